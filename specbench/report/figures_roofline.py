"""The roofline: where the steps of plain decoding and of speculation stand under this device's roofs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.roofs import Roof, ceilings_of, missing_roofs, roofs_of, staircases_of
from specbench.report.series import Point, Series, best_series, best_series_by_drafter
from specbench.report.style import Drawn, Marks

MAX_ROOFLINE_SERIES = 6
_ROOF_TITLE = "Roofline: one step of plain decoding (AR) and of speculation, by batch size"
_ROOF_HEADER = (
    "kind", "name", "depth", "batch_size", "intensity_flop_per_byte", "achieved_flops_per_s", "achieved_bytes_per_s",
    "roof_fraction_measured", "roof_fraction_datasheet", "roof_bytes_per_s", "roof_flops_per_s", "knee_flop_per_byte",
    "source",
)  # fmt: skip
_ROOF_LOOKS: dict[str, dict[str, Any]] = {
    "measured": {"color": style.INK, "linewidth": 1.8, "linestyle": "-"},
    "datasheet": {"color": style.GREY, "linewidth": 1.4, "linestyle": (0, (5, 2))},
    "h100": {"color": style.GREY, "linewidth": 1.4, "linestyle": (0, (1, 1.2))},
}
_CEILING: dict[str, Any] = {"color": style.GREY, "linewidth": 0.8, "linestyle": (0, (6, 2, 1, 2))}
_STAIRS: dict[str, Any] = {"color": style.GREY, "linewidth": 0.8, "marker": "|", "markersize": 5}
_ROOF_NAMES = {"measured": "measured roof", "datasheet": "datasheet roof", "h100": "H100 datasheet"}


def main_dtype(series: Sequence[Series]) -> str:
    """The dtype of most cells; roofs are drawn for it."""
    counts = Counter(str(read.axis(point.row, "dtype")) for one in series for point in one.points)
    return counts.most_common(1)[0][0] if counts else ""


def draw_roofline(series: Sequence[Series], manifest: Mapping[str, Any]) -> Drawn:
    """Roofs, ceilings and ridges; AR's and the drafters' points by batch, joined AR to verify at each batch."""
    dtype = main_dtype(series)
    roofs = roofs_of(manifest, dtype)
    ar = _ar_places(series)
    data = _roofline_data(series, roofs)
    chosen = [one for one in _leading(series) if any(_place(point, "") for point in one.points)]
    if not chosen and not ar:
        return style.left(_ROOF_TITLE, "no cell has an intensity and an achieved FLOP/s", _ROOF_HEADER, data)
    shown = chosen[:MAX_ROOFLINE_SERIES]
    own = [roof for roof in roofs if roof.kind != "h100"]
    places = [place for one in shown for point in one.points if (place := _place(point, ""))] + list(ar.values())
    ceilings, stairs = ceilings_of(manifest, dtype), staircases_of(manifest, dtype)
    entries = _roofline_legend(roofs, shown, bool(ar), bool(ceilings), bool(stairs))
    beside = len(own) < len(roofs)
    height = 4.1
    figure = style.new_figure(style.HEAD_IN + height + 0.75 + style.legend_height(entries), arrange=False)
    top, main_in = style.HEAD_IN + 0.24, 5.35 if beside else style.WIDTH_IN - 1.15
    axes, marks = style.panel(figure, 1.0, top, main_in, height), Marks()
    low = min(x for x, _ in places) / 1.6
    high = max([*(x for x, _ in places), *(roof.knee for roof in own)]) * 1.7
    bottom = min([*(y for _, y in places)]) / 1.8
    ceiling = max([*(y for _, y in places), *(roof.flops_per_s for roof in own)]) * 1.6
    _frame(axes, (low, high), (bottom, ceiling))
    for ceiling_ in ceilings:
        axes.plot([low, ceiling_.knee, high], [ceiling_.attainable(x) for x in (low, ceiling_.knee, high)], **_CEILING,
                  zorder=1.8)  # fmt: skip
    _draw_roofs(axes, own, (low, high))
    for points in stairs:
        (line,) = axes.plot([p.intensity for p in points], [p.flops_per_s for p in points], **_STAIRS, zorder=1.9)
        marks.add(line, [p.text for p in points])
    _draw_points(axes, shown, ar, marks)
    axes.set_title("this device")
    if beside:
        _draw_overview(figure, roofs, places, (1.0 + main_in + 0.85, top), height)
    style.legend_below(figure, entries)
    absent = "; ".join(missing_roofs(manifest, dtype))
    caption = "How close one step comes to what this device can do: AR's step and the drafters', at each batch size."
    note = (
        f"Roofs for {dtype or 'an unknown dtype'}; a diamond marks each ridge (FLOP/byte): left of it memory is the"
        " limit and extra tokens are nearly free, right of it they cost compute. Thin lines join AR to speculation at"
        " the same batch. FLOP/s include rejected tokens."
        + (f" Not drawn: {absent}." if absent else "")
        + style.left_out(len(shown), len(chosen), "series")
    )
    alt = "Log-log roofline. " + " ".join(f"{r.name}: knee at {r.knee:.3g} FLOP/byte." for r in roofs)
    return Drawn(figure, _ROOF_TITLE, caption, alt.strip(), _ROOF_HEADER, data, note, marks=marks)


def _leading(series: Sequence[Series]) -> list[Series]:
    """The best of each drafter where they fit, else of each kind; measured before synthetic, the fastest first."""
    best = best_series_by_drafter(series)
    if len(best) > MAX_ROOFLINE_SERIES:
        best = best_series(series, lambda one: one.kind)
    return sorted(best, key=lambda one: (one.synthetic, -max((p.speedup[0] for p in one.measured if p.speedup),
                                                            default=0.0)))  # fmt: skip


def _frame(axes: Any, x_limits: tuple[float, float], y_limits: tuple[float, float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*x_limits)
    axes.set_ylim(*y_limits)
    axes.set_xlabel("arithmetic intensity of a step (FLOP/byte)")
    axes.yaxis.set_major_formatter(lambda value, _: read.significant(value, "FLOP/s", 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axis, (low, high), text in (
        (axes.xaxis, x_limits, lambda value: f"{value:g}"),
        (axes.yaxis, y_limits, lambda value: read.significant(value, "FLOP/s", 1)),
    ):
        _minor_labels(axis, low, high, text)


def _minor_labels(axis: Any, low: float, high: float, text: Any) -> None:
    """Labels at 2 and 5 too where an axis spans less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    few = high / low < 200
    axis.set_minor_locator(LogLocator(subs=(2, 5) if few else (1,), numticks=20))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: text(value)) if few else NullFormatter())
    axis.set_tick_params(which="minor", labelsize=8)


def _draw_roofs(axes: Any, roofs: Sequence[Roof], x_limits: tuple[float, float]) -> None:
    for roof in roofs:
        xs = [x_limits[0], roof.knee, x_limits[1]]
        axes.plot(xs, [roof.attainable(x) for x in xs], **_ROOF_LOOKS[roof.kind], zorder=2)
        look = _ROOF_LOOKS[roof.kind]["color"]
        axes.plot([roof.knee], [roof.flops_per_s], marker="D", color=look, markersize=5, zorder=2.2)


def _draw_points(axes: Any, shown: Sequence[Series], ar: Mapping[int, tuple[float, float]], marks: Marks) -> None:
    for index, one in enumerate(shown):
        points = [(point, place) for point in one.points if (place := _place(point, ""))]
        look = style.look(index, one.synthetic) | {"linewidth": 1.2}
        for point, place in points:
            if point.batch_size in ar:
                start = ar[point.batch_size]
                axes.plot([start[0], place[0]], [start[1], place[1]], color=look["color"], linewidth=0.6, alpha=0.55,
                          zorder=2.4)  # fmt: skip
        (line,) = axes.plot([x for _, (x, _) in points], [y for _, (_, y) in points], **look, zorder=3)
        texts = [
            f"{one.label}, batch {point.batch_size}: {read.significant(y, 'FLOP/s')} at {x:.3g} FLOP/byte"
            + _share(point.metric("roof_fraction_measured"))
            for point, (x, y) in points
        ]
        marks.add(line, texts, one.label)
    if ar:
        batches = sorted(ar)
        (line,) = axes.plot([ar[b][0] for b in batches], [ar[b][1] for b in batches], color=style.AR_COLOUR, marker="o",
                            markersize=5.5, linewidth=1.3, zorder=3.5)  # fmt: skip
        marks.add(line, [f"AR, batch {b}: {read.significant(ar[b][1], 'FLOP/s')} at {ar[b][0]:.3g} FLOP/byte"
                         for b in batches], "AR")  # fmt: skip
        for batch in batches:
            text = f"batch {batch}" if batch in (batches[0], batches[-1]) else str(batch)
            axes.annotate(text, ar[batch], xytext=(5, -12), textcoords="offset points", fontsize=8.5, zorder=5)


def _share(value: float | None) -> str:
    return "" if value is None else f", {100 * value:.0f} % of the measured roof"


def _draw_overview(
    figure: Any,
    roofs: Sequence[Roof],
    places: Sequence[tuple[float, float]],
    corner: tuple[float, float],
    height: float,
) -> None:
    """All roofs on one pair of axes, with the points as one cloud: how far this device is from an H100."""
    width = style.WIDTH_IN - corner[0] - 0.1
    axes = style.panel(figure, corner[0], corner[1], width, height)
    low = min(x for x, _ in places) / 2
    high = max([*(x for x, _ in places), *(roof.knee for roof in roofs)]) * 3
    most = max([*(y for _, y in places), *(roof.flops_per_s for roof in roofs)])
    _frame(axes, (low, high), (min(y for _, y in places) / 2, most * 2.5))
    _draw_roofs(axes, roofs, (low, high))
    axes.plot([x for x, _ in places], [y for _, y in places], color=style.COLOURS[0], marker=".", linestyle="none",
              markersize=4, zorder=3)  # fmt: skip
    axes.set_title("beside an H100")
    axes.set_xlabel("FLOP/byte")


def _place(point: Point, prefix: str) -> tuple[float, float] | None:
    x, y = point.metric(f"{prefix}intensity"), point.metric(f"{prefix}achieved_flops_per_s")
    return (x, y) if point.ok and x and y and 1e-9 < x < 1e9 and 1 < y < 1e21 else None


def _ar_places(series: Sequence[Series]) -> dict[int, tuple[float, float]]:
    """AR's place by batch: the median over the cells that measured it."""
    found: dict[int, list[tuple[float, float]]] = {}
    for one in series:
        for point in one.points:
            place = _place(point, "ar_")
            if place:
                found.setdefault(point.batch_size, []).append(place)
    return {batch: (median(x for x, _ in at), median(y for _, y in at)) for batch, at in found.items()}


def _roofline_legend(
    roofs: Sequence[Roof], shown: Sequence[Series], has_ar: bool, has_ceilings: bool, has_stairs: bool
) -> list[tuple[Any, str]]:
    entries = [(style.handle(**_ROOF_LOOKS[roof.kind], marker="D", markersize=5), _roof_label(roof)) for roof in roofs]
    if has_ceilings:
        entries.append((style.handle(**_CEILING), "ceilings: copy bandwidth, peak of other dtypes"))
    if has_stairs:
        entries.append((style.handle(**_STAIRS), "measured matrix products of M tokens"))
    if has_ar:
        look = {"color": style.AR_COLOUR, "marker": "o", "markersize": 5, "linewidth": 1.1}
        entries.append((style.handle(**look), "AR step, by batch"))
    return entries + [
        (style.handle(**style.look(i, one.synthetic)), style.label(one.label)) for i, one in enumerate(shown)
    ]


def _roof_label(roof: Roof) -> str:
    rates = f"{read.significant(roof.bytes_per_s, 'B/s')}, {read.significant(roof.flops_per_s, 'FLOP/s')}"
    return f"{_ROOF_NAMES[roof.kind]}: {rates}, ridge {roof.knee:.3g}"


def _roofline_data(series: Sequence[Series], roofs: Sequence[Roof]) -> tuple[tuple[object, ...], ...]:
    rows: list[tuple[object, ...]] = [
        ("roof", roof.name, *[None] * 7, roof.bytes_per_s, roof.flops_per_s, roof.knee, roof.source) for roof in roofs
    ]
    names = ("intensity", "achieved_flops_per_s", "achieved_bytes_per_s", "roof_fraction_measured",
             "roof_fraction_datasheet")  # fmt: skip
    for one in series:
        for point in one.points:
            for prefix, arm in (("ar_", "AR arm"), ("", "speculative arm")):
                if _place(point, prefix):
                    values = tuple(point.metric(prefix + name) for name in names)
                    rows.append((arm, one.drafter_label, one.depth, point.batch_size, *values, None, None, None, None))
    return tuple(rows)
