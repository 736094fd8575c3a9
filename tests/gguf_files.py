"""Small GGUF files for tests, written with the gguf library the way a converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from specbench.roofline.shapes import ModelSpec

TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str) -> str:
    """GGUF's name of a canonical tensor name."""
    if name in TOP:
        return TOP[name]
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """A converter's permutation of q and k for the llama architecture (as in llama.cpp's convert_hf_to_gguf.py)."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def spec_keys(spec: ModelSpec, arch: str) -> dict[str, Any]:
    """The keys of a spec, without the architecture's prefix left out."""
    return {
        f"{arch}.block_count": spec.num_layers,
        f"{arch}.context_length": spec.max_position_embeddings,
        f"{arch}.embedding_length": spec.hidden_size,
        f"{arch}.feed_forward_length": spec.intermediate_size,
        f"{arch}.attention.head_count": spec.num_heads,
        f"{arch}.attention.head_count_kv": spec.num_kv_heads,
        f"{arch}.attention.key_length": spec.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        f"{arch}.rope.freq_base": spec.rope_theta,
        f"{arch}.vocab_size": spec.vocab_size,
        "tokenizer.ggml.bos_token_id": spec.bos_token_id,
        "tokenizer.ggml.eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
    }


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    arch: str = "llama",
    types: Mapping[str, GGMLQuantizationType] | None = None,
    raw: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write keys (None left out) and tensors by stored name; `types` quantises, `raw` bytes are written as they are."""
    writer = GGUFWriter(str(path), arch)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            raise TypeError(f"{key}: {value!r}")
    for name, array in (tensors or {}).items():
        kind = (types or {}).get(name, GGMLQuantizationType.F32)
        if raw and name in raw:
            writer.add_tensor(name, raw[name], raw_dtype=kind)
        else:
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(array, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(weights: Mapping[str, np.ndarray], spec: ModelSpec, *, permuted: bool) -> dict[str, np.ndarray]:
    """Canonical weights under GGUF names, q and k permuted as for the llama architecture."""
    out = {}
    for name, array in weights.items():
        if permuted and ".self_attn.q_proj." in name:
            array = permute(array, spec.num_heads)
        elif permuted and ".self_attn.k_proj." in name:
            array = permute(array, spec.num_kv_heads)
        out[stored_name(name)] = array
    return out
