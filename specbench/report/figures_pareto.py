"""What a user feels against what the device yields: the Pareto frontier of throughput and speed, and energy a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures_panels import (
    Axis,
    Frame,
    Key,
    amount_axis,
    batch_axis,
    cut_note,
    draw_grid,
    line_name,
)
from specbench.report.rows import DAGGER
from specbench.report.series import Panel, Point, Series, batch_sizes, panels_of
from specbench.report.style import Drawn, Marks

MAX_CONTEXTS, MAX_KINDS, MAX_TIPS = 4, 6, 150
_FRONTIER: dict[str, Any] = {"color": style.GREY, "linewidth": 1.3, "linestyle": (0, (3, 1.5))}
_TITLE = "Throughput of all requests against the speed that each user gets"
_HEADER = (
    "drafter", "depth", "batch_size", "tokens_per_s_per_user", "tpot_s", "output_tokens_per_s", "on_frontier",
)  # fmt: skip
_ENERGY_TITLE = "Energy per output token, by batch size"
_ENERGY_HEADER = ("drafter", "depth", "context", "batch_size", "joules_per_token", "output_tokens_per_s")


@dataclass(frozen=True)
class Spot:
    """One cell: speed per user and of all users, tokens/s; `kind` is "AR" for plain decoding."""

    context: str
    kind: str
    name: str
    depth: int | None
    batch_size: int
    per_user: float
    total: float

    @property
    def tip(self) -> str:
        return (
            f"{self.name}, batch {self.batch_size}: {read.rate(self.per_user)} tokens/s for each user"
            f" (TPOT {read.significant(1 / self.per_user, 's')}), {read.rate(self.total)} tokens/s in all"
        )


def spots_of(series: Sequence[Series]) -> list[Spot]:
    """Every valid cell (of forced acceptance only where there are no others), and plain decoding at each batch: the
    median over the cells that measured it."""
    spots = []
    plain: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in series:
        for point in one.points:
            found, ar = _rates(point, ""), _rates(point, "ar_")
            if found and not one.control:
                spots.append(Spot(one.panel_context, one.kind, one.name, one.depth, point.batch_size, *found))
            if ar:
                plain.setdefault((one.panel_context, point.batch_size), []).append(ar)
    real = [spot for spot in spots if DAGGER not in spot.kind]
    spots = real or spots
    for (context, batch), rates in plain.items():
        speeds = (median(rate for rate, _ in rates), median(rate for _, rate in rates))
        spots.append(Spot(context, "AR", "AR", None, batch, *speeds))
    return spots


def _rates(point: Point, prefix: str) -> tuple[float, float] | None:
    tpot, total = point.metric(f"{prefix}tpot_s"), point.metric(f"{prefix}output_tokens_per_s")
    return (1 / tpot, total) if point.ok and tpot and total and 1e-12 < tpot < 1e12 and 0 < total < 1e15 else None


def frontier(spots: Sequence[Spot]) -> list[Spot]:
    """Spots that no other beats in both: from the fastest for a user to the most in all."""
    best: list[Spot] = []
    for spot in sorted(spots, key=lambda one: (-one.per_user, -one.total)):
        if not best or spot.total > best[-1].total:
            best.append(spot)
    return best


def draw_pareto(series: Sequence[Series]) -> Drawn:
    """All cells as points, the frontier in steps over them, plain decoding in black."""
    spots = spots_of(series)
    contexts = list(dict.fromkeys(spot.context for spot in spots))
    groups = {context: [spot for spot in spots if spot.context == context] for context in contexts}
    best = {context: frontier(group) for context, group in groups.items()}
    on = {id(spot) for line in best.values() for spot in line}
    data = tuple(
        (" · ".join(part for part in (spot.name, spot.context) if part), spot.depth, spot.batch_size, spot.per_user,
         1 / spot.per_user, spot.total, id(spot) in on)
        for spot in spots
    )  # fmt: skip
    if not any(spot.kind != "AR" for spot in spots):
        return style.left(_TITLE, "no cell has a time per output token and a throughput", _HEADER, data)
    shown = contexts[:MAX_CONTEXTS]
    kinds = list(dict.fromkeys(spot.kind for context in shown for spot in best[context] if spot.kind != "AR"))
    kinds = kinds[:MAX_KINDS]
    foot = [(style.handle(**_spot_look(kinds, kind)), kind) for kind in kinds]
    foot += [
        (style.handle(**_spot_look((), "")), "other cells"),
        (style.handle(color=style.AR_COLOUR, marker="o", markersize=4, linewidth=1.1), "AR, by batch"),
        (style.handle(**_FRONTIER), "frontier: nothing beats it in both"),
    ]
    axes = [_axes(groups[context]) for context in shown]
    ground, frames = draw_grid(shown, [[] for _ in shown], lambda place: axes[place],
                               panel_in=3.1 if len(shown) < 3 else 2.5, foot=foot)  # fmt: skip
    marks = Marks()
    for frame, context in zip(frames, shown, strict=True):
        _draw_spots(frame, groups[context], best[context], kinds, marks)
    caption = "What each cell yields in all against what each user gets; the best trade-offs lie up and to the right."
    note = (
        "Points of one setting differ in batch size: larger batches lie further up and left. Labels: drafter, depth and"
        " batch where the frontier turns. Forced acceptance is left out."
        + style.left_out(len(shown), len(contexts), "panels")
    )
    ends = [(context, best[context][0], best[context][-1]) for context in shown]
    words = "; ".join(
        f"{context or 'all cells'}: from {first.name} at batch {first.batch_size} ({read.rate(first.per_user)} tokens/s"
        f" a user) to {last.name} at batch {last.batch_size} ({read.rate(last.total)} tokens/s in all)"
        for context, first, last in ends
    )
    return Drawn(
        ground.figure, _TITLE, caption, f"Scatter chart with a frontier. {words}.", _HEADER, data, note, marks=marks
    )


def _spot_look(kinds: Sequence[str], kind: str) -> dict[str, Any]:
    if kind not in kinds:
        return {"color": style.RULE, "marker": "o", "markersize": 4, "linestyle": "none"}
    return style.look(kinds.index(kind)) | {"linestyle": "none", "markersize": 6}


def _axes(group: Sequence[Spot]) -> tuple[Axis, Axis]:
    fastest, most = (max(getattr(spot, side) for spot in group) for side in ("per_user", "total"))
    x = amount_axis(0.0, 1.16 * fastest, "tokens/s that one user gets (1 / TPOT)")
    return x, amount_axis(0.0, 1.12 * most, "tokens/s of all requests")


def _draw_spots(frame: Frame, group: Sequence[Spot], best: Sequence[Spot], kinds: Sequence[str], marks: Marks) -> None:
    on = {id(spot) for spot in best}
    rest = [spot for spot in group if id(spot) not in on and spot.kind != "AR"]
    if len(rest) <= MAX_TIPS:
        dots = frame.plot([s.per_user for s in rest], [s.total for s in rest], **_spot_look((), ""), zorder=2)
        marks.add(dots, [spot.tip for spot in rest])
    else:
        places = [(frame.x_at(spot.per_user), frame.y_at(spot.total)) for spot in rest]
        frame.ground.lines([[(x - 0.001, y), (x + 0.001, y)] for x, y in places], colors=style.RULE, linewidths=4,
                           capstyle="round", zorder=2)  # fmt: skip
    ar = sorted((spot for spot in group if spot.kind == "AR"), key=lambda spot: spot.batch_size)
    line = frame.plot([s.per_user for s in ar], [s.total for s in ar], color=style.AR_COLOUR, marker="o", markersize=4,
                      linewidth=1.1, zorder=2.5)  # fmt: skip
    marks.add(line, [spot.tip for spot in ar], "AR")
    corners = [(one.per_user, one.total) for one in best[:1]]
    for before, after in pairwise(best):
        corners += [(before.per_user, after.total), (after.per_user, after.total)]
    frame.plot([x for x, _ in corners], [y for _, y in corners], **_FRONTIER, zorder=2.7)
    for kind in dict.fromkeys(spot.kind for spot in best if spot.kind != "AR"):
        own = [spot for spot in best if spot.kind == kind]
        look = _spot_look(kinds, kind) if kind in kinds else _spot_look((), "") | {"color": style.GREY}
        dots = frame.plot([s.per_user for s in own], [s.total for s in own], **look, zorder=3)
        marks.add(dots, [spot.tip for spot in own], kind)
    _label_turns(frame, best)


def _label_turns(frame: Frame, best: Sequence[Spot]) -> None:
    """Names at the frontier's points, those left out that would stand on another: the ends come first."""
    taken: list[tuple[float, float]] = []
    for spot in list(dict.fromkeys([best[0], best[-1], *best])):
        x, y = frame.x_at(spot.per_user), frame.y_at(spot.total)
        if any(abs(y - other) < 0.17 and abs(x - left) < 2.0 for left, other in taken):
            continue
        taken.append((x, y))
        text = f"{style.label(spot.name.replace(' · depth ', ', depth '), 26)}, batch {spot.batch_size}"
        right = x + 0.066 * len(text) < frame.left + frame.width + 0.1
        frame.ground.text(x + (0.08 if right else 0.02), y - (0.07 if right else 0.11), text, fontsize=7.5,
                          ha="left" if right else "right", zorder=5,
                          bbox={"facecolor": style.PAGE, "edgecolor": "none", "pad": 0.6})  # fmt: skip


# ---- energy


def draw_energy(series: Sequence[Series]) -> Drawn:
    """Joules per output token by batch size, a panel for each kind, each drafter at its best depth."""
    drafting = [one for one in series if not one.control]
    data = tuple(
        (one.drafter, one.depth, one.context, point.batch_size, point.metric("joules_per_token"),
         point.metric("output_tokens_per_s"))
        for one in drafting for point in one.points if point.ok and point.metric("joules_per_token")
    )  # fmt: skip
    panels = panels_of([one for one in drafting if any(_joules(point) for point in one.points)])
    if not panels:
        return style.left(_ENERGY_TITLE, _no_energy(drafting), _ENERGY_HEADER, data)
    shown = panels[: style.MAX_PANELS]
    keys = [[Key(style.look(i, one.synthetic), line_name(panel, one)) for i, one in enumerate(panel.lines)]
            for panel in shown]  # fmt: skip
    top = max(value for panel in shown for one in panel.lines for p in one.points if (value := _joules(p)))
    axes = batch_axis(batch_sizes(drafting)), amount_axis(0.0, 1.08 * top, "J per output token", 5)
    ground, frames = draw_grid([panel.name for panel in shown], keys, lambda _: axes, panel_in=1.6)
    marks = Marks()
    for frame, panel in zip(frames, shown, strict=True):
        _draw_energy_panel(frame, panel, marks)
    caption = "The energy that an output token takes at each batch size, each drafter at its best depth."
    note = "Energy of the whole device over the timed window." + cut_note(panels, len(shown))
    words = "; ".join(
        f"{one.label}: {read.fixed(_joules(one.points[0]))} J at batch {one.points[0].batch_size}"
        for panel in shown for one in panel.lines
    )  # fmt: skip
    alt = f"Small line charts of energy per token. {words}."
    return Drawn(ground.figure, _ENERGY_TITLE, caption, alt, _ENERGY_HEADER, data, note, marks=marks)


def _joules(point: Point) -> float | None:
    value = point.metric("joules_per_token") if point.ok else None
    return value if value and value > 0 else None


def _draw_energy_panel(frame: Frame, panel: Panel, marks: Marks) -> None:
    for index, one in enumerate(panel.lines):
        spots = [(point, value) for point in one.points if (value := _joules(point))]
        line = frame.plot([p.batch_size for p, _ in spots], [value for _, value in spots],
                          **style.look(index, one.synthetic), zorder=3)  # fmt: skip
        marks.add(line, [f"{one.label}, batch {p.batch_size}: {value:.3g} J/token" for p, value in spots], one.label)


def _no_energy(series: Sequence[Series]) -> str:
    """Why no cell has energy, in the rows' own words."""
    for one in series:
        for point in one.points:
            metrics = read.section(point.row, "metrics")
            reason = metrics.get("joules_per_token_reason")
            reason = reason or read.section(metrics, "null_reasons").get("joules_per_token")
            if reason:
                return f"no cell has energy per token: {read.plain(reason)}"
    return "no cell has energy per token"
