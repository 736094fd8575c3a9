"""tree_build: the device's trees against EAGLE-2 in plain Python, the published vector, ties, ragged and odd sizes."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, check
from specbench_kernels import tree_build
from specbench_kernels.op import Case, Op
from specbench_kernels.tree_build import Candidates, Frontier, Tree, expand, rerank, top_children

Path = tuple[int, ...]
Law = Callable[[Path], Sequence[float]]  # drafted tokens below the root -> log-probabilities of the next
FLOATS = [torch.float32, torch.float64]


@dataclass
class Node:
    score: float
    path: Path
    parent: int


def best(scores: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


class PlainTree:
    """EAGLE-2 as it is written down: lists, sorts, one float type for the sums."""

    def __init__(self, law: Law, top_k: int, depth: int, total: int, number: type) -> None:
        self.candidates: list[Node] = []
        self.frontiers: list[list[int]] = []
        frontier = [-1]
        for _ in range(depth + 1):
            level = []
            for parent in frontier:
                above = Node(number(0), (), -1) if parent < 0 else self.candidates[parent]
                row = law(above.path)
                for token in best(row, top_k):
                    level.append(Node(number(above.score + number(row[token])), (*above.path, token), parent))
            first = len(self.candidates)
            self.candidates += level
            frontier = [first + i for i in best([node.score for node in level], top_k)]
            self.frontiers.append(frontier)
        self.kept = sorted(best([node.score for node in self.candidates], total - 1))
        self.paths = [(), *(self.candidates[i].path for i in self.kept)]

    def parents(self) -> list[int]:
        return [-1, *(self.paths.index(path[:-1]) for path in self.paths[1:])]

    def mask(self) -> list[list[bool]]:
        """Row i sees node j: j's path is a beginning of i's."""
        return [[other == path[: len(other)] for other in self.paths] for path in self.paths]


def law_of(seed: int, vocabulary: int, step: float | None) -> Law:
    """Log-probabilities that depend on the whole path; multiples of `step`, or any real numbers."""

    def law(path: Path) -> list[float]:
        stream = random.Random(f"{seed} {path}")
        if step is not None:
            return [-step * stream.randrange(1, 9) for _ in range(vocabulary)]
        weights = [stream.random() ** 3 + 1e-3 for _ in range(vocabulary)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return law


@dataclass
class Grown:
    candidates: Candidates
    frontiers: list[Frontier]
    tree: Tree


def garbage(holder: Candidates | Frontier | Tree) -> None:
    for tensor in vars(holder).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -77)


def grow(laws: Sequence[Law], top_k: int, depth: int, total: int, dtype: torch.dtype, cell: int = 1) -> Grown:
    """The device's trees of a batch, one law a request; the best k tokens of a row are found here."""
    batch, words = len(laws), -(-(cell + top_k * (depth + 1)) // 64)
    candidates = Candidates.empty(batch, top_k, depth, device=DEVICE, dtype=dtype)
    garbage(candidates)
    frontier = Frontier.root(batch, words, device=DEVICE, dtype=dtype, uncommitted=cell > 0)
    paths: list[list[Path]] = [[()] for _ in laws]
    frontiers = []
    for level in range(depth + 1):
        rows = [[law(path) for path in of_request] for law, of_request in zip(laws, paths, strict=True)]
        ids = [[best(row, top_k) for row in of_request] for of_request in rows]
        values = [
            [[row[t] for t in chosen] for row, chosen in zip(*both, strict=True)]
            for both in zip(rows, ids, strict=True)
        ]
        out = Frontier.empty(batch, top_k, words, device=DEVICE, dtype=dtype)
        garbage(out)
        frontier = expand(
            torch.tensor(values, dtype=dtype, device=DEVICE),
            torch.tensor(ids, device=DEVICE),
            frontier,
            candidates,
            level=level,
            cell=cell + level * top_k,
            out=out,
        )
        assert frontier is out
        above, tokens = frontier.rows.tolist(), frontier.tokens.tolist()
        paths = [[(*paths[b][above[b][i]], tokens[b][i]) for i in range(top_k)] for b in range(batch)]
        frontiers.append(frontier)
    nodes = min(total, top_k + depth * top_k**2 + 1)
    tree = Tree.empty(batch, nodes, device=DEVICE)
    garbage(tree)
    roots = torch.arange(1000, 1000 + batch, device=DEVICE)
    context = torch.arange(5, 5 + batch, dtype=torch.int32, device=DEVICE)
    assert rerank(candidates, total, roots=roots, context_lens=context, out=tree) is tree
    return Grown(candidates, frontiers, tree)


def visible(words: list[int], count: int) -> list[bool]:
    return [bool(words[j // 64] >> (j % 64) & 1) for j in range(count)]


def assert_grown(grown: Grown, b: int, plain: PlainTree, cell: int = 1) -> None:
    """Request b of the device's trees is the plain tree: candidates, frontiers and what they see, the pruned tree."""
    candidates, tree = grown.candidates, grown.tree
    assert candidates.scores[b].tolist() == [node.score for node in plain.candidates]
    assert candidates.tokens[b].tolist() == [node.path[-1] for node in plain.candidates]
    assert candidates.parents[b].tolist() == [node.parent for node in plain.candidates]
    cells: dict[Path, int] = {(): 0} if cell > 0 else {}
    written = cell
    for frontier, wanted in zip(grown.frontiers, plain.frontiers, strict=True):
        nodes = [plain.candidates[i] for i in wanted]
        assert frontier.candidates[b].tolist() == wanted
        assert frontier.scores[b].tolist() == [node.score for node in nodes]
        assert frontier.tokens[b].tolist() == [node.path[-1] for node in nodes]
        cells |= {node.path: written + i for i, node in enumerate(nodes)}
        written += len(nodes)
        for node, words in zip(nodes, frontier.mask[b].tolist(), strict=True):
            above = {cells[node.path[:length]] for length in range(len(node.path) + 1) if node.path[:length] in cells}
            assert visible(words, 64 * len(words)) == [c in above for c in range(64 * len(words))]
    count = len(plain.paths)
    assert tree.candidates[b].tolist() == [-1, *plain.kept]
    assert tree.tokens[b].tolist() == [1000 + b, *(path[-1] for path in plain.paths[1:])]
    assert tree.parents[b].tolist() == plain.parents()
    assert tree.depths[b].tolist() == [len(path) for path in plain.paths]
    assert tree.positions[b].tolist() == [5 + b + len(path) for path in plain.paths]
    words = tree.mask.shape[-1]
    assert words == -(-count // 64)
    for row, want in zip(tree.mask[b].tolist(), plain.mask(), strict=True):
        assert visible(row, 64 * words) == want + [False] * (64 * words - count)


@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op.name} {case.name}") for op in tree_build.OPS for case in op.small()],
)
def test_against_reference(op: Op, case: Case) -> None:
    check(op, case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_published_vector(dtype: torch.dtype) -> None:
    """facts: the draft depends on the last token only; root 0, k 2, D 2, 6 nodes."""
    table = [(0.1, 0.6, 0.2, 0.1), (0.05, 0.15, 0.5, 0.3), (0.3, 0.4, 0.1, 0.2), (0.7, 0.1, 0.15, 0.05)]
    grown = grow([lambda path: [math.log(p) for p in table[path[-1] if path else 0]]], 2, 2, 6, dtype)
    scores = torch.tensor([0.6, 0.2, 0.3, 0.18, 0.08, 0.06, 0.12, 0.09, 0.126, 0.027], dtype=torch.float64).log()
    assert (grown.candidates.scores[0].cpu().double() - scores).abs().max() < (
        1e-6 if dtype == torch.float32 else 1e-14
    )
    tree = grown.tree
    assert tree.candidates.tolist() == [[-1, 0, 1, 2, 3, 8]]
    assert tree.tokens.tolist() == [[1000, 1, 2, 2, 3, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 4]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert tree.positions.tolist() == [[5, 6, 6, 7, 7, 8]]
    rows = ["100000", "110000", "101000", "110100", "110010", "110011"]
    assert [f"{row[0]:06b}"[::-1] for row in tree.mask[0].tolist()] == rows


SHAPES = [
    (1, 0, 3),
    (1, 4, 6),
    (1, 3, 9),
    (2, 0, 2),
    (3, 0, 9),
    (2, 3, 1),
    (2, 2, 30),
    (3, 2, 8),
    (5, 2, 20),
    (4, 3, 13),
]


@pytest.mark.parametrize(("top_k", "depth", "total"), SHAPES)
def test_random_trees_are_eagle2(top_k: int, depth: int, total: int) -> None:
    """Any reals in fp32 (sums rounded alike), multiples of 1/4 in fp64 (ties everywhere), in one batch each."""
    seed = secrets.randbits(31)
    for dtype, number, step in ((torch.float32, np.float32, None), (torch.float64, float, 0.25)):
        laws = [law_of(seed + i, top_k + 2, step) for i in range(2)]
        grown = grow(laws, top_k, depth, total, dtype)
        assert grown.tree.tokens.shape == (2, min(total, top_k + depth * top_k**2 + 1))
        for b, law in enumerate(laws):
            assert_grown(grown, b, PlainTree(law, top_k, depth, total, number))


@pytest.mark.parametrize("cell", [0, 1, 61])
def test_two_words_of_mask(cell: int) -> None:
    """Trees of more than 64 nodes, drafts over more than 64 cells; bits 63 and 64 are in use."""
    law = law_of(secrets.randbits(31), 8, 0.125)
    grown = grow([law], 6, 3, 100, torch.float32, cell)
    assert grown.tree.mask.shape == (1, 100, 2)
    assert grown.tree.mask[0, 63, 0] < 0
    assert_grown(grown, 0, PlainTree(law, 6, 3, 100, np.float32), cell)


def test_chain() -> None:
    grown = grow([law_of(secrets.randbits(31), 4, None)], 1, 6, 8, torch.float32)
    assert grown.tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5, 6]]
    assert grown.tree.mask[0, :, 0].tolist() == [2 ** (i + 1) - 1 for i in range(8)]


def test_a_batch_is_its_requests_in_any_order() -> None:
    seed = secrets.randbits(31)
    laws = [law_of(seed + i, 5, None) for i in range(3)]
    alone = [grow([law], 3, 2, 9, torch.float32) for law in laws]
    for order in ((0, 1, 2), (2, 0, 1)):
        grown = grow([laws[i] for i in order], 3, 2, 9, torch.float32)
        for b, i in enumerate(order):
            for name in ("parents", "depths", "mask", "candidates"):
                assert torch.equal(getattr(grown.tree, name)[b], getattr(alone[i].tree, name)[0])
            assert torch.equal(grown.candidates.scores[b], alone[i].candidates.scores[0])
            assert torch.equal(grown.tree.positions[b], alone[i].tree.positions[0] + b)


def candidates_of(
    scores: Sequence[Sequence[float]], parents: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> Candidates:
    values = torch.tensor(scores, dtype=dtype, device=DEVICE)
    above = torch.tensor(parents, dtype=torch.int32, device=DEVICE)
    tokens = torch.arange(values.numel(), device=DEVICE).view(values.shape) + 100
    return Candidates(values, tokens, above, top_k=2, depth=values.shape[1])


def context_of(*lengths: int) -> dict[str, torch.Tensor]:
    return {
        "roots": torch.full((len(lengths),), 7, dtype=torch.int64, device=DEVICE),
        "context_lens": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    }


def test_positions_are_prefix_and_depth() -> None:
    """Parents -1, 0, 0, 1, 2 and -1, 0, 0, 1, 3 (the root first) behind a prefix of 5, and of 2^31 - 4."""
    found = candidates_of([[-1.0, -2.0, -3.0, -4.0]] * 3, [[-1, -1, 0, 1], [-1, -1, 0, 2], [-1, -1, 0, 2]])
    tree = rerank(found, 5, **context_of(5, 5, 2**31 - 4))
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2], [-1, 0, 0, 1, 3], [-1, 0, 0, 1, 3]]
    assert tree.positions.tolist()[:2] == [[5, 6, 6, 7, 7], [5, 6, 6, 7, 8]]
    assert tree.positions[2, -1] == 2**31 - 1
    assert tree.mask[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101]
    assert tree.mask[1, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ties_infinities_nan_and_zeros(dtype: torch.dtype) -> None:
    """Ties go to the smaller index, -0 ties with 0, NaN and -inf are last, and all are counted."""
    low, nan = -math.inf, math.nan
    scores = [[-1.0] * 6, [-3.0, low, -3.0, nan, -2.0, low], [-0.0, 0.0, -0.0, -1e-300, low, 0.0], [low] * 6, [nan] * 6]
    kept = [[0, 1, 2], [0, 2, 4], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    tree = rerank(candidates_of(scores, [[-1] * 6] * 5, dtype), 4, **context_of(*range(5)))
    assert tree.candidates[:, 1:].tolist() == kept
    tree = rerank(candidates_of(scores, [[-1] * 6] * 5, dtype), 6, **context_of(*range(5)))
    assert tree.candidates[1].tolist() == [-1, 0, 1, 2, 3, 4]
    found = Candidates.empty(1, 4, 0, device=DEVICE, dtype=dtype)
    values = torch.tensor([[[low, -0.0, nan, 0.0]]], dtype=dtype, device=DEVICE)
    frontier = expand(
        values,
        torch.arange(4, device=DEVICE)[None, None],
        Frontier.root(1, 1, device=DEVICE, dtype=dtype),
        found,
        level=0,
    )
    assert frontier.tokens.tolist() == [[1, 3, 0, 2]]
    assert found.scores.tolist() == [[low, 0.0, low, 0.0]]


def test_a_child_never_ranks_above_its_parent() -> None:
    """A log-probability above 0 is no law; still every kept node's parent is kept."""
    found = Candidates.empty(1, 2, 1, device=DEVICE)
    first = torch.tensor([[[-1.0, -5.0]]], device=DEVICE)
    frontier = expand(
        first,
        torch.zeros(1, 1, 2, dtype=torch.int64, device=DEVICE),
        Frontier.root(1, 1, device=DEVICE),
        found,
        level=0,
    )
    second = torch.tensor([[[-9.0, -9.0], [8.0, 7.0]]], device=DEVICE)
    expand(second, torch.zeros(1, 2, 2, dtype=torch.int64, device=DEVICE), frontier, found, level=1)
    assert found.scores.tolist() == [[-1.0, -5.0, -10.0, -10.0, -5.0, -5.0]]
    assert rerank(found, 4, **context_of(0)).parents.tolist() == [[-1, 0, 0, 2]]


def test_a_level_writes_its_own_candidates_only() -> None:
    found = Candidates.empty(2, 3, 2, device=DEVICE)
    garbage(found)
    frontier = Frontier.empty(2, 3, 1, device=DEVICE)
    for tensor in vars(frontier).values():
        tensor.zero_()
    values = -torch.rand(2, 3, 3, device=DEVICE)
    expand(values, torch.zeros(2, 3, 3, dtype=torch.int64, device=DEVICE), frontier, found, level=1)
    for tensor, poison in ((found.tokens, -77), (found.parents, -77), (found.scores.nan_to_num(-77.0), -77)):
        assert (tensor == poison).tolist() == [[True] * 3 + [False] * 9 + [True] * 9] * 2


def test_top_children_are_the_best_log_probabilities() -> None:
    logits = torch.randn(2, 3, 50, device=DEVICE, dtype=torch.float64)
    values, ids = top_children(logits, 4)
    assert torch.equal(ids, logits.argsort(dim=-1, descending=True)[..., :4])
    assert torch.allclose(values, logits.softmax(-1).log().gather(-1, ids), rtol=0, atol=1e-12)
    assert top_children(logits.half(), 4)[0].dtype == torch.float32


def test_empty_batch() -> None:
    found = Candidates.empty(0, 2, 1, device=DEVICE)
    values = torch.empty(0, 1, 2, device=DEVICE)
    root = Frontier.root(0, 1, device=DEVICE)
    assert expand(values, values.long(), root, found, level=0).tokens.shape == (0, 2)
    assert rerank(found, 4, **context_of()).tokens.shape == (0, 4)


def test_no_wrapper_reads_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one would wait for the device: with every way to do so barred, all levels and the rerank are launched."""
    launched = []

    class Launcher:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: launched.append(self.name)

    def barred(*_: object, **__: object) -> None:
        raise AssertionError("a value was read")

    context = context_of(1, 2)
    logits = torch.randn(2, 1, 9, device=DEVICE)
    for name in ("expand_kernel", "rerank_kernel"):
        monkeypatch.setattr(tree_build, name, Launcher(name))
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, barred)
    found = Candidates.empty(2, 3, 1, device=DEVICE)
    frontier = expand(*top_children(logits, 3), Frontier.root(2, 1, device=DEVICE, uncommitted=True), found, level=0)
    expand(*top_children(logits.expand(2, 3, 9), 3), frontier, found, level=1)
    rerank(found, 5, **context)
    monkeypatch.undo()
    assert launched == ["expand_kernel", "expand_kernel", "rerank_kernel"]


def test_refusals() -> None:
    found, root = Candidates.empty(1, 2, 1, device=DEVICE), Frontier.root(1, 1, device=DEVICE)
    values, ids = torch.zeros(1, 1, 2, device=DEVICE), torch.zeros(1, 1, 2, dtype=torch.int64, device=DEVICE)
    two = Frontier.empty(1, 2, 1, device=DEVICE)
    for call, message in (
        (lambda: expand(values.half(), ids, root, found, level=0), "values are torch.float16"),
        (lambda: expand(values.double(), ids, root, found, level=0), "values is float64, expected float32"),
        (lambda: expand(values, ids.int(), root, found, level=0), "ids is int32"),
        (lambda: expand(values, ids, root, found, level=1), r"values has shape \[1, 1, 2\], expected \[1, 2, 2\]"),
        (lambda: expand(values, ids, root, found, level=2), "level 2 is outside 0 to 1"),
        (lambda: expand(values, ids, two, found, level=0), "frontier.scores has shape"),
        (lambda: expand(values, ids, root, found, level=0, cell=63), "cells 63 to 64 need more mask words"),
        (lambda: expand(values, ids, root, found, level=0, out=root), "out.scores has shape"),
        (
            lambda: expand(values.expand(1, 2, 2).clone(), ids.expand(1, 2, 2).clone(), two, found, level=1, out=two),
            "itself",
        ),
        (lambda: rerank(found, 0, **context_of(1)), "total is 0"),
        (lambda: rerank(found, 4, **context_of(1, 2)), r"roots has shape \[2\]"),
        (lambda: rerank(found, 4, **context_of(1), out=Tree.empty(1, 5, device=DEVICE)), "out.tokens has shape"),
        (lambda: rerank(Candidates.empty(1, 20, 1, device=DEVICE), 257, **context_of(1)), "257 nodes"),
        (lambda: Candidates.empty(1, 0, 1, device=DEVICE), "top_k 0"),
        (lambda: Candidates.empty(1, 64, 1, device=DEVICE), "4160 candidates"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_case_names_are_unique() -> None:
    for op in tree_build.OPS:
        names: list[Case] = [*op.small(), *op.bench()]
        assert len({case.name for case in names}) == len(names)
        assert len({each.label for each in op.compilations()}) == len(op.compilations())
