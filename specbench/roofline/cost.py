"""FLOPs and DRAM bytes of a forward pass in closed form: no counter that reads 0 on a fused kernel, none that doubles.

For B requests with q query tokens each over a context of S (T = Σq), L layers:
FLOPs = 2·T·P_lin + 2·T_head·P_head + 4·L·n_h·d_h·Σ q(S + (q+1)/2); bytes = weights once + activations + KV read once
per request + KV written + logits in fp32. The embedding lookup is a gather: no FLOP, and a tied matrix is read once, as
the head. Norm weights, biases and elementwise traffic are left out, so bytes are a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specbench.errors import InputError
from specbench.roofline.shapes import DTYPE_BYTES, ModelSpec

LOGIT_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes moved to and from device memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float | None:
        """FLOP per byte; None where no byte moves."""
        return self.flops / self.bytes if self.bytes > 0 else None

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flops * times, self.bytes * times)

    __rmul__ = __mul__


ZERO = Cost(0.0, 0.0)


@dataclass(frozen=True)
class StepCost:
    """A forward pass by op class; `kv_write` and `embedding` have bytes only."""

    linear: Cost = ZERO
    attention: Cost = ZERO
    kv_write: Cost = ZERO
    embedding: Cost = ZERO
    head: Cost = ZERO

    def by_class(self) -> dict[str, Cost]:
        """Op class -> cost, in the order of a forward pass."""
        return {
            "embedding": self.embedding,
            "linear": self.linear,
            "kv_write": self.kv_write,
            "attention": self.attention,
            "head": self.head,
        }

    @property
    def total(self) -> Cost:
        return self.linear + self.attention + self.kv_write + self.embedding + self.head

    @property
    def flops(self) -> float:
        return self.total.flops

    @property
    def bytes(self) -> float:
        return self.total.bytes

    @property
    def intensity(self) -> float | None:
        return self.total.intensity

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            linear=self.linear + other.linear,
            attention=self.attention + other.attention,
            kv_write=self.kv_write + other.kv_write,
            embedding=self.embedding + other.embedding,
            head=self.head + other.head,
        )


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; raises InputError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise InputError(f"unknown dtype {dtype!r}", remedy="use one of: " + ", ".join(DTYPE_BYTES), key="dtype")
    return DTYPE_BYTES[dtype]


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype: str) -> int:
    """Bytes of K and V of `num_tokens` tokens: 2 · L · n_kv · d_h · tokens · b; query heads do not count."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_tokens * dtype_bytes(dtype)


def linear_cost(
    num_tokens: int, in_features: int, out_features: int, *, weight_dtype: str, activation_dtype: str
) -> Cost:
    """One matmul [T, in] x [in, out]: 2·T·in·out FLOPs; the weight once, the activations in and out."""
    weights = in_features * out_features
    activations = num_tokens * (in_features + out_features) * dtype_bytes(activation_dtype)
    return Cost(2.0 * num_tokens * weights, float(weights * dtype_bytes(weight_dtype) + activations))


def attention_flops(batch: int, num_heads: int, query_len: int, kv_len: int, head_dim: int) -> float:
    """Dense (unmasked) attention: QK^T and PV, 4 · B · H · q · S · d."""
    return 4.0 * batch * num_heads * query_len * kv_len * head_dim


class _Keys(NamedTuple):
    """One request's keys on one layer: `seen` summed over its queries, `read` from memory once."""

    seen: int
    read: int


def _keys(query: int, context: int, window: int | None) -> _Keys:
    """Keys of a causal block of `query` tokens after `context` cached ones.

    Without a window query j (1-based) sees context + j keys. With one it sees the last `window` of them.
    """
    full = query * context + query * (query + 1) // 2
    if window is None or query == 0 or context + query <= window:
        return _Keys(full, context + query if query else 0)
    growing = max(0, window - context)  # queries whose window is not yet full
    seen = growing * context + growing * (growing + 1) // 2 + (query - growing) * window
    return _Keys(seen, min(context + query, window + query - 1))


def forward_cost(
    spec: ModelSpec,
    query_tokens: Sequence[int],
    context_lens: Sequence[int],
    *,
    weight_dtype: str,
    kv_dtype: str | None = None,
    activation_dtype: str | None = None,
    head_tokens: int | None = None,
    num_layers: int | None = None,
) -> StepCost:
    """Cost of one forward pass over B requests, by op class.

    `query_tokens[i]` tokens of request i run over `context_lens[i]` tokens already cached; a tree counts like a chain
    of as many nodes, which is an upper bound. `kv_dtype` and `activation_dtype` follow `weight_dtype` unless given.
    `head_tokens` rows go through the head (default: all, as in a verify step; in prefill, one a request). `num_layers`
    runs only the first layers, then the head (early exit). Raises InputError for lengths that do not fit.
    """
    if len(query_tokens) != len(context_lens):
        raise InputError(f"{len(query_tokens)} query lengths for {len(context_lens)} contexts")
    if any(count < 0 for count in query_tokens) or any(count < 0 for count in context_lens):
        raise InputError("query and context lengths must not be negative")
    layers = spec.num_layers if num_layers is None else num_layers
    if not 0 <= layers <= spec.num_layers:
        raise InputError(f"{layers} layers of a model with {spec.num_layers}", key="layers")
    tokens = sum(query_tokens)
    rows = tokens if head_tokens is None else head_tokens
    if not 0 <= rows <= tokens:
        raise InputError(f"{rows} head rows for {tokens} tokens")
    if tokens == 0:
        return StepCost()
    b_w = dtype_bytes(weight_dtype)
    b_kv = dtype_bytes(kv_dtype or weight_dtype)
    b_a = dtype_bytes(activation_dtype or weight_dtype)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    params = layers * spec.num_layer_linear_params
    # q and o, k and v, gate and up, down: each reads its input and writes its output
    in_and_out = 2 * (hidden + q_dim) + 2 * (hidden + kv_dim) + 2 * (hidden + inner) + (inner + hidden)
    linear = Cost(2.0 * tokens * params, float(params * b_w + layers * in_and_out * tokens * b_a))

    seen = read = 0
    for window, count in _layers_by_window(spec, layers):
        if count:
            keys = [_keys(query, context, window) for query, context in zip(query_tokens, context_lens, strict=True)]
            seen += count * sum(key.seen for key in keys)
            read += count * sum(key.read for key in keys)
    attention = Cost(4.0 * q_dim * seen, float(2 * kv_dim * read * b_kv + 2 * layers * q_dim * tokens * b_a))
    head = ZERO
    if rows:
        head_bytes = spec.num_head_params * b_w + rows * (hidden * b_a + spec.vocab_size * LOGIT_BYTES)
        head = Cost(2.0 * rows * spec.num_head_params, float(head_bytes))
    return StepCost(
        linear=linear,
        attention=attention,
        kv_write=Cost(0.0, float(2 * layers * kv_dim * tokens * b_kv)),
        embedding=Cost(0.0, float(tokens * hidden * b_a)),
        head=head,
    )


def _layers_by_window(spec: ModelSpec, layers: int) -> tuple[tuple[int | None, int], tuple[int | None, int]]:
    """(window, number of layers) for windowed and for full layers among the first `layers`."""
    if spec.sliding_window is None:
        return (None, layers), (None, 0)
    windowed = layers if spec.sliding_layers is None else sum(spec.sliding_layers[:layers])
    return (spec.sliding_window, windowed), (None, layers - windowed)
