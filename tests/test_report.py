"""The report room: the verdict in words and tables, plots that don't change, a page that's safe, small and offline."""

from __future__ import annotations

import csv
import io
import math
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_rows import CATEGORIES, DRAFTERS, make_manifest, make_row, make_rows
from rich.console import Console

from specbench.report import rows as read
from specbench.report.html import Run, block_quantiles, inline_svg, write_report
from specbench.report.plots import Plot, make_plots
from specbench.report.roofs import missing_roofs, roofs_of
from specbench.report.series import best_depth_table, crossing_text, series_of
from specbench.report.summary import summary_markdown
from specbench.report.tables import verdict, verdict_sentences, verdict_table
from specbench.result_row import ResultRow

HOSTILE = "</script><b>[red]$\\frac{x$&\"'|\x00\u202e"
GOLDEN = """\
On this CPU, up to which batch does each drafter pay off for SmolLM2-135M?
                                 batch     batch     batch stops                             accept.
drafter                depth         1         2         8 paying off                         tokens
────────────────────────────────────────────────────────────────────────────────────────────────────
suffix                     3 1.42 ±.05 1.02 ±.03    failed never in this grid (≤2), unclear     0.34
                                                           above batch 1                        2.02

oracle(0.8) †synthetic     3 2.58 ±.02 2.32 ±.03 1.60 ±.03 never in this grid (≤8)              0.65
                                                                                                2.95
Speedup: tokens/s over the AR arm of the same cell; ± is half its interval.
accept., tokens: drafts accepted, as a share, and tokens a step, each over the batches of its line.
†synthetic: acceptance was forced; it shows what the system costs, not what a drafter earns.
1 failed of 6 cells: they have no speedup."""
NAMES = ["speedup", "best_depth", "depth_map", "roofline", "acceptance_by_position", "acceptance_by_category",
         "step_time", "pareto"]  # fmt: skip


def with_speedups(values: dict[int, tuple[float, float, float] | None], depth: int = 3) -> list[dict[str, Any]]:
    """One series with these speedups by batch; None is a failed cell."""
    rows = []
    for batch, value in values.items():
        row = make_row("suffix", depth, batch, status="ok" if value else "failed", reason=None if value else "boom")
        if value:
            row["metrics"] |= dict(zip(("speedup", "speedup_low", "speedup_high"), value, strict=True))
        rows.append(row)
    return rows


def around(value: float, half: float = 0.02) -> tuple[float, float, float]:
    return value, value - half, value + half


def printed(rows: list[dict[str, Any]], width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=False)
    console.print(verdict_table(rows, make_manifest(), width))
    return console.export_text()


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return make_rows(("ngram(3)", "early_exit(8)", "oracle(0.8)"), (1, 3), (1, 4, 16))


@pytest.fixture(scope="module")
def plots(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Plot]:
    return make_plots(rows, make_manifest(), tmp_path_factory.mktemp("plots"))


@pytest.fixture(scope="module")
def page(rows: list[dict[str, Any]], plots: list[Plot], tmp_path_factory: pytest.TempPathFactory) -> Page:
    run = Run(rows, make_manifest(), plots)
    return Page(write_report([run, run], tmp_path_factory.mktemp("page") / "report.html"))


def test_the_generated_rows_are_rows_that_the_store_accepts() -> None:
    assert len([ResultRow.model_validate(row) for row in make_rows()]) == 45


# ---- series


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({1: around(1.5), 2: around(1.2), 4: around(0.9)}, "between batch 2 and 4"),
        ({1: around(1.5), 16: around(1.2)}, "never in this grid (≤16)"),
        ({1: around(0.9), 4: around(0.7)}, "already at batch 1"),
        ({1: around(1.5), 8: around(1.2), 16: None}, "never in this grid (≤8)"),
        ({1: around(1.5), 8: around(1.01)}, "never in this grid (≤8), unclear above batch 7"),
        ({1: around(1.01), 8: around(1.005)}, "unclear: interval holds 1.0 at batch 1 and 8"),
        ({1: None, 8: None}, "no data: failed at every batch"),
    ],
)
def test_crossing_in_words(values: dict[int, tuple[float, float, float] | None], text: str) -> None:
    (one,) = series_of(with_speedups(values))
    assert crossing_text(one) == text


def test_a_speedup_without_an_interval_is_shown_but_decides_nothing() -> None:
    rows = with_speedups({1: around(1.5), 4: around(0.8)})
    rows[1]["metrics"] |= {"speedup_low": None, "speedup_high": math.nan}
    (one,) = series_of(rows)
    assert crossing_text(one).startswith("never in this grid (≤1)")
    assert verdict(rows).lines[0].speedups[1].text == "0.80 ±?"


def test_axes_that_vary_name_the_series_and_the_others_do_not() -> None:
    rows = [make_row("suffix", 3, b, axes={"temperature": t, "output_len": 64}) for b in (1, 2) for t in (0.0, 0.8)]
    assert [one.label for one in series_of(rows)] == ["suffix · depth 3 · T 0", "suffix · depth 3 · T 0.8"]
    assert [one.label for one in series_of(rows[:1])] == ["suffix · depth 3"]


def test_the_last_row_of_a_case_counts_and_equal_labels_are_not_merged() -> None:
    failed, retried = make_row("suffix", 3, 1, status="failed", reason="oom"), make_row("suffix", 3, 1)
    assert [point.status for one in series_of([failed, retried]) for point in one.points] == ["ok"]
    twin = make_row("suffix", 3, 1) | {"case_hash": "another"}
    assert [one.context for one in series_of([retried, twin])] == ["variant 1", "variant 2"]


def test_synthetic_after_measured_and_controls_last() -> None:
    rows = [make_row("oracle(0.8)", 1, 1), make_row("suffix", 1, 1)]
    rows.append(make_row("none", 0, 1, drafter=("none", 0.0, 0.0, False)))
    content = verdict(rows)
    assert [line.drafter for line in content.lines] == ["suffix", "oracle(0.8) †synthetic", "none"]
    assert content.lines[-1].stops == "control: never drafts"
    assert not any("none" in sentence for sentence in verdict_sentences(rows, make_manifest()))


def test_best_depth_by_tokens_per_second_never_by_acceptance() -> None:
    rows = [make_row("suffix", depth, 1) for depth in (2, 4, 8)]
    for row, rate, tokens_per_s in zip(rows, (1.0, 0.5, 0.25), (100.0, 140.0, 120.0), strict=True):
        row["metrics"] |= {"acceptance_rate": rate, "output_tokens_per_s": tokens_per_s, "ar_output_tokens_per_s": 90.0}
        row["metrics"] |= {"output_tokens_per_s_low": tokens_per_s - 5, "output_tokens_per_s_high": tokens_per_s + 5}
        row["metrics"] |= {"speedup": tokens_per_s / 90}
    (best,) = best_depth_table(rows)
    assert (best.depth, best.tokens_per_s, best.ties) == (4, 140.0, ())
    rows[2]["metrics"]["output_tokens_per_s_high"] = 136.0
    assert best_depth_table(rows)[0].ties == (8,)


def test_ar_is_the_best_depth_where_nothing_beats_it_and_invalid_cells_never_win() -> None:
    rows = with_speedups({4: around(0.9)})
    (best,) = best_depth_table(rows)
    assert (best.depth, best.speculative_depth, best.clear) == (0, 3, True)
    broken = make_row("suffix", 5, 4, status="invalid", reason="diverged")
    broken["metrics"]["output_tokens_per_s"] = 1e9
    (best,) = best_depth_table([*rows, broken])
    assert (best.depth, best.note) == (0, "depth 5 invalid")
    assert best_depth_table([broken])[0].depth is None


# ---- tables


def test_the_verdict_table_fits_100_columns_and_cuts_nothing() -> None:
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for drafters, sizes in ((("ngram(3)", "early_exit(8)", "oracle(0.8)"), batches[:5]), (tuple(DRAFTERS), batches)):
        text = printed(make_rows(drafters, batches=sizes))
        assert max(map(len, text.splitlines())) <= 100
        assert "…" not in text
        assert all(word in text for word in ("invalid", "failed", "skipped", "†synthetic", "≈", "between"))
        assert all(name.split("(")[0].split()[0] in text for name in drafters)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_figure_of_the_verdict_table_is_cut(width: int) -> None:
    rows = make_rows(("ngram(3)", "early_exit(8)", "oracle(0.8)"), batches=(1, 2, 4, 8, 16))
    for place, row in enumerate(rows):
        if row["status"] == "ok":
            row["metrics"] |= {"acceptance_rate": 0.2 + place / 97, "tokens_per_step": 10.0 + place / 7}
    words = set(printed(rows, width).split())
    for line in verdict(rows).lines:
        figures = (*(cell.text for cell in line.speedups), line.acceptance, line.tokens_per_step, str(line.depth))
        assert {word for text in figures for word in text.split()} <= words


def test_the_verdict_line_says_what_the_cell_says() -> None:
    rows = with_speedups({1: (1.416, 1.366, 1.466), 2: (1.02, 0.99, 1.05), 4: (0.8, 0.7, 0.9), 8: None})
    (line,) = verdict(rows).lines
    cells = [(cell.text, cell.meaning) for cell in line.speedups]
    assert cells == [("1.42 ±.05", "gain"), ("1.02 ±.03", "unclear"), ("0.80 ±.10", "loss"), ("failed", "void")]
    assert (line.acceptance, line.stops) == ("0.34", "between batch 2 and 4")


def test_the_acceptance_of_trees_is_named_apart() -> None:
    row = make_row("eagle2(16)", 3, 1)
    row["metrics"] |= {"acceptance_rate": None, "depth_acceptance_rate": 0.41, "draft_efficiency": 0.1}
    assert verdict([row]).lines[0].acceptance == "0.41 of depth"


def test_the_verdict_table_as_printed() -> None:
    rows = with_speedups({1: (1.416, 1.366, 1.466), 2: (1.02, 0.99, 1.05), 8: None})
    rows += [make_row("oracle(0.8)", 3, batch) for batch in (1, 2, 8)]
    printed_lines = [line.rstrip() for line in printed(rows).splitlines()]
    assert "\n".join(printed_lines) == GOLDEN


def test_markup_from_outside_is_text_in_the_terminal_and_in_markdown() -> None:
    rows = [make_row(HOSTILE, 1, 1, drafter=("x", 0.5, 0.1, False))]
    assert "[red]" in printed(rows).replace("\n", "")
    assert read.drafter(rows[0]) == "</script><b>[red]$\\frac{x$&\"'|"
    text = summary_markdown(rows, make_manifest(name=HOSTILE, question=HOSTILE))
    assert "<b>" not in text
    assert "</script>" not in text
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {len(re.findall(r"\|", table[0]))}


def test_summary_markdown_states_answer_units_intervals_faults_and_conditions() -> None:
    text = summary_markdown(make_rows(), make_manifest())
    for part in (
        "On Example CPU, 2 cores speculation pays off clearly up to batch 8",
        "| ngram(3) | 3 | **1.47 ±.03** |",
        "out of memory: 3.1 GB asked, 2.2 GB free",
        "†synthetic",
        "knee at 13.3 FLOP/B",
        "43 identical",
        "no datasheet roof is known",
    ):
        assert part in text


def test_sentences_never_claim_without_evidence() -> None:
    manifest = make_manifest()
    assert verdict_sentences([], manifest) == ["This run has no cells, so there's no verdict."]
    (only,) = verdict_sentences([make_row("suffix", 3, 1, status="failed", reason="boom")], manifest)
    assert only == "No cell has a valid speedup (1 failed), so there's no verdict. First reason: boom."
    assert (
        "no drafter pays off clearly"
        in verdict_sentences(with_speedups({1: around(1.01), 4: around(0.9)}), manifest)[0]
    )
    assert "only synthetic acceptance" in verdict_sentences([make_row("oracle(0.8)", 3, 1)], manifest)[0]
    first = verdict_sentences(with_speedups({1: around(1.5), 4: around(1.3)}), manifest)[0]
    assert "up to batch 4 (suffix · depth 3), the largest measured." in first


# ---- roofs


def test_roofs_are_read_with_their_source_and_unknown_ones_are_named() -> None:
    manifest = make_manifest()
    measured, h100 = roofs_of(manifest, "bf16")
    assert (measured.kind, round(measured.knee, 1)) == ("measured", 13.3)
    assert (h100.name, round(h100.knee)) == ("NVIDIA H100 80GB HBM3, datasheet", 295)
    assert h100.source == "H100 datasheet, dense [V]; H100 datasheet [V]"
    assert missing_roofs(manifest, "bf16") == ["no datasheet roof is known for this device"]
    assert len(missing_roofs(manifest, "int3")) == 3
    assert roofs_of({}, "bf16") == []
    manifest["roofs"]["measured"] |= {"marks": ["foreign load"], "notes": ["buffers of 8 MiB"]}
    assert roofs_of(manifest, "bf16")[0].source == "measured on this device; foreign load; buffers of 8 MiB"


# ---- plots


def test_every_plot_has_a_picture_twice_its_data_and_words(plots: list[Plot]) -> None:
    assert [plot.name for plot in plots] == NAMES
    for plot in plots:
        assert plot.png_path is not None
        assert plot.png_path.read_bytes().startswith(b"\x89PNG")
        assert plot.caption.endswith(".")
        assert plot.alt.endswith(".")
        with plot.csv_path.open(encoding="utf-8", newline="") as stream:
            header, *data = list(csv.reader(stream))
        assert data
        assert all(len(line) == len(header) for line in data)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows = make_rows(("suffix",), (1,), (1, 4), faults=False)
    first, second = (make_plots(rows, make_manifest(), tmp_path / name) for name in ("a", "b"))
    for one, two in zip(first, second, strict=True):
        for kind in ("svg_path", "png_path", "csv_path"):
            assert getattr(one, kind).read_bytes() == getattr(two, kind).read_bytes(), (one.name, kind)


def test_svg_text_is_text_and_synthetic_series_are_dashed(plots: list[Plot]) -> None:
    source = plots[0].svg_path.read_text(encoding="utf-8")
    assert "oracle(0.8) · depth 1 †</text>" in source
    assert "stroke-dasharray" in source
    assert "<dc:date>" not in source


def test_the_speedup_data_names_every_cell_and_its_status(rows: list[dict[str, Any]], plots: list[Plot]) -> None:
    with plots[0].csv_path.open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(rows)
    assert Counter(line["status"] for line in lines) == {"ok": 15, "invalid": 1, "failed": 1, "skipped": 1}
    assert all((line["speedup"] == "") == (line["status"] != "ok") for line in lines)


# ---- page


def test_the_page_answers_first(page: Page) -> None:
    words = page.words
    order = [
        "pays off clearly up to",
        "stops paying off",
        "Why: depth, roofline",
        "All cells",
        "Conditions and provenance",
    ]
    places = [words.index(part) for part in order]
    assert places == sorted(places)
    for part in (
        "out of memory: 3.1 GB asked",
        "near tie (top-2 margin 0.004)",
        "Example CPU",
        "1a5af79",
        "max_ngram: 3",
    ):
        assert part in words
    assert "this device has no energy counter" in words
    assert "num_accepted_tokens" in words
    assert all(category in words for category in CATEGORIES)


def test_the_page_asks_nothing_of_the_network(page: Page) -> None:
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:80])
        for target in re.findall(r"url\(([^)]*)\)", value):
            assert target.startswith("#"), (tag, name, value[:80])
    assert not re.search(r"@import|https?:|//[a-z]+\.", page.source)
    assert page.tags["link"] == page.tags["iframe"] == 0


def test_ids_are_unique_and_every_reference_resolves(page: Page) -> None:
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert [name for name, count in ids.items() if count > 1] == []
    wanted = {value[1:] for _, name, value in page.attributes if name == "href" and value.startswith("#")}
    wanted |= {name for _, _, value in page.attributes for name in re.findall(r"url\(#([^)]*)\)", value)}
    wanted |= {name for _, key, value in page.attributes if key == "aria-labelledby" for name in value.split()}
    assert wanted
    assert wanted <= set(ids)
    assert page.tags["svg"] == 2 * (len(NAMES) + 2)  # the first screen's plot stands there for a screen and for a phone


def test_text_from_outside_is_escaped_everywhere(tmp_path: Path) -> None:
    rows = [make_row(HOSTILE, 1, b, axes={"target": HOSTILE}, drafter=("x", 0.5, 0.1, False)) for b in (1, 2)]
    rows.append(make_row(HOSTILE, 1, 4, status="failed", reason=HOSTILE, drafter=("x", 0.5, 0.1, False)))
    rows[2]["axes"]["target"] = HOSTILE
    rows[0]["warnings"] = [HOSTILE]
    rows[0]["metrics"]["by_category"] = {HOSTILE: rows[0]["metrics"]["by_category"]["qa"], "_hidden 漢": {}}
    rows[0]["metrics"]["null_reasons"] = {HOSTILE: HOSTILE}
    rows[0]["conditions"] |= {"weights": HOSTILE, "prompt_categories": [HOSTILE], "output_check": HOSTILE}
    manifest = make_manifest(name=HOSTILE, question=HOSTILE, device=HOSTILE, scenario={HOSTILE: HOSTILE})
    manifest |= {"environment": {HOSTILE: [HOSTILE]}, "scenario_file": HOSTILE, "code_revision": HOSTILE}
    plots = make_plots(rows, manifest, tmp_path / "plots")
    found = Page(write_report([Run(rows, manifest, plots)], tmp_path / "report.html"))
    assert found.tags["b"] == 0
    assert found.tags["script"] == found.source.count("</script>") == 3  # theme, page, raw cells
    assert "</script><b>[red]$\\frac{x$&\"'|" in found.words
    assert "\x00" not in found.source
    assert "\u202e" not in found.source


def test_nan_and_infinity_never_appear(tmp_path: Path) -> None:
    rows = make_rows(("suffix",), (1,), (1, 4), faults=False)
    for place, row in enumerate(rows):
        bad = (math.nan, math.inf)[place]
        keep = ("by_category", "null_reasons")
        row["metrics"] = {key: value if key in keep else bad for key, value in row["metrics"].items()}
        row["metrics"] |= {"acceptance_at": [bad], "acceptance_conditional_at": [bad]}
        row["metrics"]["by_category"]["qa"] = dict.fromkeys(row["metrics"]["by_category"]["qa"], bad)
        row["samples"]["blocks"][0]["wall_s"] = bad
    manifest = make_manifest()
    manifest["roofs"]["measured"]["bandwidth_bytes_per_s"] = math.nan
    manifest["scenario"]["measure"]["seed"] = manifest["environment"]["load"] = math.inf
    plots = make_plots(rows, manifest, tmp_path / "plots")
    found = Page(write_report([Run(rows, manifest, plots)], tmp_path / "report.html"))
    texts = [found.words, summary_markdown(rows, manifest), printed(rows)]
    texts += [plot.csv_path.read_text(encoding="utf-8") for plot in plots]
    for text in texts:
        assert not re.search(r"(?i)(?<![a-z])[-+.]?(nan|inf|infinity)(?![a-z])", text)


def test_two_thousand_cells_of_two_hundred_samples_stay_small(plots: list[Plot], tmp_path: Path) -> None:
    rows = [
        make_row(f"drafter {i}", depth, batch, blocks=100, axes={"temperature": t}, drafter=("x", 0.5, 0.02 * i, False))
        for t in (0.0, 0.5, 0.7, 1.0, 1.2)
        for i in range(10)
        for depth in (1, 2, 3, 5, 7)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    assert (len(rows), len(rows[0]["samples"]["blocks"])) == (2000, 200)
    path = write_report([Run(rows, make_manifest(), plots)], tmp_path / "report.html")
    # Panels and data rows are capped: the plots of a run of this size add at most 1.5 MB more.
    assert path.stat().st_size < 3.5e6


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "This run has no cells"),
        (
            [make_row("suffix", 3, b, status="failed", reason="driver lost") for b in (1, 2)],
            "First reason: driver lost.",
        ),
    ],
)
def test_an_empty_or_failed_run_says_so(rows: list[dict[str, Any]], says: str, tmp_path: Path) -> None:
    plots = make_plots(rows, {}, tmp_path / "plots")
    assert plots == []
    found = Page(write_report([Run(rows, {}, plots)], tmp_path / "report.html"))
    assert says in found.words
    assert "pays off" not in found.words.split("Why:")[0].replace("stops paying off", "")


def test_block_quantiles_leave_out_invalid_blocks_and_need_two() -> None:
    row = make_row("suffix", 3, 1)
    blocks = [{"arm": "spec", "tokens": 100, "wall_s": s, "valid": s < 9} for s in (1.0, 2.0, 4.0, 100.0)]
    row["samples"]["blocks"] = blocks
    assert block_quantiles(row, "spec") == "30 / 50 / 90"
    assert block_quantiles(row, "ar") == "–"
    row["samples"]["blocks"] = blocks[:1]
    assert block_quantiles(row, "spec") == "–"


def test_inline_svg_renames_ids_and_drops_what_could_reach_out() -> None:
    source = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        ' viewBox="0 0 4 2" width="4pt">'
        '<metadata>http://purl.org</metadata><script>x</script><defs><clipPath id="p"/></defs>'
        '<g clip-path="url(#p)"><use xlink:href="#p"/><text>id="p"</text></g></svg>'
    )
    text = inline_svg(source, "r1", "T<", "D")
    assert 'id="r1-p"' in text
    assert 'clip-path="url(#r1-p)"' in text
    assert 'href="#r1-p"' in text
    assert '<text>id="p"</text>' in text
    assert "T&lt;</title>" in text
    assert not re.search("http|metadata|script|xlink|width=", text)


# ---- numbers


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.000840, "s", "840 µs"), (9.2e-3, "s", "9.20 ms"), (3.35e12, "B/s", "3.35 TB/s"),
        (999.9e9, "B/s", "1.00 TB/s"),
        (0, "B", "0 B"), (None, "s", "–"), (math.nan, "s", "–"), (1234.5, "", "1,234"), (0.1234, "", "0.123"),
    ],
)  # fmt: skip
def test_numbers_carry_units(value: float | None, unit: str, text: str) -> None:
    assert read.significant(value, unit) == text


def test_the_room_needs_no_torch_and_tables_need_no_matplotlib() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import specbench.report.tables, specbench.report.plots, specbench.report.html\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
