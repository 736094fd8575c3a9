"""The gate's answer in the terminal: worst first, the passes counted, not listed."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specbench.errors import ExitCode
from specbench.gate import words
from specbench.gate.text import change, counted, terminal, values
from specbench.gate.types import CaseVerdict, GateResult, Verdict

LINES = 40
_STYLES: dict[Verdict, str] = {
    "REGRESSION": "bold red",
    "INVALID": "red",
    "MISSING": "red",
    "INCONCLUSIVE": "yellow",
    "IMPROVEMENT": "green",
    "NEW": "cyan",
    "PASS": "dim",
}


def render_terminal(result: GateResult, lines: int = LINES) -> RenderableType:
    """Table of what deserves a look (at most `lines`, the rest counted), then sentences, the headline last: it is what
    a terminal still shows."""
    shown = [one for one in words.ordered(result.verdicts) if words.deserves_a_look(one)]
    parts: list[RenderableType] = []
    if shown:
        parts.append(_table(shown[:lines]))
    left = len(result.verdicts) - len(shown)
    if len(shown) > lines:
        parts.append(Text(f"... {counted(len(shown) - lines, 'more line')}; all are in --markdown, --json and --junit"))
    if left:
        parts.append(Text(f"{counted(left, 'verdict')} of PASS or IMPROVEMENT not listed", style="dim"))
    parts += [Text(f"{name}: {terminal(value)}", style="dim") for name, value in words.sides(result)]
    parts += [Text(f"- {terminal(line)}") for line in words.summary(result)]
    style = {ExitCode.DONE: "bold green", ExitCode.INCONCLUSIVE: "bold yellow"}.get(result.exit_code, "bold red")
    parts.append(Text(terminal(words.headline(result)), style=style))
    return Group(*parts)


def _table(shown: list[CaseVerdict]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("verdict", no_wrap=True)
    table.add_column("case", overflow="fold")
    table.add_column("metric", overflow="fold")
    table.add_column("baseline", justify="right", overflow="fold")
    table.add_column("candidate", justify="right", overflow="fold")
    table.add_column("change (interval)", justify="right", overflow="fold")
    table.add_column("why", overflow="fold")
    for one in shown:
        cells = (terminal(one.case_name, 90), terminal(one.metric, 40), *values(one), change(one))
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        table.add_row(verdict, *(Text(cell) for cell in (*cells, terminal(words.reason(one)))))
    return table
