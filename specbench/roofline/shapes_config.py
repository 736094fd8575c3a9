"""From any model's config.json to a `ModelSpec` for costs: dense, routed, latent, sparse and compressed attention.

`engine/models/config.py` reads the same files for models that the engine runs, and refuses more. Here RoPE and
activations do not matter, and an unknown `model_type` is read by its keys as a Llama-like decoder, with a tag that says
so, unless a key tells of layers that the cost model does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.errors import InputError
from specbench.roofline.config_keys import Keys
from specbench.roofline.model_spec import CompressedSpec, IndexerSpec, MlaSpec, ModelSpec, MoeSpec

DENSE = ("llama", "mistral", "qwen2", "qwen3", "mimo")
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa")
COMPRESSED = ("deepseek_v4",)
FAMILIES = (*DENSE, *ROUTED, *LATENT, *COMPRESSED)
_FOREIGN = (
    "ssm",
    "mamba",
    "linear_attn",
    "linear_num",
    "rwkv",
    "lru",
    "conv_",
    "recurrent",
    "cross_attention",
    "n_embd",
)
"""Beginnings of keys that tell of layers which are no attention, or of another layout."""
_FULL, _SLIDING = ("full_attention", "indexed_attention"), "sliding_attention"
_CHOSEN, _WHOLE = "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {_CHOSEN: 4, _WHOLE: 128}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_config(path: Path, name: str | None = None) -> ModelSpec:
    """The spec of a model's folder or of a config.json itself; `name` defaults to the folder's.

    Raises InputError, with the file, for what is missing, no JSON, or not understood.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"can't be read: {error.strerror}", file=file, remedy="give the folder that holds the model's config.json"
        ) from error
    except ValueError as error:
        raise InputError(f"is no JSON: {error}", file=file, remedy="download the file again") from error
    if not isinstance(config, dict):
        raise InputError("must hold an object", file=file, remedy="give a model's config.json")
    return spec_from_config(config, name or file.resolve().parent.name, file=file)


def spec_from_config(config: Mapping[str, Any], name: str, *, file: Path | str | None = None) -> ModelSpec:
    """The spec in the contents of a config.json. A multimodal model's text part is read from its `text_config`.

    Raises InputError naming file, key and remedy where a key is missing or contradicts another.
    """
    text = config.get("text_config")
    nested = isinstance(text, Mapping) and "hidden_size" not in config
    keys = Keys(text if nested else config, file, "text_config." if nested else "")  # type: ignore[arg-type]
    family = keys.text("model_type")
    tags: tuple[tuple[str, str], ...] = ()
    if family not in FAMILIES:
        foreign = [key for key in keys.values if key.startswith(_FOREIGN) and keys.values[key]]
        if foreign:
            raise keys.error(
                "model_type",
                f"{family!r} has layers that the cost model does not know (key {foreign[0]})",
                remedy=f"known: {', '.join(FAMILIES)}",
            )
        tags = (("family", f"model_type {family!r} is not known, it was read by its keys as a Llama-like decoder"),)
    hidden, heads, layers = (keys.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    latent = _latent(keys)
    routed = _routed(keys, layers)
    compressed = _compressed(keys, layers) if family in COMPRESSED else None
    window, sliding = (None, None) if compressed is not None else _sliding(keys, family, layers)
    bias = keys.flag("attention_bias", family == "gpt_oss") and latent is None
    spec = ModelSpec(
        name=name,
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=0 if compressed is not None else _inner(keys, routed, layers),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=_head_dim(keys, family, latent, hidden, heads),
        vocab_size=keys.integer("vocab_size"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        max_position_embeddings=keys.integer("max_position_embeddings", 8192),
        qkv_bias=bias or family in ("qwen2", "qwen2_moe", "mimo"),
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
        qk_norm=family in ("qwen3", "qwen3_moe") or keys.flag("use_qk_norm", False),
        sliding_window=window,
        sliding_layers=sliding,
        moe=routed,
        mla=latent,
        indexer=_indexer(keys, layers) if latent is not None or compressed is not None else None,
        compressed=compressed,
        attention_sinks=family in ("gpt_oss", "deepseek_v4"),
        tags=tags,
    )
    if spec.num_heads % spec.num_kv_heads:
        raise keys.error("num_key_value_heads", f"{spec.num_kv_heads} does not divide {spec.num_heads} heads")
    return spec


def _head_dim(keys: Keys, family: str, latent: MlaSpec | None, hidden: int, heads: int) -> int:
    if latent is not None:
        return latent.qk_nope + latent.qk_rope
    if keys.values.get("head_dim") is None and family not in ("qwen3", "gpt_oss", "deepseek_v4") and hidden % heads:
        raise keys.error(
            "head_dim", f"the key is missing, and {heads} heads do not divide {hidden}", remedy="add head_dim"
        )
    usual = {"qwen3": 128, "gpt_oss": 64, "deepseek_v4": 512}.get(family, hidden // heads)
    return keys.integer("head_dim", usual)


def _inner(keys: Keys, routed: MoeSpec | None, layers: int) -> int:
    """The dense MLP's width; a model all of whose layers are routed may leave it out."""
    all_routed = routed is not None and all(routed.is_moe(layer) for layer in range(layers))
    return keys.count("intermediate_size", 0) if all_routed else keys.integer("intermediate_size")


def _latent(keys: Keys) -> MlaSpec | None:
    if keys.values.get("kv_lora_rank") is None:
        return None
    rank = keys.values.get("q_lora_rank")
    return MlaSpec(
        q_lora_rank=None if rank is None else keys.integer("q_lora_rank"),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope=keys.integer("qk_nope_head_dim"),
        qk_rope=keys.integer("qk_rope_head_dim"),
        v_dim=keys.integer("v_head_dim"),
    )


def _routed(keys: Keys, layers: int) -> MoeSpec | None:
    """Experts, under whichever of the three keys counts them. A dense model may say that it has none, or one."""
    named = [key for key in _EXPERT_COUNTS if keys.values.get(key) is not None]
    if not named or keys.count(named[0], 0) <= 1:
        return None
    count = keys.integer(named[0])
    top_k = keys.integer("num_experts_per_tok")
    if top_k > count:
        raise keys.error("num_experts_per_tok", f"{top_k} of {count} experts", remedy="choose at most all of them")
    own_width = keys.values.get("moe_intermediate_size") is not None
    width = keys.integer("moe_intermediate_size" if own_width else "intermediate_size")
    shared_width = keys.values.get("shared_expert_intermediate_size")
    gated = shared_width is not None and keys.count("shared_expert_intermediate_size", 0) > 0
    gpt_oss = keys.values.get("model_type") == "gpt_oss"
    return MoeSpec(
        num_experts=count,
        top_k=top_k,
        expert_intermediate=width,
        num_shared=1 if gated else keys.count("n_shared_experts", 0),
        shared_intermediate=keys.integer("shared_expert_intermediate_size") if gated else None,
        moe_layers=_routed_layers(keys, layers),
        first_dense=0,
        shared_gate=gated,
        router_bias=gpt_oss
        or keys.values.get("model_type") in ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"),
        expert_bias=gpt_oss,
    )


def _routed_layers(keys: Keys, layers: int) -> tuple[bool, ...] | None:
    """Which layers are routed, by the first of: mlp_layer_types; first_k_dense_replace and moe_layer_freq;
    mlp_only_layers and decoder_sparse_step; all."""
    types = keys.values.get("mlp_layer_types")
    if types is not None:
        listed = _listed(keys, "mlp_layer_types", layers, ("dense", "sparse", "moe", "hash_moe"))
        return tuple(kind != "dense" for kind in listed)
    first = keys.count("first_k_dense_replace", 0)
    if first or keys.values.get("moe_layer_freq") not in (None, 1):
        every = keys.integer("moe_layer_freq", 1)
        return tuple(layer >= first and layer % every == 0 for layer in range(layers))
    dense, step = keys.values.get("mlp_only_layers") or [], keys.integer("decoder_sparse_step", 1)
    if not dense and step == 1:
        return None
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _listed(keys: Keys, key: str, layers: int, known: tuple[str, ...]) -> list[str]:
    """A list with a name for each layer."""
    values = keys.values.get(key)
    if not isinstance(values, list) or len(values) < layers:
        raise keys.error(key, f"must be a list of {layers} names, is {values!r}", remedy="one name a layer")
    for layer, value in enumerate(values[:layers]):
        if value not in known:
            raise keys.error(key, f"{value!r} (layer {layer}) is not known", remedy=f"known: {', '.join(known)}")
    return [str(value) for value in values[:layers]]


def _sliding(keys: Keys, family: str, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window and its layers: as layer_types says, or by the family's rule (Llama: none; Qwen: from
    max_window_layers on; gpt-oss: every second layer from the first; others: all, where there is a window)."""
    absent = {"mistral": 4096, "gpt_oss": 128}.get(family)
    given = keys.values.get("sliding_window", absent)
    switched = family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mimo")
    if family == "llama" or given is None or (switched and not keys.flag("use_sliding_window", False)):
        return None, None
    window = keys.integer("sliding_window", absent)
    if keys.values.get("layer_types") is not None:
        names = _listed(keys, "layer_types", layers, (*_FULL, _SLIDING))
        chosen = tuple(name == _SLIDING for name in names)
    elif family == "gpt_oss":
        chosen = tuple(layer % 2 == 0 for layer in range(layers))
    else:
        first = keys.count("max_window_layers", 28) if switched else 0
        chosen = tuple(layer >= first for layer in range(layers))
    return (window, chosen) if any(chosen) else (None, None)


def _indexer(keys: Keys, layers: int) -> IndexerSpec | None:
    if keys.values.get("index_topk") is None:
        return None
    full: tuple[bool, ...] | None = None
    pattern = keys.values.get("index_topk_pattern")
    if keys.values.get("indexer_types") is not None:
        full = tuple(name == "full" for name in _listed(keys, "indexer_types", layers, ("full", "shared")))
    elif pattern is not None:
        if not isinstance(pattern, str) or len(pattern) < layers or set(pattern) - {"F", "S"}:
            raise keys.error("index_topk_pattern", f"must be {layers} letters F or S, is {pattern!r}")
        full = tuple(letter == "F" for letter in pattern[:layers])
    return IndexerSpec(
        heads=keys.integer("index_n_heads"),
        head_dim=keys.integer("index_head_dim"),
        top_k=keys.integer("index_topk"),
        share_group=keys.integer("index_topk_freq", 1),
        share_offset=keys.count("index_skip_topk_offset", 2),
        full_layers=full,
    )


def _compressed(keys: Keys, layers: int) -> CompressedSpec:
    rates = keys.values.get("compress_rates") or _RATIOS
    if not isinstance(rates, Mapping) or set(rates) != set(_RATIOS):
        raise keys.error("compress_rates", f"must give a rate for {' and '.join(_RATIOS)}, is {rates!r}")
    by_name = {_SLIDING: 0, **{name: int(rate) for name, rate in rates.items()}}
    ratios = keys.values.get("compress_ratios")
    if ratios is not None:
        if not isinstance(ratios, list) or len(ratios) < layers or set(ratios) - set(by_name.values()):
            raise keys.error("compress_ratios", f"must be {layers} of {list(by_name.values())}, is {ratios!r}")
        chosen = tuple(int(ratio) for ratio in ratios[:layers])
    elif keys.values.get("layer_types") is not None:
        chosen = tuple(by_name[name] for name in _listed(keys, "layer_types", layers, tuple(by_name)))
    else:
        raise keys.error("compress_ratios", "the key is missing", remedy="give a ratio for each layer, or layer_types")
    return CompressedSpec(
        ratios=chosen,
        window=keys.integer("sliding_window"),
        q_lora_rank=keys.integer("q_lora_rank"),
        o_groups=keys.integer("o_groups"),
        o_lora_rank=keys.integer("o_lora_rank"),
        streams=keys.integer("hc_mult", 1),
        indexed=(by_name[_CHOSEN],),
        overlapping=(by_name[_CHOSEN],),
    )


def stored_format(config: Mapping[str, Any]) -> str | None:
    """The weight format (formats.py) that a config.json says its weights have; None where it does not say.

    Quantised checkpoints leave the unembedding in 16 bits. fp8 counts values, not the scales of its 128 x 128 blocks.
    """
    plain = config.get("torch_dtype") or config.get("dtype")
    floats = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return floats.get(str(plain))
    method, bits, group = (quantised.get(key) for key in ("quant_method", "bits", "group_size"))
    if method == "fp8":
        return "fp8,experts=mxfp4,head=bf16" if quantised.get("expert_dtype") == "fp4" else "fp8,head=bf16"
    if method == "mxfp4":
        return "bf16,experts=mxfp4"
    if method in ("gptq", "awq") and bits in (4, 8):
        scales = f"-g{group}" if isinstance(group, int) and group > 0 else ""
        return f"int{bits}{scales},head=bf16"
    return None
