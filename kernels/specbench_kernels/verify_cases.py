"""Inputs of the verification ops: packed trees, and distributions that drafts were really drawn from."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch


def random_parents(nodes: int, children: int, random: np.random.Generator) -> list[int]:
    """Root-included parents of a tree of `nodes` nodes with at most `children` children a node; 1: a chain."""
    parents, room = [-1], [children]
    for _ in range(1, nodes):
        open_nodes = [node for node, left in enumerate(room) if left]
        parent = int(random.choice(open_nodes))
        room[parent] -= 1
        parents.append(parent)
        room.append(children)
    return parents


def packed_trees(
    requests: int, nodes: int, children: int, vocab: int, device: torch.device, seed: int, *, ragged: bool = True
) -> dict[str, Any]:
    """Trees of 1..nodes nodes with distinct siblings: tokens int64[N], parents int32[N], query_start int32[B + 1]."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    parents: list[int] = []
    starts = [0]
    for index in range(requests):
        count = int(random.integers(1, nodes + 1)) if ragged and index else nodes
        own = random_parents(count, min(children, vocab), random)
        left = {node: list(random.permutation(vocab)[: count + 1]) for node in range(count)}
        tokens += [0, *(int(left[parent].pop()) for parent in own[1:])]
        parents += own
        starts.append(len(tokens))
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int64, device=device),
        "parents": torch.tensor(parents, dtype=torch.int32, device=device),
        "query_start": torch.tensor(starts, dtype=torch.int32, device=device),
    }


def drawn_drafts(trees: dict[str, Any], q: torch.Tensor, siblings: torch.Tensor, seed: int) -> torch.Tensor:
    """tokens int64[N] of the trees, each sampled from `q` [N, V] at the row of its position's first child, without
    earlier siblings where `siblings` int32[B] is 2. The rows of `q` of later siblings are made equal to the first's.
    """
    random = np.random.default_rng(seed)
    tokens = trees["tokens"].tolist()
    parents = trees["parents"].tolist()
    starts = trees["query_start"].tolist()
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        first: dict[int, int] = {}
        used: dict[int, list[int]] = {}
        for row in range(start + 1, end):
            eldest = first.setdefault(parents[row], row)
            if eldest != row:
                q[row] = q[eldest]
            law = q[eldest].double().cpu().numpy().copy()
            if int(siblings[index]) == 2:
                law[used.get(parents[row], [])] = 0.0
            cdf = law.cumsum()
            tokens[row] = min(int(np.searchsorted(cdf, random.random() * cdf[-1], side="right")), len(law) - 1)
            used.setdefault(parents[row], []).append(tokens[row])
    return torch.tensor(tokens, dtype=torch.int64, device=trees["tokens"].device)
