"""The schema: values are converted once, and each refusal names the file, the line, the key and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specbench.errors import InputError
from specbench.scenario.drafter_schema import KINDS, AnyDrafter, DraftModelDrafter, ForcedDrafter
from specbench.scenario.fields import SEED_MAX
from specbench.scenario.schema import Scenario, SyntheticSource, load_scenario, resolve_scenario_path

ROOT = Path(__file__).parent.parent
HEAD = "name: n\nquestion: q?\n"
BASE: dict[str, str] = {
    "target": "{model: smollm2-135m-instruct}",
    "drafters": "[{kind: ngram}]",
    "sweep": "{depth: 3}",
}

Load = Callable[..., Scenario]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a scenario whose sections stand one a line from line 3 on, in the order of BASE and then of `sections`."""

    def write(**sections: str) -> Scenario:
        path = tmp_path / "s.yaml"
        rows = {**BASE, **sections}
        path.write_text(HEAD + "".join(f"{key}: {value}\n" for key, value in rows.items()))
        return load_scenario(path)

    return write


def line_of(section: str) -> int:
    return 3 + [*BASE, section].index(section)


def refused(load: Load, **sections: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load(**sections)
    assert str(caught.value.file).endswith("s.yaml")
    assert caught.value.line is not None
    assert caught.value.remedy
    return caught.value


def test_the_smallest_scenario_has_its_defaults_filled_in(load: Load) -> None:
    scenario = load()
    assert scenario.to_dict() == {
        "name": "n",
        "question": "q?",
        "target": {
            "model": ["smollm2-135m-instruct"],
            "shape": None,
            "weights": None,
            "dtype": ["bf16"],
            "revision": None,
            "backend": ["auto"],
            "graphs": None,
        },
        "drafters": [
            {
                "kind": "ngram",
                "depth": None,
                "max_depth": None,
                "max_ngram": [3],
                "min_ngram": [1],
                "rule": ["transformers"],
                "branches": [1],
                "nodes": [None],
            },
        ],
        "sweep": {"batch_size": [1], "depth": [3], "max_depth": None, "context_len": [None]},
        "workload": {
            "prompts": ["builtin"],
            "categories": None,
            "output_len": [64],
            "num_prompts": None,
            "seed": [0],
            "stop": [],
            "ignore_eos": False,
        },
        "sampling": {
            "temperature": [0.0],
            "top_k": [0],
            "top_p": [1.0],
            "min_p": [0.0],
            "verification": ["token"],
        },
        "kv": {"rollback": ["compact"], "page_size": [16]},
        "measure": {
            "blocks": {"min": 5, "max": 12},
            "warmup": {"min": 1, "max": 5, "tolerance": 0.1},
            "target_interval": 0.04,
            "budget_s": None,
            "seed": 0,
            "canary": "self",
        },
        "compare": None,
    }


TWO = "[{kind: eagle}, {kind: ngram}]"


def test_two_kinds_of_drafters_are_compared(load: Load) -> None:
    scenario = load(drafters=TWO, compare="{drafters: [eagle, ngram], claim: 1.25}")
    assert scenario.to_dict()["compare"] == {"drafters": ["eagle", "ngram"], "claim": 1.25}
    assert Scenario.from_dict(scenario.to_dict()) == scenario


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("{drafters: [eagle, mtp]}", "compare.drafters[1]", "no drafter is of kind mtp"),
        ("{drafters: [eagle, eagel]}", "compare.drafters[1]", "'eagel' is not known"),
        ("{drafters: [eagle]}", "compare.drafters", "names 1, and two are compared"),
        ("{drafters: [eagle, eagle]}", "compare.drafters[1]", "twice"),
        ("{drafters: [eagle, ngram], claim: 0}", "compare.claim", "out of range"),
        ("{drafters: [eagle, ngram], claims: 1.2}", "compare.claims", "not a known key"),
        ("[eagle, ngram]", "compare", "must be a mapping"),
    ],
)
def test_a_comparison_that_can_not_be_made_is_refused(load: Load, text: str, key: str, says: str) -> None:
    error = refused(load, drafters=TWO, compare=text)
    assert (error.key, error.line) == (key, line_of("compare"))
    assert says in error.message
    if key == "compare.claims":
        assert "did you mean claim?" in str(error.remedy)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3", (0.001,)),
        ("1.0e3", None),
        ("1.0e0", (1.0,)),
        ("1E0", (1.0,)),
        ("[1e-3, .5, 0.7, 1., +2, -0.0]", (0.001, 0.5, 0.7, 1.0, 2.0, 0.0)),
    ],
)
def test_numbers_that_yaml_reads_as_text_are_converted(load: Load, text: str, values: tuple[float, ...] | None) -> None:
    if values is None:  # 1000 is read as a number, and is then out of range
        assert "1.0e3 is out of range" in refused(load, sampling=f"{{temperature: {text}}}").message
        return
    temperatures = load(sampling=f"{{temperature: {text}}}").sampling.temperature
    assert temperatures == values
    assert all(type(value) is float for value in temperatures)
    assert "-" not in str(temperatures[-1])


TRAPS = [
    ("sweep", "{depth: 010}", "sweep.depth", "octal: 8", "write 10 or 8"),
    ("sweep", "{depth: -010}", "sweep.depth", "octal: -8", "write -10 or -8"),
    ("sweep", "{depth: 08}", "sweep.depth", "reads 08 as text", "write 8"),
    ("sweep", "{depth: 0o10}", "sweep.depth", "the text '0o10'", "decimal"),
    ("sweep", "{depth: 0x8}", "sweep.depth", "the number 8", "write 8"),
    ("sweep", "{depth: 1_0}", "sweep.depth", "the number 10", "write 10"),
    ("sweep", "{depth: 0b11}", "sweep.depth", "the number 3", "write 3"),
    ("sweep", "{depth: 0x_}", "sweep.depth", "it can't make", "decimal"),
    ("workload", "{output_len: 12:30}", "workload.output_len", "750 (base 60)", "write 750"),
    ("sampling", "{temperature: 1:30.5}", "sampling.temperature", "90.5 (base 60)", "write 90.5"),
    ("sampling", "{temperature: 00.5}", "sampling.temperature", "leading zero", "write 0.5"),
    ("sweep", "{depth: no}", "sweep.depth", "reads no as false", "write a number"),
    ("sweep", "{depth: yes}", "sweep.depth", "reads yes as true", "write a number"),
    ("sweep", "{depth: 2001-01-01}", "sweep.depth", "reads 2001-01-01 as a date", "write a number"),
    ("sweep", "{depth: 2001-99-99}", "sweep.depth", "reads 2001-99-99 as a date", "write a number"),
    ("sweep", '{depth: "3"}', "sweep.depth", "quoted text '3'", "without quotes"),
    ("sweep", "{depth: 3.0}", "sweep.depth", "a whole number, not 3.0", "0..64"),
    ("sweep", "{depth: 1e1}", "sweep.depth", "a whole number, not 1e1", "0..64"),
    ("sweep", "{depth: {a: 1}}", "sweep.depth", "not a mapping", "0..64"),
    ("sweep", "{depth: [[1]]}", "sweep.depth[0]", "not a list", "0..64"),
    ("sweep", "{batch_size: , depth: 1}", "sweep.batch_size", "not an empty value", "1..4096"),
    ("target", "{model: no}", "target.model", "reads no as false", 'quote it: "no"'),
    ("target", "{model: On}", "target.model", "reads On as true", 'quote it: "On"'),
    ("target", "{model: 123}", "target.model", "the number 123", 'quote it: "123"'),
    ("target", "{model: 2001-01-01}", "target.model", "a date", "quote it"),
    ("target", '{model: ""}', "target.model", "is empty", "printed"),
    ("target", '{model: "a\\0b"}', "target.model", "control character", "printed"),
    ("target", "{model: m, revision: 010}", "target.revision", "the number 8", "quote it"),
    ("workload", "{ignore_eos: 1}", "workload.ignore_eos", "true or false, not '1'", "write true or false"),
    ("workload", '{ignore_eos: "true"}', "workload.ignore_eos", "true or false", "write true or false"),
]


@pytest.mark.parametrize(("section", "text", "key", "message", "remedy"), TRAPS)
def test_yaml_traps_say_what_yaml_read(
    load: Load, section: str, text: str, key: str, message: str, remedy: str
) -> None:
    error = refused(load, **{section: text})
    assert (error.key, error.line) == (key, line_of(section))
    assert message in error.message
    assert remedy in str(error.remedy)


LIMITS: list[tuple[str, str, list[str], list[str]]] = [
    ("sweep", "batch_size: {}, depth: 1", ["1", "4096"], ["0", "4097", "-1"]),
    ("sweep", "depth: {}", ["0", "64"], ["-1", "65", "9" * 60, "-" + "9" * 60]),
    ("sweep", "context_len: {}, depth: 1", ["1", "10000000", "null"], ["0", "10000001"]),
    ("workload", "output_len: {}", ["1", "100000"], ["0", "100001"]),
    ("workload", "num_prompts: {}", ["1", "null"], ["0", "1000001"]),
    ("workload", "seed: {}", ["0", str(SEED_MAX)], ["-1", str(SEED_MAX + 1)]),
    ("sampling", "temperature: {}", ["0", "10"], ["-0.1", "10.1", ".nan", "nan", ".inf", "-.inf", "inf", "1e999"]),
    ("sampling", "top_k: {}", ["0", "1000000"], ["-1", "1000001"]),
    ("sampling", "top_p: {}", ["1e-9", "1"], ["0", "1.01", ".NaN"]),
    ("sampling", "min_p: {}", ["0", "0.999"], ["1", "-0.1"]),
    ("measure", "seed: {}", ["0", str(SEED_MAX)], ["-1", str(SEED_MAX + 1)]),
    ("measure", "budget_s: {}", ["0.5", "null"], ["0", "1e7"]),
    ("measure", "target_interval: {}", ["0.04", "1"], ["0", "1.5"]),
    ("measure", "blocks: {{min: {}}}", ["1", "12"], ["0", "13"]),
    ("measure", "blocks: {{max: {}}}", ["5", "1000"], ["4", "1001"]),
    ("measure", "warmup: {{min: {}}}", ["1", "5"], ["0", "6"]),
    ("measure", "warmup: {{tolerance: {}}}", ["0.1"], ["0", "2"]),
    ("drafters", "kind: ngram, max_ngram: {}", ["1", "64"], ["0", "65"]),
    ("drafters", "kind: ngram, min_ngram: {}", ["1", "3"], ["0", "4"]),
    ("drafters", "kind: early_exit, layers: {}", ["1", "1000"], ["0", "1001"]),
    ("drafters", "kind: forced, length: {}", ["1", "4"], ["0.9", "4.1", ".nan"]),
    ("drafters", "kind: forced, rates: [1, 1, {}]", ["0", "1"], ["-0.1", "1.1", ".nan"]),
    ("drafters", "kind: ngram, depth: {}", ["0", "64"], ["65", "-1"]),
    ("workload", "prompts: {{synthetic: {{count: 1, words: 16, copy_rate: {}}}}}", ["0", "1"], ["-0.1", "1.1"]),
    ("workload", "prompts: {{synthetic: {{count: {}, words: 16, copy_rate: 0}}}}", ["1"], ["0", "100001"]),
    ("workload", "prompts: {{synthetic: {{count: 1, words: {}, copy_rate: 0}}}}", ["16"], ["15", "1000001"]),
]


@pytest.mark.parametrize(("section", "text", "good", "bad"), LIMITS)
def test_limits(load: Load, section: str, text: str, good: list[str], bad: list[str]) -> None:
    for value in good:
        load(**{section: "{" + text.format(value) + "}"})
    for value in bad:
        error = refused(load, **{section: "{" + text.format(value) + "}"})
        assert error.line == line_of(section)
        assert error.key is not None
        assert error.key.startswith(section)
        assert any(word in error.message for word in ("out of range", "finite", "above", "can't be had")), error


def test_a_range_is_named_in_the_remedy(load: Load) -> None:
    assert "1..4096" in str(refused(load, sweep="{batch_size: 0, depth: 1}").remedy)
    assert "(0, 1]" in str(refused(load, sampling="{top_p: 0}").remedy)
    assert "[0, 1)" in str(refused(load, sampling="{min_p: 1}").remedy)
    assert "[0, 10]" in str(refused(load, sampling="{temperature: 11}").remedy)


def test_one_value_and_a_list_of_one_are_the_same(load: Load) -> None:
    assert load(sweep="{batch_size: 4, depth: 3}") == load(sweep="{batch_size: [4], depth: [3]}")
    assert load(drafters="{kind: ngram}") == load(drafters="[{kind: ngram}]")


def test_anything_may_be_a_list(load: Load) -> None:
    scenario = load(
        target="{model: [a, b], dtype: [bf16, fp32], backend: [torch, triton]}",
        drafters="[{kind: ngram, max_ngram: [3, 4], min_ngram: [1, 2], rule: [vllm, transformers], depth: [1, 2]}, "
        "{kind: early_exit, layers: [4, 8]}, {kind: draft_model, model: [x, y], dtype: [null, fp32]}, "
        "{kind: forced, length: [1.5, 2.5]}, {kind: forced, rates: [[0.9, 0.8, 0.7], [0.5, 0.5, 0.5]]}]",
        sweep="{batch_size: [1, 2], depth: [2, 3], context_len: [null, 512]}",
        workload="{prompts: [builtin, {synthetic: {count: 8, words: 100, copy_rate: 0.5}}, ./p.jsonl], "
        "output_len: [8, 16], seed: [0, 1]}",
        sampling="{temperature: [0, 1], top_k: [0, 50], top_p: [1, 0.9], min_p: [0, 0.1]}",
    )
    assert scenario.target.dtype == ("bf16", "fp32")
    assert isinstance(scenario.workload.prompts[1], SyntheticSource)
    forced = scenario.drafters[4]
    assert isinstance(forced, ForcedDrafter)
    assert forced.rates == ((0.9, 0.8, 0.7), (0.5, 0.5, 0.5))
    assert scenario.sweep.context_len == (None, 512)


def test_a_curve_of_rates_is_one_value(load: Load) -> None:
    forced = load(drafters="[{kind: forced, rates: [0.9, 0.5, 0.5]}]").drafters[0]
    assert isinstance(forced, ForcedDrafter)
    assert forced.rates == ((0.9, 0.5, 0.5),)
    assert forced.options == {"tree": (None,), "length": (None,), "rates": ((0.9, 0.5, 0.5),)}


TREE = "[[0], [1], [0, 0], [0, 1]]"


def test_one_tree_is_a_list_of_paths_and_an_axis_a_list_of_trees(load: Load) -> None:
    sweep = "{depth: 2}"
    ordered = ((0,), (1,), (0, 0), (0, 1))
    for text in (TREE, f"[{TREE}]", "[[0, 1], [1], [0, 0], [0]]"):
        drafter = load(drafters=f"[{{kind: oracle, tree: {text}}}]", sweep=sweep).drafters[0]
        assert drafter.options == {"tree": (ordered,)}
    two = load(drafters=f"[{{kind: early_exit, layers: 2, tree: [{TREE}, [[0], [0, 0]]]}}]", sweep=sweep)
    assert two.drafters[0].options["tree"] == (ordered, ((0,), (0, 0)))
    assert two.drafters[0].options["children"] == (None,)
    assert Scenario.from_dict(json.loads(json.dumps(two.to_dict()))) == two
    drawn = load(drafters=f"[{{kind: draft_model, model: m, tree: {TREE}, children: [top, independent]}}]", sweep=sweep)
    assert drawn.drafters[0].options["children"] == ("top", "independent")


LONG = "[" + ", ".join(f"[{rank}]" for rank in range(127)) + ", [0, 0]]"


@pytest.mark.parametrize(
    ("tree", "key", "message", "remedy"),
    [
        ("[]", "tree", "the list is empty", "at least one"),
        ("12", "tree", "must be a list of paths, not '12'", "[[0], [1], [0, 0]]"),
        ("[[1]]", "tree", "[1] has no sibling before it", "add [0]"),
        ("[[0], [0, 0, 0]]", "tree", "[0, 0, 0] has no parent", "add [0, 0]"),
        ("[[0], [0, 1]]", "tree", "[0, 1] has no sibling before it", "add [0, 0]"),
        ("[[0], [1], [0]]", "tree", "[0] stands here twice", "keep each path once"),
        ("[[0], [-1]]", "tree[1]", "out of range", "0..126"),
        ("[[0], [x]]", "tree[1]", "must be a number", "decimal number"),
        ("[[0], []]", "tree[1]", "the list is empty", "at least one"),
        ("[[[0], [0, 0], [0, 0, 0]], [[0], []]]", "tree[1][1]", "the list is empty", "at least one"),
        (LONG, "tree", "a tree of 128 nodes", "at most 127"),
        ("[[0], [1], [1, 0], [1, 0, 0]]", "tree", "the first children end at level 1 of 3", "add [0, 0]"),
        ("[[0]]", "tree", "has 1 levels, and depth reaches 3", "depths up to 1"),
    ],
)
def test_what_is_no_tree_is_refused_by_its_path(load: Load, tree: str, key: str, message: str, remedy: str) -> None:
    error = refused(load, drafters=f"[{{kind: oracle, tree: {tree}}}]")
    assert str(error.key).startswith(f"drafters[0].{key}")
    assert message in error.message
    assert remedy in str(error.remedy)


def test_drafters_without_trees_know_no_such_key(load: Load) -> None:
    assert "known key" in refused(load, drafters=f"[{{kind: ngram, tree: {TREE}}}]").message
    assert "known key" in refused(load, drafters=f"[{{kind: oracle, tree: {TREE}, children: top}}]").message
    error = refused(load, drafters=f"[{{kind: early_exit, layers: 2, tree: {TREE}, children: best, depth: 1}}]")
    assert "top, independent, without_replacement" in str(error.remedy)


def test_pages_of_other_sizes_need_triton(load: Load) -> None:
    assert load(kv="{rollback: [index, realloc]}").kv.rollback == ("index", "realloc")
    paged = load(target="{model: m, backend: [torch, triton]}", kv="{page_size: [16, 32]}")
    assert paged.kv.page_size == (16, 32)
    for target, kv, message in (
        ("{model: m}", "{page_size: 32}", "pages of 32 tokens need backend triton"),
        ("{model: m, backend: triton}", "{page_size: [16, 48]}", "pages of 48 tokens are not to be had"),
        ("{model: m, backend: triton}", "{page_size: 0}", "out of range"),
        ("{model: m}", "{rollback: copy}", "'copy' is not known"),
        ("{model: m}", "{pages: 16}", "not a known key"),
    ):
        error = refused(load, target=target, kv=kv)
        assert message in error.message
        assert str(error.key).startswith("kv")
    assert "token, greedy, chain, block" in str(refused(load, sampling="{verification: tree}").remedy)


@pytest.mark.parametrize(
    ("section", "text", "key"),
    [
        ("sweep", "{batch_size: [], depth: 1}", "sweep.batch_size"),
        ("sweep", "{depth: []}", "sweep.depth"),
        ("drafters", "[]", "drafters"),
        ("target", "{model: []}", "target.model"),
        ("sampling", "{temperature: []}", "sampling.temperature"),
        ("workload", "{prompts: []}", "workload.prompts"),
        ("workload", "{categories: []}", "workload.categories"),
        ("drafters", "[{kind: forced, rates: []}]", "drafters[0].rates"),
        ("drafters", "[{kind: forced, rates: [[], [1]]}]", "drafters[0].rates[0]"),
    ],
)
def test_an_empty_axis_is_refused(load: Load, section: str, text: str, key: str) -> None:
    error = refused(load, **{section: text})
    assert error.key == key
    assert "the list is empty" in error.message
    assert "at least one" in str(error.remedy)


@pytest.mark.parametrize(
    ("section", "text", "key"),
    [
        ("sweep", "{batch_size: [1, 2, 1], depth: 1}", "sweep.batch_size[2]"),
        ("sampling", "{temperature: [0, 1, 0.0]}", "sampling.temperature[2]"),
        ("sampling", "{temperature: [1e-3, 0.001]}", "sampling.temperature[1]"),
        ("target", "{model: [a, a]}", "target.model[1]"),
        ("drafters", "[{kind: ngram}, {kind: ngram, max_ngram: 3}]", "drafters[1]"),
        ("drafters", "[{kind: forced, rates: [[1, 1, 1], [1, 1, 1.0]]}]", "drafters[0].rates[1]"),
        ("workload", "{categories: [qa, qa]}", "workload.categories[1]"),
        ("workload", "{prompts: [builtin, builtin]}", "workload.prompts[1]"),
        ("workload", "{stop: [x, x]}", "workload.stop[1]"),
    ],
)
def test_a_value_stands_once_in_an_axis(load: Load, section: str, text: str, key: str) -> None:
    error = refused(load, **{section: text})
    assert error.key == key
    assert "twice" in error.message


@pytest.mark.parametrize(
    ("section", "text", "key", "message", "remedy"),
    [
        ("target", "{modle: m}", "target.modle", "not a known key", "did you mean model?"),
        ("sweep", "{depht: 1}", "sweep.depht", "not a known key", "did you mean depth?"),
        ("workload", "{outputlen: 1}", "workload.outputlen", "not a known key", "did you mean output_len?"),
        ("sampling", "{temp: 1}", "sampling.temp", "not a known key", "temperature, top_k, top_p, min_p"),
        ("measure", "{blocks: {mni: 1}}", "measure.blocks.mni", "not a known key", "did you mean min?"),
        ("workload", "{prompts: {synthetic: {word: 1}}}", "workload.prompts.synthetic.word", "known", "mean words?"),
        ("workload", "{prompts: {synthtic: 1}}", "workload.prompts.synthtic", "known", "did you mean synthetic?"),
        ("drafters", "[{kind: ngram, nmax: 1}]", "drafters[0].nmax", "known", "max_ngram, min_ngram, rule"),
        ("drafters", "[{kind: oracle, layers: 1}]", "drafters[0].layers", "known", "choose from: kind, depth"),
        ("mesure", "{}", "mesure", "not a known key", "did you mean measure?"),
        ("drafters", "[{kind: eagle9}]", "drafters[0].kind", "'eagle9' is not a drafter", ", ".join(KINDS)),
        ("drafters", "[{kind: ngrm}]", "drafters[0].kind", "'ngrm' is not a drafter", "did you mean ngram?"),
        ("drafters", "[{kind: no}]", "drafters[0].kind", "reads no as false", ", ".join(KINDS)),
        ("drafters", "[{kind: null}]", "drafters[0].kind", "an empty value", ", ".join(KINDS)),
        ("drafters", "[{kind: [ngram]}]", "drafters[0].kind", "not a list", ", ".join(KINDS)),
        ("drafters", "[{depth: 1}]", "drafters[0]", "has no kind", ", ".join(KINDS)),
        ("drafters", "[ngram]", "drafters[0]", "not 'ngram'", "kind: ngram"),
        ("drafters", "[{kind: early_exit}]", "drafters[0].layers", "is missing", "add layers"),
        ("drafters", "[{kind: draft_model}]", "drafters[0].model", "is missing", "add model"),
        ("drafters", "[{kind: none, depth: 2}]", "drafters[0].depth", "drafts nothing", "drop depth"),
        ("drafters", "[{kind: forced}]", "drafters[0]", "either length or rates", "length: 2.5"),
        ("drafters", "[{kind: forced, length: 2, rates: [1, 1, 1]}]", "drafters[0]", "not both", "length: 2.5"),
        (
            "drafters",
            "[{kind: forced, rates: [1, 1], depth: [1, 3]}]",
            "drafters[0].rates",
            "2 rates, and depth reaches 3",
            "each",
        ),
        ("drafters", "[{kind: forced, length: 3, depth: [1, 4]}]", "drafters[0].length", "at depth 1", "here 2"),
        ("drafters", "[{kind: ngram, min_ngram: [1, 4]}]", "drafters[0].min_ngram", "above max_ngram 3", "at or below"),
        ("drafters", "[{kind: ngram, rule: vlm}]", "drafters[0].rule", "not known", "did you mean vllm?"),
        ("target", "{model: m, dtype: float16}", "target.dtype", "not known", "fp32, bf16, fp16, fp64"),
        ("target", "{model: m, backend: cuda}", "target.backend", "not known", "auto, torch, cpu, triton"),
        ("target", "{model: m, shape: s}", "target", "not both", "weights: dummy"),
        ("target", "{dtype: bf16}", "target", "either model or shape", "model: NAME"),
        ("target", "{shape: s}", "target.shape", "no weights of its own", "add weights: dummy"),
        ("target", "{model: m, weights: dummy}", "target.weights", "brings its own", "drop weights"),
        ("target", "{shape: s, weights: dummy, revision: r}", "target.revision", "no revision", "drop"),
        ("target", "{model: m, revision: [a, b]}", "target.revision", "not a list", "one word"),
        ("target", "word", "target", "must be a mapping, not 'word'", "model, shape"),
        ("target", "", "target", "not an empty value", "model, shape"),
        ("measure", "[1]", "measure", "not a list", "blocks"),
        ("sweep", "{batch_size: 1}", "drafters[0]", "has no depth", "sweep.depth"),
        ("sweep", "{depth: auro}", "sweep.depth", "not the text 'auro'", "or auto"),
        ("sweep", "{depth: [3, 65]}", "sweep.depth[1]", "out of range", "0..64, or auto"),
        ("sweep", "{depth: 3, max_depth: 4}", "sweep.max_depth", "belongs to depth auto", "depth: auto"),
        ("sweep", "{depth: auto, max_depth: 0}", "sweep.max_depth", "out of range", "1..64"),
        ("sweep", "{depth: 3, batch_size: {search: crossing}}", "sweep.batch_size.max", "is missing", "add max"),
        (
            "sweep",
            "{depth: 3, batch_size: {search: cross, max: 8}}",
            "sweep.batch_size.search",
            "not known",
            "crossing",
        ),
        (
            "sweep",
            "{depth: 3, batch_size: {search: crossing, max: 1}}",
            "sweep.batch_size.max",
            "out of range",
            "2..4096",
        ),
        (
            "sweep",
            "{depth: 3, batch_size: {search: crossing, min: 8, max: 8}}",
            "sweep.batch_size.max",
            "min 8 is not below",
            "larger max",
        ),
        (
            "sweep",
            "{depth: 3, batch_size: {search: crossing, max: 8, mix: 2}}",
            "sweep.batch_size.mix",
            "not a known key",
            "choose from: search, max, min",
        ),
        (
            "sweep",
            "{depth: [0, 3], batch_size: {search: crossing, max: 8}}",
            "drafters[0]",
            "no crossing to search",
            "list of batch sizes",
        ),
        ("drafters", "[{kind: none}, {kind: ngram, depth: 3, max_depth: 3}]", "drafters[1].max_depth", "auto", "drop"),
        ("drafters", "[{kind: none, depth: auto}]", "drafters[0].depth", "drafts nothing", "drop depth"),
        ("sweep", "{batch_size: {from: 1}}", "sweep.batch_size", "not a mapping", "1..4096"),
        ("workload", "{prompts: bultin}", "workload.prompts", "not known", "did you mean builtin?"),
        ("workload", "{prompts: synthetic}", "workload.prompts", "need their settings", "copy_rate"),
        ("workload", "{prompts: {synthetic: 3}}", "workload.prompts.synthetic", "must be a mapping", "count, words"),
        ("workload", '{stop: [""]}', "workload.stop[0]", "is empty", "printed"),
    ],
)
def test_refusals_name_line_key_and_remedy(
    load: Load, section: str, text: str, key: str, message: str, remedy: str
) -> None:
    error = refused(load, **{section: text})
    assert error.key == key
    assert error.line == line_of(key.split(".")[0].split("[")[0])
    assert message in error.message
    assert remedy in str(error.remedy)


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "-x", "a/b", "x" * 81])
def test_a_name_must_be_able_to_name_a_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"name: '{name}'\nquestion: q\ntarget: {{model: m}}\ndrafters: {{kind: none}}\n")
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    assert (caught.value.line, caught.value.key) == (1, "name")


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("# c\nname: n\n")
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    assert (caught.value.file, caught.value.line, caught.value.key) == (path, 2, "question")
    assert "target: is missing" in str(caught.value)
    assert "drafters: is missing" in str(caught.value)


def test_lines_are_those_of_the_value_not_of_its_section(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: n\nquestion: >\n  a long\n  question\ntarget:\n  model: m\n  dtype:\n    - bf16\n    - bf17\n"
        "drafters:\n  - kind: ngram\n    depth: 1\n    rules: vllm\n  - kind: early_exit\n    depth: 1\n"
        "  - kind: forced\n    depth: 2\n    rates: [1,\n      2]\n"
    )
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    first, *rest = [row for row in str(caught.value).splitlines() if row.startswith(str(path))]
    assert first.startswith(f"{path}:9: target.dtype[1]: ")
    assert [row.removeprefix(f"{path}:").split(": ")[:2] for row in rest] == [
        ["13", "drafters[0].rules"],
        ["14", "drafters[1].layers"],
        ["19", "drafters[2].rates[1]"],
    ]
    assert str(caught.value).count("remedy: ") == 4


def test_a_folded_question_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("name: n\nquestion: |\n  a long\n  question\ntarget: {model: m}\ndrafters: {kind: none}\n")
    assert load_scenario(path).question == "a long question"


def test_many_errors_are_cut(load: Load) -> None:
    error = refused(load, sampling="{" + ", ".join(f"key{i}: 1" for i in range(30)) + "}")
    assert "... and 10 more" in str(error)
    assert str(error).count("is not a known key") == 20


def test_models_are_frozen_and_read_no_other_key(load: Load) -> None:
    scenario = load()
    with pytest.raises(ValidationError, match="frozen"):
        scenario.sweep.batch_size = (2,)  # type: ignore[misc]
    with pytest.raises(InputError, match="not a known key"):
        Scenario.from_dict({**scenario.to_dict(), "extra": 1})


def test_the_dict_reads_back_the_same(load: Load) -> None:
    scenario = load(
        drafters="[{kind: none}, {kind: oracle, depth: [0, 2]}, {kind: forced, rates: [0.5, 0.25, 0.125]}, "
        "{kind: draft_model, model: x}, {kind: early_exit, layers: 3}]",
        workload='{prompts: [humaneval, {synthetic: {count: 8, words: 100, copy_rate: 1}}], stop: "\\n\\n", '
        "categories: qa, ignore_eos: yes, num_prompts: 7}",
        measure="{budget_s: 1e1}",
    )
    assert scenario.workload.stop == ("\n\n",)
    assert scenario.workload.ignore_eos is True
    assert scenario.measure.budget_s == 10
    data = json.loads(json.dumps(scenario.to_dict(), allow_nan=False))
    assert Scenario.from_dict(data) == scenario
    assert yaml.safe_load(yaml.safe_dump(data)) == data


def repr_of(value: object) -> str:
    return "huge" if isinstance(value, int) and value > 10**300 else type(value).__name__


@pytest.mark.parametrize(
    "value", [True, 10**400, 10**5000, float("nan"), float("inf"), "1", None, {}, object()], ids=repr_of
)
def test_python_values_are_held_to_the_same_rules(load: Load, value: object) -> None:
    for section, key in (("sweep", "depth"), ("sampling", "temperature"), ("sampling", "top_k")):
        data: dict[str, Any] = load().to_dict()
        data[section][key] = [value]
        with pytest.raises(InputError) as caught:
            Scenario.from_dict(data)
        assert caught.value.key == f"{section}.{key}[0]"
        assert caught.value.line is None
        assert str(caught.value.remedy).startswith("write a ")


def test_relative_paths_resolve_beside_the_scenario_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (beside, working, beside / "model", working / "model", working / "draft"):
        folder.mkdir(exist_ok=True)
    for name in ("both.jsonl", "smollm2-135m-instruct", "builtin"):
        (beside / name).write_text("")
    (working / "both.jsonl").write_text("")
    (working / "here.jsonl").write_text("")
    path = beside / "s.yaml"
    path.write_text(
        "name: n\nquestion: q\ntarget: {model: [model, smollm2-135m-instruct, org/hub]}\n"
        "drafters: {kind: draft_model, model: draft, depth: 1}\n"
        "workload: {prompts: [both.jsonl, here.jsonl, absent.jsonl, builtin]}\n"
    )
    monkeypatch.chdir(working)
    scenario = load_scenario(path)
    assert scenario.target.model == (str(beside / "model"), "smollm2-135m-instruct", "org/hub")
    drafter = scenario.drafters[0]
    assert isinstance(drafter, DraftModelDrafter)
    assert drafter.model == (str(working / "draft"),)
    assert scenario.workload.prompts == (
        str(beside / "both.jsonl"),
        str(working / "here.jsonl"),
        "absent.jsonl",
        "builtin",
    )


def test_a_shipped_scenario_is_found_where_there_is_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "quickstart.yaml").write_text("shipped")
    monkeypatch.chdir(tmp_path)
    given = Path("scenarios/quickstart.yaml")

    def files(name: str) -> Path:
        assert name == "specbench.scenarios"
        return package

    monkeypatch.setattr("specbench.scenario.schema.resources.files", files)
    assert resolve_scenario_path(given) == package / "quickstart.yaml"
    for other in ("quickstart.yaml", "scenarios/absent.yaml", "a/scenarios/quickstart.yaml"):
        assert resolve_scenario_path(other) == Path(other)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / given).write_text("own")
    assert resolve_scenario_path(given) == given

    def absent(name: str) -> Path:
        raise ModuleNotFoundError(name)

    (tmp_path / given).unlink()
    monkeypatch.setattr("specbench.scenario.schema.resources.files", absent)
    assert resolve_scenario_path(given) == given
    with pytest.raises(InputError, match="no such file"):
        load_scenario(given)


def test_the_registry_and_the_union_name_the_same_kinds() -> None:
    union = AnyDrafter.__origin__  # type: ignore[attr-defined]
    assert {member.__origin__ for member in union.__args__} == set(KINDS.values())
    assert all(set(cls.model_fields["kind"].annotation.__args__) == {kind} for kind, cls in KINDS.items())  # type: ignore[union-attr]


def test_quickstart_loads() -> None:
    scenario = load_scenario(ROOT / "scenarios" / "quickstart.yaml")
    assert scenario.name == "quickstart"
    assert [drafter.kind for drafter in scenario.drafters] == ["ngram", "eagle", "oracle"]
    assert scenario.sweep.batch_size == (1, 2, 4, 8, 16)
    assert scenario.workload.categories == ("editing", "coding", "qa", "writing")
    assert (scenario.measure.blocks.min, scenario.measure.blocks.max) == (3, 8)


QUICKSTART = (ROOT / "scenarios" / "quickstart.yaml").read_text()
JUNK = st.sampled_from(
    ["", "[]", "{}", "no", "010", "12:30", "1e-3", ".nan", "~", "[1, 1]", "-1", "*x", "\t", '"', "ngram"],
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_scenario_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    words = QUICKSTART.split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(JUNK | st.text(max_size=6))
    path = tmp_path / "s.yaml"
    path.write_text(" ".join(words), encoding="utf-8", errors="replace")
    try:
        scenario = load_scenario(path)
    except InputError as error:
        fault = error
    else:
        assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario
        return
    assert fault.file == path
    assert fault.remedy


# ---- depth auto, and batch sizes that are searched


def scenario_of(drafters: list[dict], **sweep: object) -> Scenario:
    return Scenario.from_dict(
        {"name": "n", "question": "q?", "target": {"model": "m"}, "drafters": drafters, "sweep": sweep}
    )


@pytest.mark.parametrize(
    ("drafter", "sweep", "levels"),
    [
        ({"kind": "ngram"}, {"depth": "auto"}, 5),
        ({"kind": "ngram"}, {"depth": ["auto"], "max_depth": 7}, 7),
        ({"kind": "ngram"}, {"depth": [1, 4, "auto"]}, 4),
        ({"kind": "ngram"}, {"depth": [0, "auto"]}, 5),
        ({"kind": "ngram", "max_depth": 9}, {"depth": [1, "auto"], "max_depth": 7}, 9),
        ({"kind": "ngram", "depth": ["auto", 2]}, {"depth": 3}, 2),
        ({"kind": "medusa"}, {"depth": "auto"}, 3),
        ({"kind": "forced", "rates": [0.8, 0.6]}, {"depth": "auto"}, 2),
        ({"kind": "oracle", "tree": [[0], [0, 0]]}, {"depth": "auto"}, 2),
    ],
)
def test_how_deep_auto_may_go(drafter: dict, sweep: dict, levels: int) -> None:
    read = scenario_of([drafter], **sweep)
    points = read.depth_points(read.drafters[0])
    assert points[-1] == (levels, "auto")
    assert [point.policy for point in points[:-1]] == ["fixed"] * (len(points) - 1)
    assert Scenario.from_dict(read.to_dict()) == read


def test_options_are_checked_at_the_depth_that_auto_reaches() -> None:
    with pytest.raises(InputError, match="2 rates, and depth reaches 4"):
        scenario_of([{"kind": "forced", "rates": [0.8, 0.6]}], depth="auto", max_depth=4)


def test_a_search_is_kept_in_the_manifest() -> None:
    read = scenario_of([{"kind": "ngram"}], depth=3, batch_size={"search": "crossing", "max": 64})
    assert read.sweep.crossing is not None
    assert (read.sweep.crossing.min, read.sweep.crossing.max, read.sweep.batch_sizes) == (1, 64, (1,))
    assert Scenario.from_dict(read.to_dict()) == read
    assert scenario_of([{"kind": "ngram"}], depth=3, batch_size=[2, 4]).sweep.crossing is None
