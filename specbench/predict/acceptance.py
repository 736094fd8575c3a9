"""Where a prediction's acceptance comes from: the scenario (forced, oracle), a curve, a curve file, or measured rows.

    specbench predict SCENARIO --hardware h100-sxm --acceptance 0.8,0.7,0.6
    specbench predict SCENARIO --hardware h100-sxm --acceptance scenarios/predict/acceptance.json
    specbench predict SCENARIO --hardware h100-sxm --acceptance results/drafters-smollm2

A curve file is JSON: {"curves": [{"drafter": kind or name, "rates": [...], "kind": "conditional" or "joint", "drafted":
share, "status": measured, published or assumed, "source": text}]}. What a number rests on is told wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from specbench.errors import InputError
from specbench.result_row import ResultRow
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.scenario.cases import Case
from specbench.scenario.drafter_schema import KINDS
from specbench.store import ROWS_FILE, latest_rows

ASSUMED_FILE = "scenarios/predict/acceptance.json"
STATUSES = ("measured", "published", "assumed")
_SHAPE_REMEDY = 'write {"curves": [{"drafter": "eagle3", "rates": [0.8, 0.75, 0.7], "source": "..."}]}'


@dataclass(frozen=True)
class Entry:
    """One curve and the drafters it is for. `depth`, `temperature`: what it was measured at; None: any.
    `nodes`: mean nodes verified a step, where that was seen."""

    drafter: str
    curve: AcceptanceCurve
    depth: int | None = None
    temperature: float | None = None
    nodes: float | None = None

    def curve_for(self, case: Case) -> AcceptanceCurve:
        """The curve; where the nodes of a step were seen, with their share of the case's own (of its depth, where it
        was measured at another)."""
        if self.nodes is None or self.depth is None:
            return self.curve
        most = case.num_nodes if self.depth == case.depth else self.depth
        return replace(self.curve, drafted=min(1.0, self.nodes / most))


@dataclass(frozen=True)
class AcceptanceBook:
    """Curves by drafter; `label` names where they are from."""

    entries: tuple[Entry, ...]
    label: str

    def curve(self, case: Case) -> AcceptanceCurve:
        """The case's curve: the scenario's own for forced and oracle, else the entry that fits best.

        A name before a kind; then the case's own temperature, then its depth or the next deeper one. Raises
        InputError, naming what there is, for a drafter without any.
        """
        own = scenario_curve(case)
        if own is not None:
            return own
        drafter = case.drafter
        fitting = [one for one in self.entries if one.drafter in (drafter.name, drafter.kind, "any")]
        if not fitting:
            there = ", ".join(dict.fromkeys(one.drafter for one in self.entries)) or "none"
            raise InputError(
                f"no acceptance curve for the drafter {drafter.name}; {self.label} has: {there}",
                key="--acceptance",
                remedy=f"add one of kind {drafter.kind} to a curve file, or give one curve for all: 0.8,0.7,0.6",
            )
        return min(fitting, key=lambda one: _distance(one, case)).curve_for(case)


def _distance(entry: Entry, case: Case) -> tuple[float, ...]:
    names = {case.drafter.name: 0, case.drafter.kind: 1}
    heat = 0.0 if entry.temperature is None else abs(entry.temperature - case.sampling.temperature)
    gap = 0 if entry.depth is None else entry.depth - case.depth
    return (names.get(entry.drafter, 2), heat, 0 if gap >= 0 else 1, abs(gap))


def scenario_curve(case: Case) -> AcceptanceCurve | None:
    """What the scenario itself sets: a forced drafter's rates or length, an oracle's certainty; None for all else."""
    options: dict[str, Any] = dict(case.drafter.options)
    if case.drafter.kind == "none" or case.depth == 0:
        return AcceptanceCurve((0.0,), source="nothing is drafted", status="forced")
    if case.drafter.kind == "oracle":
        return AcceptanceCurve((1.0,), source="an oracle's drafts are all right", status="forced")
    if case.drafter.kind == "forced":
        told: dict[str, Any] = {"source": "forced by the scenario", "status": "forced"}
        if options.get("rates") is not None:
            return AcceptanceCurve(tuple(float(rate) for rate in options["rates"]), **told)
        return AcceptanceCurve.of_length(float(options["length"]), case.depth, **told)
    return None


def read_acceptance(text: str | None) -> AcceptanceBook:
    """`--acceptance`: a curve such as 0.8,0.7, a curve file, a folder of measured rows; None: the shipped assumptions.

    Raises InputError for what is none of these.
    """
    if text is None:
        return assumed_book()
    path = Path(text)
    if path.is_dir() or path.name == ROWS_FILE:
        return measured_book(path)
    if path.is_file() or path.suffix == ".json":
        return read_book(path)
    return AcceptanceBook((Entry("any", parse_curve(text)),), f"the curve {text}")


def parse_curve(text: str) -> AcceptanceCurve:
    """ "0.8,0.7,0.6": conditional rates by position; one number holds at every position."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{text!r} is neither a curve nor a file here",
            key="--acceptance",
            remedy="give rates such as 0.8,0.7,0.6, a .json file, or a folder of results",
        ) from None
    return AcceptanceCurve(rates, source=f"--acceptance {text}", status="assumed")


def assumed_book() -> AcceptanceBook:
    """The curves that ship with the package; each says what it rests on."""
    given = Path(ASSUMED_FILE)
    if given.is_file():
        return read_book(given)
    return read_book(Path(str(resources.files("specbench.scenarios").joinpath("predict", "acceptance.json"))))


def read_book(path: Path) -> AcceptanceBook:
    """A curve file. Raises InputError with file and key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("no such file", file=path, key="--acceptance") from None
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg}", file=path, line=error.lineno, remedy=_SHAPE_REMEDY) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"can't be read: {error}", file=path) from None
    curves = content.get("curves") if isinstance(content, dict) else None
    if not isinstance(curves, list) or not curves:
        raise InputError("has no list of curves", file=path, key="curves", remedy=_SHAPE_REMEDY)
    entries = tuple(_entry(one, path, f"curves[{index}]") for index, one in enumerate(curves))
    return AcceptanceBook(entries, path.name)


_KEYS = ("drafter", "rates", "kind", "drafted", "status", "source", "depth", "temperature", "note")


def _entry(value: object, path: Path, key: str) -> Entry:
    if not isinstance(value, Mapping):
        raise InputError("must be an object", file=path, key=key, remedy=_SHAPE_REMEDY)
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise InputError(f"{unknown[0]!r} is not known", file=path, key=key, remedy=f"keys: {', '.join(_KEYS)}")
    drafter, rates, kind = value.get("drafter"), value.get("rates"), value.get("kind", "conditional")
    status = value.get("status", "assumed")
    if not isinstance(drafter, str) or (drafter.partition("(")[0] not in KINDS and drafter != "any"):
        remedy = f"a kind ({', '.join(KINDS)}), a name such as ngram(3), or any"
        raise InputError(f"{drafter!r} is no drafter", file=path, key=f"{key}.drafter", remedy=remedy)
    if not isinstance(rates, list) or not rates:
        raise InputError("needs a list of rates", file=path, key=f"{key}.rates", remedy=_SHAPE_REMEDY)
    if kind not in ("conditional", "joint"):
        raise InputError(f"{kind!r} is no kind", file=path, key=f"{key}.kind", remedy="conditional or joint")
    if status not in STATUSES:
        raise InputError(f"{status!r} is no status", file=path, key=f"{key}.status", remedy=", ".join(STATUSES))
    told: dict[str, Any] = {
        "source": str(value.get("source") or path.name),
        "status": status,
        "drafted": value.get("drafted"),
    }
    try:
        curve = AcceptanceCurve(tuple(rates), **told) if kind == "conditional" else _joint(rates, told)
    except InputError as error:
        raise InputError(error.message, file=path, key=f"{key}.rates", remedy=error.remedy) from None
    return Entry(drafter, curve, value.get("depth"), value.get("temperature"))


def _joint(rates: Sequence[Any], told: dict[str, Any]) -> AcceptanceCurve:
    return AcceptanceCurve.from_joint(rates, **told)


def measured_book(path: Path) -> AcceptanceBook:
    """The curves of a run's ok rows, pooled over batch sizes: one a drafter, depth and temperature."""
    folder = path if path.is_dir() else path.parent
    entries = pooled_entries([row for row in latest_rows(path) if not row.conditions.get("predicted")], folder.name)
    if not entries:
        raise InputError("no ok row here has acceptance by position", file=path, key="--acceptance")
    return AcceptanceBook(tuple(entries), f"the rows of {folder.name}")


def pooled_entries(rows: Iterable[ResultRow], name: str) -> list[Entry]:
    """Rows of equal drafter, depth and temperature as one entry each: their counts are added, never their rates."""
    pooled: dict[tuple[str, int, float], dict[str, Any]] = {}
    for row in rows:
        metrics: dict[str, Any] = row.metrics or {}
        histogram = metrics.get("accepted_histogram")
        if row.status != "ok" or not isinstance(histogram, list) or len(histogram) < 2:
            continue
        axes: dict[str, Any] = row.axes
        key = (str(axes["drafter"]), int(axes["depth"]), float(axes["temperature"]))
        sums = pooled.setdefault(key, {"accepted_histogram": [], "num_steps": 0, "num_draft_tokens": 0})
        sums["accepted_histogram"] = _added(sums["accepted_histogram"], histogram)
        sums["num_steps"] += metrics["num_steps"]
        sums["num_draft_tokens"] += metrics["num_draft_tokens"]
    entries = []
    for (drafter, depth, temperature), sums in pooled.items():
        curve = AcceptanceCurve.from_row(sums, source=f"measured in {name}")
        entries.append(Entry(drafter, curve, depth, temperature, sums["num_draft_tokens"] / sums["num_steps"]))
    return entries


def _added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    length = max(len(one), len(other))
    return [sum(values[i] for values in (one, other) if i < len(values)) for i in range(length)]
