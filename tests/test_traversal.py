"""Traversal verification is lossless on drawn trees, and is block verification on a chain: proved by enumeration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction as F

import numpy as np
import pytest
import torch
from coin_law import TinyLaw
from engine_tools import decode, make_decoder, make_request, outputs
from exact_law import (
    Context,
    Model,
    completed,
    constant,
    first_token_law,
    four_drafts,
    four_tokens,
    history_draft,
    history_target,
    mean_emitted,
    sequence_law,
)
from scipy.stats import chisquare
from tree_law import (
    Update,
    drawn_block_law,
    drawn_law,
    drawn_trees,
    lossless_update,
    traversal_outcomes,
    traversal_ways,
    tree_laws,
    tree_outcomes,
    ways_law,
)

from specbench.engine.drafters.growth import Children
from specbench.engine.drafters.model import EarlyExitDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.sampling import RequestGenerator, SamplingParams
from specbench.engine.tree import TokenTree
from specbench.engine.verify import (
    DraftContractError,
    Proposal,
    Verification,
    verify,
    verify_block,
    verify_sequential,
    verify_traversal,
)

SAMPLED = ("independent", "without_replacement")
BOTH = constant("1/2", "3/10", "1/5"), constant("1/5", "3/10", "1/2")


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


def traversal_law(target: Model, draft: Model, shape: Sequence[int], siblings: str) -> dict[Context, F]:
    return drawn_law(verify_traversal, target, draft, shape, siblings, traversal_outcomes)


# The law -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("siblings", SAMPLED)
@pytest.mark.parametrize(
    ("target", "draft", "shape"),
    [
        (history_target, history_draft, (1,)),
        (history_draft, history_target, (2, 1)),
        (history_target, history_draft, (1, 2)),
        (history_target, history_draft, (3,)),
        (four_tokens, four_drafts, (2,)),
        (four_tokens, four_drafts, (3,)),
        (four_tokens, four_drafts, (1, 2)),
        (four_drafts, four_tokens, (2, 1)),
        (history_draft, history_draft, (2, 1)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value)),
)
def test_drawn_trees_have_the_targets_law(target: Model, draft: Model, shape: tuple[int, ...], siblings: str) -> None:
    """Impossible tokens on either side among them; a law that runs out of tokens gives fewer siblings."""
    law = traversal_law(target, draft, shape, siblings)
    length = len(shape) + 1
    assert completed(law, target, length) == sequence_law(target, length)


@pytest.mark.parametrize(
    ("siblings", "shape", "mean"),
    [
        ("without_replacement", (2,), F(16, 9)),
        ("without_replacement", (2, 2), F(158, 63)),
        ("independent", (2,), F(250, 147)),
        ("independent", (2, 2), F(16769, 7203)),
    ],
)
def test_binary_trees_emit_what_they_should(siblings: str, shape: tuple[int, ...], mean: F) -> None:
    law = traversal_law(history_target, history_draft, shape, siblings)
    assert mean_emitted(law) == mean
    length = len(shape) + 1
    assert completed(law, history_target, length) == sequence_law(history_target, length)


def test_it_keeps_more_of_a_deep_tree_than_the_sequential_rule() -> None:
    for siblings in SAMPLED:
        sequential = drawn_law(verify_sequential, history_target, history_draft, (2, 1), siblings)
        assert mean_emitted(traversal_law(history_target, history_draft, (2, 1), siblings)) > mean_emitted(sequential)


def test_one_level_is_recursive_rejection() -> None:
    """Without levels below there is nothing to gain: the same acceptance as child by child."""
    for siblings in SAMPLED:
        for count in (1, 2, 3):
            law = traversal_law(*BOTH, (count,), siblings)
            assert law == drawn_law(verify_sequential, *BOTH, (count,), siblings, tree_outcomes)


def ragged_trees(draft: Model) -> list[tuple[TokenTree, F]]:
    """Two children of the root, of which only the first has children, and only if it is token 0: a shape that depends
    on what was drawn above, as drafters with a law of their own make it."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], F] = defaultdict(F)
    for tree, mass in drawn_trees(draft, (2, 2), "without_replacement"):
        kept = [n for n in range(len(tree)) if tree.parents[n] < 0 or (tree.parents[n] == 0 and tree.tokens[0] == 0)]
        found[tuple(tree.tokens[kept].tolist()), tuple(tree.parents[kept].tolist())] += mass
    return [(tree_of(*key), mass) for key, mass in found.items()]


def test_a_shape_that_depends_on_kept_tokens_has_the_targets_law() -> None:
    law: dict[Context, F] = defaultdict(F)
    for tree, mass in ragged_trees(history_draft):
        share = traversal_outcomes(verify_traversal, history_target, tree, history_draft, "without_replacement")
        for emitted, part in share.items():
            law[emitted] += mass * part
    assert completed(law, history_target, 3) == sequence_law(history_target, 3)


# Chains --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "mean"), [(1, F(67, 42)), (2, F(613, 294)), (3, F(13081, 5145))], ids=["1", "2", "3"]
)
def test_on_a_chain_it_is_block_verification(depth: int, mean: F) -> None:
    """Theorem 3.4 of the paper: the law of what is emitted, and so of the accepted lengths."""

    def block(p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, _: str, u: np.ndarray) -> Verification:
        return verify_block(p, tree.tokens, q, u)

    for siblings in SAMPLED:
        law = traversal_law(history_target, history_draft, (1,) * depth, siblings)
        assert mean_emitted(law) == mean
        assert law == drawn_block_law(block, history_target, history_draft, depth)


def test_on_a_chain_it_is_block_verification_coin_by_coin() -> None:
    rng = np.random.default_rng(3)
    lengths: Counter[int] = Counter()
    for _ in range(400):
        count = int(rng.integers(0, 6))
        p = torch.tensor(rng.dirichlet(np.full(5, 0.8), size=count + 1))
        q = torch.tensor(rng.dirichlet(np.full(5, 0.8), size=count).reshape(count, 5))
        chain = TokenTree.chain(np.array([rng.choice(5, p=row) for row in q.numpy()], dtype=np.int64))
        coins = rng.random(count + 1)
        found = verify_traversal(p, chain, q, "independent", coins)
        assert found == verify_block(p, chain.tokens, q, coins)
        lengths[found.accepted] += 1
    assert set(lengths) == set(range(6))


# Updates that are not lossless must fail the checker -----------------------------------------------------------------


def over_what_is_left(total: F, ratio: F, lost: F) -> F:
    """A published re-implementation's update: S / (1 - Q(x))."""
    return total / (1 - lost) if lost != 1 else F(1)


def unchanged(total: F, ratio: F, lost: F) -> F:
    return ratio


def restated_law(target: Model, draft: Model, shape: Sequence[int], update: Update) -> dict[Context, F]:
    law: dict[Context, F] = defaultdict(F)
    for tree, mass in drawn_trees(draft, shape, "without_replacement"):
        p, q = tree_laws(target, tree, draft)
        for emitted, share in ways_law(traversal_ways(p, tree, q, "without_replacement", update), tree).items():
            law[emitted] += mass * share
    return law


def test_only_the_right_update_of_r_keeps_the_law() -> None:
    truth = sequence_law(history_target, 3)
    right = restated_law(history_target, history_draft, (2, 2), lossless_update)
    assert completed(right, history_target, 3) == truth
    assert mean_emitted(right) == F(158, 63)
    for update in (over_what_is_left, unchanged):
        wrong = restated_law(history_target, history_draft, (2, 2), update)
        assert sum(wrong.values()) == 1
        assert completed(wrong, history_target, 3) != truth, update.__name__


def faulty(how: str) -> object:
    """Traversal, restated in floats, with one fault in it."""

    def rule(p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: str, u: np.ndarray) -> Verification:
        assert q is not None

        def below(row: int, path: list[int], r: float) -> tuple[list[int], np.ndarray] | None:
            law, left_q = p[row].numpy().copy(), None
            for node in np.flatnonzero(tree.parents + 1 == row):
                x = tree.tokens[node]
                left_q = q[node].numpy().copy() if left_q is None else left_q
                found = below(int(node) + 1, [*path, int(node)], min(1.0, r * law[x] / left_q[x]))
                if found:
                    return found
                left = np.maximum(r * law - left_q, 0.0)
                if how == "law kept":
                    left = law
                lost, total = left_q[x], np.maximum(r * law - left_q, 0.0).sum()
                r = total / (1 - lost) if how == "over what is left" else total / max(total + 1 - r, 1e-300)
                law = left / left.sum() if left.sum() > 0 else law
                if siblings == "without_replacement" and how != "kept in q":
                    left_q[x] = 0.0
                    left_q /= max(left_q.sum(), 1e-300)
            return (path, law) if row == 0 or u[row - 1] < r else None

        found = below(0, [], 1.0)
        assert found
        path, law = found
        index = int(np.searchsorted(np.cumsum(law) / law.sum(), u[-1], side="right"))
        return Verification.of(tree, path, min(index, len(law) - 1))

    return rule


@pytest.mark.parametrize("how", ["none", "over what is left", "kept in q", "law kept"])
def test_the_checker_refuses_each_fault(how: str) -> None:
    def law() -> dict[Context, F]:
        rule = faulty(how)
        return drawn_law(rule, history_target, history_draft, (2, 2), "without_replacement", traversal_outcomes)  # type: ignore[arg-type]

    if how == "none":
        assert mean_emitted(law()) == F(158, 63)
        return
    with pytest.raises(AssertionError, match=r"path .* expected|changes within the cell"):
        law()


def test_siblings_verified_as_what_they_are_not_are_not_lossless() -> None:
    law: dict[Context, F] = defaultdict(F)
    target, draft = constant(0.1, 0.2, 0.3, 0.4), constant(0.4, 0.3, 0.2, 0.1)
    for tree, mass in drawn_trees(draft, (2,), "without_replacement"):
        for emitted, share in traversal_outcomes(verify_traversal, target, tree, draft, "independent").items():
            law[emitted] += mass * share
    assert first_token_law(law, 4) != target(())


# Edges ---------------------------------------------------------------------------------------------------------------


def test_thresholds_are_strict_and_the_root_always_stands() -> None:
    """Token 0 has p/q = 1/2: its coin must be below; all coins at 1 leave the root and its residual."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    tree = tree_of([0], [-1])
    assert verify_traversal(p, tree, q, "independent", np.array([0.5, 0.3])).tokens == (1,)
    assert verify_traversal(p, tree, q, "independent", np.array([np.nextafter(0.5, 0), 0.3])).tokens == (0, 0)
    assert verify_traversal(p, tree, q, "independent", np.array([1.0, 1.0])).tokens == (1,)
    assert verify_traversal(p[:1], tree_of([], []), None, "chosen", np.array([0.9])).tokens == (1,)


@pytest.mark.parametrize("siblings", SAMPLED)
@pytest.mark.parametrize("coin", [0.0, 0.5, 1.0])
def test_an_empty_residual_leaves_the_law_as_it_was(siblings: str, coin: float) -> None:
    """p = q, rejected by forced coins of 1; and a law without a second sibling's mass is never asked for more."""
    uniform = torch.full((3, 4), 0.25, dtype=torch.float64)
    tree = tree_of([2, 1], [-1, -1])
    verdict = verify_traversal(uniform, tree, uniform[:2], siblings, np.array([1.0, coin, 0.9]))  # type: ignore[arg-type]
    assert verdict.path == ((1,) if coin < 1.0 else ())
    assert 0 <= verdict.next_token < 4


def test_an_impossible_draft_is_an_error() -> None:
    p = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    rejecting = np.array([1.0, 1.0, 0.5])
    with pytest.raises(DraftContractError, match="draft 1 is token 2, whose q is 0"):
        verify_traversal(p, tree_of([0, 2], [-1, -1]), q, "independent", rejecting)
    other = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]], dtype=torch.float64)
    with pytest.raises(DraftContractError, match="node 1 and its sibling 0 have different q"):
        verify_traversal(p, tree_of([0, 1], [-1, -1]), other, "independent", rejecting)
    with pytest.raises(DraftContractError, match="node 1 holds a token that its siblings have left no mass for"):
        verify_traversal(p, tree_of([0, 0], [-1, -1]), q, "without_replacement", rejecting)


# The batch -----------------------------------------------------------------------------------------------------------


class Coins:
    def __init__(self, request_id: str, values: Sequence[float]) -> None:
        self.request_id, self.values = request_id, values

    def uniforms(self, count: int) -> np.ndarray:
        assert count == len(self.values)
        return np.array(self.values)


def test_packed_trees_have_the_targets_law() -> None:
    """End to end beside a greedy neighbour: logits, parameters, offsets, coins and method."""

    def packed(
        p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: str, uniforms: np.ndarray
    ) -> Verification:
        logits = torch.cat([torch.zeros(3, 3, dtype=torch.float64), 0.5 * p.log()])
        proposals = [Proposal(tree_of([1, 0], [-1, -1])), Proposal(tree, q, siblings)]  # type: ignore[arg-type]
        coins = [Coins("a", []), Coins("b", uniforms.tolist())]
        params = [SamplingParams(), SamplingParams(0.5)]
        return verify(proposals, logits, params, coins, method="traversal")[1]

    law = drawn_law(packed, history_target, history_draft, (2, 1), "without_replacement", traversal_outcomes)
    assert completed(law, history_target, 3) == sequence_law(history_target, 3)


def test_a_request_is_the_same_alone_and_in_a_batch() -> None:
    """Coins are one a node and one for the emitted token, whatever stands."""
    rng = np.random.default_rng(5)
    trees = [tree_of([0, 1, 2, 3], [-1, -1, 0, 0]), tree_of([], []), tree_of([4, 2, 0], [-1, 0, 1])]
    laws = [torch.tensor(rng.dirichlet(np.ones(5), size=len(tree) + 1)) for tree in trees]
    logits = [torch.tensor(rng.normal(size=(len(tree) + 1, 5))) for tree in trees]
    proposals = [
        Proposal(tree, law[tree.parents + 1] if len(tree) else None, "without_replacement")
        for tree, law in zip(trees, laws, strict=True)
    ]
    warm = SamplingParams(0.9, seed=1)
    alone = []
    for index, proposal in enumerate(proposals):
        generator = RequestGenerator(1, str(index))
        alone += verify([proposal], logits[index], [warm], [generator], method="traversal")
        assert generator.num_drawn == len(proposal.tree) + 1
    for order in ((0, 1, 2), (2, 0, 1)):
        together = verify(
            [proposals[i] for i in order],
            torch.cat([logits[i] for i in order]),
            [warm] * 3,
            [RequestGenerator(1, str(i)) for i in order],
            method="traversal",
        )
        assert together == [alone[i] for i in order]


# The engine ----------------------------------------------------------------------------------------------------------


class Sharpened(EarlyExitDrafter):
    """Fault 11: drafts from a sharper law than the q it hands over."""

    def _drawn(self, law: torch.Tensor, coins: np.ndarray) -> list[int]:
        return super()._drawn(law**4 / (law**4).sum(), coins)


def output_p_value(siblings: Children, kind: type[EarlyExitDrafter] = EarlyExitDrafter) -> float:
    """Chi-square of seeded outputs through trees, judged by traversal, against the exact law."""
    tiny = TinyLaw(3, SamplingParams(1.0, seed=11))
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16, max_rows=96)
    drafter = kind(target, 1, StaticTree.of([[0], [1], [0, 0], [0, 1], [1, 0]]), siblings)
    runs, length = 1000, 4
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=tiny.params) for i in range(runs)]
    trace = decode(target, requests, drafter, batch_size=16, depth=2, method="traversal", check=False)
    found = Counter(outputs(trace).values())
    law = tiny.output_law(length)
    assert set(found) <= set(law)
    common = [tokens for tokens, probability in law.items() if probability * runs >= 8]
    expected = [law[tokens] * runs for tokens in common]
    observed = [found[tokens] for tokens in common]
    if len(common) < len(law):
        expected, observed = [*expected, runs - sum(expected)], [*observed, runs - sum(observed)]
    return float(chisquare(observed, np.array(expected) * runs / sum(expected)).pvalue)


def test_the_engine_through_traversal_has_the_targets_law() -> None:
    """The real generators, trees over several steps; and a drafter that lies about its q is seen."""
    assert output_p_value("without_replacement") > 1e-4
    assert output_p_value("independent") > 1e-4
    assert output_p_value("independent", Sharpened) < 1e-6
