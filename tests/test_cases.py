"""Cases: axes bound point by point, in a set order; names that tell them apart, and a hash that is theirs alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.scenario.cases import (
    Case,
    DrafterSpec,
    KvSpec,
    PromptSpec,
    SamplingSpec,
    SyntheticPrompts,
    TargetSpec,
    Workload,
    canonical_json,
    expand,
)
from specbench.scenario.filters import filter_cases
from specbench.scenario.schema import Scenario, load_scenario

ROOT = Path(__file__).parent.parent
CASE = Case(
    TargetSpec("smollm2-135m-instruct"),
    DrafterSpec("ngram", (("max_ngram", 3), ("min_ngram", 1), ("rule", "transformers"))),
    5,
    Workload(batch_size=8),
)


def scenario(**sections: Any) -> Scenario:
    base = {"name": "n", "question": "q?", "target": {"model": "m"}, "drafters": [{"kind": "ngram"}]}
    return Scenario.from_dict({**base, "sweep": {"depth": 3}, **sections})


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def test_quickstart_expands_in_the_order_it_runs() -> None:
    cases = expand(load_scenario(ROOT / "scenarios" / "quickstart.yaml"))
    cells = ["ngram(3) · depth 2", "ngram(3) · depth 4", "eagle · depth 1", "eagle · depth 3", "oracle · depth 4"]
    assert names(cases) == [f"{cell} · batch {batch} · T 0" for batch in (1, 2, 4, 8, 16) for cell in cells]
    assert len({case.hash for case in cases}) == 25


def test_batch_and_depth_ascend_and_the_rest_stays_as_written() -> None:
    cases = expand(
        scenario(
            target={"model": ["z", "a"], "dtype": ["fp32", "bf16"]},
            drafters=[{"kind": "oracle"}, {"kind": "ngram"}],
            sweep={"batch_size": [8, 1], "depth": [5, 1]},
        )
    )
    points = [
        (case.target.model, case.target.dtype, case.workload.batch_size, case.drafter.kind, case.depth)
        for case in cases
    ]
    assert points == [
        (model, dtype, batch, kind, depth)
        for model in ("z", "a")
        for dtype in ("fp32", "bf16")
        for batch in (1, 8)
        for kind in ("oracle", "ngram")
        for depth in (1, 5)
    ]


def test_cases_that_share_an_ar_arm_stand_together() -> None:
    cases = expand(
        scenario(
            drafters=[{"kind": "ngram", "depth": [1, 2]}, {"kind": "oracle"}],
            sweep={"batch_size": [1, 2], "depth": 3, "context_len": [None, 64]},
            workload={"output_len": [8, 16], "seed": [0, 1], "prompts": ["builtin", "humaneval"]},
            sampling={"temperature": [0, 1], "top_k": [0, 5], "top_p": [1, 0.5], "min_p": [0, 0.1]},
        )
    )
    arms = [(case.target, case.workload, case.sampling) for case in cases]
    assert len(cases) == 3 * 2 * 2 * 2 * 2 * 2 * 2 * 2 * 2 * 2
    changes = sum(one != other for one, other in pairwise(arms))
    assert changes + 1 == len(set(arms)) == len(cases) // 3
    assert len(set(names(cases))) == len(cases)


def test_the_options_of_a_drafter_are_axes() -> None:
    cases = expand(
        scenario(
            drafters=[
                {"kind": "ngram", "max_ngram": [4, 3], "min_ngram": [1, 2], "rule": ["transformers", "vllm"]},
                {"kind": "draft_model", "model": ["org/a", "/models/b"], "dtype": [None, "fp32"], "revision": "r1"},
                {"kind": "forced", "length": [1.5, 2]},
                {"kind": "forced", "rates": [[0.9, 0.5, 0.25], [1, 1, 1]]},
            ]
        )
    )
    assert [case.drafter.name for case in cases] == [
        "ngram(4)",
        "ngram(4, vllm)",
        "ngram(4, min 2)",
        "ngram(4, min 2, vllm)",
        "ngram(3)",
        "ngram(3, vllm)",
        "ngram(3, min 2)",
        "ngram(3, min 2, vllm)",
        "draft_model(org/a, revision r1)",
        "draft_model(org/a, fp32, revision r1)",
        "draft_model(b, revision r1)",
        "draft_model(b, fp32, revision r1)",
        "forced(1.5)",
        "forced(2)",
        "forced(0.9/0.5/0.25)",
        "forced(1/1/1)",
    ]
    assert cases[3].drafter.option("rule") == "vllm"
    assert cases[-1].drafter.option("rates") == (1, 1, 1)
    assert cases[-1].drafter.option("length") is None
    with pytest.raises(KeyError):
        cases[0].drafter.option("layers")


TREE = [[1], [0], [0, 0], [0, 1]]


def test_a_tree_shows_its_nodes_and_how_its_children_came_about() -> None:
    cases = expand(
        scenario(
            drafters=[
                {"kind": "draft_model", "model": "m", "tree": TREE, "children": ["top", "independent"], "depth": 2},
                {"kind": "early_exit", "layers": 3, "tree": [TREE, [[0], [1]]], "depth": 1},
                {"kind": "forced", "length": 2, "tree": TREE, "depth": 2},
                {"kind": "oracle", "tree": TREE, "depth": 2},
                {"kind": "early_exit", "layers": 3, "children": "top", "depth": 1},
            ]
        )
    )
    assert [case.drafter.name for case in cases] == [
        "draft_model(m, top, tree 4)",
        "draft_model(m, independent, tree 4)",
        "early_exit(3, tree 4)",
        "early_exit(3, tree 2)",
        "forced(2, tree 4)",
        "oracle(tree 4)",
        "early_exit(3, top)",
    ]
    assert cases[0].drafter.option("tree") == ((0,), (1,), (0, 0), (0, 1))
    assert len({case.hash for case in cases}) == 7


def test_a_tree_is_the_same_however_it_is_written_and_the_same_name_gets_a_hash() -> None:
    def run(*trees: list[list[int]]) -> list[Case]:
        return expand(scenario(drafters=[{"kind": "oracle", "tree": list(trees), "depth": 1}]))

    assert run(TREE)[0].hash == run(TREE[::-1])[0].hash
    two = run([[0], [0, 0], [1]], [[0], [1], [0, 0], [2]], [[0], [0, 0], [0, 1]])
    assert [case.drafter.name for case in two] == ["oracle(tree 3)", "oracle(tree 4)", "oracle(tree 3)"]
    assert len(set(names(two))) == 3


def test_rollback_page_size_and_verification_are_axes() -> None:
    cases = expand(
        scenario(
            target={"model": "m", "backend": "triton"},
            sampling={"temperature": 1, "verification": ["token", "block"]},
            kv={"rollback": ["index", "compact", "realloc"], "page_size": [16, 64]},
        )
    )
    assert names(cases[:4]) == [
        "ngram(3) · depth 3 · batch 1 · T 1 · index",
        "ngram(3) · depth 3 · batch 1 · T 1 · block · index",
        "ngram(3) · depth 3 · batch 1 · T 1 · index · page 64",
        "ngram(3) · depth 3 · batch 1 · T 1 · block · index · page 64",
    ]
    assert names(cases)[4] == "ngram(3) · depth 3 · batch 1 · T 1"
    assert len({case.hash for case in cases}) == len(set(names(cases))) == 12
    assert {case.kv for case in filter_cases(cases, ["rollback=realloc", "page_size=64"])} == {KvSpec("realloc", 64)}
    assert {case.axes["verification"] for case in filter_cases(cases, ["verification=block"])} == {"block"}


def test_keys_that_came_later_leave_the_hash_alone() -> None:
    """A case without them is the case it was."""
    assert "kv" not in CASE.content()
    assert CASE.content()["sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    (plain,) = expand(scenario(drafters=[{"kind": "early_exit", "layers": 8}]))
    assert plain.drafter.options == (("layers", 8),)
    paged = dataclasses.replace(CASE, kv=KvSpec("index"))
    assert paged.content()["kv"] == {"rollback": "index"}


def test_none_runs_at_depth_0_and_a_speculative_engine_may() -> None:
    cases = expand(
        scenario(drafters=[{"kind": "none"}, {"kind": "ngram", "depth": [2, 0]}], sweep={"batch_size": 1, "depth": 9})
    )
    assert names(cases) == [
        "none · depth 0 · batch 1 · T 0",
        "ngram(3) · depth 0 · batch 1 · T 0",
        "ngram(3) · depth 2 · batch 1 · T 0",
    ]
    assert len({case.hash for case in cases}) == 3


def test_the_same_point_runs_once() -> None:
    cases = expand(scenario(drafters=[{"kind": "ngram", "depth": [1, 2]}, {"kind": "ngram", "depth": [2, 3]}]))
    assert [case.depth for case in cases] == [1, 2, 3]


def test_names_hold_what_varies_and_nothing_else() -> None:
    one = expand(
        scenario(
            target={"model": "org/m", "dtype": "fp32"},
            workload={
                "output_len": 8,
                "seed": 7,
                "prompts": {"synthetic": {"count": 8, "words": 90, "copy_rate": 0.5}},
            },
            sampling={"temperature": 0.1234567, "top_p": 0.9},
        )
    )
    assert names(one) == ["ngram(3) · depth 3 · batch 1 · T 0.1234567"]
    many = expand(
        scenario(
            target={"model": "/models/m", "dtype": ["fp32", "bf16"]},
            sweep={"depth": 3, "context_len": [None, 64]},
            workload={"prompts": ["builtin", {"synthetic": {"count": 8, "words": 90, "copy_rate": 0.5}}]},
        )
    )
    assert many[0].name == "ngram(3) · depth 3 · batch 1 · T 0 · fp32 · prompts builtin"
    assert many[-1].name.endswith("T 0 · bf16 · context 64 · prompts synthetic(8 × 90 words, copy 0.5)")


def test_names_that_would_be_the_same_carry_the_head_of_the_hash() -> None:
    cases = expand(scenario(target={"model": ["/a/m", "/b/m"]}))
    assert names(cases) == [f"ngram(3) · depth 3 · batch 1 · T 0 · #{case.hash[:8]}" for case in cases]
    assert len(set(names(cases))) == 2


def test_axes_are_those_of_a_row() -> None:
    case = expand(scenario(target={"shape": "llama-3.1-8b", "weights": "dummy"}, sweep={"depth": 3}))[0]
    assert case.axes == {
        "target": "llama-3.1-8b",
        "dtype": "bf16",
        "backend": "auto",
        "drafter": "ngram(3)",
        "drafter_kind": "ngram",
        "depth": 3,
        "batch_size": 1,
        "context_len": None,
        "output_len": 64,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "prompts": "builtin",
        "seed": 0,
        "verification": "token",
        "rollback": "compact",
        "page_size": 16,
        "depth_policy": "fixed",
    }
    assert json.loads(json.dumps(case.axes)) == case.axes


def test_too_many_cases_are_refused_before_they_are_made() -> None:
    with pytest.raises(InputError) as caught:
        expand(
            scenario(
                sweep={"batch_size": list(range(1, 1001)), "depth": list(range(65))},
                workload={"seed": list(range(1000))},
            )
        )
    assert caught.value.message == "the axes make 65000000 cases, more than 10000"
    assert caught.value.remedy


# The hash


VARIED: list[Case] = [
    dataclasses.replace(CASE, target=target)
    for target in (
        TargetSpec("other"),
        TargetSpec(None, "smollm2-135m-instruct"),
        TargetSpec("smollm2-135m-instruct", weights="dummy"),
        TargetSpec("smollm2-135m-instruct", dtype="fp32"),
        TargetSpec("smollm2-135m-instruct", revision="main"),
        TargetSpec("smollm2-135m-instruct", backend="torch"),
        TargetSpec("smollm2-135m-instruct", graphs=False),
    )
]
VARIED += [
    dataclasses.replace(CASE, drafter=drafter)
    for drafter in (
        DrafterSpec("other", CASE.drafter.options),
        DrafterSpec("ngram", (("max_ngram", 4), ("min_ngram", 1), ("rule", "transformers"))),
        DrafterSpec("ngram", (("max_ngram", "3"), ("min_ngram", 1), ("rule", "transformers"))),
        DrafterSpec("ngram", (("max_ngram", None), ("min_ngram", 1), ("rule", "transformers"))),
        DrafterSpec("ngram", (("max_ngram", (3,)), ("min_ngram", 1), ("rule", "transformers"))),
        DrafterSpec("ngram", (("max_ngram", 3), ("min_ngram", 1))),
    )
]
VARIED += [dataclasses.replace(CASE, depth=6), dataclasses.replace(CASE, depth_policy="auto")]
VARIED += [
    dataclasses.replace(CASE, workload=dataclasses.replace(CASE.workload, **change))
    for change in (
        {"context_len": 64},
        {"output_len": 65},
        {"batch_size": 9},
        {"seed": 1},
        {"stop": ("x",)},
        {"ignore_eos": True},
        {"prompts": PromptSpec("humaneval")},
        {"prompts": PromptSpec(categories=("qa",))},
        {"prompts": PromptSpec(categories=("qa", "coding"))},
        {"prompts": PromptSpec(num_prompts=3)},
        {"prompts": PromptSpec(sha256="0" * 64)},
        {"prompts": PromptSpec(synthetic=SyntheticPrompts(8, 90, 0.5))},
        {"prompts": PromptSpec(synthetic=SyntheticPrompts(9, 90, 0.5))},
        {"prompts": PromptSpec(synthetic=SyntheticPrompts(8, 91, 0.5))},
        {"prompts": PromptSpec(synthetic=SyntheticPrompts(8, 90, 0.6))},
    )
]
VARIED += [
    dataclasses.replace(CASE, sampling=law)
    for law in (
        SamplingSpec(temperature=1),
        SamplingSpec(temperature=1e-9),
        SamplingSpec(top_k=1),
        SamplingSpec(top_p=0.5),
        SamplingSpec(min_p=0.5),
        SamplingSpec(verification="block"),
    )
]
VARIED += [dataclasses.replace(CASE, kv=kv) for kv in (KvSpec("index"), KvSpec("realloc"), KvSpec(page_size=32))]


def fields_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_changes_the_hash() -> None:
    hashes = [case.hash for case in (CASE, *VARIED)]
    assert len(set(hashes)) == len(hashes)
    assert all(len(digest) == 64 for digest in hashes)


def test_the_varied_cases_reach_every_field() -> None:
    def changed(path: str) -> set[str]:
        def part(case: Case) -> Any:
            value: Any = case
            for name in filter(None, path.split(".")):
                value = getattr(value, name)
            return value

        base = part(CASE)
        return {
            name
            for name in fields_of(type(base))
            for case in VARIED
            if getattr(part(case), name) != getattr(base, name)
        }

    assert changed("") == fields_of(Case) - {"label"}
    for path in ("target", "drafter", "workload", "workload.prompts", "sampling", "kv"):
        assert changed(path) >= fields_of(type(getattr(CASE, path) if "." not in path else CASE.workload.prompts))


def test_equal_cases_have_equal_hashes() -> None:
    shuffled = DrafterSpec("ngram", tuple(reversed(CASE.drafter.options)))
    same = dataclasses.replace(CASE, drafter=shuffled, sampling=SamplingSpec(0, 0, 1, 0), label=("other",))
    assert same == CASE
    assert same.hash == CASE.hash
    assert dataclasses.replace(CASE, sampling=SamplingSpec(-0.0)).hash == CASE.hash


def test_the_hash_is_pinned() -> None:
    """A change here makes every stored row a stranger: do it knowingly."""
    assert CASE.hash == "9b66731381dac50f6408338faba96418559273a13269f32fe00ea8b9270f8b33"


def test_the_hash_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "from specbench.scenario.cases import *\n"
        "drafter = DrafterSpec('ngram', (('rule', 'transformers'), ('max_ngram', 3), ('min_ngram', 1)))\n"
        "print(Case(TargetSpec('smollm2-135m-instruct'), drafter, 5, Workload(batch_size=8)).hash)\n"
    )
    for seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == CASE.hash


def test_the_hash_does_not_depend_on_how_the_file_is_written(tmp_path: Path) -> None:
    one = """
        name: a
        question: q
        target: {model: m, dtype: fp32}
        drafters: [{kind: forced, rates: [1, 0.5], depth: 2}]
        sampling: {temperature: 1, top_p: 0.001}
    """
    other = """
        measure: {seed: 5, blocks: {max: 30}}
        sampling:
          top_p: 1e-3
          temperature: [1.0]
        drafters:
        - rates: [[1.0, 5e-1]]
          kind: forced
        sweep: {depth: [2]}
        target:
          dtype: [fp32]
          model: m
        question: r
        name: b
    """
    hashes = []
    for text in (one, other):
        path = tmp_path / "s.yaml"
        path.write_text(text)
        hashes += [case.hash for case in expand(load_scenario(path))]
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]


def test_a_prompt_file_counts_by_its_bytes_and_not_by_its_folder(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "p.jsonl" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("{}")

    def run(*files: Path) -> list[Case]:
        return expand(scenario(workload={"prompts": [str(file) for file in files]}))

    first, second = run(paths[0])[0], run(paths[1])[0]
    assert first.hash == second.hash
    assert first.workload.prompts.source == str(paths[0])
    assert first.axes["prompts"] == "p.jsonl"
    assert len(run(*paths)) == 1
    paths[1].write_text("{ }")
    assert run(paths[1])[0].hash != first.hash
    assert len(run(*paths)) == 2


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_canonical_json_keeps_values_and_forgets_order(tree: Any) -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(item) for item in value] if isinstance(value, list) else value

    text = canonical_json(tree)
    assert json.loads(text) == tree
    assert canonical_json(turned(tree)) == text
    assert canonical_json(json.loads(text)) == text


def test_one_and_one_point_nought_are_the_same_but_text_and_truth_are_not() -> None:
    assert canonical_json({"b": 1.0, "a": -0.0}) == '{"a":0,"b":1}' == canonical_json({"a": 0, "b": 1})
    assert len({canonical_json(value) for value in (1, "1", True, None, [1])}) == 5


def test_a_locator_is_what_prompts_are_loaded_by() -> None:
    assert PromptSpec("humaneval").locator(5) == "humaneval"
    made = PromptSpec("synthetic", synthetic=SyntheticPrompts(8, 90, 0.1))
    assert made.locator(5) == "synthetic:count=8,words=90,copy_rate=0.1,seed=5"


# --only


@pytest.fixture
def cases() -> list[Case]:
    return expand(
        scenario(
            target={"model": "m", "dtype": ["bf16", "fp32"]},
            drafters=[{"kind": "ngram", "max_ngram": [3, 4], "rule": "vllm"}, {"kind": "none"}],
            sweep={"batch_size": [1, 4, 8], "depth": [2, 3], "context_len": [None, 64]},
            sampling={"temperature": [0, 0.5]},
        )
    )


def test_filters_narrow(cases: list[Case]) -> None:
    kept = filter_cases(cases, ["drafter=ngram", "batch_size=4, 8", "temperature=5e-1", "context_len=null"])
    assert {case.drafter.kind for case in kept} == {"ngram"}
    assert [case.workload.batch_size for case in kept] == ([4] * 4 + [8] * 4) * 2
    assert {case.sampling.temperature for case in kept} == {0.5}
    assert {case.workload.context_len for case in kept} == {None}
    assert [case for case in cases if case in kept] == kept
    assert filter_cases(cases, []) == cases
    assert names(filter_cases(cases, ["depth=3"])) == [case.name for case in cases if case.depth == 3]


def test_a_drafter_is_meant_by_kind_or_full_name(cases: list[Case]) -> None:
    assert {case.drafter.name for case in filter_cases(cases, ["drafter=ngram"])} == {
        "ngram(3, vllm)",
        "ngram(4, vllm)",
    }
    both = filter_cases(cases, ["drafter=ngram(4, vllm),none"])
    assert {case.drafter.name for case in both} == {"ngram(4, vllm)", "none"}
    assert {case.drafter.kind for case in filter_cases(cases, ["drafter_kind=none"])} == {"none"}


@pytest.mark.parametrize(
    ("filters", "message", "remedy"),
    [
        (["batchsize=4"], "'batchsize' is not an axis", "did you mean batch_size?"),
        (["nonsense=4"], "'nonsense' is not an axis", "target, dtype, backend, drafter"),
        (["batch_size=5"], "no case has batch_size=5", "there is: 1, 4, 8"),
        (["batch_size=4,5"], "no case has batch_size=5", "there is: 1, 4, 8"),
        (["batch_size=four"], "no case has batch_size=four", "there is: 1, 4, 8"),
        (["temperature=nan"], "no case has temperature=nan", "there is: 0, 0.5"),
        (["drafter=eagle"], "no case has drafter=eagle", "ngram(3, vllm), ngram(4, vllm), none"),
        (["context_len=0"], "no case has context_len=0", "there is: null, 64"),
        (["dtype=fp16"], "no case has dtype=fp16", "there is: bf16, fp32"),
        (["drafter=none", "depth=2"], "no case meets all of: drafter=none, depth=2", "drop a filter"),
        (["depth=2", "depth=3"], "'depth' is given twice", "--only depth=VALUE,VALUE"),
        (["depth"], "'depth' is not KEY=VALUE", "--only batch_size=4,8"),
        (["depth="], "'depth=' is not KEY=VALUE", "--only batch_size=4,8"),
        (["=2"], "'' is not an axis", "choose from"),
        (["depth=2,"], "no case has depth=", "there is: 2, 3, 0"),
    ],
)
def test_a_filter_that_fits_nothing_lists_what_there_is(
    cases: list[Case], filters: list[str], message: str, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        filter_cases(cases, filters)
    assert caught.value.message == message
    assert remedy in str(caught.value.remedy)
    assert caught.value.key == "--only"


def test_this_room_runs_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from specbench.scenario.cases import expand\nfrom specbench.scenario.schema import load_scenario\n"
        f"print(len(expand(load_scenario({str(ROOT / 'scenarios' / 'quickstart.yaml')!r}))))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "25"


def test_depth_auto_is_one_case_beside_the_fixed_ones() -> None:
    cases = expand(scenario(sweep={"depth": ["auto", 3, 1]}))
    assert [(case.depth, case.depth_policy) for case in cases] == [(1, "fixed"), (3, "fixed"), (3, "auto")]
    assert cases[2].name == "ngram(3) · depth auto, at most 3 · batch 1 · T 0"
    assert cases[1].hash == expand(scenario(sweep={"depth": 3}))[0].hash, "fixed cases keep their hashes"
    assert len({case.hash for case in cases}) == 3


def test_a_search_begins_each_series_with_one_case() -> None:
    search = {"search": "crossing", "max": 64, "min": 2}
    cases = expand(scenario(sweep={"depth": [1, 3], "batch_size": search}))
    assert [(case.depth, case.workload.batch_size) for case in cases] == [(1, 2), (3, 2)]
    moved = cases[0].at_batch(16)
    assert moved.hash == expand(scenario(sweep={"depth": 1, "batch_size": 16}))[0].hash, "a cell like any other"
    assert moved.name == "ngram(3) · depth 1 · batch 16 · T 0"
