"""TokenTree: the tokens a drafter proposes for one request; a chain is a tree with branching 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenTree:
    """Drafted nodes of one request, parents before children.

    `tokens` int64[n]; `parents` int64[n], -1 for children of the root. The root itself, the pending token that was
    sampled but is not yet in the KV cache, is not a node.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    @classmethod
    def chain(cls, tokens: NDArray[np.int64]) -> TokenTree:
        """A chain: every node is the parent of the next."""
        tokens = np.asarray(tokens, dtype=np.int64)
        return cls(tokens, np.arange(len(tokens), dtype=np.int64) - 1)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        return bool(np.array_equal(self.parents, np.arange(len(self.tokens)) - 1))

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """int64[n]: 1 for children of the root."""
        depths = np.zeros(len(self.tokens), dtype=np.int64)
        for node, parent in enumerate(self.parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
        return depths

    @cached_property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool[n, n]: row i marks node i and its ancestors among the nodes."""
        mask = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask
