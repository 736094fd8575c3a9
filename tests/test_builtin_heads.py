"""The heads that ship with specbench: their size, their cards, and what they do on the model they were trained for."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.target import PreparedPrompts, Target
from specbench.engine.decode import Engine
from specbench.engine.trace import Trace
from specbench.scenario.cases import Case, PromptSpec, TargetSpec, Workload
from specbench.scenario.drafter_spec import DrafterSpec

MODEL = "smollm2-135m-instruct"
HOME = Path(str(importlib.resources.files("specbench"))) / "heads" / MODEL
KINDS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
MOST_BYTES = 30e6
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DRAFTERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "draft_model": (("model", "builtin"), ("dtype", None)),
    "eagle": (("head", "builtin"),),
    "eagle, tree": (("head", "builtin"), ("tree", TREE)),
    "eagle2": (("head", "builtin"), ("nodes", 12), ("top_k", 4)),
    "eagle3": (("head", "builtin"),),
    "medusa": (("head", "builtin"),),
    "mtp": (("head", "builtin"),),
}
LEAST_FIRST = 0.08
"""Least share of steps whose first draft is accepted: below what the cards say, far above chance."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(TargetSpec(model=MODEL, dtype="fp32", backend="cpu"))


@pytest.fixture(scope="module")
def prompts(target: Target) -> PreparedPrompts:
    chosen = PromptSpec("builtin", ("coding", "qa", "writing"), None, 3)
    return target.prompts(Workload(output_len=24, batch_size=2, prompts=chosen))


def run(target: Target, prompts: PreparedPrompts, drafter: DrafterSpec | None, depth: int = 3) -> Trace:
    work = Workload(output_len=24, batch_size=2)
    case = Case(target.target, drafter or DrafterSpec("none"), depth if drafter else 0, work)
    target.bind(case, prompts)
    made = target.drafter(case, prompts.longest + work.output_len + 1)
    engine = Engine(target.decoder, target.store, made, batch_size=2, depth=case.depth, check=True)
    return engine.run(target.requests(case, prompts))


@pytest.fixture(scope="module")
def truth(target: Target, prompts: PreparedPrompts) -> list[tuple[int, ...]]:
    return [one.token_ids for one in run(target, prompts, None).requests]


def test_they_are_small_and_each_has_its_card() -> None:
    assert sorted(path.name for path in HOME.iterdir() if path.is_dir()) == sorted(KINDS)
    assert sum(path.stat().st_size for path in HOME.rglob("*.safetensors")) < MOST_BYTES
    for kind in KINDS:
        card = json.loads((HOME / kind / "card.json").read_text())
        assert card["drafter"] == kind
        assert card["command"].startswith("specbench distill")
        assert (HOME / kind / "README.md").read_text().startswith("# ")


@pytest.mark.parametrize("name", DRAFTERS)
def test_outputs_are_those_of_ar_and_drafts_are_often_right(
    name: str, target: Target, prompts: PreparedPrompts, truth: list[tuple[int, ...]]
) -> None:
    trace = run(target, prompts, DrafterSpec(name.split(",")[0], DRAFTERS[name]))
    assert [one.token_ids for one in trace.requests] == truth
    drafted = trace.draft_depth > 0
    first = (trace.num_accepted[drafted] > 0).mean()
    assert first > LEAST_FIRST, f"{first:.2f} of the first drafts are accepted"
