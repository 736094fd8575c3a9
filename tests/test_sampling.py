"""One definition of the distribution, one stream a request, and an inverse CDF that cannot go wrong."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engine import sampling
from specbench.engine.sampling import (
    AHEAD,
    GREEDY_EPSILON,
    NumericalError,
    RequestGenerator,
    SamplingParams,
    bad_rows,
    best_tokens,
    distribution,
    draw,
    philox4x32,
    philox_uniforms,
    sample,
    token_logprobs,
    top2_margins,
)
from specbench.errors import InputError


def logits_of(*probs: float) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition restated for one row, in float64 and plain loops."""
    if params.temperature <= 1e-5:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = (logits - logits.max()) / params.temperature
    weight = np.exp(scaled)
    alive = np.ones(len(logits), dtype=bool)
    if params.top_k:
        alive &= logits >= np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]
    if params.top_p < 1:
        total, mass, floor = weight[alive].sum(), 0.0, math.inf
        for value in sorted(logits[alive], reverse=True):
            if mass / total >= params.top_p:
                break
            floor = value
            mass += math.exp((value - logits.max()) / params.temperature)
        alive &= logits >= floor
    alive &= weight >= params.min_p
    return np.where(alive, weight, 0.0) / weight[alive].sum()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.93, 0.512, 1e-9]),
    min_p=st.sampled_from([0.0, 0.047, 0.4, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_mixed_rows_equal_the_definition_restated(params: list[SamplingParams], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(len(params), 9)) * 2
    expected = np.stack([reference(row, each) for row, each in zip(logits, params, strict=True)])
    probs = distribution(torch.tensor(logits), params)
    assert probs.dtype == torch.float64
    np.testing.assert_allclose(probs, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(3, 300)) * 3).to(dtype)
    probs = distribution(logits, [SamplingParams(0.8)] * 3)
    assert probs.dtype == torch.float32
    expected = np.stack([reference(row, SamplingParams(0.8)) for row in logits.double().numpy()])
    np.testing.assert_allclose(probs, expected, rtol=2e-5)


def test_filters_agree_with_transformers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    logits = torch.tensor(np.random.default_rng(1).normal(size=(4, 50)) * 3)
    warpers = TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.85), MinPLogitsWarper(0.05)
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    probs = distribution(logits, [SamplingParams(0.7, 20, 0.85, 0.05)] * 4)
    np.testing.assert_allclose(probs, scores.softmax(dim=-1), rtol=1e-10)
    assert 1 < int((probs[0] > 0).sum()) < 20


def test_the_order_of_the_filters_shows() -> None:
    """top_p on what top_k left: .4 of .7 is over a half, so one token stays; the other way round two would."""
    probs = distribution(logits_of(0.4, 0.3, 0.2, 0.1), [SamplingParams(1.0, top_k=2, top_p=0.55)])
    assert probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    probs = distribution(logits_of(0.4, 0.3, 0.2, 0.1), [SamplingParams(1.0, top_p=0.55)])
    np.testing.assert_allclose(probs, [[4 / 7, 3 / 7, 0, 0]])


def test_tokens_tied_at_a_border_stay_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    for params in (SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.7)):
        probs = distribution(logits, [params])[0]
        assert probs[0] == probs[2] > 0
        assert probs[3] == 0


def test_greedy_rows_are_one_hot_at_the_lowest_best_id() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [2.0, 2.0, 2.0], [1.0, 0.0, 4.0]])
    params = [SamplingParams(0.0), SamplingParams(1e-6, top_k=2), SamplingParams(GREEDY_EPSILON)]
    assert distribution(logits, params).argmax(dim=-1).tolist() == [1, 0, 2]
    assert distribution(logits, params).sum(dim=-1).tolist() == [1.0, 1.0, 1.0]


def test_temperatures_0_and_1e_6_beside_a_warm_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).repeat(3, 1)
    probs = distribution(logits, [SamplingParams(0.0), SamplingParams(1e-6), SamplingParams(0.8)])
    assert probs[:2].tolist() == [[0.0, 1.0, 0.0]] * 2
    np.testing.assert_allclose(probs[2], reference(np.array([1.0, 3.0, 2.0]), SamplingParams(0.8)), rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.1e-5, 1.0, 1e6])
def test_extreme_logits_give_no_nan(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, -math.inf], [-math.inf, -math.inf, 1.0, -math.inf]])
    probs = distribution(logits, [SamplingParams(temperature, top_k=3, top_p=0.99, min_p=0.001)] * 2)
    assert bool(torch.isfinite(probs).all())
    np.testing.assert_allclose(probs.sum(dim=-1), 1.0, rtol=1e-6)
    assert probs[:, 3].tolist() == [0.0, 0.0]
    assert probs[1, 2] == 1.0


def test_a_wide_nucleus_equals_a_narrow_search(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor(np.random.default_rng(2).normal(size=(6, 40)) * np.array([[0.1, 1, 2, 4, 8, 0.5]]).T)
    params = [SamplingParams(1.0, top_p=0.9)] * 6
    whole = distribution(logits, params)
    monkeypatch.setattr(sampling, "NUCLEUS_GUESS", 5)
    guessed = distribution(logits, params)
    assert {int((row > 0).sum()) > 5 for row in guessed} == {True, False}
    np.testing.assert_array_equal(guessed, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_best_tokens_are_the_first_maxima_and_bad_rows_are_told(dtype: torch.dtype) -> None:
    logits = torch.full((6, 300), -1.0, dtype=dtype)
    logits[0, [7, 250]] = 2.0
    logits[1, [3, 200]] = torch.tensor([math.inf, math.nan], dtype=dtype)
    logits[2] = -math.inf
    logits[3, 299] = math.inf
    logits[4] = -math.inf
    logits[4, 299] = -5.0
    logits[5, :150] = -math.inf
    best, bad = best_tokens(logits[:, :300])
    assert bad.tolist() == bad_rows(logits).tolist() == [False, True, True, True, False, False]
    assert best[[0, 4, 5]].tolist() == [7, 299, 150]


def test_bad_rows_are_found_and_named() -> None:
    logits = torch.zeros(5, 3)
    logits[1, 0] = math.nan
    logits[2, 2] = math.inf
    logits[3] = -math.inf
    logits[4, :2] = -math.inf
    assert bad_rows(logits).tolist() == [False, True, True, True, False]
    with pytest.raises(NumericalError, match="row 1: the logits have no distribution") as caught:
        distribution(logits, [SamplingParams()] * 5)
    assert caught.value.row == 1
    with pytest.raises(NumericalError, match="row 1 of request b"):
        draw(logits, [SamplingParams()] * 5, [RequestGenerator(0, name) for name in "abcde"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 0.5),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.key == field


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit 1 rows"):
        distribution(torch.zeros(2, 3), [SamplingParams()])
    with pytest.raises(InputError, match="do not fit"):
        distribution(torch.zeros(3), [SamplingParams()] * 3)


# Sampling by inverse CDF -----------------------------------------------------------------------

WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1), st.sampled_from([1e-30, 1e-17, 5e-324, 1 / 3])), min_size=1, max_size=8
).filter(lambda values: sum(values) > 0)


@settings(max_examples=300, deadline=None)
@given(WEIGHTS, st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, math.nextafter(1, 0)])))
def test_a_sampled_token_exists_and_has_mass(weights: list[float], u: float) -> None:
    token = sample(np.array(weights), u)
    assert 0 <= token < len(weights)
    assert weights[token] > 0


def test_sampling_is_the_inverse_cdf() -> None:
    probs = np.array([0.25, 0.0, 0.5, 0.25, 0.0])
    below = np.nextafter
    points = [0.0, below(0.25, 0), 0.25, below(0.75, 0), 0.75, below(1, 0), 1.0]
    assert [sample(probs, u) for u in points] == [0, 0, 2, 2, 3, 3, 3]
    assert [sample(torch.tensor(probs), u) for u in points] == [0, 0, 2, 2, 3, 3, 3]


def test_the_sum_need_not_be_one() -> None:
    assert [sample(np.array([3.0, 1.0]), u) for u in (0.74, 0.75, 1.0)] == [0, 1, 1]
    short = np.full(1000, np.float32(0.001), dtype=np.float32) * np.float32(0.999)
    assert sample(short, math.nextafter(1, 0)) == 999


@pytest.mark.parametrize("probs", [[0.0, 0.0], [math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_no_mass_is_an_error_not_a_token(probs: list[float]) -> None:
    with pytest.raises(NumericalError):
        sample(np.array(probs), 0.5)


def test_drafters_hand_over_what_they_sampled_from() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1).repeat(3, 1)
    params = [SamplingParams(1.0, top_k=2), SamplingParams(), SamplingParams(1.0)]
    counts = np.zeros((3, 4))
    for trial in range(300):
        generators = [RequestGenerator(trial, name) for name in "abc"]
        tokens, q = draw(logits, params, generators)
        counts[np.arange(3), tokens] += 1
        assert [generator.num_drawn for generator in generators] == [1, 0, 1]
    np.testing.assert_allclose(q, [[4 / 7, 3 / 7, 0, 0], [1, 0, 0, 0], [0.4, 0.3, 0.2, 0.1]])
    assert np.all(counts[np.asarray(q) == 0] == 0)
    assert np.all(counts[np.asarray(q) > 0] > 0)


# Streams -----------------------------------------------------------------------


def test_a_stream_depends_on_seed_and_request_alone() -> None:
    first = RequestGenerator(1, "a")
    singles = [first.uniform() for _ in range(6)]
    again = RequestGenerator(1, "a")
    assert [*again.uniforms(2), again.uniform(), *again.uniforms(0), *again.uniforms(3)] == singles
    assert again.num_drawn == 6
    others = [RequestGenerator(2, "a"), RequestGenerator(1, "b"), RequestGenerator(11, ""), RequestGenerator(1, "1/")]
    assert len({stream.uniform() for stream in others} | {singles[0]}) == 5


def test_a_stream_is_pinned_across_machines_and_versions() -> None:
    stream = RequestGenerator(0, "pin")
    assert stream.key == 10634026176760723750
    np.testing.assert_array_equal(stream.uniforms(3), PINNED)


PINNED = [0.40622064854675266, 0.7601199234574151, 0.2742534781758106]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple, key: int, words: tuple) -> None:
    """Known answers of Random123, alone and among other counters."""
    found = philox4x32(np.array([counter, (1, 2, 3, 4)], dtype=np.uint64).T, key)
    assert found[:, 0].tolist() == list(words)


def philox_in_integers(key: int, number: int) -> float:
    """The generator restated for one number, in Python's own integers."""
    words, keys = [number % 2**32, number // 2**32, 0, 0], [key % 2**32, key // 2**32]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b // 2**32 ^ words[1] ^ keys[0], b % 2**32, a // 2**32 ^ words[3] ^ keys[1], a % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return (words[0] // 2**5 * 2**26 + words[1] // 2**6) / 2**53


@settings(max_examples=60, deadline=None)
@given(key=st.integers(0, 2**64 - 1), first=st.one_of(st.integers(0, 999), st.integers(2**32 - 3, 2**33)))
def test_uniforms_are_numbered_counters_of_the_key(key: int, first: int) -> None:
    expected = [philox_in_integers(key, first + i) for i in range(5)]
    assert philox_uniforms(key, first, 5).tolist() == expected


def test_a_generator_is_its_key_and_its_position() -> None:
    """Calls of any sizes, and numbers that were drawn elsewhere, leave the numbering as it is."""
    stream = RequestGenerator(7, "a")
    for count in (0, 1, 5, AHEAD - 2, AHEAD + 9, 3, 0, 2 * AHEAD, 1):
        begin = stream.num_drawn
        np.testing.assert_array_equal(stream.uniforms(count), philox_uniforms(stream.key, begin, count))
        assert stream.num_drawn == begin + count
    for count in (3, 1000):
        stream.skip(count)
        begin = stream.num_drawn
        np.testing.assert_array_equal(stream.uniforms(4), philox_uniforms(stream.key, begin, 4))


def test_what_a_caller_does_to_its_numbers_stays_with_it() -> None:
    stream = RequestGenerator(7, "a")
    stream.uniforms(2)[:] = 9.0
    first = stream.uniforms(2)
    first[:] = 9.0
    np.testing.assert_array_equal(stream.uniforms(2), philox_uniforms(stream.key, 4, 2))


def test_an_unseeded_stream_records_the_seed_it_drew() -> None:
    streams = [RequestGenerator(None, "a") for _ in range(3)]
    assert len({stream.seed for stream in streams}) == 3
    replay = RequestGenerator(streams[0].seed, "a")
    np.testing.assert_array_equal(replay.uniforms(4), streams[0].uniforms(4))
    with pytest.raises(InputError, match="seed"):
        RequestGenerator(-1, "a")


def test_uniforms_are_uniform() -> None:
    values = RequestGenerator(0, "a").uniforms(20_000)
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom: p = 0.0007


# Scores -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_and_margins(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5], [0.0, -1.0, 0.0]], dtype=dtype)
    exact = logits.double().log_softmax(dim=-1)
    np.testing.assert_allclose(token_logprobs(logits, [2, 1]), [exact[0, 2], exact[1, 1]], rtol=1e-6)
    assert top2_margins(logits) == [0.5, 0.0]


def test_margins_of_certain_rows_and_tiny_vocabularies() -> None:
    assert top2_margins(torch.tensor([[0.0, -math.inf]])) == [math.inf]
    assert top2_margins(torch.tensor([[1.0, 1.0 + 1e-7]], dtype=torch.float64)) == pytest.approx([1e-7], rel=1e-6)
    with pytest.raises(InputError, match="two tokens"):
        top2_margins(torch.zeros(1, 1))
