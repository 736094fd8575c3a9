"""Trees in one pass: every root path is what autoregression computes, in every batch, backend and rollback policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_tools import (
    Weights,
    assert_history_matters,
    cached,
    empty,
    feed,
    feed_trees,
    history_logits,
    make_decoder,
    prompts,
    random_path,
    random_tree,
    step_cells,
    tiny_spec,
    wide_weights,
)

from specbench.engine.kv_cache import ROLLBACKS
from specbench.engine.models.decoder import DTYPES, Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.tree import TokenTree
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

BACKENDS = ("cpu", "torch")
SPECS = {
    "6/2 heads of 16": tiny_spec(),
    "6/1 heads of 24, window 9 on layer 0": tiny_spec(
        family="mistral", sliding_window=9, sliding_layers=(True, False), num_kv_heads=1, head_dim=24, vocab_size=16
    ),
    "window 3": tiny_spec(family="mistral", sliding_window=3, sliding_layers=(True, True)),
    "window 1": tiny_spec(family="mistral", sliding_window=1, sliding_layers=(True, True)),
    "4/4 heads of 80, norms": tiny_spec(family="qwen3", qk_norm=True, num_heads=4, num_kv_heads=4, head_dim=80),
}
FAULT_41 = ([-1, 0, 0, 1, 2], [5, 6, 6, 7, 7]), ([-1, 0, 0, 1, 3], [5, 6, 6, 7, 8])


def tree_of(packed_parents: Sequence[int], tokens: Sequence[int] | None = None) -> TokenTree:
    """A tree from parents in packed numbering, the root's own -1 first."""
    parents = np.array(packed_parents[1:], dtype=np.int64) - 1
    return TokenTree(np.arange(len(parents)) if tokens is None else np.array(tokens), parents)


# ---- TokenTree


def test_a_tree_knows_its_shape() -> None:
    """Fault 36's tree: 0 - 1 - 3 and 0 - 2 - 4 under the root's packed numbering."""
    tree = tree_of([-1, 0, 0, 1, 2], [7, 8, 7, 9])
    assert len(tree) == 4
    assert not tree.is_chain
    assert (tree.depths.tolist(), tree.depth) == ([1, 1, 2, 2], 2)
    assert tree.packed_parents.tolist() == [-1, 0, 0, 1, 2]
    assert tree.children == ((0, 1), (2,), (3,), (), ())
    assert tree.mask_words.tolist() == [[0b1], [0b11], [0b101], [0b1011], [0b10101]]
    assert tree.ancestor_mask.astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert (tree.path_to(3), tree.path_to(0), tree.path_to(-1)) == ((1, 3), (0,), ())
    assert tree.is_path((1, 3))
    assert tree.is_path(())
    assert not tree.is_path((0, 3))
    assert not tree.is_path((3,))
    assert not tree.has_equal_siblings
    assert tree_of([-1, 0, 0, 0], [4, 5, 4]).has_equal_siblings
    assert not tree_of([-1, 0, 1, 2], [4, 4, 4]).has_equal_siblings


def test_a_chain_is_a_tree_with_branching_one() -> None:
    chain = TokenTree.chain(np.array([3, 1, 4]))
    assert chain.is_chain
    assert (chain.depths.tolist(), chain.depth) == ([1, 2, 3], 3)
    assert chain.mask_words.tolist() == [[1], [3], [7], [15]]
    none = TokenTree.chain(np.array([], dtype=np.int64))
    assert none.is_chain
    assert (none.depth, none.children, none.mask_words.tolist()) == (0, ((),), [[1]])
    assert not TokenTree(np.array([1, 2]), np.array([-1, -1])).is_chain


def test_masks_of_many_nodes_take_several_words() -> None:
    """Random trees of up to 200 nodes against sets of ancestors."""
    stream = np.random.default_rng(0)
    for size in (62, 63, 64, 65, 127, 128, 200):
        tree = random_tree(stream, size, 500, reach=9)
        words = tree.mask_words.view(np.uint64)
        assert words.shape == (size + 1, size // 64 + 1)
        for node in range(-1, size):
            bits = {j for j in range(64 * words.shape[1]) if int(words[node + 1, j // 64]) >> (j % 64) & 1}
            assert bits == {0, *(each + 1 for each in tree.path_to(node))}
            if node >= 0:
                assert tree.depths[node] == len(tree.path_to(node)) == len(bits) - 1


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-2], [-1, -1, 5]])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(InputError, match="has parent"):
        TokenTree(np.zeros(len(parents), dtype=np.int64), np.array(parents))


def test_tokens_and_parents_must_fit() -> None:
    with pytest.raises(InputError, match="parents of shape"):
        TokenTree(np.zeros(2, dtype=np.int64), np.array([-1]))
    with pytest.raises(InputError, match="parents of shape"):
        TokenTree(np.zeros((1, 1), dtype=np.int64), np.array([[-1]]))


# ---- batches


@pytest.mark.parametrize(("parents", "positions"), FAULT_41)
def test_positions_are_prefix_plus_depth(parents: list[int], positions: list[int]) -> None:
    """Fault 41."""
    tree = tree_of(parents)
    batch = ForwardBatch.of([[9, *tree.tokens]], [0], [5], trees=[tree])
    assert batch.positions.tolist() == positions
    assert batch.cache_index.tolist() == [5, 6, 7, 8, 9]


def test_chains_need_no_mask_and_one_tree_gives_all_a_mask() -> None:
    chains = [TokenTree.chain(np.array([5])), TokenTree.chain(np.array([], dtype=np.int64))]
    batch = ForwardBatch.of([[1, 5], [2]], [0, 1], [3, 4], trees=chains)
    assert batch.tree_mask is None
    assert batch.positions.tolist() == [3, 4, 4]
    wide = tree_of([-1] + [0] * 70)
    batch = ForwardBatch.of([[1, 5], [2, *wide.tokens]], [0, 1], [3, 4], trees=[chains[0], wide])
    assert batch.tree_mask is not None
    assert batch.tree_mask.shape == (73, 2)
    assert batch.tree_mask[:3].tolist() == [[1, 0], [3, 0], [1, 0]]
    assert batch.tree_mask[-1].tolist() == [1, 1 << 6]
    assert batch.num_keys.tolist() == [5, 75]


def literally_visible(tree: TokenTree, context: int, window: int) -> list[list[bool]]:
    """Row by row: committed cells and ancestors, less what stands `window` or more positions before."""
    rows = []
    for node in range(-1, len(tree)):
        path = [0, *(each + 1 for each in tree.path_to(node))]
        position = context + len(path) - 1
        seen = {cell: cell for cell in range(context)} | {context + j: context + r for r, j in enumerate(path)}
        rows.append(
            [c in seen and (window == 0 or position - seen[c] < window) for c in range(context + len(tree) + 1)]
        )
    return rows


@pytest.mark.parametrize("window", [0, 1, 2, 3, 5, 40])
def test_what_a_node_sees(window: int) -> None:
    stream = np.random.default_rng(window)
    for context in (0, 1, 4, 17):
        trees = [random_tree(stream, size, 99) for size in (0, 3, 12)]
        tokens = [[0, *tree.tokens] for tree in trees]
        batch = ForwardBatch.of(tokens, [0, 1, 2], [context] * 3, trees=trees)
        for index, tree in enumerate(trees):
            assert batch.visible(index, window).tolist() == literally_visible(tree, context, window)


# ---- every path is autoregression


def make(spec: ModelSpec, weights: Weights, backend: str, rollback: str, dtype: str = "fp64") -> Decoder:
    return make_decoder(spec, weights, backend=backend, rollback=rollback, dtype=dtype, max_rows=96)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_every_root_path_is_autoregression(name: str, backend: str, rollback: str) -> None:
    """Random trees, ragged, five steps on end: logits of every node, then K and V of what was committed."""
    spec = SPECS[name]
    weights = wide_weights(spec)
    decoder = make(spec, weights, backend, rollback)
    scratch = make_decoder(spec, weights, backend="torch", max_rows=128)
    if spec.sliding_window is None:
        assert_history_matters(scratch, prompts(spec, [20])[0])
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    stream = np.random.default_rng(seed)
    texts = [list(text) for text in prompts(spec, (1, 14, 31, 5), seed)]
    slots = [2, 0, 3, 1]
    for slot, text in zip(slots, texts, strict=True):
        decoder.kv.open(slot, 120)
        if len(text) > 1:
            feed(decoder, [text[:-1]], [slot])
    for _ in range(5):
        trees = [random_tree(stream, int(stream.integers(0, 13)), spec.vocab_size) for _ in slots]
        logits = feed_trees(decoder, [text[-1] for text in texts], trees, slots)
        row = 0
        for text, tree in zip(texts, trees, strict=True):
            for node in range(-1, len(tree)):
                line = [*text, *(int(tree.tokens[each]) for each in tree.path_to(node))]
                expected = history_logits(scratch, line)[-1]
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-10, msg=f"seed {seed}, node {node}")
                row += 1
        paths = [random_path(stream, tree) for tree in trees]
        packed = [(0, *(node + 1 for node in path)) for path in paths]
        before = [step_cells(decoder, slot, path) for slot, path in zip(slots, packed, strict=True)]
        lengths = [int(decoder.kv.lengths[slot]) for slot in slots]
        decoder.kv.commit_paths(slots, packed)
        decoder.kv.check_integrity()
        for slot, text, tree, path, length, copied in zip(slots, texts, trees, paths, lengths, before, strict=True):
            for found, expected in zip(cached(decoder, slot, length), copied, strict=True):
                assert torch.equal(found, expected), f"seed {seed}: what was kept is not what was computed"
            text += [int(tree.tokens[node]) for node in path]
            assert decoder.kv.lengths[slot] == len(text)
            feed(scratch, [text])
            for found, expected in zip(cached(decoder, slot), cached(scratch, 0), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=f"seed {seed}")
            empty(scratch)
            text.append(int(stream.integers(0, spec.vocab_size)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_keeps_to_the_sliding_window(backend: str) -> None:
    """Fault 47: window 4, prefix 6, and a node of depth 2 behind 3 siblings: its window holds the last 4 positions of
    its own path, whatever cells lie between."""
    spec = tiny_spec(family="mistral", num_layers=1, sliding_window=4, sliding_layers=(True,))
    decoder = make(spec, wide_weights(spec), backend, "compact")
    text = prompts(spec, [6])[0]
    tree = tree_of([-1, 0, 0, 0, 2, 1, 4], [10, 11, 12, 13, 14, 15])
    feed(decoder, [text])
    logits = feed_trees(decoder, [9], [tree])
    empty(decoder)
    for node in range(len(tree)):
        line = [*text, 9, *(int(tree.tokens[each]) for each in tree.path_to(node))]
        outside = [(token + 1) % 83 for token in line[:-4]]
        same = history_logits(decoder, [*outside, *line[-4:]])[-1]
        torch.testing.assert_close(logits[node + 1], same, rtol=0, atol=1e-12)
        edge = [*line[:-4], (line[-4] + 1) % 83, *line[-3:]]
        assert (history_logits(decoder, edge)[-1] - logits[node + 1]).abs().max() > 1e-2


# ---- bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(SPECS)[:2])
def test_a_chain_is_a_branching_one_tree_bit_for_bit(name: str, dtype: str) -> None:
    """The mask that hides nothing changes no bit, on either backend."""
    spec = SPECS[name]
    for backend in BACKENDS if dtype == "fp64" else ("cpu",):
        decoder = make(spec, wide_weights(spec, 1), backend, "compact", dtype)
        text = prompts(spec, [40])[0]
        for first in (0, 1, 15, 16, 20):
            empty(decoder)
            if first:
                feed(decoder, [text[:first]])
            chain = TokenTree.chain(np.array(text[first + 1 : first + 12]))
            plain = feed_trees(decoder, [text[first]], [chain])
            tokens = [list(text[first : first + 12])]
            batch = ForwardBatch.of(tokens, [0], [first], masks=[chain.mask_words])
            assert batch.tree_mask is not None
            assert torch.equal(decoder.forward(batch), plain)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_a_ragged_batch_is_batch_one_in_every_order(dtype: str, rollback: str) -> None:
    """Faults 34 and 44: trees of 0, 6, 1 and 20 nodes behind contexts of all kinds, in all orders, the same bits; then
    paths of 0, 2, 1 and 3 drafts are kept, and the next trees' logits are those of each request alone."""
    spec = SPECS["6/2 heads of 16"]
    weights = wide_weights(spec, 2)
    stream = np.random.default_rng(4)
    texts = prompts(spec, (2, 5, 16, 33), 4)
    rounds = [[random_tree(stream, size, 83) for size in sizes] for sizes in ((0, 6, 1, 20), (7, 3, 12, 2))]
    paths: list[tuple[int, ...]] = []
    for tree, length in zip(rounds[0], (0, 2, 1, 3), strict=True):
        paths.append(next(tree.path_to(n) for n in range(-1, len(tree)) if len(tree.path_to(n)) == length))

    def run(decoder: Decoder, order: Sequence[int]) -> list[list[torch.Tensor]]:
        """Logits of both rounds by request."""
        found: list[list[torch.Tensor]] = [[], [], [], []]
        for i in order:
            decoder.kv.open(i, 100)
            feed(decoder, [texts[i]], [i])
        for trees in rounds:
            picked = [trees[i] for i in order]
            logits = feed_trees(decoder, [i + 1 for i in order], picked, order)
            for i, rows in zip(order, logits.split([1 + len(tree) for tree in picked]), strict=True):
                found[i].append(rows)
            if trees is rounds[0]:
                decoder.kv.commit_paths(order, [(0, *(node + 1 for node in paths[i])) for i in order])
        empty(decoder)
        return found

    decoder = make(spec, weights, "cpu", rollback, dtype)
    alone = [run(decoder, [i])[i] for i in range(4)]
    for order in itertools.permutations(range(4)):
        for found, expected in zip(run(decoder, order), alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("name", list(SPECS)[:3])
def test_level_by_level_is_all_at_once(name: str, dtype: str) -> None:
    """Passes of one level each, told what is written already, give the bits of one pass over the whole tree."""
    spec = SPECS[name]
    for backend, rollback in (("cpu", "compact"), ("cpu", "realloc"), ("torch", "index")):
        decoder = make(spec, wide_weights(spec, 3), backend, rollback, dtype)
        stream = np.random.default_rng(6)
        texts = prompts(spec, (15, 4), 6)
        feed(decoder, texts)
        trees = [random_tree(stream, 11, spec.vocab_size), random_tree(stream, 5, spec.vocab_size)]
        by_level = []
        for tree in trees:  # nodes in the order of their levels, as a drafter makes them
            order = np.argsort(tree.depths, kind="stable")
            place = {int(node): index for index, node in enumerate(order)}
            parents = [place.get(int(tree.parents[node]), -1) for node in order]
            by_level.append(TokenTree(tree.tokens[order], np.array(parents)))
        whole = feed_trees(decoder, [1, 2], by_level)
        starts = (0, 1 + len(by_level[0]))
        written = [0, 0]
        for level in range(max(tree.depth for tree in by_level) + 1):
            busy = [i for i in (0, 1) if by_level[i].depth >= level]
            rows, tokens, masks, depths = [], [], [], []
            for i in busy:
                packed_depths = np.concatenate([[0], by_level[i].depths])
                mine = np.flatnonzero(packed_depths == level)
                rows += [starts[i] + row for row in mine]
                tokens.append(np.array([i + 1, *by_level[i].tokens])[mine])
                masks.append(by_level[i].mask_words[mine])
                depths.append(packed_depths[mine])
            contexts = [len(texts[i]) for i in busy]
            batch = ForwardBatch.of(
                tokens, busy, contexts, written=[written[i] for i in busy], masks=masks, depths=depths
            )
            found = decoder.forward(batch)
            if backend == "cpu":
                assert torch.equal(found, whole[rows])
            else:
                torch.testing.assert_close(found, whole[rows], rtol=0, atol=1e-10 if dtype == "fp64" else 0.5)
            for i, ids in zip(busy, tokens, strict=True):
                written[i] += len(ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_of_more_than_64_nodes(backend: str) -> None:
    """Masks of two words: nodes on both sides of the word's edge."""
    spec = SPECS["6/2 heads of 16"]
    weights = wide_weights(spec)
    decoder = make(spec, weights, backend, "index")
    scratch = make_decoder(spec, weights, backend="torch", max_rows=128)
    stream = np.random.default_rng(1)
    text = prompts(spec, [12])[0]
    tree = random_tree(stream, 80, 83, reach=30)
    feed(decoder, [text])
    logits = feed_trees(decoder, [3], [tree])
    for node in (0, 40, 61, 62, 63, 64, 65, 79):
        line = [*text, 3, *(int(tree.tokens[each]) for each in tree.path_to(node))]
        torch.testing.assert_close(logits[node + 1], history_logits(scratch, line)[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_but_the_nodes_cells_is_written_or_read(backend: str, rollback: str) -> None:
    """Fault 45: the pool holds a sentinel, NaN; drafts of 4 and 1; logits are finite, other slots keep the sentinel."""
    spec = SPECS["4/4 heads of 80, norms"]
    decoder = make(spec, wide_weights(spec), backend, rollback)
    kv = decoder.kv
    for pool in (kv.k_pool, kv.v_pool):
        pool.fill_(float("nan"))
    if backend == "cpu":
        decoder.ops._scratch.fill_(255)
    for slot in (0, 1):
        kv.open(slot, 60)
    feed(decoder, prompts(spec, (13, 16)))
    written = {int(place) for slot in (0, 1) for place in kv.slot_index[slot, : kv.lengths[slot]]}
    for step in range(3):
        trees = [tree_of([-1, 0, 0, 1, 2], [4, 5, 6, 7]), tree_of([-1, 0], [8])]
        logits = feed_trees(decoder, [1, 2], trees)
        assert torch.isfinite(logits).all()
        for slot, tree in enumerate(trees):
            first = int(kv.lengths[slot])
            written |= {int(place) for place in kv.slot_index[slot, first : first + 1 + len(tree)]}
        kv.commit_paths([0, 1], [(0, 2, 4), (0, 1)] if step else [(0,), (0,)])
        written |= {int(place) for slot in (0, 1) for place in kv.slot_index[slot, : kv.lengths[slot]]}
        for rows in (kv.k_rows, kv.v_rows):
            untouched = rows.isnan().all(dim=-1).permute(0, 2, 1, 3).flatten(2)
            assert torch.equal(rows.isnan().any(dim=-1), rows.isnan().all(dim=-1))
            expected = torch.tensor([place not in written for place in range(kv.num_pages * 16)])
            assert torch.equal(untouched, expected.expand_as(untouched))
