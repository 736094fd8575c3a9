"""TokenTree: the tokens a drafter proposes for one request; a chain is a tree with branching 1.

Two numberings. Among themselves draft nodes are 0 .. n - 1 and the root is -1 (`parents`, `children`, paths). In a
packed step the root is row 0 and draft node i is row i + 1 (`packed_parents`, `mask_words`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError

IntArray = NDArray[np.int64]
WORD = 64
"""Bits of one word of an ancestor mask."""


@dataclass(frozen=True)
class TreeShape:
    """What follows from the parents alone, shared by all trees of that shape (its arrays are read-only).

    `depths` int64[n], 1 for children of the root; `mask_words` int64[n + 1, W], W = ceil((n + 1) / 64): bit j of row i
    says that packed node j is i itself or one of its ancestors, the root included (uint64 patterns, lowest bit first);
    `children[node + 1]`: the draft nodes under `node`, so `children[0]` are the root's.
    """

    depths: IntArray
    mask_words: IntArray
    children: tuple[tuple[int, ...], ...]

    @classmethod
    @lru_cache(maxsize=128)
    def of(cls, parents: bytes) -> TreeShape:
        """The shape of valid parents, given as the bytes of int64[n]."""
        array = np.frombuffer(parents, dtype=np.int64)
        num_nodes = len(array)
        depths = np.zeros(num_nodes + 1, dtype=np.int64)
        words = np.zeros((num_nodes + 1, num_nodes // WORD + 1), dtype=np.uint64)
        words[0, 0] = 1
        children: list[list[int]] = [[] for _ in range(num_nodes + 1)]
        for node, parent in enumerate(array.tolist()):
            children[parent + 1].append(node)
            depths[node + 1] = depths[parent + 1] + 1
            words[node + 1] = words[parent + 1]
            words[node + 1, (node + 1) // WORD] |= np.uint64(1 << (node + 1) % WORD)
        for fixed in (depths, words):
            fixed.setflags(write=False)
        return cls(depths[1:], words.view(np.int64), tuple(tuple(nodes) for nodes in children))


@dataclass(frozen=True)
class TokenTree:
    """Drafted nodes of one request, parents before children.

    `tokens` int64[n]; `parents` int64[n], -1 for children of the root. The root itself, the pending token that was
    sampled but is not yet in the KV cache, is not a node. Raises InputError where that is no tree. Whether siblings
    may hold the same token is the verifier's rule: see `has_equal_siblings`.
    """

    tokens: IntArray
    parents: IntArray

    def __post_init__(self) -> None:
        tokens, parents = (np.asarray(array, dtype=np.int64) for array in (self.tokens, self.parents))
        if tokens.ndim != 1 or tokens.shape != parents.shape:
            raise InputError(f"a tree of {tokens.shape} tokens has parents of shape {parents.shape}", key="tree")
        before = parents < np.arange(len(parents))
        if not before.all() or parents.min(initial=-1) < -1:
            node = int((~before | (parents < -1)).argmax())
            raise InputError(
                f"node {node} of a tree has parent {parents[node]}", key="tree", remedy="parents stand before children"
            )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)

    @classmethod
    def chain(cls, tokens: IntArray) -> TokenTree:
        """A chain: every node is the parent of the next."""
        tokens = np.asarray(tokens, dtype=np.int64)
        return cls(tokens, np.arange(len(tokens), dtype=np.int64) - 1)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        return bool(np.array_equal(self.parents, np.arange(len(self.tokens)) - 1))

    @cached_property
    def shape(self) -> TreeShape:
        return TreeShape.of(self.parents.tobytes())

    @property
    def depths(self) -> IntArray:
        """int64[n]: 1 for children of the root."""
        return self.shape.depths

    @property
    def depth(self) -> int:
        """The deepest level; 0 for a tree without nodes."""
        if self.is_chain:
            return len(self.tokens)
        return int(self.shape.depths.max(initial=0))

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """`children[node + 1]` are the nodes under `node` in their order; `children[0]` those under the root."""
        return self.shape.children

    @property
    def packed_parents(self) -> IntArray:
        """int64[n + 1] in packed numbering: -1 for the root, which is node 0."""
        return np.concatenate([np.array([-1], dtype=np.int64), self.parents + 1])

    @property
    def mask_words(self) -> IntArray:
        """int64[n + 1, W] in packed numbering: see TreeShape."""
        return self.shape.mask_words

    @property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool[n, n]: row i marks node i and its ancestors among the nodes."""
        mask = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`; () for the root, -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return tuple(reversed(path))

    def is_path(self, path: tuple[int, ...]) -> bool:
        """Whether `path` leads from the root downwards, one edge a step."""
        return all(self.parents[node] == parent for parent, node in zip((-1, *path), path, strict=False))

    @property
    def has_equal_siblings(self) -> bool:
        """Whether two children of one node hold the same token."""
        pairs = set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        return len(pairs) < len(self.tokens)
