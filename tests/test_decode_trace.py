"""What the engine writes down: identities of the trace, the cost of the passes really made, times, labels, logprobs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from engine_tools import (
    CountedForward,
    accepted_share,
    by_id,
    decode,
    history_logits,
    make_decoder,
    make_engine,
    make_request,
    outputs,
    perturbed,
    prompts,
)
from engine_world import DRAFTERS, LENGTHS, OUTPUT, V, World, build_world

from specbench import metrics
from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.roofline.cost import Cost, forward_cost


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_identities_of_a_trace(world: World, name: str | None) -> None:
    eos = world.truth["r2"][7]
    chosen = [
        make_request(one.prompt_ids, one.request_id, max_tokens=20 + i, reference=one.reference, eos_ids=(eos,))
        for i, one in enumerate(world.requests)
    ]
    trace = decode(world.target, chosen, world.drafter(name) if name else None, batch_size=3, depth=4)
    trace.check()
    rows, steps = len(trace.row_step), len(trace.step_s)
    assert trace.row_step.tolist() == sorted(trace.row_step.tolist())
    assert set(trace.row_step.tolist()) == set(range(steps))
    assert trace.busy.sum() == rows
    drafted = np.bincount(trace.row_step, trace.num_draft, steps)
    assert np.array_equal(trace.query_tokens, drafted + trace.busy)
    assert np.all(np.diff(trace.end_s) > 0)
    cut = 0
    for index, one in enumerate(trace.requests):
        mine = trace.row_request == index
        lengths = one.prompt_len + np.concatenate([[0], np.cumsum(trace.num_committed[mine])[:-1]])
        assert np.array_equal(trace.context_len[mine], lengths if mine.any() else [])
        assert len(one.token_ids) == 1 + trace.num_committed[mine].sum()
        cut += int((trace.num_accepted[mine] + 1 - trace.num_committed[mine]).sum())
    assert trace.num_committed.sum() == trace.num_accepted.sum() + rows - cut
    if name == "oracle":
        assert cut > 0
    found = metrics.acceptance_metrics([trace], window_only=False)
    histogram = found["accepted_histogram"]
    assert isinstance(histogram, list)
    assert sum(histogram) == found["num_drafts"] == (trace.num_draft > 0).sum()
    assert sum(i * n for i, n in enumerate(histogram)) == found["num_accepted_tokens"] == trace.num_accepted.sum()


@pytest.mark.parametrize("name", [None, "ngram, vllm", "draft model, near", "early exit"])
def test_the_cost_counts_every_pass_really_made(world: World, name: str | None) -> None:
    """Each forward call of target and drafter, written down by a wrapper, priced on its own; prefills are apart."""
    target = make_decoder(world.spec, world.weights)
    decoder = make_decoder(world.spec, perturbed(world.weights, 0.08))
    drafter: Drafter | None = None
    if name == "draft model, near":
        drafter = DraftModelDrafter(decoder, V)
    elif name == "early exit":
        drafter = EarlyExitDrafter(target, 1)
    elif name is not None:
        drafter = world.drafter(name)
    counted = [CountedForward(target), CountedForward(decoder)]
    trace = decode(target, world.requests, drafter, batch_size=3, depth=3)
    total, drafted, verifies, drafts = Cost(0.0, 0.0), Cost(0.0, 0.0), 0, 0
    for side, one in enumerate(counted):
        for lens, contexts, head_rows, num_layers in one.calls:
            if contexts == (0,):
                continue  # a prefill
            verify = side == 0 and num_layers is None
            verifies += verify
            drafts += not verify
            assert head_rows == (sum(lens) if verify else len(lens))
            options = {"weight_dtype": "fp64", "head_tokens": head_rows, "num_layers": num_layers}
            cost = forward_cost(world.spec, lens, contexts, **options).total  # type: ignore[arg-type]
            total += cost
            drafted += cost * (not verify)
    assert verifies == len(trace.step_s)
    assert drafts == 0 if name in (None, "ngram, vllm") else 2 * verifies < drafts <= 3 * verifies
    assert trace.flops.sum() == pytest.approx(total.flops, rel=1e-12)
    assert trace.bytes.sum() == pytest.approx(total.bytes, rel=1e-12)
    assert trace.draft_flops.sum() == pytest.approx(drafted.flops, rel=1e-12)
    assert trace.draft_bytes.sum() == pytest.approx(drafted.bytes, rel=1e-12)


def test_times_are_parts_of_the_step_and_hold_no_prefill(world: World) -> None:
    """A clock that ticks once a look: draft, verify and sample one tick each, two for the host, and three for the
    commit, with the rollback in its middle."""
    for drafter in (None, world.drafter("early exit")):
        ticks = itertools.count(1)
        trace = decode(
            world.target, world.requests, drafter, batch_size=2, depth=2, now=lambda ticks=ticks: float(next(ticks))
        )
        expected = {"draft_s": 1, "verify_s": 1, "sample_s": 1, "commit_s": 3, "rollback_s": 1, "host_s": 2}
        for part, ticks_of_it in expected.items():
            assert set(getattr(trace, part).tolist()) == {ticks_of_it}
        assert set(trace.step_s.tolist()) == {8}


def test_prefill_happens_once_a_prompt_and_outside_the_steps(world: World) -> None:
    target = make_decoder(world.spec, world.weights)
    counted = CountedForward(target)
    engine = make_engine(target, EarlyExitDrafter(target, 1), batch_size=2)
    again = [make_request(one.prompt_ids, f"again {one.request_id}", max_tokens=OUTPUT) for one in world.requests[:3]]
    trace = engine.run([*world.requests[:3], *again])
    prefills = [call for call in counted.calls if call[1] == (0,)]
    assert sorted(call[0][0] for call in prefills) == sorted(LENGTHS[:3])
    assert all(call[2] == 1 for call in prefills)
    found = outputs(trace)
    assert all(found[f"again r{i}"] == found[f"r{i}"] == world.truth[f"r{i}"] for i in range(3))
    expected = sum(t.nbytes for _, p in engine.store._done.values() for t in (p.kv.k, p.kv.v, p.logits))
    assert engine.store.bytes == expected > 0


def test_a_long_prompt_is_prefilled_in_passes(world: World) -> None:
    """More prompt than rows of one pass: the same output, in both the target and the draft model."""
    text = prompts(world.spec, [50], seed=9)[0]
    whole = make_decoder(world.spec, world.weights)
    expected = outputs(decode(whole, [make_request(text)]))
    target = make_decoder(world.spec, world.weights, max_rows=8)
    decoder = make_decoder(world.spec, world.weights, max_rows=7)
    trace = decode(target, [make_request(text)], DraftModelDrafter(decoder, V), depth=3)
    assert outputs(trace) == expected
    assert accepted_share(trace) == 1.0


@pytest.mark.parametrize("name", ["oracle", "draft model, near", "ngram, vllm"])
def test_logprobs_are_the_targets_and_equal_autoregression(world: World, name: str) -> None:
    """Fault 94."""
    scratch = make_decoder(world.spec, world.weights, backend="torch")
    ar = by_id(decode(world.target, world.requests[:3], batch_size=3, want_logprobs=True))
    spec = by_id(
        decode(world.target, world.requests[:3], world.drafter(name), batch_size=3, depth=3, want_logprobs=True)
    )
    for request in world.requests[:3]:
        text = (*request.prompt_ids, *world.truth[request.request_id])
        logits = history_logits(scratch, text[:-1])[len(request.prompt_ids) - 1 :]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(text[len(request.prompt_ids) :])[:, None])[:, 0]
        for found in (ar, spec):
            assert found[request.request_id].logprobs == pytest.approx(wanted.tolist(), abs=1e-9)


def test_labels_travel_with_their_requests(world: World) -> None:
    """Fault 93: two categories of two prompts in one cell."""
    chosen = [
        make_request(one.prompt_ids, one.request_id, category="qa" if i % 2 else "coding", max_tokens=9)
        for i, one in enumerate(world.requests[:4])
    ]
    trace = decode(world.target, chosen, world.drafter("early exit"), batch_size=3)
    assert [one.request_id for one in trace.requests] == ["r0", "r1", "r2", "r3"]
    assert [one.category for one in trace.requests] == ["coding", "qa", "coding", "qa"]
    assert [one.prompt_len for one in trace.requests] == list(LENGTHS[:4])
