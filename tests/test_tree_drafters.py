"""Drafters of static trees: shapes by rank, what each node holds, the draft cache, costs; and speculation through trees
is autoregression, greedily token for token and sampled law for law."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from coin_law import DraftLaw, ForcedCoins, TinyLaw, Tokens, assert_volumes_are_the_law, tree_coin_paths
from engine_tools import (
    accepted_share,
    by_id,
    decode,
    empty,
    feed,
    history_logits,
    make_decoder,
    make_request,
    outputs,
    perturbed,
    prompts,
    resized_vocabulary,
)
from engine_world import V, World, build_world
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench import metrics
from specbench.engine import decode as decode_module
from specbench.engine.drafters import levels as model_drafters
from specbench.engine.drafters.base import Drafter, DraftPass
from specbench.engine.drafters.growth import Children
from specbench.engine.drafters.levels import best_children
from specbench.engine.drafters.lookup import ReplayDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.static_tree import NAMED_TREES, StaticTree, check_first_children
from specbench.engine.models.decoder import Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams, distribution
from specbench.engine.verify import Proposal
from specbench.errors import InputError
from specbench.roofline.cost import forward_cost

Z = (0,)
DEEP = StaticTree.of(
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    + [[*Z * depth, rank] for depth in range(3, 7) for rank in (0, 1)]
    + [[*Z * 8]]
)
WIDE = StaticTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [0, 1, 0], [2, 0, 0], [2, 0, 1]])


# The shape -----------------------------------------------------------------------------------------------------------


def test_nodes_stand_level_by_level_and_by_rank() -> None:
    tree = StaticTree.of([[1, 0], [0, 1], [1], [0], [0, 0], [1, 0, 0]])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0))
    assert tree.parents == (-1, -1, 0, 0, 1, 4)
    assert tree.children == ((0, 1), (2, 3), (4,), (), (), (5,), ())
    assert tree.inner == ((-1,), (0, 1), (4,))
    assert (len(tree), tree.depth, tree.is_chain, tree.first_path, tree.most_fed) == (6, 3, False, (0, 2), 2)


def test_a_cut_keeps_the_first_levels() -> None:
    assert [len(WIDE.cut(depth)) for depth in range(-1, 6)] == [0, 0, 3, 8, 11, 11, 11]
    assert WIDE.cut(2).paths == WIDE.paths[:8]
    assert WIDE.cut(3) is WIDE
    assert [len(DEEP.cut(depth)) for depth in range(1, 9)] == [3, 6, 9, 11, 13, 15, 17, 18]
    assert DEEP.depth == 8


def test_a_chain_is_a_static_tree() -> None:
    for depth in range(4):
        chain = StaticTree.chain(depth)
        assert (len(chain), chain.depth, chain.is_chain) == (depth, depth, True)
        assert chain.parents == tuple(range(-1, depth - 1))
        assert chain.inner == tuple((level - 1,) for level in range(depth))
        assert chain.first_path == tuple(range(depth))
    assert StaticTree.of([[0, 0], [0]]) == StaticTree.chain(2)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "needs a node"),
        ([[]], "is no path of ranks"),
        ([[0], [-1]], "is no path of ranks"),
        ([[1]], r"\[1\] has no sibling before it"),
        ([[0], [0, 0, 0]], r"\[0, 0, 0\] has no parent"),
        ([[0], [0]], r"\[0\] stands here twice"),
        ([[rank] for rank in range(128)], "a tree of 128 nodes"),
    ],
)
def test_what_is_no_tree_is_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        StaticTree.of(paths)
    assert caught.value.key == "tree"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_closed_set_of_paths_is_a_tree_whatever_its_order(seeds: list[list[int]]) -> None:
    closed = {()}
    for path in seeds:
        for end in range(1, len(path) + 1):
            closed |= {(*path[: end - 1], rank) for rank in range(path[end - 1] + 1)}
    paths = sorted(closed - {()}, reverse=True)
    tree = StaticTree.of(paths)
    assert set(tree.paths) == set(paths)
    for node, (path, parent) in enumerate(zip(tree.paths, tree.parents, strict=True)):
        assert parent < node
        assert path[:-1] == (tree.paths[parent] if parent >= 0 else ())
        assert tree.children[parent + 1][path[-1]] == node
    assert sorted(itertools.chain(*tree.inner)) == [n for n in range(-1, len(tree)) if tree.children[n + 1]]
    assert sum(map(len, tree.children)) == len(tree)


# What the nodes hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


@pytest.fixture(scope="module")
def targets(world: World) -> dict[str, Decoder]:
    return {
        rollback: make_decoder(world.spec, world.weights, max_rows=96, max_context=144, rollback=rollback)
        for rollback in ("compact", "index", "realloc")
    }


def tree_drafter(
    world: World,
    target: Decoder,
    name: str,
    tree: StaticTree,
    children: Children = "top",
    *,
    noise: float = 0.08,
    rollback: str = "compact",
) -> Drafter:
    if name == "early exit":
        return EarlyExitDrafter(target, 1, tree, children)
    if name == "oracle":
        return ReplayDrafter(V, tree=tree)
    if name == "forced":
        return ReplayDrafter(V, length=2.4, tree=tree)
    spec, weights = world.spec, perturbed(world.weights, noise)
    if name == "narrower":
        spec, weights = resized_vocabulary(spec, weights, V - 3)
    decoder = make_decoder(spec, weights, max_rows=48, max_context=144, rollback=rollback)
    return DraftModelDrafter(decoder, V, tree, children)


TREE_DRAFTERS = ("draft model", "narrower", "early exit", "oracle", "forced")


class Watched:
    """Passes everything on to a drafter, and judges each proposal by `judge`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.synthetic, self.capture = inner, inner.synthetic, inner.capture
        self.num_judged = 0

    def start(self, active: ActiveRequest) -> None:
        self.inner.start(active)

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        proposals = self.inner.propose(active, depths)
        for one, depth, proposal in zip(active, depths, proposals, strict=True):
            assert len(proposal.tree) <= self.num_nodes(depth)
            assert proposal.tree.depth <= depth
            self.judge(one, depth, proposal)
            self.num_judged += 1
        return proposals

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        raise AssertionError("defined by each test")

    def num_nodes(self, depth: int) -> int:
        return self.inner.num_nodes(depth)

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        self.inner.commit(active, num_draft, num_accepted, path)

    def finish(self, active: ActiveRequest) -> None:
        self.inner.finish(active)

    def take_passes(self) -> list[DraftPass]:
        return self.inner.take_passes()


class WatchedModel(Watched):
    """Each node's children are those the drafting model has after the node's own path, computed from scratch."""

    def __init__(
        self, inner: Drafter, tree: StaticTree, children: str, scratch: Decoder, num_layers: int | None
    ) -> None:
        super().__init__(inner)
        self._tree, self._children, self._scratch, self._num_layers = tree, children, scratch, num_layers
        self.num_short = 0

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        params, tree = one.request.params, proposal.tree
        drawn = self._children != "top" and not params.is_greedy
        assert proposal.siblings == (self._children if drawn and len(tree) else "chosen")
        assert (proposal.q is not None) == (drawn and len(tree) > 0)
        shape = self._tree.cut(depth)
        if not drawn:
            assert tuple(tree.parents.tolist()) == shape.parents
        vocab_size = self._scratch.spec.vocab_size
        for node in range(-1, len(tree)):
            nodes = tree.children[node + 1]
            if not nodes:
                continue
            path = [int(tree.tokens[each]) for each in tree.path_to(node)]
            text = [min(t, vocab_size - 1) for t in (*one.request.prompt_ids, *one.tokens, *path)]
            logits = history_logits(self._scratch, text, self._num_layers)[-1:, :V]
            tokens = tree.tokens[list(nodes)].tolist()
            if not drawn:
                order = np.argsort(-logits[0].numpy(), kind="stable")
                assert tokens == order[: len(nodes)].tolist()
                continue
            law = torch.zeros(V, dtype=torch.float64)
            law[: logits.shape[1]] = distribution(logits, [params])[0]
            for each in nodes:
                torch.testing.assert_close(proposal.q[each], law, rtol=0, atol=1e-10)
                assert law[tree.tokens[each]] > 0
            if self._children == "without_replacement":
                assert len(set(tokens)) == len(tokens)
        if drawn:
            self.num_short += len(tree) < len(shape)


@pytest.mark.parametrize(
    ("temperature", "children"),
    [(0.0, "top"), (0.0, "independent"), (0.9, "top"), (0.9, "independent"), (0.9, "without_replacement")],
)
@pytest.mark.parametrize("who", ["draft model", "narrower", "early exit"])
def test_every_node_holds_what_the_model_would_say_after_its_path(
    world: World, targets: dict[str, Decoder], who: str, children: Children, temperature: float
) -> None:
    """After rejections and accepted paths of every length, in a ragged batch."""
    target = targets["compact"]
    inner = tree_drafter(world, target, who, WIDE, children)
    spec, weights = world.spec, world.weights if who == "early exit" else perturbed(world.weights, 0.08)
    if who == "narrower":
        spec, weights = resized_vocabulary(spec, weights, V - 3)
    watched = WatchedModel(inner, WIDE, children, make_decoder(spec, weights), 1 if who == "early exit" else None)
    params = SamplingParams(temperature, top_k=2, seed=3)
    requests = [make_request(one.prompt_ids, one.request_id, params=params, max_tokens=12) for one in world.requests]
    trace = decode(target, requests, watched, batch_size=3, depth=3)
    assert watched.num_judged == len(trace.row_step)
    assert {0, 1, 2} <= set(trace.num_accepted.tolist())
    # Two tokens have mass: a third child can't be drawn without replacement.
    assert (watched.num_short > 0) == (children == "without_replacement" and temperature > 0)


def test_draws_differ_from_the_best_and_from_each_other(world: World, targets: dict[str, Decoder]) -> None:
    """Independent siblings may repeat a token; the streams of two requests and of two steps are not the same."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    for children in ("top", "independent", "without_replacement"):

        class Kept(Watched):
            def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
                if depth:
                    seen.setdefault(children, []).append(tuple(proposal.tree.tokens[:3].tolist()))  # noqa: B023

        drafter = Kept(tree_drafter(world, targets["compact"], "early exit", WIDE, children))
        requests = [
            make_request(world.requests[2].prompt_ids, f"{i}", params=SamplingParams(1.5, seed=1), max_tokens=8)
            for i in range(12)
        ]
        decode(targets["compact"], requests, drafter, batch_size=4, depth=1)
    assert len(set(seen["independent"])) > 12
    assert any(len(set(tokens)) < 3 for tokens in seen["independent"])
    assert all(len(set(tokens)) == 3 for tokens in (*seen["top"], *seen["without_replacement"]))
    assert seen["without_replacement"] != seen["top"]


def test_the_best_children_are_ranked_with_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert best_children(logits, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert best_children(logits, 1).tolist() == [[1], [0]]
    assert logits.tolist() == [[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]


class WatchedCache(Watched):
    """After every commit, the draft model's cache holds a prefix of the committed tokens, by value."""

    def __init__(self, inner: DraftModelDrafter, decoder: Decoder, scratch: Decoder) -> None:
        super().__init__(inner)
        self._decoder, self._scratch = decoder, scratch
        self.missing: Counter[int] = Counter()

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        self._decoder.kv.check_integrity()
        return super().propose(active, depths)

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        """The tokens are another test's matter."""

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        super().commit(active, num_draft, num_accepted, path)
        kv = self._decoder.kv
        length = int(kv.lengths[active.slot])
        committed = [*active.request.prompt_ids, *active.tokens[:-1]]
        if num_draft:
            # Only a leaf at the end of an accepted path was never fed.
            missing = len(committed) - length
            assert missing in (0, 1)
            self.missing[missing] += 1
        feed(self._scratch, [committed[:length]], last_only=True)
        for layer in range(self._decoder.spec.num_layers):
            found = kv.read(layer, active.slot, length)
            for mine, fresh in zip(found, self._scratch.kv.read(layer, 0, length), strict=True):
                torch.testing.assert_close(mine, fresh, rtol=0, atol=1e-10)
        empty(self._scratch)


@pytest.mark.parametrize("rollback", ["compact", "index", "realloc"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_draft_cache_holds_the_accepted_path_only(
    world: World, targets: dict[str, Decoder], noise: float, rollback: str
) -> None:
    """Fault 39: nodes that were fed and rejected leave nothing; paths through second and third children are kept."""
    drafter = tree_drafter(world, targets["compact"], "draft model", WIDE, noise=noise, rollback=rollback)
    decoder = drafter._decoder  # type: ignore[attr-defined]
    watched = WatchedCache(drafter, decoder, make_decoder(world.spec, perturbed(world.weights, noise)))
    trace = decode(targets["compact"], world.requests, watched, batch_size=3, depth=3)
    assert outputs(trace) == world.truth
    assert watched.missing[1] > 0
    assert noise == 0.0 or watched.missing[0] > 0
    assert decoder.kv.num_free_pages == decoder.kv.num_pages
    if rollback == "compact":
        assert (decoder.kv.bytes_moved > 0) == (noise > 0), "a path along first children may need a copy too"


# Greedy speculation through trees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_speculation_through_a_tree_is_autoregression(
    world: World, targets: dict[str, Decoder], name: str, depth: int
) -> None:
    """Alone and in ragged batches of two orders; the policies take turns."""
    policies = itertools.cycle(("compact", "index", "realloc"))
    for batch_size, order in ((1, 1), (3, 1), (4, -1)):
        rollback = next(policies)
        target = targets[rollback]
        requests = world.requests[::order] if batch_size > 1 else world.requests[:2]
        drafter = tree_drafter(world, target, name, DEEP, rollback=rollback)
        trace = decode(target, requests, drafter, batch_size=batch_size, depth=depth)
        assert outputs(trace) == {one.request_id: world.truth[one.request_id] for one in requests}
        assert trace.num_draft.max() == len(DEEP.cut(depth))
        assert trace.draft_depth.max() == depth
        assert trace.num_accepted.max() <= depth
        assert trace.num_accepted.sum() > 0


@pytest.mark.parametrize("rollback", ["compact", "index", "realloc"])
@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_every_policy_and_the_torch_backend_give_the_same(world: World, name: str, rollback: str) -> None:
    target = make_decoder(world.spec, world.weights, backend="torch", max_rows=96, max_context=144, rollback=rollback)
    drafter = tree_drafter(world, target, name, DEEP, rollback=rollback)
    trace = decode(target, world.requests, drafter, batch_size=3, depth=3)
    assert outputs(trace) == world.truth
    assert (trace.kv_bytes_moved.sum() > 0) == (rollback != "index")


def token_bytes(token: int) -> bytes:
    return f"<{token}>".encode()


@pytest.mark.parametrize("name", ["draft model", "early exit", "oracle"])
def test_an_output_ends_where_autoregression_ends_it(world: World, targets: dict[str, Decoder], name: str) -> None:
    """Faults 22 and 24: EOS at every place, stop strings across tokens, every length and a short context."""
    one = world.requests[2]
    truth = world.truth["r2"]
    cases: list[tuple[dict, tuple[int, ...], str]] = []
    for place in range(12):
        first = truth.index(truth[place])
        cases.append(({"eos_ids": (truth[place],)}, truth[: first + 1], "stop"))
    for place in range(1, 10):
        text = b"".join(map(token_bytes, truth))
        needle = token_bytes(truth[place - 1])[1:] + token_bytes(truth[place])[:2]
        ends = [i for i in range(len(truth)) if needle in text[: len(b"".join(map(token_bytes, truth[: i + 1])))]]
        cases.append(({"stop_strings": (needle.decode(),)}, truth[: ends[0] + 1], "stop"))
    for length in range(1, 12):
        cases.append(({"max_tokens": length}, truth[:length], "length"))
        cases.append(({"max_context": len(one.prompt_ids) + length}, truth[:length], "context"))
    requests = []
    for index, (stops, _, _) in enumerate(cases):
        options = {"max_tokens": len(truth)} | stops
        requests.append(make_request(one.prompt_ids, f"{index}", reference=truth, **options))
    for depth, batch_size, rollback in ((3, 4, "compact"), (8, 1, "index"), (5, 3, "realloc")):
        drafter = tree_drafter(world, targets[rollback], name, DEEP, noise=0.03)
        trace = decode(
            targets[rollback], requests, drafter, batch_size=batch_size, depth=depth, token_bytes=token_bytes
        )
        found = by_id(trace)
        for index, (stops, expected, reason) in enumerate(cases):
            assert found[f"{index}"].token_ids == expected, stops
            assert found[f"{index}"].finish_reason == reason, stops


def test_a_tree_that_is_a_chain_drafts_as_the_chain(world: World, targets: dict[str, Decoder]) -> None:
    """The same tokens, the same passes, the same acceptance, greedily and with the same coins."""
    for params in (SamplingParams(), SamplingParams(0.8, seed=4)):
        found = []
        for tree in (None, StaticTree.chain(5)):
            drafter = EarlyExitDrafter(targets["compact"], 1, tree, "independent")
            requests = [
                make_request(one.prompt_ids, one.request_id, params=params, max_tokens=16) for one in world.requests
            ]
            trace = decode(targets["compact"], requests, drafter, batch_size=3, depth=4)
            found.append((outputs(trace), trace.num_draft.tolist(), trace.num_accepted.tolist(), trace.flops.tolist()))
        assert found[0] == found[1]


def test_a_tree_accepts_more_than_its_first_path(world: World, targets: dict[str, Decoder]) -> None:
    lengths = []
    for tree in (StaticTree.chain(3), WIDE):
        drafter = tree_drafter(world, targets["compact"], "early exit", tree)
        trace = decode(targets["compact"], world.requests, drafter, batch_size=4, depth=3)
        found = metrics.acceptance_metrics([trace], window_only=False)
        lengths.append(found["acceptance_length"])
        assert found["draft_efficiency"] == pytest.approx(accepted_share(trace))
    assert lengths[1] > lengths[0] + 0.2


# A replay is greedy: it has no sampled case.
@pytest.mark.parametrize(
    ("name", "temperature"),
    [("draft model", 0.0), ("draft model", 0.8), ("early exit", 0.0), ("early exit", 0.8), ("forced", 0.0)],
)
def test_trees_do_not_depend_on_the_batch(
    world: World, targets: dict[str, Decoder], name: str, temperature: float
) -> None:
    params = SamplingParams(temperature, seed=2)
    requests = [replace(one, params=params) for one in world.requests]

    def rows(requests: list, batch_size: int) -> dict[str, list[tuple[int, ...]]]:
        drafter = tree_drafter(world, targets["compact"], name, DEEP, "without_replacement")
        trace = decode(targets["compact"], requests, drafter, batch_size=batch_size, depth=3)
        found: dict[str, list[tuple[int, ...]]] = {}
        for request, *row in zip(
            trace.row_request, trace.num_draft, trace.draft_depth, trace.num_accepted, trace.num_committed, strict=True
        ):
            found.setdefault(trace.requests[request].request_id, []).append(tuple(map(int, row)))
        return {name: [*found[name], tokens] for name, tokens in outputs(trace).items()}

    alone = rows(requests, 1)
    assert rows(requests, 3) == alone
    assert rows(requests[::-1], 4) == alone


def test_a_node_without_a_distribution_ends_its_requests_draft_only(
    world: World, targets: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 18 on the drafter's side: levels before the broken one stand, the other requests draft on."""
    target = targets["compact"]
    drafter = tree_drafter(world, target, "draft model", WIDE)
    decoder: Decoder = drafter._decoder  # type: ignore[attr-defined]
    inner = decoder.forward

    def forward(batch: ForwardBatch, *args: object) -> torch.Tensor:
        logits = inner(batch, *args).clone()  # type: ignore[arg-type]
        if batch.written.any() and batch.slots[-1] == 1:
            logits[-1] = float("nan")  # one row of one request, on the first level below the root
        return logits

    monkeypatch.setattr(decoder, "forward", forward)
    trace = decode(target, world.requests[:2], drafter, batch_size=2, depth=3)
    assert outputs(trace) == {name: world.truth[name] for name in ("r0", "r1")}
    last = trace.num_draft[trace.row_request == 1]
    assert set(last.tolist()) <= {0, 3}
    assert trace.num_draft[trace.row_request == 0].max() == len(WIDE)


# Costs ---------------------------------------------------------------------------------------------------------------


class _Coins:
    seed, request_id = 0, "r"


def test_passes_are_reported_as_they_were_made(world: World, targets: dict[str, Decoder]) -> None:
    """One pass a level over the nodes that have children: rows, cells before them, rows through the head."""
    target = targets["compact"]
    decoder = make_decoder(world.spec, world.weights, max_rows=48)
    texts = prompts(world.spec, [6, 9, 4])
    for drafter, layers in ((EarlyExitDrafter(target, 1, WIDE), 1), (DraftModelDrafter(decoder, V, WIDE), None)):
        active = []
        for slot, text in enumerate(texts):
            logits = target.prefill(text, slot)
            one = ActiveRequest(make_request(text, f"{slot}"), slot, generator=_Coins(), stop_state=None)  # type: ignore[arg-type]
            one.tokens.append(int(logits.argmax()))
            drafter.start(one)
            active.append(one)
        for one, depth in zip(active, (0, 3, 2), strict=True):
            target.kv.reserve(one.slot, 1 + drafter.num_nodes(depth))
        proposals = drafter.propose(active, (0, 3, 2))
        assert [len(proposal.tree) for proposal in proposals] == [0, 11, 8]
        made = drafter.take_passes()
        # Level 1 feeds all three children of the root; level 2 the two of them that have children.
        assert [one.query_lens for one in made] == [(1, 1), (3, 3), (2,)]
        assert [one.context_lens for one in made] == [(9, 4), (10, 5), (13,)]
        assert [one.num_head_rows for one in made] == [2, 6, 2]
        assert {(one.spec, one.dtype, one.num_layers) for one in made} == {(world.spec, "fp64", layers)}
        for one in active:
            drafter.finish(one)
        empty(target)


def test_the_traces_cost_is_that_of_the_passes(world: World, targets: dict[str, Decoder]) -> None:
    target = targets["compact"]
    drafter = EarlyExitDrafter(target, 1, WIDE)
    trace = decode(target, world.requests[:1], drafter, depth=3)
    spec, first = world.spec, int(trace.context_len[0])
    expected = forward_cost(spec, [12], [first], weight_dtype="fp64").total
    for rows, before in ((1, 0), (3, 1), (2, 4)):
        expected += forward_cost(
            spec, [rows], [first + before], weight_dtype="fp64", head_tokens=rows, num_layers=1
        ).total
    assert trace.flops[0] == pytest.approx(expected.flops)
    assert trace.bytes[0] == pytest.approx(expected.bytes)
    assert trace.query_tokens[0] == 12


# Replays -------------------------------------------------------------------------------------------------------------


class WatchedReplay(Watched):
    """The reference stands along the first children for as long as it is wanted, and nowhere else."""

    def judge(self, one: ActiveRequest, depth: int, proposal: Proposal) -> None:
        reference = (one.request.reference or ())[len(one.tokens) :]
        tree = proposal.tree
        assert not tree.has_equal_siblings
        assert ((tree.tokens >= 0) & (tree.tokens < V)).all()
        node, level = -1, 0
        while level < min(depth, len(reference)) and tree.children[node + 1]:
            nodes = tree.children[node + 1]
            right = [each for each in nodes if tree.tokens[each] == reference[level]]
            assert right in ([], [nodes[0]])
            if not right:
                break
            node, level = right[0], level + 1


@pytest.mark.parametrize("options", [{}, {"length": 2.4}, {"rates": (0.9, 0.6, 0.5, 0.4, 0.9, 0.5, 0.5, 0.5)}])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_replayed_tree_accepts_what_the_replayed_chain_accepts(
    world: World, targets: dict[str, Decoder], options: dict, depth: int
) -> None:
    rows = []
    for tree in (None, DEEP):
        inner = ReplayDrafter(V, **options, seed=5, tree=tree)
        drafter = WatchedReplay(inner) if tree else inner
        trace = decode(targets["index"], world.requests, drafter, batch_size=3, depth=depth)
        assert outputs(trace) == world.truth
        rows.append((trace.num_accepted.tolist(), trace.draft_depth.tolist()))
        if "length" in options:
            assert set(trace.num_accepted[trace.draft_depth == depth].tolist()) <= {1, 2}
    assert rows[0] == rows[1]
    assert max(rows[0][0]) >= min(depth, 2)


def test_a_replay_needs_first_children_down_to_the_last_level_and_room_for_siblings() -> None:
    with pytest.raises(InputError, match="the first children end at level 1 of 2"):
        ReplayDrafter(V, tree=StaticTree.of([[0], [1], [1, 0]]))
    wide = StaticTree.of([[rank] for rank in range(V)])
    with pytest.raises(InputError, match=f"{V} children of a vocabulary of {V}"):
        ReplayDrafter(V, tree=wide)
    ReplayDrafter(V + 1, tree=wide)


def test_a_tree_wider_than_the_drafters_vocabulary_is_refused(world: World, targets: dict[str, Decoder]) -> None:
    wide = StaticTree.of([[rank] for rank in range(V - 2)])
    with pytest.raises(InputError, match=f"{V - 2} children of a vocabulary of {V - 3}"):
        tree_drafter(world, targets["compact"], "narrower", wide)
    with pytest.raises(InputError, match="unknown children 'best'"):
        EarlyExitDrafter(targets["compact"], 1, WIDE, "best")  # type: ignore[arg-type]


# Sampled speculation through trees -----------------------------------------------------------------------------------


def draft_law_of(tiny: TinyLaw, who: str) -> DraftLaw:
    def law(tokens: Tokens, path: Tokens) -> np.ndarray:
        text = (*tokens, *path)
        return tiny.law("target", text, 1) if who == "early exit" else tiny.law("draft", text)

    return law


FORK = StaticTree.of([[0], [1]])
TALL = StaticTree.of([[0], [1], [1, 0]])


@pytest.mark.parametrize("children", ["top", "independent", "without_replacement"])
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        (FORK, SamplingParams(1.0, seed=0)),
        (FORK, SamplingParams(1.4, top_k=2, seed=0)),
        (TALL, SamplingParams(1.4, top_k=2, seed=0)),
    ],
    ids=["fork", "fork, filtered", "tall, filtered"],
)
@pytest.mark.parametrize("who", ["draft model", "early exit"])
def test_the_whole_engine_has_the_targets_law_through_trees(
    who: str, children: Children, shape: StaticTree, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All coins of a request, cut into the cells on which its output is constant: each cell's midpoint is run through
    the engine, must give the output the definitions say, and the volumes must add up to the target's law."""
    tiny = TinyLaw(3, params)
    length = shape.depth + 2
    paths = list(tree_coin_paths(tiny, draft_law_of(tiny, who), shape, children, length))
    ForcedCoins.paths = {str(i): path for i, path in enumerate(paths)}
    monkeypatch.setattr(decode_module, "RequestGenerator", ForcedCoins)
    monkeypatch.setattr(model_drafters, "RequestGenerator", ForcedCoins)
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16, max_rows=96)
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=params) for i in range(len(paths))]
    drafter: Drafter = EarlyExitDrafter(target, 1, shape, children)
    if who == "draft model":
        decoder = make_decoder(tiny.spec, tiny.near, num_slots=16, max_rows=96)
        drafter = DraftModelDrafter(decoder, tiny.vocab_size, shape, children)
    found = outputs(decode(target, requests, drafter, batch_size=16, depth=shape.depth))
    for i, path in enumerate(paths):
        assert found[str(i)] == path.output
    assert_volumes_are_the_law(paths, tiny.output_law(length))


@pytest.mark.parametrize(
    ("name", "levels"),
    [("eagle", [4, 8, 8, 3, 2]), ("medusa", [10, 28, 23, 2]), ("medusa-vicuna-7b", [10, 23, 23, 7])],
)
def test_published_trees_have_their_published_levels(name: str, levels: list[int]) -> None:
    tree = NAMED_TREES[name]
    assert [sum(len(path) == level for path in tree.paths) for level in range(1, tree.depth + 1)] == levels
    check_first_children(tree)
