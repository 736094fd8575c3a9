"""One request's draft while it grows, level by level: which nodes are fed, what they see, what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.drafters.base import EMPTY
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.request import ActiveRequest
from specbench.engine.tree import WORD, TokenTree
from specbench.engine.verify import Proposal

Children = Literal["top", "independent", "without_replacement"]
CHILDREN: tuple[Children, ...] = get_args(Children)


@dataclass
class Draft:
    """One request's draft under way: the nodes of `shape` that came about, and the cells that were fed.

    A node is fed if its children are wanted. Cells count behind the committed ones: the `num_inputs` tokens up to the
    pending one first, then the fed nodes in the order of the passes.
    """

    active: ActiveRequest
    shape: StaticTree
    inputs: list[int]
    context: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=lambda: {-1: -1})
    cells: dict[int, int] = field(default_factory=dict)
    written: int = 0
    over: bool = False

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def is_chain(self) -> bool:
        return self.shape.is_chain

    def num_children(self, place: int) -> int:
        """How many children the fed node wants."""
        return len(self.shape.children[place + 1])

    def parent(self, place: int) -> int:
        """The node that a node hangs on, -1 for the root."""
        return self.shape.parents[place]

    def fed_cells(self, path: Sequence[int]) -> list[int]:
        """Cells of the drafted nodes of `path`, as far as they were fed."""
        return [self.cells[node] for node in path if node in self.cells]

    def frontier(self, level: int) -> list[int]:
        """Nodes of `shape` at `level` (the root is level 0) that came about and want children."""
        if self.over or level >= self.shape.depth:
            return []
        return [place for place in self.shape.inner[level] if place in self.node_of]

    def feed(self, frontier: list[int]) -> list[int]:
        """The tokens of this pass; their cells are taken."""
        if frontier == [-1]:
            self.written = self.num_inputs
            return self.inputs
        nodes = [self.node_of[place] for place in frontier]
        for node in nodes:
            self.cells[node] = self.written
            self.written += 1
        return [self.tokens[node] for node in nodes]

    def seen(self, place: int) -> int:
        """The uncommitted cells that a fed node sees, as bits."""
        bits = (1 << self.num_inputs) - 1
        node = self.node_of[place]
        while node >= 0:
            bits |= 1 << self.cells[node]
            node = self.parents[node]
        return bits

    def grow(self, place: int, tokens: Sequence[int], law: torch.Tensor | None) -> None:
        """The children of `place`, by rank; there may be fewer than wanted."""
        for child, token in zip(self.shape.children[place + 1], tokens, strict=False):
            self.node_of[child] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(self.node_of[place])
            if law is not None:
                self.laws.append(law)

    def proposal(self, children: Children) -> Proposal:
        if not self.tokens:
            return EMPTY
        tree = TokenTree(np.array(self.tokens, dtype=np.int64), np.array(self.parents, dtype=np.int64))
        if not self.laws:
            return Proposal(tree)
        assert children != "top", "the best tokens are not drawn"
        return Proposal(tree, torch.stack(self.laws), children)


@dataclass
class DynamicDraft:
    """A tree that grows where the drafter is surest (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

    Every fed node names its `top_k` best children; the best `top_k` of a level by the sum of log-probabilities are fed
    next; of all that were named the `num_nodes` best are verified. Ties go to the earlier candidate, so a kept node's
    parent is kept.

    Nodes are numbered as candidates, in the order they were named.
    """

    active: ActiveRequest
    depth: int
    top_k: int
    num_nodes: int
    inputs: list[int]
    context: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    cells: dict[int, int] = field(default_factory=dict)
    written: int = 0
    over: bool = False
    is_chain = False

    def __post_init__(self) -> None:
        self._frontier = [-1]
        self._kept: list[int] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def num_children(self, place: int) -> int:
        return self.top_k

    def parent(self, node: int) -> int:
        return self.parents[node]

    def fed_cells(self, path: Sequence[int]) -> list[int]:
        """Cells of the verified nodes of `path`, as far as they were fed."""
        return [self.cells[self._kept[node]] for node in path if self._kept[node] in self.cells]

    def frontier(self, level: int) -> list[int]:
        return [] if self.over or level >= self.depth else self._frontier

    def feed(self, frontier: list[int]) -> list[int]:
        """The tokens of this pass; their cells are taken."""
        if frontier == [-1]:
            self.written = self.num_inputs
            return self.inputs
        for node in frontier:
            self.cells[node] = self.written
            self.written += 1
        return [self.tokens[node] for node in frontier]

    def seen(self, node: int) -> int:
        """The uncommitted cells that a fed node sees, as bits."""
        bits = (1 << self.num_inputs) - 1
        while node >= 0:
            bits |= 1 << self.cells[node]
            node = self.parents[node]
        return bits

    def expand(self, frontier: list[int], tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> None:
        """Children of fed nodes: tokens and log-probabilities [F, top_k], best first; F = 0 ends the draft."""
        first, width = len(self.tokens), tokens.shape[1]
        before = np.array([self.scores[node] if node >= 0 else 0.0 for node in frontier])
        scores = (before[:, None] + logprobs).ravel()
        self.tokens += tokens.ravel().tolist()
        self.scores += scores.tolist()
        self.parents += [node for node in frontier for _ in range(width)]
        best = np.argsort(-scores, kind="stable")[: self.top_k]
        self._frontier = [first + place for place in best.tolist()]

    def proposal(self, children: Children) -> Proposal:
        if not self.tokens:
            return EMPTY
        best = np.argsort(-np.array(self.scores), kind="stable")[: self.num_nodes]
        kept = np.sort(best)
        self._kept = kept.tolist()
        place = {candidate: node for node, candidate in enumerate(self._kept)}
        parents = [place.get(self.parents[candidate], -1) for candidate in self._kept]
        tokens = np.array(self.tokens, dtype=np.int64)[kept]
        return Proposal(TokenTree(tokens, np.array(parents, dtype=np.int64)))


def rows_of_bits(draft: Draft | DynamicDraft, frontier: list[int]) -> NDArray[np.int64]:
    """int64[T, W]: what each row of this pass sees of the uncommitted cells."""
    if frontier == [-1]:
        bits = [(2 << row) - 1 for row in range(draft.num_inputs)]
    else:
        bits = [draft.seen(place) for place in frontier]
    width = -(-draft.written // WORD)
    low = (1 << WORD) - 1
    words = [[row >> WORD * word & low for word in range(width)] for row in bits]
    return np.array(words, dtype=np.uint64).view(np.int64)


def fed_nodes(draft: Draft | DynamicDraft) -> int:
    """Most nodes below the root that a draft feeds: each takes a cell of the drafter's cache."""
    if isinstance(draft, DynamicDraft):
        return max(0, draft.depth - 1) * draft.top_k
    return sum(len(nodes) for nodes in draft.shape.inner) - 1
