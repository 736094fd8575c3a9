"""Verification of chains is lossless: proved by enumerating all drafts and integrating the uniforms exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction as F
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exact_law import (
    Context,
    Model,
    chosen_law,
    completed,
    constant,
    emitted_law,
    first_token_law,
    four_drafts,
    four_tokens,
    history_draft,
    history_target,
    mean_emitted,
    outcomes,
    point_mass,
    sequence_law,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engine import verify as verify_module
from specbench.engine.sampling import NumericalError, RequestGenerator, SamplingParams, distribution
from specbench.engine.tree import TokenTree
from specbench.engine.verify import (
    DraftContractError,
    Proposal,
    Verification,
    sample_next,
    verify,
    verify_chain,
    verify_greedy_chain,
)
from specbench.errors import InputError

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0, seed=0)


# The law -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "mean"), [(1, F(67, 42)), (2, F(1219, 588)), (3, F(612173, 246960))], ids=["1", "2", "3"]
)
def test_chain_has_the_targets_law_on_a_history_dependent_model(depth: int, mean: F) -> None:
    law = emitted_law(verify_chain, history_target, history_draft, depth)
    assert completed(law, history_target, depth + 1) == sequence_law(history_target, depth + 1)
    assert mean_emitted(law) == mean


@pytest.mark.parametrize("depth", [1, 2])
def test_chain_has_the_targets_law_where_tokens_are_impossible(depth: int) -> None:
    law = emitted_law(verify_chain, four_tokens, four_drafts, depth)
    assert completed(law, four_tokens, depth + 1) == sequence_law(four_tokens, depth + 1)


@pytest.mark.parametrize(
    ("depth", "mean"), [(1, F(5, 3)), (2, F(19, 9)), (3, F(65, 27)), (4, F(211, 81))], ids=["1", "2", "3", "4"]
)
def test_chain_mean_emission_of_independent_tokens(depth: int, mean: F) -> None:
    target, draft = constant("1/3", "2/3"), constant("2/3", "1/3")
    law = emitted_law(verify_chain, target, draft, depth)
    assert mean_emitted(law) == mean
    assert completed(law, target, depth + 1) == sequence_law(target, depth + 1)


@pytest.mark.parametrize("alpha", [F(1, 2), F(3, 5), F(7, 10), F(4, 5), F(9, 10)], ids=str)
def test_mean_emission_is_the_geometric_sum(alpha: F) -> None:
    target, draft = constant(alpha, 1 - alpha), constant(1, 0)
    for depth in (1, 2, 3):
        assert mean_emitted(emitted_law(verify_chain, target, draft, depth)) == (1 - alpha ** (depth + 1)) / (1 - alpha)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("model", [history_target, four_tokens])
def test_every_chosen_draft_is_lossless(model: Model, depth: int) -> None:
    truth = sequence_law(model, depth + 1)
    for tokens in itertools.product(range(len(model(()))), repeat=depth):
        assert completed(chosen_law(verify_chain, model, tokens), model, depth + 1) == truth


def test_a_chosen_draft_is_kept_with_its_target_probability() -> None:
    law = chosen_law(verify_chain, constant("1/2", "3/10", "1/5"), (2,))
    assert sum(mass for emitted, mass in law.items() if emitted[0] == 2) == F(1, 5)
    assert mean_emitted(law) == 1 + F(1, 5)


def test_a_point_mass_as_q_and_no_q_are_the_same_rule() -> None:
    for tokens in itertools.product(range(3), repeat=2):
        p = [history_target(tokens[:i]) for i in range(3)]
        told = [point_mass(token, 3) for token in tokens]
        assert outcomes(verify_chain, p, tokens, told) == outcomes(verify_chain, p, tokens, None)


# Rules that are not lossless must fail the checker -------------------------------------------------------------------


def kept_then_target(p: torch.Tensor, draft: np.ndarray, q: torch.Tensor | None, uniforms: np.ndarray) -> Verification:
    """Wrong: after a rejection it emits from p, not from the residual."""
    right = verify_chain(p, draft, q, uniforms)
    spare = verify_chain(p[right.accepted : right.accepted + 1], draft[:0], None, uniforms[-1:])
    return Verification(right.accepted, spare.next_token, (*right.tokens[:-1], spare.next_token))


def test_checker_refuses_a_correction_drawn_from_p() -> None:
    target, draft = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    law = emitted_law(kept_then_target, target, draft, 1)
    assert completed(law, target, 2) != sequence_law(target, 2)


def test_checker_refuses_a_moved_threshold() -> None:
    def lenient(p: torch.Tensor, draft: np.ndarray, q: torch.Tensor | None, uniforms: np.ndarray) -> Verification:
        return verify_chain(p, draft, q, np.array([*(uniforms[:-1] * 0.9), uniforms[-1]]))

    with pytest.raises(AssertionError, match="changes within the cell"):
        emitted_law(lenient, constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5), 1)


@pytest.mark.parametrize(
    ("p", "q", "faulty"),
    [((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), (0.6, 0.0, 0.4)), ((0.3, 0.7), (0.6, 0.4), (0.5, 0.5))],
)
def test_argmax_drafts_need_a_point_mass(p: tuple, q: tuple, faulty: tuple) -> None:
    target, best = constant(*p), int(np.argmax(q))
    told = outcomes(verify_chain, [target(()), target((best,))], (best,), [constant(*q)(())])
    assert first_token_law(told, len(p)) == constant(*faulty)(())
    assert first_token_law(chosen_law(verify_chain, target, (best,)), len(p)) == target(())


def test_filtered_drafts_need_the_filtered_q() -> None:
    target, raw = constant(0.1, 0.2, 0.3, 0.4), constant(0.4, 0.3, 0.2, 0.1)
    drafter = SamplingParams(temperature=1.0, top_k=2)
    float_q = distribution(tensor([raw(())]).log(), [drafter])[0]
    filtered = constant("4/7", "3/7", 0, 0)
    np.testing.assert_allclose(float_q, [float(x) for x in filtered(())], rtol=1e-12)
    lied = first_token_law(emitted_law(verify_chain, target, filtered, 1, hand_over=raw), 4)
    assert lied == (F(1, 7), F(2, 7), F(1, 7), F(3, 7))
    assert first_token_law(emitted_law(verify_chain, target, filtered, 1), 4) == target(())


def test_dropping_unlikely_drafts_is_not_lossless() -> None:
    target, draft = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    law = [F(0)] * 3
    for token, mass in enumerate(draft(())):
        if mass < F(1, 4):
            one = target(())
        else:
            one = first_token_law(outcomes(verify_chain, [target(())] * 2, (token,), [draft(())]), 3)
        law = [total + mass * share for total, share in zip(law, one, strict=True)]
    assert law == [F(2, 5), F(9, 25), F(6, 25)]


# Edges of the rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coin", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("last", [0.0, 0.5, 1.0])
def test_an_empty_residual_falls_back_to_p(coin: float, last: float) -> None:
    uniform = torch.full((2, 4), 0.25)
    verdict = verify_chain(uniform, np.array([2]), uniform[:1], np.array([coin, last]))
    assert verdict.accepted == (coin < 1.0)
    assert verdict.next_token == min(int(last * 4), 3)


def test_a_certain_draft_rejected_by_a_forced_coin_still_gives_a_token() -> None:
    certain = torch.tensor([[0.0, 1.0, 0.0]]).repeat(2, 1)
    verdict = verify_chain(certain, np.array([1]), None, np.array([1.0, 1.0]))
    assert (verdict.accepted, verdict.next_token) == (0, 1)


def test_the_threshold_is_strict_and_an_impossible_token_never_stands() -> None:
    p = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    assert verify_chain(p, np.array([0]), None, np.array([0.0, 0.0])).tokens == (1,)
    assert verify_chain(p, np.array([1]), None, np.array([0.5, 0.0])).tokens == (2,)
    assert verify_chain(p, np.array([1]), None, np.array([np.nextafter(0.5, 0), 0.0])).tokens == (1, 0)


def test_a_rejected_token_is_not_emitted_in_its_own_place() -> None:
    p = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    for last in (0.0, 0.1, 0.99, 1.0):
        assert verify_chain(p, np.array([1]), None, np.array([0.9, last])).tokens == (0,)


def test_a_draft_that_q_cannot_have_produced_is_an_error() -> None:
    p = torch.full((3, 3), 1 / 3)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])
    with pytest.raises(DraftContractError, match="draft 1 is token 1, whose q is 0"):
        verify_chain(p, np.array([0, 1]), q, np.array([0.9, 0.0, 0.0]))


def test_only_the_leading_run_counts() -> None:
    verdict = verify_greedy_chain(np.array([4, 5, 6, 7, 8]), np.array([4, 0, 6, 7]))
    assert (verdict.accepted, verdict.next_token, verdict.tokens) == (1, 5, (4, 5))


@settings(deadline=None)
@given(st.integers(0, 6).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 2), min_size=n, max_size=n)] * 2)))
def test_greedy_is_the_leading_run(pair: tuple[list[int], list[int]]) -> None:
    target, draft = pair
    verdict = verify_greedy_chain(np.array([*target, 9]), np.array(draft, dtype=np.int64))
    run = list(itertools.takewhile(lambda both: both[0] == both[1], zip(target, draft, strict=True)))
    assert verdict.accepted == len(run) >= 0
    assert verdict.tokens == (*draft[: len(run)], [*target, 9][len(run)])


def test_the_first_draft_is_verified_too() -> None:
    """A prompt 1,1,1 drafts [1]; the target wants 2."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [9.0, 0.0, 0.0]])
    (verdict,) = verify([chain(1)], logits, [GREEDY], [RequestGenerator(0, "a")])
    assert verdict.tokens == (2,)


# The batch -----------------------------------------------------------------------------------------------------------


def chain(*tokens: int, q: torch.Tensor | None = None) -> Proposal:
    return Proposal(TokenTree.chain(np.array(tokens, dtype=np.int64)), q)


class Coins:
    """Forced uniforms, and a count of how many were taken."""

    def __init__(self, request_id: str, *values: float) -> None:
        self.request_id = request_id
        self.values = list(values)
        self.num_drawn = 0

    def uniforms(self, count: int) -> np.ndarray:
        taken = self.values[self.num_drawn : self.num_drawn + count]
        self.num_drawn += count
        return np.array(taken, dtype=np.float64)


def ragged_batch(lengths: Sequence[int], vocab_size: int = 7) -> list[SimpleNamespace]:
    """Requests of mixed kinds: greedy, sampled with a chosen draft, sampled with a sampled draft."""
    rng = np.random.default_rng(11)
    requests = []
    for index, length in enumerate(lengths):
        kind = index % 3
        logits = torch.tensor(rng.normal(size=(length + 1, vocab_size)))
        q = torch.tensor(rng.dirichlet(np.ones(vocab_size), size=length)) if kind == 2 else None
        tokens = rng.integers(vocab_size, size=length)
        if kind == 0:
            tokens[: length // 2] = logits.argmax(dim=-1)[: length // 2]
        params = GREEDY if kind == 0 else SamplingParams(0.7, top_k=kind * 3, top_p=0.95, min_p=0.01, seed=5)
        requests.append(SimpleNamespace(id=f"r{index}", proposal=chain(*tokens, q=q), logits=logits, params=params))
    return requests


def judge(requests: Sequence[SimpleNamespace], **options: object) -> dict[str, Verification]:
    generators = [RequestGenerator(3, request.id) for request in requests]
    verdicts = verify(
        [request.proposal for request in requests],
        torch.cat([request.logits for request in requests]),
        [request.params for request in requests],
        generators,
        want_logprobs=True,
        want_margins=True,
        **options,
    )
    for request, generator in zip(requests, generators, strict=True):
        expected = 0 if request.params.is_greedy else len(request.proposal.tree) + 1
        assert generator.num_drawn == expected, "the coins taken depend on the verdict or on the batch"
    return {request.id: verdict for request, verdict in zip(requests, verdicts, strict=True)}


@pytest.mark.parametrize("lengths", [(0, 4, 1), (4, 1, 0), (2, 0, 3), (0, 0, 0), (5, 2, 2)])
def test_a_ragged_batch_equals_each_request_alone_in_every_order(lengths: tuple[int, ...]) -> None:
    requests = ragged_batch(lengths)
    alone = {request.id: judge([request])[request.id] for request in requests}
    for order in itertools.permutations(requests):
        assert judge(order) == alone


def test_a_batch_uses_the_single_request_rules() -> None:
    requests = ragged_batch((3, 3, 3, 2, 2, 2))
    for request in requests:
        tokens, count = request.proposal.tree.tokens, len(request.proposal.tree) + 1
        verdict = judge([request])[request.id]
        if request.params.is_greedy:
            expected = verify_greedy_chain(request.logits.argmax(dim=-1).numpy(), tokens)
        else:
            p = distribution(request.logits, [request.params] * count)
            coins = RequestGenerator(3, request.id).uniforms(count)
            expected = verify_chain(p, tokens, request.proposal.q, coins)
        assert (verdict.accepted, verdict.tokens) == (expected.accepted, expected.tokens)


def test_sampled_batch_verdicts_have_the_targets_law() -> None:
    """The packed path end to end: logits, parameters, offsets and coins, beside a greedy neighbour."""

    def packed(p: torch.Tensor, draft: np.ndarray, q: torch.Tensor | None, uniforms: np.ndarray) -> Verification:
        logits = torch.cat([torch.zeros(2, 3, dtype=torch.float64), 0.5 * p.log()])
        warm = SamplingParams(temperature=0.5)
        proposals = [chain(1), Proposal(TokenTree.chain(draft), q)]
        return verify(proposals, logits, [GREEDY, warm], [Coins("a"), Coins("b", *uniforms)])[1]

    law = emitted_law(packed, history_target, history_draft, 1)
    assert completed(law, history_target, 2) == sequence_law(history_target, 2)
    assert mean_emitted(law) == F(67, 42)


def test_greedy_requests_compute_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a greedy batch asked for a distribution")

    monkeypatch.setattr(verify_module, "distribution", refuse)
    logits = torch.eye(4)
    generators = [Coins("a"), Coins("b")]
    assert [v.tokens for v in verify([chain(0, 1), chain()], logits, [GREEDY] * 2, generators)] == [(0, 1, 2), (3,)]
    assert [v.tokens for v in sample_next(logits[:2], [GREEDY] * 2, generators)] == [(0,), (1,)]


def test_the_target_is_scored_with_the_requests_own_parameters() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0]]).repeat(4, 1)
    params = [SamplingParams(1.0, top_k=1), SamplingParams(1.0)]
    for coin in (0.0, 0.3, 0.7, 0.999999, 1.0):
        first, second = verify([chain(1), chain(1)], logits, params, [Coins("a", coin, coin), Coins("b", coin, coin)])
        assert first.tokens == (0,), "top_k 1 must give token 0 whatever the coin"
        assert second.tokens[0] == (1 if coin < 0.2 else 0 if coin < 0.8 else 3)


def test_near_zero_temperatures_are_greedy_in_a_mixed_batch() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).repeat(3, 1)
    params = [SamplingParams(0.0), SamplingParams(1e-6), SamplingParams(0.8)]
    generators = [Coins("a"), Coins("b"), Coins("c", 0.0)]
    assert [v.tokens for v in verify([chain()] * 3, logits, params, generators)] == [(1,), (1,), (0,)]
    generators = [Coins("a"), Coins("b"), Coins("c", 0.0)]
    assert [v.tokens for v in sample_next(logits, params, generators)] == [(1,), (1,), (0,)]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, None], ids=["nan", "inf", "all -inf"])
@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_row_without_a_distribution_fails_its_request_only(
    params: SamplingParams, poison: float | None, row: int
) -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(10, 5)))
    good = verify([chain(1, 2, 3, 4)], logits[5:], [params], [RequestGenerator(0, "good")])[0]
    logits[row] = -math.inf if poison is None else logits[row]
    if poison is not None:
        logits[row, 3] = poison
    generators = [RequestGenerator(0, "bad"), RequestGenerator(0, "good")]
    failed, fine = verify([chain(1, 2, 3, 4)] * 2, logits, [params] * 2, generators, step=7, want_logprobs=True)
    assert isinstance(failed.error, NumericalError)
    assert (failed.error.row, failed.error.request_id, failed.error.step) == (row, "bad", 7)
    assert f"row {row} of request bad in step 7" in str(failed.error)
    assert (failed.tokens, failed.accepted, failed.logprobs) == ((), 0, ())
    assert fine.error is None
    assert fine.tokens == good.tokens
    assert all(0 <= token < 5 for token in fine.tokens)


def test_autoregressive_failures_name_their_request_too() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    generators = [RequestGenerator(0, name) for name in "abc"]
    verdicts = sample_next(logits, [WARM, WARM, GREEDY], generators, step=2, want_margins=True)
    assert [verdict.error is None for verdict in verdicts] == [True, False, True]
    assert (verdicts[1].error.request_id, verdicts[1].error.step, verdicts[1].tokens) == ("b", 2, ())


def test_a_drafters_nan_fails_its_request_and_a_false_q_is_a_bug() -> None:
    logits = torch.zeros(4, 3)
    q = torch.full((1, 3), 1 / 3)
    broken = torch.tensor([[0.5, math.nan, 0.5]])
    generators = [RequestGenerator(0, "bad"), RequestGenerator(0, "good")]
    failed, fine = verify([chain(0, q=broken), chain(0, q=q)], logits, [WARM] * 2, generators)
    assert failed.error.request_id == "bad"
    assert "q is not finite" in str(failed.error)
    assert fine.error is None
    for false in (q * 2, torch.tensor([[1.5, -0.5, 0.0]])):
        with pytest.raises(DraftContractError, match="request a: a row of q is not a distribution"):
            verify([chain(0, q=false)], logits[:2], [WARM], [RequestGenerator(0, "a")])


@pytest.mark.parametrize("tokens", [(0, 3), (-1, 0)])
def test_drafts_outside_the_vocabulary_are_refused(tokens: tuple[int, int]) -> None:
    with pytest.raises(DraftContractError, match="request a: a drafted id is outside the vocabulary of 3"):
        verify([chain(*tokens)], torch.zeros(3, 3), [GREEDY], [RequestGenerator(0, "a")])
    with pytest.raises(DraftContractError, match="q has shape"):
        verify([chain(0, q=torch.ones(1, 2))], torch.zeros(2, 3), [WARM], [RequestGenerator(0, "a")])


def test_what_is_not_there_is_refused() -> None:
    generator = RequestGenerator(0, "a")
    with pytest.raises(InputError, match="unknown verification backend 'cuda'"):
        verify([chain()], torch.zeros(1, 3), [GREEDY], [generator], backend="cuda")
    with pytest.raises(InputError, match="unknown verification 'typical'"):
        verify([chain()], torch.zeros(1, 3), [GREEDY], [generator], method="typical")
    fork = Proposal(TokenTree(np.array([0, 1]), np.array([-1, -1])))
    with pytest.raises(InputError, match="block verification judges chains, and a draft branches"):
        verify([fork], torch.zeros(3, 3), [GREEDY], [generator], method="block")
    with pytest.raises(InputError, match=r"expected \[2, V\]"):
        verify([chain(0)], torch.zeros(3, 3), [GREEDY], [generator])
    with pytest.raises(InputError, match="1 requests, 2 parameters, 1 generators"):
        verify([chain(0)], torch.zeros(2, 3), [GREEDY] * 2, [generator])
    assert generator.num_drawn == 0


def test_backends_are_dispatched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = Verification(0, 1, (1,))
    monkeypatch.setitem(verify_module.BACKENDS, "other", lambda batch: [marker] * len(batch))
    arguments = [chain()], torch.zeros(1, 3), [GREEDY], [RequestGenerator(0, "a")]
    assert verify(*arguments, backend="other") == [marker]
    assert verify(*arguments)[0].tokens == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_id_in_every_dtype(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 4000, dtype=dtype)
    logits[:, [17, 1000, 3999]] = 2.0
    assert verify([chain(17)], logits, [GREEDY], [Coins("a")])[0].tokens == (17, 17)


# Decoding to the end: speculative equals autoregressive -----------------------------------------------------------


def history_logits(context: Context, vocab_size: int = 4) -> torch.Tensor:
    """Logits that depend on the whole history."""
    seed = sum((i + 1) * (t + 3) ** 2 for i, t in enumerate(context)) + 101 * len(context)
    return torch.tensor(np.random.default_rng(seed).normal(size=vocab_size) * 2)


def decode(requests: dict[str, SamplingParams], length: int, drafts: dict[str, list[list[int]]] | None) -> dict:
    """Tokens, logprobs and margins of every request; `drafts` None is the autoregressive arm."""
    generators = {name: RequestGenerator(params.seed, name) for name, params in requests.items()}
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in requests}
    step = 0
    while busy := [name for name in requests if len(tokens[name]) < length]:
        common = [requests[name] for name in busy], [generators[name] for name in busy]
        if drafts is None:
            logits = torch.stack([history_logits(tuple(tokens[name])) for name in busy])
            verdicts = sample_next(logits, *common, want_logprobs=True, want_margins=True)
        else:
            proposals = [chain(*drafts[name][step % len(drafts[name])]) for name in busy]
            contexts = [
                (*tokens[name], *proposal.tree.tokens[:i])
                for name, proposal in zip(busy, proposals, strict=True)
                for i in range(len(proposal.tree) + 1)
            ]
            logits = torch.stack([history_logits(context) for context in contexts])
            verdicts = verify(proposals, logits, *common, want_logprobs=True, want_margins=True)
        for name, verdict in zip(busy, verdicts, strict=True):
            tokens[name] += verdict.tokens
            scores[name] += zip(verdict.logprobs, verdict.top2_margins, strict=True)
        step += 1
    return {name: (tokens[name][:length], scores[name][:length]) for name in requests}


DRAFTS = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(a=DRAFTS, b=DRAFTS)
def test_greedy_speculation_equals_autoregression_for_any_drafter(a: list[list[int]], b: list[list[int]]) -> None:
    requests = {"a": GREEDY, "b": GREEDY}
    plain, speculative = decode(requests, 6, None), decode(requests, 6, {"a": a, "b": b})
    for name in requests:
        assert speculative[name][0] == plain[name][0]
        np.testing.assert_allclose(speculative[name][1], plain[name][1], rtol=1e-12)


def test_logprobs_and_margins_are_those_of_the_raw_target() -> None:
    """V = 4, 6 tokens, drafts of 3; a temperature moves neither logprob nor margin."""
    requests = {"greedy": GREEDY, "sampled": SamplingParams(0.5, top_k=3, seed=1)}
    drafts = {"greedy": [[0, 1, 2], [3, 1, 0]], "sampled": [[1, 1, 1], [2, 0, 3]]}
    for name, (tokens, scores) in decode(requests, 6, drafts).items():
        assert len(tokens) == len(scores) == 6, name
        for position, (token, (logprob, margin)) in enumerate(zip(tokens, scores, strict=True)):
            logits = history_logits(tuple(tokens[:position])).numpy()
            best = np.sort(logits)[::-1]
            assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-12)
            assert logprob < 0
            assert margin == pytest.approx(best[0] - best[1], abs=1e-12)


def test_scores_are_left_out_unless_asked_for() -> None:
    (verdict,) = verify([chain(0)], torch.eye(2), [GREEDY], [Coins("a")])
    assert (verdict.logprobs, verdict.top2_margins) == ((), ())


def test_a_seeded_request_does_not_notice_its_neighbours() -> None:
    """Seeds 1, None, 2: request one decodes the same alone, in a batch of 3, and last in the batch."""
    warm = {name: SamplingParams(0.9, seed=seed) for name, seed in (("one", 1), ("two", None), ("three", 2))}
    drafts = {"one": [[0, 1], [2], []], "two": [[3, 3, 3]], "three": [[], [1, 2, 0]]}
    for chosen in (None, drafts):
        alone = decode({"one": warm["one"]}, 12, chosen)["one"]
        assert decode(warm, 12, chosen)["one"] == alone
        assert decode(dict(reversed(warm.items())), 12, chosen)["one"] == alone
        runs = [decode(warm, 12, chosen) for _ in range(3)]
        assert all(run["three"] == runs[0]["three"] for run in runs)
        assert len({tuple(run["two"][0]) for run in runs}) > 1, "an unseeded request repeats itself"


def test_autoregression_is_verification_without_drafts() -> None:
    logits = torch.tensor(np.random.default_rng(4).normal(size=(6, 9)))
    params = [GREEDY, WARM, SamplingParams(0.6, top_p=0.8)] * 2
    options = {"want_logprobs": True, "want_margins": True}
    plain = [RequestGenerator(1, str(i)) for i in range(6)]
    empty = [RequestGenerator(1, str(i)) for i in range(6)]
    assert sample_next(logits, params, plain, **options) == verify([chain()] * 6, logits, params, empty, **options)
    assert [g.num_drawn for g in plain] == [g.num_drawn for g in empty] == [0, 1, 1, 0, 1, 1]
