"""Predict thousands of cells and tell what it took. It imports nothing but the prediction itself, so that the process's
peak is the prediction's own.

    python -m benchmarks.predicted_cells --cells 10000
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CELLS = 10_000


def scenario(cells: int) -> dict[str, Any]:
    """`cells` cells, a multiple of 100: 10 drafters and depths, 10 batch sizes, and as many contexts as it takes."""
    contexts = cells // 100
    return {
        "name": "predict-benchmark",
        "question": "How long does predicting take?",
        "target": {"shape": ["llama-3.1-8b"], "weights": "dummy", "dtype": ["bf16"], "backend": ["triton"]},
        "drafters": [
            {"kind": "eagle3", "depth": [1, 3, 5, 7]},
            {"kind": "eagle", "depth": [1, 3]},
            {"kind": "draft_model", "model": ["llama-3.2-1b"], "depth": [1, 3]},
            {"kind": "ngram", "depth": [3, 5]},
        ],
        "sweep": {
            "batch_size": [1, 2, 4, 8, 12, 16, 24, 32, 48, 64],
            "context_len": [128 + 16 * i for i in range(contexts)],
        },
    }


def measure(cells: int) -> dict[str, float]:
    """Seconds and the peak of this process; the caller has imported nothing else."""
    from specbench.predict.acceptance import read_acceptance
    from specbench.predict.cells import Predictor, device_of
    from specbench.predict.rows import contents_of, write_rows
    from specbench.roofline.hardware import hardware
    from specbench.scenario.cases import expand
    from specbench.scenario.schema import Scenario

    begin = time.perf_counter()
    cases = expand(Scenario.from_dict(scenario(cells)))
    bound = time.perf_counter()
    predictor = Predictor(device_of(hardware("h100-sxm")), read_acceptance(None))
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder), contents_of((predictor.predict(case) for case in cases), predictor.device))
        end = time.perf_counter()
    assert rows == len(cases)
    return {
        "cells": float(rows),
        "expand_s": bound - begin,
        "predict_s": end - bound,
        "peak_bytes": float(_peak_bytes()),
        "torch": float("torch" in sys.modules),
    }


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: run this benchmark on Linux")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_cells", description=__doc__)
    parser.add_argument("--cells", type=int, default=CELLS)
    print(json.dumps(measure(parser.parse_args().cells), indent=2))
