"""Paged KV cache: one pool of pages, a block table and a length for each slot.

K of a page is stored as [head_dim, PAGE_SIZE], V as [PAGE_SIZE, head_dim padded to 16]: both are panels that the
attention kernels stream. Taking and giving back pages moves integers on a preallocated stack; no step allocates memory.

Invariant after every commit: a slot holds ceil(length / PAGE_SIZE) pages, every page is free or held once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.errors import CapacityError

PAGE_SIZE = 16


@dataclass(frozen=True)
class KVSnapshot:
    """K and V of the first `length` tokens of a request: k [L, pages, H, D, 16], v [L, pages, H, 16, Dv]."""

    k: torch.Tensor
    v: torch.Tensor
    length: int


class PagedKVCache:
    """KV pages of up to `num_slots` requests of at most `max_context` tokens each.

    `k_pool` is [L, num_pages, H_kv, D, 16] and `v_pool` [L, num_pages, H_kv, 16, ceil16(D)], zero-filled in `dtype`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: str = "cpu",
        num_pages: int | None = None,
    ) -> None:
        pages_per_slot = -(-max_context // PAGE_SIZE)
        self.num_pages = num_slots * pages_per_slot if num_pages is None else num_pages
        self.max_context = max_context
        v_dim = -(-head_dim // PAGE_SIZE) * PAGE_SIZE
        shape = (num_layers, self.num_pages, num_kv_heads)
        self.k_pool = torch.zeros(*shape, head_dim, PAGE_SIZE, dtype=dtype, device=device)
        self.v_pool = torch.zeros(*shape, PAGE_SIZE, v_dim, dtype=dtype, device=device)
        self.block_table: NDArray[np.int64] = np.zeros((num_slots, pages_per_slot), dtype=np.int64)
        self.lengths: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._held: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._free: NDArray[np.int64] = np.arange(self.num_pages, dtype=np.int64)[::-1].copy()
        self._num_free = self.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    @property
    def bytes(self) -> int:
        """Bytes of both pools."""
        return self.k_pool.nbytes + self.v_pool.nbytes

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens of `slot`. Raises CapacityError, leaving the slot as it was."""
        length = int(self.lengths[slot]) + num_tokens
        if length > self.max_context:
            raise CapacityError(f"a request needs {length} tokens of context, and the cache has {self.max_context}")
        missing = -(-length // PAGE_SIZE) - int(self._held[slot])
        if missing > self._num_free:
            raise CapacityError(f"the KV cache has {self._num_free} free pages and a request needs {missing} more")
        for _ in range(missing):
            self._num_free -= 1
            self.block_table[slot, self._held[slot]] = self._free[self._num_free]
            self._held[slot] += 1

    def commit(self, slot: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens written since the last commit and roll the rest back."""
        length = int(self.lengths[slot]) + num_tokens
        assert num_tokens >= 0, "a commit takes nothing back"
        assert length <= int(self._held[slot]) * PAGE_SIZE, "commit beyond what was reserved"
        self._set_length(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tokens of `slot` from `length` on."""
        assert 0 <= length <= int(self.lengths[slot]), "truncate beyond the length"
        self._set_length(slot, length)

    def close(self, slot: int) -> None:
        """Give all pages of `slot` back."""
        self._set_length(slot, 0)

    def _set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        keep = -(-length // PAGE_SIZE)
        while self._held[slot] > keep:
            self._held[slot] -= 1
            self._free[self._num_free] = self.block_table[slot, self._held[slot]]
            self._num_free += 1

    def snapshot(self, slot: int) -> KVSnapshot:
        """A copy of the committed tokens of `slot`, to start other requests from."""
        length = int(self.lengths[slot])
        pages = torch.from_numpy(self.block_table[slot, : -(-length // PAGE_SIZE)].copy()).to(self.k_pool.device)
        return KVSnapshot(self.k_pool[:, pages].clone(), self.v_pool[:, pages].clone(), length)

    def restore(self, slot: int, snapshot: KVSnapshot) -> None:
        """Fill the empty `slot` with a snapshot's tokens."""
        assert self.lengths[slot] == 0, "restore into a slot in use"
        self.reserve(slot, snapshot.length)
        pages = torch.from_numpy(self.block_table[slot, : self._held[slot]].copy()).to(self.k_pool.device)
        self.k_pool[:, pages] = snapshot.k
        self.v_pool[:, pages] = snapshot.v
        self.commit(slot, snapshot.length)

    def read(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as [H_kv, length, D] copies, for reference code and tests."""
        pages = torch.from_numpy(self.block_table[slot, : -(-length // PAGE_SIZE)].copy()).to(self.k_pool.device)
        head_dim = self.k_pool.shape[3]
        k = self.k_pool[layer, pages].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
        v = self.v_pool[layer, pages].permute(1, 0, 2, 3).flatten(1, 2)[:, :length, :head_dim]
        return k, v

    def check_integrity(self) -> None:
        """Assert that every page is free or held by one slot, and that slots hold just what their length needs."""
        free = self._free[: self._num_free].tolist()
        held = [int(page) for slot, n in enumerate(self._held) for page in self.block_table[slot, :n]]
        assert sorted(free + held) == list(range(self.num_pages)), "a page is lost or held twice"
        for slot, length in enumerate(self.lengths):
            assert self._held[slot] == -(-int(length) // PAGE_SIZE), f"slot {slot} holds a wrong number of pages"
