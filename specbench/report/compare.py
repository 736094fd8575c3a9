"""Two kinds of drafters held against each other, as the scenario's `compare` asks: how often the first is accepted over
how often the second is, by category of prompt and by position in the draft.

Only cells that differ in nothing but the drafter are compared. Intervals are bootstraps over prompts, and a prompt's
two cells stay together: both drafters were asked the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench.report import rows as read
from specbench.report.rows import Row
from specbench.report.series import context_of, varying_axes
from specbench.stats import Interval, bootstrap_rate, bootstrap_ratio

ALL = "all prompts"
NO_COUNTS = "these rows hold no acceptance by prompt: run the scenario again"


@dataclass(frozen=True)
class Comparison:
    """Kinds of drafters, and the ratio of their acceptance that was claimed."""

    first: str
    second: str
    claim: float | None = None


@dataclass(frozen=True)
class Pair:
    """Two cells alike in all but the drafter; `context` tells what else varies in the run."""

    first: Row
    second: Row
    depth: int
    batch_size: int
    context: str

    @property
    def names(self) -> tuple[str, str]:
        return read.drafter(self.first), read.drafter(self.second)

    @property
    def place(self) -> str:
        """ "depth 3 · T 0"."""
        return f"depth {self.depth} · {self.context}" if self.context else f"depth {self.depth}"


@dataclass(frozen=True)
class RatioLine:
    """Rates of both drafters and their ratio, each with its interval, over the prompts of one `name`."""

    name: str
    first: Interval
    second: Interval
    ratio: Interval
    num_prompts: int


def comparison_of(manifest: Mapping[str, Any]) -> Comparison | None:
    """What the run's scenario asks to compare."""
    asked = read.section(read.section(manifest, "scenario"), "compare")
    kinds = asked.get("drafters")
    if not isinstance(kinds, list | tuple) or len(kinds) != 2:
        return None
    return Comparison(read.plain(kinds[0]), read.plain(kinds[1]), read.number(asked.get("claim")))


def pairs_of(rows: Iterable[Row], asked: Comparison) -> list[Pair]:
    """Pairs of `ok` cells in the order of the run, each pair of drafters at its smallest batch."""
    cells = [row for row in read.latest(rows) if read.is_ok(row) and read.batch_size(row) is not None]
    cells = [row for row in cells if read.axis(row, "drafter_kind") in (asked.first, asked.second)]
    varying = varying_axes(cells)
    sides: dict[str, dict[str, list[Row]]] = {}
    for row in cells:
        rest = {
            key: value for key, value in read.section(row, "axes").items() if key not in ("drafter", "drafter_kind")
        }
        key = json.dumps(read.finite(rest), sort_keys=True)
        sides.setdefault(key, {}).setdefault(str(read.axis(row, "drafter_kind")), []).append(row)
    found: dict[tuple[str, str, str, int], Pair] = {}
    for side in sides.values():
        for first in side.get(asked.first, []):
            for second in side.get(asked.second, []):
                batch, context = read.batch_size(first) or 0, context_of(first, varying)
                pair = Pair(first, second, read.depth(first), batch, context)
                key_of = (*pair.names, context, pair.depth)
                if key_of not in found or batch < found[key_of].batch_size:
                    found[key_of] = pair
    return list(found.values())


@dataclass(frozen=True)
class _Counts:
    """Drafts of one prompt by position, in both cells."""

    category: str
    first: Mapping[str, list[int]]
    second: Mapping[str, list[int]]


def _counts(pair: Pair) -> list[_Counts]:
    sides = []
    for row in (pair.first, pair.second):
        prompts = read.section(row, "samples").get("prompts")
        kept = [one for one in prompts if isinstance(one, Mapping)] if isinstance(prompts, list | tuple) else []
        sides.append({str(one.get("id")): one for one in kept if one.get("offered_at")})
    first, second = sides
    return [
        _Counts(str(one.get("category")), _lists(one), _lists(second[name]))
        for name, one in first.items()
        if name in second
    ]


def _lists(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    return {
        name: [int(read.number(n) or 0) for n in sample[name]] for name in ("offered_at", "tried_at", "accepted_at")
    }


def by_category(pair: Pair) -> list[RatioLine]:
    """Accepted tokens over drafted depth: of all prompts, then of each category, sorted. Empty without counts."""
    counts = _counts(pair)
    groups = {ALL: counts} | {
        name: [one for one in counts if one.category == name] for name in sorted({one.category for one in counts})
    }
    lines = []
    for name, group in groups.items():
        columns = [
            [sum(side[key]) for side in sides] for sides in _sides(group) for key in ("accepted_at", "offered_at")
        ]
        if group:
            lines.append(_ratio_line(read.plain(name), columns, len(group)))
    return lines


def by_position(pair: Pair) -> list[RatioLine]:
    """Conditional acceptance at positions 1, 2, ... up to the shallower draft's depth. Empty without counts."""
    counts = _counts(pair)
    sides = _sides(counts)
    deepest = min(max((len(one["offered_at"]) for one in side), default=0) for side in sides)
    lines = []
    for index in range(deepest):
        columns = [[_at(one[key], index) for one in side] for side in sides for key in ("accepted_at", "tried_at")]
        lines.append(_ratio_line(str(index + 1), columns, len(counts)))
    return lines


def _sides(counts: Sequence[_Counts]) -> tuple[list[Mapping[str, list[int]]], list[Mapping[str, list[int]]]]:
    return [one.first for one in counts], [one.second for one in counts]


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if index < len(values) else 0


def _ratio_line(name: str, columns: Sequence[Sequence[int]], num_prompts: int) -> RatioLine:
    """`columns`: accepted and offered of the first drafter, then of the second, one entry a prompt."""
    accepted, offered, accepted_2, offered_2 = columns
    first, second = rate_interval(accepted, offered), rate_interval(accepted_2, offered_2)
    if not first.value or not second.value:
        return RatioLine(
            name, first, second, Interval(None, None, None, "nothing was accepted", num_prompts), num_prompts
        )
    ratio = bootstrap_ratio(accepted, offered, accepted_2, offered_2)
    return RatioLine(name, first, second, ratio, num_prompts)


def rate_interval(accepted: Sequence[int], offered: Sequence[int]) -> Interval:
    """sum accepted / sum offered with its bootstrap over prompts; a rate is at most 1."""
    if not sum(offered):
        return Interval(None, None, None, "no draft got that far", len(offered))
    if not sum(accepted):
        return Interval(0.0, None, None, "none was accepted", len(offered))
    found = bootstrap_rate(accepted, offered)
    return found if found.high is None else replace(found, high=min(found.high, 1.0))


# ---- in words and tables


@dataclass(frozen=True)
class ComparisonText:
    """A comparison as a page tells it: sentences, and two tables under one header. Empty where nothing was asked."""

    title: str
    sentences: tuple[str, ...]
    header: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]
    positions: tuple[tuple[str, ...], ...]


def comparison_text(rows: Iterable[Row], manifest: Mapping[str, Any]) -> ComparisonText | None:
    """What the run's scenario asks to compare, answered; None where it asks nothing."""
    asked = comparison_of(manifest)
    if asked is None:
        return None
    pairs = pairs_of(rows, asked)
    several = len({pair.names for pair in pairs}) > 1
    header = (
        "cells",
        "over",
        asked.first,
        asked.second,
        f"{asked.first} over {asked.second}",
        "its interval",
        "prompts",
    )
    tables = [
        tuple(_line(pair, line, asked, several) for pair in pairs for line in lines(pair))
        for lines in (by_category, by_position)
    ]
    return ComparisonText(f"{asked.first} held against {asked.second}", tuple(sentences(asked, pairs)), header, *tables)


def _line(pair: Pair, line: RatioLine, asked: Comparison, several: bool) -> tuple[str, ...]:
    place = f"{pair.names[0]}, {pair.names[1]} · {pair.place}" if several else pair.place
    rates = (rate_text(line.first), rate_text(line.second))
    return (
        place,
        line.name,
        *rates,
        ratio_text(line.ratio),
        claim_text(line.ratio, asked.claim),
        str(line.num_prompts),
    )


def rate_text(found: Interval) -> str:
    """ ".62 (.58 to .66)"."""
    if found.low is None or found.high is None:
        return read.share(found.value)
    return f"{read.share(found.value)} ({read.share(found.low)} to {read.share(found.high)})"


def ratio_text(found: Interval) -> str:
    """ "1.31 (1.22 to 1.41)"."""
    if found.value is None:
        return read.DASH
    bounds = "no interval" if found.low is None or found.high is None else f"{found.low:.2f} to {found.high:.2f}"
    return f"{found.value:.2f} ({bounds})"


def claim_text(found: Interval, claim: float | None) -> str:
    """What an interval says of 1.0 and of the claim."""
    if found.low is None or found.high is None:
        return "no interval"
    words = []
    for value in (1.0,) if claim is None else (1.0, claim):
        where = "above" if found.low > value else "below" if found.high < value else "holds"
        words.append(f"{where} {value:g}")
    return ", ".join(dict.fromkeys(words))


def sentences(asked: Comparison, pairs: Sequence[Pair]) -> list[str]:
    """The answer over all pairs, then a sentence a pair: the ratio over all its prompts, what it says of the claim, and
    what each drafter weighs."""
    if not pairs:
        return [f"No cell of {asked.first} has a counterpart of {asked.second} that differs in the drafter alone."]
    told = [_sentence(asked, pair) for pair in pairs]
    return told if len(pairs) == 1 else [_overall(asked, pairs), *told]


def _overall(asked: Comparison, pairs: Sequence[Pair]) -> str:
    ratios = [lines[0].ratio for pair in pairs if (lines := by_category(pair))]
    values = [one.value for one in ratios if one.value is not None]
    if not values:
        return f"{asked.first} and {asked.second} can't be compared: {NO_COUNTS if not ratios else ratios[0].reason}."
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    spread = low if low == high else f"{low} to {high}"
    text = f"Over {len(pairs)} pairs of cells {asked.first} is accepted {spread} times as often as {asked.second}"
    if asked.claim is None:
        return f"{text}."
    counts = Counter(_verdict(one, asked.claim).split(",")[0] for one in ratios)
    said = read.listed([f"{word} in {count}" for word, count in counts.items()])
    return f"{text}; the claim of {asked.claim:g} is {said}."


def _sentence(asked: Comparison, pair: Pair) -> str:
    first, second = pair.names
    lines = by_category(pair)
    start = f"At {pair.place}, batch {pair.batch_size}: "
    if not lines:
        return f"{start}{NO_COUNTS}."
    whole = lines[0]
    rates = f"{read.share(whole.first.value)} of its tokens against {read.share(whole.second.value)}"
    if whole.ratio.value is None:
        return f"{start}{first} and {second} can't be compared, for {whole.ratio.reason} ({rates})."
    ratio = f"{first} is accepted {ratio_text(whole.ratio)} times as often as {second}, {rates}"
    said = f"; the claim of {asked.claim:g}: {_verdict(whole.ratio, asked.claim)}" if asked.claim is not None else ""
    weights = _against(pair, "drafter_params", "")
    moved = _against(pair, "drafter_step_bytes", "B")
    return f"{start}{ratio}{said}. Own weights: {weights}; a draft step moves {moved}."


def _verdict(found: Interval, claim: float) -> str:
    if found.low is None or found.high is None:
        return "undecided for want of an interval"
    if found.low <= claim <= found.high:
        return "inside the interval" + (", as is 1: no difference is shown" if found.low <= 1 else "")
    return "exceeded" if found.low > claim else "not reached"


def _against(pair: Pair, name: str, unit: str) -> str:
    values = [read.metric(row, name) for row in (pair.first, pair.second)]
    return " against ".join(read.significant(value, unit) if unit else read.compact(value) for value in values)
