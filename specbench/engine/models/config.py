"""From a model's own description (config.json, GGUF keys, a named shape) to a `ModelSpec`. No torch.

A key that is missing, mistyped or means something that the decoder does not do is an InputError that names file and
key; where Hugging Face's class has a default for an absent key, the same default holds here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specbench.engine.models.gguf_weights import ROPE_FACTORS, GGUFFile, open_gguf
from specbench.engine.models.sources import CONFIG_FILE, DUMMY_PREFIX, ModelSource, read_json_object
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys
from specbench.roofline.shapes import ModelSpec, RopeScaling, named_shape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_QWEN2 = ("qwen2", "mimo")
_QWEN = (*_QWEN2, "qwen3")
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Config keys that say how many MTP modules a checkpoint holds beside the model's own layers."""
_MTP_NAME = re.compile(r"(model\.)?mtp(_layers)?\.")
_LAYER_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.")
# Class defaults of transformers for keys that an old config may lack.
_MISTRAL_SLIDING_WINDOW = 4096
_QWEN_SLIDING_WINDOW = 4096
_QWEN_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128
_ROPE_THETA = 10000.0
_RMS_NORM_EPS = 1e-6


def read_model_spec(source: ModelSource) -> ModelSpec:
    """The spec of a resolved model, read from its config or header; no weights are read and torch is not needed."""
    if source.kind == "dummy":
        spec = named_shape(source.display_name.removeprefix(DUMMY_PREFIX))
        refuse_unrunnable(spec)
        return replace(spec, name=source.display_name)
    if source.path is None:
        raise InputError(f"a source of kind {source.kind} needs a path", key="model")
    if source.kind == "gguf":
        return spec_from_gguf(open_gguf(source.path), source.display_name)
    config_file, generation_file = source.path / CONFIG_FILE, source.path / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else None
    return spec_from_hf_config(
        read_json_object(config_file), source.display_name, generation_config=generation, file=config_file
    )


def refuse_unrunnable(spec: ModelSpec) -> None:
    """InputError for shapes that only the cost model knows: experts, latent, sparse and compressed attention, sinks."""
    lacking = [
        what
        for what, there in (
            ("mixture of experts", spec.moe),
            ("multi-head latent attention", spec.mla),
            ("sparse attention with an indexer", spec.indexer),
            ("compressed attention", spec.compressed),
            ("attention sinks", spec.attention_sinks),
        )
        if there
    ]
    if lacking:
        raise InputError(
            f"the engine does not run {spec.name}: it has no {', no '.join(lacking)}",
            key="target.shape",
            remedy="choose a dense shape (llama, mistral, qwen2, qwen3), or let `specbench predict` reckon this one",
        )


def spec_from_hf_config(
    config: Mapping[str, Any],
    name: str,
    *,
    generation_config: Mapping[str, Any] | None = None,
    file: Path | str | None = None,
) -> ModelSpec:
    """A spec from the contents of a config.json (llama, mistral, qwen2, qwen3; mimo is qwen2 with MTP modules).

    End-of-text ids come from `generation_config` where it has any, as in transformers' generate. `file` is named in
    errors. Raises InputError on unknown families, missing or mistyped keys and features the decoder lacks.
    """
    keys = Keys(config, file)
    family = keys.text("model_type")
    if family not in FAMILIES:
        raise keys.error("model_type", f"{family!r} is not supported", remedy=f"supported: {', '.join(FAMILIES)}")
    keys.refuse_unless("hidden_act", "silu")
    keys.refuse_unless("quantization_config", None)
    keys.refuse_unless("partial_rotary_factor", 1.0)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    num_layers = keys.integer("num_hidden_layers")
    max_positions = keys.integer("max_position_embeddings")
    if keys.values.get("head_dim") is None and family != "qwen3" and hidden_size % num_heads:
        raise keys.error("head_dim", f"the key is missing, and {num_heads} heads do not divide {hidden_size}")
    head_dim = keys.integer("head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads)
    rope_theta, rope_scaling = hf_rope(keys)
    sliding_window, sliding_layers = _hf_sliding(keys, family, num_layers)
    attention_bias = family in ("llama", "qwen3") and keys.flag("attention_bias", False)
    eos = token_ids(Keys(generation_config or {}, "generation_config.json"), "eos_token_id")
    bos = token_ids(keys, "bos_token_id")
    return _checked(
        keys,
        ModelSpec(
            name=name,
            family=family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=keys.integer("vocab_size"),
            tie_word_embeddings=keys.flag("tie_word_embeddings", False),
            rms_norm_eps=keys.number("rms_norm_eps", _RMS_NORM_EPS),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_positions,
            qkv_bias=family in _QWEN2 or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and keys.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos or token_ids(keys, "eos_token_id"),
        ),
    )


def left_aside(config: Mapping[str, Any], num_layers: int, file: Path | str | None = None) -> Callable[[str], bool]:
    """Which stored tensors of a model of `num_layers` are its MTP modules', which a head of kind mtp reads: those named
    mtp, and behind the last layer as many layers as the config counts."""
    keys = Keys(config, file)
    end = num_layers + max(keys.count(key, 0) for key in MTP_COUNTS)

    def is_left_aside(stored_name: str) -> bool:
        layer = _LAYER_NAME.match(stored_name)
        return _MTP_NAME.match(stored_name) is not None or (layer is not None and num_layers <= int(layer[1]) < end)

    return is_left_aside


def spec_from_gguf(gguf: GGUFFile, name: str) -> ModelSpec:
    """A spec from a GGUF's keys and tensor list (architectures llama, qwen2, qwen3; Mistral is stored as llama).

    Tied embeddings and biases show in which tensors there are. A `rope_freqs.weight` tensor must be Llama 3's scaling
    with its published parameters (low 1, high 4, original context 8192); any other is refused.
    """
    keys = Keys(gguf.metadata, gguf.path)
    arch = keys.text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise keys.error(
            "general.architecture", f"{arch!r} is not supported", remedy=f"supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    for key, plain in (("expert_count", 0), ("attention.sliding_window", 0)):
        keys.refuse_unless(f"{arch}.{key}", plain)
    hidden_size = keys.integer(f"{arch}.embedding_length")
    num_heads = keys.integer(f"{arch}.attention.head_count")
    head_dim = keys.integer(f"{arch}.attention.key_length", hidden_size // num_heads)
    keys.refuse_unless(f"{arch}.attention.value_length", head_dim)
    keys.refuse_unless(f"{arch}.rope.dimension_count", head_dim)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.error("token_embd.weight", "the tensor is missing", remedy="pass a whole model, not a part of one")
    keys.refuse_unless(f"{arch}.vocab_size", embedding.shape[0])
    rope_theta = keys.number(f"{arch}.rope.freq_base", _ROPE_THETA)
    eos = [
        token
        for key in ("eos_token_id", "eot_token_id")
        for token in token_ids(keys, f"tokenizer.ggml.{key}")
    ]  # fmt: skip
    bos = token_ids(keys, "tokenizer.ggml.bos_token_id")
    return _checked(
        keys,
        ModelSpec(
            name=name,
            family=arch,
            num_layers=keys.integer(f"{arch}.block_count"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer(f"{arch}.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=keys.integer(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            tie_word_embeddings="output.weight" not in gguf.tensors,
            # Stored as float32: 1e-5 comes back as 9.99999974e-06.
            rms_norm_eps=_short(keys.number(f"{arch}.attention.layer_norm_rms_epsilon")),
            rope_theta=_short(rope_theta),
            rope_scaling=_gguf_rope_scaling(keys, gguf, arch, head_dim, rope_theta),
            max_position_embeddings=keys.integer(f"{arch}.context_length"),
            qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
            output_bias="blk.0.attn_output.bias" in gguf.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in gguf.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        ),
    )


def llama3_rope_factors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> list[float]:
    """What Llama 3's scaling divides each of the D/2 inverse frequencies by.

    With wavelength w = 2π·θ^(2i/D) and original context L: 1 where w < L/high, `factor` where w > L/low, and
    1/((1 - s)/factor + s) between, s = (L/w - low)/(high - low). Source: the llama3 rope type of transformers.
    """
    factors = []
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * i / head_dim)
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return factors


def _checked(keys: Keys, spec: ModelSpec) -> ModelSpec:
    """Relations between keys that no single key shows."""
    if spec.num_heads % spec.num_kv_heads:
        raise keys.error("num_key_value_heads", f"{spec.num_kv_heads} does not divide {spec.num_heads} heads")
    if spec.head_dim % 2:
        raise keys.error("head_dim", f"{spec.head_dim} is odd; RoPE turns pairs")
    special = [*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])]
    for token in special:
        if not 0 <= token < spec.vocab_size:
            raise keys.error("eos_token_id", f"token id {token} is outside the vocabulary of {spec.vocab_size}")
    return spec


def hf_rope(keys: Keys) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    old, new = keys.values.get("rope_scaling"), keys.values.get("rope_parameters")
    if old and new and old != new:
        raise keys.error("rope_scaling", "contradicts rope_parameters", remedy="keep one of them")
    name = "rope_parameters" if new else "rope_scaling"
    values = new or old or {}
    if not isinstance(values, Mapping):
        raise keys.error(name, f"must be an object, is {values!r}")
    rope = Keys(values, keys.file, f"{name}.")
    theta = rope.number("rope_theta", keys.number("rope_theta", _ROPE_THETA))
    nested = [key for key, value in values.items() if isinstance(value, Mapping)]
    if nested:
        raise rope.error(nested[0], "RoPE parameters that differ by layer are not supported")
    rope.refuse_unless("partial_rotary_factor", 1.0)
    kind_key = "rope_type" if "rope_type" in values else "type"
    kind = rope.text(kind_key) if kind_key in values or (name == "rope_scaling" and values) else "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind != "llama3":
        raise rope.error(kind_key, f"{kind!r} is not supported", remedy="supported: default, linear, llama3")
    scaling = RopeScaling(
        "llama3",
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.integer("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.error("high_freq_factor", "must be above low_freq_factor")
    return theta, scaling


def _hf_sliding(keys: Keys, family: str, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window and the layers that use it.

    Llama: none. Mistral: `sliding_window` on every layer, null = full attention, absent = 4096. Qwen: only with
    `use_sliding_window`; on `layer_types`' sliding layers, or else on layers >= max_window_layers.
    """
    window, first = None, 0
    if family == "mistral":
        window = keys.optional_integer("sliding_window", _MISTRAL_SLIDING_WINDOW)
    elif family in _QWEN and keys.flag("use_sliding_window", False):
        window = keys.optional_integer("sliding_window", _QWEN_SLIDING_WINDOW)
        first = keys.count("max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
    sliding = tuple(window is not None and layer >= first for layer in range(num_layers))
    types = keys.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise keys.error("layer_types", f"must be a list of {num_layers} names, is {types!r}")
        for layer, kind in enumerate(types):
            if kind not in ("full_attention", "sliding_attention"):
                raise keys.error("layer_types", f"{kind!r} (layer {layer}) is not supported")
        listed = tuple(kind == "sliding_attention" for kind in types)
        if listed != sliding and (window is None or family not in _QWEN):
            raise keys.error("layer_types", f"contradicts the sliding window, which is {window} for {family}")
        sliding = listed
    return (window, sliding) if any(sliding) else (None, None)


def token_ids(keys: Keys, key: str) -> tuple[int, ...]:
    """One id, a list of ids, or none (absent, null, or -1 as some converters write)."""
    value = keys.values.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token in values:
        if not isinstance(token, int) or isinstance(token, bool):
            raise keys.error(key, f"must be a token id or a list of them, is {value!r}")
    return tuple(token for token in values if token != -1)


def _short(value: float) -> float:
    """The shortest decimal that float32 rounds to this value."""
    return float(str(np.float32(value)))


def _gguf_rope_scaling(keys: Keys, gguf: GGUFFile, arch: str, head_dim: int, rope_theta: float) -> RopeScaling | None:
    kind = keys.values.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise keys.error(f"{arch}.rope.scaling.type", f"{kind!r} is not supported", remedy="supported: none, linear")
    linear = RopeScaling("linear", keys.number(f"{arch}.rope.scaling.factor")) if kind == "linear" else None
    if ROPE_FACTORS not in gguf.tensors:
        return linear
    stored = gguf.values(ROPE_FACTORS).reshape(-1)
    scaling = RopeScaling("llama3", float(stored.max(initial=1.0)))
    expected = np.array(llama3_rope_factors(scaling, head_dim, rope_theta))
    if linear is not None or stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise keys.error(
            ROPE_FACTORS,
            "these RoPE factors are not Llama 3's scaling (low 1, high 4, original context 8192)",
            remedy="use the model's Hugging Face folder, whose config.json names the scaling",
        )
    return scaling
