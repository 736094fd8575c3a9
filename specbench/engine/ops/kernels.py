"""Operations of the CPU program over rows: linear layers, norms, embedding, activation.

Each runs on every thread at once and takes chunks from the operation's atomic counter. `tag` tells the storage type,
`size` and `real` its bytes and those of the arithmetic type; addresses are plain integers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from specbench.engine.ops.layout import SELECTED_ROWS, TOKEN_IDS
from specbench.engine.ops.vector import (
    MAX_TILE,
    PAIRED_ROWS,
    PANEL,
    as_real,
    double_bits,
    fetch_add,
    floor_float,
    int_pointer,
    load_stored,
    panel_kernel,
    power_of_two,
    real_pointer,
)

_FAST = {"reassoc", "contract", "arcp", "nsz"}
# Python's division check is a branch that keeps loops from vectorising.
plain = njit(error_model="numpy")
fast = njit(error_model="numpy", fastmath=_FAST)
ordered = njit(error_model="numpy", fastmath={"nnan", "nsz"})

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


@plain
def share_of(count, thread, threads):  # type: ignore[no-untyped-def]
    """First of the `count` items that are `thread`'s; the next thread's first is its end."""
    return count * thread // threads


@plain
def linear(tag, size, real, op, rows, thread, threads):  # type: ignore[no-untyped-def]
    """y[rows, n] = x[rows, k] @ panels (+ bias).

    Each thread has one run of panels, so that what it prefetches is what it works on next: while one panel is
    multiplied the next one streams in, and behind the last comes the thread's first panel of the next linear layer.
    """
    x, ldx, w, y, ldy, k, num_panels, bias = op[1], op[2], op[3], op[4], op[5], op[6], op[7], op[8]
    next_w, next_panels, next_bytes = op[9], op[10], op[11]
    w_row = PANEL * size
    panel_bytes = k * w_row
    passes = (rows + MAX_TILE - 1) // MAX_TILE
    panel = share_of(num_panels, thread, threads)
    end = share_of(num_panels, thread + 1, threads)
    following = next_w + share_of(next_panels, thread, threads) * next_bytes
    while panel < end:
        wp = w + panel * panel_bytes
        yp = y + panel * PANEL * real
        beside = 2 if rows <= PAIRED_ROWS and panel + 2 <= end else 1
        ahead = wp + beside * panel_bytes if panel + beside < end else following
        step = beside * w_row // passes
        m = 0
        for left in range(passes, 0, -1):
            take = (rows - m + left - 1) // left
            xm = x + m * ldx * real
            ym = yp + m * ldy * real
            if beside == 2:
                panel_kernel(tag, 2, 0, take, xm, ldx, wp, panel_bytes, w_row, ym, ldy, k, ahead, step)
            else:
                panel_kernel(tag, 1, 0, take, xm, ldx, wp, 0, w_row, ym, ldy, k, ahead, step)
            m += take
            ahead += k * step
        if bias != 0:
            b = carray(real_pointer(tag, bias + panel * PANEL * real), beside * PANEL)
            for m in range(rows):
                out = carray(real_pointer(tag, yp + m * ldy * real), beside * PANEL)
                for j in range(beside * PANEL):
                    out[j] += b[j]
        panel += beside


@plain
def embed(tag, size, real, op, rows, state, counter, panels):  # type: ignore[no-untyped-def]
    table, out_address, ldo, width = op[1], op[2], op[3], op[4]
    ids = carray(int_pointer(state[TOKEN_IDS]), rows)
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        out = carray(real_pointer(tag, out_address + row * ldo * real), width)
        if panels:
            start = table + ((ids[row] // PANEL) * width * PANEL + ids[row] % PANEL) * size
            step = PANEL * size
        else:
            start = table + ids[row] * width * size
            step = size
        for j in range(width):
            out[j] = load_stored(tag, start + j * step)


@fast
def mean_square(x, width):  # type: ignore[no-untyped-def]
    total = x[0] * x[0]
    for j in range(1, width):
        total += x[j] * x[j]
    return total / x.dtype.type(width)


@plain
def normalise(tag, x, weight, out, width, eps):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    inverse = as_real(tag, 1.0 / math.sqrt(np.float64(mean_square(x, width)) + eps))
    for j in range(width):
        out[j] = x[j] * inverse * weight[j]


@plain
def rms_norm(tag, real, op, rows, counter):  # type: ignore[no-untyped-def]
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
        normalise(tag, x, weight, carray(real_pointer(tag, out_at + row * ldo * real), width), width, eps)


@plain
def select_rows(tag, real, op, rows, state, counter):  # type: ignore[no-untyped-def]
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


@plain
def copy_rows(tag, real, op, rows, counter):  # type: ignore[no-untyped-def]
    """out = x."""
    x_at, ldx, out_at, ldo, width = op[1], op[2], op[3], op[4], op[5]
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        x = carray(real_pointer(tag, x_at + row * ldx * real), width)
        out = carray(real_pointer(tag, out_at + row * ldo * real), width)
        for j in range(width):
            out[j] = x[j]


@plain
def silu_add(tag, real, op, rows, counter):  # type: ignore[no-untyped-def]
    """out += silu(x)."""
    x_at, ldx, out_at, ldo, width = op[1], op[2], op[3], op[4], op[5]
    one = as_real(tag, 1.0)
    zero = as_real(tag, 0.0)
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        x = carray(real_pointer(tag, x_at + row * ldx * real), width)
        out = carray(real_pointer(tag, out_at + row * ldo * real), width)
        for j in range(width):
            out[j] += x[j] / (one + exp_real(zero - x[j]))


@plain
def silu_mul(tag, real, op, rows, counter):  # type: ignore[no-untyped-def]
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
