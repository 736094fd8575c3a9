"""The gate's answer as JSON for programs: everything that there is, versioned, strict (a missing number is null)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specbench.gate import words
from specbench.gate.types import VERDICTS, GateResult

SCHEMA_VERSION = 1


def as_json(result: GateResult) -> dict[str, Any]:
    """The document's content. `headline` and `counts` repeat for people what the rest says."""
    document = {
        "kind": "specbench-gate",
        "schema_version": SCHEMA_VERSION,
        "headline": words.headline(result),
        "exit_code": int(result.exit_code),
        "passed": result.passed,
        "reasons": list(result.reasons),
        "notes": list(result.notes),
        "armed": result.armed,
        "compared": result.compared,
        "counts": {verdict: result.count(verdict) for verdict in VERDICTS},
        "scenario": result.scenario,
        "candidate": {"path": result.candidate_dir, "fingerprint": result.fingerprint_candidate},
        "baseline": {"path": result.baseline_dir, "fingerprint": result.fingerprint_baseline},
        "policy": result.policy,
        "verdicts": [asdict(one) for one in words.ordered(result.verdicts)],
    }
    plain: dict[str, Any] = finite(document)
    return plain


def render_json(result: GateResult) -> str:
    """Strict JSON in ASCII."""
    return json.dumps(as_json(result), allow_nan=False, indent=2) + "\n"


def finite(value: object) -> Any:
    """Plain JSON types: NaN and infinite numbers are null, lone surrogates "?", and unknown objects their text."""
    if isinstance(value, Mapping):
        return {finite(str(key)): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).encode("utf-8", "replace").decode("utf-8")
