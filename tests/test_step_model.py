"""The step model by hand, in its limits against the closed forms, and the published values of facts/roofline.md."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.breakeven import closed_form_batch, expected_tokens, find_crossing
from specbench.roofline.cost import Cost, forward_cost
from specbench.roofline.draft_cost import DraftShape, drafter_shape
from specbench.roofline.hardware import hardware
from specbench.roofline.model import Roof, critical_tokens, step_time_s
from specbench.roofline.shapes import ModelSpec, named_shape
from specbench.roofline.staircase import Staircase, StairPoint
from specbench.roofline.step_model import (
    ASSUMED_GPU,
    IDEAL,
    Efficiency,
    StepModel,
    StepTimes,
    chosen_rows,
)

LLAMA = named_shape("llama-3.1-8b")
H100 = Roof(989.4e12, 3350e9)
TINY = ModelSpec("tiny", "llama", 2, 16, 24, 4, 2, 4, 100, True)
SMALL_ROOF = Roof(1e9, 1e8)


def test_an_op_class_takes_the_longer_of_compute_and_memory() -> None:
    model = StepModel(TINY, SMALL_ROOF, Efficiency(compute=0.5, memory=0.25))
    assert model.seconds(Cost(1e9, 1.0)) == pytest.approx(2.0)
    assert model.seconds(Cost(1.0, 1e8)) == pytest.approx(4.0)
    assert model.seconds(Cost(0.0, 0.0)) == 0.0
    joined = model.with_efficiency(replace(model.efficiency, overlap=1.0))
    assert joined.seconds(Cost(1e9, 1e8)) == pytest.approx(6.0)
    halfway = model.with_efficiency(replace(model.efficiency, overlap=2.0))
    assert halfway.seconds(Cost(1e9, 0.5e8)) == pytest.approx(math.hypot(2.0, 2.0))


def test_a_step_by_hand() -> None:
    engine = Efficiency(pass_s=1e-3, step_s=2e-3, token_s=3e-3, request_s=4e-3, draft_pass_s=5e-3, draft_token_s=6e-3)
    model = StepModel(TINY, SMALL_ROOF, engine, "fp32")
    draft = DraftShape("early_exit", num_layers=1)
    found = model.step(2, 10, 3, draft)
    verify = step_time_s(forward_cost(TINY, [4, 4], [10, 10], weight_dtype="fp32"), SMALL_ROOF)
    assert found.verify_s == pytest.approx(verify + 1e-3)
    assert found.sample_s == pytest.approx(8 * 3e-3 + 3 * 4 * 8 * 100 / 1e8)
    assert found.host_s == pytest.approx(2e-3 + 2 * 4e-3)
    passes = sum(
        step_time_s(forward_cost(TINY, [1, 1], [10 + i] * 2, weight_dtype="fp32", num_layers=1), SMALL_ROOF)
        for i in range(3)
    )
    assert found.draft_s == pytest.approx(passes + 3 * 5e-3 + 2 * 3 * 6e-3)
    assert found.total_s == pytest.approx(sum((found.draft_s, found.verify_s, found.sample_s, found.host_s)))


def test_fault_55_depth_0_is_the_pure_ar_step() -> None:
    """A disabled mode drafts nothing and pays for nothing."""
    model = StepModel(LLAMA, H100, ASSUMED_GPU)
    draft = drafter_shape("eagle3", LLAMA)
    off = model.step(8, 512, 0, draft)
    assert off == model.ar_step(8, 512)
    assert off.draft_s == 0
    cell = model.cell(8, 512, 0, draft, AcceptanceCurve((0.9,)))
    assert cell.value == pytest.approx(1.0)
    assert cell.tokens_per_step == 1


def test_fault_57_break_even_from_what_verifying_really_costs() -> None:
    """AR 10 ms, verify 15 ms, 4 drafts of 1 ms: 1.9 tokens a step break even, whatever the roofline says."""
    ar, step = StepTimes(0, 10e-3, 0, 0), StepTimes(4e-3, 15e-3, 0, 0)
    assert step.total_s / ar.total_s == pytest.approx(1.9)
    flat = StepModel(TINY, Roof(1e15, 1e15), IDEAL, "fp32")
    slow = tuple(StairPoint(m, n, k, 10e-3 / 9 if m == 1 else 15e-3 / 9) for n, k, _ in flat.matrices for m in (1, 5))
    measured = replace(flat, staircase=Staircase("fp32", slow))
    assert measured.ar_s(1, 0) == pytest.approx(10e-3, rel=1e-3)
    assert measured.step(1, 0, 4).verify_s / measured.ar_s(1, 0) == pytest.approx(1.5, rel=1e-3)


def test_fault_54_a_predicted_series_is_bracketed_by_its_grid() -> None:
    """AR 10 ms, spec 10 + 1.5 B ms, 2.5 tokens: it crosses at 10, and a grid of 8 and 16 says (8, 16]."""
    speedup = {batch: 2.5 * 10 / (10 + 1.5 * batch) for batch in (8, 16)}
    assert find_crossing(list(speedup), list(speedup.values())).describe().startswith("(8, 16]")


def test_the_staircase_stands_where_it_was_measured_and_nowhere_else() -> None:
    model = StepModel(TINY, SMALL_ROOF, IDEAL, "fp32")
    times = {shape: 1e-3 * (1 + place) for place, shape in enumerate((n, k) for n, k, _ in model.matrices)}
    points = tuple(StairPoint(m, n, k, time) for (n, k), time in times.items() for m in (2, 4))
    stairs = replace(model, staircase=Staircase("fp32", points))
    layers = 2 * (1e-3 + 2e-3 + 3e-3 + 4e-3)
    cost = stairs.target_cost(2, 1, 0)
    rest = sum(model.seconds(one) for name, one in cost.by_class().items() if name not in ("linear", "head"))
    assert stairs.stairs_s(2) == pytest.approx((layers, 5e-3))
    assert stairs.target_pass_s(2, 1, 0) == pytest.approx(layers + 5e-3 + rest)
    assert stairs.stairs_s(5) is None
    assert stairs.target_pass_s(5, 1, 0) == pytest.approx(model.target_pass_s(5, 1, 0))
    halved = stairs.with_efficiency(Efficiency(stairs=2.0))
    assert halved.stairs_s(2) == pytest.approx((layers / 2, 2.5e-3))
    with pytest.raises(InputError, match="bf16"):
        replace(model, weight_dtype="bf16", staircase=Staircase("fp32", points))


def test_mean_rows_lie_between_whole_ones() -> None:
    model = StepModel(TINY, SMALL_ROOF, IDEAL, "fp32")
    points = tuple(StairPoint(m, n, k, m * 1e-3) for n, k, _ in model.matrices for m in (1, 2, 3))
    stairs = replace(model, staircase=Staircase("fp32", points))
    low, middle, high = (stairs.stairs_s(rows) for rows in (2, 2.25, 3))
    assert low is not None
    assert middle is not None
    assert high is not None
    assert middle[0] == pytest.approx(0.75 * low[0] + 0.25 * high[0])


@pytest.mark.parametrize(
    ("context", "batch", "ar_ms", "ratio4", "ratio8"),
    [
        (0, 1, 4.482, 1.001, 1.003),
        (0, 128, 4.726, 1.665, 3.330),
        (1024, 64, 7.167, 1.051, 1.455),
        (8192, 32, 14.80, 1.012, 1.029),
    ],
)
def test_verify_over_ar_of_llama_on_h100(context: int, batch: int, ar_ms: float, ratio4: float, ratio8: float) -> None:
    """facts/roofline.md §2.4: its time is of weights and KV alone, ours counts activations and logits too."""
    model = StepModel(LLAMA, H100)
    ar = model.target_pass_s(batch, 1, context)
    assert ar * 1e3 == pytest.approx(ar_ms, rel=0.03)
    assert model.target_pass_s(batch, 4, context) / ar == pytest.approx(ratio4, rel=0.04)
    assert model.target_pass_s(batch, 8, context) / ar == pytest.approx(ratio8, rel=0.05)


def linear_only(spec: ModelSpec) -> ModelSpec:
    """MLPs so wide that activations vanish beside weights, and no attention or vocabulary to speak of."""
    wide = 1 << 17
    return replace(
        spec,
        num_layers=1,
        hidden_size=wide,
        intermediate_size=wide,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=64,
    )


@pytest.mark.parametrize("gamma", [1, 3, 5, 7])
@pytest.mark.parametrize("alpha", [0.6, 0.7, 0.8])
def test_in_the_linear_limit_the_crossing_is_the_closed_form(alpha: float, gamma: int) -> None:
    """B_be = T*(A - γc)/(γ+1), with free drafts (c = 0), where linear layers alone count."""
    model = StepModel(linear_only(LLAMA), H100)
    tokens = expected_tokens(alpha, gamma)
    closed = closed_form_batch(critical_tokens(H100, 2), tokens, gamma, 0.0)
    assert closed is not None
    curve = AcceptanceCurve.constant(alpha)
    batches = list(range(1, 301))
    series = [model.speedup(batch, 0, gamma, None, curve) for batch in batches]
    crossing = find_crossing(batches, series)
    assert crossing.kind == "bracket"
    assert crossing.high_batch == pytest.approx(closed, rel=0.02)


def test_context_raises_the_crossing() -> None:
    """The MagicDec effect: reading KV is shared by all rows of a request."""
    model = StepModel(LLAMA, H100, ASSUMED_GPU)
    curve, draft = AcceptanceCurve.constant(0.7), drafter_shape("eagle3", LLAMA)

    def crossing(context: int) -> float:
        batches = list(range(4, 400, 4))
        found = find_crossing(batches, [model.speedup(b, context, 5, draft, curve) for b in batches])
        return math.inf if found.high_batch is None else found.high_batch

    assert crossing(128) < crossing(512) < crossing(2048)


def test_a_less_efficient_engine_crosses_earlier() -> None:
    curve = AcceptanceCurve.constant(0.7)
    fast, slow = StepModel(LLAMA, H100), StepModel(LLAMA, H100, ASSUMED_GPU)
    assert slow.speedup(100, 128, 5, None, curve) < fast.speedup(100, 128, 5, None, curve)


def test_lookups_and_replays_run_no_model() -> None:
    model = StepModel(LLAMA, H100, replace(ASSUMED_GPU, lookup_s=1e-5))
    assert model.draft_s(8, 512, 3, DraftShape("ngram")) == pytest.approx(8e-5)
    assert model.draft_s(8, 512, 3, DraftShape("oracle")) == 0
    assert model.draft_s(8, 512, 3, None) == 0


def test_rows_that_a_drafter_chooses_from() -> None:
    assert chosen_rows(drafter_shape("eagle", LLAMA), 4) == 4
    assert chosen_rows(drafter_shape("eagle2", LLAMA), 4) == 1 + 3 * 10
    assert chosen_rows(drafter_shape("eagle", LLAMA, levels=(1, 3, 2)), 2) == 4
    assert chosen_rows(drafter_shape("medusa", LLAMA), 8) == 5


def test_accepting_drafts_has_a_cost_of_its_own() -> None:
    model = StepModel(TINY, SMALL_ROOF, Efficiency(sample_step_s=1e-3, verdict_s=2e-3), "fp32")
    assert model.sample_s(5, accepting=True) - model.sample_s(5) == pytest.approx(2e-3)
    assert model.step(1, 0, 2).sample_s - model.sample_s(3) == pytest.approx(2e-3)


def test_sampled_chains_draw_their_nodes_and_trees_do_not() -> None:
    engine = Efficiency(sampled_draft_token_s=1e-3)
    greedy, hot = (StepModel(LLAMA, H100, engine, sampled=sampled) for sampled in (False, True))
    chain, tree = drafter_shape("eagle", LLAMA), drafter_shape("eagle2", LLAMA)
    assert hot.draft_s(2, 64, 3, chain) - greedy.draft_s(2, 64, 3, chain) == pytest.approx(6e-3)
    assert hot.draft_s(2, 64, 3, tree) == greedy.draft_s(2, 64, 3, tree)


def test_sampled_rows_may_cost_more() -> None:
    engine = Efficiency(token_s=1e-3, sampled_token_s=5e-3)
    greedy, hot = (StepModel(TINY, SMALL_ROOF, engine, "fp32", sampled=sampled) for sampled in (False, True))
    assert hot.sample_s(10) - greedy.sample_s(10) == pytest.approx(0.04)


@given(st.integers(1, 512), st.integers(0, 8), st.integers(0, 20_000))
def test_more_work_never_takes_less_time(batch: int, depth: int, context: int) -> None:
    model = StepModel(LLAMA, H100, ASSUMED_GPU)
    draft = drafter_shape("eagle3", LLAMA)
    here = model.step(batch, context, depth, draft).total_s
    assert here <= model.step(batch + 1, context, depth, draft).total_s * (1 + 1e-12)
    assert here <= model.step(batch, context + 100, depth, draft).total_s * (1 + 1e-12)
    assert here <= model.step(batch, context, depth + 1, draft).total_s * (1 + 1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.step(0, 10, 1),
        lambda model: model.step(1, -1, 1),
        lambda model: model.step(1, 10, -1),
        lambda model: model.step(1 << 30, 10, 64),
        lambda model: model.ar_s(1, 1 << 40),
    ],
)
def test_absurd_sizes_are_refused(call: object) -> None:
    with pytest.raises(InputError) as caught:
        call(StepModel(LLAMA, H100))  # type: ignore[operator]
    assert caught.value.remedy


@pytest.mark.parametrize(
    "values",
    [{"compute": 0.0}, {"memory": -1.0}, {"memory": math.nan}, {"compute": math.inf}, {"overlap": 0.5},
     {"step_s": -1e-3}, {"token_s": math.nan}, {"pass_s": math.inf}],
)  # fmt: skip
def test_impossible_efficiencies_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Efficiency(**values)  # type: ignore[arg-type]
    assert Efficiency().to_dict()["overlap"] is None


def test_int8_weights_keep_16_bit_activations() -> None:
    assert StepModel(LLAMA, hardware("h100-sxm").roof("int8") or H100, IDEAL, "int8").activation_dtype == "bf16"
