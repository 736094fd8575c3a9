"""Rows that nobody foresaw never crash report, gate, baseline or history: there is a page or a verdict, or an error
that says what is wrong."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate_folders import at, some_rows
from gate_results import HOSTILE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from report_rows import make_manifest, make_row

from specbench.errors import ExitCode, SpecbenchError
from specbench.gate.baseline import update
from specbench.gate.command import compare, failed
from specbench.gate.history import history_json, read_history, render_history
from specbench.gate.render_gab import render_gab
from specbench.gate.render_json import render_json
from specbench.gate.render_junit import render_junit
from specbench.gate.render_markdown import render_markdown
from specbench.gate.render_terminal import render_terminal
from specbench.gate.types import GateResult
from specbench.report.command import write_page
from specbench.result_row import ResultRow
from specbench.store import MANIFEST_FILE, ROWS_FILE, read_rows

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12), st.sampled_from(HOSTILE),
    st.sampled_from([0, 0.0, -1, 1e-300, 1e308, "1.5", "nan", []]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(max_size=6), item, max_size=3),
    max_leaves=5,
)
QUICK = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ROWS = at(some_rows(blocks=6), 1)
Path_ = tuple[Any, ...]


def paths(value: Any, start: Path_ = ()) -> list[Path_]:
    """Every place inside a JSON value."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*start, key), *paths(item, (*start, key)))]


PLACES = sorted(paths(ROWS[0]), key=str)
TOP = [place for place in PLACES if len(place) <= 2]
MANIFEST_PLACES = sorted(paths(make_manifest()), key=str)


def changed(value: Any, place: Path_, new: Any, remove: bool) -> Any:
    """A copy with what is at `place` replaced or taken away; as it is where there is no such place any more."""
    made = copy.deepcopy(value)
    try:
        *way, last = place
        inner = made
        for key in way:
            inner = inner[key]
        if remove:
            del inner[last]
        else:
            inner[last] = new
    except (KeyError, IndexError, TypeError):
        return made
    return made


def mutations(places: list[Path_]) -> st.SearchStrategy[list[tuple[Path_, Any, bool]]]:
    return st.lists(st.tuples(st.sampled_from(places), VALUES, st.booleans()), min_size=1, max_size=4)


def mutated(row: Any, changes: list[tuple[Path_, Any, bool]]) -> Any:
    for place, new, remove in changes:
        row = changed(row, place, new, remove)
    return row


def write(folder: Path, rows: list[Any], manifest: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def judged(candidate: Path, baseline: Path) -> GateResult:
    """The gate's answer, or its error as the files show it; every rendering is made."""
    try:
        result = compare(candidate, baseline)
    except SpecbenchError as error:
        result = failed(candidate, baseline, error)
    assert result.reasons
    assert all(result.reasons)
    assert result.compared or result.exit_code in (ExitCode.BAD_INPUT, ExitCode.BAD_ENVIRONMENT)
    for render in (render_markdown, render_junit, render_json, render_gab, render_terminal):
        assert render(result)
    return result


@settings(QUICK, max_examples=60)
@given(mutations(TOP) | mutations(PLACES), mutations(TOP) | st.just([]), st.booleans())
def test_the_gate_has_a_verdict_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, one: Any, other: Any, on_baseline: bool
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    sane = write(folder / "sane", ROWS, make_manifest())
    odd = write(folder / "odd", [mutated(ROWS[0], one), mutated(ROWS[1], other), ROWS[2]], make_manifest())
    judged(sane, odd) if on_baseline else judged(odd, sane)


@settings(QUICK, max_examples=12)
@given(mutations(MANIFEST_PLACES))
def test_an_odd_manifest_is_a_verdict_or_an_error(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    sane = write(folder / "sane", ROWS, make_manifest())
    odd = write(folder / "odd", ROWS, mutated(make_manifest(), changes))
    judged(odd, sane)
    judged(sane, odd)
    recorded(odd, folder)


def recorded(run: Path, folder: Path) -> None:
    """Baseline and history of a run: a file and a table, or an error."""
    try:
        update(run, folder / "b", who="a", why="b", when="2026-01-01T00:00:00+00:00")
        judged(run, folder / "b")
        history = read_history(folder)
    except SpecbenchError:
        return
    assert json.loads(history_json(history))["lines"]
    assert render_history(history)


@settings(QUICK, max_examples=60)
@given(mutations(PLACES))
def test_a_baseline_and_a_history_or_an_error(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    recorded(write(folder / "odd", [mutated(ROWS[0], changes), *ROWS[1:]], make_manifest()), folder)


@settings(QUICK, max_examples=60)
@given(st.binary(max_size=40) | st.just(b"[" * 100_000), st.integers(0, 4000), st.integers(0, 3))
def test_bytes_in_the_file_are_rows_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, place: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    sane = write(folder / "sane", ROWS, make_manifest())
    odd = write(folder / "odd", ROWS, make_manifest())
    data = (odd / ROWS_FILE).read_bytes()
    (odd / ROWS_FILE).write_bytes(data[:place] + junk + data[place + cut :])
    result = judged(odd, sane)
    try:
        rows = read_rows(odd)
    except SpecbenchError:
        assert result.exit_code is ExitCode.BAD_ENVIRONMENT
    else:
        assert len(rows) <= len(ROWS) or result.reasons


# ---- The page

ODD: tuple[Any, ...] = (
    *HOSTILE, None, True, 0, 0.0, -1, -0.0, 1e-300, 1e308, -1e308, 2**70, "1.5", "nan", [], {}, [None], [[1]], 
    [1e308, -1], {"x": {"y": [None]}}, "x" * 3000,
)  # fmt: skip


def valid_odd_rows(seed: int, count: int, places: Callable[[Path_], bool]) -> list[dict[str, Any]]:
    """Rows that the store takes, with odd values at the places asked for."""
    noise = random.Random(seed)
    found: list[dict[str, Any]] = []
    chosen = [place for place in PLACES if places(place)]
    while len(found) < count:
        depth, batch = noise.choice((0, 1, 3)), noise.choice((1, 2, 4))
        row: Any = make_row(noise.choice(("ngram(3)", "mtp", "oracle(0.8)")), depth, batch)
        for _ in range(noise.randint(1, 5)):
            row = changed(row, noise.choice(chosen), noise.choice(ODD), remove=noise.random() < 0.2)
        row["case_hash"] = row["key"] = f"odd {seed} {len(found)}"
        try:
            found.append(ResultRow.model_validate(json.loads(json.dumps(row))).model_dump())
        except (ValidationError, ValueError):
            continue
    return found


@pytest.mark.parametrize(
    ("seed", "places"),
    [
        (1, lambda place: place[0] == "metrics" and len(place) <= 3),
        (2, lambda place: place[0] in ("axes", "conditions", "reason", "warnings", "case_name", "started_at")),
    ],
    ids=["metrics", "axes and texts"],
)
def test_odd_rows_that_the_store_takes_make_a_page(seed: int, places: Callable[[Path_], bool], tmp_path: Path) -> None:
    rows = valid_odd_rows(seed, 8, places)
    assert len({json.dumps(row["metrics"]) for row in rows}) > 3
    run = write(tmp_path / "run", [*rows, *(make_row("ngram(3)", 3, batch) for batch in (1, 2))], make_manifest())
    try:
        page = write_page([run], tmp_path / "page.html").read_text(encoding="utf-8")
    except SpecbenchError as error:
        pytest.fail(f"the store took these rows, so the page must show them: {error}")
    assert "</html>" in page
    assert "<script>alert(1)" not in page
    for sign in ("\x00", "\u202e", "\u2066", "\x1b"):
        assert sign not in page
    judged(run, run)


@settings(QUICK, max_examples=12)
@given(mutations(TOP))
def test_rows_that_the_store_refuses_are_an_error(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    """Only where the row is refused: a page takes seconds, and the tests above make some."""
    folder = tmp_path_factory.mktemp("fuzz")
    run = write(folder / "run", [mutated(ROWS[0], changes)], make_manifest())
    try:
        read_rows(run)
    except SpecbenchError:
        with pytest.raises(SpecbenchError):
            write_page([run], folder / "page.html")
        assert not (folder / "page.html").exists()
