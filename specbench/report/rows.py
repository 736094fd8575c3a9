"""Read result rows as plain dicts: one accessor for each question, and text for numbers.

Every number passes `number`, so a missing, boolean, infinite or NaN value is None here and a dash (with its reason
elsewhere) on the page: it's never 0 and never "nan".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

DASH = "–"
DAGGER = "†"
STATUSES = ("ok", "invalid", "failed", "skipped")
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2028-\u2029\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def number(value: object) -> float | None:
    """The value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def section(row: Row, name: str) -> Mapping[str, Any]:
    """A nested dict of the row (`axes`, `conditions`, `metrics`, ...), empty where it's null or absent."""
    value = row.get(name)
    if type(value) is dict:
        return value
    return value if isinstance(value, Mapping) else {}


def axis(row: Row, name: str) -> Any:
    return section(row, "axes").get(name)


def metric(row: Row, name: str) -> float | None:
    """A scalar metric, or None. Only `ok` rows have performance; an `invalid` row keeps its diagnostics alone."""
    return number(section(row, "metrics").get(name))


def metric_list(row: Row, name: str) -> list[float | None]:
    value = section(row, "metrics").get(name)
    return [number(item) for item in value] if isinstance(value, list | tuple) else []


def status(row: Row) -> str:
    return str(row.get("status", "failed"))


def is_ok(row: Row) -> bool:
    return status(row) == "ok"


def batch_size(row: Row) -> int | None:
    value = number(axis(row, "batch_size"))
    return None if value is None or value < 1 else int(value)


def depth(row: Row) -> int:
    value = number(axis(row, "depth"))
    return 0 if value is None else int(value)


def drafter(row: Row) -> str:
    return plain(axis(row, "drafter") or "unnamed")


def is_synthetic(row: Row) -> bool:
    return bool(section(row, "conditions").get("synthetic"))


def is_predicted(row: Row) -> bool:
    """True for a row that the cost model computed: nothing of it was measured."""
    return bool(section(row, "conditions").get("predicted"))


def is_control(row: Row) -> bool:
    """True for a cell that never drafts: it measures the engine's overhead, it can't pay off."""
    return depth(row) == 0 or axis(row, "drafter_kind") == "none"


def speedup(row: Row) -> tuple[float, float | None, float | None] | None:
    """Speedup with the ends of its interval; None unless the row is ok and has one."""
    mean = metric(row, "speedup") if is_ok(row) else None
    return None if mean is None else (mean, metric(row, "speedup_low"), metric(row, "speedup_high"))


def reason(row: Row) -> str:
    return plain(row.get("reason") or "no reason was recorded")


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each case, the last written; a cell that was run again replaces its earlier row."""
    kept: dict[str, Row] = {}
    for position, row in enumerate(rows):
        case = str(row.get("case_hash") or row.get("key") or f"row {position}")
        kept.pop(case, None)
        kept[case] = row
    return list(kept.values())


def plain(value: object, limit: int | None = None) -> str:
    """Text from outside without control or direction characters; cut to `limit` characters with an ellipsis."""
    text = " ".join(_CONTROL.sub(" ", str(value)).split()) or "(empty)"
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """Text of several lines without control or direction characters."""
    return "\n".join(_CONTROL.sub(" ", line) for line in text.split("\n"))


def axis_text(name: str, value: object) -> str:
    """One axis as a person writes it: "T 0.8", "context 512"; empty for what goes without saying."""
    if name == "depth_policy":
        return "adaptive" if value == "auto" else ""
    short = {
        "temperature": "T",
        "context_len": "context",
        "output_len": "output",
        "dtype": "",
        "target": "",
        "backend": "",
    }
    shown = f"{value:g}" if number(value) is not None else plain(value, 48)
    if value is None:
        shown = "unset"
    return f"{short.get(name, name)} {shown}".strip()


def fixed(value: float | None, digits: int = 2) -> str:
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def with_interval(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """ "1.42 ±0.05": half the width of the interval; without one, "±?"."""
    if value is None:
        return DASH
    if low is None or high is None:
        return f"{value:.{digits}f} ±?"
    return f"{value:.{digits}f} ±{max(high - low, 0.0) / 2:.{digits}f}"


def significant(value: float | None, unit: str = "", digits: int = 3) -> str:
    """A number with three significant digits and an SI prefix where there's a unit: "1.23 TB/s", "840 µs"."""
    if value is None or not math.isfinite(value):
        return DASH
    if not unit:
        return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    if value == 0:
        return f"0 {unit}"
    prefixes: Sequence[tuple[float, str]] = (
        ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
        if unit == "s"
        else ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    )
    for scale, prefix in prefixes:
        scaled = value / scale
        if abs(scaled) >= 0.9995:
            places = max(0, digits - 1 - math.floor(math.log10(abs(scaled) * 1.0005)))
            return f"{scaled:.{places}f} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"


def compact(value: float | None) -> str:
    """A count with three significant digits and an SI prefix: "2.94 M"."""
    return significant(value, " ").strip()


def share(value: float | None) -> str:
    """A share of 1 in three characters: ".62", "1.0"."""
    return DASH if value is None else f"{value:.2f}".removeprefix("0") if value < 0.995 else f"{value:.1f}"


def rate(value: float | None, digits: int = 3) -> str:
    """Tokens a second, compact: "84.2", "1,240"."""
    return DASH if value is None else significant(value, "", digits)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(items: Sequence[object]) -> str:
    """ "1", "1 and 2", "1, 2 and 4"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def finite(value: object) -> Any:
    """The same structure in plain JSON types, with every infinite or NaN number replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)
