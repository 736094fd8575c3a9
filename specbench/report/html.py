"""One self-contained HTML file from rows, manifests and plots: it opens offline and asks nothing of the network.

Everything from outside is escaped by jinja2's autoescape; SVG files are parsed and rebuilt with ids of their own.
"""

from __future__ import annotations

import csv
import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from specbench.definitions import DEFINITIONS
from specbench.report import rows as read
from specbench.report import tables
from specbench.report.plots import Plot
from specbench.report.roofs import Roof, missing_roofs, roofs_of
from specbench.report.rows import Row

DATA_ROWS = 300
ANSWER_PLOT = "speedup"
_SVG = "{http://www.w3.org/2000/svg}"
_FONT = "'DejaVu Sans'"


@dataclass(frozen=True)
class Run:
    """What one run brings to the page."""

    rows: Sequence[Row]
    manifest: Mapping[str, Any]
    plots: Sequence[Plot] = field(default=())


def write_report(runs: Sequence[Run], out_file: Path | str) -> Path:
    """Write the page for one run or several (each in a section of its own, never compared) and return its path.

    Samples don't enter the page: each cell shows quantiles of its blocks. Raises OSError where the file can't be
    written.
    """
    environment = Environment(
        loader=PackageLoader("specbench.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [_section(run, f"r{place}") for place, run in enumerate(runs, start=1)]
    title = sections[0]["title"] if len(sections) == 1 else f"{len(sections)} speculative decoding runs"
    page = environment.get_template("report.html.j2").render(
        title=title, runs=sections, definitions=[(d.name, d.unit, d.formula, d.meaning) for d in DEFINITIONS.values()]
    )
    path = Path(out_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _section(run: Run, prefix: str) -> dict[str, Any]:
    manifest: Mapping[str, Any] = read.finite(run.manifest)
    cells = read.latest(run.rows)
    name = read.plain(manifest.get("name") or "unnamed run")
    figures = [_figure(plot, f"{prefix}-{plot.name}") for plot in run.plots]
    dtypes = list(dict.fromkeys(str(read.axis(row, "dtype")) for row in cells))
    return {
        "prefix": prefix,
        "name": name,
        "title": read.plain(manifest.get("question") or name),
        "device": read.plain(manifest.get("device") or "an unrecorded device"),
        "sentences": tables.verdict_sentences(cells, manifest),
        "verdict": tables.verdict(cells),
        "answer": next((figure for figure in figures if figure["name"] == ANSWER_PLOT), None),
        "figures": [figure for figure in figures if figure["name"] != ANSWER_PLOT],
        "faults": [_fault(row) for row in cells if not read.is_ok(row)],
        "warnings": _warnings(cells),
        "cells": [_cell(row) for row in cells],
        "conditions": tables.condition_pairs(cells, manifest),
        "roofs": [_roof(roof) for dtype in dtypes for roof in roofs_of(manifest, dtype)],
        "no_roofs": [text for dtype in dtypes for text in missing_roofs(manifest, dtype)],
        "environment": _flat(manifest.get("environment")),
        "scenario": _yaml(manifest.get("scenario")),
        "scenario_file": read.plain(manifest.get("scenario_file") or ""),
        "nulls": _nulls(cells),
    }


def _yaml(scenario: object) -> str:
    if not scenario:
        return ""
    text: str = yaml.safe_dump(scenario, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)
    return read.printable(text)


# ---- figures


def _figure(plot: Plot, prefix: str) -> dict[str, Any]:
    with plot.csv_path.open(encoding="utf-8", newline="") as stream:
        header, *data = list(csv.reader(stream))
    return {
        "name": plot.name,
        "id": prefix,
        "title": plot.title,
        "caption": plot.caption,
        "svg": inline_svg(plot.svg_path.read_text(encoding="utf-8"), prefix, plot.title, plot.alt),
        "header": [name.replace("_", " ") for name in header],
        "data": [[_short(value) for value in row] for row in data[:DATA_ROWS]],
        "total": len(data),
        "csv": plot.csv_path.name,
    }


def _short(text: str) -> str:
    """A CSV value for a narrow table: four significant digits, everything else as it stands."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return read.DASH
    return text if value == int(value) and "." not in text else f"{value:.4g}"


def inline_svg(source: str, prefix: str, title: str, description: str) -> Markup:
    """An SVG file as an element for HTML: ids made unique by `prefix`, no metadata, no namespaces, no fixed size."""
    root = ElementTree.fromstring(source)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG) in ("metadata", "style", "script", "title", "desc"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            element.set(name, _own(name, value, prefix))
    width, height = root.get("viewBox", "0 0 1 1").split()[2:]
    root.attrib = {
        "viewBox": root.get("viewBox", ""),
        "role": "img",
        "aria-labelledby": f"{prefix}-t {prefix}-d",
        "style": f"aspect-ratio:{width}/{height};stroke-linejoin:round;stroke-linecap:butt",
    }
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        words = ElementTree.Element(tag, {"id": f"{prefix}-{tag[0]}"})
        words.text = read.plain(text)
        root.insert(place, words)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _own(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    if name == "style":
        value = value.replace(_FONT, f"{_FONT}, Verdana, sans-serif")
    return value.replace("url(#", f"url(#{prefix}-")


# ---- tables


def _cell(row: Row) -> list[str]:
    """One line of the table of all cells, in the order of the template's header."""
    values = {name: read.metric(row, name) for name in _CELL_METRICS}
    percent = values["roof_fraction_measured"]
    memory = read.significant(values["peak_memory_bytes"], "B")
    check = read.section(row, "conditions").get("output_check")
    return [
        read.plain(row.get("case_name") or "unnamed cell"),
        read.status(row),
        _rate(row, ""),
        _rate(row, "ar_"),
        tables.speedup_text(row),
        read.fixed(values["acceptance_rate"]),
        read.fixed(values["tokens_per_step"]),
        _milliseconds(values["step_s"]),
        _milliseconds(values["ar_step_s"]),
        read.significant(values["intensity"]),
        read.DASH if percent is None else f"{100 * percent:.0f} %",
        block_quantiles(row, "spec"),
        block_quantiles(row, "ar"),
        memory,
        read.DASH if check is None else read.plain(check).replace("_", " "),
    ]


_CELL_METRICS = (
    "acceptance_rate",
    "tokens_per_step",
    "step_s",
    "ar_step_s",
    "intensity",
    "roof_fraction_measured",
    "peak_memory_bytes",
)


def _rate(row: Row, arm: str) -> str:
    low, mean, high = (read.metric(row, f"{arm}output_tokens_per_s{end}") for end in ("_low", "", "_high"))
    if mean is None or not read.is_ok(row):
        return read.DASH
    half = "?" if low is None or high is None else read.rate((high - low) / 2, 2)
    return f"{read.rate(mean, 4)} ±{half}"


def _milliseconds(seconds: float | None) -> str:
    return read.DASH if seconds is None else f"{1e3 * seconds:.4g}"


def block_quantiles(row: Row, arm: str) -> str:
    """The 10th, 50th and 90th percentile of tokens/s over an arm's valid blocks; "–" below two blocks."""
    blocks = read.section(row, "samples").get("blocks")
    rates = [
        tokens / wall
        for block in (blocks if isinstance(blocks, list) else [])
        if isinstance(block, Mapping) and block.get("arm") == arm and block.get("valid", True)
        if (tokens := read.number(block.get("tokens"))) is not None and (wall := read.number(block.get("wall_s")))
    ]
    if len(rates) < 2 or not read.is_ok(row):
        return read.DASH
    tenths = quantiles(rates, n=10, method="inclusive")
    return " / ".join(read.rate(tenths[place]) for place in (0, 4, 8))


def _fault(row: Row) -> tuple[str, str, str]:
    return read.plain(row.get("case_name") or "unnamed cell"), read.status(row), read.reason(row)


def _warnings(cells: Iterable[Row]) -> list[tuple[str, str]]:
    """Each distinct warning with the cells that gave it."""
    found: dict[str, list[str]] = {}
    for row in cells:
        for text in row.get("warnings") or []:
            found.setdefault(read.plain(text), []).append(read.plain(row.get("case_name") or "unnamed cell"))
    more = {text: f" and {len(names) - 1} more" if len(names) > 1 else "" for text, names in found.items()}
    return [(text, names[0] + more[text]) for text, names in found.items()]


def _nulls(cells: Iterable[Row]) -> list[tuple[str, str, int]]:
    """Metrics without a value: name, reason, number of cells."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in cells:
        for name, why in read.section(read.section(row, "metrics"), "null_reasons").items():
            counts[read.plain(name), read.plain(why)] += 1
    return [(name, why, count) for (name, why), count in counts.items()]


def _roof(roof: Roof) -> tuple[str, str, str, str, str, str]:
    return (
        roof.name,
        roof.dtype,
        read.significant(roof.bytes_per_s, "B/s"),
        read.significant(roof.flops_per_s, "FLOP/s"),
        read.significant(roof.knee),
        roof.source,
    )


def _flat(value: object, name: str = "") -> list[tuple[str, str]]:
    """Nested provenance as dotted names and values."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))]
    if value is None and not name:
        return []
    return [(read.plain(name), "not known" if value is None else read.plain(value))]
