"""A plan counts what a drafter brings: its weights, as its file holds them, and the K and V of its own cache."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.bench.drafters import drafter_bytes, head_source
from specbench.bench.plan import Planner
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.sources import ModelSource
from specbench.roofline.shapes import ModelSpec, named_shape
from specbench.scenario.cases import Case, PromptSpec, TargetSpec, Workload
from specbench.scenario.drafter_spec import DrafterSpec
from specbench.scenario.schema import MeasureConfig

MODEL = "smollm2-135m-instruct"
HOME = Path(str(resources.files("specbench"))) / "heads" / MODEL
TARGET = named_shape("smollm2-135m")
CONTEXT, BATCH = 70, 3


def file_values(kind: str) -> int:
    """Values in a safetensors file, the map of the draft vocabulary left out."""
    raw = (HOME / kind / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    total = 0
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in ("BF16", "F16", "F32"):
            first, end = entry["data_offsets"]
            total += (end - first) // (4 if entry["dtype"] == "F32" else 2)
    return total


def cache_bytes(layer: ModelSpec, context: int, page_size: int = 16) -> int:
    kv = PagedKVCache(
        num_layers=max(1, layer.num_layers),
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_slots=BATCH,
        max_context=context,
        dtype=torch.float32,
        page_size=page_size,
    )
    return kv.bytes


def case(kind: str, depth: int, **options: Any) -> Case:
    work = Workload(output_len=24, batch_size=BATCH, prompts=PromptSpec("builtin", ("qa",), None, 2))
    return Case(TargetSpec(model=MODEL, dtype="fp32"), DrafterSpec(kind, tuple(options.items())), depth, work)


@pytest.mark.parametrize("kind", ["eagle", "eagle2", "eagle3", "mtp", "medusa"])
def test_heads(kind: str) -> None:
    options: dict[str, Any] = {"head": "builtin"}
    fed = 2  # of a chain of three, those below the root
    if kind == "eagle2":
        options, fed = options | {"nodes": 12, "top_k": 4}, 2 * 4
    one = case(kind, 3, **options)
    _, spec = head_source(one.drafter, TARGET, MODEL)
    named = "eagle" if kind == "eagle2" else kind
    assert drafter_bytes(one, TARGET, CONTEXT) == file_values(named) * 4 + cache_bytes(spec.layer, CONTEXT + fed)


def test_draft_model() -> None:
    folder = HOME / "draft_model"
    spec = read_model_spec(ModelSource("folder", folder, None, "draft_model"))
    one = case("draft_model", 3, model="builtin")
    assert drafter_bytes(one, TARGET, CONTEXT) == file_values("draft_model") * 4 + cache_bytes(spec, CONTEXT)


@pytest.mark.parametrize(
    ("kind", "options"), [("ngram", {"max_ngram": 3}), ("early_exit", {"layers": 4}), ("none", {})]
)
def test_nothing_of_their_own(kind: str, options: dict[str, Any]) -> None:
    assert drafter_bytes(case(kind, 0 if kind == "none" else 3, **options), TARGET, CONTEXT) == 0


def test_the_plan_counts_them_and_skips_for_them() -> None:
    plain = case("early_exit", 3, layers=4)
    drafted = case("draft_model", 3, model="builtin")
    planner = Planner(MeasureConfig(), None, free_bytes=10**12)
    without, with_it = (planner.plan(one).memory_bytes for one in (plain, drafted))
    assert without is not None
    assert with_it is not None
    assert with_it - without > file_values("draft_model") * 4
    tight = Planner(MeasureConfig(), None, free_bytes=(without + with_it) // 2)
    assert tight.plan(plain).skip is None
    assert "are free" in str(tight.plan(drafted).skip)


def test_a_drafter_that_is_not_there_adds_nothing_and_is_why_the_case_is_skipped(tmp_path: Path) -> None:
    absent = case("eagle", 3, head=str(tmp_path))
    planned = Planner(MeasureConfig(), None, free_bytes=10**12).plan(absent)
    assert planned.skip
    assert planned.memory_bytes == Planner(MeasureConfig(), None).plan(case("early_exit", 3, layers=4)).memory_bytes
