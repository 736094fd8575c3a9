"""Steps in a series, and the history of stored runs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from gate_folders import OTHER, at, some_rows, write_run
from rich.console import Console

from specbench.errors import InputError
from specbench.gate.baseline import update
from specbench.gate.history import History, history_json, is_worse, read_history, render_history, sparkline
from specbench.gate.steps import could_confirm, find_steps

EFFECT = 0.05


def series(*levels: tuple[float, int], noise: float = 0.01, seed: int = 0) -> list[float]:
    """Log-normal noise about levels that hold for so many runs each."""
    random = np.random.default_rng(seed)
    return [float(level * np.exp(noise * random.standard_normal())) for level, runs in levels for _ in range(runs)]


# ---- Steps


def test_a_step_is_found_where_it_is_and_as_large_as_it_is() -> None:
    (step,) = find_steps(series((100, 8), (88, 8)), EFFECT)
    assert (step.at, step.confirmed) == (8, True)
    assert step.ratio == pytest.approx(0.88, abs=0.01)


def test_two_steps_are_two() -> None:
    steps = find_steps(series((100, 8), (80, 8), (110, 8)), EFFECT)
    assert [(step.at, step.confirmed) for step in steps] == [(8, True), (16, True)]


@pytest.mark.parametrize("outlier", [0.3, 3.0])
@pytest.mark.parametrize("place", range(3, 14))
def test_one_bad_night_is_no_step(outlier: float, place: int) -> None:
    data = series((100, 16))
    data[place] *= outlier
    assert find_steps(data, EFFECT) == []


def test_noise_alone_has_no_confirmed_steps() -> None:
    """2,000 series of 5 to 40 runs, log-normal with outliers: at most the promised 5 %, sizes not even looked at."""
    random = np.random.default_rng(1)
    found = 0
    for _ in range(2000):
        data = np.exp(0.03 * random.standard_normal(int(random.integers(5, 40))))
        data[random.random(len(data)) < 0.05] *= 1.3
        found += any(step.confirmed for step in find_steps(data.tolist(), 0.0))
    assert 0.01 < found / 2000 <= 0.05


def test_a_step_of_eight_percent_is_found() -> None:
    runs = [find_steps(series((100, 8), (92, 8), noise=0.015, seed=seed), EFFECT) for seed in range(200)]
    assert sum([(step.at, step.confirmed) for step in steps] == [(8, True)] for steps in runs) >= 180


def test_a_change_below_the_smallest_effect_is_none() -> None:
    assert find_steps(series((100, 10), (97, 10), noise=0.001), EFFECT) == []
    assert len(find_steps(series((100, 10), (97, 10), noise=0.001), 0.02)) == 1


@pytest.mark.parametrize("runs", [2, 3, 4, 5, 6, 7])
def test_few_runs_can_only_give_a_possible_step(runs: int) -> None:
    assert not could_confirm(runs)
    steps = find_steps(series((100, runs - 1), (60, 1), noise=0.005), EFFECT)
    assert [step.confirmed for step in steps] == ([False] if runs > 2 else [])
    assert all(step.at == runs - 1 and step.ratio == pytest.approx(0.6, abs=0.02) for step in steps)


def test_enough_runs_could_confirm() -> None:
    assert all(could_confirm(runs) for runs in range(8, 41))


def test_a_count_has_a_step_wherever_it_changes() -> None:
    steps = find_steps([0.5, 0.5, 0.5 + 1e-12, 0.49, 0.49, 0.0, 0.0, 0.5], EFFECT, exact=True)
    assert [(step.at, step.ratio) for step in steps] == [(3, pytest.approx(0.98)), (5, 0.0), (7, float("inf"))]


@pytest.mark.parametrize("data", [[], [1.0], [0.0] * 20, [1.0] * 19 + [-1.0], [1.0] * 30])
def test_series_without_a_ratio_or_a_change_have_no_steps(data: list[float]) -> None:
    assert find_steps(data, EFFECT) == []


# ---- History


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Twelve runs; from the seventh on the early exit is 15 % slower."""
    for day in range(1, 13):
        noise = 1 + 0.004 * ((day * 7) % 5 - 2)
        rows = at(some_rows(), day, factor=noise)
        if day >= 7:
            rows[2] = at([some_rows()[2]], day, factor=0.85 * noise)[0]
        write_run(tmp_path / f"night-{12 - day}", rows)
    return tmp_path


def shown(history: History, width: int = 180) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render_history(history))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_history_marks_the_step_in_the_right_case_at_the_right_run(runs: Path) -> None:
    (line,) = read_history(runs).lines
    assert [run.when[8:10] for run in line.runs] == [f"{day:02d}" for day in range(1, 13)]
    stepped = {(trend.case_name, trend.metric): trend for trend in line.trends if trend.steps}
    name = "early_exit(8) · depth 3 · batch 1 · T 0"
    assert set(stepped) == {(name, "output_tokens_per_s"), (name, "speedup")}
    (step,) = stepped[name, "speedup"].steps
    assert line.runs[step.at].when.startswith("2026-01-07")
    assert step.ratio == pytest.approx(0.85, abs=0.01)
    assert sparkline(stepped[name, "speedup"]).index("|") == 6
    text = shown(read_history(runs))
    assert text.index(name) < text.index("ngram(3)")
    assert "at 2026-01-07 (rev0007), worse" in text


def test_history_as_json(runs: Path) -> None:
    document = json.loads(history_json(read_history(runs, ["speedup"])))
    assert (document["kind"], document["schema_version"], document["unread"]) == ("specbench-history", 1, [])
    (line,) = document["lines"]
    assert len(line["runs"]) == 12
    assert [len(trend["values"]) for trend in line["trends"]] == [12] * 3
    assert line["trends"][0]["steps"] == [{"run": 6, "ratio": pytest.approx(0.85, abs=0.01), "confirmed": True}]


def test_machines_are_never_mixed(runs: Path) -> None:
    rows = at(some_rows(), 20, factor=3.0)
    for row in rows:
        row["environment"] = "0123456789abcdef"
    write_run(runs / "elsewhere", rows, fingerprint="0123456789abcdef", environment=OTHER)
    assert sorted(len(line.runs) for line in read_history(runs).lines) == [1, 12]


def test_blocks_measured_later_are_no_run_of_their_own(runs: Path) -> None:
    write_run(runs / "night-1" / "extend-1", at(some_rows(), 11))
    (line,) = read_history(runs).lines
    assert len(line.runs) == 12


def test_entries_of_a_baseline_are_runs(runs: Path, tmp_path: Path) -> None:
    for day in range(1, 4):
        update(runs / f"night-{12 - day}", tmp_path / "b", who="a", why="b", when=f"2026-02-0{day}T00:00:00+00:00")
    (line,) = read_history(tmp_path / "b").lines
    assert [run.label.rpartition("#")[2] for run in line.runs] == ["1", "2", "3"]
    assert "So few runs" in shown(read_history(tmp_path / "b"))


def test_what_can_not_be_read_is_said(runs: Path) -> None:
    (runs / "night-0" / "rows.jsonl").write_text("{broken\n{}\n")
    (runs / "other.jsonl").write_text("{}\n")
    history = read_history(runs)
    assert len(history.lines[0].runs) == 11
    assert len(history.unread) == 2
    assert "not read: " in shown(history)
    assert len(json.loads(history_json(history))["unread"]) == 2


def test_a_cell_that_was_not_ok_is_a_gap(tmp_path: Path) -> None:
    for day in range(1, 5):
        rows = at(some_rows(), day)
        if day == 3:
            rows[0] |= {"status": "failed", "reason": "out of memory", "metrics": None}
            rows[0]["samples"] = {"blocks": [], "prompts": []}
        write_run(tmp_path / str(day), rows)
    (line,) = read_history(tmp_path, ["speedup"]).lines
    trend = next(trend for trend in line.trends if trend.case_name.startswith("ngram(3) · depth 1 · batch 1"))
    assert [value is None for value in trend.values] == [False, False, True, False]
    assert sparkline(trend) == "▅▅·▅"


@pytest.mark.parametrize(
    ("direction", "change", "worse"),
    [("up", 0.9, True), ("up", 1.1, False), ("down", 0.9, False), ("down", 1.1, True), ("both", 1.1, True),
     ("both", 1.0, False), ("up", 1.0, False), ("down", 1.0, False)],
)  # fmt: skip
def test_each_direction_knows_worse(direction: str, change: float, worse: bool) -> None:
    assert is_worse(direction, change) is worse


def test_wrong_input(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no metric 'speedpu'") as told:
        read_history(runs, ["speedpu"])
    assert "did you mean speedup?" in str(told.value)
    with pytest.raises(InputError, match="no such folder"):
        read_history(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no runs here"):
        read_history(tmp_path / "empty")
