"""What a policy that chooses the depth of every step chose; formulas in `definitions.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specbench.metrics import NO_WINDOW, Metrics
from specbench.traces import BoolArray, IntArray


class DepthTrace(Protocol):
    """What is read of a trace: the depth chosen for each step, and which steps count."""

    @property
    def step_depth(self) -> IntArray: ...
    @property
    def in_window(self) -> BoolArray: ...


def depth_metrics(traces: Sequence[DepthTrace], max_depth: int, step_seconds: Sequence[float]) -> Metrics:
    """Depths of the window's steps, pooled over `traces`, and the step times (by depth) that they were chosen by.

    step_depth_mean = Σ step_depth / steps; index γ of `step_depth_share`, 0 .. max_depth, = steps of depth γ / steps.
    """
    chosen = np.concatenate([np.zeros(0, dtype=np.int64), *(trace.step_depth[trace.in_window] for trace in traces)])
    known = {"depth_step_seconds": [float(value) for value in step_seconds]}
    if not len(chosen):
        names = ("step_depth_mean", "step_depth_share")
        return {**dict.fromkeys(names), **known, "null_reasons": dict.fromkeys(names, NO_WINDOW)}
    share = np.bincount(chosen, minlength=max_depth + 1) / len(chosen)
    return {
        "step_depth_mean": float(chosen.mean()),
        "step_depth_share": [float(value) for value in share],
        **known,
        "null_reasons": {},
    }
