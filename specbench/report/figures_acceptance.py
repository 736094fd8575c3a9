"""How much of what's drafted is accepted: by position in the draft, and by category of prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.series import Point, Series, best_series_by_drafter
from specbench.report.style import Drawn

MAX_CATEGORY_BARS = 60
_POSITION_TITLE = "Acceptance by position in the draft"
_POSITION_HEADER = (
    "drafter",
    "depth",
    "batch_size",
    "position",
    "acceptance_at",
    "acceptance_conditional_at",
    "num_drafts",
)
_CATEGORY_TITLE = "Acceptance by prompt category"
_CATEGORY_HEADER = (
    "drafter", "depth", "batch_size", "category", "acceptance_rate", "tokens_per_step", "num_accepted_tokens",
    "num_draft_tokens", "num_requests",
)  # fmt: skip


def _widest(one: Series) -> Point | None:
    """The cell of a series with the most drafts, so that rates by position rest on the largest count."""
    cells = [point for point in one.points if point.has_diagnostics and point.metric("num_drafts")]
    return max(cells, key=lambda point: (point.metric("num_drafts") or 0, -point.batch_size), default=None)


def draw_positions(series: Sequence[Series]) -> Drawn:
    """Unconditional and conditional acceptance by position, for each drafter at its deepest depth."""
    deepest: dict[str, tuple[Series, Point]] = {}
    data: list[tuple[object, ...]] = []
    for one in series:
        point = _widest(one)
        rates = read.metric_list(point.row, "acceptance_at") if point else []
        if one.control or point is None or not any(rate is not None for rate in rates):
            continue
        given = read.metric_list(point.row, "acceptance_conditional_at")
        for place, rate in enumerate(rates):
            conditional = given[place] if place < len(given) else None
            data.append(
                (
                    one.drafter_label,
                    one.depth,
                    point.batch_size,
                    place + 1,
                    rate,
                    conditional,
                    point.metric("num_drafts"),
                )
            )
        if one.drafter_label not in deepest or one.depth > deepest[one.drafter_label][0].depth:
            deepest[one.drafter_label] = (one, point)
    if not deepest:
        return style.void(style.empty(_POSITION_TITLE, "no cell has acceptance by position"), _POSITION_HEADER)
    shown = list(deepest.values())[: style.MAX_PANELS]
    entries = [
        (style.handle(**style.look(i, one.synthetic)), style.label(f"{one.label} (batch {point.batch_size})"))
        for i, (one, point) in enumerate(shown)
    ]
    figure = style.new_figure(3.3 + style.legend_height(entries) + 0.4)
    panels = figure.subplots(1, 2, sharey=True)
    names = ("acceptance_at", "acceptance_conditional_at")
    titles = ("accepted up to this position", "accepted here, if all before it were")
    longest = 1
    for axes, name, title in zip(panels, names, titles, strict=True):
        for index, (one, point) in enumerate(shown):
            rates = read.metric_list(point.row, name)
            longest = max(longest, len(rates))
            values = [math.nan if rate is None else rate for rate in rates]
            axes.plot(range(1, len(rates) + 1), values, **style.look(index, one.synthetic), zorder=3, clip_on=False)
        axes.set_title(title)
        axes.set_xlabel("position in the draft (tokens)")
        axes.set_ylim(0, 1.02)
    step = max(1, math.ceil(longest / 10))
    for axes in panels:
        axes.set_xlim(0.7, longest + 0.3)
        axes.set_xticks(range(1, longest + 1, step))
    panels[0].set_ylabel("share of drafts")
    style.heading(figure, _POSITION_TITLE)
    style.legend_below(figure, entries)
    caption = (
        "Each drafter at its deepest depth, from its cell with the most drafts. Left: the share of drafts whose tokens"
        " up to the position were all accepted; right: the share among those that got that far."
        + style.left_out(len(shown), len(deepest), "drafters")
    )
    first = [
        f"{one.label}: {read.fixed(read.metric_list(p.row, 'acceptance_at')[0])} at position 1" for one, p in shown
    ]
    return Drawn(
        figure, _POSITION_TITLE, caption, f"Two line charts. {'; '.join(first)}.", _POSITION_HEADER, tuple(data)
    )


def draw_categories(series: Sequence[Series]) -> Drawn:
    """Acceptance rate and tokens per step by category, for each drafter at its best depth, with counts."""
    data = tuple(
        (
            one.drafter_label,
            one.depth,
            point.batch_size,
            read.plain(name),
            *(read.number(values.get(key)) for key in keys),
        )
        for one in series
        if not one.control and (point := _widest(one))
        for name, values in _categories(point).items()
        for keys in [_CATEGORY_HEADER[4:]]
    )
    chosen = [(one, point) for one in best_series_by_drafter(series) if (point := _widest(one)) and _categories(point)]
    names = list(dict.fromkeys(name for _, point in chosen for name in _categories(point)))
    if not chosen:
        return style.void(style.empty(_CATEGORY_TITLE, "no cell has acceptance by category"), _CATEGORY_HEADER, data)
    room = max(1, MAX_CATEGORY_BARS // len(names))
    shown = chosen[:room]
    entries = [
        (style.patch(**_bar_look(i)), style.label(f"{one.label} (batch {point.batch_size})"))
        for i, (one, point) in enumerate(shown)
    ]
    bars = len(names) * (len(shown) + 1)
    figure = style.new_figure(0.19 * bars + 1.2 + style.legend_height(entries))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, title in zip(
        panels, ("acceptance_rate", "tokens_per_step"), ("acceptance rate", "tokens per step"), strict=True
    ):
        top = 0.0
        for index, (_, point) in enumerate(shown):
            for place, name in enumerate(names):
                values = _categories(point).get(name, {})
                value, y = read.number(values.get(key)), place * (len(shown) + 1) + index
                if value is None:
                    axes.annotate("no value", (0, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
                    continue
                top = max(top, value)
                drafted, steps = read.number(values.get("num_draft_tokens")), read.number(values.get("num_steps"))
                count = f"({drafted or 0:,.0f} drafted)" if key == "acceptance_rate" else f"({steps or 0:,.0f} steps)"
                axes.barh(y, value, height=0.86, **_bar_look(index), zorder=3)
                axes.annotate(
                    f"{value:.2f} {count}", (value, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5
                )
        axes.set_xlim(0, (top or 1.0) * 1.55)
        axes.set_xlabel(f"{title} (accepted ÷ drafted)" if key == "acceptance_rate" else f"{title} (tokens a request)")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    middle = (len(shown) - 1) / 2
    panels[0].set_yticks(
        [place * (len(shown) + 1) + middle for place in range(len(names))], [style.label(n, 24) for n in names]
    )
    panels[0].set_ylim(bars - 1.3, -0.9)
    style.heading(figure, _CATEGORY_TITLE)
    style.legend_below(figure, entries)
    caption = (
        "Each drafter at its best depth for the smallest batch, from its cell with the most drafts; counts beside the"
        " bars say what each rate rests on." + style.left_out(len(shown), len(chosen), "drafters")
    )
    alt = f"Bar charts of acceptance rate and tokens per step; categories: {read.listed(names)}."
    return Drawn(figure, _CATEGORY_TITLE, caption, alt, _CATEGORY_HEADER, data)


def _categories(point: Point) -> dict[str, Mapping[str, Any]]:
    found = read.section(read.section(point.row, "metrics"), "by_category")
    return {str(name): values for name, values in found.items() if isinstance(values, Mapping)}


def _bar_look(index: int) -> dict[str, Any]:
    looks = style.look(index)
    hatch = "" if index < len(style.COLOURS) else "////"
    return {"facecolor": looks["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
