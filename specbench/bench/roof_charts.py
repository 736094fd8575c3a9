"""Charts of measured roofs, as PNG, SVG and CSV: bandwidth over working-set size, the staircase of skinny matmuls."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specbench.bench.ceilings import MeasuredRoofs
from specbench.bench.ceilings_bandwidth import STREAMS
from specbench.bench.ceilings_skinny import SkinnyPoint
from specbench.report import rows as read
from specbench.report import style
from specbench.report.style import Drawn
from specbench.roofline.shapes import ModelSpec
from specbench.roofline.staircase import LinearShape, model_linears

KERNEL_WORDS = {"read": "read", "copy": "copy (2 streams)", "triad": "triad (3 streams)"}
OWN_KERNELS = {"cpu": "own CPU kernels", "torch": "torch"}


def write_charts(roofs: MeasuredRoofs, spec: ModelSpec, device: str, folder: Path) -> list[Path]:
    """bandwidth.{png,svg,csv} and staircase.{png,svg,csv} in `folder`; returns what was written.

    Where nothing was measured there is no picture, and the table has its header alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with style.drawing():
        for name, drawn in (
            ("bandwidth", draw_bandwidth(roofs, device)),
            ("staircase", draw_staircase(roofs, spec, device)),
        ):
            if drawn.figure is not None:
                svg, png = style.save(drawn, folder / name)
                written += [path for path in (png, svg) if path is not None]
            table = folder / f"{name}.csv"
            with table.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([drawn.header, *drawn.data])
            written.append(table)
    return written


def _size(num_bytes: float) -> str:
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _marked(roofs: MeasuredRoofs) -> str:
    """What disturbed the measurement shows in the picture itself."""
    return f"\ndisturbed while measured: {'; '.join(roofs.marks)}" if roofs.marks else ""


def draw_bandwidth(roofs: MeasuredRoofs, device: str) -> Drawn:
    """Read, copy and triad over the working set; a vertical line where each cache ends, named at the top."""
    title = f"Bandwidth by working set: {style.label(device)}"
    header = ("kernel", "working_set_bytes", "bytes_per_s", "repetitions")
    data = tuple((p.kernel, p.working_set_bytes, p.bytes_per_s, p.repetitions) for p in roofs.bandwidth)
    if not roofs.bandwidth:
        return style.left(title, "no working set was measured", header, data)
    entries = [(style.handle(**style.look(i)), KERNEL_WORDS[name]) for i, name in enumerate(STREAMS)]
    figure = style.new_figure(4.2 + style.legend_height(entries))
    axes = figure.subplots()
    for index, name in enumerate(STREAMS):
        points = [(p.working_set_bytes, p.bytes_per_s) for p in roofs.bandwidth if p.kernel == name]
        axes.plot(*zip(*points, strict=True), **style.look(index))
    sizes = [p.working_set_bytes for p in roofs.bandwidth]
    low, high = min(sizes) / 1.3, max(sizes) * 1.3
    _log_axis(axes, "x", low, high, _size, base=2)
    _log_axis(axes, "y", *_decades([p.bytes_per_s for p in roofs.bandwidth]), lambda v: read.significant(v, "B/s", 2))
    left = low
    for level in roofs.levels:
        end = min(level.capacity_bytes or high, high)
        if left < end:
            text = level.level if level.capacity_bytes is None else f"{level.level} {_size(level.capacity_bytes)}"
            axes.text(math.sqrt(left * end), 1.01, text, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
            if level.capacity_bytes is not None and end < high:
                axes.axvline(end, color=style.GREY, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1.5)
        left = max(left, end)
    axes.set_xlabel("working set of all threads")
    axes.set_ylabel("bytes asked for per second")
    style.heading(figure, title + _marked(roofs))
    style.legend_below(figure, entries)
    plateaus = "; ".join(
        f"{level.level} {read.significant(rate, 'B/s')}"
        for level in roofs.levels
        if (rate := level.bytes_per_s["read"])
    )
    caption = (
        "Each thread walks its own part of the set; dashed lines mark the caches' sizes, so each level is a plateau."
        f" Read: {plateaus or 'no plateau inside a level'}."
        + (f" Marked: {'; '.join(roofs.marks)}." if roofs.marks else "")
    )
    return Drawn(figure, title, caption, caption, header, data)


def draw_staircase(roofs: MeasuredRoofs, spec: ModelSpec, device: str) -> Drawn:
    """Time over M of each linear layer, a panel each: own kernels, torch beside them, and what one row costs."""
    title = f"Skinny matmuls of {style.label(spec.name)}: {style.label(device)}"
    header = ("layer", "kernel", "dtype", "m", "n", "k", "time_s", "flops_per_s", "bytes_per_s", "reason")
    linears = model_linears(spec)
    every = (*roofs.skinny, *roofs.skinny_torch)
    data = tuple(
        (one.name, p.kernel, p.dtype, p.m, p.n, p.k, p.time_s, p.flops_per_s, p.bytes_per_s, p.reason)
        for one in linears
        for p in every
        if (p.n, p.k) == (one.n, one.k)
    )
    shown = [one for one in linears if any(p.time_s is not None for p in every if (p.n, p.k) == (one.n, one.k))]
    if not shown:
        return style.left(title, "no skinny matmul was measured", header, data)
    kernels = tuple(dict.fromkeys(p.kernel for p in every if p.time_s is not None))
    entries = [(style.handle(**style.look(i)), OWN_KERNELS.get(name, name)) for i, name in enumerate(kernels)]
    entries.append(
        (style.handle(color=style.GREY, linewidth=1, linestyle=(0, (1, 1.5))), "M times the time of one row")
    )
    rows, columns = style.grid_shape(len(shown))
    figure = style.new_figure(2.9 * rows + 0.4 + style.legend_height(entries))
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, one in zip(panels.flat, shown, strict=False):
        _panel(axes, one, every, kernels)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("time of one layer")
    for index, axes in enumerate(panels.flat[: len(shown)]):
        if index >= len(shown) - columns:
            axes.set_xlabel("rows M (batch x nodes to verify)")
            axes.tick_params(labelbottom=True)
    style.heading(figure, title + _marked(roofs))
    style.legend_below(figure, entries)
    left_out = sum(p.time_s is None for p in every)
    caption = (
        "Flat: extra rows are free, which is what makes speculation pay. Once a kernel runs out of arithmetic, time"
        " follows the dotted slope; a tile of rows makes it a stair."
        + (f" {left_out} points would have taken more than their time budget." if left_out else "")
    )
    return Drawn(figure, title, caption, caption, header, data)


def _panel(axes: Any, one: LinearShape, every: Sequence[SkinnyPoint], kernels: Sequence[str]) -> None:
    times: list[float] = []
    for index, kernel in enumerate(kernels):
        points = [
            (p.m, p.time_s)
            for p in every
            if (p.n, p.k) == (one.n, one.k) and p.kernel == kernel and p.time_s is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **(style.look(index) | {"markersize": 3.5}))
            times += [time for _, time in points]
            if index == 0:
                first, last = points[0], points[-1]
                axes.plot(
                    *((first[0], last[0]), (first[1], first[1] * last[0] / first[0])),
                    color=style.GREY,
                    linewidth=1,
                    linestyle=(0, (1, 1.5)),
                    zorder=1.5,
                )
    axes.set_title(f"{one.name}: n {one.n:,}, k {one.k:,}")
    most = max(p.m for p in every)
    _log_axis(axes, "x", 0.85, most * 1.2, lambda value: f"{value:.0f}", base=2, most=6)
    _log_axis(axes, "y", *_decades(times), lambda value: read.significant(value, "s", 2))


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Limits with air around the values, and at least a decade apart."""
    low, high = min(values) / 1.4, max(values) * 1.4
    grow = max(1.0, 10 / (high / low)) ** 0.5
    return low / grow, high * grow


def _log_axis(
    axes: Any, which: str, low: float, high: float, text: Callable[[float], str], base: int = 10, most: int = 10
) -> None:
    """A log axis with at most `most` labels at powers of 2 (of 4 or 8), or at 1, 2 and 5 in decades."""
    from matplotlib.ticker import FixedLocator, NullLocator

    if base == 2:
        exponents = [k for k in range(64) if low <= 2**k <= high]
        step = max(1, math.ceil(len(exponents) / most))
        ticks = [float(2**k) for k in exponents[::step]]
    else:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        factors = (1, 2, 5) if last - first <= 3 else (1,)
        ticks = [f * 10.0**k for k in range(first, last + 1) for f in factors if low <= f * 10.0**k <= high]
    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("log", base=base)
    getattr(axes, f"set_{which}lim")(low, high)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: text(value))
