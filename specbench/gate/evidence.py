"""A run as the gate reads it: the last row of each case, the blocks behind it, and blocks measured later on top.

Blocks that `--extend` measured lie in DIR/extend-1, DIR/extend-2, ..., each a run of the same cases by the same code on
the same machine; they count as more repetitions of the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.errors import InvalidEnvironmentError
from specbench.gate.identity import fingerprint
from specbench.report.rows import number
from specbench.result_row import BlockSample, ResultRow
from specbench.store import read_manifest, read_rows

EXTENSIONS = "extend-*"
LEAST = 1e-9
"""A speed or a time below this is no measurement."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Block number `index` of one measuring (`segment` 0 is the run, 1, 2, ... its extensions): the valid block of each
    arm, as `store.BlockSample`; `spec` is None in a case that never drafts. `group` names the prompts where the row
    tells."""

    segment: int
    index: int
    ar: BlockSample
    spec: BlockSample | None
    group: str | None

    @property
    def main(self) -> BlockSample:
        return self.spec if self.spec is not None else self.ar


@dataclass(frozen=True)
class CaseRun:
    """One case of a run: its row, and all pairs of blocks in the order in which they were measured."""

    row: ResultRow
    pairs: tuple[Pair, ...]

    @property
    def has_drafts(self) -> bool:
        return bool(self.pairs) and self.pairs[0].spec is not None

    @property
    def is_repeatable(self) -> bool:
        """Whether the same code must accept the same drafts again: greedy, and no depth that a clock chose."""
        axes = self.row.axes
        return number(axes.get("temperature")) == 0 and axes.get("depth_policy", "fixed") == "fixed"

    @property
    def is_greedy(self) -> bool:
        return number(self.row.axes.get("temperature")) == 0

    @property
    def is_predicted(self) -> bool:
        return bool(self.row.conditions.get("predicted"))

    def scalar(self, metric: str) -> float | None:
        return number((self.row.metrics or {}).get(metric))


@dataclass(frozen=True)
class Run:
    """All cases of a folder, by hash. `foreign` are those whose last row is of another machine than the manifest."""

    directory: Path
    manifest: Mapping[str, Any]
    cases: Mapping[str, CaseRun]
    foreign: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.manifest)

    @property
    def name(self) -> str:
        return str(self.manifest.get("name") or "")

    @property
    def revision(self) -> str:
        return str(self.manifest.get("code_revision") or "")


def load_run(directory: Path) -> Run:
    """Read DIR. Raises InputError where there is no run, InvalidEnvironmentError where its rows can't be read or an
    extension is of another machine or other code."""
    manifest = read_manifest(directory)
    rows = _last(read_rows(directory))
    later: dict[str, list[ResultRow]] = {}
    notes = []
    for place in sorted(directory.glob(EXTENSIONS), key=lambda path: (len(path.name), path.name)):
        more = _last(read_rows(place))
        for case, row in more.items():
            base = rows.get(case)
            if base is None or row.status != "ok" or base.status != "ok":
                continue
            if (row.environment, row.code_revision) != (base.environment, base.code_revision):
                message = f"{row.case_name}: the extension was measured by other code or on another machine"
                raise InvalidEnvironmentError(message, remedy="delete the folder and extend again", file=place)
            later.setdefault(case, []).append(row)
        notes.append(f"{place.name} adds blocks to {len(more)} cases")
    machine = manifest.get("fingerprint")
    foreign = frozenset(case for case, row in rows.items() if machine is not None and row.environment != machine)
    cases = {case: CaseRun(row, tuple(_pairs([row, *later.get(case, [])]))) for case, row in rows.items()}
    return Run(directory, manifest, cases, foreign, tuple(notes))


def _last(rows: list[ResultRow]) -> dict[str, ResultRow]:
    """The last row of each case, in the order in which the cases first appeared."""
    return {row.case_hash: row for row in rows}


def _pairs(rows: list[ResultRow]) -> Iterator[Pair]:
    """Valid blocks by their number; of a pair that was repeated, the last valid one of each arm."""
    for segment, row in enumerate(rows):
        arms: dict[int, dict[str, BlockSample]] = {}
        for block in sorted(row.samples["blocks"], key=lambda one: one["order"]):
            if block["valid"]:
                arms.setdefault(block["block"], {})[block["arm"]] = block
        with_spec = any("spec" in pair for pair in arms.values())
        for index in sorted(arms):
            pair = arms[index]
            if "ar" in pair and ("spec" in pair or not with_spec):
                ar, spec = pair["ar"], pair.get("spec")
                facts = (spec or ar).get("facts")
                yield Pair(segment, index, ar, spec, facts["inputs"] if facts else None)


def block_value(pair: Pair, metric: str) -> float | None:
    """A ratio metric of one pair of blocks, in its unit; None where the pair has none, 0.0 where it is below LEAST."""
    ar, spec = pair.ar, pair.spec
    main = spec or ar
    if metric == "speedup":
        return _quotient(_rate(spec), _rate(ar)) if spec is not None else None
    if metric == "output_tokens_per_s":
        return _rate(main)
    if metric == "ar_output_tokens_per_s":
        return _rate(ar) if spec is not None else None
    if metric == "tokens_per_step":
        return _quotient(main["tokens"], main["steps"])
    if metric == "step_s":
        return _quotient(main["wall_s"], main["steps"])
    facts: Mapping[str, Any] = main.get("facts", {})
    return _floored(number(facts.get(metric)))


def _rate(block: BlockSample) -> float | None:
    seconds = block["wall_s"]
    return _floored(block["tokens"] / seconds) if seconds else None


def _quotient(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else _floored(top / bottom)


def _floored(value: float | None) -> float | None:
    return value if value is None or LEAST <= value < math.inf else 0.0
