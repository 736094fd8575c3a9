"""Which backend a target runs on, on which device, and whether its steps are captured as graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch

from specbench.errors import InputError
from specbench.scenario.cases import TargetSpec


def has_gpu() -> bool:
    """Whether torch sees a GPU that Triton kernels can run on."""
    return torch.cuda.is_available()


def resolve_backend(target: TargetSpec) -> str:
    """`auto` made explicit: triton on a GPU, the engine's own CPU kernels elsewhere; what a row stores is never `auto`.

    Raises InputError, with the remedy, where the backend can't run here.
    """
    if target.backend == "auto":
        return "triton" if has_gpu() and importlib.util.find_spec("triton") is not None else "cpu"
    if target.backend == "torch" and target.dtype == "fp16":
        raise InputError("torch has no fp16 matmul of use on a CPU", key="target.dtype", remedy="use backend: cpu")
    device_of(target.backend)
    return target.backend


def device_of(backend: str) -> str:
    """Where a backend runs: triton on the GPU, or in its interpreter where that is asked for; the others on the CPU."""
    if backend != "triton":
        return "cpu"
    if importlib.util.find_spec("triton") is None:
        raise InputError(
            "backend triton needs the package triton", key="target.backend", remedy="pip install specbench-suite[gpu]"
        )
    if has_gpu():
        return "cuda"
    from specbench_kernels.checks import interpreted

    if interpreted():
        return "cpu"
    raise InputError(
        "backend triton needs a GPU, and there is none",
        key="target.backend",
        remedy="use backend: cpu (own kernels) or torch; TRITON_INTERPRET=1 runs the kernels slowly on the CPU",
    )


def graphs_on(target: TargetSpec) -> bool:
    """Whether steps are captured: by default wherever graphs exist. Raises InputError for `graphs: on` elsewhere."""
    backend = resolve_backend(target)
    possible = device_of(backend) == "cuda"
    if target.graphs and not possible:
        raise InputError(
            f"backend {backend} has no graphs on this machine", key="target.graphs", remedy="write graphs: off"
        )
    return possible if target.graphs is None else target.graphs


def sweep_device(targets: Iterable[TargetSpec]) -> str:
    """The one device that a sweep runs on: its roofs and its environment are one device's.

    Raises InputError where its backends need two.
    """
    devices = sorted({device_of(resolve_backend(target)) for target in targets})
    if len(devices) > 1:
        raise InputError(
            "a sweep runs on one device, and these backends need the CPU and a GPU",
            key="target.backend",
            remedy="write a scenario for each",
        )
    return devices[0] if devices else "cpu"
