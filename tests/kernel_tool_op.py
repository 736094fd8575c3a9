"""Small ops to try the tools around the kernels on: a scaled copy, a matmul tile, and copies that are wrong on purpose.

Not a test: `specbench kernels --op kernel_tool_op:COPY` finds them by name where this folder is on the path.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs

BLOCK = 64


@triton.jit
def scaled_copy(x, y, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, (value * scale).to(y.dtype.element_ty), mask=at < n)


@triton.jit
def matmul_tile(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def too_many_values(x, out, M: tl.constexpr, N: tl.constexpr):
    """More live values than registers: this kernel must spill."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    tl.store(out + at, value + tl.sum(value, 0)[None, :] * tl.sum(value, 1)[:, None])


def small() -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    return [Case(f"{n} {str(d).removeprefix('torch.')}", d, {"n": n}) for n in (1, 100) for d in dtypes]


def inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    x = torch.randn(case["n"], generator=torch.Generator().manual_seed(seed)).to(device, case.dtype)
    return {"x": x, "scale": 1.5}


def run(given: Inputs) -> Outputs:
    x = given["x"]
    y = torch.full_like(x, float("nan"))
    scaled_copy[(triton.cdiv(len(x), BLOCK),)](x, y, len(x), given["scale"], BLOCK=BLOCK)
    return {"y": y, "count": torch.tensor([len(x)])}


def reference(given: Inputs) -> Outputs:
    return {"y": given["x"].double() * given["scale"], "count": torch.tensor([len(given["x"])])}


def compilations() -> list[Compilation]:
    copy = Compilation(
        label="bf16",
        kernel=scaled_copy,
        signature={"x": "*bf16", "y": "*bf16", "n": "i32", "scale": "fp32"},
        constants={"BLOCK": 1024},
        divisible=("x", "y", "n"),
    )
    return [copy, dataclasses.replace(copy, label="fp32", signature={**copy.signature, "x": "*fp32", "y": "*fp32"})]


def tiles() -> list[Compilation]:
    def tile(label: str, element: str) -> Compilation:
        pointers = dict.fromkeys(("x", "y"), f"*{element}") | {"out": "*fp32"}
        return Compilation(label, matmul_tile, pointers, {"N": 64}, divisible=tuple(pointers), uses_dot=True)

    return [tile("bf16", "bf16"), tile("fp16", "fp16")]


COPY = Op(
    name="scaled_copy",
    small=small,
    bench=lambda: [Case("64 Mi bf16", torch.bfloat16, {"n": 1 << 26})],
    inputs=inputs,
    run=run,
    reference=reference,
    cost=lambda case: Cost(float(case["n"]), 2.0 * case["n"] * case.dtype.itemsize),
    tolerance=lambda case: (0.01, 1e-6) if case.dtype == torch.bfloat16 else (1e-6, 1e-6),
    compilations=compilations,
)
TILE = dataclasses.replace(COPY, name="matmul_tile", compilations=tiles)


def _off_by_a_tenth(given: Inputs) -> Outputs:
    return {name: value * 1.1 if name == "y" else value for name, value in run(given).items()}


def _one_lost(given: Inputs) -> Outputs:
    y = run(given)["y"]
    y[-1] = float("nan")
    return {"y": y, "count": torch.tensor([len(y)])}


def _fails(given: Inputs) -> Outputs:
    raise ValueError(f"wrong shape {list(given['x'].shape)}")


def _spilling() -> list[Compilation]:
    return [Compilation("spills", too_many_values, {"x": "*fp32", "out": "*fp32"}, {"M": 64, "N": 128}, num_warps=1)]


def _no_tensor_cores() -> list[Compilation]:
    return [dataclasses.replace(compilations()[0], uses_dot=True)]


def _incomplete() -> list[Compilation]:
    return [dataclasses.replace(compilations()[0], label="bf16 without scale", signature={"x": "*bf16", "y": "*bf16"})]


def _untranslatable() -> list[Compilation]:
    signature = {"x": "*bf16", "y": "*bf16", "n": "i32", "scale": "fp32"}
    return [Compilation("block of 100", scaled_copy, signature, {"BLOCK": 100})]


WRONG = dataclasses.replace(COPY, name="off_by_a_tenth", run=_off_by_a_tenth)
LOST = dataclasses.replace(COPY, name="one_lost", run=_one_lost)
FAILS = dataclasses.replace(COPY, name="fails", run=_fails)
SPILLS = dataclasses.replace(COPY, name="spills", compilations=_spilling)
SCALAR = dataclasses.replace(COPY, name="scalar", compilations=_no_tensor_cores)
INCOMPLETE = dataclasses.replace(COPY, name="incomplete", compilations=_incomplete)
UNTRANSLATABLE = dataclasses.replace(COPY, name="untranslatable", compilations=_untranslatable)
