"""How a call of tree_attention is launched: tiles, splits, workspace, compile-time arguments, what to compile.

All plain functions of the sizes, so that tests and tools can ask for the path that a call takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from specbench_kernels.op import Compilation
from specbench_kernels.tree_attention_kernel import attention_kernel, merge_kernel

KV_FP8 = torch.float8_e4m3fn
MAX_SPLITS = 128
MERGE_BLOCK = 16
TRITON_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True)
class Plan:
    """How a call is launched: `num_tiles` query tiles of `block_m` rows x `num_splits` splits x KV heads x requests.

    Key blocks have `block_n` cells. With one split the output is written directly and no workspace is used.
    """

    block_m: int
    block_n: int
    num_tiles: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_num_splits(
    batch: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_sms: int,
    *,
    num_tiles: int = 1,
    block_n: int = 64,
    programs_per_sm: int = 2,
) -> int:
    """Splits of the cells that fill the chip: the least estimate of waves x key blocks a program.

    A program costs its key blocks and one more to start; a merge costs two. Below two blocks a split gains nothing.
    Without SMs (the CPU, whose interpreter runs one program at a time) nothing is split.
    """
    if num_sms == 0:
        return 1
    blocks = max(triton.cdiv(max_seq_len, block_n), 1)
    programs = max(batch * num_kv_heads * num_tiles, 1)
    resident = programs_per_sm * num_sms

    def estimate(splits: int) -> int:
        return triton.cdiv(programs * splits, resident) * (triton.cdiv(blocks, splits) + 1) + (2 if splits > 1 else 0)

    return min(range(1, max(min(blocks // 2, MAX_SPLITS), 1) + 1), key=estimate)


def _tile(dtype: torch.dtype, cache: str, head_dim: int, rows: int, window: int) -> tuple[int, int, int, int]:
    """(block_m, block_n, num_warps, num_stages) for `rows` query rows a KV head.

    Table entries lead to K and V, so the pipeline's stages are shared by two loads: 5 stages keep two tiles of K and V
    under way, 7 keep three. Two programs of 4 warps, or one of 8, fit on an SM.
    """
    wanted = max(triton.next_power_of_2(rows), 16)
    if dtype.itemsize >= 4:
        # No tensor cores: every product is an FMA on registers, so tiles are small.
        return (min(wanted, 32), 32, 4, 3) if head_dim <= 64 else (16, 16, 4, 3)
    # A window's positions need registers too.
    block_m = min(wanted, 128 if head_dim <= 64 or (head_dim <= 128 and not window) else 64)
    if block_m == 128 or head_dim > 128:
        block_n = 64 if cache == "fp8" and head_dim <= 64 else 32
    elif head_dim > 64:
        block_n = 32 if cache == "bits" or block_m == 64 else 64
    else:
        block_n = 64 if cache == "bits" or block_m == 64 else 128
    tile_bytes = block_n * triton.next_power_of_2(head_dim) * (dtype.itemsize if cache == "same" else 1)
    crowded = block_m * head_dim > 64 * 128 or (block_m * head_dim > 32 * 128 and window > 0)
    # Padded tiles of fp8, and wide ones decoded by hand, need more registers than 4 warps have on sm_100.
    padded = head_dim > 64 and head_dim != triton.next_power_of_2(head_dim)
    crowded |= (cache == "fp8" and padded) or (cache == "bits" and head_dim > 128)
    return block_m, block_n, 8 if block_m == 128 or crowded else 4, 7 if tile_bytes <= 8192 else 5


@functools.lru_cache(maxsize=4096)
def plan(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    batch: int,
    num_kv_heads: int,
    max_nodes: int,
    max_seq_len: int,
    num_sms: int,
    cache: str = "same",
    window: int = 0,
    num_splits: int | None = None,
) -> Plan:
    """The launch for these sizes; `group` = query heads a KV head, `num_splits` None = choose_num_splits.

    `cache`: "same" (K and V in the dtype of q), "fp8" (converted by the GPU) or "bits" (decoded by integer operations).
    """
    block_m, block_n, num_warps, num_stages = _tile(dtype, cache, head_dim, max_nodes * group, window)
    num_tiles = triton.cdiv(max_nodes * group, block_m)
    if num_splits is None:
        cells = min(max_seq_len, window + max_nodes) if window else max_seq_len
        num_splits = choose_num_splits(
            batch,
            num_kv_heads,
            cells,
            num_sms,
            num_tiles=num_tiles,
            block_n=block_n,
            programs_per_sm=1 if num_warps == 8 else 2,
        )
    return Plan(block_m, block_n, num_tiles, num_splits, num_warps, num_stages)


def workspace_size(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Elements of the workspace (fp32; fp64 for fp64 queries): a partial output and its log-sum-exp for every split."""
    return num_rows * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """SMs of the device; 0 for the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.cache
def cache_kind(device: torch.device, dtype: torch.dtype) -> str:
    """The `cache` of `plan` for K and V of `dtype` on the device: GPUs before sm_89 can't convert from e4m3."""
    if dtype != KV_FP8:
        return "same"
    return "bits" if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9) else "fp8"


def constants(
    chosen: Plan,
    dtype: torch.dtype,
    *,
    group: int,
    head_dim: int,
    page_size: int,
    granularity: int,
    mask_words: int,
    window: bool,
    cache: str,
    in_interpreter: bool,
) -> dict[str, Any]:
    """The compile-time arguments of attention_kernel. In the interpreter bf16 is computed in fp32."""
    upcast = in_interpreter and dtype == torch.bfloat16
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "PAGE_SIZE": page_size,
        "GRANULARITY": granularity,
        "MASK_WORDS": mask_words,
        "WINDOW": window,
        "SPLIT": chosen.num_splits > 1,
        "FP8_BITS": cache == "bits",
        "DOT": tl.float32 if upcast else TRITON_TYPES[dtype],
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
    }


POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
STRIDES = ("qn", "qh", "kp", "kh", "kt", "vp", "vh", "vt", "on", "oh")


def _compilation(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    nodes: int = 8,
    group: int = 4,
    granularity: int = 16,
    mask_words: int = 1,
    window: bool = False,
    num_splits: int = 8,
    cache: str = "same",
) -> Compilation:
    """attention_kernel as tree_attention launches it."""
    chosen = plan(
        dtype,
        head_dim,
        group,
        batch=1,
        num_kv_heads=8,
        max_nodes=nodes,
        max_seq_len=4096,
        num_sms=132,
        cache=cache,
        window=int(window),
        num_splits=num_splits,
    )
    element, accumulator = POINTERS[dtype], "*fp64" if dtype == torch.float64 else "*fp32"
    kv = {"same": element, "fp8": "*fp8e4nv", "bits": "*u8"}[cache]
    signature = {"q_ptr": element, "k_ptr": kv, "v_ptr": kv, "out_ptr": element}
    absent: dict[str, Any] = {}
    for pointer, kind, used in (
        ("partial_ptr", accumulator, num_splits > 1),
        ("lse_ptr", accumulator, num_splits > 1),
        ("table_ptr", "*i32", True),
        ("context_lens_ptr", "*i32", True),
        ("seq_lens_ptr", "*i32", True),
        ("query_start_ptr", "*i32", True),
        ("mask_ptr", "*i64", mask_words > 0),
        ("positions_ptr", "*i32", window),
    ):
        if used:
            signature[pointer] = kind
        else:
            absent[pointer] = None
    divisible = (*signature, *(f"stride_{stride}" for stride in STRIDES))
    signature |= {"qk_scale": "fp64", "v_scale": "fp64"}
    signature |= {f"stride_{stride}": "i32" for stride in (*STRIDES, "tb")} | {"window": "i32", "num_splits": "i32"}
    arguments = constants(
        chosen,
        dtype,
        group=group,
        head_dim=head_dim,
        page_size=16,
        granularity=granularity,
        mask_words=mask_words,
        window=window,
        cache=cache,
        in_interpreter=False,
    )
    return Compilation(
        label=f"{name}, D {head_dim}, {nodes} nodes, {'pages' if granularity > 1 else 'slots'}"
        f"{', chain' if mask_words == 0 else ''}{', window' if window else ''}{', 1 split' if num_splits == 1 else ''}",
        kernel=attention_kernel,
        signature=signature,
        constants=absent | arguments,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        divisible=divisible,
        uses_dot=dtype.itemsize == 2,
        minimum_arch=89 if cache == "fp8" else 80,
    )


def _merge_compilation(dtype: torch.dtype, head_dim: int) -> Compilation:
    pointers = {"out_ptr": POINTERS[dtype], "partial_ptr": "*fp32", "lse_ptr": "*fp32", "query_start_ptr": "*i32"}
    sizes = {"batch": "i32", "stride_on": "i32", "stride_oh": "i32", "num_splits": "i32"}
    block_d = max(triton.next_power_of_2(head_dim), 16)
    return Compilation(
        label=f"merge {str(dtype).removeprefix('torch.')}, D {head_dim}",
        kernel=merge_kernel,
        signature=pointers | sizes,
        constants={"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_S": MERGE_BLOCK, "ACC": tl.float32},
        num_stages=3,
        divisible=(*pointers, "stride_on", "stride_oh"),
    )


def compilations() -> list[Compilation]:
    """Every dtype x head dim, and around bf16 (the dtype of the bench) each option that makes another kernel."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

    def grid() -> Iterator[Compilation]:
        for head_dim in (64, 80, 96, 128, 256):
            yield _compilation("bf16", bf16, head_dim)
            yield _compilation("bf16", bf16, head_dim, granularity=1)
            yield _compilation("bf16", bf16, head_dim, window=True)
            yield _compilation("bf16", bf16, head_dim, nodes=1, mask_words=0)
            yield _compilation("bf16", bf16, head_dim, nodes=128, mask_words=2, num_splits=1)
            yield _compilation("fp16", fp16, head_dim)
            yield _compilation("fp32", fp32, head_dim)
            yield _compilation("bf16 q, fp8 KV", bf16, head_dim, cache="fp8")
            yield _compilation("bf16 q, fp8 KV by bits", bf16, head_dim, cache="bits")
        for head_dim in (64, 128):
            yield _compilation("bf16", bf16, head_dim, num_splits=1)
            yield _compilation("bf16", bf16, head_dim, nodes=16)
            yield _compilation("bf16 q, fp8 KV", bf16, head_dim, nodes=128, mask_words=2, cache="fp8")
            yield _compilation("bf16", bf16, head_dim, granularity=1, window=True)
            yield _compilation("bf16", bf16, head_dim, mask_words=0, window=True)
            yield _compilation("bf16", bf16, head_dim, nodes=128, mask_words=2, window=True)
            yield _compilation("bf16", bf16, head_dim, nodes=128, mask_words=0)
            yield _compilation("fp32", fp32, head_dim, granularity=1, window=True)
            yield _compilation("bf16 q, fp8 KV", bf16, head_dim, granularity=1, cache="fp8")
            yield _compilation("fp16 q, fp8 KV", fp16, head_dim, cache="fp8")
        for head_dim in (64, 128, 256):
            yield _merge_compilation(bf16, head_dim)
        yield _merge_compilation(fp32, 128)

    return list(grid())
