"""Whole checkpoints with MTP modules: the folder is a target, and the same folder is its head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tools import blocks, measured, one_case, one_thread, text_model, write_prompts
from head_files import TARGET, Tensors, random_head
from safetensors.torch import load_file, save_file

from specbench.bench.canary import check_drafter
from specbench.bench.plan import Planner
from specbench.bench.target import Target
from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.heads.canary import CanaryError
from specbench.engine.heads.load import load_head, read_head_spec, resolve_head, write_head
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.loader import load_weights, tensor_shapes
from specbench.engine.models.sources import resolve_model
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import Case


def modules_of(target: ModelSpec, count: int, **changes: Any) -> HeadSpec:
    """MTP modules in the shape of the target's own layers."""
    layer = replace(target, num_layers=count)
    fields: dict[str, Any] = {"recycle": "post_norm", "num_modules": count, "trained_depth": count} | changes
    sizes = {"target_hidden_size": target.hidden_size, "target_vocab_size": target.vocab_size}
    return HeadSpec(kind="mtp", name="head", layer=layer, **sizes, **fields)


def add_modules(
    folder: Path, spec: HeadSpec, layout: str, num_layers: int, tmp: Path, count: int | None = None
) -> Tensors:
    """Put MTP modules beside the model in `folder`, whose config then counts `count` of them: canonical tensors."""
    tensors = random_head(spec)
    write_head(tmp, spec, tensors, layout=layout, dtype=torch.float32, extra={"num_hidden_layers": num_layers})
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), **load_file(tmp / "model.safetensors")}, weights)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = spec.num_modules if count is None else count
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def write_target(folder: Path, spec: ModelSpec, **config: Any) -> Tensors:
    """A checkpoint of a Llama-like or Qwen2-like family with random weights."""
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(spec).items()}
    folder.mkdir()
    save_file(
        {n if n == "lm_head.weight" else f"model.{n}": t for n, t in tensors.items()}, folder / "model.safetensors"
    )
    keys = {
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(keys))
    return tensors


LLAMA = replace(TARGET, num_layers=2)
MIMO = replace(LLAMA, family="mimo", qkv_bias=True)
# As MiMo-7B's config has them, beside Qwen2's sizes.
MIMO_KEYS = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "tie_word_embeddings": False,
}
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True)


@pytest.mark.parametrize(
    ("target", "config", "layout", "spec"),
    [
        (LLAMA, {}, "mtp-deepseek", modules_of(LLAMA, 1, own_head=True, own_embedding=True)),
        (LLAMA, {}, "mtp-deepseek", modules_of(LLAMA, 3)),
        (MIMO, MIMO_KEYS, "mtp-mimo", modules_of(MIMO, 1)),
        (MIMO, MIMO_KEYS, "mtp-mimo", modules_of(MIMO, 3)),
        (QWEN3, {}, "mtp-qwen3-next", modules_of(QWEN3, 1)),
    ],
    ids=["deepseek", "deepseek, three modules", "mimo", "mimo, three modules", "qwen3-next"],
)
def test_one_folder_is_target_and_head(
    target: ModelSpec, config: dict[str, Any], layout: str, spec: HeadSpec, tmp_path: Path
) -> None:
    folder = tmp_path / "whole"
    own = write_target(folder, target, **config)
    modules = add_modules(folder, spec, layout, target.num_layers, tmp_path / "head")
    source = resolve_model(str(folder))
    found = read_model_spec(source)
    assert replace(found, name=target.name) == target
    weights = load_weights(source, found, torch.float32)
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in own.items())
    head = resolve_head(str(folder), target=found)
    read = read_head_spec(head, found, "mtp")
    assert (read.num_modules, read.own_head, read.layer.qkv_bias) == (
        spec.num_modules,
        spec.own_head,
        spec.layer.qkv_bias,
    )
    loaded = load_head(head, read, found, torch.float32)
    assert loaded.keys() == modules.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in modules.items())


@pytest.mark.parametrize("count", [0, 1])
def test_layers_that_the_config_does_not_count_are_still_unexpected(count: int, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    write_target(folder, LLAMA)
    add_modules(folder, modules_of(LLAMA, 2), "mtp-deepseek", 2, tmp_path / "head", count)
    source = resolve_model(str(folder))
    with pytest.raises(InputError, match="unexpected tensor") as caught:
        load_weights(source, read_model_spec(source), torch.float32)
    assert str(caught.value.key).startswith(f"model.layers.{2 + count}.")


# ---- Several modules in whole cases


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mtp")
    folder = text_model(root / "whole")
    target = read_model_spec(resolve_model(str(folder)))
    add_modules(folder, modules_of(target, 3), "mtp-mimo", target.num_layers, root / "head")
    write_prompts(
        root / "prompts.jsonl", ("a", "qa", ["When? When?"]), ("b", "writing", ["Rain."]), ("c", "qa", ["Who?"])
    )
    return root


def modules_case(root: Path, depth: int = 3, drafter: dict[str, Any] | None = None, **changes: Any) -> Case:
    folder = str(root / "whole")
    return one_case(
        {"kind": "mtp", "head": folder, **(drafter or {})},
        target={"model": folder, "dtype": "fp32"},
        workload={"prompts": str(root / "prompts.jsonl"), "output_len": 12},
        depth=depth,
        **changes,
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}])
def test_a_case_of_three_modules_agrees_with_ar(sampling: dict[str, Any], text_folder: Path) -> None:
    case = modules_case(text_folder, sampling=sampling)
    with one_thread():
        target = Target(case.target)
        outcome = measured(case, blocks(2), target)
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert outcome.conditions["output_check"] == ("distribution" if sampling else "identical")
        assert isinstance(target.drafter(case, 100), ModulesDrafter)


def test_the_canary_of_three_modules_runs_along_a_chain(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = modules_case(text_folder)
    with one_thread():
        target = Target(case.target)
        prompts = target.prompts(case.workload)
        check_drafter(target, case, prompts)
        keep = ModulesDrafter._keep

        def slipped(self: ModulesDrafter, slot: int, module: int, left: torch.Tensor, num_true: int) -> torch.Tensor:
            return keep(self, slot, module, left.flip(0), num_true)

        monkeypatch.setattr(ModulesDrafter, "_keep", slipped)
        with pytest.raises(CanaryError, match="state"):
            check_drafter(target, case, prompts)


@pytest.mark.parametrize(
    ("depth", "drafter", "skip"),
    [
        (3, {}, None),
        (4, {}, "a draft of 4 levels, and the head has 3 modules"),
        (2, {"tree": [[0], [1], [0, 0]]}, "MTP with 3 modules drafts chains"),
        (2, {"nodes": 6, "top_k": 2}, "MTP with 3 modules drafts chains"),
    ],
)
def test_what_modules_can_not_draft_is_skipped_and_refused(
    depth: int, drafter: dict[str, Any], skip: str | None, text_folder: Path
) -> None:
    case = modules_case(text_folder, depth, drafter)
    found = Planner(blocks(), None).plan(case).skip
    assert (found is None) if skip is None else (skip in (found or ""))
    with one_thread():
        target = Target(case.target)
        target.bind(case, target.prompts(case.workload))
        if skip is None:
            assert target.drafter(case, 100) is not None
        else:
            with pytest.raises(InputError, match=skip):
                target.drafter(case, 100)
