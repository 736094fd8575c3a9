"""Weights of backend `cpu`: one arena, packed into panels of 16 output columns ([panel, k, 16]), so that a matrix
product streams them once, front to back; norms and biases in the arithmetic type beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from specbench.engine.ops.heap import release_freed_memory
from specbench.engine.ops.vector import PANEL
from specbench.roofline.shapes import ModelSpec

FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up": ("gate_proj", "up_proj"),
    "o": ("o_proj",),
    "down": ("down_proj",),
}
"""Linear maps of a decoder layer that run as one, and the projections they are made of, in order."""


def padded(width: int) -> int:
    return -(-width // PANEL) * PANEL


def pack_panels(weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write weight [n, k] into `out` [panels, k, 16]; columns beyond n are zero."""
    n, k = weight.shape
    full = n // PANEL
    out[:full] = weight[: full * PANEL].view(full, PANEL, k).transpose(1, 2)
    if full < len(out):
        out[full].zero_()
        out[full, :, : n - full * PANEL] = weight[full * PANEL :].T


class PackedWeights:
    """Panels by name, and what stands beside them.

    `table` [V, H] is an embedding of its own; where it is None, `embedding` is the panels it is read from.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.real = torch.float64 if dtype == torch.float64 else torch.float32
        self.panels: dict[str, torch.Tensor] = {}
        self.small: dict[str, torch.Tensor] = {}
        self.table: torch.Tensor | None = None
        arena = torch.empty(sum(padded(n) * k for n, k in shapes.values()), dtype=dtype)
        at = 0
        for name, (n, k) in shapes.items():
            size = padded(n) * k
            self.panels[name] = arena[at : at + size].view(-1, k, PANEL)
            at += size
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def embedding(self) -> torch.Tensor:
        return self.panels["lm_head"]

    def unembedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[len(ids), H]: the unembedding of these tokens."""
        return self.panels["lm_head"][ids // PANEL, :, ids % PANEL]

    def place_weight(self, name: str, weight: torch.Tensor) -> None:
        """Pack weight [n, k] as `name`."""
        pack_panels(weight, self.panels[name])

    def place_small(self, name: str, values: torch.Tensor) -> None:
        """A norm's weights, as they are."""
        self.small[name] = values.to(self.real).contiguous()

    def place_bias(self, name: str, bias: torch.Tensor) -> None:
        """The bias of linear map `name`, zero beyond its columns."""
        values = torch.zeros(padded(len(bias)), dtype=self.real)
        values[: len(bias)] = bias
        self.small[f"{name}.bias"] = values

    def place_layer(self, name: str, tensor: torch.Tensor) -> None:
        """A projection `layers.i.<block>.<projection>.<weight or bias>`; packed once all it is fused with are there."""
        parts = name.split(".")
        layer, projection, what = ".".join(parts[:2]), parts[-2], parts[-1]
        fused, members = next((f, m) for f, m in FUSED.items() if projection in m)
        target = f"{layer}.{fused}"
        group = self._waiting.setdefault(f"{target}.{what}", {})
        group[projection] = tensor
        if len(group) < len(members):
            return
        whole = torch.cat([group[m] for m in members])
        del self._waiting[f"{target}.{what}"]
        if what == "weight":
            self.place_weight(target, whole)
        else:
            self.place_bias(target, whole)

    def finish(self) -> None:
        assert not self._waiting, f"tensors missing for {sorted(self._waiting)}"
        release_freed_memory()


class CpuWeights(PackedWeights):
    """The packed weights of one model."""

    def __init__(self, spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
        shapes = {
            fused: shape for i in range(spec.num_layers) for fused, shape in layer_shapes(spec, f"layers.{i}").items()
        }
        super().__init__({**shapes, "lm_head": (spec.vocab_size, spec.hidden_size)}, dtype)
        for name, tensor in tensors:
            if name == "embed_tokens.weight" and not spec.tie_word_embeddings:
                self.table = tensor.contiguous()
            elif name in ("embed_tokens.weight", "lm_head.weight"):
                self.place_weight("lm_head", tensor)
            elif name.split(".")[-2].endswith("norm"):
                self.place_small(name, tensor)
            else:
                self.place_layer(name, tensor)
            del tensor
        self.finish()


def layer_shapes(spec: ModelSpec, at: str, reads: int | None = None) -> dict[str, tuple[int, int]]:
    """[out, in] of the fused linear maps of one decoder layer, whose attention reads `reads` columns (default H)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        f"{at}.qkv": ((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, reads or hidden),
        f"{at}.o": (hidden, spec.num_heads * spec.head_dim),
        f"{at}.gate_up": (2 * inner, hidden),
        f"{at}.down": (hidden, inner),
    }
