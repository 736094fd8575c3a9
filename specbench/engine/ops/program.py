"""The CPU step as one launch: a table of operations that all threads walk together.

A forward pass is ~270 small operations. Launched one by one, dispatch and thread wake-ups cost more than the work; here
a single call runs them all: threads take chunks of an operation from an atomic counter and meet at a barrier after it.
The table is written once per model (`cpu.py`), only the batch's sizes and indices change between steps.

Every row's result is the same bits whatever rows and requests stand beside it: each output sums in an order that
depends on the row alone. That is what makes speculative greedy output equal to AR output bit for bit, in bf16 too.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import overload

from specbench.engine.ops import vector
from specbench.engine.ops.vector import (
    as_real,
    cycles,
    double_bits,
    fetch_add,
    floor_float,
    int_pointer,
    load_acquire,
    load_stored,
    panel_kernel,
    power_of_two,
    real_pointer,
    store_stored,
)

FIELDS = 16
"""int64 fields of one operation; field 0 is its kind."""

EMBED_ROWS, EMBED_PANELS, RMS_NORM, LINEAR, ROPE_STORE, ATTENTION, SILU_MUL, SELECT_ROWS = range(8)
NUM_KINDS = 8

# Fields of the state array: sizes and addresses that change from step to step, then the fixed ones.
(
    NUM_OPS,
    NUM_THREADS,
    BARRIER,
    THREAD,
    NUM_ROWS,
    NUM_REQUESTS,
    NUM_SELECTED,
    TOKEN_IDS,
    POSITIONS,
    ROW_REQUEST,
    QUERY_START,
    CONTEXT_LENS,
    BLOCK_TABLE,
    BLOCK_TABLE_STRIDE,
    SELECTED_ROWS,
    TABLE,
    COUNTERS,
    CYCLES,
    SCRATCH,
    SCRATCH_STRIDE,
    SLOTS,
) = range(21)
STATE_FIELDS = 24

QUERY_TILE = 4
"""Query nodes of one request that one attention chunk takes."""

_PAGE = vector.PANEL
_FAST = {"reassoc", "contract", "arcp", "nsz"}
# Python's division check is a branch that keeps loops from vectorising.
_plain = njit(error_model="numpy")
_fast = njit(error_model="numpy", fastmath=_FAST)
_ordered = njit(error_model="numpy", fastmath={"nnan", "nsz"})
_sched_yield = types.ExternalFunction("sched_yield", types.int32())

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ONE, _HALF, _LOWEST = np.float32(1.0), np.float32(0.5), np.float32(-87.0)
_HIGHEST = np.float32(88.0)


def exp_real(value: Any) -> Any:
    """exp in the arithmetic type: Cephes' polynomial in float32 (1e-7 relative, vectorises), libm in float64."""
    raise AssertionError("only inside compiled code")


@overload(exp_real, inline="always")
def _exp_real(value):  # type: ignore[no-untyped-def]
    if value == types.float64:
        return lambda value: math.exp(value)

    def exp32(value):  # type: ignore[no-untyped-def]
        x = min(max(value, _LOWEST), _HIGHEST)
        n = floor_float(x * _LOG2E + _HALF)
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        return (p * r * r + r + _ONE) * power_of_two(n)

    return exp32


@_plain
def _tile(tag, rows, x, ldx, w, w_row, y, ldy, k, ahead, step):  # type: ignore[no-untyped-def]
    """One panel, at most MAX_TILE rows."""
    if rows == 1:
        panel_kernel(tag, 1, 1, 0, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 2:
        panel_kernel(tag, 2, 1, 0, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 3:
        panel_kernel(tag, 3, 1, 0, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 4:
        panel_kernel(tag, 4, 1, 0, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 5:
        panel_kernel(tag, 5, 1, 0, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    else:
        panel_kernel(tag, 6, 1, 0, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)


@_plain
def _tile_add(tag, rows, x, ldx, w, w_row, y, ldy, k, ahead, step):  # type: ignore[no-untyped-def]
    """One panel, at most MAX_TILE rows, added to y."""
    if rows == 1:
        panel_kernel(tag, 1, 1, 1, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 2:
        panel_kernel(tag, 2, 1, 1, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 3:
        panel_kernel(tag, 3, 1, 1, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 4:
        panel_kernel(tag, 4, 1, 1, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    elif rows == 5:
        panel_kernel(tag, 5, 1, 1, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)
    else:
        panel_kernel(tag, 6, 1, 1, x, ldx, w, 0, w_row, y, ldy, k, ahead, step)


@_plain
def _pair(tag, rows, x, ldx, w, w_panel, w_row, y, ldy, k, ahead, step):  # type: ignore[no-untyped-def]
    """Two panels side by side, at most 3 rows: enough independent sums to hide the latency of the multiply-add."""
    if rows == 1:
        panel_kernel(tag, 1, 2, 0, x, ldx, w, w_panel, w_row, y, ldy, k, ahead, step)
    elif rows == 2:
        panel_kernel(tag, 2, 2, 0, x, ldx, w, w_panel, w_row, y, ldy, k, ahead, step)
    else:
        panel_kernel(tag, 3, 2, 0, x, ldx, w, w_panel, w_row, y, ldy, k, ahead, step)


@_plain
def _linear(tag, size, real, op, rows, counter):  # type: ignore[no-untyped-def]
    """y[rows, n] = x[rows, k] @ panels (+ bias); a chunk is a run of panels; the next panel is prefetched meanwhile."""
    x, ldx, w, y, ldy, k, num_panels, chunk, bias = op[1], op[2], op[3], op[4], op[5], op[6], op[7], op[8], op[9]
    w_row = _PAGE * size
    panel_bytes = k * w_row
    passes = (rows + vector.MAX_TILE - 1) // vector.MAX_TILE
    while True:
        panel = fetch_add(counter, chunk)
        if panel >= num_panels:
            return
        end = min(panel + chunk, num_panels)
        while panel < end:
            wp = w + panel * panel_bytes
            yp = y + panel * _PAGE * real
            done = 1
            if rows <= 3 and panel + 2 <= end:
                done = 2
                _pair(tag, rows, x, ldx, wp, panel_bytes, w_row, yp, ldy, k, wp + 2 * panel_bytes, 2 * w_row)
            else:
                ahead = wp + panel_bytes
                step = w_row // passes
                m = 0
                for left in range(passes, 0, -1):
                    take = (rows - m + left - 1) // left
                    _tile(tag, take, x + m * ldx * real, ldx, wp, w_row, yp + m * ldy * real, ldy, k, ahead, step)
                    m += take
                    ahead += k * step
            if bias != 0:
                b = carray(real_pointer(tag, bias + panel * _PAGE * real), done * _PAGE)
                for m in range(rows):
                    out = carray(real_pointer(tag, yp + m * ldy * real), done * _PAGE)
                    for j in range(done * _PAGE):
                        out[j] += b[j]
            panel += done


@_plain
def _embed(tag, size, real, op, rows, state, counter, panels):  # type: ignore[no-untyped-def]
    table, out_address, ldo, width = op[1], op[2], op[3], op[4]
    ids = carray(int_pointer(state[TOKEN_IDS]), rows)
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        out = carray(real_pointer(tag, out_address + row * ldo * real), width)
        if panels:
            start = table + ((ids[row] // _PAGE) * width * _PAGE + ids[row] % _PAGE) * size
            step = _PAGE * size
        else:
            start = table + ids[row] * width * size
            step = size
        for j in range(width):
            out[j] = load_stored(tag, start + j * step)


@_fast
def _mean_square(x, width):  # type: ignore[no-untyped-def]
    total = x[0] * x[0]
    for j in range(1, width):
        total += x[j] * x[j]
    return total / x.dtype.type(width)


@_plain
def _normalise(tag, x, weight, out, width, eps):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    inverse = as_real(tag, 1.0 / math.sqrt(np.float64(_mean_square(x, width)) + eps))
    for j in range(width):
        out[j] = x[j] * inverse * weight[j]


@_plain
def _rms_norm(tag, real, op, rows, counter):  # type: ignore[no-untyped-def]
    """x += add (where there is one), out = rms_norm(x) * weight."""
    x_at, ldx, add_at, ldadd, weight_at, out_at, ldo, width = op[1], op[2], op[3], op[4], op[5], op[6], op[7], op[8]
    eps = double_bits(op[9])
    weight = carray(real_pointer(tag, weight_at), width)
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        x = carray(real_pointer(tag, x_at + row * ldx * real), width)
        if add_at != 0:
            add = carray(real_pointer(tag, add_at + row * ldadd * real), width)
            for j in range(width):
                x[j] += add[j]
        _normalise(tag, x, weight, carray(real_pointer(tag, out_at + row * ldo * real), width), width, eps)


@_plain
def _select_rows(tag, real, op, rows, state, counter):  # type: ignore[no-untyped-def]
    """out[i] = x[selected[i]] + add[selected[i]]."""
    x_at, ldx, add_at, ldadd, out_at, ldo, width = op[1], op[2], op[3], op[4], op[5], op[6], op[7]
    selected = carray(int_pointer(state[SELECTED_ROWS]), rows)
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        x = carray(real_pointer(tag, x_at + selected[row] * ldx * real), width)
        add = carray(real_pointer(tag, add_at + selected[row] * ldadd * real), width)
        out = carray(real_pointer(tag, out_at + row * ldo * real), width)
        for j in range(width):
            out[j] = x[j] + add[j]


@_plain
def _silu_mul(tag, real, op, rows, counter):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up."""
    in_at, ldi, out_at, ldo, width = op[1], op[2], op[3], op[4], op[5]
    one = as_real(tag, 1.0)
    zero = as_real(tag, 0.0)
    block = 512
    blocks = (width + block - 1) // block
    while True:
        chunk = fetch_add(counter, 1)
        if chunk >= rows * blocks:
            return
        row = chunk // blocks
        first = (chunk % blocks) * block
        n = min(block, width - first)
        gate = carray(real_pointer(tag, in_at + (row * ldi + first) * real), n)
        up = carray(real_pointer(tag, in_at + (row * ldi + width + first) * real), n)
        out = carray(real_pointer(tag, out_at + (row * ldo + first) * real), n)
        for j in range(n):
            out[j] = gate[j] / (one + exp_real(zero - gate[j])) * up[j]


@_plain
def _rotate(tag, x, cos, sin, half, scale):  # type: ignore[no-untyped-def]
    """RoPE on one head, half-split pairs (i, i + D/2), times `scale`."""
    for j in range(half):
        a = x[j]
        b = x[half + j]
        x[j] = (a * cos[j] - b * sin[j]) * scale
        x[half + j] = (b * cos[j] + a * sin[j]) * scale


@_plain
def _rope_store(tag, size, real, op, rows, state, counter):  # type: ignore[no-untyped-def]
    """Per row: q and k normed (Qwen3) and rotated, q scaled by 1/sqrt(D), k and v written into the row's page."""
    qkv_at, ld, num_q, num_kv, dim = op[1], op[2], op[3], op[4], op[5]
    cos_at, sin_at, k_pool, v_pool, q_norm, k_norm = op[6], op[7], op[8], op[9], op[10], op[11]
    eps = double_bits(op[12])
    half = dim // 2
    v_dim = (dim + _PAGE - 1) // _PAGE * _PAGE
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
        entry = state[BLOCK_TABLE] + (slots[request] * state[BLOCK_TABLE_STRIDE] + index // _PAGE) * 8
        page = carray(int_pointer(entry), 1)[0]
        within = index % _PAGE
        cos = carray(real_pointer(tag, cos_at + positions[row] * half * real), half)
        sin = carray(real_pointer(tag, sin_at + positions[row] * half * real), half)
        for head in range(num_q + num_kv):
            x = carray(real_pointer(tag, qkv_at + (row * ld + head * dim) * real), dim)
            norm = q_norm if head < num_q else k_norm
            if norm != 0:
                _normalise(tag, x, carray(real_pointer(tag, norm), dim), x, dim, eps)
            _rotate(tag, x, cos, sin, half, scale if head < num_q else one)
            if head >= num_q:
                at = k_pool + ((page * num_kv + head - num_q) * dim * _PAGE + within) * size
                for j in range(dim):
                    store_stored(tag, at + j * _PAGE * size, x[j])
        for head in range(num_kv):
            x = carray(real_pointer(tag, qkv_at + (row * ld + (num_q + num_kv + head) * dim) * real), dim)
            at = v_pool + ((page * num_kv + head) * _PAGE + within) * v_dim * size
            for j in range(dim):
                store_stored(tag, at + j * size, x[j])


@_ordered
def _largest(row, count):  # type: ignore[no-untyped-def]
    """Largest of row[:count]. A NaN may be passed over here; it reaches the output through V all the same."""
    top = row[0]
    for j in range(count):
        top = max(top, row[j])
    return top


@_fast
def _total(row, count):  # type: ignore[no-untyped-def]
    total = row[0]
    for j in range(1, count):
        total += row[j]
    return total


@_plain
def _softmax(row, count):  # type: ignore[no-untyped-def]
    """Softmax of row[:count] in place. Loops start at 0, where no index can be negative: so they vectorise."""
    top = _largest(row, count)
    for j in range(count):
        row[j] = exp_real(row[j] - top)
    scale = row.dtype.type(1.0) / _total(row, count)
    for j in range(count):
        row[j] *= scale


@_plain
def _attention(tag, size, real, op, state, thread, counter):  # type: ignore[no-untyped-def]
    """Queries of one request and KV head against its pages: each query node sees its past and itself.

    A page holds K as [D, 16] and V as [16, D]: both are panels of the micro-kernel, so K and V are read once for all
    query nodes and all heads of the group.
    """
    qkv_at, ld, out_at, ldo, num_q, num_kv, dim = op[1], op[2], op[3], op[4], op[5], op[6], op[7]
    k_pool, v_pool, window = op[8], op[9], op[10]
    group = num_q // num_kv
    v_dim = (dim + _PAGE - 1) // _PAGE * _PAGE
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
                first_page = max(0, context + start + 1 - window) // _PAGE
            pages = (keys + _PAGE - 1) // _PAGE
            lds = (pages - first_page) * _PAGE
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
            page_bytes = dim * _PAGE * size
            for p in range(first_page, pages):
                at = k_pool + (table[p] * num_kv + head) * page_bytes
                ahead = k_pool + (table[min(p + 1, pages - 1)] * num_kv + head) * page_bytes
                y = s_at + (p - first_page) * _PAGE * real
                m = 0
                while m < rows:
                    take = min(vector.MAX_TILE, rows - m)
                    _tile(
                        tag,
                        take,
                        q_at + m * dim * real,
                        dim,
                        at,
                        _PAGE * size,
                        y + m * lds * real,
                        lds,
                        dim,
                        ahead,
                        _PAGE * size,
                    )
                    m += take
            offset = first_page * _PAGE
            for m in range(rows):
                position = context + start + m // group
                first = 0
                if window > 0:
                    first = max(0, position + 1 - window) - offset
                last = position + 1 - offset
                scores = carray(real_pointer(tag, s_at + m * lds * real), lds)
                _softmax(carray(real_pointer(tag, s_at + (m * lds + first) * real), last - first), last - first)
                for j in range(first):
                    scores[j] = zero
                for j in range(last, lds):
                    scores[j] = zero
            page_bytes = v_dim * _PAGE * size
            for p in range(first_page, pages):
                at = v_pool + (table[p] * num_kv + head) * page_bytes
                ahead = v_pool + (table[min(p + 1, pages - 1)] * num_kv + head) * page_bytes
                x = s_at + (p - first_page) * _PAGE * real
                depth = min(_PAGE, keys - p * _PAGE)
                for c in range(v_dim // _PAGE):
                    m = 0
                    while m < rows:
                        take = min(vector.MAX_TILE, rows - m)
                        _tile_add(
                            tag,
                            take,
                            x + m * lds * real,
                            lds,
                            at + c * _PAGE * size,
                            v_dim * size,
                            o_at + (m * v_dim + c * _PAGE) * real,
                            v_dim,
                            depth,
                            ahead + c * _PAGE * size,
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


@_plain
def _walk(tag, size, real, state_at):  # type: ignore[no-untyped-def]
    """What each thread runs: every operation in order, a barrier after each."""
    state = carray(int_pointer(state_at), STATE_FIELDS)
    thread = fetch_add(state_at + THREAD * 8, 1)
    threads = state[NUM_THREADS]
    barrier = state_at + BARRIER * 8
    spent = carray(int_pointer(state[CYCLES]), NUM_KINDS)
    before = cycles()
    for index in range(state[NUM_OPS]):
        op = carray(int_pointer(state[TABLE] + index * FIELDS * 8), FIELDS)
        counter = state[COUNTERS] + index * 8
        kind = op[0]
        rows = state[NUM_ROWS] if op[FIELDS - 1] == 0 else state[NUM_SELECTED]
        if kind == LINEAR:
            _linear(tag, size, real, op, rows, counter)
        elif kind == ATTENTION:
            _attention(tag, size, real, op, state, thread, counter)
        elif kind == RMS_NORM:
            _rms_norm(tag, real, op, rows, counter)
        elif kind == ROPE_STORE:
            _rope_store(tag, size, real, op, rows, state, counter)
        elif kind == SILU_MUL:
            _silu_mul(tag, real, op, rows, counter)
        elif kind == SELECT_ROWS:
            _select_rows(tag, real, op, rows, state, counter)
        else:
            _embed(tag, size, real, op, rows, state, counter, kind == EMBED_PANELS)
        fetch_add(barrier, 1)
        spins = 0
        while load_acquire(barrier) < (index + 1) * threads:
            spins += 1
            if spins > 100_000:
                _sched_yield()
        if thread == 0:
            now = cycles()
            spent[kind] += now - before
            before = now


@_plain
def _count_threads(state_at):  # type: ignore[no-untyped-def]
    fetch_add(state_at, 1)


def _cache_folder() -> Path | None:
    """A folder of its own for this version of the kernels (numba sees changes of one file only), or None."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in (Path(__file__), Path(vector.__file__)):
        digest.update(source.read_bytes())
    base = Path(os.path.expanduser("~")) / ".cache" / "specbench" / f"kernels-{digest.hexdigest()[:16]}"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return base if os.access(base, os.W_OK) else None


_SIGNATURE = types.void(types.int64)


def _define(kind: str):  # type: ignore[no-untyped-def]
    if kind == "bf16":

        def entry(state_at):  # type: ignore[no-untyped-def]
            _walk(np.uint16(0), 2, 4, state_at)
    elif kind == "fp16":

        def entry(state_at):  # type: ignore[no-untyped-def]
            _walk(np.int16(0), 2, 4, state_at)
    elif kind == "fp32":

        def entry(state_at):  # type: ignore[no-untyped-def]
            _walk(np.float32(0), 4, 4, state_at)
    elif kind == "fp64":

        def entry(state_at):  # type: ignore[no-untyped-def]
            _walk(np.float64(0), 8, 8, state_at)
    else:

        def entry(state_at):  # type: ignore[no-untyped-def]
            _count_threads(state_at)

    return entry


_compiled: dict[str, object] = {}


def kernel_address(kind: str) -> int:
    """Address of the compiled walker for storage `kind` (bf16, fp16, fp32, fp64), or of "threads", the thread counter.

    Compiled on first use (seconds) and cached on disk for this version of the kernels and this processor.
    """
    if kind not in _compiled:
        folder = _cache_folder()
        previous = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder or "")
        try:
            _compiled[kind] = cfunc(_SIGNATURE, cache=folder is not None)(_define(kind))
        finally:
            numba.config.CACHE_DIR = previous
    return int(_compiled[kind].address)  # type: ignore[attr-defined]
