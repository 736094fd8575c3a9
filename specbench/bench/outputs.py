"""The output check of every timed cell: the speculative arm's tokens against the AR arm's.

Lengths are compared too. Where the arms part, the AR prefix is run through the target once more: if the two best
logits are closer there than rounding can tell, and the other arm took the second best, it is a near tie; anything else
is a fault, and the cell is invalid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specbench.bench.target import Target
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import Request
from specbench.engine.trace import Trace

NEAR_TIE = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.06, "bf16": 0.25}
"""Largest gap of the two best logits that rounding in this dtype may turn around: some units in the last place of a
logit near 20."""


@dataclass
class OutputCheck:
    """What the comparisons of a case found so far."""

    num_compared: int = 0
    num_near_ties: int = 0
    reason: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str | None:
        """ "identical", "near_tie", "diverged", or None before anything was compared."""
        if self.reason is not None:
            return "diverged"
        if self.num_near_ties:
            return "near_tie"
        return "identical" if self.num_compared else None


def first_difference(ar: Sequence[int], spec: Sequence[int], *, spec_cut: bool) -> int | None:
    """Index of the first difference, or None. A cut output need only be a beginning; else lengths count as well."""
    for index, (a, b) in enumerate(zip(ar, spec, strict=False)):
        if a != b:
            return index
    if len(spec) > len(ar) or (len(spec) < len(ar) and not spec_cut):
        return min(len(ar), len(spec))
    return None


def compare_outputs(check: OutputCheck, target: Target, requests: Sequence[Request], ar: Trace, spec: Trace) -> None:
    """Compare each speculative output with the AR output of the same request and add the findings to `check`."""
    asked = {one.request_id: one for one in requests}
    expected = {r.request_id: r for r in ar.requests if r.finish_reason != "cut" and r.error is None}
    for done in spec.requests:
        reference = expected.get(done.request_id)
        if reference is None or done.error is not None:
            continue
        check.num_compared += 1
        at = first_difference(reference.token_ids, done.token_ids, spec_cut=done.finish_reason == "cut")
        if at is None:
            continue
        _judge(check, target, asked[done.request_id], reference.token_ids, done.token_ids, at)
    if not any(done.request_id in expected and done.finish_reason != "cut" for done in spec.requests):
        check.reason = check.reason or "no request ended in both arms, so outputs could not be compared"


def _judge(
    check: OutputCheck, target: Target, request: Request, ar: Sequence[int], spec: Sequence[int], at: int
) -> None:
    where = f"request {request.request_id} parts from AR at token {at}"
    if at >= len(ar) or at >= len(spec):
        check.reason = f"{where}: {len(spec)} tokens where AR has {len(ar)}"
        return
    margin, second = top_two(target, (*request.prompt_ids, *ar[:at]))
    limit = NEAR_TIE[target.decoder.dtype]
    text = f"{where}: AR {ar[at]}, here {spec[at]}; the two best logits are {margin:.3g} apart"
    if margin <= limit and spec[at] in second:
        check.num_near_ties += 1
        check.notes.append(f"near tie: {text}, within {limit:g} of rounding in {target.decoder.dtype}")
    else:
        check.reason = text


def top_two(target: Target, ids: tuple[int, ...]) -> tuple[float, tuple[int, int]]:
    """Gap of the two best logits after `ids`, and both tokens, from a fresh pass over the whole text."""
    kv, rows = target.decoder.kv, target.decoder.limits.max_rows
    free = int(np.flatnonzero(kv.lengths == 0)[0])
    logits = None
    for first in range(0, len(ids), rows):
        chunk = np.array(ids[first : first + rows], dtype=np.int64)
        kv.reserve(free, len(chunk))
        logits = target.decoder.forward(ForwardBatch.of([chunk], [free], [first], last_only=True))
        kv.commit(free, len(chunk))
    kv.close(free)
    assert logits is not None
    best = logits[0].topk(2)
    return float(best.values[0] - best.values[1]), (int(best.indices[0]), int(best.indices[1]))
