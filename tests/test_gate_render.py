"""The gate's renderings: golden files, the limits of each place, and texts from outside that stay texts."""

from __future__ import annotations

import html
import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gate_results as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from specbench.errors import ExitCode
from specbench.gate.render_gab import render_gab, write_gab
from specbench.gate.render_json import SCHEMA_VERSION, render_json
from specbench.gate.render_junit import render_junit
from specbench.gate.render_markdown import LIMITS, Place, render_markdown, size
from specbench.gate.render_terminal import render_terminal
from specbench.gate.text import clean, code, markdown, number, percent
from specbench.gate.types import VERDICTS, GateResult

MAKERS = [made.sample, made.passed, made.hostile, made.result]
EVERY = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
Make = Callable[[], GateResult]


def terminal(result: GateResult, width: int = 180, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render_terminal(result, **options))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def hidden(text: str) -> list[str]:
    """Signs that a reader can't see, but for line breaks."""
    return [sign for sign in text if sign != "\n" and unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Cn")]


@pytest.mark.parametrize("name", sorted(made.render_golden()))
def test_golden(name: str) -> None:
    """A change of the renderings is seen and meant: `python tests/gate_results.py` writes them anew."""
    assert made.render_golden()[name] == (made.GOLDEN / name).read_text(encoding="utf-8")


def test_every_golden_file_is_one_of_ours() -> None:
    assert {path.name for path in made.GOLDEN.glob("gate-*")} == set(made.render_golden())


# ---- Markdown


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every table, as a CommonMark parser with GFM tables reads them."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    found: list[list[list[str]]] = []
    for place, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and tokens[place - 1].type in ("td_open", "th_open"):
            found[-1][-1].append(token.content)
    return found


@EVERY
def test_markdown_tables_keep_their_columns(make: Make) -> None:
    result = make()
    sides, *rest = tables(render_markdown(result))
    assert {len(row) for row in sides} == {2}
    rows = [row for table in rest for row in table[1:]]
    assert {len(row) for table in rest for row in table} <= {7}
    assert len(rows) == len(result.verdicts)


@pytest.mark.parametrize("text", made.HOSTILE)
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    """Rendered, then its tags taken away and its entities read: the cleaned text, and no element but <p> and <code>."""
    for shown in (markdown(text), code(text)):
        page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(f"x {shown} x")
        assert set(re.findall(r"</?([a-zA-Z]+)", page)) <= {"p", "code"}
        assert html.unescape(re.sub(r"</?(p|code)>", "", page)).strip() == f"x {clean(text)} x"
    assert "@" not in markdown(text)
    assert "`" not in markdown(text)


def test_the_worst_comes_first_and_passes_are_folded_away() -> None:
    text = render_markdown(made.sample())
    kinds = ("REGRESSION", "INVALID", "MISSING", "INCONCLUSIVE", "IMPROVEMENT", "NEW")
    order = [text.index(f" {name} |") for name in kinds]
    assert order == sorted(order)
    assert text.index("<details>") < text.index(" PASS |")
    assert "(--extend 7)" in html.unescape(text)
    assert text.startswith("## ❌ specbench gate: REGRESSION (exit code 1): quickstart")


@pytest.mark.parametrize("place", list(LIMITS))
def test_a_page_that_would_be_too_long_says_what_it_left_out(place: Place) -> None:
    result = made.huge()
    text = render_markdown(result, place)
    assert 0.4 * LIMITS[place] < size(text, place) < LIMITS[place]
    assert "sentences above are cut" in text
    (said,) = re.findall(r"\*\*Left out\*\* .*: ([\d,]+) lines \((.*)\)", text)
    lines = len(re.findall(r"^\| [🔴⚪]", text, re.M))
    assert int(said[0].replace(",", "")) + lines == len(result.verdicts)
    kinds = {kind: int(count.replace(",", "")) for count, kind in re.findall(r"([\d,]+) ([A-Z]+)", said[1])}
    for kind in ("REGRESSION", "PASS"):
        shown = len(re.findall(rf"^\| . {kind} ", text, re.M))
        assert shown + kinds.get(kind, 0) == result.count(kind)  # type: ignore[arg-type]
    assert all(len(row) == 7 for table in tables(text)[1:] for row in table)


@pytest.mark.parametrize("place", list(LIMITS))
@pytest.mark.parametrize("wide", ["x" * 2000, "漢" * 2000, "🙂" * 2000, "|" * 2000])
def test_no_text_is_too_long_for_the_limit(place: Place, wide: str) -> None:
    verdicts = [made.verdict(wide, wide, verdict=kind, reason=wide, flags=(wide,)) for kind in VERDICTS] * 150
    result = made.result(*verdicts, scenario=wide, candidate_dir=wide, baseline_dir=wide, reasons=(wide,) * 900)
    assert size(render_markdown(result, place), place) < LIMITS[place]


# ---- JUnit


@EVERY
def test_junit_is_wellformed_and_its_sums_are_right(make: Make) -> None:
    result = make()
    text = render_junit(result)
    root = ElementTree.fromstring(text.encode("utf-8"))
    (suite,) = root
    cases = suite.findall("testcase")
    assert len(cases) == len(result.verdicts) + 1
    assert int(suite.get("tests", "")) == len(cases)
    for tag, total in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.get(total, "")) == int(root.get(total, "")) == len(suite.findall(f"testcase/{tag}"))
    assert not hidden(text)


def test_junit_is_red_exactly_where_the_gate_is() -> None:
    for exit_code in (ExitCode.FAILED, ExitCode.BAD_INPUT, ExitCode.INCONCLUSIVE, ExitCode.BAD_ENVIRONMENT):
        root = ElementTree.fromstring(render_junit(made.result(exit_code=exit_code, reasons=("because",))))
        (case,) = root.findall("testsuite/testcase")
        assert [child.tag for child in case] == ["failure" if exit_code is ExitCode.FAILED else "error"]
        assert "because" in (case[0].text or "")
    root = ElementTree.fromstring(render_junit(made.passed()))
    assert root.get("failures") == root.get("errors") == root.get("skipped") == "0"


@pytest.mark.parametrize(
    ("kind", "tag"),
    [("REGRESSION", "failure"), ("INVALID", "error"), ("MISSING", "error"), ("INCONCLUSIVE", "skipped"),
     ("NEW", "skipped"), ("PASS", "system-out"), ("IMPROVEMENT", "system-out")],
)  # fmt: skip
def test_each_verdict_has_its_element(kind: Any, tag: str) -> None:
    root = ElementTree.fromstring(render_junit(made.result(made.verdict(verdict=kind))))
    assert [child.tag for child in root.findall("testsuite/testcase")[1]] == [tag]


def test_tests_of_a_suite_have_names_of_their_own() -> None:
    root = ElementTree.fromstring(render_junit(made.sample()))
    names = [case.get("name") for case in root.iter("testcase")]
    assert len(set(names)) == len(names)


# ---- JSON


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@EVERY
def test_json_is_strict_versioned_and_complete(make: Make) -> None:
    result = make()
    text = render_json(result)
    assert text.isascii()
    document = json.loads(text, parse_constant=refuse)
    json.dumps(document, ensure_ascii=False).encode("utf-8")  # no lone surrogates
    assert (document["kind"], document["schema_version"]) == ("specbench-gate", SCHEMA_VERSION)
    assert document["exit_code"] == int(result.exit_code)
    assert document["counts"] == {kind: result.count(kind) for kind in VERDICTS}
    assert sorted(one["case_hash"] for one in document["verdicts"]) == sorted(one.case_hash for one in result.verdicts)


# ---- github-action-benchmark


def test_benchmark_files_hold_one_direction_each(tmp_path: Path) -> None:
    found = render_gab(made.sample())
    for entries in found.values():
        assert all(isinstance(entry["value"], float) and entry["unit"] and entry["name"] for entry in entries)
        assert len({entry["name"] for entry in entries}) == len(entries)
    assert {entry["name"].split(" · ")[-1] for entry in found["customBiggerIsBetter"]} == {"speedup", "acceptance_rate"}
    assert [entry["unit"] for entry in found["customSmallerIsBetter"]] == ["B"]
    assert [path.name for path in write_gab(made.sample(), tmp_path / "b.json")] == ["b.bigger.json", "b.smaller.json"]
    assert write_gab(made.result(), tmp_path / "empty.json") == []
    assert json.loads((tmp_path / "b.smaller.json").read_text())[0]["value"] == 764948480


# ---- Terminal


def test_the_terminal_ends_with_the_headline_and_begins_with_the_worst() -> None:
    text = terminal(made.sample())
    assert text.splitlines()[-1].rstrip() == "REGRESSION (exit code 1): quickstart"
    order = [text.index(name) for name in ("REGRESSION", "INVALID", "MISSING", "INCONCLUSIVE", "NEW")]
    assert order == sorted(order)
    assert "3 verdicts of PASS or IMPROVEMENT not listed" in text
    assert "−8.1 % (−9.9 to −6.2)" in text
    assert "... 5 more lines" in terminal(made.sample(), lines=2)


def test_the_terminal_takes_no_orders_from_a_text() -> None:
    for width in (60, 180):
        text = terminal(made.hostile(), width)
        assert not hidden(text)
        assert not [line for line in text.splitlines() if line.lstrip().startswith("::")]


# ---- Any text, any number


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(max_size=60), st.one_of(st.none(), st.floats()), st.one_of(st.none(), st.floats()))
def test_any_text_and_number_can_be_rendered(text: str, value: float | None, other: float | None) -> None:
    one = made.verdict(text, text, verdict="REGRESSION", reason=text, baseline=value, candidate=other, ratio=value,
                       low=other, high=other, severity=0.0)  # fmt: skip
    result = made.result(one, scenario=text, reasons=(text,), exit_code=ExitCode.FAILED)
    ElementTree.fromstring(render_junit(result).encode("utf-8"))
    json.loads(render_json(result), parse_constant=refuse)
    assert [len(row) for row in tables(render_markdown(result))[1]] == [7, 7]
    assert terminal(result)
    for entries in render_gab(result).values():
        json.dumps(entries, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (0.0, "0"), (68.10651, "68.11"), (0.336492, "0.3365"),
     (764948480.0, "764,948,480"), (1.5e-7, "1.5e-07"), (-2.0, "-2"), (999999.9, "1,000,000"), (1e300, "1e+300")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(None, "–"), (1.0, "±0.0 %"), (0.92, "−8.0 %"), (1.00001, "+0.0 %"), (0.99999, "−0.0 %"), (0.0, "−100 %"),
     (3.5, "+250 %"), (float("inf"), "–")],
)  # fmt: skip
def test_changes(ratio: float | None, text: str) -> None:
    assert percent(ratio) == text
