"""Baselines: who, when and why are kept, nothing is overwritten, a torn tail is forgiven and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gate_folders import OTHER, at, some_rows, write_run
from report_rows import make_row

from specbench.errors import InputError, InvalidEnvironmentError, SpecbenchError
from specbench.gate.baseline import as_run, find_baseline, machine_of, pin, read_baseline, update
from specbench.store import latest_rows, read_manifest

WHEN = "2026-01-31T12:00:00+00:00"


def updated(run: Path, folder: Path, **options: Any) -> Path:
    found, _ = update(run, folder, **{"who": "A. Name", "why": "first", "when": WHEN} | options)
    return found.path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A baseline file with one entry, of day 1."""
    return updated(write_run(tmp_path / "run1", at(some_rows(), 1)), tmp_path / "baselines")


def test_an_update_keeps_rows_and_says_who_when_and_why(base: Path, tmp_path: Path) -> None:
    found = read_baseline(base)
    fingerprint = machine_of(found.latest.manifest, base)[1]
    assert base.name == f"quickstart-{fingerprint}.jsonl"
    (entry,) = found.entries
    assert (entry.who, entry.why, entry.when, entry.number) == ("A. Name", "first", WHEN, 1)
    assert list(entry.rows) == latest_rows(tmp_path / "run1")
    assert entry.manifest == read_manifest(tmp_path / "run1")
    assert found.size == base.stat().st_size
    assert found.pinned is found.latest is entry


def test_an_entry_is_a_run_again(base: Path, tmp_path: Path) -> None:
    again = as_run(read_baseline(base).latest, tmp_path / "again")
    assert latest_rows(again) == latest_rows(tmp_path / "run1")
    assert read_manifest(again) == read_manifest(tmp_path / "run1")


def test_what_the_gate_reads_beside_the_rows_is_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", at(some_rows(), 1))
    (run / "kernels.json").write_text('{"kernels": []}')
    write_run(run / "extend-1", at(some_rows(), 1))
    (run / "report.html").write_text("not this")
    entry = read_baseline(updated(run, tmp_path / "b")).latest
    again = as_run(entry, tmp_path / "again")
    names = {path.relative_to(again).as_posix() for path in again.rglob("*") if path.is_file()}
    assert names == {"rows.jsonl", "manifest.json", "kernels.json", "extend-1/rows.jsonl"}
    assert (again / "extend-1" / "rows.jsonl").read_bytes() == (run / "extend-1" / "rows.jsonl").read_bytes()


def test_updates_are_appended_and_the_first_stays_pinned(base: Path, tmp_path: Path) -> None:
    before = base.read_bytes()
    updated(write_run(tmp_path / "run2", at(some_rows(), 2)), base.parent, who="B. Name", why="a new kernel")
    assert base.read_bytes().startswith(before)
    found = read_baseline(base)
    assert [(entry.number, entry.who, entry.why) for entry in found.entries] == [
        (1, "A. Name", "first"),
        (2, "B. Name", "a new kernel"),
    ]
    assert (found.latest.number, found.pinned.number) == (2, 1)
    after = pin(base, entry=None, who="C", why="agreed", when=WHEN)
    assert after.pinned.number == 2
    assert pin(base, entry=1, who="C", why="no", when=WHEN).pinned.number == 1
    assert [(one.entry, one.why) for one in read_baseline(base).pins] == [(2, "agreed"), (1, "no")]
    assert base.read_bytes().startswith(before)


def test_each_scenario_and_machine_has_a_file(base: Path, tmp_path: Path) -> None:
    rows = at(some_rows(), 3)
    for row in rows:
        row["environment"] = "0123456789abcdef"
    run = write_run(tmp_path / "other", rows, fingerprint="0123456789abcdef", environment=OTHER)
    other = updated(run, base.parent)
    third = updated(write_run(tmp_path / "third", at(some_rows(), 3), name="drafters"), base.parent)
    assert {base, other, third} == set(base.parent.iterdir())
    assert len({base, other, third}) == 3
    assert find_baseline(base.parent, read_manifest(run), run).path == other


def test_a_machine_is_known_again_though_its_memory_reads_a_little_less(tmp_path: Path) -> None:
    """Near the edge of a step the fingerprint differs, and the file is the same."""
    edge = 2 ** (34 + 1 / 8)
    runs = [
        write_run(tmp_path / str(day), at(some_rows(), day), environment={"device": "cpu", "memory_bytes": memory})
        for day, memory in enumerate((int(edge * 1.001), int(edge * 0.999)), start=1)
    ]
    assert machine_of(read_manifest(runs[0]), runs[0]) != machine_of(read_manifest(runs[1]), runs[1])
    assert len({updated(run, tmp_path / "b") for run in runs}) == 1
    assert (
        len(
            read_baseline(
                updated(
                    write_run(runs[0], at(some_rows(), 3), environment={"device": "cpu", "memory_bytes": int(edge)}),
                    tmp_path / "b",
                )
            ).entries
        )
        == 3
    )


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "a b", "é", ".hidden", "x" * 300])
def test_a_scenario_can_not_choose_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "baselines"
    path = updated(write_run(tmp_path / "run", at(some_rows(), 1), name=name), folder)
    assert path.parent == folder
    assert [item.name for item in folder.iterdir()] == [path.name]
    assert path.name.isascii()
    assert len(path.name) < 140
    assert read_baseline(path).scenario == name


# ---- What is refused


@pytest.mark.parametrize("option", ["who", "why"])
def test_who_and_why_are_said(option: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", at(some_rows(), 1))
    with pytest.raises(InputError, match=f"--{option}: is empty"):
        updated(run, tmp_path / "b", **{option: "  "})
    assert not (tmp_path / "b").exists()


def test_the_same_run_twice_is_refused(base: Path, tmp_path: Path) -> None:
    before = base.read_bytes()
    with pytest.raises(InputError, match=r"is entry 1 of 2026-01-31 .* already"):
        updated(tmp_path / "run1", base.parent)
    assert base.read_bytes() == before


def test_a_run_that_lacks_cases_is_refused_unless_told(base: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run2", at(some_rows()[:2], 2))
    with pytest.raises(InputError, match="lacks 1 case of the baseline, such as early_exit"):
        updated(run, base.parent)
    updated(run, base.parent, drop_missing=True)
    assert [len(entry.rows) for entry in read_baseline(base).entries] == [3, 2]


def test_cells_that_are_not_ok_are_left_out_by_name(tmp_path: Path) -> None:
    rows = [
        *at(some_rows(), 1),
        make_row("suffix", 1, 1, status="invalid", reason="token 17 differs"),
        make_row("suffix", 1, 2, status="failed", reason="out of memory"),
        make_row("suffix", 1, 4, status="skipped", reason="no room"),
    ]
    entry = read_baseline(updated(write_run(tmp_path / "run", rows), tmp_path / "b")).latest
    assert [row.status for row in entry.rows] == ["ok", "ok", "ok", "skipped"]
    assert [text.split(": ", 1)[1] for text in entry.left_out] == ["invalid: token 17 differs", "failed: out of memory"]


def test_a_run_without_an_ok_cell_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [make_row("suffix", 1, 1, status="skipped", reason="no room")])
    with pytest.raises(InputError, match="no cell of this run is ok"):
        updated(run, tmp_path / "b")


def test_rows_of_two_machines_are_refused(tmp_path: Path) -> None:
    rows = at(some_rows(), 1)
    rows[0]["environment"] = "another"
    with pytest.raises(InvalidEnvironmentError, match="rows of another, f00dfeedcafe0001"):
        updated(write_run(tmp_path / "run", rows), tmp_path / "b")


@pytest.mark.parametrize(
    "changes", [{"name": ""}, {"name": None}, {"fingerprint": 5}, {"fingerprint": None}, {"environment": {}}]
)
def test_a_manifest_that_does_not_say_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", at(some_rows(), 1), **changes)
    with pytest.raises(InvalidEnvironmentError):
        machine_of(read_manifest(run), run)
    with pytest.raises(InvalidEnvironmentError):
        updated(run, tmp_path / "b")


def test_no_baseline_is_no_pass(base: Path, tmp_path: Path) -> None:
    """First run without a baseline, and another machine's: exit 4, with what is there and the remedy."""
    run = write_run(tmp_path / "other", at(some_rows(), 1), environment=OTHER)
    for folder, there in ((base.parent, "there: quickstart on "), (tmp_path / "nowhere", "there: none")):
        with pytest.raises(InvalidEnvironmentError, match=there) as told:
            find_baseline(folder, read_manifest(run), run)
        assert "specbench baseline update" in str(told.value)
        assert int(told.value.exit_code) == 4


@pytest.mark.parametrize("entry", [0, -1, 3])
def test_a_pin_of_nothing_is_refused(entry: int, base: Path) -> None:
    before = base.read_bytes()
    with pytest.raises(InputError, match=f"no entry {entry} here"):
        pin(base, entry=entry, who="a", why="b", when=WHEN)
    assert base.read_bytes() == before


# ---- Torn and broken files


def test_a_torn_update_is_forgiven_and_cut_by_the_next(base: Path, tmp_path: Path) -> None:
    """Wherever the second update was cut, the first holds, and a third stands behind it."""
    first = base.read_bytes()
    updated(write_run(tmp_path / "run2", at(some_rows(), 2)), base.parent)
    whole = base.read_bytes()
    ends = [place + len(first) for place in range(0, len(whole) - len(first), 1500)]
    for end in [*ends, len(whole) - 1]:
        base.write_bytes(whole[:end])
        assert [entry.number for entry in read_baseline(base).entries] == [1]
    updated(tmp_path / "run2", base.parent)
    assert base.read_bytes() == whole


def test_a_torn_first_update_is_begun_anew(base: Path, tmp_path: Path) -> None:
    whole = base.read_bytes()
    base.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidEnvironmentError, match="no complete update"):
        read_baseline(base)
    updated(tmp_path / "run1", base.parent)
    assert base.read_bytes() == whole


def edited(line: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(line) | changes).encode()


@pytest.mark.parametrize(
    ("number", "edit", "message"),
    [
        (1, lambda line: b"{", "is no JSON"),
        (1, lambda line: b"[]", "neither an update nor a pin"),
        (1, lambda line: edited(line, baseline="x"), "neither an update nor a pin"),
        (1, lambda line: edited(line, schema_version=2), "schema version 2"),
        (1, lambda line: edited(line, rows="3"), "rows is not what it should be"),
        (1, lambda line: edited(line, rows=-1), "rows is not what it should be"),
        (1, lambda line: edited(line, entry=True), "entry is not what it should be"),
        (1, lambda line: edited(line, entry=2), "says it is entry 2"),
        (1, lambda line: edited(line, who=None), "who is not what it should be"),
        (1, lambda line: edited(line, manifest=[]), "manifest is not what it should be"),
        (1, lambda line: edited(line, beside={"../x": ""}), "beside is not what it should be"),
        (1, lambda line: edited(line, beside={"kernels.json": ""}), "were changed after they were written"),
        (2, lambda line: edited(line, duration_s=1.0), "were changed after they were written"),
        (5, lambda line: edited(line, rows=2), "were changed after they were written"),
        (5, lambda line: edited(line, manifest={"name": "x"}), "another scenario or machine"),
        (9, lambda line: edited(line, entry=7), "pins entry 7"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(
    number: int, edit: Any, message: str, base: Path, tmp_path: Path
) -> None:
    updated(write_run(tmp_path / "run2", at(some_rows(), 2)), base.parent)
    pin(base, entry=2, who="a", why="b", when=WHEN)
    lines = base.read_bytes().splitlines()
    assert len(lines) == 9
    lines[number - 1] = edit(lines[number - 1])
    base.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(SpecbenchError, match=message) as told:
        read_baseline(base)
    assert told.value.exit_code == 4
    assert told.value.line is not None
