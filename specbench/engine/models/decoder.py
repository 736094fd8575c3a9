"""One lean decoder, configured: Llama, Mistral (sliding window), Qwen2 (biases), Qwen3 (q/k norms).

The layers are written once, against a small set of operations; a backend runs them as they are called (`torch`) or
records them once and replays the record (`cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.ops.batch import ForwardBatch
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

BACKENDS = ("torch", "cpu")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Ops(Protocol):
    """What a backend must offer. Names are those of activation buffers and of fused weights."""

    num_threads: int

    def embed(self, out: str) -> None: ...
    def rms_norm(self, weight: str, x: str, out: str, *, add: str | None = None, selected: bool = False) -> None: ...
    def linear(self, weight: str, x: str, out: str, *, selected: bool = False) -> None: ...
    def rope_and_store(self, layer: int, qkv: str) -> None: ...
    def attention(self, layer: int, qkv: str, out: str) -> None: ...
    def silu_mul(self, gate_up: str, out: str) -> None: ...
    def select_rows(self, x: str, add: str, out: str) -> None: ...


def decoder_layers(ops: Ops, num_layers: int) -> None:
    """The whole forward pass: embedding, `num_layers` layers, final norm and unembedding of the selected rows."""
    ops.embed("x")
    for i in range(num_layers):
        at = f"layers.{i}"
        ops.rms_norm(f"{at}.input_layernorm.weight", "x", "h", add="proj" if i else None)
        ops.linear(f"{at}.qkv", "h", "qkv")
        ops.rope_and_store(i, "qkv")
        ops.attention(i, "qkv", "attn")
        ops.linear(f"{at}.o", "attn", "proj")
        ops.rms_norm(f"{at}.post_attention_layernorm.weight", "x", "h", add="proj")
        ops.linear(f"{at}.gate_up", "h", "gate_up")
        ops.silu_mul("gate_up", "act")
        ops.linear(f"{at}.down", "act", "proj")
    ops.select_rows("x", "proj", "last")
    ops.rms_norm("norm.weight", "last", "features", selected=True)
    ops.linear("lm_head", "features", "logits", selected=True)


@dataclass(frozen=True)
class DecoderLimits:
    """How large a batch may get: rows of one pass, rows with logits."""

    max_rows: int
    max_selected: int


class Decoder:
    """A model on a backend with its KV cache.

    `tensors` yields (canonical name, tensor in `dtype`); it is consumed once, so that the peak stays near one copy.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: str,
        backend: str,
        kv: PagedKVCache,
        limits: DecoderLimits,
        device: str = "cpu",
    ) -> None:
        self.spec, self.dtype, self.backend, self.kv, self.limits = spec, dtype, backend, kv, limits
        torch_dtype = DTYPES[dtype]
        self._weights = self._load(spec, tensors, torch_dtype, backend, device)
        self._bind()

    @staticmethod
    def _load(spec: ModelSpec, tensors: Any, dtype: torch.dtype, backend: str, device: str) -> Any:
        if backend == "cpu":
            from specbench.engine.ops.cpu import CpuWeights

            return CpuWeights(spec, tensors, dtype)
        if backend == "torch":
            from specbench.engine.ops.torch_ops import TorchWeights

            return TorchWeights(spec, tensors, dtype, device)
        raise InputError(
            f"unknown backend {backend!r}", remedy=f"use one of: {', '.join(BACKENDS)}", key="target.backend"
        )

    def _bind(self) -> None:
        from specbench.engine.ops.cpu import CpuOps, CpuWeights, rope_tables
        from specbench.engine.ops.torch_ops import TorchOps

        rope = rope_tables(self.spec, self.kv.max_context)
        if isinstance(self._weights, CpuWeights):
            self.ops: Any = CpuOps(
                self.spec,
                self._weights,
                self.kv,
                rope,
                max_rows=self.limits.max_rows,
                max_selected=self.limits.max_selected,
                num_threads=torch.get_num_threads(),
            )
        else:
            self.ops = TorchOps(self.spec, self._weights, self.kv, rope)

    def rebind(self, kv: PagedKVCache, limits: DecoderLimits) -> None:
        """Use another KV cache and other limits with the same weights (the next case of a sweep)."""
        self.kv, self.limits = kv, limits
        self._bind()

    def forward(self, batch: ForwardBatch, num_layers: int | None = None) -> torch.Tensor:
        """Logits [R, V] of the selected rows after `num_layers` layers (default: all), in fp32, or fp64 for fp64.

        K and V of every row are written to the cache. The tensor is valid until the next call.
        """
        assert batch.num_rows <= self.limits.max_rows, "more rows than the decoder's buffers hold"
        assert len(batch.selected_rows) <= self.limits.max_selected, "more logits than the decoder's buffers hold"
        # A panel kernel reads whatever address an id leads to.
        assert batch.token_ids.min() >= 0, "a token id is outside the vocabulary"
        assert batch.token_ids.max() < self.spec.vocab_size, "a token id is outside the vocabulary"
        layers = self.spec.num_layers if num_layers is None else num_layers
        record: Callable[[Any], None] = lambda ops: decoder_layers(ops, layers)  # noqa: E731
        logits: torch.Tensor = self.ops.run(record, layers, batch)["logits"]
        logits = logits[: len(batch.selected_rows), : self.spec.vocab_size]
        return logits if logits.dtype == torch.float64 else logits.float()

    def prefill(self, prompt: Sequence[int], slot: int) -> torch.Tensor:
        """Run `prompt` (one token or more) in the empty `slot`, in passes of max_rows; logits [1, V] after its last."""
        rows = self.limits.max_rows
        for first in range(0, len(prompt), rows):
            chunk = list(prompt[first : first + rows])
            self.kv.reserve(slot, len(chunk))
            logits = self.forward(ForwardBatch.of([chunk], [slot], [first], last_only=True))
            self.kv.commit(slot, len(chunk))
        return logits
