"""The look of every plot: colours, markers, sizes, legends outside the data, and a panel that says why it's empty.

Matplotlib is imported inside functions only: reading rows and printing tables must not pay for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbench.report import rows as read

# Okabe and Ito's colour-blind safe palette; black is the AR arm's, and yellow is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
AR_COLOUR = "#000000"
GREY = "#767676"
LIGHT = "#D9D9D9"
PARTS = (
    ("draft", "#E69F00", ""), ("verify", "#0072B2", ""), ("sample", "#CC79A7", "///"), ("commit", "#009E73", "..."),
    ("host", "#BBBBBB", "xxx"),
)  # fmt: skip
WIDTH_IN = 9.0
MAX_PANELS = 12
LABEL_CHARS = 44
_RC: dict[str, Any] = {
    "svg.hashsalt": "specbench",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Drawn:
    """A figure that isn't saved yet, with its words and the data behind it."""

    figure: Any
    title: str
    caption: str
    alt: str
    header: tuple[str, ...]
    data: tuple[tuple[object, ...], ...]


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings and nobody else's; a character without a glyph is drawn as a box, which isn't worth a warning."""
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def save(figure: Any, stem: Path) -> tuple[Path, Path]:
    """Write stem.svg and stem.png without dates or versions, so that the same rows give the same bytes."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    svg, png = stem.with_suffix(".svg"), stem.with_suffix(".png")
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=144, metadata={"Software": None})
    return svg, png


def heading(figure: Any, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")


def label(text: object, limit: int = LABEL_CHARS) -> str:
    """Text from outside for a plot: cut in its middle (depth and context stand at its end) where it's too long, and
    never starting with the underscore that hides a legend entry."""
    shown = read.plain(text)
    if len(shown) > limit:
        tail = (limit - 1) // 2
        shown = f"{shown[: limit - 1 - tail]}…{shown[-tail:]}"
    return f" {shown}" if shown.startswith("_") else shown


def look(index: int, synthetic: bool = False) -> dict[str, Any]:
    """Colour, marker and line of series number `index`; the second round of colours has hollow markers."""
    colour = COLOURS[index % len(COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": colour if index < len(COLOURS) else "white",
        "linestyle": (0, (4, 2)) if synthetic else "-",
        "linewidth": 1.5,
        "markersize": 5.5,
    }


def handle(**style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def patch(**style: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(**style)


def legend_below(figure: Any, entries: Sequence[tuple[Any, str]], width_in: float = WIDTH_IN) -> None:
    """One legend under all panels, in as many columns as its longest entry allows."""
    if not entries:
        return
    longest = max(len(text) for _, text in entries)
    columns = max(1, min(len(entries), int(width_in / (0.075 * longest + 0.55)), 5))
    figure.legend([mark for mark, _ in entries], [text for _, text in entries], loc="outside lower center",
                  ncols=columns, columnspacing=1.4, handlelength=2.6)  # fmt: skip


def legend_height(entries: Sequence[tuple[Any, str]], width_in: float = WIDTH_IN) -> float:
    """Inches that `legend_below` needs."""
    longest = max((len(text) for _, text in entries), default=1)
    columns = max(1, min(len(entries) or 1, int(width_in / (0.075 * longest + 0.55)), 5))
    return 0.19 * math.ceil(len(entries) / columns) + 0.15


def batch_axis(axes: Any, batches: Sequence[int]) -> None:
    """A log2 axis whose ticks are the batch sizes measured, or the powers of two where those would touch."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    low, high = min(batches), max(batches)
    crowded = len(batches) > 12 or any(b / a < 1.3 for a, b in pairwise(batches))
    powers = [2**k for k in range(int(math.log2(max(high, 1))) + 1) if 2**k >= low]
    ticks = powers if crowded and powers else list(batches)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([str(tick) for tick in ticks])


def empty(title: str, why: str) -> Drawn:
    """The panel of a plot that can't be drawn: it says so, and why."""
    figure = new_figure(1.6)
    axes = figure.subplots()
    axes.set_axis_off()
    heading(figure, title)
    axes.text(0.5, 0.5, f"no data: {label(why, 110)}", ha="center", va="center", transform=axes.transAxes, color=GREY)
    text = f"No data: {why}."
    return Drawn(figure, title, text, text, (), ())


def void(drawn: Drawn, header: Sequence[str], data: Sequence[tuple[object, ...]] = ()) -> Drawn:
    """An empty panel that keeps the header of its data, and what data there is."""
    return Drawn(drawn.figure, drawn.title, drawn.caption, drawn.alt, tuple(header), tuple(data))


def grid_shape(count: int, most: int = 3) -> tuple[int, int]:
    """Rows and columns for `count` panels; four panels make a square."""
    columns = 2 if count == 4 else min(count, most)
    return math.ceil(count / columns), columns


def left_out(shown: int, total: int, what: str) -> str:
    """A sentence when not everything fits, so that nothing is cut silently."""
    return "" if shown >= total else f" Shown: the first {shown} of {total} {what}; its CSV has all."
