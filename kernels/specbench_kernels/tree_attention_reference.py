"""tree_attention in float64, row by row from its definition; its cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from specbench_kernels.op import Case, Cost, Inputs

FP8 = torch.float8_e4m3fn


def visible_cells(
    *,
    context: int,
    seq_len: int,
    nodes: int,
    node: int,
    bits: list[int] | None,
    positions: list[int] | None,
    window: int,
) -> list[int]:
    """The cells that row `node` of a request sees.

    `bits`: the words of the row's mask (None: chain). `positions`: those of the request's rows, needed with a window.
    """
    seen = []
    for cell in range(seq_len):
        if bits is None:
            visible = cell < seq_len - nodes + node + 1
        else:
            bit = cell - context
            visible = bit < 0 or (bit < 64 * len(bits) and bits[bit // 64] >> bit % 64 & 1 == 1)
        if visible and window > 0:
            assert positions is not None
            row = cell - (seq_len - nodes)
            if cell < context or bits is None:
                position = cell
            elif row >= 0:
                position = positions[row]
            else:  # an uncommitted cell of an earlier pass: its depth is its rank among the row's ancestors
                position = context + sum(bits[j // 64] >> j % 64 & 1 for j in range(cell - context))
            visible = positions[node] - position < window
        if visible:
            seen.append(cell)
    return seen


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    table: torch.Tensor,
    granularity: int,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    scale: float,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    **_launch: Any,
) -> torch.Tensor:
    """The arguments of tree_attention (those of its launch are ignored); float64 [N, Hq, D], which starts as `out`."""
    group, page_size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    result = torch.zeros(q.shape, dtype=torch.float64, device=q.device) if out is None else out.double()
    starts = query_start.tolist()
    for b, (context, seq_len) in enumerate(zip(context_lens.tolist(), seq_lens.tolist(), strict=True)):
        first, nodes = starts[b], starts[b + 1] - starts[b]
        if nodes == 0:
            continue
        cell = torch.arange(seq_len, device=q.device)
        slot = table[b, cell // granularity].long() * granularity + cell % granularity
        k, v = (
            cache[slot // page_size, :, slot % page_size].to(torch.float64).repeat_interleave(group, 1) * factor
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        rows = slice(first, first + nodes)
        for node in range(nodes):
            seen = visible_cells(
                context=context,
                seq_len=seq_len,
                nodes=nodes,
                node=node,
                bits=None if mask is None else [int(word) % 2**64 for word in mask[first + node]],
                positions=None if positions is None else positions[rows].tolist(),
                window=window,
            )
            row = q[first + node].double()
            scores = scale * torch.einsum("hd,chd->hc", row, k[seen])
            result[first + node] = torch.einsum("hc,chd->hd", torch.softmax(scores, 1), v[seen]) if seen else 0.0
    return result


def tree_mask(parents: list[int], num_words: int, written: int = 0) -> list[list[int]]:
    """Mask words (int64 patterns) of the nodes from `written` on; `parents[0]` = -1 is the root's."""
    paths: list[int] = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else 0) | 1 << node)
    words = [[path >> 64 * word & (1 << 64) - 1 for word in range(num_words)] for path in paths[written:]]
    return [[word - 2**64 if word >= 2**63 else word for word in row] for row in words]


def depths(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def _lengths(case: Case) -> list[tuple[int, int, list[int]]]:
    """(context, nodes, parents) of each request: all alike, or under `ragged` each shorter than the one before."""
    batch, parts = case["batch"], []
    for b in range(batch):
        share = 1 - b / batch if case["ragged"] else 1
        nodes = max(int(case["nodes"] * share), 1)
        # A chain, or a tree whose node i hangs below node (i - 1) // 2.
        parents = [(i - 1) // 2 if case["tree"] and i else i - 1 for i in range(nodes)]
        parts.append((int(case["context"] * share), nodes, parents))
    return parts


def inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Random q, K and V; pages in random order; every cell that no request owns holds NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, kv_heads, head_dim, page_size = case["heads"], case["kv_heads"], case["head_dim"], case["page_size"]
    parts = _lengths(case)
    seq_lens = [context + nodes for context, nodes, _ in parts]
    per_request = -(-max(seq_lens) // page_size)
    num_pages = case["batch"] * per_request + 1
    pages = torch.randperm(num_pages, generator=generator, device=device)[1:].view(case["batch"], per_request)
    within = torch.arange(page_size, device=device)
    slots = (pages[:, :, None] * page_size + within).flatten(1)
    kv_dtype = FP8 if case["fp8"] else case.dtype
    scales = {"k_scale": 0.0625, "v_scale": 0.125} if case["fp8"] else {"k_scale": 1.0, "v_scale": 1.0}
    owned = torch.zeros(num_pages * page_size, dtype=torch.bool, device=device)
    for b, length in enumerate(seq_lens):
        owned[slots[b, :length]] = True
    unowned = ~owned.view(num_pages, 1, page_size, 1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def pool(factor: float) -> torch.Tensor:
        values = randn(num_pages, kv_heads, page_size, head_dim) / factor
        values = values.clamp(-448, 448) if case["fp8"] else values
        return values.masked_fill_(unowned, float("nan")).to(kv_dtype)

    counts = torch.tensor([0, *(nodes for _, nodes, _ in parts)])
    words = -(-max(nodes for _, nodes, _ in parts) // 64)
    masks = [row for _, _, parents in parts for row in tree_mask(parents, words)]
    positions = [context + depth for context, _, parents in parts for depth in depths(parents)]

    def int32(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    return {
        "q": randn(int(counts.sum()), heads, head_dim).to(case.dtype),
        "k_cache": pool(scales["k_scale"]),
        "v_cache": pool(scales["v_scale"]),
        "table": (slots if case["granularity"] == 1 else pages).to(torch.int32),
        "granularity": 1 if case["granularity"] == 1 else page_size,
        "context_lens": int32([context for context, _, _ in parts]),
        "seq_lens": int32(seq_lens),
        "query_start": int32(counts.cumsum(0)),
        "mask": torch.tensor(masks, device=device) if case["tree"] else None,
        "positions": int32(positions),
        "scale": head_dim**-0.5,
        "window": case["window"],
        "max_nodes": max(nodes for _, nodes, _ in parts),
        "max_seq_len": max(seq_lens),
        "num_splits": case["splits"] or None,
        **scales,
    }


def cost(case: Case) -> Cost:
    """4 D FLOPs a query head and visible key; K and V of every cell that some row sees, q and the output, once each."""
    keys = cells = rows = 0
    for context, nodes, parents in _lengths(case):
        levels = depths(parents)
        seen = [context + depth + 1 for depth in levels]
        if case["window"]:
            seen = [min(count, case["window"]) for count in seen]
        keys += sum(seen)
        # The root reaches back furthest; behind the context every node's own cell is read.
        cells += min(context, max(case["window"] - 1, 0)) + nodes if case["window"] else context + nodes
        rows += nodes
    width = case["head_dim"]
    kv_bytes = 1 if case["fp8"] else case.dtype.itemsize
    return Cost(
        flops=4.0 * case["heads"] * width * keys,
        bytes=2.0 * cells * case["kv_heads"] * width * kv_bytes
        + 2.0 * rows * case["heads"] * width * case.dtype.itemsize,
    )


def tolerance(case: Case) -> tuple[float, float]:
    """(relative, absolute): rounding of the weights and of the output; bf16 is truncated by the interpreter's store."""
    return {
        torch.float64: (1e-11, 1e-12),
        torch.float32: (2e-5, 2e-6),
        torch.float16: (4e-3, 1e-3),
        torch.bfloat16: (1.6e-2, 4e-3),
    }[case.dtype]


DEFAULTS = {
    "batch": 2,
    "context": 37,
    "nodes": 5,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
    "granularity": 16,
    "tree": 1,
    "window": 0,
    "splits": 0,
    "ragged": 1,
    "fp8": 0,
}


def _case(name: str, dtype: torch.dtype, **sizes: int) -> Case:
    return Case(f"{name} {str(dtype).removeprefix('torch.')}", dtype, DEFAULTS | sizes)


def small() -> list[Case]:
    """Every dtype, and each option once."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    return [
        *(_case("tree", dtype) for dtype in (torch.float64, fp32, fp16, bf16)),
        _case("chain", fp32, tree=0, head_dim=80, nodes=1),
        _case("tree, 3 splits", fp32, context=200, splits=3, page_size=32),
        _case("tree, slots, D 96", fp16, granularity=1, head_dim=96, heads=6),
        _case("tree, window", fp32, window=9, head_dim=24, page_size=4),
        _case("tree of 70, 2 words", bf16, nodes=70, batch=1, heads=6, head_dim=128, page_size=64),
        _case("chain, D 256", bf16, tree=0, head_dim=256, page_size=1),
        _case("tree, fp8 KV", bf16, fp8=1, head_dim=128),
        _case("tree, fp8 KV, slots", fp32, fp8=1, granularity=1),
    ]


def bench() -> list[Case]:
    """Llama-3.1-8B's attention (32 query heads on 8, D 128) and its neighbours."""
    fp16, bf16 = torch.float16, torch.bfloat16
    llama = {"batch": 32, "context": 4096, "nodes": 8, "heads": 32, "kv_heads": 8, "head_dim": 128, "ragged": 0}
    long = llama | {"batch": 1, "context": 32768}
    return [
        _case("batch 32, 4k, T 8", bf16, **llama),
        _case("batch 32, 4k, T 1", bf16, **llama | {"nodes": 1, "tree": 0}),
        _case("batch 32, 4k, chain of 8", bf16, **llama | {"tree": 0}),
        _case("batch 32, 4k, T 8, slots", bf16, **llama | {"granularity": 1}),
        _case("batch 32, 4k, T 8, page 64", bf16, **llama | {"page_size": 64, "granularity": 64}),
        _case("batch 32, 4k ragged, T 8", bf16, **llama | {"ragged": 1}),
        _case("batch 32, 4k, T 64", bf16, **llama | {"nodes": 64}),
        _case("batch 32, 4k, T 8, fp8 KV", bf16, **llama | {"fp8": 1}),
        _case("batch 32, 4k, T 8, window 1k", bf16, **llama | {"window": 1024}),
        _case("batch 32, 4k, T 8, D 64", bf16, **llama | {"head_dim": 64}),
        _case("batch 32, 4k, T 8", fp16, **llama),
        _case("batch 1, 32k, T 8", bf16, **long),
        _case("batch 1, 32k, T 1", bf16, **long | {"nodes": 1, "tree": 0}),
        _case("batch 1, 32k, T 8, D 64", bf16, **long | {"head_dim": 64}),
    ]
