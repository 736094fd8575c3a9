"""verify_greedy: the longest path of drafts that agrees with the target's argmax, and the token after it.

A chain is the special case of a tree with one child a node. What is emitted is what greedy decoding would have emitted,
token for token, whatever the drafts are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specbench_kernels.checks import require_device, require_tensor
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs
from specbench_kernels.verify_cases import packed_trees
from specbench_kernels.verify_reference import greedy_reference

NAME = "verify_greedy"


@triton.jit
def verify_greedy_kernel(
    argmax, tokens, parents, query_start, accepted, path, path_stride, next_token, NODES: tl.constexpr
):
    """One program a request, one sweep over its nodes: parents come before children, so the walk never looks back."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start + request).to(tl.int64)
    count = (tl.load(query_start + request + 1).to(tl.int64) - start).to(tl.int32)
    slot = tl.arange(0, NODES)
    taken = tl.full([NODES], -1, tl.int32)
    at = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    best = tl.load(argmax + start, mask=count > 0, other=-1)
    bad = best < 0
    for node in range(1, count):
        row = start + node
        own = tl.load(argmax + row)
        bad = bad | (own < 0)
        follows = (tl.load(parents + row) == at) & (tl.load(tokens + row) == best)
        taken = tl.where(follows & (slot == depth), node, taken)
        depth += follows.to(tl.int32)
        at = tl.where(follows, node, at)
        best = tl.where(follows, own, best)
    tl.store(accepted + request, tl.where(bad, 0, depth))
    tl.store(path + request * path_stride + slot, tl.where(bad, -1, taken), mask=slot < path_stride)
    tl.store(next_token + request, tl.where(bad, -1, best))


@dataclass(frozen=True)
class GreedyOut:
    """Verdicts: `accepted` int32[B], `path` int32[B, Tmax] (accepted nodes, root-included numbering, then -1),
    `next_token` int64[B] (-1: the request has a row without a distribution, or no rows; nothing is accepted then).
    """

    accepted: torch.Tensor
    path: torch.Tensor
    next_token: torch.Tensor

    @classmethod
    def empty(cls, num_requests: int, max_nodes: int, device: torch.device) -> GreedyOut:
        """Room for requests of up to `max_nodes` nodes, the root included."""
        return cls(
            torch.empty(num_requests, dtype=torch.int32, device=device),
            torch.empty(num_requests, max_nodes, dtype=torch.int32, device=device),
            torch.empty(num_requests, dtype=torch.int64, device=device),
        )

    def check(self, op: str, num_requests: int, device: torch.device) -> None:
        require_tensor(op, "out.accepted", self.accepted, [num_requests], [torch.int32], device)
        require_tensor(op, "out.path", self.path, [num_requests, None], [torch.int32], device)
        require_tensor(op, "out.next_token", self.next_token, [num_requests], [torch.int64], device)


def verify_greedy(
    argmax: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    query_start: torch.Tensor,
    out: GreedyOut,
) -> GreedyOut:
    """Judge the packed trees of B requests by the argmax of the target's rows.

    `argmax` int64[N] (as `row_stats` gives it, -1 for a bad row), `tokens` int64[N] (root rows are not read), `parents`
    int32[N] within the request, root-included (root -1, parents before children), `query_start` int32[B + 1]. A request
    has at most Tmax = out.path.shape[1] nodes. Raises ValueError for a wrong shape, dtype, device or stride.
    """
    require_tensor(NAME, "argmax", argmax, [None], [torch.int64])
    rows, device = argmax.shape[0], argmax.device
    require_tensor(NAME, "tokens", tokens, [rows], [torch.int64], device)
    require_tensor(NAME, "parents", parents, [rows], [torch.int32], device)
    require_tensor(NAME, "query_start", query_start, [None], [torch.int32], device)
    requests = query_start.shape[0] - 1
    out.check(NAME, requests, device)
    require_device(NAME, device)
    if requests > 0:
        width = out.path.shape[1]
        verify_greedy_kernel[(requests,)](
            argmax,
            tokens,
            parents,
            query_start,
            out.accepted,
            out.path,
            width,
            out.next_token,
            NODES=triton.next_power_of_2(width),
            num_warps=1,
        )
    return out


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Trees over few tokens, whose argmax often agrees with a child."""
    trees = packed_trees(case["requests"], case["nodes"], case["children"], 4, device, seed)
    random = torch.Generator().manual_seed(seed + 1)
    argmax = torch.randint(0, 4, (len(trees["tokens"]),), generator=random).to(device)
    return trees | {"argmax": argmax, "width": case["nodes"]}


def _run(inputs: Inputs) -> Outputs:
    requests = len(inputs["query_start"]) - 1
    out = GreedyOut.empty(requests, inputs["width"], inputs["argmax"].device)
    verify_greedy(inputs["argmax"], inputs["tokens"], inputs["parents"], query_start=inputs["query_start"], out=out)
    return {"accepted": out.accepted, "path": out.path, "next_token": out.next_token}


def _reference(inputs: Inputs) -> Outputs:
    starts = inputs["query_start"].tolist()
    accepted, paths, tokens = [], [], []
    for start, end in itertools.pairwise(starts):
        own = [inputs[name][start:end].tolist() for name in ("argmax", "tokens", "parents")]
        path, token = greedy_reference(*own)
        accepted.append(len(path))
        paths.append([*path, *[-1] * (inputs["width"] - len(path))])
        tokens.append(token)
    device = inputs["argmax"].device
    return {
        "accepted": torch.tensor(accepted, dtype=torch.int32, device=device),
        "path": torch.tensor(paths, dtype=torch.int32, device=device),
        "next_token": torch.tensor(tokens, dtype=torch.int64, device=device),
    }


def _case(requests: int, nodes: int, children: int) -> Case:
    sizes = {"requests": requests, "nodes": nodes, "children": children}
    return Case(f"B={requests} T={nodes} children={children}", torch.int64, sizes)


def _compilations() -> list[Compilation]:
    pointers = {
        "argmax": "*i64",
        "tokens": "*i64",
        "parents": "*i32",
        "query_start": "*i32",
        "accepted": "*i32",
        "path": "*i32",
        "next_token": "*i64",
    }
    signature = pointers | {"path_stride": "i32"}
    return [
        Compilation(
            f"T<={nodes}",
            verify_greedy_kernel,
            signature,
            {"NODES": nodes},
            num_warps=1,
            divisible=tuple(pointers),
        )
        for nodes in (8, 128)
    ]


OP = Op(
    name=NAME,
    small=lambda: [_case(4, 5, 1), _case(4, 9, 3)],
    bench=lambda: [_case(64, 8, 1), _case(64, 64, 4)],
    inputs=_inputs,
    run=_run,
    reference=_reference,
    # Argmax, token and parent of every node are read; what is written a request is small.
    cost=lambda case: Cost(flops=4.0 * case["requests"] * case["nodes"], bytes=24.0 * case["requests"] * case["nodes"]),
    tolerance=lambda case: (0.0, 0.0),
    compilations=_compilations,
)
