"""verify_sampled emits the target's law, exactly: drafts enumerated, uniforms integrated as fractions.

A verdict is piecewise constant in the coins. `boxes` writes the rule down with fractions: every box of coins with one
verdict, so that laws and means come out as exact numbers, without the kernel. Then the kernel is fed the lowest and the
highest corner of the boxes, one request a corner, many in one launch: it must give the box's verdict at both, which
pins all its thresholds to 1e-9. Small cases feed every corner, larger ones a fresh random share of them.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction as F

import numpy as np
import pytest
import torch
from specbench_kernels.philox import philox_uniforms
from specbench_kernels.processors import RowStats, probabilities, row_stats
from specbench_kernels.verify_sampled import SampledOut, verify_sampled

CPU = torch.device("cpu")
CHOSEN, INDEPENDENT, WITHOUT_REPLACEMENT = 0, 1, 2
Row = tuple[F, ...]
Context = tuple[int, ...]
Model = Callable[[Context], Row]
Verdict = tuple[tuple[int, ...], int]
EDGE = 1e-9


@dataclass(frozen=True)
class Draft:
    """A drafted tree: parents and tokens of all nodes, the root first; `mass` how likely the drafter makes it."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    siblings: int
    mass: F = F(1)

    def context(self, node: int) -> Context:
        return () if node == 0 else (*self.context(self.parents[node]), self.tokens[node])

    def children(self, node: int) -> list[int]:
        return [i for i in range(1, len(self.parents)) if self.parents[i] == node]


@dataclass(frozen=True)
class Box:
    """Coins (node -> half-open interval; others are free) under which `draft` gets the verdict."""

    draft: Draft
    coins: dict[int, tuple[F, F]]
    verdict: Verdict

    @property
    def volume(self) -> F:
        return math.prod((high - low for low, high in self.coins.values()), start=F(1))

    @property
    def emitted(self) -> Context:
        path, token = self.verdict
        return (*(self.draft.tokens[node] for node in path), token)

    def corner(self, top: bool) -> list[float]:
        """Coins of all nodes: the lowest allowed (0 itself included), or just below the highest; 1 - 2^-53 for a draft
        that is rejected up to 1.
        """
        found = [0.5] * len(self.draft.parents)
        for node, (low, high) in self.coins.items():
            if top:
                found[node] = 1 - 2.0**-53 if high == 1 and low and node else float(high) - EDGE
            else:
                found[node] = float(low) + (EDGE if low else 0.0)
        return found


# The rules, in fractions --------------------------------------------------------------------------------------------


def normalised(weights: Iterable[F | int]) -> Row:
    row = tuple(F(x) for x in weights)
    return tuple(x / sum(row) for x in row)


def emission(law: Row) -> Iterator[tuple[int, tuple[F, F]]]:
    low = F(0)
    for token, mass in enumerate(law):
        if mass:
            yield token, (low, low + mass)
        low += mass


def sequential_boxes(draft: Draft, target: Model, drafter: Model) -> Iterator[Box]:
    def walk(node: int, path: tuple[int, ...], coins: dict[int, tuple[F, F]]) -> Iterator[Box]:
        context = draft.context(node)
        law, share = target(context), drafter(context)
        for child in draft.children(node):
            token = draft.tokens[child]
            if draft.siblings == CHOSEN:
                threshold = law[token]
                rest = tuple(F(0) if t == token else x for t, x in enumerate(law))
            else:
                threshold = min(F(1), law[token] / share[token])
                rest = tuple(max(F(0), x - y) for x, y in zip(law, share, strict=True))
            if threshold:
                yield from walk(child, (*path, child), {**coins, child: (F(0), threshold)})
            if threshold == 1:
                return
            coins = {**coins, child: (threshold, F(1))}
            law = normalised(rest)
            if draft.siblings == WITHOUT_REPLACEMENT:
                left = tuple(F(0) if t == token else x for t, x in enumerate(share))
                if not sum(left):
                    break
                share = normalised(left)
        for token, interval in emission(law):
            yield Box(draft, {**coins, 0: interval}, (path, token))

    yield from walk(0, (), {})


def block_boxes(draft: Draft, target: Model, drafter: Model) -> Iterator[Box]:
    last = len(draft.parents) - 1
    ratios, accepts = [F(1)], [F(1)]
    contexts = [draft.context(node) for node in range(last + 1)]

    def drawn(node: int) -> Row:
        """The law that node was drawn from."""
        token = draft.tokens[node]
        size = len(target(()))
        return tuple(F(t == token) for t in range(size)) if draft.siblings == CHOSEN else drafter(contexts[node - 1])

    def residual(node: int) -> Row:
        pairs = zip(target(contexts[node]), drawn(node + 1), strict=True)
        return tuple(max(F(0), ratios[node] * x - y) for x, y in pairs)

    for node in range(1, last + 1):
        token = draft.tokens[node]
        ratios.append(min(F(1), ratios[-1] * target(contexts[node - 1])[token] / drawn(node)[token]))
        rest = sum(residual(node)) if node < last else F(0)
        scale = rest + 1 - ratios[node]
        accepts.append(ratios[node] if node == last else rest / scale if scale else F(1))
    coins: dict[int, tuple[F, F]] = {}
    for node in range(last, -1, -1):
        if node and not accepts[node]:
            coins = {**coins, node: (F(0), F(1))}
            continue
        kept = {**coins, node: (F(0), accepts[node])} if node else coins
        law = target(contexts[node]) if node == last else residual(node)
        if sum(law):
            for token, interval in emission(normalised(law)):
                yield Box(draft, {**kept, 0: interval}, (tuple(range(1, node + 1)), token))
        if node and accepts[node] == 1:
            return
        coins = {**coins, node: (accepts[node], F(1))}


def all_drafts(parents: Sequence[int], drafter: Model, siblings: int) -> list[Draft]:
    """Every tree of this shape that the drafter can sample, with its probability."""
    found = [Draft((-1,), (0,), siblings)]
    for parent in parents[1:]:
        grown = []
        for draft in found:
            law = drafter(draft.context(parent))
            if siblings == WITHOUT_REPLACEMENT:
                used = [draft.tokens[child] for child in draft.children(parent)]
                law = normalised(F(0) if t in used else x for t, x in enumerate(law))
            for token, mass in enumerate(law):
                if mass:
                    nodes = ((*draft.parents, parent), (*draft.tokens, token))
                    grown.append(Draft(*nodes, siblings, draft.mass * mass))
        found = grown
    return found


def mean_emitted(boxes: list[Box]) -> F:
    return sum((box.draft.mass * box.volume * len(box.emitted) for box in boxes), F(0))


def assert_law(boxes: list[Box], target: Model, length: int) -> None:
    """Emissions, continued by the target to `length` tokens, have the law of the target's own sequences."""
    size = len(target(()))
    law: dict[Context, F] = defaultdict(F)
    for box in boxes:
        law[box.emitted] += box.draft.mass * box.volume

    def probability(sequence: Context, start: int) -> F:
        return math.prod((target(sequence[:i])[sequence[i]] for i in range(start, len(sequence))), start=F(1))

    for sequence in itertools.product(range(size), repeat=length):
        heads = ((sequence[:i], i) for i in range(1, length + 1))
        assert sum(law.get(head, F(0)) * probability(sequence, i) for head, i in heads) == probability(sequence, 0)


# The kernel at the corners ------------------------------------------------------------------------------------------


def row_of(law: Row) -> list[float]:
    return [math.log(x) if x else -math.inf for x in law]


def assert_kernel(
    boxes: list[Box], target: Model, drafter: Model, *, method: str = "sequential", limit: int | None = None
) -> None:
    """The kernel's verdict at both corners of the boxes, or at `limit` random ones of them, in one launch."""
    seed = secrets.randbits(32)
    points = [(box, top) for box in boxes for top in (False, True)]
    if limit is not None and limit < len(points):
        chosen = np.random.default_rng(seed).choice(len(points), limit, replace=False)
        points = [points[index] for index in chosen]
    places: dict[Context, int] = {}
    rows, q, tokens, parents, coins, starts = [], [], [], [], [], [0]
    for box, top in points:
        draft = box.draft
        for node, parent in enumerate(draft.parents):
            rows.append(places.setdefault(draft.context(node), len(places)))
            q.append([float(x) for x in drafter(draft.context(parent) if node else ())])
        tokens += draft.tokens
        parents += draft.parents
        coins += box.corner(top)
        starts.append(len(tokens))
    unique = torch.tensor([row_of(target(context)) for context in places], dtype=torch.float64)
    stats = row_stats(unique, temperature=torch.ones(len(unique)))
    index = torch.tensor(rows)
    out = SampledOut.empty(len(points), max(len(box.draft.parents) for box, _ in points), CPU)
    out.path.fill_(-7)
    verify_sampled(
        unique[index],
        RowStats(**{name: field[index] for name, field in vars(stats).items()}),
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents, dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        siblings=torch.tensor([box.draft.siblings for box, _ in points], dtype=torch.int32),
        uniforms=torch.tensor(coins, dtype=torch.float64),
        q=torch.tensor(q, dtype=torch.float64),
        out=out,
        method=method,
    )
    for number, (box, top) in enumerate(points):
        path = tuple(out.path[number, : int(out.accepted[number])].tolist())
        verdict = (path, int(out.next_token[number]))
        assert verdict == box.verdict, f"seed {seed}: {box} at its {'top' if top else 'bottom'} gave {verdict}"
        assert (out.path[number, len(path) :] == -1).all()
    assert not out.bad.any()


# Models -------------------------------------------------------------------------------------------------------------


def history_target(context: Context) -> Row:
    """The context-dependent 3-token target of the published test vectors."""
    k = (7 * sum((i + 1) * (t + 1) for i, t in enumerate(context)) + 3 * len(context)) % 5
    return normalised((1 + k, 3 + (2 * k) % 4, 2 + (3 * k) % 5))


def history_draft(context: Context) -> Row:
    k = (5 * sum((i + 2) * (t + 1) for i, t in enumerate(context)) + len(context)) % 4
    return normalised((4 - k, 1 + k, 2))


def four_tokens(context: Context) -> Row:
    """A target with impossible tokens."""
    k = (3 * sum((i + 1) * (t + 2) for i, t in enumerate(context)) + len(context)) % 4
    return normalised((k, 4 - k, 0 if k == 2 else 1, 2))


def four_drafts(context: Context) -> Row:
    """A drafter with impossible tokens, not those of `four_tokens`."""
    k = (sum(context) + 2 * len(context)) % 3
    return normalised((1, k, 2, 0 if k == 1 else 3))


def five_tokens(context: Context) -> Row:
    return normalised((t * 3 + len(context)) % 5 for t in range(5))


def constant(*weights: int) -> Model:
    row = normalised(weights)
    return lambda context: row


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length))


PAIR = (-1, 0, 0)
BINARY = (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("parents", "siblings", "target", "drafter", "length"),
    [
        pytest.param(chain(2), INDEPENDENT, history_target, history_draft, 3, id="chain of 2, 3 tokens"),
        pytest.param(chain(1), INDEPENDENT, four_tokens, four_drafts, 2, id="chain, impossible tokens"),
        pytest.param(PAIR, INDEPENDENT, history_target, history_draft, 2, id="two with replacement"),
        pytest.param(PAIR, WITHOUT_REPLACEMENT, history_target, history_draft, 2, id="two without"),
        pytest.param(PAIR, WITHOUT_REPLACEMENT, four_tokens, four_drafts, 2, id="two without, impossible tokens"),
    ],
)
def test_sampled_drafts_leave_the_targets_law(
    parents: tuple[int, ...], siblings: int, target: Model, drafter: Model, length: int
) -> None:
    boxes = [
        box for draft in all_drafts(parents, drafter, siblings) for box in sequential_boxes(draft, target, drafter)
    ]
    assert_law(boxes, target, length)
    assert_kernel(boxes, target, drafter)


@pytest.mark.parametrize(("siblings", "drafter"), [(INDEPENDENT, history_draft), (WITHOUT_REPLACEMENT, history_draft)])
def test_trees_of_two_levels_leave_the_targets_law(siblings: int, drafter: Model) -> None:
    parents = (-1, 0, 0, 1, 1)
    drafts = all_drafts(parents, drafter, siblings)
    boxes = [box for draft in drafts for box in sequential_boxes(draft, history_target, drafter)]
    assert_law(boxes, history_target, 3)
    assert_kernel(boxes, history_target, drafter, limit=48)


@pytest.mark.parametrize("siblings", [INDEPENDENT, WITHOUT_REPLACEMENT])
def test_three_siblings_of_five_tokens_leave_the_targets_law(siblings: int) -> None:
    """q lies on tokens that p has little of, so that several tokens are left after every rejection."""
    target, drafter = constant(1, 2, 5, 4, 3), constant(8, 4, 2, 1, 1)
    drafts = all_drafts((-1, 0, 0, 0), drafter, siblings)
    boxes = [box for draft in drafts for box in sequential_boxes(draft, target, drafter)]
    assert_law(boxes, target, 2)
    assert_kernel([box for box in boxes if not box.verdict[0]], target, drafter, limit=40)
    assert_kernel([box for box in boxes if box.verdict[0]], target, drafter, limit=24)


def test_block_verification_leaves_the_targets_law() -> None:
    drafts = all_drafts(chain(2), history_draft, INDEPENDENT)
    boxes = [box for draft in drafts for box in block_boxes(draft, history_target, history_draft)]
    assert_law(boxes, history_target, 3)
    assert_kernel(boxes, history_target, history_draft, method="block", limit=64)


def test_block_verification_draws_from_the_residual_of_its_ratio() -> None:
    """Five tokens, several of them left after a first draft that stands with a ratio below 1."""
    target, drafter = constant(1, 2, 5, 4, 3), constant(8, 4, 2, 1, 1)
    drafts = all_drafts(chain(2), drafter, INDEPENDENT)
    boxes = [box for draft in drafts for box in block_boxes(draft, target, drafter)]
    assert_law(boxes, target, 3)
    first = [box for box in boxes if box.verdict[0] == (1,) and box.draft.tokens[1] < 2]
    assert len({box.verdict[1] for box in first}) > 1
    assert_kernel(first, target, drafter, method="block", limit=24)


@pytest.mark.parametrize("method", ["sequential", "block"])
def test_chosen_chains_leave_the_targets_law(method: str) -> None:
    rule = block_boxes if method == "block" else sequential_boxes
    boxes = []
    for tokens in ((0, 1, 3), (0, 2, 2), (0, 0, 1)):
        own = list(rule(Draft(chain(2), tokens, CHOSEN), four_tokens, four_drafts))
        assert_law(own, four_tokens, 3)
        boxes += own
    assert_kernel(boxes, four_tokens, four_drafts, method=method)


def test_chosen_trees_leave_the_targets_law() -> None:
    """The published tree {0 -> {0, 2}, 1 -> {1}}: 23/12 tokens a step; and three siblings of five tokens."""
    tree = Draft((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 2, 1), CHOSEN)
    boxes = list(sequential_boxes(tree, history_target, history_draft))
    assert_law(boxes, history_target, 3)
    assert mean_emitted(boxes) == F(23, 12)
    assert_kernel(boxes, history_target, history_draft)
    wide = Draft((-1, 0, 0, 0, 2), (0, 4, 1, 0, 3), CHOSEN)
    boxes = list(sequential_boxes(wide, five_tokens, five_tokens))
    assert_law(boxes, five_tokens, 3)
    assert_kernel(boxes, five_tokens, five_tokens)


@pytest.mark.parametrize(
    ("tree", "target", "drafter"),
    [
        pytest.param((chain(1), INDEPENDENT), constant(1, 2, 3, 4), constant(4, 3, 0, 0), id="q after top-k 2"),
        pytest.param((PAIR, WITHOUT_REPLACEMENT), constant(1, 2, 3, 4), constant(4, 3, 2, 1), id="two siblings"),
        pytest.param((PAIR, INDEPENDENT), constant(1, 2, 3, 4), constant(4, 3, 2, 1), id="two with replacement"),
        pytest.param(Draft((-1, 0), (0, 0), CHOSEN), constant(3, 7), constant(6, 4), id="argmax is a point mass"),
        pytest.param(Draft(PAIR, (0, 0, 1), CHOSEN), constant(1, 2, 3, 4), constant(4, 3, 2, 1), id="top 2 chosen"),
    ],
)
def test_known_faults_of_the_draft_contract_do_not_bend_the_law(
    tree: Draft | tuple[tuple[int, ...], int], target: Model, drafter: Model
) -> None:
    """What is emitted has the target's law if q is what was sampled from, and nothing where nothing was sampled."""
    drafts = [tree] if isinstance(tree, Draft) else all_drafts(tree[0], drafter, tree[1])
    boxes = [box for draft in drafts for box in sequential_boxes(draft, target, drafter)]
    assert_law(boxes, target, 2)
    assert_kernel(boxes, target, drafter, limit=40)


# Published numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "drafter", "independent", "without"),
    [
        (constant(5, 3, 2), constant(2, 3, 5), ("7/10", "19/25", "101/125"), ("7/10", "41/50", "1")),
        (constant(6, 3, 1), constant(5, 1, 4), ("7/10", "83/100", "847/1000"), ("7/10", "17/20", "1")),
    ],
)
def test_acceptance_of_one_step_with_three_siblings(
    target: Model, drafter: Model, independent: Sequence[str], without: Sequence[str]
) -> None:
    """Recursive rejection, with and without replacement: the chance that one of the first k siblings stands."""
    for siblings, expected in ((INDEPENDENT, independent), (WITHOUT_REPLACEMENT, without)):
        drafts = all_drafts((-1, 0, 0, 0), drafter, siblings)
        boxes = [box for draft in drafts for box in sequential_boxes(draft, target, drafter)]
        for k, value in enumerate(expected, 1):
            accepted = [box for box in boxes if box.verdict[0] and box.verdict[0][0] <= k]
            assert sum(box.draft.mass * box.volume for box in accepted) == F(value)
        assert_kernel(boxes, target, drafter, limit=40)


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        (constant(5, 3, 2), constant(2, 3, 5), ("29/100", "483/1000", "6161/10000")),
        (constant(6, 3, 1), constant(5, 1, 4), (None, "571/1000", "6847/10000")),
    ],
)
def test_acceptance_of_target_only_walks(target: Model, drafter: Model, expected: Sequence[str | None]) -> None:
    """NSS: k drafts drawn independently, equal ones taken once, judged as chosen."""
    boxes: list[Box] = []
    for k, value in enumerate(expected, 1):
        accepted = F(0)
        for tokens in itertools.product(range(3), repeat=k):
            distinct = tuple(dict.fromkeys(tokens))
            mass = math.prod((drafter(())[token] for token in tokens), start=F(1))
            draft = Draft((-1, *[0] * len(distinct)), (0, *distinct), CHOSEN, mass)
            own = list(sequential_boxes(draft, target, drafter))
            accepted += sum((mass * box.volume for box in own if box.verdict[0]), F(0))
            boxes += own
        assert value is None or accepted == F(value)
    assert_kernel(boxes, target, drafter, limit=40)


CHAINS = [
    (constant(1, 2), constant(2, 1), "sequential", ("5/3", "19/9", "65/27", "211/81")),
    (constant(1, 2), constant(2, 1), "block", ("5/3", "20/9", "8/3", "247/81")),
    (history_target, history_draft, "sequential", ("67/42", "1219/588", "612173/246960")),
    (history_target, history_draft, "block", ("67/42", "613/294", "13081/5145")),
]


@pytest.mark.parametrize(("target", "drafter", "method", "expected"), CHAINS)
def test_mean_tokens_of_chains(target: Model, drafter: Model, method: str, expected: Sequence[str]) -> None:
    rule = block_boxes if method == "block" else sequential_boxes
    boxes: list[Box] = []
    for length, value in enumerate(expected, 1):
        drafts = all_drafts(chain(length), drafter, INDEPENDENT)
        own = [box for draft in drafts for box in rule(draft, target, drafter)]
        assert mean_emitted(own) == F(value)
        boxes += own
    assert_kernel(boxes, target, drafter, method=method, limit=32)


@pytest.mark.parametrize(
    ("siblings", "one_level", "two_levels"),
    [(WITHOUT_REPLACEMENT, F(16, 9), F(5, 2)), (INDEPENDENT, F(250, 147), F(99851, 43218))],
)
def test_mean_tokens_of_binary_trees(siblings: int, one_level: F, two_levels: F) -> None:
    def boxes_of(parents: tuple[int, ...]) -> list[Box]:
        drafts = all_drafts(parents, history_draft, siblings)
        return [box for draft in drafts for box in sequential_boxes(draft, history_target, history_draft)]

    assert mean_emitted(boxes_of(PAIR)) == one_level
    boxes = boxes_of(BINARY)
    assert mean_emitted(boxes) == two_levels
    assert_kernel(boxes, history_target, history_draft, limit=40)


# A vocabulary of thousands -------------------------------------------------------------------------------------------


VOCAB = 4096


def discrepancy(drawn: torch.Tensor, law: torch.Tensor) -> tuple[float, float]:
    """(largest error of the cumulative shares, chi-square over 32 groups of tokens of equal mass) of `drawn` tokens."""
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    cdf, share = law.cumsum(0), counts.cumsum(0) / len(drawn)
    group = (cdf * 32).long().clamp(max=31)
    expected = torch.zeros(32, dtype=torch.float64).index_add_(0, group, law) * len(drawn)
    seen = torch.zeros(32, dtype=torch.float64).index_add_(0, group, counts)
    some = expected > 0
    return float((share - cdf).abs().max()), float(((seen - expected)[some] ** 2 / expected[some]).sum())


@pytest.mark.parametrize("rejected", [False, True])
def test_draws_from_a_large_vocabulary(rejected: bool) -> None:
    """Stratified coins, one in each of n equal parts of [0, 1): cumulative shares are right to 1/n, so that n = 200
    draws see an error of 1 % for which independent coins would need tens of thousands; chi-square sees coarser ones.

    With `rejected` every draft falls, and what is drawn is the residual of p and q. Moving 1 % of the draws breaks the
    cumulative bound: that is checked on the draws themselves.
    """
    seed, n = secrets.randbits(32), 200
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(VOCAB, generator=random)
    other = torch.softmax(logits + torch.randn(VOCAB, generator=random), dim=-1)
    stats = row_stats(logits[None], temperature=torch.tensor([0.9]))
    p = probabilities(logits[None], stats)[0].double()
    nodes = 2 if rejected else 1
    rows = n * nodes
    coins = torch.empty(rows, dtype=torch.float64)
    starts = torch.arange(0, rows + 1, nodes, dtype=torch.int32)
    philox_uniforms(torch.full((n,), seed), torch.arange(n) * 7, starts, coins)
    order = torch.randperm(n, generator=random)
    coins[::nodes] = (order + coins[::nodes]) / n
    tokens = torch.zeros(rows, dtype=torch.int64)
    law = p
    if rejected:
        # The likeliest token of all that q prefers: p < q, and a coin of 1 - 2^-53 rejects it.
        tokens[1::2] = int(torch.where(other > p, p, 0.0).argmax())
        coins[1::2] = 1 - 2.0**-53
        law = (p - other.double()).clamp(min=0)
    out = SampledOut.empty(n, 2, CPU)
    verify_sampled(
        logits.expand(rows, VOCAB).contiguous(),
        RowStats(**{name: field.expand(rows).contiguous() for name, field in vars(stats).items()}),
        tokens=tokens,
        parents=torch.tensor([-1, 0][:nodes] * n, dtype=torch.int32),
        query_start=starts,
        siblings=torch.ones(n, dtype=torch.int32),
        uniforms=coins,
        q=other.expand(rows, VOCAB).contiguous(),
        out=out,
        max_siblings=1,
        block=VOCAB // 2,
    )
    assert not out.bad.any()
    assert not out.accepted.any()
    law = law / law.sum()
    assert bool((law[out.next_token] > 0).all())
    error, chi_square = discrepancy(out.next_token, law)
    # A group's count is off by one coin at each of its two ends, at most.
    assert error <= 1.01 / n, f"seed {seed}"
    assert chi_square < 32 * 2**2 / (n / 32), f"seed {seed}"
    moved = out.next_token.clone()
    lowest = torch.argsort(moved)[: n // 100]
    moved[lowest] = int(moved.max())
    assert discrepancy(moved, law)[0] > 1.01 / n
