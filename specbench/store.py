"""Rows on disk: one JSON object a line in DIR/rows.jsonl, appended and synced case by case, so that a run resumes.

A row's newline is its commit mark: a last line without it (or one that is no JSON) is what a killed run leaves, and is
cut away before the next append. Anything wrong further up is an error. Nothing is ever overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import JsonValue, ValidationError

from specbench.errors import InputError, InvalidEnvironmentError
from specbench.result_row import KNOWN_FINITE, SCHEMA_VERSION, Conditions, ResultRow, Status, non_finite

if TYPE_CHECKING:
    import pandas as pd

ROWS_FILE = "rows.jsonl"
MANIFEST_FILE = "manifest.json"
LOCK_FILE = ".lock"

REUSABLE: tuple[Status, ...] = ("ok", "skipped")

_BEGINNING = re.compile(rb'\{"schema_version": ?1,')
_DIGITS_AS_ONES = bytes.maketrans(b"0123456789E", b"1111111111e")
_SUSPECT = (b"1e111", b"1e+111")
_HUGE = re.compile(rb"[:,\[ ]-?[0-9.]+[eE]\+?[0-9]{3}")
_LONG = b"1" * 300
"""JSON numbers of 1e100 and more, and of 300 digits: beyond some of them float64 is infinite."""


class RowStore:
    """DIR/rows.jsonl and DIR/manifest.json, held by one writer at a time. Use it in a `with` block.

    Opening creates DIR, takes the lock and reads what is there. Raises InvalidEnvironmentError if another process
    holds the lock or if a row other than the last is broken.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"can't make this folder: {error.strerror}"
            raise InputError(message, remedy="give another folder to --out", file=directory) from None
        self._file = self.directory / ROWS_FILE
        self._lock = _take_lock(self.directory)
        try:
            self._rows, self._size = _parse(self._file) if self._file.exists() else ([], 0)
        except BaseException:
            os.close(self._lock)
            raise
        self._latest = {row.key: row for row in self._rows}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back; a closed store refuses to write. Closing twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def rows(self) -> list[ResultRow]:
        """All complete rows, oldest first."""
        return list(self._rows)

    def reusable(self, key: str) -> ResultRow | None:
        """The latest row of this key if it is ok or skipped; an invalid or failed one is to be measured again."""
        row = self._latest.get(key)
        return row if row is not None and row.status in REUSABLE else None

    def append(self, row: ResultRow) -> None:
        """Write one line and sync it; a torn tail is cut away first. The row is on disk when this returns."""
        self._refuse_if_closed()
        line = row.to_json_line().encode("ascii")
        is_new = not self._file.exists()
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size < self._size:
                raise InvalidEnvironmentError("was cut or replaced while this run was writing to it", file=self._file)
            if size > self._size:
                os.ftruncate(handle, self._size)
            view = memoryview(line)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        if is_new:
            _sync_directory(self.directory)
        self._size += len(line)
        self._rows.append(row)
        self._latest[row.key] = row

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace DIR/manifest.json as a whole: temporary file, sync, rename. Rows are never touched."""
        self._refuse_if_closed()
        found = non_finite(manifest)
        if found is not None:
            raise InputError("is not a finite number; a missing value is null", file=MANIFEST_FILE, key=found)
        text = json.dumps(manifest, allow_nan=False, indent=2, ensure_ascii=False)
        temporary = self.directory / f".{MANIFEST_FILE}.tmp"
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(self.directory / MANIFEST_FILE)
        _sync_directory(self.directory)

    def _refuse_if_closed(self) -> None:
        assert self._lock >= 0, "this store is closed"


def read_rows(path: Path | str) -> list[ResultRow]:
    """All complete rows of DIR or of a rows.jsonl, oldest first; a torn last line is left out. Takes no lock."""
    return list(iter_rows(path))


def iter_rows(path: Path | str) -> Iterator[ResultRow]:
    """`read_rows`, a row at a time: a long file never stands in memory as a whole."""
    file = Path(path)
    file = file / ROWS_FILE if file.is_dir() else file
    if not file.is_file():
        raise InputError("no rows here", remedy="run `specbench run SCENARIO --out DIR` first", file=file)
    for row, _ in _stream(file):
        yield row


def latest_rows(path: Path | str) -> list[ResultRow]:
    """The last row of each key, in the order in which the keys first appeared."""
    return list({row.key: row for row in read_rows(path)}.values())


def read_manifest(path: Path | str) -> dict[str, Any]:
    """DIR/manifest.json. Raises InputError if it is missing, InvalidEnvironmentError if it is broken."""
    file = Path(path) / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("no manifest here", remedy="give the folder of a run", file=file) from None
    except (ValueError, RecursionError) as error:
        raise InvalidEnvironmentError(f"is not JSON: {error}", file=file) from error
    if not isinstance(manifest, dict):
        raise InvalidEnvironmentError("is not a JSON object", file=file)
    return manifest


def load(path: Path | str) -> pd.DataFrame:
    """A frame with one row for the latest row of each key of DIR (or of a rows.jsonl).

    Columns: the row's own scalars (status, reason, case_name, ...), its conditions, its axes and its scalar metrics,
    each under its plain name. Missing values are missing (None or NaN, as pandas has it).
    """
    import pandas as pd

    own = ("key", "case_hash", "case_name", "status", "reason")
    end = ("environment", "code_revision", "started_at", "duration_s")
    flags = tuple(name for name in Conditions.__annotations__ if name != "prompt_categories")
    records: list[dict[str, Any]] = []
    for row in latest_rows(path):
        values = row.model_dump()
        held = {name: values["conditions"].get(name) for name in flags}
        groups = [{name: values[name] for name in own}, row.axes, held]
        groups += [_scalars(row.metrics or {}), {name: values[name] for name in end}]
        record: dict[str, Any] = {}
        for group in groups:
            twice = sorted(set(record) & set(group))
            if twice:
                raise InvalidEnvironmentError("an axis or metric has the name of another column", key=twice[0])
            record |= group
        records.append(record)
    return pd.DataFrame(records) if records else pd.DataFrame(columns=[*own, *flags, *end])


def _scalars(metrics: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {name: value for name, value in metrics.items() if not isinstance(value, list | dict)}


def _parse(file: Path) -> tuple[list[ResultRow], int]:
    """Complete rows and the bytes that they take; what follows those bytes is a torn tail."""
    rows: list[ResultRow] = []
    size = 0
    for row, end in _stream(file):
        rows.append(row)
        size = end
    return rows, size


def _stream(file: Path) -> Iterator[tuple[ResultRow, int]]:
    """Each complete row with the place where it ends; stops before a torn tail."""
    with file.open("rb") as handle:
        size, end = os.fstat(handle.fileno()).st_size, 0
        for number, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            row = _plain_row(line)
            if row is not None:
                yield row, end
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if end >= size:
                    return
                remedy = "restore the file, or start anew with --fresh"
                raise InvalidEnvironmentError(
                    f"a broken row: {error}", remedy=remedy, file=file, line=number
                ) from error
            yield _validate(record, file, number), end


def _plain_row(line: bytes) -> ResultRow | None:
    """The row of a line that is a valid one and can't hold a number that isn't finite, in one pass; None sends the line
    the long way, which says what is wrong."""
    if _BEGINNING.match(line) is None or line.count(b'"schema_version"') > 1:
        return None
    shape = line.translate(_DIGITS_AS_ONES)
    # A digest may hold what looks like an exponent, so only the slower search decides.
    if any(text in shape for text in _SUSPECT) and _HUGE.search(line) is not None:
        return None
    if b"NaN" in line or b"Infinity" in line or _LONG in shape:
        return None
    try:
        return ResultRow.model_validate_json(line, context=KNOWN_FINITE)
    except ValidationError:
        return None


def _validate(record: Any, file: Path, line: int) -> ResultRow:
    version = record.get("schema_version") if isinstance(record, dict) else None
    if isinstance(record, dict) and (version != SCHEMA_VERSION or isinstance(version, bool)):
        message = f"a row of schema version {version!r}; this program reads version {SCHEMA_VERSION}"
        remedy = "read it with the version of specbench that wrote it, or start anew with --fresh"
        raise InvalidEnvironmentError(message, remedy=remedy, file=file, line=line, key="schema_version")
    try:
        return ResultRow.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or None
        raise InvalidEnvironmentError(f"not a valid row: {first['msg']}", file=file, line=line, key=key) from error


def _take_lock(directory: Path) -> int:
    """File descriptor that holds DIR/.lock; the kernel frees it when the process ends, however it ends."""
    handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        message = f"process {owner} is already writing to this folder"
        remedy = "wait for it to end, or give another --out"
        raise InvalidEnvironmentError(message, remedy=remedy, file=directory) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _sync_directory(directory: Path) -> None:
    """Make a new or renamed entry of the directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
