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

import numpy as np
import torch

from specbench.engine.drafters.base import EMPTY, Drafter, DraftPass
from specbench.engine.kv_cache import KVSnapshot
from specbench.engine.models.decoder import Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest, Request
from specbench.engine.sampling import RequestGenerator
from specbench.engine.stops import StopState
from specbench.engine.trace import RequestTrace, Trace
from specbench.engine.verify import Proposal, Verification, sample_next, verify
from specbench.errors import CapacityError, InputError
from specbench.metrics import is_looping
from specbench.roofline.cost import Cost, forward_cost

Now = Callable[[], float]


@dataclass(frozen=True)
class Prefilled:
    """A prompt's K and V, the logits [1, V] after it, and the seconds its prefill took."""

    kv: KVSnapshot
    logits: torch.Tensor
    prefill_s: float


class PrefillStore:
    """Each prompt's prefill, done once per target."""

    def __init__(self, decoder: Decoder, now: Now = time.perf_counter) -> None:
        self._decoder, self._now = decoder, now
        self._done: dict[tuple[int, ...], Prefilled] = {}

    @property
    def bytes(self) -> int:
        return sum(p.kv.k.nbytes + p.kv.v.nbytes + p.logits.nbytes for p in self._done.values())

    def get(self, prompt: tuple[int, ...], slot: int) -> Prefilled:
        """The prefill of `prompt`, run in the empty `slot` if it is new; the slot is left empty."""
        if prompt not in self._done:
            if not prompt:
                raise InputError("a request needs a prompt of one token or more", key="prompts")
            begin = self._now()
            try:
                logits = self._decoder.prefill(prompt, slot)
                elapsed = self._now() - begin
                self._done[prompt] = Prefilled(self._decoder.kv.snapshot(slot), logits.clone(), elapsed)
            finally:
                self._decoder.kv.close(slot)
        return self._done[prompt]


@dataclass
class _Step:
    """What is kept of one step until the trace is built."""

    times: tuple[float, float, float, float, float]
    end_s: float
    busy: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    passes: list[DraftPass]
    rows: list[tuple[int, int, int, int, int, int]]


class Engine:
    """Decodes blocks of requests on one target with one drafter, or with none (`drafter=None`: the AR arm).

    `depth` tokens are drafted a step at most, fewer where the request's length or context leaves no room.
    `token_bytes` is needed for stop strings only. `check` asserts the KV cache's integrity after every step.
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
    ) -> None:
        self.target, self.store, self.drafter = target, store, drafter
        self.batch_size, self.depth = batch_size, depth
        self._token_bytes, self._now, self._check, self._logprobs = token_bytes, now, check, want_logprobs
        self._slots: list[ActiveRequest | None] = [None] * batch_size
        self._finished: dict[int, RequestTrace] = {}
        self._index: dict[int, int] = {}
        self._drafting: set[int] = set()

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
        begin = self._now()
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
            steps.append(self._step(active, len(steps), begin))
            for one in active:
                if one.finish_reason is not None:
                    if self._index[one.slot] < len(requests):
                        own -= 1
                    self._retire(one)
        for one in [one for one in self._slots if one is not None]:
            one.finish_reason = "cut"
            self._retire(one)
        return self._trace(steps, started)

    def _start(self, request: Request, slot: int, index: int) -> bool:
        """Put `request` into `slot`; False if it ended with its first token."""
        prefilled = self.store.get(request.prompt_ids, slot)
        active = ActiveRequest(
            request=request,
            slot=slot,
            generator=RequestGenerator(request.params.seed, request.request_id),
            stop_state=StopState(request.stops, prompt_len=len(request.prompt_ids), token_bytes=self._token_bytes),
            prefill_s=prefilled.prefill_s,
        )
        self._slots[slot] = active
        self._index[slot] = index
        self.target.kv.restore(slot, prefilled.kv)
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

    def _room(self, active: ActiveRequest) -> int:
        """Drafts that can still be committed: the target's own token takes the last place."""
        context = self.target.kv.max_context - active.num_cached - 1
        return max(0, min(self.depth, active.stop_state.remaining - 1, context))

    def _step(self, active: list[ActiveRequest], number: int, begin: float) -> _Step:
        kv = self.target.kv
        t0 = self._now()
        for one in active:
            kv.reserve(one.slot, 1 + (self._room(one) if self.drafter is not None else 0))
        proposals: list[Proposal] = [EMPTY] * len(active)
        t1 = self._now()
        if self.drafter is not None:
            proposals = self.drafter.propose(active, [self._room(one) for one in active])
        t2 = self._now()
        contexts = [one.num_cached for one in active]
        inputs = [
            np.concatenate([np.array([one.pending], dtype=np.int64), proposal.tree.tokens])
            for one, proposal in zip(active, proposals, strict=True)
        ]
        batch = ForwardBatch.of(inputs, [one.slot for one in active], contexts)
        t3 = self._now()
        logits = self.target.forward(batch)
        t4 = self._now()
        params = [one.request.params for one in active]
        coins = [one.generator for one in active]
        if self.drafter is None:
            verdicts = sample_next(logits, params, coins, step=number, want_logprobs=self._logprobs)
        else:
            verdicts = verify(proposals, logits, params, coins, step=number, want_logprobs=self._logprobs)
        t5 = self._now()
        rows = []
        for one, proposal, verdict, context in zip(active, proposals, verdicts, contexts, strict=True):
            if verdict.error is not None:
                one.finish_reason, one.error = "failed", str(verdict.error)
                continue
            num_draft = len(proposal.tree)
            kept = self._append(one, verdict)
            kv.commit(one.slot, kept)
            accepted = verdict.accepted
            if self.drafter is not None:
                self.drafter.commit(one, num_draft, min(accepted, kept))
            rows.append((self._index[one.slot], num_draft, num_draft, accepted, kept, context))
        t6 = self._now()
        if self._check:
            for one in active:
                if one.error is not None:
                    kv.truncate(one.slot, int(kv.lengths[one.slot]))
                else:
                    assert kv.lengths[one.slot] == one.num_cached, f"slot {one.slot}: cache and output differ in length"
            kv.check_integrity()
        times = (t2 - t1, t4 - t3, t5 - t4, t6 - t5, (t1 - t0) + (t3 - t2))
        passes = self.drafter.take_passes() if self.drafter is not None else []
        lens = tuple(int(n) for n in batch.query_lens)
        return _Step(times, t6 - begin, len(active), lens, tuple(contexts), passes, rows)

    def _cost(self, step: _Step) -> Cost:
        """FLOPs and bytes of the passes the step really made: the drafter's and the verify pass."""
        spec, dtype = self.target.spec, self.target.dtype
        total = forward_cost(spec, step.query_lens, step.context_lens, weight_dtype=dtype).total
        for p in step.passes:
            head = len(p.query_lens)
            total = (
                total
                + forward_cost(
                    p.spec,
                    p.query_lens,
                    p.context_lens,
                    weight_dtype=p.dtype,
                    head_tokens=head,
                    num_layers=p.num_layers,
                ).total
            )
        return total

    def _trace(self, steps: list[_Step], started: int) -> Trace:
        times = np.array([s.times for s in steps], dtype=np.float64).reshape(-1, 5)
        costs = [self._cost(s) for s in steps]
        rows = np.array([(i, *row) for i, s in enumerate(steps) for row in s.rows], dtype=np.int64).reshape(-1, 7)
        trace = Trace(
            batch_size=self.batch_size,
            step_s=times.sum(axis=1),
            draft_s=times[:, 0],
            verify_s=times[:, 1],
            sample_s=times[:, 2],
            commit_s=times[:, 3],
            host_s=times[:, 4],
            end_s=np.array([s.end_s for s in steps], dtype=np.float64),
            busy=np.array([s.busy for s in steps], dtype=np.int64),
            in_window=np.array([s.busy == self.batch_size for s in steps], dtype=bool),
            flops=np.array([c.flops for c in costs], dtype=np.float64),
            bytes=np.array([c.bytes for c in costs], dtype=np.float64),
            query_tokens=np.array([sum(s.query_lens) for s in steps], dtype=np.int64),
            row_step=rows[:, 0],
            row_request=rows[:, 1],
            num_proposed=rows[:, 2],
            num_draft=rows[:, 3],
            num_accepted=rows[:, 4],
            num_committed=rows[:, 5],
            context_len=rows[:, 6],
            requests=tuple(self._finished[i] for i in range(started)),
        )
        trace.check()
        return trace


def with_reference(request: Request, reference: tuple[int, ...]) -> Request:
    """The same request, knowing its AR output."""
    return replace(request, reference=reference)


__all__ = ["CapacityError", "Engine", "PrefillStore", "with_reference"]
