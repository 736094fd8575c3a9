"""Reference, cost and cases of kv_write."""

from __future__ import annotations

import torch

from specbench_kernels.checks import FP8, roundoff
from specbench_kernels.op import Case, Cost, Inputs, Outputs

_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
K_SCALE, V_SCALE = 0.037, 0.25  # of the cases with fp8 pools


def to_fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x / scale in `dtype`, saturated; the product with fp32(1 / scale) is rounded to fp32 first, as in the kernel."""
    largest = torch.finfo(dtype).max
    inverse = torch.tensor(1.0 / scale, dtype=torch.float32, device=x.device)
    return (x.float() * inverse).clamp(-largest, largest).to(dtype)


def rotated(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, Hq, D] and k [N, Hkv, D] in float64, normed and rotated by cos, sin [N, D/2], and v in its own dtype."""
    rows = qkv.view(qkv.shape[0], -1, head_dim)
    kv_heads = (rows.shape[1] - num_heads) // 2
    q, k, v = torch.split(rows, [num_heads, kv_heads, kv_heads], dim=1)
    turned = []
    for x, weight in ((q.double(), q_norm), (k.double(), k_norm)):
        if weight is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
        c, s = cos.double()[:, None], sin.double()[:, None]
        low, high = x.chunk(2, dim=-1)
        turned.append(torch.cat([low * c - high * s, high * c + low * s], dim=-1))
    return turned[0], turned[1], v


def reference(inputs: Inputs) -> Outputs:
    """The outputs of `kv_write` from pools as they were before: q, k in float64 (k of fp8 pools as bytes mean)."""
    dim, mapping = inputs["q_out"].shape[-1], inputs["slot_mapping"]
    real = mapping >= 0
    position = inputs["positions"].long()[real]
    q, k, v = rotated(
        inputs["qkv"][real],
        inputs["cos"][position],
        inputs["sin"][position],
        inputs["num_heads"],
        dim,
        inputs["q_norm"],
        inputs["k_norm"],
        inputs["eps"],
    )
    q_out = inputs["q_before"].double()
    q_out[real] = q
    k_cache, v_cache = inputs["k_before"].clone(), inputs["v_before"].clone()
    size = k_cache.shape[2]
    pages, offsets = mapping[real] // size, mapping[real] % size
    if k_cache.dtype in FP8:
        k = to_fp8(k, inputs["k_scale"], k_cache.dtype)
        v = to_fp8(v, inputs["v_scale"], v_cache.dtype)
        for pool, rows in ((k_cache, k), (v_cache, v)):
            pool.view(torch.uint8)[pages, :, offsets] = rows.view(torch.uint8)
        return {"q": q_out, "k": k_cache, "v": v_cache}
    k_wide = k_cache.double()
    k_wide[pages, :, offsets] = k
    v_cache[pages, :, offsets] = v
    return {"q": q_out, "k": k_wide, "v": v_cache}


def inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Fresh values; slots scattered over twice as many pages as are needed; the last `pads` rows are pads."""
    random = torch.Generator(device=device).manual_seed(seed)
    rows, dim, size = case["rows"], case["head_dim"], case["page_size"]
    heads = case["heads"] + 2 * case["kv_heads"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(case.dtype)

    pages = 2 * -(-rows // size)
    slots = torch.randperm(pages * size, generator=random, device=device)[:rows]
    positions = torch.randint(0, case["max_pos"], (rows,), generator=random, device=device, dtype=torch.int32)
    slots[rows - case["pads"] :] = -1
    positions[rows - case["pads"] :] = -1
    angles = torch.rand(case["max_pos"], dim // 2, generator=random, device=device, dtype=torch.float64) * 6.3
    table = torch.float64 if case.dtype == torch.float64 else torch.float32
    pool_type = {0: case.dtype, 3: torch.float8_e4m3fn, 2: torch.float8_e5m2}[case["fp8_mantissa"]]
    pool = normal(2, pages, case["kv_heads"], size, dim).to(pool_type)
    q_out = torch.full((rows, case["heads"], dim), float("nan"), dtype=case.dtype, device=device)
    return {
        "qkv": normal(rows, heads * dim),
        "cos": angles.cos().to(table),
        "sin": angles.sin().to(table),
        "positions": positions,
        "slot_mapping": slots,
        "k_cache": pool[0].clone(),
        "v_cache": pool[1].clone(),
        "k_before": pool[0],
        "v_before": pool[1],
        "q_out": q_out,
        "q_before": q_out.clone(),
        "num_heads": case["heads"],
        "q_norm": normal(dim) if case["norm"] else None,
        "k_norm": normal(dim) if case["norm"] else None,
        "eps": 1e-6,
        "k_scale": K_SCALE if case["fp8_mantissa"] else 1.0,
        "v_scale": V_SCALE if case["fp8_mantissa"] else 1.0,
    }


def cost(case: Case) -> Cost:
    """qkv, slots, positions and table rows read once; q, K and V written once. 3 FLOPs a rotated value, norms 5."""
    rows = case["rows"] - case["pads"]
    q, kv = case["heads"] * case["head_dim"], case["kv_heads"] * case["head_dim"]
    stored = 1 if case["fp8_mantissa"] else case.dtype.itemsize
    table = case["head_dim"] * (8 if case.dtype == torch.float64 else 4)
    size = (q + 2 * kv + q) * case.dtype.itemsize + 2 * kv * stored + table + 12
    return Cost(flops=rows * (q + kv) * (8.0 if case["norm"] else 3.0), bytes=float(rows * size))


def tolerance(case: Case) -> tuple[float, float]:
    """One rounding of values of size 1 to 10 (three with norms). An fp8 pool adds one of its steps."""
    unit = roundoff(case.dtype) + (1e-6 if case.dtype != torch.float64 else 1e-14)
    relative, absolute = (4 if case["norm"] else 2) * unit, (16 if case["norm"] else 4) * unit
    if not case["fp8_mantissa"]:
        return relative, absolute
    return 2.0 ** -case["fp8_mantissa"] + relative, (absolute if case["norm"] else 1e-5) / K_SCALE + 2.0**-9


def _case(dtype: torch.dtype, rows: int, shape: tuple[int, int, int], size: int, pads: int = 0, **more: int) -> Case:
    heads, kv_heads, dim = shape
    sizes = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "page_size": size, "pads": pads}
    sizes |= {"max_pos": 8192 if rows > 16 else 50, "norm": 0, "fp8_mantissa": 0} | more
    pool = {0: "", 2: " e5m2 pool", 3: " e4m3 pool"}[sizes["fp8_mantissa"]]
    name = f"{_TYPES[dtype]} N{rows} H{heads}/{kv_heads} D{dim} P{size}{' norm' * sizes['norm']}{pool}"
    return Case(name, dtype, sizes)


def small() -> list[Case]:
    """Cases for the interpreter: dims that are no power of two, odd groups, pads, pages of 1 to 32."""
    cases = []
    for dtype in _TYPES:
        cases += [
            _case(dtype, 5, (6, 2, 24), 4, pads=2),
            _case(dtype, 3, (9, 3, 64), 16),
            _case(dtype, 2, (6, 1, 80), 1, norm=1),
            _case(dtype, 4, (4, 2, 96), 32, pads=1, norm=1),
            _case(dtype, 2, (2, 1, 256), 16),
        ]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cases += [_case(dtype, 4, (6, 2, 80), 4, pads=1, fp8_mantissa=m, norm=m - 2) for m in (3, 2)]
    return cases


def bench() -> list[Case]:
    """Decode and verify steps of Llama-3.1-8B's attention (32/8 heads of 128) and of SmolLM2's (9/3 of 64)."""
    shapes = ((32, 8, 128), (9, 3, 64))
    cases = [_case(torch.bfloat16, rows, shape, 16) for shape in shapes for rows in (1, 32, 256, 2048)]
    fp8 = [_case(torch.bfloat16, rows, shapes[0], 16, fp8_mantissa=3) for rows in (32, 256)]
    return [*cases, *fp8, _case(torch.bfloat16, 256, shapes[0], 16, norm=1)]
