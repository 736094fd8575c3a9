"""The drafter table and two drafters held against each other: what the lines say, what is compared, and what is not."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from report_rows import CATEGORIES, make_manifest, make_row, with_prompts

from specbench.definitions import DEFINITIONS
from specbench.report import compare
from specbench.report.compare import (
    ALL,
    Comparison,
    by_category,
    by_position,
    claim_text,
    comparison_of,
    comparison_text,
    pairs_of,
    rate_interval,
)
from specbench.report.figures_compare import draw_category_ratios, draw_conditional
from specbench.report.html import Run, write_report
from specbench.report.plots import make_plots
from specbench.report.series import series_of
from specbench.report.style import drawing
from specbench.report.summary import summary_markdown
from specbench.report.tables_drafters import drafter_table, positions_text
from specbench.result_row import ResultRow
from specbench.scenario.cases import expand
from specbench.scenario.schema import load_scenario
from specbench.stats import Interval
from specbench.store import latest_rows, read_manifest

ROOT = Path(__file__).resolve().parent.parent
EAGLE = ("eagle", 0.6, 0.05, False)
TOKENS = ("draft_model", 0.5, 0.12, False)
ASKED = Comparison("eagle", "draft_model", 1.25)
GOLDEN = """\
ngram(3) · T 0 | 2 | 1 | – | – | .45 .20 | 1.65 | 0.02 | – | 0.11 | 1.49 ±0.03 | pays off | none up to 4
eagle · T 0 | 2 | 1 | 5.40 M | 21.6 MB | .60 .36 | 1.96 | 0.09 | 0.07 | 0.20 | 1.64 ±0.04 | pays off | none up to 4
eagle · T 1 | 2 | 4 | 5.40 M | 21.6 MB | .60 .36 | 1.96 | 0.09 | 0.07 | 0.41 | 1.39 ±0.02 | pays off | none up to 4
"""


def cell(
    drafter: tuple[str, float, float, bool],
    depth: int = 2,
    batch: int = 1,
    rates: Sequence[float] | None = None,
    scale: float = 1.0,
    **axes: Any,
) -> dict[str, Any]:
    """A cell whose prompts accept position i + 1 with rates[i]."""
    name = "draft_model(builtin)" if drafter is TOKENS else drafter[0]
    row = make_row(name, depth, batch, axes=axes, drafter=drafter)
    return with_prompts(row, rates or [drafter[1]], scale=scale)


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    return [" | ".join(line) for line in drafter_table(rows).lines]


# ---- the drafter table


def test_the_drafter_table() -> None:
    rows = [make_row("ngram(3)", 2, batch, axes={"temperature": 0.0}) for batch in (1, 4)]
    rows += [make_row("eagle", 2, batch, axes={"temperature": 0.0}, drafter=EAGLE) for batch in (4, 1)]
    rows += [make_row("eagle", 2, 4, axes={"temperature": 1.0}, drafter=EAGLE)]
    assert "\n".join(lines_of(rows)) + "\n" == GOLDEN
    assert [one.crossing.describe() for one in series_of(rows)] == [
        line.split(" | ")[-1] for line in GOLDEN.splitlines()
    ]


def test_it_is_there_for_several_drafters_only() -> None:
    one = [make_row("eagle", depth, 1, drafter=EAGLE) for depth in (1, 2)]
    control = make_row("none", 0, 1, drafter=("none", 0.0, 0.0, False))
    for rows in ([], one, [*one, control]):
        table = drafter_table(rows)
        assert (table.lines, table.category_lines) == ((), ())
        assert "## Drafters" not in summary_markdown(rows, make_manifest())
    assert len(lines_of([*one, control, make_row("suffix", 1, 1)])) == 3


def test_a_cell_without_a_speedup_says_what_it_is_and_a_larger_batch_stands_in_for_it() -> None:
    rows = [
        make_row("suffix", 3, 1, status="failed", reason="boom"),
        make_row("suffix", 3, 2),
        make_row("suffix", 5, 1, status="invalid", reason="diverged"),
        make_row("mtp", 3, 1, status="skipped", reason="no head"),
    ]
    lines = [line.split(" | ") for line in lines_of(rows)]
    assert [(line[2], line[11]) for line in lines] == [("2", "pays off"), ("1", "invalid"), ("1", "skipped")]
    assert lines[1][5] == ".55 .30 .17 .09 .05"  # acceptance is a diagnostic, and a diverged cell keeps it
    assert lines[1][9] == lines[1][10] == "–"
    assert set(lines[2][3:11]) == {"–"}


def test_the_verdict_follows_the_interval() -> None:
    rows = [make_row("suffix", depth, 1) for depth in (1, 2, 3)] + [make_row("mtp", 1, 1)]
    for row, speedup in zip(rows, ((1.2, 1.1, 1.3), (1.2, 0.9, 1.4), (0.8, 0.7, 0.9)), strict=False):
        row["metrics"] |= dict(zip(("speedup", "speedup_low", "speedup_high"), speedup, strict=True))
    assert [line.split(" | ")[11] for line in lines_of(rows)[:3]] == ["pays off", "unclear", "slower"]


def test_rows_older_than_the_cost_of_drafting_are_read() -> None:
    rows = [make_row("suffix", 3, 1), make_row("mtp", 3, 1)]
    new = [line.split(" | ") for line in lines_of(rows)]
    for row in rows:
        for name in [key for key in row["metrics"] if key.startswith("draft")]:
            if name != "draft_s":
                del row["metrics"][name]
    old = [line.split(" | ") for line in lines_of(rows)]
    assert [line[7] for line in old] == [line[7] for line in new] == ["0.03", "0.14"]
    assert [line[3:5] for line in old] == [["–", "–"]] * 2


@pytest.mark.parametrize("name", ["quickstart", "rollback"])
def test_results_of_earlier_versions_still_make_a_page(name: str) -> None:
    directory = ROOT / "results" / name
    rows = [row.model_dump() for row in latest_rows(directory)]
    manifest = read_manifest(directory)
    table = drafter_table(rows)
    assert len(table.lines) >= 2
    assert table.category_lines
    assert comparison_text(rows, manifest) is None
    assert "## Drafters" in summary_markdown(rows, manifest)


def test_positions_are_short_and_cut_openly() -> None:
    assert positions_text([0.996, 0.5, None, 0.0]) == "1.0 .50 – .00"
    assert positions_text([0.5] * 9) == " ".join([".50"] * 8) + " …"
    assert positions_text([]) == "–"


def test_acceptance_by_category_of_trees_is_that_of_their_depth() -> None:
    rows = [make_row("eagle2(16)", 3, 1), make_row("suffix", 3, 1)]
    for values in rows[0]["metrics"]["by_category"].values():
        values |= {"acceptance_rate": None, "depth_acceptance_rate": 0.4321}
    table = drafter_table(rows)
    assert table.category_header[3:] == tuple(sorted(CATEGORIES))
    assert [set(line[3:]) for line in table.category_lines] == [{".43"}, {".39", ".36", ".31", ".26"}]


def test_every_column_that_is_a_metric_is_defined() -> None:
    table = drafter_table([])
    assert {heading for heading, *_ in table.columns} - set(table.header) == {"by category"}
    formulas = {definition.formula for definition in DEFINITIONS.values()}
    assert all(formula in formulas for _, _, formula, _ in table.columns)


# ---- two drafters held against each other


def manifest_of(claim: float | None = 1.25, kinds: Sequence[str] = ("eagle", "draft_model")) -> dict[str, Any]:
    manifest = make_manifest()
    manifest["scenario"]["compare"] = {"drafters": list(kinds), "claim": claim}
    return manifest


def test_what_is_compared_is_read_from_the_scenario() -> None:
    assert comparison_of(manifest_of()) == ASKED
    assert comparison_of(manifest_of(None)) == Comparison("eagle", "draft_model")
    for broken in ({}, make_manifest(), manifest_of(1.0, ["eagle"]), {"scenario": {"compare": "eagle"}}):
        assert comparison_of(broken) is None


def test_only_cells_alike_in_all_but_the_drafter_are_pairs() -> None:
    rows = [cell(TOKENS, 3, 2, temperature=1.0), cell(EAGLE, 5), make_row("suffix", 3, 2)]
    rows += [cell(kind, depth, batch) for kind in (EAGLE, TOKENS) for depth in (1, 3) for batch in (4, 2)]
    rows += [make_row("draft_model(builtin)", 1, 1, status="failed", reason="boom", drafter=TOKENS)]
    pairs = pairs_of(rows, ASKED)
    assert [(pair.depth, pair.batch_size, pair.names) for pair in pairs] == [
        (depth, 2, ("eagle", "draft_model(builtin)")) for depth in (1, 3)
    ]
    assert all(pair.first["axes"]["temperature"] == pair.second["axes"]["temperature"] for pair in pairs)


def test_two_trees_of_one_kind_are_two_pairs() -> None:
    tree = make_row("eagle(tree 25)", 2, 1, drafter=EAGLE)
    (plain, other) = pairs_of([cell(EAGLE), tree, cell(TOKENS)], ASKED)
    assert (plain.names[0], other.names[0]) == ("eagle", "eagle(tree 25)")


def exact_rows() -> list[dict[str, Any]]:
    """Three prompts of two categories, counted by hand; prompt c was drafted for in one cell alone."""
    counts = {
        "eagle": {"a": ([4, 4], [4, 3], [3, 2]), "b": ([4, 4], [4, 2], [2, 1]), "c": ([9, 9], [9, 9], [9, 9])},
        "draft_model": {"a": ([4, 4], [4, 2], [2, 1]), "b": ([8, 8], [8, 2], [2, 1])},
    }
    rows = []
    for kind in (EAGLE, TOKENS):
        row = cell(kind)
        row["samples"]["prompts"] = [
            {"id": name, "category": "qa" if name == "a" else "math", "ar_tokens": 1, "ar_s": 1.0, "spec_tokens": 1}
            | {"spec_s": 1.0, "offered_at": lists[0], "tried_at": lists[1], "accepted_at": lists[2]}
            for name, lists in counts[kind[0]].items()
        ]
        ResultRow.model_validate(row)
        rows.append(row)
    return rows


def test_rates_and_ratios_by_hand() -> None:
    (pair,) = pairs_of(exact_rows(), ASKED)
    whole, math, qa = by_category(pair)
    assert (whole.name, math.name, qa.name) == (ALL, "math", "qa")
    assert (whole.first.value, whole.second.value, whole.num_prompts) == (8 / 16, 6 / 24, 2)
    assert whole.ratio.value == pytest.approx(2.0)
    assert whole.ratio.low is None  # two prompts make no interval
    assert (math.first.value, math.second.value) == (3 / 8, 3 / 16)
    assert qa.ratio.value == pytest.approx(5 / 3)
    first, second = by_position(pair)
    assert (first.first.value, second.first.value) == (5 / 8, 3 / 5)
    assert (first.second.value, second.second.value) == (4 / 12, 2 / 4)
    assert second.ratio.value == pytest.approx(1.2)


def test_a_rate_of_nothing_is_null_and_a_rate_of_none_is_zero() -> None:
    assert rate_interval([0, 0], [0, 0]).value is None
    none = rate_interval([0, 0, 0, 0], [5, 5, 5, 5])
    assert (none.value, none.low) == (0.0, None)
    most = rate_interval([4, 5, 5, 3, 5], [5, 5, 5, 5, 5])
    assert most.value == pytest.approx(22 / 25)
    assert most.high == 1.0


def test_the_interval_holds_the_ratio_that_the_prompts_were_drawn_with() -> None:
    rows = [cell(EAGLE, 3, rates=[0.6]), cell(TOKENS, 3, rates=[0.5])]
    (pair,) = pairs_of(rows, ASKED)
    expected = (0.6 + 0.36 + 0.216) / (0.5 + 0.25 + 0.125)
    whole = by_category(pair)[0].ratio
    assert whole.low is not None
    assert whole.high is not None
    assert 1.0 < whole.low < expected < whole.high < 2.0


@pytest.mark.parametrize(
    ("low", "high", "claim", "text"),
    [
        (1.1, 1.4, 1.25, "above 1, holds 1.25"),
        (1.1, 1.2, 1.25, "above 1, below 1.25"),
        (1.3, 1.5, 1.25, "above 1, above 1.25"),
        (0.8, 1.1, 1.25, "holds 1, below 1.25"),
        (0.7, 0.9, None, "below 1"),
        (None, None, 1.25, "no interval"),
    ],
)
def test_what_an_interval_says_of_a_claim(
    low: float | None, high: float | None, claim: float | None, text: str
) -> None:
    assert claim_text(Interval(1.0, low, high), claim) == text


def test_the_answer_in_words() -> None:
    rows = [cell(kind, depth, rates=[rate]) for depth in (1, 3) for kind, rate in ((EAGLE, 0.8), (TOKENS, 0.4))]
    text = comparison_text(rows, manifest_of())
    assert text is not None
    overall, shallow, deep = text.sentences
    assert re.fullmatch(
        r"Over 2 pairs of cells eagle is accepted [\d.]+ to [\d.]+ times as often as draft_model; the claim of 1.25 is"
        r" exceeded in 2.",
        overall,
    )
    assert re.fullmatch(
        r"At depth 1, batch 1: eagle is accepted [\d.]+ \([\d.]+ to [\d.]+\) times as often as draft_model\(builtin\),"
        r" \.\d\d of its tokens against \.\d\d; the claim of 1.25: exceeded. Own weights: 5.40 M against 8.90 M; a"
        r" draft step moves 10.8 MB against 17.8 MB.",
        shallow,
    )
    assert deep.startswith("At depth 3, batch 1: ")
    assert len(text.categories) == 2 * (1 + len(CATEGORIES))
    assert [line[1] for line in text.positions] == ["1", "1", "2", "3"]
    assert "claim" not in " ".join(comparison_text(rows, manifest_of(None)).sentences)  # type: ignore[union-attr]


def test_rows_without_counts_and_cells_without_partners_are_named() -> None:
    old = [cell(EAGLE), cell(TOKENS)]
    for row in old:
        for sample in row["samples"]["prompts"]:
            del sample["offered_at"], sample["tried_at"], sample["accepted_at"]
    text = comparison_text(old, manifest_of())
    assert text is not None
    assert text.sentences == (f"At depth 2, batch 1: {compare.NO_COUNTS}.",)
    assert text.categories == text.positions == ()
    alone = comparison_text([cell(EAGLE)], manifest_of())
    assert alone is not None
    assert alone.sentences == ("No cell of eagle has a counterpart of draft_model that differs in the drafter alone.",)


def test_figures_have_their_data_beside_them_and_say_when_there_is_none() -> None:
    rows = [cell(kind, depth, temperature=t) for t in (0.0, 1.0) for depth in (1, 2) for kind in (EAGLE, TOKENS)]
    pairs = pairs_of(rows, ASKED)
    with drawing():
        ratios, curves = draw_category_ratios(ASKED, pairs), draw_conditional(ASKED, pairs)
        nothing = draw_category_ratios(ASKED, []), draw_conditional(ASKED, [])
    assert len(ratios.data) == 4 * (1 + len(CATEGORIES))
    assert len(curves.data) == 2 * (1 + 2)
    line = dict(zip(curves.header, curves.data[-1], strict=True))
    assert (line["context"], line["depth"], line["over"]) == ("T 1", 2, "2")
    assert line["ratio"] == pytest.approx(line["first_rate"] / line["second_rate"])  # type: ignore[operator]
    assert ratios.title == "Acceptance of eagle over draft_model, by prompt category"
    assert all("no two cells" in one.alt for one in nothing)


def test_page_and_summary_show_the_comparison_where_the_scenario_asks(tmp_path: Path) -> None:
    rows = [cell(kind, depth) for depth in (1, 2) for kind in (EAGLE, TOKENS)]
    plots = make_plots(rows, manifest_of(), tmp_path / "plots")
    assert [plot.name for plot in plots][-2:] == ["compare_categories", "compare_positions"]
    with plots[-1].csv_path.open(encoding="utf-8", newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 3
    page = write_report([Run(rows, manifest_of(), plots)], tmp_path / "report.html").read_text(encoding="utf-8")
    places = [
        page.index(part) for part in ("Over 2 pairs of cells", "Compared: eagle held", "The drafters, one by one")
    ]
    assert places == sorted(places)
    assert page.count("<figure") == len(plots) + 1  # and the first screen's
    assert "crossing batch" in page
    text = summary_markdown(rows, manifest_of())
    assert text.index("- Over 2 pairs") < text.index("## Compared") < text.index("## Drafters")
    quiet = write_report([Run(rows, make_manifest(), [])], tmp_path / "quiet.html").read_text(encoding="utf-8")
    assert "Compared:" not in quiet


def test_text_from_outside_is_text_in_the_new_tables(tmp_path: Path) -> None:
    hostile = "</script><b>|`x"
    rows = [cell((hostile, 0.5, 0.1, False)), cell(TOKENS)]
    manifest = manifest_of(1.25, [hostile, "draft_model"])
    rows[0]["samples"]["prompts"][0]["category"] = hostile
    rows[1]["samples"]["prompts"][0]["category"] = hostile
    assert comparison_text(rows, manifest) is not None
    page = write_report([Run(rows, manifest, make_plots(rows, manifest, tmp_path))], tmp_path / "report.html")
    assert "<b>" not in page.read_text(encoding="utf-8")
    text = summary_markdown(rows, manifest)
    assert "<b>" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


# ---- the scenarios


@pytest.mark.parametrize(
    ("name", "asked", "num_cases"),
    [
        ("drafters-smollm2", None, 210),
        ("claims/feature-vs-token", ASKED, 2),
        ("claims/heads-decorrelate", Comparison("medusa", "mtp"), 2),
    ],
)
def test_the_scenarios_say_how_many_cases_they_have(name: str, asked: Comparison | None, num_cases: int) -> None:
    file = ROOT / "scenarios" / f"{name}.yaml"
    scenario = load_scenario(file)
    cases = expand(scenario)
    assert len(cases) == num_cases
    assert re.search(rf"^# .*\b{num_cases} cases", file.read_text(encoding="utf-8"), re.M)
    assert comparison_of({"scenario": json.loads(json.dumps(scenario.to_dict()))}) == asked
    if asked is None:
        kinds = {case.drafter.kind for case in cases}
        assert kinds == {
            *("ngram", "suffix", "early_exit", "draft_model", "medusa", "eagle", "eagle2", "eagle3", "mtp", "oracle")
        }
        assert {case.workload.batch_size for case in cases} == {1, 2, 4, 8, 16}
        assert {case.sampling.temperature for case in cases} == {0.0, 1.0}
