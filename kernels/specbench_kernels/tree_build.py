"""tree_build: the dynamic draft tree of EAGLE-2 and EAGLE-3, grown and pruned on the device, without waits.

With k = top_k and D = depth: level 0 takes the k best tokens at the last real position; each of D further levels
expands the k frontier nodes by their k best tokens, records all k^2 children as candidates (score = cumulative
log-probability) and goes on with the k best of them; `rerank` keeps the `total` - 1 best of all k + D k^2 candidates,
in index order, under the root. Ties go to the smaller index. Source of the algorithm: arXiv 2406.16858, section 4.

    candidates = Candidates.empty(batch, top_k, depth, device=device)
    frontier = Frontier.root(batch, num_words=1, device=device)
    for level in range(depth + 1):
        values, ids = top_children(logits, top_k)             # of the frontier's nodes: [B, 1 or k, k]
        frontier = expand(values, ids, frontier, candidates, level=level, cell=...)
        # run the head on the frontier: tokens, parent states by rows, tree mask
    tree = rerank(candidates, total, roots=roots, context_lens=context_lens)

The top-k over the vocabulary is torch.topk (`top_children`), which does not wait for the device either; the selection
among k^2, the rerank and the masks are ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbench_kernels.checks import require, require_device, require_tensor
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs
from specbench_kernels.tree_build_kernel import expand_kernel, rerank_kernel
from specbench_kernels.tree_build_reference import expand_reference, grown, rerank_reference
from specbench_kernels.tree_build_types import Candidates, Frontier, Tree

MAX_NODES = 256
_FLOATS = (torch.float32, torch.float64)
_KEYS = {torch.float32: tl.int32, torch.float64: tl.int64}


def top_children(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of the k best tokens, best first, of logits [B, F, V]: fp32 (fp64) and int64 [B, F, k].

    log-softmax and torch.topk, which leaves the order of equal logits open.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    best = torch.log_softmax(wide, dim=-1).topk(top_k, dim=-1)
    return best.values, best.indices


def expand(
    values: torch.Tensor,
    ids: torch.Tensor,
    frontier: Frontier,
    candidates: Candidates,
    *,
    level: int,
    cell: int = 0,
    out: Frontier | None = None,
) -> Frontier:
    """One level of growth: record every child of the frontier, and return the k best of them, best first.

    values [B, F, k] (log-probabilities, <= 0; NaN counts as -inf, more than 0 as 0) and ids int64[B, F, k] are each
    frontier node's k children; F = 1 (the root) at level 0, else k. A child's score is its parent's plus its own. The
    new node of rank i will be written to the draft's uncommitted cell `cell` + i; it sees that and all its parent sees.
    `candidates` is filled at this level's place; `out` (k nodes) must not be `frontier`. Raises ValueError for a wrong
    shape, dtype, device or level, or a cell beyond the mask's words.
    """
    op = "expand"
    width, top_k = (1 if level == 0 else candidates.top_k), candidates.top_k
    require_device(op, values.device)
    require(0 <= level <= candidates.depth, op, f"level {level} is outside 0 to {candidates.depth}")
    batch, count = candidates.scores.shape
    require(values.dtype in _FLOATS, op, f"values are {values.dtype}, expected float32 or float64")
    require_tensor(op, "values", values, [batch, width, top_k], [candidates.scores.dtype])
    require_tensor(op, "ids", ids, [batch, width, top_k], [torch.int64], values.device)
    num_words = frontier.mask.shape[-1]
    require(
        cell >= 0 and cell + top_k <= 64 * num_words, op, f"cells {cell} to {cell + top_k - 1} need more mask words"
    )
    if out is None:
        out = Frontier.empty(batch, top_k, num_words, device=values.device, dtype=values.dtype)
    for name, nodes, size in (("frontier", frontier, width), ("out", out, top_k)):
        require_tensor(op, f"{name}.scores", nodes.scores, [batch, size], [values.dtype], values.device)
        require_tensor(op, f"{name}.tokens", nodes.tokens, [batch, size], [torch.int64], values.device)
        require_tensor(op, f"{name}.rows", nodes.rows, [batch, size], [torch.int32], values.device)
        require_tensor(op, f"{name}.candidates", nodes.candidates, [batch, size], [torch.int32], values.device)
        require_tensor(op, f"{name}.mask", nodes.mask, [batch, size, num_words], [torch.int64], values.device)
    require(out.mask.data_ptr() != frontier.mask.data_ptr() or batch == 0, op, "out is the frontier itself")
    if batch == 0:
        return out
    expand_kernel[(batch,)](
        values,
        ids,
        frontier.scores,
        frontier.candidates,
        frontier.mask,
        candidates.scores,
        candidates.tokens,
        candidates.parents,
        out.scores,
        out.tokens,
        out.rows,
        out.candidates,
        out.mask,
        candidates.level_start(level),
        cell,
        **_expand_constants(count, width, top_k, num_words, values.dtype),
        num_warps=_num_warps(width * top_k),
    )
    return out


def rerank(
    candidates: Candidates,
    total: int,
    *,
    roots: torch.Tensor,
    context_lens: torch.Tensor,
    out: Tree | None = None,
) -> Tree:
    """The trees of the `total` - 1 best candidates, or of all C where there are fewer: N = min(total, C + 1) nodes.

    `roots` int64[B] are the pending tokens, `context_lens` int32[B] their cells. Candidates must be as `expand` leaves
    them: a parent before its child, with no smaller score; then every kept node's parent is kept. Raises ValueError for
    a wrong shape, dtype or device, total < 1, or more than 256 nodes.
    """
    op = "rerank"
    require_device(op, candidates.scores.device)
    device = candidates.scores.device
    require_tensor(op, "candidates.scores", candidates.scores, [None, None], _FLOATS)
    batch, count = candidates.scores.shape
    require_tensor(op, "candidates.tokens", candidates.tokens, [batch, count], [torch.int64], device)
    require_tensor(op, "candidates.parents", candidates.parents, [batch, count], [torch.int32], device)
    require(total >= 1, op, f"total is {total}, expected at least 1: the root")
    nodes = min(total, count + 1)
    require(nodes <= MAX_NODES, op, f"{nodes} nodes, at most {MAX_NODES} are supported")
    require_tensor(op, "roots", roots, [batch], [torch.int64], device)
    require_tensor(op, "context_lens", context_lens, [batch], [torch.int32], device)
    out = Tree.empty(batch, nodes, device=device) if out is None else out
    words = triton.cdiv(nodes, 64)
    require_tensor(op, "out.tokens", out.tokens, [batch, nodes], [torch.int64], device)
    for name in ("parents", "depths", "positions", "candidates"):
        require_tensor(op, f"out.{name}", getattr(out, name), [batch, nodes], [torch.int32], device)
    require_tensor(op, "out.mask", out.mask, [batch, nodes, words], [torch.int64], device)
    if batch == 0:
        return out
    rerank_kernel[(batch,)](
        candidates.scores,
        candidates.tokens,
        candidates.parents,
        roots,
        context_lens,
        out.tokens,
        out.parents,
        out.depths,
        out.mask,
        out.positions,
        out.candidates,
        **_rerank_constants(count, nodes, candidates.depth, candidates.scores.dtype),
        num_warps=_num_warps(count),
    )
    return out


def _num_warps(candidates: int) -> int:
    return 1 if candidates <= 256 else 4 if candidates <= 1024 else 8


def _expand_constants(count: int, width: int, top_k: int, num_words: int, dtype: torch.dtype) -> dict[str, object]:
    return {
        "NUM_CANDIDATES": count,
        "WIDTH": width,
        "TOP_K": top_k,
        "NUM_WORDS": num_words,
        "KEY": _KEYS[dtype],
        "BLOCK": max(32, triton.next_power_of_2(width * top_k)),
        "BLOCK_K": max(2, triton.next_power_of_2(top_k)),
        "BLOCK_WORDS": triton.next_power_of_2(num_words),
    }


def _rerank_constants(count: int, nodes: int, depth: int, dtype: torch.dtype) -> dict[str, object]:
    words = triton.cdiv(nodes, 64)
    return {
        "NUM_CANDIDATES": count,
        "NUM_NODES": nodes,
        "MAX_DEPTH": depth + 1,
        "NUM_WORDS": words,
        "KEY": _KEYS[dtype],
        "BLOCK": max(32, triton.next_power_of_2(count)),
        "BLOCK_NODES": max(32, triton.next_power_of_2(nodes)),
        "BLOCK_WORDS": triton.next_power_of_2(words),
    }


def _levels(case: Case, device: torch.device, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities, best first, and ids of each level; multiples of 1/64, so that sums are exact and tie."""
    random = torch.Generator(device=device).manual_seed(seed)
    batch, k = case["batch"], case["top_k"]
    values, ids = [], []
    for level in range(case["depth"] + 1):
        shape = (batch, 1 if level == 0 else k, k)
        steps = torch.randint(1, 257, shape, generator=random, device=device)
        values.append((-steps.sort(dim=-1).values / 64).to(case.dtype))
        ids.append(torch.randint(0, 1 << 31, shape, generator=random, device=device))
    return values, ids


def _expand_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    values, ids = _levels(case, device, seed)
    words = triton.cdiv(case["top_k"] * (case["depth"] + 1) + 1, 64)
    batch, k = case["batch"], case["top_k"]
    dtype = case.dtype
    return {
        "values": values,
        "ids": ids,
        "root": Frontier.root(batch, words, device=device, dtype=dtype, uncommitted=True),
        "candidates": Candidates.empty(batch, k, case["depth"], device=device, dtype=dtype),
        "out": [Frontier.empty(batch, k, words, device=device, dtype=dtype) for _ in values],
    }


def _expand_run(inputs: Inputs) -> Outputs:
    """All levels: D + 1 launches."""
    frontier, k = inputs["root"], inputs["candidates"].top_k
    for level, (values, ids) in enumerate(zip(inputs["values"], inputs["ids"], strict=True)):
        out = inputs["out"][level]
        frontier = expand(values, ids, frontier, inputs["candidates"], level=level, cell=1 + level * k, out=out)
    found = {f"candidate_{name}": getattr(inputs["candidates"], name) for name in ("scores", "tokens", "parents")}
    return found | {name: getattr(frontier, name) for name in ("scores", "tokens", "rows", "candidates", "mask")}


def _expand_reference(inputs: Inputs) -> Outputs:
    root, k = inputs["root"], inputs["candidates"].top_k
    frontier = {"scores": root.scores, "candidates": root.candidates, "mask": root.mask}
    levels = []
    for level, (values, ids) in enumerate(zip(inputs["values"], inputs["ids"], strict=True)):
        start = inputs["candidates"].level_start(level)
        above = (frontier["scores"], frontier["candidates"], frontier["mask"])
        recorded, frontier = expand_reference(values, ids, *above, start, 1 + level * k)
        levels.append(recorded)
    found = {f"candidate_{name}": torch.cat([level[name] for level in levels], dim=1) for name in levels[0]}
    return found | frontier


def _rerank_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    candidates = Candidates.empty(case["batch"], case["top_k"], case["depth"], device=device, dtype=case.dtype)
    for name, tensor in grown(*_levels(case, device, seed)).items():
        getattr(candidates, name).copy_(tensor)
    random = torch.Generator(device=device).manual_seed(seed + 1)
    shape = (case["batch"],)
    roots = torch.randint(0, 1 << 31, shape, generator=random, device=device)
    context = torch.randint(0, 4096, shape, generator=random, device=device, dtype=torch.int32)
    out = Tree.empty(case["batch"], min(case["total"], candidates.scores.shape[1] + 1), device=device)
    return {"candidates": candidates, "total": case["total"], "roots": roots, "context_lens": context, "out": out}


def _rerank_run(inputs: Inputs) -> Outputs:
    return dict(vars(rerank(**inputs)))


def _rerank_reference(inputs: Inputs) -> Outputs:
    found = inputs["candidates"]
    above = (found.scores, found.tokens, found.parents, inputs["total"])
    return rerank_reference(*above, inputs["roots"], inputs["context_lens"])


def _expand_cost(case: Case) -> Cost:
    """Values and ids in, candidates out, every level; the frontiers are small beside them."""
    count = case["top_k"] + case["depth"] * case["top_k"] ** 2
    return Cost(float(case["batch"] * count), float(case["batch"] * count * (2 * case.dtype.itemsize + 20)))


def _rerank_cost(case: Case) -> Cost:
    """Every score read; of each kept node token and parent read, and a row of the tree written."""
    count = case["top_k"] + case["depth"] * case["top_k"] ** 2
    nodes = min(case["total"], count + 1)
    row = 12 + 8 + 4 * 4 + 8 * triton.cdiv(nodes, 64)
    bits = 8 * case.dtype.itemsize
    return Cost(float(case["batch"] * count * bits), float(case["batch"] * (count * case.dtype.itemsize + nodes * row)))


def _case(dtype: torch.dtype, batch: int, top_k: int, depth: int, total: int) -> Case:
    name = f"{str(dtype).removeprefix('torch.')} B{batch} k{top_k} D{depth} T{total}"
    return Case(name, dtype, {"batch": batch, "top_k": top_k, "depth": depth, "total": total})


def _small() -> list[Case]:
    sizes = ((2, 2, 2, 6), (3, 1, 4, 9), (1, 3, 0, 8), (2, 4, 2, 8), (1, 10, 2, 60), (1, 5, 4, 70), (2, 3, 2, 1))
    return [_case(dtype, *each) for dtype in _FLOATS for each in sizes]


def _bench() -> list[Case]:
    """EAGLE-3's defaults (60 nodes, depth 7, top 10), a chain, and a small tree."""
    shapes = ((10, 7, 60), (1, 7, 8), (4, 4, 16))
    return [_case(torch.float32, batch, *shape) for shape in shapes for batch in (1, 32)]


def _expand_compilations() -> list[Compilation]:
    integers = dict.fromkeys(("frontier_candidates", "candidate_parents", "next_rows", "next_candidates"), "*i32")
    integers |= dict.fromkeys(("ids", "frontier_mask", "candidate_tokens", "next_tokens", "next_mask"), "*i64")
    found = []
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        for top_k, depth, level in ((10, 7, 0), (10, 7, 1), (4, 4, 1), (1, 7, 1)):
            width = top_k if level else 1
            words = triton.cdiv(top_k * (depth + 1) + 1, 64)
            floats = ("values", "frontier_scores", "candidate_scores", "next_scores")
            types = integers | dict.fromkeys(floats, f"*{name}")
            found.append(
                Compilation(
                    label=f"{name} k{top_k} D{depth} {'level' if level else 'root'}",
                    kernel=expand_kernel,
                    signature=types | {"offset": "i32", "cell": "i32"},
                    constants=_expand_constants(top_k + depth * top_k**2, width, top_k, words, dtype),
                    num_warps=_num_warps(width * top_k),
                    divisible=tuple(types),
                )
            )
    return found


def _rerank_compilations() -> list[Compilation]:
    types = {"tokens": "*i64", "parents": "*i32", "roots": "*i64", "context_lens": "*i32", "tree_tokens": "*i64"}
    types |= {"tree_parents": "*i32", "depths": "*i32", "mask": "*i64", "positions": "*i32", "kept_out": "*i32"}
    return [
        Compilation(
            label=f"{name} k{top_k} D{depth} T{total}",
            kernel=rerank_kernel,
            signature={"scores": f"*{name}"} | types,
            constants=_rerank_constants(top_k + depth * top_k**2, total, depth, dtype),
            num_warps=_num_warps(top_k + depth * top_k**2),
            divisible=("scores", *types),
        )
        for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64"))
        for top_k, depth, total in ((10, 7, 60), (10, 7, 128), (4, 4, 16), (1, 7, 8))
    ]


def _exact(_: Case) -> tuple[float, float]:
    return 0.0, 0.0


OPS = (
    Op(
        "expand",
        _small,
        _bench,
        _expand_inputs,
        _expand_run,
        _expand_reference,
        _expand_cost,
        _exact,
        _expand_compilations,
    ),
    Op(
        "rerank",
        _small,
        _bench,
        _rerank_inputs,
        _rerank_run,
        _rerank_reference,
        _rerank_cost,
        _exact,
        _rerank_compilations,
    ),
)
