"""The exact checker for trees and blocks: each node has one threshold, so a verdict is decided by the walk alone.

`tree_outcomes`, `traversal_outcomes` and `block_outcomes` restate the rules in fractions to find every way a step can
end, then run the rule under test on coins of that way: near both ends of every interval and in its middle, with the
coins that must not matter at their extremes. Weights are the exact volumes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as F

import numpy as np
import torch
from exact_law import Context, Model, Row, cells, normalised, residual, sequence_law, tensor

from specbench.engine.tree import TokenTree
from specbench.engine.verify import Verification

TreeRule = Callable[[torch.Tensor, TokenTree, torch.Tensor | None, str, np.ndarray], Verification]
Ways = Iterator[tuple[tuple[int, ...], Row, dict[int, tuple[F, F]]]]
"""(accepted path, law of the emitted token, interval of each coin that matters)."""


def node_contexts(tree: TokenTree) -> list[Context]:
    """Tokens from the root down to the root (index 0) and to each node (index i + 1)."""
    contexts: list[Context] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        contexts.append((*contexts[parent + 1], token))
    return contexts


def without(row: Row, token: int) -> Row:
    return tuple(F(0) if index == token else mass for index, mass in enumerate(row))


def sequential_ways(p: Sequence[Row], tree: TokenTree, q: Sequence[Row] | None, siblings: str) -> Ways:
    """Every way a sequential walk can end."""

    def walk(row: int, path: tuple[int, ...], coins: dict[int, tuple[F, F]]) -> Ways:
        law, q_law = p[row], None
        coins = dict(coins)
        for node in [i for i, parent in enumerate(tree.parents) if parent + 1 == row]:
            token = int(tree.tokens[node])
            if q is None:
                threshold = law[token]
                rest = without(law, token)
            else:
                q_law = q[node] if q_law is None else q_law
                threshold = min(F(1), law[token] / q_law[token])
                rest = residual(law, q_law)
            yield from walk(node + 1, (*path, node), {**coins, node: (F(0), threshold)}) if threshold else ()
            if threshold == 1:
                return
            coins[node] = (threshold, F(1))
            law = normalised(rest)
            if siblings == "without_replacement" and q_law is not None and sum(without(q_law, token)):
                q_law = normalised(without(q_law, token))
        yield path, law, coins

    return walk(0, (), {})


def block_ways(p: Sequence[Row], tree: TokenTree, q: Sequence[Row] | None) -> Ways:
    """Every way a block verification can end: the last coin below its threshold decides."""
    count = len(tree)
    size = len(p[0])
    told = [tuple(F(int(t == other)) for other in range(size)) for t in tree.tokens] if q is None else q
    ratios, lefts, thresholds = [F(1)], [], []
    for i, token in enumerate(tree.tokens.tolist()):
        ratios.append(min(F(1), ratios[-1] * p[i][token] / told[i][token]))
    for i, ratio in enumerate(ratios):
        left = p[i] if i == count else tuple(max(ratio * a - b, F(0)) for a, b in zip(p[i], told[i], strict=True))
        lefts.append(left)
        total = sum(left)
        thresholds.append(ratio if i == count else total / (total + 1 - ratio) if total + 1 - ratio else F(1))
    for accepted in range(count, -1, -1):
        coins = {i - 1: (thresholds[i], F(1)) for i in range(accepted + 1, count + 1)}
        if accepted:
            coins[accepted - 1] = (F(0), thresholds[accepted])
        if all(low < high for low, high in coins.values()):
            law = normalised(lefts[accepted]) if sum(lefts[accepted]) else p[accepted]
            yield tuple(range(accepted)), law, coins


Update = Callable[[F, F, F], F]
"""The r of a node that lost a child, from the mass S of its residual, its r before, and Q(x) of the child."""


def lossless_update(total: F, ratio: F, lost: F) -> F:
    return total / (total + 1 - ratio) if total + 1 - ratio else F(1)


def traversal_ways(
    p: Sequence[Row], tree: TokenTree, q: Sequence[Row] | None, siblings: str, update: Update = lossless_update
) -> Ways:
    """Every way a traversal can end: nodes are tested after their children, each against one threshold, which no coin
    moves; the first whose coin is below stands with its whole path."""
    tested: dict[int, tuple[F, F]] = {}

    def below(row: int, path: tuple[int, ...], ratio: F) -> Ways:
        law, rest = p[row], None
        for node in [i for i, parent in enumerate(tree.parents) if parent + 1 == row]:
            assert q is not None
            token, rest = int(tree.tokens[node]), q[node] if rest is None else rest
            yield from below(node + 1, (*path, node), min(F(1), ratio * law[token] / rest[token]))
            left = tuple(max(ratio * a - b, F(0)) for a, b in zip(law, rest, strict=True))
            ratio = update(sum(left, F(0)), ratio, rest[token])
            law = normalised(left) if sum(left) else law
            if siblings == "without_replacement":
                others = without(rest, token)
                rest = normalised(others) if sum(others) else others
        if row and ratio:
            yield path, law, {**tested, row - 1: (F(0), min(F(1), ratio))}
        tested[row - 1] = (ratio, F(1))
        if not row:
            del tested[-1]
            yield path, law, dict(tested)

    for path, law, coins in below(0, (), F(1)):
        if all(low < high for low, high in coins.values()):
            yield path, law, coins


def ways_law(ways: Ways, tree: TokenTree) -> dict[Context, F]:
    """Law of the emission that the ways themselves describe, without a rule under test."""
    law: dict[Context, F] = defaultdict(F)
    for path, final, coins in ways:
        volume = F(1)
        for low, high in coins.values():
            volume *= high - low
        for token, mass in enumerate(final):
            if mass:
                law[(*(int(tree.tokens[node]) for node in path), token)] += volume * mass
    return law


def outcomes_of(
    ways: Ways, rule: TreeRule, p: Sequence[Row], tree: TokenTree, q: Sequence[Row] | None, siblings: str
) -> dict[Context, F]:
    """Law of what `rule` emits for one draft: {emitted tokens: probability}."""
    law: dict[Context, F] = defaultdict(F)
    arguments = tensor(p), tree, None if q is None else tensor(q), siblings
    for path, final, coins in ways:
        volume = F(1)
        for low, high in coins.values():
            volume *= high - low
        for cell in cells(list(itertools.accumulate(final))):
            seen = set()
            for share, rest in ((F(1, 1000), 0.0), (F(1, 2), 0.5), (F(999, 1000), 1 - 2**-53)):
                uniforms = np.full(len(tree) + 1, rest)
                for node, (low, high) in coins.items():
                    uniforms[node] = float(low + (high - low) * share)
                uniforms[-1] = float(cell[0] + (cell[1] - cell[0]) * share)
                verdict = rule(*arguments, uniforms)
                assert verdict.path == path, f"path {verdict.path}, expected {path}, for coins {uniforms}"
                assert verdict.accepted == len(path)
                assert verdict.tokens == (*(int(tree.tokens[node]) for node in path), verdict.next_token)
                seen.add(verdict.tokens)
            assert len(seen) == 1, f"the verdict changes within the cell {cell}: {seen}"
            law[seen.pop()] += volume * (cell[1] - cell[0])
    assert sum(law.values()) == 1
    return law


def tree_outcomes(
    rule: TreeRule, target: Model, tree: TokenTree, draft: Model | None, siblings: str
) -> dict[Context, F]:
    """Law of one drafted tree under the sequential rule; `draft` None: chosen nodes."""
    p, q = tree_laws(target, tree, draft)
    return outcomes_of(sequential_ways(p, tree, q, siblings), rule, p, tree, q, siblings)


def traversal_outcomes(
    rule: TreeRule, target: Model, tree: TokenTree, draft: Model | None, siblings: str
) -> dict[Context, F]:
    """Law of one drafted tree under traversal."""
    p, q = tree_laws(target, tree, draft)
    return outcomes_of(traversal_ways(p, tree, q, siblings), rule, p, tree, q, siblings)


def tree_laws(target: Model, tree: TokenTree, draft: Model | None) -> tuple[list[Row], list[Row] | None]:
    """The target's laws after the root and each node, and the law that each node was drawn from."""
    contexts = node_contexts(tree)
    q = None if draft is None else [draft(contexts[parent + 1]) for parent in tree.parents]
    return [target(context) for context in contexts], q


def block_outcomes(rule: TreeRule, target: Model, tokens: Context, draft: Model | None) -> dict[Context, F]:
    tree = TokenTree.chain(np.array(tokens, dtype=np.int64))
    contexts = node_contexts(tree)
    p = [target(context) for context in contexts]
    q = None if draft is None else [draft(context) for context in contexts[:-1]]
    return outcomes_of(block_ways(p, tree, q), rule, p, tree, q, "independent")


def children_drawn(law: Row, count: int, siblings: str) -> Iterator[tuple[Context, F]]:
    """Every ordered draw of `count` siblings (fewer where the law runs out), with its probability."""
    if count == 0:
        yield (), F(1)
        return
    if not sum(law):
        yield (), F(1)
        return
    for token, mass in enumerate(law):
        if mass:
            rest = law
            if siblings == "without_replacement":
                rest = without(law, token)
                rest = normalised(rest) if sum(rest) else rest
            for others, share in children_drawn(rest, count - 1, siblings):
                yield (token, *others), mass * share


def drawn_trees(draft: Model, shape: Sequence[int], siblings: str) -> Iterator[tuple[TokenTree, F]]:
    """Every tree whose nodes at level d have shape[d] children drawn from `draft`, with its probability."""

    def level(tokens: list[int], parents: list[int], frontier: list[tuple[int, Context]], depth: int) -> Iterator:
        if depth == len(shape) or not frontier:
            yield TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)), F(1)
            return
        draws = [list(children_drawn(draft(context), shape[depth], siblings)) for _, context in frontier]
        for chosen in itertools.product(*draws):
            more, above, below = list(tokens), list(parents), []
            share = F(1)
            for (node, context), (children, mass) in zip(frontier, chosen, strict=True):
                share *= mass
                for token in children:
                    below.append((len(more), (*context, token)))
                    more.append(token)
                    above.append(node)
            for tree, mass in level(more, above, below, depth + 1):
                yield tree, share * mass

    return level([], [], [(-1, ())], 0)


Outcomes = Callable[[TreeRule, Model, TokenTree, Model | None, str], dict[Context, F]]


def drawn_law(
    rule: TreeRule,
    target: Model,
    draft: Model,
    shape: Sequence[int],
    siblings: str,
    outcomes: Outcomes = tree_outcomes,
) -> dict[Context, F]:
    """Law of one step's emission over all drawn trees."""
    law: dict[Context, F] = defaultdict(F)
    for tree, mass in drawn_trees(draft, shape, siblings):
        for emitted, share in outcomes(rule, target, tree, draft, siblings).items():
            law[emitted] += mass * share
    return law


def drawn_block_law(rule: TreeRule, target: Model, draft: Model, depth: int) -> dict[Context, F]:
    law: dict[Context, F] = defaultdict(F)
    for tokens, mass in sequence_law(draft, depth).items():
        for emitted, share in block_outcomes(rule, target, tokens, draft).items():
            law[emitted] += mass * share
    return law
