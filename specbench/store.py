"""Rows on disk: one JSON object a line in DIR/rows.jsonl, appended and synced case by case, so that a run resumes.

A row's newline is its commit mark: a last line without it (or one that is no JSON) is what a killed run leaves, and is
cut away before the next append. Anything wrong further up is an error. Nothing is ever overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator, with_config
from typing_extensions import TypedDict

from specbench.errors import InputError, InvalidEnvironmentError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION: Literal[1] = 1
ROWS_FILE = "rows.jsonl"
MANIFEST_FILE = "manifest.json"
LOCK_FILE = ".lock"

Status = Literal["ok", "invalid", "failed", "skipped"]
REUSABLE: tuple[Status, ...] = ("ok", "skipped")
SPEEDUP_CLAIMS = ("speedup", "speedup_low", "speedup_high", "implied_overhead")

_FORBID = ConfigDict(extra="forbid")


@with_config(_FORBID)
class Conditions(TypedDict):
    """What a number holds under. `output_check`: how the tokens compared with the AR arm's."""

    lossless: bool
    synthetic: bool
    output_check: Literal["identical", "near_tie", "diverged", "distribution"] | None
    device: str
    weights: str
    prompt_categories: list[str]


@with_config(_FORBID)
class BlockSample(TypedDict):
    """One timed block of one arm; `marks` say what disturbed it."""

    order: int
    arm: Literal["ar", "spec"]
    block: int
    tokens: int
    wall_s: float
    steps: int
    valid: bool
    marks: list[str]


@with_config(_FORBID)
class PromptSample(TypedDict):
    """One prompt's tokens and seconds in both arms, for the paired bootstrap."""

    id: str
    category: str
    ar_tokens: int
    ar_s: float
    spec_tokens: int
    spec_s: float


@with_config(_FORBID)
class Samples(TypedDict):
    """The raw samples, from which statistics can be computed anew."""

    blocks: list[BlockSample]
    prompts: list[PromptSample]


def _no_samples() -> Samples:
    return {"blocks": [], "prompts": []}


class ResultRow(BaseModel):
    """One case's result; `status` decides which fields may exist.

    ok: metrics, no reason. invalid: a reason and diagnostics, no speedup. failed, skipped: a reason, neither metrics
    nor samples. A metric that is None has its reason in `metrics["null_reasons"]` (or in NAME_reason). NaN and
    Infinity are refused anywhere. Raises pydantic.ValidationError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str = Field(min_length=1)
    case_hash: str
    case_name: str
    status: Status
    reason: str | None = None
    axes: dict[str, JsonValue]
    conditions: Conditions
    metrics: dict[str, JsonValue] | None = None
    samples: Samples = Field(default_factory=_no_samples)
    warnings: list[str] = Field(default_factory=list)
    environment: str
    code_revision: str
    started_at: str
    duration_s: float = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = _non_finite(self.model_dump())
        if found is not None:
            raise ValueError(f"{found} is not a finite number; a missing value is null, with a reason")
        if (self.status == "ok") != (self.reason is None) or self.reason == "":
            raise ValueError(f"a row that is {self.status} has {'no reason' if self.status == 'ok' else 'a reason'}")
        if self.status in ("ok", "invalid"):
            if self.metrics is None:
                raise ValueError(f"a row that is {self.status} has metrics")
            _check_metrics(self.metrics, allow_speedup=self.status == "ok")
        elif self.metrics is not None or self.samples["blocks"] or self.samples["prompts"]:
            raise ValueError(f"a row that is {self.status} has neither metrics nor samples")
        return self

    def to_json_line(self) -> str:
        """Strict JSON in ASCII and a newline, so that a row is one line whatever its strings hold."""
        return json.dumps(self.model_dump(), allow_nan=False, separators=(",", ":")) + "\n"


def diagnostics_only(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What an invalid row may keep: everything but the speedup and what is computed from it."""
    kept = {name: value for name, value in metrics.items() if name not in SPEEDUP_CLAIMS}
    reasons = {name: why for name, why in metrics.get("null_reasons", {}).items() if name not in SPEEDUP_CLAIMS}
    return kept | {"null_reasons": reasons}


def resume_key(case_hash: str, code_revision: str, environment: str, schema_version: int = SCHEMA_VERSION) -> str:
    """Key of a row: sha256 of its case, code, machine and schema. Rows of equal keys answer the same question."""
    text = json.dumps([case_hash, code_revision, environment, schema_version])
    return hashlib.sha256(text.encode()).hexdigest()


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
        found = _non_finite(manifest)
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
    file = Path(path)
    file = file / ROWS_FILE if file.is_dir() else file
    if not file.is_file():
        raise InputError("no rows here", remedy="run `specbench run SCENARIO --out DIR` first", file=file)
    return _parse(file)[0]


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
    except ValueError as error:
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
        groups = [{name: values[name] for name in own}, row.axes, {name: values["conditions"][name] for name in flags}]
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


def _check_metrics(metrics: Mapping[str, JsonValue], *, allow_speedup: bool) -> None:
    """Raise ValueError on a claim that may not be made, or on a null without a reason."""
    claims = [name for name in SPEEDUP_CLAIMS if metrics.get(name) is not None]
    if claims and not allow_speedup:
        raise ValueError(f"an invalid row claims {', '.join(claims)}")
    reasons = metrics.get("null_reasons", {})
    if not isinstance(reasons, dict):
        raise ValueError("null_reasons is not an object")
    for name, value in metrics.items():
        is_reason = name.endswith("_reason")
        if value is None and not is_reason and not (reasons.get(name) or metrics.get(f"{name}_reason")):
            raise ValueError(f"metrics.{name} is null without a reason in null_reasons")


def _non_finite(value: Any, path: str = "") -> str | None:
    """The path of the first NaN or Infinity anywhere inside, or None."""
    if isinstance(value, float):
        return path if not math.isfinite(value) else None
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        found = _non_finite(item, f"{path}.{key}" if path else str(key))
        if found is not None:
            return found
    return None


def _parse(file: Path) -> tuple[list[ResultRow], int]:
    """Complete rows and the bytes that they take; what follows those bytes is a torn tail."""
    data = file.read_bytes()
    rows: list[ResultRow] = []
    start, number = 0, 0
    while start < len(data):
        number += 1
        end = data.find(b"\n", start)
        if end < 0:
            break
        try:
            record = json.loads(data[start:end])
        except ValueError as error:
            if end + 1 == len(data):
                break
            remedy = "restore the file, or start anew with --fresh"
            raise InvalidEnvironmentError(f"a broken row: {error}", remedy=remedy, file=file, line=number) from error
        rows.append(_validate(record, file, number))
        start = end + 1
    return rows, start


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
