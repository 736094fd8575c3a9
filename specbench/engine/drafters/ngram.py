"""n-gram lookup (prompt lookup): the text's own past as the drafter, with no weights and no forward pass.

Find where the last n tokens occurred before and draft what followed. Two published rules:

- "vllm": the longest n in [min_ngram, max_ngram] that re-occurs; among equal lengths the earliest place; the next k
  tokens.
- "transformers": the same search, and the draft ends before the first EOS.

With `branches` > 1 the draft is a tree, after the idea of SGLang's n-gram tries: up to `branches` places are gathered
from the longest n-gram that re-occurs down to min_ngram, of each n-gram the earliest place first (the longest one's is
the chain's own), then the latest ones backwards. The next k tokens of each place are merged into a trie. Nodes are kept
by how many of the places run through them, most first; among equals those on higher levels, then those of the place
found earlier.

Drafts are chosen, not sampled: a point mass for the verifier (no q).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specbench.engine.tree import TokenTree
from specbench.errors import InputError

NgramRule = Literal["vllm", "transformers"]


class NgramLookup:
    """One request's tokens and an index of its n-grams.

    `append` costs O(max_ngram^2) a token, `propose` O(max_ngram^2 + k), `propose_tree` as much for each branch and a
    sort of its nodes, whatever the length of the text: the index maps each n-gram to the position after its earliest
    occurrence, and for trees to those after its latest. Raises InputError for an empty range, an unknown rule or no
    branch.
    """

    def __init__(
        self,
        max_ngram: int = 3,
        min_ngram: int = 1,
        rule: NgramRule = "vllm",
        *,
        eos_ids: Sequence[int] = (),
        branches: int = 1,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(
                f"n-grams of {min_ngram} to {max_ngram} tokens", key="max_ngram", remedy="1 <= min_ngram <= max_ngram"
            )
        if rule not in get_args(NgramRule):
            raise InputError(f"unknown n-gram rule {rule!r}", key="rule", remedy=f"one of {list(get_args(NgramRule))}")
        if branches < 1:
            raise InputError(f"{branches} branches", key="branches", remedy="give 1 or more")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.rule: NgramRule = rule
        self.branches = branches
        self._eos_ids = frozenset(int(token) for token in eos_ids)
        self._tokens: list[int] = []
        self._after_earliest: dict[tuple[int, ...], int] = {}
        # The last of them is where the text ends, if the n-gram is its suffix.
        self._after_latest: dict[tuple[int, ...], deque[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Add committed tokens (the prompt first); rejected drafts never come here."""
        for token in tokens:
            self._tokens.append(int(token))
            for size in range(self.min_ngram, min(self.max_ngram, len(self._tokens)) + 1):
                ngram = tuple(self._tokens[-size:])
                self._after_earliest.setdefault(ngram, len(self._tokens))
                if self.branches > 1:
                    latest = self._after_latest.get(ngram)
                    if latest is None:
                        latest = self._after_latest[ngram] = deque(maxlen=self.branches + 1)
                    latest.append(len(self._tokens))

    def propose(self, k: int) -> NDArray[np.int64]:
        """int64[<= k]: what followed the match, shorter where the text ends; empty without a match.

        A match ends before the text does, so at least one token follows it; it may overlap the suffix.
        """
        end = len(self._tokens)
        for size in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            start = self._after_earliest[tuple(self._tokens[-size:])]
            if start < end:
                return self._clip(self._tokens[start : start + max(k, 0)])
        return np.empty(0, dtype=np.int64)

    def propose_tree(self, k: int, max_nodes: int) -> TokenTree:
        """A tree of at most k levels and max_nodes nodes; parents come first, siblings hold distinct tokens."""
        merged: dict[tuple[int, int], int] = {}
        tokens, parents, counts, levels = list[int](), list[int](), list[int](), list[int]()
        for place in self._places():
            node = -1
            for level, token in enumerate(self._clip(self._tokens[place : place + max(k, 0)]).tolist()):
                key, parent = (node, token), node
                node = merged.setdefault(key, len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    counts.append(0)
                    levels.append(level)
                counts[node] += 1
        # Nodes are in the order of the places, the sort is stable, and a parent's count is not below its child's.
        kept = sorted(range(len(tokens)), key=lambda node: (-counts[node], levels[node]))[: max(max_nodes, 0)]
        rank = {node: new for new, node in enumerate(kept)} | {-1: -1}
        return TokenTree(
            np.array([tokens[node] for node in kept], dtype=np.int64),
            np.array([rank[parents[node]] for node in kept], dtype=np.int64),
        )

    def _places(self) -> list[int]:
        """Up to `branches` positions at which a continuation begins, the best first."""
        end, places = len(self._tokens), list[int]()
        for size in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            ngram = tuple(self._tokens[-size:])
            for place in (self._after_earliest[ngram], *reversed(self._after_latest.get(ngram, ()))):
                if place < end and place not in places and len(places) < self.branches:
                    places.append(place)
        return places

    def _clip(self, draft: list[int]) -> NDArray[np.int64]:
        if self.rule == "transformers":
            draft = draft[: next((i for i, token in enumerate(draft) if token in self._eos_ids), len(draft))]
        return np.array(draft, dtype=np.int64)

    def reset(self) -> None:
        """Forget all tokens; the rule stays."""
        self._tokens.clear()
        self._after_earliest.clear()
        self._after_latest.clear()

    def fork(self) -> NgramLookup:
        """An independent copy: what is appended to one is not seen by the other."""
        twin = NgramLookup(
            self.max_ngram, self.min_ngram, self.rule, eos_ids=tuple(self._eos_ids), branches=self.branches
        )
        twin._tokens = self._tokens.copy()
        twin._after_earliest = self._after_earliest.copy()
        twin._after_latest = {ngram: latest.copy() for ngram, latest in self._after_latest.items()}
        return twin
