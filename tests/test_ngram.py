"""n-gram lookup against a slow restatement of both published rules, and against transformers itself."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_bad_options_are_refused() -> None:
    for sizes in ((0, 0), (2, 3), (3, 0)):
        with pytest.raises(InputError, match="n-grams of"):
            NgramLookup(*sizes)
    with pytest.raises(InputError, match="unknown n-gram rule 'sglang'"):
        NgramLookup(rule="sglang")
