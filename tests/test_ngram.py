"""n-gram lookup against a slow restatement of both published rules, and against transformers itself."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from engine_tools import decode, make_decoder, outputs
from engine_world import World, build_world
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.ngram import NgramLookup
from specbench.errors import InputError

TEXTS = st.lists(st.integers(0, 2), max_size=24)


def literal(tokens: list[int], k: int, max_ngram: int, min_ngram: int, eos: set[int]) -> list[int]:
    """Scan for the longest suffix, leftmost, with a token after it; stop before an EOS."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                draft = []
                for token in tokens[start + size : start + size + k]:
                    if token in eos:
                        break
                    draft.append(token)
                return draft
    return []


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(TEXTS, max_size=4),
    k=st.integers(0, 6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    eos=st.sets(st.integers(0, 2), max_size=1),
)
def test_both_rules_equal_the_literal_scan(
    pieces: list[list[int]], k: int, sizes: tuple[int, int], eos: set[int]
) -> None:
    low, high = sorted(sizes)
    vllm = NgramLookup(high, low, "vllm", eos_ids=tuple(eos))
    transformers = NgramLookup(high, low, "transformers", eos_ids=tuple(eos))
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        for lookup in (vllm, transformers):
            lookup.append(np.array(piece, dtype=np.int64))
            assert len(lookup) == len(tokens)
        assert vllm.propose(k).tolist() == literal(tokens, k, high, low, set())
        assert transformers.propose(k).tolist() == literal(tokens, k, high, low, eos)
        assert vllm.propose(k).dtype == np.int64


def test_the_transformers_rule_is_transformers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
    rng = np.random.default_rng(3)
    found = 0
    for size in (1, 2, 3):
        theirs = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor([0]), num_output_tokens=4, max_matching_ngram_size=size, max_length=10_000
        )
        for _ in range(60):
            tokens = rng.integers(0, 4, size=rng.integers(1, 20))
            candidates, _scores = theirs.get_candidates(torch.tensor(tokens)[None])
            ours = NgramLookup(size, 1, "transformers", eos_ids=(0,))
            ours.append(tokens)
            assert ours.propose(4).tolist() == candidates[0, len(tokens) :].tolist()
            found += len(ours.propose(4)) > 0
    assert found > 60


def proposal(tokens: list[int], k: int = 4, **options: object) -> list[int]:
    lookup = NgramLookup(**options)
    lookup.append(tokens)
    return lookup.propose(k).tolist()


def test_longest_first_then_earliest() -> None:
    assert proposal([1, 2, 9, 2, 8, 1, 2], k=1) == [9]
    assert proposal([2, 8, 1, 2, 9, 3, 1, 2], k=1) == [9]
    assert proposal([2, 8, 1, 2, 9, 3, 1, 2], k=1, max_ngram=1) == [8]
    assert proposal([2, 8, 3, 2], min_ngram=2) == []


def test_the_suffix_is_no_match_but_may_overlap_one() -> None:
    assert proposal([]) == []
    assert proposal([1]) == []
    assert proposal([1, 2, 3]) == []
    assert proposal([1, 1]) == [1]
    assert proposal([1, 1, 1]) == [1]


def test_drafts_are_clipped_to_the_text() -> None:
    assert proposal([5, 6, 7, 5], k=9) == [6, 7, 5]
    assert proposal([5, 6, 7, 5], k=2) == [6, 7]
    assert proposal([5, 6, 7, 5], k=0) == []


def test_an_eos_right_after_the_match_leaves_no_draft() -> None:
    text = [1, 2, 0, 4, 2, 3, 1, 2]
    assert proposal(text, rule="transformers", eos_ids=(0,)) == []
    assert proposal(text, rule="vllm", eos_ids=(0,)) == [0, 4, 2, 3]


def test_forks_and_resets_do_not_leak() -> None:
    lookup = NgramLookup(2)
    lookup.append([1, 2, 3, 1])
    twin = lookup.fork()
    twin.append([7, 1])
    lookup.append([2])
    assert lookup.propose(2).tolist() == [3, 1]
    assert twin.propose(2).tolist() == [2, 3]
    assert (len(lookup), len(twin)) == (5, 6)
    lookup.reset()
    assert (len(lookup), lookup.propose(2).tolist(), twin.propose(2).tolist()) == (0, [], [2, 3])
    lookup.append([7, 4, 5, 2])
    assert lookup.propose(2).tolist() == []


def test_a_draft_is_a_copy() -> None:
    lookup = NgramLookup()
    lookup.append([1, 2, 1])
    lookup.propose(2)[:] = 99
    assert lookup.propose(2).tolist() == [2, 1]


def test_cost_does_not_grow_with_the_text() -> None:
    """Every lookup and insertion is counted: a fixed number a token, whatever the length."""

    class Counting(dict):
        operations = 0

        def setdefault(self, *arguments: object) -> object:
            self.operations += 1
            return super().setdefault(*arguments)

        def __getitem__(self, key: object) -> object:
            self.operations += 1
            return super().__getitem__(key)

    for length in (100, 3000):
        lookup = NgramLookup(4, 2)
        lookup._after_earliest = Counting()
        lookup.append(range(length))
        assert lookup._after_earliest.operations <= 3 * length
        before = lookup._after_earliest.operations
        assert lookup.propose(5).size == 0
        assert lookup._after_earliest.operations - before == 3


# Trees ---------------------------------------------------------------------------------------------------------------


def literal_tree(
    tokens: list[int], k: int, sizes: tuple[int, int], branches: int, nodes: int, eos: set[int]
) -> list[tuple[int, ...]]:
    """Paths of the nodes in their order: all places by scanning, all prefixes of their continuations, the most common
    first."""
    places: list[int] = []
    for size in range(sizes[1], sizes[0] - 1, -1):
        suffix = tokens[len(tokens) - size :]
        found = [at + size for at in range(len(tokens) - size) if tokens[at : at + size] == suffix]
        places += [place for place in [*found[:1], *reversed(found[1:])] if place not in places]
    continuations = []
    for place in places[:branches]:
        draft = tokens[place : place + k]
        ends = [i for i, token in enumerate(draft) if token in eos]
        continuations.append(tuple(draft[: ends[0]] if ends else draft))
    paths: list[tuple[int, ...]] = []
    for draft in continuations:
        paths += [draft[:end] for end in range(1, len(draft) + 1) if draft[:end] not in paths]
    uses = {path: sum(draft[: len(path)] == path for draft in continuations) for path in paths}
    return sorted(paths, key=lambda path: (-uses[path], len(path), paths.index(path)))[:nodes]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(TEXTS, max_size=4),
    k=st.integers(0, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    branches=st.integers(1, 5),
    nodes=st.integers(0, 12),
    eos=st.sets(st.integers(0, 2), max_size=1),
)
def test_a_tree_equals_the_literal_scan(
    pieces: list[list[int]], k: int, sizes: tuple[int, int], branches: int, nodes: int, eos: set[int]
) -> None:
    low, high = sorted(sizes)
    vllm = NgramLookup(high, low, "vllm", eos_ids=tuple(eos), branches=branches)
    transformers = NgramLookup(high, low, "transformers", eos_ids=tuple(eos), branches=branches)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        for lookup, ends in ((vllm, set()), (transformers, eos)):
            lookup.append(piece)
            tree = lookup.propose_tree(k, nodes)
            paths = [tuple(tree.tokens[list(tree.path_to(node))].tolist()) for node in range(len(tree))]
            assert paths == literal_tree(tokens, k, (low, high), branches, nodes, ends)
            assert not tree.has_equal_siblings
            twin = lookup.fork()
            assert twin.propose_tree(k, nodes).tokens.tolist() == tree.tokens.tolist()
            twin.append([0, 1])
        # Whatever else a tree holds, with room for all of it the chain is one of its paths.
        chain = vllm.propose(k).tolist()
        whole = vllm.propose_tree(k, branches * k)
        paths = [whole.tokens[list(whole.path_to(node))].tolist() for node in range(len(whole))]
        assert chain in [[], *paths]


def tree_of(tokens: list[int], k: int, nodes: int, **options: object) -> tuple[list[int], list[int]]:
    lookup = NgramLookup(**options)
    lookup.append(tokens)
    tree = lookup.propose_tree(k, nodes)
    return tree.tokens.tolist(), tree.parents.tolist()


def test_the_earliest_place_and_the_latest_ones_are_merged() -> None:
    text = [1, 2, 5, 7, 1, 2, 6, 7, 1, 2, 5, 8, 1, 2]
    assert tree_of(text, 2, 9, branches=1) == ([5, 7], [-1, 0])
    assert tree_of(text, 2, 9, branches=2) == ([5, 7, 8], [-1, 0, 0])
    assert tree_of(text, 2, 9, branches=3) == ([5, 6, 7, 8, 7], [-1, -1, 0, 0, 1])
    assert tree_of(text, 2, 3, branches=3) == ([5, 6, 7], [-1, -1, 0])
    assert tree_of(text, 1, 9, branches=3) == ([5, 6], [-1, -1])
    assert tree_of(text, 0, 9, branches=3) == ([], [])
    # One place for two tokens, so the third branch is that of a single one.
    assert tree_of([2, 9, 1, 2, 5, 1, 2], 1, 9, branches=3) == ([5, 9], [-1, -1])


def test_an_index_for_trees_keeps_a_bounded_number_of_places() -> None:
    lookup = NgramLookup(2, branches=3)
    lookup.append([1, 2] * 500)
    assert {len(latest) for latest in lookup._after_latest.values()} == {4}
    lookup.reset()
    assert (lookup._after_latest, len(lookup.propose_tree(3, 9))) == ({}, 0)


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


@pytest.mark.parametrize(("branches", "nodes"), [(2, None), (4, 6), (3, 3)])
def test_greedy_output_through_ngram_trees_is_autoregression(world: World, branches: int, nodes: int | None) -> None:
    target = make_decoder(world.spec, world.weights, max_rows=96, max_context=144)
    for batch_size, order, depth in ((1, 1, 3), (3, 1, 1), (4, -1, 3)):
        drafter = NgramDrafter(3, 1, "vllm", (), branches=branches, nodes=nodes)
        trace = decode(target, world.requests[::order], drafter, batch_size=batch_size, depth=depth)
        assert outputs(trace) == world.truth
        assert trace.num_draft.max() <= drafter.num_nodes(depth) == min(branches * depth, nodes or 99)
        assert trace.draft_depth.max() == depth
        assert trace.num_accepted.sum() > 0
        assert trace.num_draft.max() > depth or nodes == depth


def test_a_tree_accepts_no_less_than_its_chain(world: World) -> None:
    target = make_decoder(world.spec, world.weights, max_rows=96, max_context=144)
    steps = []
    for branches in (1, 2, 4):
        drafter = NgramDrafter(3, 1, "vllm", (), branches=branches)
        steps.append(len(decode(target, world.requests, drafter, depth=3).step_s))
    assert steps[0] > steps[1] > steps[2]


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="0 branches"):
        NgramLookup(branches=0)
    for sizes in ((0, 0), (2, 3), (3, 0)):
        with pytest.raises(InputError, match="n-grams of"):
            NgramLookup(*sizes)
    with pytest.raises(InputError, match="unknown n-gram rule 'sglang'"):
        NgramLookup(rule="sglang")
