"""From config.json to costs: published configs give the named shapes; what is missing is named with file and key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench.engine.models.config import spec_from_hf_config
from specbench.errors import InputError
from specbench.roofline.cost import uniform_cost
from specbench.roofline.shapes import ModelSpec, named_shape
from specbench.roofline.shapes_config import read_config, spec_from_config, stored_format

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 48,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "glm-5.2": {
        "model_type": "glm_moe_dsa",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "q_lora_rank": 2048,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 64,
        "hc_mult": 4,
        "index_head_dim": 128,
        "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
    },
}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """A spec of `config` with changes; a change to `...` drops the key."""
    fields = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return spec_from_config(fields, "m", file="config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_named_shapes(name: str) -> None:
    known, found = named_shape(name), read(PUBLISHED[name])
    assert found.num_params == known.num_params
    for query, context in ((1, 0), (4, 5000), (3, 200_000)):
        options: dict[str, Any] = {"weight_dtype": "bf16"}
        assert uniform_cost(found, 8, query, context, **options) == uniform_cost(known, 8, query, context, **options)
    # RoPE and the way in which a schedule is written cost nothing.
    for field in ("num_layers", "mla", "max_position_embeddings", "sliding_layers", "compressed", "indexer", "qk_norm"):
        assert getattr(found, field) == getattr(known, field), field
    assert not found.uncertain_cells


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mimo"])
def test_dense_families_are_read_as_the_engine_reads_them(family: str) -> None:
    for changes in ({}, {"head_dim": 20}, {"tie_word_embeddings": True}, {"sliding_window": 8}):
        config = {**BASE, "model_type": family, "hidden_act": "silu", **changes}
        if family in ("qwen2", "qwen3", "mimo"):
            config |= {"use_sliding_window": "sliding_window" in changes, "max_window_layers": 2}
        ours, theirs = spec_from_config(config, "m"), spec_from_hf_config(config, "m")
        assert replace(ours, rope_theta=0.0, bos_token_id=None) == replace(theirs, rope_theta=0.0, bos_token_id=None)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((BASE, key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")),
        (BASE, "num_attention_heads"),
        *((PUBLISHED["mixtral-8x7b"], key) for key in ("num_experts_per_tok", "intermediate_size")),
        *((PUBLISHED["deepseek-v3"], key) for key in ("qk_nope_head_dim", "v_head_dim", "intermediate_size")),
        *((PUBLISHED["glm-5.2"], key) for key in ("index_n_heads", "index_head_dim")),
        *((PUBLISHED["deepseek-v4-flash"], key) for key in ("o_groups", "q_lora_rank", "compress_ratios")),
        (PUBLISHED["deepseek-v4-flash"], "sliding_window"),
    ],
)
def test_a_missing_key_is_named_with_file_and_remedy(config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match="missing") as caught:
        read(config, **{key: ...})
    assert caught.value.key == key
    assert str(caught.value.file) == "config.json"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 33}, "head_dim"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense"] * 3 + ["?"]}, "mlp_layer_types"),
        ({"model_type": "novel", "sliding_window": 8, "layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        read(BASE, **changes)
    assert caught.value.key == key


def test_unknown_families_are_read_by_their_keys_or_refused() -> None:
    guessed = read(BASE, model_type="novel")
    assert "novel" in guessed.uncertain_cells["family"]
    assert guessed.num_params == read(BASE).num_params
    for key in ("linear_num_key_heads", "ssm_state_size", "mamba_d_conv"):
        with pytest.raises(InputError, match=key) as caught:
            read(BASE, model_type="hybrid", **{key: 4})
        assert caught.value.key == "model_type"
        assert "deepseek_v3" in str(caught.value.remedy)


def test_routed_layers_of_every_way_to_name_them() -> None:
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

    def layers(**changes: Any) -> list[bool]:
        moe = read(BASE, **routed, **changes).moe
        assert moe is not None
        return [moe.is_moe(layer) for layer in range(4)]

    assert layers() == [True] * 4
    assert layers(mlp_only_layers=[1]) == [True, False, True, True]
    assert layers(decoder_sparse_step=2) == [False, True, False, True]
    assert layers(first_k_dense_replace=2) == [False, False, True, True]
    assert layers(first_k_dense_replace=1, moe_layer_freq=2) == [False, False, True, False]
    assert layers(mlp_layer_types=["dense", "sparse", "sparse", "dense"]) == [False, True, True, False]
    assert read(BASE, num_experts=1).moe is None
    assert read(BASE, num_experts=0).moe is None
    shared = read(BASE, **routed, shared_expert_intermediate_size=12).moe
    assert shared is not None
    assert (shared.num_shared, shared.shared_width, shared.shared_gate) == (1, 12, True)


def test_index_share_by_pattern_type_or_frequency() -> None:
    glm = PUBLISHED["glm-5.2"]
    by_rule = read(glm).indexer
    assert by_rule is not None
    pattern = "".join("F" if by_rule.is_full(layer) else "S" for layer in range(78))
    types = ["full" if letter == "F" else "shared" for letter in pattern]
    for changes in ({"index_topk_pattern": pattern}, {"indexer_types": types}):
        other = read(glm, index_topk_freq=..., **changes).indexer
        assert other is not None
        assert [other.is_full(layer) for layer in range(78)] == [by_rule.is_full(layer) for layer in range(78)]
    every = read(glm, index_topk_freq=...).indexer
    assert every is not None
    assert all(every.is_full(layer) for layer in range(78))
    with pytest.raises(InputError) as caught:
        read(glm, index_topk_pattern="FSX")
    assert caught.value.key == "index_topk_pattern"


def test_text_part_of_a_multimodal_config() -> None:
    nested = {"model_type": "novel_vl", "text_config": BASE}
    assert spec_from_config(nested, "m").num_params == read(BASE).num_params
    with pytest.raises(InputError) as caught:
        spec_from_config({"text_config": {**BASE, "vocab_size": None}}, "m", file="config.json")
    assert caught.value.key == "text_config.vocab_size"


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    assert read_config(tmp_path).name == tmp_path.name
    assert read_config(tmp_path / "config.json", "mine").name == "mine"
    for text, words in (("{", "no JSON"), ("[]", "object")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=words) as caught:
            read_config(tmp_path)
        assert caught.value.file == tmp_path / "config.json"
    with pytest.raises(InputError, match="can't be read"):
        read_config(tmp_path / "absent")


def test_stored_formats() -> None:
    assert stored_format({"torch_dtype": "bfloat16"}) == "bf16"
    assert stored_format({"dtype": "float32"}) == "fp32"
    assert stored_format({}) is None
    for quantised, wanted in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8,head=bf16"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8,experts=mxfp4,head=bf16"),
        ({"quant_method": "mxfp4"}, "bf16,experts=mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4-g128,head=bf16"),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, "int4,head=bf16"),
        ({"quant_method": "novel"}, None),
    ):
        assert stored_format({"torch_dtype": "bfloat16", "quantization_config": quantised}) == wanted
