"""Drafts of heads against the literal restatement, in every step of real generations; and outputs equal to AR."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import (
    Weights,
    decode,
    greedy_from_scratch,
    make_decoder,
    make_request,
    outputs,
    prompts,
    wide_weights,
)
from head_world import LiteralTarget, head_spec, head_weights, literal_medusa, literal_path, make_head, tiny_target_spec

from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.head import HeadDrafter, MedusaDrafter
from specbench.engine.drafters.levels import DynamicShape
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.spec import FINAL, HeadSpec
from specbench.engine.models.decoder import Decoder
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal
from specbench.errors import InputError

FORK = StaticTree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 1, 1]])
OUTPUT = 10
TARGET = tiny_target_spec()

VARIANTS: dict[str, HeadSpec] = {
    "eagle": head_spec("eagle", TARGET),
    "eagle, bias, reduced vocabulary, two layers": head_spec(
        "eagle", TARGET, layer={"num_layers": 2, "vocab_size": 13, "qkv_bias": True}, fc_bias=True
    ),
    "eagle, own embedding and head": head_spec("eagle", TARGET, own_embedding=True, own_head=True),
    "eagle3": head_spec("eagle3", TARGET),
    "eagle3, reduced vocabulary": head_spec("eagle3", TARGET, layer={"vocab_size": 17}),
    "eagle3, norm before residual, fed back after the norm": head_spec(
        "eagle3", TARGET, norm_before_residual=True, recycle="post_norm"
    ),
    "eagle3, one norm before fc": head_spec("eagle3", TARGET, norm_before_fc=True, fc_bias=True),
    "eagle3, a norm for each state, two layers": head_spec("eagle3", TARGET, fc_norms=True, layer={"num_layers": 2}),
    "eagle3, one final state": head_spec("eagle3", TARGET, states=(FINAL,), uses_fc=False),
    "mtp": head_spec("mtp", TARGET),
    "mtp, before the norm, q/k norms": head_spec("mtp", TARGET, recycle="pre_norm", layer={"qk_norm": True}),
    "mtp, reduced vocabulary": head_spec("mtp", TARGET, layer={"vocab_size": 11}),
    "medusa": head_spec("medusa", TARGET),
    "medusa, own heads, two blocks": head_spec("medusa", TARGET, num_blocks=2, own_head=True),
    "medusa, reduced vocabulary": head_spec("medusa", TARGET, layer={"vocab_size": 19}),
}
RECURRENT = [name for name in VARIANTS if not name.startswith("medusa")]
SHAPES: dict[str, StaticTree | DynamicShape | None] = {"chain": None, "fork": FORK, "dynamic": DynamicShape(3, 7)}


@cache
def target_weights() -> Weights:
    return wide_weights(TARGET, seed=5, gain=2.0)


@cache
def literal_target() -> LiteralTarget:
    return LiteralTarget(TARGET, target_weights())


@cache
def variant_weights(name: str) -> Weights:
    return head_weights(VARIANTS[name])


@cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    scratch = make_decoder(TARGET, target_weights(), backend="torch", max_rows=80)
    return greedy_from_scratch(scratch, prompt, OUTPUT)


def the_drafter(name: str, target: Decoder, shape: Any = None, children: Any = None, **options: Any) -> Drafter:
    head = make_head(VARIANTS[name], variant_weights(name), target, **options)
    if VARIANTS[name].kind == "medusa":
        return MedusaDrafter(head, shape, children)
    return HeadDrafter(head, shape, children)


@cache
def literal_law(name: str, tokens: tuple[int, ...], drafted: tuple[int, ...]) -> torch.Tensor:
    """The draft's law [V_target] after `drafted`, with `tokens` committed: softmax at temperature 1."""
    spec, weights = VARIANTS[name], variant_weights(name)
    if spec.kind == "medusa":
        logits = literal_medusa(spec, weights, literal_target(), tokens, len(drafted))
    else:
        logits = literal_path(spec, weights, literal_target(), tokens, drafted)
    law = torch.zeros(spec.target_vocab_size, dtype=torch.float64)
    law[weights["draft_ids"] if spec.reduced_vocabulary else slice(None)] = logits.softmax(dim=-1)
    return law


@dataclass
class Watched:
    """A drafter whose every proposal is handed to `look` with the committed tokens."""

    inner: Drafter
    look: Callable[[tuple[int, ...], int, Proposal], None]
    seen: int = 0

    def __post_init__(self) -> None:
        self.synthetic, self.capture = self.inner.synthetic, self.inner.capture
        for name in ("start", "commit", "finish", "take_passes", "num_nodes"):
            setattr(self, name, getattr(self.inner, name))

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        proposals = self.inner.propose(active, depths)
        for one, depth, proposal in zip(active, depths, proposals, strict=True):
            self.look((*one.request.prompt_ids, *one.tokens), depth, proposal)
            self.seen += len(proposal.tree)
        return proposals


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node's parent."""
    paths: list[tuple[int, ...]] = []
    for parent in tree.parents.tolist():
        paths.append(() if parent < 0 else (*paths[parent], int(tree.tokens[parent])))
    return paths


TEXTS = prompts(TARGET, (6, 1, 2, 19))


def watched_run(name: str, look: Any, shape: Any, params: SamplingParams, backend: str = "cpu", **options: Any) -> Any:
    target = make_decoder(TARGET, target_weights(), backend=backend)
    drafter = Watched(the_drafter(name, target, shape, options.pop("children", None)), look)
    requests = [make_request(text, f"r{i}", max_tokens=OUTPUT, params=params) for i, text in enumerate(TEXTS)]
    trace = decode(target, requests, drafter, batch_size=3, **{"depth": 3, **options})  # type: ignore[arg-type]
    assert drafter.seen > 40
    return trace


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_chain_is_drawn_from_the_literal_law_in_every_step(name: str, backend: str) -> None:
    """Ragged batches, prompts of one token, refilled slots, rejected drafts: q is the restatement's, to 1e-9."""

    def look(tokens: tuple[int, ...], depth: int, proposal: Proposal) -> None:
        if not depth:
            return
        assert proposal.q is not None
        for path, law in zip(paths_of(proposal.tree), proposal.q, strict=True):
            torch.testing.assert_close(law, literal_law(name, tokens, path), rtol=1e-9, atol=1e-12)

    watched_run(name, look, None, SamplingParams(temperature=1.0, seed=7), backend)


@pytest.mark.parametrize("name", ["eagle", "eagle3, reduced vocabulary", "mtp", "medusa"])
def test_a_static_trees_nodes_are_the_best_of_the_literal_law(name: str) -> None:
    def look(tokens: tuple[int, ...], depth: int, proposal: Proposal) -> None:
        shape = FORK.cut(depth)
        assert proposal.tree.parents.tolist() == list(shape.parents)
        for path, token, ranks in zip(paths_of(proposal.tree), proposal.tree.tokens, shape.paths, strict=True):
            order = literal_law(name, tokens, path).argsort(descending=True, stable=True)
            assert token == order[ranks[-1]]

    watched_run(name, look, FORK, SamplingParams())


def literal_dynamic(name: str, tokens: tuple[int, ...], depth: int, k: int, count: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree as a set of token paths, by its published rule, from log-probabilities of the literal law."""
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    named: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        children = []
        for score, path in level:
            law = literal_law(name, tokens, path).log()
            for token in law.argsort(descending=True)[:k].tolist():
                children.append((score + float(law[token]), (*path, token)))
        named += children
        level = sorted(children, key=lambda child: -child[0])[:k]
    return {path for _, path in sorted(named, key=lambda child: -child[0])[:count]}


@pytest.mark.parametrize("name", ["eagle", "eagle3, reduced vocabulary", "mtp, before the norm, q/k norms"])
def test_a_dynamic_tree_is_the_published_rules(name: str) -> None:
    def look(tokens: tuple[int, ...], depth: int, proposal: Proposal) -> None:
        tree = proposal.tree
        paths = {(*path, int(token)) for path, token in zip(paths_of(tree), tree.tokens, strict=True)}
        assert len(paths) == len(tree)
        assert paths == (literal_dynamic(name, tokens, depth, 3, 7) if depth else set())

    watched_run(name, look, DynamicShape(3, 7), SamplingParams())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in ("eagle", "eagle3, reduced vocabulary", "mtp") for shape in SHAPES]
    + [("medusa", "chain"), ("medusa", "fork")],  # its trees are static
)
def test_greedy_outputs_are_those_of_ar(name: str, shape: str, backend: str) -> None:
    target = make_decoder(TARGET, target_weights(), backend=backend)
    requests = [make_request(text, f"r{i}", max_tokens=OUTPUT) for i, text in enumerate(TEXTS)]
    for batch_size in (1, 3):
        drafter = the_drafter(name, target, SHAPES[shape])
        found = outputs(decode(target, requests, drafter, batch_size=batch_size, depth=3))
        assert found == {f"r{i}": truth(text) for i, text in enumerate(TEXTS)}


@pytest.mark.parametrize("name", ["eagle", "mtp", "medusa"])
def test_an_end_of_text_inside_a_path_ends_the_request(name: str) -> None:
    """Each place of the EOS in turn, so that it is drafted, emitted, and stands in the middle of what was accepted."""
    target = make_decoder(TARGET, target_weights())
    text = TEXTS[0]
    for place in range(1, OUTPUT):
        eos = truth(text)[place]
        request = make_request(text, "r0", max_tokens=OUTPUT, eos_ids=(eos,))
        found = outputs(decode(target, [request], the_drafter(name, target, FORK), depth=3))["r0"]
        assert found == truth(text)[: truth(text).index(eos) + 1]


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_a_request_drafts_the_same_in_every_batch_and_order(name: str) -> None:
    target = make_decoder(TARGET, target_weights())
    params = SamplingParams(temperature=0.8, seed=3)
    requests = [make_request(text, f"r{i}", max_tokens=9, params=params) for i, text in enumerate(TEXTS[:3])]
    alone: dict[str, tuple[int, ...]] = {}
    for request in requests:
        alone |= outputs(decode(target, [request], the_drafter(name, target, FORK, "without_replacement")))
    for order in itertools.permutations(requests):
        drafter = the_drafter(name, target, FORK, "without_replacement")
        assert outputs(decode(target, order, drafter, batch_size=3)) == alone


@pytest.mark.parametrize("num_requests", [1, 3])
def test_steps_without_a_draft_leave_pairs_for_the_next_one(num_requests: int) -> None:
    """Depth 0 for a while, as a throttle would have it: no state is lost, more rows than a pass holds are fed."""
    name = "eagle"
    target = make_decoder(TARGET, target_weights())
    inner = the_drafter(name, target, max_rows=6)
    checked = 0

    def look(tokens: tuple[int, ...], depth: int, proposal: Proposal) -> None:
        nonlocal checked
        for path, law in zip(paths_of(proposal.tree), proposal.q if len(proposal.tree) else (), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(law, literal_law(name, tokens, path), rtol=1e-9, atol=1e-12)
            checked += 1

    class Throttled(Watched):
        steps = 0

        def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
            self.steps += 1
            return super().propose(active, depths if self.steps % 9 == 0 else [0] * len(depths))

    params = SamplingParams(temperature=1.0, seed=1)
    requests = [make_request(TEXTS[i], f"r{i}", max_tokens=40, params=params) for i in range(num_requests)]
    decode(target, requests, Throttled(inner, look), depth=3, batch_size=num_requests)  # type: ignore[arg-type]
    assert checked >= 9 * num_requests


def test_nothing_is_drafted_beyond_the_heads_own_context() -> None:
    short = head_spec("eagle", TARGET, layer={"max_position_embeddings": 12})
    target = make_decoder(TARGET, target_weights())
    drafter = HeadDrafter(make_head(short, head_weights(short), target))
    lengths: list[tuple[int, int]] = []

    def look(tokens: tuple[int, ...], depth: int, proposal: Proposal) -> None:
        lengths.append((len(tokens), len(proposal.tree)))

    request = make_request(TEXTS[0], "r0", max_tokens=OUTPUT)
    found = outputs(decode(target, [request], Watched(drafter, look), depth=3))  # type: ignore[arg-type]
    assert found == {"r0": truth(TEXTS[0])}
    # With n tokens committed the pairs of a draft of depth d stand at positions up to n - 2 + d - 1.
    assert {drafted > 0 for length, drafted in lengths if length - 2 + 2 < 12} == {True}
    assert {drafted > 0 for length, drafted in lengths if length - 2 + 2 >= 12 and length < 20} == {False}


def test_the_cache_of_a_head_holds_true_pairs_only() -> None:
    """After a tree of 8 nodes and any verdict its length is that of the committed tokens' pairs (fault 39)."""
    target = make_decoder(TARGET, target_weights())
    head = make_head(VARIANTS["eagle"], variant_weights("eagle"), target)
    drafter = HeadDrafter(head, FORK)
    found: list[int] = []

    def look(tokens: tuple[int, ...], depth: int, proposal: Proposal) -> None:
        found.append(int(head.kv.lengths[0]) - (len(tokens) - 1))

    decode(target, [make_request(TEXTS[3], max_tokens=OUTPUT)], Watched(drafter, look), depth=3)  # type: ignore[arg-type]
    # While it drafts, the pairs of the last verdict are fed but not committed: one to depth + 1 of them.
    assert set(found) <= {-1, -2, -3, -4}
    assert head.kv.num_free_pages == head.kv.num_pages


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_hidden_size": 48}, "hidden size 48"),
        ({"target_vocab_size": 30}, "vocabulary 30"),
        ({"states": (0, 1, 4)}, "layer 4"),
    ],
)
def test_a_head_for_another_target_is_refused(changes: dict[str, Any], words: str) -> None:
    spec = head_spec("eagle3", TARGET, **changes)
    target = make_decoder(TARGET, target_weights())
    with pytest.raises(InputError, match=words):
        make_head(spec, head_weights(spec), target)


def test_drafts_are_counted_as_passes_with_their_cost() -> None:
    """One pass of true pairs and one a further level; a pass reads all of the head's weights and the unembedding."""
    target = make_decoder(TARGET, target_weights())
    for name in ("eagle", "eagle3, reduced vocabulary", "mtp", "medusa"):
        spec, drafter = VARIANTS[name], the_drafter(name, target)
        trace = decode(target, [make_request(TEXTS[0], max_tokens=4)], drafter, depth=2)
        drafter = the_drafter(name, target)
        cost = []
        inner = drafter.take_passes

        def taken(inner: Any = inner, cost: Any = cost) -> Any:
            passes = inner()
            cost.append([drafted.cost().bytes for drafted in passes])
            return passes

        drafter.take_passes = taken  # type: ignore[method-assign]
        decode(target, [make_request(TEXTS[0], max_tokens=4)], drafter, depth=2)
        assert next(len(step) for step in cost if step) == (1 if spec.kind == "medusa" else 2)
        small = sum(np.prod(t.shape) for n, t in variant_weights(name).items() if "norm" in n or n.endswith("bias"))
        assert abs(cost[0][0] - (spec.weight_bytes(8) - 8 * small)) < 0.2 * cost[0][0]
        assert trace.flops.sum() > 0
