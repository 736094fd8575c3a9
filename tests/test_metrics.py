"""Metrics on small traces whose values are known by hand; fault rows A 1, 2, 3, 5, 7, 8, 10, 93 and F 58 to 62."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench import metrics as m
from specbench.definitions import DEFINITIONS
from specbench.engine.trace import RequestTrace, Trace

# One row: (request index, l, a, c), or (request index, proposed, l, a, c).
Row = tuple[int, ...]


def request(name: str = "r0", tokens: int = 1, **changes: Any) -> RequestTrace:
    base = RequestTrace(name, "qa", 4, tuple(range(tokens)), "length", prefill_s=0.5)
    return replace(base, **changes)


def trace(
    steps: list[list[Row]],
    requests: list[RequestTrace] | None = None,
    step_s: float | list[float] = 0.1,
    in_window: list[bool] | None = None,
    draft_depth: list[int] | None = None,
    **changes: Any,
) -> Trace:
    """A consistent trace: parts of a step are fixed shares of it, end_s has no prefill unless given."""
    rows = [(index, *row) for index, step in enumerate(steps) for row in step]
    full = [(s, r, *([rest[0], *rest] if len(rest) == 3 else rest)) for s, r, *rest in rows]
    columns = np.array(full, dtype=np.int64).reshape(-1, 6).T
    num_requests = int(columns[1].max()) + 1 if len(full) else 0
    if requests is None:
        emitted = np.bincount(columns[1], columns[5], num_requests).astype(int)
        requests = [request(f"r{index}", 1 + count) for index, count in enumerate(emitted)]
    seconds = np.broadcast_to(np.asarray(step_s, dtype=np.float64), len(steps)).copy()
    values: dict[str, Any] = {
        "batch_size": max([len(step) for step in steps], default=1),
        "step_s": seconds,
        "draft_s": 0.2 * seconds,
        "verify_s": 0.5 * seconds,
        "sample_s": 0.1 * seconds,
        "commit_s": 0.05 * seconds,
        "host_s": 0.15 * seconds,
        "end_s": np.cumsum(seconds),
        "busy": np.array([len(step) for step in steps], dtype=np.int64),
        "in_window": np.array(in_window if in_window is not None else [True] * len(steps), dtype=bool),
        "flops": np.full(len(steps), 100.0),
        "bytes": np.full(len(steps), 50.0),
        "draft_flops": np.full(len(steps), 20.0),
        "draft_bytes": np.full(len(steps), 10.0),
        "query_tokens": np.ones(len(steps), dtype=np.int64),
        "row_step": columns[0],
        "row_request": columns[1],
        "num_proposed": columns[2],
        "num_draft": columns[3],
        "draft_depth": columns[3] if draft_depth is None else np.array(draft_depth, dtype=np.int64),
        "num_accepted": columns[4],
        "num_committed": columns[5],
        "context_len": np.full(len(full), 8, dtype=np.int64),
        "rollback_s": 0.01 * seconds,
        "kv_bytes_moved": np.full(len(steps), 64, dtype=np.int64),
        "kv_allocator_calls": np.ones(len(steps), dtype=np.int64),
        "requests": tuple(requests),
    }
    return Trace(**(values | changes))


EMPTY = trace([])


def strict_json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


# ---- acceptance


def test_bonus_token_is_counted_once() -> None:  # fault 1
    got = m.acceptance_metrics([trace([[(0, 3, 3, 4)], [(0, 3, 0, 1)], [(0, 3, 1, 2)]])])
    assert got["num_draft_tokens"] == 9
    assert got["acceptance_rate"] == 4 / 9
    assert got["tokens_per_step"] == 7 / 3
    assert got["acceptance_length"] == 1 + 4 / 3
    assert got["accepted_histogram"] == [1, 1, 0, 1]


def test_leading_run_only() -> None:  # fault 2
    assert m.leading_run([True, False, True, True]) == 1
    assert m.leading_run([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).tolist() == [1, 4, 0]
    got = m.acceptance_metrics([trace([[(0, 4, 1, 2)]])])
    assert (got["num_accepted_tokens"], got["num_committed_tokens"]) == (1, 2)
    assert got["acceptance_at"] == [1, 0, 0, 0]


def test_tree_metrics_have_their_own_names() -> None:  # fault 3
    got = m.acceptance_metrics([trace([[(0, 8, 3, 4)]], draft_depth=[3])])
    assert got["draft_efficiency"] == 3 / 8
    assert got["depth_acceptance_rate"] == 1.0
    assert got["acceptance_rate"] is None
    assert "tree" in got["null_reasons"]["acceptance_rate"]
    assert got["acceptance_at"] == [1, 1, 1]
    assert got["accepted_histogram"] == [0, 0, 0, 1]


def test_tree_metrics_equal_chain_metrics_on_a_chain() -> None:
    steps: list[list[Row]] = [[(0, 3, 2, 3)], [(0, 2, 0, 1)]]
    assert m.acceptance_metrics([trace(steps)]) == m.acceptance_metrics([trace(steps, draft_depth=[3, 2])])


def test_discarded_drafts_are_not_rejected() -> None:  # fault 5: minimum draft 2, drafts of 1 and 3
    got = m.acceptance_metrics([trace([[(0, 1, 0, 0, 1)], [(0, 3, 3, 3, 4)]])])
    assert got["acceptance_rate"] == 1.0
    assert (got["num_drafts"], got["num_draft_tokens"], got["num_discarded_tokens"]) == (1, 3, 1)


def test_empty_step_accepts_nothing() -> None:  # fault 7
    assert m.accepted_from_emitted([0, 1, 4, 5], [3, 3, 3, 3]).tolist() == [0, 0, 3, 3]
    got = m.acceptance_metrics([trace([[(0, 3, 0, 0)]])])
    assert (got["num_accepted_tokens"], got["acceptance_rate"], got["tokens_per_step"]) == (0, 0.0, 0.0)
    with pytest.raises(AssertionError, match="accepted"):
        m.acceptance_metrics([trace([[(0, 3, -1, 0)]])])


ROOF = m.Roof(1000.0, 100.0)


def everything(traces: list[Trace]) -> m.Metrics:
    return m.merge_metrics(
        m.acceptance_metrics(traces),
        m.latency_metrics(traces),
        m.step_split(traces),
        m.throughput(traces),
        m.end_to_end(traces),
        m.roofline_metrics(traces, ROOF, None),
        m.draft_metrics(traces),
        m.looping_share(traces),
        m.step_split(traces, "ar_"),
        m.throughput(traces, "ar_"),
        m.latency_metrics(traces, "ar_"),
        m.roofline_metrics(traces, ROOF, ROOF, "ar_"),
    )


NO_WINDOW = trace([[(0, 3, 1, 2)]], in_window=[False])
NO_DRAFTS = trace([[(0, 0, 0, 1)], [(0, 0, 0, 1)]])


@pytest.mark.parametrize("traces", [[], [EMPTY], [EMPTY, EMPTY], [NO_WINDOW], [NO_DRAFTS]])
def test_nothing_to_measure_gives_null_with_a_reason(traces: list[Trace]) -> None:  # faults 7 and 84
    got = everything(traces)
    strict_json(got)
    strict_json(m.metrics_by_category(traces))
    nulls = {name for name, value in got.items() if value is None}
    assert nulls == set(got["null_reasons"])
    assert all(got["null_reasons"].values())
    assert {"acceptance_rate", "acceptance_length", "roof_fraction_datasheet"} <= nulls
    assert got["num_drafts"] == 0
    assert got["acceptance_at"] == got["accepted_histogram"] == []


def test_prefill_token_is_not_a_step() -> None:  # fault 8: 8 tokens, 3 verify steps
    got = m.acceptance_metrics([trace([[(0, 3, 1, 2)], [(0, 3, 1, 2)], [(0, 3, 2, 3)]], [request(tokens=8)])])
    assert got["tokens_per_step"] == 7 / 3


def test_depth_does_not_change_tokens_per_step() -> None:  # fault 10: always 2 accepted
    got = [m.acceptance_metrics([trace([[(0, k, 2, 3)]] * 5)]) for k in (2, 4, 8)]
    assert [one["acceptance_rate"] for one in got] == [1, 0.5, 0.25]
    assert [one["tokens_per_step"] for one in got] == [3, 3, 3]


def test_acceptance_by_category_and_in_total() -> None:  # fault 93: 2 categories of 2 prompts in one cell
    requests = [request(f"r{i}", 9, category="coding" if i % 2 else "qa") for i in range(4)]
    got = [trace([[(0, 2, 2, 3), (1, 2, 0, 1), (2, 2, 1, 2), (3, 4, 1, 2)]], requests)]
    by_category = m.metrics_by_category(got)
    assert list(by_category) == ["coding", "qa"]
    assert by_category["qa"]["acceptance_rate"] == 3 / 4
    assert by_category["coding"]["acceptance_rate"] == 1 / 6
    assert [one["num_requests"] for one in by_category.values()] == [2, 2]
    assert m.acceptance_metrics(got)["acceptance_rate"] == 4 / 10
    for name in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens"):
        assert sum(one[name] for one in by_category.values()) == m.acceptance_metrics(got)[name]


def test_a_prompt_repeated_in_two_blocks_is_one_request() -> None:
    block = trace([[(0, 2, 2, 3)], [(0, 2, 0, 1)]])
    assert m.metrics_by_category([block, block])["qa"]["num_requests"] == 1


def test_a_category_whose_requests_never_ran_is_still_listed() -> None:
    got = m.metrics_by_category([trace([], [request(category="writing", tokens=0)])])
    assert got["writing"]["num_requests"] == 0
    assert got["writing"]["tokens_per_step"] is None
    assert "tokens_per_step" in got["writing"]["null_reasons"]


def test_positions_and_conditional_rates() -> None:
    got = m.acceptance_metrics([trace([[(0, 3, 3, 4)], [(0, 3, 1, 2)], [(0, 1, 1, 2)], [(0, 2, 0, 1)]])])
    assert got["acceptance_at"] == [3 / 4, 1 / 3, 1 / 2]
    assert got["acceptance_conditional_at"] == [3 / 4, 1 / 2, 1.0]


def test_a_position_never_reached_is_null_with_a_reason() -> None:
    got = m.acceptance_metrics([trace([[(0, 3, 0, 1)]])])
    assert got["acceptance_conditional_at"] == [0.0, None, None]
    assert got["null_reasons"]["acceptance_conditional_at"]


def test_pooled_and_by_request_lengths_differ() -> None:
    got = m.acceptance_metrics([trace([[(0, 2, 2, 3)], [(0, 2, 2, 3)], [(0, 2, 2, 3), (1, 2, 0, 1)]])])
    assert got["acceptance_length"] == 1 + 6 / 4
    assert got["acceptance_length_by_request"] == 2.0


def test_window_excludes_steps_with_idle_slots() -> None:
    one = [trace([[(0, 2, 2, 3)], [(0, 2, 0, 1)]], in_window=[True, False])]
    assert m.acceptance_metrics(one)["num_steps"] == 1
    assert m.acceptance_metrics(one, window_only=False)["num_steps"] == 2
    assert m.throughput(one)["output_tokens_per_s"] == pytest.approx(30)


drafts = st.integers(0, 6).flatmap(
    lambda proposed: st.integers(0, proposed).flatmap(
        lambda drafted: st.integers(0, drafted).flatmap(
            lambda accepted: st.integers(1, accepted + 1).map(lambda c: (proposed, drafted, accepted, c)),
        )
    )
)
blocks = st.lists(
    st.lists(st.lists(drafts, min_size=1, max_size=4).map(lambda rows: [(i, *row) for i, row in enumerate(rows)])),
    max_size=3,
)


@settings(max_examples=80, deadline=None)
@given(blocks)
def test_identities(steps: list[list[list[Row]]]) -> None:
    traces = [trace(block) for block in steps]
    for one in traces:
        one.check()
    got = everything(traces)
    strict_json(got)
    histogram = got["accepted_histogram"]
    assert sum(histogram) == got["num_drafts"]
    assert sum(i * count for i, count in enumerate(histogram)) == got["num_accepted_tokens"]
    rows = [row for block in steps for step in block for row in step]
    cut_off = sum(a + 1 - c for *_, a, c in rows)
    assert got["num_committed_tokens"] == got["num_accepted_tokens"] + got["num_steps"] - cut_off
    assert got["num_discarded_tokens"] + got["num_draft_tokens"] == sum(row[1] for row in rows)
    assert (got["acceptance_rate"] is None) == (got["num_draft_tokens"] == 0)
    if got["acceptance_rate"] is not None:
        assert 0 <= got["acceptance_rate"] <= 1
        assert got["acceptance_at"][0] == got["acceptance_conditional_at"][0]
    costs = m.prompt_costs(*traces)
    assert sum(cost.tokens for cost in costs) == got["num_committed_tokens"]
    assert sum(cost.seconds for cost in costs) == pytest.approx(sum(one.step_s.sum() for one in traces))
    assert sum(part["num_steps"] for part in m.metrics_by_category(traces).values()) == got["num_steps"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20), min_size=1))
def test_running_product_of_conditional_rates_is_the_curve(blocks_: list[list[tuple[int, int]]]) -> None:
    """For drafts of one length the curve is the product of the conditional rates, up to the first zero."""
    steps = [[(0, 4, max(pair), max(pair) + 1)] for block in blocks_ for pair in block]
    got = m.acceptance_metrics([trace(steps)])
    product = 1.0
    for share, conditional in zip(got["acceptance_at"], got["acceptance_conditional_at"], strict=True):
        product *= conditional if conditional is not None else 0.0
        assert share == pytest.approx(product)
    assert got["acceptance_length"] == pytest.approx(1 + sum(got["acceptance_at"]))


# ---- throughput and latency


def test_tokens_are_counted_not_chunks() -> None:  # fault 58: 4 chunks of 4 tokens in 1 s
    got = m.throughput([trace([[(0, 3, 3, 4)]] * 4, step_s=0.25)])
    assert got["output_tokens_per_s"] == 16


def test_equal_tokens_are_counted_as_ids() -> None:  # fault 59: 7 space tokens
    one = trace([[(0, 0, 0, 1)]] * 6, [request(token_ids=(220,) * 7)], step_s=0.5)
    assert m.end_to_end([one])["end_to_end_tokens_per_s"] == 7 / 3.0


def test_decode_time_holds_no_prefill() -> None:  # fault 60: prefill .5 s, 16 steps of .025 s
    one = trace([[(0, 0, 0, 1)]] * 16, step_s=0.025, end_s=0.5 + 0.025 * np.arange(1, 17))
    latency = m.latency_metrics([one])
    assert 1 / latency["tpot_s"] == pytest.approx(40)
    assert m.throughput([one])["output_tokens_per_s"] == pytest.approx(40)
    assert m.end_to_end([one])["end_to_end_tokens_per_s"] == pytest.approx(17 / 0.9)
    assert latency["ttft_s"] == 0.5
    assert latency["itl_p50_s"] == pytest.approx(0.025)


def test_request_without_tokens_failed() -> None:  # fault 62: outputs of 8, 0 and 8 tokens
    requests = [request("r0", 8, prefill_s=0.1), request("r1", 0, prefill_s=9.0), request("r2", 8, prefill_s=0.3)]
    got = m.latency_metrics([trace([[(0, 6, 6, 7), (2, 6, 6, 7)]], requests, step_s=0.7)])
    assert (got["num_requests"], got["num_failed_requests"]) == (3, 1)
    assert got["ttft_s"] == pytest.approx(0.2)
    assert got["tpot_s"] == pytest.approx(0.1)
    assert got["itl_p50_s"] is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_tpot_of_zero_or_one_token_is_null(tokens: int) -> None:  # fault 62
    got = m.latency_metrics([trace([], [request(tokens=tokens)])])
    assert got["tpot_s"] is None
    assert got["null_reasons"]["tpot_s"]
    assert (got["ttft_s"] is None) == (tokens == 0)


def test_a_failed_request_gives_no_time() -> None:
    requests = [request("r0", 3), request("r1", 3, error="NaN in row 1, step 0", prefill_s=0.0)]
    steps: list[list[Row]] = [[(0, 0, 0, 1), (1, 0, 0, 1)], [(0, 0, 0, 1)], [(1, 0, 0, 1)]]
    got = m.latency_metrics([trace(steps, requests, step_s=[0.1, 0.1, 9.0])])
    assert (got["num_failed_requests"], got["ttft_s"]) == (1, 0.5)
    assert got["tpot_s"] == pytest.approx(0.1)
    assert got["itl_p99_s"] == pytest.approx(0.1)


def test_gaps_stay_within_a_request_and_the_window() -> None:
    steps: list[list[Row]] = [[(0, 0, 0, 1), (1, 0, 0, 1)], [(1, 0, 0, 1)], [(0, 0, 0, 1), (1, 0, 0, 1)]]
    got = m.latency_metrics([trace(steps, step_s=[1.0, 2.0, 4.0])])
    assert got["itl_p50_s"] == pytest.approx(4.0)  # gaps 6 (request 0), 2 and 4 (request 1)
    assert got["itl_p99_s"] == pytest.approx(4.0 + 0.98 * 2.0)
    cut = m.latency_metrics([trace(steps, step_s=[1.0, 2.0, 4.0], in_window=[True, False, True])])
    assert cut["itl_p50_s"] == pytest.approx(6.0)  # request 1's commit outside the window breaks both of its gaps


def test_latency_does_not_join_requests_of_two_blocks() -> None:
    block = trace([[(0, 0, 0, 1)], [(0, 0, 0, 1)]], step_s=0.5)
    assert m.latency_metrics([block, block])["itl_p99_s"] == pytest.approx(0.5)
    assert m.latency_metrics([block, block])["num_requests"] == 2


def test_step_parts_add_up() -> None:
    got = m.step_split([trace([[(0, 0, 0, 1)]] * 3, step_s=[0.1, 0.2, 0.3], in_window=[True, True, False])], "ar_")
    assert got["ar_step_s"] == pytest.approx(0.15)
    assert got["ar_verify_s"] == pytest.approx(0.075)
    parts = ("ar_draft_s", "ar_verify_s", "ar_sample_s", "ar_commit_s", "ar_host_s")
    assert sum(got[part] for part in parts) == pytest.approx(got["ar_step_s"])


def test_throughput_is_a_ratio_of_sums() -> None:
    fast, slow = trace([[(0, 3, 3, 4)]], step_s=0.1), trace([[(0, 3, 0, 1)]], step_s=0.9)
    assert m.throughput([fast, slow])["output_tokens_per_s"] == pytest.approx(5.0)
    assert m.throughput([trace([[(0, 0, 0, 1), (1, 0, 0, 1)]])])["effective_batch"] == 2


def test_prompt_costs_share_a_step_equally_and_join_blocks() -> None:
    steps: list[list[Row]] = [[(0, 3, 3, 4), (1, 3, 0, 1)], [(1, 3, 1, 2)], [(0, 3, 3, 4)]]
    one = trace(steps, step_s=[0.2, 0.3, 9.0], in_window=[True, True, False])
    costs = {cost.request_id: cost for cost in m.prompt_costs(one, one)}
    assert (costs["r0"].tokens, costs["r0"].seconds) == (8, pytest.approx(0.2))
    assert (costs["r1"].tokens, costs["r1"].seconds) == (6, pytest.approx(0.8))
    assert m.prompt_costs(EMPTY) == m.prompt_costs() == []


# ---- roofline


def test_roof_fraction_on_both_sides_of_the_knee() -> None:
    bound_by_memory = m.roofline_metrics([trace([[(0, 0, 0, 1)]], step_s=1.0)], ROOF, None)
    assert bound_by_memory["intensity"] == 2.0
    assert bound_by_memory["achieved_bytes_per_s"] == 50.0
    assert bound_by_memory["roof_fraction_measured"] == 100 / 200
    bound_by_compute = m.roofline_metrics(
        [trace([[(0, 0, 0, 1)]], step_s=1.0, bytes=np.array([5.0]))], ROOF, ROOF, "x_"
    )
    assert bound_by_compute["x_roof_fraction_measured"] == bound_by_compute["x_roof_fraction_datasheet"] == 100 / 1000


def test_roofline_means_are_over_steps_in_the_window() -> None:
    steps: list[list[Row]] = [[(0, 0, 0, 1)]] * 3
    got = m.roofline_metrics(
        [trace(steps, step_s=2.0, flops=np.array([10.0, 30.0, 1e9]), in_window=[True, True, False])], ROOF, None
    )
    assert (got["flops"], got["bytes"], got["intensity"]) == (20, 50, 0.4)
    assert got["achieved_flops_per_s"] == 10


@pytest.mark.parametrize("roof", [None, m.Roof(None, 1.0), m.Roof(1.0, None), m.Roof(0.0, 1.0)])
def test_unknown_roof_gives_no_fraction(roof: m.Roof | None) -> None:
    got = m.roofline_metrics([trace([[(0, 0, 0, 1)]])], roof, None)
    assert got["roof_fraction_measured"] is None
    assert "unknown" in got["null_reasons"]["roof_fraction_measured"]
    assert got["intensity"] == 2.0


@pytest.mark.parametrize("flops", [np.nan, 0.0])
def test_unknown_cost_gives_no_place_on_the_roofline(flops: float) -> None:
    got = m.roofline_metrics([trace([[(0, 0, 0, 1)]], flops=np.array([flops]))], ROOF, ROOF)
    strict_json(got)
    assert got["flops"] is got["achieved_flops_per_s"] is got["roof_fraction_measured"] is None
    assert "cost" in got["null_reasons"]["roof_fraction_measured"]


def test_more_than_the_roof_is_impossible() -> None:
    assert m.impossible_reason({"roof_fraction_measured": 1.04, "roof_fraction_datasheet": None}) is None
    assert "measured" in str(m.impossible_reason({"roof_fraction_measured": 1.06}))
    assert "104.0%" in str(m.impossible_reason({"roof_fraction_datasheet": 1.04}))
    assert "ar_roof" in str(m.impossible_reason({"ar_roof_fraction_datasheet": 1.01}))


# ---- derived


def test_derived_metrics() -> None:
    got = m.derived_metrics({"ar_step_s": 0.010, "verify_s": 0.015, "tokens_per_step": 3.0, "speedup": 2.0})
    assert got["target_efficiency"] == pytest.approx(2 / 3)
    assert got["implied_overhead"] == 0.5
    missing = m.derived_metrics({"speedup": None, "tokens_per_step": 3.0})
    assert missing["target_efficiency"] is missing["implied_overhead"] is None
    names = {"target_efficiency", "implied_overhead", "draft_cost_ratio", "draft_cost_ratio_roof"}
    assert set(missing["null_reasons"]) == names


# ---- what drafting costs


def test_draft_passes_are_counted_over_steps_of_the_window() -> None:
    costs = {"draft_flops": np.array([10.0, 30.0, 999.0]), "draft_bytes": np.array([4.0, 8.0, 999.0])}
    steps = [[(0, 3, 1, 2)], [(0, 3, 0, 1)], [(0, 3, 0, 1)]]
    got = m.draft_metrics([trace(steps, in_window=[True, True, False], **costs)])
    assert (got["drafter_step_flops"], got["drafter_step_bytes"]) == (20.0, 6.0)


@pytest.mark.parametrize("in_window", [True, False])
def test_no_draft_pass_is_null_and_never_zero(in_window: bool) -> None:
    zeros = {"draft_flops": np.zeros(1), "draft_bytes": np.zeros(1)}
    got = m.draft_metrics([trace([[(0, 3, 1, 2)]], in_window=[in_window], **zeros)])
    assert got["drafter_step_flops"] is got["drafter_step_bytes"] is None
    reason = got["null_reasons"]["drafter_step_bytes"]
    assert reason == ("drafting made no forward pass" if in_window else m.NO_WINDOW)


def test_draft_cost_in_ar_steps_measured_and_from_the_roof() -> None:
    known = {"num_drafts": 7, "draft_s": 0.004, "ar_step_s": 0.010}
    known |= {"drafter_step_flops": 8.0, "drafter_step_bytes": 1.0, "ar_flops": 4.0, "ar_bytes": 20.0}
    got = m.derived_metrics(known, m.Roof(flops_per_s=2.0, bytes_per_s=5.0))
    assert got["draft_cost_ratio"] == pytest.approx(0.4)
    assert got["draft_cost_ratio_roof"] == 1.0  # drafting is bound by compute, 8 / 2; the AR step by memory, 20 / 5
    for roof in (None, m.Roof(None, 5.0), m.Roof(2.0, None)):
        assert m.derived_metrics(known, roof)["draft_cost_ratio_roof"] is None
    nothing = m.derived_metrics(known | {"num_drafts": 0})
    assert nothing["draft_cost_ratio"] is None
    assert nothing["null_reasons"]["draft_cost_ratio"] == "nothing was drafted"


def test_acceptance_by_prompt_sums_to_acceptance_by_position() -> None:
    """Two requests over two traces; a shorter draft, a step without a draft, and one outside the window."""
    requests = [request("a", 9), request("b", 9, category="coding")]
    first = trace([[(0, 3, 2, 3), (1, 3, 0, 1)], [(0, 2, 2, 3), (1, 0, 0, 1)]], requests)
    second = trace([[(0, 3, 3, 4)], [(0, 3, 3, 4)]], [request("a", 9)], in_window=[True, False])
    one, two = m.prompt_acceptance(first, second)
    assert one == ("a", "qa", [3, 3, 2], [3, 3, 2], [3, 3, 1])
    assert two == ("b", "coding", [1, 1, 1], [1, 0, 0], [0, 0, 0])
    whole = m.acceptance_metrics([first, second])
    offered, tried, accepted = (np.add(a, b) for a, b in zip(one[2:], two[2:], strict=True))
    assert whole["acceptance_at"] == pytest.approx((accepted / offered).tolist())
    assert whole["acceptance_conditional_at"] == pytest.approx((accepted / tried).tolist())
    assert whole["depth_acceptance_rate"] == accepted.sum() / offered.sum()
    assert m.prompt_acceptance(NO_DRAFTS, NO_WINDOW, EMPTY) == []


@pytest.mark.parametrize(("joules", "tokens"), [(None, 10), (0.0, 10), (5.0, 0)])
def test_missing_energy_is_null(joules: float | None, tokens: int) -> None:
    got = m.energy_metrics(joules, tokens)
    assert got["joules_per_token"] is None
    assert got["joules_per_token_reason"] == got["null_reasons"]["joules_per_token"] != ""


def test_energy_per_token() -> None:
    got = m.energy_metrics(200.0, 50)
    assert (got["joules_per_token"], got["joules_per_token_reason"]) == (4.0, None)
    assert m.energy_metrics(None, 5, "no NVML")["joules_per_token_reason"] == "no NVML"


def test_merge_refuses_to_compute_a_metric_twice() -> None:
    with pytest.raises(AssertionError, match="step_s"):
        m.merge_metrics(m.step_split([]), m.step_split([]))


# ---- loops


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        ([*range(50), *([1, 2, 3] * 11)], True),
        ([*range(50), *([1, 2, 3] * 10)], False),
        (list(range(16)) * 4, True),
        (list(range(16)) * 3, False),
        (list(range(17)) * 8, False),
        ([*([1, 2] * 40), 9], False),
        (list(range(200)), False),
        ([], False),
    ],
)
def test_is_looping(ids: list[int], expected: bool) -> None:
    assert m.is_looping(ids) is expected


def test_looping_share_leaves_out_failures_and_looks_before_the_stop_token() -> None:
    requests = [
        request("a", token_ids=(5,) * 40),
        request("b", token_ids=(*((5,) * 40), 2), finish_reason="stop"),
        request("c", token_ids=tuple(range(40))),
        request("d", token_ids=()),
    ]
    assert m.looping_share([trace([], requests)])["looping_share"] == 2 / 3


# ---- the registry


def test_every_metric_is_defined_with_unit_and_formula() -> None:
    one = [trace([[(0, 2, 1, 2)]])]
    names = (
        set(everything(one))
        | set(m.derived_metrics({}))
        | set(m.energy_metrics(1.0, 1))
        | set(m.metrics_by_category(one)["qa"])
    )
    names |= {
        "drafter_params",
        "speedup",
        "speedup_low",
        "speedup_high",
        "num_blocks",
        "peak_memory_bytes",
        "ar_output_tokens_per_s_low",
    }
    assert names - {"null_reasons", "joules_per_token_reason"} <= set(DEFINITIONS)
    for name, definition in DEFINITIONS.items():
        assert definition.name == name
        assert all(definition), f"{name} has an empty field"
        assert name.endswith("_s") <= (definition.unit in ("s", "tokens/s", "FLOP/s", "B/s")), name
    assert not {"ar_speedup", "ar_num_blocks", "ar_target_efficiency", "ar_drafter_step_bytes"} & set(DEFINITIONS)


def test_metrics_import_no_room_above() -> None:
    tree = ast.parse(Path(inspect.getfile(m)).read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    below = ("specbench.errors", "specbench.traces")
    assert not [name for name in imported if name.startswith("specbench") and name not in below]
