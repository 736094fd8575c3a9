"""What a case holds in device memory, from shapes alone: weights, KV of all slots, drafter, logits of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from specbench.roofline.cost import LOGIT_BYTES, dtype_bytes, kv_bytes
from specbench.roofline.draft_cost import DraftShape
from specbench.roofline.shapes import ModelSpec

USABLE_SHARE = 0.95
"""Of a device's memory; the rest is the context of the driver, captured graphs and the allocator's slack."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by what holds them."""

    weights: float
    kv: float
    drafter: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.drafter + self.logits

    def why_not(self, memory_bytes: float, device: str) -> str | None:
        """Why it does not fit into `memory_bytes` of `device`, or None."""
        usable = USABLE_SHARE * memory_bytes
        if self.total <= usable:
            return None
        parts = (("weights", self.weights), ("KV cache", self.kv), ("drafter", self.drafter), ("logits", self.logits))
        told = ", ".join(f"{name} {size(held)}" for name, held in parts if held)
        return f"needs {size(self.total)} ({told}), and {device} has {size(usable)} to use of {size(memory_bytes)}"


def footprint(
    spec: ModelSpec,
    batch: int,
    tokens: int,
    rows: float,
    *,
    weight_dtype: str,
    kv_dtype: str | None = None,
    draft: DraftShape | None = None,
    draft_params: int = 0,
    draft_dtype: str = "bf16",
) -> Footprint:
    """`tokens` cached at most by each of `batch` requests (nodes of a draft included), `rows` logits of one pass.

    `draft_params` are the drafter's own weights; its layers keep K and V of the same tokens.
    """
    kv_format = kv_dtype or weight_dtype
    held = 0.0
    if draft is not None and draft.layer is not None and draft.layer.num_layers and draft.kind != "early_exit":
        held = float(kv_bytes(draft.layer, batch * tokens, draft_dtype))
    return Footprint(
        weights=_weight_bytes(spec, weight_dtype),
        kv=float(kv_bytes(spec, batch * tokens, kv_format)),
        drafter=held + float(draft_params * dtype_bytes(draft_dtype)),
        logits=float(rows * spec.vocab_size * LOGIT_BYTES),
    )


@lru_cache(maxsize=256)
def _weight_bytes(spec: ModelSpec, weight_dtype: str) -> float:
    return float(spec.weight_bytes(weight_dtype))


def size(num_bytes: float) -> str:
    """ "14.9 GiB"; MiB below one of them."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
