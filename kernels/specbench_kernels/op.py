"""What an op is to the tools around it: cases, inputs, the kernel's run, the reference, the cost, what to compile.

`specbench kernels`, the tests and the GPU check go through this one description, so that none of them times or checks
something else than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One point of an op's grid: a name for people, the dtype of its data, and its sizes."""

    name: str
    dtype: torch.dtype
    sizes: Mapping[str, int]

    def __getitem__(self, size: str) -> int:
        return self.sizes[size]


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of device memory that the op must move at least."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Compilation:
    """One kernel to compile ahead of time, just as the wrapper would launch it.

    `kernel` is the @triton.jit function; `signature` maps each run-time argument to a Triton type ("*bf16", "i32",
    "fp32"), `constants` each constexpr to its value; `divisible` names the pointers and sizes that the launcher would
    specialise as multiples of 16. `uses_dot` promises tensor-core instructions; `no_spills` that nothing spills;
    `minimum_arch` is the oldest architecture that can run it (89: sm_89 and up).
    """

    label: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    divisible: Sequence[str] = ()
    uses_dot: bool = False
    no_spills: bool = True
    minimum_arch: int = 80


@dataclass(frozen=True)
class Op:
    """`small` cases suit the interpreter, `bench` cases a GPU. `reference` computes in float64.

    `run` and `reference` take what `inputs` made and return outputs under the same names; both leave the inputs as they
    were, so that they can be run again. `tolerance` is (relative, absolute) against the reference; exact ops give 0, 0.
    """

    name: str
    small: Callable[[], list[Case]]
    bench: Callable[[], list[Case]]
    inputs: Callable[[Case, torch.device, int], Inputs]
    run: Callable[[Inputs], Outputs]
    reference: Callable[[Inputs], Outputs]
    cost: Callable[[Case], Cost]
    tolerance: Callable[[Case], tuple[float, float]]
    compilations: Callable[[], list[Compilation]] = field(default=list)
