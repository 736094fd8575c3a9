"""The step: propose -> verify -> commit, over a steady batch; and the AR arm, which has neither drafter nor verifier.

A block keeps all slots busy: a finished request is replaced at once, from the block's own queue and then from fillers,
until the block's last request ends. Prefills happen between steps, outside every timed span: each prompt is prefilled
once, and later starts copy its K and V.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from specbench.engine.drafters.base import EMPTY, AnyPass, Drafter
from specbench.engine.kv_cache import KVSnapshot
from specbench.engine.marks import HostMarks, Marks, Now
from specbench.engine.models.decoder import Capture, Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.graphs import Graphs
from specbench.engine.request import ActiveRequest, Request
from specbench.engine.sampling import RequestGenerator
from specbench.engine.stops import StopState
from specbench.engine.trace import RequestTrace, Trace
from specbench.engine.verify import Method, Proposal, Verification, sample_next, verify
from specbench.errors import CapacityError, InputError
from specbench.metrics import is_looping
from specbench.roofline.cost import ZERO, Cost, forward_cost
from specbench.roofline.throttle import DepthPolicy

MARKS = 9
"""Marks of a step: its begin, reserved, drafted, batched, verified, judged, appended, rolled back, its end."""


@dataclass(frozen=True)
class Prefilled:
    """A prompt's K and V, the logits [1, V] after it, and the seconds its prefill took."""

    kv: KVSnapshot
    logits: torch.Tensor
    prefill_s: float
    states: torch.Tensor | None = None


class PrefillStore:
    """Each prompt's prefill, done once per target."""

    def __init__(self, decoder: Decoder, now: Now = time.perf_counter) -> None:
        self._decoder, self._now = decoder, now
        self._done: dict[tuple[int, ...], tuple[Capture, Prefilled]] = {}

    @property
    def bytes(self) -> int:
        found = (prefilled for _, prefilled in self._done.values())
        return sum(p.kv.k.nbytes + p.kv.v.nbytes + p.logits.nbytes for p in found)

    def get(self, prompt: tuple[int, ...], slot: int, capture: Capture = ()) -> Prefilled:
        """The prefill of `prompt`, run in the empty `slot` if it is new; the slot is left empty.

        With `capture` its states are kept beside it; those of another capture are replaced.
        """
        known = self._done.get(prompt)
        if known is None or (capture and known[0] != capture):
            if not prompt:
                raise InputError("a request needs a prompt of one token or more", key="prompts")
            begin = self._now()
            try:
                states = None
                if capture:
                    logits, states = self._decoder.prefill_states(prompt, slot, capture)
                else:
                    logits = self._decoder.prefill(prompt, slot)
                elapsed = self._now() - begin
                kept = Prefilled(self._decoder.kv.snapshot(slot), logits.clone(), elapsed, states)
                self._done[prompt] = (capture, kept)
            finally:
                self._decoder.kv.close(slot)
        return self._done[prompt][1]


@dataclass
class _Step:
    """What is kept of one step until the trace is built. `marks`: MARKS of them; `captured` says that graphs were."""

    marks: tuple[Any, ...]
    bytes_moved: int
    allocator_calls: int
    busy: int
    captured: bool
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    passes: Sequence[AnyPass]
    depth: int
    rows: list[tuple[int, int, int, int, int, int, int]]


class Engine:
    """Decodes blocks of requests on one target with one drafter, or with none (`drafter=None`: the AR arm).

    `depth` levels are drafted a step at most, fewer where the request's length or context leaves no room, and where
    `policy` says so: it is asked before each step, knowing the steps before alone. Accepted
    paths are kept by the rollback policy of the target's KV cache; `method` is the rule for sampled requests.
    `token_bytes` is needed for stop strings only. `check` asserts the KV cache's integrity after every step. Times are
    `marks`, by default readings of `now`; a step that captured graphs is left out of the window.
    """

    def __init__(
        self,
        target: Decoder,
        store: PrefillStore,
        drafter: Drafter | None,
        *,
        batch_size: int,
        depth: int,
        token_bytes: Callable[[int], bytes] | None = None,
        now: Now = time.perf_counter,
        check: bool = False,
        want_logprobs: bool = False,
        method: Method = "sequential",
        marks: Marks | None = None,
        policy: DepthPolicy | None = None,
    ) -> None:
        self.target, self.store, self.drafter = target, store, drafter
        self.batch_size, self.depth, self.policy = batch_size, depth, policy
        self._token_bytes, self._check, self._logprobs = token_bytes, check, want_logprobs
        self._marks: Marks = marks or HostMarks(now)
        self._method: Method = method
        self._slots: list[ActiveRequest | None] = [None] * batch_size
        self._finished: dict[int, RequestTrace] = {}
        self._index: dict[int, int] = {}
        self._drafting: set[int] = set()
        self._capture: Capture = drafter.capture if drafter is not None else ()

    def run(self, requests: Sequence[Request], fillers: Iterator[Request] | None = None) -> Trace:
        """Decode all of `requests` to their ends; `fillers` keep the batch full meanwhile and are cut at the end."""
        try:
            return self._run(requests, fillers)
        finally:
            # Only an error leaves slots in use: the next run must find none of them.
            for one in [one for one in self._slots if one is not None]:
                self._release(one)
            if self.drafter is not None:
                self.drafter.take_passes()

    def _run(self, requests: Sequence[Request], fillers: Iterator[Request] | None) -> Trace:
        queue = deque(requests)
        own, self._finished = len(requests), {}
        steps: list[_Step] = []
        started = 0
        begin = self._marks.mark()
        while True:
            for slot in range(self.batch_size):
                while self._slots[slot] is None:
                    request = queue.popleft() if queue else (next(fillers, None) if fillers and own else None)
                    if request is None:
                        break
                    if not self._start(request, slot, started) and started < len(requests):
                        own -= 1
                    started += 1
            active = [one for one in self._slots if one is not None]
            if own == 0 or not active:
                break
            steps.append(self._step(active, len(steps)))
            for one in active:
                if one.finish_reason is not None:
                    if self._index[one.slot] < len(requests):
                        own -= 1
                    self._retire(one)
        for one in [one for one in self._slots if one is not None]:
            one.finish_reason = "cut"
            self._retire(one)
        return self._trace(begin, steps, started)

    def _start(self, request: Request, slot: int, index: int) -> bool:
        """Put `request` into `slot`; False if it ended with its first token."""
        prefilled = self.store.get(request.prompt_ids, slot, self._capture)
        active = ActiveRequest(
            request=request,
            slot=slot,
            generator=RequestGenerator(request.params.seed, request.request_id),
            stop_state=StopState(request.stops, prompt_len=len(request.prompt_ids), token_bytes=self._token_bytes),
            prefill_s=prefilled.prefill_s,
        )
        self._slots[slot] = active
        self._index[slot] = index
        kv, prompt_len = self.target.kv, len(request.prompt_ids)
        kv.open(slot, min(kv.max_context, prompt_len + request.stops.max_tokens + self._num_nodes(self.depth)))
        kv.restore(slot, prefilled.kv)
        first = sample_next(prefilled.logits, [request.params], [active.generator], want_logprobs=self._logprobs)[0]
        if first.error is not None:
            active.finish_reason, active.error = "failed", str(first.error)
        else:
            self._append(active, first)
        if active.finish_reason is not None:
            self._retire(active)
            return False
        if self.drafter is not None:
            self._drafting.add(slot)
            active.states = prefilled.states
            self.drafter.start(active)
        return True

    def _append(self, active: ActiveRequest, verdict: Verification) -> int:
        """Add a verdict's tokens up to the first stop; returns how many were kept."""
        kept, reason = active.stop_state.push(verdict.tokens)
        active.tokens += verdict.tokens[:kept]
        active.logprobs += verdict.logprobs[:kept]
        active.finish_reason = reason
        return kept

    def _release(self, active: ActiveRequest) -> None:
        """Empty the request's slot, the drafter's too."""
        self._slots[active.slot] = None
        self.target.kv.close(active.slot)
        if self.drafter is not None and active.slot in self._drafting:
            self._drafting.discard(active.slot)
            self.drafter.finish(active)

    def _retire(self, active: ActiveRequest) -> None:
        self._release(active)
        self._finished[self._index[active.slot]] = RequestTrace(
            request_id=active.request.request_id,
            category=active.request.category,
            prompt_len=len(active.request.prompt_ids),
            token_ids=tuple(active.tokens),
            finish_reason=active.finish_reason or "cut",
            prefill_s=active.prefill_s,
            looping=is_looping(active.tokens),
            logprobs=tuple(active.logprobs),
            error=active.error,
        )

    def _num_nodes(self, depth: int) -> int:
        """Most nodes that a draft of `depth` levels has."""
        return self.drafter.num_nodes(depth) if self.drafter is not None and depth > 0 else 0

    def _room(self, active: ActiveRequest, depth: int) -> int:
        """Levels that can still be committed (the target's own token takes the last place) and whose nodes the cache
        has room for."""
        context = self.target.kv.max_context - active.num_cached - 1
        levels = max(0, min(depth, active.stop_state.remaining - 1, context))
        while levels and self._num_nodes(levels) > context:
            levels -= 1
        return levels

    def _next_depth(self, active: list[ActiveRequest]) -> int:
        if self.policy is None:
            return self.depth
        return min(self.depth, self.policy.depth(len(active), sum(one.num_cached for one in active) // len(active)))

    def _step(self, active: list[ActiveRequest], number: int) -> _Step:
        kv, mark = self.target.kv, self._marks.mark
        allocated, moved, captured = kv.allocator_calls, kv.bytes_moved, Graphs.captured_in_all
        begin = mark()
        depth = self._next_depth(active)
        rooms = [self._room(one, depth) for one in active]
        nodes = [self._num_nodes(room) for room in rooms]
        for one, count in zip(active, nodes, strict=True):
            kv.reserve(one.slot, 1 + count)
        proposals: list[Proposal] = [EMPTY] * len(active)
        reserved = mark()
        if self.drafter is not None:
            proposals = self.drafter.propose(active, rooms)
        drafted = mark()
        trees = [proposal.tree for proposal in proposals]
        assert all(len(tree) <= count for tree, count in zip(trees, nodes, strict=True)), "more drafted than reserved"
        contexts = [one.num_cached for one in active]
        inputs = [
            np.concatenate([np.array([one.pending], dtype=np.int64), tree.tokens])
            for one, tree in zip(active, trees, strict=True)
        ]
        batch = ForwardBatch.of(inputs, [one.slot for one in active], contexts, trees=trees)
        batched = mark()
        logits = self.target.forward(batch, capture=self._capture) if self._capture else self.target.forward(batch)
        verified = mark()
        verdicts = self._judge(active, proposals, logits, number)
        judged = mark()
        kept: list[tuple[ActiveRequest, Verification, int]] = []
        rows = []
        for one, room, tree, verdict, context in zip(active, rooms, trees, verdicts, contexts, strict=True):
            if verdict.error is not None:
                one.finish_reason, one.error = "failed", str(verdict.error)
                continue
            count = self._append(one, verdict)
            if self.policy is not None:
                self.policy.observe(tree.depth, verdict.accepted, room)
            kept.append((one, verdict, count))
            rows.append((self._index[one.slot], len(tree), len(tree), tree.depth, verdict.accepted, count, context))
        appended = mark()
        # The pending token and the accepted drafts before a stop; the last token kept is pending again.
        paths = [(0, *(node + 1 for node in verdict.path))[:count] for _, verdict, count in kept]
        kv.commit_paths([one.slot for one, _, _ in kept], paths)
        rolled_back = mark()
        if self.drafter is not None:
            length = {one.slot: len(tree) for one, tree in zip(active, trees, strict=True)}
            first = dict(zip((one.slot for one in active), batch.query_start.tolist(), strict=False))
            for (one, verdict, count), kept_nodes in zip(kept, paths, strict=True):
                path = verdict.path[:count]
                if self._capture:
                    one.states = self.target.states[[first[one.slot] + node for node in kept_nodes]]
                self.drafter.commit(one, length[one.slot], len(path), path)
        end = mark()
        if self._check:
            for one in active:
                if one.error is not None:
                    kv.truncate(one.slot, int(kv.lengths[one.slot]))
                else:
                    assert kv.lengths[one.slot] == one.num_cached, f"slot {one.slot}: cache and output differ in length"
            kv.check_integrity()
        return _Step(
            marks=(begin, reserved, drafted, batched, verified, judged, appended, rolled_back, end),
            bytes_moved=kv.bytes_moved - moved,
            allocator_calls=kv.allocator_calls - allocated,
            busy=len(active),
            captured=Graphs.captured_in_all > captured,
            query_lens=tuple(int(n) for n in batch.query_lens),
            context_lens=tuple(contexts),
            passes=self.drafter.take_passes() if self.drafter is not None else [],
            depth=depth,
            rows=rows,
        )

    def _judge(
        self, active: list[ActiveRequest], proposals: list[Proposal], logits: torch.Tensor, number: int
    ) -> list[Verification]:
        params = [one.request.params for one in active]
        coins = [one.generator for one in active]
        options: dict[str, Any] = {"backend": self.target.verifier, "step": number, "want_logprobs": self._logprobs}
        if self.drafter is None:
            return sample_next(logits, params, coins, **options)
        return verify(proposals, logits, params, coins, method=self._method, **options)

    def _costs(self, step: _Step) -> tuple[Cost, Cost]:
        """FLOPs and bytes of the passes the step really made: the drafter's, and those and the verify pass."""
        spec, dtype = self.target.spec, self.target.dtype
        verifying = forward_cost(spec, step.query_lens, step.context_lens, weight_dtype=dtype).total
        drafting = sum((one.cost() for one in step.passes), ZERO)
        return drafting, drafting + verifying

    def _trace(self, begin: Any, steps: list[_Step], started: int) -> Trace:
        seconds = self._marks.seconds([begin, *(mark for s in steps for mark in s.marks)])
        at = seconds[1:].reshape(-1, MARKS)
        spans = np.diff(at, axis=1)
        reserving, drafting, batching, verifying, judging = (spans[:, part] for part in range(5))
        commit_s, host_s = at[:, 8] - at[:, 5], reserving + batching
        drafts, costs = zip(*map(self._costs, steps), strict=True) if steps else ((), ())
        rows = np.array([(i, *row) for i, s in enumerate(steps) for row in s.rows], dtype=np.int64).reshape(-1, 8)
        trace = Trace(
            batch_size=self.batch_size,
            step_s=drafting + verifying + judging + commit_s + host_s,
            draft_s=drafting,
            verify_s=verifying,
            sample_s=judging,
            commit_s=commit_s,
            host_s=host_s,
            end_s=at[:, 8] - seconds[0],
            busy=np.array([s.busy for s in steps], dtype=np.int64),
            in_window=np.array([s.busy == self.batch_size and not s.captured for s in steps], dtype=bool),
            flops=np.array([c.flops for c in costs], dtype=np.float64),
            bytes=np.array([c.bytes for c in costs], dtype=np.float64),
            draft_flops=np.array([c.flops for c in drafts], dtype=np.float64),
            draft_bytes=np.array([c.bytes for c in drafts], dtype=np.float64),
            query_tokens=np.array([sum(s.query_lens) for s in steps], dtype=np.int64),
            row_step=rows[:, 0],
            row_request=rows[:, 1],
            num_proposed=rows[:, 2],
            num_draft=rows[:, 3],
            draft_depth=rows[:, 4],
            num_accepted=rows[:, 5],
            num_committed=rows[:, 6],
            context_len=rows[:, 7],
            rollback_s=at[:, 7] - at[:, 6],
            kv_bytes_moved=np.array([s.bytes_moved for s in steps], dtype=np.int64),
            kv_allocator_calls=np.array([s.allocator_calls for s in steps], dtype=np.int64),
            step_depth=np.array([s.depth for s in steps], dtype=np.int64),
            requests=tuple(self._finished[i] for i in range(started)),
        )
        trace.check()
        return trace


def with_reference(request: Request, reference: tuple[int, ...]) -> Request:
    """The same request, knowing its AR output."""
    return replace(request, reference=reference)


__all__ = ["CapacityError", "Engine", "PrefillStore", "with_reference"]
