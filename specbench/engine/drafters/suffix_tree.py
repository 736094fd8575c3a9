"""SuffixTree: how often each run of at most `max_depth` tokens occurs in some texts, and what follows it.

A trie of all suffixes, cut at `max_depth`, that grows token by token and forgets whole texts. A run that occurs once is
a leaf: what follows it is read from its text. So nodes are spent on runs that occur again and on their followers, never
more than tokens * max_depth of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specbench.errors import InputError

Text = list[int]


class _Node:
    """A run: its `count` of occurrences. `children` None: a leaf, whose only occurrence ends before text[end], or a run
    of max_depth tokens. `best` caches the child with the largest count, the lowest token among equals."""

    __slots__ = ("best", "children", "count", "end", "text")

    def __init__(self, text: Text, end: int) -> None:
        self.count = 1
        self.children: dict[int, _Node] | None = None
        self.best: int | None = None
        self.text, self.end = text, end

    def raised(self, token: int, child: _Node) -> None:
        """Keep `best` true after child `token` was counted once more."""
        if self.best is not None and self.best != token:
            assert self.children is not None
            rival = self.children[self.best].count
            if child.count > rival or (child.count == rival and token < self.best):
                self.best = token


class Place(NamedTuple):
    """A run in a tree: `node` itself, or `below` tokens under that leaf; `left` more tokens may follow it. It is good
    until the tree changes."""

    node: _Node
    below: int
    left: int

    @property
    def occurrences(self) -> int:
        """Occurrences of the run. A leaf has one, and so has every run below it."""
        return self.node.count

    def after(self, token: int) -> Place | None:
        """The run with `token` behind it, if it occurs."""
        node, below, left = self
        if not left:
            return None
        if node.children is not None:
            child = node.children.get(token)
            return None if child is None else Place(child, 0, left - 1)
        at = node.end + below
        return Place(node, below + 1, left - 1) if at < len(node.text) and node.text[at] == token else None

    def children(self, least: float = 0.0) -> list[tuple[int, Place]]:
        """The tokens that follow at least `least` times, with the runs they make."""
        node, below, left = self
        if not left:
            return []
        if node.children is not None:
            found = node.children.items()
            return [(token, Place(child, 0, left - 1)) for token, child in found if child.count >= least]
        at = node.end + below
        return [(node.text[at], Place(node, below + 1, left - 1))] if at < len(node.text) and least <= 1 else []

    def likeliest(self) -> tuple[int, Place] | None:
        """The child with the largest count, the lowest token among equals; None where nothing follows."""
        node, _, left = self
        if not left or not node.children:
            children = self.children()
            return children[0] if children else None
        if node.best is None:
            node.best = min((-child.count, token) for token, child in node.children.items())[1]
        return node.best, Place(node.children[node.best], 0, left - 1)


class Remaining(NamedTuple):
    """A run with the counts of `whole` less those of `own`, a tree of some of the same texts: `whole` as it would be
    without them. `own` None: the run does not occur there."""

    whole: Place
    own: Place | None

    @property
    def occurrences(self) -> int:
        return self.whole.occurrences - (self.own.occurrences if self.own is not None else 0)

    def children(self, least: float = 0.0) -> list[tuple[int, Remaining]]:
        own, least = self.own, max(least, 1)
        rest = ((token, Remaining(place, own and own.after(token))) for token, place in self.whole.children(least))
        return [(token, place) for token, place in rest if place.occurrences >= least]

    def likeliest(self) -> tuple[int, Remaining] | None:
        found = self.whole.likeliest()
        if found is None or self.own is None or self.own.after(found[0]) is None:
            # Others lose counts or keep them, so the likeliest of all stays it if it loses none.
            return None if found is None else (found[0], Remaining(found[1], None))
        return min(self.children(), key=lambda item: (-item[1].occurrences, item[0]), default=None)


class SuffixTree:
    """All runs of at most `max_depth` tokens of some texts. Raises InputError unless max_depth is 2 or more.

    `extend` costs O(max_depth) a token; `remove` O(max_depth) a token of the text; `suffixes` O(max_depth), and
    `suffixes_of` O(max_depth^2).
    """

    def __init__(self, max_depth: int) -> None:
        if max_depth < 2:
            raise InputError(
                f"a suffix tree of depth {max_depth} knows no continuation",
                key="max_tree_depth",
                remedy="give a depth of 2 or more",
            )
        self.max_depth = max_depth
        self._root = _Node([], 0)
        self._root.children = {}
        self.text: Text = []
        """The newest text."""
        # _open[m]: the node of the newest text's last m tokens. It ends where a suffix has no node of its own.
        self._open: list[_Node] = [self._root]

    def add(self, tokens: Iterable[int]) -> Text:
        """Begin a new text with `tokens`; what it returns is the text's handle for `remove`, not to be changed."""
        self.text, self._open = [], [self._root]
        self.extend(tokens)
        return self.text

    def extend(self, tokens: Iterable[int]) -> None:
        """Add `tokens` to the newest text."""
        text, deepest = self.text, self.max_depth
        for token in tokens:
            token = int(token)
            text.append(token)
            reached = [self._root]
            for depth, node in enumerate(self._open[:deepest], start=1):
                assert node.children is not None
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = _Node(text, len(text))
                else:
                    child.count += 1
                    if child.children is None and depth < deepest:
                        # The leaf's occurrence ended earlier, or in a finished text: what follows it is known.
                        child.children = {}
                        if child.end < len(child.text):
                            child.children[child.text[child.end]] = _Node(child.text, child.end + 1)
                    reached.append(child)
                node.raised(token, child)
            self._open = reached

    def remove(self, text: Text) -> None:
        """Forget a text that `add` returned; counts are then as if it had never been there."""
        for start in range(len(text)):
            node = self._root
            for at in range(start, min(start + self.max_depth, len(text))):
                children, token = node.children, text[at]
                assert children is not None
                child = children[token]
                child.count -= 1
                if node.best == token:
                    node.best = None
                if child.count == 0:
                    del children[token]
                    break
                node = child
        if text is self.text:
            self.text, self._open = [], [self._root]

    def suffixes(self) -> list[Place]:
        """Item m - 1: the last m tokens of the newest text, for each m that something may follow in this tree."""
        return [Place(node, 0, self.max_depth - m) for m, node in enumerate(self._open[: self.max_depth])][1:]

    def suffixes_of(self, tokens: Sequence[int]) -> list[Place]:
        """The same for any text: item m - 1 is its last m tokens, as long as they occur."""
        places: list[Place] = []
        for length in range(1, min(self.max_depth - 1, len(tokens)) + 1):
            place = self.find(tokens[-length:])
            if place is None:
                break
            places.append(place)
        return places

    def find(self, run: Sequence[int]) -> Place | None:
        """The place of `run`, or None if it occurs nowhere or is longer than max_depth."""
        node, left = self._root, self.max_depth
        for index, token in enumerate(run):
            if left == 0:
                return None
            if node.children is None:
                end = node.end + len(run) - index
                found = len(run) - index <= left and node.text[node.end : end] == list(run[index:])
                return Place(node, len(run) - index, left - len(run) + index) if found else None
            child = node.children.get(token)
            if child is None:
                return None
            node, left = child, left - 1
        return Place(node, 0, left)

    @property
    def num_nodes(self) -> int:
        """Nodes in memory, the root left out."""
        count, stack = -1, [self._root]
        while stack:
            count += 1
            stack.extend((stack.pop().children or {}).values())
        return count
