"""The paged KV cache: rollback undoes append, pages are never lost, a refusal changes nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specbench.engine.kv_cache import PAGE_SIZE, KVSnapshot, PagedKVCache
from specbench.errors import CapacityError, InputError

SLOTS, CONTEXT, PAGES = 3, 70, 9
SLOT = st.integers(0, SLOTS - 1)


def make_cache(num_pages: int | None = PAGES, num_slots: int = SLOTS, max_context: int = CONTEXT) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2,
        num_kv_heads=2,
        head_dim=6,
        num_slots=num_slots,
        max_context=max_context,
        dtype=torch.float32,
        num_pages=num_pages,
    )


def pages_of(length: int) -> int:
    return -(-length // PAGE_SIZE)


def mark(kv: PagedKVCache, slot: int, first: int, values: list[int]) -> None:
    """Write value v as K and V (as -v) of token first + i, where a backend would."""
    for index, value in enumerate(values, start=first):
        page, within = kv.block_table[slot, index // PAGE_SIZE], index % PAGE_SIZE
        kv.k_pool[:, page, :, :, within] = value
        kv.v_pool[:, page, :, within, :6] = -value


def stored(kv: PagedKVCache, slot: int) -> list[int]:
    """The marks of the slot's tokens, read back through `read`, the same in every layer, head and dimension."""
    length = int(kv.lengths[slot])
    for layer in range(2):
        k, v = kv.read(layer, slot, length)
        assert k.shape == v.shape == (2, length, 6)
        assert torch.equal(k, -v)
        assert torch.equal(k, k[:1, :, :1].expand_as(k))
    return [int(x) for x in k[0, :, 0]]


def free_pages(kv: PagedKVCache) -> list[int]:
    held = {int(kv.block_table[slot, i]) for slot in range(len(kv.lengths)) for i in range(int(kv._held[slot]))}
    return sorted(set(range(kv.num_pages)) - held)


class CacheMachine(RuleBasedStateMachine):
    """Random operations beside a model that is plain lists."""

    @initialize()
    def begin(self) -> None:
        self.kv = make_cache()
        self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]
        self.snapshots: list[tuple[KVSnapshot, list[int]]] = []
        self.stamp = 0

    def fresh(self, count: int) -> list[int]:
        self.stamp += count
        return list(range(self.stamp - count + 1, self.stamp + 1))

    @rule(slot=SLOT, written=st.integers(0, 40), share=st.floats(0, 1))
    def append(self, slot: int, written: int, share: float) -> None:
        """Reserve, write, keep a part: what a verify step does, and with nothing kept a rollback."""
        before = (self.kv.num_free_pages, self.kv.lengths.copy(), self.kv.block_table.copy(), self.kv._held.copy())
        total = len(self.tokens[slot]) + written
        missing = pages_of(total) - pages_of(len(self.tokens[slot]))
        if total > CONTEXT or missing > self.kv.num_free_pages:
            with pytest.raises(CapacityError):
                self.kv.reserve(slot, written)
            assert self.kv.num_free_pages == before[0]
            assert np.array_equal(self.kv.lengths, before[1])
            assert np.array_equal(self.kv.block_table, before[2])
            assert np.array_equal(self.kv._held, before[3])
            return
        self.kv.reserve(slot, written)
        assert self.kv.num_free_pages == before[0] - missing
        values = self.fresh(written)
        mark(self.kv, slot, len(self.tokens[slot]), values)
        kept = round(share * written)
        self.kv.commit(slot, kept)
        self.tokens[slot] += values[:kept]

    @rule(slot=SLOT, share=st.floats(0, 1))
    def truncate(self, slot: int, share: float) -> None:
        length = int(share * len(self.tokens[slot]))
        self.kv.truncate(slot, length)
        del self.tokens[slot][length:]

    @rule(slot=SLOT)
    def close(self, slot: int) -> None:
        self.kv.close(slot)
        self.tokens[slot].clear()

    @rule(slot=SLOT, reserved=st.integers(0, 20))
    def snapshot(self, slot: int, reserved: int) -> None:
        """Also with room reserved and not yet committed."""
        length = len(self.tokens[slot])
        if length + reserved <= CONTEXT and pages_of(length + reserved) - pages_of(length) <= self.kv.num_free_pages:
            self.kv.reserve(slot, reserved)
        self.snapshots.append((self.kv.snapshot(slot), self.tokens[slot].copy()))
        self.kv.commit(slot, 0)

    @precondition(lambda self: self.snapshots)
    @rule(slot=SLOT, data=st.data())
    def restore(self, slot: int, data: st.DataObject) -> None:
        if self.tokens[slot]:
            return
        snapshot, tokens = data.draw(st.sampled_from(self.snapshots))
        if pages_of(len(tokens)) > self.kv.num_free_pages:
            with pytest.raises(CapacityError):
                self.kv.restore(slot, snapshot)
            return
        self.kv.restore(slot, snapshot)
        self.tokens[slot] = tokens.copy()

    @invariant()
    def holds_just_what_it_should(self) -> None:
        self.kv.check_integrity()
        assert self.kv.lengths.tolist() == [len(tokens) for tokens in self.tokens]
        used = sum(pages_of(len(tokens)) for tokens in self.tokens)
        assert self.kv.num_free_pages + used == PAGES
        assert len(free_pages(self.kv)) == self.kv.num_free_pages
        for slot, tokens in enumerate(self.tokens):
            if tokens:
                assert stored(self.kv, slot) == tokens

    def teardown(self) -> None:
        for slot in range(SLOTS):
            self.kv.close(slot)
        self.kv.check_integrity()
        assert self.kv.num_free_pages == PAGES


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_operations = CacheMachine.TestCase


def test_a_hundred_rejected_steps_keep_no_page() -> None:
    """Fault 35: every draft rejected, one token a step; pages are ceil(length / page) all along and all free at end."""
    kv = make_cache(num_pages=16, num_slots=2, max_context=128)
    for slot, length in enumerate((1, 13)):
        kv.reserve(slot, length)
        kv.commit(slot, length)
    for step in range(100):
        for slot in range(2):
            kv.reserve(slot, 9)
            kv.commit(slot, 1)
        kv.check_integrity()
        used = pages_of(1 + step + 1) + pages_of(13 + step + 1)
        assert kv.num_free_pages == 16 - used
    kv.close(0)
    kv.close(1)
    assert kv.num_free_pages == 16


def test_a_step_allocates_no_memory() -> None:
    """1000 steps of four slots: tokens come and go, requests end and others begin, and nothing grows."""
    kv = make_cache(num_pages=40, num_slots=4, max_context=160)
    pools = (kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), kv.block_table.ctypes.data, kv._free.ctypes.data)

    def steps(count: int) -> None:
        for step in range(count):
            for slot in range(4):
                if kv.lengths[slot] > 140:
                    kv.close(slot)
                kv.reserve(slot, 6)
                kv.commit(slot, (step + slot) % 7)

    steps(50)
    tracemalloc.start()
    try:
        steps(50)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        steps(1000)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 512, f"{after - before} bytes were left over"
    assert peak - before < 4096, f"a step takes {peak - before} bytes"
    assert pools == (kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), kv.block_table.ctypes.data, kv._free.ctypes.data)
    kv.check_integrity()


def test_a_snapshot_is_a_copy() -> None:
    kv = make_cache()
    kv.reserve(0, 20)
    mark(kv, 0, 0, list(range(1, 21)))
    kv.commit(0, 20)
    snapshot = kv.snapshot(0)
    mark(kv, 0, 0, [99] * 20)
    kv.restore(1, snapshot)
    assert stored(kv, 1) == list(range(1, 21))
    assert stored(kv, 0) == [99] * 20
    # What is restored twice is twice its own.
    kv.restore(2, snapshot)
    mark(kv, 2, 0, [7])
    assert stored(kv, 1) == list(range(1, 21))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "columns"}, "unknown KV layout 'columns'"),
        ({"rollback": "swap"}, "unknown rollback policy 'swap'"),
        ({"page_size": 32}, "a page of layout panels can't hold 32 tokens"),
        ({"page_size": 0, "layout": "rows"}, "a page of layout rows can't hold 0 tokens"),
    ],
)
def test_what_a_cache_can_not_be_is_refused(options: dict[str, object], message: str) -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "num_slots": 1, "max_context": 20}
    with pytest.raises(InputError, match=message):
        PagedKVCache(**sizes, dtype=torch.float32, **options)  # type: ignore[arg-type]


def test_refusals_say_what_is_lacking() -> None:
    kv = make_cache()
    with pytest.raises(CapacityError, match="needs 71 tokens of context, and the cache has 70"):
        kv.reserve(0, 71)
    kv.reserve(0, 70)
    kv.commit(0, 70)
    with pytest.raises(CapacityError, match="4 free pages and a request needs 5 more"):
        kv.reserve(1, 70)
    assert kv.num_free_pages == 4


@pytest.mark.parametrize(
    "misuse",
    [
        lambda kv: kv.commit(0, -1),
        lambda kv: kv.commit(0, 12),
        lambda kv: kv.truncate(0, 6),
        lambda kv: kv.restore(0, kv.snapshot(0)),
    ],
    ids=["negative commit", "commit of what was not reserved", "truncate to more", "restore into a slot in use"],
)
def test_misuse_is_a_bug_of_ours(misuse: Callable[[PagedKVCache], None]) -> None:
    kv = make_cache()
    kv.reserve(0, 5)
    kv.commit(0, 5)
    with pytest.raises(AssertionError):
        misuse(kv)


def test_integrity_finds_a_lost_a_doubled_and_a_surplus_page() -> None:
    for fault in ("lost", "doubled", "surplus"):
        kv = make_cache()
        for slot in range(2):
            kv.reserve(slot, 20)
            kv.commit(slot, 20)
        if fault == "lost":
            kv._num_free -= 1
        elif fault == "doubled":
            kv.block_table[1, 0] = kv.block_table[0, 0]
        else:
            kv.reserve(0, 20)
        with pytest.raises(AssertionError, match="page"):
            kv.check_integrity()


def test_bytes_are_those_of_both_pools() -> None:
    """K [L, pages, H, 6, 16] and V [L, pages, H, 16, 16]: the head dimension of V is padded to 16."""
    assert make_cache().bytes == 4 * 2 * PAGES * 2 * 16 * (6 + 16)
