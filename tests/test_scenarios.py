"""Every shipped scenario parses, plans, and says what it answers and how long it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specbench.bench import command, plan
from specbench.bench.plan import Planner
from specbench.errors import ExitCode
from specbench.roofline.model import Roof
from specbench.scenario.cases import expand
from specbench.scenario.schema import load_scenario, resolve_scenario_path

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"
FILES = sorted(file for file in FOLDER.rglob("*.yaml") if file.parent.name not in ("distill", "size"))
H100 = [file for file in FILES if file.parent.name == "h100"]
H100_FREE_BYTES = 79 << 30
MOST_TOKENS = {"long_context": 16 * 16384}
"""Batch x context that an H100 of 80 GB has room for beside the weights, as the scenario's comment says."""


def ids(files: list[Path]) -> list[str]:
    return [file.relative_to(FOLDER).as_posix() for file in files]


def comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(
        line.removeprefix("#").strip() for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")]
    )


def test_there_are_scenarios_for_an_h100() -> None:
    assert "gpu_check" in {file.stem for file in H100}
    assert len(H100) >= 4


def test_names_are_distinct() -> None:
    names = [load_scenario(file).name for file in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", H100, ids=ids(H100))
def test_begins_with_the_command_that_runs_it(file: Path) -> None:
    assert f"specbench run scenarios/{file.relative_to(FOLDER).as_posix()}" in comment(file)


@pytest.mark.parametrize("file", H100, ids=ids(H100))
def test_comment_says_what_it_answers_and_how_long_it_takes(file: Path) -> None:
    text = comment(file)
    scenario = load_scenario(file)
    assert "Answers:" in text
    (cases, seconds) = re.findall(r"(\d+) cases of at most ([\d.]+) s", text)[0]
    assert int(cases) == len(expand(scenario))
    assert float(seconds) == scenario.measure.budget_s
    assert re.search(r"about [\d to]+ minutes on one H100", text)
    minutes = max(map(int, re.findall(r"\d+", re.findall(r"about ([\d to]+) minutes", text)[0])))
    assert int(cases) * float(seconds) / 60 <= 1.2 * minutes


@pytest.mark.parametrize("file", H100, ids=ids(H100))
def test_plans_on_an_h100(file: Path) -> None:
    scenario = load_scenario(file)
    planner = Planner(scenario.measure, None, free_bytes=H100_FREE_BYTES)
    planned = [planner.plan(case) for case in expand(scenario)]
    for one in planned:
        tokens = one.case.workload.batch_size * (one.case.workload.context_len or 0)
        fits = tokens <= MOST_TOKENS.get(file.stem, tokens)
        assert (one.skip is None) == fits, f"{one.case.name}: {one.skip}"
        assert one.skip is None or "are free" in one.skip


@pytest.mark.parametrize("file", H100, ids=ids(H100))
def test_dry_run_shows_the_plan(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan, "quick_roof", lambda: Roof(1e12, 1e11))
    assert command.run(file, out=tmp_path / "out", fresh=False, only=[], dry_run=True) == ExitCode.DONE
    assert not (tmp_path / "out").exists()


def test_scenarios_in_folders_are_found_where_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specbench.scenario.schema.resources.files", lambda package: FOLDER)
    assert load_scenario("scenarios/h100/trees.yaml").name == "h100-trees"
    for other in (
        "scenarios",
        "scenarios/h100",
        "scenarios/h100/absent.yaml",
        "scenarios/../scenarios/quickstart.yaml",
    ):
        assert resolve_scenario_path(other) == Path(other)


def test_gpu_check_covers_its_grid() -> None:
    cases = expand(load_scenario(FOLDER / "h100" / "gpu_check.yaml"))
    assert {case.workload.batch_size for case in cases} >= {1, 256}
    assert {case.depth for case in cases} >= {0, 1, 7}
    trees = {bool(dict(case.drafter.options).get("tree")) for case in cases if case.drafter.kind == "forced"}
    assert trees == {False, True}
