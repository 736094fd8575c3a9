"""Predicting thousands of cells: seconds and memory, from bound cases to rows on disk, in a process without torch.

    python -m benchmarks --only predict

The sweep is Llama-3.1-8B on an H100 over batch, context, depth and drafter (`predicted_cells.py`). The expansion of the
scenario, which any sweep pays, is told apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.blocks import Arm, Sample
from benchmarks.figures import Figure, Report, at_most
from benchmarks.predicted_cells import CELLS
from benchmarks.settings import Settings
from specbench.errors import InvalidEnvironmentError

ROOT = Path(__file__).resolve().parent.parent
QUICK_CELLS = 200
SECONDS_TARGET = 5.0
MEMORY_TARGET_BYTES = 300e6


def _once(cells: int, _: int) -> Sample:
    command = [sys.executable, "-m", "benchmarks.predicted_cells", "--cells", str(cells)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidEnvironmentError(f"predicting ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    if found["torch"]:
        raise InvalidEnvironmentError("predicting imported torch", remedy="this is a fault of the program")
    return Sample({name: found[name] for name in ("expand_s", "predict_s", "peak_bytes")})


def predict(settings: Settings) -> Report:
    """Seconds and peak memory of predicting 10,000 cells and writing their rows."""
    cells = QUICK_CELLS if settings.blocks == 1 else CELLS
    arms: dict[str, Arm] = {"predict": partial(_once, cells)}
    rounds = settings.rounds("predict", arms, min(3, settings.blocks))
    seconds, peak, expand = (rounds.values("predict", name) for name in ("predict_s", "peak_bytes", "expand_s"))
    busy = rounds.disturbed
    figures = (
        Figure("predict", f"predicting {cells} cells, rows on disk", "s", seconds, at_most(SECONDS_TARGET), None, busy),
        Figure("predict.memory", "peak memory of that process", "MB", peak, at_most(MEMORY_TARGET_BYTES), None, busy),
        Figure("predict.expand", f"expanding a scenario to {cells} cases", "s", expand, None, None, busy),
    )
    notes = ("a process without torch; plots and the page are not in it",)
    return Report("predict", figures, {"predict": rounds.to_list()}, notes)
