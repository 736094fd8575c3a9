"""Published models by their short names, each as its config.json gives it.

Cells that were not read in a model's own config are tagged, with the reason: `ModelSpec.uncertain_cells` lists them.
Sources: config.json of the models and the class defaults of transformers 5.24; DeepSeek-V4 and GLM-5.2 as noted.
"""

from __future__ import annotations

from specbench.errors import InputError
from specbench.roofline.model_spec import CompressedSpec, IndexerSpec, MlaSpec, ModelSpec, MoeSpec, RopeScaling

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


_DENSE = (
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

_GLM_TAG = "the vendor's figure, read in copies and in engine code, not in the published config"
_V4_TAG = "from the config class of transformers and model cards, not from the published config"
_V4_PRO_TAG = "from a mirror of the config"


def _deepseek_v4(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    q_rank: int,
    groups: int,
    moe: MoeSpec,
    ratios: tuple[int, ...],
    tags: tuple[tuple[str, str], ...],
) -> ModelSpec:
    """Head dim 512, one vector a token for keys and values, a window of 128, and an indexer at ratio 4."""
    return ModelSpec(
        *(name, "deepseek_v4", layers, hidden, 0, heads, 1, 512, 129280, False),
        rms_norm_eps=1e-6,
        max_position_embeddings=1048576,
        moe=moe,
        indexer=IndexerSpec(heads=64, head_dim=128, top_k=512),
        compressed=CompressedSpec(
            ratios=ratios, window=128, q_lora_rank=q_rank, o_groups=groups, o_lora_rank=1024, streams=4
        ),
        attention_sinks=True,
        tags=tags,
    )


_ROUTED = (
    ModelSpec(
        *("mixtral-8x7b", "mixtral", 32, 4096, 14336, 32, 8, 128, 32000, False),
        rope_theta=1e6,
        max_position_embeddings=32768,
        moe=MoeSpec(num_experts=8, top_k=2, expert_intermediate=14336),
    ),
    ModelSpec(
        *("qwen3-30b-a3b", "qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, False),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        qk_norm=True,
        moe=MoeSpec(num_experts=128, top_k=8, expert_intermediate=768),
    ),
    ModelSpec(
        *("gpt-oss-120b", "gpt_oss", 36, 2880, 2880, 64, 8, 64, 201088, False),
        rope_theta=150000.0,
        max_position_embeddings=131072,
        qkv_bias=True,
        output_bias=True,
        sliding_window=128,
        sliding_layers=tuple(layer % 2 == 0 for layer in range(36)),
        moe=MoeSpec(num_experts=128, top_k=4, expert_intermediate=2880, router_bias=True, expert_bias=True),
        attention_sinks=True,
    ),
    ModelSpec(
        *("deepseek-v3", "deepseek_v3", 61, 7168, 18432, 128, 128, 192, 129280, False),
        rms_norm_eps=1e-6,
        max_position_embeddings=163840,
        moe=MoeSpec(num_experts=256, top_k=8, expert_intermediate=2048, num_shared=1, first_dense=3, router_bias=True),
        mla=MlaSpec(q_lora_rank=1536, kv_lora_rank=512, qk_nope=128, qk_rope=64, v_dim=128),
    ),
    _deepseek_v4(
        *("deepseek-v4-flash", 43, 4096, 64, 1024, 8),
        MoeSpec(num_experts=256, top_k=6, expert_intermediate=2048, num_shared=1),
        (0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43))),
        (("compressed", _V4_TAG), ("indexer", _V4_TAG)),
    ),
    _deepseek_v4(
        *("deepseek-v4-pro", 61, 7168, 128, 1536, 16),
        MoeSpec(num_experts=384, top_k=6, expert_intermediate=3072, num_shared=1),
        (128, 128, *(128 if layer % 2 == 0 else 4 for layer in range(2, 61))),
        (
            ("compressed", f"{_V4_PRO_TAG}; the order of ratios is the config class's default for Pro"),
            ("indexer", f"{_V4_PRO_TAG}: top_k 512 there, officially perhaps 1024; heads as in Flash"),
            ("moe", _V4_PRO_TAG),
            ("num_heads", _V4_PRO_TAG),
            ("hidden_size", _V4_PRO_TAG),
        ),
    ),
    ModelSpec(
        *("glm-5.2", "glm_moe_dsa", 78, 6144, 12288, 64, 64, 256, 154880, False),
        rope_theta=8e6,
        max_position_embeddings=1048576,
        moe=MoeSpec(num_experts=256, top_k=8, expert_intermediate=2048, num_shared=1, first_dense=3, router_bias=True),
        mla=MlaSpec(q_lora_rank=2048, kv_lora_rank=512, qk_nope=192, qk_rope=64, v_dim=256),
        indexer=IndexerSpec(heads=32, head_dim=128, top_k=2048, share_group=4, share_offset=3),
        tags=(
            ("indexer", f"{_GLM_TAG}: groups of 4 from offset 3, 21 of 78 layers full"),
            ("moe", _GLM_TAG),
            ("mla", _GLM_TAG),
            ("max_position_embeddings", _GLM_TAG),
            ("rope_theta", _GLM_TAG),
        ),
    ),
)
NAMED_SHAPES: dict[str, ModelSpec] = {spec.name: spec for spec in (*_DENSE, *_ROUTED)}


def named_shape(name: str) -> ModelSpec:
    """The shape of a published model, by its short name; raises InputError listing the known names."""
    spec = NAMED_SHAPES.get(name.strip().lower())
    if spec is None:
        raise InputError(
            f"unknown model shape {name!r}", remedy="use one of: " + ", ".join(sorted(NAMED_SHAPES)), key="shape"
        )
    return spec
