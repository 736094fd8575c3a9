"""ModelSpec: the shape of a decoder, from which weights, KV bytes and FLOPs follow without torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling. `kind` is "llama3" or "linear"; fields as in a Hugging Face config."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a Llama-like decoder (Llama, Mistral, Qwen2, Qwen3).

    `sliding_window` counts the tokens a query sees, itself included (Hugging Face's rule: key position >
    query position - sliding_window); None means full attention. `sliding_layers[i]` says which layers use it.
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

    @property
    def num_layer_linear_params(self) -> int:
        """Weights of one layer's linear maps: q, k, v, o, gate, up, down (biases left out)."""
        q = self.hidden_size * self.num_heads * self.head_dim
        kv = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return 2 * q + kv + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_linear_params(self) -> int:
        """P_lin: weights of all layers' linear maps, without embedding and head."""
        return self.num_layers * self.num_layer_linear_params

    @property
    def num_head_params(self) -> int:
        """P_head: weights of the unembedding, tied or not."""
        return self.hidden_size * self.vocab_size

    @property
    def num_small_params(self) -> int:
        """Norm weights and biases."""
        per_layer = 2 * self.hidden_size
        if self.qk_norm:
            per_layer += 2 * self.head_dim
        if self.qkv_bias:
            per_layer += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.output_bias:
            per_layer += self.hidden_size
        if self.mlp_bias:
            per_layer += 2 * self.intermediate_size + self.hidden_size
        return self.num_layers * per_layer + self.hidden_size

    @property
    def num_params(self) -> int:
        """All stored parameters; a tied embedding is stored once."""
        embeddings = self.num_head_params * (1 if self.tie_word_embeddings else 2)
        return self.num_linear_params + embeddings + self.num_small_params

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the stored weights in `dtype` (fp32, bf16, fp16)."""
        return self.num_params * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers: 2 · L · n_kv · d_h · b (query heads do not count)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]
