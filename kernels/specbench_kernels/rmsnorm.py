"""rmsnorm: y = weight * x / sqrt(mean(x^2) + eps), with the residual stream updated on the way.

One program a row, the row held in registers: x and the residual are read once, the residual and y written once.
Arithmetic is fp32 (fp64 for fp64 data). Rounded as `specbench/engine/ops/torch_ops.py` rounds: the sum with the
residual to x's dtype, the normed value to x's dtype, then the product with the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbench_kernels.checks import FLOATS, require, require_device, require_tensor, roundoff
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs

NAME = "rmsnorm"
MAX_COLUMNS = 32768  # a row must fit in the registers of one program
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def rmsnorm_kernel(
    x,
    residual,
    residual_out,
    weight,
    out,
    x_stride,
    residual_stride,
    residual_out_stride,
    out_stride,
    NUM_COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < NUM_COLUMNS
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(WIDE)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(WIDE)
        rounded = value.to(x.dtype.element_ty)
        tl.store(residual_out + row * residual_out_stride + column, rounded, mask=inside)
        value = rounded.to(WIDE)
    scale = tl.rsqrt(tl.sum(value * value, 0) / NUM_COLUMNS + EPS)
    normed = (value * scale).to(x.dtype.element_ty).to(WIDE)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
    tl.store(out + row * out_stride + column, (normed * gain).to(x.dtype.element_ty), mask=inside)


def _launch_shape(columns: int) -> tuple[int, int]:
    """BLOCK and num_warps: 8 to 32 values a thread."""
    block = max(32, triton.next_power_of_2(columns))
    return block, 4 if block <= 1024 else 8 if block <= 4096 else 16


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm of the rows of x [N, C] (rows may be strided), times weight [C] of the same dtype; returns out [N, C].

    With `residual` [N, C], residual += x first (in place, or into `residual_out`), and the sum is normed. `out` may be
    x. Raises ValueError for a wrong shape, dtype, device or stride, eps <= 0, or more than 32,768 columns.
    """
    require_tensor(NAME, "x", x, [None, None], FLOATS, contiguous=False)
    rows, columns = x.shape
    require_device(NAME, x.device)
    require(0 < columns <= MAX_COLUMNS, NAME, f"x has {columns} columns, expected 1 to {MAX_COLUMNS}")
    require(eps > 0, NAME, f"eps is {eps}, expected a positive number")
    require_tensor(NAME, "weight", weight, [columns], [x.dtype], x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    require(residual is not None or residual_out is None, NAME, "residual_out is given without residual")
    residual_out = residual if residual_out is None else residual_out
    for name, tensor in (("out", out), ("residual", residual), ("residual_out", residual_out)):
        if tensor is not None:
            require_tensor(NAME, name, tensor, [rows, columns], [x.dtype], x.device, contiguous=False)
    if rows == 0:
        return out
    block, num_warps = _launch_shape(columns)
    old, new = (x, x) if residual is None or residual_out is None else (residual, residual_out)
    rmsnorm_kernel[(rows,)](
        x,
        old,
        new,
        weight,
        out,
        x.stride(0),
        old.stride(0),
        new.stride(0),
        out.stride(0),
        NUM_COLUMNS=columns,
        EPS=eps,
        HAS_RESIDUAL=residual is not None,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


def rmsnorm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, new residual) in float64, nothing rounded on the way."""
    wide = x.double()
    total = None if residual is None else wide + residual.double()
    value = wide if total is None else total
    return weight.double() * value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps), total


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    random = torch.Generator(device=device).manual_seed(seed)
    shape = (case["rows"], case["columns"])

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device, dtype=torch.float32).to(case.dtype)

    inputs = {"x": normal(*shape), "weight": normal(shape[1]), "eps": 1e-5, "residual": None, "residual_out": None}
    if case["residual"]:
        inputs |= {"residual": normal(*shape), "residual_out": torch.empty(shape, dtype=case.dtype, device=device)}
    return inputs | {"out": torch.full(shape, float("nan"), dtype=case.dtype, device=device)}


def _run(inputs: Inputs) -> Outputs:
    out = rmsnorm(**inputs)
    return {"out": out} if inputs["residual"] is None else {"out": out, "residual": inputs["residual_out"]}


def _reference(inputs: Inputs) -> Outputs:
    out, total = rmsnorm_reference(inputs["x"], inputs["weight"], inputs["eps"], inputs["residual"])
    return {"out": out} if total is None else {"out": out, "residual": total}


def _cost(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    size = case.dtype.itemsize
    passes = 4 if case["residual"] else 2
    return Cost(flops=elements * (5.0 if case["residual"] else 4.0), bytes=size * (passes * elements + case["columns"]))


def _tolerance(case: Case) -> tuple[float, float]:
    """Three roundings (the sum, the normed value, the product), and the error of a mean of squares."""
    unit = roundoff(case.dtype)
    return 4 * unit + (1e-6 if case.dtype != torch.float64 else 1e-14), 4 * unit


def _small() -> list[Case]:
    return [
        Case(
            f"{_TYPES[dtype]} {rows}x{columns}{' +residual' * residual}",
            dtype,
            {"rows": rows, "columns": columns, "residual": residual},
        )
        for dtype in _TYPES
        for rows, columns, residual in ((1, 1, 0), (3, 576, 1), (2, 33, 1), (5, 128, 0))
    ]


def _bench() -> list[Case]:
    return [
        Case(f"bf16 {rows}x{columns} +residual", torch.bfloat16, {"rows": rows, "columns": columns, "residual": 1})
        for columns in (576, 4096)
        for rows in (1, 32, 256, 4096)
    ]


def _compilations() -> list[Compilation]:
    found = []
    for name in _TYPES.values():
        for columns in (576, 2048, 4096, 8192):
            for residual in (False, True):
                block, num_warps = _launch_shape(columns)
                pointers = ["x", "residual", "residual_out", "weight", "out"]
                strides = ["x_stride", "residual_stride", "residual_out_stride", "out_stride"]
                found.append(
                    Compilation(
                        label=f"{name} C{columns}{' +residual' * residual}",
                        kernel=rmsnorm_kernel,
                        signature=dict.fromkeys(pointers, f"*{name}") | dict.fromkeys(strides, "i32"),
                        constants={
                            "NUM_COLUMNS": columns,
                            "EPS": 1e-5,
                            "HAS_RESIDUAL": residual,
                            "WIDE": tl.float64 if name == "fp64" else tl.float32,
                            "BLOCK": block,
                        },
                        num_warps=num_warps,
                        divisible=(*pointers, *strides),
                    )
                )
    return found


OP = Op(NAME, _small, _bench, _inputs, _run, _reference, _cost, _tolerance, _compilations)
