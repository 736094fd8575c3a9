"""The page: its first screen, policy, badges, provenance, permalinks and exports, and what hostile text does to it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_rows import DRAFTERS, make_manifest, make_row, make_rows

from specbench.report import rows as read
from specbench.report.answer import Answer, answer_of
from specbench.report.badges import BADGES, badges_of, legend, target_interval
from specbench.report.figures_svg import PALETTE
from specbench.report.html import Run, file_name, render, write_report
from specbench.report.html_cells import RAW_METRICS, command_of, json_for_html, raw_cells
from specbench.report.html_figures import DATA_ROWS, LEAST_DATA_ROWS, PAGE_DATA_ROWS, rows_per_figure, short
from specbench.report.html_provenance import provenance
from specbench.report.html_svg import Sheet, inline_svg
from specbench.report.plots import Plot, make_plots
from specbench.report.series import varying_axes
from specbench.scenario.cases import expand
from specbench.scenario.filters import filter_cases
from specbench.scenario.schema import load_scenario
from specbench.store import latest_rows, read_manifest

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "</script><script>alert(1)</script>\"' onload=x ]]> <!-- &amp; \x00\u202e\u2028=1+1"
SLOW, FAST = (0.8, 0.78, 0.82), (1.5, 1.45, 1.55)


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.inline: list[tuple[str, dict[str, str], str]] = []
        self.words: list[str] = []
        self._open: tuple[str, dict[str, str]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.found.append((tag, named))
        self._open = (tag, named) if tag in ("script", "style") else None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.inline.append((*self._open, data))
            self._open = None
        else:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [named for name, named in self.found if name == tag]


def cells(
    values: dict[int, tuple[float, float, float]], name: str = "suffix", depth: int = 3, **more: Any
) -> list[dict[str, Any]]:
    """One series with these speedups by batch."""
    found = []
    for batch, value in values.items():
        row = make_row(name, depth, batch, drafter=DRAFTERS.get(name, ("x", 0.5, 0.1, False)), **more)
        row["metrics"] |= dict(zip(("speedup", "speedup_low", "speedup_high"), value, strict=True))
        found.append(row)
    return found


def answer(*series: list[dict[str, Any]], **manifest: Any) -> Answer:
    return answer_of([row for rows in series for row in rows], make_manifest(**manifest))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return make_rows(("ngram(3)", "early_exit(8)", "oracle(0.8)"), (1, 3), (1, 4, 16))


@pytest.fixture(scope="module")
def plots(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Plot]:
    return make_plots(rows, make_manifest(), tmp_path_factory.mktemp("plots"))


@pytest.fixture(scope="module")
def page(rows: list[dict[str, Any]], plots: list[Plot]) -> Elements:
    return Elements(render([Run(rows, make_manifest(), plots)]))


# ---- the first screen


def test_it_names_drafter_depth_and_batch() -> None:
    found = answer(cells({1: FAST, 4: (1.2, 1.1, 1.3), 16: SLOW}))
    assert found.sentence == (
        "On Example CPU, 2 cores, with smollm2-135m-instruct (bf16) and editing, coding, qa and writing prompts:"
        " speculation pays off clearly up to batch 4. Use suffix at depth 3 up to batch 4"
        " (1.50× [1.45 to 1.55] at batch 1, 1.20× [1.10 to 1.30] at batch 4). At batch 16 nothing"
        " measured is clearly faster than plain decoding."
    )
    (line,) = found.lines
    assert [(cell.text, cell.depth, cell.meaning, cell.chosen) for cell in line.cells] == [
        ("1.50×", "3", "gain", True), ("1.20×", "3", "gain", True), ("0.80×", "3", "loss", False),
    ]  # fmt: skip
    assert line.stops == "between batch 4 and 16"


def test_it_changes_the_advice_where_another_is_clearly_better_and_only_there() -> None:
    first = cells({1: (2.0, 1.9, 2.1), 4: (1.1, 1.05, 1.15), 16: SLOW})
    second = cells({1: (1.5, 1.4, 1.6), 4: (1.4, 1.3, 1.5), 16: (1.1, 1.02, 1.2)}, "ngram(3)", 1)
    assert (
        "suffix at depth 3 at batch 1 (2.00× [1.90 to 2.10]); then ngram(3) at depth 1 from batch 4 to 16"
        in answer(first, second).sentence
    )
    tied = cells({1: (1.9, 1.7, 2.1), 4: (1.4, 1.3, 1.5), 16: SLOW}, "ngram(3)", 1)
    told = answer(first, tied).sentence
    assert "Use ngram(3) at depth 1 up to batch 4" in told
    passed_over = (
        "At batch 1 suffix at depth 3 measured 2.00× [1.90 to 2.10], not clearly more, and does worse at larger"
    )
    assert passed_over in told
    assert "not clearly more" not in answer(first, second).sentence


@pytest.mark.parametrize("value", [(1.2, 0.9, 1.5), (1.2, None, None), (0.9, 0.8, 0.95)])
def test_it_never_advises_what_is_not_clearly_faster(value: tuple[float, Any, Any]) -> None:
    found = answer(cells({1: value, 4: value}))
    assert "no drafter pays off clearly at any batch measured (≤4): decode plainly" in found.sentence
    assert not any(line.chosen for line in found.lines)


def test_forced_acceptance_and_lossy_drafters_are_shown_but_never_advised() -> None:
    better = (9.0, 8.9, 9.1)
    lossy = cells({1: better}, "mtp", conditions={"lossless": False})
    found = answer(cells({1: FAST}), cells({1: better}, "oracle(0.8)"), lossy)
    assert "Use suffix at depth 3 at batch 1" in found.sentence
    assert [line.drafter for line in found.lines if line.chosen] == ["suffix"]
    assert {"synthetic", "lossy"} <= {name for line in found.lines for name in line.badges}
    assert "only synthetic acceptance" in answer(cells({1: better}, "oracle(0.8)")).sentence


def test_predicted_rows_answer_by_their_value_and_say_so() -> None:
    rows = cells({1: (1.3, None, None), 4: (0.9, None, None)}, conditions={"predicted": True})
    found = answer(rows)
    assert found.sentence.startswith("Predicted, not measured: on Example CPU")
    assert "Use suffix at depth 3 at batch 1 (1.30×)" in found.sentence
    assert found.sure_word == "predicted"
    assert [cell.meaning for cell in found.lines[0].cells] == ["gain", "loss"]
    assert badges_of(rows[0]) == ("predicted",)


def test_conditions_that_vary_are_answered_one_by_one_and_choices_compete() -> None:
    cold, hot = (
        cells({1: FAST, 4: SLOW}, axes={"temperature": 0.0}),
        cells({1: SLOW, 4: SLOW}, axes={"temperature": 1.0}),
    )
    found = answer(cold, hot)
    assert found.said == "it depends on temperature (T)."
    assert [text.split(":")[0] for text in found.advice] == ["At T 0", "At T 1"]
    assert "no drafter pays off" in found.advice[1]
    moves = cells({1: FAST}, axes={"rollback": "compact"}), cells({1: (2.0, 1.9, 2.1)}, axes={"rollback": "index"})
    assert "Use suffix at depth 3 (rollback index) at batch 1" in answer(*moves).sentence


def test_how_sure_follows_the_intervals_and_blocks() -> None:
    narrow, wide = {1: (1.5, 1.47, 1.53)}, {1: (1.5, 1.1, 2.4)}
    assert answer(cells(narrow)).sure_word == "firm"
    assert answer(cells(wide)).sure_word == "weak"
    assert "noisy" in " ".join(answer(cells(wide)).sure)
    one_block = cells(narrow)
    one_block[0]["metrics"]["num_blocks"] = 1
    assert answer(one_block).sure_word == "weak"
    assert "between 1.47 and 1.53" in " ".join(answer(cells(narrow)).sure)


def test_what_would_change_it_is_computed_from_the_steps() -> None:
    rows = cells({1: FAST, 4: SLOW})
    rows[0]["metrics"] |= {"step_s": 0.03, "ar_step_s": 0.02, "verify_s": 0.025, "tokens_per_step": 2.25}
    rows[1]["metrics"] |= {"step_s": 0.06, "ar_step_s": 0.02, "verify_s": 0.05, "tokens_per_step": 2.4}
    told = " ".join(answer(rows).change)
    assert (
        "a step of suffix · depth 3 yields 2.25 tokens for the cost of 1.50 plain steps; below 1.50 tokens a step"
        in told
    )
    assert (
        "To pay at batch 4 it needs 3.00 tokens a step instead of 2.40 or a verify pass of 1.90 instead of 2.50" in told
    )
    assert "Held fixed, so not answered: other values than bf16, greedy decoding (T 0), outputs of 64 tokens" in told


@pytest.mark.parametrize("rows", [[], [make_row("suffix", 3, 1, status="failed", reason="boom")]])
def test_an_answer_needs_a_speedup(rows: list[dict[str, Any]]) -> None:
    found = answer(rows)
    assert found.sure_word == "none"
    assert "no verdict" in found.sentence
    assert not found.plotted


# ---- badges


@pytest.mark.parametrize(
    ("change", "badge"),
    [
        (lambda row: row.update(status="invalid"), "invalid"),
        (lambda row: row.update(status="failed"), "failed"),
        (lambda row: row.update(status="skipped"), "skipped"),
        (lambda row: row["conditions"].update(output_check="near_tie"), "near tie"),
        (lambda row: row["conditions"].update(synthetic=True), "synthetic"),
        (lambda row: row["conditions"].update(predicted=True), "predicted"),
        (lambda row: row["conditions"].update(lossless=False), "lossy"),
        (lambda row: row["metrics"].update(speedup_low=1.0, speedup_high=2.0), "noisy"),
        (lambda row: row["metrics"].update(speedup_low=None), "noisy"),
        (lambda row: row["metrics"].update(num_blocks=1), "noisy"),
        (lambda row: row["samples"]["blocks"][0].update(marks=["software thermal"], valid=False), "throttled"),
        (lambda row: row.update(warnings=["1 of 6 blocks were disturbed (power brake) and left out"]), "throttled"),
    ],
)  # fmt: skip
def test_each_badge_has_its_cause(change: Callable[[dict[str, Any]], None], badge: str) -> None:
    row = cells({1: (1.5, 1.47, 1.53)})[0]
    assert badges_of(row) == ()
    change(row)
    assert badges_of(row) == (badge,)
    assert legend([row], 0.05) == [(badge, BADGES[badge])]


def test_noise_is_held_against_what_the_scenario_asked_for() -> None:
    row = cells({1: (1.5, 1.4, 1.6)})[0]
    asked = make_manifest()
    asked["scenario"]["measure"]["target_interval"] = 0.02
    assert (target_interval(make_manifest()), target_interval(asked)) == (0.05, 0.02)
    assert (badges_of(row, 0.05), badges_of(row, 0.02)) == ((), ("noisy",))


def test_the_page_shows_and_explains_the_badges(page: Elements) -> None:
    shown = {
        named["class"].split()[1].removeprefix("b-") for named in page.all("span") if "badge" in named.get("class", "")
    }
    assert {name.replace(" ", "-") for name in BADGES} <= shown
    assert all(meaning in "".join(page.words) for meaning in BADGES.values())


# ---- the policy


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(page: Elements) -> None:
    (policy,) = [one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    rules = {name: values for name, *values in (rule.split() for rule in policy.split(";"))}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["img-src"] == ["data:"]
    assert "unsafe" not in policy
    inline: dict[str, list[str]] = {"script": [], "style": []}
    for tag, named, text in page.inline:
        if named.get("type") != "application/json":
            inline[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    assert rules["script-src"] == inline["script"]
    assert rules["style-src"] == inline["style"]
    assert len(inline["style"]) == 1


def test_nothing_on_the_page_needs_what_the_policy_forbids(page: Elements) -> None:
    for tag, named in page.found:
        assert "style" not in named, (tag, named)
        assert not [name for name in named if name.startswith("on")], (tag, named)
        assert not named.get("href", "#").strip().lower().startswith(("javascript", "data:text")), (tag, named)
    assert not page.all("link") + page.all("iframe") + page.all("object") + page.all("img")


def test_styles_of_figures_become_classes_and_colours_follow_the_theme() -> None:
    sheet = Sheet()
    role, (light, _) = next(iter(PALETTE.items()))
    source = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 2"><path class="sb-mark" style="fill: {light};'
        ' stroke: #123456" onclick="x()"/><path style="stroke: #123456; background: url(http://x.y/)"/>'
        '<image href="http://x.y/z.png"/><a href="javascript:x()"><text style="color: red} body{x:y">t</text></a></svg>'
    )
    text = inline_svg(source, "r1", "T", "D", sheet)
    assert 'class="sb-mark f0"' in text
    assert f".fig .f0{{fill:var(--sb-{role});stroke:#123456}}" in sheet.css()
    assert ".fig .f1{stroke:#123456}" in sheet.css()
    assert not re.search(r"style=|onclick|http|javascript|body", text + sheet.css())
    assert inline_svg(source, "r2", "T", "D", sheet).count("f0") == 1
    assert len(sheet.css().splitlines()) == 2


# ---- hostile text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    drafter = ("x", 0.5, 0.1, False)
    rows = [make_row(HOSTILE, 1, b, axes={"target": HOSTILE, "dtype": HOSTILE}, drafter=drafter) for b in (1, 2)]
    rows.append(make_row(HOSTILE, 1, 4, status="failed", reason=HOSTILE, drafter=drafter, axes={"target": HOSTILE}))
    rows[0] |= {"warnings": [HOSTILE], "case_hash": HOSTILE, "case_name": HOSTILE, "code_revision": HOSTILE}
    rows[0]["metrics"]["by_category"] = {HOSTILE: rows[0]["metrics"]["by_category"]["qa"]}
    rows[0]["metrics"]["null_reasons"] = {HOSTILE: HOSTILE}
    rows[0]["conditions"] |= {"weights": HOSTILE, "prompt_categories": [HOSTILE], "output_check": HOSTILE}
    manifest = make_manifest(name=HOSTILE, question=HOSTILE, device=HOSTILE, scenario={HOSTILE: HOSTILE})
    manifest |= {"environment": {HOSTILE: [HOSTILE], "gpu": {"driver": HOSTILE}}, "scenario_file": HOSTILE}
    plots = make_plots(rows, manifest, tmp_path_factory.mktemp("hostile"))
    run = Run(rows, manifest, plots, [(HOSTILE, HOSTILE)])
    return render([run, Run(rows, manifest)])


def test_hostile_text_is_text_in_html_attributes_json_and_svg(hostile: str) -> None:
    found = Elements(hostile)
    scripts = found.all("script")
    assert [one for one in scripts if one.get("type") != "application/json"] == [{}, {}]
    assert hostile.count("</script") == len(scripts) == 4
    for tag, named in found.found:
        assert set(named).isdisjoint({"onload", "onerror", "onclick", "style"}), (tag, named)
        assert all(character not in value for value in named.values() for character in "\x00\u202e\u2028")
    assert "alert(1)" in "".join(found.words)
    assert not re.search("[\x00\u202a-\u202e\u2028\u2029\u2066-\u2069]", hostile)
    for tag, named, text in found.inline:
        if named.get("type") == "application/json":
            assert tag == "script"
            block = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
            assert "</script><script>alert(1)</script>" in block["rows"][0][0]
        else:
            assert "alert(1)" not in text


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "a\u2028b", "\u202eabc", "x\x00y", "\ud800", "&lt;"])
def test_json_in_the_page_cannot_end_its_element(text: str) -> None:
    shown = json_for_html({text: [text, {"k": text}]})
    assert not re.search("[<>&\x00\u2028\u2029\u202e\ud800]", shown)
    assert json.loads(shown) == {read.plain(text): [read.plain(text), {"k": read.plain(text)}]}


def test_json_in_the_page_is_strict() -> None:
    assert (
        json_for_html([float("nan"), float("inf"), -float("inf"), 1e300, True, None])
        == "[null,null,null,1e+300,true,null]"
    )


def test_names_of_exported_files_are_plain() -> None:
    assert file_name(HOSTILE) == "script-script-alert-1-script-onload-x-amp-1-1"
    assert file_name("漢") == "run"


# ---- provenance, permalinks, commands


def test_provenance_names_what_a_number_rests_on(rows: list[dict[str, Any]]) -> None:
    pairs = dict(provenance(rows, make_manifest()))
    assert pairs["code revision"] == "1a5af79"
    assert pairs["machine's fingerprint"] == "f00dfeedcafe0001"
    assert pairs["seeds"] == "0 (prompts, sampling), 0 (order of blocks)"
    assert pairs["driver"] == "none: a CPU"
    assert pairs["the whole run again"] == "specbench run quickstart.yaml --fresh"
    gpu = {"driver": "580.95", "cuda": "13.0", "power_limit_w": 350.0, "power_limit_default_w": 700.0, "sm_count": 132,
           "sm_clock_mhz": 1980}  # fmt: skip
    pairs = dict(provenance(rows, make_manifest(environment={"gpu": gpu, "torch": "2.13"}, device="H200")))
    assert (pairs["driver"], pairs["power limit"]) == ("580.95", "350 W of a default of 700 W")
    assert (pairs["clocks"], pairs["device"]) == ("sm clock 1980 MHz", "H200, 132 SMs")
    assert pairs["versions"] == "torch 2.13, cuda 13.0"
    gone = {"driver": None, "power_limit_w": None, "nvml_reason": "NVML is not there"}
    pairs = dict(provenance([], make_manifest(environment={"gpu": gone})))
    assert pairs["driver"] == pairs["power limit"] == "not known: NVML is not there"


@pytest.mark.parametrize("name", ["quickstart", "rollback"])
def test_the_command_of_a_cell_selects_that_cell_alone(name: str) -> None:
    rows = [row.model_dump() for row in latest_rows(ROOT / "results" / name)]
    manifest = read_manifest(ROOT / "results" / name)
    varying = varying_axes(rows)
    chosen = []
    for row in rows:
        words = shlex.split(command_of(row, manifest, varying))
        assert words[:2] == ["specbench", "run"]
        chosen.append([words[place + 1] for place, word in enumerate(words) if word == "--only"])
    cases = expand(load_scenario(ROOT / "scenarios" / "rollback.yaml"))
    if name == "rollback":  # the quickstart's scenario has moved on since its rows were measured
        for row, filters in zip(rows, chosen, strict=True):
            (case,) = filter_cases(cases, filters)
            same = ("drafter", "depth", "batch_size", "rollback", "temperature")
            assert [case.axes[key] for key in same] == [row["axes"][key] for key in same]
    assert len({tuple(one) for one in chosen}) == len(rows)


def test_permalinks_are_unique_and_outlive_the_page(rows: list[dict[str, Any]], page: Elements) -> None:
    anchors = [named["id"] for named in page.all("tr") if named.get("id")]
    assert anchors == [f"r1-{row['case_hash'][:10]}" for row in read.latest(rows)]
    links = {named.get("href") for named in page.all("a")}
    assert {f"#{anchor}" for anchor in anchors} <= links
    twin = [*rows[:1], rows[0] | {"case_hash": rows[0]["case_hash"][:12] + "ffff"}]
    text = render([Run(twin, make_manifest())])
    assert f'id="r1-{rows[0]["case_hash"][:10]}-2"' in text


# ---- data, sizes


def test_raw_cells_hold_base_units_and_null_for_what_is_missing(rows: list[dict[str, Any]]) -> None:
    block = json.loads(raw_cells(read.latest(rows), 0.05))
    place = {name: index for index, name in enumerate(block["columns"])}
    assert set(RAW_METRICS) <= set(place)
    assert len(block["rows"]) == len(rows)
    for row, line in zip(read.latest(rows), block["rows"], strict=True):
        assert line[place["status"]] == row["status"]
        if row["status"] == "ok":
            assert line[place["speedup"]] == pytest.approx(row["metrics"]["speedup"], rel=1e-5)
        else:
            assert line[place["speedup"]] is None
            assert line[place["reason"]]


def test_no_sample_enters_the_page() -> None:
    row = make_row("suffix", 3, 1, blocks=100)
    row["samples"]["blocks"][7]["wall_s"] = 0.123456789
    row["samples"]["prompts"] = [{"id": "a-prompt's-id", "category": "qa", "ar_tokens": 7654321, "ar_s": 1.0,
                                  "spec_tokens": 1, "spec_s": 1.0}]  # fmt: skip
    text = render([Run([row], make_manifest())])
    assert not re.search("0.12345|7654321|a-prompt", text)


def test_what_is_left_out_of_a_table_is_told(plots: list[Plot], rows: list[dict[str, Any]], tmp_path: Path) -> None:
    long = tmp_path / "long.csv"
    long.write_text("a,b\n" + "\n".join(f"{n},{n / 3}" for n in range(9000)) + "\n", encoding="utf-8")
    many = [*plots[:2], Plot(**(plots[2].__dict__ | {"csv_path": long}))]
    text = render([Run(rows, make_manifest(), many)])
    assert "Data of this figure (9000 rows)" in text
    told = re.search(r"The first (\d+) of 9000 rows\. All of them: long\.csv", text)
    assert told is not None
    assert int(told[1]) == DATA_ROWS
    assert text.count("<td>0.3333</td>") == 1


def test_a_page_of_many_figures_shows_fewer_rows_of_each() -> None:
    assert rows_per_figure([100, 9000]) == DATA_ROWS
    assert sum(min(n, rows_per_figure([4000] * 14)) for n in [4000] * 14) <= PAGE_DATA_ROWS
    assert rows_per_figure([9000] * 100) == LEAST_DATA_ROWS
    assert [short(text) for text in ("1.23456", "12", "nan", "", "x\u202ey")] == ["1.235", "12", "–", "", "x y"]


def test_two_hundred_cells_stay_under_two_megabytes(tmp_path: Path) -> None:
    rows = make_rows(tuple(DRAFTERS)[:8], (1, 2, 3, 5, 7), (1, 2, 4, 8, 16), blocks=12)
    assert len(rows) == 200
    run = Run(rows, make_manifest(), make_plots(rows, make_manifest(), tmp_path / "plots"))
    path = write_report([run], tmp_path / "report.html")
    assert path.stat().st_size < 2e6
