"""Regret of depth auto against fixed depths, the schedule of a run, and the command that exports it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_rows import make_row

from specbench.errors import InputError
from specbench.report.series import best_depth_table, series_of
from specbench.report.tables_throttle import chosen_schedule, regret_table, regrets, schedules
from specbench.report.throttle_command import throttle
from specbench.result_row import ResultRow
from specbench.store import RowStore


def cell(depth: int, batch: int, speedup: float, half: float | None = 0.02, *, auto: bool = False, **axes: Any) -> dict:
    row = make_row(
        "ngram(3)", depth, batch, axes=axes | ({"depth_policy": "auto"} if auto else {"depth_policy": "fixed"})
    )
    bounds = (None, None) if half is None else (speedup - half, speedup + half)
    row["metrics"] |= {"speedup": speedup, "speedup_low": bounds[0], "speedup_high": bounds[1]}
    row["metrics"]["output_tokens_per_s"] = speedup * row["metrics"]["ar_output_tokens_per_s"]
    if half is None:
        row["metrics"]["null_reasons"] |= dict.fromkeys(("speedup_low", "speedup_high"), "too few prompts")
    if auto:
        row["metrics"] |= {"step_depth_mean": 2.5, "step_depth_share": [0.1] * (depth + 1)}
    return row


def test_regret_is_the_share_lost_to_the_best_fixed_depth() -> None:
    rows = [cell(1, 4, 1.3), cell(3, 4, 1.6), cell(5, 4, 1.5), cell(5, 4, 1.52, auto=True)]
    (one,) = regrets(rows)
    assert (one.best_depth, one.depths, one.mean_depth) == (3, (0, 1, 3, 5), 2.5)
    assert one.regret == pytest.approx(1 - 1.52 / 1.6)
    # Half widths of the logs: of 1.52 +- .02 and 1.6 +- .02, joined as independent.
    wide = math.hypot(math.log(1.54 / 1.5) / 2, math.log(1.62 / 1.58) / 2)
    assert one.low == pytest.approx(1 - 0.95 * math.exp(wide))
    assert one.high == pytest.approx(1 - 0.95 * math.exp(-wide))
    assert one.verdict == "loses"


def test_plain_decoding_is_a_depth_too() -> None:
    rows = [cell(1, 64, 0.8), cell(3, 64, 0.6), cell(3, 64, 0.99, auto=True)]
    (one,) = regrets(rows)
    assert (one.best_depth, one.best_speedup) == (0, 1.0)
    assert one.regret == pytest.approx(0.01)
    assert one.verdict == "as good"
    assert regrets([cell(3, 64, 0.8), cell(3, 64, 1.1, auto=True)])[0].verdict == "gains"


def test_only_cells_that_differ_in_depth_alone_are_compared() -> None:
    rows = [cell(3, 4, 1.6, context_len=512), cell(3, 8, 1.4), cell(3, 4, 1.5, auto=True)]
    assert regrets(rows) == []
    assert regret_table(rows).lines == ()
    rows.append(cell(1, 4, 1.7))
    (line,) = regret_table(rows).lines
    assert line[:5] == ("ngram(3)", "4", "1.50", "1", "1.70")
    assert line[-1] == "loses"


def test_without_an_interval_nothing_is_claimed() -> None:
    (one,) = regrets([cell(1, 4, 1.7), cell(3, 4, 1.2, None, auto=True)])
    assert (one.low, one.high, one.verdict) == (None, None, "unclear")
    assert "to" not in regret_table([cell(1, 4, 1.7), cell(3, 4, 1.2, None, auto=True)]).lines[0][5]


def test_an_adaptive_series_stands_beside_the_fixed_ones() -> None:
    """It never takes part in the best fixed depth, and a fixed series' name does not change."""
    rows = [cell(3, 4, 1.6), cell(3, 8, 1.3), cell(3, 4, 1.7, auto=True), cell(3, 8, 1.4, auto=True)]
    assert [one.label for one in series_of(rows)] == ["ngram(3) · depth 3", "ngram(3) · depth 3 · adaptive"]
    by_label = {(one.drafter_label, one.batch_size): one.speedup for one in best_depth_table(rows)}
    assert by_label[("ngram(3)", 4)] == 1.6
    assert by_label[("ngram(3) · adaptive", 4)] == 1.7


# ---- the schedule

RUN = [
    *(cell(depth, 1, s) for depth, s in ((1, 1.4), (3, 1.7), (5, 1.9))),
    *(cell(depth, 8, s) for depth, s in ((1, 1.2), (3, 1.3), (5, 1.25))),
    *(cell(depth, 32, s) for depth, s in ((1, 1.01), (3, 0.9), (5, 0.8))),
    *(cell(depth, 64, s) for depth, s in ((1, 0.9), (3, 0.8), (5, 0.7))),
    cell(5, 1, 3.0, auto=True),
]


def test_a_schedule_drafts_only_where_a_gain_is_clear() -> None:
    (one,) = schedules(RUN)
    assert one.table == {1: 5, 8: 3, 32: 0, 64: 0}
    assert one.unclear == (32,)


def test_predicted_cells_count_by_their_value() -> None:
    rows = [cell(depth, 4, s, None) for depth, s in ((1, 1.2), (3, 1.3))]
    assert schedules(rows)[0].table == {4: 0}
    for row in rows:
        row["conditions"]["predicted"] = True
    assert schedules(rows)[0].table == {4: 3}


def test_a_drafter_must_be_named_where_there_are_several() -> None:
    rows = [*RUN, make_row("early_exit(8)", 3, 1)]
    with pytest.raises(InputError, match="several drafters") as caught:
        chosen_schedule(rows, None)
    assert "early_exit(8)" in str(caught.value.remedy)
    assert chosen_schedule(rows, "ngram").drafter == "ngram(3)"
    with pytest.raises(InputError, match="no drafter is eagle"):
        chosen_schedule(rows, "eagle")
    with pytest.raises(InputError, match="no drafter is there"):
        chosen_schedule([], None)


def stored(directory: Path, rows: list[dict[str, Any]]) -> Path:
    with RowStore(directory) as store:
        for row in rows:
            store.append(ResultRow.model_validate(row))
    return directory


def test_the_command_writes_what_each_engine_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(tmp_path / "run", RUN)
    assert throttle(run, "vllm", None, None) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 16, 3], [17, 64, 0]],
    }
    assert "no gain is clear" in printed.err
    file = tmp_path / "adaptive.json"
    throttle(run, "sglang", "ngram(3)", file)
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "1": {"candidate_steps": [5]},
        "3": {"candidate_steps": [3]},
        "17": {"candidate_steps": [0]},
    }
    assert "--speculative-num-steps 5" in capsys.readouterr().err
    with pytest.raises(InputError, match="not known"):
        throttle(run, "trt", None, None)


def test_a_run_that_never_gains_has_no_schedule(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", [cell(1, 8, 0.9), cell(3, 8, 0.8)])
    with pytest.raises(InputError, match="gains by drafting"):
        throttle(run, "vllm", None, None)
