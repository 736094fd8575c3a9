"""Paged KV cache: pools of pages, the cells of each slot, and three ways to keep the accepted path of a step.

A *cell* is a logical index within a slot: cells 0 .. length - 1 are committed, node i of a step stands in cell
length + i. A *physical slot* is page * page_size + offset; `slot_index` tells where each reserved cell is. A commit
keeps the accepted nodes of the step, in their order, as the next committed cells. What that takes is the policy:

compact  cells follow the pages in order; accepted K and V are copied down to where they belong. A prefix needs no copy.
index    the pages of a whole request are taken when it opens. A commit permutes `slot_index`: accepted cells first,
         then the rejected ones, which the next step writes over. No K or V moves and no page is taken or given back.
realloc  every step's nodes live in pages taken for that step; accepted K and V are copied to the tail of the committed
         pages, and the step's pages are given back. The churn that the other two avoid.

Invariant between steps: every page is free or held once; cells of a slot are distinct places in the pages it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.errors import CapacityError, InputError

PAGE_SIZE = 16
"""Tokens of a page of layout panels: the panel width of the CPU kernels."""

LAYOUTS = ("panels", "rows")
ROLLBACKS = ("compact", "index", "realloc")

IntArray = NDArray[np.int64]
CellMover = Callable[[torch.Tensor, torch.Tensor, IntArray, IntArray], None]
"""(k_pool, v_pool, source int64[B, M], target int64[B, M]): copies cells of all layers between physical slots, each
row in ascending order, -1 = none. A slot may be a source and, later in its row, a target; rows share no slot."""


@dataclass(frozen=True)
class KVSnapshot:
    """K and V of the first `length` tokens of a request, in whole pages: [L, pages, ...] as in the pools."""

    k: torch.Tensor
    v: torch.Tensor
    length: int


class PagedKVCache:
    """KV pages of up to `num_slots` requests of at most `max_context` tokens each.

    Pools are zero-filled, in `dtype`. Layout panels: `k_pool` [L, pages, H, D, 16], `v_pool` [L, pages, H, 16,
    ceil16(D)]; layout rows: both [L, pages, H, page_size, D]. `k_rows` and `v_rows` show either as [L, pages, H,
    page_size, D]. `num_pages` defaults to what `num_slots` full requests can need under the policy.

    `bytes_moved` counts bytes of K and V copied by commits (a copy counts once), `allocator_calls` pages taken and
    given back; both only grow. `mover` copies cells where a device has a kernel for it.

    Raises InputError for an unknown layout or policy, or a page size that the layout does not have.
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
        page_size: int = PAGE_SIZE,
        layout: str = "panels",
        rollback: str = "compact",
    ) -> None:
        _check_choices(page_size, layout, rollback)
        self.page_size, self.layout, self.rollback = page_size, layout, rollback
        self.max_context = max_context
        width = -(-max_context // page_size)
        self.num_pages = pages_needed(num_slots, max_context, page_size, rollback) if num_pages is None else num_pages
        front = (num_layers, self.num_pages, num_kv_heads)
        if layout == "panels":
            padded = -(-head_dim // PAGE_SIZE) * PAGE_SIZE
            self.k_pool = torch.zeros(*front, head_dim, page_size, dtype=dtype, device=device)
            self.v_pool = torch.zeros(*front, page_size, padded, dtype=dtype, device=device)
            self.k_rows, self.v_rows = self.k_pool.transpose(3, 4), self.v_pool[..., :head_dim]
        else:
            self.k_pool = torch.zeros(*front, page_size, head_dim, dtype=dtype, device=device)
            self.v_pool = torch.zeros(*front, page_size, head_dim, dtype=dtype, device=device)
            self.k_rows, self.v_rows = self.k_pool, self.v_pool
        self.block_table: IntArray = np.zeros((num_slots, width), dtype=np.int64)
        self.slot_index: IntArray = np.zeros((num_slots, width * page_size), dtype=np.int64)
        self.lengths: IntArray = np.zeros(num_slots, dtype=np.int64)
        self.bytes_moved = 0
        self.allocator_calls = 0
        self.mover: CellMover | None = None
        self._cell_bytes = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        self._within: IntArray = np.arange(page_size, dtype=np.int64)
        self._held: IntArray = np.zeros(num_slots, dtype=np.int64)
        # realloc only: the pages of the step under way, which hold cells length .. length + reserved - 1.
        self._step_pages: IntArray = np.zeros((num_slots, width), dtype=np.int64)
        self._step_held: IntArray = np.zeros(num_slots, dtype=np.int64)
        self._free: IntArray = np.arange(self.num_pages, dtype=np.int64)[::-1].copy()
        self._num_free = self.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    @property
    def bytes(self) -> int:
        """Bytes of both pools."""
        return self.k_pool.nbytes + self.v_pool.nbytes

    @property
    def pages_in_order(self) -> bool:
        """Whether cell c always stands in page block_table[c // page_size]: then nobody needs `slot_index`."""
        return self.rollback == "compact"

    # ---- taking and giving back

    def open(self, slot: int, num_tokens: int) -> None:
        """Begin a request in the empty `slot` that will need at most `num_tokens` cells, drafts included.

        Under policy index this takes all of its pages. Raises CapacityError, leaving the slot as it was.
        """
        assert self.lengths[slot] == 0, "open a slot in use"
        self._check_context(num_tokens)
        if self.rollback == "index":
            self._grow(slot, num_tokens)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens behind the committed ones of `slot`. Asking again for as many or fewer
        changes nothing. Raises CapacityError, leaving the slot as it was."""
        length = int(self.lengths[slot])
        self._check_context(length + num_tokens)
        # A request's first tokens are no step: they go where they stay.
        if self.rollback == "realloc" and length:
            self._grow_step(slot, num_tokens)
        else:
            self._grow(slot, length + num_tokens)

    def _check_context(self, length: int) -> None:
        if length > self.max_context:
            raise CapacityError(f"a request needs {length} tokens of context, and the cache has {self.max_context}")

    def _check_free(self, missing: int) -> None:
        if missing > self._num_free:
            raise CapacityError(f"the KV cache has {self._num_free} free pages and a request needs {missing} more")

    def _grow(self, slot: int, length: int) -> None:
        """Pages for cells 0 .. length - 1; new pages hold the cells behind those already there, in order."""
        held = int(self._held[slot])
        missing = -(-length // self.page_size) - held
        self._check_free(missing)
        for number in range(held, held + missing):
            page = self._take()
            self.block_table[slot, number] = page
            self._point(slot, number * self.page_size, page)
            self._held[slot] = number + 1

    def _grow_step(self, slot: int, num_tokens: int) -> None:
        held = int(self._step_held[slot])
        missing = -(-num_tokens // self.page_size) - held
        self._check_free(missing)
        for number in range(held, held + missing):
            page = self._take()
            self._step_pages[slot, number] = page
            self._point(slot, int(self.lengths[slot]) + number * self.page_size, page)
            self._step_held[slot] = number + 1

    def _point(self, slot: int, cell: int, page: int) -> None:
        """Cells `cell` .. stand in `page`, as many as it holds and the slot may have."""
        cells = self.slot_index[slot, cell : cell + self.page_size]
        np.add(self._within[: len(cells)], page * self.page_size, out=cells)

    def _take(self) -> int:
        self._num_free -= 1
        self.allocator_calls += 1
        return int(self._free[self._num_free])

    def _give_back(self, page: int) -> None:
        self._free[self._num_free] = page
        self._num_free += 1
        self.allocator_calls += 1

    # ---- keeping and rolling back

    def commit_paths(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep nodes `paths[i]` of the step of `slots[i]` (offsets behind the committed cells, strictly ascending)
        as its next committed cells, in that order, and roll all other nodes back."""
        moves: list[tuple[int, list[int]]] = []
        for slot, path in zip(slots, paths, strict=True):
            nodes = list(path)
            assert all(a < b for a, b in pairwise((-1, *nodes))), "a path goes down"
            if nodes and nodes[-1] != len(nodes) - 1:
                assert nodes[-1] < self._num_reserved(slot), "commit beyond what was reserved"
                if self.rollback == "index" or self._step_held[slot]:
                    self._permute(slot, nodes)
                else:
                    moves.append((slot, nodes))
        if moves:
            self._copy_down(moves)
        for slot, path in zip(slots, paths, strict=True):
            self.commit(slot, len(path))

    def commit(self, slot: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens written since the last commit and roll the rest back."""
        assert num_tokens >= 0, "a commit takes nothing back"
        assert num_tokens <= self._num_reserved(slot), "commit beyond what was reserved"
        length = int(self.lengths[slot])
        if self._step_held[slot] and num_tokens:
            source = self.slot_index[slot, length : length + num_tokens].copy()
            self._grow(slot, length + num_tokens)
            # The tail page's own last cells: steps pointed them at their pages.
            for number in range(length // self.page_size, int(self._held[slot])):
                self._point(slot, number * self.page_size, int(self.block_table[slot, number]))
            target = self.slot_index[slot, length : length + num_tokens]
            self._move(source[None], target[None])
        self._set_length(slot, length + num_tokens)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tokens of `slot` from `length` on, and what was reserved."""
        assert 0 <= length <= int(self.lengths[slot]), "truncate beyond the length"
        self._set_length(slot, length)

    def close(self, slot: int) -> None:
        """Give all pages of `slot` back."""
        self._set_length(slot, 0)
        self._shrink(slot, 0)

    def _num_reserved(self, slot: int) -> int:
        """Cells behind the committed ones that stand in pages of the slot."""
        length = int(self.lengths[slot])
        if self.rollback == "realloc" and length:
            return int(self._step_held[slot]) * self.page_size
        return int(self._held[slot]) * self.page_size - length

    def _copy_down(self, moves: list[tuple[int, list[int]]]) -> None:
        width = max(len(nodes) for _, nodes in moves)
        source = np.full((len(moves), width), -1, dtype=np.int64)
        target = np.full((len(moves), width), -1, dtype=np.int64)
        for row, (slot, nodes) in enumerate(moves):
            cells = self.slot_index[slot, int(self.lengths[slot]) :]
            for place, node in enumerate(nodes):
                # place <= node, and no later node reads the cell `place`: ascending order overwrites nothing needed.
                if place != node:
                    source[row, place], target[row, place] = cells[node], cells[place]
        self._move(source, target)

    def _permute(self, slot: int, nodes: list[int]) -> None:
        first = int(self.lengths[slot])
        cells = self.slot_index[slot, first : first + nodes[-1] + 1]
        chosen = set(nodes)
        cells[:] = cells[nodes + [node for node in range(len(cells)) if node not in chosen]]

    def _move(self, source: IntArray, target: IntArray) -> None:
        """Copy cells between physical slots, in all layers; see CellMover."""
        self.bytes_moved += int((source >= 0).sum()) * self._cell_bytes
        if self.mover is not None:
            self.mover(self.k_pool, self.v_pool, source, target)
            return
        size = self.page_size
        for here, there in zip(source.ravel().tolist(), target.ravel().tolist(), strict=True):
            if here >= 0:
                for rows in (self.k_rows, self.v_rows):
                    rows[:, there // size, :, there % size].copy_(rows[:, here // size, :, here % size])

    def _set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        while self._step_held[slot]:
            self._step_held[slot] -= 1
            self._give_back(int(self._step_pages[slot, self._step_held[slot]]))
        # Under index a request keeps its pages until it closes.
        if self.rollback != "index":
            self._shrink(slot, -(-length // self.page_size))

    def _shrink(self, slot: int, keep: int) -> None:
        while self._held[slot] > keep:
            self._held[slot] -= 1
            self._give_back(int(self.block_table[slot, self._held[slot]]))

    # ---- reading and writing, for what is not a kernel

    def write(self, layer: int, places: IntArray, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [N, H_kv, D] of one layer at physical slots int64[N]."""
        pages, within = self._split(places)
        self.k_rows[layer][pages, :, within] = k
        self.v_rows[layer][pages, :, within] = v

    def read(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `length` cells in one layer as [H_kv, length, D] copies."""
        if self.pages_in_order:
            pages = self._on_device(self.block_table[slot, : -(-length // self.page_size)])
            k, v = (r[layer, pages].permute(1, 0, 2, 3).flatten(1, 2) for r in (self.k_rows, self.v_rows))
            return k[:, :length], v[:, :length]
        pages, within = self._split(self.slot_index[slot, :length])
        k, v = (r[layer][pages, :, within].transpose(0, 1).contiguous() for r in (self.k_rows, self.v_rows))
        return k, v

    def snapshot(self, slot: int) -> KVSnapshot:
        """A copy of the committed tokens of `slot`, to start other requests from."""
        length = int(self.lengths[slot])
        num_pages = -(-length // self.page_size)
        if self.rollback != "index":
            pages = self._on_device(self.block_table[slot, :num_pages])
            return KVSnapshot(self.k_pool[:, pages].clone(), self.v_pool[:, pages].clone(), length)
        empty_k, empty_v = (p.new_zeros(len(p), num_pages, *p.shape[2:]) for p in (self.k_pool, self.v_pool))
        snapshot = KVSnapshot(empty_k, empty_v, length)
        pages, within = self._split(self.slot_index[slot, :length])
        numbers, offsets = self._split(np.arange(length, dtype=np.int64))
        k, v = (snapshot.k.transpose(3, 4), snapshot.v) if self.layout == "panels" else (snapshot.k, snapshot.v)
        k[:, numbers, :, offsets] = self.k_rows[:, pages, :, within]
        v[:, numbers, :, offsets, : self.v_rows.shape[-1]] = self.v_rows[:, pages, :, within]
        return snapshot

    def restore(self, slot: int, snapshot: KVSnapshot) -> None:
        """Fill the empty `slot` with a snapshot's tokens."""
        assert self.lengths[slot] == 0, "restore into a slot in use"
        self._check_context(snapshot.length)
        self._grow(slot, snapshot.length)
        # Whole pages are filled: the cells of a slot that was in use under index stand in page order again.
        for number in range(int(self._held[slot])):
            self._point(slot, number * self.page_size, int(self.block_table[slot, number]))
        pages = self._on_device(self.block_table[slot, : snapshot.k.shape[1]])
        self.k_pool[:, pages] = snapshot.k
        self.v_pool[:, pages] = snapshot.v
        self._set_length(slot, snapshot.length)

    def _on_device(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(self.k_pool.device)

    def _split(self, places: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        return self._on_device(places // self.page_size), self._on_device(places % self.page_size)

    # ---- proofs

    def check_integrity(self) -> None:
        """Assert that every page is free or held by one slot, that slots hold just what their length needs (or, under
        index, no less), that no step is under way, and that the cells of a slot are distinct places in its pages."""
        size = self.page_size
        free = self._free[: self._num_free].tolist()
        held = [int(page) for slot, n in enumerate(self._held) for page in self.block_table[slot, :n]]
        step = [int(page) for slot, n in enumerate(self._step_held) for page in self._step_pages[slot, :n]]
        assert sorted(free + held + step) == list(range(self.num_pages)), "a page is lost or held twice"
        for slot, length in enumerate(self.lengths.tolist()):
            needed, has = -(-length // size), int(self._held[slot])
            assert not self._step_held[slot], f"slot {slot} holds pages of a step that is over"
            right = has >= needed if self.rollback == "index" else has == needed
            assert right, f"slot {slot} holds a wrong number of pages"
            places = (self.block_table[slot, :has, None] * size + self._within).ravel()
            cells = self.slot_index[slot, : has * size]
            if self.rollback == "index":
                assert np.array_equal(np.sort(cells), np.sort(places)), f"slot {slot} points outside its pages"
            else:
                assert np.array_equal(cells[:length], places[:length]), f"slot {slot} points outside its pages"


def pages_needed(num_slots: int, max_context: int, page_size: int = PAGE_SIZE, rollback: str = "compact") -> int:
    """Pages with which `num_slots` requests of `max_context` tokens never lack one.

    Under realloc a step's nodes start a page of their own (one more a slot), and while one slot commits both copies
    of its accepted nodes exist.
    """
    width = -(-max_context // page_size)
    return num_slots * (width + 1) + width if rollback == "realloc" else num_slots * width


def _check_choices(page_size: int, layout: str, rollback: str) -> None:
    if layout not in LAYOUTS:
        raise InputError(f"unknown KV layout {layout!r}", remedy=f"use one of: {', '.join(LAYOUTS)}")
    if rollback not in ROLLBACKS:
        raise InputError(
            f"unknown rollback policy {rollback!r}", remedy=f"use one of: {', '.join(ROLLBACKS)}", key="kv.rollback"
        )
    if page_size < 1 or (layout == "panels" and page_size != PAGE_SIZE):
        raise InputError(
            f"a page of layout {layout} can't hold {page_size} tokens",
            remedy=f"page_size: {PAGE_SIZE}" if layout == "panels" else "page_size: 16, 32 or 64",
            key="kv.page_size",
        )
