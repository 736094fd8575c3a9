"""Folders of runs for tests of baselines, history and commands, made from report_rows."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report_rows import make_manifest, make_row

from specbench.store import MANIFEST_FILE, ROWS_FILE

SPEEDS = ("speedup", "speedup_low", "speedup_high", "output_tokens_per_s")
SMALL = (("ngram(3)", 1, 1), ("ngram(3)", 1, 2), ("early_exit(8)", 3, 1))
OTHER = {"device": "cpu", "device_name": "Another CPU", "memory_gib": 64}
"""An environment of another machine."""


def some_rows(places: Sequence[tuple[str, int, int]] = SMALL, *, blocks: int = 8) -> list[dict[str, Any]]:
    return [make_row(*place, blocks=blocks) for place in places]


def at(rows: Sequence[dict[str, Any]], day: int, *, factor: float = 1.0) -> list[dict[str, Any]]:
    """The rows as measured on a day of January 2026, the speculative arm `factor` times as fast."""
    made = copy.deepcopy(list(rows))
    for row in made:
        row["started_at"] = f"2026-01-{day:02d}T10:00:00+00:00"
        row["code_revision"] = f"rev{day:04d}"
        row["key"] = f"{row['key'][:40]}{day}"
        for name in SPEEDS:
            if row["metrics"] and row["metrics"].get(name) is not None:
                row["metrics"][name] *= factor
        for block in row["samples"]["blocks"]:
            if block["arm"] == "spec":
                block["wall_s"] /= factor
    return made


def write_run(folder: Path, rows: Sequence[dict[str, Any]], **manifest: Any) -> Path:
    """A run's folder with these rows and report_rows' manifest, changed by `manifest`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / ROWS_FILE).write_text(lines, encoding="utf-8")
    (folder / MANIFEST_FILE).write_text(json.dumps(make_manifest(**manifest)), encoding="utf-8")
    return folder
