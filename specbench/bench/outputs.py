"""The output check of every timed cell: the speculative arm's tokens against the AR arm's.

Lengths are compared too. Where the arms part, the AR prefix is run through the target once more: if the logits of both
tokens are as near the best one there as rounding can tell, it is a near tie; anything else is a fault, and the cell is
invalid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specbench.bench.target import Target
from specbench.engine.request import Request
from specbench.engine.trace import Trace

NEAR_TIE = {"fp64": 1e-13, "fp32": 5e-5, "fp16": 3e-3, "bf16": 1.25e-2}
"""Largest gap of two logits that rounding in this dtype may turn around, as a share of the largest logit by size: a
few units in its last place in 16 bits; some hundred in 32 and 64, for the sums of all layers."""


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
        check.reason = check.reason or f"{where}: {len(spec)} tokens where AR has {len(ar)}"
        return
    logits = logits_after(target, (*request.prompt_ids, *ar[:at]))
    best, size = float(logits.max()), float(logits.abs().max())
    behind_ar, behind_spec = best - float(logits[ar[at]]), best - float(logits[spec[at]])
    limit = NEAR_TIE[target.decoder.dtype] * size
    text = (
        f"{where}: AR {ar[at]}, here {spec[at]}; their logits are {behind_ar:.3g} and {behind_spec:.3g} "
        f"below the best, and rounding in {target.decoder.dtype} explains {limit:.3g}"
    )
    if max(behind_ar, behind_spec) <= limit:
        check.num_near_ties += 1
        check.notes.append(f"near tie: {text}")
    else:
        check.reason = check.reason or text


def logits_after(target: Target, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits [V] after `ids`, from a fresh pass over the whole text in an empty slot."""
    kv = target.decoder.kv
    free = int(np.flatnonzero(kv.lengths == 0)[0])
    try:
        return target.decoder.prefill(ids, free)[0]
    finally:
        kv.close(free)
