"""Runs side by side: cells matched by case, changes judged only where they may be, and what differs between runs."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_rows import make_manifest, make_row, make_rows
from rich.console import Console

from specbench.errors import ExitCode, InputError
from specbench.report import command
from specbench.report.html import Run, render
from specbench.report.versus import Change, cell_line, change_words, overview, sides_of, versus


def paired(factor: float = 1.0, **manifest: Any) -> Any:
    """A run against one whose rates are `factor` times as high."""
    before, after = (
        make_rows(("suffix",), (1, 3), (1, 4), faults=False),
        make_rows(("suffix",), (1, 3), (1, 4), faults=False),
    )
    for row in after:
        for end in ("", "_low", "_high"):
            row["metrics"][f"output_tokens_per_s{end}"] *= factor
    other = make_manifest(name="after", code_revision="2b6bf80") | manifest
    return versus(sides_of([(before, make_manifest(name="before")), (after, other)]))


@pytest.mark.parametrize(("factor", "word"), [(1.0, "no clear difference"), (1.3, "faster"), (0.7, "slower")])
def test_a_change_is_judged_by_its_interval(factor: float, word: str) -> None:
    found = paired(factor)
    assert [cell.change.word for cell in found.cells] == [word] * 4
    change = found.cells[0].change
    assert change.ratio == pytest.approx(factor)
    row = found.cells[0].rows[0]
    half = math.log(row["metrics"]["output_tokens_per_s_high"] / row["metrics"]["output_tokens_per_s_low"]) / 2
    assert change.high / change.ratio == pytest.approx(math.exp(half * math.sqrt(2)))
    assert f"{word} in 4" in found.sentence


def test_other_machines_and_unlike_cells_are_shown_and_not_judged() -> None:
    found = paired(1.5, fingerprint="another", device="H200")
    for cell in found.cells:
        cell.rows[1]["environment"] = "another"
    found = versus(found.sides)
    assert {cell.change.reason for cell in found.cells} == {"different machines"}
    assert all(cell.change.ratio is None for cell in found.cells)
    assert "no change is judged: different machines" in found.sentence
    assert any("different machines" in note for note in found.notes)
    for change, reason in (
        ({"status": "failed", "metrics": None, "reason": "boom"}, "failed in after"),
        ({"conditions": {"lossless": False}}, "one is lossy, the other not"),
        ({"conditions": {"predicted": True}}, "one is measured, the other predicted"),
        ({"metrics": {"output_tokens_per_s": None}}, "no rate"),
        ({"metrics": {"output_tokens_per_s": 5.0}}, "no interval in one of the runs"),
    ):
        sides = paired(1.5).sides
        sides[1].cells[0].update(change)
        reasons = {cell.change.reason for cell in versus(sides).cells}
        assert reasons == {"", reason}


def test_cells_of_one_run_only_are_listed_and_nothing_in_common_is_said() -> None:
    one, two = [make_row("suffix", 1, 1)], [make_row("suffix", 1, 1), make_row("mtp", 1, 1)]
    found = versus(sides_of([(one, make_manifest(name="a")), (two, make_manifest(name="b"))]))
    assert found.only == (("mtp · depth 1 · batch 1 · T 0", "b"),)
    found = versus(sides_of([(one, make_manifest(name="a")), (two[1:], make_manifest(name="b"))]))
    assert found.sentence == "a and b have no cell in common: each stands by itself below."
    assert len(found.only) == 2


def test_cells_without_a_common_hash_are_matched_by_name_and_that_is_told() -> None:
    one, two = [make_row("suffix", 1, 1)], [make_row("suffix", 1, 1) | {"case_hash": "other"}]
    found = versus(sides_of([(one, make_manifest()), (two, make_manifest())]))
    assert (found.by_name, len(found.cells)) == (True, 1)
    assert "matched by name" in found.notes[0]


def test_what_differs_is_listed_and_what_does_not_is_not() -> None:
    found = paired(environment={"python": "3.12.1", "torch": "2.13.0"})
    names = {line[0]: line[1:] for line in found.differences}
    assert names["machine: python"] == ("3.11.7", "3.12.1")
    assert names["machine: cpu.name"] == ("Example CPU", "not there")
    assert "machine: torch" not in names
    assert "code revision" in names


def test_runs_of_one_name_get_names_of_their_own() -> None:
    rows = [make_row("suffix", 1, 1)]
    same = [(rows, make_manifest())] * 2
    assert [side.name for side in sides_of(same)] == ["quickstart (1)", "quickstart (2)"]
    pair = [(rows, make_manifest(code_revision=code)) for code in ("aaa", "bbb")]
    assert [side.name for side in sides_of(pair)] == ["quickstart · aaa", "quickstart · bbb"]
    pair = [(rows, make_manifest(device=device)) for device in ("H100", "H200")]
    assert [side.name for side in sides_of(pair)] == ["quickstart · H100", "quickstart · H200"]


def test_words_of_a_change() -> None:
    assert change_words(Change(1.041, 0.99, 1.095, "no clear difference")) == (
        "+4.1 % (−1.0 % to +9.5 %)",
        "no clear difference",
    )
    assert change_words(Change(None, None, None, "", "different machines")) == ("–", "different machines")


def test_three_runs_stand_side_by_side_without_changes() -> None:
    runs = [(make_rows(("suffix",), (1,), (1, 4), faults=False), make_manifest(name=name)) for name in "abc"]
    found = versus(sides_of(runs))
    assert [cell.change for cell in found.cells] == [None, None]
    assert len(cell_line(found.cells[0])) == 7
    assert [line[0] for line in overview(found.sides)] == ["a", "b", "c"]
    text = render([Run(rows, manifest) for rows, manifest in runs])
    assert text.index("The runs and their answers") < text.index('id="r1"') < text.index('id="r3"')


# ---- the command


def write_run(folder: Path, rows: list[dict[str, Any]], manifest: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def shown(*arguments: Any, width: int = 120) -> tuple[ExitCode, str]:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=False)
    code = command.compare(*arguments, console=console)
    return code, console.export_text()


def test_compare_shows_answers_cells_and_differences(tmp_path: Path) -> None:
    rows = make_rows(("suffix",), (3,), (1, 4), faults=False)
    a = write_run(tmp_path / "a", rows, make_manifest(name="[red]before"))
    b = write_run(tmp_path / "b", rows, make_manifest(name="after"))
    code, text = shown(a, b)
    assert code == ExitCode.DONE
    for part in (
        "Of 2 cells in common, after is faster in 0",
        "[red]before",
        "suffix · depth 3 · batch 4",
        "no clear difference",
    ):
        assert part in " ".join(text.split())
    page = tmp_path / "both.html"
    assert shown(a, b, page)[0] == ExitCode.DONE
    assert "Cells in common" in page.read_text(encoding="utf-8")


def test_compare_ends_inconclusive_where_nothing_is_in_common(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [make_row("suffix", 1, 1)], make_manifest(name="a"))
    b = write_run(tmp_path / "b", [make_row("mtp", 1, 1)], make_manifest(name="b"))
    code, text = shown(a, b)
    assert code == ExitCode.INCONCLUSIVE
    assert "no cell in common" in text
    assert "only in b: mtp" in text
    with pytest.raises(InputError, match="no such folder"):
        command.compare(a, tmp_path / "c")
