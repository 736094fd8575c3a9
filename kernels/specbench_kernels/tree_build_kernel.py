"""The kernels of tree_build: one program a request selects among candidates by exact integer order.

Scores become integers of the same order (`ordered`), so that ties, infinities and padding need no care: a tie goes to
the smaller index, padding is below every score, NaN counts as -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lowest(KEY: tl.constexpr):
    """The key below every score's."""
    return tl.full((), 1, KEY) << (KEY.primitive_bitwidth - 1)


@triton.jit
def ordered(score, KEY: tl.constexpr):
    """Float scores as integers of type KEY, of the same order; -0 equals 0, NaN is -inf. All are above `lowest`."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(KEY, bitcast=True)
    # Negative floats count downwards: all bits but the sign are turned.
    return bits ^ ((bits >> (KEY.primitive_bitwidth - 1)) & ~lowest(KEY))


@triton.jit(do_not_specialize=["offset", "cell"])
def expand_kernel(
    values,
    ids,
    frontier_scores,
    frontier_candidates,
    frontier_mask,
    candidate_scores,
    candidate_tokens,
    candidate_parents,
    next_scores,
    next_tokens,
    next_rows,
    next_candidates,
    next_mask,
    offset,
    cell,
    NUM_CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    KEY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Record the children as candidates [offset, offset + WIDTH * TOP_K); the best TOP_K are the next frontier."""
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, BLOCK)
    real = child < WIDTH * TOP_K
    row = child // TOP_K
    above = tl.load(frontier_scores + request * WIDTH + row, mask=real, other=0.0)
    parent = tl.load(frontier_candidates + request * WIDTH + row, mask=real, other=-1)
    value = tl.load(values + request * (WIDTH * TOP_K) + child, mask=real, other=0.0)
    token = tl.load(ids + request * (WIDTH * TOP_K) + child, mask=real, other=0)
    # A child never ranks above its parent, so a kept child's parent is kept.
    score = tl.where(value < 0, above + value, tl.where(value == value, above, value))
    score = tl.where(score == score, score, float("-inf"))
    record = request * NUM_CANDIDATES + offset + child
    tl.store(candidate_scores + record, score, mask=real)
    tl.store(candidate_tokens + record, token, mask=real)
    tl.store(candidate_parents + record, parent, mask=real)

    key = tl.where(real, ordered(score, KEY), lowest(KEY))
    rank = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(TOP_K):
        best = tl.argmax(key, 0, tie_break_left=True)
        chosen = tl.where(rank == i, best, chosen)
        key = tl.where(child == best, lowest(KEY), key)
    # What this program has just stored is read again by other threads of it.
    tl.debug_barrier()
    taken = rank < TOP_K
    out = request * TOP_K + rank
    record = request * NUM_CANDIDATES + offset + chosen
    tl.store(next_scores + out, tl.load(candidate_scores + record, mask=taken, other=0.0), mask=taken)
    tl.store(next_tokens + out, tl.load(candidate_tokens + record, mask=taken, other=0), mask=taken)
    tl.store(next_rows + out, chosen // TOP_K, mask=taken)
    tl.store(next_candidates + out, offset + chosen, mask=taken)

    word = tl.arange(0, BLOCK_WORDS)[None, :]
    written = taken[:, None] & (word < NUM_WORDS)
    seen = tl.load(
        frontier_mask + (request * WIDTH + (chosen // TOP_K)[:, None]) * NUM_WORDS + word, mask=written, other=0
    )
    own = (cell + rank)[:, None]
    seen |= tl.where(own // 64 == word, tl.full((), 1, tl.int64) << (own % 64).to(tl.int64), 0)
    tl.store(next_mask + out[:, None] * NUM_WORDS + word, seen, mask=written)


@triton.jit
def rerank_kernel(
    scores,
    tokens,
    parents,
    roots,
    context_lens,
    tree_tokens,
    tree_parents,
    depths,
    mask,
    positions,
    kept_out,
    NUM_CANDIDATES: tl.constexpr,
    NUM_NODES: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    KEY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Keep the NUM_NODES - 1 best candidates and number them 1, 2, ... in the order of their indices; 0 is the root."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    real = index < NUM_CANDIDATES
    score = tl.load(scores + request * NUM_CANDIDATES + index, mask=real, other=0.0)
    key = tl.where(real, ordered(score, KEY), lowest(KEY))

    # The key of the (NUM_NODES - 1)th best, bit by bit: the largest bound that so many keys reach.
    bound = lowest(KEY)
    for i in range(KEY.primitive_bitwidth):
        higher = bound ^ (tl.full((), 1, KEY) << (KEY.primitive_bitwidth - 1 - i))
        reached = tl.sum((key >= higher).to(tl.int32), 0)
        bound = tl.where(reached >= NUM_NODES - 1, higher, bound)
    above = key > bound
    tied = key == bound
    room = NUM_NODES - 1 - tl.sum(above.to(tl.int32), 0)
    kept = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    number = tl.cumsum(kept.to(tl.int32), 0)

    base = request * NUM_NODES
    tl.store(kept_out + base + number, index, mask=kept)
    tl.store(kept_out + base + index, -1, mask=index == 0)
    tl.debug_barrier()
    node = tl.arange(0, BLOCK_NODES)
    inside = node < NUM_NODES
    drafted = inside & (node > 0)
    candidate = tl.load(kept_out + base + node, mask=drafted, other=0)
    token = tl.load(tokens + request * NUM_CANDIDATES + candidate, mask=drafted, other=0)
    token = tl.where(node == 0, tl.load(roots + request), token)
    above_it = tl.load(parents + request * NUM_CANDIDATES + candidate, mask=drafted, other=-1)
    parent = tl.gather(number, tl.maximum(above_it, 0), 0)
    parent = tl.where(above_it < 0, 0, parent)
    parent = tl.where(node == 0, -1, parent)

    word = tl.arange(0, BLOCK_WORDS)[None, :]
    one = tl.full((), 1, tl.int64)
    seen = tl.where(word == 0, one, 0) + tl.zeros((BLOCK_NODES, BLOCK_WORDS), tl.int64)
    depth = tl.zeros((BLOCK_NODES,), tl.int32)
    at = tl.where(inside, node, 0)
    for _ in range(MAX_DEPTH):
        here = at[:, None]
        seen |= tl.where(here // 64 == word, one << (here % 64).to(tl.int64), 0)
        depth += (at > 0).to(tl.int32)
        at = tl.maximum(tl.gather(parent, at, 0), 0)

    tl.store(tree_tokens + base + node, token, mask=inside)
    tl.store(tree_parents + base + node, parent, mask=inside)
    tl.store(depths + base + node, depth, mask=inside)
    tl.store(positions + base + node, tl.load(context_lens + request) + depth, mask=inside)
    rows = (base + node)[:, None] * NUM_WORDS + word
    tl.store(mask + rows, seen, mask=inside[:, None] & (word < NUM_WORDS))
