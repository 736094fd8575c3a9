"""Text from outside made safe for where it goes, and numbers as people read them.

Model names, prompts, labels and paths come from files that others wrote. Each place has its own dangers: bidi marks
turn a line around in a terminal, a pipe ends a Markdown cell, an @ calls people into a pull request, U+0000 is no XML.
"""

from __future__ import annotations

import math
import re
import unicodedata

from specbench.definitions import DEFINITIONS
from specbench.gate.types import CaseVerdict

DASH = "–"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"})
"""Categories without a glyph: controls, format and bidi marks, lone surrogates, unassigned, line breaks."""
_MARKUP = re.compile(r"[&<>`|*~\[\]\\#@$]|(?<![a-z0-9])_|_(?![a-z0-9])|:(?=//)|(?<=www)\.", re.IGNORECASE)


def clean(value: object, limit: int | None = None) -> str:
    """One line without control, format or direction characters; cut to `limit` characters with an ellipsis."""
    text = str(value)
    if not text.isprintable():
        text = "".join(" " if unicodedata.category(sign) in _HIDDEN else sign for sign in text)
    text = " ".join(text.split()) or "(empty)"
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def markdown(value: object, limit: int | None = None) -> str:
    """The text so that Markdown, HTML in it, and a table's cell show it as it is: what could mean something is an
    entity, and entities never start markup."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", clean(value, limit))


def code(value: object, limit: int | None = None) -> str:
    """As `markdown`, in <code>: where mentions, issue numbers and bare addresses are left alone."""
    return f"<code>{markdown(value, limit)}</code>"


def terminal(value: object, limit: int | None = None) -> str:
    """As `clean`, and no order to the CI that reads the log: "::error::" and "##[error]" are such in GitHub's."""
    return clean(value, limit).replace("::", ": :").replace("##[", "# #[")


def unit_of(metric: str) -> str:
    """The metric's unit; "" for a pure number and for what definitions.py does not hold."""
    known = DEFINITIONS.get(metric)
    return "" if known is None or known.unit == "1" else known.unit


def number(value: float | None, unit: str = "") -> str:
    """Four significant digits, whole numbers as they are up to 15 digits; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif 1e-3 <= abs(value) < 1e6:
        text = f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    else:
        text = f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def percent(ratio: float | None) -> str:
    """A ratio as a change: 0.92 is "−8.0 %"."""
    if ratio is None or not math.isfinite(ratio):
        return DASH
    change = 100 * (ratio - 1)
    digits = 1 if abs(change) < 99.95 else 0
    text = f"{abs(change):,.{digits}f} %" if abs(change) < 1e6 else f"{abs(change):.2g} %"
    if float(f"{abs(change):.{digits}f}") == 0:
        return "±0.0 %" if change == 0 else f"{'−' if change < 0 else '+'}0.0 %"
    return f"{'−' if change < 0 else '+'}{text}"


def change(one: CaseVerdict) -> str:
    """The change with its interval: "−8.2 % (−9.9 to −6.4)"."""
    if one.ratio is None:
        return DASH
    if one.low is None or one.high is None:
        return percent(one.ratio)
    return f"{percent(one.ratio)} ({percent(one.low).removesuffix(' %')} to {percent(one.high).removesuffix(' %')})"


def values(one: CaseVerdict) -> tuple[str, str]:
    """Baseline and candidate in the metric's unit; on the whole case there are none."""
    unit = unit_of(one.metric)
    return number(one.baseline, unit), number(one.candidate, unit)


def counted(count: int, noun: str) -> str:
    """ "1 case", "1,200 cases"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
