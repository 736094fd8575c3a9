"""verify_sampled: which drafted nodes stand under sampling, and the next token: exact for every drafter and every tree.

Rules (facts and sources: verify_reference.py): chosen children are target-only, u < P(x), else P loses x; sampled ones
go through recursive rejection, u < P(x) / Q(x), else P <- norm(relu(P - Q)), and without replacement Q <- norm(Q
without x); `method="block"` is block verification of chains. Comparisons are strict, residuals exact, laws fp64.

Nothing of the size of the vocabulary is written: p comes from the logits and their RowStats. A chain, or a tree of
chosen nodes, reads one row of logits (and q) a request; every sampled sibling beyond the first adds one pass over the
rows that have it, block verification one pass over the inner rows. The blocks of the vocabulary depend on its size
alone and are added in one order, so a request's result is the same in every batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton

from specbench_kernels.checks import FLOATS, require, require_device, require_tensor
from specbench_kernels.op import Case, Cost, Inputs, Op, Outputs
from specbench_kernels.processors import RowStats, block_size, random_logits, row_stats
from specbench_kernels.verify_cases import drawn_drafts, packed_trees
from specbench_kernels.verify_compile import compilations
from specbench_kernels.verify_greedy import GreedyOut
from specbench_kernels.verify_kernels import nodes_kernel, ratios_kernel, residual_kernel, totals_kernel
from specbench_kernels.verify_reference import distribution_reference, verify_sampled_reference
from specbench_kernels.verify_walk_kernels import block_walk_kernel, draw_kernel, emission_kernel, walk_kernel

NAME = "verify_sampled"
WIDTH = 1024
"""Tokens of one block: small, since laws are held in fp64."""
METHODS = ("sequential", "block")
NO_DISTRIBUTION, BAD_Q, MALFORMED = 1, 2, 3
"""Codes of `SampledOut.bad`."""


@dataclass(frozen=True)
class SampledOut(GreedyOut):
    """Verdicts as GreedyOut, and `bad` int32[B]: 0, or why the request has none (accepted 0, next_token -1):
    1 a row of the target has no distribution; 2 q is 0 at a drafted token, or no number in [0, 2], or leaves no mass;
    3 the tree is none: parents not before children, a token outside the vocabulary, equal siblings that are not
    independent, more siblings or nodes than announced, no chain under method "block".
    """

    bad: torch.Tensor

    @classmethod
    def empty(cls, num_requests: int, max_nodes: int, device: torch.device) -> SampledOut:
        plain = GreedyOut.empty(num_requests, max_nodes, device)
        bad = torch.empty(num_requests, dtype=torch.int32, device=device)
        return cls(plain.accepted, plain.path, plain.next_token, bad)

    def check(self, op: str, num_requests: int, device: torch.device) -> None:
        super().check(op, num_requests, device)
        require_tensor(op, "out.bad", self.bad, [num_requests], [torch.int32], device)


@dataclass(frozen=True)
class VerifyWorkspace:
    """Intermediate results: `nodes` int32[4, N] (first child, next sibling, number of children, mode), `laws`
    fp64[5, N] (p and q of the token, Z, D, r), `partial` fp64[N, blocks, 2], `emission` fp64[B, blocks, 2],
    `emit` int32[2, B].
    """

    nodes: torch.Tensor
    laws: torch.Tensor
    partial: torch.Tensor
    emission: torch.Tensor
    emit: torch.Tensor

    @classmethod
    def empty(
        cls, num_rows: int, num_requests: int, vocab_size: int, device: torch.device, block: int | None = None
    ) -> VerifyWorkspace:
        """Room for `num_rows` packed rows of `num_requests` requests."""
        blocks = triton.cdiv(vocab_size, block or block_size(vocab_size, WIDTH))

        def room(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        return cls(
            room(torch.int32, 4, num_rows),
            room(torch.float64, 5, num_rows),
            room(torch.float64, num_rows, blocks, 2),
            room(torch.float64, num_requests, blocks, 2),
            room(torch.int32, 2, num_requests),
        )

    def check(self, op: str, num_rows: int, num_requests: int, num_blocks: int, device: torch.device) -> None:
        shapes = (
            ("nodes", self.nodes, [4, num_rows], torch.int32),
            ("laws", self.laws, [5, num_rows], torch.float64),
            ("partial", self.partial, [num_rows, num_blocks, 2], torch.float64),
            ("emission", self.emission, [num_requests, num_blocks, 2], torch.float64),
            ("emit", self.emit, [2, num_requests], torch.int32),
        )
        for name, tensor, shape, kind in shapes:
            require_tensor(op, f"workspace.{name}", tensor, shape, [kind], device)


def most_siblings(parents: torch.Tensor, query_start: torch.Tensor) -> int:
    """The most children that any node has; reads back from the device."""
    starts, above = query_start.tolist(), parents.tolist()
    counts = [0]
    for start, end in itertools.pairwise(starts):
        own = above[start + 1 : end]
        counts += [own.count(parent) for parent in set(own)]
    return max(counts)


def verify_sampled(
    logits: torch.Tensor,
    stats: RowStats,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    query_start: torch.Tensor,
    siblings: torch.Tensor,
    uniforms: torch.Tensor,
    out: SampledOut,
    q: torch.Tensor | None = None,
    method: str = "sequential",
    max_siblings: int | None = None,
    workspace: VerifyWorkspace | None = None,
    block: int | None = None,
) -> SampledOut:
    """Judge the packed trees of B requests under sampling; requests at temperature 0 among them are greedy.

    `logits` [N, V] (rows may be strided; row i: the target after node i) and their `stats`; `tokens` int64[N] (root
    rows are not read); `parents` int32[N] within the request, root-included (root -1, parents before children);
    `query_start` int32[B + 1], rows behind it are pads. `q` fp32 or fp64 [N, V] or None (all chosen): row i is the law
    that node i's position was drawn from, earlier siblings included; siblings share it, and the first one's row is
    read; rows of roots and of chosen requests are not. `siblings` int32[B]: 0 chosen, 1 independent, 2 without
    replacement. `uniforms` fp64[N] in [0, 1): node i's coin at its row, at the root's row the one that draws the next
    token. A request has at most Tmax = out.path.shape[1] nodes.

    `max_siblings`: the most children of a node among sampled trees; without it the parents are read back, which a
    captured step can't do. `block` overrides the block of the split. Codes of what is wrong with a request are in
    `out.bad`. Raises ValueError for a wrong shape, dtype, device, stride or method.
    """
    require_tensor(NAME, "logits", logits, [None, None], FLOATS, contiguous=False)
    rows, vocab_size = logits.shape
    device = logits.device
    stats.check(NAME, rows, logits.dtype, device)
    require_tensor(NAME, "tokens", tokens, [rows], [torch.int64], device)
    require_tensor(NAME, "parents", parents, [rows], [torch.int32], device)
    require_tensor(NAME, "query_start", query_start, [None], [torch.int32], device)
    requests = query_start.shape[0] - 1
    require_tensor(NAME, "siblings", siblings, [requests], [torch.int32], device)
    require_tensor(NAME, "uniforms", uniforms, [rows], [torch.float64], device)
    if q is not None:
        kinds = [torch.float32, torch.float64]
        require_tensor(NAME, "q", q, [rows, vocab_size], kinds, device, contiguous=False)
    require(method in METHODS, NAME, f"method {method!r} is none of {list(METHODS)}")
    out.check(NAME, requests, device)
    require_device(NAME, device)
    block = block or block_size(vocab_size, WIDTH)
    num_blocks = triton.cdiv(vocab_size, block)
    if workspace is None:
        workspace = VerifyWorkspace.empty(rows, requests, vocab_size, device, block)
    workspace.check(NAME, rows, requests, num_blocks, device)
    if requests <= 0 or rows == 0:
        out.accepted.zero_()
        out.path.fill_(-1)
        out.next_token.fill_(-1)
        out.bad.zero_()
        return out

    chain = method == "block"
    has_q = q is not None
    if max_siblings is None:
        max_siblings = most_siblings(parents, query_start) if has_q else 0
    q = logits if q is None else q
    law = (stats.argmax, stats.maximum, stats.inv_temperature, stats.floor, stats.log_z)
    first_child, next_sibling, num_children, mode = workspace.nodes
    p_token, q_token, z, d, ratio = workspace.laws
    emit_row, emit_stages = workspace.emit
    width = out.path.shape[1]
    nodes = triton.next_power_of_2(width)
    blocks = triton.next_power_of_2(num_blocks)

    nodes_kernel[(requests,)](
        *(logits, logits.stride(0), *law, stats.bad, tokens, parents, query_start, q, q.stride(0), siblings),
        *(first_child, next_sibling, num_children, mode, p_token, q_token, out.bad, vocab_size, max_siblings),
        HAS_Q=has_q,
        CHAIN=chain,
        NODES=nodes,
        num_warps=4 if nodes > 16 else 1,
    )
    if chain:
        ratios_kernel[(requests,)](query_start, p_token, q_token, mode, out.bad, ratio, HAS_Q=has_q, num_warps=1)
    passes = range(1, max_siblings) if not chain else range(min(1, max_siblings))
    for stages in passes if has_q else ():
        residual_kernel[(rows, num_blocks)](
            *(logits, logits.stride(0), *law, tokens, parents, query_start, requests, q, q.stride(0)),
            *(first_child, next_sibling, num_children, mode, ratio, z, d, workspace.partial),
            *(vocab_size, num_blocks, max(stages, 1)),
            CHAIN=chain,
            BLOCK=block,
            num_warps=4,
        )
        totals_kernel[(rows,)](
            *(parents, query_start, requests, first_child, next_sibling, num_children, mode, workspace.partial),
            *(z, d, num_blocks, max(stages, 1)),
            CHAIN=chain,
            BLOCKS=blocks,
            num_warps=1,
        )
    verdict = (out.accepted, out.path, width, out.bad, emit_row, emit_stages)
    if chain:
        block_walk_kernel[(requests,)](
            *(query_start, mode, p_token, z, uniforms, stats.inv_temperature, *verdict, ratio),
            HAS_Q=has_q,
            NODES=nodes,
            num_warps=1,
        )
    else:
        walk_kernel[(requests,)](
            *(parents, query_start, first_child, next_sibling, mode, p_token, q_token, z, d, uniforms),
            *(stats.inv_temperature, *verdict),
            HAS_Q=has_q,
            NODES=nodes,
            num_warps=1,
        )
    emitting = (
        *(logits, logits.stride(0), *law, tokens, q, q.stride(0), query_start, first_child, next_sibling, mode),
        *(z, d, ratio, out.bad, emit_row, emit_stages, workspace.emission),
    )
    emission_kernel[(requests, num_blocks)](
        *(*emitting, vocab_size, num_blocks),
        HAS_Q=has_q,
        CHAIN=chain,
        BLOCK=block,
        num_warps=4,
    )
    draw_kernel[(requests,)](
        *(*emitting, uniforms, out.accepted, out.path, width, out.next_token, vocab_size, num_blocks),
        HAS_Q=has_q,
        CHAIN=chain,
        BLOCKS=blocks,
        BLOCK=block,
        NODES=nodes,
        num_warps=16 if block >= 1024 else 4,
    )
    return out


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Requests under all three kinds of siblings, some greedy; drafts really drawn from q, q near to p."""
    requests, vocab_size = case["requests"], case["vocab"]
    trees = packed_trees(requests, case["nodes"], case["children"], vocab_size, device, seed, ragged=vocab_size < 1000)
    rows = len(trees["tokens"])
    logits = random_logits((rows, vocab_size), torch.float32, device, seed)
    noise = random_logits((rows, vocab_size), torch.float32, device, seed + 1)
    siblings = torch.arange(requests, device=device, dtype=torch.int32) % 3
    q = torch.softmax(logits[trees["parents"].clamp(min=0).long() + _starts(trees)] + 0.3 * noise, dim=-1)
    del noise
    drawn = drawn_drafts(trees, q, siblings, seed)
    request = _request_of(trees)
    chosen = siblings[request] == 0
    random = torch.Generator(device=device).manual_seed(seed)
    return {
        "logits": logits.to(case.dtype),
        "temperature": torch.where(request % 5 == 4, 0.0, 1.0).to(torch.float32),
        "tokens": torch.where(chosen, trees["tokens"], drawn),
        "parents": trees["parents"],
        "query_start": trees["query_start"],
        "q": q if case.dtype != torch.float64 else q.double(),
        "siblings": siblings,
        "uniforms": torch.rand(rows, generator=random, device=device, dtype=torch.float64),
        "method": METHODS[case["block"]],
        "width": case["nodes"],
        "max_siblings": case["children"],
    }


def _request_of(trees: Inputs) -> torch.Tensor:
    """int64[N]: the request of each row."""
    starts = trees["query_start"].long()
    return torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())


def _starts(trees: Inputs) -> torch.Tensor:
    """int64[N]: the first row of each row's request."""
    return trees["query_start"].long()[_request_of(trees)]


def _run(inputs: Inputs) -> Outputs:
    logits, starts = inputs["logits"], inputs["query_start"]
    stats = row_stats(logits, temperature=inputs["temperature"])
    out = SampledOut.empty(len(starts) - 1, inputs["width"], logits.device)
    names = ("tokens", "parents", "query_start", "q", "siblings", "uniforms", "method", "max_siblings")
    verify_sampled(logits, stats, out=out, **{name: inputs[name] for name in names})
    return {name: getattr(out, name) for name in ("accepted", "path", "next_token", "bad")}


def _reference(inputs: Inputs) -> Outputs:
    names = ("tokens", "parents", "query_start", "q", "siblings", "uniforms", "method", "width")
    return verify_sampled_reference(
        distribution_reference(inputs["logits"], inputs["temperature"]),
        greedy=inputs["temperature"] == 0,
        **{name: inputs[name] for name in names},
    )


def _case(dtype: torch.dtype, requests: int, vocab: int, nodes: int, children: int, block: bool) -> Case:
    kind = str(dtype).removeprefix("torch.")
    name = f"{kind} B={requests} V={vocab} T={nodes} children={children}{' block' if block else ''}"
    sizes = {"requests": requests, "vocab": vocab, "nodes": nodes, "children": children, "block": int(block)}
    return Case(name, dtype, sizes)


def _small() -> list[Case]:
    shapes = [(37, 5, 1, False), (37, 5, 1, True), (5000, 6, 3, False)]
    return [_case(dtype, 4, *shape) for dtype in (torch.float64, torch.float32) for shape in shapes]


def _bench() -> list[Case]:
    shapes = [(131072, 8, 1, False), (131072, 8, 1, True), (131072, 8, 3, False), (262144, 8, 1, False)]
    return [_case(torch.float32, 64, *shape) for shape in shapes]


def _cost(case: Case) -> Cost:
    """One row of logits and of q is read for the emission of every request; and once more for each further sibling of
    the inner nodes that have one (at least (T - 1) / children of them), or for the inner nodes under "block".
    """
    rows = float(case["requests"])
    inner = max(0, case["nodes"] - 2) if case["block"] else (case["nodes"] - 1) // case["children"]
    passes = 1 if case["block"] else case["children"] - 1
    elements = case["vocab"] * rows * (1 + inner * passes * 2 / 3)
    return Cost(flops=10.0 * elements, bytes=elements * (case.dtype.itemsize + 4.0))


OP = Op(
    name=NAME,
    small=_small,
    bench=_bench,
    inputs=_inputs,
    run=_run,
    reference=_reference,
    cost=_cost,
    tolerance=lambda case: (0.0, 0.0),
    compilations=lambda: compilations(WIDTH),
)
