"""Kernels of verify_sampled.py, in the order of their launches. Nothing of the size of the vocabulary is written.

Words: a row is a node's place in the packed batch; its logits give the target's law after it. A *stage* of a node is
one judged and rejected child. P_1 = p and Q_1 = q (the row of the first child: siblings share a position); stage j
leaves P_{j+1} = relu(P_j - Q_j) / Z_{j+1}, and without replacement Q_{j+1} = q without the first j children / D_{j+1}.
Z and D are kept at the row of child j + 1. Where rounding left no mass (Z = 0), P stays as it was.
Laws and masses are fp64; log_z is fp64, exp has the type of the logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbench_kernels.processors_kernel import probability

CHOSEN = tl.constexpr(0)
INDEPENDENT = tl.constexpr(1)
WITHOUT_REPLACEMENT = tl.constexpr(2)
NO_DISTRIBUTION = tl.constexpr(1)
BAD_Q = tl.constexpr(2)
MALFORMED = tl.constexpr(3)


@triton.jit
def law(logits, row_stride, stats, row, token, inside):
    """p(token) of `row` in fp64; `stats` are the pointers (argmax, maximum, inv_temperature, floor, log_z)."""
    x = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    argmax, maximum, inv_temperature, floor, log_z = stats
    return probability(
        x.to(maximum.dtype.element_ty),
        token,
        tl.load(argmax + row),
        tl.load(maximum + row),
        tl.load(inv_temperature + row),
        tl.load(floor + row),
        tl.load(log_z + row),
    ).to(tl.float64)


@triton.jit
def after_stages(p, q, token, child, mode, count, tokens, next_sibling, z, d):
    """A block after `count` stages: (last residual, not normalised; the law before it; tokens of judged children)."""
    before = p
    judged = token < 0
    for stage in range(count):
        at = child.to(tl.int64)
        drafted = tl.load(tokens + at)
        if mode == CHOSEN:
            before = p
            p = tl.where(token == drafted, 0.0, p)
        else:
            share = q
            if stage > 0:
                mass = tl.load(z + at)
                p = tl.where(mass > 0.0, p / tl.where(mass > 0.0, mass, 1.0), before)
                if mode == WITHOUT_REPLACEMENT:
                    share = tl.where(judged, 0.0, q) / tl.load(d + at)
            before = p
            p = tl.where(p > share, p - share, 0.0)
        judged = judged | (token == drafted)
        child = tl.load(next_sibling + at)
    return p, before, judged


@triton.jit
def nodes_kernel(
    logits,
    row_stride,
    argmax,
    maximum,
    inv_temperature,
    floor,
    log_z,
    stats_bad,
    tokens,
    parents,
    query_start,
    q,
    q_stride,
    siblings,
    first_child,
    next_sibling,
    num_children,
    mode,
    p_token,
    q_token,
    bad,
    vocab_size,
    max_siblings,
    HAS_Q: tl.constexpr,
    CHAIN: tl.constexpr,
    NODES: tl.constexpr,
):
    """One program a request: links between its rows (-1: none), p and q of every drafted token, and what is wrong.

    NODES bounds the nodes of a request; CHAIN asks for chains.
    """
    request = tl.program_id(0)
    start = tl.load(query_start + request).to(tl.int64)
    count = tl.load(query_start + request + 1).to(tl.int64) - start
    node = tl.arange(0, NODES)
    inside = node < count
    row = start + node
    token = tl.load(tokens + row, mask=inside, other=-1)
    parent = tl.load(parents + row, mask=inside, other=-2)
    broken = tl.max(tl.load(stats_bad + row, mask=inside, other=0), axis=0)
    draft = inside & (node > 0)
    sound = (parent >= 0) & (parent < node) & (token >= 0) & (token < vocab_size)
    if CHAIN:
        sound = sound & (parent == node - 1)
    draft_ok = draft & sound
    # A root's parent is -1; rows that are no draft are nobody's sibling.
    key = tl.where(draft_ok, parent, -1 - node)
    earlier = (key[:, None] == key[None, :]) & (node[:, None] < node[None, :])
    later = (key[:, None] == key[None, :]) & (node[:, None] > node[None, :])
    mine = key[:, None] == node[None, :]
    following = tl.min(tl.where(later, node[:, None], NODES), axis=0)
    eldest = tl.min(tl.where(mine, node[:, None], NODES), axis=0)
    children = tl.sum(mine.to(tl.int32), axis=0)
    first_sibling = tl.minimum(node, tl.min(tl.where(earlier, node[:, None], NODES), axis=0))

    declared = tl.full([], 0, tl.int32)
    kind = declared
    if HAS_Q:
        greedy = tl.load(inv_temperature + start, mask=count > 0, other=0.0) == 0.0
        declared = tl.load(siblings + request)
        kind = tl.where(greedy, 0, declared)
    twins = tl.max((earlier & (token[:, None] == token[None, :])).to(tl.int32)) > 0
    wrong = (tl.max((draft & (sound == 0)).to(tl.int32), axis=0) > 0) | (count > NODES)
    wrong = wrong | (twins & (declared != INDEPENDENT)) | (declared < 0) | (declared > 2)
    if HAS_Q:
        wrong = wrong | ((kind > 0) & (tl.max(children, axis=0) > max_siblings))
    code = tl.where(broken > 0, NO_DISTRIBUTION, tl.where(wrong, MALFORMED, 0))

    stats = (argmax, maximum, inv_temperature, floor, log_z)
    usable = draft_ok & (code == 0)
    above = start + tl.where(usable, parent, 0)
    p = law(logits, row_stride, stats, tl.where(usable, above, 0), tl.where(usable, token, 0), usable)
    tl.store(p_token + row, p, mask=inside)
    if HAS_Q:
        sampled = usable & (kind > 0)
        share = tl.load(q + (start + first_sibling) * q_stride + token, mask=sampled, other=1.0).to(tl.float64)
        tl.store(q_token + row, share, mask=inside)
        unusable = sampled & ((share > 0.0) & (share <= 2.0) == 0)
        # A sibling without mass is left to the walk: there may be none left in q.
        unusable = unusable & ((first_sibling == node) | (kind == INDEPENDENT) | (share != 0.0))
        code = tl.where((code == 0) & (tl.max(unusable.to(tl.int32), axis=0) > 0), BAD_Q, code)
    tl.store(first_child + row, tl.where(eldest < NODES, row - node + eldest, -1).to(tl.int32), mask=inside)
    tl.store(next_sibling + row, tl.where(following < NODES, row - node + following, -1).to(tl.int32), mask=inside)
    tl.store(num_children + row, children, mask=inside)
    tl.store(mode + row, tl.where(code == 0, kind, 0) + tl.zeros([NODES], tl.int32), mask=inside)
    tl.store(bad + request, code)


@triton.jit
def ratios_kernel(query_start, p_token, q_token, mode, bad, ratio, HAS_Q: tl.constexpr):
    """One program a request, block verification: r_0 = 1, r_i = min(1, r_{i-1} p(x_i) / q(x_i))."""
    request = tl.program_id(0)
    start = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    r = tl.full([], 1.0, tl.float64)
    if tl.load(bad + request) == 0:
        for row in range(start, end):
            if row > start:
                share = tl.full([], 1.0, tl.float64)
                if HAS_Q:  # noqa: SIM102 -- decided at compile time, the next one at run time
                    if tl.load(mode + row) != CHOSEN:
                        share = tl.load(q_token + row)
                r = tl.minimum(1.0, r * tl.load(p_token + row) / share)
            tl.store(ratio + row, r)


@triton.jit
def residual_kernel(
    logits,
    row_stride,
    argmax,
    maximum,
    inv_temperature,
    floor,
    log_z,
    tokens,
    parents,
    query_start,
    num_requests,
    q,
    q_stride,
    first_child,
    next_sibling,
    num_children,
    mode,
    ratio,
    z,
    d,
    partial,
    vocab_size,
    num_blocks,
    stages,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a (row, block): its part of Z and D after `stages` stages, for the rows that have one child more.

    CHAIN (block verification): its part of sum relu(r_i p - q) for the inner nodes of sampled chains.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if row >= tl.load(query_start + num_requests):
        return
    kind = tl.load(mode + row)
    if kind == CHOSEN:
        return
    if CHAIN:
        if (tl.load(num_children + row) == 0) | (tl.load(parents + row) < 0):
            return
    else:
        if tl.load(num_children + row) <= stages:
            return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    p = law(logits, row_stride, (argmax, maximum, inv_temperature, floor, log_z), row, token, inside)
    child = tl.load(first_child + row)
    share = tl.load(q + child.to(tl.int64) * q_stride + token, mask=inside, other=0.0).to(tl.float64)
    if CHAIN:
        p = p * tl.load(ratio + row)
    rest, _, judged = after_stages(p, share, token, child, kind, stages, tokens, next_sibling, z, d)
    sound = (share >= 0.0) & (share <= 2.0)
    rest = tl.where(sound, rest, float("nan"))
    at = (row * num_blocks + block) * 2
    tl.store(partial + at, tl.sum(rest, axis=0))
    tl.store(partial + at + 1, tl.sum(tl.where(judged, 0.0, share), axis=0))


@triton.jit
def totals_kernel(
    parents,
    query_start,
    num_requests,
    first_child,
    next_sibling,
    num_children,
    mode,
    partial,
    z,
    d,
    num_blocks,
    stages,
    CHAIN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program a row: Z and D of the blocks of `residual_kernel` together, kept at the child that they are for."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(query_start + num_requests):
        return
    if tl.load(mode + row) == CHOSEN:
        return
    if CHAIN:
        if (tl.load(num_children + row) == 0) | (tl.load(parents + row) < 0):
            return
    else:
        if tl.load(num_children + row) <= stages:
            return
    child = tl.load(first_child + row).to(tl.int64)
    if not CHAIN:
        for _ in range(stages):
            child = tl.load(next_sibling + child).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = partial + (row * num_blocks + block) * 2
    present = block < num_blocks
    tl.store(z + child, tl.sum(tl.load(at, mask=present, other=0.0), axis=0))
    tl.store(d + child, tl.sum(tl.load(at + 1, mask=present, other=0.0), axis=0))
