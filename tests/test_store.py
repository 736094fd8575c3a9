"""The row store: what may be written, what a kill leaves behind, and what is reused; fault rows I 80 and K 84."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from specbench import metrics
from specbench import store as store_module
from specbench.errors import ExitCode, InputError, InvalidEnvironmentError
from specbench.result_row import LATER_AXES, ResultRow, diagnostics_only, resume_key
from specbench.store import MANIFEST_FILE, ROWS_FILE, RowStore, latest_rows, load, read_manifest, read_rows

ROOT = Path(__file__).parent.parent
PROMPT = {"id": "p0", "category": "qa", "ar_tokens": 8, "ar_s": 0.2, "spec_tokens": 8, "spec_s": 0.1}
BLOCK = {
    "order": 0,
    "arm": "ar",
    "block": 0,
    "tokens": 8,
    "wall_s": 0.2,
    "steps": 8,
    "valid": True,
    "marks": ["thermal"],
}


def fields(key: str = "k0", **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "key": key,
        "case_hash": "c0",
        "case_name": "ngram(3) · depth 5 · batch 8 · T 0",
        "status": "ok",
        "axes": {"drafter": "ngram(3)", "depth": 5, "batch_size": 8, "context_len": None},
        "conditions": {
            "lossless": True,
            "synthetic": False,
            "output_check": "identical",
            "device": "cpu",
            "weights": "smollm2-135m-instruct @ 1a2b",
            "prompt_categories": ["qa"],
        },
        "metrics": {"speedup": 1.5, "acceptance_at": [0.5, None], "ttft_s": None, "null_reasons": {"ttft_s": "none"}},
        "samples": {"blocks": [BLOCK], "prompts": [PROMPT]},
        "environment": "e0",
        "code_revision": "r0",
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 1.5,
    }
    return base | changes


def row(key: str = "k0", **changes: Any) -> ResultRow:
    return ResultRow.model_validate(fields(key, **changes))


def without_result(key: str, status: str, reason: str = "out of memory") -> ResultRow:
    return row(key, status=status, reason=reason, metrics=None, samples={"blocks": [], "prompts": []})


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} in strict JSON")


def write(directory: Path, *rows: ResultRow) -> Path:
    with RowStore(directory) as store:
        for one in rows:
            store.append(one)
    return directory / ROWS_FILE


# ---- what a row may be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": "but"}, "no reason"),
        ({"metrics": None}, "has metrics"),
        ({"status": "failed", "reason": None, "metrics": None}, "a reason"),
        ({"status": "failed", "reason": "", "metrics": None}, "a reason"),
        ({"status": "failed", "reason": "oom"}, "neither metrics"),
        ({"status": "skipped", "reason": "oom", "metrics": None}, "nor samples"),
        ({"status": "invalid", "reason": "diverged"}, "claims speedup"),
        ({"status": "invalid", "reason": "diverged", "metrics": {"implied_overhead": 0.1}}, "claims implied_overhead"),
        ({"status": "invalid", "reason": None, "metrics": {}}, "a reason"),
        ({"status": "invalid", "reason": "diverged", "metrics": None}, "has metrics"),
        ({"status": "slow", "reason": "x"}, "status"),
        ({"metrics": {"tpot_s": None}}, "tpot_s is null without a reason"),
        ({"metrics": {"tpot_s": None, "null_reasons": {"tpot_s": ""}}}, "tpot_s is null without a reason"),
        ({"metrics": {"null_reasons": ["tpot_s"]}}, "null_reasons"),
        ({"schema_version": 2}, "schema_version"),
        ({"speed": 3}, "speed"),
        ({"key": ""}, "key"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"conditions": {"lossless": True}}, "synthetic"),
        ({"samples": {"blocks": [{**BLOCK, "arm": "both"}], "prompts": []}}, "arm"),
    ],
)
def test_an_impossible_row_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        row(**changes)


def test_possible_rows_of_every_status() -> None:
    assert row().status == "ok"
    assert without_result("k", "failed").metrics is None
    assert without_result("k", "skipped").metrics is None
    kept = diagnostics_only({"speedup": 1.5, "speedup_low": None, "step_s": 0.1, "null_reasons": {"speedup_low": "x"}})
    assert kept == {"step_s": 0.1, "null_reasons": {}}
    assert row(status="invalid", reason="diverged at token 3", metrics=kept).reason
    assert row(metrics={"joules_per_token": None, "joules_per_token_reason": "no NVML"}).status == "ok"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float64("nan")])
@pytest.mark.parametrize(
    "place",
    [
        lambda bad: {"metrics": {"tpot_s": bad}},
        lambda bad: {"metrics": {"acceptance_at": [0.5, bad]}},
        lambda bad: {"metrics": {"by_category": {"qa": {"tokens_per_step": bad}}}},
        lambda bad: {"axes": {"temperature": bad}},
        lambda bad: {"duration_s": bad},
        lambda bad: {"samples": {"blocks": [], "prompts": [{**PROMPT, "spec_s": bad}]}},
        lambda bad: {"samples": {"blocks": [{**BLOCK, "wall_s": bad}], "prompts": []}},
    ],
)
def test_nan_and_infinity_are_refused_everywhere(place: Any, bad: float) -> None:  # fault 84
    with pytest.raises(ValidationError):
        row(**place(bad))


def test_a_cell_without_steps_is_strict_json() -> None:  # fault 84
    empty = metrics.merge_metrics(
        metrics.acceptance_metrics([]),
        metrics.latency_metrics([]),
        metrics.step_split([]),
        metrics.throughput([]),
        metrics.roofline_metrics([], None, None),
        {"by_category": metrics.metrics_by_category([])},
    )
    line = row(status="invalid", reason="every sample was throttled", metrics=empty).to_json_line()
    record = json.loads(line, parse_constant=no_constants)
    assert record["metrics"]["acceptance_rate"] is None
    assert record["metrics"]["null_reasons"]["acceptance_rate"]


def test_a_row_is_one_line_and_comes_back_equal(tmp_path: Path) -> None:
    odd = without_result("k", "failed", "line\nfeed \u2028 lone \udce9 · tab\t")
    assert odd.to_json_line().count("\n") == 1
    file = write(tmp_path, row(), odd)
    assert read_rows(file) == read_rows(tmp_path) == [row(), odd]


def test_key_depends_on_every_part() -> None:
    keys = [resume_key("a", "b", "c", 1), resume_key("a", "b", "c", 2), resume_key("ab", "", "c", 1)]
    keys += [resume_key("a", "bc", "", 1), resume_key("x", "b", "c", 1), resume_key("a", "b", "x", 1)]
    assert len(set(keys)) == len(keys)
    assert resume_key("a", "b", "c") == keys[0]
    assert len(keys[0]) == 64


# ---- resume


def test_ok_and_skipped_are_reused_and_the_latest_row_wins(tmp_path: Path) -> None:
    invalid = row("invalid", status="invalid", reason="diverged", metrics={})
    rows = [row("ok"), without_result("skipped", "skipped"), without_result("failed", "failed"), invalid]
    rows += [without_result("again", "failed"), row("again"), row("worse"), without_result("worse", "failed")]
    with RowStore(tmp_path / "new" / "folder") as store:
        for one in rows:
            store.append(one)
        assert store.reusable("again") == row("again")
    with RowStore(tmp_path / "new" / "folder") as store:
        assert store.rows() == rows
        reused = {one.key for one in rows if store.reusable(one.key)}
        assert reused == {"ok", "skipped", "again"}
        assert store.reusable("never seen") is None
    latest = latest_rows(tmp_path / "new" / "folder")
    assert [one.key for one in latest] == ["ok", "skipped", "failed", "invalid", "again", "worse"]
    assert [one.status for one in latest[-2:]] == ["ok", "failed"]


def test_torn_last_line_gives_two_reused_and_one_rerun(tmp_path: Path) -> None:  # fault 80
    file = write(tmp_path, row("k0"), row("k1"), row("k2"))
    file.write_bytes(file.read_bytes()[:-20])
    with RowStore(tmp_path) as store:
        assert [key for key in ("k0", "k1", "k2") if store.reusable(key)] == ["k0", "k1"]
        store.append(row("k2"))
    assert [one.key for one in read_rows(file)] == ["k0", "k1", "k2"]
    assert file.read_bytes().count(b"\n") == 3


def test_a_line_torn_at_any_byte_is_forgiven_and_cut_away(tmp_path: Path) -> None:  # fault 80
    second = without_result("k1", "skipped", "memory")
    file = write(tmp_path, row("k0"), second)
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    again = second.to_json_line().encode()
    for length in range(first, len(whole)):
        file.write_bytes(whole[:length])
        assert [one.key for one in read_rows(file)] == ["k0"]
        with RowStore(tmp_path) as store:
            assert store.reusable("k1") is None
            assert file.read_bytes() == whole[:length], "opening must not write"
            store.append(second)
        assert file.read_bytes() == whole[:first] + again == whole


@pytest.mark.parametrize("tail", [b'{"key": "k', b"\x00\x00\x00\x00", b"garbage\n", b"\xff\xfe\n", b"\n", b"{}"])
def test_other_torn_tails(tmp_path: Path, tail: bytes) -> None:
    file = write(tmp_path, row("k0"))
    file.write_bytes(file.read_bytes() + tail)
    write(tmp_path, row("k1"))
    assert [one.key for one in read_rows(file)] == ["k0", "k1"]


@pytest.mark.parametrize("middle", [b"{broken", b"", b'{"key": "k1"', b"\xff", b"[1", b"NULL"])
def test_a_broken_middle_is_an_error_with_file_and_line(tmp_path: Path, middle: bytes) -> None:  # fault 80
    file = write(tmp_path, row("k0"), row("k1"), row("k2"))
    lines = file.read_bytes().split(b"\n")
    lines[1] = middle
    broken = b"\n".join(lines)
    file.write_bytes(broken)
    for attempt in (lambda: RowStore(tmp_path), lambda: read_rows(tmp_path), lambda: load(tmp_path)):
        with pytest.raises(InvalidEnvironmentError) as caught:
            attempt()
        assert (caught.value.file, caught.value.line) == (file, 2)
        assert caught.value.exit_code == ExitCode.BAD_ENVIRONMENT
    assert file.read_bytes() == broken
    with pytest.raises(InvalidEnvironmentError, match="broken row"):
        RowStore(tmp_path)  # not "already writing": a failed opening gave the lock back


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"status": "fine"}, "status"),
        ({"metrics": {"speedup": math.nan}}, None),
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_json_that_is_no_row_is_an_error_even_at_the_end(
    tmp_path: Path, change: dict[str, Any], key: str | None, position: int
) -> None:
    """A complete line is not torn: to drop it would lose a row without a word."""
    lines = [row("k0").to_json_line(), row("k1").to_json_line()]
    lines[position] = json.dumps(json.loads(lines[position]) | change) + "\n"
    (tmp_path / ROWS_FILE).write_text("".join(lines), encoding="utf-8")
    with pytest.raises(InvalidEnvironmentError) as caught:
        RowStore(tmp_path)
    assert (caught.value.line, caught.value.key) == (position + 1, key)


def test_a_json_line_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ROWS_FILE).write_text("[1, 2]\n" + row().to_json_line(), encoding="utf-8")
    with pytest.raises(InvalidEnvironmentError, match="not a valid row"):
        read_rows(tmp_path)


def test_a_failed_write_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with RowStore(tmp_path) as store:
        store.append(row("k0"))

        def full_disk(handle: int, data: Any) -> int:
            real(handle, bytes(data)[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space"):
            store.append(row("k1"))
        monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:7]))
        store.append(row("k2"))
        assert [one.key for one in store.rows()] == ["k0", "k2"]
    assert [one.key for one in read_rows(tmp_path)] == ["k0", "k2"]


def test_every_row_is_synced_and_a_new_file_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def spy(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    monkeypatch.setattr(os, "fsync", spy)
    write(tmp_path, row("k0"), row("k1"))
    assert synced == [ROWS_FILE, tmp_path.name, ROWS_FILE]


def test_rows_cut_by_someone_else_are_noticed(tmp_path: Path) -> None:
    with RowStore(tmp_path) as store:
        store.append(row("k0"))
        (tmp_path / ROWS_FILE).write_bytes(b"")
        with pytest.raises(InvalidEnvironmentError, match="cut or replaced"):
            store.append(row("k1"))


WRITER = """
import json, sys
from specbench.result_row import ResultRow
from specbench.store import RowStore
fields = json.loads(sys.argv[2])
with RowStore(sys.argv[1]) as store:
    count = len(store.rows())
    print("ready", flush=True)
    while True:
        store.append(ResultRow(**fields | {"key": f"k{count}"}))
        count += 1
"""


def test_kill_dash_nine_loses_at_most_the_row_being_written(tmp_path: Path) -> None:
    rng = random.Random(0)
    template = without_result("k", "failed", "x" * 50_000).to_json_line()
    done = 0
    for _ in range(10):
        command = [sys.executable, "-c", WRITER, str(tmp_path), template]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        file = tmp_path / ROWS_FILE
        rows = read_rows(file) if file.exists() else []
        assert [one.key for one in rows] == [f"k{index}" for index in range(len(rows))]
        assert all(len(one.reason or "") == 50_000 for one in rows)
        assert len(rows) >= done
        done = len(rows)
    assert done > 0, "no writer lived long enough to append"
    write(tmp_path, row("last"))
    assert [one.key for one in read_rows(tmp_path)][-2:] == [f"k{done - 1}", "last"]


# ---- one writer


def test_a_second_writer_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    code = "import sys; from specbench.store import RowStore; RowStore(sys.argv[1])"
    with RowStore(tmp_path) as store:
        with pytest.raises(InvalidEnvironmentError, match=f"process {os.getpid()} is already writing"):
            RowStore(tmp_path)
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert other.returncode != 0
        assert f"process {os.getpid()} is already writing" in other.stderr
        store.append(row())
        assert len(latest_rows(tmp_path)) == 1, "readers need no lock"
    store.close()
    with pytest.raises(AssertionError, match="closed"):
        store.append(row("k1"))
    write(tmp_path, row("k2"))
    assert len(read_rows(tmp_path)) == 2


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    for path in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(InputError, match="folder"):
            RowStore(path)


# ---- manifest


def test_manifest_is_replaced_as_a_whole_and_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, row())
    before = file.read_bytes()
    with RowStore(tmp_path) as store:
        store.write_manifest({"name": "quickstart · 1", "roofs": None})
        assert read_manifest(tmp_path) == {"name": "quickstart · 1", "roofs": None}
        with pytest.raises(InputError, match=r"roofs\.0"):
            store.write_manifest({"name": "second", "roofs": [math.inf]})

        def crash(self: Path, target: Path) -> Path:
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            store.write_manifest({"name": "third"})
        monkeypatch.undo()
        assert read_manifest(tmp_path)["name"] == "quickstart · 1"
        store.write_manifest({"name": "fourth"})
    assert read_manifest(tmp_path) == {"name": "fourth"}
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_missing_and_broken_manifests(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no manifest"):
        read_manifest(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / MANIFEST_FILE).write_text(text, encoding="utf-8")
        with pytest.raises(InvalidEnvironmentError, match="is not"):
            read_manifest(tmp_path)


# ---- frame


def test_load_flattens_the_latest_rows(tmp_path: Path) -> None:
    values = {"speedup": 1.5, "by_category": {"qa": {}}, "acceptance_at": [0.5], "ttft_s": None}
    good = row("k0", metrics=values | {"null_reasons": {"ttft_s": "none"}})
    file = write(tmp_path, without_result("k0", "failed"), without_result("k1", "skipped"), good)
    for path in (tmp_path, file, str(file)):
        frame = load(path)
        assert frame["key"].tolist() == ["k0", "k1"]
        assert frame["status"].tolist() == ["ok", "skipped"]
        assert frame["case_name"][0] == "ngram(3) · depth 5 · batch 8 · T 0"
        assert frame["batch_size"].tolist() == [8, 8]
        assert frame["speedup"][0] == 1.5
        assert frame["speedup"].isna().tolist() == [False, True]
        assert frame["ttft_s"].isna().all()
        assert frame["lossless"].tolist() == [True, True]
        assert frame["reason"][1] == "out of memory"
        assert not {"by_category", "acceptance_at", "null_reasons", "samples", "prompt_categories"} & set(frame.columns)


def test_load_of_no_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows"):
        load(tmp_path)
    (tmp_path / ROWS_FILE).write_bytes(b"")
    assert load(tmp_path).empty
    assert "status" in load(tmp_path).columns


def test_load_refuses_two_columns_of_one_name(tmp_path: Path) -> None:
    write(tmp_path, row(axes={"speedup": "x2"}))
    with pytest.raises(InvalidEnvironmentError, match="speedup"):
        load(tmp_path)


def test_importing_the_store_loads_neither_pandas_nor_torch() -> None:
    code = "import sys, specbench.store, specbench.metrics, specbench.stats; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"pandas", "torch", "scipy", "matplotlib"} & set(loaded.split())


def test_rows_of_earlier_versions_get_the_axes_that_came_later() -> None:
    """Theirs stay as they are, in their order; what a row says itself is kept."""
    rows = latest_rows(ROOT / "results" / "quickstart")
    assert len(rows) == 25
    for row in rows:
        assert list(row.axes)[-4:] == ["verification", "rollback", "page_size", "depth_policy"]
        assert [row.axes[name] for name in LATER_AXES] == ["token", "compact", 16, "fixed"]
    newer = rows[0].model_dump() | {"axes": {"page_size": 64, "depth": 2}}
    assert ResultRow.model_validate(newer).axes == {
        "page_size": 64,
        "depth": 2,
        "verification": "token",
        "rollback": "compact",
        "depth_policy": "fixed",
    }


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-2.5E+400", "1" * 400 + ".0"])
def test_a_number_that_is_not_finite_is_refused_however_it_is_written(tmp_path: Path, text: str) -> None:
    """K 84: rows are read in one pass where nothing in them can overflow, and all of these can."""
    line = row("k0").to_json_line()
    assert '"duration_s":' in line
    broken = re.sub(r'"wall_s":[^,}]+', f'"wall_s":{text}', line, count=1)
    assert broken != line
    (tmp_path / ROWS_FILE).write_text(broken, encoding="utf-8")
    with pytest.raises(InvalidEnvironmentError, match="finite"):
        read_rows(tmp_path)


def test_a_row_reads_the_same_in_one_pass_and_the_long_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [row("k0").to_json_line(), row("k1").to_json_line()]
    (tmp_path / ROWS_FILE).write_text("".join(lines), encoding="utf-8")
    quick = read_rows(tmp_path)
    monkeypatch.setattr(store_module, "_plain_row", lambda line: None)
    assert read_rows(tmp_path) == quick == [row("k0"), row("k1")]
