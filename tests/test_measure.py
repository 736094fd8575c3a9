"""measure_case: what is timed, against what, and what a row may claim; fault rows A 93, B 18, B 29, C 38, E 55, E 56,
F 60, F 62, F 63, F 66."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bench_tools import (
    HIGH,
    STEP_S,
    TICK_S,
    ScriptedMonitor,
    ScriptedTarget,
    TickClock,
    blocks,
    measured,
    one_case,
    one_thread,
    tiny_target,
    wide,
    with_clock,
)

from specbench.bench import blocks as blocks_module
from specbench.bench import outputs as outputs_module
from specbench.bench.blocks import Block, speedup_interval
from specbench.bench.measure import Outcome, RoofsInUse
from specbench.bench.target import Target, blocks_of, prompt_id
from specbench.bench.telemetry import BlockConditions
from specbench.engine import decode as decode_module
from specbench.engine.decode import Engine
from specbench.engine.drafters.lookup import ReplayDrafter
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import Request
from specbench.engine.trace import Trace
from specbench.engine.verify import Proposal, Verification
from specbench.metrics import Roof
from specbench.result_row import SPEEDUP_CLAIMS, ResultRow, diagnostics_only
from specbench.stats import relative_halfwidth

NGRAM = {"kind": "ngram", "max_ngram": 3}
EARLY_EXIT = {"kind": "early_exit", "layers": 1}
FORCED = {"kind": "forced", "rates": [0.7, 0.5, 0.5]}
NONE = {"kind": "none"}
EVERY_DRAFTER = [NGRAM, EARLY_EXIT, FORCED, {"kind": "oracle"}, {"kind": "forced", "length": 2.5}]


LONG = {"num_prompts": 4, "output_len": 20}


class Ragged(ScriptedTarget):
    """Outputs that end at different times, at LONG's output_len at the latest."""

    script = (("a", "x", 20, 5), ("b", "y", 33, 17), ("c", "x", 16, 9), ("d", "y", 7, 2), ("e", "x", 12, 12))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wide(monkeypatch)
    with one_thread():
        yield


def assert_row(outcome: Outcome) -> ResultRow:
    """The outcome as a row: what may not be stored raises here."""
    metrics = outcome.metrics if outcome.status in ("ok", "invalid") else None
    if outcome.status == "invalid":
        metrics = diagnostics_only(outcome.metrics)
    return ResultRow.model_validate(
        {
            "key": "k",
            "case_hash": "c",
            "case_name": "n",
            "status": outcome.status,
            "reason": outcome.reason,
            "axes": {},
            "conditions": outcome.conditions,
            "metrics": metrics,
            "samples": outcome.samples,
            "warnings": outcome.warnings,
            "environment": "e",
            "code_revision": "r",
            "started_at": "t",
            "duration_s": 1.0,
        }
    )


class Recorder:
    """Every run of an engine: (arm, requests, trace), and the calls of verifier and drafter during it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, list[Request], Trace]] = []
        self.calls: list[tuple[str, str | None]] = []
        self.arm: str | None = None
        run, verify = Engine.run, decode_module.verify
        propose = ReplayDrafter.propose

        def recorded(engine: Engine, requests: Sequence[Request], fillers: Iterator[Request] | None = None) -> Trace:
            self.arm = "ar" if engine.drafter is None else "spec"
            trace = run(engine, requests, fillers)
            if fillers is not None:  # warm-up has none
                self.runs.append((self.arm, list(requests), trace))
            self.arm = None
            return trace

        def counted(*args: Any, **options: Any) -> list[Verification]:
            self.calls.append(("verify", self.arm))
            return verify(*args, **options)

        def proposed(*args: Any) -> list[Proposal]:
            self.calls.append(("propose", self.arm))
            return propose(*args)

        monkeypatch.setattr(Engine, "run", recorded)
        monkeypatch.setattr(decode_module, "verify", counted)
        monkeypatch.setattr(ReplayDrafter, "propose", proposed)

    def traces(self, arm: str) -> list[Trace]:
        return [trace for each, _, trace in self.runs if each == arm]


# ---- Two arms, the same prompts, in a seeded order


def test_the_ar_arm_has_neither_drafter_nor_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(monkeypatch)
    outcome = measured(one_case(), blocks(3))
    assert {arm for arm, _, _ in record.runs} == {"ar", "spec"}
    assert {arm for _, arm in record.calls} == {"spec"}
    assert {name for name, _ in record.calls} == {"verify", "propose"}
    assert all(trace.num_draft.sum() == 0 for trace in record.traces("ar"))
    assert outcome.status == "ok"


def test_a_case_without_drafter_is_the_ar_arm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(monkeypatch)
    outcome = measured(one_case(NONE), blocks(3))
    row = assert_row(outcome)
    assert [arm for arm, _, _ in record.runs] == ["ar"] * 3
    assert record.calls == []
    assert row.metrics is not None
    assert row.metrics["speedup"] is None
    assert row.metrics["null_reasons"]["speedup"] == "this is the AR arm itself"  # type: ignore[index,call-overload]
    assert row.metrics["output_tokens_per_s"] == row.metrics["ar_output_tokens_per_s"]
    assert row.conditions["output_check"] is None
    assert {block["arm"] for block in row.samples["blocks"]} == {"ar"}


def test_depth_0_is_a_speculative_engine_that_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other baseline: drafter and verifier are there, and cost what they cost."""
    with_clock(monkeypatch)
    record = Recorder(monkeypatch)
    row = assert_row(measured(one_case(depth=0)))
    assert row.status == "ok"
    assert {arm for _, arm in record.calls} == {"spec"}
    assert row.metrics is not None
    assert row.metrics["num_draft_tokens"] == row.metrics["num_drafts"] == 0
    assert row.metrics["acceptance_rate"] is None
    assert row.metrics["tokens_per_step"] == 1.0
    assert row.metrics["speedup"] == pytest.approx(1.0)
    assert row.conditions["output_check"] == "identical"


@pytest.mark.parametrize("drafter", EVERY_DRAFTER, ids=lambda d: d["kind"])
def test_both_arms_of_a_block_run_the_same_prompts(drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(monkeypatch)
    case = one_case(drafter, workload=LONG)
    outcome = measured(case, blocks(4), tiny_target(case, Ragged))
    assert outcome.status == "ok"
    assert len(record.runs) == 8
    for first, second in zip(record.runs[::2], record.runs[1::2], strict=True):
        assert {first[0], second[0]} == {"ar", "spec"}
        for one, other in zip(first[1], second[1], strict=True):
            assert (one.request_id, one.prompt_ids, one.stops) == (other.request_id, other.prompt_ids, other.stops)
    ids = {prompt_id(one.request_id) for _, requests, _ in record.runs for one in requests}
    assert ids == {"a", "b", "c", "d", "e"}, "blocks walk over all prompts"


def orders(outcome: Outcome) -> list[str]:
    found = [block["arm"] for block in sorted(outcome.samples["blocks"], key=lambda block: block["order"])]
    return [first + second for first, second in zip(found[::2], found[1::2], strict=True)]


def test_the_order_of_blocks_is_seeded_and_both_orders_occur() -> None:
    case = one_case(NGRAM)
    once = orders(measured(case, blocks(10)))
    assert once == orders(measured(case, blocks(10)))
    assert set(once) == {"arspec", "specar"}
    assert once != orders(measured(case, blocks(10, seed=1)))


def test_a_replaying_drafter_never_runs_before_the_output_it_replays_is_known() -> None:
    """Four prompts, two a block: the first two blocks have AR first, and later ones are free."""
    outcome = measured(one_case(), blocks(12))
    assert orders(outcome)[:2] == ["arspec"] * 2
    assert set(orders(outcome)[2:]) == {"arspec", "specar"}


def test_a_prompt_that_stands_twice_in_a_batch_is_one_prompt_of_the_interval() -> None:
    """Names may hold the mark that tells rounds apart."""

    class Named(ScriptedTarget):
        script = (("a", "x", 8, 4), ("a#1", "x", 9, 6), ("a#1#1", "y", 10, 5))

    case = one_case(NGRAM, batch_size=8)
    target = tiny_target(case, Named)
    requests = target.requests(case, target.prompts(case.workload))
    block = next(blocks_of(requests, 8, 2))
    assert len({one.request_id for one in block}) == 8
    assert [prompt_id(one.request_id) for one in block] == ["a", "a#1", "a#1#1"] * 2 + ["a", "a#1"]
    outcome = measured(case, blocks(3), target)
    assert outcome.status == "ok"
    assert [sample["id"] for sample in outcome.samples["prompts"]] == ["a", "a#1", "a#1#1"]


# ---- The window: all slots busy, and nothing else


@pytest.mark.parametrize("drafter", EVERY_DRAFTER, ids=lambda d: d["kind"])
def test_finished_requests_are_replaced_so_that_all_slots_stay_busy(
    drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recorder(monkeypatch)
    case = one_case(drafter, batch_size=3, workload=LONG)
    outcome = measured(case, blocks(3), tiny_target(case, Ragged))
    assert outcome.status == "ok"
    for _, requests, trace in record.runs:
        assert (trace.busy == 3).all()
        assert len(trace.requests) > len(requests), "slots were refilled"
        own = trace.requests[: len(requests)]
        assert all(done.finish_reason == "length" for done in own), "the block's own requests end by themselves"
        assert [len(done.token_ids) for done in own] == [one.stops.max_tokens for one in requests]
    assert outcome.metrics["effective_batch"] == outcome.metrics["ar_effective_batch"] == 3.0


def test_steps_without_a_full_batch_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without refill the ends are ragged; they are in no number of the row."""
    clock = with_clock(monkeypatch)
    monkeypatch.setattr(blocks_module.itertools, "cycle", lambda items: iter(()))
    record = Recorder(monkeypatch)
    case = one_case(EARLY_EXIT, batch_size=3, workload=LONG)
    outcome = measured(case, blocks(3), tiny_target(case, Ragged))
    assert clock.time_s > 0
    for arm, prefix in (("spec", ""), ("ar", "ar_")):
        traces = record.traces(arm)
        busy = np.concatenate([trace.busy for trace in traces])
        assert 0 < (busy < 3).sum() < len(busy), "the test has ragged ends"
        full = int((busy == 3).sum())
        tokens = sum(int(t.num_committed[t.busy[t.row_step] == 3].sum()) for t in traces)
        samples = [block for block in outcome.samples["blocks"] if block["arm"] == arm]
        assert sum(block["steps"] for block in samples) == full
        assert sum(block["tokens"] for block in samples) == tokens
        assert sum(block["wall_s"] for block in samples) == pytest.approx(full * STEP_S)
        assert outcome.metrics[f"{prefix}effective_batch"] == 3.0
        assert outcome.metrics[f"{prefix}output_tokens_per_s"] == pytest.approx(tokens / (full * STEP_S))
    assert outcome.metrics["num_steps"] == 3 * sum(b["steps"] for b in outcome.samples["blocks"] if b["arm"] == "spec")


def test_a_block_counts_tokens_and_seconds_of_its_window_only() -> None:
    case = one_case(NONE, batch_size=3, workload=LONG)
    target = tiny_target(case, Ragged)
    prompts = target.prompts(case.workload)
    target.bind(case, prompts)
    engine = Engine(target.decoder, target.store, None, batch_size=3, depth=0, now=TickClock())
    trace = engine.run(target.requests(case, prompts))
    sample = Block(4, "ar", 2, trace, BlockConditions(None, None, 0, ("thermal",))).sample()
    full = int((trace.busy == 3).sum())
    assert 0 < full < len(trace.busy)
    assert sample == {
        "order": 4,
        "arm": "ar",
        "block": 2,
        "tokens": 3 * full,
        "wall_s": pytest.approx(full * STEP_S),
        "steps": full,
        "valid": False,
        "marks": ["thermal"],
    }


def test_a_case_whose_outputs_end_with_prefills_token_has_nulls_with_reasons() -> None:
    """F 62, K 84: no decode step at all."""
    row = assert_row(measured(one_case(workload={"num_prompts": 4, "output_len": 1})))
    assert row.metrics is not None
    assert row.metrics["num_steps"] == 0
    for name in ("speedup", "output_tokens_per_s", "tpot_s", "acceptance_rate", "tokens_per_step"):
        assert row.metrics[name] is None
        assert row.metrics["null_reasons"][name]  # type: ignore[index,call-overload]


# ---- What the numbers are


@pytest.mark.parametrize("drafter", EVERY_DRAFTER, ids=lambda d: d["kind"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_rows_speedup_follows_from_its_raw_samples(drafter: dict[str, Any], batch_size: int) -> None:
    case = one_case(drafter, batch_size=batch_size, workload=LONG)
    outcome = measured(case, blocks(5), tiny_target(case, Ragged))
    metrics, samples = outcome.metrics, outcome.samples
    interval = speedup_interval(samples["prompts"])
    assert (metrics["speedup"], metrics["speedup_low"], metrics["speedup_high"]) == (
        interval.value,
        interval.low,
        interval.high,
    )
    assert metrics["speedup_low"] <= metrics["speedup"] <= metrics["speedup_high"]
    rates = {}
    for arm, prefix in (("spec", ""), ("ar", "ar_")):
        kept = [block for block in samples["blocks"] if block["arm"] == arm]
        tokens = sum(sample[f"{arm}_tokens"] for sample in samples["prompts"])
        seconds = sum(sample[f"{arm}_s"] for sample in samples["prompts"])
        assert tokens == sum(block["tokens"] for block in kept)
        assert seconds == pytest.approx(sum(block["wall_s"] for block in kept))
        assert metrics[f"{prefix}step_s"] == pytest.approx(seconds / sum(block["steps"] for block in kept))
        rates[arm] = tokens / seconds
        assert metrics[f"{prefix}output_tokens_per_s"] == pytest.approx(rates[arm])
        assert (
            metrics[f"{prefix}output_tokens_per_s_low"]
            <= metrics[f"{prefix}output_tokens_per_s"]
            <= metrics[f"{prefix}output_tokens_per_s_high"]
        )
    assert metrics["speedup"] == pytest.approx(rates["spec"] / rates["ar"])


@pytest.mark.parametrize("drafter", EVERY_DRAFTER, ids=lambda d: d["kind"])
def test_identities_of_a_row(drafter: dict[str, Any]) -> None:
    case = one_case(drafter, depth=3, batch_size=3, workload=LONG)
    outcome = measured(case, blocks(3), tiny_target(case, Ragged))
    metrics = outcome.metrics
    histogram = metrics["accepted_histogram"]
    assert sum(histogram) == metrics["num_drafts"] > 0
    assert sum(index * count for index, count in enumerate(histogram)) == metrics["num_accepted_tokens"]
    assert metrics["num_committed_tokens"] == metrics["num_accepted_tokens"] + metrics["num_steps"]  # no stop cuts
    assert metrics["acceptance_rate"] == metrics["num_accepted_tokens"] / metrics["num_draft_tokens"]
    assert metrics["tokens_per_step"] == metrics["num_committed_tokens"] / metrics["num_steps"]
    parts = [metrics[f"{part}_s"] for part in ("draft", "verify", "sample", "commit", "host")]
    assert sum(parts) == pytest.approx(metrics["step_s"])
    assert metrics["target_efficiency"] == metrics["ar_step_s"] / metrics["verify_s"]
    assert metrics["implied_overhead"] == metrics["tokens_per_step"] / metrics["speedup"] - 1
    assert metrics["acceptance_at"] == sorted(metrics["acceptance_at"], reverse=True)
    assert all(value is None or not isinstance(value, float) or math.isfinite(value) for value in metrics.values())
    offered, tried, accepted = (
        [
            sum(at)
            for at in itertools.zip_longest(*(one.get(name, []) for one in outcome.samples["prompts"]), fillvalue=0)
        ]
        for name in ("offered_at", "tried_at", "accepted_at")
    )
    assert sum(accepted) == metrics["num_accepted_tokens"]
    assert [a / b for a, b in zip(accepted, offered, strict=True)] == metrics["acceptance_at"]
    assert [a / b if b else None for a, b in zip(accepted, tried, strict=True)] == metrics["acceptance_conditional_at"]
    assert metrics["draft_cost_ratio"] == metrics["draft_s"] / metrics["ar_step_s"]
    has_passes = drafter["kind"] == "early_exit"
    assert (metrics["drafter_step_bytes"] is not None) == has_passes
    assert (metrics["draft_cost_ratio_roof"] is not None) == has_passes
    assert not has_passes or metrics["drafter_step_bytes"] < metrics["bytes"]
    assert metrics["drafter_params"] is outcome.conditions["drafter_weights"] is None
    assert metrics["null_reasons"]["drafter_params"]


def test_with_equal_steps_the_speedup_is_the_ratio_of_tokens_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle, depth 2, 1 + 9 tokens: three steps of three tokens against nine steps; no clock of the world is in it."""
    with_clock(monkeypatch)
    metrics = measured(one_case(workload={"num_prompts": 4, "output_len": 10})).metrics
    assert metrics["tokens_per_step"] == 3.0
    assert metrics["acceptance_rate"] == 1.0
    assert metrics["speedup"] == pytest.approx(3.0)
    assert [metrics["step_s"], metrics["ar_step_s"]] == pytest.approx([STEP_S, STEP_S])
    assert metrics["host_s"] == pytest.approx(2 * TICK_S)
    assert metrics["ar_output_tokens_per_s"] == pytest.approx(2 / STEP_S)
    assert metrics["ar_tpot_s"] == pytest.approx(STEP_S)
    assert metrics["tpot_s"] == pytest.approx(STEP_S / 3)


def test_the_prefill_is_in_no_decode_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """F 60: a prefill that takes 100 steps' time changes the time to the first token alone."""
    clock = with_clock(monkeypatch)
    prefill = Decoder.prefill

    def slow(decoder: Decoder, prompt: Sequence[int], slot: int) -> torch.Tensor:
        clock.time_s += 100 * STEP_S
        return prefill(decoder, prompt, slot)

    class Clocked(Target):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.store._now = clock

    monkeypatch.setattr(Decoder, "prefill", slow)
    case = one_case(NONE)
    metrics = measured(case, target=tiny_target(case, Clocked)).metrics
    assert metrics["output_tokens_per_s"] == pytest.approx(2 / STEP_S)
    assert metrics["tpot_s"] == pytest.approx(STEP_S)
    assert metrics["ttft_s"] == pytest.approx(100 * STEP_S + TICK_S)


def test_every_category_has_its_acceptance_row_and_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 93: two categories of two prompts in one cell; the label travels with each request."""

    class TwoKinds(ScriptedTarget):
        script = (("a", "coding", 12, 9), ("b", "qa", 9, 6), ("c", "coding", 14, 7), ("d", "qa", 8, 11))

    case = one_case(NGRAM, depth=3, workload=LONG)
    outcome = measured(case, blocks(4), tiny_target(case, TwoKinds))
    parts, metrics = outcome.metrics["by_category"], outcome.metrics
    assert list(parts) == outcome.conditions["prompt_categories"] == ["coding", "qa"]
    for name in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens"):
        assert sum(part[name] for part in parts.values()) == metrics[name]
    assert {sample["id"]: sample["category"] for sample in outcome.samples["prompts"]} == {
        "a": "coding",
        "b": "qa",
        "c": "coding",
        "d": "qa",
    }


def test_every_category_stands_in_every_block() -> None:
    class Sorted(ScriptedTarget):
        script = (("a", "x", 8, 4), ("b", "y", 8, 4), ("c", "z", 8, 4), ("d", "x", 8, 4), ("e", "y", 8, 4))

    case = one_case(NGRAM, batch_size=1)
    target = tiny_target(case, Sorted)
    source = blocks_of(target.requests(case, target.prompts(case.workload)), 1, 3)
    assert [len(next(source)) for _ in range(9)] == [3] * 9


@pytest.mark.parametrize(("drafter", "shape", "expected"), [({"kind": "oracle"}, False, True), (NGRAM, False, False)])
def test_synthetic_says_whether_acceptance_was_made(
    drafter: dict[str, Any], shape: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed outputs and dummy weights are synthetic; a lookup drafter on a real model is not."""
    case = one_case(drafter)
    target = tiny_target(case)
    assert measured(case, target=target).conditions["synthetic"] is True
    target.source = replace(target.source, kind="folder")
    assert measured(case, target=target).conditions["synthetic"] is expected


def test_a_sampled_case_names_what_its_output_check_is() -> None:
    outcome = measured(one_case(EARLY_EXIT, sampling={"temperature": 0.8}), blocks(3))
    assert outcome.status == "ok"
    assert outcome.conditions["output_check"] == "distribution"
    assert assert_row(outcome).metrics


# ---- When to stop


def test_blocks_stop_at_the_wanted_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal steps and full acceptance all prompts agree: the interval is a point once 3 prompts were seen."""
    with_clock(monkeypatch)
    outcome = measured(one_case(), blocks(2, 50, target_interval=0.01))
    assert outcome.metrics["stopped_by"] == "target"
    assert outcome.metrics["num_blocks"] == 2
    halfwidth = relative_halfwidth(speedup_interval(outcome.samples["prompts"]))
    assert halfwidth is not None
    assert halfwidth <= 0.01


def test_blocks_stop_at_the_most_that_is_allowed() -> None:
    outcome = measured(one_case(NGRAM), blocks(2, 5))
    assert outcome.metrics["stopped_by"] == "max_blocks"
    assert outcome.metrics["num_blocks"] == 5
    assert len(outcome.samples["blocks"]) == 10


@pytest.mark.parametrize(("budget_s", "expected"), [(0.5, 1), (2.5, 3)])
def test_blocks_stop_when_the_budget_is_spent(budget_s: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair takes a second here. The budget holds even below the least number of blocks, but one pair is measured."""

    class SlowPairs(ScriptedMonitor):
        def stop(self) -> BlockConditions:
            clock.time_s += 0.5
            return super().stop()

    clock = TickClock(0.0)
    monkeypatch.setattr(blocks_module.time, "perf_counter", clock)
    outcome = measured(one_case(NGRAM), blocks(9, 9, budget_s=budget_s), monitor=SlowPairs())
    assert outcome.metrics["stopped_by"] == "budget"
    assert outcome.metrics["num_blocks"] == expected
    assert ("only one block fitted the budget: the interval says little" in outcome.warnings) == (expected == 1)


# ---- Disturbed blocks


@pytest.mark.parametrize("place", range(4))
def test_a_disturbed_block_is_repeated_and_not_averaged(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disturbed block is ten times as slow; every number of the row is that of the undisturbed ones."""
    clock = with_clock(monkeypatch)
    marks = [("foreign load 40%",) if index == place else () for index in range(4)] + [()]
    case = one_case(EARLY_EXIT)
    calm = measured(case, monitor=ScriptedMonitor(clock=clock))
    clock.time_s = 0.0
    outcome = measured(case, monitor=ScriptedMonitor(marks, clock))
    found = outcome.samples["blocks"]
    assert [block["order"] for block in found] == list(range(6))
    assert [block["order"] for block in found if not block["valid"]] == [place]
    assert found[place]["marks"] == ["foreign load 40%"]
    assert found[place]["wall_s"] / found[place]["steps"] == pytest.approx(10 * STEP_S)
    assert [block["block"] for block in found] == ([0, 0, 0, 0, 1, 1] if place < 2 else [0, 0, 1, 1, 1, 1])
    assert outcome.metrics["num_blocks"] == 2
    volatile = {"peak_memory_bytes", "ttft_s", "ar_ttft_s", "end_to_end_tokens_per_s"}
    for name in calm.metrics.keys() - volatile:
        expected = calm.metrics[name]
        assert outcome.metrics[name] == (pytest.approx(expected) if isinstance(expected, float) else expected), name
    assert "1 of 6 blocks were disturbed (foreign load) and left out" in outcome.warnings
    assert calm.warnings == []


def test_a_case_without_one_undisturbed_block_fails_with_the_reason() -> None:
    """F 66: not an empty table, and no number from a throttled machine."""
    monitor = ScriptedMonitor([("foreign load 40%",), ("foreign load 41%",), ("thermal",)])
    outcome = measured(one_case(), blocks(2, 3), monitor=monitor)
    row = assert_row(outcome)
    assert row.status == "failed"
    expected = "none of 8 blocks was undisturbed: foreign load, thermal; run again when the machine is idle"
    assert row.reason == expected
    assert row.metrics is None


def test_a_first_pair_that_was_disturbed_is_repeated_even_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair takes a second, and there are 0.8: without one good pair the case would have no number at all."""

    class SlowPairs(ScriptedMonitor):
        def stop(self) -> BlockConditions:
            clock.time_s += 0.5
            return super().stop()

    clock = TickClock(0.0)
    monkeypatch.setattr(blocks_module.time, "perf_counter", clock)
    outcome = measured(one_case(NGRAM), blocks(5, budget_s=0.8), monitor=SlowPairs([("thermal",), ()]))
    assert (outcome.status, outcome.metrics["num_blocks"]) == ("ok", 1)


def test_repeats_of_disturbed_blocks_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowPairs(ScriptedMonitor):
        def stop(self) -> BlockConditions:
            clock.time_s += 0.5
            return super().stop()

    clock = TickClock(0.0)
    monkeypatch.setattr(blocks_module.time, "perf_counter", clock)
    outcome = measured(one_case(), blocks(2, 99, budget_s=2), monitor=SlowPairs([("thermal",)]))
    assert outcome.status == "failed"
    assert clock.time_s <= 6


# ---- A number is printed only if the work behind it was right


def in_the_speculative_arm(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """{"now": True} while a speculative engine runs, so that a fault can be put into that arm alone."""
    state = {"now": False}
    run = Engine.run

    def watched(engine: Engine, *args: Any) -> Trace:
        state["now"] = engine.drafter is not None
        try:
            return run(engine, *args)
        finally:
            state["now"] = False

    monkeypatch.setattr(Engine, "run", watched)
    return state


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = decode_module.verify

    def gullible(proposals: Sequence[Proposal], *args: Any, **options: Any) -> list[Verification]:
        out = []
        for proposal, verdict in zip(proposals, verify(proposals, *args, **options), strict=True):
            drafts = tuple(int(token) for token in proposal.tree.tokens)
            tokens = (*drafts, verdict.next_token)
            out.append(replace(verdict, accepted=len(drafts), path=tuple(range(len(drafts))), tokens=tokens))
        return out

    monkeypatch.setattr(decode_module, "verify", gullible)


def wipe_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """C 38: a rollback that takes all the history with it."""
    state, commit = in_the_speculative_arm(monkeypatch), PagedKVCache.commit

    def wiping(kv: PagedKVCache, slot: int, num_tokens: int) -> None:
        commit(kv, slot, num_tokens)
        if state["now"] and num_tokens < 3:
            kv.k_pool[:, torch.from_numpy(kv.block_table[slot])] = 0

    monkeypatch.setattr(PagedKVCache, "commit", wiping)


def keep_a_rejected_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rejected draft stays in the cache, and what follows stands one place too far."""
    state, forward = in_the_speculative_arm(monkeypatch), Decoder.forward

    def shifted(decoder: Decoder, batch: ForwardBatch, num_layers: int | None = None) -> torch.Tensor:
        if state["now"] and len(batch.query_lens) == 2 and (batch.context_lens > 131).all():
            batch = replace(batch, positions=batch.positions + 1)
        return forward(decoder, batch, num_layers)

    monkeypatch.setattr(Decoder, "forward", shifted)


def cut_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter by one token, all of which are right: equality by zip would pass."""
    run = Engine.run

    def cut(engine: Engine, requests: Sequence[Request], fillers: Iterator[Request] | None = None) -> Trace:
        if engine.drafter is not None and fillers is not None:
            requests = [replace(one, stops=replace(one.stops, max_tokens=7)) for one in requests]
        return run(engine, requests, fillers)

    monkeypatch.setattr(Engine, "run", cut)


FAULTS = [accept_everything, wipe_the_history, keep_a_rejected_token, cut_the_output]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_cell_with_wrong_output_is_invalid_and_has_no_speedup(
    fault: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"shape": "tiny-llama-test", "weights": "dummy", "dtype": dtype}
    case = one_case({"kind": "forced", "length": 2.0}, target=target)
    assert measured(case).status == "ok"
    fault(monkeypatch)
    outcome = measured(case)
    row = assert_row(outcome)
    assert row.status == "invalid"
    assert row.conditions["output_check"] == "diverged"
    assert row.reason is not None
    assert "parts from AR at token" in row.reason
    assert row.metrics is not None
    assert not [name for name in SPEEDUP_CLAIMS if row.metrics.get(name) is not None]
    assert len(row.samples["blocks"]) == 2, "a wrong cell is not measured further"


def test_a_truncated_output_is_named_with_both_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_the_output(monkeypatch)
    outcome = measured(one_case())
    assert outcome.reason == "request random-0#0 parts from AR at token 7: 7 tokens where AR has 8"


def test_a_fault_that_appears_late_takes_the_earlier_speedup_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verify, calls = decode_module.verify, 0

    def late(proposals: Sequence[Proposal], *args: Any, **options: Any) -> list[Verification]:
        nonlocal calls
        calls += 1
        verdicts = verify(proposals, *args, **options)
        if calls < 20:
            return verdicts
        return [replace(v, tokens=(*v.tokens[:-1], (v.next_token + 1) % 256)) for v in verdicts]

    monkeypatch.setattr(decode_module, "verify", late)
    outcome = measured(one_case(NGRAM), blocks(50))
    assert outcome.status == "invalid"
    assert outcome.metrics["num_blocks"] > 2
    assert assert_row(outcome).metrics


def test_a_disturbed_block_whose_output_is_wrong_is_still_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    case = one_case({"kind": "forced", "length": 2.0})
    outcome = measured(case, monitor=ScriptedMonitor([("thermal",)]))
    assert outcome.status == "invalid"
    assert assert_row(outcome).samples["blocks"][0]["marks"] == ["thermal"]


def test_a_cache_that_leaks_a_token_a_step_is_a_failure_and_no_lack_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped row would be reused for ever."""
    state, commit = in_the_speculative_arm(monkeypatch), PagedKVCache.commit

    def leaking(kv: PagedKVCache, slot: int, num_tokens: int) -> None:
        held = int(kv._held[slot]) * 16
        spare = int(state["now"] and num_tokens < 3 and kv.lengths[slot] + num_tokens < held)
        commit(kv, slot, num_tokens + spare)

    monkeypatch.setattr(PagedKVCache, "commit", leaking)
    with pytest.raises(Exception, match="the cache filled up while decoding") as caught:
        measured(one_case({"kind": "forced", "length": 1.0}))
    assert type(caught.value).__name__ == "SpecbenchError"


@pytest.mark.parametrize(("gap", "expected"), [(1e-7, "near_tie"), (0.2, "near_tie"), (1.0, "diverged")])
def test_a_near_tie_is_told_from_a_fault_by_the_margin(
    gap: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B 29: bf16 arms part. Where AR's logit leads by 1e-7 at a logit of 20 it is rounding; by 1.0 it is a fault."""
    accept_everything(monkeypatch)

    def logits_after(target: Target, ids: tuple[int, ...]) -> torch.Tensor:
        logits = torch.full((256,), 20.0, dtype=torch.float64)
        for (prompt, *_), tokens in target.references.items():
            if ids[: len(prompt)] == prompt:  # type: ignore[arg-type]
                logits[tokens[len(ids) - len(prompt)]] += gap  # type: ignore[arg-type]
        return logits

    monkeypatch.setattr(outputs_module, "logits_after", logits_after)
    target = {"shape": "tiny-llama-test", "weights": "dummy", "dtype": "bf16"}
    row = assert_row(measured(one_case({"kind": "forced", "length": 2.0}, target=target)))
    assert row.conditions["output_check"] == expected
    assert row.metrics is not None
    text = f"their logits are 0 and {gap:.3g} below the best, and rounding in bf16 explains 0.2"
    if expected == "near_tie":
        assert row.status == "ok"
        assert row.metrics["speedup"] is not None
        assert all(note.startswith("near tie: request random-") for note in row.warnings)
        assert text in row.warnings[0]
    else:
        assert row.status == "invalid"
        assert row.metrics.get("speedup") is None
        assert row.reason is not None
        assert text in row.reason


@pytest.mark.parametrize("where", ["prefill", "ar", "spec"])
def test_a_request_that_fails_makes_the_cell_invalid_and_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B 18 in a timed cell: NaN logits of one request beside a good one, from the first token or some steps later."""
    state, forward = in_the_speculative_arm(monkeypatch), Decoder.forward

    def broken(decoder: Decoder, batch: ForwardBatch, num_layers: int | None = None) -> torch.Tensor:
        logits = forward(decoder, batch, num_layers)
        late = int(batch.context_lens.min()) > 130 and state["now"] == (where == "spec")
        if (where == "prefill" and not batch.context_lens.any()) or (where != "prefill" and late):
            logits[-1] = float("nan")
        return logits

    monkeypatch.setattr(Decoder, "forward", broken)
    case = one_case(NGRAM)
    target = tiny_target(case)
    row = assert_row(measured(case, target=target))
    assert {len(tokens) for tokens in target.references.values()} <= {8}, "no part of an output is kept to be replayed"
    assert row.status == "invalid"
    assert row.reason is not None
    assert row.reason.startswith("request random-")
    assert "no distribution" in row.reason
    assert row.conditions["output_check"] is None
    assert row.metrics is not None
    assert [bool(row.metrics["ar_num_failed_requests"]), bool(row.metrics["num_failed_requests"])] == [
        where != "spec",
        where != "ar",
    ]
    assert len(row.samples["blocks"]) == 2


@pytest.mark.parametrize("prefix", ["", "ar_"])
def test_a_rate_over_105_percent_of_the_measured_limit_is_impossible(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F 63: 104 % can be noise, 106 % means that work was skipped or time was not counted; in either arm."""
    clock, state = with_clock(monkeypatch), in_the_speculative_arm(monkeypatch)
    forward = Decoder.forward

    def slow(decoder: Decoder, *args: Any) -> torch.Tensor:
        clock.time_s += (prefix == "ar_") * state["now"]
        return forward(decoder, *args)

    monkeypatch.setattr(Decoder, "forward", slow)
    case = one_case(EARLY_EXIT)
    reached = measured(case).metrics[f"{prefix}achieved_flops_per_s"]

    def limited(share: float) -> Outcome:
        clock.time_s = 0.0
        return measured(case, roofs=RoofsInUse(HIGH, None, Roof(reached / share, 1e18)))

    assert limited(1.04).status == "ok"
    outcome = limited(1.06)
    assert outcome.status == "invalid"
    assert outcome.reason is not None
    assert f"{prefix}roof_fraction_measured is 106.0%, over 105%" in outcome.reason
    assert assert_row(outcome).metrics


def test_a_rate_over_the_datasheet_is_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    with_clock(monkeypatch)
    outcome = measured(one_case(), roofs=RoofsInUse(HIGH, Roof(1.0, 1.0), HIGH))
    assert outcome.status == "invalid"
    assert "roof_fraction_datasheet" in (outcome.reason or "")


def test_unknown_roofs_are_null_and_no_fault() -> None:
    row = assert_row(measured(one_case(), roofs=RoofsInUse(None, None, None)))
    assert row.status == "ok"
    assert row.metrics is not None
    assert row.metrics["roof_fraction_measured"] is row.metrics["roof_fraction_datasheet"] is None


# ---- Nothing leaks from case to case


def counts(outcome: Outcome) -> dict[str, Any]:
    names = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens", "accepted_histogram")
    return {name: outcome.metrics[name] for name in names} | {
        "blocks": [(block["arm"], block["tokens"], block["steps"]) for block in outcome.samples["blocks"]]
    }


@pytest.mark.parametrize("drafter", EVERY_DRAFTER, ids=lambda d: d["kind"])
def test_a_case_counts_the_same_alone_and_after_others(drafter: dict[str, Any]) -> None:
    """E 56: cells A, B against B alone. For replayed outputs the order of arms may differ, the counts may not."""
    case = one_case(drafter, depth=3, batch_size=2)
    alone = counts(measured(case, blocks(4)))
    target = tiny_target(case)
    for other in (one_case(FORCED, depth=1, batch_size=4), one_case(NGRAM, depth=5, batch_size=1)):
        measured(other, blocks(2), target)
    after = counts(measured(case, blocks(4), target))
    alone["blocks"], after["blocks"] = sorted(alone["blocks"]), sorted(after["blocks"])
    assert after == alone


def test_a_case_that_broke_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_case(EARLY_EXIT)
    alone = counts(measured(case, blocks(3)))
    target = tiny_target(case)
    forward, calls = Decoder.forward, 0

    def failing(decoder: Decoder, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("device lost")
        return forward(decoder, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            measured(one_case(EARLY_EXIT, depth=4, batch_size=3), target=target)
    assert counts(measured(case, blocks(3), target)) == alone


def test_peak_memory_is_the_cases_own() -> None:
    """What an earlier case held for a moment is not in the next one's row."""
    chunk, count = 60_000, 7_000
    case = one_case(NGRAM)
    target = tiny_target(case)
    before = measured(case, target=target).metrics["peak_memory_bytes"]
    held = [bytearray(chunk) for _ in range(count)]
    # Allocated above the rest and kept, it leaves a hole in the heap that `free` alone does not give back.
    tip = bytearray(chunk)
    del held
    after = measured(case, target=target).metrics["peak_memory_bytes"]
    assert len(tip) == chunk
    assert after < before + chunk * count // 2


def test_where_a_case_spends_its_time_is_told() -> None:
    seconds = measured(one_case()).seconds
    assert set(seconds) == {"prefill", "warm-up", "measured", "total"}
    assert sum(seconds.values()) - seconds["total"] <= seconds["total"]
