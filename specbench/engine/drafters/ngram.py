"""n-gram lookup (prompt lookup): the text's own past as the drafter, with no weights and no forward pass.

Find where the last n tokens occurred before and draft what followed. Two published rules:

- "vllm": the longest n in [min_ngram, max_ngram] that re-occurs; among equal lengths the earliest place; the next k
  tokens.
- "transformers": the same search, and the draft ends before the first EOS.

Drafts are chosen, not sampled: a point mass for the verifier (no q).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError

NgramRule = Literal["vllm", "transformers"]


class NgramLookup:
    """One request's tokens and an index of its n-grams.

    `append` costs O(max_ngram^2) a token, `propose` O(max_ngram^2 + k), whatever the length of the text: the index maps
    each n-gram to the position after its earliest occurrence. Raises InputError for an empty range or unknown rule.
    """

    def __init__(
        self, max_ngram: int = 3, min_ngram: int = 1, rule: NgramRule = "vllm", *, eos_ids: Sequence[int] = ()
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(
                f"n-grams of {min_ngram} to {max_ngram} tokens", key="max_ngram", remedy="1 <= min_ngram <= max_ngram"
            )
        if rule not in get_args(NgramRule):
            raise InputError(f"unknown n-gram rule {rule!r}", key="rule", remedy=f"one of {list(get_args(NgramRule))}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.rule: NgramRule = rule
        self._eos_ids = frozenset(int(token) for token in eos_ids)
        self._tokens: list[int] = []
        self._after_earliest: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Add committed tokens (the prompt first); rejected drafts never come here."""
        for token in tokens:
            self._tokens.append(int(token))
            for size in range(self.min_ngram, min(self.max_ngram, len(self._tokens)) + 1):
                self._after_earliest.setdefault(tuple(self._tokens[-size:]), len(self._tokens))

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

    def _clip(self, draft: list[int]) -> NDArray[np.int64]:
        if self.rule == "transformers":
            draft = draft[: next((i for i, token in enumerate(draft) if token in self._eos_ids), len(draft))]
        return np.array(draft, dtype=np.int64)

    def reset(self) -> None:
        """Forget all tokens; the rule stays."""
        self._tokens.clear()
        self._after_earliest.clear()

    def fork(self) -> NgramLookup:
        """An independent copy: what is appended to one is not seen by the other."""
        twin = NgramLookup(self.max_ngram, self.min_ngram, self.rule, eos_ids=tuple(self._eos_ids))
        twin._tokens = self._tokens.copy()
        twin._after_earliest = self._after_earliest.copy()
        return twin
