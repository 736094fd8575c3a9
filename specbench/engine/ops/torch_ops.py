"""Backend `torch`: the same operations in plain torch, on any device. It is the reference of every other backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch

from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.ops.batch import ForwardBatch
from specbench.roofline.shapes import ModelSpec


class TorchWeights:
    """Weights by canonical name, fused as the decoder uses them: q/k/v and gate/up."""

    def __init__(
        self, spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: str
    ) -> None:
        loaded = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors}
        self.tensors = fuse_layers(loaded, spec.num_layers)
        if spec.tie_word_embeddings:
            self.tensors["lm_head.weight"] = self.tensors["embed_tokens.weight"]

    def unembedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[len(ids), H]: the unembedding of these tokens."""
        return self.tensors["lm_head.weight"][ids.to(self.tensors["lm_head.weight"].device)]


def fuse_layers(loaded: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Tensors by canonical name, the linear maps of layers 0 .. num_layers - 1 fused."""
    tensors: dict[str, torch.Tensor] = {}
    for i in range(num_layers):
        at = f"layers.{i}"
        for fused, members in (
            ("qkv", [f"{at}.self_attn.{n}_proj" for n in "qkv"]),
            ("o", [f"{at}.self_attn.o_proj"]),
            ("gate_up", [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]),
            ("down", [f"{at}.mlp.down_proj"]),
        ):
            for what in ("weight", "bias"):
                if f"{members[0]}.{what}" in loaded:
                    tensors[f"{at}.{fused}.{what}"] = torch.cat([loaded.pop(f"{m}.{what}") for m in members])
    return {**tensors, **loaded}


class TorchOps:
    """The decoder's operations, run as they are called."""

    num_threads: int

    def __init__(
        self,
        spec: ModelSpec,
        weights: TorchWeights,
        kv: PagedKVCache,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self.spec, self.weights, self.kv = spec, weights, kv
        self.num_threads = torch.get_num_threads()
        device = kv.k_pool.device
        self._rope = tuple(t.to(device) for t in rope)
        self._buffers: dict[str, torch.Tensor] = {}
        self._batch: ForwardBatch
        self._inputs: Mapping[str, tuple[torch.Tensor, int]] = {}

    def _index(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, device=self.kv.k_pool.device)

    def embed(self, out: str, *, columns: int = 0) -> None:
        table = self.weights.tensors["embed_tokens.weight"]
        self._put(out, table[self._index(self._batch.token_ids)], 0, columns)

    def input(self, name: str, width: int) -> None:
        """A buffer that `run` fills, wholly or in part, before the first operation."""
        self._buffers[name] = self._new(width)
        values, column = self._inputs[name]
        self._buffers[name][:, column : column + values.shape[1]] = values

    def _new(self, width: int) -> torch.Tensor:
        dtype = self.weights.tensors["lm_head.weight"].dtype
        return torch.zeros(self._batch.num_rows, width, dtype=dtype, device=self.kv.k_pool.device)

    def copy(self, x: str, out: str, *, width: int, x_at: int = 0, at: int = 0, columns: int = 0) -> None:
        self._put(out, self._buffers[x][:, x_at : x_at + width].clone(), at, columns)

    def _put(self, out: str, values: torch.Tensor, at: int, columns: int) -> None:
        """`values` as columns `at` .. of buffer `out`, which has `columns` in all (0: just these)."""
        if not columns:
            self._buffers[out] = values
            return
        if out not in self._buffers or self._buffers[out].shape != (len(values), columns):
            self._buffers[out] = self._new(columns)
        self._buffers[out][:, at : at + values.shape[1]] = values

    def silu_add(self, x: str, out: str) -> None:
        self._buffers[out] = self._buffers[out] + torch.nn.functional.silu(self._buffers[x])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return weight * normed.to(x.dtype)

    def rms_norm(
        self,
        weight: str,
        x: str,
        out: str,
        *,
        add: str | None = None,
        selected: bool = False,
        x_at: int = 0,
        at: int = 0,
        columns: int = 0,
    ) -> None:
        scale = self.weights.tensors[weight]
        if add is not None:
            self._buffers[x] = self._buffers[x] + self._buffers[add]
        self._put(out, self._norm(self._buffers[x][:, x_at : x_at + len(scale)], scale), at, columns)

    def linear(self, weight: str, x: str, out: str, *, selected: bool = False) -> None:
        tensors = self.weights.tensors
        bias = tensors.get(f"{weight}.bias")
        self._buffers[out] = torch.nn.functional.linear(self._buffers[x], tensors[f"{weight}.weight"], bias)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def rope_and_store(self, layer: int, qkv: str) -> None:
        spec, batch, tensors = self.spec, self._batch, self.weights.tensors
        rows = self._buffers[qkv].view(batch.num_rows, -1, spec.head_dim)
        q, k, v = torch.split(rows, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.qk_norm:
            q = self._norm(q, tensors[f"layers.{layer}.self_attn.q_norm.weight"])
            k = self._norm(k, tensors[f"layers.{layer}.self_attn.k_norm.weight"])
        positions = self._index(batch.positions)
        cos, sin = (t[positions].to(q.dtype)[:, None] for t in self._rope)
        self._buffers["q"] = self._rotate(q, cos, sin)
        places = self.kv.slot_index[batch.slots[batch.row_request], batch.cache_index]
        self.kv.write(layer, places, self._rotate(k, cos, sin), v)

    def attention(self, layer: int, qkv: str, out: str) -> None:
        spec, batch = self.spec, self._batch
        q = self._buffers["q"]
        slides = spec.sliding_window is not None and (spec.sliding_layers is None or spec.sliding_layers[layer])
        outputs = []
        for b, slot in enumerate(batch.slots):
            first, end = int(batch.query_start[b]), int(batch.query_start[b + 1])
            k, v = self.kv.read(layer, int(slot), int(batch.num_keys[b]))
            visible = self._index(batch.visible(b, spec.sliding_window or 0 if slides else 0))
            group = spec.num_heads // spec.num_kv_heads
            heads = q[first:end].transpose(0, 1).reshape(spec.num_kv_heads, group, end - first, spec.head_dim)
            scores = heads @ k[:, None].transpose(-1, -2) / spec.head_dim**0.5
            scores = scores.masked_fill(~visible, float("-inf"))
            wide = scores if scores.dtype == torch.float64 else scores.float()
            mixed = torch.softmax(wide, dim=-1).to(q.dtype) @ v[:, None]
            outputs.append(mixed.flatten(0, 1).transpose(0, 1).flatten(1))
        self._buffers[out] = torch.cat(outputs)

    def silu_mul(self, gate_up: str, out: str) -> None:
        gate, up = self._buffers[gate_up].chunk(2, dim=-1)
        self._buffers[out] = torch.nn.functional.silu(gate) * up

    def select_rows(self, x: str, add: str, out: str) -> None:
        rows = self._index(self._batch.selected_rows)
        self._buffers[out] = self._buffers[x][rows] + self._buffers[add][rows]

    def run(
        self,
        record: Callable[[TorchOps], None],
        key: Hashable,
        batch: ForwardBatch,
        inputs: Mapping[str, tuple[torch.Tensor, int]] | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Run the decoder on `batch`; returns its buffers. `inputs`: name -> (values [N, w], first column)."""
        self._batch, self._inputs = batch, inputs or {}
        with torch.inference_mode():
            record(self)
        return self._buffers
