"""The last kernels of verify_sampled.py: the walk that decides a request's path, and the draw of its next token."""

from __future__ import annotations

import triton
import triton.language as tl

from specbench_kernels.verify_kernels import BAD_Q, CHOSEN, WITHOUT_REPLACEMENT, after_stages, law


@triton.jit
def walk_kernel(
    parents,
    query_start,
    first_child,
    next_sibling,
    mode,
    p_token,
    q_token,
    z,
    d,
    uniforms,
    inv_temperature,
    accepted,
    path,
    path_stride,
    bad,
    emit_row,
    emit_stages,
    HAS_Q: tl.constexpr,
    NODES: tl.constexpr,
):
    """One program a request, one sweep over its nodes: parents come before children, so the walk never looks back.

    u < P(x) / Q(x) accepts, strictly. Chosen children: u < p(x) / (1 - sum of the children before).
    """
    request = tl.program_id(0)
    start = tl.load(query_start + request).to(tl.int64)
    count = (tl.load(query_start + request + 1).to(tl.int64) - start).to(tl.int32)
    code = tl.load(bad + request)
    slot = tl.arange(0, NODES)
    taken = tl.full([NODES], -1, tl.int32)
    at = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    stages = tl.full([], 0, tl.int32)
    rest = tl.full([], 1.0, tl.float64)
    stopped = tl.full([], 0, tl.int32)
    if code == 0:
        greedy = tl.load(inv_temperature + start, mask=count > 0, other=0.0) == 0.0
        for node in range(1, count):
            row = start + node
            if (tl.load(parents + row) == at) & (stopped == 0):
                # A greedy law is 0 or 1: any coin below 1 does, and what the coin's memory holds does not matter.
                u = tl.where(greedy, 0.5, tl.load(uniforms + row))
                p = tl.load(p_token + row)
                accept = u * rest < p
                judged = tl.full([], 1, tl.int32)
                if HAS_Q:  # noqa: SIM102 -- decided at compile time, the next one at run time
                    if tl.load(mode + row) != CHOSEN:
                        without = tl.load(mode + row) == WITHOUT_REPLACEMENT
                        drafted = tl.load(q_token + row)
                        share = drafted
                        child = tl.load(first_child + start + at).to(tl.int64)
                        for _ in range(stages):
                            following = tl.load(next_sibling + child).to(tl.int64)
                            left = tl.where(p > share, p - share, 0.0)
                            mass = tl.load(z + following)
                            code = tl.where(mass != mass, BAD_Q, code)
                            p = tl.where(mass > 0.0, left / tl.where(mass > 0.0, mass, 1.0), p)
                            if without:
                                remaining = tl.load(d + following)
                                share = drafted / tl.where(remaining > 0.0, remaining, 1.0)
                                stopped = tl.where(remaining > 0.0, stopped, 1)
                            child = following
                        code = tl.where((drafted > 0.0) | (stopped != 0), code, BAD_Q)
                        accept = u < p / tl.where(share > 0.0, share, 1.0)
                        judged = 1 - stopped
                kept = tl.where(accept, judged, 0)
                taken = tl.where((slot == depth) & (kept != 0), node, taken)
                depth += kept
                at = tl.where(kept != 0, node, at)
                stages = tl.where(kept != 0, 0, stages + judged)
                rest = tl.where(kept != 0, 1.0, rest - p)
    fine = code == 0
    tl.store(accepted + request, tl.where(fine, depth, 0))
    tl.store(path + request.to(tl.int64) * path_stride + slot, tl.where(fine, taken, -1), mask=slot < path_stride)
    tl.store(bad + request, code)
    tl.store(emit_row + request, start + at)
    tl.store(emit_stages + request, stages)


@triton.jit
def block_walk_kernel(
    query_start,
    mode,
    p_token,
    z,
    uniforms,
    inv_temperature,
    accepted,
    path,
    path_stride,
    bad,
    emit_row,
    emit_stages,
    ratio,
    HAS_Q: tl.constexpr,
    NODES: tl.constexpr,
):
    """Block verification of one chain a program: the last node i with u_i < h_i, h_i = S_i / (S_i + 1 - r_i)."""
    request = tl.program_id(0)
    start = tl.load(query_start + request).to(tl.int64)
    count = (tl.load(query_start + request + 1).to(tl.int64) - start).to(tl.int32)
    code = tl.load(bad + request)
    slot = tl.arange(0, NODES)
    best = tl.full([], 0, tl.int32)
    if code == 0:
        greedy = tl.load(inv_temperature + start, mask=count > 0, other=0.0) == 0.0
        for node in range(1, count):
            row = start + node
            r = tl.load(ratio + row)
            h = r
            if node < count - 1:
                s = r * tl.maximum(1.0 - tl.load(p_token + row + 1), 0.0)
                if HAS_Q:  # noqa: SIM102 -- decided at compile time, the next one at run time
                    if tl.load(mode + row) != CHOSEN:
                        s = tl.load(z + row + 1)
                        code = tl.where(s != s, BAD_Q, code)
                scale = s + (1.0 - r)
                h = tl.where(scale > 0.0, s / tl.where(scale > 0.0, scale, 1.0), 1.0)
            u = tl.where(greedy, 0.5, tl.load(uniforms + row))
            best = tl.where(u < h, node, best)
    fine = code == 0
    depth = tl.where(fine, best, 0)
    tl.store(accepted + request, depth)
    chain = tl.where(slot < depth, slot + 1, -1)
    tl.store(path + request.to(tl.int64) * path_stride + slot, chain, mask=slot < path_stride)
    tl.store(bad + request, code)
    tl.store(emit_row + request, start + best)
    tl.store(emit_stages + request, tl.where(best < count - 1, 1, 0))


@triton.jit
def emission(
    logits,
    row_stride,
    stats,
    tokens,
    q,
    q_stride,
    first_child,
    next_sibling,
    mode,
    z,
    d,
    ratio,
    row,
    stages,
    token,
    inside,
    HAS_Q: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """(mass of the next token, the law before the last stage) of a block of `row` after `stages` stages."""
    p = law(logits, row_stride, stats, row, token, inside)
    if CHAIN:
        p = p * tl.load(ratio + row)
    child = tl.load(first_child + row)
    kind = tl.load(mode + row)
    share = tl.zeros(p.shape, tl.float64)
    sound = inside
    if HAS_Q:  # noqa: SIM102
        if (kind != CHOSEN) & (stages > 0):
            share = tl.load(q + child.to(tl.int64) * q_stride + token, mask=inside, other=0.0).to(tl.float64)
            sound = (share >= 0.0) & (share <= 2.0)
    rest, before, _ = after_stages(p, share, token, child, kind, stages, tokens, next_sibling, z, d)
    return tl.where(sound | (inside == 0), rest, float("nan")), before


@triton.jit
def emission_kernel(
    logits,
    row_stride,
    argmax,
    maximum,
    inv_temperature,
    floor,
    log_z,
    tokens,
    q,
    q_stride,
    query_start,
    first_child,
    next_sibling,
    mode,
    z,
    d,
    ratio,
    bad,
    emit_row,
    emit_stages,
    partial,
    vocab_size,
    num_blocks,
    HAS_Q: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a (request, block): sums of the emitted token's mass, and of the law to fall back to."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(query_start + request) == tl.load(query_start + request + 1):
        return
    if tl.load(bad + request) != 0:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    mass, before = emission(
        logits,
        row_stride,
        (argmax, maximum, inv_temperature, floor, log_z),
        tokens,
        q,
        q_stride,
        first_child,
        next_sibling,
        mode,
        z,
        d,
        ratio,
        tl.load(emit_row + request),
        tl.load(emit_stages + request),
        token,
        token < vocab_size,
        HAS_Q,
        CHAIN,
    )
    at = (request * num_blocks + block) * 2
    tl.store(partial + at, tl.sum(mass, axis=0))
    tl.store(partial + at + 1, tl.sum(before, axis=0))


@triton.jit
def draw_kernel(
    logits,
    row_stride,
    argmax,
    maximum,
    inv_temperature,
    floor,
    log_z,
    tokens,
    q,
    q_stride,
    query_start,
    first_child,
    next_sibling,
    mode,
    z,
    d,
    ratio,
    bad,
    emit_row,
    emit_stages,
    partial,
    uniforms,
    accepted,
    path,
    path_stride,
    next_token,
    vocab_size,
    num_blocks,
    HAS_Q: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    """One program a request: the token at u of the inverse CDF. A token without mass is never drawn, even for u = 1.

    Only the block that u falls into is computed again.
    """
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start + request).to(tl.int64)
    empty = tl.load(query_start + request + 1) == start
    chosen = tl.full([], -1, tl.int64)
    code = tl.load(bad + request)
    if (code == 0) & (empty == 0):
        greedy = tl.load(inv_temperature + start) == 0.0
        u = tl.where(greedy, 0.5, tl.load(uniforms + start))
        block = tl.arange(0, BLOCKS)
        present = block < num_blocks
        at = partial + (request * num_blocks + block) * 2
        sums = tl.load(at, mask=present, other=0.0)
        fallback = tl.load(at + 1, mask=present, other=0.0)
        total = tl.sum(sums, axis=0)
        code = tl.where(total != total, BAD_Q, code)
        empty_rest = (total > 0.0) == 0
        sums = tl.where(empty_rest, fallback, sums)
        goal = u * tl.sum(sums, axis=0)
        held = sums > 0.0
        first = tl.min(tl.where(held & (tl.cumsum(sums, axis=0) > goal), block, BLOCKS), axis=0)
        last = tl.max(tl.where(held, block, -1), axis=0)
        picked = tl.minimum(first, last)
        if (code == 0) & (picked >= 0):
            before_block = tl.sum(tl.where(block < picked, sums, 0.0), axis=0)
            token = picked * BLOCK + tl.arange(0, BLOCK)
            mass, before = emission(
                logits,
                row_stride,
                (argmax, maximum, inv_temperature, floor, log_z),
                tokens,
                q,
                q_stride,
                first_child,
                next_sibling,
                mode,
                z,
                d,
                ratio,
                tl.load(emit_row + request),
                tl.load(emit_stages + request),
                token,
                token < vocab_size,
                HAS_Q,
                CHAIN,
            )
            mass = tl.where(empty_rest, before, mass)
            here = mass > 0.0
            above = here & (before_block + tl.cumsum(mass, axis=0) > goal)
            found = tl.min(tl.where(above, token, vocab_size), axis=0)
            chosen = tl.minimum(found, tl.max(tl.where(here, token, -1), axis=0)).to(tl.int64)
        code = tl.where((code == 0) & (chosen < 0), BAD_Q, code)
    tl.store(next_token + request, chosen)
    if code != 0:
        slot = tl.arange(0, NODES)
        tl.store(accepted + request, 0)
        tl.store(path + request.to(tl.int64) * path_stride + slot, -1, mask=slot < path_stride)
        tl.store(bad + request, code)
