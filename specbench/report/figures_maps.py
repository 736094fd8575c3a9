"""Maps of speedup: the best depth of each drafter by batch, batch by depth, and context length by depth.

A cell's colour is its speedup on one log scale, a heavy edge runs where it passes 1.0, and a cell is hatched where its
interval holds 1.0. Edges follow the cells that were measured: nothing is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.report import rows as read
from specbench.report import style
from specbench.report.figures_panels import Ground
from specbench.report.figures_tiles import Tile, draw_tiles, ratio_bar, ratio_scale, tile_ticks
from specbench.report.rows import DAGGER, Row
from specbench.report.series import ADAPTIVE, BestDepth, Series, best_depth_of, context_of, varying_axes
from specbench.report.style import Drawn, Marks

MAX_MAP_ROWS, MAX_MAP_COLUMNS, MAX_TILE_PANELS = 40, 16, 15
_BEST_TITLE = "Best depth by tokens/s, for each drafter and batch size"
_BEST_HEADER = (
    "drafter", "batch_size", "best_depth", "best_speculative_depth", "speedup", "speedup_low",
    "speedup_high", "output_tokens_per_s", "ar_output_tokens_per_s", "tied_depths", "note",
)  # fmt: skip
_DEPTH_TITLE = "Speedup over batch size and depth, drafter by drafter"
_CONTEXT_TITLE = "Speedup over context length, drafter by drafter"
_TILE_HEADER = (
    "drafter", "panel", "x", "x_value", "y", "y_value", "status", "speedup", "speedup_low", "speedup_high", "clear",
)  # fmt: skip
_SHORT = {"invalid": "inv.", "failed": "fail", "skipped": "skip"}
_KEY = (
    "A heavy edge runs where the speedup passes 1.0; hatched cells can't be told from 1.0 (their interval holds it);"
    " inv., fail, skip: invalid, failed or skipped, no speedup."
)
_BAR_IN, _TILE_IN = 0.95, 0.3


@dataclass(frozen=True)
class TilePanel:
    """A map: `rows` from the bottom up, each as long as `x_values`; None where nothing was measured."""

    title: str
    x_values: tuple[int, ...]
    y_values: tuple[int, ...]
    rows: tuple[tuple[Tile | None, ...], ...]
    data: tuple[tuple[object, ...], ...]


# ---- the best depth


def draw_best_depth(series: Sequence[Series]) -> Drawn:
    """A grid of drafter by batch: the depth with the most tokens/s ("AR" where plain decoding has more)."""
    series = [one for one in series if not one.control]
    table = best_depth_of(series)
    data = tuple(
        (b.drafter_label, b.batch_size, "AR" if b.depth == 0 else b.depth, b.speculative_depth, b.speedup,
         b.speedup_low, b.speedup_high, b.tokens_per_s, b.ar_tokens_per_s, " ".join(map(str, b.ties)), b.note)
        for b in table
    )  # fmt: skip
    if not any(best.depth is not None for best in table):
        return style.left(_BEST_TITLE, "no cell has valid tokens/s", _BEST_HEADER, data)
    found = {(best.drafter_label, best.batch_size): best for best in table}
    batches = sorted({best.batch_size for best in table})
    panels: dict[str, dict[str, str]] = {}
    for one in series:
        name = one.drafter + (f" · {ADAPTIVE}" if one.panel_context != one.context else "")
        name += f" {DAGGER}synthetic" if one.synthetic else ""
        panels.setdefault(one.panel_context, {})[name] = one.drafter_label
    across = max(1, min(len(panels), MAX_MAP_COLUMNS // len(batches)))
    shown = _fitting(list(panels.items()), across)
    scale = ratio_scale([best.speedup for best in table])
    predicted = all(read.is_predicted(point.row) for one in series for point in one.points)
    label_in, between = 2.25, 0.15
    width = (style.WIDTH_IN - _BAR_IN - label_in - between * (across - 1)) / across
    tile = (width / len(batches), 0.36)
    bands = [shown[start : start + across] for start in range(0, len(shown), across)]
    lines = [list(dict.fromkeys(name for _, names in band for name in names)) for band in bands]
    heights = [len(names) * tile[1] + 0.75 for names in lines]
    ground, marks = Ground(style.HEAD_IN + sum(heights)), Marks()
    for row, band in enumerate(bands):
        top = style.HEAD_IN + sum(heights[:row]) + 0.25
        for column, (context, labels) in enumerate(band):
            corner = (label_in + column * (width + between), top)
            tiles = [
                [_best_tile(found.get((labels.get(name, ""), batch)), predicted) for batch in batches]
                for name in lines[row]
            ]
            size = 8.0 if tile[0] > 0.5 else 6.5
            draw_tiles(ground, corner, tile, tiles, marks, scale, size=size, edges=(True, False))
            if context:
                ground.text(corner[0], top - 0.11, style.label(context, 40), fontsize=9.5, fontweight="bold")
            shown_names = [style.label(name, 32) if column == 0 else "" for name in lines[row]]
            tile_ticks(ground, corner, tile, [str(batch) for batch in batches], shown_names,
                       "batch size (requests)", names_size=8)  # fmt: skip
    ratio_bar(ground, scale, style.HEAD_IN + 0.3, min(2.4, max(heights[0] - 0.8, 0.5)))
    wins = sum(1 for best in table if best.depth)
    lost = sum(len(names) for names in panels.values()) - sum(len(names) for _, names in shown)
    caption = "The depth with the most tokens/s for each drafter at each batch size, and its speedup over AR."
    note = (
        "“AR”: plain decoding has more tokens/s, and the best depth's speedup stands below; “*”: some depths have no"
        f" valid cell there. {_KEY}" + (f" {lost} lines are in the data alone." if lost else "")
    )
    extent = f"{len(found)} cells of {read.counted(len({b.drafter_label for b in table}), 'drafter')}"
    alt = f"Grid of {extent}; speculation is the faster in {wins} of them."
    return Drawn(ground.figure, _BEST_TITLE, caption, alt, _BEST_HEADER, data, note, marks=marks)


def _fitting(panels: list[tuple[str, dict[str, str]]], across: int) -> list[tuple[str, dict[str, str]]]:
    """Bands of panels as long as their lines fit; a first panel that is too long is cut."""
    kept: list[tuple[str, dict[str, str]]] = []
    room = MAX_MAP_ROWS
    for start in range(0, len(panels), across):
        band = panels[start : start + across]
        need = max(len(names) for _, names in band)
        if need > room and kept:
            break
        kept += [(context, dict(list(names.items())[:room])) for context, names in band]
        room -= need
    return kept


def _best_tile(best: BestDepth | None, predicted: bool) -> Tile | None:
    if best is None:
        return None
    where = f"{best.drafter_label}, batch {best.batch_size}"
    if best.depth is None:
        return Tile(
            None, True, _SHORT.get(best.note.rpartition(" ")[2], "–"), f"{where}: {best.note or 'no valid cell'}"
        )
    name = "AR" if best.depth == 0 else f"depth {best.depth}"
    star = "*" if best.note else ""
    if best.speedup is None:
        return Tile(None, True, f"{name}{star}", f"{where}: {name}, no speedup")
    ends = "" if best.speedup_low is None else f" ({read.fixed(best.speedup_low)} to {read.fixed(best.speedup_high)})"
    more = f"; {best.note}" if best.note else ""
    tip = f"{where}: depth {best.speculative_depth} is the best, {_ratio(best.speedup)}×{ends}{more}"
    value = best.speedup if best.speedup > 0 else None
    return Tile(value, best.clear or predicted, f"{name}{star}\n{_ratio(best.speedup)}", tip)


# ---- speedup over batch and depth


def draw_depth_map(series: Sequence[Series]) -> Drawn:
    """A map for each drafter that has several depths and several batch sizes."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        if not one.control:
            groups.setdefault(one.drafter_label, []).append(one)
    panels = []
    for label, group in groups.items():
        cells = {(point.batch_size, one.depth): point.row for one in group for point in one.points}
        panel = _tile_panel(label, label, cells, "batch_size", "depth")
        if len(panel.x_values) > 1 and len(panel.y_values) > 1 and _measured(panel):
            panels.append(panel)
    data = tuple(line for panel in panels for line in panel.data)
    if not panels:
        why = "no drafter was measured at two depths and two batch sizes"
        return style.left(_DEPTH_TITLE, why, _TILE_HEADER, data)
    caption = "The speedup of every depth at every batch size, a map for each drafter with several depths."
    return _draw_panels(_DEPTH_TITLE, caption, panels, data, "batch size (requests)", lambda _: "depth")


def draw_context_map(rows: Sequence[Row]) -> Drawn | None:
    """A map for each drafter at its smallest and its largest batch; None where the run has one context length."""
    cells = [row for row in read.latest(rows) if not read.is_control(row) and read.batch_size(row) is not None]
    lengths = {length for row in cells if (length := _length(row)) is not None}
    if len(lengths) < 2:
        return None
    varying = [name for name in varying_axes(cells) if name != "context_len"]
    groups: dict[str, list[Row]] = {}
    for row in cells:
        name = read.drafter(row) + (f" {DAGGER}synthetic" if read.is_synthetic(row) else "")
        groups.setdefault(" · ".join(part for part in (name, context_of(row, varying)) if part), []).append(row)
    panels = [panel for label, group in groups.items() for panel in _context_panels(label, group) if _measured(panel)]
    data = tuple(line for panel in panels for line in panel.data)
    if not panels:
        return style.left(_CONTEXT_TITLE, "no cell with a context length has a speedup", _TILE_HEADER, data)
    caption = "The speedup at every context length, a map for each drafter."
    named = {panel.title: panel.data[0][4] for panel in panels}
    return _draw_panels(_CONTEXT_TITLE, caption, panels, data, "context length (tokens)",
                        lambda panel: "batch" if named[panel.title] == "batch_size" else "depth")  # fmt: skip


def _length(row: Row) -> int | None:
    value = read.number(read.axis(row, "context_len"))
    return None if value is None else int(value)


def _context_panels(label: str, group: Sequence[Row]) -> list[TilePanel]:
    """Context length by depth at the smallest and the largest batch; by batch where there's one depth."""
    group = [row for row in group if _length(row) is not None]
    batches = sorted({read.batch_size(row) or 0 for row in group})
    if len({read.depth(row) for row in group}) < 2:
        cells = {(_length(row) or 0, read.batch_size(row) or 0): row for row in group}
        return [_tile_panel(label, label, cells, "context_len", "batch_size")] if cells else []
    return [
        _tile_panel(label, f"{label} · batch {batch}",
                    {(_length(row) or 0, read.depth(row)): row for row in group if read.batch_size(row) == batch},
                    "context_len", "depth")
        for batch in dict.fromkeys((batches[0], batches[-1]))
    ]  # fmt: skip


def _measured(panel: TilePanel) -> bool:
    return any(tile is not None and tile.value is not None for row in panel.rows for tile in row)


def _tile_panel(drafter: str, title: str, cells: dict[tuple[int, int], Row], x: str, y: str) -> TilePanel:
    x_values, y_values = (tuple(sorted({place[i] for place in cells})) for i in (0, 1))
    tiles = {place: _tile(row) for place, row in cells.items()}
    data = tuple(
        (drafter, title, x, place[0], y, place[1], read.status(row), *(read.speedup(row) or (None, None, None)),
         tiles[place].clear)
        for place, row in sorted(cells.items(), key=lambda item: item[0][::-1])
    )  # fmt: skip
    rows = tuple(tuple(tiles.get((a, b)) for a in x_values) for b in y_values)
    return TilePanel(title, x_values, y_values, rows, data)


def _tile(row: Row) -> Tile:
    where = read.plain(row.get("case_name") or read.drafter(row))
    found = read.speedup(row)
    if found is None:
        why = "no speedup" if read.is_ok(row) else f"{read.status(row)}: {read.reason(row)[:120]}"
        return Tile(None, True, _SHORT.get(read.status(row), "–"), f"{where}: {why}")
    mean, low, high = found
    clear = read.is_predicted(row) or (low is not None and high is not None and not low <= 1.0 <= high)
    ends = "" if low is None else f" ({read.fixed(low)} to {read.fixed(high)})"
    return Tile(mean if mean > 0 else None, clear, _ratio(mean), f"{where}: {_ratio(mean)}×{ends}")


def _draw_panels(
    title: str,
    caption: str,
    panels: Sequence[TilePanel],
    data: tuple[tuple[object, ...], ...],
    x_label: str,
    y_label: Callable[[TilePanel], str],
) -> Drawn:
    shown = panels[:MAX_TILE_PANELS]
    rows, columns = style.grid_shape(len(shown))
    width = min((style.WIDTH_IN - _BAR_IN - 0.62 * columns) / columns, 4.2)
    heights = [
        max(len(panel.y_values) for panel in shown[row * columns : (row + 1) * columns]) * _TILE_IN + 0.8
        for row in range(rows)
    ]
    ground, marks = Ground(style.HEAD_IN + sum(heights)), Marks()
    scale = ratio_scale([tile.value for panel in panels for row in panel.rows for tile in row if tile])
    for place, panel in enumerate(shown):
        row, column = divmod(place, columns)
        corner = (0.58 + column * (width + 0.62), style.HEAD_IN + sum(heights[:row]) + 0.26)
        tile = (width / len(panel.x_values), _TILE_IN)
        draw_tiles(ground, corner, tile, panel.rows[::-1], marks, scale, size=8 if tile[0] >= 0.34 else 6)
        name = style.label(panel.title, int((width + 0.5) * 11))
        ground.text(corner[0], corner[1] - 0.11, name, fontsize=9.5, fontweight="bold")
        x = [_thousands(value) for value in panel.x_values]
        tile_ticks(ground, corner, tile, x, [str(value) for value in panel.y_values[::-1]], x_label)
        middle = corner[1] + len(panel.y_values) * _TILE_IN / 2
        ground.text(corner[0] - 0.42, middle, y_label(panel), ha="center", rotation=90, fontsize=9)
    ratio_bar(ground, scale, style.HEAD_IN + 0.3, min(2.2, max(sum(heights) - 0.8, 0.5)))
    wins = sum(1 for panel in panels for row in panel.rows for tile in row if tile and tile.value and tile.value > 1)
    count = sum(1 for panel in panels for row in panel.rows for tile in row if tile and tile.value)
    alt = f"{read.counted(len(panels), 'heat map')} of speedup; {wins} of {count} cells are above 1.0."
    note = _KEY + style.left_out(len(shown), len(panels), "maps")
    return Drawn(ground.figure, title, caption, alt, _TILE_HEADER, data, note, marks=marks)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0e}"


def _thousands(value: int) -> str:
    return f"{value // 1024}k" if value >= 4096 and value % 1024 == 0 else str(value)
