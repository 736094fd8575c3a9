"""Every op by its name, imported only when it is asked for.

    python -c "from specbench_kernels import registry; print(registry.names())"

A name is one of `names()`, or "package.module:ATTRIBUTE" for an op that lives elsewhere, so that the same tools check,
time and compile it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from types import ModuleType

from specbench_kernels.op import Op

MODULES: dict[str, str] = {
    "tree_attention": "tree_attention",
    "kv_write": "kv_write",
    "kv_compact": "kv_compact",
    "rmsnorm": "rmsnorm",
    "silu_mul": "silu_mul",
    "expand": "tree_build",
    "rerank": "tree_build",
    "philox_uniforms": "philox",
    "row_stats": "processors",
    "probabilities": "processors",
    "verify_greedy": "verify_greedy",
    "verify_sampled": "verify_sampled",
}
"""Op name -> its module in this package. A module holds its ops in `OP`, or in `OPS` where there are several."""

REMEDY = "pip install 'triton>=3.6,<3.10'"


class KernelsUnavailableError(ImportError):
    """The kernels can't be imported here; the message holds the remedy."""


def names() -> tuple[str, ...]:
    """All ops of this package, in the order of their tables."""
    return tuple(MODULES)


def require_triton() -> None:
    """Raise KernelsUnavailableError, with the remedy, where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise KernelsUnavailableError(f"specbench_kernels needs triton, which is not installed; install it: {REMEDY}")


def find(name: str) -> Op:
    """The op called `name`.

    Raises KeyError with the nearest known name where there is none, KernelsUnavailableError without triton.
    """
    if ":" in name:
        require_triton()
        module_name, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module_name), attribute, None)
        if not isinstance(found, Op):
            raise KeyError(f"{name} is no Op")
        return found
    if name not in MODULES:
        near = difflib.get_close_matches(name, MODULES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(MODULES)}"
        raise KeyError(f"there is no op {name!r}: {hint}")
    require_triton()
    held = ops_of(importlib.import_module(f"specbench_kernels.{MODULES[name]}"))
    if name not in held:
        raise KeyError(f"module {MODULES[name]} holds no op {name!r}, only {', '.join(held) or 'none'}")
    return held[name]


def ops_of(module: ModuleType) -> dict[str, Op]:
    """The ops that a module offers, by name."""
    single = getattr(module, "OP", None)
    several = getattr(module, "OPS", ())
    return {op.name: op for op in ((single,) if single is not None else ()) + tuple(several)}
