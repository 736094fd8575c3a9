"""The throttle: what it picks, what it learns, when it tries again; and its table as serving engines read it."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.depth_export import DepthRange, depth_ranges, export, start_depth
from specbench.roofline.depth_model import model_table, model_throttle
from specbench.roofline.draft_cost import drafter_shape
from specbench.roofline.model import Roof
from specbench.roofline.shapes import named_shape
from specbench.roofline.step_model import ASSUMED_GPU, StepModel
from specbench.roofline.throttle import (
    CachedSteps,
    FixedDepth,
    MeasuredSteps,
    RunningAcceptance,
    Throttle,
    best_depth,
    depth_table,
)

CHEAP = MeasuredSteps((1.0, 1.05, 1.1, 1.15, 1.2), 4)
STEEP = MeasuredSteps((1.0, 2.5, 4.0, 5.5, 7.0), 4)


class Linear:
    """A machine that reads weights for 8 ms and takes 0.2 ms a token and 0.5 ms a drafted level."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def step_times(self, batch: int, context_len: int, depth: int) -> float:
        self.calls.append((batch, context_len, depth))
        return max(8.0, 0.2 * batch * (depth + 1)) + 0.5 * depth + 1e-4 * context_len * batch


def run(throttle: Throttle, rates: tuple[float, ...], steps: int, batch: int = 4, seed: int = 0) -> list[int]:
    """Depths of `steps` steps of a drafter whose position i is accepted with rates[i]."""
    stream, chosen = random.Random(seed), []
    for _ in range(steps):
        depth = throttle.depth(batch, 100)
        chosen.append(depth)
        for _ in range(batch):
            accepted = 0
            while accepted < depth and stream.random() < rates[accepted]:
                accepted += 1
            throttle.observe(depth, accepted)
    return chosen


def tokens(rates: tuple[float, ...], depth: int) -> float:
    return sum(math.prod(rates[:i]) for i in range(depth + 1))


# ---- the choice


def test_it_takes_the_depth_with_most_tokens_a_second() -> None:
    """Against every depth by hand: tokens 1, 1.8, 2.36, 2.64 over 10, 13, 15, 19 ms."""
    expected = [1.0, 1.8, 2.36, 2.64]
    steps = MeasuredSteps((10.0, 13.0, 15.0, 19.0), 1)
    assert best_depth(steps, expected, 1, 0) == 2
    assert best_depth(MeasuredSteps((10.0, 13.0, 15.0, 16.0), 1), expected, 1, 0) == 3
    assert best_depth(MeasuredSteps((10.0, 18.1, 23.7, 26.5), 1), expected, 1, 0) == 0
    assert best_depth(MeasuredSteps((10.0, 18.0, 23.6, 26.4), 1), expected, 1, 0) == 0, "of equals the smallest"


def test_the_best_depth_shrinks_as_the_batch_grows() -> None:
    expected = [1.0, 1.8, 2.44, 2.95, 3.36]
    table = depth_table(Linear(), expected, 128, (1, 8, 16, 32, 64, 128))
    depths = list(table.values())
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 3
    assert depths[-1] == 0


@pytest.mark.parametrize(
    ("steps", "rates"), list(product((CHEAP, STEEP), ((0.9, 0.9, 0.9, 0.9), (0.6, 0.2, 0.1, 0.1))))
)
def test_it_settles_on_the_best_fixed_depth(steps: MeasuredSteps, rates: tuple[float, ...]) -> None:
    best = max(range(5), key=lambda depth: (tokens(rates, depth) / steps.seconds[depth], -depth))
    late = run(Throttle(steps, 4), rates, 400)[200:]
    earned = sum(tokens(rates, depth) for depth in late) / sum(steps.seconds[depth] for depth in late)
    assert earned >= 0.97 * tokens(rates, best) / steps.seconds[best]
    assert max(set(late), key=late.count) == best


def test_at_zero_it_tries_again_and_finds_what_changed() -> None:
    steps = MeasuredSteps((1.0, 1.3, 1.6, 1.9, 2.2), 4)
    throttle = Throttle(steps, 4)
    bad = run(throttle, (0.05,) * 4, 600)
    assert bad[-100:].count(0) >= 90
    assert any(bad[200:]), "it never tried again"
    good = run(throttle, (0.95,) * 4, 400)
    assert good[-100:].count(4) >= 95


def test_a_drafter_that_offers_nothing_is_not_asked_for_long() -> None:
    """Nothing offered is nothing accepted, however good the drafts were that it did offer."""
    throttle = Throttle(MeasuredSteps((1.0, 1.3, 1.6), 2), 2)
    depths = []
    for _ in range(60):
        depths.append(throttle.depth(2, 0))
        for _ in range(2):
            throttle.observe(0, 0, depths[-1])
    assert depths[0] > 0
    assert depths[-40:].count(0) >= 35


def test_positions_are_counted_as_tried_where_all_before_them_stand() -> None:
    seen = RunningAcceptance(3, 0.5, 1.0, 1.0)
    for asked, accepted in ((3, 3), (3, 1), (3, 0), (1, 1), (0, 0)):
        seen.observe(asked, accepted)
    # Position 1: tried 4, accepted 3; position 2: tried 2, accepted 1; position 3: tried 1, accepted 1.
    first = (3 + 0.5) / (4 + 1)
    second = (1 + first) / (2 + 1)
    third = (1 + second) / (1 + 1)
    assert seen.rates() == pytest.approx([first, second, third], abs=1e-12)
    joint = [first, first * second, first * second * third]
    assert seen.expected_tokens() == pytest.approx([1, 1 + joint[0], 1 + sum(joint[:2]), 1 + sum(joint)], abs=1e-12)


def test_evidence_fades_towards_the_position_before() -> None:
    seen = RunningAcceptance(2, 0.7, 4.0, 0.5)
    for _ in range(50):
        seen.observe(2, 1)
    assert seen.rates()[1] < 0.1
    for _ in range(40):
        seen.fade()
    assert seen.rates() == pytest.approx([0.7, 0.7], abs=1e-6)


def test_a_prior_may_be_a_curve() -> None:
    assert RunningAcceptance(4, (0.9, 0.5), 4.0, 0.98).rates() == pytest.approx([0.9, 0.5, 0.5, 0.5])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40), st.integers(1, 64))
def test_rates_stay_rates_and_depths_stay_in_range(seen: list[tuple[int, int]], batch: int) -> None:
    throttle = Throttle(Linear(), 5)
    for asked, accepted in seen:
        depth = throttle.depth(batch, 50)
        assert 0 <= depth <= 5
        drafted = min(asked, depth)
        throttle.observe(drafted, min(accepted, drafted), depth)
        assert all(0 <= rate <= 1 for rate in throttle.acceptance.rates())


def test_reset_forgets_everything() -> None:
    """Fault 56: what one cell taught is not for the next."""
    used, fresh = Throttle(CHEAP, 4), Throttle(CHEAP, 4)
    run(used, (0.0,) * 4, 50)
    assert used.acceptance.rates() != fresh.acceptance.rates()
    used.reset()
    assert run(used, (0.5,) * 4, 80) == run(fresh, (0.5,) * 4, 80)


def test_a_model_is_asked_once_a_bucket() -> None:
    model = Linear()
    steps = CachedSteps(model)
    assert steps.step_times(4, 100, 2) == steps.step_times(4, 127, 2) == Linear().step_times(4, 96, 2)
    steps.step_times(4, 128, 2)
    assert len(model.calls) == 2


def test_a_fixed_policy_never_moves() -> None:
    policy = FixedDepth(3)
    policy.observe(3, 0)
    assert policy.depth(64, 9000) == 3


@pytest.mark.parametrize("seconds", [(), (1.0, 0.0), (1.0, -1.0), (math.nan,), (math.inf, 1.0)])
def test_step_times_that_can_not_be_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        MeasuredSteps(seconds, 1)


def test_settings_that_can_not_be_are_refused() -> None:
    for options in ({"prior": 1.2}, {"prior": ()}, {"weight": 0.0}, {"decay": 0.0}, {"decay": 1.1}):
        with pytest.raises(InputError):
            Throttle(CHEAP, 4, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="largest depth"):
        Throttle(CHEAP, 0)


# ---- the table for engines


def vllm_lookup(schedule: list[list[int]], largest: int, batch: int) -> int:
    """vLLM's own rules: the range that holds the batch, a gap or the tail has the value before it."""
    found = [tokens for first, _, tokens in sorted(schedule) if first <= min(batch, largest)]
    return found[-1]


def sglang_lookup(config: dict[str, dict[str, list[int]]], batch: int) -> list[int]:
    """SGLang's router: the entry of the largest key that is not above the batch."""
    key = max((int(key) for key in config if int(key) <= batch), default=min(map(int, config)))
    return config[str(key)]["candidate_steps"]


def test_ranges_meet_at_the_geometric_mean() -> None:
    assert depth_ranges({1: 5, 4: 3, 16: 3, 64: 0}) == (
        DepthRange(1, 2, 5),
        DepthRange(3, 32, 3),
        DepthRange(33, 64, 0),
    )
    assert depth_ranges({8: 2}) == (DepthRange(1, 8, 2),)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(1, 300), st.integers(0, 7), min_size=1, max_size=9))
def test_exports_are_valid_and_say_the_same(table: dict[int, int]) -> None:
    ranges = depth_ranges(table)
    assert ranges[0].first == 1
    assert ranges[-1].last == max(table)
    assert all(a.last + 1 == b.first and a.depth != b.depth for a, b in pairwise(ranges))
    if not any(table.values()):
        with pytest.raises(InputError, match="without speculative decoding"):
            export("vllm", table) and None
        return
    vllm, sglang = export("vllm", table), export("sglang", table)
    assert json.loads(json.dumps(vllm)) == vllm
    schedule = vllm["num_speculative_tokens_per_batch_size"]
    assert vllm["num_speculative_tokens"] == max(table.values()) == start_depth(table)
    assert all(0 < first <= last and depth >= 0 for first, last, depth in schedule)
    for batch, depth in table.items():
        assert vllm_lookup(schedule, max(table), batch) == depth
        assert sglang_lookup(sglang, batch) == [depth]


def test_exports_name_what_they_can_not_do() -> None:
    for bad in ({}, {0: 1}, {1: -1}):
        with pytest.raises(InputError):
            depth_ranges(bad)
    with pytest.raises(InputError, match="not known"):
        export("trt", {1: 3})


# ---- by the step model


def test_the_models_table_is_its_best_speedup() -> None:
    """Llama-3.1-8B on an H100: at each batch the depth with the highest predicted speedup; a throttle that begins with
    the same curve asks for the same."""
    model = StepModel(named_shape("llama-3.1-8b"), Roof(989.4e12, 3350e9), ASSUMED_GPU)
    draft, curve = drafter_shape("eagle3", model.target), AcceptanceCurve((0.8, 0.7, 0.65, 0.6))
    batches = (1, 16, 64, 160, 512)
    table = model_table(model, draft, curve, 544, batches, 6)
    for batch in batches:
        best = max(range(7), key=lambda depth: (model.speedup(batch, 544, depth, draft, curve), -depth))
        assert table[batch] == best
        assert model_throttle(model, draft, 6, curve).depth(batch, 544) == best
    assert table[1] > table[512]
    assert list(table.values()) == sorted(table.values(), reverse=True)
    assert export("vllm", table)["num_speculative_tokens"] == max(table.values())
