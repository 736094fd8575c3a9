"""The figures: nothing hidden or overlapping where there are many series, every value can be read, all are small."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_rows import DRAFTERS, make_manifest, make_row, make_rows

from specbench.report import style
from specbench.report.figures import MAX_LINES, draw_speedup, draw_speedup_by_kind
from specbench.report.figures_acceptance import draw_positions
from specbench.report.figures_maps import draw_best_depth, draw_context_map, draw_depth_map
from specbench.report.figures_panels import amount_axis, batch_axis, speedup_axis, spread
from specbench.report.figures_pareto import Spot, draw_energy, draw_pareto, frontier
from specbench.report.figures_predicted import CELLS, SERIES, comparison_in, comparison_of_rows, draw_cells, draw_series
from specbench.report.figures_roofline import draw_roofline
from specbench.report.figures_svg import PALETTE
from specbench.report.figures_time import draw_split
from specbench.report.plots import Figures, make_figures
from specbench.report.roofs import ceilings_of, staircases_of
from specbench.report.series import best_series, crossing_brief, series_of
from specbench.report.style import Drawn, drawing

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["speedup", "best_depth", "depth_map", "roofline", "acceptance_by_position", "acceptance_by_category",
         "step_time", "pareto"]  # fmt: skip


def many_rows() -> list[dict[str, Any]]:
    """A sweep of 9 kinds, two drafters each but for two, three depths, five batches and two temperatures."""
    return [
        make_row(name if other == 0 else f"{value[0]}(3, nodes 12, branches 3)", depth, batch,
                 axes={"temperature": t}, drafter=value)
        for t in (0.0, 1.0)
        for name, value in DRAFTERS.items()
        for other in range(1 if value[0] in ("oracle", "mtp") else 2)
        for depth in (1, 3, 5)
        for batch in (1, 2, 4, 8, 16)
    ]  # fmt: skip


def big_rows() -> list[dict[str, Any]]:
    return [
        make_row(f"drafter {i}", depth, batch, axes={"temperature": t}, drafter=("x", 0.5, 0.02 * i, False))
        for t in (0.0, 0.5, 0.7, 1.0, 1.2)
        for i in range(10)
        for depth in (1, 2, 3, 5, 7)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
    ]


def with_contexts(lengths: Sequence[int] = (512, 2048, 8192), depths: Sequence[int] = (1, 3)) -> list[dict[str, Any]]:
    return [
        make_row(name, depth, batch, axes={"context_len": length})
        for name in ("ngram(3)", "mtp")
        for length in lengths
        for depth in depths
        for batch in (1, 4, 16)
    ]


def told(rows: Sequence[dict[str, Any]], seed: str = "", spread_by: float = 0.1) -> list[dict[str, Any]]:
    """The same cells as a model would give them: verify steps off by up to `spread_by`."""
    found = copy.deepcopy(list(rows))
    for row in found:
        noise = random.Random(seed + row["key"])
        metrics = row["metrics"]
        row["conditions"]["predicted"] = True
        metrics["verify_s"] *= 1 + noise.uniform(-spread_by, spread_by)
        metrics["step_s"] = sum(metrics[f"{part}_s"] for part in ("draft", "verify", "sample", "commit", "host"))
        metrics["speedup"] = metrics["tokens_per_step"] * metrics["ar_step_s"] / metrics["step_s"]
        metrics |= {"speedup_low": None, "speedup_high": None}
    return found


def texts(svg: Path) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.parse(svg).iter(f"{SVG}text")]


def tips(svg: Path) -> list[str]:
    return [tip for one in ElementTree.parse(svg).iter() if (tip := one.get("data-tip")) is not None]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    return make_figures(many_rows(), make_manifest(), tmp_path_factory.mktemp("many"), png=False)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    rows = make_rows(("ngram(3)", "early_exit(8)", "oracle(0.8)"), (1, 3), (1, 4, 16))
    return make_figures(rows, make_manifest(), tmp_path_factory.mktemp("few"), png=False)


def path_of(figures: Figures, name: str) -> Path:
    return next(plot.svg_path for plot in figures.plots if plot.name == name)


# ---- the files


def test_what_has_data_is_drawn_and_the_rest_is_named_with_its_reason(few: Figures, tmp_path: Path) -> None:
    assert [plot.name for plot in few.plots] == NAMES
    ((name, why),) = [(one.name, one.why) for one in few.left_out]
    assert (name, why) == ("energy", "no cell has energy per token: this device has no energy counter")
    rows = [make_row("suffix", 3, 1, status="failed", reason="driver lost")]
    nothing = make_figures(rows, {}, tmp_path, png=False)
    assert nothing.plots == ()
    assert [one.name for one in nothing.left_out] == [*NAMES, "energy"]
    assert all(re.match(r"no (cell|drafter) ", one.why) for one in nothing.left_out)
    assert list(tmp_path.iterdir()) == []


def test_titles_say_what_a_figure_shows_and_captions_are_one_sentence(few: Figures, many: Figures) -> None:
    for plot in (*few.plots, *many.plots):
        assert plot.title in texts(plot.svg_path)
        assert plot.caption.endswith(".")
        assert ". " not in plot.caption
        assert plot.alt.endswith(".")
    assert {plot.title for plot in few.plots} < {plot.title for plot in many.plots}


def test_every_value_of_a_series_can_be_hovered(few: Figures) -> None:
    source = path_of(few, "speedup")
    series = [one for one in ElementTree.parse(source).iter(f"{SVG}g") if one.get("data-name")]
    assert len(series) == 6
    assert all(one.get("class") == "sb-series" for one in series)
    found = tips(source)
    assert len(found) == 18
    assert sum("× (" in tip and "tokens/s against" in tip for tip in found) == 15
    assert any(tip.endswith("failed: out of memory: 3.1 GB asked, 2.2 GB free") for tip in found)
    row = make_row("ngram(3)", 1, 16)
    wanted = f"ngram(3) · depth 1, batch 16: {row['metrics']['speedup']:.2f}×"
    assert sum(tip.startswith(wanted) for tip in found) == 1
    for plot in few.plots:
        marks = [one for one in ElementTree.parse(plot.svg_path).iter() if one.get("class") == "sb-mark"]
        assert len(marks) >= 9, plot.name
        assert all(one.get("data-tip") for one in marks)


def test_svg_files_follow_the_convention_for_pages(many: Figures) -> None:
    light = {colour for colour, _ in PALETTE.values()}
    for plot in many.plots:
        source = plot.svg_path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(source)
        ids = [name for one in root.iter() if (name := one.get("id"))]
        assert len(ids) == len(set(ids))
        wanted = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", source))
        assert wanted <= set(ids), plot.name
        assert all(one.get("class") == "sb-text" for one in root.iter(f"{SVG}text"))
        assert not re.search(r"<(metadata|script|title|desc)|<!--|rotate\(-0", source)
        colours = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", source))
        if plot.name not in ("best_depth", "depth_map", "acceptance_by_category"):
            assert colours <= light, plot.name
    assert [name for name, _ in sorted(PALETTE.items()) if name.startswith("s") and name != "soft"] == [
        f"s{i}" for i in range(6)
    ]


def test_the_same_rows_give_the_same_bytes_in_another_process(few: Figures, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', 'kernels']\n"
        "from report_rows import make_manifest, make_rows\n"
        "from specbench.report.plots import make_figures\n"
        "rows = make_rows(('ngram(3)', 'early_exit(8)', 'oracle(0.8)'), (1, 3), (1, 4, 16))\n"
        f"make_figures(rows, make_manifest(), {str(tmp_path)!r}, png=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": "77", "PATH": ""},
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 2 * len(NAMES)
    for plot in few.plots:
        for path in (plot.svg_path, plot.csv_path):
            assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_two_thousand_rows_are_drawn_in_seconds_and_stay_small(tmp_path: Path) -> None:
    rows = big_rows()
    assert len(rows) == 2000
    start = time.process_time()
    figures = make_figures(rows, make_manifest(), tmp_path, png=False)
    assert time.process_time() - start < 10
    assert len(figures.plots) == len(NAMES) + 1
    assert sum(plot.svg_path.stat().st_size for plot in figures.plots) < 2.2e6
    cut = {plot.name for plot in figures.plots if "Shown: " in plot.note or "in the data alone" in plot.note}
    assert {"speedup", "depth_map", "acceptance_by_category", "step_time", "pareto"} <= cut


# ---- what a reader sees


def _boxes(figure: Any) -> list[tuple[str, Any]]:
    """Upright and level texts that are drawn, with the boxes that they fill."""
    from matplotlib.text import Text

    found: list[Any] = []
    draw = Text.draw

    def note(one: Any, *arguments: Any, **named: Any) -> None:
        found.append(one)
        draw(one, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", note)
        figure.draw_without_rendering()
    found = [one for one in found if one.get_text().strip() and one.get_visible()]
    return [(one.get_text(), one.get_window_extent()) for one in found if one.get_rotation() in (0, 90)]


def overlapping(boxes: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    ends = np.array([(box.x0, box.y0, box.x1, box.y1) for _, box in boxes])
    across = np.minimum.outer(ends[:, 2], ends[:, 2]) - np.maximum.outer(ends[:, 0], ends[:, 0])
    along = np.minimum.outer(ends[:, 3], ends[:, 3]) - np.maximum.outer(ends[:, 1], ends[:, 1])
    # in pixels of 1/100 inch: descenders may touch
    touching = np.argwhere(np.triu((across > 1.5) & (along > 3.0), 1))
    return [(boxes[one][0], boxes[other][0]) for one, other in touching]


def outside(figure: Any, boxes: Sequence[tuple[str, Any]]) -> list[str]:
    width, height = figure.get_size_inches() * figure.dpi
    return [t for t, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > width + 1 or b.y1 > height + 1]


def all_drawn(rows: Sequence[dict[str, Any]]) -> list[Drawn]:
    series = series_of(rows)
    glance = draw_speedup(series)
    found = [glance, draw_speedup_by_kind(series, glance.data), draw_best_depth(series), draw_depth_map(series),
             draw_context_map(rows), draw_roofline(series, make_manifest()), draw_positions(series),
             draw_split(series), draw_pareto(series), draw_energy(series)]  # fmt: skip
    return [one for one in found if one is not None and one.figure is not None]


@pytest.mark.parametrize("rows", [many_rows(), make_rows(), with_contexts()], ids=["many", "few", "contexts"])
def test_no_text_stands_on_another_or_outside(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["metrics"] = row["metrics"] and row["metrics"] | {"joules_per_token": 1.5}
    with drawing():
        held = comparison_of_rows(rows, told([row for row in rows if row["metrics"]]))
        for one in [*all_drawn(rows), draw_cells(held), draw_series(held)]:
            style.heading(one.figure, one.title)
            boxes = _boxes(one.figure)
            assert len(boxes) > 8
            assert overlapping(boxes) == [], one.title
            assert outside(one.figure, boxes) == [], one.title


def test_at_a_glance_there_is_one_named_line_for_each_kind_and_forced_acceptance_is_elsewhere(many: Figures) -> None:
    found = texts(path_of(many, "speedup"))
    named = [text for text in found if " · depth " in text]
    kinds = {value[0] for value in DRAFTERS.values() if value[0] != "oracle"}
    assert len(named) == 2 * len(kinds) <= 2 * MAX_LINES
    drafters = {text.split(" · depth ")[0] for text in named}
    assert len(drafters) >= len(kinds)
    assert [text for text in found if text in ("T 0", "T 1")] == ["T 0", "T 1"]
    assert not any("oracle" in text for text in found)


def test_kind_by_kind_every_drafter_has_its_best_depth_and_its_crossing_in_words(many: Figures) -> None:
    found = texts(path_of(many, "speedup_by_kind"))
    assert {value[0] for name, value in DRAFTERS.items() if name != "oracle(0.8)"} <= set(found)
    assert "oracle †synthetic" in found
    named = [text for text in found if " · T " in text]
    assert len(named) == 2 * (2 * len(DRAFTERS) - 2)
    assert sum(text.startswith("(3, nodes 12") for text in named) == 2 * 7
    said = [text for text in found if "stops in" in text or "no stop up to" in text or "below 1 from" in text]
    assert len(said) >= len(named) - 2


def test_the_crossing_in_brief() -> None:
    rows = [make_row("suffix", 3, batch) for batch in (1, 2, 4)]
    for values, text in (
        (((1.5, 1.4, 1.6), (1.2, 1.1, 1.3), (0.9, 0.8, 0.95)), r"stops in \(2, 4\] ≈ 3\.\d+"),
        (((1.5, 1.4, 1.6),) * 3, "no stop up to 4"),
        (((0.9, 0.8, 0.95),) * 3, "below 1 from batch 1"),
        (((1.0, 0.9, 1.1),) * 3, "unclear"),
    ):
        for row, value in zip(rows, values, strict=True):
            row["metrics"] |= dict(zip(("speedup", "speedup_low", "speedup_high"), value, strict=True))
        assert re.fullmatch(text, crossing_brief(series_of(rows)[0]))


def test_a_line_that_rises_is_explained_and_only_then() -> None:
    rows = [make_row("suffix", 3, 4), make_row("mtp", 3, 4)]
    with drawing():
        assert "A line may rise" not in draw_positions(series_of(rows)).note
        rows[0]["metrics"]["acceptance_at"] = [0.3, 0.5, 0.4]
        rows[0]["samples"]["prompts"] = [{"id": "a", "offered_at": [9, 5, 2]}, {"id": "b", "offered_at": [1, 1]}]
        drawn = draw_positions(series_of(rows))
    assert "A line may rise: position i counts only drafts of at least i tokens" in drawn.note
    assert [line[-1] for line in drawn.data[:3]] == [10, 6, 2]
    assert [line[-1] for line in drawn.data[3:]] == [None] * 3


def test_the_best_of_a_kind_was_run_at_the_most_batch_sizes() -> None:
    rows = [make_row("mtp", depth, batch) for depth in (1, 3) for batch in (1, 4)] + [make_row("mtp", 5, 1)]
    for row in rows:
        row["metrics"]["output_tokens_per_s"] = 100.0 * row["axes"]["depth"]
    assert [one.depth for one in best_series(series_of(rows), lambda one: one.kind)] == [3]
    rows[2] = make_row("mtp", 3, 1, status="failed", reason="boom")
    assert [one.depth for one in best_series(series_of(rows), lambda one: one.kind)] == [1]


# ---- maps


def speedups(rows: list[dict[str, Any]], values: dict[tuple[int, int], tuple[float, float, float]]) -> None:
    for row in rows:
        value = values[row["axes"]["depth"], row["axes"]["batch_size"]]
        row["metrics"] |= dict(zip(("speedup", "speedup_low", "speedup_high"), value, strict=True))


def test_the_edge_of_one_runs_between_cells_and_unclear_ones_are_hatched() -> None:
    from matplotlib.collections import LineCollection, PatchCollection

    rows = [make_row("suffix", depth, batch) for depth in (1, 3) for batch in (1, 4, 16)]
    gain, loss, unsure = (1.5, 1.4, 1.6), (0.7, 0.6, 0.8), (1.02, 0.98, 1.06)
    speedups(rows, {(1, 1): gain, (1, 4): gain, (1, 16): unsure, (3, 1): gain, (3, 4): loss, (3, 16): loss})
    rows[-1] = make_row("suffix", 3, 16, status="failed", reason="boom")
    with drawing():
        drawn = draw_depth_map(series_of(rows))
    ground = drawn.figure.axes[0]
    (edges,) = [one for one in ground.collections if isinstance(one, LineCollection)]
    # depth 3 is above depth 1: an upright edge between its batches 1 and 4, a level one under its batch 4
    turns = [abs(a[0] - b[0]) < 1e-9 for a, b in edges.get_segments()]
    assert sorted(turns) == [False, True]
    (hatched,) = [one for one in ground.collections if isinstance(one, PatchCollection)]
    assert len(hatched.get_paths()) == 1
    assert [line[6:] for line in drawn.data][-1] == ("failed", None, None, None, True)
    assert drawn.marks is not None
    assert [tip.split(": ")[-1] for tip in drawn.marks.tips["series-0"]][:3] == [
        "1.50× (1.40 to 1.60)", "0.70× (0.60 to 0.80)", "boom",
    ]  # fmt: skip


def test_a_drafter_of_one_depth_has_no_map_of_depths() -> None:
    with drawing():
        one = draw_depth_map(series_of([make_row("suffix", 3, batch) for batch in (1, 4)]))
    assert one.figure is None
    assert one.why == "no drafter was measured at two depths and two batch sizes"


def test_the_map_of_context_lengths_is_there_where_there_are_several() -> None:
    assert draw_context_map(with_contexts((512,))) is None
    assert draw_context_map(make_rows()) is None
    with drawing():
        by_depth, by_batch = draw_context_map(with_contexts()), draw_context_map(with_contexts(depths=(3,)))
    assert by_depth is not None
    assert by_batch is not None
    assert {(line[0], line[1]) for line in by_depth.data} == {
        (name, f"{name} · batch {batch}") for name in ("ngram(3)", "mtp") for batch in (1, 16)
    }
    assert {line[2:6:2] for line in by_depth.data} == {("context_len", "depth")}
    assert {line[2:6:2] for line in by_batch.data} == {("context_len", "batch_size")}
    assert len(by_batch.data) == 2 * 3 * 3


def test_the_best_depth_stands_beside_ar_and_says_when_it_cannot_tell() -> None:
    rows = [make_row("suffix", depth, batch) for depth in (1, 3) for batch in (1, 4)]
    for row in rows:
        depth, batch = row["axes"]["depth"], row["axes"]["batch_size"]
        mean = {1: 1.1, 3: 1.4}[depth] if batch == 1 else {1: 0.97, 3: 0.7}[depth]
        half = 0.05
        row["metrics"] |= {"speedup": mean, "speedup_low": mean - half, "speedup_high": mean + half,
                           "output_tokens_per_s": 100 * mean, "ar_output_tokens_per_s": 100.0}  # fmt: skip
    with drawing():
        drawn = draw_best_depth(series_of(rows))
    assert [text.get_text() for text in drawn.figure.axes[0].texts if "\n" in text.get_text()] == [
        "depth 3\n1.40", "AR\n0.97",
    ]  # fmt: skip
    assert [line[2] for line in drawn.data] == [3, "AR"]


# ---- throughput and latency, energy


def spot(per_user: float, total: float) -> Spot:
    return Spot("", "x", "x", 1, 1, per_user, total)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    spots = [spot(*point) for point in points]
    found = {(one.per_user, one.total) for one in frontier(spots)}
    beaten = {
        (a.per_user, a.total)
        for a in spots
        for b in spots
        if b.per_user >= a.per_user and b.total >= a.total and (b.per_user > a.per_user or b.total > a.total)
    }
    assert found == {(one.per_user, one.total) for one in spots} - beaten


def test_forced_acceptance_has_no_place_on_the_frontier() -> None:
    rows = [make_row(name, 3, batch) for name in ("suffix", "oracle(0.8)") for batch in (1, 4)]
    with drawing():
        drawn = draw_pareto(series_of(rows))
        alone = draw_pareto(series_of(rows[2:]))
    assert {line[0] for line in drawn.data} == {"suffix · depth 3", "AR"}
    assert alone.figure is not None
    assert any("oracle" in str(line[0]) for line in alone.data)


def test_energy_is_drawn_where_there_is_any_and_only_of_valid_cells() -> None:
    rows = [make_row("suffix", 3, batch) for batch in (1, 4)] + [make_row("mtp", 3, 1)]
    rows[0]["metrics"]["joules_per_token"] = 2.5
    with drawing():
        drawn = draw_energy(series_of(rows))
    assert [line[3:5] for line in drawn.data] == [(1, 2.5)]
    assert drawn.marks is not None
    assert drawn.marks.tips == {"series-0": ("suffix · depth 3, batch 1: 2.5 J/token",)}


# ---- the roofline


def test_ceilings_and_staircases_are_read_from_what_was_measured() -> None:
    manifest = make_manifest()
    measured = manifest["roofs"]["measured"]
    measured["skinny"] = [
        {"m": m, "n": n, "k": 576, "dtype": "bf16", "flops_per_s": 1e9 * m, "bytes_per_s": 2e9} for n in (576, 1536)
        for m in (4, 1, 2)
    ] + [{"m": 8, "n": 576, "k": 576, "dtype": "fp32", "flops_per_s": 1.0, "bytes_per_s": 1.0}, "broken"]  # fmt: skip
    assert [(one.name, one.bytes_per_s, one.flops_per_s) for one in ceilings_of(manifest, "bf16")] == [
        ("copy bandwidth", 38e9, 600e9), ("fp32 peak", 45e9, 310e9),
    ]  # fmt: skip
    stairs = staircases_of(manifest, "bf16")
    assert [[step.tokens for step in one] for one in stairs] == [[1, 2, 4], [1, 2, 4]]
    assert [step.intensity for step in stairs[0]] == [0.5, 1.0, 2.0]
    assert ceilings_of({}, "bf16") == staircases_of({}, "bf16") == []


def test_ar_is_joined_to_verification_at_each_batch() -> None:
    rows = [make_row("suffix", 3, batch) for batch in (1, 4, 16)]
    with drawing():
        drawn = draw_roofline(series_of(rows), make_manifest())
        bare = draw_roofline(series_of(rows), {})
    main = drawn.figure.axes[0]
    joins = [line for line in main.lines if line.get_alpha() == 0.55]
    assert len(joins) == 3
    for line, row in zip(joins, rows, strict=True):
        metrics = row["metrics"]
        assert list(line.get_xdata()) == [metrics["ar_intensity"], metrics["intensity"]]
        assert list(line.get_ydata()) == [metrics["ar_achieved_flops_per_s"], metrics["achieved_flops_per_s"]]
    assert len(drawn.figure.axes) == 2
    assert len(bare.figure.axes) == 1
    assert "Not drawn: no measured roof for bf16" in bare.note


# ---- predicted


def test_predicted_rows_stand_beside_the_measured(tmp_path: Path) -> None:
    rows = make_rows(("mtp",), (1, 3), (1, 16), faults=False)
    model = told(rows)
    both = make_figures(rows, make_manifest(), tmp_path / "both", predicted=model, png=False)
    mixed = make_figures([*rows, *model], make_manifest(), tmp_path / "mixed", png=False)
    assert [plot.name for plot in both.plots] == [*NAMES[:-1], CELLS, SERIES, "pareto"]
    for plot, other in zip(both.plots, mixed.plots, strict=True):
        assert plot.svg_path.read_bytes() == other.svg_path.read_bytes()
    assert not any(plot.title.endswith(" (predicted)") for plot in both.plots)
    caption = next(plot.caption for plot in both.plots if plot.name == CELLS)
    errors = [abs(a["metrics"]["speedup"] / b["metrics"]["speedup"] - 1) for a, b in zip(rows, model, strict=True)]
    assert f"the median error is {100 * median(errors):.1f} % of the speedup" in caption
    assert caption.endswith("over 4 cells.")


def test_a_prediction_keeps_its_comparison_with_the_run_that_it_was_fitted_on(tmp_path: Path) -> None:
    rows = make_rows(("mtp",), (1,), (1, 4), faults=False)
    held = comparison_of_rows(rows, told(rows))
    manifest = make_manifest(predicted={"comparison": json.loads(json.dumps(held.to_dict()))})
    assert comparison_in(manifest) == held
    assert comparison_in(make_manifest()) is None
    figures = make_figures(told(rows), manifest, tmp_path, png=False)
    named = {plot.name: plot.title for plot in figures.plots}
    assert {CELLS, SERIES} <= set(named)
    assert {name for name, title in named.items() if not title.endswith("(predicted)")} == {CELLS, SERIES}


def test_each_series_tells_both_crossings_and_what_made_the_gap() -> None:
    rows = [make_row("early_exit(8)", depth, batch) for depth in (1, 3) for batch in (1, 2, 4, 8, 16)]
    held = comparison_of_rows(rows, told(rows, spread_by=0.2))
    with drawing():
        drawn = draw_series(held)
    words = [text.get_text() for text in drawn.figure.axes[0].texts]
    for one in held.series:
        (place,) = [i for i, text in enumerate(words) if text.startswith(f"depth {one.depth}: {one.name}")]
        assert f"{one.measured.describe()} → {one.predicted.describe()}" in " ".join(words[place : place + 2])
    assert any(re.search(r"\b1: 3→\d", text) for text in words)


def test_a_prediction_of_other_cells_is_left_out() -> None:
    held = comparison_of_rows([make_row("suffix", 3, 1)], told([make_row("mtp", 3, 1)]))
    assert (draw_cells(held).why, draw_series(held).why) == ("no cell is on both sides", "no series is on both sides")


def test_predicted_maps_are_not_hatched_for_want_of_intervals() -> None:
    from matplotlib.collections import PatchCollection

    rows = told([make_row("suffix", depth, batch) for depth in (1, 3) for batch in (1, 4)])
    with drawing():
        for drawn in (draw_depth_map(series_of(rows)), draw_best_depth(series_of(rows))):
            assert not [one for one in drawn.figure.axes[0].collections if isinstance(one, PatchCollection)]


# ---- scales


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(0.05, 2))
def test_labels_are_moved_apart_in_their_order(places: list[float], gap: float) -> None:
    places.sort()
    moved = spread(places, gap, 0.0, 10.0)
    least = min(gap, 10 / max(len(places) - 1, 1))
    assert all(after - before >= least - 1e-6 for before, after in pairwise(moved))
    assert all(-1e-6 <= place <= 10 + 1e-6 for place in moved)
    if all(after - before >= gap for before, after in pairwise(places)):
        assert moved == pytest.approx(places)


@given(st.floats(0.01, 1e9))
def test_ticks_of_amounts_say_their_value_and_are_few(top: float) -> None:
    axis = amount_axis(0.0, top, "s")
    assert 2 <= len(axis.ticks) <= 7
    for value, text in axis.ticks:
        assert 0 <= value <= top * (1 + 1e-9)
        assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=9))
def test_an_axis_of_speedups_holds_one_and_every_value(values: list[float]) -> None:
    axis = speedup_axis(values, "x")
    assert all(0 < axis.share(value) < 1 for value in [1.0, *values])
    assert 1.0 in [value for value, _ in axis.ticks]
    shares = [axis.share(value) for value, _ in axis.ticks]
    assert all(after - before > 0.05 for before, after in pairwise(shares))
    assert math.isnan(axis.share(0.0))


def test_batch_sizes_are_the_ticks_unless_they_would_touch() -> None:
    assert [tick for tick, _ in batch_axis([1, 3, 8]).ticks] == [1, 3, 8]
    assert [tick for tick, _ in batch_axis([8, 9, 10, 16]).ticks] == [8, 16]


# ---- rows from elsewhere


@pytest.mark.parametrize("seed", range(4))
def test_extreme_values_are_drawn_or_left_out_and_never_crash(seed: int, tmp_path: Path) -> None:
    noise = random.Random(seed)
    odd: list[Any] = [None, 0, 0.0, -1.0, 1e-310, 1e308, -1e308, 1e-12, 10**30, math.nan, math.inf, "x", [], {}, True]
    rows = make_rows(("ngram(3)", "mtp", "oracle(0.8)"), (1, 3), (1, 4), blocks=2)
    for row in rows:
        for name in list(row["metrics"] or {}):
            if noise.random() < 0.25:
                row["metrics"][name] = noise.choice(odd)
    figures = make_figures([*rows, *told_oddly(rows)], make_manifest(), tmp_path, png=False)
    for plot in figures.plots:
        drawn = re.sub(r'(data-tip|data-name)="[^"]*"', "", plot.svg_path.read_text(encoding="utf-8"))
        assert not re.search(r"(?i)[\s\",](nan|inf)[\s\",]", drawn), plot.name


def told_oddly(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = copy.deepcopy([row for row in rows if row["metrics"]])
    for row in found:
        row["conditions"]["predicted"] = True
    return found


def test_text_from_outside_is_text_in_hover_texts(tmp_path: Path) -> None:
    name = "</script><b>\"'&\x00\u202e"
    rows = [make_row(name, depth, batch, drafter=(name, 0.5, 0.1, False)) for depth in (1, 3) for batch in (1, 4)]
    figures = make_figures(rows, make_manifest(), tmp_path, png=False)
    for plot in figures.plots:
        source = plot.svg_path.read_text(encoding="utf-8")
        assert "<b>" not in source
        assert "\u202e" not in source
    assert any("</script><b>\"'&" in tip for tip in tips(figures.plots[0].svg_path))
