"""How a kernel is held against its reference: fresh inputs each run, every output compared, the seed in the message."""

from __future__ import annotations

import secrets

import torch
from specbench_kernels.op import Case, Inputs, Op, Outputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as integers, so that NaNs and signs of zero compare too."""
    return tensor.view(_INTEGER[tensor.dtype.itemsize]) if tensor.dtype.is_floating_point else tensor


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float], about: str) -> None:
    """Every value of `got` within relative + absolute tolerance of `want`, NaN only where `want` has one."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}; {about}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got.long(), want.long()), f"{name} differs; {about}"
        return
    wide, wanted = got.double(), want.double()
    same = (wide == wanted) | (wide.isnan() & wanted.isnan())
    close = (wide - wanted).abs() <= tolerance[1] + tolerance[0] * wanted.abs()
    bad = ~(same | close)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        error = (wide - wanted)[bad].abs().max().item()
        raise AssertionError(f"{name}: {int(bad.sum())} values off, by up to {error:.3g}, the first at {at}; {about}")


def check(op: Op, case: Case) -> tuple[Inputs, Outputs]:
    """Run `op` on fresh inputs and compare all outputs with its float64 reference; returns inputs and outputs."""
    seed = secrets.randbits(31)
    inputs = op.inputs(case, DEVICE, seed)
    got = op.run(inputs)
    want = op.reference(inputs)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], op.tolerance(case), f"{op.name} {case.name}, seed {seed}")
    return inputs, got
