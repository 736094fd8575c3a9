"""How much of what's drafted is accepted: by position in the draft, and by category of prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures_panels import Axis, Frame, Ground, Key, amount_axis, cut_note, draw_grid, line_name
from specbench.report.figures_tiles import Scale, Tile, draw_tiles, tile_ticks
from specbench.report.series import Point, Series, best_series_by_drafter, panels_of
from specbench.report.style import Drawn, Marks

MAX_CATEGORY_ROWS, MAX_CATEGORIES = 36, 14
FEW_TOKENS = 30
"""A category's rate that rests on fewer drafted tokens (or a mean on fewer steps) is hatched."""
_POSITION_TITLE = "Acceptance by position in the draft, kind by kind"
_POSITION_HEADER = (
    "drafter", "depth", "batch_size", "position", "acceptance_at", "acceptance_conditional_at", "num_drafts",
    "num_drafts_of_this_length",
)  # fmt: skip
_CATEGORY_TITLE = "Acceptance by prompt category"
_CATEGORY_HEADER = (
    "drafter", "depth", "batch_size", "category", "acceptance_rate", "depth_acceptance_rate", "tokens_per_step",
    "num_accepted_tokens", "num_draft_tokens", "num_steps", "num_requests",
)  # fmt: skip


def _widest(one: Series) -> Point | None:
    """The cell of a series with the most drafts, so that rates by position rest on the largest count."""
    cells = [point for point in one.points if point.has_diagnostics and point.metric("num_drafts")]
    return max(cells, key=lambda point: (point.metric("num_drafts") or 0, -point.batch_size), default=None)


# ---- by position


def draw_positions(series: Sequence[Series]) -> Drawn:
    """A panel for each kind: acceptance up to a position (lines) and at it alone (hollow), at the deepest depth."""
    drafting = [one for one in series if not one.control]
    data = tuple(
        (one.drafter_label, one.depth, point.batch_size, place + 1, rate, alone, point.metric("num_drafts"), offered)
        for one in drafting
        if (point := _widest(one))
        for place, (rate, alone, offered) in enumerate(_rates(point))
    )
    panels = panels_of(drafting, _deepest)
    if not panels:
        return style.left(_POSITION_TITLE, "no cell has acceptance by position", _POSITION_HEADER, data)
    shown = panels[: style.MAX_PANELS]
    keys = [
        [Key(style.look(i, one.synthetic), line_name(panel, one)) for i, one in enumerate(panel.lines)]
        for panel in shown
    ]
    both = {"color": style.GREY, "marker": "o", "markersize": 5}
    foot = [
        (style.handle(**both), "line: accepted up to this position"),
        (
            style.handle(**both, markerfacecolor=style.PAGE, linestyle="none"),
            "hollow: accepted here, if all before were",
        ),
    ]
    longest = max(len(_rates(point)) for panel in shown for one in panel.lines if (point := _widest(one)))
    step = next(size for size in (1, 2, 4, 5, 10, 20, 50, 10**9) if longest / size <= 8)
    ticks = [1, *range(step, longest + 1, step)] if step > 1 else range(1, longest + 1)
    x = Axis(0.7, longest + 0.3, tuple((tick, str(tick)) for tick in ticks), False, "position in the draft (tokens)")
    y = amount_axis(0.0, 1.03, "share of drafts", 5)
    titles = [panel.name for panel in shown]
    ground, frames = draw_grid(titles, keys, lambda _: (x, y), panel_in=1.5, foot=foot)
    marks, rising = Marks(), False
    for frame, panel in zip(frames, shown, strict=True):
        for index, one in enumerate(panel.lines):
            rising |= _draw_curves(frame, one, style.look(index, one.synthetic), marks)
    caption = "The share of drafts whose tokens up to a position were all accepted, each drafter at its deepest depth."
    note = (
        "Each line is the drafter's cell with the most drafts. Its own rate at a position (hollow) counts only drafts"
        " that were right up to there."
        + (" A line may rise: position i counts only drafts of at least i tokens, and a drafter that drafts as far as"
           " it is sure drafts long where it is right." if rising else "")
        + cut_note(panels, len(shown))
    )  # fmt: skip
    first = [
        f"{one.label}: {read.fixed(_rates(point)[0][0])} at position 1, {read.fixed(_rates(point)[-1][0])} at"
        f" {len(_rates(point))}"
        for panel in shown for one in panel.lines if (point := _widest(one))
    ]  # fmt: skip
    alt = f"Small line charts of acceptance by position. {'; '.join(first)}."
    return Drawn(ground.figure, _POSITION_TITLE, caption, alt, _POSITION_HEADER, data, note, marks=marks)


def _rates(point: Point) -> list[tuple[float | None, float | None, int | None]]:
    """By position: accepted up to there, accepted there alone, and the drafts that were at least so long."""
    joint = read.metric_list(point.row, "acceptance_at")
    alone = read.metric_list(point.row, "acceptance_conditional_at")
    offered = [0] * len(joint)
    prompts = read.section(point.row, "samples").get("prompts")
    for prompt in prompts if isinstance(prompts, list) else []:
        counts = prompt.get("offered_at") if isinstance(prompt, Mapping) else None
        for place, count in enumerate((counts or [])[: len(joint)]):
            offered[place] += int(read.number(count) or 0)
    return [
        (rate, alone[place] if place < len(alone) else None, offered[place] or None) for place, rate in enumerate(joint)
    ]


def _deepest(group: list[Series]) -> list[Series]:
    """Each drafter (and context) at its deepest depth, of the series that have a rate."""
    best: dict[str, Series] = {}
    for one in group:
        point = _widest(one)
        known = point is not None and any(rate is not None for rate, _, _ in _rates(point))
        if known and (one.drafter_label not in best or one.depth > best[one.drafter_label].depth):
            best[one.drafter_label] = one
    return list(best.values())


def _draw_curves(frame: Frame, one: Series, look: dict[str, Any], marks: Marks) -> bool:
    """Both curves of a series; True where the first one rises."""
    point = _widest(one)
    rates = _rates(point) if point else []
    joint = [(place + 1, rate, n) for place, (rate, _, n) in enumerate(rates) if rate is not None]
    alone = [(place + 1, rate) for place, (_, rate, _) in enumerate(rates) if rate is not None]
    hollow = look | {"linestyle": "none", "markerfacecolor": style.PAGE, "markersize": 5}
    dots = frame.plot([x for x, _ in alone], [y for _, y in alone], **hollow, zorder=2.8)
    marks.add(dots, [f"{one.label}, position {x}: {y:.3f} accepted here, if all before were" for x, y in alone])
    line = frame.plot([x for x, _, _ in joint], [y for _, y, _ in joint], **look, zorder=3)
    texts = [
        f"{one.label}, position {x}: {y:.3f} accepted up to here" + ("" if n is None else f", of {n:,} drafts so long")
        for x, y, n in joint
    ]
    marks.add(line, texts, one.label)
    return any(after > before + 1e-9 for (_, before, _), (_, after, _) in pairwise(joint))


# ---- by category


def draw_categories(series: Sequence[Series]) -> Drawn:
    """Acceptance and tokens per step by category, for each drafter at its best depth, side by side."""
    data = tuple(
        (one.drafter_label, one.depth, point.batch_size, read.plain(name),
         *(read.number(values.get(key)) for key in _CATEGORY_HEADER[4:]))
        for one in series
        if not one.control and (point := _widest(one))
        for name, values in _categories(point).items()
    )  # fmt: skip
    chosen = [(one, point) for one in best_series_by_drafter(series) if (point := _widest(one)) and _categories(point)]
    names = sorted({name for _, point in chosen for name in _categories(point)})
    if not chosen:
        return style.left(_CATEGORY_TITLE, "no cell has acceptance by category", _CATEGORY_HEADER, data)
    shown, columns = chosen[:MAX_CATEGORY_ROWS], names[:MAX_CATEGORIES]
    left, gap = 2.6, 0.18
    tile = ((style.WIDTH_IN - left - gap - 0.1) / 2 / len(columns), 0.25)
    longest = max(len(name) for name in columns)
    turned = longest * 0.075 > tile[0]
    foot = min(1.1, 0.06 * min(longest, 14) + 0.15) if turned else 0.25
    ground = Ground(style.HEAD_IN + 0.25 + tile[1] * len(shown) + foot)
    marks, top = Marks(), style.HEAD_IN + 0.25
    for place, (title, read_tile) in enumerate((("share of drafted tokens accepted", _rate_tile),
                                                ("tokens a request gains in a step", _gain_tile))):  # fmt: skip
        tiles = [[read_tile(one, point, name) for name in columns] for one, point in shown]
        most = max([cell.value for row in tiles for cell in row if cell.value is not None], default=1.0)
        scale = Scale(0.0, 1.0, False) if place == 0 else Scale(1.0, max(most, 1.5), False)
        corner = (left + place * (tile[0] * len(columns) + gap), top)
        draw_tiles(ground, corner, tile, tiles, marks, scale, size=8 if tile[0] >= 0.32 else 6.5)
        ground.text(corner[0], top - 0.11, title, fontsize=9.5, fontweight="bold")
        names_left = [style.label(one.label, 38) if place == 0 else "" for one, _ in shown]
        tile_ticks(ground, corner, tile, [], names_left, names_size=8)
        for index, name in enumerate(columns):
            x, y = corner[0] + (index + 0.5) * tile[0], top + tile[1] * len(shown) + 0.06
            turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if turned else {"ha": "center"}
            ground.text(x, y, style.label(name, 14), va="top", **turn)
    caption = "Acceptance and tokens per step by category of prompt, each drafter at its best depth."
    note = (
        "From each drafter's cell with the most drafts; for trees the share is of the draft's depth. Hatched: fewer"
        f" than {FEW_TOKENS} drafted tokens (left) or steps (right)."
        + style.left_out(len(shown), len(chosen), "drafters")
        + style.left_out(len(columns), len(names), "categories")
    )
    alt = f"Two maps, acceptance and tokens per step; categories: {read.listed(names)}."
    return Drawn(ground.figure, _CATEGORY_TITLE, caption, alt, _CATEGORY_HEADER, data, note, marks=marks)


def _categories(point: Point) -> dict[str, Mapping[str, Any]]:
    found = read.section(read.section(point.row, "metrics"), "by_category")
    return {read.plain(name): values for name, values in found.items() if isinstance(values, Mapping)}


def _rate_tile(one: Series, point: Point, name: str) -> Tile:
    values = _categories(point).get(name, {})
    rate = read.number(values.get("acceptance_rate"))
    rate = read.number(values.get("depth_acceptance_rate")) if rate is None else rate
    drafted = read.number(values.get("num_draft_tokens")) or 0
    tip = f"{one.label}, {name}: {read.fixed(rate, 3)} accepted, of {drafted:,.0f} drafted tokens"
    return Tile(rate, drafted >= FEW_TOKENS, read.share(rate), tip)


def _gain_tile(one: Series, point: Point, name: str) -> Tile:
    values = _categories(point).get(name, {})
    gain, steps = read.number(values.get("tokens_per_step")), read.number(values.get("num_steps")) or 0
    tip = f"{one.label}, {name}: {read.fixed(gain)} tokens a step, over {steps:,.0f} steps"
    return Tile(gain, steps >= FEW_TOKENS, "–" if gain is None else f"{gain:.1f}", tip)
