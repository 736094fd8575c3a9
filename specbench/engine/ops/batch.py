"""ForwardBatch: which tokens of which requests one forward pass works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbench.engine.tree import WORD, TokenTree

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class ForwardBatch:
    """A ragged batch. Rows query_start[b] .. query_start[b+1] (half-open) belong to request b.

    `token_ids`, `positions` (RoPE) and `row_request` are int64[N]; `slots`, `context_lens` (tokens committed to the KV
    cache) and `written` (uncommitted cells that earlier passes of the same step wrote) int64[B]; `query_start`
    int64[B+1]; `selected_rows` int64[R], the rows whose logits are wanted. Row i of a request is written at cell
    context_len + written + i of its slot.

    `tree_mask` int64[N, W] (uint64 patterns): bit j of a row says that it sees cell context_len + j; all committed
    cells are seen. A row's uncommitted cells are its ancestors and itself, root first, at consecutive positions, and
    none stands behind its own cell. None: chains, every row sees all cells up to its own. A sliding window hides keys
    by position, on top of that.
    """

    token_ids: IntArray
    positions: IntArray
    row_request: IntArray
    query_start: IntArray
    context_lens: IntArray
    slots: IntArray
    selected_rows: IntArray
    written: IntArray
    tree_mask: IntArray | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[IntArray] | Sequence[list[int]],
        slots: Sequence[int] | IntArray,
        context_lens: Sequence[int] | IntArray,
        *,
        last_only: bool = False,
        trees: Sequence[TokenTree] | None = None,
        written: Sequence[int] | IntArray | None = None,
        masks: Sequence[IntArray] | None = None,
        depths: Sequence[IntArray] | Sequence[list[int]] | None = None,
    ) -> ForwardBatch:
        """Request b continues with `tokens[b]` after `context_lens[b]` cached tokens.

        `trees[b]`: its tokens are the root and the tree's nodes. A pass of one level of a tree gives `written` cells,
        `masks[b]` int64[T_b, W_b] (bit j: cell context_len + j, own bit included) and `depths[b]` int64[T_b] (position
        = context_len + depth; default: one after the other behind the written cells).
        """
        counts = np.array([len(t) for t in tokens], dtype=np.int64)
        start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=start[1:])
        lens = np.asarray(context_lens, dtype=np.int64)
        ahead = np.zeros(len(counts), dtype=np.int64) if written is None else np.asarray(written, dtype=np.int64)
        row_request = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        within = np.arange(start[-1], dtype=np.int64) - start[row_request]
        rows = start[1:] - 1 if last_only else np.arange(start[-1], dtype=np.int64)
        positions = (lens + ahead)[row_request] + within
        if trees is not None and not all(tree.is_chain for tree in trees):
            assert masks is None, "a tree has its own mask"
            assert depths is None, "a tree has its own depths"
            assert not ahead.any(), "a tree is one pass"
            assert [len(tree) + 1 for tree in trees] == counts.tolist(), "a tree's tokens are its root and its nodes"
            masks = [tree.mask_words for tree in trees]
            depths = [np.concatenate([np.zeros(1, dtype=np.int64), tree.depths]) for tree in trees]
        if depths is not None:
            assert [len(depth) for depth in depths] == counts.tolist(), "one depth a row"
            positions = lens[row_request] + np.concatenate([np.asarray(depth, dtype=np.int64) for depth in depths])
        return cls(
            token_ids=np.concatenate([np.asarray(t, dtype=np.int64) for t in tokens]),
            positions=positions,
            row_request=row_request,
            query_start=start,
            context_lens=lens,
            slots=np.asarray(slots, dtype=np.int64),
            selected_rows=rows,
            written=ahead,
            tree_mask=None if masks is None else _packed_mask(masks, counts, int((counts + ahead).max(initial=1))),
        )

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def cache_index(self) -> IntArray:
        """Where each row's K and V go: the cell of its request's cache, int64[N]."""
        within = np.arange(self.num_rows, dtype=np.int64) - self.query_start[self.row_request]
        return (self.context_lens + self.written)[self.row_request] + within

    @property
    def query_lens(self) -> IntArray:
        return np.diff(self.query_start)

    @property
    def num_keys(self) -> IntArray:
        """Cells of each request's cache that hold keys of this pass, int64[B]: committed, written and its own rows."""
        return self.context_lens + self.written + self.query_lens

    def visible(self, request: int, window: int = 0) -> NDArray[np.bool_]:
        """bool[T, keys] of one request: which cells each row attends to. The definition every backend follows.

        `window` > 0: only keys whose position is less than `window` before the row's own.
        """
        first, end = int(self.query_start[request]), int(self.query_start[request + 1])
        context, keys = int(self.context_lens[request]), int(self.num_keys[request])
        cells = np.arange(keys, dtype=np.int64)
        if self.tree_mask is None:
            own = np.arange(keys - (end - first), keys, dtype=np.int64)[:, None]
            seen = cells <= own
            return seen & (cells > own - window) if window > 0 else seen
        bits = np.arange(keys - context, dtype=np.int64)
        words = self.tree_mask[first:end].view(np.uint64)
        uncommitted = (words[:, bits // WORD] >> (bits % WORD).astype(np.uint64) & np.uint64(1)).astype(bool)
        if window > 0:
            # The r-th ancestor, root first, stands at position context + r.
            position = context + uncommitted.cumsum(axis=1) - 1
            uncommitted &= position > self.positions[first:end, None] - window
        committed = np.broadcast_to(cells[:context], (end - first, context))
        if window > 0:
            return np.concatenate([committed > self.positions[first:end, None] - window, uncommitted], axis=1)
        return np.concatenate([np.ones((end - first, context), dtype=bool), uncommitted], axis=1)


def _packed_mask(masks: Sequence[IntArray], counts: IntArray, num_bits: int) -> IntArray:
    """int64[N, W] of the requests' own masks, W words for `num_bits` uncommitted cells."""
    width = -(-num_bits // WORD)
    packed = np.zeros((int(counts.sum()), width), dtype=np.int64)
    row = 0
    for mask, count in zip(masks, counts.tolist(), strict=True):
        assert mask.shape[0] == count, "one mask row a token"
        assert mask.shape[1] <= width, "a mask is wider than the uncommitted cells"
        packed[row : row + count, : mask.shape[1]] = mask
        row += count
    return packed
