"""Two kinds of drafters held against each other: their acceptance by prompt category, and position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.compare import ALL, Comparison, Pair, RatioLine, by_category, by_position
from specbench.report.style import Drawn
from specbench.stats import Interval

CATEGORIES, POSITIONS = "compare_categories", "compare_positions"
_NO_PAIR = "no two cells with acceptance by prompt differ in the drafter alone"
_RATES = ("rate", "low", "high")
HEADER = (
    *("first", "second", "depth", "batch_size", "context", "over", "num_prompts", "ratio", "ratio_low", "ratio_high"),
    *(f"{side}_{end}" for side in ("first", "second") for end in _RATES),
)
Lines = list[tuple[Pair, list[RatioLine]]]


def draw_category_ratios(asked: Comparison, pairs: Sequence[Pair]) -> Drawn:
    """The ratio of acceptance with its interval for each category; one panel a context, one colour a depth."""
    title = f"Acceptance of {asked.first} over {asked.second}, by prompt category"
    found = [(pair, lines) for pair in pairs if (lines := by_category(pair))]
    data = _data(found)
    if not found:
        return style.left(title, _NO_PAIR, HEADER)
    panels = _panels(found)
    shown = list(panels.items())[: style.MAX_PANELS]
    looks = _series(found)
    names = [ALL, *sorted({line.name for _, lines in found for line in lines} - {ALL})]
    entries = [(style.handle(**_point(index)), style.label(name)) for name, index in looks.items()]
    entries.append((style.handle(color=style.AR_COLOUR, linewidth=1.1), "1.0: accepted as often"))
    if asked.claim is not None:
        entries.append((style.handle(color=style.GREY, linestyle=(0, (4, 2))), f"{asked.claim:g}: the claim"))
    rows, columns = style.grid_shape(len(shown), 2)
    step = 1.0 / (len(looks) + 1)
    height = rows * (0.17 * len(names) * max(2, len(looks)) + 0.8) + style.legend_height(entries) + 0.4
    figure = style.new_figure(height)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    limits = _limits([line.ratio for _, lines in found for line in lines], asked.claim)
    for place, axes in enumerate(grid.flat):
        if place >= len(shown):
            axes.set_axis_off()
            continue
        context, group = shown[place]
        axes.set_title(style.label(context) if context else "")
        axes.axvline(1.0, color=style.AR_COLOUR, linewidth=1.1, zorder=1.5)
        if asked.claim is not None:
            axes.axvline(asked.claim, color=style.GREY, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1.5)
        for pair, lines in group:
            index = looks[_name_of(pair, found)]
            for line in lines:
                y = names.index(line.name) + (index - (len(looks) - 1) / 2) * step
                _draw_interval(axes, line.ratio, y, index, limits)
        axes.set_xscale("log")
        axes.set_xlim(*limits)
        _ratio_axis(axes.xaxis, limits)
        axes.set_yticks(range(len(names)), [style.label(name, 24) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.axhline(0.5, color=style.LIGHT, linewidth=0.8)
        axes.tick_params(axis="y", length=0)
        if place + columns >= len(shown):
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel("ratio of acceptance (accepted ÷ drafted)")
    style.legend_below(figure, entries)
    caption = (
        f"Each point is the acceptance of {asked.first} over that of {asked.second} on the same prompts, cells alike in"
        " all else, with a 95 % bootstrap interval over prompts; arrows: it goes on beyond the axis."
        + style.left_out(len(shown), len(panels), "panels")
    )
    whole = "; ".join(f"{pair.place}: {read.fixed(lines[0].ratio.value)}" for pair, lines in found[:12])
    return Drawn(figure, title, caption, f"Point chart of ratios. Over all prompts: {whole}.", HEADER, data)


def draw_conditional(asked: Comparison, pairs: Sequence[Pair]) -> Drawn:
    """Conditional acceptance by position of both drafters at their deepest common depth, and the ratio of the two."""
    title = f"Acceptance position by position: {asked.first} and {asked.second}"
    found = [(pair, lines) for pair in pairs if (lines := by_position(pair))]
    data = _data(found)
    if not found:
        return style.left(title, _NO_PAIR, HEADER)
    panels = _panels(found)
    deepest = {context: _deepest(group) for context, group in panels.items()}
    shown = list(deepest.items())[:3]
    drafters = list(dict.fromkeys(name for _, group in shown for pair, _ in group for name in pair.names))
    entries = [(style.handle(**style.look(i)), style.label(name)) for i, name in enumerate(drafters)]
    entries.append((style.handle(**_ratio_look()), f"{asked.first} over {asked.second}"))
    entries.append((style.handle(color=style.AR_COLOUR, linewidth=1.1), "1.0: accepted as often"))
    figure = style.new_figure(5.6 + style.legend_height(entries))
    grid = figure.subplots(2, len(shown), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 2))
    longest = max(len(lines) for _, group in shown for _, lines in group)
    limits = _limits([line.ratio for _, group in shown for _, lines in group for line in lines], None)
    for column, (_context, group) in enumerate(shown):
        rates, ratios = grid[0][column], grid[1][column]
        drawn: set[str] = set()
        for pair, lines in group:
            for side, name in enumerate(pair.names):
                if name not in drawn:
                    look = style.look(drafters.index(name))
                    _draw_curve(rates, [(line.first, line.second)[side] for line in lines], look, 0.06 * (2 * side - 1))
                drawn.add(name)
            _draw_curve(ratios, [line.ratio for line in lines], _ratio_look(), 0.0)
        rates.set_title(style.label(group[0][0].place))
        rates.set_ylim(0, 1.02)
        ratios.axhline(1.0, color=style.AR_COLOUR, linewidth=1.1, zorder=1.5)
        ratios.set_yscale("log")
        ratios.set_ylim(*limits)
        _ratio_axis(ratios.yaxis, limits)
        ratios.set_xlim(0.7, longest + 0.3)
        ratios.set_xticks(range(1, longest + 1, max(1, math.ceil(longest / 10))))
        ratios.set_xlabel("position in the draft (tokens)")
    grid[0][0].set_ylabel("accepted here, if all before were\n(share of drafts)")
    grid[1][0].set_ylabel("ratio of the two")
    style.legend_below(figure, entries)
    caption = (
        "The deepest drafts that both were measured with. Above: the share accepted at a position, among the drafts"
        f" whose tokens before it all were. Below: that of {asked.first} over that of {asked.second}. Bars: 95 %"
        " bootstrap intervals over prompts." + style.left_out(len(shown), len(panels), "panels")
    )
    last = [(group[0][0], group[0][1][-1]) for _, group in shown]
    alt = "; ".join(
        f"{pair.place}: ratio {read.fixed(line.ratio.value)} at position {line.name}" for pair, line in last
    )
    return Drawn(figure, title, caption, f"Line charts of conditional acceptance. {alt}.", HEADER, data)


def _data(found: Lines) -> tuple[tuple[object, ...], ...]:
    rows = []
    for pair, lines in found:
        for line in lines:
            sides = [value for side in (line.first, line.second) for value in (side.value, side.low, side.high)]
            ratio = (line.ratio.value, line.ratio.low, line.ratio.high)
            where = (*pair.names, pair.depth, pair.batch_size, pair.context)
            rows.append((*where, line.name, line.num_prompts, *ratio, *sides))
    return tuple(rows)


def _panels(found: Lines) -> dict[str, Lines]:
    panels: dict[str, Lines] = {}
    for pair, lines in found:
        panels.setdefault(pair.context, []).append((pair, lines))
    return panels


def _deepest(group: Lines) -> Lines:
    depth = max(pair.depth for pair, _ in group)
    return [(pair, lines) for pair, lines in group if pair.depth == depth]


def _name_of(pair: Pair, found: Lines) -> str:
    """What tells a pair from others of its panel: its depth, and the drafters' names where there are several pairs."""
    several = len({other.names for other, _ in found}) > 1
    return f"{pair.names[0]} over {pair.names[1]} · depth {pair.depth}" if several else f"depth {pair.depth}"


def _series(found: Lines) -> dict[str, int]:
    names = dict.fromkeys(_name_of(pair, found) for pair, _ in sorted(found, key=lambda one: one[0].depth))
    return {name: index for index, name in enumerate(names)}


def _point(index: int) -> dict[str, Any]:
    return style.look(index) | {"linestyle": "none"}


def _ratio_look() -> dict[str, Any]:
    return {"color": style.GREY, "marker": "D", "linewidth": 1.5, "markersize": 4.5}


def _limits(ratios: Sequence[Interval], claim: float | None) -> tuple[float, float]:
    """Ends of a log axis: the values with room around them, and no more than a factor of 8 beyond the middle ones."""
    values = [one.value for one in ratios if one.value]
    ends = [end for one in ratios for end in (one.low, one.high) if end]
    most = 2.0 * max([1.0, *values]), 0.5 * min([1.0, *values])
    high = min(max([1.0, claim or 1.0, *values, *ends]), max(most[0], claim or 1.0))
    low = max(min([1.0, claim or 1.0, *values, *ends]), min(most[1], claim or 1.0))
    pad = max((high / low) ** 0.06, 1.03)
    return low / pad, high * pad


def _ratio_axis(axis: Any, limits: tuple[float, float]) -> None:
    """Ticks at round ratios and their inverses, the rounder first, none closer to another than a label is wide."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    low, high = limits
    ticks: list[float] = []
    for step in (1.0, 2.0, 4.0, 8.0, 1.5, 3.0, 1.25, 1.1, 1.05):
        for tick in (step, 1 / step):
            apart = min((abs(math.log(tick / other)) for other in ticks), default=math.inf)
            if low <= tick <= high and apart >= 0.1 * math.log(high / low):
                ticks.append(tick)
    ticks.sort()
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_ticklabels([f"{tick:.2f}" for tick in ticks])


def _draw_interval(axes: Any, found: Interval, y: float, index: int, limits: tuple[float, float]) -> None:
    if found.value is None:
        axes.annotate(
            "no value", (1.0, y), (4, 0), textcoords="offset points", va="center", fontsize=7, color=style.GREY
        )
        return
    look = style.look(index)
    if found.low is not None and found.high is not None:
        low, high = max(found.low, limits[0]), min(found.high, limits[1])
        axes.plot([low, high], [y, y], color=look["color"], linewidth=1.3, zorder=2.5)
        for end, beyond, mark in ((limits[0], found.low < limits[0], "<"), (limits[1], found.high > limits[1], ">")):
            if beyond:
                axes.plot([end], [y], marker=mark, color=look["color"], markersize=4, clip_on=False)
    axes.plot([found.value], [y], **_point(index), zorder=3)


def _draw_curve(axes: Any, found: Sequence[Interval], look: dict[str, Any], shift: float) -> None:
    """Values by position, the curve moved a little sideways so that bars of two curves don't hide each other."""
    places = [index + 1 + shift for index in range(len(found))]
    values = [math.nan if one.value is None else one.value for one in found]
    axes.plot(places, values, **look, zorder=3, clip_on=False)
    spans = [
        (place, one.value, one.low, one.high)
        for place, one in zip(places, found, strict=True)
        if one.value is not None and one.low is not None and one.high is not None
    ]
    if spans:
        below, above = [value - low for _, value, low, _ in spans], [high - value for _, value, _, high in spans]
        axes.errorbar([s[0] for s in spans], [s[1] for s in spans], yerr=[below, above], fmt="none",
                      ecolor=look["color"], elinewidth=1.1, capsize=2.5, zorder=2.5)  # fmt: skip
