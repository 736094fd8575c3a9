"""A head's tensors as a backend's operations read them, beside the target's embedding and unembedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specbench.engine.heads.spec import HeadSpec
from specbench.engine.ops.cpu_weights import PackedWeights, layer_shapes
from specbench.engine.ops.torch_ops import TorchWeights, fuse_layers

SHARED = "lm_head"


def _linear_names(spec: HeadSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Linear maps outside decoder layers: their name as an operation -> canonical weight."""
    names: dict[str, str] = {}
    for name in tensors:
        map_name, _, what = name.rpartition(".")
        if what == "weight" and (map_name == "fc" or map_name.endswith("eh_proj") or ".blocks." in map_name):
            names[map_name] = name
        elif map_name.endswith("lm_head"):
            names[_unembedding_name(map_name)] = name
    return names


def _unembedding_name(map_name: str) -> str:
    """`modules.m.lm_head` and `heads.m.lm_head` are "lm_head" for m = 0, then "lm_head.m"."""
    parts = map_name.split(".")
    return SHARED if len(parts) == 1 or parts[1] == "0" else f"{SHARED}.{parts[1]}"


class CpuHeadWeights(PackedWeights):
    """Packed weights of a head beside those of its target."""

    def __init__(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, target: PackedWeights
    ) -> None:
        linears = _linear_names(spec, tensors)
        shapes = {name: tuple(tensors[stored].shape) for name, stored in linears.items()}
        for index in range(spec.layer.num_layers if spec.kind != "medusa" else 0):
            reads = 2 * spec.hidden_size if spec.kind == "eagle3" and index == 0 else None
            shapes.update(layer_shapes(spec.layer, f"layers.{index}", reads))
        if not spec.own_head and spec.reduced_vocabulary:
            shapes[SHARED] = (spec.draft_vocab_size, spec.hidden_size)
        super().__init__(shapes, dtype)  # type: ignore[arg-type]
        for name, stored in linears.items():
            self.place_weight(name, tensors[stored].to(dtype))
            bias = tensors.get(f"{name}.bias")
            if bias is not None:
                self.place_bias(name, bias)
        for name, tensor in tensors.items():
            parts = name.split(".")
            if (".self_attn." in name and parts[-2].endswith("_proj")) or ".mlp." in name:
                self.place_layer(name, tensor.to(dtype) if parts[-1] == "weight" else tensor)
            elif name.startswith("fc_norms.") or (parts[-2:-1] and parts[-2].endswith("norm")):
                self.place_small(name, tensor)
        self.finish()
        if not spec.own_head:
            if spec.reduced_vocabulary:
                self.place_weight(SHARED, target.unembedding_rows(tensors["draft_ids"]))
            else:
                self.panels[SHARED] = target.panels[SHARED]
        self.table = tensors["embed_tokens.weight"].to(dtype).contiguous() if spec.own_embedding else target.table
        self._embedding = target.embedding

    @property
    def embedding(self) -> torch.Tensor:
        return self._embedding


class TorchHeadWeights:
    """Tensors of a head by the names that operations use, on the target's device."""

    def __init__(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, target: TorchWeights
    ) -> None:
        device = target.tensors["embed_tokens.weight"].device
        ids = tensors.get("draft_ids")
        loaded = {name: t.to(device=device, dtype=dtype) for name, t in tensors.items() if name != "draft_ids"}
        linears = _linear_names(spec, loaded)
        self.tensors = fuse_layers(loaded, spec.layer.num_layers if spec.kind != "medusa" else 0)
        for name, stored in linears.items():
            self.tensors[f"{name}.weight"] = self.tensors.pop(stored)
        if not spec.own_head:
            whole = target.tensors[f"{SHARED}.weight"]
            self.tensors[f"{SHARED}.weight"] = whole if ids is None else target.unembedding_rows(ids).contiguous()
        self.tensors.setdefault("embed_tokens.weight", target.tensors["embed_tokens.weight"])
