"""Each drafter by itself: what it drafts is what its definition says, after every history, in every batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_tools import (
    accepted_share,
    decode,
    empty,
    feed,
    history_logits,
    make_decoder,
    make_request,
    outputs,
    perturbed,
    prompts,
    resized_vocabulary,
)
from engine_world import OUTPUT, V, World, build_world

from specbench import metrics
from specbench.engine.drafters.base import Drafter, DraftPass
from specbench.engine.drafters.lookup import NgramDrafter, ReplayDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.ngram import NgramLookup
from specbench.engine.models.decoder import Decoder
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams, distribution
from specbench.engine.verify import Proposal
from specbench.errors import InputError


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


class Watched:
    """Passes everything on to a drafter, and judges each proposal by `expected(active, depth)`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.synthetic, self.capture = inner.synthetic, inner.capture
        self.num_judged = 0
        self.num_drafted = 0

    def start(self, active: ActiveRequest) -> None:
        self.inner.start(active)

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        proposals = self.inner.propose(active, depths)
        assert len(proposals) == len(active)
        for one, depth, proposal in zip(active, depths, proposals, strict=True):
            assert len(proposal.tree) <= depth
            assert proposal.tree.is_chain
            self.judge(one, depth, proposal)
            self.num_judged += 1
            self.num_drafted += len(proposal.tree)
        return proposals

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        raise AssertionError("defined by each test")

    def num_nodes(self, depth: int) -> int:
        return self.inner.num_nodes(depth)

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        self.inner.commit(active, num_draft, num_accepted, path)

    def finish(self, active: ActiveRequest) -> None:
        self.inner.finish(active)

    def take_passes(self) -> list[DraftPass]:
        return self.inner.take_passes()


class WatchedModel(Watched):
    """Drafts are the drafting model's own: greedily the argmax, sampled from just the q that is handed over."""

    def __init__(self, inner: Drafter, scratch: Decoder, num_layers: int | None) -> None:
        super().__init__(inner)
        self._scratch, self._num_layers = scratch, num_layers

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        assert len(proposal.tree) == depth
        params = one.request.params
        text = [*one.request.prompt_ids, *one.tokens]
        vocab_size = self._scratch.spec.vocab_size
        if depth == 0:
            assert proposal.q is None
            return
        if params.is_greedy:
            assert proposal.q is None
        else:
            assert proposal.q is not None
            assert proposal.q.shape == (depth, V)
        for level, token in enumerate(proposal.tree.tokens):
            ids = [min(t, vocab_size - 1) for t in text]
            logits = history_logits(self._scratch, ids, self._num_layers)[-1:, :V]
            if params.is_greedy:
                assert token == int(logits.argmax())
            else:
                law = torch.zeros(V, dtype=torch.float64)
                law[: logits.shape[1]] = distribution(logits, [params])[0]
                torch.testing.assert_close(proposal.q[level], law, rtol=0, atol=1e-10)
                assert law[token] > 0
            text.append(int(token))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("who", ["near", "wider", "narrower", "early exit"])
def test_a_model_drafts_what_it_would_say_itself(world: World, who: str, temperature: float) -> None:
    """Every draft of every step, after rejections and full acceptances, equals drafting from scratch."""
    near = perturbed(world.weights, 0.08)
    spec, weights, num_layers = world.spec, near, None
    if who == "wider":
        spec, weights = resized_vocabulary(spec, near, V + 5)
    elif who == "narrower":
        spec, weights = resized_vocabulary(spec, near, V - 3)
    drafter: Drafter
    if who == "early exit":
        weights, num_layers = world.weights, 1
        drafter = EarlyExitDrafter(world.target, 1)
    else:
        drafter = DraftModelDrafter(make_decoder(spec, weights, max_rows=16), V)
    watched = WatchedModel(drafter, make_decoder(spec, weights), num_layers)
    params = SamplingParams(temperature, top_k=6, seed=3)
    requests = [make_request(one.prompt_ids, one.request_id, params=params, max_tokens=16) for one in world.requests]
    trace = decode(world.target, requests, watched, batch_size=3, depth=4)
    assert watched.num_judged == len(trace.row_step)
    assert watched.num_drafted == trace.num_draft.sum() > 80
    assert {0, 3} <= set(trace.num_accepted.tolist())


class WatchedCache(Watched):
    """After every commit, the draft model's cache holds a prefix of the committed tokens, by value."""

    def __init__(self, inner: DraftModelDrafter, decoder: Decoder, scratch: Decoder) -> None:
        super().__init__(inner)
        self._decoder, self._scratch = decoder, scratch
        self.missing: list[int] = []

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        self._decoder.kv.check_integrity()
        return super().propose(active, depths)

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        """The tokens are another test's matter."""

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        super().commit(active, num_draft, num_accepted, path)
        kv = self._decoder.kv
        length = int(kv.lengths[active.slot])
        committed = [*active.request.prompt_ids, *active.tokens[:-1]]
        self.missing.append(len(committed) - length)
        if num_draft:
            # Only the last draft of a full acceptance was never fed, and only that may be missing.
            assert self.missing[-1] == (1 if num_accepted == num_draft else 0)
        feed(self._scratch, [committed[:length]], last_only=True)
        for layer in range(self._decoder.spec.num_layers):
            found = kv.read(layer, active.slot, length)
            for mine, fresh in zip(found, self._scratch.kv.read(layer, 0, length), strict=True):
                torch.testing.assert_close(mine, fresh, rtol=0, atol=1e-10)
        empty(self._scratch)


@pytest.mark.parametrize("share", [0.0, 0.08, 0.5])
def test_the_draft_cache_holds_committed_tokens_only(world: World, share: float) -> None:
    """Fault 31: rows that accepted everything, something and nothing."""
    weights = perturbed(world.weights, share)
    decoder = make_decoder(world.spec, weights)
    watched = WatchedCache(DraftModelDrafter(decoder, V), decoder, make_decoder(world.spec, weights))
    trace = decode(world.target, world.requests, watched, batch_size=3, depth=3)
    assert outputs(trace) == world.truth
    assert share == 0.5 or 1 in watched.missing
    assert share == 0.0 or 0 in watched.missing
    assert decoder.kv.num_free_pages == decoder.kv.num_pages


class WatchedLookup(Watched):
    """Drafts equal those of an index that is built anew from the whole text."""

    def __init__(self, inner: NgramDrafter, *rule: object, eos_ids: Sequence[int]) -> None:
        super().__init__(inner)
        self._rule, self._eos_ids = rule, eos_ids

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        fresh = NgramLookup(*self._rule, eos_ids=self._eos_ids)  # type: ignore[arg-type]
        fresh.append(one.request.prompt_ids)
        fresh.append(one.tokens)
        assert proposal.q is None
        assert proposal.tree.tokens.tolist() == fresh.propose(depth).tolist()


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (4, 2), (1, 1)])
@pytest.mark.parametrize("rule", ["vllm", "transformers"])
def test_lookup_knows_all_committed_tokens_and_no_other(
    world: World, rule: str, max_ngram: int, min_ngram: int
) -> None:
    eos_ids = (4, 7)
    inner = NgramDrafter(max_ngram, min_ngram, rule, eos_ids)  # type: ignore[arg-type]
    watched = WatchedLookup(inner, max_ngram, min_ngram, rule, eos_ids=eos_ids)
    trace = decode(world.target, world.requests, watched, batch_size=3, depth=4)
    assert outputs(trace) == world.truth
    assert trace.num_draft.sum() > 0
    assert inner._lookups == {}


def test_a_first_draft_is_verified_too(world: World) -> None:
    """Fault 21: the prompt 1, 1, 1 drafts [1] at once, and the target says otherwise."""
    target = make_decoder(world.spec, world.weights)
    expected = outputs(decode(target, [make_request((1, 1, 1))]))
    trace = decode(target, [make_request((1, 1, 1))], NgramDrafter(3, 1, "vllm", ()), depth=1)
    assert outputs(trace) == expected


@pytest.mark.parametrize("name", ["ngram, vllm", "draft model, near", "early exit", "oracle", "forced length"])
def test_drafts_do_not_depend_on_the_batch(world: World, name: str) -> None:
    """Alone or among others, in any order: the same drafts and acceptances for a request, step by step."""

    def rows(requests: list, batch_size: int) -> dict[str, list[tuple[int, int]]]:
        trace = decode(world.target, requests, world.drafter(name), batch_size=batch_size, depth=4)
        found: dict[str, list[tuple[int, int]]] = {}
        for request, drafted, accepted in zip(trace.row_request, trace.num_draft, trace.num_accepted, strict=True):
            found.setdefault(trace.requests[request].request_id, []).append((int(drafted), int(accepted)))
        return found

    alone = rows(world.requests, 1)
    assert rows(world.requests, 3) == alone
    assert rows(world.requests[::-1], 4) == alone


def test_equal_prompts_share_one_prefill_of_the_draft_model(world: World) -> None:
    decoder = make_decoder(world.spec, perturbed(world.weights, 0.08))
    drafter = DraftModelDrafter(decoder, V)
    one = world.requests[3]
    requests = [make_request(one.prompt_ids, f"{i}", max_tokens=OUTPUT) for i in range(5)]
    trace = decode(world.target, requests, drafter, batch_size=2, depth=3)
    assert set(outputs(trace).values()) == {world.truth["r3"]}
    assert len(drafter._prompts) == 1


def test_passes_are_reported_as_they_were_made(world: World) -> None:
    """Levels of a ragged batch: requests leave as their depth is reached; layers and context of each pass are right."""
    target = make_decoder(world.spec, world.weights)
    decoder = make_decoder(world.spec, world.weights)
    texts = prompts(world.spec, [6, 9, 4])
    for drafter, layers in ((EarlyExitDrafter(target, 1), 1), (DraftModelDrafter(decoder, V), None)):
        active = []
        for slot, text in enumerate(texts):
            logits = target.prefill(text, slot)
            one = ActiveRequest(
                make_request(text, f"{slot}"),
                slot,
                generator=_Coins(),
                stop_state=None,  # type: ignore[arg-type]
            )
            one.tokens.append(int(logits.argmax()))
            drafter.start(one)
            active.append(one)
        assert drafter.take_passes() == []
        for one, depth in zip(active, (0, 3, 1), strict=True):
            target.kv.reserve(one.slot, depth + 1)
        drafter.propose(active, (0, 3, 1))
        made = drafter.take_passes()
        assert [one.query_lens for one in made] == [(1, 1), (1,), (1,)]
        assert [one.context_lens for one in made] == [(9, 4), (10,), (11,)]
        assert {(one.spec, one.dtype, one.num_layers) for one in made} == {(world.spec, "fp64", layers)}
        assert drafter.take_passes() == []
        empty(target)


class _Coins:
    seed, request_id = 0, "r"


# ---- replays


def long_requests(world: World, count: int, length: int) -> list:
    target = make_decoder(world.spec, world.weights, max_context=256, num_slots=8)
    texts = prompts(world.spec, [8] * count, seed=5)
    requests = [make_request(text, f"q{i}", max_tokens=length) for i, text in enumerate(texts)]
    truth = outputs(decode(target, requests, batch_size=8))
    return [
        make_request(one.prompt_ids, one.request_id, max_tokens=length, reference=truth[one.request_id])
        for one in requests
    ]


@pytest.fixture(scope="module")
def replayed(world: World) -> tuple[Decoder, list]:
    return make_decoder(world.spec, world.weights, max_context=256, num_slots=8), long_requests(world, 16, 160)


@pytest.mark.parametrize(("length", "depth"), [(1.0, 4), (1.5, 3), (2.25, 4), (3.0, 5), (4.9, 4), (5.0, 4)])
def test_a_forced_length_is_the_mean_acceptance_length(
    replayed: tuple[Decoder, list], length: float, depth: int
) -> None:
    """Bonus token included, over steps that had room for the whole draft; the spread is that of a coin per step."""
    target, requests = replayed
    drafter = ReplayDrafter(V, length=length)
    assert drafter.synthetic
    trace = decode(target, requests, drafter, batch_size=8, depth=depth)
    assert outputs(trace) == {one.request_id: one.reference for one in requests}
    whole = trace.num_draft == depth
    accepted = trace.num_accepted[whole]
    share = length - int(length)
    sigma = (share * (1 - share) / len(accepted)) ** 0.5
    assert abs(1 + accepted.mean() - length) <= 4 * sigma
    assert set(accepted.tolist()) == ({int(length) - 1} if share == 0 else {int(length) - 1, int(length)})
    found = metrics.acceptance_metrics([trace], window_only=False)
    assert found["acceptance_length"] == pytest.approx(length, abs=0.05 * length)


def test_forced_rates_are_the_conditional_curve(replayed: tuple[Decoder, list]) -> None:
    target, requests = replayed
    rates = (0.8, 0.5, 0.9, 0.25)
    trace = decode(target, requests, ReplayDrafter(V, rates=rates), batch_size=8, depth=4)
    assert outputs(trace) == {one.request_id: one.reference for one in requests}
    accepted = trace.num_accepted[trace.num_draft == 4]
    for i, rate in enumerate(rates):
        reached = int((accepted >= i).sum())
        sigma = (rate * (1 - rate) / reached) ** 0.5
        assert abs((accepted > i).sum() / reached - rate) < 4 * sigma
    # A curve shorter than the depth says nothing of what follows: nothing follows.
    trace = decode(target, requests[:4], ReplayDrafter(V, rates=(1.0, 1.0)), batch_size=4, depth=4)
    assert set(trace.num_accepted[trace.num_draft == 4].tolist()) == {2}


def test_replays_depend_on_seed_and_request_alone(replayed: tuple[Decoder, list]) -> None:
    target, requests = replayed

    def accepted(seed: int, batch_size: int, order: int) -> list[tuple[int, ...]]:
        drafter = ReplayDrafter(V, length=2.5, seed=seed)
        trace = decode(target, requests[:6][::order], drafter, batch_size=batch_size, depth=4)
        mine = [tuple(trace.num_accepted[trace.row_request == i].tolist()) for i in range(6)]
        return mine[::order]

    assert accepted(0, 1, 1) == accepted(0, 4, -1)
    assert accepted(0, 4, 1) != accepted(1, 4, 1)
    assert len(set(accepted(0, 4, 1))) == 6


def test_an_oracle_is_right_up_to_the_end_of_its_reference(world: World) -> None:
    """A reference that ends early (it was cut by EOS) drafts no further; past it, nothing is drafted."""
    short = make_request(world.requests[0].prompt_ids, "r0", max_tokens=OUTPUT, reference=world.truth["r0"][:10])
    trace = decode(world.target, [short], ReplayDrafter(V), depth=4)
    assert outputs(trace) == {"r0": world.truth["r0"]}
    assert accepted_share(trace) == 1.0
    assert trace.num_draft.sum() < 10
    assert np.array_equal(trace.num_accepted, trace.num_draft)


def test_replays_refuse_what_they_can_not_replay(world: World) -> None:
    with pytest.raises(InputError, match="request r has no AR output to replay"):
        decode(world.target, [make_request((1, 2, 3))], ReplayDrafter(V))
    sampled = make_request((1, 2, 3), params=SamplingParams(0.5), reference=(1, 2))
    with pytest.raises(InputError, match="fixed at temperature 0 only"):
        decode(world.target, [sampled], ReplayDrafter(V, length=2.0))
    assert world.target.kv.num_free_pages == world.target.kv.num_pages
