"""Tiny draft heads for tests: specs, random canonical tensors, and targets that they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specbench.engine.heads.spec import HeadSpec, head_tensor_shapes
from specbench.roofline.shapes import ModelSpec

TARGET = ModelSpec(
    name="tiny-target",
    family="llama",
    num_layers=8,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=40,
    tie_word_embeddings=False,
    rope_theta=500000.0,
)
Tensors = dict[str, torch.Tensor]


def tiny_layer(**changes: Any) -> ModelSpec:
    """One decoder layer, other than the target's in every size that may differ."""
    layer = replace(
        TARGET,
        name="head",
        num_layers=1,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rope_theta=10000.0,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
    )
    return replace(layer, **changes)


def tiny_spec(kind: str, layer: dict[str, Any] | None = None, **changes: Any) -> HeadSpec:
    """A head of the kind for TARGET; `layer` changes its layer, the rest the head."""
    fields: dict[str, Any] = {"name": "head", "target_hidden_size": 16, "target_vocab_size": 40}
    if kind == "medusa":
        fields |= {"layer": replace(TARGET, name="head", num_layers=0), "num_modules": 3, "trained_depth": 3}
        fields["layer"] = replace(fields["layer"], **(layer or {}))
    else:
        fields["layer"] = tiny_layer(**(layer or {}))
    if kind == "eagle3":
        fields |= {"states": (2, 4, 5), "own_head": True}
    if kind == "mtp":
        fields |= {"recycle": "post_norm", "trained_depth": 1}
    return HeadSpec(kind=kind, **{**fields, **changes})  # type: ignore[arg-type]


def random_head(spec: HeadSpec, seed: int = 0) -> Tensors:
    """Canonical tensors in float32; norms within [0.5, 1.5), where 1 can be taken off and put back exactly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in head_tensor_shapes(spec).items():
        if name == "draft_ids":
            tensors[name] = torch.randperm(spec.target_vocab_size, generator=generator)[: shape[0]].sort().values
        elif name.endswith("norm.weight"):
            tensors[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            tensors[name] = torch.randn(shape, generator=generator)
    return tensors


# ---- Files as they are published, name by name


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, file: str = "model.safetensors") -> None:
    """A folder with config.json and one file of weights: .safetensors, or a pickle as torch.save writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(shape) % 1000 + seed))


def layer_tensors(prefix: str, *, reads: int = 16, first_norm: bool = True, bias: bool = False) -> Tensors:
    """A Llama layer of 16 wide, 2 heads of 8 with one of keys and values, inner 20, in Hugging Face's names."""
    shapes = {
        "self_attn.q_proj.weight": (16, reads),
        "self_attn.k_proj.weight": (8, reads),
        "self_attn.v_proj.weight": (8, reads),
        "self_attn.o_proj.weight": (16, 16),
        "mlp.gate_proj.weight": (20, 16),
        "mlp.up_proj.weight": (20, 16),
        "mlp.down_proj.weight": (16, 20),
        "post_attention_layernorm.weight": (16,),
    }
    if first_norm:
        shapes["input_layernorm.weight"] = (16,)
    if bias:
        shapes |= {f"self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 16), ("k", 8), ("v", 8))}
    return {f"{prefix}{name}": rand(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


LAYER_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
KEPT = (0, 3, 4, 9, 17, 30, 31, 39)


def eagle1_tensors(*, bias: bool = True) -> Tensors:
    """EAGLE-1 as its authors save it: no first norm, the target's embedding beside."""
    tensors = {"embed_tokens.weight": rand(40, 16), "fc.weight": rand(16, 32)}
    if bias:
        tensors["fc.bias"] = rand(16)
    return tensors | layer_tensors("layers.0.", first_norm=False)


def eagle3_tensors(prefix: str = "midlayer.", *, states: int = 3) -> Tensors:
    """EAGLE-3 as its authors save it, with a draft vocabulary of the 8 tokens KEPT."""
    kept = torch.tensor(KEPT)
    mask = torch.zeros(40, dtype=torch.bool)
    mask[kept] = True
    return {
        "d2t": kept - torch.arange(8),
        "t2d": mask,
        "fc.weight": rand(16, 16 * states),
        f"{prefix}hidden_norm.weight": rand(16, seed=50),
        **layer_tensors(prefix, reads=32),
        "norm.weight": rand(16, seed=51),
        "lm_head.weight": rand(8, 16, seed=52),
    }


EAGLE3_CONFIG = {**LAYER_CONFIG, "draft_vocab_size": 8}


def medusa_tensors(heads: int = 5, blocks: int = 1, *, own: bool = True, prefix: str = "") -> Tensors:
    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = rand(16, 16, seed=head + 10 * block)
            tensors[f"{prefix}{head}.{block}.linear.bias"] = rand(16, seed=head + 10 * block)
        if own:
            tensors[f"{prefix}{head}.{blocks}.weight"] = rand(40, 16, seed=head)
    return tensors


def deepseek_tensors(index: int) -> Tensors:
    """An MTP module in DeepSeek's names, with a dense layer."""
    at = f"model.layers.{index}."
    return {
        f"{at}embed_tokens.weight": rand(40, 16),
        f"{at}enorm.weight": rand(16, seed=60),
        f"{at}hnorm.weight": rand(16, seed=61),
        f"{at}eh_proj.weight": rand(16, 32),
        f"{at}shared_head.norm.weight": rand(16, seed=62),
        f"{at}shared_head.head.weight": rand(40, 16, seed=63),
        **layer_tensors(at),
    }


def mimo_tensors() -> Tensors:
    at = "model.mtp_layers.0."
    return {
        f"{at}token_layernorm.weight": rand(16, seed=60),
        f"{at}hidden_layernorm.weight": rand(16, seed=61),
        f"{at}input_proj.weight": rand(16, 32),
        f"{at}final_layernorm.weight": rand(16, seed=62),
        **layer_tensors(at, bias=True),
    }


def qwen3_next_tensors() -> Tensors:
    return {
        "mtp.fc.weight": rand(16, 32),
        "mtp.pre_fc_norm_embedding.weight": rand(16, seed=60),
        "mtp.pre_fc_norm_hidden.weight": rand(16, seed=61),
        "mtp.norm.weight": rand(16, seed=62),
        **layer_tensors("mtp.layers.0."),
        "mtp.layers.0.self_attn.q_norm.weight": rand(8, seed=63),
        "mtp.layers.0.self_attn.k_norm.weight": rand(8, seed=64),
    }


def deepseek_v4_tensors() -> Tensors:
    at, layer = "mtp.0.", layer_tensors("")
    return {
        f"{at}e_proj.weight": rand(16, 16, seed=70),
        f"{at}h_proj.weight": rand(16, 16, seed=71),
        f"{at}enorm.weight": rand(16, seed=60),
        f"{at}hnorm.weight": rand(16, seed=61),
        f"{at}norm.weight": rand(16, seed=62),
        f"{at}attn_norm.weight": layer["input_layernorm.weight"],
        f"{at}ffn_norm.weight": layer["post_attention_layernorm.weight"],
        **{f"{at}attn.w{part}.weight": layer[f"self_attn.{part}_proj.weight"] for part in "qkvo"},
        f"{at}ffn.w1.weight": layer["mlp.gate_proj.weight"],
        f"{at}ffn.w2.weight": layer["mlp.down_proj.weight"],
        f"{at}ffn.w3.weight": layer["mlp.up_proj.weight"],
    }


MTP_CONFIG = {**LAYER_CONFIG, "num_hidden_layers": 8, "num_nextn_predict_layers": 1}
