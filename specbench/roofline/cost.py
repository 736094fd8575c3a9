"""FLOPs and DRAM bytes of a forward pass in closed form: no counter that reads 0 on a fused kernel, none that doubles.

For B requests with q query tokens each over a context of S (T = Σq), L layers:
FLOPs = 2·T·P_lin + 2·T_head·P_head + 4·L·n_h·d_h·Σ q(S + (q+1)/2); bytes = weights once + activations + KV read once
per request + KV written + logits in fp32 (Pope et al., arXiv 2211.05102; Yuan et al., arXiv 2402.16363, whose n tokens
in parallel are the q of a verify step). The embedding lookup is a gather: no FLOP, and a tied matrix is read once, as
the head. Norm weights, biases and elementwise traffic are left out, so bytes are a lower bound. Experts: cost_moe.py;
windows, MLA, sparse and compressed attention: cost_attention.py; storage formats: formats.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from specbench.errors import InputError
from specbench.roofline.cost_attention import (
    attention_flops,
    attention_keys,
    entries_written,
    flops_per_key,
    index_entries_written,
    index_keys,
    values_per_key,
    values_per_query,
)
from specbench.roofline.cost_moe import distinct_experts, experts_cost
from specbench.roofline.cost_types import ZERO, Cost, StepCost
from specbench.roofline.formats import dtype_bytes, storage_bytes, weight_format
from specbench.roofline.matrices import LayerKind, Matrix, head_matrix, layer_kinds, layer_matrices, total_params
from specbench.roofline.model_spec import ModelSpec

__all__ = [
    "LOGIT_BYTES",
    "ZERO",
    "Cost",
    "StepCost",
    "attention_flops",
    "dtype_bytes",
    "forward_cost",
    "kv_bytes",
    "linear_cost",
    "uniform_cost",
]
LOGIT_BYTES = 4
LARGEST = 1e12
"""Tokens beyond which a batch or a context is a slip of the pen."""


class _Group(NamedTuple):
    """Equal requests of a pass: how many, query tokens of each, and the tokens cached before them."""

    requests: int
    query: float
    context: float


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype: str) -> int:
    """Bytes of K and V of `num_tokens` tokens: 2 · L · n_kv · d_h · tokens · b; query heads do not count."""
    return num_tokens * spec.kv_bytes_per_token(dtype)


def linear_cost(
    num_tokens: int, in_features: int, out_features: int, *, weight_dtype: str, activation_dtype: str
) -> Cost:
    """One matmul [T, in] x [in, out]: 2·T·in·out FLOPs; the weight once, the activations in and out."""
    matrix = Matrix(out_features, in_features)
    weights = storage_bytes(weight_dtype, matrix.rows, matrix.cols)
    activations = num_tokens * matrix.values * dtype_bytes(activation_dtype)
    return Cost(2.0 * num_tokens * matrix.params, float(weights + activations))


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
    distinct_experts: float | None = None,
) -> StepCost:
    """Cost of one forward pass over B requests, by op class.

    `query_tokens[i]` tokens of request i run over `context_lens[i]` tokens already cached; a tree counts like a chain
    of as many nodes, which is an upper bound. `weight_dtype` is a weight format (formats.py); `kv_dtype` and
    `activation_dtype` follow it unless given, and are bf16 beside weights that are no floats. `head_tokens` rows go
    through the head (default: all, as in a verify step; in prefill, one a request). `num_layers` runs only the first
    layers, then the head (early exit). `distinct_experts`: the measured union of a routed layer, a mean over layers.
    Raises InputError for lengths that do not fit.
    """
    if len(query_tokens) != len(context_lens):
        raise InputError(f"{len(query_tokens)} query lengths for {len(context_lens)} contexts")
    pairs = Counter(zip(query_tokens, context_lens, strict=True))
    groups = [_Group(count, query, context) for (query, context), count in pairs.items()]
    profile = _profile(spec, _layers(spec, num_layers), weight_dtype, kv_dtype, activation_dtype)
    return _pass_cost(profile, groups, head_tokens, distinct_experts)


def uniform_cost(
    spec: ModelSpec,
    batch: int,
    query_tokens: float,
    context_len: float,
    *,
    weight_dtype: str,
    kv_dtype: str | None = None,
    activation_dtype: str | None = None,
    head_tokens: float | None = None,
    num_layers: int | None = None,
    distinct_experts: float | None = None,
) -> StepCost:
    """forward_cost of `batch` equal requests, in a time that does not depend on the batch.

    `query_tokens` and `context_len` may be means, not whole. `head_tokens` counts rows of the whole batch.
    """
    if batch < 0:
        raise InputError(f"a batch of {batch}", key="batch_size", remedy="choose 0 or more")
    profile = _profile(spec, _layers(spec, num_layers), weight_dtype, kv_dtype, activation_dtype)
    return _pass_cost(profile, [_Group(batch, query_tokens, context_len)], head_tokens, distinct_experts)


def _layers(spec: ModelSpec, num_layers: int | None) -> int:
    layers = spec.num_layers if num_layers is None else num_layers
    if not 0 <= layers <= spec.num_layers:
        raise InputError(f"{layers} layers of a model with {spec.num_layers}", key="layers")
    return layers


@dataclass(frozen=True)
class _Profile:
    """What a pass costs a token, and once, whatever its batch: floats, so that sums over tokens are plain products."""

    spec: ModelSpec
    weight_dtype: str
    kinds: tuple[tuple[LayerKind, int], ...]
    linear: tuple[float, float, float]
    indexer: tuple[float, float, float]
    head: tuple[float, float, float]
    experts: tuple[Matrix, ...]
    routed_layers: int
    kv_written: float
    activation_bytes: int
    kv_bytes: int

    def priced(self, per_token: tuple[float, float, float], tokens: float) -> Cost:
        """(FLOPs a token, weight bytes, activation bytes a token) of `tokens`; none of it where nothing is run."""
        flops, weights, activations = per_token
        return Cost(flops * tokens, weights + activations * tokens)


@lru_cache(maxsize=4096)
def _profile(
    spec: ModelSpec, layers: int, weight_dtype: str, kv_dtype: str | None, activation_dtype: str | None
) -> _Profile:
    stored = weight_format(weight_dtype)
    b_a = dtype_bytes(activation_dtype or stored.computed)
    b_kv = dtype_bytes(kv_dtype or stored.computed)
    kinds = layer_kinds(spec, layers)
    written = 0.0
    totals = {"linear": [0.0, 0.0, 0.0], "indexer": [0.0, 0.0, 0.0]}
    experts: tuple[Matrix, ...] = ()
    for kind, count in kinds:
        parts = layer_matrices(spec, kind)
        experts = parts["experts"] or experts
        for part, total in totals.items():
            total[0] += 2.0 * count * total_params(parts[part])
            total[1] += count * sum(m.copies * storage_bytes(stored.linear, m.rows, m.cols) for m in parts[part])
            total[2] += count * sum(m.values for m in parts[part]) * b_a
        written += count * entries_written(kind) * values_per_key(spec) * b_kv
        if spec.indexer is not None:
            written += count * index_entries_written(kind) * spec.indexer.head_dim * b_kv
    head = head_matrix(spec)
    row_bytes = spec.hidden_size * b_a + spec.vocab_size * LOGIT_BYTES
    linear, indexer = totals["linear"], totals["indexer"]
    return _Profile(
        spec=spec,
        weight_dtype=weight_dtype,
        kinds=kinds,
        linear=(linear[0], linear[1], linear[2]),
        indexer=(indexer[0], indexer[1], indexer[2]),
        head=(2.0 * head.params, storage_bytes(stored.head, head.rows, head.cols), float(row_bytes)),
        experts=experts,
        routed_layers=sum(count for kind, count in kinds if kind.moe),
        kv_written=written,
        activation_bytes=b_a,
        kv_bytes=b_kv,
    )


def _pass_cost(
    profile: _Profile, groups: Sequence[_Group], head_tokens: float | None, measured: float | None
) -> StepCost:
    for group in groups:
        if not (0 <= group.query <= LARGEST and 0 <= group.context <= LARGEST and group.requests <= LARGEST):
            raise InputError(
                f"{group.requests} requests of {group.query} query tokens after {group.context}: lengths must not be "
                f"negative, nor above {LARGEST:g}"
            )
    spec = profile.spec
    tokens = sum(group.requests * group.query for group in groups)
    rows = tokens if head_tokens is None else head_tokens
    if not 0 <= rows <= tokens:
        raise InputError(f"{rows} head rows for {tokens} tokens")
    if measured is not None and spec.moe is None:
        raise InputError(f"{spec.name} has no experts", key="distinct_experts", remedy="leave distinct_experts out")
    if tokens == 0:
        return StepCost()
    return StepCost(
        linear=profile.priced(profile.linear, tokens),
        attention=_attention(profile, groups, tokens),
        kv_write=Cost(0.0, profile.kv_written * tokens),
        embedding=Cost(0.0, float(tokens * spec.hidden_size * profile.activation_bytes)),
        head=profile.priced(profile.head, rows) if rows else ZERO,
        experts=_experts(profile, tokens, measured),
        indexer=_index(profile, groups, tokens),
    )


def _attention(profile: _Profile, groups: Sequence[_Group], tokens: float) -> Cost:
    seen = read = layers = 0.0
    for kind, count in profile.kinds:
        layers += count
        for requests, query, context in groups:
            keys = attention_keys(profile.spec, kind, query, context)
            seen += count * requests * keys.seen
            read += count * requests * keys.read
    moved = values_per_key(profile.spec) * read * profile.kv_bytes
    queries = layers * values_per_query(profile.spec) * tokens * profile.activation_bytes
    return Cost(flops_per_key(profile.spec) * seen, moved + queries)


def _experts(profile: _Profile, tokens: float, measured: float | None) -> Cost:
    moe = profile.spec.moe
    if moe is None:
        return ZERO
    stored, distinct = weight_format(profile.weight_dtype).experts, distinct_experts(moe, tokens, measured)
    layer = experts_cost(profile.experts, moe, tokens, distinct, stored, profile.activation_bytes)
    return layer * profile.routed_layers


def _index(profile: _Profile, groups: Sequence[_Group], tokens: float) -> Cost:
    """The indexer's maps, and its scores over all keys: 2 · H · (D + 1) FLOPs a pair (DeepSeek-V3.2: Σ_h w_h
    relu(q_h · k)), each key read once a request."""
    indexer, total = profile.spec.indexer, profile.priced(profile.indexer, tokens)
    if indexer is None:
        return total
    for kind, count in profile.kinds:
        for requests, query, context in groups:
            keys = index_keys(kind, query, context)
            flops = 2.0 * indexer.heads * (indexer.head_dim + 1) * keys.seen
            total += Cost(flops, float(indexer.head_dim * keys.read * profile.kv_bytes)) * (count * requests)
    return total
