"""Baselines that people can trust: who put them there, when and why, and nothing ever overwritten.

    specbench baseline update runs/quickstart --baseline results/baselines --who "A. Name" --why "first baseline"

A folder of baselines holds one file for each scenario and machine, SCENARIO-FINGERPRINT.jsonl. The file only grows: an
update is a line that says who, when and why, then the run's rows; a pin is a line that names an update. The gate
compares with the latest update, and against drift with the pinned one (the first, until another is pinned).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specbench.errors import InputError, InvalidEnvironmentError
from specbench.gate import identity
from specbench.gate.evidence import EXTENSIONS
from specbench.gate.exact import KERNELS_FILE
from specbench.gate.text import clean, counted
from specbench.result_row import ResultRow
from specbench.store import MANIFEST_FILE, ROWS_FILE, latest_rows, read_manifest

SCHEMA_VERSION = 1
BESIDE = re.compile(rf"{re.escape(KERNELS_FILE)}|extend-[0-9]+/{re.escape(ROWS_FILE)}")
"""What the gate reads beside a run's rows: the kernels' resources, and blocks that were measured later."""


@dataclass(frozen=True)
class Entry:
    """One update: the rows of one run, as they were. `left_out` names cells that were not ok, and why; `beside` holds
    the files that the gate reads beside a run's rows (BESIDE), name -> text."""

    number: int
    who: str
    when: str
    why: str
    source: str
    left_out: tuple[str, ...]
    beside: Mapping[str, str]
    manifest: Mapping[str, Any]
    rows: tuple[ResultRow, ...]

    @property
    def label(self) -> str:
        return f"entry {self.number} of {self.when[:10]}"


@dataclass(frozen=True)
class Pin:
    """Which entry drift is seen against."""

    entry: int
    who: str
    when: str
    why: str


@dataclass(frozen=True)
class Baseline:
    """A baseline file; entries and pins oldest first. `size`: bytes of what is complete."""

    path: Path
    scenario: str
    fingerprint: str
    entries: tuple[Entry, ...]
    pins: tuple[Pin, ...]
    size: int

    @property
    def latest(self) -> Entry:
        return self.entries[-1]

    @property
    def pinned(self) -> Entry:
        return self.entries[self.pins[-1].entry - 1] if self.pins else self.entries[0]


def read_baseline(path: Path) -> Baseline:
    """A baseline file. A last update that was cut off is left out, as a run's last row is; InvalidEnvironmentError on
    anything else that is broken, InputError where there is no file."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise InputError("no baseline file here", remedy="specbench baseline update RUN ...", file=path) from None
    baseline = _parse(path, data)
    if baseline is None:
        raise _broken("holds no complete update", path, 1)
    return baseline


def _parse(path: Path, data: bytes) -> Baseline | None:
    """What the bytes hold, or None where they hold no complete update."""
    complete = data.split(b"\n")[:-1]
    entries: list[Entry] = []
    pins: list[Pin] = []
    size, place = 0, 0
    while place < len(complete):
        note = _note(complete[place], path, place + 1)
        count = note["rows"] if note["baseline"] == "update" else 0
        body = complete[place + 1 : place + 1 + count]
        if len(body) < count:
            break
        if note["baseline"] == "update":
            entries.append(_entry(note, body, len(entries) + 1, path, place + 1))
        elif note["entry"] > len(entries):
            raise _broken(f"pins entry {note['entry']}, which is not above it", path, place + 1)
        else:
            pins.append(Pin(note["entry"], note["who"], note["when"], note["why"]))
        size += sum(len(line) + 1 for line in complete[place : place + 1 + count])
        place += 1 + count
    if not entries:
        return None
    name, fingerprint = machine_of(entries[0].manifest, path)
    for entry in entries:
        if identity.differences(entries[0].manifest, entry.manifest):
            raise _broken(f"entry {entry.number} is of another scenario or machine than entry 1", path, 1)
    return Baseline(path, name, fingerprint, tuple(entries), tuple(pins), size)


def baselines_in(folder: Path) -> list[Baseline]:
    """All baseline files of a folder, by name, but for those whose first update was cut off; or the one that `folder`
    itself is."""
    if folder.is_file():
        return [read_baseline(folder)]
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path.name != ROWS_FILE]
    found = [_parse(path, path.read_bytes()) for path in paths]
    return [baseline for baseline in found if baseline is not None]


def find_baseline(folder: Path, manifest: Mapping[str, Any], run: Path) -> Baseline:
    """The file for a run's scenario and machine. InvalidEnvironmentError where there is none: an absent
    baseline, or one of another machine, is never a pass."""
    name, fingerprint = machine_of(manifest, run / MANIFEST_FILE)
    found = baselines_in(folder) if folder.exists() else []
    same = _comparable(found, manifest)
    if same is not None:
        return same
    there = ", ".join(f"{clean(one.scenario, 60)} on {one.fingerprint}" for one in found) or "none"
    message = f"no baseline for scenario {clean(name, 60)} on machine {fingerprint}; there: {there}"
    remedy = f"specbench baseline update {run} --baseline {folder} --who NAME --why REASON"
    raise InvalidEnvironmentError(message, remedy=remedy, file=folder)


def update(
    run: Path, folder: Path, *, who: str, why: str, when: str, drop_missing: bool = False
) -> tuple[Baseline, Entry]:
    """Append the run's rows as a new entry; returns the file as it now is, and the entry.

    Only ok and skipped rows become a baseline, the others are named in the entry. InputError where who or why is empty,
    where nothing is ok, where the run is the latest entry already, or where it lacks cases of the latest entry and
    `drop_missing` is not set.
    """
    who, why = _said(who, "--who"), _said(why, "--why")
    manifest = read_manifest(run)
    rows = {row.case_hash: row for row in latest_rows(run)}.values()
    kept = [row for row in rows if row.status in ("ok", "skipped")]
    _check_run(run, manifest, kept)
    if folder.is_file():
        raise InputError("is a file", remedy="give --baseline a folder", file=folder)
    name, fingerprint = machine_of(manifest, run / MANIFEST_FILE)
    same = _comparable(baselines_in(folder), manifest) if folder.is_dir() else None
    path = same.path if same is not None else folder / f"{_file_name(name)}-{fingerprint}.jsonl"
    body, beside = "".join(row.to_json_line() for row in kept), _beside(run)
    note: dict[str, Any] = {"baseline": "update", "schema_version": SCHEMA_VERSION}
    said = {"who": who, "when": when, "why": why, "source": str(run)}
    faults = [f"{row.case_name}: {row.status}: {row.reason}" for row in rows if row.status not in ("ok", "skipped")]
    held = {"left_out": faults, "rows": len(kept), "sha256": _digest(body, beside), "beside": beside}
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = _parse(path, path.read_bytes())
        if before is not None:
            _check_successor(before, kept, drop_missing, run)
        note["entry"] = len(before.entries) + 1 if before is not None else 1
        _append(handle, before.size if before is not None else 0, note | said | held | {"manifest": manifest}, body)
    finally:
        os.close(handle)
    after = read_baseline(path)
    return after, after.latest


def pin(path: Path, *, entry: int | None, who: str, why: str, when: str) -> Baseline:
    """Append a pin of `entry` (default: the latest). InputError where there is no such entry, or where who or why is
    empty."""
    who, why = _said(who, "--who"), _said(why, "--why")
    read_baseline(path)
    handle = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = read_baseline(path)
        number = len(before.entries) if entry is None else entry
        if not 1 <= number <= len(before.entries):
            remedy = f"give --entry from 1 to {len(before.entries)}"
            raise InputError(f"no entry {number} here", remedy=remedy, file=path)
        note = {"baseline": "pin", "schema_version": SCHEMA_VERSION, "entry": number, "who": who, "when": when}
        _append(handle, before.size, note | {"why": why}, "")
    finally:
        os.close(handle)
    return read_baseline(path)


def as_run(entry: Entry, folder: Path) -> Path:
    """Write the entry as a run's folder, rows and manifest, into the new folder `folder`; returns it."""
    folder.mkdir(parents=True)
    (folder / ROWS_FILE).write_text("".join(row.to_json_line() for row in entry.rows), encoding="ascii")
    (folder / MANIFEST_FILE).write_text(json.dumps(entry.manifest, allow_nan=False), encoding="utf-8")
    for name, text in entry.beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def machine_of(manifest: Mapping[str, Any], file: Path) -> tuple[str, str]:
    """Scenario and fingerprint (of gate/identity.py) that a manifest speaks of. Raises InvalidEnvironmentError where it
    names no scenario or tells nothing of the machine."""
    for key, kind in (("name", str), ("fingerprint", str), ("environment", dict)):
        value = manifest.get(key)
        if not isinstance(value, kind) or not value:
            raise InvalidEnvironmentError("the manifest does not say", remedy="run it again", file=file, key=key)
    return str(manifest["name"]), identity.fingerprint(manifest)


def _comparable(found: list[Baseline], manifest: Mapping[str, Any]) -> Baseline | None:
    """The baseline of the same scenario and, within the tolerances of identity.py, the same machine."""
    for baseline in found:
        if not identity.differences(baseline.latest.manifest, manifest):
            return baseline
    return None


def _check_run(run: Path, manifest: Mapping[str, Any], kept: list[ResultRow]) -> None:
    """Something is ok, all is of the manifest's machine, and the manifest is strict JSON."""
    if not any(row.status == "ok" for row in kept):
        raise InputError("no cell of this run is ok", remedy="a baseline needs at least one", file=run)
    machines = sorted({row.environment for row in kept})
    if machines != [manifest.get("fingerprint")]:
        message = f"rows of {', '.join(machines)} under a manifest of {manifest.get('fingerprint')}"
        raise InvalidEnvironmentError(message, remedy="measure on one machine, with --fresh", file=run)
    try:
        json.dumps(manifest, allow_nan=False)
    except ValueError as error:
        message = f"holds a number that is none: {error}"
        raise InvalidEnvironmentError(message, remedy="run it again", file=run / MANIFEST_FILE) from None


def _beside(run: Path) -> dict[str, str]:
    """BESIDE's files of a run: name -> text."""
    files = [run / KERNELS_FILE, *sorted(run.glob(f"{EXTENSIONS}/{ROWS_FILE}"))]
    texts: dict[str, str] = {}
    for file in files:
        name = file.relative_to(run).as_posix()
        if not file.is_file() or not BESIDE.fullmatch(name):
            continue
        try:
            texts[name] = file.read_text(encoding="utf-8")
        except ValueError:
            raise InvalidEnvironmentError("is not UTF-8", remedy="make it again", file=file) from None
    return texts


def _check_successor(before: Baseline, rows: list[ResultRow], drop_missing: bool, run: Path) -> None:
    if [row.to_json_line() for row in before.latest.rows] == [row.to_json_line() for row in rows]:
        raise InputError(f"is {before.latest.label} of {before.path.name} already", remedy="nothing to do", file=run)
    there = {row.case_hash for row in rows}
    gone = [row.case_name for row in before.latest.rows if row.case_hash not in there]
    if gone and not drop_missing:
        message = f"lacks {counted(len(gone), 'case')} of the baseline, such as {clean(gone[0], 120)}"
        raise InputError(message, remedy="run the whole scenario, or give --drop-missing", file=run)


def _append(handle: int, size: int, note: Mapping[str, Any], body: str) -> None:
    """Cut a torn tail away, then write the note and the rows in one piece, and sync."""
    line = json.dumps(note, allow_nan=False, separators=(",", ":")) + "\n"
    if os.fstat(handle).st_size > size:
        os.ftruncate(handle, size)
    view = memoryview((line + body).encode("ascii"))
    while view:
        view = view[os.write(handle, view) :]
    os.fsync(handle)


def _note(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        note = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _broken(f"is no JSON: {error}", path, number) from error
    if not isinstance(note, dict) or note.get("baseline") not in ("update", "pin"):
        raise _broken("neither an update nor a pin", path, number)
    if note.get("schema_version") != SCHEMA_VERSION:
        message = f"a baseline of schema version {note.get('schema_version')!r}, this program reads {SCHEMA_VERSION}"
        raise InvalidEnvironmentError(message, remedy="make a new baseline", file=path, line=number)
    wanted: dict[str, type] = {"entry": int, "who": str, "when": str, "why": str}
    if note["baseline"] == "update":
        wanted |= {"rows": int, "sha256": str, "manifest": dict, "source": str, "left_out": list, "beside": dict}
    for name, kind in wanted.items():
        value = note.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 1):
            raise _broken(f"{name} is not what it should be", path, number)
    return note


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _entry(note: Mapping[str, Any], body: list[bytes], number: int, path: Path, line: int) -> Entry:
    if note["entry"] != number:
        raise _broken(f"says it is entry {note['entry']}, and it is entry {number}", path, line)
    beside = note["beside"]
    if not all(BESIDE.fullmatch(name) and isinstance(text, str) for name, text in beside.items()):
        raise _broken("beside is not what it should be", path, line)
    if _digest(b"".join(row + b"\n" for row in body), beside) != note["sha256"]:
        raise _broken(f"the rows of entry {number} were changed after they were written", path, line)
    rows = []
    for place, text in enumerate(body, start=line + 1):
        try:
            rows.append(ResultRow.model_validate(json.loads(text)))
        except (ValueError, ValidationError) as error:
            raise _broken(f"not a valid row: {error}", path, place) from error
    left_out = tuple(str(one) for one in note["left_out"])
    who, when, why, source = (str(note[name]) for name in ("who", "when", "why", "source"))
    return Entry(number, who, when, why, source, left_out, beside, note["manifest"], tuple(rows))


def _broken(message: str, path: Path, line: int) -> InvalidEnvironmentError:
    return InvalidEnvironmentError(message, remedy="restore the file from version control", file=path, line=line)


def _said(text: str, option: str) -> str:
    if not text.strip():
        raise InputError("is empty", remedy="a baseline's history says who and why", key=option)
    return clean(text)


def _file_name(text: str) -> str:
    """The text as a part of a file's name; where that changes it, with a digest, so that two names stay two."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:80].lstrip(".")
    return name if name == text else f"{name}.{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"


def _digest(body: str | bytes, beside: Mapping[str, str]) -> str:
    digest = hashlib.sha256(body.encode("ascii") if isinstance(body, str) else body)
    digest.update(json.dumps(beside, sort_keys=True).encode("ascii"))
    return digest.hexdigest()
