"""How much work a run does: the full one, whose figures count, and a quick one that only shows that all of it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.blocks import Arm, Monitor, Rounds, Tell, run_rounds
from specbench.bench.telemetry import LoadMonitor

CATEGORIES = ("coding", "maths", "translation", "writing")
"""Of the built-in prompts: one turn, 50 to 180 tokens. On CPUs without bf16 units a rival's prefill takes long."""


@dataclass(frozen=True)
class Settings:
    """Sizes of all benchmarks, the folder of a sweep's results, and who watches."""

    blocks: int = 5
    output_len: int = 64
    lookup_output_len: int = 128
    lookup_prompts: int = 3
    lookup_depth: int = 8
    lookup_ngram: int = 3
    context_len: int = 200
    row_repeats: int = 15
    verify_output_len: int = 129
    step_tokens: int = 48
    roof_budget_s: float = 1.5
    memory_runs: int = 3
    help_runs: int = 7
    growth_tokens: int = 2000
    gate_cells: int = 2000
    report_cells: int = 2000
    seed: int = 0
    results: Path | None = None
    monitor: Callable[[], Monitor] = LoadMonitor
    tell: Tell = field(default=lambda _: None)

    def rounds(self, name: str, arms: dict[str, Arm], blocks: int | None = None) -> Rounds:
        """Interleaved blocks of `arms`, told under `name`."""
        return run_rounds(
            arms,
            blocks=self.blocks if blocks is None else blocks,
            seed=self.seed,
            monitor=self.monitor(),
            tell=lambda text: self.tell(f"{name}: {text}"),
        )


QUICK = {
    "report_cells": 40,
    "blocks": 1,
    "output_len": 4,
    "lookup_output_len": 8,
    "lookup_prompts": 1,
    "context_len": 24,
    "row_repeats": 1,
    "verify_output_len": 9,
    "step_tokens": 4,
    "roof_budget_s": 0.2,
    "memory_runs": 1,
    "help_runs": 2,
    "growth_tokens": 40,
    "gate_cells": 20,
}
"""What `--quick` changes."""
