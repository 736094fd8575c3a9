"""Trace: what one block of one arm did, step by step, as arrays. Every metric is computed from it.

A *step* is one verify pass over the busy slots (in the AR arm: one decode pass). A *draft row* is one request within
one step. Prefill's own token is counted apart: it is in `RequestTrace.token_ids` but in no step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class RequestTrace:
    """One request's output. `finish_reason`: "stop" (EOS or stop string), "length", "context", "cut", "failed"."""

    request_id: str
    category: str
    prompt_len: int
    token_ids: tuple[int, ...]
    finish_reason: str
    prefill_s: float
    looping: bool = False
    logprobs: tuple[float, ...] = ()
    top2_margins: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Trace:
    """Arrays over steps (n), over draft rows (m), and the requests.

    Per step: `step_s` wall time in seconds and its parts `draft_s + verify_s + sample_s + commit_s + host_s == step_s`;
    `busy` slots; `in_window` (all B slots busy); `flops` and `bytes` of the forward passes really made (draft passes
    and the verify pass), and `draft_flops` and `draft_bytes` of the draft passes alone; `query_tokens` of the verify
    pass; `end_s` time of the commit since the block began. What the target's KV cache did: `rollback_s` seconds of
    keeping the accepted paths (a part of `commit_s`), `kv_bytes_moved` bytes of K and V copied for it,
    `kv_allocator_calls` pages taken and given back in the whole step. `step_depth`: the levels that were to be drafted,
    before any request's own room (empty in traces that do not tell).
    Per draft row: `row_step` and `row_request` (indices into steps and `requests`), `num_proposed` (before tokens were
    discarded unverified), `num_draft` l (nodes verified), `draft_depth` (deepest level of them; l for a chain),
    `num_accepted` a (the path that stands, a chain's leading run), `num_committed` c (after stops), `context_len`
    (tokens in the KV cache before the step).
    """

    batch_size: int
    step_s: FloatArray
    draft_s: FloatArray
    verify_s: FloatArray
    sample_s: FloatArray
    commit_s: FloatArray
    host_s: FloatArray
    end_s: FloatArray
    busy: IntArray
    in_window: BoolArray
    flops: FloatArray
    bytes: FloatArray
    draft_flops: FloatArray
    draft_bytes: FloatArray
    query_tokens: IntArray
    row_step: IntArray
    row_request: IntArray
    num_proposed: IntArray
    num_draft: IntArray
    draft_depth: IntArray
    num_accepted: IntArray
    num_committed: IntArray
    context_len: IntArray
    rollback_s: FloatArray
    kv_bytes_moved: IntArray
    kv_allocator_calls: IntArray
    requests: tuple[RequestTrace, ...] = field(default=())
    step_depth: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def check(self) -> None:
        """Assert the identities that hold on every trace; a failure is a bug of the engine."""
        parts = self.draft_s + self.verify_s + self.sample_s + self.commit_s + self.host_s
        assert np.allclose(parts, self.step_s, rtol=1e-6, atol=1e-7), "step parts do not sum to the step"
        assert np.all(self.rollback_s <= self.commit_s + 1e-7), "rollback is a part of the commit"
        assert np.all(self.draft_flops <= self.flops), "drafting does more than the whole step"
        assert np.all(self.draft_bytes <= self.bytes), "drafting moves more than the whole step"
        assert np.all(self.num_accepted >= 0)
        assert np.all(self.num_accepted <= self.draft_depth)
        assert np.all(self.draft_depth <= self.num_draft)
        assert np.all(self.num_draft <= self.num_proposed)
        assert np.all(self.num_committed <= self.num_accepted + 1), "more committed than accepted + 1"
        assert np.all(self.num_committed >= 1), "a step committed nothing"
        committed = np.bincount(self.row_request, self.num_committed, len(self.requests)).astype(np.int64)
        for index, request in enumerate(self.requests):
            assert len(request.token_ids) == committed[index] + 1 or request.error, "emitted is not prefill + committed"
