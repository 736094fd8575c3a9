"""Checks at the door of every op: a kernel given a wrong shape reads memory that is not its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: decided by TRITON_INTERPRET when triton was imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`. The interpreter cuts bf16 off instead of rounding it."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and interpreted() else 2)


def require(condition: bool, op: str, message: str) -> None:
    """Raise ValueError "op: message" unless `condition` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def require_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    *,
    contiguous: bool = True,
) -> None:
    """Raise ValueError unless `tensor` has `shape` (None: any size), one of `dtypes`, and lies on `device`.

    `contiguous` asks for a contiguous tensor; without it only the last dimension must have stride 1.
    """
    fits = tensor.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    require(fits, op, f"{name} has shape {list(tensor.shape)}, expected {wanted}")
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    require(tensor.dtype in dtypes, op, f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected {names}")
    if device is not None:
        require(tensor.device == device, op, f"{name} is on {tensor.device}, the other tensors on {device}")
    if contiguous:
        require(tensor.is_contiguous(), op, f"{name} is not contiguous")
    elif tensor.ndim and tensor.shape[-1] > 1:
        require(tensor.stride(-1) == 1, op, f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")


def require_device(op: str, device: torch.device) -> None:
    """Raise ValueError where no kernel can run: on the CPU only the interpreter runs them."""
    require(
        device.type == "cuda" or interpreted(),
        op,
        f"Triton kernels run on a GPU, and the tensors are on {device} "
        "(set TRITON_INTERPRET=1 before the start to run them in the interpreter)",
    )
