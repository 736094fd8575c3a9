"""verify_greedy and verify_sampled: against their references, at the edges of the coins, and what they refuse.

The law that verify_sampled leaves is proved in test_kernel_law.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from specbench_kernels import verify_greedy as greedy_module
from specbench_kernels import verify_sampled as sampled_module
from specbench_kernels.op import Case, Op
from specbench_kernels.processors import RowStats, probabilities, row_stats
from specbench_kernels.verify_cases import drawn_drafts, packed_trees
from specbench_kernels.verify_greedy import GreedyOut, verify_greedy
from specbench_kernels.verify_reference import distribution_reference, verify_sampled_reference
from specbench_kernels.verify_sampled import (
    BAD_Q,
    MALFORMED,
    NO_DISTRIBUTION,
    SampledOut,
    VerifyWorkspace,
    most_siblings,
    verify_sampled,
)

from specbench.engine.sampling import SamplingParams
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal, verify

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
CHOSEN, INDEPENDENT, WITHOUT_REPLACEMENT = 0, 1, 2
LAST = 1 - 2.0**-53
"""The largest coin."""
P = [0.1, 0.2, 0.3, 0.4]
Q = [0.4, 0.3, 0.2, 0.1]


def i32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def logits_of(*laws: Sequence[float]) -> torch.Tensor:
    return torch.tensor([[math.log(x) if x else -INF for x in law] for law in laws], dtype=torch.float64)


@dataclasses.dataclass
class Request:
    """One tree: its logits [T, V], tokens, root-included parents, coins [T] (the root's first), q [T, V] or None."""

    logits: torch.Tensor
    tokens: Sequence[int]
    parents: Sequence[int]
    coins: Sequence[float]
    q: Sequence[Sequence[float]] | None = None
    siblings: int = CHOSEN
    temperature: float = 1.0


def judge(requests: list[Request], *, pads: int = 0, **options: Any) -> SampledOut:
    """All requests in one launch, outputs poisoned first, `pads` rows of NaN behind the last one."""
    size = requests[0].logits.shape[1]
    counts = [len(each.tokens) for each in requests]
    pad = torch.full((pads, size), NAN, dtype=requests[0].logits.dtype)
    logits = torch.cat([*(each.logits for each in requests), pad])
    temperature = torch.cat([torch.full((n,), each.temperature) for n, each in zip(counts, requests, strict=True)])
    blank = [[0.0] * size]
    q = [row for n, each in zip(counts, requests, strict=True) for row in (each.q or blank * n)] + blank * pads
    stats = row_stats(logits, temperature=torch.cat([temperature, torch.ones(pads)]))
    out = poisoned(len(requests), max(counts, default=0) + 1)
    return verify_sampled(
        logits,
        stats,
        tokens=torch.tensor([t for each in requests for t in each.tokens] + [-5] * pads, dtype=torch.int64),
        parents=i32([p for each in requests for p in each.parents] + [99] * pads),
        query_start=i32([sum(counts[:i]) for i in range(len(counts) + 1)]),
        siblings=i32([each.siblings for each in requests]),
        uniforms=torch.tensor([u for each in requests for u in each.coins] + [NAN] * pads, dtype=torch.float64),
        q=torch.tensor(q, dtype=torch.float64) if any(each.q is not None for each in requests) else None,
        out=out,
        **options,
    )


def poisoned(requests: int, width: int) -> SampledOut:
    out = SampledOut.empty(requests, width, CPU)
    for field in vars(out).values():
        field.fill_(-77)
    return out


def path(out: GreedyOut, request: int) -> list[int]:
    accepted = int(out.accepted[request])
    assert out.path[request, accepted:].tolist() == [-1] * (out.path.shape[1] - accepted)
    return out.path[request, :accepted].tolist()


# Against the references ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, id=f"{op.name} {case.name}")
        for op in (greedy_module.OP, sampled_module.OP)
        for case in op.small()
    ],
)
def test_ops_equal_their_references(op: Op, case: Case) -> None:
    seed = secrets.randbits(32)
    inputs = op.inputs(case, CPU, seed)
    found, expected = op.run(inputs), op.reference(inputs)
    for name, want in expected.items():
        assert found[name].dtype == want.dtype
        assert torch.equal(found[name], want), f"{case.name}, seed {seed}: {name}"


def random_batch(seed: int, children: int, vocab_size: int = 20) -> dict[str, Any]:
    """Six requests of all kinds, drafts drawn from a q near to p, two of them at temperature 0."""
    trees = packed_trees(6, 6, children, vocab_size, CPU, seed)
    rows = len(trees["tokens"])
    random = torch.Generator().manual_seed(seed)
    starts = trees["query_start"].long()
    owner = torch.repeat_interleave(torch.arange(6), starts.diff())
    logits = 2 * torch.randn(rows, vocab_size, generator=random, dtype=torch.float64)
    noise = torch.randn(rows, vocab_size, generator=random, dtype=torch.float64)
    q = torch.softmax(logits[trees["parents"].clamp(min=0).long() + starts[owner]] + 0.5 * noise, dim=-1)
    siblings = i32([0, 1, 2, 2, 1, 0])
    drawn = drawn_drafts(trees, q, siblings, seed)
    return {
        "logits": logits,
        "temperature": torch.where((owner == 0) | (owner == 4), 0.0, 0.8).double(),
        "tokens": torch.where(siblings[owner] == 0, trees["tokens"], drawn),
        "parents": trees["parents"],
        "query_start": trees["query_start"],
        "q": q,
        "siblings": siblings,
        "uniforms": torch.rand(rows, generator=random, dtype=torch.float64),
    }


def run(batch: dict[str, Any], **options: Any) -> SampledOut:
    rest = {name: value for name, value in batch.items() if name not in ("logits", "temperature")}
    out = poisoned(len(batch["query_start"]) - 1, 6)
    stats = row_stats(batch["logits"], temperature=batch["temperature"])
    return verify_sampled(batch["logits"], stats, out=out, **rest, **options)


@pytest.mark.parametrize(("method", "children"), [("sequential", 3), ("sequential", 1), ("block", 1)])
def test_batches_of_all_kinds_equal_the_reference_in_every_split_and_alone(method: str, children: int) -> None:
    seed = secrets.randbits(32)
    batch = random_batch(seed, children)
    out = run(batch, method=method)
    law = distribution_reference(batch["logits"], batch["temperature"])
    rest = {name: value for name, value in batch.items() if name not in ("logits", "temperature")}
    expected = verify_sampled_reference(law, **rest, greedy=batch["temperature"] == 0, method=method, width=6)
    split = run(batch, method=method, block=16)
    for name, want in expected.items():
        assert torch.equal(getattr(out, name), want), f"seed {seed}: {name}"
        assert torch.equal(getattr(split, name), want), f"seed {seed}: {name} in blocks of 16"
    starts = batch["query_start"].tolist()
    for request in (2, 5):
        rows = slice(starts[request], starts[request + 1])
        alone = {name: value[rows] for name, value in batch.items()}
        alone |= {"query_start": i32([0, rows.stop - rows.start]), "siblings": batch["siblings"][request : request + 1]}
        single = run(alone, method=method)
        for name in expected:
            assert torch.equal(getattr(single, name), getattr(out, name)[request : request + 1]), f"seed {seed}"


class Forced:
    """A source of given coins, in the host's order."""

    def __init__(self, coins: torch.Tensor) -> None:
        self.coins, self.request_id = coins.numpy(), "forced"

    def uniforms(self, count: int) -> Any:
        return self.coins[:count]


@pytest.mark.parametrize("children", [1, 3])
def test_verdicts_are_the_hosts(children: int) -> None:
    """The same coins through the engine's own verifier: top-k on, chosen and sampled trees, two greedy ones."""
    seed = secrets.randbits(32)
    batch = random_batch(seed, children)
    starts, kinds = batch["query_start"].tolist(), batch["siblings"].tolist()
    names = ("chosen", "independent", "without_replacement")
    proposals, coins, params = [], [], []
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        rows = slice(begin + 1, end)
        tree = TokenTree(batch["tokens"][rows].numpy(), batch["parents"][rows].long().numpy() - 1)
        sampled = kinds[index] != CHOSEN and len(tree) > 0
        proposals.append(Proposal(tree, batch["q"][rows] if sampled else None, names[kinds[index] if sampled else 0]))
        coins.append(Forced(torch.cat([batch["uniforms"][rows], batch["uniforms"][begin : begin + 1]])))
        params.append(SamplingParams(temperature=float(batch["temperature"][begin]), top_k=12))
    expected = verify(proposals, batch["logits"], params, coins)
    rest = {name: value for name, value in batch.items() if name not in ("logits", "temperature")}
    top_k = i32([12] * len(batch["logits"]))
    stats = row_stats(batch["logits"], temperature=batch["temperature"], top_k=top_k)
    out = verify_sampled(batch["logits"], stats, out=poisoned(6, 6), **rest)
    for index, verdict in enumerate(expected):
        # The host numbers drafts from 0, the root aside.
        assert tuple(node - 1 for node in path(out, index)) == verdict.path, f"seed {seed}, request {index}"
        assert int(out.next_token[index]) == verdict.next_token, f"seed {seed}, request {index}"


# Greedy --------------------------------------------------------------------------------------------------------------


def greedy(requests: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> GreedyOut:
    """(argmax, tokens, parents) of each request."""
    starts = [0]
    for argmax, _, _ in requests:
        starts.append(starts[-1] + len(argmax))
    out = GreedyOut.empty(len(requests), 6, CPU)
    for field in vars(out).values():
        field.fill_(-77)
    columns = [[x for each in requests for x in each[part]] for part in range(3)]
    return verify_greedy(
        torch.tensor(columns[0]), torch.tensor(columns[1]), i32(columns[2]), query_start=i32(starts), out=out
    )


def test_greedy_walks_to_the_child_that_holds_the_argmax() -> None:
    """Position 0 is checked too (prompt 1, 1, 1, draft 1, argmax 2); a wrong branch's children are never reached."""
    out = greedy(
        [
            ([2, 1], [1, 1], [-1, 0]),
            ([5, 6, 7], [0, 5, 6], [-1, 0, 1]),
            ([5, 6, 7], [0, 5, 9], [-1, 0, 1]),
            ([4, 8, 3, 3, 2, 1], [0, 7, 4, 3, 3, 9], [-1, 0, 0, 1, 2, 2]),
            ([9], [0], [-1]),
            ([], [], []),
            ([5, -1, 7], [0, 4, 6], [-1, 0, 1]),
        ]
    )
    assert [path(out, i) for i in range(7)] == [[], [1, 2], [1], [2, 4], [], [], []]
    assert out.next_token.tolist() == [2, 7, 6, 2, 9, -1, -1]
    assert out.accepted.tolist() == [0, 2, 1, 2, 0, 0, 0]


def test_greedy_refuses_what_does_not_fit() -> None:
    argmax, parents, starts = torch.zeros(3, dtype=torch.int64), i32([-1, 0, 1]), i32([0, 3])
    out = GreedyOut.empty(1, 3, CPU)
    with pytest.raises(ValueError, match="tokens has shape"):
        verify_greedy(argmax, argmax[:2], parents, query_start=starts, out=out)
    with pytest.raises(ValueError, match="parents is int64"):
        verify_greedy(argmax, argmax, argmax, query_start=starts, out=out)
    with pytest.raises(ValueError, match=r"out.accepted has shape"):
        verify_greedy(argmax, argmax, parents, query_start=i32([0, 1, 3]), out=out)


def test_greedy_requests_are_greedy_beside_sampled_ones() -> None:
    """Their coins are no numbers and their q is not read; a coin of 0 beside them does not accept what has p = 0."""
    logits = logits_of(P, P, P)
    chain = {"parents": [-1, 0, 1], "coins": [NAN] * 3, "q": [[NAN] * 4] * 3, "siblings": WITHOUT_REPLACEMENT}
    out = judge(
        [
            Request(logits, [0, 3, 2], temperature=0.0, **chain),
            Request(logits_of([0, 0.2, 0.3, 0.5], P), [0, 0], [-1, 0], [0.0, 0.0]),
            Request(logits, [0, 3, 3], temperature=1e-6, **chain),
        ],
        max_siblings=1,
    )
    assert [path(out, i) for i in range(3)] == [[1], [], [1, 2]]
    assert out.next_token.tolist() == [3, 1, 3]
    assert out.bad.tolist() == [0, 0, 0]
    for method in ("sequential", "block"):
        out = judge([Request(logits, [0, 3, 2], temperature=0.0, **chain)], method=method, max_siblings=1)
        assert path(out, 0) == [1]
        assert int(out.next_token[0]) == 3


# Coins at the edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sequential", "block"])
def test_comparisons_are_strict(method: str) -> None:
    """u = p / q = 1/2 exactly rejects, the next float below accepts."""
    logits = torch.zeros(2, 4, dtype=torch.float64)
    half = [[0.0] * 4, [0.5, 0.5, 0.0, 0.0]]
    stats = row_stats(logits, temperature=torch.ones(2))
    assert probabilities(logits, stats)[0].tolist() == [0.25] * 4
    below = math.nextafter(0.5, 0.0)
    requests = [Request(logits, [0, 1], [-1, 0], [0.1, u], half, INDEPENDENT) for u in (0.5, below)]
    requests += [Request(logits, [0, 1], [-1, 0], [0.1, u]) for u in (0.25, math.nextafter(0.25, 0.0))]
    out = judge(requests, method=method)
    assert out.accepted.tolist() == [0, 1, 0, 1]
    assert out.next_token.tolist() == [2, 0, 0, 0]
    edges = [Request(logits[:1], [0], [-1], [u]) for u in (0.25, math.nextafter(0.25, 0.0), 0.75)]
    assert judge(edges, method=method).next_token.tolist() == [1, 0, 3]


def test_tokens_without_mass_are_never_drawn() -> None:
    """Coins 0 and 1 - 2^-53, and 1 itself, on laws with nothing at both ends, in blocks of 16, the outer ones empty."""
    size = 70
    law = torch.full((1, size), -INF, dtype=torch.float64)
    law[0, 20:23] = torch.tensor([0.0, 1.0, 0.5])
    out = judge([Request(law, [0], [-1], [u]) for u in (0.0, LAST, 1.0)], block=16)
    assert out.next_token.tolist() == [20, 22, 22]
    requests = [Request(logits_of([0, 0.5, 0.5, 0], P), [0, 2], [-1, 0], [u, LAST]) for u in (0.0, LAST, 1.0)]
    assert judge(requests).next_token.tolist() == [1, 1, 1]


@pytest.mark.parametrize("method", ["sequential", "block"])
def test_a_residual_that_rounding_left_empty_falls_back_to_p(method: str) -> None:
    """q at or above p everywhere, forced coins up to 1: an id of 0 to 3, and no NaN."""
    quarter = [0.25] * 4
    over = [[0.0] * 4, [0.26] * 4]
    one = [0.0, 1.0, 0.0, 0.0]
    requests = [
        Request(logits_of(quarter, quarter), [0, 1], [-1, 0], [LAST, 1.0], [quarter] * 2, INDEPENDENT),
        Request(logits_of(quarter, quarter), [0, 1], [-1, 0], [LAST, LAST], over, INDEPENDENT),
        Request(logits_of(quarter, quarter), [0, 2], [-1, 0], [0.0, LAST], over, WITHOUT_REPLACEMENT),
        Request(logits_of(one, one), [0, 1], [-1, 0], [0.5, 1.0]),
    ]
    out = judge(requests, method=method)
    assert out.accepted.tolist() == [0, 0, 0, 0]
    assert out.next_token.tolist()[1:] == [3, 0, 1]
    assert 0 <= int(out.next_token[0]) <= 3
    assert out.bad.tolist() == [0] * 4


def test_a_residual_left_empty_between_siblings_leaves_p_as_it_was() -> None:
    """p = q and a forced coin of 1 rejects the first sibling: the second is judged by p / q = 1 still."""
    quarter = [[0.25] * 4] * 3
    for coin, accepted in ((0.5, [2]), (1.0, [])):
        request = Request(logits_of(*quarter), [0, 1, 2], [-1, 0, 0], [0.0, 1.0, coin], quarter, INDEPENDENT)
        out = judge([request])
        assert path(out, 0) == accepted
        assert int(out.next_token[0]) == 0


def test_siblings_share_the_first_ones_row_of_q() -> None:
    """Rows of later siblings, of roots and of chosen requests are not read."""
    unread = [NAN] * 4
    sampled = Request(logits_of(P, P, P), [0, 0, 1], [-1, 0, 0], [0.5, LAST, LAST], [unread, Q, unread], INDEPENDENT)
    without = dataclasses.replace(sampled, siblings=WITHOUT_REPLACEMENT)
    chosen = dataclasses.replace(sampled, siblings=CHOSEN, q=[unread] * 3)
    out = judge([sampled, without, chosen])
    assert out.bad.tolist() == [0, 0, 0]
    assert out.next_token.tolist() == [3, 3, 3]


def test_q_without_mass_ends_the_siblings() -> None:
    """Without replacement, q on one token only: the second sibling can't have been drawn and is not judged."""
    one = [0.0, 1.0, 0.0, 0.0]
    request = Request(logits_of(P, P, P), [0, 1, 3], [-1, 0, 0], [0.0, 0.5, 0.0], [one] * 3, WITHOUT_REPLACEMENT)
    out = judge([request])
    assert path(out, 0) == []
    assert int(out.next_token[0]) == 0
    assert out.bad.tolist() == [0]


# Bad rows, bad trees, bad q ------------------------------------------------------------------------------------------


def test_a_bad_row_fails_its_request_alone() -> None:
    """NaN, +inf and all -inf anywhere in a request, even where the walk does not come; V = 37 in blocks of 16."""
    size = 37
    good = torch.zeros(2, size, dtype=torch.float64)
    requests = [Request(good, [0, 36], [-1, 0], [LAST, 0.5])]
    for row, value, at in ((0, NAN, 36), (1, NAN, 3), (1, INF, 20), (0, -INF, slice(None))):
        rows = good.clone()
        rows[row, at] = value
        requests += [Request(rows, [0, 36], [-1, 0], [LAST, 0.5]), Request(good, [0, 36], [-1, 0], [LAST, 0.5])]
    out = judge(requests, block=16, pads=3)
    assert out.bad.tolist() == [0, *[NO_DISTRIBUTION, 0] * 4]
    assert out.next_token.tolist() == [35, *[-1, 35] * 4]
    assert all(path(out, i) == [] for i in range(len(requests)))


def test_a_q_that_is_none_is_told() -> None:
    """0, NaN, negative or above 2 at the drafted token; NaN elsewhere in a residual that is needed."""
    logits = logits_of(P, P)
    requests = []
    for value in (0.0, NAN, -0.1, 3.0, INF):
        q = [0.4, value, 0.2, 0.1]
        requests.append(Request(logits, [0, 1], [-1, 0], [0.5, LAST], [Q, q], INDEPENDENT))
    requests.append(Request(logits, [0, 0], [-1, 0], [0.5, LAST], [Q, [0.4, 0.3, NAN, 0.1]], INDEPENDENT))
    requests.append(Request(logits, [0, 0], [-1, 0], [0.5, 0.0], [Q, [0.4, 0.3, NAN, 0.1]], INDEPENDENT))
    for siblings in (INDEPENDENT, WITHOUT_REPLACEMENT):
        q = [[0.4, 0.3, NAN, 0.3]] * 3
        requests.append(Request(logits_of(P, P, P), [0, 0, 1], [-1, 0, 0], [0.5, LAST, 0.1], q, siblings))
    out = judge(requests)
    assert out.bad.tolist() == [BAD_Q] * 6 + [0] + [BAD_Q] * 2
    assert out.next_token.tolist()[:6] == [-1] * 6
    assert path(out, 6) == [1]


def test_trees_that_are_none_are_told() -> None:
    logits = logits_of(*[P] * 3)
    coins = [0.5] * 3
    q = [Q] * 3
    requests = [
        Request(logits, [0, 1, 2], [-1, 2, 0], coins),
        Request(logits, [0, 1, 2], [-1, 0, -1], coins),
        Request(logits, [0, 4, 2], [-1, 0, 0], coins),
        Request(logits, [0, -1, 2], [-1, 0, 0], coins),
        Request(logits, [0, 1, 1], [-1, 0, 0], coins),
        Request(logits, [0, 1, 1], [-1, 0, 0], coins, q, WITHOUT_REPLACEMENT),
        Request(logits, [0, 1, 1], [-1, 0, 0], coins, q, INDEPENDENT),
        Request(logits, [0, 1, 1], [-1, 0, 1], coins, q, 3),
        Request(logits, [9, 1, 1], [-1, 0, 1], coins, q, WITHOUT_REPLACEMENT),
    ]
    out = judge(requests)
    assert out.bad.tolist() == [MALFORMED] * 6 + [0, MALFORMED, 0]
    assert out.next_token.tolist()[:6] == [-1] * 6
    tree = Request(logits, [0, 1, 2], [-1, 0, 0], coins, q, INDEPENDENT)
    assert judge([tree], method="block").bad.tolist() == [MALFORMED]
    assert judge([tree], max_siblings=1).bad.tolist() == [MALFORMED]
    chosen = Request(logits, [0, 1, 2], [-1, 0, 0], coins)
    assert judge([chosen, Request(logits, [0, 1, 2], [-1, 0, 1], coins, q, 1)], max_siblings=1).bad.tolist() == [0, 0]


def test_empty_requests_and_pads() -> None:
    """Requests without rows get nothing; rows behind the last request hold NaN and are not looked at."""
    logits = logits_of(P, P)
    whole = Request(logits, [0, 3], [-1, 0], [0.0, 0.1], [Q, Q], INDEPENDENT)
    none = Request(logits[:0], [], [], [])
    out = judge([none, whole, none], pads=2)
    assert out.accepted.tolist() == [0, 1, 0]
    assert out.next_token.tolist() == [-1, 0, -1]
    assert out.bad.tolist() == [0, 0, 0]
    empty = judge([none])
    assert empty.next_token.tolist() == [-1]
    assert path(empty, 0) == []


def test_given_room_is_used_and_everything_else_refused() -> None:
    logits = logits_of(P, P)
    stats = row_stats(logits, temperature=torch.ones(2))
    given: dict[str, Any] = {
        "tokens": torch.tensor([0, 1]),
        "parents": i32([-1, 0]),
        "query_start": i32([0, 2]),
        "siblings": i32([0]),
        "uniforms": torch.full((2,), 0.5, dtype=torch.float64),
    }
    workspace = VerifyWorkspace.empty(2, 1, 4, CPU)
    for field in vars(workspace).values():
        field.fill_(-9)
    verify_sampled(logits, stats, out=poisoned(1, 2), workspace=workspace, **given)
    assert float(workspace.emission[0, 0, 0]) == pytest.approx(0.8)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tokens is int32", {"tokens": i32([0, 1])}),
        ("parents has shape", {"parents": i32([-1])}),
        ("uniforms is float32", {"uniforms": torch.zeros(2)}),
        ("siblings has shape", {"siblings": i32([0, 0])}),
        ("q has shape", {"q": torch.zeros(1, 4)}),
        ("q is float16", {"q": torch.zeros(2, 4, dtype=torch.float16)}),
        ("method 'greedy'", {"method": "greedy"}),
        (r"workspace.nodes has shape", {"workspace": VerifyWorkspace.empty(3, 1, 4, CPU)}),
        (r"out.bad has shape", {"out": dataclasses.replace(poisoned(1, 2), bad=i32([0, 0]))}),
    ]
    for match, change in wrong:
        with pytest.raises(ValueError, match=match):
            verify_sampled(logits, stats, **{"out": poisoned(1, 2), **given, **change})
    with pytest.raises(ValueError, match=r"stats.maximum is float64"):
        verify_sampled(logits.float(), stats, out=poisoned(1, 2), **given)
    short = RowStats(**{name: field[:1] for name, field in vars(stats).items()})
    with pytest.raises(ValueError, match=r"stats.argmax has shape"):
        verify_sampled(logits, short, out=poisoned(1, 2), **given)
    assert most_siblings(i32([-1, 0, 0, 1, 0, -1, 0]), i32([0, 5, 7])) == 3
    assert most_siblings(i32([]), i32([0])) == 0
