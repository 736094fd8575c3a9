"""The matrices of a decoder's layers, by part: the one place where parameter counts, bytes and FLOPs come from."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specbench.roofline.model_spec import CompressedSpec, MlaSpec, ModelSpec, MoeSpec


class Matrix(NamedTuple):
    """`copies` equal matrices of `rows` outputs and `cols` inputs, each run by every token."""

    rows: int
    cols: int
    copies: int = 1

    @property
    def params(self) -> int:
        return self.rows * self.cols * self.copies

    @property
    def values(self) -> int:
        """Activations that one token reads and writes."""
        return (self.rows + self.cols) * self.copies


class LayerKind(NamedTuple):
    """What sets a layer apart: routed experts, its window, whether it runs an indexer of its own, whether it reads an
    indexer's choice, and its ratio where attention is compressed (0: the window alone)."""

    moe: bool
    window: int | None
    indexed: bool
    sparse: bool
    ratio: int | None


def total_params(matrices: tuple[Matrix, ...]) -> int:
    return sum(matrix.params for matrix in matrices)


def head_matrix(spec: ModelSpec) -> Matrix:
    """The unembedding."""
    return Matrix(spec.vocab_size, spec.hidden_size)


@lru_cache(maxsize=1024)
def layer_kinds(spec: ModelSpec, num_layers: int) -> tuple[tuple[LayerKind, int], ...]:
    """The kinds among the first `num_layers` layers, in the order they first come, and how many there are of each."""
    return tuple(Counter(_kind(spec, layer) for layer in range(num_layers)).items())


def _kind(spec: ModelSpec, layer: int) -> LayerKind:
    moe = spec.moe is not None and spec.moe.is_moe(layer)
    if spec.compressed is not None:
        ratio = spec.compressed.ratios[layer]
        sparse = spec.indexer is not None and ratio in spec.compressed.indexed
        indexed = sparse and spec.indexer is not None and spec.indexer.is_full(layer)
        return LayerKind(moe, spec.compressed.window, indexed, sparse, ratio)
    sliding = spec.sliding_window is not None and (spec.sliding_layers is None or spec.sliding_layers[layer])
    indexed = spec.indexer is not None and spec.indexer.is_full(layer)
    return LayerKind(moe, spec.sliding_window if sliding else None, indexed, spec.indexer is not None, None)


@lru_cache(maxsize=1024)
def layer_matrices(spec: ModelSpec, kind: LayerKind) -> dict[str, tuple[Matrix, ...]]:
    """Part -> matrices of one layer: `linear` (attention, dense MLP, shared experts, router), `experts` (all routed
    ones) and `indexer`. Not to be changed."""
    linear = _attention(spec, kind)
    experts: tuple[Matrix, ...] = ()
    if kind.moe and spec.moe is not None:
        linear += _beside_experts(spec.hidden_size, spec.moe)
        experts = _gated(spec.hidden_size, spec.moe.expert_intermediate, spec.moe.num_experts)
    elif spec.intermediate_size:
        linear += _gated(spec.hidden_size, spec.intermediate_size)
    return {"linear": linear, "experts": experts, "indexer": _indexer(spec, kind) if kind.indexed else ()}


def _gated(hidden: int, inner: int, copies: int = 1) -> tuple[Matrix, ...]:
    """Gate, up and down."""
    return (Matrix(inner, hidden, 2 * copies), Matrix(hidden, inner, copies))


def _beside_experts(hidden: int, moe: MoeSpec) -> tuple[Matrix, ...]:
    router = (Matrix(moe.num_experts, hidden),)
    gate = (Matrix(1, hidden),) if moe.shared_gate else ()
    return (*router, *gate, *(_gated(hidden, moe.shared_width) if moe.num_shared else ()))


def _attention(spec: ModelSpec, kind: LayerKind) -> tuple[Matrix, ...]:
    if spec.compressed is not None:
        return _compressed(spec, spec.compressed, kind.ratio or 0)
    if spec.mla is not None:
        return _latent(spec, spec.mla)
    hidden, query, key = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (Matrix(query, hidden), Matrix(key, hidden, 2), Matrix(hidden, query))


def _latent(spec: ModelSpec, mla: MlaSpec) -> tuple[Matrix, ...]:
    """Absorbed MLA: W_UK maps each head's query into the latent, W_UV each head's sum of latents out of it, so both are
    run on query tokens alone and no key is ever expanded (DeepSeek-V2 §2.1.2)."""
    hidden, heads, query = spec.hidden_size, spec.num_heads, spec.num_heads * (mla.qk_nope + mla.qk_rope)
    queries: tuple[Matrix, ...] = (Matrix(query, hidden),)
    if mla.q_lora_rank is not None:
        queries = (Matrix(mla.q_lora_rank, hidden), Matrix(query, mla.q_lora_rank))
    return (
        *queries,
        Matrix(mla.entry, hidden),
        Matrix(mla.kv_lora_rank, mla.qk_nope, heads),
        Matrix(mla.v_dim, mla.kv_lora_rank, heads),
        Matrix(hidden, heads * mla.v_dim),
    )


def _compressed(spec: ModelSpec, shape: CompressedSpec, ratio: int) -> tuple[Matrix, ...]:
    """DeepSeek-V4: low-rank queries, one shared key-value vector, grouped low-rank output, a compressor's values and
    gates, and two hyper-connections, which read all streams and write (2 + n) · n mixing weights. Mixing the streams by
    them, 4 · n² · d FLOPs a token and layer without weights, is left out: 0.04 % of V4-Flash."""
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim
    matrices = [
        Matrix(shape.q_lora_rank, hidden),
        Matrix(width, shape.q_lora_rank),
        Matrix(spec.head_dim, hidden),
        Matrix(shape.o_lora_rank, width // shape.o_groups, shape.o_groups),
        Matrix(hidden, shape.o_groups * shape.o_lora_rank),
    ]
    if ratio:
        matrices.append(Matrix(spec.head_dim * (1 + (ratio in shape.overlapping)), hidden, 2))
    if shape.streams > 1:
        matrices.append(Matrix((2 + shape.streams) * shape.streams, shape.streams * hidden, 2))
    return tuple(matrices)


def _indexer(spec: ModelSpec, kind: LayerKind) -> tuple[Matrix, ...]:
    """Queries from the low-rank query, one key, one weight a head; compressed attention compresses the keys too."""
    indexer, rank = spec.indexer, None
    assert indexer is not None
    if spec.compressed is not None:
        rank = spec.compressed.q_lora_rank
    elif spec.mla is not None:
        rank = spec.mla.q_lora_rank
    queries = Matrix(indexer.heads * indexer.head_dim, rank or spec.hidden_size)
    keys = Matrix(indexer.head_dim, spec.hidden_size)
    if spec.compressed is not None and kind.ratio:
        keys = Matrix(indexer.head_dim * (1 + (kind.ratio in spec.compressed.overlapping)), spec.hidden_size, 2)
    return (queries, keys, Matrix(indexer.heads, spec.hidden_size))
