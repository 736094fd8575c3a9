"""The page in a real browser: it opens from disk under its own policy, asks nothing of the network, and what a reader
does with it works: sort, filter, export, theme, hover, arrow keys, permalinks, print. axe-core finds nothing serious.

Skipped where there is no Chromium; `dev.py test` says so loudly.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, find_chromium
from report_rows import make_manifest, make_row, make_rows

from specbench.report.html import Run, write_report
from specbench.report.plots import make_plots

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason="NO CHROMIUM: the page was opened in no browser (apt-get install chromium, or SPECBENCH_CHROMIUM=PATH)",
)
WIDTHS = (390, 820, 1400)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'\x00\u202e=1+1"
AXE_PACKAGES = ("axe_playwright_python", "axe_core_python")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.start() as started:
        yield started


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run, one of two runs side by side, one of hostile text."""
    folder = tmp_path_factory.mktemp("pages")
    rows, manifest = make_rows(("ngram(3)", "early_exit(8)", "oracle(0.8)"), (1, 3), (1, 4, 16)), make_manifest()
    plots = make_plots(rows, manifest, folder / "plots")
    few = rows[:4]
    before, after = (Run(few, make_manifest(name=name), plots[:1]) for name in ("before", "after"))
    bad = [
        make_row(HOSTILE, 1, b, drafter=("x", 0.5, 0.1, False), axes={"target": HOSTILE}) for b in (1, 2, 4, 8, 16, 32)
    ]
    hostile = Run(bad, make_manifest(name=HOSTILE, question=HOSTILE, device=HOSTILE))
    return {
        "one": write_report([Run(rows, manifest, plots)], folder / "one.html"),
        "two": write_report([before, after], folder / "two.html"),
        "hostile": write_report([hostile], folder / "bad.html"),
    }


@pytest.fixture(scope="module")
def page(browser: Browser, reports: dict[str, Path]) -> Iterator[Page]:
    """One page for tests that leave it as it was."""
    with browser.page(1400) as opened:
        opened.open(reports["one"])
        yield opened


def texts(page: Page, selector: str) -> list[str]:
    return list(page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"))


def column(page: Page, place: int) -> list[str]:
    rows = "table.cells tbody tr:not([hidden])"
    return list(page.evaluate(f"[...document.querySelectorAll('{rows}')].map(r => r.cells[{place}].textContent)"))


# ---- every page, every width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "two", "hostile"])
def test_it_opens_quietly_asks_for_nothing_and_fits(
    browser: Browser, reports: dict[str, Path], name: str, width: int
) -> None:
    with browser.page(width, dark=width == 820) as page:
        page.open(reports[name])
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.problems == []
        asked = [url for url in page.requests if not url.startswith("data:image/png;base64,")]
        assert asked == [reports[name].resolve().as_uri()]
        assert page.evaluate("document.images.length") == 0


@pytest.mark.parametrize(("width", "dark", "name"), [(390, False, "two"), (820, True, "two"), (1400, True, "one")])
def test_axe_finds_nothing_serious(
    browser: Browser, reports: dict[str, Path], width: int, dark: bool, name: str
) -> None:
    with browser.page(width, dark=dark) as page:
        page.open(reports[name])
        page.evaluate("document.querySelectorAll('section details').forEach(d => { d.open = true; })")
        page.evaluate(axe_source())
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
        told = [
            (one["id"], one["impact"], [node["html"][:160] for node in one["nodes"]][:3])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert told == []


def axe_source() -> str:
    for name in AXE_PACKAGES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin:
            return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    pytest.fail(f"axe-core isn't installed: pip install axe-core-python (one of {', '.join(AXE_PACKAGES)})")


def test_the_policy_is_enforced(browser: Browser, reports: dict[str, Path]) -> None:
    with browser.page() as page:
        page.open(reports["one"])
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x.png\">')")
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
        )
        assert page.evaluate("window.ran") is None
        assert len([text for text in page.problems if "Content Security Policy" in text]) == 2
        assert page.blocked == ["csp"]


# ---- tables


def test_a_click_sorts_and_says_so(browser: Browser, reports: dict[str, Path]) -> None:
    with browser.page() as page:
        page.open(reports["one"])
        head = "document.querySelectorAll('table.cells thead th')[2]"
        assert page.evaluate(f"{head}.getAttribute('aria-sort')") == "none"
        for direction in ("ascending", "descending"):
            page.evaluate(f"{head}.querySelector('button').click()")
            assert page.evaluate(f"{head}.getAttribute('aria-sort')") == direction
            values = [float(text.split(" ")[0]) for text in column(page, 2) if text != "–"]
            assert values == sorted(values, reverse=direction == "descending")
            assert column(page, 2)[-3:] == ["–"] * 3  # what has no speedup stays at the end
        assert "sorted by speedup, descending" in texts(page, "#say")[0]
        page.evaluate("document.querySelectorAll('table.cells thead th')[0].querySelector('button').click()")
        assert page.evaluate(f"{head}.getAttribute('aria-sort')") == "none"


def test_numbers_sort_by_size_not_by_letters(page: Page) -> None:
    names = column(page, 13)
    page.evaluate("document.querySelectorAll('table.cells thead th')[13].querySelector('button').click()")
    sizes = [float(text.split(" ")[0]) for text in column(page, 13) if text != "–"]
    assert sizes == sorted(sizes)
    assert sorted(names) == sorted(column(page, 13))


def test_the_filter_keeps_what_matches_every_word(browser: Browser, reports: dict[str, Path]) -> None:
    with browser.page() as page:
        page.open(reports["one"])
        every = len(column(page, 0))
        box = "document.querySelector('table.cells').closest('details').querySelector('input[type=search]')"
        for typed, count in (("ngram DEPTH=3", 3), ("near tie", 1), ("nothing like it", 0), ("", every)):
            page.evaluate(f"{box}.value = {json.dumps(typed)}; {box}.dispatchEvent(new Event('input'))")
            assert len(column(page, 0)) == count
            told = page.evaluate(f"{box}.nextElementSibling.textContent")
            assert told == (f"{count} of {every} rows" if typed else "")


@pytest.mark.parametrize("kind", ["CSV", "JSON"])
def test_exports_hold_raw_values_of_the_rows_shown(browser: Browser, reports: dict[str, Path], kind: str) -> None:
    with browser.page() as page:
        page.open(reports["one"])
        tools = "document.querySelector('table.cells').closest('details').querySelector('.tools')"
        page.evaluate(f"{tools}.querySelector('input').value = 'ngram'")
        page.evaluate(f"{tools}.querySelector('input').dispatchEvent(new Event('input'))")
        page.evaluate(f"[...{tools}.querySelectorAll('button')].find(b => b.textContent === '{kind}').click()")
        text = page.downloaded(f"quickstart-cells.{kind.lower()}").read_text(encoding="utf-8")
        records: list[dict[str, Any]]
        records = list(csv.DictReader(io.StringIO(text))) if kind == "CSV" else json.loads(text)
        assert len(records) == 6
        rows = make_rows(("ngram(3)", "early_exit(8)", "oracle(0.8)"), (1, 3), (1, 4, 16))[:6]
        for record, row in zip(records, rows, strict=True):
            assert record["cell"] == row["case_name"]
            assert record["case_hash"] == row["case_hash"]
            wanted = row["metrics"].get("speedup") if row["status"] == "ok" else None
            got = float(record["speedup"]) if record["speedup"] not in (None, "") else None
            assert got == (None if wanted is None else pytest.approx(wanted, rel=1e-5))
        assert page.problems == []


def test_a_spreadsheet_never_runs_an_exported_cell(browser: Browser, reports: dict[str, Path]) -> None:
    with browser.page() as page:
        page.open(reports["hostile"])
        page.evaluate("document.querySelector('table.cells tbody td').textContent = '=HYPERLINK(1)'")
        page.evaluate("delete document.querySelector('table.cells').dataset.raw")
        tools = "document.querySelector('table.cells').closest('details').querySelector('.tools')"
        page.evaluate(f"[...{tools}.querySelectorAll('button')].find(b => b.textContent === 'CSV').click()")
        name = page.evaluate("document.querySelector('table.cells').dataset.file") + ".csv"
        (first, *_) = list(csv.reader(io.StringIO(page.downloaded(name).read_text(encoding="utf-8"))))[1:]
        assert first[0] == "'=HYPERLINK(1)"


# ---- theme


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, reports: dict[str, Path]) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.fig text')).fill"
    with browser.page(dark=True) as page:
        page.open(reports["one"])
        dark = page.evaluate(back), page.evaluate(ink)
        page.media(dark=False)
        light = page.evaluate(back), page.evaluate(ink)
        assert light[0] == "rgb(255, 255, 255)"
        assert dark[0] != light[0]
        assert dark[1] != light[1]
        seen = []
        for _ in range(3):
            page.evaluate("document.getElementById('theme').click()")
            seen.append((page.evaluate("document.getElementById('theme').textContent"), page.evaluate(back)))
        assert seen == [("Theme: light", light[0]), ("Theme: dark", dark[0]), ("Theme: system", light[0])]


# ---- figures


def test_values_show_at_the_pointer(page: Page) -> None:
    page.evaluate("document.querySelector('.plot.wide').scrollIntoView({block: 'center'})")
    mark = ".plot.wide [data-tip]"
    place = "(b => [b.left + b.width / 2, b.top + b.height / 2])"
    x, y = page.evaluate(f"{place}(document.querySelector('{mark}').getBoundingClientRect())")
    page.move(x + 2, y + 1)
    assert page.evaluate("document.getElementById('tip').hidden") is False
    assert texts(page, "#tip") == [page.evaluate(f"document.querySelector('{mark}').dataset.tip")]
    assert "batch" in texts(page, "#tip")[0]
    tip = page.evaluate("(b => [b.left, b.right, b.top])(document.getElementById('tip').getBoundingClientRect())")
    assert tip[0] >= 0
    assert tip[1] <= 1400
    page.move(2, 2)
    assert page.evaluate("document.getElementById('tip').hidden") is True


def test_arrow_keys_read_every_value(page: Page) -> None:
    page.evaluate("document.querySelector('.plot.wide').focus()")
    tips = page.evaluate("[...document.querySelectorAll('.plot.wide [data-tip]')].map(m => m.dataset.tip)")
    assert len(tips) > 5
    for place in (0, 1, 2):
        page.key("ArrowRight")
        assert texts(page, "#tip") == [tips[place]]
        assert texts(page, "#say") == [f"{tips[place]} ({place + 1} of {len(tips)})"]
    page.key("End")
    assert texts(page, "#tip") == [tips[-1]]
    page.key("Escape")
    assert page.evaluate("document.getElementById('tip').hidden") is True


def test_every_figure_has_words_data_and_a_way_in_for_the_keyboard(page: Page) -> None:
    figures = page.evaluate(
        """[...document.querySelectorAll('figure')].map(f => ({
             svg: f.querySelectorAll('svg[role=img]').length, title: f.querySelector('svg > title').textContent,
             alt: f.querySelector('svg > desc').textContent, caption: f.querySelector('figcaption').textContent.trim(),
             table: f.querySelectorAll('details').length, focus: f.querySelectorAll('.plot[tabindex="0"]').length}))"""
    )
    assert len(figures) >= 7
    for one in figures:
        assert one["svg"] == one["focus"] >= 1
        assert one["table"] == 1
        assert all(len(one[name]) > 10 for name in ("title", "alt", "caption"))


# ---- links and print


def test_a_permalink_opens_its_row_and_print_opens_all(browser: Browser, reports: dict[str, Path]) -> None:
    with browser.page() as page:
        page.open(reports["one"])
        anchor = page.evaluate("document.querySelector('table.cells tbody tr:last-child').id")
        page.evaluate("document.querySelector('table.cells').closest('details').open = false")
        page.evaluate(f"location.hash = '{anchor}'")
        page.evaluate("new Promise(done => setTimeout(done, 50))")
        top = page.evaluate(f"document.getElementById('{anchor}').getBoundingClientRect().top")
        assert 0 < top < 900
        closed = page.evaluate("document.querySelectorAll('details:not([open])').length")
        assert closed > 3
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        page.media(dark=True, kind="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.querySelector('.tools')).display") == "none"
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.querySelectorAll('details:not([open])').length") == closed


def test_without_a_script_all_of_it_is_still_there(browser: Browser, reports: dict[str, Path]) -> None:
    with browser.page() as page:
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        page.call("Page.navigate", url=reports["one"].resolve().as_uri())
        for _ in range(100):
            time.sleep(0.1)
            document = page.call("DOM.getDocument", depth=0)["root"]["nodeId"]
            rows = page.call("DOM.querySelectorAll", nodeId=document, selector="table.cells tbody tr")["nodeIds"]
            if len(rows) == 18:
                break
        assert len(rows) == 18
