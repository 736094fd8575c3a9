"""ForwardBatch: which tokens of which requests one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class ForwardBatch:
    """A ragged batch. Rows query_start[b] .. query_start[b+1] (half-open) belong to request b.

    `token_ids`, `positions` (RoPE) and `row_request` are int64[N]; `slots`, `context_lens` (tokens already in the KV
    cache) int64[B]; `query_start` int64[B+1]; `selected_rows` int64[R], the rows whose logits are wanted. Row i of a
    request is written at index context_len + i of its slot and sees everything before it, and itself.
    """

    token_ids: IntArray
    positions: IntArray
    row_request: IntArray
    query_start: IntArray
    context_lens: IntArray
    slots: IntArray
    selected_rows: IntArray

    @classmethod
    def of(
        cls,
        tokens: list[NDArray[np.int64]] | list[list[int]],
        slots: list[int] | IntArray,
        context_lens: list[int] | IntArray,
        *,
        last_only: bool = False,
    ) -> ForwardBatch:
        """A batch of chains: request b continues with `tokens[b]` after `context_lens[b]` cached tokens."""
        counts = np.array([len(t) for t in tokens], dtype=np.int64)
        start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=start[1:])
        lens = np.asarray(context_lens, dtype=np.int64)
        row_request = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        within = np.arange(start[-1], dtype=np.int64) - start[row_request]
        rows = start[1:] - 1 if last_only else np.arange(start[-1], dtype=np.int64)
        return cls(
            token_ids=np.concatenate([np.asarray(t, dtype=np.int64) for t in tokens]),
            positions=lens[row_request] + within,
            row_request=row_request,
            query_start=start,
            context_lens=lens,
            slots=np.asarray(slots, dtype=np.int64),
            selected_rows=rows,
        )

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def cache_index(self) -> IntArray:
        """Where each row's K and V go: the index within its request's cached tokens, int64[N]."""
        within = np.arange(self.num_rows, dtype=np.int64) - self.query_start[self.row_request]
        return self.context_lens[self.row_request] + within

    @property
    def query_lens(self) -> IntArray:
        return np.diff(self.query_start)
