"""Rollback policies: compact, index and realloc keep the same path, and each moves and takes just what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import (
    ScriptedDrafter,
    cached,
    decode,
    empty,
    feed,
    feed_trees,
    make_decoder,
    make_engine,
    make_request,
    outputs,
    prompts,
    random_path,
    random_tree,
    tiny_spec,
    wide_weights,
)
from engine_world import OUTPUT, V, World, build_world

from specbench.engine.decode import Engine
from specbench.engine.kv_cache import ROLLBACKS, PagedKVCache, pages_needed
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.request import ActiveRequest
from specbench.engine.trace import Trace
from specbench.engine.tree import TokenTree
from specbench.errors import CapacityError

LAYOUTS = (("panels", 16), ("rows", 16), ("rows", 4), ("rows", 1))
CELL_BYTES = 2 * 2 * 2 * 6 * 4
"""K and V of 2 layers, 2 heads, 6 dimensions, fp32."""


def make_cache(rollback: str, layout: str = "panels", page_size: int = 16, **changes: Any) -> PagedKVCache:
    options: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 6,
        "num_slots": 3,
        "max_context": 70,
        "dtype": torch.float32,
    }
    return PagedKVCache(**(options | changes), rollback=rollback, layout=layout, page_size=page_size)


def mark(kv: PagedKVCache, slot: int, values: Sequence[int]) -> None:
    """Value v as K, -v as V, of the cells behind the committed ones, where a backend would write them."""
    first = int(kv.lengths[slot])
    places = kv.slot_index[slot, first : first + len(values)]
    marks = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(len(values), 2, 6)
    for layer in range(2):
        kv.write(layer, places, marks, -marks)


def marks(kv: PagedKVCache, slot: int) -> list[int]:
    k, v = kv.read(1, slot, int(kv.lengths[slot]))
    assert torch.equal(k, -v)
    assert torch.equal(k, kv.read(0, slot, int(kv.lengths[slot]))[0])
    assert torch.equal(k, k[:1, :, :1].expand_as(k))
    return [int(x) for x in k[0, :, 0]]


# ---- one step


@pytest.mark.parametrize(("layout", "page_size"), LAYOUTS)
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_path_whose_cells_are_source_and_target(rollback: str, layout: str, page_size: int) -> None:
    """Fault 36: parents -1, 0, 0, 1, 2 and path 0, 2, 4: cell 2 is written from 4 and read into 1; and longer ones."""
    for context in (1, 13, 15, 16, 31):
        for path in ((0, 2, 4), (0, 1, 2), (0,), (), (0, 1, 4), (1, 3), (4,), (0, 2, 3, 9, 12, 17)):
            kv = make_cache(rollback, layout, page_size)
            kv.open(0, 60)
            kv.reserve(0, context)
            mark(kv, 0, range(1, context + 1))
            kv.commit(0, context)
            kv.reserve(0, 18)
            mark(kv, 0, range(100, 118))
            before = (kv.bytes_moved, kv.allocator_calls)
            kv.commit_paths([0], [path])
            assert marks(kv, 0) == [*range(1, context + 1), *(100 + node for node in path)]
            kv.check_integrity()
            shifted = sum(node != place for place, node in enumerate(path))
            moved = {"compact": shifted, "index": 0, "realloc": len(path)}[rollback]
            assert kv.bytes_moved - before[0] == moved * CELL_BYTES
            if rollback == "index":
                assert kv.allocator_calls == before[1]
            elif rollback == "realloc":
                assert kv.allocator_calls - before[1] >= -(-18 // page_size)


def test_index_puts_accepted_cells_first_and_rejected_ones_behind() -> None:
    """Their places are used again, in that order, by the next step."""
    kv = make_cache("index")
    kv.open(0, 32)
    kv.reserve(0, 3)
    kv.commit(0, 3)
    first = kv.slot_index[0].copy()
    kv.reserve(0, 6)
    kv.commit_paths([0], [(0, 2, 4)])
    expected = [*first[:3], *first[[3, 5, 7]], *first[[4, 6]], *first[8:32]]
    assert kv.slot_index[0, :32].tolist() == expected
    kv.commit_paths([0], [(1,)])
    assert kv.slot_index[0, :32].tolist() == [*expected[:6], expected[7], expected[6], *expected[8:]]


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_batch_is_committed_slot_by_slot(rollback: str) -> None:
    kv = make_cache(rollback)
    for slot, length in enumerate((5, 16, 30)):
        kv.open(slot, 60)
        kv.reserve(slot, length)
        mark(kv, slot, range(length))
        kv.commit(slot, length)
        kv.reserve(slot, 7)
        mark(kv, slot, [1000 * (slot + 1) + node for node in range(7)])
    kv.commit_paths([2, 0], [(0, 3, 6), (0, 1)])
    kv.commit_paths([1], [(0, 5)])
    assert marks(kv, 0) == [*range(5), 1000, 1001]
    assert marks(kv, 1) == [*range(16), 2000, 2005]
    assert marks(kv, 2) == [*range(30), 3000, 3003, 3006]
    kv.check_integrity()


@pytest.mark.parametrize("path", [(0, 0), (0, 3, 2), (-1, 1), (0, 40)])
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_path_that_is_none_is_a_bug_of_ours(rollback: str, path: tuple[int, ...]) -> None:
    kv = make_cache(rollback)
    kv.open(0, 16)
    kv.reserve(0, 3)
    kv.commit(0, 3)
    kv.reserve(0, 5)
    with pytest.raises(AssertionError, match=r"a path goes down|beyond what was reserved"):
        kv.commit_paths([0], [path])


@pytest.mark.parametrize("rollback", ["compact", "realloc"])
def test_a_mover_gets_every_copy_and_no_other(rollback: str) -> None:
    """What a device's kernel is told: physical slots, rows of a batch padded by -1, ascending."""
    kv, seen = make_cache(rollback), []

    def mover(k_pool: torch.Tensor, v_pool: torch.Tensor, source: Any, target: Any) -> None:
        assert k_pool is kv.k_pool
        assert v_pool is kv.v_pool
        seen.append((source.tolist(), target.tolist()))

    kv.mover = mover
    starts = {}
    for slot, length in enumerate((5, 20)):
        kv.reserve(slot, length)
        kv.commit(slot, length)
        kv.reserve(slot, 7)
        starts[slot] = kv.slot_index[slot, length : length + 7].tolist()
    kv.commit_paths([0, 1], [(0, 2, 4), (0, 6)])
    if rollback == "compact":
        a, b = starts[0], starts[1]
        assert seen == [([[-1, a[2], a[4]], [-1, b[6], -1]], [[-1, a[1], a[2]], [-1, b[1], -1]])]
    else:
        assert [source for source, _ in seen] == [[[starts[0][i] for i in (0, 2, 4)]], [[starts[1][i] for i in (0, 6)]]]
        assert [target for _, target in seen] == [[kv.slot_index[0, 5:8].tolist()], [kv.slot_index[1, 20:22].tolist()]]


# ---- no memory


@pytest.mark.parametrize("rollback", ["compact", "index"])
def test_a_step_takes_no_tensor_memory(rollback: str) -> None:
    """Counted by torch's profiler; the pools stay where they are."""
    kv = make_cache(rollback)
    places = (kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), kv.slot_index.ctypes.data, kv.block_table.ctypes.data)
    for slot in range(3):
        kv.open(slot, 70)
        kv.reserve(slot, 9)
        kv.commit(slot, 9)

    def allocated() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            for slot in range(3):
                kv.reserve(slot, 8)
            kv.commit_paths([0, 1, 2], [(0, 2, 5), (0, 7), (0, 1)])
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    assert allocated() == 0
    assert (kv.bytes_moved > 0) == (rollback == "compact")
    assert places == (kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), kv.slot_index.ctypes.data, kv.block_table.ctypes.data)


def test_index_leaves_the_pools_as_they_are() -> None:
    """Bit by bit over the whole pool, for a commit and for a rollback of everything."""
    kv = make_cache("index")
    kv.open(0, 60)
    kv.reserve(0, 20)
    mark(kv, 0, range(20))
    kv.commit(0, 20)
    for path in ((0, 3, 7), (), (0, 9)):
        kv.reserve(0, 10)
        mark(kv, 0, range(50, 60))
        before = (kv.k_pool.clone(), kv.v_pool.clone(), kv.num_free_pages, kv.allocator_calls)
        kv.commit_paths([0], [path])
        assert torch.equal(kv.k_pool, before[0])
        assert torch.equal(kv.v_pool, before[1])
        assert (kv.num_free_pages, kv.allocator_calls, kv.bytes_moved) == (*before[2:], 0)


# ---- thousands of steps


@pytest.mark.parametrize(("layout", "page_size", "num_steps"), [("panels", 16, 10_000), ("rows", 4, 2_000)])
@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_ten_thousand_random_steps_lose_nothing(rollback: str, layout: str, page_size: int, num_steps: int) -> None:
    """Requests come and go over four slots; a step writes nodes and keeps a random path. Beside it, plain lists."""
    kv = PagedKVCache(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        num_slots=4,
        max_context=90,
        dtype=torch.float32,
        layout=layout,
        page_size=page_size,
        rollback=rollback,
    )
    values = kv.k_rows[0, :, 0, :, 0]
    pool = values.numpy()
    stream = np.random.default_rng(7)
    texts: list[list[float]] = [[], [], [], []]
    stamp, moved, steps = 0, 0, 0

    def write(slot: int, count: int) -> list[float]:
        nonlocal stamp
        first = int(kv.lengths[slot])
        places = kv.slot_index[slot, first : first + count]
        assert len(set(places.tolist())) == count
        pool[places // page_size, places % page_size] = np.arange(stamp, stamp + count)
        stamp = (stamp + count) % 2**24
        return pool[places // page_size, places % page_size].tolist()

    while steps < num_steps:
        slot = int(stream.integers(4))
        text = texts[slot]
        if not text:
            start = int(stream.integers(1, 40))
            kv.open(slot, 90)
            kv.reserve(slot, start)
            text += write(slot, start)
            kv.commit(slot, start)
            continue
        if len(text) > 75 or stream.random() < 0.02:
            if stream.random() < 0.3:
                del text[int(stream.integers(1, len(text) + 1)) :]
                kv.truncate(slot, len(text))
            else:
                kv.close(slot)
                text.clear()
            kv.check_integrity()
            continue
        steps += 1
        before = (kv.bytes_moved, kv.allocator_calls)
        nodes = int(stream.integers(1, 15))
        kv.reserve(slot, nodes)
        held = kv.num_pages - kv.num_free_pages
        kv.reserve(slot, nodes)
        assert kv.num_pages - kv.num_free_pages == held, "asking twice takes pages twice"
        written = write(slot, nodes)
        path = [node for node in range(nodes) if node == 0 or stream.random() < 0.4]
        kv.commit_paths([slot], [path])
        text += [written[node] for node in path]
        kv.check_integrity()
        places = kv.slot_index[slot, : len(text)]
        assert pool[places // page_size, places % page_size].tolist() == text
        shifted = sum(node != place for place, node in enumerate(path))
        moved = {"compact": shifted, "index": 0, "realloc": len(path)}[rollback] * 8
        assert kv.bytes_moved - before[0] == moved
        calls = kv.allocator_calls - before[1]
        if rollback == "index":
            assert calls == 0
        else:
            needed = [-(-n // page_size) for n in (len(text) - len(path), nodes, len(text))]
            if rollback == "realloc":
                assert calls == 2 * needed[1] + needed[2] - needed[0]
        if steps % 100 == 0:
            for other, expected in enumerate(texts):
                k, _ = kv.read(0, other, len(expected))
                assert k[0, :, 0].tolist() == expected
                used = sum(-(-len(each) // page_size) for each in texts)
                assert rollback == "index" or kv.num_pages - kv.num_free_pages == used
    for slot in range(4):
        kv.close(slot)
    kv.check_integrity()
    assert kv.num_free_pages == kv.num_pages


def test_the_default_pool_never_runs_dry() -> None:
    """All slots full to the last cell, each in a step of as many nodes as fit, committed one after the other."""
    for rollback in ROLLBACKS:
        for page_size, context in ((4, 21), (16, 64), (1, 9)):
            for length in range(1, context):
                kv = make_cache(rollback, "rows", page_size, max_context=context)
                assert kv.num_pages == pages_needed(3, context, page_size, rollback)
                for slot in range(3):
                    kv.open(slot, context)
                    kv.reserve(slot, length)
                    kv.commit(slot, length)
                for slot in range(3):
                    kv.reserve(slot, context - length)
                for slot in range(3):
                    kv.commit_paths([slot], [range(context - length)])
                kv.check_integrity()


def test_too_few_pages_are_refused_before_anything_changes() -> None:
    kv = make_cache("index", num_pages=4)
    with pytest.raises(CapacityError, match="4 free pages and a request needs 5 more"):
        kv.open(0, 65)
    with pytest.raises(CapacityError, match="needs 71 tokens of context"):
        kv.open(0, 71)
    assert kv.num_free_pages == 4
    kv = make_cache("realloc", num_pages=3)
    kv.reserve(0, 32)
    kv.commit(0, 32)
    with pytest.raises(CapacityError, match="1 free pages and a request needs 2 more"):
        kv.reserve(0, 17)
    kv.reserve(0, 5)
    with pytest.raises(CapacityError, match="0 free pages and a request needs 1 more"):
        kv.commit(0, 1)
    kv.truncate(0, 32)
    kv.check_integrity()
    assert kv.num_free_pages == 1


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_snapshots_are_in_the_order_of_cells(rollback: str) -> None:
    """Also of a slot whose cells are scattered, into one whose cells were."""
    kv = make_cache(rollback)
    for slot in (0, 1):
        kv.open(slot, 60)
        kv.reserve(slot, 18)
        mark(kv, slot, range(18))
        kv.commit_paths([slot], [(0, 3, 5, 17)])
        kv.reserve(slot, 30)
        mark(kv, slot, range(200, 230))
        kv.commit_paths([slot], [range(0, 30, 2)])
    snapshot = kv.snapshot(0)
    kv.truncate(1, 0)
    kv.restore(1, snapshot)
    kv.restore(2, snapshot)
    expected = [0, 3, 5, 17, *range(200, 230, 2)]
    assert [marks(kv, slot) for slot in range(3)] == [expected] * 3
    kv.check_integrity()


def test_integrity_finds_a_cell_out_of_place_and_a_step_that_never_ended() -> None:
    for rollback in ROLLBACKS:
        kv = make_cache(rollback)
        kv.open(0, 60)
        kv.reserve(0, 20)
        kv.commit(0, 20)
        kv.check_integrity()
        kv.slot_index[0, 3] = kv.slot_index[0, 4]
        with pytest.raises(AssertionError, match="points outside its pages"):
            kv.check_integrity()
    kv = make_cache("realloc")
    kv.reserve(0, 20)
    kv.commit(0, 20)
    kv.reserve(0, 2)
    with pytest.raises(AssertionError, match="a step that is over"):
        kv.check_integrity()
    kv.commit(0, 0)
    kv.check_integrity()
    kv = make_cache("index")
    kv.open(0, 60)
    kv.reserve(0, 40)
    kv.commit(0, 40)
    kv._held[0] = 2
    kv._free[kv._num_free] = kv.block_table[0, 2]
    kv._free[kv._num_free + 1] = kv.block_table[0, 3]
    kv._num_free += 2
    with pytest.raises(AssertionError, match="wrong number of pages"):
        kv.check_integrity()


# ---- through the model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5])
def test_all_policies_give_the_same_bits(dtype: str, window: int) -> None:
    """The same trees and paths, ten steps on end, on both backends: scattered cells are read in their logical order."""
    shape = {"family": "mistral", "sliding_window": window, "sliding_layers": (True, False)} if window else {}
    spec = tiny_spec(num_kv_heads=3, head_dim=24, **shape)
    weights = wide_weights(spec, 3)
    for backend in ("cpu", "torch") if dtype == "fp64" else ("cpu",):
        decoders = [
            make_decoder(spec, weights, dtype=dtype, backend=backend, rollback=rollback, max_rows=96)
            for rollback in ROLLBACKS
        ]
        stream = np.random.default_rng(8)
        texts = prompts(spec, (3, 16, 29), 8)
        for decoder in decoders:
            for slot in range(3):
                decoder.kv.open(slot, 128)
            feed(decoder, texts)
        for step in range(10):
            trees = [random_tree(stream, int(stream.integers(0, 16)), 83) for _ in range(3)]
            paths = [(0, *(node + 1 for node in random_path(stream, tree))) for tree in trees]
            logits = []
            for decoder in decoders:
                logits.append(feed_trees(decoder, [step] * 3, trees))
                decoder.kv.commit_paths([0, 1, 2], paths)
                decoder.kv.check_integrity()
            assert torch.equal(logits[0], logits[1])
            assert torch.equal(logits[0], logits[2])
            for slot in range(3):
                kept = [cached(decoder, slot) for decoder in decoders]
                assert all(torch.equal(a, b) for other in kept[1:] for a, b in zip(kept[0], other, strict=True))
        index = decoders[ROLLBACKS.index("index")].kv
        assert all(np.any(np.diff(index.slot_index[slot, : index.lengths[slot]] % 16) < 0) for slot in range(3))
        assert any(np.any(np.abs(np.diff(index.slot_index[slot, : index.lengths[slot]] % 16)) > 1) for slot in range(3))


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_layout_and_page_size_change_no_logits(rollback: str) -> None:
    """Backend torch over pages of rows, of 1, 4 and 32 tokens, against panels."""
    spec = tiny_spec()
    weights = wide_weights(spec, 3)

    def run(layout: str, page_size: int) -> list[torch.Tensor]:
        kv = PagedKVCache(
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            num_slots=2,
            max_context=90,
            dtype=torch.float64,
            layout=layout,
            page_size=page_size,
            rollback=rollback,
        )
        tensors = iter(weights.items())
        decoder = Decoder(spec, tensors, dtype="fp64", backend="torch", kv=kv, limits=DecoderLimits(64, 64))
        stream = np.random.default_rng(1)
        for slot in (0, 1):
            kv.open(slot, 80)
        found = [feed(decoder, prompts(spec, (17, 3)))]
        for _ in range(4):
            trees = [random_tree(stream, 9, 83), random_tree(stream, 4, 83)]
            found.append(feed_trees(decoder, [1, 2], trees))
            kv.commit_paths([0, 1], [(0, *(node + 1 for node in random_path(stream, tree))) for tree in trees])
        return found

    expected = run("panels", 16)
    for page_size in (1, 4, 32):
        for a, b in zip(run("rows", page_size), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---- through the engine


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


def script(world: World, seed: int, num_nodes: int = 9) -> ScriptedDrafter:
    """Random trees in which, more often than not, some path follows the truth for a while."""
    stream = np.random.default_rng(seed)

    def draft(name: str, tokens: tuple[int, ...], depth: int) -> TokenTree:
        truth = world.truth[name][len(tokens) : len(tokens) + depth]
        tree = random_tree(stream, num_nodes, V, reach=5)
        values, node = tree.tokens.copy(), -1
        for right in truth:
            below = [each for each in tree.children[node + 1] if stream.random() < 0.9]
            if not below:
                break
            if right not in values[list(tree.children[node + 1])]:
                values[below[-1]] = right
            node = next(each for each in tree.children[node + 1] if values[each] == right)
        shallow = tree.depths <= depth  # a prefix-closed set of nodes, renumbered
        place = np.cumsum(shallow) - 1
        parents = np.where(tree.parents[shallow] < 0, -1, place[tree.parents[shallow]])
        return TokenTree(values[shallow], parents)

    return ScriptedDrafter(draft, max_nodes=num_nodes)


class Watched(Engine):
    """Looks at the target's cache before and after every step."""

    num_looked = 0
    scratch: Decoder

    def _step(self, active: list[ActiveRequest], *rest: Any) -> Any:
        kv = self.target.kv
        before = (kv.k_pool.clone(), kv.v_pool.clone(), kv.lengths.copy(), kv.slot_index.copy())
        places = (kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), kv.slot_index.ctypes.data)
        step = super()._step(active, *rest)
        assert places == (kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), kv.slot_index.ctypes.data)
        self.num_looked += 1
        if kv.rollback == "index":
            nodes = dict(zip((one.slot for one in active), step.query_lens, strict=True))
            written = np.zeros(kv.num_pages * 16, dtype=bool)
            for slot, count in nodes.items():
                written[before[3][slot, before[2][slot] : before[2][slot] + count]] = True
            same = torch.from_numpy(~written.reshape(-1, 16))[None, :, None, :, None]
            for old, new in zip(before[:2], (kv.k_pool, kv.v_pool), strict=True):
                if new is kv.k_pool:
                    old, new = old.transpose(3, 4), new.transpose(3, 4)
                assert torch.equal(torch.where(same, old, 0), torch.where(same, new, 0))
        for one in active:
            tokens = [*one.request.prompt_ids, *one.tokens][: one.num_cached]
            feed(self.scratch, [tokens], last_only=True)
            for found, expected in zip(cached(self.target, one.slot), cached(self.scratch, 0), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            empty(self.scratch)
        return step


def run_trees(world: World, rollback: str, backend: str = "cpu", batch_size: int = 3) -> Trace:
    target = make_decoder(world.spec, world.weights, backend=backend, rollback=rollback)
    trace = decode(target, world.requests, script(world, 3), batch_size=batch_size, depth=5)
    assert outputs(trace) == world.truth
    return trace


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_the_cache_holds_just_the_committed_tokens_after_every_step(world: World, rollback: str) -> None:
    """Values of all layers against a fresh prefill, and under index not a bit outside the nodes' own cells moves."""
    target = make_decoder(world.spec, world.weights, rollback=rollback)
    engine = Watched(target, make_engine(target).store, script(world, 4), batch_size=3, depth=4, check=True)
    engine.scratch = make_decoder(world.spec, world.weights, max_rows=96)
    assert outputs(engine.run(world.requests)) == world.truth
    assert engine.num_looked > 20


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_tree_drafts_under_every_policy_are_autoregression(world: World, backend: str, batch_size: int) -> None:
    """The same tokens, and the same acceptance step by step; what differs is what the trace counts."""
    traces = {rollback: run_trees(world, rollback, backend, batch_size) for rollback in ROLLBACKS}
    for trace in traces.values():
        assert 0.1 < trace.num_accepted.sum() / trace.draft_depth.sum() < 0.95
        assert (trace.draft_depth < trace.num_draft).any()
        assert (trace.num_accepted > 1).any()
        for name in ("num_draft", "draft_depth", "num_accepted", "num_committed", "context_len", "flops", "bytes"):
            assert np.array_equal(getattr(trace, name), getattr(traces["compact"], name)), name
        assert np.all(trace.rollback_s <= trace.commit_s)
        assert (trace.rollback_s > 0).all()
    cell = 2 * 2 * 2 * 16 * 8  # K and V, layers, heads, dimensions, bytes
    index, compact, realloc = traces["index"], traces["compact"], traces["realloc"]
    assert not index.kv_bytes_moved.any()
    assert not index.kv_allocator_calls.any()
    committed = np.bincount(realloc.row_step, realloc.num_committed, len(realloc.step_s))
    assert np.array_equal(realloc.kv_bytes_moved, committed * cell)
    assert np.all(realloc.kv_allocator_calls >= 2 * realloc.busy)
    assert compact.kv_bytes_moved.any()
    assert np.all(compact.kv_bytes_moved < realloc.kv_bytes_moved)
    assert np.all(compact.kv_bytes_moved % cell == 0)


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_chains_move_nothing_but_under_realloc(world: World, rollback: str) -> None:
    target = make_decoder(world.spec, world.weights, rollback=rollback)
    trace = decode(target, world.requests, world.drafter("ngram, vllm"), batch_size=3, depth=4)
    assert outputs(trace) == world.truth
    assert trace.kv_bytes_moved.any() == (rollback == "realloc")
    assert np.array_equal(trace.draft_depth, trace.num_draft)


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_wide_tree_shrinks_where_the_context_ends(world: World, rollback: str) -> None:
    """Nine nodes have no room in the last cells: nothing is drafted there, and the limit is reached all the same."""
    target = make_decoder(world.spec, world.weights, max_context=24, num_slots=2, rollback=rollback)
    chosen = [make_request(world.requests[i].prompt_ids, f"r{i}", max_tokens=99, max_context=24) for i in (2, 4, 6)]
    trace = decode(target, chosen, script(world, 5), batch_size=2, depth=3)
    for one in trace.requests:
        assert one.finish_reason == "context"
        assert one.token_ids == world.truth[one.request_id][: len(one.token_ids)]
    assert np.all(trace.context_len + 1 + trace.num_draft <= 24)
    assert not trace.num_draft[trace.context_len > 14].any()


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_stop_in_the_middle_of_an_accepted_path(world: World, rollback: str) -> None:
    target = make_decoder(world.spec, world.weights, rollback=rollback)
    for position in (1, 4, 8):
        eos = world.truth["r0"][position]
        request = make_request(world.requests[0].prompt_ids, "r0", max_tokens=OUTPUT, eos_ids=(eos,))
        trace = decode(target, [request, world.requests[2]], script(world, 6), batch_size=2, depth=6)
        expected = world.truth["r0"][: world.truth["r0"].index(eos) + 1]
        assert outputs(trace) == {"r0": expected, "r2": world.truth["r2"]}


def test_more_nodes_than_were_reserved_are_a_bug_of_the_drafter(world: World) -> None:
    drafter = script(world, 3)
    drafter.max_nodes = 2
    target = make_decoder(world.spec, world.weights)
    with pytest.raises(AssertionError, match="more drafted than reserved"):
        make_engine(target, drafter, depth=4).run(world.requests[:1])
    assert target.kv.num_free_pages == target.kv.num_pages


# ---- faults put in on purpose must show


def dense(kv: PagedKVCache, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
    """Fault 36: the accepted cells are read as if they lay side by side."""
    for slot, path in zip(slots, paths, strict=True):
        kv.commit(slot, len(path))


def descending(kv: PagedKVCache, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
    """The last accepted cell is copied first, over one that is read later."""
    move = kv._move
    kv._move = lambda source, target: move(source[:, ::-1], target[:, ::-1])  # type: ignore[method-assign]
    try:
        PagedKVCache.commit_paths(kv, slots, paths)
    finally:
        kv._move = move  # type: ignore[method-assign]


@pytest.mark.parametrize("wrong", [dense, descending])
def test_a_wrong_commit_of_scattered_cells_shows(
    world: World, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., None]
) -> None:
    target = make_decoder(world.spec, world.weights)
    monkeypatch.setattr(target.kv, "commit_paths", lambda slots, paths: wrong(target.kv, slots, paths))
    engine = Watched(target, make_engine(target).store, script(world, 4), batch_size=3, depth=4)
    engine.scratch = make_decoder(world.spec, world.weights, max_rows=96)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        engine.run(world.requests)
