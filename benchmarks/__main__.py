"""Speed and memory against their targets, beside transformers' `generate` where a rival is named.

    python -m benchmarks                               # everything, about twenty minutes on two quiet cores
    python -m benchmarks --only ar --only rows         # some of it
    python -m benchmarks --out FILE --markdown         # JSON into FILE, the tables of benchmarks/README.md filled in

Progress and a table go to stderr, JSON to stdout (or FILE). A figure that misses its target is told as missed; the
exit code is 0 whenever everything was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Report, fill_readme, text_table
from benchmarks.settings import QUICK, Settings
from specbench.errors import InputError, SpecbenchError

README = Path(__file__).resolve().parent / "README.md"


def _benchmarks() -> dict[str, Callable[[Settings], Report]]:
    from benchmarks import drafting, gate, generation, memory, predicting, program, reporting, rows, steps

    return {
        "ar": generation.ar,
        "prompt_lookup": generation.prompt_lookup,
        "rows": rows.rows,
        "linear_bandwidth": steps.linear_bandwidth,
        "host": steps.host,
        "memory": memory.memory,
        "drafting": drafting.drafting,
        "predict": predicting.predict,
        "gate": gate.gate,
        "report": reporting.report,
        "help": program.help_time,
        "harness": program.harness,
        "sweep": program.sweep,
    }


NAMES = (
    *("ar", "prompt_lookup", "rows", "linear_bandwidth", "host", "memory", "drafting"),
    *("predict", "gate", "report", "help", "harness", "sweep"),
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure specbench against its targets.")
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that all runs; its figures mean nothing"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here, after each benchmark")
    parser.add_argument("--markdown", action="store_true", help="fill the figures into benchmarks/README.md")
    parser.add_argument("--results", type=Path, metavar="DIR", help="a sweep's folder, for harness and sweep")
    parser.add_argument("--blocks", type=int, help=f"clean blocks of each comparison (default {Settings.blocks})")
    parser.add_argument("--seed", type=int, default=0, help="order of blocks and choice of prompts")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """Raises InputError for options that do not go together."""
    if options.quick and options.markdown:
        raise InputError("the figures of --quick mean nothing", key="--markdown", remedy="leave --quick out")
    if options.blocks is not None and options.blocks < 1:
        raise InputError(f"{options.blocks} blocks", key="--blocks", remedy="give 5 or more; 1 is the least")
    chosen: dict[str, Any] = dict(QUICK) if options.quick else {}
    if options.blocks is not None:
        chosen["blocks"] = options.blocks
    return Settings(**chosen, seed=options.seed, results=options.results, tell=_tell)


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    from specbench.bench.environment import environment, fingerprint
    from specbench.bench.telemetry import foreign_load

    machine = environment()
    return {
        **machine,
        "fingerprint": fingerprint(machine),
        "transformers": version("transformers"),
        "foreign_load_at_start": foreign_load(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "seed": options.seed,
    }


def _run_name(conditions: dict[str, Any]) -> str:
    """Day, code and machine: a row of README.md names the run that measured it."""
    return f"{conditions['started_at'][:10]} {conditions['code_revision'][:12]} {conditions['fingerprint'][:6]}"


def _in_words(conditions: dict[str, Any]) -> str:
    names = ("python", "torch", "transformers", "numba", "numpy")
    versions = ", ".join(f"{name} {conditions[name]}" for name in names)
    machine = f"{conditions['cpu_model']}, {conditions['cpu_isa']}, {conditions['memory_gib']} GiB"
    code = f"code {conditions['code_revision']}, seed {conditions['seed']}"
    return f"{machine}; {conditions['torch_threads']} threads; {versions}; {code}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for; returns the JSON document, which is on disk after each benchmark."""
    settings = settings_of(options)
    conditions = _conditions(options)
    document: dict[str, Any] = {"conditions": conditions, "ratios": {}, "benchmarks": {}}
    figures: list[Figure] = []
    table = _benchmarks()
    for name in [name for name in NAMES if not options.only or name in options.only]:
        begin = time.perf_counter()
        report = table[name](settings)
        seconds = round(time.perf_counter() - begin, 1)
        document["benchmarks"][name] = {**report.to_dict(), "seconds": seconds}
        figures += report.figures
        document["ratios"] |= {figure.key: figure.to_dict() for figure in report.figures if figure.bound is not None}
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        _tell(f"{name}: done in {seconds} s")
    print(text_table(figures), file=sys.stderr)
    if options.markdown:
        README.write_text(fill_readme(README.read_text(), figures, _run_name(conditions), _in_words(conditions)))
    return document


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        document = run(options)
    except SpecbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    if options.out is None:
        print(json.dumps(document, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
