"""Whatever JSON a row or a manifest holds: there is a page, or an error that a person can act on; never a crash."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_rows import make_manifest, make_row, make_rows

from specbench.errors import SpecbenchError
from specbench.report import html
from specbench.report.html import Run, render
from specbench.report.versus import sides_of, versus

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**12),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["", "</script>", "1e3", "\u202ex", "\x00", "漢", "a\nb", "="]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
ROW = make_row("suffix", 3, 1)
METRICS, AXES = sorted(ROW["metrics"]), sorted(ROW["axes"])
MANIFEST = sorted(make_manifest())
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def changed(value: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(value) | changes


@SLOW
@given(
    st.dictionaries(st.sampled_from(METRICS), VALUES, max_size=6),
    st.dictionaries(st.sampled_from(AXES), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(MANIFEST), VALUES, max_size=2),
    st.sampled_from(["ok", "invalid", "failed", "skipped"]),
)
def test_a_page_or_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    metrics: dict[str, Any],
    axes: dict[str, Any],
    manifest: dict[str, Any],
    status: str,
) -> None:
    monkeypatch.setattr(html, "draw_answers", lambda series: None)
    rows = make_rows(("suffix", "mtp"), (1, 3), (1, 4), faults=False)
    kept = status in ("ok", "invalid")
    rows[1] |= {"status": status, "reason": None if status == "ok" else "why"}
    rows[1] |= {
        "metrics": changed(rows[1]["metrics"], metrics) if kept else None,
        "axes": changed(rows[1]["axes"], axes),
    }
    told = make_manifest() | manifest
    try:
        text = render([Run(rows, told)])
    except SpecbenchError:
        return
    assert text.endswith("</html>")
    for block in text.split('<script type="application/json"')[1:]:
        json.loads(block[block.index(">") + 1 : block.index("</script>")], parse_constant=pytest.fail)
    found = versus(sides_of([(rows, told), (make_rows(("suffix",), (1,), (1, 4), faults=False), make_manifest())]))
    assert found.sentence
