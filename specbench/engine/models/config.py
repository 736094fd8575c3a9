"""From a model's own description (config.json, GGUF keys, a named shape) to a `ModelSpec`. No torch.

A key that is missing, mistyped or means something that the decoder does not do is an InputError that names file and
key; where Hugging Face's class has a default for an absent key, the same default holds here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specbench.engine.models.gguf_weights import ROPE_FACTORS, GGUFFile, open_gguf
from specbench.engine.models.sources import CONFIG_FILE, DUMMY_PREFIX, ModelSource, read_json_object
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec, RopeScaling, named_shape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_QWEN = ("qwen2", "qwen3")
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
        return replace(named_shape(source.display_name.removeprefix(DUMMY_PREFIX)), name=source.display_name)
    if source.path is None:
        raise InputError(f"a source of kind {source.kind} needs a path", key="model")
    if source.kind == "gguf":
        return spec_from_gguf(open_gguf(source.path), source.display_name)
    config_file, generation_file = source.path / CONFIG_FILE, source.path / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else None
    return spec_from_hf_config(
        read_json_object(config_file), source.display_name, generation_config=generation, file=config_file
    )


def spec_from_hf_config(
    config: Mapping[str, Any],
    name: str,
    *,
    generation_config: Mapping[str, Any] | None = None,
    file: Path | str | None = None,
) -> ModelSpec:
    """A spec from the contents of a config.json (llama, mistral, qwen2, qwen3).

    End-of-text ids come from `generation_config` where it has any, as in transformers' generate. `file` is named in
    errors. Raises InputError on unknown families, missing or mistyped keys and features the decoder lacks.
    """
    keys = _Keys(config, file)
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
    rope_theta, rope_scaling = _hf_rope(keys)
    sliding_window, sliding_layers = _hf_sliding(keys, family, num_layers)
    attention_bias = family in ("llama", "qwen3") and keys.flag("attention_bias", False)
    eos = _token_ids(_Keys(generation_config or {}, "generation_config.json"), "eos_token_id")
    bos = _token_ids(keys, "bos_token_id")
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
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and keys.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos or _token_ids(keys, "eos_token_id"),
        ),
    )


def spec_from_gguf(gguf: GGUFFile, name: str) -> ModelSpec:
    """A spec from a GGUF's keys and tensor list (architectures llama, qwen2, qwen3; Mistral is stored as llama).

    Tied embeddings and biases show in which tensors there are. A `rope_freqs.weight` tensor must be Llama 3's scaling
    with its published parameters (low 1, high 4, original context 8192); any other is refused.
    """
    keys = _Keys(gguf.metadata, gguf.path)
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
        for token in _token_ids(keys, f"tokenizer.ggml.{key}")
    ]  # fmt: skip
    bos = _token_ids(keys, "tokenizer.ggml.bos_token_id")
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


class _Keys:
    """A mapping read key by key, with the file and the key in every error. JSON null counts as absent."""

    def __init__(self, values: Mapping[str, Any], file: Path | str | None, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def error(self, key: str, message: str, *, remedy: str | None = None) -> InputError:
        return InputError(message, file=self.file, key=f"{self.prefix}{key}", remedy=remedy)

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "the key is missing", remedy=f"it must be {what}")
            return default
        # bool is an int to Python, but never a size.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(key, f"must be {what}, is {value!r}")
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, None, (str,), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, (bool,), "true or false"))

    def count(self, key: str, default: int) -> int:
        value = int(self._get(key, default, (int,), "a whole number"))
        if value < 0:
            raise self.error(key, f"must not be negative, is {value}")
        return value

    def optional_integer(self, key: str, absent: int) -> int | None:
        """None if the key is null; `absent` if it is not there."""
        return None if self.values.get(key, absent) is None else self.integer(key, absent)

    def integer(self, key: str, default: int | None = None) -> int:
        value = int(self._get(key, default, (int,), "a positive whole number"))
        if value <= 0:
            raise self.error(key, f"must be a positive whole number, is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, default, (int, float), "a positive number"))
        if not 0 < value < math.inf:
            raise self.error(key, f"must be a positive number, is {value}")
        return value

    def refuse_unless(self, key: str, supported: Any) -> None:
        """InputError if the key is there with another value than the one this decoder computes."""
        value = self.values.get(key)
        if value is not None and value != supported:
            raise self.error(key, f"{value!r} is not supported" + (f"; {supported!r} is" if supported else ""))


def _checked(keys: _Keys, spec: ModelSpec) -> ModelSpec:
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


def _hf_rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    old, new = keys.values.get("rope_scaling"), keys.values.get("rope_parameters")
    if old and new and old != new:
        raise keys.error("rope_scaling", "contradicts rope_parameters", remedy="keep one of them")
    name = "rope_parameters" if new else "rope_scaling"
    values = new or old or {}
    if not isinstance(values, Mapping):
        raise keys.error(name, f"must be an object, is {values!r}")
    rope = _Keys(values, keys.file, f"{name}.")
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


def _hf_sliding(keys: _Keys, family: str, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
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


def _token_ids(keys: _Keys, key: str) -> tuple[int, ...]:
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


def _gguf_rope_scaling(keys: _Keys, gguf: GGUFFile, arch: str, head_dim: int, rope_theta: float) -> RopeScaling | None:
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
