"""StaticTree: the shape of a drafted tree as ranks, from a scenario's option `tree`. No torch here.

A node is the path of ranks that leads to it: [0] is the first child of the root, [0, 1] the second child of that one.
Nodes stand level by level, siblings in the order of their ranks, so parents come before children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from specbench.errors import InputError

MAX_NODES = 127
"""With the root, 128 rows a request."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """A tree as paths of ranks, in the order of the nodes. Make one with `of` or `chain`."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> StaticTree:
        """The tree of these paths, in any order.

        Raises InputError unless every prefix of a path is there, siblings have the ranks 0, 1, .., no path stands
        twice, and there are at most 127 of them.
        """
        if not paths:
            raise InputError(
                "a tree needs a node", key="tree", remedy="write paths of ranks, such as [[0], [1], [0, 0]]"
            )
        if len(paths) > MAX_NODES:
            raise InputError(f"a tree of {len(paths)} nodes", key="tree", remedy=f"keep at most {MAX_NODES} nodes")
        known = {tuple(path) for path in paths}
        for path in sorted(known, key=lambda path: (len(path), path)):
            if not path or min(path) < 0:
                raise InputError(f"{list(path)} is no path of ranks", key="tree", remedy="ranks count from 0")
            if len(path) > 1 and path[:-1] not in known:
                raise InputError(f"{list(path)} has no parent", key="tree", remedy=f"add {list(path[:-1])}")
            before = (*path[:-1], path[-1] - 1)
            if path[-1] and before not in known:
                raise InputError(f"{list(path)} has no sibling before it", key="tree", remedy=f"add {list(before)}")
        if len(known) < len(paths):
            twice = next(path for index, path in enumerate(paths) if path in paths[:index])
            raise InputError(f"{list(twice)} stands here twice", key="tree", remedy="keep each path once")
        return cls(tuple(sorted(known, key=lambda path: (len(path), path))))

    @classmethod
    @lru_cache(maxsize=256)
    def chain(cls, depth: int) -> StaticTree:
        """One node a level; without nodes at depth 0."""
        return cls(tuple((0,) * level for level in range(1, depth + 1)))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """The number of levels below the root."""
        return len(self.paths[-1]) if self.paths else 0

    @cached_property
    def _cuts(self) -> tuple[StaticTree, ...]:
        return tuple(
            StaticTree(tuple(path for path in self.paths if len(path) <= level)) for level in range(self.depth)
        )

    def cut(self, depth: int) -> StaticTree:
        """The first `depth` levels."""
        return self if depth >= self.depth else self._cuts[max(depth, 0)]

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node, -1 for children of the root."""
        numbers = {path: number for number, path in enumerate(self.paths)}
        return tuple(numbers.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of the root at index 0 and of node i at index i + 1, by rank."""
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def inner(self) -> tuple[tuple[int, ...], ...]:
        """Nodes with children, by level; the root, -1, is level 0. A drafter feeds just these."""
        levels: list[list[int]] = [[] for _ in range(self.depth)]
        for node in range(-1, len(self)):
            if self.children[node + 1]:
                levels[len(self.paths[node]) if node >= 0 else 0].append(node)
        return tuple(tuple(nodes) for nodes in levels)

    @cached_property
    def is_chain(self) -> bool:
        return len(self) == self.depth

    @cached_property
    def first_path(self) -> tuple[int, ...]:
        """The nodes on the path of first children."""
        path = []
        node = -1
        while self.children[node + 1]:
            node = self.children[node + 1][0]
            path.append(node)
        return tuple(path)

    @property
    def most_fed(self) -> int:
        """Most nodes that one level of a draft feeds, the root counted as one; 0 without nodes."""
        return max((len(nodes) for nodes in self.inner), default=0)


def check_first_children(tree: StaticTree) -> None:
    """Raise InputError unless the first children lead down to the deepest level, where a replay needs them."""
    level = len(tree.first_path)
    if level < tree.depth:
        raise InputError(
            f"the first children end at level {level} of {tree.depth}, and the AR output runs along them",
            key="tree",
            remedy=f"add {[0] * (level + 1)}",
        )


def _counted(children: Mapping[Path, int]) -> StaticTree:
    """The tree in which each node has so many children, by its path of ranks; others have none."""
    return StaticTree.of([(*path, rank) for path, count in children.items() for rank in range(count)])


EAGLE_TREE = _counted(
    {(): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1}
    | {(0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1, (0, 0, 0): 3, (0, 0, 0, 0): 2}
)
"""EAGLE-1's published tree: 25 drafts in 5 levels of 4, 8, 8, 3 and 2 (EAGLE's repository, `mc_sim_7b_63`)."""

MEDUSA_TREE = _counted(
    {(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1}
    | {(0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1}
    | {(0, 0, 0): 2}
)
"""Medusa's published tree: 63 drafts in 4 levels of 10, 28, 23 and 2 (Medusa's repository, `mc_sim_7b_63`)."""

MEDUSA_VICUNA_TREE = _counted(
    {(): 10, (0,): 10, (1,): 5, (2,): 2, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1}
    | {(0, 0): 9, (0, 1): 4, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (1, 0): 3, (1, 1): 1, (2, 0): 1}
    | {(0, 0, 0): 4, (0, 0, 1): 1, (0, 0, 2): 1, (0, 1, 0): 1}
)
"""The one for Vicuna 7B: 63 drafts in 4 levels of 10, 23, 23 and 7 (Medusa's repository, `vicuna_7b_stage2`)."""

NAMED_TREES = {"eagle": EAGLE_TREE, "medusa": MEDUSA_TREE, "medusa-vicuna-7b": MEDUSA_VICUNA_TREE}
