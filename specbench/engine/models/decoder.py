"""One lean decoder, configured: Llama, Mistral (sliding window), Qwen2 (biases), Qwen3 (q/k norms).

The layers are written once, against a small set of operations; a backend runs them as they are called (`torch`),
records them once and replays the record (`cpu`), or captures them as graphs of the device (`triton`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.config import refuse_unrunnable
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.verify import Backend
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

BACKENDS = ("torch", "cpu", "triton")
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
    def copy(self, x: str, out: str, *, width: int, x_at: int = 0, at: int = 0, columns: int = 0) -> None: ...


Capture = tuple[int, ...]
"""States to leave in one buffer, side by side: i is the residual stream that enters layer i (the number of layers:
the one that leaves the last), FINAL the state after the final norm."""
FINAL = -1


def states_buffer(capture: Capture) -> str:
    """Each width has a buffer for good: recorded programs hold its address."""
    return f"states.{len(capture)}"


def layer_tail(ops: Ops, layer: int, attention_in: str) -> None:
    """A layer from its q/k/v map on: reads `attention_in`, adds attention to x, leaves the MLP's part in proj."""
    at = f"layers.{layer}"
    ops.linear(f"{at}.qkv", attention_in, "qkv")
    ops.rope_and_store(layer, "qkv")
    ops.attention(layer, "qkv", "attn")
    ops.linear(f"{at}.o", "attn", "proj")
    ops.rms_norm(f"{at}.post_attention_layernorm.weight", "x", "h", add="proj")
    ops.linear(f"{at}.gate_up", "h", "gate_up")
    ops.silu_mul("gate_up", "act")
    ops.linear(f"{at}.down", "act", "proj")


def decoder_layers(ops: Ops, num_layers: int, hidden_size: int, capture: Capture = ()) -> None:
    """The whole forward pass: embedding, `num_layers` layers, final norm and unembedding of the selected rows."""

    def keep(state: int, source: str) -> None:
        for place in (place for place, wanted in enumerate(capture) if wanted == state):
            ops.copy(
                source,
                states_buffer(capture),
                width=hidden_size,
                at=place * hidden_size,
                columns=len(capture) * hidden_size,
            )

    ops.embed("x")
    for i in range(num_layers):
        ops.rms_norm(f"layers.{i}.input_layernorm.weight", "x", "h", add="proj" if i else None)
        keep(i, "x")
        layer_tail(ops, i, "h")
    ops.select_rows("x", "proj", "last")
    ops.rms_norm("norm.weight", "last", "features", selected=True)
    ops.linear("lm_head", "features", "logits", selected=True)
    if FINAL in capture or num_layers in capture:
        ops.rms_norm("norm.weight", "x", "h", add="proj")
        keep(num_layers, "x")
        keep(FINAL, "h")


@dataclass(frozen=True)
class DecoderLimits:
    """How large a batch may get: rows of one pass, rows with logits."""

    max_rows: int
    max_selected: int


class Decoder:
    """A model on a backend with its KV cache.

    `tensors` yields (canonical name, tensor in `dtype`); it is consumed once, so that the peak stays near one copy.
    `graphs` captures the passes of backend triton on a GPU; the other backends have none.
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
        graphs: bool = False,
    ) -> None:
        refuse_unrunnable(spec)
        self.spec, self.dtype, self.backend, self.kv, self.limits = spec, dtype, backend, kv, limits
        if graphs and (backend != "triton" or torch.device(device).type != "cuda"):
            raise InputError(
                f"backend {backend} on {device} has no graphs", key="target.graphs", remedy="set graphs: off"
            )
        self.graphs = graphs
        torch_dtype = DTYPES[dtype]
        self._weights = self._load(spec, tensors, torch_dtype, backend, device)
        self._bind()

    @staticmethod
    def _load(spec: ModelSpec, tensors: Any, dtype: torch.dtype, backend: str, device: str) -> Any:
        if backend == "cpu":
            from specbench.engine.ops.cpu_weights import CpuWeights

            return CpuWeights(spec, tensors, dtype)
        if backend in ("torch", "triton"):
            from specbench.engine.ops.torch_ops import TorchWeights

            return TorchWeights(spec, tensors, dtype, device)
        raise InputError(
            f"unknown backend {backend!r}", remedy=f"use one of: {', '.join(BACKENDS)}", key="target.backend"
        )

    def _bind(self) -> None:
        self._states: torch.Tensor | None = None
        self._verifier: Backend | None = None
        from specbench.engine.ops.cpu import CpuOps, rope_tables
        from specbench.engine.ops.cpu_weights import CpuWeights
        from specbench.engine.ops.torch_ops import TorchOps

        rope = rope_tables(self.spec, self.kv.max_context)
        limits = self.limits
        if isinstance(self._weights, CpuWeights):
            self.ops: Any = CpuOps(
                self.spec,
                self._weights,
                self.kv,
                rope,
                max_rows=limits.max_rows,
                max_selected=limits.max_selected,
                num_threads=torch.get_num_threads(),
            )
        elif self.backend == "triton":
            from specbench.engine.ops.graphs import CudaRecorder, Graphs
            from specbench.engine.ops.triton_ops import TritonOps

            graphs = Graphs(CudaRecorder(self.kv.k_pool.device) if self.graphs else None)
            self.ops = TritonOps(
                self.spec,
                self._weights,
                self.kv,
                rope,
                max_rows=limits.max_rows,
                max_selected=limits.max_selected,
                graphs=graphs,
            )
        else:
            self.ops = TorchOps(self.spec, self._weights, self.kv, rope)

    @property
    def weights(self) -> Any:
        """The backend's own form of them: PackedWeights or TorchWeights."""
        return self._weights

    @property
    def verifier(self) -> Backend | str:
        """What judges drafts against this decoder's logits: by name, or made for the sizes it is bound to."""
        if self.backend != "triton":
            return "torch"
        if self._verifier is None:
            from specbench.engine.ops.graphs import CudaRecorder, Graphs
            from specbench.engine.verify_triton import TritonVerifier

            device = self.kv.k_pool.device
            self._verifier = TritonVerifier(
                max_rows=self.limits.max_selected,
                max_requests=len(self.kv.lengths),
                vocab_size=self.spec.vocab_size,
                device=device,
                graphs=Graphs(CudaRecorder(device) if self.graphs else None),
                wide=self.dtype == "fp64",
            )
        return self._verifier

    def rebind(self, kv: PagedKVCache, limits: DecoderLimits) -> None:
        """Use another KV cache and other limits with the same weights (the next case of a sweep)."""
        self.kv, self.limits = kv, limits
        self._bind()

    def twin(self, kv: PagedKVCache, limits: DecoderLimits) -> Decoder:
        """Another decoder over the same weights, with a KV cache of its own."""
        other = copy.copy(self)
        other.rebind(kv, limits)
        return other

    def forward(
        self,
        batch: ForwardBatch,
        num_layers: int | None = None,
        *,
        captured: bool | None = None,
        capture: Capture = (),
    ) -> torch.Tensor:
        """Logits [R, V] of the selected rows after `num_layers` layers (default: all), in fp32, or fp64 for fp64.

        K and V of every row are written to the cache. The tensor is valid until the next call. `captured` False keeps a
        pass whose sizes will not come again out of the graphs; by default it follows `graphs`. `capture` leaves states
        of all rows in `states`.
        """
        assert batch.num_rows <= self.limits.max_rows, "more rows than the decoder's buffers hold"
        assert len(batch.selected_rows) <= self.limits.max_selected, "more logits than the decoder's buffers hold"
        # A panel kernel reads whatever address an id leads to.
        assert batch.token_ids.min() >= 0, "a token id is outside the vocabulary"
        assert batch.token_ids.max() < self.spec.vocab_size, "a token id is outside the vocabulary"
        layers = self.spec.num_layers if num_layers is None else num_layers
        hidden = self.spec.hidden_size
        record: Callable[[Any], None] = lambda ops: decoder_layers(ops, layers, hidden, capture)  # noqa: E731
        options = {} if captured is None else {"captured": captured}
        buffers: Any = self.ops.run(record, (layers, capture), batch, **options)
        self._states = buffers[states_buffer(capture)][: batch.num_rows, : len(capture) * hidden] if capture else None
        logits: torch.Tensor = buffers["logits"]
        logits = logits[: len(batch.selected_rows), : self.spec.vocab_size]
        return logits if logits.dtype == torch.float64 else logits.float()

    @property
    def states(self) -> torch.Tensor:
        """[N, len(capture) * H] of the rows of the last pass, which captured them; valid until the next call."""
        assert self._states is not None, "the last pass captured no states"
        return self._states

    def prefill(self, prompt: Sequence[int], slot: int) -> torch.Tensor:
        """Run `prompt` (one token or more) in the empty `slot`, in passes of max_rows; logits [1, V] after its last."""
        return self.prefill_states(prompt, slot)[0]

    def prefill_states(
        self, prompt: Sequence[int], slot: int, capture: Capture = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`prefill`, with the states [n, len(capture) * H] of all the prompt's tokens where `capture` asks for them."""
        rows = self.limits.max_rows
        states = []
        for first in range(0, len(prompt), rows):
            chunk = list(prompt[first : first + rows])
            self.kv.reserve(slot, len(chunk))
            batch = ForwardBatch.of([chunk], [slot], [first], last_only=True)
            options: dict[str, Any] = {"captured": False} if self.graphs else {}
            if capture:
                options["capture"] = capture
            logits = self.forward(batch, **options)
            if capture:
                states.append(self.states.clone())
            self.kv.commit(slot, len(chunk))
        return logits, torch.cat(states) if capture else None
