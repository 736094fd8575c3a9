"""Kernels of processors.py: logits to the few numbers a row needs for p(x), and p(x) itself.

A scaled logit is (logit - maximum) / temperature, at most 0. Its negative is at least 0, so that its bits, read as an
integer, have its order: thresholds of top-k and top-p are found exactly, bit by bit, and tokens tied at a border fall
on the same side.
"""

from __future__ import annotations

import triton
import triton.language as tl

GREEDY_EPSILON = tl.constexpr(1e-5)


@triton.jit
def probability(logit, token, argmax, maximum, inv_temperature, floor, log_z):
    """p(token) for the logit of a row with these stats, all in the row's dtype but log_z (fp64); greedy: one-hot.

    inv_temperature 0 marks a greedy row.
    """
    scaled = (logit - maximum) * tl.where(inv_temperature > 0, inv_temperature, 1.0)
    inv_z = tl.exp(-log_z).to(scaled.dtype)
    sampled = tl.where(scaled >= floor, tl.exp(scaled) * inv_z, 0.0)
    greedy = tl.where(token == argmax, 1.0, 0.0).to(scaled.dtype)
    return tl.where(inv_temperature > 0, sampled, greedy)


@triton.jit
def row_blocks_kernel(
    logits,
    row_stride,
    temperature,
    block_max,
    block_argmax,
    block_sum,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """One program a (row, block): its maximum (+inf: a NaN or +inf in it), its first place, sum exp(scaled to it)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    dtype: tl.constexpr = block_max.dtype.element_ty
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(dtype)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
    # A broken block is emptied, so that no NaN is ever computed.
    x = tl.where(broken, float("-inf"), x)
    best = tl.max(x, axis=0)
    first = tl.min(tl.where(inside & (x == best), token, vocab_size), axis=0)
    t = tl.load(temperature + row).to(tl.float64)
    inv_temperature = (1.0 / tl.where(t <= GREEDY_EPSILON, 1.0, t)).to(dtype)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp((x - anchor) * inv_temperature), axis=0)
    at = row * num_blocks + block
    tl.store(block_max + at, tl.where(broken, float("inf"), best))
    tl.store(block_argmax + at, first)
    tl.store(block_sum + at, total.to(tl.float64))


@triton.jit
def nearest_keys(row_logits, maximum, inv_temperature, goal, vocab_size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key t such that the tokens with keys below t weigh less than `goal` (fp64): what a filter keeps is
    all keys up to t. A token weighs 1 (COUNT) or exp(-distance). Two bits of t a pass over the row.
    """
    dtype: tl.constexpr = maximum.dtype
    wide: tl.constexpr = maximum.dtype == tl.float64
    key_type: tl.constexpr = tl.int64 if wide else tl.int32
    passes: tl.constexpr = 32 if wide else 16
    t = tl.zeros([], key_type)
    for done in range(passes):
        shift = 2 * (passes - 1 - done)
        step = tl.full([], 1, key_type) << shift
        # The sign bit is never set: the first pass settles one bit only.
        digits = tl.where(done == 0, 1, 3)
        t1 = t + step
        t2 = t + step * tl.minimum(2, digits)
        t3 = t + step * digits
        w1 = tl.zeros([BLOCK], dtype)
        w2 = tl.zeros([BLOCK], dtype)
        w3 = tl.zeros([BLOCK], dtype)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            x = tl.load(row_logits + token, mask=inside, other=float("-inf")).to(dtype)
            distance = (maximum - x) * inv_temperature
            key = distance.to(key_type, bitcast=True)
            if COUNT:
                weight = tl.where(inside, 1.0, 0.0).to(dtype)
            else:
                weight = tl.exp(-distance)
            w1 += tl.where(key < t1, weight, 0.0)
            w2 += tl.where(key < t2, weight, 0.0)
            w3 += tl.where(key < t3, weight, 0.0)
        below = (tl.sum(w1.to(tl.float64), axis=0) < goal).to(tl.int32)
        below += (tl.sum(w2.to(tl.float64), axis=0) < goal).to(tl.int32)
        below += (tl.sum(w3.to(tl.float64), axis=0) < goal).to(tl.int32)
        t += step * tl.minimum(below, digits)
    return t


@triton.jit
def kept_mass(row_logits, maximum, inv_temperature, limit, min_p, vocab_size, BLOCK: tl.constexpr):
    """(largest distance, sum exp(-distance) in fp64) of the tokens with key <= limit and exp(-distance) >= min_p."""
    dtype: tl.constexpr = maximum.dtype
    farthest = tl.zeros([BLOCK], dtype)
    mass = tl.zeros([BLOCK], dtype)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf")).to(dtype)
        distance = (maximum - x) * inv_temperature
        weight = tl.exp(-distance)
        kept = (distance.to(limit.dtype, bitcast=True) <= limit) & (weight >= min_p) & (distance < float("inf"))
        farthest = tl.where(kept, tl.maximum(farthest, distance), farthest)
        mass += tl.where(kept, weight, 0.0)
    return tl.max(farthest, axis=0), tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def row_stats_kernel(
    logits,
    row_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    block_max,
    block_argmax,
    block_sum,
    argmax,
    maximum,
    inv_temperature,
    floor,
    log_z,
    bad,
    vocab_size,
    num_blocks,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCKS: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """One program a row: puts its blocks together, then finds the thresholds of the filters it has, if any, reading the
    row SEARCH tokens at a time."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = block_max.dtype.element_ty
    block = tl.arange(0, BLOCKS)
    present = block < num_blocks
    maxima = tl.load(block_max + row * num_blocks + block, mask=present, other=float("-inf"))
    firsts = tl.load(block_argmax + row * num_blocks + block, mask=present, other=vocab_size)
    sums = tl.load(block_sum + row * num_blocks + block, mask=present, other=0.0)
    best = tl.max(maxima, axis=0)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    first = tl.min(tl.where(maxima == best, firsts, vocab_size), axis=0)
    t = tl.load(temperature + row).to(tl.float64)
    greedy = is_bad | (t <= GREEDY_EPSILON)
    inverse = (1.0 / tl.where(greedy, 1.0, t)).to(dtype)
    anchor = tl.where(is_bad, 0.0, best)
    drop = tl.where(is_bad, float("-inf"), maxima) - anchor
    z = tl.sum(sums * tl.exp(drop.to(tl.float64) * inverse.to(tl.float64)), axis=0)
    least = tl.full([], float("-inf"), dtype)

    if HAS_TOP_K or HAS_TOP_P or HAS_MIN_P:
        k = vocab_size
        if HAS_TOP_K:
            k = tl.load(top_k + row)
            k = tl.where((k <= 0) | (k > vocab_size), vocab_size, k)
        p = tl.full([], 1.0, tl.float64)
        if HAS_TOP_P:
            p = tl.load(top_p + row).to(tl.float64)
        share = tl.zeros([], dtype)
        if HAS_MIN_P:
            share = tl.load(min_p + row).to(dtype)
        if (greedy == 0) & ((k < vocab_size) | (p < 1.0) | (share > 0.0)):
            row_logits = logits + row * row_stride
            key_type: tl.constexpr = tl.int64 if dtype == tl.float64 else tl.int32
            limit = tl.full([], 0x7FFFFFFFFFFFFFFF if dtype == tl.float64 else 0x7FFFFFFF, key_type)
            if HAS_TOP_K:  # noqa: SIM102 -- decided at compile time, the next one at run time
                if k < vocab_size:
                    limit = nearest_keys(row_logits, best, inverse, k.to(tl.float64), vocab_size, True, SEARCH)
            if HAS_TOP_P:  # noqa: SIM102
                if p < 1.0:
                    _, kept = kept_mass(row_logits, best, inverse, limit, tl.zeros([], dtype), vocab_size, SEARCH)
                    nucleus = nearest_keys(row_logits, best, inverse, p * kept, vocab_size, False, SEARCH)
                    limit = tl.minimum(limit, nucleus)
            farthest, z = kept_mass(row_logits, best, inverse, limit, share, vocab_size, SEARCH)
            least = -farthest

    tl.store(argmax + row, tl.where(is_bad, -1, first).to(tl.int64))
    tl.store(maximum + row, anchor)
    tl.store(inv_temperature + row, tl.where(greedy, 0.0, inverse))
    tl.store(floor + row, tl.where(greedy, 0.0, least))
    tl.store(log_z + row, tl.where(greedy, 0.0, tl.log(tl.where(greedy, 1.0, z))))
    tl.store(bad + row, is_bad.to(tl.int32))


@triton.jit
def probabilities_kernel(
    logits,
    row_stride,
    argmax,
    maximum,
    inv_temperature,
    floor,
    log_z,
    bad,
    out,
    out_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program a (row, block) of the distribution; NaN throughout a bad row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    dtype: tl.constexpr = maximum.dtype.element_ty
    is_bad = tl.load(bad + row) != 0
    x = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(dtype)
    x = tl.where(is_bad, 0.0, x)
    p = probability(
        x,
        token,
        tl.load(argmax + row),
        tl.load(maximum + row),
        tl.load(inv_temperature + row),
        tl.load(floor + row),
        tl.load(log_z + row),
    )
    tl.store(out + row * out_stride + token, tl.where(is_bad, float("nan"), p), mask=inside)
