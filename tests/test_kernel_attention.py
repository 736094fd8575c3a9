"""tree_attention in the interpreter, against float64 row by row: masks, windows, ragged batches, splits, formats."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import numpy as np
import pytest
import torch
from specbench_kernels import tree_attention as module
from specbench_kernels.tree_attention import OP, tree_attention
from specbench_kernels.tree_attention_launch import MERGE_BLOCK, choose_num_splits, plan, workspace_size
from specbench_kernels.tree_attention_reference import attend, depths, tree_mask, visible_cells

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
NAN = float("nan")
TOLERANCES = {
    torch.float64: (1e-11, 1e-12),
    torch.float32: (2e-5, 2e-6),
    torch.float16: (4e-3, 1e-3),
    # The interpreter computes bf16 in fp32 and truncates on the store: one unit in the last place is 2^-7.
    torch.bfloat16: (8e-3, 1e-6),
}
Given = dict[str, Any]


@pytest.fixture
def seed() -> int:
    return secrets.randbits(32)


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    return [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def problem(
    seed: int,
    contexts: list[int],
    trees: list[list[int]],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    page_size: int = 16,
    slots: bool = False,
    window: int = 0,
    as_chain: bool = False,
    written: list[int] | None = None,
    fp8: bool = False,
    pad_rows: int = 0,
    **options: Any,
) -> Given:
    """Arguments of tree_attention: request b has `contexts[b]` committed cells and the tree of parents `trees[b]`.

    The first `written[b]` nodes of a tree come from an earlier pass. Cells lie in random pages, or, with `slots`, in
    random slots; every slot that no cell owns holds NaN in K and V.
    """
    rng = np.random.default_rng(seed)
    written = written or [0] * len(trees)
    seqs = [context + len(tree) for context, tree in zip(contexts, trees, strict=True)]
    pages_each = max(-(-max(seqs, default=1) // page_size), 1)
    num_pages = len(trees) * pages_each + 2
    if slots:
        cell_slots = rng.permutation(num_pages * page_size)[: len(trees) * pages_each * page_size]
        table = cell_slots.reshape(len(trees), -1)
    else:
        table = rng.permutation(num_pages)[: len(trees) * pages_each].reshape(len(trees), -1)
        cell_slots = (table[:, :, None] * page_size + np.arange(page_size)).reshape(-1)
    cell_slots = cell_slots.reshape(len(trees), pages_each * page_size)
    owned = np.zeros(num_pages * page_size, dtype=bool)
    for b, length in enumerate(seqs):
        owned[cell_slots[b, :length]] = True
    unowned = torch.from_numpy(~owned).view(num_pages, 1, page_size, 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    def cache(factor: float) -> torch.Tensor:
        values = normal(num_pages, heads[1], page_size, head_dim) / factor
        return values.masked_fill(unowned, NAN).to(FP8 if fp8 else dtype)

    scales = {"k_scale": 0.07, "v_scale": 0.3} if fp8 else {}
    counts = [len(tree) - done for tree, done in zip(trees, written, strict=True)]
    rows = sum(counts)
    words = max(-(-max(len(tree) for tree in trees) // 64), 1)
    mask = [row for tree, done in zip(trees, written, strict=True) for row in tree_mask(tree, words, done)]
    mask += [[-1] * words] * pad_rows
    positions = [
        context + depth
        for context, tree, done in zip(contexts, trees, written, strict=True)
        for depth in depths(tree)[done:]
    ]
    return {
        "q": normal(rows + pad_rows, heads[0], head_dim).to(dtype),
        "k_cache": cache(scales.get("k_scale", 1.0)),
        "v_cache": cache(scales.get("v_scale", 1.0)),
        "table": torch.from_numpy(table).to(torch.int32).contiguous(),
        "granularity": 1 if slots else page_size,
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "seq_lens": torch.tensor(seqs, dtype=torch.int32),
        "query_start": torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        "mask": None if as_chain else torch.tensor(mask, dtype=torch.int64).view(rows + pad_rows, words),
        "positions": torch.tensor(positions + [0] * pad_rows, dtype=torch.int32),
        "scale": 1.0 / head_dim**0.5 if not options.get("scale") else options.pop("scale"),
        "window": window,
        "max_nodes": max(max(counts), 1),
        "max_seq_len": max(seqs),
        **scales,
        **options,
    }


def spare_page(given: Given) -> int:
    """A page of nobody, full of NaN."""
    return next(page for page in range(given["k_cache"].shape[0]) if page not in given["table"])


def run(given: Given) -> torch.Tensor:
    """The kernel's output on a poisoned `out`, and, where it splits, a poisoned workspace that it must have used."""
    out = torch.full_like(given["q"], NAN)
    splits = launch(given).num_splits
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    workspace = torch.full((workspace_size(*out.shape, splits),), NAN, dtype=dtype)
    assert tree_attention(**given, out=out, workspace=workspace) is out
    assert (splits > 1) == (len(workspace) > 0)
    assert splits == 1 or workspace.isfinite().any()
    return out


def assert_matches(given: Given, seed: int, tolerance: tuple[float, float] | None = None) -> torch.Tensor:
    """The kernel equals float64 on every row of a request; pad rows keep their poison."""
    out = run(given)
    used = int(given["query_start"][-1])
    assert out[used:].isnan().all(), f"seed {seed}: a pad row was written"
    relative, absolute = tolerance or TOLERANCES[out.dtype]
    expected = attend(**given)[:used]
    torch.testing.assert_close(
        out[:used].double(), expected, rtol=relative, atol=absolute, msg=lambda text: f"seed {seed}: {text}"
    )
    return out


@pytest.mark.parametrize("case", OP.small(), ids=lambda case: case.name)
def test_small_cases(case: Any, seed: int) -> None:
    given = OP.inputs(case, CPU, seed)
    relative, absolute = OP.tolerance(case)
    torch.testing.assert_close(
        OP.run(given)["out"].double(),
        OP.reference(given)["out"],
        rtol=relative,
        atol=absolute,
        msg=lambda text: f"seed {seed}: {text}",
    )


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("head_dim", "heads", "page_size", "slots"),
    [(24, (6, 2), 4, False), (80, (6, 1), 16, False), (96, (9, 3), 1, False), (64, (4, 4), 32, True)],
)
def test_odd_shapes(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], page_size: int, slots: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_parents(rng, n) for n in (5, 1, 7)]
    contexts = [int(n) for n in rng.integers(0, 90, 3)]
    shape = {"dtype": dtype, "head_dim": head_dim, "heads": heads, "page_size": page_size, "slots": slots}
    assert_matches(problem(seed, contexts, trees, pad_rows=2, **shape), seed)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_heads(head_dim: int, dtype: torch.dtype, seed: int) -> None:
    tree = random_parents(np.random.default_rng(seed), 6)
    assert_matches(problem(seed, [75], [tree], dtype=dtype, head_dim=head_dim, heads=(4, 1)), seed)


@pytest.mark.parametrize("as_chain", [False, True])
@pytest.mark.parametrize("nodes", [63, 64, 65, 128])
def test_many_nodes_take_several_query_tiles(nodes: int, as_chain: bool, seed: int) -> None:
    tree = chain(nodes) if as_chain else random_parents(np.random.default_rng(seed), nodes)
    given = problem(seed, [70], [tree], heads=(6, 2), as_chain=as_chain)
    assert launch(given).num_tiles == -(-nodes * 3 // launch(given).block_m) > 1
    assert_matches(given, seed)


def test_a_wide_tile_holds_all_nodes_of_the_group(seed: int) -> None:
    given = problem(seed, [100], [random_parents(np.random.default_rng(seed), 32)], dtype=torch.float16, heads=(8, 2))
    assert (launch(given).block_m, launch(given).num_tiles) == (128, 1)
    assert_matches(given, seed)


def launch(given: Given) -> Any:
    """The plan of a call, asked for as the wrapper does."""
    kv_heads = given["k_cache"].shape[1]
    return plan(
        given["q"].dtype,
        given["q"].shape[2],
        given["q"].shape[1] // kv_heads,
        batch=len(given["seq_lens"]),
        num_kv_heads=kv_heads,
        max_nodes=given["max_nodes"],
        max_seq_len=given["max_seq_len"],
        num_sms=0,
        num_splits=given.get("num_splits"),
    )


# Masks, chains and passes


def test_a_chain_is_a_tree_of_one_branch(seed: int) -> None:
    shape = {"dtype": torch.float64, "head_dim": 16}
    trees, contexts = [chain(6), chain(1), chain(70)], [3, 40, 64]
    as_tree = run(problem(seed, contexts, trees, **shape))
    as_chain = run(problem(seed, contexts, trees, as_chain=True, **shape))
    torch.testing.assert_close(as_chain, as_tree, rtol=1e-12, atol=1e-13, msg=lambda text: f"seed {seed}: {text}")


@pytest.mark.parametrize("window", [0, 3])
def test_a_pass_over_later_levels_equals_the_whole_tree(window: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees, contexts = [random_parents(rng, 9), random_parents(rng, 80)], [21, 5]
    whole = problem(seed, contexts, trees, window=window)
    later = problem(seed, contexts, trees, window=window, written=[4, 66])
    rows = [*range(4, 9), *range(9 + 66, 9 + 80)]
    later |= {"q": whole["q"][rows].clone(), "k_cache": whole["k_cache"], "v_cache": whole["v_cache"]}
    later["table"] = whole["table"]
    assert_matches(later, seed)
    torch.testing.assert_close(run(later), run(whole)[rows], rtol=2e-5, atol=2e-6, msg=lambda t: f"seed {seed}: {t}")


def test_every_mask_bit_counts(seed: int) -> None:
    """Any bits, not only paths: each row of 128 cells sees a random half of them."""
    rng = np.random.default_rng(seed)
    given = problem(seed, [2], [chain(128)], heads=(1, 1))
    bits = rng.integers(-(2**63), 2**63, (128, 2), dtype=np.int64)
    assert_matches(given | {"mask": torch.from_numpy(bits)}, seed)


def test_masks_begin_at_the_first_uncommitted_cell(seed: int) -> None:
    """Contexts that end just before, at and behind the end of a key block, and rows that don't see the root."""
    given = problem(seed, [31, 32, 33, 63, 64], [chain(3)] * 5, heads=(1, 1))
    bits = torch.from_numpy(np.random.default_rng(seed).integers(0, 8, (15, 1)))
    bits[:, 0][::3] = 6
    assert_matches(given | {"mask": bits}, seed)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_that_sees_nothing_gets_zeros(num_splits: int, seed: int) -> None:
    given = problem(seed, [0], [chain(3)], num_splits=num_splits)
    given["mask"] = torch.tensor([[1], [0], [2]])
    out = assert_matches(given, seed)
    assert (out[1] == 0).all()


def test_an_empty_request_and_pads_write_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_parents(rng, 4), [], random_parents(rng, 2), []]
    assert_matches(problem(seed, [9, 30, 17, 0], trees, pad_rows=3), seed)
    given = problem(seed, [9, 30, 17, 0], trees, pad_rows=3, num_splits=2)
    assert_matches(given, seed)
    nobody = given | {"query_start": torch.zeros(5, dtype=torch.int32)}
    assert run_unchecked(nobody).isnan().all()


def run_unchecked(given: Given) -> torch.Tensor:
    return tree_attention(**given, out=torch.full_like(given["q"], NAN))


def test_no_rows_or_no_requests() -> None:
    given = problem(1, [4], [chain(2)])
    empty = given | {name: given[name][:0] for name in ("q", "mask", "positions")}
    assert tree_attention(**empty | {"query_start": torch.zeros(2, dtype=torch.int32)}).shape == (0, 4, 16)


# Windows


def test_window_by_position_of_the_node() -> None:
    """Window 4, prefix 6, a root with two children: both stand at 7 and see 4 and 5, the root and themselves."""
    positions = [6 + depth for depth in depths([-1, 0, 0])]
    masks = tree_mask([-1, 0, 0], 1)
    seen = [
        visible_cells(context=6, seq_len=9, nodes=3, node=node, bits=masks[node], positions=positions, window=4)
        for node in range(3)
    ]
    assert positions == [6, 7, 7]
    assert seen == [[3, 4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 8]]
    keys = {"head_dim": 16, "heads": (1, 1), "window": 4, "dtype": torch.float64}
    given = problem(3, [6], [[-1, 0, 0]], **keys)
    # Values that name their cell, and equal scores: the output tells which cells each row saw.
    given["q"].zero_()
    slots = given["table"][0, 0].long()
    given["v_cache"][slots, 0, :9] = torch.eye(16, dtype=torch.float64)[:9]
    out = run(given)[:, 0]
    assert [row.nonzero().flatten().tolist() for row in out] == seen
    torch.testing.assert_close(out[out > 0], torch.full((12,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("as_chain", [False, True])
@pytest.mark.parametrize(("window", "num_splits"), [(1, 1), (4, 1), (30, 1), (90, 3), (1000, 1)])
def test_windows(window: int, num_splits: int, as_chain: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = [6, 110, 0]
    trees = [chain(n) if as_chain else random_parents(rng, n) for n in (3, 12, 20)]
    given = problem(seed, contexts, trees, heads=(2, 1), window=window, as_chain=as_chain, num_splits=num_splits)
    assert_matches(given, seed)


def test_cells_that_a_window_hides_are_not_read(seed: int) -> None:
    given = problem(seed, [400], [[-1, 0, 0, 1]], window=8, page_size=4)
    # The root stands at 400 and sees back to 393: the pages before belong to somebody else by now.
    given["table"][0, : 393 // 4] = spare_page(given)
    reference = attend(**given | {name: given[name].nan_to_num() for name in ("k_cache", "v_cache")})
    torch.testing.assert_close(run(given).double(), reference, rtol=2e-5, atol=2e-6, msg=lambda t: f"seed {seed}: {t}")


@pytest.mark.parametrize(
    ("parents", "positions"), [([-1, 0, 0, 1, 2], [5, 6, 6, 7, 7]), ([-1, 0, 0, 1, 3], [5, 6, 6, 7, 8])]
)
def test_positions_of_a_tree_under_a_window(parents: list[int], positions: list[int], seed: int) -> None:
    given = problem(seed, [5], [parents], window=3, dtype=torch.float64)
    assert given["positions"].tolist() == positions
    out = assert_matches(given, seed)
    flat = given | {"positions": torch.arange(5, 10, dtype=torch.int32)}
    assert not torch.allclose(run(flat), out)


# Batches and splits


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_ragged_batch_equals_each_request_alone(order: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [chain(1), random_parents(rng, 5), random_parents(rng, 2)]
    contexts = [2, 70, 19]
    given = problem(seed, [contexts[b] for b in order], [trees[b] for b in order], dtype=torch.float64)
    together, starts = run(given), given["query_start"].tolist()
    for b in range(3):
        rows = slice(starts[b], starts[b + 1])
        alone = given | {name: given[name][rows] for name in ("q", "mask", "positions")}
        alone |= {name: given[name][b : b + 1] for name in ("table", "context_lens", "seq_lens")}
        alone["query_start"] = torch.tensor([0, starts[b + 1] - starts[b]], dtype=torch.int32)
        assert torch.equal(run(alone), together[rows]), f"seed {seed}"


@pytest.mark.parametrize("as_chain", [False, True])
def test_split_counts_agree(as_chain: bool, seed: int) -> None:
    """1 to more splits than key blocks; a context of a few cells beside a long one leaves splits without work."""
    rng = np.random.default_rng(seed)
    trees = [chain(6) if as_chain else random_parents(rng, 6), chain(2)]
    given = problem(seed, [100, 3], trees, dtype=torch.float64, as_chain=as_chain, heads=(1, 1))
    one = assert_matches(given | {"num_splits": 1}, seed)
    for num_splits in (2, 3, 5, 20):
        assert launch(given | {"num_splits": num_splits}).num_splits == num_splits
        out = assert_matches(given | {"num_splits": num_splits}, seed)
        torch.testing.assert_close(out, one, rtol=1e-12, atol=1e-13, msg=lambda text: f"seed {seed}: {text}")


def test_the_merge_takes_its_splits_in_several_turns(seed: int) -> None:
    """More splits with cells in them than one turn of the merge holds; the largest scores come last."""
    given = problem(seed, [32 * (MERGE_BLOCK + 3)], [chain(1)], heads=(1, 1), num_splits=MERGE_BLOCK + 4)
    assert launch(given).block_n == 32
    assert_matches(given, seed)
    last = given["table"][0, -3:].long()
    given["k_cache"][last] = 3 * given["q"][0, 0]
    assert_matches(given | {"k_cache": given["k_cache"].nan_to_num()}, seed)


def test_splits_with_scores_far_apart(seed: int) -> None:
    """The merge weighs the splits by their maxima: scores of +-500 overflow if it doesn't."""
    given = problem(seed, [200], [chain(2)], num_splits=4, scale=80.0)
    # A score of 500 is known to 2^-15 in fp32, and some such roundings come before its exponential.
    assert_matches(given, seed, tolerance=(5e-4, 5e-4))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_comes_through_and_stays_in_its_request(num_splits: int, seed: int) -> None:
    given = problem(seed, [100, 100], [[-1, 0], [-1, 0]], num_splits=num_splits)
    given["k_cache"][given["table"][0, 0].long(), :, 3] = NAN
    out = run(given)
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all()


def test_num_splits_fills_the_chip() -> None:
    assert choose_num_splits(32, 8, 4096, 132) == 1
    assert choose_num_splits(1, 8, 32768, 132) == 32
    assert choose_num_splits(1, 8, 100, 132) == 1
    assert choose_num_splits(1, 1, 0, 132) == 1
    assert choose_num_splits(1, 8, 32768, 0) == 1
    for batch, kv_heads, seq_len in itertools.product((1, 2, 4, 8), (1, 2, 8), (4096, 32768, 131072)):
        splits = choose_num_splits(batch, kv_heads, seq_len, 132)
        assert 1 <= splits <= min(128, seq_len // 64)
        assert batch * kv_heads * splits >= min(132, batch * kv_heads * 32), (batch, kv_heads, seq_len)
    # A window leaves few cells to split, and query tiles count as programs.
    sizes = {"batch": 1, "num_kv_heads": 8, "max_seq_len": 32768, "num_sms": 132}
    assert plan(torch.bfloat16, 128, 4, max_nodes=8, window=64, **sizes).num_splits == 1
    assert plan(torch.bfloat16, 128, 4, max_nodes=8, **sizes).num_splits == 32
    assert plan(torch.bfloat16, 128, 4, max_nodes=128, **sizes).num_splits < 32


@pytest.mark.parametrize(
    ("nodes", "group", "block_m", "num_tiles"),
    [(1, 4, 16, 1), (8, 4, 32, 1), (8, 6, 64, 1), (32, 4, 128, 1), (128, 4, 128, 4)],
)
def test_one_tile_holds_the_group_and_the_nodes(nodes: int, group: int, block_m: int, num_tiles: int) -> None:
    sizes = {"batch": 1, "num_kv_heads": 8, "max_seq_len": 4096, "num_sms": 132}
    chosen = plan(torch.bfloat16, 128, group, max_nodes=nodes, **sizes)
    assert (chosen.block_m, chosen.num_tiles) == (block_m, num_tiles)


# Formats, strides, memory


@pytest.mark.parametrize("cache", ["fp8", "bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_cache(dtype: torch.dtype, cache: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cache_kind", lambda _device, _dtype: cache)
    tree = random_parents(np.random.default_rng(seed), 5)
    given = problem(seed, [45], [tree], dtype=dtype, fp8=True, head_dim=24, page_size=16)
    assert given["k_cache"].dtype == FP8
    assert_matches(given, seed)


@pytest.mark.parametrize("cache", ["fp8", "bits"])
def test_every_fp8_code_is_decoded(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cache_kind", lambda _device, _dtype: cache)
    given = problem(5, [0], [chain(1)], fp8=True, heads=(1, 1), head_dim=256)
    codes = torch.arange(256).to(torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    codes = codes.view(FP8)
    given["v_cache"][int(given["table"][0, 0]), 0, 0] = codes
    assert torch.equal(run(given | {"v_scale": 1.0})[0, 0], codes.float())


def test_nan_in_an_fp8_cache_comes_through_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not asserted of the interpreter's own conversion, which reads e4m3's NaN as 480."""
    monkeypatch.setattr(module, "cache_kind", lambda _device, _dtype: "bits")
    given = problem(5, [20], [chain(1)], fp8=True)
    given["v_cache"][int(given["table"][0, 0]), :, 2] = NAN
    assert run(given).isnan().all()


def test_strided_tensors(seed: int) -> None:
    """q and out as parts of wider rows, K and V as layers of pools with tokens before heads, V with wider rows."""
    given = problem(seed, [50, 8], [chain(3), [-1, 0, 0]], head_dim=24)
    expected = run(given)
    wide = torch.full((6, 4 + 7, 24), NAN)
    wide[:, 2:6] = given["q"]
    pools = {}
    for name, wider in (("k_cache", 0), ("v_cache", 8)):
        tokens_first = given[name].transpose(1, 2)
        pool = torch.full((2, *tokens_first.shape[:3], 24 + wider), NAN)[..., :24]
        pool[1] = tokens_first
        pools[name] = pool[1].transpose(1, 2)
    table = torch.full((2, 9), spare_page(given), dtype=torch.int32)
    table[:, : given["table"].shape[1]] = given["table"]
    out = torch.full((6, 4 + 7, 24), NAN)
    view = out[:, 5:9]
    tree_attention(**given | pools | {"q": wide[:, 2:6], "table": table}, out=view)
    assert torch.equal(view, expected), f"seed {seed}"
    assert out[:, :5].isnan().all()
    assert out[:, 9:].isnan().all()


def test_offsets_beyond_two_to_the_31(seed: int) -> None:
    given = problem(seed, [5], [chain(2)], fp8=True, heads=(1, 1), page_size=4)
    stride, pages = 2**30, given["k_cache"].shape[0]
    assert pages * stride > 2**31
    for name in ("k_cache", "v_cache"):
        pool = torch.empty(pages * stride, dtype=torch.uint8).view(FP8)
        far = pool.as_strided((pages, 1, 4, 16), (stride, 64, 16, 1))
        far.copy_(given[name])
        given[name] = far
    given["table"].copy_(torch.tensor([[pages - 1, pages - 2]]))
    given["k_cache"].fill_(0.5)
    given["v_cache"].copy_(torch.arange(4).view(1, 1, 4, 1).expand(pages, 1, 4, 16).to(FP8))
    assert_matches(given, seed)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_nothing_is_allocated(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(7, [90], [chain(2)], num_splits=num_splits)
    out = torch.empty_like(given["q"])
    workspace = torch.empty(workspace_size(*out.shape, num_splits))
    before = given["q"].clone()

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("allocated")

    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "full", "empty_like", "zeros_like", "full_like"):
            patch.setattr(module.torch, name, refuse)
        assert tree_attention(**given, out=out, workspace=workspace) is out
        with pytest.raises(AssertionError, match="allocated"):
            tree_attention(**given, workspace=workspace)
    assert torch.equal(given["q"], before)


# Errors


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 16)}, r"q has shape \[4, 16\]"),
        ({"q": torch.zeros(4, 3, 16)}, "3 query heads are no multiple of 2 KV heads"),
        ({"q": torch.zeros(4, 4, 16, dtype=torch.int32)}, "q is int32"),
        ({"q": torch.zeros(4, 4, 32)[:, :, ::2]}, "q has stride 2"),
        ({"k_cache": torch.zeros(4, 2, 16, 8)}, "k_cache has shape"),
        ({"v_cache": torch.zeros(4, 2, 8, 16)}, "v_cache has shape"),
        ({"k_cache": torch.zeros(4, 2, 16, 16).half()}, "k_cache is float16"),
        ({"granularity": 4}, "granularity 4 is neither 1"),
        ({"table": torch.zeros(2, 2)}, "table is float32"),
        ({"context_lens": int32(1, 2, 3)}, "context_lens has shape"),
        ({"seq_lens": torch.tensor([12, 9])}, "seq_lens is int64"),
        ({"query_start": int32(0, 4)}, "query_start has shape"),
        ({"mask": torch.zeros(3, 1, dtype=torch.int64)}, "mask has shape"),
        ({"mask": torch.zeros(4, 0, dtype=torch.int64)}, "mask has no words"),
        ({"window": -1}, "window -1 is negative"),
        ({"window": 4, "positions": None}, "a sliding window needs positions"),
        ({"positions": int32(1, 2)}, "positions has shape"),
        ({"max_nodes": 0}, "max_nodes 0"),
        ({"num_splits": 0}, "num_splits 0 is below 1"),
        ({"out": torch.zeros(4, 4, 8)}, "out has shape"),
        ({"out": torch.zeros(4, 4, 16).half()}, "out is float16"),
        ({"num_splits": 2, "workspace": torch.zeros(543)}, "workspace has 543 elements, needs 544"),
        ({"num_splits": 2, "workspace": torch.zeros(544).double()}, "workspace is float64"),
        ({"query_start": int32(1, 3, 4)}, "query_start begins with 1"),
        ({"query_start": int32(0, 3, 5)}, "query_start ends with 5, but q has 4 rows"),
        ({"query_start": int32(0, 3, 2)}, "request 1 has -1 nodes"),
        ({"max_nodes": 2}, "request 0 has 3 nodes, max_nodes is 2"),
        ({"max_seq_len": 11}, "request 0 has seq_len 12, max_seq_len is 11"),
        ({"seq_lens": int32(12, 99), "max_seq_len": 99}, "request 1 has seq_len 99, its table row holds 16 cells"),
        ({"seq_lens": int32(11, 9)}, "request 0 has seq_len 11, less than its context 9 and 3 nodes"),
        (
            {"seq_lens": int32(80, 9), "max_seq_len": 80, "table": torch.zeros(2, 5, dtype=torch.int32)},
            "request 0 has 71 uncommitted cells, the mask 64 bits",
        ),
    ],
)
def test_errors(change: Given, message: str) -> None:
    given = problem(11, [9, 8], [[-1, 0, 0], [-1]])
    with pytest.raises(ValueError, match=f"^tree_attention: .*{message}"):
        tree_attention(**given | change)


def test_head_dim_above_256_and_fp8_under_fp64_are_refused() -> None:
    with pytest.raises(ValueError, match="head dim 257 is not in 1 to 256"):
        tree_attention(**problem(1, [2], [chain(1)], head_dim=257))
    with pytest.raises(ValueError, match="k_cache is float8_e4m3fn, expected float64"):
        tree_attention(**problem(1, [2], [chain(1)], fp8=True, dtype=torch.float64))


# What the tools are told


def test_cost_counts_each_key_once_a_request() -> None:
    small = {case.name: case for case in OP.small()}
    # Contexts 37 and 18; trees of 5 (depths 0 1 1 2 2) and 2 nodes: 38+39+39+40+40 and 19+20 visible keys.
    cost = OP.cost(small["tree float32"])
    assert cost.flops == 4 * 4 * 64 * (196 + 39)
    assert cost.bytes == 4 * (2 * (42 + 20) * 2 * 64 + 2 * 7 * 4 * 64)
    bench = {case.name: case for case in OP.bench()}
    llama = OP.cost(bench["batch 32, 4k, T 8 bfloat16"])
    assert llama.bytes == 2 * (2 * 32 * 4104 * 8 * 128 + 2 * 256 * 32 * 128)
    fp8 = OP.cost(bench["batch 32, 4k, T 8, fp8 KV bfloat16"])
    assert fp8.bytes == 2 * 32 * 4104 * 8 * 128 + 2 * 2 * 256 * 32 * 128
    window = OP.cost(bench["batch 32, 4k, T 8, window 1k bfloat16"])
    assert window.flops == 4 * 32 * 128 * 32 * 8 * 1024


def test_compilations_name_every_argument_once() -> None:
    compilations = OP.compilations()
    labels = [compilation.label for compilation in compilations]
    assert len(set(labels)) == len(labels)
    for compilation in compilations:
        run_time, compile_time = set(compilation.signature), set(compilation.constants)
        assert run_time | compile_time == set(compilation.kernel.arg_names), compilation.label
        assert not run_time & compile_time
        assert set(compilation.divisible) <= run_time
    for head_dim, dtype in itertools.product((64, 80, 96, 128, 256), ("bf16", "fp16", "fp32", "bf16 q, fp8 KV")):
        assert any(label.startswith(f"{dtype}, D {head_dim},") for label in labels)
