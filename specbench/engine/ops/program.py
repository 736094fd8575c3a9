"""The CPU step as one launch: a table of operations that all threads walk together.

A forward pass is ~270 small operations. Launched one by one, dispatch and thread wake-ups cost more than the work; here
a single call runs them all: threads take chunks of an operation from an atomic counter and meet at a barrier after it.
The table is written once per model (`cpu.py`), only the batch's sizes and indices change between steps.

Every row's result is the same bits whatever rows and requests stand beside it: each output sums in an order that
depends on the row alone. That is what makes speculative greedy output equal to AR output bit for bit, in bf16 too.
"""

from __future__ import annotations

import os
from pathlib import Path

import numba
import numpy as np
from numba import carray, cfunc, types

from specbench.engine.ops.attention import attention, rope_store
from specbench.engine.ops.kernels import copy_rows, embed, linear, plain, rms_norm, select_rows, silu_add, silu_mul
from specbench.engine.ops.layout import (
    ATTENTION,
    BARRIER,
    COPY,
    COUNTERS,
    CYCLES,
    EMBED_PANELS,
    FIELDS,
    LINEAR,
    NUM_KINDS,
    NUM_OPS,
    NUM_ROWS,
    NUM_SELECTED,
    NUM_THREADS,
    RMS_NORM,
    ROPE_STORE,
    SELECT_ROWS,
    SILU_ADD,
    SILU_MUL,
    STATE_FIELDS,
    TABLE,
    THREAD,
)
from specbench.engine.ops.revision import kernel_revision
from specbench.engine.ops.vector import cycles, fetch_add, int_pointer, load_acquire

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@plain
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
            linear(tag, size, real, op, rows, thread, threads)
        elif kind == ATTENTION:
            attention(tag, size, real, op, state, thread, counter)
        elif kind == RMS_NORM:
            rms_norm(tag, real, op, rows, counter)
        elif kind == ROPE_STORE:
            rope_store(tag, size, real, op, rows, state, counter)
        elif kind == SILU_MUL:
            silu_mul(tag, real, op, rows, counter)
        elif kind == SELECT_ROWS:
            select_rows(tag, real, op, rows, state, counter)
        elif kind == COPY:
            copy_rows(tag, real, op, rows, counter)
        elif kind == SILU_ADD:
            silu_add(tag, real, op, rows, counter)
        else:
            embed(tag, size, real, op, rows, state, counter, kind == EMBED_PANELS)
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


@plain
def _count_threads(state_at):  # type: ignore[no-untyped-def]
    fetch_add(state_at, 1)


def _cache_folder() -> Path | None:
    """A folder of its own for this version of the kernels (numba sees changes of one file only), or None."""
    version = f"{kernel_revision()}-numba-{numba.__version__}"
    base = Path(os.path.expanduser("~")) / ".cache" / "specbench" / f"kernels-{version}"
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
