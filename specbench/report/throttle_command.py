"""`specbench throttle RUN --engine vllm|sglang`: the best depth by batch size of a run, as that engine reads it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from specbench.errors import ExitCode, InputError
from specbench.report.tables_throttle import as_json, chosen_schedule, schedule_notes
from specbench.roofline.depth_export import ENGINES, export, start_depth
from specbench.store import latest_rows

USES = {
    "vllm": "merge it into the object of --speculative-config, beside method and model",
    "sglang": "give the file to --speculative-adaptive-config, with --speculative-adaptive --speculative-eagle-topk 1"
    " --speculative-num-steps {steps} (a version that knows batch-size keys)",
}


def throttle(directory: Path, engine: str, drafter: str | None, out: Path | None) -> ExitCode:
    """Print or write the table; notes go to stderr, so that stdout is JSON alone."""
    if engine not in ENGINES:
        raise InputError(f"{engine!r} is not known", key="--engine", remedy=f"choose from: {', '.join(ENGINES)}")
    schedule = chosen_schedule([row.model_dump() for row in latest_rows(directory)], drafter)
    text = as_json(export(engine, schedule.table))
    notes = Console(stderr=True, highlight=False)
    for note in (*schedule_notes(schedule), USES[engine].format(steps=start_depth(schedule.table))):
        notes.print(f"- {note}", markup=False, soft_wrap=True)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
        notes.print(f"wrote {out}", markup=False, soft_wrap=True)
    return ExitCode.DONE
