"""Keys that a block of queries sees and reads: causal, windowed, chosen by an indexer, or compressed.

`seen` counts pairs of query and key, and makes FLOPs; `read` counts cache entries that come from memory, once a request
where its queries share them. Lengths may be means, not whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from specbench.roofline.matrices import LayerKind
from specbench.roofline.model_spec import ModelSpec


class Keys(NamedTuple):
    """One request's keys on one layer: `seen` summed over its queries, `read` from memory."""

    seen: float
    read: float


NONE = Keys(0.0, 0.0)


def attention_flops(batch: int, num_heads: int, query_len: int, kv_len: int, head_dim: int) -> float:
    """Dense (unmasked) attention: QK^T and PV, 4 · B · H · q · S · d."""
    return 4.0 * batch * num_heads * query_len * kv_len * head_dim


def causal_keys(query: float, context: float) -> Keys:
    """Query j (from 1) of `query` after `context` cached tokens sees context + j keys; each is read once."""
    return Keys(query * context + query * (query + 1) / 2, context + query) if query else NONE


def _at_most(query: float, context: float, most: float) -> float:
    """Σ_j min(context + j, most) over the queries j = 1 .. query."""
    if context + query <= most:
        return query * context + query * (query + 1) / 2
    growing = max(0.0, most - context)  # queries that do not yet see `most` keys
    return growing * context + growing * (growing + 1) / 2 + (query - growing) * most


def windowed_keys(query: float, context: float, window: int) -> Keys:
    """Each query sees the last `window` keys, its own included."""
    if not query:
        return NONE
    return Keys(_at_most(query, context, window), min(context + query, window + query - 1))


def chosen_keys(query: float, context: float, top_k: int) -> Keys:
    """Each query reads the `top_k` keys that an indexer chose for it.

    Queries of a block choose for themselves: the sum of their choices is read, at most every key. Where choices overlap
    less is read, so this is an upper bound.
    """
    if not query:
        return NONE
    seen = _at_most(query, context, top_k)
    return Keys(seen, min(seen, context + query))


def _whole_blocks(end: float, ratio: int) -> float:
    """Σ_{p=1}^{end} ⌊p / ratio⌋: with m = ⌊end / ratio⌋, ratio · m (m - 1) / 2 + m (end - ratio · m + 1)."""
    blocks = math.floor(end / ratio)
    return ratio * blocks * (blocks - 1) / 2 + blocks * (end - ratio * blocks + 1)


def compressed_keys(query: float, context: float, ratio: int, top_k: int | None) -> Keys:
    """Entries that stand for `ratio` tokens each: query j sees ⌊(context + j) / ratio⌋, at most `top_k`."""
    if not query:
        return NONE
    end, entries = context + query, math.floor((context + query) / ratio)
    if top_k is None:
        return Keys(_whole_blocks(end, ratio) - _whole_blocks(context, ratio), entries)
    full = ratio * top_k  # from this position on a query sees top_k entries
    below = min(end, full - 1)
    seen = max(0.0, _whole_blocks(below, ratio) - _whole_blocks(context, ratio)) if below > context else 0.0
    seen += top_k * max(0.0, end - max(context, full - 1))
    return Keys(seen, min(seen, entries))


def attention_keys(spec: ModelSpec, kind: LayerKind, query: float, context: float) -> Keys:
    """Keys of one request's attention on a layer of `kind`; compressed layers read their window beside the entries."""
    top_k = spec.indexer.top_k if kind.sparse and spec.indexer is not None else None
    if kind.ratio is not None:
        assert kind.window is not None
        near = windowed_keys(query, context, kind.window)
        far = compressed_keys(query, context, kind.ratio, top_k) if kind.ratio else NONE
        return Keys(near.seen + far.seen, near.read + far.read)
    if top_k is not None:
        return chosen_keys(query, context, top_k)
    return causal_keys(query, context) if kind.window is None else windowed_keys(query, context, kind.window)


def index_keys(kind: LayerKind, query: float, context: float) -> Keys:
    """Keys that an indexer scores: all before a query, or all whole blocks of them."""
    if not kind.indexed:
        return NONE
    return compressed_keys(query, context, kind.ratio, None) if kind.ratio else causal_keys(query, context)


def flops_per_key(spec: ModelSpec) -> float:
    """FLOPs of a query and a key over all heads: scores and weighted sum.

    GQA and compressed attention: 4 · n_h · d_h. Absorbed MLA: scores over d_c + d_r values, sums over d_c:
    2 · n_h · (2 d_c + d_r).
    """
    if spec.mla is not None:
        return 2.0 * spec.num_heads * (2 * spec.mla.kv_lora_rank + spec.mla.qk_rope)
    return 4.0 * spec.num_heads * spec.head_dim


def values_per_key(spec: ModelSpec) -> int:
    """Values of a cache entry on one layer: 2 · n_kv · d_h; MLA: d_c + d_r; compressed: d_h, key and value in one."""
    if spec.mla is not None:
        return spec.mla.entry
    if spec.compressed is not None:
        return spec.head_dim
    return 2 * spec.num_kv_heads * spec.head_dim


def values_per_query(spec: ModelSpec) -> int:
    """Activations of a query on one layer: all heads in and out."""
    if spec.mla is not None:
        return spec.num_heads * (spec.mla.entry + spec.mla.kv_lora_rank)
    return 2 * spec.num_heads * spec.head_dim


def entries_written(kind: LayerKind) -> float:
    """Cache entries of one token on one layer: its own, and a part of a compressed one."""
    return 1.0 + (1.0 / kind.ratio if kind.ratio else 0.0)


def index_entries_written(kind: LayerKind) -> float:
    """Index keys of one token on one layer."""
    return 0.0 if not kind.indexed else 1.0 / kind.ratio if kind.ratio else 1.0
