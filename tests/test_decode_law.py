"""Sampled output has the target's law, exactly, through the whole engine, whatever drafts; and seeds are streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from coin_law import CoinPath, Draft, ForcedCoins, Law, TinyLaw, Tokens, cells
from engine_tools import decode, make_decoder, make_request, outputs
from engine_world import SAMPLING_DRAFTERS, World, build_world
from scipy.stats import chisquare

from specbench.engine import decode as decode_module
from specbench.engine.drafters import levels as model_drafters
from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.model import EarlyExitDrafter
from specbench.engine.models.decoder import Decoder
from specbench.engine.sampling import SamplingParams


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


# ---- sampling


@pytest.mark.parametrize("name", [None, *SAMPLING_DRAFTERS])
def test_a_seeded_request_is_the_same_alone_and_in_every_batch(world: World, name: str | None) -> None:
    """Fault 27: seeds 1, none and 2, a greedy request among them, orders turned around, run after run."""
    options = [
        SamplingParams(0.9, seed=1),
        SamplingParams(0.9),
        SamplingParams(1.3, top_k=5, top_p=0.9, seed=2),
        SamplingParams(0.0),
        SamplingParams(0.7, min_p=0.05, seed=1),
    ]
    requests = [
        make_request(one.prompt_ids, one.request_id, max_tokens=16, params=params)
        for one, params in zip(world.requests, options, strict=False)
    ]
    alone = {}
    for request in requests:
        drafter = world.drafter(name) if name else None
        alone |= outputs(decode(world.target, [request], drafter, depth=3))
    assert alone["r3"] == world.truth["r3"][:16]
    for order in (1, -1):
        drafter = world.drafter(name) if name else None
        together = outputs(decode(world.target, requests[::order], drafter, batch_size=3, depth=3))
        for request in requests:
            if request.request_id != "r1":
                assert together[request.request_id] == alone[request.request_id]
    assert together["r1"] != alone["r1"]
    other = make_request(requests[0].prompt_ids, "r0", max_tokens=16, params=SamplingParams(0.9, seed=3))
    assert outputs(decode(world.target, [other], world.drafter(name) if name else None, depth=3))["r0"] != alone["r0"]


def coin_paths(
    target: Law, drafts: Callable[[Tokens, int], Iterator[Draft]], depth: int, length: int
) -> Iterator[CoinPath]:
    """Every way that `length` tokens can come about, written from the definitions alone: no code of the engine."""

    def continued(tokens: Tokens, coins: Tokens, draft_coins: Tokens, volume: float) -> Iterator[CoinPath]:
        if len(tokens) == length:
            yield CoinPath(coins, draft_coins, tokens, volume)
            return
        for draft, more_draft_coins, q, share in drafts(tokens, min(depth, length - len(tokens) - 1)):
            p = [target((*tokens, *draft[:j])) for j in range(len(draft) + 1)]
            ratios = [min(1.0, p[j][x] / q[j][x]) for j, x in enumerate(draft)]
            for accepted in range(len(draft) + 1):
                judged = [ratios[j] / 2 for j in range(accepted)]
                chance = float(np.prod(ratios[:accepted]))
                law = p[accepted]
                if accepted < len(draft):
                    chance *= 1 - ratios[accepted]
                    judged += [(1 + ratios[accepted]) / 2, *[0.5] * (len(draft) - accepted - 1)]
                    law = np.maximum(p[accepted] - q[accepted], 0)
                if chance < 1e-12:
                    continue
                for token, probability, middle in cells(law):
                    yield from continued(
                        (*tokens, *draft[:accepted], token),
                        (*coins, *judged, middle),
                        (*draft_coins, *more_draft_coins),
                        volume * share * chance * probability,
                    )

    for token, probability, middle in cells(target(())):
        yield from continued((token,), (middle,), (), probability)


LAWS = {
    "plain": SamplingParams(1.0, seed=0),
    "filtered": SamplingParams(1.4, top_k=3, top_p=0.95, seed=0),
}


@pytest.mark.parametrize("params", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize(("vocab_size", "depth", "length"), [(4, 1, 3), (3, 2, 4)])
@pytest.mark.parametrize("name", ["none", "ngram", "draft model", "early exit"])
def test_the_whole_engine_has_the_targets_law_exactly(
    name: str, vocab_size: int, depth: int, length: int, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All coins of a request, cut into the cells on which its output is constant: each cell's midpoint is run through
    the engine, must give the output the definitions say, and the volumes must add up to the target's law."""
    tiny = TinyLaw(vocab_size, params)
    paths = list(coin_paths(tiny.target, tiny.drafts(name), depth if name != "none" else 0, length))
    if name == "none":
        paths = [CoinPath(p.target_coins, (), p.output, p.volume) for p in paths]
    else:
        assert max(len(p.target_coins) for p in paths) > length
    ForcedCoins.paths = {str(i): path for i, path in enumerate(paths)}
    monkeypatch.setattr(decode_module, "RequestGenerator", ForcedCoins)
    monkeypatch.setattr(model_drafters, "RequestGenerator", ForcedCoins)
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16)
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=params) for i in range(len(paths))]
    found = outputs(decode(target, requests, tiny.drafter(name, target), batch_size=16, depth=depth))

    expected = tiny.output_law(length)
    emitted: Counter[Tokens] = Counter()
    for i, path in enumerate(paths):
        assert found[str(i)] == path.output
        emitted[found[str(i)]] += path.volume  # type: ignore[assignment]
    assert set(emitted) == set(expected)
    for tokens, probability in expected.items():
        assert emitted[tokens] == pytest.approx(probability, abs=1e-9)


def p_value(tiny: TinyLaw, drafter: Drafter | None, target: Decoder, runs: int, length: int) -> float:
    """Chi-square of `runs` outputs from the real generators against the exact law, rare outputs pooled."""
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=tiny.params) for i in range(runs)]
    counts = Counter(outputs(decode(target, requests, drafter, batch_size=16, depth=2, check=False)).values())
    law = tiny.output_law(length)
    assert set(counts) <= set(law)
    common = [tokens for tokens, probability in law.items() if probability * runs >= 8]
    observed = [counts[tokens] for tokens in common]
    expected = [law[tokens] * runs for tokens in common]
    rest = runs - sum(expected)
    if rest > 1e-6 * runs:
        observed.append(runs - sum(observed))
        expected.append(rest)
    return float(chisquare(observed, np.array(expected) * runs / sum(expected)).pvalue)


@pytest.mark.parametrize("name", ["none", "ngram", "draft model", "early exit"])
def test_seeded_streams_draw_from_the_targets_law(name: str) -> None:
    """The real generators: are a request's coins uniform, and its draft and verify streams independent?"""
    tiny = TinyLaw(4, SamplingParams(1.0, seed=11))
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16)
    assert p_value(tiny, tiny.drafter(name, target), target, 4000, 3) > 1e-4


def test_the_statistic_refuses_a_false_q() -> None:
    """Fault 11: drafts sampled from a sharper law than the q handed over."""

    class Sharpened(EarlyExitDrafter):
        def _drawn(self, law: torch.Tensor, coins: np.ndarray) -> list[int]:
            return super()._drawn(law**4 / (law**4).sum(), coins)

    tiny = TinyLaw(4, SamplingParams(1.0, seed=11))
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16)
    assert p_value(tiny, Sharpened(target, 1), target, 2000, 3) < 1e-6
