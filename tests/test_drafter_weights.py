"""What a drafter brings of its own: the built-in draft model by name, and the weights that a row tells of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_tools import blocks, make_scenario, measured, one_case, write_scenario
from head_files import random_head, tiny_spec

from specbench.bench import drafters
from specbench.bench.drafters import DrafterShop, draft_model_source
from specbench.bench.plan import Planner
from specbench.distill.card import write_draft_model
from specbench.engine.heads.load import write_head
from specbench.engine.models.loader import embedding_of, load_weights
from specbench.engine.models.sources import resolve_model
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec, named_shape
from specbench.scenario.cases import Case, TargetSpec
from specbench.scenario.schema import load_scenario

TARGET = "smollm2-135m-instruct"
LAYER_PARAMS = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 8 + 2 * 576


def draft_spec() -> ModelSpec:
    """One layer of the target's width, its MLP all but gone."""
    return replace(named_shape("smollm2-135m"), num_layers=1, intermediate_size=8, vocab_size=96)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder of our own, with a built-in draft model for the target."""
    spec, folder = draft_spec(), tmp_path / "heads" / TARGET / "draft_model"
    folder.mkdir(parents=True)
    tensors = {"norm.weight": torch.ones(576)}
    for name, size in (
        *(("self_attn.q_proj", (576, 576)), ("self_attn.k_proj", (192, 576)), ("self_attn.v_proj", (192, 576))),
        *(("self_attn.o_proj", (576, 576)), ("mlp.gate_proj", (8, 576)), ("mlp.up_proj", (8, 576))),
        *(("mlp.down_proj", (576, 8)), ("input_layernorm", (576,)), ("post_attention_layernorm", (576,))),
    ):
        tensors[f"layers.0.{name}.weight"] = torch.full(size, 0.01)
    write_draft_model(folder, spec, tensors)
    monkeypatch.setattr(drafters.resources, "files", lambda package: tmp_path)
    return tmp_path


def case_of(drafter: dict[str, Any]) -> Case:
    return replace(one_case(drafter), target=TargetSpec(TARGET, dtype="bf16"))


def test_builtin_names_the_folder_of_the_target(package: Path) -> None:
    case = case_of({"kind": "draft_model", "model": "builtin"})
    assert case.drafter.name == "draft_model(builtin)"
    source = draft_model_source(case.drafter, case.target.name)
    assert source.path == package / "heads" / TARGET / "draft_model"
    assert source.label.startswith(f"{TARGET}/draft_model@sampled-sha256:")
    with pytest.raises(InputError, match="no built-in draft model for the target llama") as caught:
        draft_model_source(case.drafter, "llama")
    assert "specbench distill" in str(caught.value.remedy)


def test_a_shared_embedding_is_the_targets_and_no_weight_of_the_drafter(package: Path) -> None:
    case = case_of({"kind": "draft_model", "model": "builtin"})
    own = DrafterShop(SimpleNamespace(target=case.target)).weights(case)  # type: ignore[arg-type]
    assert (own.params, own.null_reasons) == (LAYER_PARAMS + 576, {})
    source = draft_model_source(case.drafter, case.target.name)
    shared = embedding_of(resolve_model("dummy:smollm2-135m"), replace(draft_spec(), name="x"), torch.bfloat16)
    weights = load_weights(source, draft_spec(), torch.bfloat16, shared=shared)
    assert torch.equal(weights["embed_tokens.weight"], shared["embed_tokens.weight"])


def test_a_case_with_a_draft_model_that_shares_the_embedding_is_measured(tmp_path: Path) -> None:
    """The target's own layers and norm under its embedding, which is the draft model's unembedding too."""
    spec = replace(named_shape("tiny-llama-test"), tie_word_embeddings=True)
    case = one_case(
        {"kind": "draft_model", "model": str(tmp_path)}, depth=2, workload={"num_prompts": 4, "output_len": 8}
    )
    weights = load_weights(resolve_model("dummy:tiny-llama-test"), spec, torch.float32)
    assert "lm_head.weight" not in weights
    write_draft_model(tmp_path, spec, {name: weights[name] for name in weights if name != "embed_tokens.weight"})
    outcome = measured(case, blocks(2))
    metrics = outcome.metrics
    assert outcome.conditions["drafter_weights"].startswith(f"{tmp_path.name}@sampled-sha256:")
    assert metrics["drafter_params"] == spec.num_params - spec.num_head_params
    assert metrics["drafter_step_bytes"] > 4 * metrics["drafter_params"]  # two passes, and each reads the embedding too
    assert metrics["draft_cost_ratio"] > 0
    assert metrics["draft_cost_ratio_roof"] == pytest.approx(metrics["drafter_step_bytes"] / metrics["ar_bytes"])


def test_a_head_tells_its_file_and_its_own_values(tmp_path: Path) -> None:
    spec = tiny_spec("eagle")
    write_head(tmp_path / "mine", spec, random_head(spec), layout="eagle")
    case = case_of({"kind": "eagle", "head": str(tmp_path / "mine")})
    width, vocab = spec.target_hidden_size, spec.target_vocab_size
    target = SimpleNamespace(
        target=case.target, spec=replace(spec.layer, hidden_size=width, vocab_size=vocab, num_layers=4)
    )
    own = DrafterShop(target).weights(case)  # type: ignore[arg-type]
    assert own.label is not None
    assert own.label.startswith("mine@sampled-sha256:")
    assert own.params == sum(t.numel() for name, t in random_head(spec).items() if name != "draft_ids")


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        ({"kind": "ngram"}, "it drafts without a model"),
        ({"kind": "early_exit", "layers": 1}, "it runs the target's own layers"),
        ({"kind": "none"}, "nothing is drafted"),
    ],
)
def test_a_drafter_without_weights_says_why(drafter: dict[str, Any], reason: str) -> None:
    case = one_case(drafter, depth=0 if drafter["kind"] == "none" else 2)
    own = DrafterShop(SimpleNamespace(target=case.target)).weights(case)  # type: ignore[arg-type]
    assert (own.label, own.params) == (None, None)
    assert own.null_reasons == {"drafter_params": reason}


def test_the_plan_skips_a_built_in_model_that_is_not_there_and_asks_no_tokens_of_one_that_shares(
    package: Path,
) -> None:
    case = case_of({"kind": "draft_model", "model": "builtin"})
    nowhere = resolve_model("dummy:smollm2-135m")
    assert Planner._vocabularies(case, nowhere) is None
    other = replace(case, target=replace(case.target, model="another"))
    assert Planner._vocabularies(other, nowhere) == "no built-in draft model for the target another"


def test_a_folder_called_builtin_beside_the_scenario_does_not_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "builtin").mkdir()
    drafter = {"kind": "draft_model", "model": "builtin", "depth": 2}

    scenario = load_scenario(write_scenario(tmp_path / "s.yaml", drafters=[drafter]))
    assert scenario.drafters[0].options["model"] == ("builtin",)
    assert make_scenario(drafters=[drafter]).drafters[0].options["model"] == ("builtin",)


def test_a_shared_embedding_leaves_no_place_for_an_unembedding(package: Path) -> None:
    folder, spec = package / "heads" / TARGET / "draft_model", draft_spec()
    shared = {"embed_tokens.weight": torch.zeros(96, 576)}
    whole = load_weights(resolve_model(str(folder)), spec, torch.float32, shared=shared)
    del whole["embed_tokens.weight"]
    write_draft_model(folder, spec, {**whole, "lm_head.weight": torch.zeros(96, 576)})
    with pytest.raises(InputError, match="unexpected tensor"):
        load_weights(resolve_model(str(folder)), spec, torch.float32, shared=shared)
