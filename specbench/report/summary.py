"""summary.md, which a pull request shows: the answer, its tables and the conditions that they hold under."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.report import rows as read
from specbench.report.compare import ComparisonText, comparison_text
from specbench.report.roofs import Roof, missing_roofs, roofs_of
from specbench.report.rows import Row
from specbench.report.tables import verdict, verdict_sentences
from specbench.report.tables_drafters import drafter_table

SUMMARY_FAULTS = 40


def md(value: object) -> str:
    """Text from outside for one cell of a GitHub-flavoured table."""
    return (
        re.sub(r"([\\`*_\[\]|~#])", r"\\\1", read.plain(value))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )


def summary_markdown(rows: Iterable[Row], manifest: Mapping[str, Any]) -> str:
    """summary.md: the question, the sentences, the verdict table, cells without a speedup and the conditions."""
    cells = read.latest(rows)
    content = verdict(cells)
    lines = [f"# {md(manifest.get('name') or 'specbench')}", "", md(manifest.get("question") or ""), ""]
    compared = comparison_text(cells, manifest)
    lines += [f"- {md(sentence)}" for sentence in compared.sentences] if compared is not None else []
    lines += [f"- {md(sentence)}" for sentence in verdict_sentences(cells, manifest)]
    if content.lines:
        heads = [
            "drafter",
            "depth",
            *(f"batch {b}" for b in content.batches),
            "stops paying off",
            "acceptance rate",
            "tokens/step",
        ]
        lines += ["", _md_row(heads), "|---|--:|" + "--:|" * len(content.batches) + "---|--:|--:|"]
        for line in content.lines:
            shown = [f"**{c.text}**" if c.meaning == "gain" else md(c.text) for c in line.speedups]
            tail = (md(line.stops), line.acceptance, line.tokens_per_step)
            lines.append(_md_row([md(line.drafter), str(line.depth), *shown, *tail]))
        lines += ["", *(f"{md(note)}  " for note in content.notes)]
        lines.append(
            "Bold: the whole interval is above 1.0. Speedup and acceptance rate are ratios; tokens/step is per request."
        )
    lines += _comparison(compared) if compared is not None else []
    lines += _drafters(cells)
    faults = [row for row in cells if not read.is_ok(row)]
    if faults:
        lines += ["", "## Cells without a speedup", "", "| cell | status | reason |", "|---|---|---|"]
        for row in faults[:SUMMARY_FAULTS]:
            lines.append(_md_row([md(row.get("case_name", "")), read.status(row), md(read.reason(row))]))
        if len(faults) > SUMMARY_FAULTS:
            lines += ["", f"{len(faults) - SUMMARY_FAULTS} more are in rows.jsonl."]
    lines += ["", "## Conditions", ""]
    lines += [f"- {md(name)}: {md(value)}" for name, value in condition_pairs(cells, manifest)]
    dtypes = list(dict.fromkeys(str(read.axis(row, "dtype")) for row in cells))
    roofs = [roof for dtype in dtypes for roof in roofs_of(manifest, dtype)]
    lines += [f"- roof, {md(roof.name)}: {md(roof_text(roof))}" for roof in roofs]
    lines += [f"- {md(text)}" for dtype in dtypes for text in missing_roofs(manifest, dtype)]
    return "\n".join(lines) + "\n"


def _drafters(cells: Sequence[Row]) -> list[str]:
    table = drafter_table(cells)
    if not table.lines:
        return []
    lines = ["", "## Drafters", "", *_md_table(table.header, table.lines), ""]
    lines += [f"{md(table.caption)} The columns:", ""]
    lines += [
        f"- {md(heading)} ({md(unit)}): {md(formula)}; {md(meaning)}"
        for heading, unit, formula, meaning in table.columns
    ]
    if table.category_lines:
        lines += ["", "Acceptance by prompt category, accepted ÷ drafted tokens (for trees: ÷ depth):", ""]
        lines += _md_table(table.category_header, table.category_lines)
    return lines


def _comparison(text: ComparisonText) -> list[str]:
    lines = ["", f"## Compared: {md(text.title)}"] if text.categories else []
    for told, table in (
        (
            "Acceptance by prompt category, accepted ÷ drafted tokens, with 95 % intervals over prompts:",
            text.categories,
        ),
        ("Acceptance at each position, among drafts whose tokens before it were all accepted:", text.positions),
    ):
        if table:
            lines += ["", told, "", *_md_table(text.header, table)]
    return lines


def _md_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + "---|" * len(header)
    return [_md_row([md(name) for name in header]), rule, *(_md_row([md(cell) for cell in line]) for line in lines)]


def _md_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def condition_pairs(rows: Sequence[Row], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Under which conditions the numbers hold: names and values, from the rows and the manifest."""

    def distinct(values: Iterable[object]) -> str:
        found = list(dict.fromkeys(read.plain(value) for value in values if value not in (None, "", [])))
        return ", ".join(found) or "not recorded"

    def condition(name: str) -> list[Any]:
        return [read.section(row, "conditions").get(name) for row in rows]

    checks = Counter(read.plain(value) for value in condition("output_check") if value is not None)
    categories = dict.fromkeys(c for value in condition("prompt_categories") if isinstance(value, list) for c in value)
    pairs = [("device", distinct([manifest.get("device"), *condition("device")]))]
    pairs += [(name, distinct(read.axis(row, name) for row in rows)) for name in ("target", "dtype", "backend")]
    pairs += [
        ("weights", distinct(condition("weights"))),
        ("sampling", distinct(_sampling(row) for row in rows)),
        ("output tokens a request", distinct(read.axis(row, "output_len") for row in rows)),
        ("prompts", distinct(read.axis(row, "prompts") for row in rows)),
        ("prompt categories", distinct(categories)),
        ("seed", distinct(read.axis(row, "seed") for row in rows)),
        ("output against the AR arm", ", ".join(f"{count} {name}" for name, count in checks.items()) or "not recorded"),
        ("code revision", distinct([manifest.get("code_revision"), *(row.get("code_revision") for row in rows)])),
        ("environment", distinct([manifest.get("fingerprint"), *(row.get("environment") for row in rows)])),
        ("cells", ", ".join(f"{n} {name}" for name, n in Counter(read.status(row) for row in rows).items()) or "none"),
    ]
    return pairs


def _sampling(row: Row) -> str:
    names = ("temperature", "top_k", "top_p", "min_p")
    if not read.axis(row, "temperature"):
        return "greedy (T 0)"
    return " ".join(read.axis_text(name, read.axis(row, name)) for name in names if read.axis(row, name) is not None)


def roof_text(roof: Roof) -> str:
    return (
        f"{read.significant(roof.bytes_per_s, 'B/s')}, {read.significant(roof.flops_per_s, 'FLOP/s')} ({roof.dtype}),"
        f" knee at {read.significant(roof.knee)} FLOP/B; {roof.source}"
    )
