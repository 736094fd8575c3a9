"""What passes between the steps of tree_build: candidates, frontier, tree; tensors that can be reused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench_kernels.checks import require

MAX_CANDIDATES = 4096


@dataclass(frozen=True)
class Candidates:
    """All nodes drafted so far of B requests: `scores` [B, C] fp32 or fp64 (cumulative log-probabilities), `tokens`
    int64[B, C], `parents` int32[B, C] (candidate index, -1: the root); C = k + D k^2, levels one after the other."""

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    top_k: int
    depth: int

    @classmethod
    def empty(
        cls, batch: int, top_k: int, depth: int, *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Candidates:
        """Room for B requests. Raises ValueError for sizes below 1 (depth below 0) or too many candidates."""
        require(batch >= 0 and top_k >= 1 and depth >= 0, "tree_build", f"batch {batch}, top_k {top_k}, depth {depth}")
        count = top_k + depth * top_k * top_k
        require(count <= MAX_CANDIDATES, "tree_build", f"{count} candidates, at most {MAX_CANDIDATES} are supported")
        return cls(
            torch.empty(batch, count, dtype=dtype, device=device),
            torch.empty(batch, count, dtype=torch.int64, device=device),
            torch.empty(batch, count, dtype=torch.int32, device=device),
            top_k,
            depth,
        )

    def level_start(self, level: int) -> int:
        """Index of the first candidate of a level."""
        return 0 if level == 0 else self.top_k + (level - 1) * self.top_k**2


@dataclass(frozen=True)
class Frontier:
    """The F nodes a request is expanded from: `scores` [B, F], `tokens` int64[B, F], `rows` int32[B, F] (the frontier
    row of the level before whose output state is the node's input), `candidates` int32[B, F] (candidate index, -1: the
    root), `mask` int64[B, F, W] (bit c: the node sees the draft's uncommitted cell c; its own cell included)."""

    scores: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    candidates: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def empty(
        cls, batch: int, width: int, num_words: int, *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Frontier:
        """Room for B x F nodes."""
        return cls(
            torch.empty(batch, width, dtype=dtype, device=device),
            torch.empty(batch, width, dtype=torch.int64, device=device),
            torch.empty(batch, width, dtype=torch.int32, device=device),
            torch.empty(batch, width, dtype=torch.int32, device=device),
            torch.empty(batch, width, num_words, dtype=torch.int64, device=device),
        )

    @classmethod
    def root(
        cls,
        batch: int,
        num_words: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        uncommitted: bool = False,
    ) -> Frontier:
        """The root alone, score 0. With `uncommitted` it lies in the draft's uncommitted cell 0, seen by every node."""
        frontier = cls.empty(batch, 1, num_words, device=device, dtype=dtype)
        for tensor in (frontier.scores, frontier.tokens, frontier.rows, frontier.mask):
            tensor.zero_()
        frontier.candidates.fill_(-1)
        frontier.mask[:, :, 0] = int(uncommitted)
        return frontier


@dataclass(frozen=True)
class Tree:
    """The pruned trees of B requests, N nodes each with the root as node 0, parents before children: `tokens`
    int64[B, N], `parents` int32[B, N] (node number, root -1), `depths` int32[B, N], `mask` int64[B, N, W] (bit j of row
    i: node j is i or an ancestor of i; W = ceil(N / 64)), `positions` int32[B, N] (context_len + depth), `candidates`
    int32[B, N] (which candidate a node is, root -1)."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    candidates: torch.Tensor

    @classmethod
    def empty(cls, batch: int, nodes: int, *, device: torch.device) -> Tree:
        """Room for B trees of N nodes."""

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(batch, nodes, *shape, dtype=dtype, device=device)

        words = -(-nodes // 64)
        return cls(
            integers(dtype=torch.int64),
            integers(),
            integers(),
            integers(words, dtype=torch.int64),
            integers(),
            integers(),
        )
