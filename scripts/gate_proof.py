"""The gate on this CPU, for real: it passes a run against itself repeated five times, and fails a run whose verify step
is 15 % slower.

    python scripts/gate_proof.py --out runs/gate-proof                # all, about five minutes on two quiet cores
    python scripts/gate_proof.py --out runs/gate-proof --stage 3      # one: 0 the baseline, 1 to 5 repeats, 6 slowed
    python scripts/gate_proof.py --out runs/gate-proof --judge        # only the verdicts of what is there

The engine is not touched: the slow verify step is made here, by waiting 15 % of the time of each of the target's passes
over drafted tokens. Stages that are done are kept, so the script can be cut and resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "kernels")]

from specbench.gate.gate import run_gate  # noqa: E402
from specbench.gate.policy import Policy, parse_policy  # noqa: E402
from specbench.gate.selftest import self_test  # noqa: E402
from specbench.store import MANIFEST_FILE  # noqa: E402

REPEATS = 5
SLOWED = REPEATS + 1
SLOWDOWN = 0.15
POLICY = """
name: gate-proof
# A machine shared with others: a case may differ by about 1 % from run to run; changes count from 10 % on.
metrics:
  speedup: {min_effect: 0.10, run_sd: 0.008}
  output_tokens_per_s: off
  ar_output_tokens_per_s: off
"""
SCENARIO: dict[str, Any] = {
    "name": "gate-proof",
    "question": "Does the gate pass the same code and fail a slower verify step?",
    "target": {"model": "smollm2-135m-instruct", "dtype": "bf16", "backend": "cpu"},
    "drafters": [{"kind": "oracle"}],
    "sweep": {"batch_size": [1], "depth": [1]},
    "workload": {"prompts": "builtin", "categories": ["qa", "coding"], "num_prompts": 8, "output_len": 32},
    "measure": {
        "blocks": {"min": 32, "max": 32},
        "warmup": {"min": 1, "max": 3},
        "target_interval": 1e-9,
        "canary": "off",
    },
}


def stage_folder(out: Path, stage: int) -> Path:
    name = "baseline" if stage == 0 else f"repeat-{stage}" if stage <= REPEATS else "slowed"
    return out / name


def measure(out: Path, stage: int) -> None:
    """One stage: the same two arms on the same prompts, in a process whose verify step may be slowed."""
    from specbench.bench.sweep import run_sweep
    from specbench.scenario.cases import expand
    from specbench.scenario.schema import Scenario

    scenario = Scenario.from_dict(SCENARIO)
    place = stage_folder(out, stage)
    place.mkdir(parents=True, exist_ok=True)
    first = stage_folder(out, 0) / MANIFEST_FILE
    if stage and first.is_file() and not (place / MANIFEST_FILE).exists():
        (place / MANIFEST_FILE).write_text(first.read_text(encoding="utf-8"), encoding="utf-8")  # its roofs
    undo = slow_verify(SLOWDOWN) if stage == SLOWED else None
    try:
        result = run_sweep(scenario, expand(scenario), place)
    finally:
        if undo is not None:
            undo()
    for row in result.rows:
        print(f"{place.name}: {row.case_name}: {row.status}, speedup {(row.metrics or {}).get('speedup')}", flush=True)


def slow_verify(share: float) -> Callable[[], None]:
    """Make each of the target's passes inside a speculative step last `share` longer; returns what undoes it."""
    from specbench.engine.decode import Engine
    from specbench.engine.models.decoder import Decoder

    step, forward = Engine._step, Decoder.forward
    verifying = [False]

    def slow_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = forward(self, *args, **kwargs)
        end = time.perf_counter()
        while verifying[0] and time.perf_counter() - end < share * (end - begin):
            pass
        return out

    def marked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        verifying[0] = self.drafter is not None
        try:
            return step(self, *args, **kwargs)
        finally:
            verifying[0] = False

    Engine._step, Decoder.forward = marked_step, slow_forward  # type: ignore[method-assign]

    def undo() -> None:
        Engine._step, Decoder.forward = step, forward  # type: ignore[method-assign]

    return undo


def judge(out: Path, policy: Policy) -> int:
    """Exit code 0 if every repeat passed and the slowed run failed."""
    baseline = stage_folder(out, 0)
    tested = self_test(baseline, policy)
    print(f"self-test: {tested.reasons[0]}")
    wrong = 0
    told = []
    for stage in range(1, SLOWED + 1):
        folder = stage_folder(out, stage)
        if not (folder / "rows.jsonl").is_file():
            print(f"{folder.name}: not measured yet")
            wrong += 1
            continue
        result = run_gate(folder, baseline, policy, armed=tested.armed)
        expected = 1 if stage == SLOWED else 0
        wrong += int(result.exit_code) != expected
        print(f"{folder.name}: exit code {int(result.exit_code)}, expected {expected}: {result.reasons[0]}")
        for one in result.verdicts:
            print(f"  {one.verdict:12} {one.metric}: {one.reason}")
        speed = next((one for one in result.verdicts if one.metric == "speedup"), None)
        told.append(
            {
                "run": folder.name,
                "exit_code": int(result.exit_code),
                "ratio": speed.ratio if speed else None,
                "low": speed.low if speed else None,
                "high": speed.high if speed else None,
                "verdict": speed.verdict if speed else None,
            }
        )
    (out / "proof.json").write_text(
        json.dumps({"policy": policy.to_dict(), "runs": told}, indent=1) + "\n", encoding="utf-8"
    )
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The gate on this CPU, for real.")
    parser.add_argument("--out", type=Path, default=Path("runs/gate-proof"))
    parser.add_argument("--stage", type=int, choices=range(SLOWED + 1), action="append", help="only these stages")
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    if not options.judge:
        for stage in options.stage or range(SLOWED + 1):
            measure(options.out, stage)
    if options.stage and not options.judge:
        return 0
    return judge(options.out, parse_policy(POLICY, file="gate_proof policy"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
