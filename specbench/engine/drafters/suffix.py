"""Suffix decoding (arXiv 2411.04975): drafts from how texts went on before, without weights and without a forward pass.

Two suffix trees are asked: the request's own (prompt and output), and one over past responses. For each m such that the
text's last m tokens occur in the tree, a draft of at most

    min(limit, int(m * max_spec_factor + max_spec_offset + 1e-6))

tokens is walked down from there, always to the child with the largest count (the lowest token among equals); a token's
probability is the product of count / parent.count down to it, and the walk ends before it falls below min_token_prob. A
draft's score is the sum of its probabilities. The best score wins, among equals the longer match; past responses win
only with a strictly better score than the request's own text.

With `nodes` the draft is a tree of at most that many nodes (the limit above still counts): from the match on, the most
probable child of what is already drafted is taken next; among equals the one on the higher level, then that of the
earlier parent, then the lowest token.

Drafts are chosen, not sampled: a point mass for the verifier (no q).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from specbench.engine.drafters.base import EMPTY, DraftPass
from specbench.engine.drafters.suffix_tree import Place, Remaining, SuffixTree, Text
from specbench.engine.models.decoder import Capture
from specbench.engine.request import ActiveRequest
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal
from specbench.errors import InputError

Responses = Literal["others", "all"]
ENDED = ("stop", "length", "context")
"""Finish reasons of a whole response; one that was cut or failed is not kept."""


class Draft(NamedTuple):
    """Tokens with their parents (-1: the root), and the sum of their probabilities."""

    score: float
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


NOTHING = Draft(0.0, (), ())


def grow_chain(place: Place | Remaining, max_tokens: int, min_token_prob: float) -> Draft:
    """The likeliest continuation of a run, token by token."""
    tokens: list[int] = []
    score, prob = 0.0, 1.0
    while len(tokens) < max_tokens:
        found = place.likeliest()
        if found is None:
            break
        token, child = found
        prob *= child.occurrences / place.occurrences
        if prob < min_token_prob:
            break
        tokens.append(token)
        score += prob
        place = child
    return Draft(score, tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def grow_tree(place: Place | Remaining, max_nodes: int, max_levels: int, min_token_prob: float) -> Draft:
    """The most probable continuations of a run, node by node; parents stand before children."""
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    # (-probability, level, parent, token) is distinct, so places are never compared.
    heap: list[tuple[float, int, int, int, Place | Remaining]] = []

    def offer(parent: int, place: Place | Remaining, prob: float, level: int) -> None:
        if level < max_levels:
            # A rounded-down bound that spares wide nodes; a probability is 0 only where min_token_prob is.
            least = (1 - 1e-9) * min_token_prob / prob * place.occurrences if min_token_prob else 0.0
            for token, child in place.children(least):
                share = prob * (child.occurrences / place.occurrences)
                if share >= min_token_prob:
                    heapq.heappush(heap, (-share, level + 1, parent, token, child))

    offer(-1, place, 1.0, 0)
    while heap and len(tokens) < max_nodes:
        negative, level, parent, token, child = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        score -= negative
        offer(len(tokens) - 1, child, -negative, level)
    return Draft(score, tuple(tokens), tuple(parents))


class PastResponses:
    """Responses that ended, in one suffix tree; the first in is the first out, past `capacity` of them.

    "all" keeps every response, as published. "others" keeps the newest of each prompt, and shows a prompt the tree as
    it would be without its own.
    """

    def __init__(self, max_depth: int, capacity: int, responses: Responses) -> None:
        self._capacity, self._responses = capacity, responses
        self._max_depth = max_depth
        self.tree = SuffixTree(max_depth)
        self._kept: OrderedDict[int, tuple[tuple[int, ...], Text]] = OrderedDict()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._own: dict[tuple[int, ...], SuffixTree] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, prompt: tuple[int, ...], response: Sequence[int]) -> None:
        if self._responses == "others":
            if prompt in self._numbers:
                self._evict(self._numbers[prompt])
            self._numbers[prompt] = self._added
            self._own[prompt] = SuffixTree(self._max_depth)
            self._own[prompt].add(response)
        self._kept[self._added] = (prompt, self.tree.add(response))
        self._added += 1
        while len(self._kept) > self._capacity:
            self._evict(next(iter(self._kept)))

    def _evict(self, number: int) -> None:
        prompt, text = self._kept.pop(number)
        self.tree.remove(text)
        if self._responses == "others":
            del self._numbers[prompt], self._own[prompt]

    def suffixes_of(self, prompt: tuple[int, ...], tokens: Sequence[int]) -> Sequence[Place | Remaining]:
        """Item m - 1: the last m of `tokens` as they occur in the responses that `prompt` may see."""
        places = self.tree.suffixes_of(tokens)
        own = self._own.get(prompt) if places else None
        if own is None:
            return places
        rest = [Remaining(place, own.find(tokens[-m:])) for m, place in enumerate(places, start=1)]
        return [place for place in rest if place.occurrences]


class SuffixDrafter:
    """Suffix decoding over each request's own text and over past responses.

    A benchmark asks the same prompts again, block after block, and a greedy answer never changes: a drafter that found
    a prompt's own earlier answer would replay it, and the row would tell of the harness, not of the method. So by
    default (`responses="others"`) a prompt is drafted for from the responses to other prompts only, and each prompt
    counts once, however often it was asked. `responses="all"` is the published cache, for workloads that really repeat.
    Prompts are told apart by their token ids. A response joins when its request ends by itself, so a draft depends on
    requests that ended before, never on those that share its step; with `max_cached_requests=0` on its own request.

    Published defaults: max_tree_depth 24, max_spec_factor 1, max_spec_offset 0, min_token_prob 0.1, max_cached_requests
    10000. `nodes`: a tree of at most so many nodes instead of a chain. Raises InputError for options out of range.
    """

    synthetic = False
    capture: Capture = ()

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        max_cached_requests: int = 10_000,
        responses: Responses = "others",
        nodes: int | None = None,
    ) -> None:
        for key, value, low in (
            ("max_spec_factor", max_spec_factor, 0),
            ("min_token_prob", min_token_prob, 0),
            ("max_cached_requests", max_cached_requests, 0),
            ("nodes", 1 if nodes is None else nodes, 1),
        ):
            if not value >= low:
                raise InputError(f"{key} is {value}", key=key, remedy=f"give {low} or more")
        if responses not in get_args(Responses):
            raise InputError(f"unknown responses {responses!r}", key="responses", remedy="others or all")
        self._max_depth = max_tree_depth
        self._factor, self._offset = max_spec_factor, max_spec_offset
        self._min_prob, self._nodes = min_token_prob, nodes
        self._past = PastResponses(max_tree_depth, max_cached_requests, responses)
        self._keeps = max_cached_requests > 0
        self._texts: dict[int, SuffixTree] = {}

    def start(self, active: ActiveRequest) -> None:
        tree = SuffixTree(self._max_depth)
        tree.extend(active.request.prompt_ids)
        tree.extend(active.tokens)
        self._texts[active.slot] = tree

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        return [self._propose(one, depth) for one, depth in zip(active, depths, strict=True)]

    def _propose(self, one: ActiveRequest, depth: int) -> Proposal:
        text = self._texts[one.slot]
        best = self._best(text.suffixes(), depth)
        deepest = self._max_depth - 1
        if len(self._past) and best.score < self._budget(deepest, depth):
            past = self._best(self._past.suffixes_of(one.request.prompt_ids, text.text[-deepest:]), depth)
            if past.score > best.score:
                best = past
        if not best.tokens:
            return EMPTY
        return Proposal(TokenTree(np.array(best.tokens, dtype=np.int64), np.array(best.parents, dtype=np.int64)))

    def _budget(self, length: int, depth: int) -> int:
        """Most tokens after a match of `length` tokens, and so the best score: no probability is above 1."""
        limit = self.num_nodes(depth)
        return min(limit, int(length * self._factor + self._offset + 1e-6))

    def _best(self, places: Sequence[Place | Remaining], depth: int) -> Draft:
        """The best draft after the suffixes `places[m - 1]` of m tokens, from the longest to where none can win."""
        best = NOTHING
        for length in range(len(places), 0, -1):
            budget = self._budget(length, depth)
            if budget <= best.score:
                break
            place = places[length - 1]
            if self._nodes is None:
                draft = grow_chain(place, budget, self._min_prob)
            else:
                draft = grow_tree(place, budget, depth, self._min_prob)
            if draft.score > best.score:
                best = draft
        return best

    def num_nodes(self, depth: int) -> int:
        return depth if self._nodes is None or depth <= 0 else self._nodes

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        text = self._texts[active.slot]
        text.extend(active.tokens[len(text.text) - len(active.request.prompt_ids) :])

    def finish(self, active: ActiveRequest) -> None:
        self._texts.pop(active.slot, None)
        if self._keeps and active.finish_reason in ENDED:
            self._past.add(active.request.prompt_ids, active.tokens)

    def take_passes(self) -> list[DraftPass]:
        return []
