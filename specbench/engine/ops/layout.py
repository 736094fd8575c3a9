"""How the CPU program is laid out in memory: the fields of an operation and of the state array."""

from __future__ import annotations

FIELDS = 16
"""int64 fields of one operation; field 0 is its kind."""

EMBED_ROWS, EMBED_PANELS, RMS_NORM, LINEAR, ROPE_STORE, ATTENTION, SILU_MUL, SELECT_ROWS, COPY, SILU_ADD = range(10)
NUM_KINDS = 10

# Fields of the state array: sizes and addresses. TREE_MASK is 0 for a batch of chains; SLOT_INDEX is 0 where cells
# stand in page order, and then the block table tells where.
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
    WRITTEN,
    TREE_MASK,
    MASK_WORDS,
    SLOT_INDEX,
    SLOT_INDEX_STRIDE,
) = range(26)
STATE_FIELDS = 32

QUERY_TILE = 4
"""Query nodes of one request that one attention chunk takes."""
