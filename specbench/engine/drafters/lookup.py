"""Drafters without a forward pass: prompt lookup, and two that replay the AR output (oracle, forced)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specbench.engine.drafters.base import EMPTY, DraftPass
from specbench.engine.drafters.ngram import NgramLookup, NgramRule
from specbench.engine.drafters.static_tree import StaticTree, check_first_children
from specbench.engine.models.decoder import Capture
from specbench.engine.request import ActiveRequest
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal
from specbench.errors import InputError

IntArray = NDArray[np.int64]


class NgramDrafter:
    """Prompt lookup: an n-gram index of each request's prompt and output.

    With `branches` > 1 it drafts trees of at most that many continuations, and of at most `nodes` nodes (None: whatever
    the continuations hold).
    """

    synthetic = False
    capture: Capture = ()

    def __init__(
        self,
        max_ngram: int,
        min_ngram: int,
        rule: NgramRule,
        eos_ids: Sequence[int],
        *,
        branches: int = 1,
        nodes: int | None = None,
    ) -> None:
        self._empty = NgramLookup(max_ngram, min_ngram, rule, eos_ids=eos_ids, branches=branches)
        self._branches, self._nodes = branches, nodes
        self._lookups: dict[int, NgramLookup] = {}

    def start(self, active: ActiveRequest) -> None:
        lookup = self._empty.fork()
        lookup.append(active.request.prompt_ids)
        lookup.append(active.tokens)
        self._lookups[active.slot] = lookup

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        return [Proposal(self._tree(self._lookups[one.slot], depth)) for one, depth in zip(active, depths, strict=True)]

    def _tree(self, lookup: NgramLookup, depth: int) -> TokenTree:
        if self._branches == 1:
            return TokenTree.chain(lookup.propose(depth))
        return lookup.propose_tree(depth, self.num_nodes(depth))

    def num_nodes(self, depth: int) -> int:
        nodes = self._branches * depth
        return nodes if self._nodes is None else min(nodes, self._nodes)

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        lookup = self._lookups[active.slot]
        known = len(lookup) - len(active.request.prompt_ids)
        lookup.append(active.tokens[known:])

    def finish(self, active: ActiveRequest) -> None:
        self._lookups.pop(active.slot, None)

    def take_passes(self) -> list[DraftPass]:
        return []


class ReplayDrafter:
    """Drafts from the request's AR output, so that acceptance is set and the output stays the target's.

    The first `a` drafts are the reference's own tokens, the next one is wrong: greedy verification then accepts just
    `a`. Oracle: a = depth always. Forced: `a` is drawn for each step so that the acceptance length (bonus included) has
    mean `length`, or position i is accepted with probability rates[i] given that all before it were. Draws come from
    (seed, request, step) alone. Rows are synthetic.

    With a `tree` the reference runs along the first children, down to the deepest level; all other nodes hold other
    tokens. Raises InputError for a tree whose first children end earlier, or that is wider than the vocabulary allows.
    """

    synthetic = True
    capture: Capture = ()

    def __init__(
        self,
        vocab_size: int,
        *,
        length: float | None = None,
        rates: Sequence[float] | None = None,
        seed: int = 0,
        tree: StaticTree | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._length, self._rates, self._seed = length, rates, seed
        self._tree = tree
        if tree is not None:
            check_first_children(tree)
            widest = max(len(nodes) for nodes in tree.children)
            if widest >= vocab_size:
                raise InputError(f"{widest} children of a vocabulary of {vocab_size}", key="tree")

    def start(self, active: ActiveRequest) -> None:
        if active.request.reference is None:
            raise InputError(f"request {active.request.request_id} has no AR output to replay")
        if not active.request.params.is_greedy:
            raise InputError(
                "oracle and forced drafters replay the AR output, which is fixed at temperature 0 only",
                key="sampling.temperature",
                remedy="set temperature: 0, or use another drafter",
            )

    def _wanted(self, active: ActiveRequest, depth: int) -> int:
        """How many of `depth` drafts the target shall accept in this step."""
        if self._length is None and self._rates is None:
            return depth
        name = f"{self._seed}/{active.request.request_id}/{len(active.tokens)}".encode()
        stream = np.random.default_rng(int.from_bytes(hashlib.sha256(name).digest()[:8], "little"))
        if self._length is not None:
            mean = self._length - 1.0
            return min(depth, int(mean) + int(stream.random() < mean - int(mean)))
        accepted = 0
        for rate in (self._rates or ())[:depth]:
            if stream.random() >= rate:
                break
            accepted += 1
        return accepted

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        proposals = []
        for one, room in zip(active, depths, strict=True):
            reference = one.request.reference or ()
            at = len(one.tokens)
            depth = room if self._tree is None else min(room, self._tree.depth)
            draft = np.array(reference[at : at + depth], dtype=np.int64)
            wanted = self._wanted(one, depth)
            if wanted < len(draft):
                draft[wanted:] = (draft[wanted:] + 1) % self._vocab_size
            if self._tree is not None and len(draft):
                proposals.append(Proposal(self._around(self._tree.cut(len(draft)), draft)))
            else:
                proposals.append(Proposal(TokenTree.chain(draft)) if len(draft) else EMPTY)
        return proposals

    def _around(self, shape: StaticTree, draft: IntArray) -> TokenTree:
        """A tree with `draft` along its first children. Siblings count on from the first child's token: they never
        reach the reference's own, which is the first child's or, where that is wrong, the one before it."""
        firsts = dict(zip(shape.first_path, draft.tolist(), strict=True))
        tokens = np.zeros(len(shape), dtype=np.int64)
        for parent, children in enumerate(shape.children):
            for rank, node in enumerate(children):
                tokens[node] = firsts.get(children[0], tokens[parent - 1] if parent else 0) + rank
        return TokenTree(tokens % self._vocab_size, np.array(shape.parents, dtype=np.int64))

    def num_nodes(self, depth: int) -> int:
        return depth if self._tree is None else len(self._tree.cut(depth))

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        """Nothing to learn: the reference is fixed."""

    def finish(self, active: ActiveRequest) -> None:
        """Nothing is held."""

    def take_passes(self) -> list[DraftPass]:
        return []
