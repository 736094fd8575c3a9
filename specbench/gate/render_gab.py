"""The candidate's values for github-action-benchmark (tools customBiggerIsBetter and customSmallerIsBetter), which
draws their history on a page. One file holds one direction, and the action refuses an empty one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from specbench.gate.text import clean, percent, unit_of
from specbench.gate.types import CaseVerdict, GateResult

Tool = Literal["customBiggerIsBetter", "customSmallerIsBetter"]
SUFFIXES: dict[Tool, str] = {"customBiggerIsBetter": ".bigger.json", "customSmallerIsBetter": ".smaller.json"}
_BIGGER = ("acceptance", "tokens_per_step", "num_accepted_tokens", "num_committed_tokens", "accepted")


def render_gab(result: GateResult) -> dict[Tool, list[dict[str, Any]]]:
    """name, value, unit (and range, extra) of each metric that the candidate has, by the way that is better. A metric
    whose every change counts stands where its name says: acceptance and accepted tokens up, counts of work down."""
    found: dict[Tool, list[dict[str, Any]]] = {"customBiggerIsBetter": [], "customSmallerIsBetter": []}
    for one in sorted(result.verdicts, key=lambda one: (one.case_name, one.case_hash, one.metric)):
        usable = one.candidate is not None and math.isfinite(one.candidate)
        if usable and one.verdict != "INVALID" and "drift" not in one.flags:
            found[_tool(one)].append(_entry(one))
    return found


def write_gab(result: GateResult, file: Path) -> list[Path]:
    """Write FILE.bigger.json and FILE.smaller.json (before FILE's own .json), the ones that hold anything; returns
    them. Raises OSError."""
    stem = file.with_suffix("") if file.suffix == ".json" else file
    written = []
    for tool, entries in render_gab(result).items():
        if entries:
            path = stem.with_name(stem.name + SUFFIXES[tool])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(entries, allow_nan=False, indent=2) + "\n", encoding="utf-8")
            written.append(path)
    return written


def _tool(one: CaseVerdict) -> Tool:
    bigger = one.direction == "up" or (one.direction == "both" and one.metric.startswith(_BIGGER))
    return "customBiggerIsBetter" if bigger else "customSmallerIsBetter"


def _entry(one: CaseVerdict) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": f"{clean(one.case_name)} · {clean(one.metric)}",
        "unit": unit_of(one.metric) or "1",
        "value": one.candidate,
        "extra": f"{one.verdict}: {clean(one.reason)}",
    }
    if one.low is not None and one.high is not None:
        entry["range"] = f"{percent(one.low)} to {percent(one.high)} of the baseline"
    return entry
