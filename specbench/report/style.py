"""The look of every plot: colours, markers, sizes, places of panels, legends outside the data.

Matplotlib is imported inside functions only: reading rows and printing tables must not pay for it.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbench.report import rows as read
from specbench.report.figures_svg import PALETTE, finish

# Okabe and Ito's colour-blind safe palette; black is the AR arm's, and yellow is too faint on white.
PAGE, INK, GREY, RULE, GRID, *_SERIES, HOST = (light for light, _ in PALETTE.values())
COLOURS = tuple(_SERIES)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
AR_COLOUR = INK
LIGHT = RULE
ON_LIGHT, ON_DARK = "#111111", "#fafafa"
"""Text on a coloured cell: the same in both themes."""
PARTS = (
    ("draft", COLOURS[5], ""), ("verify", COLOURS[0], ""), ("sample", COLOURS[3], "////"),
    ("commit", COLOURS[2], r"\\\\"), ("host", HOST, ""),
)  # fmt: skip
WIDTH_IN = 9.0
HEAD_IN = 0.42
"""Room for a figure's title at its top."""
MAX_PANELS = 12
LABEL_CHARS = 44
_RC: dict[str, Any] = {
    "svg.hashsalt": "specbench",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 5,
    "axes.labelsize": 9,
    "axes.labelpad": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.5,
}


@dataclass(frozen=True)
class Drawn:
    """A figure that isn't saved yet, with its words and the data behind it.

    `figure` is None where there's nothing to draw: `why` tells the reason, and the figure is left out. `caption` is one
    sentence on what it shows; `note` tells how to read it. `marks` are the texts of its values.
    """

    figure: Any
    title: str
    caption: str
    alt: str
    header: tuple[str, ...]
    data: tuple[tuple[object, ...], ...]
    note: str = ""
    why: str = ""
    marks: Marks | None = None


class Marks:
    """The hover texts of a figure: each artist that stands for values gets an id and one text a value."""

    def __init__(self) -> None:
        self.tips: dict[str, tuple[str, ...]] = {}
        self.names: dict[str, str] = {}

    def add(self, artist: Any, tips: Sequence[str], name: str = "") -> None:
        """`tips`: one for each marker, bar or cell that will be drawn, in their order."""
        group = f"series-{len(self.tips)}"
        artist.set_gid(group)
        self.tips[group] = tuple(read.plain(tip) for tip in tips)
        if name:
            self.names[group] = read.plain(name)


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


def new_figure(height_in: float, width_in: float = WIDTH_IN, arrange: bool = True) -> Any:
    """A figure; `arrange` lets matplotlib lay out its panels, which takes the time of another drawing or two."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained" if arrange else None)


def panel(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """New axes at a place in inches, from the upper left corner of a figure that isn't arranged."""
    whole_width, whole_height = figure.get_size_inches()
    box = (left / whole_width, 1 - (top + height) / whole_height, width / whole_width, height / whole_height)
    return figure.add_axes(box)


def save(drawn: Drawn, stem: Path, png: bool = True) -> tuple[Path, Path | None]:
    """Write stem.svg (and stem.png) without dates or versions, so that the same rows give the same bytes."""
    figure = drawn.figure
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    svg, picture = stem.with_suffix(".svg"), stem.with_suffix(".png") if png else None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    marks = drawn.marks or Marks()
    svg.write_bytes(finish(buffer.getvalue(), marks.tips, marks.names))
    if picture is not None:
        figure.savefig(picture, format="png", dpi=144, metadata={"Software": None})
    return svg, picture


def heading(figure: Any, title: str) -> None:
    """The title at the upper left; an arranged figure makes room for it itself."""
    place = {} if figure.get_layout_engine() is not None else {"y": 1 - 0.1 / figure.get_size_inches()[1]}
    figure.suptitle(title, x=0.01, ha="left", va="top", fontsize=11, fontweight="bold", **place)


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
        "markerfacecolor": colour if index < len(COLOURS) else PAGE,
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
    place = "outside lower center" if figure.get_layout_engine() is not None else "lower center"
    look = {"loc": place, "columnspacing": 1.4, "handlelength": 2.6, "borderaxespad": 0.2}
    handles, texts = [mark for mark, _ in entries], [text for _, text in entries]
    figure.legend(handles, texts, ncols=_columns(entries, width_in), **look)


def legend_height(entries: Sequence[tuple[Any, str]], width_in: float = WIDTH_IN) -> float:
    """Inches that `legend_below` needs."""
    return 0.19 * math.ceil(len(entries) / _columns(entries, width_in)) + 0.15


def _columns(entries: Sequence[tuple[Any, str]], width_in: float) -> int:
    longest = max((len(text) for _, text in entries), default=1)
    return max(1, min(len(entries) or 1, int(width_in / (0.075 * longest + 0.55)), 5))


def batch_ticks(batches: Sequence[int]) -> list[int]:
    """The batch sizes measured, or the powers of two where those would touch."""
    low, high = min(batches), max(batches)
    crowded = len(batches) > 12 or any(b / a < 1.3 for a, b in pairwise(batches))
    powers = [2**k for k in range(int(math.log2(max(high, 1))) + 1) if 2**k >= low]
    return powers if crowded and powers else list(batches)


def batch_axis(axes: Any, batches: Sequence[int]) -> None:
    """A log2 axis with `batch_ticks`."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    ticks = batch_ticks(batches)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(batches) / 1.25, max(batches) * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([str(tick) for tick in ticks])


def left(title: str, why: str, header: Sequence[str], data: Sequence[tuple[object, ...]] = ()) -> Drawn:
    """A figure that is left out, and the reason: "no cell has a valid speedup"."""
    text = f"No data: {why}."
    return Drawn(None, title, text, text, tuple(header), tuple(data), why=why)


def grid_shape(count: int, most: int = 3) -> tuple[int, int]:
    """Rows and columns for `count` panels; four panels make a square."""
    columns = 2 if count == 4 else min(count, most)
    return math.ceil(count / columns), columns


def left_out(shown: int, total: int, what: str) -> str:
    """A sentence when not everything fits, so that nothing is cut silently."""
    return "" if shown >= total else f" Shown: {shown} of {total} {what}; its data has all."
