"""Coins of whole outputs: forced generators, the cells of a law, and a model of few tokens with its exact laws."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from engine_tools import history_logits, make_decoder, perturbed, small_vocabulary

from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.ngram import NgramLookup
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.models.decoder import Decoder
from specbench.engine.sampling import SamplingParams, distribution


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
DraftLaw = Callable[[Tokens, Tokens], np.ndarray]
"""(committed output, path drafted behind it) -> what the next draft is drawn from."""


def cells(law: np.ndarray) -> Iterator[tuple[int, float, float]]:
    """(token, probability, midpoint of its interval of the inverse CDF)."""
    law = law / law.sum()
    below = np.cumsum(law) - law
    for token in np.flatnonzero(law > 0):
        yield int(token), float(law[token]), float(below[token] + law[token] / 2)


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


def drawn_siblings(law: np.ndarray, count: int, children: str) -> Iterator[tuple[Tokens, tuple[float, ...], float]]:
    """(tokens, draft coins, probability) of every draw of `count` siblings; coins that draw nothing are 0.5."""
    if count == 0:
        yield (), (), 1.0
        return
    if not law.sum() > 0:
        yield (), (0.5,) * count, 1.0
        return
    for token, probability, middle in cells(law):
        rest = law
        if children == "without_replacement":
            rest = law.copy()
            rest[token] = 0.0
        for tokens, coins, share in drawn_siblings(rest, count - 1, children):
            yield (token, *tokens), (middle, *coins), probability * share


def tree_coin_paths(
    tiny: TinyLaw, draft_law: DraftLaw, shape: StaticTree, children: str, length: int
) -> Iterator[CoinPath]:
    """Every way that `length` tokens can come about through drafted trees, written from the definitions alone."""

    def drafted(tokens: Tokens, tree: StaticTree) -> Iterator[tuple[dict, tuple[float, ...], float]]:
        """Trees as {node: token}, with the draft's coins and their probability; level by level."""

        def grow(nodes: dict[int, int], level: int) -> Iterator[tuple[dict, tuple[float, ...], float]]:
            if level == tree.depth:
                yield nodes, (), 1.0
                return
            fed = [place for place in tree.inner[level] if place in nodes or place == -1]
            draws = []
            for place in fed:
                law, wanted = draft_law(tokens, context(nodes, tree, place)), tree.children[place + 1]
                if children == "top":
                    best = np.argsort(-law, kind="stable")[: len(wanted)]
                    draws.append([(tuple(int(t) for t in best), (), 1.0)])
                else:
                    draws.append(list(drawn_siblings(law, len(wanted), children)))
            for combination in itertools.product(*draws):
                more, coins, share = dict(nodes), [], 1.0
                for place, (found, own, probability) in zip(fed, combination, strict=True):
                    more |= dict(zip(tree.children[place + 1], found, strict=False))
                    coins += own
                    share *= probability
                for rest, later, probability in grow(more, level + 1):
                    yield rest, (*coins, *later), share * probability

        return grow({}, 0)

    def context(nodes: dict[int, int], tree: StaticTree, place: int) -> Tokens:
        path: list[int] = []
        while place >= 0:
            path.insert(0, nodes[place])
            place = tree.parents[place]
        return tuple(path)

    def walks(
        tokens: Tokens, tree: StaticTree, nodes: dict[int, int], place: int, coins: dict[int, float]
    ) -> Iterator[tuple[Tokens, dict[int, float], np.ndarray, float]]:
        """(accepted tokens, coins by node, law of the last coin, probability) of every walk from `place`."""
        path = context(nodes, tree, place)
        law = tiny.target((*tokens, *path)).astype(np.float64)
        law = law / law.sum()
        below = [child for child in tree.children[place + 1] if child in nodes]
        q = draft_law(tokens, path) if below and children != "top" else None
        chance, coins = 1.0, dict(coins)
        for child in below:
            token = nodes[child]
            ratio = min(1.0, law[token] / (1.0 if q is None else q[token]))
            if ratio > 0:
                for more, found, last, share in walks(tokens, tree, nodes, child, {**coins, child: ratio / 2}):
                    yield (token, *more), found, last, chance * ratio * share
            chance *= 1 - ratio
            if chance < 1e-12:
                return
            coins[child] = (1 + ratio) / 2
            if q is None:
                law[token] = 0.0
            else:
                law = np.maximum(law - q, 0.0)
                if children == "without_replacement":
                    q = q.copy()
                    q[token] = 0.0
                    q = q / q.sum() if q.sum() > 0 else q
            law = law / law.sum()
        yield (), coins, law, chance

    def continued(
        tokens: Tokens, coins: tuple[float, ...], draft_coins: tuple[float, ...], volume: float
    ) -> Iterator[CoinPath]:
        if len(tokens) == length:
            yield CoinPath(coins, draft_coins, tokens, volume)
            return
        tree = shape.cut(length - len(tokens) - 1)
        for nodes, more_draft_coins, share in drafted(tokens, tree):
            numbers = sorted(nodes)
            for path, judged, law, chance in walks(tokens, tree, nodes, -1, {}):
                own = tuple(judged.get(place, 0.5) for place in numbers)
                for token, probability, middle in cells(law):
                    yield from continued(
                        (*tokens, *path, token),
                        (*coins, *own, middle),
                        (*draft_coins, *more_draft_coins),
                        volume * share * chance * probability,
                    )

    for token, probability, middle in cells(tiny.target(())):
        yield from continued((token,), (middle,), (), probability)


def assert_volumes_are_the_law(paths: Sequence[CoinPath], expected: Mapping[Tokens, float]) -> None:
    """The cells of every output add up to its probability."""
    emitted: Counter[Tokens] = Counter()
    for path in paths:
        emitted[path.output] += path.volume  # type: ignore[assignment]
    assert set(emitted) == set(expected)
    for tokens, probability in expected.items():
        assert abs(emitted[tokens] - probability) < 1e-9
