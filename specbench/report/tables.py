"""The answer in words and in one table: for the terminal (rich), for a pull request (summary.py) and for the page.

`verdict` is the only place that decides what a line says; the renderings only lay it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specbench.report import rows as read
from specbench.report.rows import DAGGER, DASH, Row
from specbench.report.series import Point, Series, batch_sizes, crossing_text, series_of

NEAR_TIE = "≈"
ROOMY_BATCHES, ROOMY_WIDTH = 6, 110
LOG_WIDTH = 120
"""Columns of a log or a pipe, where no terminal says how many it has: the verdict table keeps all of its columns."""
_STYLES = {"gain": "green", "loss": "red", "unclear": "yellow", "void": "dim", "plain": ""}


@dataclass(frozen=True)
class Cell:
    """One cell's text and what it means: gain, loss, unclear (the interval holds 1.0), void or plain."""

    text: str
    meaning: str = "plain"


@dataclass(frozen=True)
class VerdictLine:
    """One series: where it pays off and where it stops."""

    drafter: str
    depth: int
    synthetic: bool
    control: bool
    speedups: tuple[Cell, ...]
    stops: str
    acceptance: str
    tokens_per_step: str


@dataclass(frozen=True)
class Verdict:
    """All lines over one common list of batch sizes, with the notes that the cells need."""

    batches: tuple[int, ...]
    lines: tuple[VerdictLine, ...]
    notes: tuple[str, ...]


def verdict(rows: Iterable[Row]) -> Verdict:
    """The verdict table's content."""
    cells = read.latest(rows)
    series = series_of(cells)
    batches = batch_sizes(series)
    lines = tuple(_line(one, batches) for one in series)
    return Verdict(tuple(batches), lines, tuple(_notes(cells, lines)))


def _line(one: Series, batches: Sequence[int]) -> VerdictLine:
    stops = "control: never drafts" if one.control else crossing_text(one)
    return VerdictLine(
        one.drafter_label,
        one.depth,
        one.synthetic,
        one.control,
        tuple(speedup_cell(one.at(batch)) for batch in batches),
        stops,
        _acceptance([point for point in one.points if point.ok]),
        _spread([point.metric("tokens_per_step") for point in one.points if point.ok]),
    )


def speedup_cell(point: Point | None) -> Cell:
    """ "1.42 ±.05", or the status of a cell that has no speedup; "≈" follows where outputs part at a near tie."""
    if point is None:
        return Cell("", "void")
    if not point.ok:
        return Cell(point.status, "void")
    if point.speedup is None:
        return Cell(DASH, "void")
    mean, low, high = point.speedup
    if read.is_predicted(point.row):
        return Cell(f"{mean:.2f}", "gain" if mean > 1.0 else "loss")
    text = read.with_interval(mean, low, high).replace("±0.", "±.")
    if read.section(point.row, "conditions").get("output_check") == "near_tie":
        text += f" {NEAR_TIE}"
    if low is None or high is None or low <= 1.0 <= high:
        return Cell(text, "unclear")
    return Cell(text, "gain" if mean > 1.0 else "loss")


def _acceptance(points: Sequence[Point]) -> str:
    """The acceptance rate; for trees, which have none, the share of the drafts' depth, named so."""
    by_depth = [point.metric("depth_acceptance_rate") for point in points]
    if all(point.metric("acceptance_rate") is None for point in points) and any(rate is not None for rate in by_depth):
        return f"{_spread(by_depth)} of depth"
    return _spread([point.metric("acceptance_rate") for point in points])


def speedup_text(row: Row) -> str:
    """A row's speedup with its interval, or a dash."""
    found = read.speedup(row)
    return read.DASH if found is None else read.with_interval(*found)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return DASH
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low}–{high}"


def _notes(cells: Sequence[Row], lines: Sequence[VerdictLine]) -> list[str]:
    notes = [
        "Speedup: tokens/s over the AR arm of the same cell; ± is half its interval.",
        "accept., tokens: drafts accepted, as a share, and tokens a step, each over the batches of its line.",
    ]
    if any(read.is_predicted(row) for row in cells):
        notes = ["Predicted by the cost model, not measured. Speedup: tokens/s over the AR arm; it has no interval."]
    if any(line.synthetic for line in lines):
        notes.append(
            f"{DAGGER}synthetic: acceptance was forced; it shows what the system costs, not what a drafter earns."
        )
    if any(read.section(row, "conditions").get("output_check") == "near_tie" for row in cells):
        notes.append(f"{NEAR_TIE} outputs part from AR at a near tie of the two best tokens.")
    if any(read.section(row, "conditions").get("lossless") is False for row in cells):
        notes.append("lossy: the output may differ from the target's own.")
    counts = Counter(read.status(row) for row in cells)
    bad = [f"{counts[name]} {name}" for name in read.STATUSES[1:] if counts[name]]
    if bad:
        notes.append(f"{read.listed(bad)} of {read.counted(len(cells), 'cell')}: they have no speedup.")
    return notes


def verdict_table(rows: Iterable[Row], manifest: Mapping[str, Any], width: int = 100) -> Table:
    """The verdict as a rich table for a terminal of `width` columns; text from outside is never taken as markup.

    With five batch sizes nothing is cut from 80 columns on; where there is room the columns stand further apart.
    """
    content = verdict(rows)
    title = Text(read.plain(manifest.get("question") or manifest.get("name") or "Verdict"), style="bold")
    caption = Text("\n".join(content.notes if content.lines else ("No cell was measured.",)), style="dim")
    many = len(content.batches) > ROOMY_BATCHES
    roomy, tight = width >= ROOMY_WIDTH and not many, width < 100 or many
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
                  padding=(0, 1, 0, 0) if roomy else (0, 0), pad_edge=False, show_edge=False)  # fmt: skip
    table.add_column("drafter", overflow="fold", min_width=_longest_word((x.drafter for x in content.lines), 7, 13))
    table.add_column("depth", justify="right", min_width=5)
    for place, batch in enumerate(content.batches):
        width = _longest_word((line.speedups[place].text for line in content.lines), 5, 8)
        table.add_column(Text(f"batch\n{batch}"), justify="right", min_width=width)
    table.add_column(Text("stops\npaying off"), overflow="fold", min_width=18 if roomy else 10)
    width = _longest_word((text for x in content.lines for text in (x.acceptance, x.tokens_per_step)), 7, 9)
    table.add_column(Text("accept.\ntokens"), justify="right", overflow="fold", min_width=width)
    previous = None
    for line in content.lines:
        if previous is not None and previous != line.drafter:
            table.add_row()
        shown = "" if previous == line.drafter else line.drafter
        previous = line.drafter
        texts = [cell.text.replace(" ", "\n") if tight else cell.text for cell in line.speedups]
        speedups = [Text(text, style=_STYLES[cell.meaning]) for text, cell in zip(texts, line.speedups, strict=True)]
        ends = Text(f"{line.acceptance}\n{line.tokens_per_step}")
        table.add_row(Text(shown), Text(str(line.depth)), *speedups, Text(line.stops), ends)
    return table


def _longest_word(texts: Iterable[str], low: int, high: int) -> int:
    longest = max((len(word) for text in texts for word in text.split()), default=low)
    return min(max(longest, low), high)


def verdict_sentences(rows: Iterable[Row], manifest: Mapping[str, Any]) -> list[str]:
    """The answer in sentences: one on the whole, one for each drafter (and context), measured before synthetic."""
    cells = read.latest(rows)
    if not cells:
        return ["This run has no cells, so there's no verdict."]
    series = [one for one in series_of(cells) if not one.control]
    if not any(one.measured for one in series):
        counts = Counter(read.status(row) for row in cells)
        what = read.listed([f"{count} {name}" for name, count in counts.items()])
        first = next((read.reason(row) for row in cells if not read.is_ok(row)), "no cell drafts tokens")
        return [f"No cell has a valid speedup ({what}), so there's no verdict. First reason: {first}."]
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.drafter_label, []).append(one)
    told = [_overall(series, manifest), *(_drafter_sentence(label, group) for label, group in groups.items())]
    if all(read.is_predicted(row) for row in cells):
        return [sentence.replace(" measured", " predicted") for sentence in told]
    return told


def _last_gain(one: Series) -> int:
    """The largest batch at which the whole interval is above 1.0; 0 where there's none."""
    return max((p.batch_size for p in one.measured if speedup_cell(p).meaning == "gain"), default=0)


def _overall(series: Sequence[Series], manifest: Mapping[str, Any]) -> str:
    device = read.plain(manifest.get("device") or "this device", 80)
    real = [one for one in series if not one.synthetic and one.measured]
    if not real:
        return f"On {device} only synthetic acceptance was measured: it shows the system's cost, not a drafter's worth."
    gains = [one for one in real if _last_gain(one)]
    tested = max(point.batch_size for one in real for point in one.measured)
    if not gains:
        return f"On {device} no drafter pays off clearly at any batch measured (≤{tested}): decode without one."
    longest = max(gains, key=lambda one: (_last_gain(one), _peak([one])[1][0]))
    last = _last_gain(longest)
    (point, best), (mean, low, high) = _peak(real)
    text = f"On {device} speculation pays off clearly up to batch {last} ({longest.label})"
    more = f"; above that, up to batch {tested}, no drafter measured is clearly faster than plain decoding."
    text += ", the largest measured." if last == tested else more
    return f"{text} The largest speedup is {_times(mean, low, high)} at batch {point.batch_size} ({best.label})."


def _times(mean: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{mean:.2f}×"
    return read.with_interval(mean, low, high).replace(" ", "× ", 1)


def _peak(series: Sequence[Series]) -> tuple[tuple[Point, Series], tuple[float, float | None, float | None]]:
    found = [((point, one), point.speedup) for one in series for point in one.measured if point.speedup is not None]
    return max(found, key=lambda item: item[1][0])


def _drafter_sentence(label: str, group: Sequence[Series]) -> str:
    measured = [one for one in group if one.measured]
    if not measured:
        return f"{label}: no valid speedup; {crossing_text(group[0])}."
    (point, best), (mean, low, high) = _peak(measured)
    longest = max(measured, key=_last_gain)
    head = f"{label}: at most {_times(mean, low, high)} (batch {point.batch_size}, depth {best.depth})"
    last, kind, stops = _last_gain(longest), longest.crossing.kind, crossing_text(longest)
    if not last:
        return f"{head}; no depth is clearly faster than plain decoding."
    if kind == "none_in_grid" and speedup_cell(longest.measured[-1]).meaning == "gain":
        text = f"{head}; depth {longest.depth} pays off at every batch measured (≤{longest.measured[-1].batch_size})."
    elif kind == "bracket":
        text = f"{head}; depth {longest.depth} pays off longest and stops {stops}{_about(longest)}."
    elif kind == "none_in_grid":
        reach = f"stays above 1.0 up to batch {longest.measured[-1].batch_size}, not clearly so above batch {last}"
        text = f"{head}; depth {longest.depth} {reach}."
    else:
        text = f"{head}; depth {longest.depth} is clearly faster up to batch {last}, then {stops}."
    return text + _why(longest)


def _about(one: Series) -> str:
    """The crossing's interpolated batch and its interval, where they're known."""
    estimate, interval = one.crossing.estimate, one.crossing.interval
    if estimate is None:
        return ""
    low, high = interval or (None, None)
    text = f", about {estimate:.3g} by interpolation"
    return text if low is None or high is None else f"{text} ({low:.3g} to {high:.3g})"


def _why(one: Series) -> str:
    """What a step costs and earns at the series' largest batch: the reason for the verdict, from its own split."""
    point = one.measured[-1]
    step, ar_step, verify = (point.metric(name) for name in ("step_s", "ar_step_s", "verify_s"))
    earned = point.metric("tokens_per_step")
    if not step or not ar_step or verify is None or earned is None:
        return ""
    return (
        f" At batch {point.batch_size} one of its steps costs {step / ar_step:.2f} AR steps"
        f" (verifying alone {verify / ar_step:.2f}) and yields {earned:.2f} tokens a request."
    )
