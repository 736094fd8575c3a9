"""The gate's answer in Markdown, for a CI step summary or a comment: worst first, and within the place's limit.

GitHub takes step summaries of at most 1 MiB and comments of at most 65,536 characters; GitLab takes comments of
1,000,000. What does not fit is left out from the mildest end, and the text says how much of what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from specbench.gate import words
from specbench.gate.text import change, code, counted, markdown, values
from specbench.gate.types import WORST_FIRST, CaseVerdict, GateResult

Place = Literal["summary", "comment"]
LIMITS: dict[Place, int] = {"summary": 1_000_000, "comment": 65_000}
"""Bytes of UTF-8 for a step summary, characters (in UTF-16's units, as the service counts them) for a comment."""
_RESERVE = 1_000
_MARKS = {
    "REGRESSION": "🔴",
    "INVALID": "🟠",
    "MISSING": "🟠",
    "INCONCLUSIVE": "🟡",
    "IMPROVEMENT": "🟢",
    "NEW": "🔵",
    "PASS": "⚪",
}
_HEADER = (
    "| verdict | case | metric | baseline | candidate | change (interval) | why |\n|---|---|---|--:|--:|--:|---|\n"
)
_LONG = 400


def size(text: str, place: Place) -> int:
    """The text's length as the place counts it."""
    return len(text.encode("utf-8")) if place == "summary" else len(text.encode("utf-16-le")) // 2


def render_markdown(result: GateResult, place: Place = "summary") -> str:
    """The page; `size(page, place)` is below LIMITS[place] whatever the result holds."""
    return _fitted(result, place, LIMITS[place])


def _fitted(result: GateResult, place: Place, limit: int) -> str:
    head = _head(result)
    if size(head, place) > limit // 2:
        head = _cut(head, place, limit // 2) + "\n\n… the sentences above are cut: there are more in the JSON.\n\n"
    ordered = words.ordered(result.verdicts)
    look = [one for one in ordered if words.deserves_a_look(one)]
    rest = [one for one in ordered if not words.deserves_a_look(one)]
    room = limit - _RESERVE - size(head, place)
    shown, room = _lines(look, place, room)
    parts = [head]
    if look:
        parts.append(_HEADER + "".join(shown) + "\n")
    quiet, room = _lines(rest, place, room) if len(shown) == len(look) else ([], room)
    if quiet:
        opening = f"<details><summary>{counted(len(quiet), 'verdict')} without a cause for concern</summary>\n\n"
        parts.append(f"{opening}{_HEADER}{''.join(quiet)}\n</details>\n\n")
    left = look[len(shown) :] + rest[len(quiet) :]
    if left:
        parts.append(_left_out(left, place))
    return "".join(parts)


def _head(result: GateResult) -> str:
    mark = {"PASSED": "✅", "INCONCLUSIVE": "🟡"}.get(words.HEADLINES[result.exit_code], "❌")
    lines = "".join(f"- {markdown(line, _LONG * 4)}\n" for line in words.summary(result))
    table = "".join(f"| {name} | {code(value, _LONG)} |\n" for name, value in words.sides(result))
    return f"## {mark} specbench gate: {markdown(words.headline(result))}\n\n{lines}\n| | |\n|---|---|\n{table}\n"


def _lines(verdicts: Sequence[CaseVerdict], place: Place, room: int) -> tuple[list[str], int]:
    """As many lines as fit, and the room that is left after them."""
    lines: list[str] = []
    room -= size(_HEADER, place) + 200
    for one in verdicts:
        line = _line(one)
        if size(line, place) > room:
            break
        room -= size(line, place)
        lines.append(line)
    return lines, room


def _line(one: CaseVerdict) -> str:
    baseline, candidate = values(one)
    return (
        f"| {_MARKS[one.verdict]} {one.verdict} | {code(one.case_name, 160)} | {code(one.metric, 60)} | {baseline} | "
        f"{candidate} | {change(one)} | {markdown(words.reason(one), _LONG)} |\n"
    )


def _left_out(left: Sequence[CaseVerdict], place: Place) -> str:
    found = Counter(one.verdict for one in left)
    kinds = ", ".join(f"{found[verdict]:,} {verdict}" for verdict in WORST_FIRST if found[verdict])
    unit = "bytes" if place == "summary" else "characters"
    limit = f"{LIMITS[place]:,} {unit}"
    return (
        f"**Left out** to stay under {limit}: {counted(len(left), 'line')} ({kinds}). All are in the JSON and JUnit.\n"
    )


def _cut(text: str, place: Place, limit: int) -> str:
    """The longest run of whole lines within the limit."""
    kept: list[str] = []
    room = limit
    for line in text.splitlines(keepends=True):
        room -= size(line, place)
        if room < 0:
            break
        kept.append(line)
    return "".join(kept)
