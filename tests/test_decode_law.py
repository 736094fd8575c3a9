"""Sampled output has the target's law, exactly, through the whole engine, whatever drafts; and seeds are streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engine_tools import decode, history_logits, make_decoder, make_request, outputs, perturbed, small_vocabulary
from engine_world import SAMPLING_DRAFTERS, World, build_world
from scipy.stats import chisquare

from specbench.engine import decode as decode_module
from specbench.engine.drafters import model as model_drafters
from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.ngram import NgramLookup
from specbench.engine.models.decoder import Decoder
from specbench.engine.sampling import SamplingParams, distribution


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


@dataclass(frozen=True)
class CoinPath:
    """A cell of the unit cube of all coins: its midpoints, the output they must lead to, and its volume."""

    target_coins: tuple[float, ...]
    draft_coins: tuple[float, ...]
    output: tuple[int, ...]
    volume: float


Tokens = tuple[int, ...]
Law = Callable[[Tokens], np.ndarray]
Draft = tuple[Tokens, tuple[float, ...], list[np.ndarray], float]


def cells(law: np.ndarray) -> Iterator[tuple[int, float, float]]:
    """(token, probability, midpoint of its interval of the inverse CDF)."""
    law = law / law.sum()
    below = np.cumsum(law) - law
    for token in np.flatnonzero(law > 0):
        yield int(token), float(law[token]), float(below[token] + law[token] / 2)


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


class ForcedCoins:
    """Stands in for a request's generator: the coins of its path."""

    paths: dict[str, CoinPath]

    def __init__(self, seed: int | None, request_id: str) -> None:
        self.request_id, self.seed, self.num_drawn = request_id, seed, 0
        path = self.paths[request_id.removeprefix("draft/")]
        self._coins = path.draft_coins if request_id.startswith("draft/") else path.target_coins

    def uniforms(self, count: int) -> np.ndarray:
        self.num_drawn += count
        coins = self._coins[self.num_drawn - count : self.num_drawn]
        assert len(coins) == count, f"request {self.request_id} took more coins than its path has"
        return np.array(coins)


@dataclass
class TinyLaw:
    """A model of few tokens with its laws, computed from scratch and without the engine."""

    vocab_size: int
    params: SamplingParams
    prompt: Tokens = (0, 1, 2, 0, 1)

    def __post_init__(self) -> None:
        self.spec, self.weights = small_vocabulary(self.vocab_size)
        self.weights = {n: t * (0.4 if n == "lm_head.weight" else 1.0) for n, t in self.weights.items()}
        self.near = perturbed(self.weights, 0.3)
        self._scratch = {
            "target": make_decoder(self.spec, self.weights, backend="torch"),
            "draft": make_decoder(self.spec, self.near, backend="torch"),
        }
        self._laws: dict[tuple[str, int | None, Tokens], np.ndarray] = {}

    def law(self, who: str, tokens: Tokens, num_layers: int | None = None) -> np.ndarray:
        key = (who, num_layers, tokens)
        if key not in self._laws:
            logits = history_logits(self._scratch[who], (*self.prompt, *tokens), num_layers)[-1:]
            self._laws[key] = distribution(logits, [self.params])[0].numpy()
        return self._laws[key]

    def target(self, tokens: Tokens) -> np.ndarray:
        return self.law("target", tokens)

    def output_law(self, length: int) -> dict[Tokens, float]:
        law: dict[Tokens, float] = {(): 1.0}
        for _ in range(length):
            law = {
                (*tokens, x): probability * float(p)
                for tokens, probability in law.items()
                for x, p in enumerate(self.target(tokens))
                if p > 0
            }
        return law

    def drafts(self, name: str) -> Callable[[Tokens, int], Iterator[Draft]]:
        def ngram(tokens: Tokens, room: int) -> Iterator[Draft]:
            lookup = NgramLookup(3, 1, "vllm")
            lookup.append((*self.prompt, *tokens))
            draft = tuple(int(t) for t in lookup.propose(room))
            yield draft, (), [np.eye(self.vocab_size)[x] for x in draft], 1.0

        def model(tokens: Tokens, room: int) -> Iterator[Draft]:
            if room == 0:
                yield (), (), [], 1.0
                return
            for draft, coins, q, share in model(tokens, room - 1):
                who, layers = ("target", 1) if name == "early exit" else ("draft", None)
                law = self.law(who, (*tokens, *draft), layers)
                for token, probability, middle in cells(law):
                    yield (*draft, token), (*coins, middle), [*q, law], share * probability

        return ngram if name.startswith("ngram") else model

    def drafter(self, name: str, target: Decoder) -> Drafter | None:
        if name == "none":
            return None
        if name == "early exit":
            return EarlyExitDrafter(target, 1)
        if name.startswith("ngram"):
            return NgramDrafter(3, 1, "vllm", ())
        return DraftModelDrafter(make_decoder(self.spec, self.near, num_slots=16), self.vocab_size)


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
        def _choose(self, logits: torch.Tensor, active: Sequence) -> tuple:
            tokens, _ = super()._choose(4 * logits, active)
            return tokens, distribution(logits, [one.request.params for one in active])

    tiny = TinyLaw(4, SamplingParams(1.0, seed=11))
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16)
    assert p_value(tiny, Sharpened(target, 1), target, 2000, 3) < 1e-6
