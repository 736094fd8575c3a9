"""kv_write: per-head norms, RoPE, and K/V into their physical slots of the paged pool, in one pass.

Replaces four passes (q/k norm, rotation of q, rotation of k, scatter): every value of qkv is read and written once.
Rotation is half-split (out_low = low * cos - high * sin, out_high = high * cos + low * sin), in fp32 (fp64 for fp64
data) and rounded once; the norms before it (Qwen3) round as `specbench/engine/ops/torch_ops.py` does. V is copied bit
for bit.

An fp8 pool stores value / scale, saturated. Its bytes are made with integer arithmetic: exact round-to-nearest-even on
every architecture (sm_80 has no such instruction) and in the interpreter (whose own conversion is wrong).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from specbench_kernels.checks import FLOATS, FP8, require, require_device, require_tensor
from specbench_kernels.kv_write_reference import bench, cost, inputs, reference, small, tolerance
from specbench_kernels.op import Compilation, Inputs, Op, Outputs

NAME = "kv_write"
ELEMENTS = 1024  # a program: 8 values a thread, 16 bytes of bf16
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


@triton.jit
def encode_fp8(x, MANTISSA: tl.constexpr):
    """fp32 to the bytes (uint8) of e4m3fn (MANTISSA 3) or e5m2 (2): nearest even, saturating, NaN to 0x7f."""
    LEAST: tl.constexpr = -6 if MANTISSA == 3 else -14  # exponent of the least normal number
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding 2^(LEAST - MANTISSA + 23) leaves the multiples of the subnormal step in the low bits.
    MAGIC: tl.constexpr = 16384.0 if MANTISSA == 3 else 128.0
    MAGIC_BITS: tl.constexpr = (127 + LEAST - MANTISSA + 23) << 23
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    nearest = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    normal = (nearest >> SHIFT) - ((127 + LEAST - 1) << MANTISSA)
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(bits < (127 + LEAST) << 23, subnormal, normal)
    code |= (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def _store(pool, value, scale, mask, MANTISSA: tl.constexpr):
    if MANTISSA == 0:
        tl.store(pool, value.to(pool.dtype.element_ty), mask=mask)
    else:
        tl.store(pool, encode_fp8(value.to(tl.float32) * scale, MANTISSA), mask=mask)


@triton.jit
def kv_write_kernel(
    qkv,
    cos,
    sin,
    positions,
    slots,
    k_cache,
    v_cache,
    q_out,
    q_norm,
    k_norm,
    k_inverse,
    v_inverse,
    qkv_stride,
    k_page,
    k_head,
    k_slot,
    v_page,
    v_head,
    v_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MANTISSA: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    # A pad's position and projections may hold anything: nothing of it is read.
    if slot >= 0:
        head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        column = tl.arange(0, BLOCK_HALF)[None, :]
        inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
        is_q = head < NUM_HEADS
        source = qkv + row * qkv_stride + head * HEAD_DIM + column
        raw_low = tl.load(source, mask=inside, other=0.0)
        raw_high = tl.load(source + HALF, mask=inside, other=0.0)
        low, high = raw_low.to(WIDE), raw_high.to(WIDE)
        if HAS_NORM:
            mean = (tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)) / HEAD_DIM
            scale = tl.rsqrt(mean + EPS)
            gain = tl.where(is_q, q_norm + column, k_norm + column)
            within = column < HALF
            low = (low * scale).to(qkv.dtype.element_ty).to(WIDE)
            low = (low * tl.load(gain, mask=within, other=0.0).to(WIDE)).to(qkv.dtype.element_ty).to(WIDE)
            high = (high * scale).to(qkv.dtype.element_ty).to(WIDE)
            high = (high * tl.load(gain + HALF, mask=within, other=0.0).to(WIDE)).to(qkv.dtype.element_ty).to(WIDE)
        angle = tl.load(positions + row).to(tl.int64) * HALF + column
        c = tl.load(cos + angle, mask=column < HALF, other=0.0).to(WIDE)
        s = tl.load(sin + angle, mask=column < HALF, other=0.0).to(WIDE)
        turned_low = low * c - high * s
        turned_high = high * c + low * s

        is_q = inside & is_q
        to_q = q_out + row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column
        tl.store(to_q, turned_low.to(q_out.dtype.element_ty), mask=is_q)
        tl.store(to_q + HALF, turned_high.to(q_out.dtype.element_ty), mask=is_q)

        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        k_index = (head - NUM_HEADS).to(tl.int64)
        is_k = inside & (k_index >= 0) & (k_index < NUM_KV_HEADS)
        to_k = k_cache + page * k_page + offset * k_slot + k_index * k_head + column
        _store(to_k, turned_low, k_inverse, is_k, MANTISSA)
        _store(to_k + HALF, turned_high, k_inverse, is_k, MANTISSA)

        v_index = k_index - NUM_KV_HEADS
        is_v = inside & (v_index >= 0)
        to_v = v_cache + page * v_page + offset * v_slot + v_index * v_head + column
        _store(to_v, raw_low, v_inverse, is_v, MANTISSA)
        _store(to_v + HALF, raw_high, v_inverse, is_v, MANTISSA)


def _blocks(heads: int, head_dim: int) -> tuple[int, int]:
    """BLOCK_HEADS and BLOCK_HALF: about ELEMENTS values a program, no more heads than there are."""
    half = triton.next_power_of_2(head_dim // 2)
    return min(max(1, ELEMENTS // (2 * half)), triton.next_power_of_2(heads)), half


def kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_out: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Rotate q into q_out [N, Hq, D]; rotate k and write it and v to the slots of k_cache, v_cache [pages, Hkv, P, D].

    qkv [N, (Hq + 2 Hkv) * D] in the pools' dtype (or fp16, bf16, fp32 with fp8 pools; rows may be strided), heads in
    the order q, k, v; cos, sin fp32 or fp64 [max_pos, D/2]; positions int32[N] in [0, max_pos); slot_mapping int64[N]:
    physical slot page * P + offset, each at most once, or -1 for a pad, for which nothing is written, not even q_out.
    The pools' last dimension has stride 1, the others any. `q_norm`, `k_norm` [D]: both or none. An fp8 pool holds
    value / scale, so that byte * scale is the value. Positions and slots are not checked (that would wait for the
    device). Raises ValueError for a wrong shape, dtype, device or stride, an odd D, or a scale that is not positive.
    """
    require_tensor(NAME, "q_out", q_out, [None, num_heads, None], FLOATS, qkv.device)
    rows, _, dim = q_out.shape
    require_device(NAME, qkv.device)
    require(dim > 0 and dim % 2 == 0, NAME, f"head dim {dim} is not even")
    require(k_cache.ndim == 4, NAME, f"k_cache has {k_cache.ndim} dimensions, expected [pages, heads, page size, D]")
    pages, kv_heads, page_size, _ = k_cache.shape
    pool_types = [q_out.dtype] if q_out.dtype == torch.float64 else [q_out.dtype, *FP8]
    for name, pool in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = [pages, kv_heads, page_size, dim]
        require_tensor(NAME, name, pool, shape, pool_types, qkv.device, contiguous=False)
    require(k_cache.dtype == v_cache.dtype, NAME, f"k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}")
    heads = num_heads + 2 * kv_heads
    require_tensor(NAME, "qkv", qkv, [rows, heads * dim], [q_out.dtype], contiguous=False)
    for name, table in (("cos", cos), ("sin", sin)):
        require_tensor(NAME, name, table, [cos.shape[0], dim // 2], [torch.float32, torch.float64], qkv.device)
    require_tensor(NAME, "positions", positions, [rows], [torch.int32], qkv.device)
    require_tensor(NAME, "slot_mapping", slot_mapping, [rows], [torch.int64], qkv.device)
    require((q_norm is None) == (k_norm is None), NAME, "q_norm and k_norm go together")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            require_tensor(NAME, name, weight, [dim], [q_out.dtype], qkv.device)
    require(eps > 0, NAME, f"eps is {eps}, expected a positive number")
    fp8 = k_cache.dtype in FP8
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        require(scale > 0 and math.isfinite(scale), NAME, f"{name} is {scale}, expected a positive number")
        require(fp8 or scale == 1.0, NAME, f"{name} is {scale}, and the pools are not fp8")
    if rows == 0:
        return q_out
    k_pool, v_pool = (k_cache.view(torch.uint8), v_cache.view(torch.uint8)) if fp8 else (k_cache, v_cache)
    block_heads, block_half = _blocks(heads, dim)
    kv_write_kernel[(rows, triton.cdiv(heads, block_heads))](
        qkv,
        cos,
        sin,
        positions,
        slot_mapping,
        k_pool,
        v_pool,
        q_out,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        1.0 / k_scale,
        1.0 / v_scale,
        qkv.stride(0),
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        EPS=eps,
        HAS_NORM=q_norm is not None,
        MANTISSA=_MANTISSA.get(k_cache.dtype, 0),
        WIDE=tl.float64 if qkv.dtype == torch.float64 else tl.float32,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
    )
    return q_out


def _run(made: Inputs) -> Outputs:
    arguments = {name: value for name, value in made.items() if not name.endswith("_before")}
    return {"q": kv_write(**arguments), "k": made["k_cache"], "v": made["v_cache"]}


def _compilation(label: str, data: str, pool: str, dim: int, *, norm: bool = False, mantissa: int = 0) -> Compilation:
    heads, kv_heads = 32, 8
    block_heads, block_half = _blocks(heads + 2 * kv_heads, dim)
    pointers = {"qkv": data, "cos": "fp32", "sin": "fp32", "positions": "i32", "slots": "i64", "k_cache": pool}
    pointers |= {"v_cache": pool, "q_out": data, "q_norm": data, "k_norm": data}
    strides = ("qkv_stride", "k_page", "k_head", "k_slot", "v_page", "v_head", "v_slot")
    signature: dict[str, Any] = {name: f"*{type_}" for name, type_ in pointers.items()}
    return Compilation(
        label=label,
        kernel=kv_write_kernel,
        signature=signature | {"k_inverse": "fp32", "v_inverse": "fp32"} | dict.fromkeys(strides, "i32"),
        constants={
            "NUM_HEADS": heads,
            "NUM_KV_HEADS": kv_heads,
            "HEAD_DIM": dim,
            "PAGE_SIZE": 16,
            "EPS": 1e-6,
            "HAS_NORM": norm,
            "MANTISSA": mantissa,
            "WIDE": tl.float64 if data == "fp64" else tl.float32,
            "BLOCK_HEADS": block_heads,
            "BLOCK_HALF": block_half,
        },
        divisible=(*pointers, *strides),
    )


def _compilations() -> list[Compilation]:
    dims = (64, 80, 96, 128, 256)
    plain = [_compilation(f"{t} D{d}", t, t, d) for t in ("bf16", "fp16", "fp32") for d in dims]
    norms = [_compilation(f"{t} D{d} norm", t, t, d, norm=True) for t in ("bf16", "fp16", "fp32") for d in (64, 128)]
    e4m3 = [_compilation(f"bf16 D{d} e4m3 pool", "bf16", "u8", d, mantissa=3) for d in dims]
    rest = [
        _compilation("bf16 D128 e5m2 pool", "bf16", "u8", 128, mantissa=2),
        _compilation("bf16 D128 norm e4m3 pool", "bf16", "u8", 128, norm=True, mantissa=3),
        _compilation("fp64 D64", "fp64", "fp64", 64),
        _compilation("fp64 D64 norm", "fp64", "fp64", 64, norm=True),
    ]
    return plain + norms + e4m3 + rest


OP = Op(NAME, small, bench, inputs, _run, reference, cost, tolerance, _compilations)
