"""The two Triton kernels of tree_attention: attention of one split of the cells, and the merge of the splits.

A program owns one query tile (rows = nodes x query heads of one KV head) and one contiguous range of cells, so K and V
of a cell are loaded once for all nodes and the whole group. Softmax runs in exp2 with a running maximum; a row that has
seen nothing keeps maximum -inf and sum 0 and never yields NaN. Shapes, launch and strides: tree_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _locate(table_row, cell, inside, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, GRANULARITY: tl.constexpr):
    """Page (int64) and offset in it of each cell; cells not `inside` (where MASKED) read no table entry."""
    entry = cell if GRANULARITY == 1 else cell // GRANULARITY
    if MASKED:
        found = tl.load(table_row + entry, mask=inside, other=0)
    else:
        found = tl.load(table_row + entry)
    if GRANULARITY == 1:
        page = found // PAGE_SIZE
        offset = found % PAGE_SIZE
    else:
        page = found
        offset = cell % PAGE_SIZE
    return page.to(tl.int64), offset


@triton.jit
def _load_tile(
    base,
    page,
    offset,
    inside,
    stride_page,
    stride_token,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8_BITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """[cells, BLOCK_D] of K or V in the dtype of the dot; zero beyond HEAD_DIM and, where MASKED, outside."""
    dim = tl.arange(0, BLOCK_D)
    at = base + (page * stride_page + offset * stride_token)[:, None] + dim[None, :]
    if MASKED and HEAD_DIM < BLOCK_D:
        tile = tl.load(at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=inside[:, None], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    if FP8_BITS:
        # e4m3 shifted into fp16: same fraction, exponent bias 7 read as 15, hence the factor 2^8; 0x7f is NaN.
        code = tile.to(tl.int16)
        magnitude = tl.where((code & 0x7F) == 0x7F, 0x7E00, (code & 0x7F) << 7)
        tile = (magnitude | ((code & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
    return tile.to(DOT)


@triton.jit
def _update(acc, maximum, total, scores, v, DOT: tl.constexpr):
    """One step of the online softmax (base 2). Rows whose scores so far are all -inf stay at acc 0, total 0."""
    new = tl.maximum(maximum, tl.max(scores, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - safe[:, None])
    decay = tl.exp2(maximum - safe)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DOT), v, acc * decay[:, None], input_precision="ieee", out_dtype=acc.dtype)
    return acc, new, total


@triton.jit
def _count_bits(word):
    """Number of set bits of each int64."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8
    word += word >> 16
    word += word >> 32
    return (word & 0x7F).to(tl.int32)


@triton.jit
def _visible_in_tree(mask_row, row_valid, node_cell, MASK_WORDS: tl.constexpr):
    """[rows, cells]: whether bit `node_cell` (cell - context_len, may be negative) of the row's mask is set."""
    visible = (node_cell < 0)[None, :] & row_valid[:, None]
    for word in tl.static_range(MASK_WORDS):
        bits = tl.load(mask_row + word, mask=row_valid, other=0)
        bit = (bits[:, None] >> (node_cell & 63).to(tl.int64)[None, :]) & 1
        visible |= (node_cell >> 6 == word)[None, :] & (bit != 0)
    return visible


@triton.jit
def _depth_in_path(mask_row, row_valid, node_cell, MASK_WORDS: tl.constexpr):
    """[rows, cells]: how many of the row's bits lie below bit `node_cell`: its depth, if it is an ancestor."""
    depth = (row_valid[:, None] & (node_cell < 0)[None, :]).to(tl.int32) * 0
    for word in tl.static_range(MASK_WORDS):
        bits = tl.load(mask_row + word, mask=row_valid, other=0)
        local = tl.minimum(tl.maximum(node_cell - 64 * word, 0), 64)
        # Two shifts: one of 64 would be undefined.
        below = ~((tl.full(local.shape, -1, tl.int64) << (local // 2)) << (local - local // 2))
        depth += _count_bits(bits[:, None] & below[None, :])
    return depth


@triton.jit(do_not_specialize=["stride_tb", "window", "num_splits"])
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    context_lens_ptr,
    seq_lens_ptr,
    query_start_ptr,
    mask_ptr,
    positions_ptr,
    qk_scale: tl.float64,
    v_scale: tl.float64,
    stride_qn,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_vp,
    stride_vh,
    stride_vt,
    stride_on,
    stride_oh,
    stride_tb,
    window,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GRANULARITY: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8_BITS: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (query tiles x splits, KV heads, requests). MASK_WORDS 0 = chain. qk_scale holds log2(e)."""
    tiles = tl.num_programs(0) // num_splits
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    kv_head = tl.program_id(1)
    request = tl.program_id(2)

    first_row = tl.load(query_start_ptr + request)
    num_nodes = tl.load(query_start_ptr + request + 1) - first_row
    if tile * BLOCK_M >= num_nodes * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_cell = seq_len - num_nodes  # node i of this pass is written at cell first_cell + i

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    row_valid = row < num_nodes * GROUP
    token = (first_row + node).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    row_dim = row_valid[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = q_ptr + token[:, None] * stride_qn + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(q_at, mask=row_dim, other=0).to(DOT)

    # Cells [low, high) can be seen by some row of the tile; those below `plain_end` by every row, but for the window.
    low = 0
    position = node
    if WINDOW:
        position = tl.load(positions_ptr + token, mask=row_valid, other=2147483647)
        low = tl.maximum(tl.min(position) - window + 1, 0)
    if MASK_WORDS == 0:
        high = first_cell + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_nodes)
        plain_end = first_cell + (tile * BLOCK_M) // GROUP + 1
        context_len = seq_len
    else:
        context_len = tl.load(context_lens_ptr + request)
        high = seq_len
        plain_end = context_len
        low = tl.minimum(low, context_len)
    share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), num_splits) * BLOCK_N
    low += split * share
    high = tl.minimum(low + share, high)
    plain_end = low + tl.maximum(tl.minimum(plain_end, high) - low, 0) // BLOCK_N * BLOCK_N

    scale = tl.full([], qk_scale, ACC)
    maximum = tl.full([BLOCK_M], float("-inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    table_row = table_ptr + request.to(tl.int64) * stride_tb
    k_base = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + kv_head.to(tl.int64) * stride_vh

    for start in range(low, plain_end, BLOCK_N):
        cell = start + tl.arange(0, BLOCK_N)
        page, offset = _locate(table_row, cell, None, False, PAGE_SIZE, GRANULARITY)
        k = _load_tile(k_base, page, offset, None, stride_kp, stride_kt, False, HEAD_DIM, BLOCK_D, FP8_BITS, DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * scale
        if WINDOW:
            scores = tl.where(position[:, None] - cell[None, :] < window, scores, float("-inf"))
        v = _load_tile(v_base, page, offset, None, stride_vp, stride_vt, False, HEAD_DIM, BLOCK_D, FP8_BITS, DOT)
        acc, maximum, total = _update(acc, maximum, total, scores, v, DOT)

    mask_row = mask_ptr
    if MASK_WORDS > 0:
        mask_row = mask_ptr + token * MASK_WORDS
    for start in range(plain_end, high, BLOCK_N):
        cell = start + tl.arange(0, BLOCK_N)
        inside = cell < high
        page, offset = _locate(table_row, cell, inside, True, PAGE_SIZE, GRANULARITY)
        k = _load_tile(k_base, page, offset, inside, stride_kp, stride_kt, True, HEAD_DIM, BLOCK_D, FP8_BITS, DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * scale
        if MASK_WORDS == 0:
            visible = inside[None, :] & (cell[None, :] <= first_cell + node[:, None])
            if WINDOW:
                visible &= position[:, None] - cell[None, :] < window
        else:
            node_cell = cell - context_len
            visible = inside[None, :] & _visible_in_tree(mask_row, row_valid, node_cell, MASK_WORDS)
            if WINDOW:
                in_pass = inside & (cell >= first_cell)
                own = tl.load(positions_ptr + first_row + cell - first_cell, mask=in_pass, other=0)
                earlier = context_len + _depth_in_path(mask_row, row_valid, node_cell, MASK_WORDS)
                key_position = tl.where((node_cell < 0)[None, :], cell[None, :], earlier)
                key_position = tl.where(in_pass[None, :], own[None, :], key_position)
                visible &= position[:, None] - key_position < window
        scores = tl.where(visible, scores, float("-inf"))
        v = _load_tile(v_base, page, offset, inside, stride_vp, stride_vt, True, HEAD_DIM, BLOCK_D, FP8_BITS, DOT)
        acc, maximum, total = _update(acc, maximum, total, scores, v, DOT)

    seen = total != 0.0
    divisor = tl.where(seen, total, 1.0)
    result = acc * (tl.full([], v_scale, ACC) / divisor)[:, None]
    if SPLIT:
        part = (token * (tl.num_programs(1) * GROUP) + head) * num_splits + split
        tl.store(lse_ptr + part, maximum + tl.log2(divisor), mask=row_valid)
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], result, mask=row_dim & seen[:, None])
    else:
        out_at = out_ptr + token[:, None] * stride_on + head[:, None] * stride_oh + dim[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=row_dim)


@triton.jit(do_not_specialize=["batch", "num_splits"])
def merge_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_start_ptr,
    batch,
    stride_on,
    stride_oh,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ACC: tl.constexpr,
):
    """Grid (rows, query heads). A split that saw nothing has lse -inf and an unwritten partial; pad rows are left."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(query_start_ptr + batch):
        return
    dim = tl.arange(0, BLOCK_D)
    first = (token * tl.num_programs(1) + head) * num_splits
    maximum = tl.full([], float("-inf"), ACC)
    total = tl.full([], 0.0, ACC)
    acc = tl.zeros([BLOCK_D], ACC)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + first + split, mask=split < num_splits, other=float("-inf"))
        written = lse != float("-inf")  # true for NaN: it must come through
        at = partial_ptr + (first + split)[:, None] * HEAD_DIM + dim[None, :]
        part = tl.load(at, mask=written[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        new = tl.maximum(maximum, tl.max(lse, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(lse - safe)
        decay = tl.exp2(maximum - safe)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        maximum = new
    result = acc / tl.where(total != 0.0, total, 1.0)
    at = out_ptr + token * stride_on + head * stride_oh + dim
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
