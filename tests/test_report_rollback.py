"""The rollback policies stand side by side on the page: the same cells under each policy, and nothing else compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbench.metrics import rollback_metrics
from specbench.report.figures_rollback import draw_rollback, rollback_groups, rollback_table
from specbench.report.html import Run, write_report
from specbench.report.plots import make_plots
from tests.report_rows import make_manifest, make_row

COSTS = {"compact": (40e-6, 69120.0, 0.25), "index": (9e-6, 0.0, 0.0), "realloc": (160e-6, 207360.0, 4.5)}


def row(policy: str, batch: int = 4, name: str = "early_exit(8)", **changes: Any) -> dict[str, Any]:
    made = make_row(name, 3, batch, axes={"rollback": policy, **changes})
    seconds, moved, pages = COSTS[policy]
    made["metrics"] |= {
        "rollback_s": seconds * batch,
        "kv_bytes_moved": moved * batch,
        "kv_allocator_calls": pages * batch,
    }
    return made


def test_a_group_holds_cells_that_differ_in_the_policy_alone() -> None:
    rows = [row(policy, batch) for batch in (1, 4) for policy in COSTS]
    rows += [row("index", 4, temperature=0.8), row("compact", 8), make_row("suffix", 3, 4, axes={"rollback": None})]
    groups = rollback_groups(rows)
    assert [(group.batch_size, sorted(group.cells)) for group in groups] == [(1, sorted(COSTS)), (4, sorted(COSTS))]
    assert all(group.cells["index"]["axes"]["temperature"] == 0.0 for group in groups)


def test_a_cell_without_a_valid_speedup_is_left_out() -> None:
    rows = [row("compact"), row("index"), row("realloc") | {"status": "failed", "metrics": None, "reason": "why"}]
    (group,) = rollback_groups(rows)
    assert sorted(group.cells) == ["compact", "index"]


def test_the_table_gives_units_and_zeros_as_zeros() -> None:
    lines = {line[3]: line for line in rollback_table([row(policy) for policy in ("realloc", "index", "compact")])}
    assert list(lines) == ["compact", "index", "realloc"]
    assert lines["compact"][4:7] == ("160 µs", "276 kB", "1.00")
    assert lines["index"][4:7] == ("36.0 µs", "0 B", "0.00")


def test_the_page_shows_the_policies_where_there_are_several(tmp_path: Path) -> None:
    rows = [row(policy, batch) for batch in (1, 4, 16) for policy in COSTS]
    plots = make_plots(rows, make_manifest(), tmp_path)
    assert "rollback" in [plot.name for plot in plots]
    page = write_report([Run(rows, make_manifest(), plots)], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "KV rollback policies, side by side" in page
    assert "207 kB" in page
    alone = make_plots([one for one in rows if one["axes"]["rollback"] == "index"], make_manifest(), tmp_path / "one")
    assert "rollback" not in [plot.name for plot in alone]


def test_the_plot_has_its_data_beside_it() -> None:
    drawn = draw_rollback([row(policy, batch) for batch in (1, 4) for policy in COSTS])
    assert len(drawn.data) == 6
    assert dict(zip(drawn.header, drawn.data[0], strict=True))["kv_bytes_moved"] == COSTS["compact"][1]
    assert "index moves 0 B and takes or gives back 0.00 pages" in drawn.alt


def test_rollback_metrics_are_means_of_the_window_or_null_with_a_reason() -> None:
    from types import SimpleNamespace

    import numpy as np

    trace: Any = SimpleNamespace(
        in_window=np.array([True, True, False]),
        kv_bytes_moved=np.array([10.0, 30.0, 1000.0]),
        kv_allocator_calls=np.array([1, 2, 50]),
        rollback_s=np.array([1e-3, 3e-3, 1.0]),
    )
    got = rollback_metrics([trace], "ar_")
    assert (got["ar_kv_bytes_moved"], got["ar_kv_allocator_calls"]) == (20.0, 1.5)
    assert got["ar_rollback_s"] == pytest.approx(2e-3)
    assert got["null_reasons"] == {}
    assert rollback_metrics([])["null_reasons"]["rollback_s"]
