"""References of tree_build in float64, by stable sorts; nothing of the kernels' integer order."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def best_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [B, count] of the best scores [B, C], best first, ties to the smaller index."""
    return torch.sort(scores.double(), dim=-1, descending=True, stable=True).indices[:, :count]


def expand_reference(
    values: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    indices: torch.Tensor,
    mask: torch.Tensor,
    start: int,
    cell: int,
) -> tuple[Tensors, Tensors]:
    """(recorded candidates of the level, next frontier) of values, ids [B, F, k] under scores, indices [B, F].

    `indices` are the frontier's candidate numbers, `mask` [B, F, W] what it sees; values are at most 0, and no NaN.
    """
    batch, _, top_k = values.shape
    child = (scores.double()[:, :, None] + values.double()).reshape(batch, -1)
    parents = indices[:, :, None].expand(-1, -1, top_k).reshape(batch, -1)
    recorded = {"scores": child, "tokens": ids.reshape(batch, -1), "parents": parents}
    chosen = best_first(child, top_k)
    rows = chosen // top_k
    seen = mask.gather(1, rows[:, :, None].expand(-1, -1, mask.shape[-1])).clone()
    for i in range(top_k):
        own = cell + i
        bit = torch.tensor(1, dtype=torch.int64, device=mask.device) << (own % 64)
        seen[:, i, own // 64] |= bit
    return recorded, {
        "scores": child.gather(1, chosen),
        "tokens": recorded["tokens"].gather(1, chosen),
        "rows": rows,
        "candidates": start + chosen,
        "mask": seen,
    }


def rerank_reference(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    total: int,
    roots: torch.Tensor,
    context_lens: torch.Tensor,
) -> Tensors:
    """The trees of `rerank`, one request after the other."""
    batch, count = scores.shape
    nodes = min(total, count + 1)
    device = scores.device
    words = -(-nodes // 64)
    tree = {name: torch.zeros(batch, nodes, dtype=torch.int64, device=device) for name in ("parents", "depths")}
    visible = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    visible[:, :, 0] = True
    kept = best_first(scores, nodes - 1).sort(dim=-1).values
    tree["parents"][:, 0] = -1
    for b in range(batch):
        number = {-1: 0} | {int(c): i + 1 for i, c in enumerate(kept[b])}
        for i, c in enumerate(kept[b], start=1):
            parent = number[int(parents[b, c])]
            tree["parents"][b, i] = parent
            tree["depths"][b, i] = tree["depths"][b, parent] + 1
            visible[b, i] |= visible[b, parent]
    root = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    tree["tokens"] = torch.cat([roots[:, None], tokens.gather(1, kept)], dim=1)
    tree["positions"] = context_lens[:, None].long() + tree["depths"]
    tree["candidates"] = torch.cat([root, kept], dim=1)
    tree["mask"] = torch.zeros(batch, nodes, words, dtype=torch.int64, device=device)
    for j in range(nodes):
        bit = torch.tensor(1, dtype=torch.int64, device=device) << (j % 64)
        tree["mask"][:, :, j // 64] |= torch.where(visible[:, :, j], bit, 0)
    return tree


def grown(values: list[torch.Tensor], ids: list[torch.Tensor]) -> Tensors:
    """All candidates of the levels' values and ids [B, 1 or k, k]: scores in float64, tokens, parents [B, C]."""
    batch, _, top_k = values[0].shape
    device = values[0].device
    scores = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    indices = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    words = -(-top_k // 64)
    mask = torch.zeros(batch, 1, words, dtype=torch.int64, device=device)
    levels, start = [], 0
    for value, tokens in zip(values, ids, strict=True):
        recorded, frontier = expand_reference(value, tokens, scores, indices, mask, start, 0)
        start += value.shape[1] * top_k
        scores, indices = frontier["scores"], frontier["candidates"]
        mask = torch.zeros(batch, top_k, words, dtype=torch.int64, device=device)
        levels.append(recorded)
    return {name: torch.cat([level[name] for level in levels], dim=1) for name in levels[0]}
