"""How sure an answer is, and what would change it: sentences from the cells that the answer rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specbench.report import rows as read
from specbench.report.advice import Advice, pays
from specbench.report.badges import badges_of, half_width, target_interval
from specbench.report.rows import Row
from specbench.report.series import Point, Series

_FIXED = ("dtype", "temperature", "context_len", "output_len", "verification")


def sure_of(cells: Sequence[Row], manifest: Mapping[str, Any], advice: Sequence[Advice]) -> tuple[str, tuple[str, ...]]:
    """One word (firm, fair, weak, predicted) and the sentences behind it."""
    if all(read.is_predicted(row) for row in cells):
        return "predicted", (
            "Nothing was measured: these are the cost model's figures, without intervals.",
            "The model's own error on measured runs is in docs/validation.md.",
        )
    target = target_interval(manifest)
    named = [
        (part.best.label, point)
        for part in advice
        for batch in part.batches
        if part.best is not None and (point := part.best.at(batch)) is not None
    ]
    rests_on = [point for _, point in named]
    weak = [point for point in rests_on if {"noisy", "throttled"} & set(badges_of(point.row, target))]
    told = [*_intervals(named, weak, target), _outputs(cells), *_lost(cells)]
    if not rests_on:
        measured = [row for row in cells if read.speedup(row) is not None]
        noisy = sum("noisy" in badges_of(row, target) for row in measured)
        return ("weak" if noisy > len(measured) / 2 else "fair"), tuple(told)
    widths = [width for point in rests_on if (width := half_width(point.row)) is not None]
    firm = not weak and len(widths) == len(rests_on) and max(widths) <= 1.25 * target
    return ("firm" if firm else "weak" if len(weak) > len(rests_on) / 2 else "fair"), tuple(told)


def _intervals(named: Sequence[tuple[str, Point]], weak: Sequence[Point], target: float) -> list[str]:
    if not named:
        return ["No cell's whole interval lies above 1.0."]
    rests_on = [point for _, point in named]
    blocks = [n for point in rests_on if (n := point.metric("num_blocks")) is not None]
    prompts = [n for point in rests_on if (n := point.metric("num_requests")) is not None]
    label, edge = min(named, key=lambda item: (item[1].speedup or (0.0, None, None))[1] or 0.0)
    _, low, high = edge.speedup or (None, None, None)
    text = "The closest call: "
    if low is not None and high is not None:
        text += (
            f"{label} at batch {edge.batch_size}, whose speedup lies between {low:.2f} and {high:.2f} (95 % interval"
        )
        text += f", {_typical(blocks, 'interleaved block')} a cell" if blocks else ""
        text += f", {_typical(prompts, 'prompt')}" if prompts else ""
        text += ")."
    else:
        text = "The cells it rests on have no intervals."
    if weak:
        what = f"{len(weak)} of the {len(rests_on)} cells it rests on" if len(rests_on) > 1 else "The cell it rests on"
        is_are = "are" if len(weak) > 1 else "is"
        text += (
            f" {what} {is_are} noisy (asked for: ±{100 * target:.0f} %) or throttled; more blocks would narrow them."
        )
    return [text]


def _typical(counts: Sequence[float], noun: str) -> str:
    return read.counted(round(median(counts)), noun)


def _outputs(cells: Sequence[Row]) -> str:
    checks = Counter(
        read.plain(value) for row in cells if (value := read.section(row, "conditions").get("output_check"))
    )
    words = {
        "identical": "token for token those of plain decoding",
        "near_tie": "part from it only at near ties",
        "distribution": "follow the target's distribution",
        "diverged": "differ from it (invalid)",
    }
    total = sum(checks.values())
    found = [
        f"in {f'all {total}' if checks[name] == total > 1 else checks[name]} {text}"
        for name, text in words.items()
        if checks.get(name)
    ]
    return f"Outputs, checked in every timed cell: {', '.join(found)}." if found else "No cell's outputs were compared."


def _lost(cells: Sequence[Row]) -> list[str]:
    counts = Counter(read.status(row) for row in cells)
    bad = [f"{counts[name]} {name}" for name in read.STATUSES[1:] if counts[name]]
    if not bad:
        return []
    return [f"{read.listed(bad)} of {read.counted(len(cells), 'cell')}: reasons below, none of them is hidden."]


# ---- what would change it


def change_of(cells: Sequence[Row], manifest: Mapping[str, Any], advice: Sequence[Advice]) -> tuple[str, ...]:
    """At most four sentences: the margin at the last batch that pays, what the next would need, prompts, conditions."""
    gains = [part for part in advice if part.best is not None]
    told: list[str | None] = []
    if gains:
        last = max(gains, key=lambda part: part.batches[-1])
        assert last.best is not None
        told.append(_margin(last.best.label, last.best.at(last.batches[-1])))
        told.append(_needed(last.best, last.batches[-1]))
        told.append(_categories(last.best.at(last.batches[0])))
    told.append(_conditions(cells))
    return tuple(text for text in told if text)


def _step(point: Point | None) -> tuple[float, float, float] | None:
    """(AR steps that one of its steps costs, of which verifying, tokens it yields)."""
    if point is None:
        return None
    step, ar, verify = (point.metric(name) for name in ("step_s", "ar_step_s", "verify_s"))
    earned = point.metric("tokens_per_step")
    if not step or not ar or verify is None or not earned:
        return None
    return step / ar, verify / ar, earned


def _margin(label: str, point: Point | None) -> str | None:
    found = _step(point)
    if found is None or point is None or found[2] <= found[0]:
        return None
    cost, _, earned = found
    return (
        f"Acceptance: at batch {point.batch_size} a step of {label} yields {earned:.2f} tokens for the cost of"
        f" {cost:.2f} plain steps; below {cost:.2f} tokens a step it would no longer pay."
    )


def _needed(one: Series, last: int) -> str | None:
    following = next((p for p in one.points if p.batch_size > last and p.speedup is not None and not pays(p)), None)
    found = _step(following)
    if found is None or following is None:
        return None
    cost, verify, earned = found
    if earned >= cost:
        return f"More blocks: at batch {following.batch_size} the mean is above 1.0, but its interval reaches below."
    rest = earned - (cost - verify)
    wish = f" or a verify pass of {rest:.2f} instead of {verify:.2f} plain steps" if rest > 0 else ""
    return f"To pay at batch {following.batch_size} it needs {cost:.2f} tokens a step instead of {earned:.2f}{wish}."


def _categories(point: Point | None) -> str | None:
    if point is None:
        return None
    by_category = read.section(read.section(point.row, "metrics"), "by_category")
    rates = {
        read.plain(name, 30): rate
        for name in by_category
        if (rate := read.number(read.section(by_category, name).get("tokens_per_step"))) is not None
    }
    if len(rates) < 2:
        return None
    worst, best = min(rates, key=lambda name: rates[name]), max(rates, key=lambda name: rates[name])
    return (
        f"Other prompts: a step yields {rates[best]:.2f} tokens on {best} and {rates[worst]:.2f} on {worst}"
        f" (batch {point.batch_size}); yours may lie outside."
    )


def _conditions(cells: Sequence[Row]) -> str | None:
    fixed = []
    for name in _FIXED:
        values = list(dict.fromkeys(str(read.axis(row, name)) for row in cells))
        value = read.axis(cells[0], name) if cells else None
        if len(values) == 1 and value is not None:
            fixed.append("greedy decoding (T 0)" if (name, value) == ("temperature", 0) else _named(name, value))
    return f"Held fixed, so not answered: other values than {', '.join(fixed)}." if fixed else None


def _named(name: str, value: object) -> str:
    words = {"output_len": "outputs of {} tokens", "context_len": "a context of {}", "verification": "{} verification"}
    return words[name].format(read.plain(value, 40)) if name in words else read.axis_text(name, value)
