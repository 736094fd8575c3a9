"""ModelSpec: the shape of a decoder, from which weights, KV bytes and FLOPs follow without torch."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.errors import InputError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


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


_LLAMA31_ROPE = RopeScaling("llama3", 8.0)
_LLAMA32_ROPE = RopeScaling("llama3", 32.0)


def _llama3(name: str, layers: int, hidden: int, inner: int, heads: int, head_dim: int, tied: bool) -> ModelSpec:
    rope = _LLAMA32_ROPE if tied else _LLAMA31_ROPE
    return ModelSpec(
        *(name, "llama", layers, hidden, inner, heads, 8, head_dim, 128256, tied),
        rope_theta=500000.0,
        rope_scaling=rope,
        max_position_embeddings=131072,
    )


def _smollm2(name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, theta: float) -> ModelSpec:
    return ModelSpec(
        *(name, "llama", layers, hidden, inner, heads, kv_heads, 64, 49152, True),
        rope_theta=theta,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def _qwen2(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, tied: bool
) -> ModelSpec:
    return ModelSpec(
        *(name, "qwen2", layers, hidden, inner, heads, kv_heads, head_dim, 151936 if tied else 152064, tied),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=32768,
        qkv_bias=True,
    )


def _qwen3(name: str, layers: int, hidden: int, inner: int, heads: int, tied: bool) -> ModelSpec:
    return ModelSpec(
        *(name, "qwen3", layers, hidden, inner, heads, 8, 128, 151936, tied),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        qk_norm=True,
    )


_SHAPES = (
    _smollm2("smollm2-135m", 30, 576, 1536, 9, 3, 100000.0),
    _smollm2("smollm2-360m", 32, 960, 2560, 15, 5, 100000.0),
    _smollm2("smollm2-1.7b", 24, 2048, 8192, 32, 32, 130000.0),
    ModelSpec("llama-2-7b", "llama", 32, 4096, 11008, 32, 32, 128, 32000, False, max_position_embeddings=4096),
    _llama3("llama-3.1-8b", 32, 4096, 14336, 32, 128, False),
    _llama3("llama-3.1-70b", 80, 8192, 28672, 64, 128, False),
    _llama3("llama-3.2-1b", 16, 2048, 8192, 32, 64, True),
    _llama3("llama-3.2-3b", 28, 3072, 8192, 24, 128, True),
    ModelSpec(
        *("mistral-7b-v0.1", "mistral", 32, 4096, 14336, 32, 8, 128, 32000, False),
        max_position_embeddings=32768,
        sliding_window=4096,
    ),
    ModelSpec(
        *("mistral-7b-v0.3", "mistral", 32, 4096, 14336, 32, 8, 128, 32768, False),
        rope_theta=1e6,
        max_position_embeddings=32768,
    ),
    _qwen2("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, True),
    _qwen2("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, True),
    _qwen2("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, False),
    _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, True),
    _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, True),
    _qwen3("qwen3-4b", 36, 2560, 9728, 32, True),
    _qwen3("qwen3-8b", 36, 4096, 12288, 32, False),
    _qwen3("qwen3-14b", 40, 5120, 17408, 40, False),
    _qwen3("qwen3-32b", 64, 5120, 25600, 64, False),
    ModelSpec(
        *("tiny-llama-test", "llama", 2, 64, 128, 4, 2, 16, 256, False),
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
)
NAMED_SHAPES: dict[str, ModelSpec] = {spec.name: spec for spec in _SHAPES}


def named_shape(name: str) -> ModelSpec:
    """The shape of a published model, by its short name; raises InputError listing the known names."""
    spec = NAMED_SHAPES.get(name.strip().lower())
    if spec is None:
        raise InputError(
            f"unknown model shape {name!r}", remedy="use one of: " + ", ".join(sorted(NAMED_SHAPES)), key="shape"
        )
    return spec
