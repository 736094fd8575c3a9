"""The gate's answer as JUnit XML, which CI systems show beside the tests: a suite for the scenario, a case for each
comparison, and one for the gate itself, so that an answer without comparisons is red too.

REGRESSION is a failure, INVALID and MISSING are errors, INCONCLUSIVE and NEW are skipped, PASS and IMPROVEMENT pass.
"""

from __future__ import annotations

from xml.etree import ElementTree

from specbench.errors import ExitCode
from specbench.gate import words
from specbench.gate.text import change, clean, values
from specbench.gate.types import CaseVerdict, GateResult, Verdict

_ELEMENTS: dict[Verdict, str] = {
    "REGRESSION": "failure",
    "INVALID": "error",
    "MISSING": "error",
    "INCONCLUSIVE": "skipped",
    "NEW": "skipped",
}
_GATE_ELEMENTS = {ExitCode.DONE: None, ExitCode.FAILED: "failure"}


def render_junit(result: GateResult) -> str:
    """The document, as text with its declaration. `clean` takes out every character that XML 1.0 forbids."""
    name = clean(result.scenario or "unnamed scenario")
    suite = ElementTree.Element("testsuite", name=f"specbench gate: {name}")
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in words.sides(result):
        ElementTree.SubElement(properties, "property", name=key, value=value)
    _gate(suite, name, result)
    for one in words.ordered(result.verdicts):
        _case(suite, name, one)
    totals = {"tests": len(suite.findall("testcase"))}
    for tag, total in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        totals[total] = len(suite.findall(f"testcase/{tag}"))
    root = ElementTree.Element("testsuites", name="specbench gate")
    for total, count in totals.items():
        suite.set(total, str(count))
        root.set(total, str(count))
    suite.set("time", "0")
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _gate(suite: ElementTree.Element, name: str, result: GateResult) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=name, name="gate", time="0")
    tag = _GATE_ELEMENTS.get(result.exit_code, "error")
    text = "\n".join(words.summary(result))
    if tag is None:
        ElementTree.SubElement(case, "system-out").text = text
    else:
        ElementTree.SubElement(
            case, tag, message=words.headline(result), type=words.HEADLINES[result.exit_code]
        ).text = text


def _case(suite: ElementTree.Element, name: str, one: CaseVerdict) -> None:
    title = words.title(one)
    case = ElementTree.SubElement(suite, "testcase", classname=name, name=title, time="0")
    baseline, candidate = values(one)
    text = f"{one.verdict}: {words.reason(one)}\nbaseline {baseline}, candidate {candidate}, change {change(one)}"
    tag = _ELEMENTS.get(one.verdict)
    if tag is None:
        ElementTree.SubElement(case, "system-out").text = text
        return
    found = ElementTree.SubElement(case, tag, message=f"{one.verdict}: {words.reason(one)}")
    if tag != "skipped":
        found.set("type", one.verdict)
        found.text = text
