"""The decoder layers of a draft head, from its config.json and back. No torch.

Absent keys have the defaults of the code the heads were published with, never the target's values: a head without
`rope_theta` was trained at 10000, whatever its target uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from specbench.engine.models.config import FAMILIES, hf_rope, token_ids
from specbench.roofline.config_keys import Keys
from specbench.roofline.shapes import ModelSpec

_MAX_POSITIONS = 2048
_RMS_NORM_EPS = 1e-6


def read_layers(keys: Keys, name: str, first: str, stored: Iterable[str], *, num_layers: int, vocab: int) -> ModelSpec:
    """The spec of a head's layers, from a config in Hugging Face's keys.

    Biases and q/k norms show in which tensors there are below `first` (the stored prefix of layer 0, with its dot);
    a key that says otherwise is an error. `vocab` is the draft vocabulary. A bare `sliding_window` has no effect, as in
    the published heads' code; layers that say they use one are refused.
    """
    keys.refuse_unless("hidden_act", "silu")
    keys.refuse_unless("partial_rotary_factor", 1.0)
    if keys.flag("use_sliding_window", False):
        raise keys.error("use_sliding_window", "heads with a sliding window are not supported")
    there = {stored_name.removeprefix(first) for stored_name in stored if stored_name.startswith(first)}
    qkv_bias, output_bias = "self_attn.q_proj.bias" in there, "self_attn.o_proj.bias" in there
    mlp_bias = "mlp.gate_proj.bias" in there
    for key, found in (("qkv_bias", qkv_bias), ("attention_bias", qkv_bias), ("mlp_bias", mlp_bias)):
        if keys.values.get(key) is not None and keys.flag(key, found) != found:
            raise keys.error(
                key,
                f"{str(keys.values[key]).lower()}, but the file has {'' if found else 'no '}such biases",
                remedy="config and weights are of different heads: fetch both again",
            )
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if keys.values.get("head_dim") is None and hidden_size % num_heads:
        raise keys.error("head_dim", f"the key is missing, and {num_heads} heads do not divide {hidden_size}")
    head_dim = keys.integer("head_dim", hidden_size // num_heads)
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
    if head_dim % 2:
        raise keys.error("head_dim", f"{head_dim} is odd; RoPE turns pairs")
    family = keys.text("model_type") if keys.values.get("model_type") is not None else "llama"
    rope_theta, rope_scaling = hf_rope(keys)
    bos = token_ids(keys, "bos_token_id")
    return ModelSpec(
        name=name,
        family=family if family in FAMILIES else "llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        rms_norm_eps=keys.number("rms_norm_eps", _RMS_NORM_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=keys.integer("max_position_embeddings", _MAX_POSITIONS),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm="self_attn.q_norm.weight" in there,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(keys, "eos_token_id"),
    )


def refuse_sliding(keys: Keys) -> None:
    """InputError if `layer_types`, which here lists the head's own layers, has another kind than full attention."""
    types = keys.values.get("layer_types") or []
    for kind in types:
        if kind != "full_attention":
            raise keys.error("layer_types", f"{kind!r} is not supported in a draft head; 'full_attention' is")


def write_layers(layer: ModelSpec, *, vocab: int) -> dict[str, Any]:
    """The config keys that `read_layers` reads `layer` back from. `vocab` is the target's vocabulary."""
    config: dict[str, Any] = {
        "model_type": layer.family,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope_theta,
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": layer.tie_word_embeddings,
        "vocab_size": vocab,
        "bos_token_id": layer.bos_token_id,
        "eos_token_id": list(layer.eos_token_ids),
    }
    scaling = layer.rope_scaling
    if scaling is not None:
        fields = asdict(scaling)
        kind = fields.pop("kind")
        config["rope_scaling"] = {"rope_type": kind, **(fields if kind == "llama3" else {"factor": scaling.factor})}
    return config


def draft_vocabulary(keys: Keys, map_shape: tuple[int, ...] | None, vocab: int) -> int:
    """Size of the draft vocabulary: the key `draft_vocab_size`, or else the map's length, or else the target's."""
    size = keys.integer("draft_vocab_size", map_shape[0] if map_shape else vocab)
    if size > vocab:
        raise keys.error("draft_vocab_size", f"{size} tokens are more than the target's {vocab}")
    return size


def trained_depth(keys: Keys, absent: int | None) -> int | None:
    """Key `trained_depth` (an extension): how many passes in a row the head was trained for; null: not known."""
    if keys.values.get("trained_depth", absent) is None:
        return None
    return keys.integer("trained_depth", absent)
