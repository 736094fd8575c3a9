"""Draft heads that are damaged, foreign, or of a kind that is not computed: refused, with file, key and remedy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import (
    EAGLE3_CONFIG,
    LAYER_CONFIG,
    MTP_CONFIG,
    TARGET,
    Tensors,
    deepseek_tensors,
    deepseek_v4_tensors,
    eagle1_tensors,
    eagle3_tensors,
    layer_tensors,
    medusa_tensors,
    mimo_tensors,
    qwen3_next_tensors,
    rand,
    save,
)
from safetensors.torch import save_file

from specbench.engine.heads.load import load_head, read_head_spec, resolve_head
from specbench.errors import InputError

Config = dict[str, Any]
Change = Callable[[Config, Tensors], None]
AUX = "eagle_aux_hidden_state_layer_ids"
HEADS: dict[str, tuple[Config, Callable[[], Tensors]]] = {
    "eagle": (LAYER_CONFIG, eagle1_tensors),
    "eagle3": (EAGLE3_CONFIG, eagle3_tensors),
    "medusa": ({"medusa_num_heads": 2}, medusa_tensors),
    "mtp": (MTP_CONFIG, lambda: deepseek_tensors(8)),
}


def load(folder: Path, kind: str, dtype: torch.dtype = torch.float32, target: Any = TARGET) -> None:
    source = resolve_head(str(folder), target=target)
    load_head(source, read_head_spec(source, target, kind), target, dtype)  # type: ignore[arg-type]


def refusal(folder: Path, kind: str, config: Config, tensors: Tensors, **options: Any) -> InputError:
    """The error that this head is refused with; it names a file below the folder."""
    file = options.pop("file", "model.safetensors")
    save(folder, config, tensors, file)
    with pytest.raises(InputError) as caught:
        load(folder, kind, **options)
    assert str(caught.value.file).startswith(str(folder))
    return caught.value


def put(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def drop(name: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        (tensors if name in tensors else config).pop(name)

    return change


def tensor(name: str, value: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: value})


@pytest.mark.parametrize("kind", HEADS)
def test_the_heads_these_tests_start_from_are_read(kind: str, tmp_path: Path) -> None:
    config, tensors = HEADS[kind]
    save(tmp_path, config, tensors())
    load(tmp_path, kind)


# kind, what is changed, the key in the error, a part of its message
CONFIGS: list[tuple[str, Change, str, str]] = [
    ("eagle", drop("hidden_size"), "hidden_size", "missing"),
    ("eagle", put(hidden_size="16"), "hidden_size", "whole number"),
    ("eagle", put(hidden_size=24), "hidden_size", "for another target"),
    ("eagle", put(vocab_size=41), "vocab_size", "for another target"),
    ("eagle", put(bias=False), "bias", "the file has an fc.bias"),
    ("eagle", put(qkv_bias=True), "qkv_bias", "no such biases"),
    ("eagle", put(mlp_bias=1), "mlp_bias", "true or false"),
    ("eagle", put(hidden_act="gelu"), "hidden_act", "gelu"),
    ("eagle", put(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_scaling.type", "dynamic"),
    ("eagle", put(num_key_value_heads=3), "num_key_value_heads", "does not divide"),
    ("eagle", put(use_sliding_window=True), "use_sliding_window", "not supported"),
    ("eagle", put(layer_types=["sliding_attention"]), "layer_types", "sliding_attention"),
    ("eagle", put(speculators_model_type="eagle"), "speculators_model_type", "'eagle'"),
    ("eagle", put(draft_vocab_size=50), "draft_vocab_size", "more than"),
    ("eagle", put(trained_depth=0), "trained_depth", "positive"),
    ("eagle3", put(target_hidden_size=32), "target_hidden_size", "for another target"),
    ("eagle3", put(parallel_drafting=True), "parallel_drafting", "P-EAGLE"),
    ("eagle3", put(norm_before_fc=True), "norm_before_fc", "no input_norm"),
    ("eagle3", put(fc_norm=True), "fc_norm", "no fc_norm"),
    ("eagle3", put(norm_before_residual="yes"), "norm_before_residual", "true or false"),
    ("eagle3", put(num_aux_hidden_states=2), "num_aux_hidden_states", "3 states are read"),
    ("eagle3", put(**{AUX: [2, 4, 9]}), AUX, "layer 9"),
    ("eagle3", put(eagle_config={AUX: [2, 4, 8]}), f"eagle_config.{AUX}", "layer 8"),
    ("eagle3", put(**{AUX: [2, 4, 5], "eagle_config": {AUX: [2, 4, 5]}}), f"eagle_config.{AUX}", "contradicts"),
    ("eagle3", put(**{AUX: [2, True]}), AUX, "list of layer numbers"),
    ("eagle3", put(eagle_config=[]), "eagle_config", "must be an object"),
    ("mtp", put(recycle="both"), "recycle", "pre_norm or post_norm"),
    ("mtp", put(num_nextn_predict_layers=2), "num_nextn_predict_layers", "holds 1 modules"),
    ("mtp", put(hc_mult=4), "hc_mult", "residual streams"),
    ("mtp", put(attn_output_gate=True), "attn_output_gate", "output gate"),
    ("mtp", put(partial_rotary_factor=0.5), "partial_rotary_factor", "0.5"),
    ("mtp", put(speculators_model_type="eagle3"), "speculators_model_type", "not an MTP head"),
    ("medusa", put(hidden_size=32), "hidden_size", "for another target"),
    ("medusa", put(vocab_size=41), "vocab_size", "for another target"),
    *(
        ("eagle3", put(speculators_model_type=name), "speculators_model_type", repr(name))
        for name in ("dflash", "dflash2", "dspark", "xpress", "peagle")
    ),
]


@pytest.mark.parametrize(("kind", "change", "key", "part"), CONFIGS, ids=[f"{c[0]}-{c[2]}-{c[3]}" for c in CONFIGS])
def test_configs_that_are_refused(kind: str, change: Change, key: str, part: str, tmp_path: Path) -> None:
    config, tensors = dict(HEADS[kind][0]), HEADS[kind][1]()
    change(config, tensors)
    error = refusal(tmp_path, kind, config, tensors)
    assert (error.key, error.file) == (key, tmp_path / "config.json")
    assert part in error.message


QUERY = "midlayer.self_attn.q_proj.weight"
FILES: list[tuple[str, Change, str, str]] = [
    ("eagle", drop("fc.weight"), "fc.weight", "missing"),
    ("eagle", drop("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight", "missing"),
    ("eagle", tensor("layers.0.input_layernorm.weight", rand(16)), "layers.0.input_layernorm.weight", "unexpected"),
    ("eagle", tensor("fc.weight", rand(16, 16)), "fc.weight", "shape [16, 16]"),
    ("eagle", tensor("fc.weight", torch.zeros(16, 32, dtype=torch.int8)), "fc.weight", "quantised"),
    ("eagle", tensor("fc.weight", torch.zeros(16, 32).to(torch.float8_e4m3fn)), "fc.weight", "F8_E4M3"),
    ("eagle", tensor("fc.bias", torch.full((16,), torch.nan)), "fc.bias", "not finite"),
    ("eagle", tensor("lm_head.weight", rand(41, 16)), "lm_head.weight", "shape [41, 16]"),
    ("eagle3", drop("d2t"), "d2t", "missing"),
    ("eagle3", drop("norm.weight"), "norm.weight", "missing"),
    ("eagle3", drop("fc.weight"), "fc.weight", "must be projected"),
    ("eagle3", tensor(QUERY, rand(16, 16)), QUERY, "[16, 32]"),
    ("eagle3", tensor("fc.weight", rand(16, 32)), "fc.weight", "[16, 48]"),
    ("eagle3", tensor("mask_hidden", rand(16)), "mask_hidden", "P-EAGLE"),
    ("eagle3", tensor("surprise.weight", rand(16)), "surprise.weight", "unexpected"),
    ("eagle3", tensor("d2t", torch.zeros(8)), "d2t", "whole numbers"),
    ("eagle3", tensor("d2t", torch.zeros(9, dtype=torch.int64)), "d2t", "shape [9]"),
    ("eagle3", tensor("d2t", torch.full((8,), 33)), "d2t", "entry 7 means token 40"),
    ("eagle3", tensor("d2t", torch.tensor([0, -2, 0, 0, 0, 0, 0, 0])), "d2t", "entry 1 means token -1"),
    ("eagle3", tensor("d2t", torch.tensor([0, 0, 0, 0, 0, -1, 0, 0])), "d2t", "does not ascend"),
    ("eagle3", tensor("d2t", torch.tensor([0, 3, 4, 9, 17, 30, 31, 39])), "d2t", "outside"),
    ("eagle3", tensor("t2d", torch.ones(40, dtype=torch.bool)), "t2d", "disagrees with d2t on 32 tokens"),
    ("eagle3", tensor("t2d", torch.ones(41, dtype=torch.bool)), "t2d", "shape [41]"),
    ("medusa", drop("1.0.linear.bias"), "1.0.linear.bias", "missing"),
    ("medusa", drop("3.1.weight"), "3.1.weight", "missing"),
    ("medusa", tensor("2.0.linear.weight", rand(16, 15)), "2.0.linear.weight", "[16, 15]"),
    ("medusa", tensor("7.0.linear.weight", rand(16, 16)), "5.0.linear.weight", "missing"),
    ("mtp", drop("model.layers.8.shared_head.norm.weight"), "model.layers.8.shared_head.norm.weight", "missing"),
    ("mtp", drop("model.layers.8.eh_proj.weight"), "model.layers.8.eh_proj.weight", "numbered from 8"),
    ("mtp", tensor("model.layers.8.mlp.extra.weight", rand(4)), "model.layers.8.mlp.extra.weight", "unexpected"),
]


@pytest.mark.parametrize(("kind", "change", "key", "part"), FILES, ids=[f"{c[0]}-{c[2]}-{c[3]}" for c in FILES])
def test_weights_that_are_refused(kind: str, change: Change, key: str, part: str, tmp_path: Path) -> None:
    config, tensors = dict(HEADS[kind][0]), HEADS[kind][1]()
    change(config, tensors)
    error = refusal(tmp_path, kind, config, tensors)
    assert error.key == key
    assert part in error.message
    assert error.remedy


STRUCTURES = [
    ("model.layers.8.self_attn.kv_a_proj_with_mqa.weight", "latent attention (MLA)"),
    ("model.layers.8.mlp.experts.0.up_proj.weight", "mixture of experts (MoE)"),
    ("model.layers.8.mlp.gate.weight", "mixture of experts (MoE)"),
    ("model.layers.8.self_attn.indexer.wk.weight", "indexer"),
    ("mtp.0.hc_head_fn", "hyper-connections"),
    ("mtp.0.attn.wkv.weight", "latent attention (MLA)"),
    ("mtp.0.markov_head.markov_w1.weight", "DSpark"),
    ("model.mtp.layers.0.eh_proj.weight", "MiMo-V2"),
]


@pytest.mark.parametrize(("name", "what"), STRUCTURES)
def test_layers_that_are_not_dense_are_refused_by_name(name: str, what: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, "mtp", MTP_CONFIG, {**deepseek_tensors(8), name: rand(16, 16)})
    assert error.key == name
    assert what in error.message
    assert "dense" in str(error.remedy)


def test_gated_attention_is_told_from_a_wrong_shape(tmp_path: Path) -> None:
    query = "mtp.layers.0.self_attn.q_proj.weight"
    error = refusal(tmp_path, "mtp", MTP_CONFIG, {**qwen3_next_tensors(), query: rand(32, 16)})
    assert (error.key, "output gate" in error.message) == (query, True)


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "part"),
    [
        ("eagle", EAGLE3_CONFIG, eagle3_tensors(), "EAGLE-3"),
        ("eagle3", LAYER_CONFIG, eagle1_tensors(), "not an EAGLE-3 head"),
        ("medusa", LAYER_CONFIG, eagle1_tensors(), "not a Medusa head"),
        ("mtp", MTP_CONFIG, layer_tensors("model.layers.8."), "MTP modules"),
        ("mtp", MTP_CONFIG, layer_tensors("model.layers.7."), "no tensors of a draft head"),
        ("eagle", LAYER_CONFIG, medusa_tensors(), "missing"),
    ],
)
def test_a_head_of_another_kind(kind: str, config: Config, tensors: Tensors, part: str, tmp_path: Path) -> None:
    assert part in refusal(tmp_path, kind, config, tensors).message


def test_a_head_of_another_width_must_bring_its_own_ends(tmp_path: Path) -> None:
    wide = replace(TARGET, hidden_size=24)
    config = {**EAGLE3_CONFIG, "target_hidden_size": 24}
    tensors = eagle3_tensors() | {"fc.weight": rand(16, 72)}
    error = refusal(tmp_path, "eagle3", config, tensors, target=wide)
    assert (error.key, "16 wide, its target 24" in error.message) == ("embed_tokens.weight", True)
    save(tmp_path, config, tensors | {"embed_tokens.weight": rand(40, 16)})
    load(tmp_path, "eagle3", target=wide)


def test_a_target_too_shallow_for_the_default_states(tmp_path: Path) -> None:
    error = refusal(tmp_path, "eagle3", EAGLE3_CONFIG, eagle3_tensors(), target=replace(TARGET, num_layers=4))
    assert (error.key, "no default for 4 layers" in error.message) == (AUX, True)


def test_values_too_large_for_the_dtype(tmp_path: Path) -> None:
    tensors = mimo_tensors()
    tensors["model.mtp_layers.0.input_proj.weight"][0, 0] = 1e6
    error = refusal(tmp_path, "mtp", MTP_CONFIG, tensors, dtype=torch.float16)
    assert (error.key, "bf16" in str(error.remedy)) == ("model.mtp_layers.0.input_proj.weight", True)
    load(tmp_path, "mtp", torch.bfloat16)


def test_a_map_over_the_whole_vocabulary_must_say_nothing(tmp_path: Path) -> None:
    tensors = eagle3_tensors() | {"d2t": torch.tensor([0] * 39 + [-1]), "lm_head.weight": rand(40, 16)}
    del tensors["t2d"]
    assert refusal(tmp_path, "eagle3", {**LAYER_CONFIG, "draft_vocab_size": 40}, tensors).key == "d2t"


def test_modules_with_different_embeddings(tmp_path: Path) -> None:
    tensors = deepseek_tensors(8) | deepseek_tensors(9) | {"model.layers.9.embed_tokens.weight": rand(40, 16, seed=5)}
    error = refusal(tmp_path, "mtp", {**MTP_CONFIG, "num_nextn_predict_layers": 2}, tensors)
    assert (error.key, "differs from" in error.message) == ("model.layers.9.embed_tokens.weight", True)


@pytest.mark.parametrize("rows", [9, 41])
def test_vllms_unembedding_has_the_kept_rows_or_all(rows: int, tmp_path: Path) -> None:
    tensors = {"token_map": torch.arange(8), "blocks.0.layers.0.weight": rand(16, 16)}
    tensors["lm_heads.0.weight"] = rand(rows, 16)
    config = {"hidden_size": 16, "vocab_size": 40, "truncated_vocab_size": 8}
    assert refusal(tmp_path, "medusa", config, tensors).key == "lm_heads.0.weight"


@pytest.mark.parametrize("entry", [40, 6])
def test_vllms_token_map_holds_different_tokens_of_the_target(entry: int, tmp_path: Path) -> None:
    tensors = {"token_map": torch.arange(8), "blocks.0.layers.0.weight": rand(16, 16)}
    tensors["token_map"][7] = entry
    tensors["lm_heads.0.weight"] = rand(40, 16)
    config = {"hidden_size": 16, "vocab_size": 40, "truncated_vocab_size": 8}
    assert refusal(tmp_path, "medusa", config, tensors).key == "token_map"


def test_deepseek_v4_shares_nothing_with_plain_names(tmp_path: Path) -> None:
    tensors = deepseek_v4_tensors()
    del tensors["mtp.0.h_proj.weight"]
    assert refusal(tmp_path, "mtp", MTP_CONFIG, tensors).key == "mtp.0.h_proj.weight"


# ---- Files


class Harmful:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LAYER_CONFIG))
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"fc.weight": Harmful(tmp_path / "ran")}, file, protocol=2)
    with pytest.raises(InputError, match="holds code"):
        load(tmp_path, "eagle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("size", [0, 10, 1000])
def test_a_file_cut_short(size: int, file: str, tmp_path: Path) -> None:
    save(tmp_path, LAYER_CONFIG, eagle1_tensors(), file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:size])
    with pytest.raises(InputError) as caught:
        load(tmp_path, "eagle")
    assert (caught.value.file, bool(caught.value.remedy)) == (tmp_path / file, True)


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LAYER_CONFIG))
    torch.save({"state_dict": eagle1_tensors()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="something else than named tensors"):
        load(tmp_path, "eagle")


def test_folders_without_what_a_head_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_head(str(tmp_path), target=TARGET)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no weights here"):
        resolve_head(str(tmp_path), target=TARGET)
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, tmp_path / name)
    with pytest.raises(InputError, match="2 pickle files"):
        resolve_head(str(tmp_path), target=TARGET)
    (tmp_path / "config.json").write_text("{")
    torch.save(eagle1_tensors(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="not valid JSON"):
        load(tmp_path, "eagle")


def test_an_index_that_leads_nowhere(tmp_path: Path) -> None:
    def index(weight_map: Any) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    (tmp_path / "config.json").write_text(json.dumps(MTP_CONFIG))
    save_file(deepseek_tensors(8), tmp_path / "b.safetensors")
    for weight_map, part in (
        ({"model.layers.8.eh_proj.weight": "../b.safetensors"}, "not a file name"),
        ({"model.layers.7.mlp.up_proj.weight": "b.safetensors"}, "none of these tensors"),
        ({"model.layers.8.eh_proj.weight": "c.safetensors"}, "shard is missing"),
        ([], "must map"),
    ):
        index(weight_map)
        with pytest.raises(InputError, match=part):
            load(tmp_path, "mtp")
    index(dict.fromkeys(deepseek_tensors(8), "b.safetensors"))
    load(tmp_path, "mtp")


def test_names_that_are_no_heads(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for name, part in (
        ("", "non-empty string"),
        ("builtin:nothing", "no built-in heads of kind 'nothing'"),
        ("builtin:eagle", "no built-in eagle head for the target tiny-target"),
        ("no-such-folder", "no such folder"),
        (str(tmp_path / "model.gguf"), "nextn tensors of a GGUF are not read"),
    ):
        with pytest.raises(InputError, match=part):
            resolve_head(name, target=TARGET)
    with pytest.raises(InputError, match="specbench distill"):
        resolve_head("builtin:mtp", target=TARGET)
    with pytest.raises(InputError, match="no built-in"):
        resolve_head("builtin:mtp", target=replace(TARGET, name="../../etc"))


def test_a_head_that_changes_between_plan_and_load(tmp_path: Path) -> None:
    save(tmp_path, HEADS["medusa"][0], medusa_tensors(3))
    source = resolve_head(str(tmp_path), target=TARGET)
    spec = read_head_spec(source, TARGET, "medusa")
    save(tmp_path, HEADS["medusa"][0], medusa_tensors(2))
    with pytest.raises(InputError, match="the files changed"):
        load_head(source, spec, TARGET, torch.float32)
