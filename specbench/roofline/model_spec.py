"""ModelSpec: the shape of a decoder, from which weights, KV bytes and FLOPs follow without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specbench.roofline.formats import dtype_bytes, storage_bytes, weight_format
from specbench.roofline.matrices import head_matrix, layer_kinds, layer_matrices, total_params


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling. `kind` is "llama3" or "linear"; fields as in a Hugging Face config."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts: each token runs `top_k` of `num_experts` gated MLPs of width `expert_intermediate`, and
    `num_shared` of width `shared_intermediate` (None: the experts' width).

    `moe_layers[i]` says which layers are routed; None: all but the `first_dense` ones. `shared_gate`: the shared expert
    has a gate of its own (Qwen2-MoE).
    """

    num_experts: int
    top_k: int
    expert_intermediate: int
    num_shared: int = 0
    shared_intermediate: int | None = None
    moe_layers: tuple[bool, ...] | None = None
    first_dense: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (from 0) is routed."""
        return layer >= self.first_dense if self.moe_layers is None else self.moe_layers[layer]

    @property
    def shared_width(self) -> int:
        """Inner width of all shared experts together."""
        return self.num_shared * (self.shared_intermediate or self.expert_intermediate)


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent of `kv_lora_rank` and one rotary key of
    `qk_rope` a token for all heads. `q_lora_rank` None: queries come straight from the hidden state."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int

    @property
    def entry(self) -> int:
        """Values cached a token and layer."""
        return self.kv_lora_rank + self.qk_rope


@dataclass(frozen=True)
class IndexerSpec:
    """DeepSeek sparse attention: an indexer scores all keys before a query, attention reads the `top_k` best.

    IndexShare (GLM-5.2): layer i is full, and runs its indexer, iff max(i - share_offset + 1, 0) mod share_group == 0;
    the others read the last full layer's choice. `full_layers` overrides that rule layer by layer.
    """

    heads: int
    head_dim: int
    top_k: int
    share_group: int = 1
    share_offset: int = 2
    full_layers: tuple[bool, ...] | None = None

    def is_full(self, layer: int) -> bool:
        """Whether `layer` (from 0) runs its own indexer."""
        if self.full_layers is not None:
            return self.full_layers[layer]
        return max(layer - self.share_offset + 1, 0) % self.share_group == 0


@dataclass(frozen=True)
class CompressedSpec:
    """DeepSeek-V4's attention: one vector of head_dim a token is key and value of all heads.

    A query sees the last `window` tokens and, where `ratios[layer]` is not 0, one entry for every `ratio` tokens
    before: all of them, or at the ratios in `indexed` the indexer's best. Output goes through `o_groups` maps of rank
    `o_lora_rank`. `streams`: residual streams that hyper-connections mix.
    """

    ratios: tuple[int, ...]
    window: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    streams: int = 1
    indexed: tuple[int, ...] = (4,)
    overlapping: tuple[int, ...] = (4,)
    """Ratios whose compressor reads two blocks a entry: twice as wide."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder: Llama-like (Llama, Mistral, Qwen2, Qwen3), and for costs alone MoE, MLA and sparse attention.

    `sliding_window` counts the tokens a query sees, itself included (Hugging Face's rule: key position >
    query position - sliding_window); None means full attention. `sliding_layers[i]` says which layers use it.
    `intermediate_size` is the width of dense MLPs. `tags`: cells whose value is not certain, each with the reason.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 8192
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    indexer: IndexerSpec | None = None
    compressed: CompressedSpec | None = None
    attention_sinks: bool = False
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def uncertain_cells(self) -> dict[str, str]:
        """Field -> why its value is not certain; empty where all are read from the model's own files."""
        return dict(self.tags)

    @property
    def num_layer_linear_params(self) -> int:
        """Weights of the first layer's linear maps (biases left out): of each layer, where all are alike."""
        return sum(total_params(matrices) for matrices in layer_matrices(self, layer_kinds(self, 1)[0][0]).values())

    @property
    def num_linear_params(self) -> int:
        """P_lin: weights of all layers' linear maps, all experts included, without embedding and head."""
        return sum(
            count * total_params(matrices)
            for kind, count in layer_kinds(self, self.num_layers)
            for matrices in layer_matrices(self, kind).values()
        )

    @property
    def num_active_params(self) -> int:
        """Weights that one token multiplies: linear maps with top_k experts, and the head."""
        total = self.num_linear_params + self.num_head_params
        if self.moe is None:
            return total
        idle = self.moe.num_experts - self.moe.top_k
        routed = sum(count for kind, count in layer_kinds(self, self.num_layers) if kind.moe)
        return total - routed * idle * 3 * self.hidden_size * self.moe.expert_intermediate

    @property
    def num_head_params(self) -> int:
        """P_head: weights of the unembedding, tied or not."""
        return self.hidden_size * self.vocab_size

    @property
    def num_small_params(self) -> int:
        """Norm weights, biases, sinks; of hyper-connections and compressors their maps' offsets are left out."""
        kinds = layer_kinds(self, self.num_layers)
        routed = sum(count for kind, count in kinds if kind.moe)
        total = self.num_layers * self._small_of_attention + routed * self._small_of_experts + self.hidden_size
        if self.indexer is not None and self.compressed is None:  # a layer norm of keys, with weight and bias
            total += 2 * self.indexer.head_dim * sum(count for kind, count in kinds if kind.indexed)
        return total

    @property
    def _small_of_attention(self) -> int:
        per_layer = 2 * self.hidden_size
        if self.mla is not None:
            per_layer += (self.mla.q_lora_rank or 0) + self.mla.kv_lora_rank
        if self.compressed is not None:
            per_layer += self.compressed.q_lora_rank + self.head_dim
        if self.qk_norm:
            per_layer += 2 * self.head_dim
        if self.qkv_bias:
            per_layer += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.output_bias:
            per_layer += self.hidden_size
        if self.mlp_bias:
            per_layer += 2 * self.intermediate_size + self.hidden_size
        return per_layer + (self.num_heads if self.attention_sinks else 0)

    @property
    def _small_of_experts(self) -> int:
        if self.moe is None:
            return 0
        of_one = 2 * self.moe.expert_intermediate + self.hidden_size if self.moe.expert_bias else 0
        return self.moe.num_experts * (of_one + self.moe.router_bias)

    @property
    def num_params(self) -> int:
        """All stored parameters; a tied embedding is stored once."""
        embeddings = self.num_head_params * (1 if self.tie_word_embeddings else 2)
        return self.num_linear_params + embeddings + self.num_small_params

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the stored weights in the weight format `dtype` (formats.py); norms and biases in its float type,
        the input embedding as the head."""
        stored = weight_format(dtype)
        total = float(self.num_small_params * dtype_bytes(stored.computed))
        for kind, count in layer_kinds(self, self.num_layers):
            for part, matrices in layer_matrices(self, kind).items():
                form = stored.experts if part == "experts" else stored.linear
                total += count * sum(m.copies * storage_bytes(form, m.rows, m.cols) for m in matrices)
        head = head_matrix(self)
        total += storage_bytes(stored.head, head.rows, head.cols) * (1 if self.tie_word_embeddings else 2)
        return math.ceil(total)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers: 2 · L · n_kv · d_h · b (query heads do not count).

        MLA: one latent and one rotary key, Σ (d_c + d_r) · b, and an indexer's key where a layer has its own.
        Compressed attention: one vector every `ratio` tokens; its window of fixed size is left out
        (kv_cost.kv_bytes_held).
        """
        return math.ceil(self.kv_values_per_token * dtype_bytes(dtype))

    @property
    def kv_values_per_token(self) -> float:
        """Values cached a token over all layers; see kv_bytes_per_token."""
        total = 0.0
        for kind, count in layer_kinds(self, self.num_layers):
            if kind.ratio is not None:
                entry = self.head_dim + (self.indexer.head_dim if kind.indexed and self.indexer else 0)
                total += count * (entry / kind.ratio if kind.ratio else 0)
            else:
                entry = self.mla.entry if self.mla is not None else 2 * self.num_kv_heads * self.head_dim
                total += count * (entry + (self.indexer.head_dim if kind.indexed and self.indexer else 0))
        return total
