"""How the CPU program is laid out in memory: the fields of an operation and of the state array."""

from __future__ import annotations

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
