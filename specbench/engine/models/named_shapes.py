"""Shapes of known models, for dummy weights and for predictions without a checkpoint. No torch.

Source: each model's published config.json; `tiny-llama-test` is ours, small enough for tests.
"""

from __future__ import annotations

from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec, RopeScaling

_NAMED_SHAPES = {
    "smollm2-135m": ModelSpec(
        name="smollm2-135m",
        family="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "llama-3.1-8b": ModelSpec(
        name="llama-3.1-8b",
        family="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "qwen3-8b": ModelSpec(
        name="qwen3-8b",
        family="qwen3",
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=40960,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
    "tiny-llama-test": ModelSpec(
        name="tiny-llama-test",
        family="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=256,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
}


def named_shape(name: str) -> ModelSpec:
    """The shape of a known model, for dummy weights and predictions; InputError with the known names otherwise."""
    if name not in _NAMED_SHAPES:
        raise InputError(
            f"no shape called {name!r}", key="shape", remedy=f"known shapes: {', '.join(sorted(_NAMED_SHAPES))}"
        )
    return _NAMED_SHAPES[name]
