"""Suffix decoding and n-gram trees as cases: YAML, names and hashes, node budgets, the drafters made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_tools import blocks, make_scenario, measured, text_model, write_prompts

from specbench.bench.plan import Planner
from specbench.bench.target import Target
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.suffix import SuffixDrafter
from specbench.errors import InputError
from specbench.scenario.cases import Case, expand
from specbench.scenario.schema import Scenario, load_scenario

Load = Callable[[str, str], Scenario]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write(drafter: str, depth: str = "3") -> Scenario:
        path = tmp_path / "s.yaml"
        path.write_text(
            f"name: n\nquestion: q?\ntarget: {{model: m}}\nsweep: {{depth: {depth}}}\ndrafters: {drafter}\n"
        )
        return load_scenario(path)

    return write


def names(scenario: Scenario) -> list[str]:
    return [case.drafter.name for case in expand(scenario)]


def test_the_defaults_are_the_published_ones_and_a_chain(load: Load) -> None:
    scenario = load("[{kind: suffix}, {kind: ngram}]", "3")
    assert scenario.to_dict()["drafters"][0] == {
        "kind": "suffix",
        "depth": None,
        "max_depth": None,
        "max_tree_depth": [24],
        "max_spec_factor": [1.0],
        "max_spec_offset": [0.0],
        "min_token_prob": [0.1],
        "max_cached_requests": [10000],
        "responses": ["others"],
        "nodes": [None],
    }
    assert scenario.to_dict()["drafters"][1]["branches"] == [1]
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    suffix, ngram = expand(scenario)
    assert [case.drafter.name for case in (suffix, ngram)] == ["suffix", "ngram(3)"]
    assert [case.num_nodes for case in (suffix, ngram)] == [3, 3]
    assert not suffix.drafter.grows_trees


def test_options_are_axes_and_stand_in_the_names(load: Load) -> None:
    assert names(load("{kind: suffix, responses: [others, all], nodes: [null, 8]}", "3")) == [
        "suffix",
        "suffix(8)",
        "suffix(responses all)",
        "suffix(8, responses all)",
    ]
    text = (
        "{kind: suffix, max_tree_depth: 12, max_spec_factor: 2, max_spec_offset: 1e0, min_token_prob: 5e-2, "
        "max_cached_requests: 0}"
    )
    assert names(load(text, "3")) == [
        "suffix(max cached requests 0, max spec factor 2, max spec offset 1, max tree depth 12, min token prob 0.05)"
    ]
    assert names(load("{kind: ngram, branches: [1, 2, 4]}", "3")) == [
        "ngram(3)",
        "ngram(3, branches 2)",
        "ngram(3, branches 4)",
    ]
    assert names(load("{kind: ngram, branches: 4, nodes: [6, null]}", "3")) == [
        "ngram(3, nodes 6, branches 4)",
        "ngram(3, branches 4)",
    ]


def test_one_branch_is_the_case_it_always_was(load: Load) -> None:
    """Options that came later leave the hashes of rows alone, and one branch is no other case."""
    (plain,), (one,) = expand(load("{kind: ngram}", "3")), expand(load("{kind: ngram, branches: 1}", "3"))
    assert plain == one
    assert plain.hash == one.hash
    assert plain.content()["drafter"] == {
        "kind": "ngram",
        "options": {"max_ngram": 3, "min_ngram": 1, "rule": "transformers"},
    }


def test_nodes_of_a_draft(load: Load) -> None:
    def counts(drafter: str, depth: str = "[0, 1, 4, 8]") -> list[int]:
        return [case.num_nodes for case in expand(load(drafter, depth))]

    assert counts("{kind: suffix}") == [0, 1, 4, 8]
    assert counts("{kind: suffix, nodes: 12}") == [0, 12, 12, 12]
    assert counts("{kind: ngram, branches: 3}") == [0, 3, 12, 24]
    assert counts("{kind: ngram, branches: 3, nodes: 10}") == [0, 3, 10, 10]


@pytest.mark.parametrize(
    ("drafter", "depth", "key", "message", "remedy"),
    [
        ("kind: sufix", "3", "kind", "'sufix' is not a drafter", "did you mean suffix?"),
        ("kind: suffix, tree_depth: 3", "3", "tree_depth", "known key", "max_tree_depth"),
        ("kind: suffix, tree: [[0]]", "3", "tree", "known key", "nodes"),
        ("kind: suffix, max_tree_depth: 1", "1", "max_tree_depth", "out of range", "2..256"),
        ("kind: suffix, max_spec_factor: -1", "3", "max_spec_factor", "out of range", "[0, 64]"),
        ("kind: suffix, max_spec_offset: .nan", "3", "max_spec_offset", "finite", "finite number"),
        ("kind: suffix, min_token_prob: 1.5", "3", "min_token_prob", "out of range", "[0, 1]"),
        ("kind: suffix, max_cached_requests: -1", "3", "max_cached_requests", "out of range", "0..1000000"),
        ("kind: suffix, max_cached_requests: 1e4", "3", "max_cached_requests", "whole number", "whole number"),
        ("kind: suffix, responses: other", "3", "responses", "'other' is not known", "did you mean others?"),
        ("kind: suffix, nodes: 0", "1", "nodes", "out of range", "1..127"),
        ("kind: suffix, nodes: [4, 2]", "[1, 3]", "nodes", "2 nodes can't have 3 levels", "nodes: 3 or more"),
        ("kind: suffix, max_tree_depth: [24, 8]", "8", "max_tree_depth", "at most 7 tokens", "deeper tree"),
        ("kind: ngram, branches: 0", "3", "branches", "out of range", "1..16"),
        ("kind: ngram, branches: 2, nodes: 128", "3", "nodes", "out of range", "1..127"),
        ("kind: ngram, branches: [1, 2], nodes: 8", "3", "nodes", "one branch is a chain", "drop nodes"),
        ("kind: ngram, branches: 4, nodes: 2", "3", "nodes", "2 nodes can't have 3 levels", "nodes: 3 or more"),
        ("kind: ngram, branches: [2, 16]", "8", "branches", "16 branches of 8 tokens", "nodes: 127"),
    ],
)
def test_what_can_not_be_had_is_refused_with_a_remedy(
    load: Load, drafter: str, depth: str, key: str, message: str, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(f"[{{{drafter}}}]", depth)
    error = caught.value
    assert str(error.key).startswith(f"drafters[0].{key}")
    assert error.line == 5
    assert message in error.message
    assert remedy in str(error.remedy)


# ---- Cases on text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    text_model(folder / "target")
    texts = ["one two one two one two", "a b c a b c a b", "tell me, tell me, tell me"]
    write_prompts(folder / "prompts.jsonl", *((f"p{i}", "qa", [text]) for i, text in enumerate(texts)))
    return folder


def text_case(folder: Path, drafter: dict[str, Any], *, depth: int = 3, **changes: Any) -> Case:
    (case,) = expand(
        make_scenario(
            drafters=[drafter],
            sweep={"batch_size": 2, "depth": depth},
            target={"model": str(folder / "target"), "dtype": "fp32"},
            workload={"prompts": str(folder / "prompts.jsonl"), "output_len": 20, "ignore_eos": True},
            **changes,
        )
    )
    return case


@pytest.mark.parametrize(
    ("drafter", "kind", "nodes"),
    [
        ({"kind": "suffix"}, SuffixDrafter, 3),
        ({"kind": "suffix", "nodes": 7, "max_spec_factor": 3, "min_token_prob": 0}, SuffixDrafter, 7),
        ({"kind": "suffix", "responses": "all"}, SuffixDrafter, 3),
        ({"kind": "ngram", "branches": 3, "nodes": 8}, NgramDrafter, 8),
        ({"kind": "ngram", "branches": 2}, NgramDrafter, 6),
    ],
)
def test_whole_cases_agree_with_ar(folder: Path, drafter: dict[str, Any], kind: type, nodes: int) -> None:
    case = text_case(folder, drafter)
    target = Target(case.target)
    first, second = target.drafter(case, 200), target.drafter(case, 200)
    assert type(first) is type(second) is kind
    assert first is not second
    assert [first.num_nodes(depth) for depth in range(1, 4)] == [case.drafter.num_nodes(d) for d in range(1, 4)]
    assert case.num_nodes == nodes
    outcome = measured(case, blocks(3), target)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.conditions["output_check"] == "identical"
    assert outcome.conditions["synthetic"] is False
    assert outcome.metrics["num_draft_tokens"] > 0
    assert target.decoder.limits.max_selected == 2 * (nodes + 1)
    assert target.decoder.kv.max_context == target.prompts(case.workload).longest + 20 + 1 + nodes - 3


@pytest.mark.parametrize(
    ("drafter", "skipped"),
    [
        ({"kind": "suffix"}, False),
        ({"kind": "suffix", "nodes": 8}, True),
        ({"kind": "ngram"}, False),
        ({"kind": "ngram", "branches": 2}, True),
    ],
)
def test_trees_are_not_verified_as_a_block(folder: Path, drafter: dict[str, Any], skipped: bool) -> None:
    case = text_case(folder, drafter, sampling={"temperature": 1.0, "verification": "block"})
    skip = Planner(blocks(), None).plan(case).skip
    assert (skip is not None) == skipped
    assert skip is None or "chain" in skip
