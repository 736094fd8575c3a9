"""silu_mul: out = silu(gate) * up, the gate and up halves lying side by side in one row.

Arithmetic is fp32 (fp64 for fp64 data); silu(gate) is rounded to the data's dtype before the product, as in
`specbench/engine/ops/torch_ops.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbench_kernels.checks import FLOATS, require, require_device, require_tensor, roundoff
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs

NAME = "silu_mul"
BLOCK = 1024
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def silu_mul_kernel(gate_up, out, in_stride, out_stride, num_columns, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    gate = tl.load(gate_up + row * in_stride + column, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + row * in_stride + num_columns + column, mask=inside, other=0.0).to(WIDE)
    # The exponent is never positive, so nothing overflows.
    power = tl.exp(-tl.abs(gate))
    silu = gate * tl.where(gate >= 0, 1.0, power) / (1.0 + power)
    silu = silu.to(gate_up.dtype.element_ty).to(WIDE)
    tl.store(out + row * out_stride + column, (silu * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """out [N, I] = silu(gate_up[:, :I]) * gate_up[:, I:] for gate_up [N, 2I] (rows may be strided).

    Raises ValueError for a wrong shape, dtype, device or stride.
    """
    require_tensor(NAME, "gate_up", gate_up, [None, None], FLOATS, contiguous=False)
    require_device(NAME, gate_up.device)
    rows, both = gate_up.shape
    require(both > 0 and both % 2 == 0, NAME, f"gate_up has {both} columns, expected an even number of them")
    columns = both // 2
    out = gate_up.new_empty(rows, columns) if out is None else out
    require_tensor(NAME, "out", out, [rows, columns], [gate_up.dtype], gate_up.device, contiguous=False)
    if rows == 0:
        return out
    silu_mul_kernel[(rows, triton.cdiv(columns, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        columns,
        WIDE=tl.float64 if gate_up.dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    random = torch.Generator(device=device).manual_seed(seed)
    shape = (case["rows"], 2 * case["columns"])
    values = 4 * torch.randn(shape, generator=random, device=device, dtype=torch.float32)
    out = torch.full((case["rows"], case["columns"]), float("nan"), dtype=case.dtype, device=device)
    return {"gate_up": values.to(case.dtype), "out": out}


def _run(inputs: Inputs) -> Outputs:
    return {"out": silu_mul(inputs["gate_up"], out=inputs["out"])}


def _reference(inputs: Inputs) -> Outputs:
    return {"out": silu_mul_reference(inputs["gate_up"])}


def _cost(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    return Cost(flops=6.0 * elements, bytes=3.0 * elements * case.dtype.itemsize)


def _tolerance(case: Case) -> tuple[float, float]:
    """Two roundings, and the error of exp (2 units of fp32 on a GPU); halves may become subnormal."""
    unit = roundoff(case.dtype)
    return 3 * unit + (1e-6 if case.dtype != torch.float64 else 1e-14), max(unit * 1e-2, 1e-16)


def _small() -> list[Case]:
    return [
        Case(f"{_TYPES[dtype]} {rows}x{columns}", dtype, {"rows": rows, "columns": columns})
        for dtype in _TYPES
        for rows, columns in ((1, 1), (3, 1536), (2, 1025), (4, 7))
    ]


def _bench() -> list[Case]:
    return [
        Case(f"bf16 {rows}x{columns}", torch.bfloat16, {"rows": rows, "columns": columns})
        for columns in (1536, 14336)
        for rows in (1, 32, 256, 4096)
    ]


def _compilations() -> list[Compilation]:
    return [
        Compilation(
            label=name,
            kernel=silu_mul_kernel,
            signature={
                "gate_up": f"*{name}",
                "out": f"*{name}",
                "in_stride": "i32",
                "out_stride": "i32",
                "num_columns": "i32",
            },
            constants={"WIDE": tl.float64 if name == "fp64" else tl.float32, "BLOCK": BLOCK},
            divisible=("gate_up", "out", "in_stride", "out_stride", "num_columns"),
        )
        for name in _TYPES.values()
    ]


OP = Op(NAME, _small, _bench, _inputs, _run, _reference, _cost, _tolerance, _compilations)
