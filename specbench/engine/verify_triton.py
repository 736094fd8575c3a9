"""Backend `triton` of the verifier: coins, laws and verdicts on the device, one read-back a step.

What a step needs goes over in one copy (drafts, parents, parameters, keys of the coins); kernels make the coins of
each request's key and counter, judge, and sample; what comes back in one copy is the path, the next token and bad rows.
That read-back is the only wait of a step. The same calls also sample the token of the AR arm: no drafts, no path.
Coins are those that the host's generators would give, so that outputs equal backend `torch` token for token. A source
of coins without a key (a test's forced ones) is asked on the host, and its numbers go over with the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from specbench_kernels.philox import philox_uniforms
from specbench_kernels.processors import RowStats, StatsWorkspace, row_stats
from specbench_kernels.verify_greedy import GreedyOut, verify_greedy
from specbench_kernels.verify_sampled import SampledOut, VerifyWorkspace, verify_sampled

from specbench.engine.ops.graphs import Graphs, next_power, request_class, row_class
from specbench.engine.ops.staging import Field, Inputs, Outputs
from specbench.engine.sampling import NumericalError, RequestGenerator, SamplingParams
from specbench.engine.tree import TokenTree
from specbench.engine.verify import VerifyBatch
from specbench.engine.verify_choices import NO_TRAVERSAL, NO_TRAVERSAL_REMEDY
from specbench.engine.verify_rules import SIBLINGS, DraftContractError, Verification
from specbench.errors import InputError

MAX_NODES = 128
"""Most rows of one request, the root included."""
NO_LAW = "the target's logits have no distribution (NaN, +inf or all -inf)"
NO_Q = "the drafter's q is not finite"
Q_TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Plan:
    """What decides which kernels run: padded sizes and the kinds of work. A captured graph belongs to one plan."""

    rows: int
    requests: int
    nodes: int
    sampled: bool
    filtered: bool
    has_q: bool
    siblings: int
    forced: bool
    method: str
    logits: int


class TritonVerifier:
    """A verifier of up to `max_rows` rows of `max_requests` requests, for logits [*, vocab_size] on `device`.

    Calling it is verify's Backend. `graphs` captures the kernels of a plan, or runs them as they are; `wide` says that
    the logits are fp64.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_requests: int,
        vocab_size: int,
        device: torch.device,
        graphs: Graphs | None = None,
        wide: bool = False,
    ) -> None:
        self.graphs = graphs or Graphs(None)
        self._max_rows, self._max_requests = max_rows, max_requests
        self._vocab_size, self._device = vocab_size, device
        real = torch.float64 if wide else torch.float32
        self._real = real
        self._inputs = Inputs(
            {
                "tokens": Field(torch.int64, (max_rows,)),
                "uniforms": Field(torch.float64, (max_rows,)),
                "keys": Field(torch.int64, (max_requests,)),
                "offsets": Field(torch.int64, (max_requests,)),
                "temperature": Field(torch.float64, (max_rows,)),
                "top_p": Field(torch.float64, (max_rows,)),
                "min_p": Field(torch.float64, (max_rows,)),
                "top_k": Field(torch.int32, (max_rows,)),
                "parents": Field(torch.int32, (max_rows,)),
                "query_start": Field(torch.int32, (max_requests + 1,)),
                "siblings": Field(torch.int32, (max_requests,)),
            },
            device,
        )
        self._outputs = Outputs(
            {
                "next_token": Field(torch.int64, (max_requests,)),
                "accepted": Field(torch.int32, (max_requests,)),
                "bad": Field(torch.int32, (max_requests,)),
                "bad_row": Field(torch.int32, (max_rows,)),
                "q_sum": Field(real, (max_rows,)),
                "path": Field(torch.int32, (max_requests * next_power(min(max_rows, MAX_NODES)),)),
            },
            device,
        )
        self._stats = RowStats.empty(max_rows, real, device)
        self._partial = StatsWorkspace.empty(max_rows, vocab_size, real, device)
        self._work = VerifyWorkspace.empty(max_rows, max_requests, vocab_size, device)
        self._uniforms = torch.zeros(max_rows, dtype=torch.float64, device=device)
        self._q: torch.Tensor | None = None

    @property
    def num_reads(self) -> int:
        """Waits of the host for the device so far."""
        return self._outputs.num_reads

    def __call__(self, batch: VerifyBatch) -> list[Verification]:
        """The verdicts on a checked batch. Raises DraftContractError where q can't be what the drafts came from, and
        InputError for a rule that has no kernel."""
        if batch.rule == "traversal":
            raise InputError(NO_TRAVERSAL, key="sampling.verification", remedy=NO_TRAVERSAL_REMEDY)
        plan = self._stage(batch)
        with torch.inference_mode():
            call = functools.partial(self._kernels, batch.logits, plan)
            if self.graphs.missing(plan):
                self.graphs.capture(plan, call)
            self.graphs.run(plan, call)
        return self._verdicts(batch, plan)

    # ---- Host to device

    def _stage(self, batch: VerifyBatch) -> _Plan:
        """Fill the inputs, pads beyond the batch's rows and requests: greedy rows that belong to nobody."""
        counts = np.diff(batch.offsets)
        rows, requests = int(batch.offsets[-1]), len(batch)
        plan = self._plan(batch, rows, requests)
        inputs = self._inputs
        inputs.begin()
        roots = batch.offsets[:-1]
        tokens, parents = inputs.host("tokens"), inputs.host("parents")
        tokens[: plan.rows], parents[: plan.rows] = 0, -1
        for first, tree in zip(roots.tolist(), batch.trees, strict=True):
            end = first + 1 + len(tree)
            tokens[first + 1 : end] = tree.tokens
            parents[first + 1 : end] = tree.parents + 1
        starts = inputs.host("query_start")
        starts[: requests + 1] = batch.offsets
        starts[requests + 1 : plan.requests + 1] = rows
        siblings = inputs.host("siblings")
        siblings[: plan.requests] = 0
        siblings[:requests] = [
            0 if q is None else max(1, SIBLINGS.index(rule)) for q, rule in zip(batch.q, batch.siblings, strict=True)
        ]
        for name, values, off in _parameters(batch.params):
            here = inputs.host(name)
            here[:rows] = np.repeat(values, counts)
            here[rows : plan.rows] = off
        self._stage_coins(batch, plan)
        inputs.send()
        if plan.has_q:
            laws = self._laws()
            for first, q, each in zip(roots.tolist(), batch.q, batch.params, strict=True):
                if q is not None and len(q) and not each.is_greedy:
                    laws[first + 1 : first + 1 + len(q)].copy_(q)
        return plan

    def _plan(self, batch: VerifyBatch, rows: int, requests: int) -> _Plan:
        padded = self.graphs.on
        sampled = [at for at, each in enumerate(batch.params) if not each.is_greedy]
        laws = [at for at in sampled if batch.q[at] is not None]
        return _Plan(
            # No more rows than the logits at hand have: they are padded by the pass that made them.
            rows=row_class(rows, self._max_requests, self._max_rows) if padded else rows,
            requests=request_class(requests, self._max_requests) if padded else requests,
            nodes=next_power(max(len(tree) for tree in batch.trees) + 1),
            sampled=bool(sampled),
            filtered=any(_is_filtered(batch.params[at]) for at in sampled),
            has_q=bool(laws),
            siblings=next_power(max((_most_siblings(batch.trees[at]) for at in laws), default=1)),
            forced=not all(isinstance(batch.generators[at], RequestGenerator) for at in sampled),
            method=batch.rule,
            logits=batch.logits.data_ptr(),
        )

    def _stage_coins(self, batch: VerifyBatch, plan: _Plan) -> None:
        """Keys and counters of the coins, or the coins themselves where a source has no key."""
        if plan.forced:
            here = self._inputs.host("uniforms")
            here[: plan.rows] = 0.0
            for first, coins in zip(batch.offsets[:-1].tolist(), batch.uniforms, strict=True):
                if len(coins):
                    here[first + 1 : first + len(coins)] = coins[:-1]
                    here[first] = coins[-1]
            return
        keys, offsets = self._inputs.host("keys").view(np.uint64), self._inputs.host("offsets")
        keys[: plan.requests], offsets[: plan.requests] = 0, 0
        for at, (source, count) in enumerate(zip(batch.generators, batch.num_coins, strict=True)):
            if count:
                generator = cast(RequestGenerator, source)
                keys[at], offsets[at] = generator.key, generator.num_drawn
                generator.skip(count)

    def _laws(self) -> torch.Tensor:
        """Room for q, taken with the first drafter that hands one over: [max_rows, V]."""
        if self._q is None:
            self._q = torch.zeros(self._max_rows, self._vocab_size, dtype=self._real, device=self._device)
        return self._q

    # ---- On the device

    def _kernels(self, logits: torch.Tensor, plan: _Plan) -> None:
        inputs, outputs, rows, requests = self._inputs.device, self._outputs.device, plan.rows, plan.requests
        # The pass that made the logits padded them as far as the plan goes; a view may end before.
        logits = logits.as_strided((rows, self._vocab_size), logits.stride())
        starts = inputs["query_start"][: requests + 1]
        stats = replace(
            RowStats(**{field.name: getattr(self._stats, field.name)[:rows] for field in fields(RowStats)}),
            bad=outputs["bad_row"][:rows],
        )
        filtered = ("top_k", "top_p", "min_p") if plan.filtered else ()
        filters: dict[str, Any] = {name: inputs[name][:rows] for name in filtered}
        row_stats(logits, temperature=inputs["temperature"][:rows], **filters, out=stats, workspace=self._partial)
        path = outputs["path"][: requests * plan.nodes].view(requests, plan.nodes)
        accepted, next_token = outputs["accepted"][:requests], outputs["next_token"][:requests]
        tokens, parents = inputs["tokens"][:rows], inputs["parents"][:rows]
        if not plan.sampled:
            out = GreedyOut(accepted=accepted, path=path, next_token=next_token)
            verify_greedy(stats.argmax, tokens=tokens, parents=parents, query_start=starts, out=out)
            return
        uniforms = inputs["uniforms"][:rows]
        if not plan.forced:
            uniforms = self._uniforms[:rows]
            philox_uniforms(inputs["keys"][:requests], inputs["offsets"][:requests], query_start=starts, out=uniforms)
        laws = self._laws()[:rows] if plan.has_q else None
        if laws is not None:
            torch.sum(laws, dim=1, out=outputs["q_sum"][:rows])
        verify_sampled(
            logits,
            stats,
            tokens=tokens,
            parents=parents,
            query_start=starts,
            q=laws,
            siblings=inputs["siblings"][:requests],
            uniforms=uniforms,
            method=plan.method,
            max_siblings=plan.siblings,
            out=SampledOut(accepted=accepted, path=path, next_token=next_token, bad=outputs["bad"][:requests]),
            workspace=self._workspace(rows, requests),
        )

    def _workspace(self, rows: int, requests: int) -> VerifyWorkspace:
        """The workspace's front, shaped for these sizes."""
        blocks = self._work.partial.shape[1]
        shapes = {
            "nodes": (4, rows),
            "laws": (5, rows),
            "partial": (rows, blocks, 2),
            "emission": (requests, blocks, 2),
            "emit": (2, requests),
        }
        parts = {
            name: getattr(self._work, name).flatten()[: math.prod(shape)].view(shape) for name, shape in shapes.items()
        }
        return VerifyWorkspace(**parts)

    # ---- Device to host

    def _verdicts(self, batch: VerifyBatch, plan: _Plan) -> list[Verification]:
        back = self._outputs.read("path", plan.requests * plan.nodes)
        path = back["path"][: plan.requests * plan.nodes].reshape(plan.requests, plan.nodes)
        accepted, next_token = back["accepted"].tolist(), back["next_token"].tolist()
        broken = {int(row) for row in np.flatnonzero(back["bad_row"][: int(batch.offsets[-1])])}
        verdicts = []
        for at, tree in enumerate(batch.trees):
            failure = self._failure(batch, at, back, broken) if broken or plan.has_q else None
            if failure is not None:
                verdicts.append(failure)
                continue
            nodes = [int(node) - 1 for node in path[at, : accepted[at]]]
            assert next_token[at] >= 0, "a request without a fault has a token"
            verdicts.append(Verification.of(tree, nodes, int(next_token[at])))
        return verdicts

    @staticmethod
    def _failure(
        batch: VerifyBatch, at: int, back: Mapping[str, NDArray[np.generic]], broken: set[int]
    ) -> Verification | None:
        """What ends request `at`, or None. Raises DraftContractError where q is none that its drafts came from."""
        rows, request_id = batch.rows(at), batch.generators[at].request_id
        bad = next((row - rows.start for row in range(rows.start, rows.stop) if row in broken), None)
        if bad is not None:
            return Verification.failure(NumericalError(NO_LAW, row=bad, request_id=request_id, step=batch.step))
        if batch.q[at] is None or batch.params[at].is_greedy:
            return None
        sums = np.asarray(back["q_sum"][rows.start + 1 : rows.stop], dtype=np.float64)
        unusable = np.flatnonzero(~np.isfinite(sums))
        if unusable.size:
            row = int(unusable[0])
            return Verification.failure(NumericalError(NO_Q, row=row, request_id=request_id, step=batch.step))
        if np.any(np.abs(sums - 1.0) > Q_TOLERANCE):
            raise DraftContractError(f"request {request_id}: a row of q is not a distribution (sums {sums.tolist()})")
        if back["bad"][at]:
            raise DraftContractError(f"request {request_id}: a drafted token has no q to be drawn with")
        return None


def _most_siblings(tree: TokenTree) -> int:
    """The most children that the root or a node has."""
    return 1 if tree.is_chain else max(len(nodes) for nodes in tree.children)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _parameters(params: Sequence[SamplingParams]) -> list[tuple[str, NDArray[np.generic], float]]:
    """Each parameter of the requests, and its value for a pad row."""
    return [
        ("temperature", np.array([each.temperature for each in params], dtype=np.float64), 0.0),
        ("top_k", np.array([each.top_k for each in params], dtype=np.int32), 0),
        ("top_p", np.array([each.top_p for each in params], dtype=np.float64), 1.0),
        ("min_p", np.array([each.min_p for each in params], dtype=np.float64), 0.0),
    ]


def verify_triton(batch: VerifyBatch) -> list[Verification]:
    """The backend by name: a verifier of this batch's size. The engine keeps one and calls that."""
    rows = int(batch.offsets[-1])
    judge = TritonVerifier(
        max_rows=rows,
        max_requests=len(batch),
        vocab_size=batch.logits.shape[1],
        device=batch.logits.device,
        wide=batch.logits.dtype == torch.float64,
    )
    return judge(batch)
