"""kv_compact: after a tree step, the accepted path's K/V are moved down into the dense cells, all layers in one launch.

One program an (layer, KV head, request) reads a block of sources whole before it writes the block's targets, blocks in
ascending order. So a slot may be the source of one pair and the target of a later one: path 0, 2, 4 moves 2 -> 1 and
4 -> 2. Values are moved as integers: bit for bit, any dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbench_kernels.checks import FLOATS, FP8, require, require_device, require_tensor
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs

NAME = "kv_compact"
MAX_MOVES = 8  # a block: 8 rows of K and of V in registers
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["num_moves"])
def kv_compact_kernel(
    k_pool,
    v_pool,
    source,
    target,
    num_moves,
    k_layer,
    k_page,
    k_head,
    k_slot,
    v_layer,
    v_page,
    v_head,
    v_slot,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    layer = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    pairs = tl.program_id(1).to(tl.int64) * num_moves
    column = tl.arange(0, BLOCK_DIM)[None, :]
    k_base = k_pool + layer * k_layer + head * k_head + column
    v_base = v_pool + layer * v_layer + head * v_head + column
    for first in range(0, num_moves, BLOCK_MOVES):
        move = first + tl.arange(0, BLOCK_MOVES)
        old = tl.load(source + pairs + move, mask=move < num_moves, other=-1)[:, None]
        new = tl.load(target + pairs + move, mask=move < num_moves, other=-1)[:, None]
        moving = (old >= 0) & (new >= 0) & (old != new) & (column < HEAD_DIM)
        k = tl.load(k_base + old // PAGE_SIZE * k_page + old % PAGE_SIZE * k_slot, mask=moving)
        v = tl.load(v_base + old // PAGE_SIZE * v_page + old % PAGE_SIZE * v_slot, mask=moving)
        # Another thread may write the slot that this one has just read.
        tl.debug_barrier()
        tl.store(k_base + new // PAGE_SIZE * k_page + new % PAGE_SIZE * k_slot, k, mask=moving)
        tl.store(v_base + new // PAGE_SIZE * v_page + new % PAGE_SIZE * v_slot, v, mask=moving)


def _block_moves(moves: int) -> int:
    return min(MAX_MOVES, int(triton.next_power_of_2(moves)))


def kv_compact(k_pool: torch.Tensor, v_pool: torch.Tensor, *, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy K/V of slot source[b, m] to slot target[b, m], in every layer, in place.

    k_pool, v_pool [L, pages, H, P, D] of one dtype (last dimension of stride 1, the others any); source, target
    int64[B, M] physical slots page * P + offset, -1 (in either): no move. The pairs of a request come in ascending
    order of the cells: no source may be the target of an earlier pair (a path that is moved down never has one), and
    requests share no slots. Slots are not checked (that would wait for the device). Raises ValueError for a wrong
    shape, dtype or device.
    """
    require(
        k_pool.ndim == 5, NAME, f"k_pool has {k_pool.ndim} dimensions, expected [layers, pages, heads, page size, D]"
    )
    dtypes = (*FLOATS, *FP8)
    require_tensor(NAME, "k_pool", k_pool, [None] * 5, dtypes, contiguous=False)
    require_tensor(NAME, "v_pool", v_pool, k_pool.shape, [k_pool.dtype], k_pool.device, contiguous=False)
    require_device(NAME, k_pool.device)
    require_tensor(NAME, "source", source, [None, None], [torch.int64], k_pool.device)
    require_tensor(NAME, "target", target, source.shape, [torch.int64], k_pool.device)
    layers, _, heads, page_size, dim = k_pool.shape
    requests, moves = source.shape
    if requests == 0 or moves == 0 or layers * heads == 0:
        return
    integer = _INTEGER[k_pool.dtype.itemsize]
    kv_compact_kernel[(layers * heads, requests)](
        k_pool.view(integer),
        v_pool.view(integer),
        source,
        target,
        moves,
        *k_pool.stride()[:4],
        *v_pool.stride()[:4],
        NUM_HEADS=heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=dim,
        BLOCK_MOVES=_block_moves(moves),
        BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )


def kv_compact_reference(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A new pool: every source is read from a copy of the old pool, so the order does not matter."""
    size = pool.shape[3]
    moving = (source >= 0) & (target >= 0)
    old, new = source[moving], target[moving]
    moved = pool.clone()
    bits = moved.view(_INTEGER[pool.dtype.itemsize])
    bits[:, new // size, :, new % size] = pool.view(bits.dtype)[:, old // size, :, old % size]
    return moved


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """A step of `nodes` nodes a request behind a context; an accepted path of up to moves + 1 nodes, root included.

    With `aliased` 0 the accepted nodes are the last ones, so that no slot is source and target and a second run finds
    the same sources.
    """
    random = torch.Generator(device=device).manual_seed(seed)
    requests, nodes, moves, size = case["requests"], case["nodes"], case["moves"], case["page_size"]
    cells = case["context"] + nodes
    pages = requests * -(-cells // size)
    table = torch.randperm(pages, generator=random, device=device).view(requests, -1)
    source = torch.full((requests, moves), -1, dtype=torch.int64, device=device)
    target = source.clone()
    for b in range(requests):
        if case["aliased"]:
            count = int(torch.randint(0, min(moves, nodes - 1) + 1, (1,), generator=random, device=device))
            path = torch.randperm(nodes - 1, generator=random, device=device)[:count].sort().values + 1
        else:
            count = moves
            path = torch.arange(nodes - moves, nodes, device=device)
        for cell, row in ((case["context"] + path, source), (case["context"] + 1 + torch.arange(count), target)):
            cell = cell.to(device)
            row[b, :count] = table[b, cell // size] * size + cell % size
    shape = (2, case["layers"], pages, case["heads"], size, case["head_dim"])
    pools = torch.randn(shape, generator=random, device=device, dtype=torch.float32).to(case.dtype)
    return {
        "source": source,
        "target": target,
        "before": pools,
        "k_pool": pools[0].clone(),
        "v_pool": pools[1].clone(),
        "restore": bool(case["aliased"]),
    }


def _run(inputs: Inputs) -> Outputs:
    k_pool, v_pool = inputs["k_pool"], inputs["v_pool"]
    if inputs["restore"]:
        k_pool.copy_(inputs["before"][0])
        v_pool.copy_(inputs["before"][1])
    kv_compact(k_pool, v_pool, source=inputs["source"], target=inputs["target"])
    return {"k": k_pool, "v": v_pool}


def _reference(inputs: Inputs) -> Outputs:
    k, v = (kv_compact_reference(pool, inputs["source"], inputs["target"]) for pool in inputs["before"])
    return {"k": k, "v": v}


def _cost(case: Case) -> Cost:
    """Every moved row of K and V is read and written once."""
    moved = case["requests"] * case["moves"] * case["layers"] * case["heads"] * case["head_dim"]
    return Cost(flops=0.0, bytes=4.0 * moved * case.dtype.itemsize + 16.0 * case["requests"] * case["moves"])


def _case(
    dtype: torch.dtype, requests: int, moves: int, nodes: int, shape: tuple[int, int, int, int], **more: int
) -> Case:
    layers, heads, size, dim = shape
    sizes = {"requests": requests, "moves": moves, "nodes": nodes, "layers": layers, "heads": heads}
    sizes |= {"page_size": size, "head_dim": dim, "context": 5, "aliased": 1} | more
    name = f"{str(dtype).removeprefix('torch.')} B{requests} M{moves} L{layers} H{heads} D{dim} P{size}"
    return Case(name, dtype, sizes)


def _small() -> list[Case]:
    return [
        _case(dtype, requests, moves, nodes, shape)
        for dtype in (*FLOATS, *FP8)
        for requests, moves, nodes, shape in (
            (3, 4, 9, (2, 2, 4, 24)),
            (2, 11, 12, (1, 1, 1, 80)),
            (1, 1, 5, (2, 1, 16, 64)),
        )
    ]


def _bench() -> list[Case]:
    return [
        _case(torch.bfloat16, requests, 4, 16, (32, 8, 16, 128), context=64, aliased=0) for requests in (1, 32, 256)
    ]


def _compilations() -> list[Compilation]:
    names = ("k_layer", "k_page", "k_head", "k_slot", "v_layer", "v_page", "v_head", "v_slot")
    return [
        Compilation(
            label=f"{bits} bits D{dim} M{moves}",
            kernel=kv_compact_kernel,
            signature={
                "k_pool": f"*i{bits}",
                "v_pool": f"*i{bits}",
                "source": "*i64",
                "target": "*i64",
                "num_moves": "i32",
                **dict.fromkeys(names, "i32"),
            },
            constants={
                "NUM_HEADS": 8,
                "PAGE_SIZE": 16,
                "HEAD_DIM": dim,
                "BLOCK_MOVES": _block_moves(moves),
                "BLOCK_DIM": triton.next_power_of_2(dim),
            },
            divisible=("k_pool", "v_pool", "source", "target", *names),
        )
        for bits in (8, 16, 32, 64)
        for dim in (64, 80, 96, 128, 256)
        for moves in (4, 8)
    ]


OP = Op(NAME, _small, _bench, _inputs, _run, _reference, _cost, lambda _: (0.0, 0.0), _compilations)
