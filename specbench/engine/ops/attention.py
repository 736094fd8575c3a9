"""Operations of the CPU program over the paged KV cache: RoPE and the write of K and V, and attention."""

from __future__ import annotations

import math

from numba import carray

from specbench.engine.ops.kernels import exp_real, fast, normalise, ordered, plain, tile, tile_add
from specbench.engine.ops.layout import (
    BLOCK_TABLE,
    BLOCK_TABLE_STRIDE,
    CONTEXT_LENS,
    NUM_REQUESTS,
    POSITIONS,
    QUERY_START,
    QUERY_TILE,
    ROW_REQUEST,
    SCRATCH,
    SCRATCH_STRIDE,
    SLOTS,
)
from specbench.engine.ops.vector import (
    MAX_TILE,
    PANEL,
    as_real,
    double_bits,
    fetch_add,
    int_pointer,
    real_pointer,
    store_stored,
)


@plain
def rotate(tag, x, cos, sin, half, scale):  # type: ignore[no-untyped-def]
    """RoPE on one head, half-split pairs (i, i + D/2), times `scale`."""
    for j in range(half):
        a = x[j]
        b = x[half + j]
        x[j] = (a * cos[j] - b * sin[j]) * scale
        x[half + j] = (b * cos[j] + a * sin[j]) * scale


@plain
def rope_store(tag, size, real, op, rows, state, counter):  # type: ignore[no-untyped-def]
    """Per row: q and k normed (Qwen3) and rotated, q scaled by 1/sqrt(D), k and v written into the row's page."""
    qkv_at, ld, num_q, num_kv, dim = op[1], op[2], op[3], op[4], op[5]
    cos_at, sin_at, k_pool, v_pool, q_norm, k_norm = op[6], op[7], op[8], op[9], op[10], op[11]
    eps = double_bits(op[12])
    half = dim // 2
    v_dim = (dim + PANEL - 1) // PANEL * PANEL
    scale = as_real(tag, 1.0 / math.sqrt(dim))
    one = as_real(tag, 1.0)
    positions = carray(int_pointer(state[POSITIONS]), rows)
    row_request = carray(int_pointer(state[ROW_REQUEST]), rows)
    query_start = carray(int_pointer(state[QUERY_START]), state[NUM_REQUESTS] + 1)
    context_lens = carray(int_pointer(state[CONTEXT_LENS]), state[NUM_REQUESTS])
    slots = carray(int_pointer(state[SLOTS]), state[NUM_REQUESTS])
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        request = row_request[row]
        index = context_lens[request] + row - query_start[request]
        entry = state[BLOCK_TABLE] + (slots[request] * state[BLOCK_TABLE_STRIDE] + index // PANEL) * 8
        page = carray(int_pointer(entry), 1)[0]
        within = index % PANEL
        cos = carray(real_pointer(tag, cos_at + positions[row] * half * real), half)
        sin = carray(real_pointer(tag, sin_at + positions[row] * half * real), half)
        for head in range(num_q + num_kv):
            x = carray(real_pointer(tag, qkv_at + (row * ld + head * dim) * real), dim)
            norm = q_norm if head < num_q else k_norm
            if norm != 0:
                normalise(tag, x, carray(real_pointer(tag, norm), dim), x, dim, eps)
            rotate(tag, x, cos, sin, half, scale if head < num_q else one)
            if head >= num_q:
                at = k_pool + ((page * num_kv + head - num_q) * dim * PANEL + within) * size
                for j in range(dim):
                    store_stored(tag, at + j * PANEL * size, x[j])
        for head in range(num_kv):
            x = carray(real_pointer(tag, qkv_at + (row * ld + (num_q + num_kv + head) * dim) * real), dim)
            at = v_pool + ((page * num_kv + head) * PANEL + within) * v_dim * size
            for j in range(dim):
                store_stored(tag, at + j * size, x[j])


@ordered
def largest(row, count):  # type: ignore[no-untyped-def]
    """Largest of row[:count]. A NaN may be passed over here; it reaches the output through V all the same."""
    top = row[0]
    for j in range(count):
        top = max(top, row[j])
    return top


@fast
def total(row, count):  # type: ignore[no-untyped-def]
    total = row[0]
    for j in range(1, count):
        total += row[j]
    return total


@plain
def softmax(row, count):  # type: ignore[no-untyped-def]
    """Softmax of row[:count] in place. Loops start at 0, where no index can be negative: so they vectorise."""
    top = largest(row, count)
    for j in range(count):
        row[j] = exp_real(row[j] - top)
    scale = row.dtype.type(1.0) / total(row, count)
    for j in range(count):
        row[j] *= scale


@plain
def attention(tag, size, real, op, state, thread, counter):  # type: ignore[no-untyped-def]
    """Queries of one request and KV head against its pages: each query node sees its past and itself.

    A page holds K as [D, 16] and V as [16, D]: both are panels of the micro-kernel, so K and V are read once for all
    query nodes and all heads of the group.
    """
    qkv_at, ld, out_at, ldo, num_q, num_kv, dim = op[1], op[2], op[3], op[4], op[5], op[6], op[7]
    k_pool, v_pool, window = op[8], op[9], op[10]
    group = num_q // num_kv
    v_dim = (dim + PANEL - 1) // PANEL * PANEL
    requests = state[NUM_REQUESTS]
    query_start = carray(int_pointer(state[QUERY_START]), requests + 1)
    context_lens = carray(int_pointer(state[CONTEXT_LENS]), requests)
    slots = carray(int_pointer(state[SLOTS]), requests)
    scratch = state[SCRATCH] + thread * state[SCRATCH_STRIDE]
    q_at = scratch
    o_at = q_at + QUERY_TILE * group * dim * real
    s_at = o_at + QUERY_TILE * group * v_dim * real
    zero = as_real(tag, 0.0)
    chunk = fetch_add(counter, 1)
    seen = 0
    for request in range(requests):
        nodes = query_start[request + 1] - query_start[request]
        tiles = (nodes + QUERY_TILE - 1) // QUERY_TILE
        while chunk < seen + tiles * num_kv:
            head = (chunk - seen) % num_kv
            start = (chunk - seen) // num_kv * QUERY_TILE
            count = min(QUERY_TILE, nodes - start)
            rows = count * group
            context = context_lens[request]
            keys = context + start + count
            first_page = 0
            if window > 0:
                first_page = max(0, context + start + 1 - window) // PANEL
            pages = (keys + PANEL - 1) // PANEL
            lds = (pages - first_page) * PANEL
            table = carray(int_pointer(state[BLOCK_TABLE] + slots[request] * state[BLOCK_TABLE_STRIDE] * 8), pages)
            q = carray(real_pointer(tag, q_at), rows * dim)
            o = carray(real_pointer(tag, o_at), rows * v_dim)
            for node in range(count):
                row = query_start[request] + start + node
                source = carray(real_pointer(tag, qkv_at + (row * ld + head * group * dim) * real), group * dim)
                for j in range(group * dim):
                    q[node * group * dim + j] = source[j]
            for j in range(rows * v_dim):
                o[j] = zero
            page_bytes = dim * PANEL * size
            for p in range(first_page, pages):
                at = k_pool + (table[p] * num_kv + head) * page_bytes
                ahead = k_pool + (table[min(p + 1, pages - 1)] * num_kv + head) * page_bytes
                y = s_at + (p - first_page) * PANEL * real
                m = 0
                while m < rows:
                    take = min(MAX_TILE, rows - m)
                    tile(
                        tag,
                        take,
                        q_at + m * dim * real,
                        dim,
                        at,
                        PANEL * size,
                        y + m * lds * real,
                        lds,
                        dim,
                        ahead,
                        PANEL * size,
                    )
                    m += take
            offset = first_page * PANEL
            for m in range(rows):
                position = context + start + m // group
                first = 0
                if window > 0:
                    first = max(0, position + 1 - window) - offset
                last = position + 1 - offset
                scores = carray(real_pointer(tag, s_at + m * lds * real), lds)
                softmax(carray(real_pointer(tag, s_at + (m * lds + first) * real), last - first), last - first)
                for j in range(first):
                    scores[j] = zero
                for j in range(last, lds):
                    scores[j] = zero
            page_bytes = v_dim * PANEL * size
            for p in range(first_page, pages):
                at = v_pool + (table[p] * num_kv + head) * page_bytes
                ahead = v_pool + (table[min(p + 1, pages - 1)] * num_kv + head) * page_bytes
                x = s_at + (p - first_page) * PANEL * real
                depth = min(PANEL, keys - p * PANEL)
                for c in range(v_dim // PANEL):
                    m = 0
                    while m < rows:
                        take = min(MAX_TILE, rows - m)
                        tile_add(
                            tag,
                            take,
                            x + m * lds * real,
                            lds,
                            at + c * PANEL * size,
                            v_dim * size,
                            o_at + (m * v_dim + c * PANEL) * real,
                            v_dim,
                            depth,
                            ahead + c * PANEL * size,
                            v_dim * size,
                        )
                        m += take
            for m in range(rows):
                row = query_start[request] + start + m // group
                at_out = out_at + (row * ldo + (head * group + m % group) * dim) * real
                target = carray(real_pointer(tag, at_out), dim)
                for j in range(dim):
                    target[j] = o[m * v_dim + j]
            chunk = fetch_add(counter, 1)
        seen += tiles * num_kv
