"""The roofline: where the steps of plain decoding and of speculation stand under this device's roofs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.roofs import Roof, missing_roofs, roofs_of
from specbench.report.series import Point, Series, best_series_by_drafter
from specbench.report.style import Drawn

MAX_ROOFLINE_SERIES = 9
_ROOF_TITLE = "Roofline: one step of plain decoding (AR) and of speculation, by batch size"
_ROOF_HEADER = (
    "kind", "name", "depth", "batch_size", "intensity_flop_per_byte", "achieved_flops_per_s", "achieved_bytes_per_s",
    "roof_fraction_measured", "roof_fraction_datasheet", "roof_bytes_per_s", "roof_flops_per_s", "knee_flop_per_byte",
    "source",
)  # fmt: skip


def main_dtype(series: Sequence[Series]) -> str:
    """The dtype of most cells; roofs are drawn for it."""
    counts = Counter(str(read.axis(point.row, "dtype")) for one in series for point in one.points)
    return counts.most_common(1)[0][0] if counts else ""


def draw_roofline(series: Sequence[Series], manifest: Mapping[str, Any]) -> Drawn:
    """Roofs with their knees; AR's and the drafters' points by batch, joined AR to speculative at each batch."""
    dtype = main_dtype(series)
    roofs = roofs_of(manifest, dtype)
    chosen = [one for one in best_series_by_drafter(series) if any(_place(point, "") for point in one.points)]
    ar = _ar_places(series)
    header, data = _ROOF_HEADER, _roofline_data(series, roofs)
    if not chosen and not ar:
        return style.void(style.empty(_ROOF_TITLE, "no cell has an intensity and an achieved FLOP/s"), header, data)
    shown = chosen[:MAX_ROOFLINE_SERIES]
    entries = _roofline_legend(roofs, shown, bool(ar))
    figure = style.new_figure(4.6 + style.legend_height(entries) + 0.4)
    axes = figure.subplots()
    places = [place for one in shown for point in one.points if (place := _place(point, ""))] + list(ar.values())
    low, high = min(x for x, _ in places) / 2, max([*(x for x, _ in places), *(roof.knee for roof in roofs)]) * 2.5
    for roof in roofs:
        xs = [low, roof.knee, high]
        axes.plot(xs, [roof.attainable(x) for x in xs], **_ROOF_LOOKS[roof.kind], zorder=2)
        axes.plot(
            [roof.knee], [roof.flops_per_s], marker="D", color=_ROOF_LOOKS[roof.kind]["color"], markersize=5, zorder=2.2
        )
    for index, one in enumerate(shown):
        points = [(point.batch_size, place) for point in one.points if (place := _place(point, ""))]
        for batch, place in points:
            if batch in ar:
                axes.plot(*zip(ar[batch], place, strict=True), color="#BBBBBB", linewidth=0.7, zorder=2.4)
        looks = style.look(index, one.synthetic) | {"linewidth": 1.1}
        axes.plot([x for _, (x, _) in points], [y for _, (_, y) in points], **looks, zorder=3)
    if ar:
        ordered = sorted(ar)
        axes.plot([ar[b][0] for b in ordered], [ar[b][1] for b in ordered], color=style.AR_COLOUR, marker="o",
                  markersize=5, linewidth=1.1, zorder=3.5)  # fmt: skip
        for batch in dict.fromkeys((ordered[0], ordered[-1])):
            axes.annotate(f"AR, batch {batch}", ar[batch], xytext=(4, -15), textcoords="offset points", fontsize=8.5,
                          zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(y for _, y in places) / 4, max([*(y for _, y in places), *(r.flops_per_s for r in roofs)]) * 2)
    axes.set_xlabel("arithmetic intensity of a step (FLOP/byte)")
    axes.set_ylabel("achieved FLOP/s")
    axes.yaxis.set_major_formatter(lambda value, _: read.significant(value, "FLOP/s", 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    style.heading(figure, _ROOF_TITLE)
    style.legend_below(figure, entries)
    absent = "; ".join(missing_roofs(manifest, dtype))
    caption = (
        f"Roofs for {dtype or 'an unknown dtype'}; a diamond marks each knee (FLOP/byte). Left of it memory is the"
        " limit and extra tokens are nearly free; right of it they cost compute. Points run from the smallest batch to"
        " the largest; thin grey lines join AR to speculation at one batch. FLOP/s include rejected tokens."
        + (f" Not drawn: {absent}." if absent else "")
        + style.left_out(len(shown), len(chosen), "drafters")
    )
    alt = "Log-log roofline. " + " ".join(f"{r.name}: knee at {r.knee:.3g} FLOP/byte." for r in roofs)
    return Drawn(figure, _ROOF_TITLE, caption, alt, header, data)


_ROOF_LOOKS: dict[str, dict[str, Any]] = {
    "measured": {"color": "black", "linewidth": 1.8, "linestyle": "-"},
    "datasheet": {"color": "#555555", "linewidth": 1.3, "linestyle": (0, (5, 2))},
    "h100": {"color": "#999999", "linewidth": 1.3, "linestyle": (0, (1, 1.2))},
}


_ROOF_NAMES = {"measured": "measured roof", "datasheet": "datasheet roof", "h100": "H100 datasheet"}


def _place(point: Point, prefix: str) -> tuple[float, float] | None:
    x, y = point.metric(f"{prefix}intensity"), point.metric(f"{prefix}achieved_flops_per_s")
    return (x, y) if point.ok and x and y and x > 0 and y > 0 else None


def _ar_places(series: Sequence[Series]) -> dict[int, tuple[float, float]]:
    """AR's place by batch: the median over the cells that measured it."""
    found: dict[int, list[tuple[float, float]]] = {}
    for one in series:
        for point in one.points:
            place = _place(point, "ar_")
            if place:
                found.setdefault(point.batch_size, []).append(place)
    return {batch: (median(x for x, _ in at), median(y for _, y in at)) for batch, at in found.items()}


def _roofline_legend(roofs: Sequence[Roof], shown: Sequence[Series], has_ar: bool) -> list[tuple[Any, str]]:
    entries = [(style.handle(**_ROOF_LOOKS[roof.kind], marker="D", markersize=5), _roof_label(roof)) for roof in roofs]
    if has_ar:
        entries.append(
            (style.handle(color=style.AR_COLOUR, marker="o", markersize=5, linewidth=1.1), "AR step, by batch")
        )
    return entries + [
        (style.handle(**style.look(i, one.synthetic)), style.label(one.label)) for i, one in enumerate(shown)
    ]


def _roof_label(roof: Roof) -> str:
    rates = f"{read.significant(roof.bytes_per_s, 'B/s')}, {read.significant(roof.flops_per_s, 'FLOP/s')}"
    return f"{_ROOF_NAMES[roof.kind]}: {rates}, knee {roof.knee:.3g}"


def _roofline_data(series: Sequence[Series], roofs: Sequence[Roof]) -> tuple[tuple[object, ...], ...]:
    rows: list[tuple[object, ...]] = [
        ("roof", roof.name, *[None] * 7, roof.bytes_per_s, roof.flops_per_s, roof.knee, roof.source) for roof in roofs
    ]
    names = (
        "intensity",
        "achieved_flops_per_s",
        "achieved_bytes_per_s",
        "roof_fraction_measured",
        "roof_fraction_datasheet",
    )
    for one in series:
        for point in one.points:
            for prefix, arm in (("ar_", "AR arm"), ("", "speculative arm")):
                if _place(point, prefix):
                    values = tuple(point.metric(prefix + name) for name in names)
                    rows.append((arm, one.drafter_label, one.depth, point.batch_size, *values, None, None, None, None))
    return tuple(rows)
