"""Every way a sampled output can come about when each step drafts a chosen tree, which needs no coins of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from coin_law import CoinPath, Tokens, cells

from specbench.engine.tree import TokenTree

Walk = tuple[tuple[int, ...], dict[int, float], np.ndarray, float]
Law = Callable[[Tokens], np.ndarray]


def walks(target: Law, tokens: Tokens, tree: TokenTree, place: int = -1) -> Iterator[Walk]:
    """(accepted nodes, coins by node, law of the emitted token, probability) of every walk from `place`, by the rule
    for point masses: a child holding x is accepted with the probability that is left to x."""
    law = target((*tokens, *(int(tree.tokens[node]) for node in tree.path_to(place)))).copy()
    chance, coins = 1.0, dict[int, float]()
    for child in tree.children[place + 1]:
        ratio = float(law[tree.tokens[child]] / law.sum()) if law.sum() > 0 else 0.0
        if ratio > 1e-12:
            for path, more, last, share in walks(target, tokens, tree, child):
                yield (child, *path), {**coins, child: ratio / 2, **more}, last, chance * ratio * share
        chance *= 1 - ratio
        coins[child] = (1 + ratio) / 2
        law[tree.tokens[child]] = 0.0
        if chance < 1e-12:
            return
    yield (), coins, law, chance


def chosen_coin_paths(
    target: Law, draft: Callable[[Tokens, int], TokenTree], depth: int, length: int
) -> Iterator[CoinPath]:
    """Every way that `length` tokens come about, written from the definitions alone; `draft` gives a step's tree."""

    def continued(tokens: Tokens, coins: tuple[float, ...], volume: float) -> Iterator[CoinPath]:
        if len(tokens) == length:
            yield CoinPath(coins, (), tokens, volume)
            return
        tree = draft(tokens, min(depth, length - len(tokens) - 1))
        for path, judged, law, share in walks(target, tokens, tree):
            own = tuple(judged.get(node, 0.5) for node in range(len(tree)))
            accepted = tuple(int(tree.tokens[node]) for node in path)
            for token, probability, middle in cells(law):
                yield from continued((*tokens, *accepted, token), (*coins, *own, middle), volume * share * probability)

    for token, probability, middle in cells(target(())):
        yield from continued((token,), (middle,), probability)
