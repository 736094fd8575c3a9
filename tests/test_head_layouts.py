"""Draft heads come out the same whatever layout they were published in; wrong and foreign files are refused by name."""

from __future__ import annotations

import importlib.resources
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import (
    EAGLE3_CONFIG,
    KEPT,
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
    random_head,
    save,
    tiny_spec,
)
from safetensors.torch import save_file

from specbench.engine.heads.load import LAYOUTS, load_head, read_head_spec, resolve_head, write_head
from specbench.engine.heads.spec import FINAL, HeadSpec, head_tensor_shapes

CASES: list[tuple[str, HeadSpec]] = [
    ("eagle", tiny_spec("eagle")),
    ("eagle", tiny_spec("eagle", fc_bias=True, own_embedding=True, own_head=True)),
    ("eagle", tiny_spec("eagle", {"vocab_size": 12}, trained_depth=5)),
    ("eagle", tiny_spec("eagle", {"num_layers": 2, "qkv_bias": True, "family": "qwen2"})),
    ("eagle3", tiny_spec("eagle3")),
    ("eagle3", tiny_spec("eagle3", {"vocab_size": 12})),
    ("eagle3", tiny_spec("eagle3", {"vocab_size": 12}, own_head=False, trained_depth=7, states=(1, 8))),
    ("eagle3", tiny_spec("eagle3", {"hidden_size": 24, "num_layers": 2}, own_embedding=True, norm_before_fc=True)),
    ("eagle3", tiny_spec("eagle3", states=(FINAL,), uses_fc=False, norm_before_residual=True)),
    ("eagle3-specforge", tiny_spec("eagle3", {"vocab_size": 12, "qkv_bias": True}, states=(1, 4, 7))),
    ("eagle3-specforge", tiny_spec("eagle3", states=(FINAL,), recycle="post_norm", fc_norms=True)),
    ("eagle3-speculators", tiny_spec("eagle3", {"vocab_size": 12}, norm_before_residual=True, states=(0, 3, 8))),
    ("eagle3-speculators", tiny_spec("eagle3", {"qk_norm": True, "family": "qwen3"}, fc_norms=True)),
    ("medusa", tiny_spec("medusa", own_head=True)),
    ("medusa", tiny_spec("medusa", {"vocab_size": 12}, own_head=True, num_blocks=2, num_modules=2, trained_depth=2)),
    ("medusa-v0", tiny_spec("medusa")),
    ("medusa-v0", tiny_spec("medusa", {"vocab_size": 12}, num_blocks=2)),
    ("medusa-vllm", tiny_spec("medusa", own_head=True)),
    ("medusa-vllm", tiny_spec("medusa", {"vocab_size": 12}, own_head=True, num_blocks=2)),
    ("mtp-deepseek", tiny_spec("mtp")),
    ("mtp-deepseek", tiny_spec("mtp", {"vocab_size": 12}, recycle="pre_norm", trained_depth=None)),
    ("mtp-deepseek", tiny_spec("mtp", {"num_layers": 2}, num_modules=2, own_head=True, own_embedding=True)),
    ("mtp-mimo", tiny_spec("mtp", {"qkv_bias": True, "family": "qwen2"})),
    ("mtp-mimo", tiny_spec("mtp", {"num_layers": 3}, num_modules=3, trained_depth=3)),
    ("mtp-qwen3-next", tiny_spec("mtp", {"qk_norm": True, "family": "qwen3"})),
    ("mtp-speculators", tiny_spec("mtp", {"qk_norm": True, "family": "qwen3"})),
    ("mtp-deepseek-v4", tiny_spec("mtp", {"qk_norm": True})),
    ("mtp-deepseek-v4", tiny_spec("mtp", {"num_layers": 2}, num_modules=2)),
]


def written(folder: Path, layout: str, spec: HeadSpec, **options: Any) -> Tensors:
    tensors = random_head(spec)
    write_head(folder, spec, tensors, layout=layout, dtype=torch.float32, **options)
    return tensors


def loaded(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> tuple[HeadSpec, Tensors]:
    source = resolve_head(str(folder), target=TARGET)
    spec = read_head_spec(source, TARGET, kind)  # type: ignore[arg-type]
    return spec, load_head(source, spec, TARGET, dtype)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous(), name


def unnamed(spec: HeadSpec) -> HeadSpec:
    return replace(spec, name="", layer=replace(spec.layer, name=""))


@pytest.mark.parametrize(("layout", "spec"), CASES, ids=[f"{i}-{layout}" for i, (layout, _) in enumerate(CASES)])
def test_round_trip(layout: str, spec: HeadSpec, tmp_path: Path) -> None:
    tensors = written(tmp_path, layout, spec)
    found_spec, found = loaded(tmp_path, spec.kind)
    assert unnamed(found_spec) == unnamed(spec)
    assert_same(found, tensors)
    assert list(found) == list(head_tensor_shapes(spec))


def test_every_layout_makes_a_round_trip() -> None:
    assert {layout for layout, _ in CASES} == set(LAYOUTS)


def test_the_page_on_heads_names_every_layout() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "heads.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"`LAYOUTS` holds (.*?)\. ", page, re.S)
    assert set(re.split(r",\s+|\s+and\s+", listed)) == set(LAYOUTS)


@pytest.mark.parametrize(
    ("layout", "spec", "field"),
    [
        ("eagle3", tiny_spec("eagle3", {"sliding_window": 8, "sliding_layers": (True,)}), "layer.sliding_window"),
        ("mtp-mimo", tiny_spec("mtp", own_embedding=True), "own_embedding"),
        ("medusa", tiny_spec("medusa", recycle="post_norm"), "recycle"),
    ],
)
def test_what_a_layout_can_not_say_is_not_written(layout: str, spec: HeadSpec, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=field):
        write_head(tmp_path / "head", spec, random_head(spec), layout=layout)
    assert not (tmp_path / "head").exists()


def test_writing_refuses_tensors_that_are_not_the_specs(tmp_path: Path) -> None:
    spec = tiny_spec("eagle", {"vocab_size": 12})
    tensors = random_head(spec)
    with pytest.raises(ValueError, match=r"fc\.weight"):
        write_head(tmp_path, spec, {**tensors, "fc.weight": rand(16, 31)}, layout="eagle")
    with pytest.raises(ValueError, match="ascending"):
        write_head(tmp_path, spec, {**tensors, "draft_ids": tensors["draft_ids"].flip(0)}, layout="eagle")
    with pytest.raises(ValueError, match="of kind eagle3"):
        write_head(tmp_path, spec, tensors, layout="eagle3")
    shared = tiny_spec("mtp", {"num_layers": 2, "qk_norm": True}, num_modules=2)
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight|mtp\.pre_fc_norm"):
        write_head(tmp_path, shared, random_head(shared), layout="mtp-qwen3-next")


def test_written_in_bfloat16_by_default(tmp_path: Path) -> None:
    spec = tiny_spec("medusa")
    tensors = random_head(spec)
    write_head(tmp_path, spec, tensors, layout="medusa-v0")
    _, found = loaded(tmp_path, "medusa")
    assert_same(found, {name: tensor.bfloat16().float() for name, tensor in tensors.items()})
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


# ---- EAGLE, as published


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_of_its_authors(bias: bool, file: str, tmp_path: Path) -> None:
    tensors = eagle1_tensors(bias=bias)
    save(tmp_path, {**LAYER_CONFIG, **({} if bias else {"bias": False})}, tensors, file)
    spec, found = loaded(tmp_path, "eagle")
    assert (spec.fc_bias, spec.own_embedding, spec.own_head, spec.states) == (bias, True, False, (FINAL,))
    assert "layers.0.input_layernorm.weight" not in found
    assert_same({name: found[name] for name in tensors}, tensors)


def test_a_head_has_its_own_rope_not_the_targets(tmp_path: Path) -> None:
    """Trap: Llama-3's theta is 500000, its heads' 10000 unless they say otherwise."""
    save(tmp_path / "silent", LAYER_CONFIG, eagle1_tensors())
    assert loaded(tmp_path / "silent", "eagle")[0].layer.rope_theta == 10000.0 != TARGET.rope_theta
    scaling = {"type": "linear", "factor": 2.0}
    save(tmp_path / "told", {**LAYER_CONFIG, "rope_theta": 5e5, "rope_scaling": scaling}, eagle1_tensors())
    layer = loaded(tmp_path / "told", "eagle")[0].layer
    assert layer.rope_scaling is not None
    assert (layer.rope_theta, layer.rope_scaling.kind, layer.rope_scaling.factor) == (5e5, "linear", 2.0)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle3_of_its_authors(file: str, tmp_path: Path) -> None:
    """Trap: d2t stores offsets. Without further keys the streams entering layers 2, N // 2 and N - 3 are read."""
    tensors = eagle3_tensors()
    save(tmp_path, EAGLE3_CONFIG, tensors, file)
    spec, found = loaded(tmp_path, "eagle3")
    assert (spec.states, spec.recycle, spec.norm_before_residual) == ((2, 4, 5), "pre_norm", False)
    assert (spec.draft_vocab_size, spec.own_head, spec.own_embedding, spec.layer.rope_theta) == (8, True, False, 1e4)
    assert found["draft_ids"].tolist() == list(KEPT)
    assert torch.equal(found["layers.0.hidden_norm.weight"], tensors["midlayer.hidden_norm.weight"])
    assert torch.equal(found["layers.0.input_layernorm.weight"], tensors["midlayer.input_layernorm.weight"])
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], tensors["midlayer.self_attn.q_proj.weight"])


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({"eagle_config": {AUX: [0, 3, 7]}}, (1, 4, 8)),
        ({AUX: [0, 3, 7]}, (0, 3, 7)),
        ({AUX: [1, 4, 8], "eagle_config": {AUX: [0, 3, 7], "use_aux_hidden_state": True}}, (1, 4, 8)),
        ({"num_aux_hidden_states": 3, "eagle_config": {}}, (2, 4, 5)),
    ],
)
def test_the_place_of_the_layer_ids_says_what_they_count(
    config: dict[str, Any], states: tuple[int, ...], tmp_path: Path
) -> None:
    """Trap: in eagle_config the layers whose output is read, at the top level those whose input is."""
    save(tmp_path, {**EAGLE3_CONFIG, **config}, eagle3_tensors())
    assert loaded(tmp_path, "eagle3")[0].states == states


def test_eagle3_on_the_final_state_needs_no_fc(tmp_path: Path) -> None:
    tensors = eagle3_tensors(states=1)
    config = {**EAGLE3_CONFIG, "eagle_config": {"use_aux_hidden_state": False}}
    save(tmp_path / "fc", config, tensors)
    del tensors["fc.weight"]
    save(tmp_path / "no_fc", config, tensors)
    for folder, uses_fc in (("fc", True), ("no_fc", False)):
        spec = loaded(tmp_path / folder, "eagle3")[0]
        assert (spec.states, spec.uses_fc) == ((FINAL,), uses_fc)


def test_eagle3_of_speculators(tmp_path: Path) -> None:
    tensors = eagle3_tensors("layers.0.") | {
        "embed_tokens.weight": rand(40, 16),
        "verifier_norm.weight": rand(16),
        "verifier_lm_head.weight": rand(40, 16),
        "layers.0.self_attn.rotary_emb.inv_freq": rand(4),
    }
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 8,
        "norm_output": True,
        "transformer_layer_config": {**LAYER_CONFIG, "rope_theta": 5e5},
        "speculators_config": {"algorithm": "eagle3"},
    }
    save(tmp_path, config, tensors)
    spec, _ = loaded(tmp_path, "eagle3")
    assert (spec.recycle, spec.norm_before_residual, spec.own_embedding) == ("post_norm", False, True)
    assert spec.layer.rope_theta == 5e5
    save(tmp_path, {**config, "norm_before_residual": True}, tensors)
    assert loaded(tmp_path, "eagle3")[0].norm_before_residual


def test_eagle3_norms_of_the_states_and_later_layers(tmp_path: Path) -> None:
    """One norm per state, under SGLang's first names too; a later layer's only norm is hidden_norm in SGLang."""
    norms = {f"aux_norm_{name}.weight": rand(16, seed=i) for i, name in enumerate(("low", "mid", "high"))}
    later = layer_tensors("layers.1.")
    later["layers.1.hidden_norm.weight"] = later.pop("layers.1.input_layernorm.weight")
    tensors = {f"model.{name}": value for name, value in (eagle3_tensors() | norms | later).items()}
    save(tmp_path, {**EAGLE3_CONFIG, "num_hidden_layers": 2, "use_aux_norm": True}, tensors)
    spec, found = loaded(tmp_path, "eagle3")
    assert spec.fc_norms
    for i, name in enumerate(("low", "mid", "high")):
        assert torch.equal(found[f"fc_norms.{i}.weight"], norms[f"aux_norm_{name}.weight"])
    assert torch.equal(found["layers.1.input_layernorm.weight"], later["layers.1.hidden_norm.weight"])


def test_a_whole_vocabulary_with_maps_is_not_reduced(tmp_path: Path) -> None:
    tensors = eagle3_tensors() | {
        "d2t": torch.zeros(40, dtype=torch.int64),
        "t2d": torch.ones(40, dtype=torch.bool),
        "lm_head.weight": rand(40, 16),
    }
    save(tmp_path, {**LAYER_CONFIG, "draft_vocab_size": 40}, tensors)
    spec, found = loaded(tmp_path, "eagle3")
    assert not spec.reduced_vocabulary
    assert "draft_ids" not in found


# ---- Medusa, as published


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_are_counted_in_the_file(prefix: str, file: str, tmp_path: Path) -> None:
    """Trap: the published configs say 2 heads where the files hold 5."""
    tensors = medusa_tensors(5, 2, prefix=prefix)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    save(tmp_path, config, tensors, file)
    spec, found = loaded(tmp_path, "medusa")
    assert (spec.num_modules, spec.num_blocks, spec.own_head, spec.trained_depth) == (5, 2, True, 5)
    assert torch.equal(found["heads.4.blocks.1.weight"], tensors[f"{prefix}4.1.linear.weight"])
    assert torch.equal(found["heads.3.lm_head.weight"], tensors[f"{prefix}3.2.weight"])


def test_medusa_v0_uses_the_targets_unembedding(tmp_path: Path) -> None:
    save(tmp_path, {"medusa_num_heads": 2}, medusa_tensors(3, own=False), "medusa_lm_head.pt")
    spec, found = loaded(tmp_path, "medusa")
    assert (spec.num_modules, spec.own_head, len(found)) == (3, False, 6)


@pytest.mark.parametrize("rows", [8, 40])
def test_medusa_of_vllm(rows: int, tmp_path: Path) -> None:
    """A token_map in order of frequency: ids are sorted, and the rows with them; a whole unembedding is cut."""
    token_map = torch.tensor([9, 3, 0, 39, 17, 4, 31, 30])
    full = [rand(40, 16, seed=head) for head in range(2)]
    tensors = {"token_map": token_map}
    for head in range(2):
        tensors[f"blocks.{head}.layers.0.weight"] = rand(16, 16, seed=head)
        tensors[f"lm_heads.{head}.weight"] = full[head] if rows == 40 else full[head][token_map].contiguous()
    tensors = {f"medusa_heads.{name}": value for name, value in tensors.items()}
    config = {
        "hidden_size": 16,
        "vocab_size": 40,
        "truncated_vocab_size": 8,
        "num_heads": 2,
        "num_hidden_layers": 1,
    }
    save(tmp_path, config, tensors)
    spec, found = loaded(tmp_path, "medusa")
    assert (spec.draft_vocab_size, spec.own_head) == (8, True)
    assert found["draft_ids"].tolist() == list(KEPT)
    for head in range(2):
        assert torch.equal(found[f"heads.{head}.lm_head.weight"], full[head][list(KEPT)])
        assert not found[f"heads.{head}.blocks.0.bias"].any()


def test_medusa_of_vllm_with_one_unembedding(tmp_path: Path) -> None:
    tensors = {f"blocks.{head}.layers.0.weight": rand(16, 16, seed=head) for head in range(2)}
    tensors["lm_heads.0.weight"] = rand(40, 16)
    save(tmp_path, {"hidden_size": 16, "vocab_size": 40, "original_lm_head": True}, tensors)
    _, found = loaded(tmp_path, "medusa")
    assert torch.equal(found["heads.1.lm_head.weight"], tensors["lm_heads.0.weight"])


# ---- MTP, as published


def test_mtp_of_deepseek_inside_its_target(tmp_path: Path) -> None:
    """Only the MTP layer's shard must be there, and only its tensors are read."""
    weights = {"model.embed_tokens.weight": rand(40, 16), "lm_head.weight": rand(40, 16), "model.norm.weight": rand(16)}
    for layer in range(8):
        weights |= layer_tensors(f"model.layers.{layer}.")
    module = deepseek_tensors(8)
    shards = dict.fromkeys(weights, "model-00001-of-00002.safetensors")
    shards |= dict.fromkeys(module, "model-00002-of-00002.safetensors")
    save_file(module, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**MTP_CONFIG, "model_type": "deepseek_v3"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    spec, found = loaded(tmp_path, "mtp")
    assert (spec.num_modules, spec.recycle, spec.trained_depth, spec.layer.num_layers) == (1, "post_norm", 1, 1)
    assert (spec.own_head, spec.own_embedding) == (True, True)
    assert torch.equal(found["modules.0.eh_proj.weight"], module["model.layers.8.eh_proj.weight"])
    assert torch.equal(found["modules.0.norm.weight"], module["model.layers.8.shared_head.norm.weight"])
    assert torch.equal(found["layers.0.mlp.up_proj.weight"], module["model.layers.8.mlp.up_proj.weight"])
    save_file(weights | module, tmp_path / "model.safetensors")
    assert_same(loaded(tmp_path, "mtp")[1], found)


def test_mtp_recycling_is_a_switch(tmp_path: Path) -> None:
    save(tmp_path, {**MTP_CONFIG, "recycle": "pre_norm"}, deepseek_tensors(8))
    source = resolve_head(str(tmp_path), target=TARGET)
    spec = read_head_spec(source, TARGET, "mtp")
    assert spec.recycle == "pre_norm"
    assert load_head(source, replace(spec, recycle="post_norm"), TARGET, torch.float32)


def test_mtp_of_mimo_concatenates_the_state_first(tmp_path: Path) -> None:
    """Trap: MiMo-7B projects [state, embedding]; the canonical order is [embedding, state]."""
    tensors = mimo_tensors() | {"model.embed_tokens.weight": rand(40, 16), "lm_head.weight": rand(40, 16)}
    save(tmp_path, {**MTP_CONFIG, "model_type": "mimo", "sliding_window": 32768}, tensors)
    spec, found = loaded(tmp_path, "mtp")
    assert (spec.layer.qkv_bias, spec.layer.output_bias, spec.own_head) == (True, False, False)
    embedding, state = rand(16, seed=1), rand(16, seed=2)
    theirs = tensors["model.mtp_layers.0.input_proj.weight"] @ torch.cat([state, embedding])
    ours = found["modules.0.eh_proj.weight"] @ torch.cat([embedding, state])
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(found["modules.0.enorm.weight"], tensors["model.mtp_layers.0.token_layernorm.weight"])


def test_mtp_of_qwen3_next_has_norms_around_one(tmp_path: Path) -> None:
    """Trap: every norm, q and k norms too, stores its distance from 1."""
    tensors = qwen3_next_tensors()
    save(tmp_path, {**MTP_CONFIG, "model_type": "qwen3_next", "layer_types": ["linear_attention"] * 8}, tensors)
    _, found = loaded(tmp_path, "mtp")
    norms = {
        "modules.0.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "modules.0.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "modules.0.norm.weight": "mtp.norm.weight",
        "layers.0.input_layernorm.weight": "mtp.layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight": "mtp.layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.q_norm.weight": "mtp.layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.k_norm.weight": "mtp.layers.0.self_attn.k_norm.weight",
    }
    assert {name for name in found if name.endswith("norm.weight")} == set(norms)
    for name, stored in norms.items():
        assert torch.allclose(found[name], tensors[stored] + 1), name
    assert torch.equal(found["modules.0.eh_proj.weight"], tensors["mtp.fc.weight"])


@pytest.mark.parametrize(("family", "shift"), [("qwen3", 0), ("qwen3_next", 1), ("qwen3_5_text", 1)])
def test_mtp_of_speculators_has_its_familys_norms(family: str, shift: int, tmp_path: Path) -> None:
    renamed = {"fc": "input_proj", "norm": "final_layernorm"}
    renamed |= {"pre_fc_norm_hidden": "hidden_layernorm", "pre_fc_norm_embedding": "token_layernorm"}
    tensors = {}
    for name, value in qwen3_next_tensors().items():
        part = name.removeprefix("mtp.").removeprefix("layers.0.")
        own = part.removesuffix(".weight")
        tensors[f"mtp_layers.0.{renamed.get(own, own)}.weight"] = value
    config = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    save(tmp_path, {**config, "transformer_layer_config": {**MTP_CONFIG, "model_type": family}}, tensors)
    _, found = loaded(tmp_path, "mtp")
    assert torch.equal(found["modules.0.norm.weight"], tensors["mtp_layers.0.final_layernorm.weight"] + shift)
    assert torch.equal(found["modules.0.hnorm.weight"], tensors["mtp_layers.0.hidden_layernorm.weight"] + shift)
    assert torch.equal(found["modules.0.eh_proj.weight"], tensors["mtp_layers.0.input_proj.weight"])


def test_mtp_of_deepseek_v4_joins_two_projections(tmp_path: Path) -> None:
    tensors = deepseek_v4_tensors()
    save(tmp_path, {**MTP_CONFIG, "hc_mult": 1}, tensors)
    _, found = loaded(tmp_path, "mtp")
    embedding, state = rand(16, seed=1), rand(16, seed=2)
    theirs = tensors["mtp.0.e_proj.weight"] @ embedding + tensors["mtp.0.h_proj.weight"] @ state
    assert torch.allclose(found["modules.0.eh_proj.weight"] @ torch.cat([embedding, state]), theirs, atol=1e-5)
    assert torch.equal(found["layers.0.mlp.up_proj.weight"], tensors["mtp.0.ffn.w3.weight"])
    assert torch.equal(found["layers.0.mlp.down_proj.weight"], tensors["mtp.0.ffn.w2.weight"])


def test_modules_share_one_embedding_or_are_refused(tmp_path: Path) -> None:
    config = {**MTP_CONFIG, "num_nextn_predict_layers": 2}
    tensors = deepseek_tensors(8) | deepseek_tensors(9)
    save(tmp_path / "same", config, tensors)
    spec, _ = loaded(tmp_path / "same", "mtp")
    assert (spec.num_modules, spec.layers_per_module) == (2, 1)


# ---- Where heads are found


def test_spec_is_read_without_torch(tmp_path: Path) -> None:
    written(tmp_path, "eagle3-speculators", tiny_spec("eagle3", {"vocab_size": 12}))
    code = f"""
import sys
sys.modules["torch"] = None
from specbench.engine.heads.load import read_head_spec, resolve_head
from specbench.roofline.shapes import ModelSpec
target = {TARGET!r}
print(read_head_spec(resolve_head({str(tmp_path)!r}, target=target), target, "eagle3").draft_vocab_size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("12", 0), done.stderr


def test_builtin_heads_stand_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path / package)
    written(tmp_path / "specbench" / "heads" / TARGET.name / "eagle", "eagle", tiny_spec("eagle"))
    source = resolve_head("builtin:eagle", target=TARGET)
    assert (source.kind, source.display_name) == ("builtin", "tiny-target/eagle")
    assert source.label.startswith("tiny-target/eagle@sampled-sha256:")
    assert read_head_spec(source, TARGET, "eagle").kind == "eagle"


def test_of_a_hub_model_only_the_shards_of_its_mtp_layer_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    names = {"model.layers.7.mlp.up_proj.weight": "a.safetensors", "model.layers.8.eh_proj.weight": "b.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(MTP_CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    asked: list[list[str]] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("org/model", "main")
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    source = resolve_head("org/model", target=TARGET, revision="main")
    assert (source.kind, source.revision, source.label) == ("hub", tmp_path.name, f"org/model@{tmp_path.name}")
    assert [pattern for pattern in asked[1] if pattern.endswith("safetensors")] == ["b.safetensors"]
