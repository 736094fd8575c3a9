"""tree_attention: T query nodes a request over a paged KV cache under an ancestor bitmask; a chain is the special case.

Flash-decoding: the cells of a request are split among programs, a second kernel merges the splits; the query heads of a
KV head are packed with the nodes into one tile, so that K and V are read once.
"""

from __future__ import annotations

import math

import torch

from specbench_kernels import tree_attention_reference as cases
from specbench_kernels.checks import FLOATS, interpreted, require, require_device, require_tensor
from specbench_kernels.op import Inputs, Op, Outputs
from specbench_kernels.tree_attention_kernel import attention_kernel, merge_kernel
from specbench_kernels.tree_attention_launch import (
    KV_FP8,
    MERGE_BLOCK,
    cache_kind,
    compilations,
    constants,
    num_multiprocessors,
    plan,
    workspace_size,
)

NAME = "tree_attention"


def _check_tensors(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    granularity: int,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window: int,
) -> None:
    require_device(NAME, q.device)
    require_tensor(NAME, "q", q, (None, None, None), FLOATS, contiguous=False)
    rows, num_heads, head_dim = q.shape
    caches = (q.dtype,) if q.dtype == torch.float64 else (q.dtype, KV_FP8)
    require_tensor(NAME, "k_cache", k_cache, (None, None, None, head_dim), caches, q.device, contiguous=False)
    require_tensor(NAME, "v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), q.device, contiguous=False)
    num_kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    require(1 <= head_dim <= 256, NAME, f"head dim {head_dim} is not in 1 to 256")
    require(
        num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        NAME,
        f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads",
    )
    require(
        granularity in (1, page_size),
        NAME,
        f"granularity {granularity} is neither 1 (a table of slots) nor the page size {page_size} (a table of pages)",
    )
    integers = (torch.int32,)
    require_tensor(NAME, "table", table, (None, None), integers, q.device, contiguous=False)
    batch = table.shape[0]
    require_tensor(NAME, "context_lens", context_lens, (batch,), integers, q.device)
    require_tensor(NAME, "seq_lens", seq_lens, (batch,), integers, q.device)
    require_tensor(NAME, "query_start", query_start, (batch + 1,), integers, q.device)
    if mask is not None:
        require_tensor(NAME, "mask", mask, (rows, None), (torch.int64,), q.device)
        require(mask.shape[1] > 0, NAME, "mask has no words")
    require(window >= 0, NAME, f"window {window} is negative (0 = none)")
    require(window == 0 or positions is not None, NAME, "a sliding window needs positions")
    if positions is not None:
        require_tensor(NAME, "positions", positions, (rows,), integers, q.device)


def _check_values(
    rows: int,
    table_cells: int,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    mask_words: int,
    max_nodes: int,
    max_seq_len: int,
) -> None:
    """Checks that read the tensors; only on the CPU, where that stops nobody."""
    starts, contexts, seqs = query_start.tolist(), context_lens.tolist(), seq_lens.tolist()
    require(starts[0] == 0, NAME, f"query_start begins with {starts[0]}, expected 0")
    require(starts[-1] <= rows, NAME, f"query_start ends with {starts[-1]}, but q has {rows} rows")
    for b, (context, seq) in enumerate(zip(contexts, seqs, strict=True)):
        nodes = starts[b + 1] - starts[b]
        require(0 <= nodes <= max_nodes, NAME, f"request {b} has {nodes} nodes, max_nodes is {max_nodes}")
        if nodes == 0:
            continue
        require(seq <= max_seq_len, NAME, f"request {b} has seq_len {seq}, max_seq_len is {max_seq_len}")
        require(seq <= table_cells, NAME, f"request {b} has seq_len {seq}, its table row holds {table_cells} cells")
        require(
            context >= 0 and context + nodes <= seq,
            NAME,
            f"request {b} has seq_len {seq}, less than its context {context} and {nodes} nodes",
        )
        require(
            mask_words == 0 or seq - context <= 64 * mask_words,
            NAME,
            f"request {b} has {seq - context} uncommitted cells, the mask {64 * mask_words} bits",
        )


def tree_attention(
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
    max_nodes: int,
    max_seq_len: int,
    num_splits: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k) v over the cells that each row sees; returns `out` [N, Hq, D] in the dtype of q.

    q [N, Hq, D] (fp64, fp32, fp16, bf16); k_cache, v_cache [pages, Hkv, P, D] in the dtype of q or float8_e4m3fn, whose
    codes stand for code x k_scale, v_scale; any strides, the last dimension 1. `table` int32 [B, M] holds pages
    (granularity P) or physical slots (granularity 1). `context_lens` int32 [B] committed cells, `seq_lens` int32 [B]
    those and all uncommitted ones, `query_start` int32 [B+1]. Rows query_start[b] .. query_start[b+1] (half-open) of
    request b are written at its last cells, and their K and V are in the cache already.

    `mask` int64 [N, W]: a row sees the committed cells and cell context_len + j where bit j is set. None: a chain, row
    i of T sees cells < seq_len - T + i + 1. `window` > 0: only keys with position difference < window, a committed
    cell's position being its index, that of a row of this pass its `positions` int32 [N], and that of an uncommitted
    cell of an earlier pass context_len + its depth, counted from the bits of the row (which must be its root path).

    `max_nodes` and `max_seq_len` bound every request. A request without rows writes nothing, pad rows behind
    query_start[B] keep what `out` holds, and a row that sees nothing gets zeros. Nothing is allocated if `out` and,
    where plan(...).num_splits > 1, `workspace` (workspace_size(...) elements, fp32, fp64 with q) are given.
    ValueError for wrong shapes, dtypes, strides and devices, and on the CPU also for values that contradict each other.
    """
    _check_tensors(
        q, k_cache, v_cache, table, granularity, context_lens, seq_lens, query_start, mask, positions, window
    )
    rows, num_heads, head_dim = q.shape
    batch, num_kv_heads, page_size = table.shape[0], k_cache.shape[1], k_cache.shape[2]
    require(max_nodes > 0 and max_seq_len > 0, NAME, f"max_nodes {max_nodes}, max_seq_len {max_seq_len}: below 1")
    require(num_splits is None or num_splits > 0, NAME, f"num_splits {num_splits} is below 1")
    mask_words = 0 if mask is None else mask.shape[1]
    if q.device.type == "cpu":
        cells = table.shape[1] * granularity
        _check_values(rows, cells, context_lens, seq_lens, query_start, mask_words, max_nodes, max_seq_len)
    if out is None:
        out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    require_tensor(NAME, "out", out, (rows, num_heads, head_dim), (q.dtype,), q.device, contiguous=False)
    if rows == 0 or batch == 0:
        return out
    group = num_heads // num_kv_heads
    cache = cache_kind(q.device, k_cache.dtype)
    chosen = plan(
        q.dtype,
        head_dim,
        group,
        batch=batch,
        num_kv_heads=num_kv_heads,
        max_nodes=max_nodes,
        max_seq_len=max_seq_len,
        num_sms=num_multiprocessors(q.device),
        cache=cache,
        window=window,
        num_splits=num_splits,
    )
    partial = lse = None
    if chosen.num_splits > 1:
        partial, lse = _parts(q, chosen.num_splits, workspace)
    if cache == "bits":
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    arguments = constants(
        chosen,
        q.dtype,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        granularity=granularity,
        mask_words=mask_words,
        window=window > 0,
        cache=cache,
        in_interpreter=interpreted(),
    )
    attention_kernel[(chosen.num_tiles * chosen.num_splits, num_kv_heads, batch)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
        table,
        context_lens,
        seq_lens,
        query_start,
        mask,
        positions if window else None,
        scale * k_scale * math.log2(math.e),
        v_scale,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        table.stride(0),
        window,
        chosen.num_splits,
        **arguments,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if chosen.num_splits > 1:
        merge_kernel[(rows, num_heads)](
            out,
            partial,
            lse,
            query_start,
            batch,
            *out.stride()[:2],
            chosen.num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=arguments["BLOCK_D"],
            BLOCK_S=MERGE_BLOCK,
            ACC=arguments["ACC"],
            num_warps=4,
        )
    return out


def _parts(q: torch.Tensor, num_splits: int, workspace: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace (allocated if None) as partial outputs and log-sum-exps."""
    rows, num_heads, head_dim = q.shape
    size = workspace_size(rows, num_heads, head_dim, num_splits)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if workspace is None:
        workspace = torch.empty(size, dtype=dtype, device=q.device)
    require_tensor(NAME, "workspace", workspace, (None,), (dtype,), q.device)
    require(len(workspace) >= size, NAME, f"workspace has {len(workspace)} elements, needs {size}")
    outputs = size // (head_dim + 1) * head_dim
    return workspace[:outputs], workspace[outputs:size]


def _run(given: Inputs) -> Outputs:
    return {"out": tree_attention(**given)}


def _reference(given: Inputs) -> Outputs:
    return {"out": cases.attend(**given)}


OP = Op(
    name=NAME,
    small=cases.small,
    bench=cases.bench,
    inputs=cases.inputs,
    run=_run,
    reference=_reference,
    cost=cases.cost,
    tolerance=cases.tolerance,
    compilations=compilations,
)
