"""`depth: auto` in a case: step times by depth measured in warm-up, and the throttle that chooses by them.

The times are of this case's own steps (drafter, batch, prompts, backend), drafting and host included: nothing is taken
from a datasheet. They are fixed before the first timed block, and the throttle begins with no evidence, so what a case
does depends on no case before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specbench.engine.decode import Engine
from specbench.engine.request import Request
from specbench.errors import InputError
from specbench.roofline.throttle import FixedDepth, MeasuredSteps, Throttle

STEPS = 3
"""Steps of full depth that a warm-up request has room for, at least."""


def measure_steps(engine: Engine, requests: Sequence[Request]) -> MeasuredSteps:
    """Median seconds of a step for each depth 0 .. engine.depth, over two short blocks of `requests` a depth: depths
    ascending, then descending, so that a drift of the machine weighs on all alike. The engine's policy is set and taken
    away again. `requests` know their references as far as they run."""
    seconds: list[list[float]] = [[] for _ in range(engine.depth + 1)]
    policy = engine.policy
    try:
        engine.policy = FixedDepth(0)
        engine.run(requests)
        for depth in (*range(engine.depth + 1), *range(engine.depth, -1, -1)):
            engine.policy = FixedDepth(depth)
            trace = engine.run(requests)
            steps = trace.step_s[trace.in_window]
            seconds[depth] += (steps if len(steps) else trace.step_s).tolist()
    finally:
        engine.policy = policy
    if not all(seconds):
        message = "outputs end with their first token: no step is left to choose a depth for"
        raise InputError(message, key="workload.output_len", remedy="give longer outputs, or a fixed depth")
    return MeasuredSteps(tuple(float(np.median(each)) for each in seconds), engine.batch_size)


def shortened(requests: Sequence[Request], num_tokens: int) -> list[Request]:
    """The same requests, ending after `num_tokens` tokens at the latest."""
    return [
        replace(one, stops=replace(one.stops, max_tokens=min(num_tokens, one.stops.max_tokens))) for one in requests
    ]


def throttle_for(engine: Engine, ar: Engine, requests: Sequence[Request]) -> tuple[Throttle, MeasuredSteps]:
    """A throttle for `engine`, from step times measured on short runs of `requests`; `ar` writes what
    drafters that replay need to know."""
    short = shortened(requests, STEPS * (engine.depth + 1) + 1)
    known = {one.request_id: one.token_ids for one in ar.run(short).requests}
    steps = measure_steps(engine, [replace(one, reference=known[one.request_id]) for one in short])
    return Throttle(steps, engine.depth), steps


def described(steps: MeasuredSteps) -> str:
    """Where the step times come from, for the row."""
    return f"step times measured in warm-up at batch {steps.batch_size}"
