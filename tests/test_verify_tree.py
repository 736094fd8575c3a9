"""Verification of trees and of blocks is lossless: proved by enumerating all drafts and integrating the uniforms.

Vectors are those of exact computations of the published rules; fault rows B 11 to 17.
"""

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
    normalised,
    sequence_law,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_law import block_outcomes, children_drawn, drawn_block_law, drawn_law, drawn_trees, tree_outcomes

from specbench.engine.sampling import RequestGenerator, SamplingParams, distribution
from specbench.engine.tree import TokenTree
from specbench.engine.verify import (
    DraftContractError,
    Proposal,
    Verification,
    verify,
    verify_block,
    verify_chain,
    verify_greedy,
    verify_greedy_chain,
    verify_sequential,
)

GREEDY = SamplingParams()
SAMPLED = ("independent", "without_replacement")
P, Q = constant(0.1, 0.2, 0.3, 0.4), constant(0.4, 0.3, 0.2, 0.1)


def block(
    p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: str, uniforms: np.ndarray
) -> Verification:
    return verify_block(p, tree.tokens, q, uniforms)


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


def five_tokens(context: tuple[int, ...]) -> tuple[F, ...]:
    k = (2 * sum((i + 1) * (t + 1) for i, t in enumerate(context)) + len(context)) % 5
    return normalised((1, k, 2, (3 * k) % 4, 1 + k))


def five_drafts(context: tuple[int, ...]) -> tuple[F, ...]:
    k = (sum(context) + len(context)) % 3
    return normalised((2, 1, k, 1 + k, 0 if k == 1 else 1))


# The law of trees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("siblings", SAMPLED)
@pytest.mark.parametrize(
    ("target", "draft", "shape"),
    [
        (history_target, history_draft, (1,)),
        (history_draft, history_target, (2, 1)),
        (history_target, history_draft, (1, 2)),
        (four_tokens, four_drafts, (2,)),
        (four_tokens, four_drafts, (3,)),
        (four_tokens, four_drafts, (1, 2)),
        (five_tokens, five_drafts, (3,)),
        (five_drafts, five_tokens, (2, 1)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value)),
)
def test_drawn_trees_have_the_targets_law(target: Model, draft: Model, shape: tuple[int, ...], siblings: str) -> None:
    """Drafters and targets with impossible tokens among them; a law that runs out of tokens gives fewer siblings."""
    law = drawn_law(verify_sequential, target, draft, shape, siblings)
    length = len(shape) + 1
    assert completed(law, target, length) == sequence_law(target, length)


@pytest.mark.parametrize(
    ("siblings", "shape", "mean"),
    [
        ("without_replacement", (2,), F(16, 9)),
        ("without_replacement", (2, 2), F(5, 2)),
        ("independent", (2,), F(250, 147)),
        ("independent", (2, 2), F(99851, 43218)),
    ],
)
def test_binary_trees_emit_what_they_should(siblings: str, shape: tuple[int, ...], mean: F) -> None:
    law = drawn_law(verify_sequential, history_target, history_draft, shape, siblings)
    assert mean_emitted(law) == mean
    length = len(shape) + 1
    assert completed(law, history_target, length) == sequence_law(history_target, length)


A = constant("1/2", "3/10", "1/5"), constant("1/5", "3/10", "1/2")
B = constant(0.6, 0.3, 0.1), constant(0.5, 0.1, 0.4)


@pytest.mark.parametrize(
    ("models", "count", "replaced", "not_replaced", "hits"),
    [
        (A, 1, F(7, 10), F(7, 10), F(29, 100)),
        (A, 2, F(19, 25), F(41, 50), F(483, 1000)),
        (A, 3, F(101, 125), F(1), F(6161, 10000)),
        (B, 1, F(7, 10), F(7, 10), None),
        (B, 2, F(83, 100), F(17, 20), F(571, 1000)),
        (B, 3, F(847, 1000), F(1), F(6847, 10000)),
    ],
    ids=["A1", "A2", "A3", "B1", "B2", "B3"],
)
def test_one_step_accepts_as_the_tables_say(
    models: tuple[Model, Model], count: int, replaced: F, not_replaced: F, hits: F | None
) -> None:
    """Recursive rejection with and without replacement, and sampling from P with i.i.d. drafts as chosen ones."""
    target, draft = models
    for siblings, accepted in (("independent", replaced), ("without_replacement", not_replaced)):
        law = drawn_law(verify_sequential, target, draft, (count,), siblings)
        assert mean_emitted(law) - 1 == accepted
        assert completed(law, target, 2) == sequence_law(target, 2)
    chosen = F(0)
    for drafts, mass in children_drawn(draft(()), count, "independent"):
        distinct = list(dict.fromkeys(drafts))
        law = tree_outcomes(verify_sequential, target, tree_of(distinct, [-1] * len(distinct)), None, "chosen")
        assert completed(law, target, 2) == sequence_law(target, 2)
        chosen += mass * (mean_emitted(law) - 1)
    assert hits is None or chosen == hits


def test_a_deterministic_tree_emits_what_it_should() -> None:
    tree = tree_of([0, 1, 0, 2, 1], [-1, -1, 0, 0, 1])
    law = tree_outcomes(verify_sequential, history_target, tree, None, "chosen")
    assert mean_emitted(law) == F(23, 12)
    assert completed(law, history_target, 3) == sequence_law(history_target, 3)


SHAPES = {
    "fork": [-1, -1],
    "all children": [-1, -1, -1],
    "fork, one deeper": [-1, -1, 1],
    "depth first": [-1, 0, 1, 0, -1],
    "crossed": [-1, -1, 1, 0, 0],
}


@pytest.mark.parametrize(
    ("target", "shape"),
    [*((history_target, shape) for shape in SHAPES), (four_tokens, "fork, one deeper"), (four_tokens, "all children")],
)
def test_every_chosen_tree_is_lossless(target: Model, shape: str) -> None:
    """All tokens that siblings can hold, in any order of the nodes."""
    parents = SHAPES[shape]
    length = int(tree_of([0] * len(parents), parents).depths.max()) + 1
    truth = sequence_law(target, length)
    count = 0
    for tokens in itertools.product(range(len(target(()))), repeat=len(parents)):
        if len({(parent, token) for parent, token in zip(parents, tokens, strict=True)}) == len(parents):
            law = tree_outcomes(verify_sequential, target, tree_of(tokens, parents), None, "chosen")
            assert completed(law, target, length) == truth
            count += 1
    assert count >= 6


def test_a_chosen_tree_accepts_the_mass_of_its_children() -> None:
    """Whatever their order, and all of it where every token is a child."""
    for tokens in itertools.permutations(range(4)):
        for count in range(1, 5):
            law = tree_outcomes(verify_sequential, P, tree_of(tokens[:count], [-1] * count), None, "chosen")
            assert mean_emitted(law) - 1 == sum(P(())[token] for token in tokens[:count])


def test_a_chain_is_a_tree_without_siblings() -> None:
    for siblings in SAMPLED:
        law = drawn_law(verify_sequential, history_target, history_draft, (1, 1), siblings)
        assert law == emitted_law(verify_chain, history_target, history_draft, 2)
    for tokens in itertools.product(range(3), repeat=2):
        law = tree_outcomes(verify_sequential, history_target, tree_of(tokens, [-1, 0]), None, "chosen")
        assert law == chosen_law(verify_chain, history_target, tokens)


# Block verification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "depth", "mean"),
    [
        (constant("1/3", "2/3"), constant("2/3", "1/3"), 1, F(5, 3)),
        (constant("1/3", "2/3"), constant("2/3", "1/3"), 2, F(20, 9)),
        (constant("1/3", "2/3"), constant("2/3", "1/3"), 3, F(8, 3)),
        (constant("1/3", "2/3"), constant("2/3", "1/3"), 4, F(247, 81)),
        (history_target, history_draft, 1, F(67, 42)),
        (history_target, history_draft, 2, F(613, 294)),
        (history_target, history_draft, 3, F(13081, 5145)),
        (four_tokens, four_drafts, 2, None),
        (five_tokens, five_drafts, 2, None),
        (history_target, history_target, 2, F(3)),
    ],
    ids=["iid 1", "iid 2", "iid 3", "iid 4", "history 1", "history 2", "history 3", "four", "five", "equal"],
)
def test_block_verification_has_the_targets_law(target: Model, draft: Model, depth: int, mean: F | None) -> None:
    law = drawn_block_law(block, target, draft, depth)
    assert completed(law, target, depth + 1) == sequence_law(target, depth + 1)
    assert mean is None or mean_emitted(law) == mean
    assert mean_emitted(law) >= mean_emitted(emitted_law(verify_chain, target, draft, depth))


@pytest.mark.parametrize("model", [history_target, four_tokens])
def test_block_verification_of_chosen_chains_is_lossless(model: Model) -> None:
    for depth in (0, 1, 2, 3):
        truth = sequence_law(model, depth + 1)
        for tokens in itertools.product(range(len(model(()))), repeat=depth):
            assert completed(block_outcomes(block, model, tokens, None), model, depth + 1) == truth


def test_a_block_may_stand_whose_first_draft_alone_would_not() -> None:
    """The later ratio makes up for the earlier one; the thresholds are strict, so an impossible draft never stands."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    assert verify_chain(p, np.array([0, 0]), q, np.array([0.9, 0.9, 0.2])).accepted == 0
    assert verify_block(p, np.array([0, 0]), q, np.array([0.999, 0.999, 0.2])).tokens == (0, 0, 0)
    impossible = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    for told in (q, None):
        assert verify_block(impossible, np.array([0, 0]), told, np.array([0.0, 0.0, 0.0])).tokens == (1,)


def test_equal_laws_stand_as_a_whole_and_a_forced_coin_still_gives_a_token() -> None:
    uniform = torch.full((3, 4), 0.25)
    verdict = verify_block(uniform, np.array([2, 1]), uniform[:2], np.array([0.9, 0.999999, 0.5]))
    assert verdict.tokens == (2, 1, 2)
    forced = verify_block(uniform, np.array([2, 1]), uniform[:2], np.array([1.0, 1.0, 1.0]))
    assert forced.tokens == (3,)
    with pytest.raises(DraftContractError, match="draft 0 is token 0, whose q is 0"):
        verify_block(uniform, np.array([0, 1]), torch.eye(4)[1:3], np.zeros(3))


# Rules that are not lossless must fail the checker -------------------------------------------------------------------


def faulty(how: str):
    """The sequential rule with one fault, written apart from it."""

    def rule(p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: str, u: np.ndarray) -> Verification:
        row, path = 0, []
        while True:
            law = p[row].numpy().copy()
            q_law = None
            for node in np.flatnonzero(tree.parents + 1 == row):
                token = tree.tokens[node]
                q_law = (np.eye(len(law))[token] if q is None else q[node].numpy()) if q_law is None else q_law
                if q is None:
                    q_law = np.eye(len(law))[token]
                ratio = law[token] / q_law[token]
                if u[node] < (ratio if how != "lenient" else ratio * 1.1):
                    path.append(int(node))
                    break
                if how == "only zeroed":
                    law[token] = 0.0
                else:
                    law = np.maximum(law - q_law, 0.0)
                if how != "not normalised":
                    law = law / law.sum()
                if siblings == "without_replacement" and how != "kept in q":
                    q_law = q_law.copy()
                    q_law[token] = 0.0
                    q_law /= max(q_law.sum(), 1e-300)
            else:
                index = min(
                    int(np.searchsorted(np.cumsum(law) / max(law.sum(), 1e-300), u[-1], side="right")), len(law) - 1
                )
                return Verification.of(tree, path, index)
            row = path[-1] + 1

    return rule


def test_the_restated_rule_without_a_fault_passes() -> None:
    for siblings in SAMPLED:
        law = drawn_law(faulty("none"), P, Q, (2,), siblings)
        assert first_token_law(law, 4) == P(())


@pytest.mark.parametrize("how", ["only zeroed", "not normalised", "kept in q", "lenient"])
def test_the_checker_refuses_each_fault(how: str) -> None:
    """Fault 13 and its neighbours: the checker finds the wrong threshold or the wrong law of the last coin."""
    with pytest.raises(AssertionError, match=r"path .* expected|changes within the cell"):
        drawn_law(faulty(how), P, Q, (3,), "without_replacement")


def test_siblings_verified_as_what_they_are_not_are_not_lossless() -> None:
    """Drawn without replacement, verified as independent: the rule under test gives another law."""
    law = [F(0)] * 4
    for tree, mass in drawn_trees(Q, (2,), "without_replacement"):
        for emitted, share in tree_outcomes(verify_sequential, P, tree, Q, "independent").items():
            law[emitted[0]] += mass * share
    assert tuple(law) != P(())


def test_top_k_children_are_not_samples() -> None:
    """Fault 14: the two best of Q under the p/q rule give [.25, 0, 0, .75]; as chosen nodes they give P."""
    best = tree_of([0, 1], [-1, -1])
    told = tree_outcomes(verify_sequential, P, best, Q, "without_replacement")
    assert first_token_law(told, 4) == (F(1, 4), F(0), F(0), F(3, 4))
    assert first_token_law(tree_outcomes(verify_sequential, P, best, None, "chosen"), 4) == P(())


# Edges of the rule ---------------------------------------------------------------------------------------------------


def test_thresholds_are_strict_at_every_sibling() -> None:
    """P = (1/4, 1/4, 1/2): the thresholds of children 0, 1, 2 are 1/4, 1/3, 1; of 2, 1 they are 1/2, 1/2."""
    p = torch.tensor([[0.25, 0.25, 0.5]] * 3, dtype=torch.float64)
    tree = tree_of([2, 1], [-1, -1])
    below = float(np.nextafter(0.5, 0))
    assert verify_sequential(p, tree, None, "chosen", np.array([0.5, 0.5, 0.9])).tokens == (0,)
    assert verify_sequential(p, tree, None, "chosen", np.array([0.5, below, 0.9])).path == (1,)
    assert verify_sequential(p, tree, None, "chosen", np.array([below, 0.9, 0.9])).path == (0,)


@pytest.mark.parametrize("siblings", ["chosen", *SAMPLED])
@pytest.mark.parametrize("coin", [0.0, 0.5, 1.0])
def test_an_empty_residual_leaves_the_law_as_it_was(siblings: str, coin: float) -> None:
    """Fault 17, with siblings: p = q, and a point mass rejected by a forced coin."""
    uniform = torch.full((3, 4), 0.25)
    tree = tree_of([2, 1], [-1, -1])
    q = None if siblings == "chosen" else uniform[:2]
    for last in (0.0, 0.5, 1.0):
        verdict = verify_sequential(uniform, tree, q, siblings, np.array([1.0, coin, last]))
        assert verdict.path == ((1,) if coin < 1.0 and (q is not None or coin < 0.25) else ())
        assert 0 <= verdict.next_token < 4
    certain = torch.tensor([[0.0, 1.0, 0.0]]).repeat(3, 1)
    forced = verify_sequential(certain, tree_of([1, 0], [-1, -1]), None, "chosen", np.array([1.0, 0.0, 1.0]))
    assert forced.tokens == (1,)


def test_siblings_must_be_what_they_say() -> None:
    p = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    q = torch.tensor([[0.5, 0.25, 0.25]] * 2, dtype=torch.float64)
    rejecting = np.array([0.999, 0.5, 0.5])
    other = torch.stack([q[0], q[0].flip(0)])
    with pytest.raises(DraftContractError, match="node 1 and its sibling 0 have different q"):
        verify_sequential(p, tree_of([0, 1], [-1, -1]), other, "independent", rejecting)
    with pytest.raises(DraftContractError, match="node 1 holds a token that its siblings have left no mass for"):
        verify_sequential(p, tree_of([0, 0], [-1, -1]), q, "without_replacement", rejecting)
    twice = verify_sequential(p, tree_of([0, 0], [-1, -1]), q, "independent", np.array([0.999, 0.0, 0.5]))
    assert twice.path == ()


@pytest.mark.parametrize(
    ("tokens", "parents", "q", "siblings", "match"),
    [
        ([0, 0], [-1, -1], False, "chosen", "siblings hold the same token"),
        ([0, 0], [-1, -1], True, "without_replacement", "siblings hold the same token"),
        ([0, 1], [-1, -1], True, "chosen", "chosen siblings come with a q"),
        ([0, 1], [-1, -1], False, "independent", "independent siblings come without the q"),
        ([0, 1], [-1, -1], False, "drawn", "siblings are 'drawn'"),
        ([0, 3], [-1, -1], False, "chosen", "outside the vocabulary of 3"),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, seed=0)], ids=["greedy", "sampled"])
def test_impossible_trees_are_refused(
    params: SamplingParams, tokens: list[int], parents: list[int], q: bool, siblings: str, match: str
) -> None:
    told = torch.full((len(tokens), 3), 1 / 3) if q else None
    proposal = Proposal(tree_of(tokens, parents), told, siblings)  # type: ignore[arg-type]
    generator = RequestGenerator(0, "a")
    with pytest.raises(DraftContractError, match=f"request a: .*{match}"):
        verify([proposal], torch.zeros(len(tokens) + 1, 3), [params], [generator])
    assert generator.num_drawn == 0


def test_a_tree_without_siblings_may_say_anything_of_them() -> None:
    """A chain that stands in another order of its branches, or has one branch, asks for no siblings' law."""
    q = torch.full((2, 3), 1 / 3)
    for siblings in ("chosen", *SAMPLED):
        for told in (q, None):
            proposal = Proposal(tree_of([0, 1], [-1, 0]), told, siblings)  # type: ignore[arg-type]
            verify([proposal], torch.zeros(3, 3), [SamplingParams(1.0)], [RequestGenerator(0, "a")])


# Greedy trees --------------------------------------------------------------------------------------------------------


def random_tree(rng: np.random.Generator, size: int, vocab_size: int) -> TokenTree:
    """Siblings hold distinct tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    while len(tokens) < size:
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(vocab_size))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return tree_of(tokens, parents)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(0, 12))
def test_greedy_is_the_longest_path_of_argmaxes(seed: int, size: int) -> None:
    """Against all root paths, judged one by one."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, size, 3)
    best = rng.integers(3, size=size + 1)
    verdict = verify_greedy(best, tree)
    longest: tuple[int, ...] = ()
    for node in range(size):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        agrees = all(best[tree.parents[each] + 1] == tree.tokens[each] for each in path)
        if agrees and len(path) > len(longest):
            longest = tuple(path)
    assert verdict.path == longest
    assert verdict.next_token == best[longest[-1] + 1 if longest else 0]
    assert verdict.tokens == (*(tree.tokens[node] for node in longest), verdict.next_token)


def test_a_greedy_chain_is_a_greedy_tree_without_siblings() -> None:
    best, draft = np.array([4, 5, 6, 7, 8]), np.array([4, 0, 6, 7])
    assert verify_greedy(best, TokenTree.chain(draft)) == verify_greedy_chain(best, draft)
    assert verify_greedy(np.array([1, 0, 2, 0]), tree_of([1, 1, 2], [-1, -1, 1])).tokens == (1, 0)


# The batch -----------------------------------------------------------------------------------------------------------


def ragged_trees(sizes: Sequence[int], vocab_size: int = 7) -> list[SimpleNamespace]:
    """Requests of every kind: greedy, chosen, independent, without replacement; trees and chains."""
    rng = np.random.default_rng(11)
    kinds = ("greedy", "chosen", "independent", "without_replacement")
    requests = []
    for index, size in enumerate(sizes):
        kind = kinds[index % 4]
        tree = random_tree(rng, size, vocab_size)
        logits = torch.tensor(rng.normal(size=(size + 1, vocab_size)))
        laws = torch.tensor(rng.dirichlet(np.ones(vocab_size), size=size + 1))
        q = None if kind in ("greedy", "chosen") else laws[tree.parents + 1]
        if kind == "greedy" and size:
            tree.tokens[0] = int(logits[0].argmax())
            for other in np.flatnonzero(tree.parents == -1)[1:]:
                tree.tokens[other] = tree.tokens[other] if tree.tokens[other] != tree.tokens[0] else 0
            tree = random_tree(rng, size, vocab_size) if _doubled(tree) else tree
        params = GREEDY if kind == "greedy" else SamplingParams(0.7, top_k=index % 3 * 3, top_p=0.95, seed=5)
        siblings = "chosen" if kind == "greedy" else kind
        proposal = Proposal(tree, q, siblings)  # type: ignore[arg-type]
        requests.append(SimpleNamespace(id=f"r{index}", proposal=proposal, logits=logits, params=params))
    return requests


def _doubled(tree: TokenTree) -> bool:
    return len({*zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}) < len(tree)


def judge(requests: Sequence[SimpleNamespace]) -> dict[str, Verification]:
    generators = [RequestGenerator(3, request.id) for request in requests]
    verdicts = verify(
        [request.proposal for request in requests],
        torch.cat([request.logits for request in requests]),
        [request.params for request in requests],
        generators,
        want_logprobs=True,
        want_margins=True,
    )
    for request, generator in zip(requests, generators, strict=True):
        expected = 0 if request.params.is_greedy else len(request.proposal.tree) + 1
        assert generator.num_drawn == expected, "the coins taken depend on the verdict or on the batch"
    return {request.id: verdict for request, verdict in zip(requests, verdicts, strict=True)}


@pytest.mark.parametrize("sizes", [(5, 0, 9, 4), (1, 6, 0, 8), (3, 3, 3, 3)])
def test_a_ragged_batch_of_trees_equals_each_request_alone_in_every_order(sizes: tuple[int, ...]) -> None:
    requests = ragged_trees(sizes)
    alone = {request.id: judge([request])[request.id] for request in requests}
    for order in itertools.permutations(requests):
        assert judge(order) == alone


def test_a_batch_uses_the_single_request_rules_and_scores_the_path() -> None:
    """Tokens, path, and for each token the raw target row that it followed."""
    accepted = 0
    for request in ragged_trees([8] * 24):
        tree, verdict = request.proposal.tree, judge([request])[request.id]
        if request.params.is_greedy:
            expected = verify_greedy(request.logits.argmax(dim=-1).numpy(), tree)
        else:
            p = distribution(request.logits, [request.params] * (len(tree) + 1))
            coins = RequestGenerator(3, request.id).uniforms(len(tree) + 1)
            expected = verify_sequential(p, tree, request.proposal.q, request.proposal.siblings, coins)
        assert (verdict.path, verdict.tokens) == (expected.path, expected.tokens)
        rows = request.logits[[0, *(node + 1 for node in verdict.path)]]
        for row, token, logprob, margin in zip(
            rows, verdict.tokens, verdict.logprobs, verdict.top2_margins, strict=True
        ):
            ordered = row.sort(descending=True).values
            assert logprob == pytest.approx(float(row.log_softmax(dim=-1)[token]), abs=1e-12)
            assert margin == pytest.approx(float(ordered[0] - ordered[1]), abs=1e-12)
        accepted += verdict.accepted
    assert accepted > 10


@pytest.mark.parametrize("method", ["sequential", "block"])
def test_packed_chains_and_trees_have_the_targets_law(method: str) -> None:
    """The packed path end to end, beside a greedy neighbour: logits, parameters, offsets, coins and method."""

    class Coins:
        def __init__(self, request_id: str, values: Sequence[float]) -> None:
            self.request_id, self.values = request_id, values

        def uniforms(self, count: int) -> np.ndarray:
            assert count == len(self.values)
            return np.array(self.values)

    def packed(
        p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: str, uniforms: np.ndarray
    ) -> Verification:
        logits = torch.cat([torch.zeros(3, 3, dtype=torch.float64), 0.5 * p.log()])
        greedy = tree_of([1, 0], [-1, -1]) if method == "sequential" else tree_of([1, 0], [-1, 0])
        proposals = [Proposal(greedy), Proposal(tree, q, siblings)]  # type: ignore[arg-type]
        coins = [Coins("a", []), Coins("b", uniforms.tolist())]
        return verify(proposals, logits, [GREEDY, SamplingParams(0.5)], coins, method=method)[1]  # type: ignore[arg-type]

    if method == "block":
        law = drawn_block_law(packed, history_target, history_draft, 2)
        assert mean_emitted(law) == F(613, 294)
    else:
        law = drawn_law(packed, history_target, history_draft, (2, 1), "without_replacement")
    assert completed(law, history_target, 3) == sequence_law(history_target, 3)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_node_fails_its_request_only(poison: float) -> None:
    requests = ragged_trees((5, 6, 7, 8))
    good = judge(requests)
    for broken in range(4):
        requests = ragged_trees((5, 6, 7, 8))
        requests[broken].logits[4, 2] = poison
        verdicts = judge(requests)
        for index, request in enumerate(requests):
            verdict = verdicts[request.id]
            if index == broken:
                assert verdict.error is not None
                assert (verdict.error.row, verdict.error.request_id, verdict.path) == (4, request.id, ())
            else:
                assert verdict == good[request.id]
