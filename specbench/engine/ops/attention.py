"""Operations of the CPU program over the paged KV cache: RoPE and the write of K and V, and attention."""

from __future__ import annotations

import math

from numba import carray

from specbench.engine.ops.kernels import exp_real, fast, normalise, ordered, plain
from specbench.engine.ops.layout import (
    BLOCK_TABLE,
    BLOCK_TABLE_STRIDE,
    CONTEXT_LENS,
    MASK_WORDS,
    NUM_REQUESTS,
    NUM_ROWS,
    POSITIONS,
    QUERY_START,
    QUERY_TILE,
    ROW_REQUEST,
    SCRATCH,
    SCRATCH_STRIDE,
    SLOT_INDEX,
    SLOT_INDEX_STRIDE,
    SLOTS,
    TREE_MASK,
    WRITTEN,
)
from specbench.engine.ops.vector import (
    MAX_TILE,
    PANEL,
    as_real,
    double_bits,
    fetch_add,
    int_pointer,
    panel_kernel,
    real_pointer,
    store_stored,
    stored_pointer,
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
    """Per row: q and k normed (Qwen3) and rotated, q scaled by 1/sqrt(D), k and v written into the row's cell."""
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
    written = carray(int_pointer(state[WRITTEN]), state[NUM_REQUESTS])
    slots = carray(int_pointer(state[SLOTS]), state[NUM_REQUESTS])
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        request = row_request[row]
        cell = context_lens[request] + written[request] + row - query_start[request]
        if state[SLOT_INDEX] != 0:
            entry = state[SLOT_INDEX] + (slots[request] * state[SLOT_INDEX_STRIDE] + cell) * 8
            place = carray(int_pointer(entry), 1)[0]
        else:
            entry = state[BLOCK_TABLE] + (slots[request] * state[BLOCK_TABLE_STRIDE] + cell // PANEL) * 8
            place = carray(int_pointer(entry), 1)[0] * PANEL + cell % PANEL
        page = place // PANEL
        within = place % PANEL
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
def fill_hidden(row, words, count, value):  # type: ignore[no-untyped-def]
    """row[j] = value for each j < count that the mask's bit j hides."""
    for j in range(count):
        if (words[j >> 6] >> (j & 63)) & 1 == 0:
            row[j] = value


@plain
def first_seen(words, count, before, window):  # type: ignore[no-untyped-def]
    """The first j < count that neither the mask nor the window hides: the query's own cell is never hidden.

    `before` is the query's position less the context length. The visible cells are a path from the root, so the r-th
    of them stands r positions behind the context: a window hides the first of them, and those alone.
    """
    rank = 0
    for j in range(count):
        seen = (words[j >> 6] >> (j & 63)) & 1
        if seen == 1 and before - rank < window:
            return j
        rank += seen
    return count - 1


@plain
def softmax_masked(tag, row, count, tail, words, hideable):  # type: ignore[no-untyped-def]
    """Softmax of row[:count] in place; weight zero for what the mask hides of `tail`, the row's last `hideable` scores
    and what a window cut off before them. With nothing hidden these are the operations of `softmax`, bit for bit.
    """
    fill_hidden(tail, words, hideable, as_real(tag, -math.inf))
    top = largest(row, count)
    for j in range(count):
        row[j] = exp_real(row[j] - top)
    fill_hidden(tail, words, hideable, as_real(tag, 0.0))
    scale = row.dtype.type(1.0) / total(row, count)
    for j in range(count):
        row[j] *= scale


@plain
def page_of(places, count):  # type: ignore[no-untyped-def]
    """The page whose first `count` places these are, in order; -1 if they are no such run."""
    start = places[0]
    if start % PANEL != 0:
        return -1
    for j in range(1, count):
        if places[j] != start + j:
            return -1
    return start // PANEL


@plain
def key_panel(tag, size, pool, places, count, num_kv, head, dim, panel_at):  # type: ignore[no-untyped-def]
    """Address of the K panel [D, 16] of up to 16 cells: their page itself, or a copy gathered at `panel_at`.

    Columns from `count` on hold anything.
    """
    page = page_of(places, count)
    if page >= 0:
        return pool + (page * num_kv + head) * dim * PANEL * size
    panel = carray(stored_pointer(tag, panel_at), dim * PANEL)
    for j in range(count):
        at = pool + (places[j] // PANEL * num_kv + head) * dim * PANEL * size
        source = carray(stored_pointer(tag, at), dim * PANEL)
        within = places[j] % PANEL
        for i in range(dim):
            panel[i * PANEL + j] = source[i * PANEL + within]
    return panel_at


@plain
def value_panel(tag, size, pool, places, count, num_kv, head, dim, v_dim, panel_at):  # type: ignore[no-untyped-def]
    """Address of the V panel [16, ceil16(D)] of up to 16 cells; rows from `count` on and padding hold anything."""
    page = page_of(places, count)
    if page >= 0:
        return pool + (page * num_kv + head) * PANEL * v_dim * size
    panel = carray(stored_pointer(tag, panel_at), PANEL * v_dim)
    for j in range(count):
        at = pool + ((places[j] // PANEL * num_kv + head) * PANEL + places[j] % PANEL) * v_dim * size
        source = carray(stored_pointer(tag, at), dim)
        for i in range(dim):
            panel[j * v_dim + i] = source[i]
    return panel_at


@plain
def attention(tag, size, real, op, state, thread, counter):  # type: ignore[no-untyped-def]
    """Queries of one request and KV head against its cells: each query node sees its past and itself; in a tree, of
    the uncommitted cells its ancestors only.

    A page holds K as [D, 16] and V as [16, D]: both are panels of the micro-kernel, so K and V are read once for all
    query nodes and all heads of the group. Where cells don't stand in page order, panels that do are used as they are
    and the others are gathered in the order of the cells: the same operations on the same values, so the same bits.
    """
    qkv_at, ld, out_at, ldo, num_q, num_kv, dim = op[1], op[2], op[3], op[4], op[5], op[6], op[7]
    k_pool, v_pool, window = op[8], op[9], op[10]
    group = num_q // num_kv
    v_dim = (dim + PANEL - 1) // PANEL * PANEL
    requests = state[NUM_REQUESTS]
    query_start = carray(int_pointer(state[QUERY_START]), requests + 1)
    context_lens = carray(int_pointer(state[CONTEXT_LENS]), requests)
    written = carray(int_pointer(state[WRITTEN]), requests)
    slots = carray(int_pointer(state[SLOTS]), requests)
    positions = carray(int_pointer(state[POSITIONS]), state[NUM_ROWS])
    indexed = state[SLOT_INDEX] != 0
    masked = state[TREE_MASK] != 0
    mask_words = state[MASK_WORDS]
    panel_bytes = v_dim * PANEL * size
    scratch = state[SCRATCH] + thread * state[SCRATCH_STRIDE]
    q_at = scratch
    o_at = q_at + QUERY_TILE * group * dim * real
    s_at = o_at + QUERY_TILE * group * v_dim * real
    panel_at = scratch + state[SCRATCH_STRIDE] - panel_bytes
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
            base = context + written[request]
            keys = base + start + count
            first_page = 0
            if window > 0:
                lowest = base + start
                if masked:
                    lowest = positions[query_start[request] + start]
                    for node in range(1, count):
                        lowest = min(lowest, positions[query_start[request] + start + node])
                    # Bit 0 of a mask is the cell behind the context: its page stays in, hidden or not.
                    lowest = min(lowest, context + window - 1)
                first_page = max(0, lowest + 1 - window) // PANEL
            pages = (keys + PANEL - 1) // PANEL
            lds = (pages - first_page) * PANEL
            table = carray(int_pointer(state[BLOCK_TABLE] + slots[request] * state[BLOCK_TABLE_STRIDE] * 8), pages)
            places_at = state[SLOT_INDEX] + slots[request] * state[SLOT_INDEX_STRIDE] * 8
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
                if indexed:
                    held = min(PANEL, keys - p * PANEL)
                    places = carray(int_pointer(places_at + p * PANEL * 8), held)
                    at = key_panel(tag, size, k_pool, places, held, num_kv, head, dim, panel_at)
                    following = carray(int_pointer(places_at + min(p + 1, pages - 1) * PANEL * 8), 1)
                    ahead = k_pool + (following[0] // PANEL * num_kv + head) * page_bytes
                else:
                    at = k_pool + (table[p] * num_kv + head) * page_bytes
                    ahead = k_pool + (table[min(p + 1, pages - 1)] * num_kv + head) * page_bytes
                y = s_at + (p - first_page) * PANEL * real
                m = 0
                while m < rows:
                    take = min(MAX_TILE, rows - m)
                    panel_kernel(
                        tag,
                        1,
                        0,
                        take,
                        q_at + m * dim * real,
                        dim,
                        at,
                        0,
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
                own = base + start + m // group
                last = own + 1 - offset
                scores = carray(real_pointer(tag, s_at + m * lds * real), lds)
                first = 0
                if masked:
                    row = query_start[request] + start + m // group
                    words = carray(int_pointer(state[TREE_MASK] + row * mask_words * 8), mask_words)
                    if window > 0:
                        first = max(0, positions[row] + 1 - window)
                        if first > context:
                            first = context + first_seen(words, own + 1 - context, positions[row] - context, window)
                        first -= offset
                    seen_row = carray(real_pointer(tag, s_at + (m * lds + first) * real), last - first)
                    tail = carray(real_pointer(tag, s_at + (m * lds + context - offset) * real), own + 1 - context)
                    softmax_masked(tag, seen_row, last - first, tail, words, own + 1 - context)
                else:
                    if window > 0:
                        first = max(0, own + 1 - window) - offset
                    softmax(carray(real_pointer(tag, s_at + (m * lds + first) * real), last - first), last - first)
                for j in range(first):
                    scores[j] = zero
                for j in range(last, lds):
                    scores[j] = zero
            page_bytes = v_dim * PANEL * size
            for p in range(first_page, pages):
                depth = min(PANEL, keys - p * PANEL)
                if indexed:
                    places = carray(int_pointer(places_at + p * PANEL * 8), depth)
                    at = value_panel(tag, size, v_pool, places, depth, num_kv, head, dim, v_dim, panel_at)
                    following = carray(int_pointer(places_at + min(p + 1, pages - 1) * PANEL * 8), 1)
                    ahead = v_pool + (following[0] // PANEL * num_kv + head) * page_bytes
                else:
                    at = v_pool + (table[p] * num_kv + head) * page_bytes
                    ahead = v_pool + (table[min(p + 1, pages - 1)] * num_kv + head) * page_bytes
                x = s_at + (p - first_page) * PANEL * real
                for c in range(v_dim // PANEL):
                    m = 0
                    while m < rows:
                        take = min(MAX_TILE, rows - m)
                        panel_kernel(
                            tag,
                            1,
                            1,
                            take,
                            x + m * lds * real,
                            lds,
                            at + c * PANEL * size,
                            0,
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
