"""rmsnorm and silu_mul: against float64, rounding order, strides, extremes, wrong arguments."""

from __future__ import annotations

import secrets

import pytest
import torch
from kernel_cases import DEVICE, assert_close, bits, check
from specbench_kernels import rmsnorm as rmsnorm_module
from specbench_kernels import silu_mul as silu_mul_module
from specbench_kernels.op import Case
from specbench_kernels.rmsnorm import rmsnorm, rmsnorm_reference
from specbench_kernels.silu_mul import silu_mul, silu_mul_reference


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> torch.Tensor:
    random = torch.Generator(device=DEVICE).manual_seed(secrets.randbits(31) if seed is None else seed)
    return torch.randn(shape, generator=random, device=DEVICE, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("case", rmsnorm_module.OP.small(), ids=lambda case: case.name)
def test_rmsnorm_against_float64(case: Case) -> None:
    inputs, _ = check(rmsnorm_module.OP, case)
    # The columns beyond a power of two are a path of their own.
    assert rmsnorm_module._launch_shape(case["columns"])[0] >= case["columns"]
    assert inputs["out"].dtype == case.dtype


@pytest.mark.parametrize("case", silu_mul_module.OP.small(), ids=lambda case: case.name)
def test_silu_mul_against_float64(case: Case) -> None:
    check(silu_mul_module.OP, case)


def torch_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As backend torch computes it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def test_rmsnorm_rounds_in_the_order_of_backend_torch() -> None:
    x, added, weight = (normal(n, 512, dtype=torch.float16) for n in (4, 4, 1))
    residual = added.clone()
    out = rmsnorm(x, weight[0], eps=1e-5, residual=residual)
    assert torch.equal(residual, x + added)
    assert (out == torch_norm(x + added, weight[0], 1e-5)).double().mean() > 0.98
    # Rounded once at the end, or with an unrounded sum, a good part of the values differ: the order is seen.
    once = rmsnorm_reference(x + added, weight[0], 1e-5)[0].half()
    assert (out == once).double().mean() < 0.9
    unrounded = torch_norm(x.float() + added.float(), weight[0].float(), 1e-5).half()
    assert (out == unrounded).double().mean() < 0.9


def test_silu_mul_rounds_in_the_order_of_backend_torch() -> None:
    gate_up = normal(4, 1024, dtype=torch.float16)
    gate, up = gate_up.chunk(2, dim=-1)
    out = silu_mul(gate_up)
    assert (out == torch.nn.functional.silu(gate) * up).double().mean() > 0.98
    assert (out == silu_mul_reference(gate_up).half()).double().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rmsnorm_residual_in_place_or_beside(dtype: torch.dtype) -> None:
    x, residual, weight = normal(3, 40, dtype=dtype), normal(3, 40, dtype=dtype), normal(40, dtype=dtype)
    before, beside = residual.clone(), torch.full_like(residual, float("nan"))
    first = rmsnorm(x, weight, eps=1e-6, residual=residual, residual_out=beside)
    assert torch.equal(bits(residual), bits(before))
    second = rmsnorm(x, weight, eps=1e-6, residual=residual)
    assert torch.equal(bits(residual), bits(beside))
    assert torch.equal(bits(first), bits(second))
    assert not torch.equal(bits(residual), bits(before))


def test_rmsnorm_rows_may_be_strided_and_out_may_be_x() -> None:
    whole = torch.full((4, 100), float("nan"), dtype=torch.float64, device=DEVICE)
    x, residual = whole[:, 3:40], torch.full((4, 90), float("nan"), dtype=torch.float64, device=DEVICE)[:, :37]
    x.copy_(normal(4, 37))
    residual.copy_(normal(4, 37))
    weight = normal(37, dtype=torch.float64)
    want, total = rmsnorm_reference(x.clone(), weight, 1e-6, residual.clone())
    rmsnorm(x, weight, eps=1e-6, residual=residual, out=x)
    assert total is not None
    assert_close("residual", residual, total, (1e-15, 0.0), "strided")
    assert_close("out", x, want, (1e-13, 1e-13), "strided")
    assert whole[:, :3].isnan().all()
    assert whole[:, 40:].isnan().all()


def test_silu_mul_rows_may_be_strided() -> None:
    gate_up = torch.full((3, 50), float("nan"), dtype=torch.float64, device=DEVICE)[:, :26]
    gate_up.copy_(normal(3, 26))
    whole = torch.full((3, 20), float("nan"), dtype=torch.float64, device=DEVICE)
    out = silu_mul(gate_up, out=whole[:, :13])
    assert out.data_ptr() == whole.data_ptr()
    assert_close("out", out, silu_mul_reference(gate_up), (1e-14, 1e-15), "strided")
    assert whole[:, 13:].isnan().all()


def test_extremes_stay_finite() -> None:
    assert torch.equal(
        rmsnorm(torch.zeros(2, 8, device=DEVICE), torch.ones(8, device=DEVICE), eps=1e-6).cpu(), torch.zeros(2, 8)
    )
    # The squares overflow fp16; the arithmetic is fp32.
    big = torch.full((1, 64), 60000.0, dtype=torch.float16, device=DEVICE)
    assert torch.equal(rmsnorm(big, torch.ones_like(big[0]), eps=1e-5), torch.ones_like(big))
    gate = torch.tensor([-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4], dtype=torch.float32, device=DEVICE)
    out = silu_mul(torch.cat([gate, torch.full_like(gate, 2.0)])[None])[0].cpu()
    assert_close("silu", out, 2 * gate.cpu().double() * torch.sigmoid(gate.cpu().double()), (1e-6, 1e-30), "extremes")


def test_no_rows_no_launch() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    assert rmsnorm(empty, torch.ones(8, device=DEVICE), eps=1e-6).shape == (0, 8)
    assert silu_mul(empty).shape == (0, 4)


X, W = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X.int()}, "x is int32"),
        ({"x": X.t()}, "stride"),
        ({"weight": W[:4]}, r"weight has shape \[4\], expected \[8\]"),
        ({"weight": W.half()}, "weight is float16, expected float32"),
        ({"residual": X[:1]}, "residual has shape"),
        ({"residual_out": X}, "residual_out is given without residual"),
        ({"out": X.double()}, "out is float64"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"x": torch.ones(1, 32769, device=DEVICE)}, "32769 columns"),
        ({"x": torch.ones(1, 0, device=DEVICE)}, "0 columns"),
    ],
)
def test_rmsnorm_refuses(arguments: dict[str, object], message: str) -> None:
    whole: dict[str, object] = {"x": X, "weight": W, "eps": 1e-6} | arguments
    with pytest.raises(ValueError, match=message):
        rmsnorm(**whole)  # type: ignore[arg-type]


def test_silu_mul_refuses() -> None:
    for wrong, message in ((X[:, :7], "7 columns"), (X.t(), "stride"), (X.int(), "int32"), (X[0], "shape")):
        with pytest.raises(ValueError, match=message):
            silu_mul(wrong)
    with pytest.raises(ValueError, match="out has shape"):
        silu_mul(X, out=X)
