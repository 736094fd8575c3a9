"""What the engine holds between steps, leaves behind after runs and errors, and does with numbers not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_tools import (
    Weights,
    accepted_share,
    by_id,
    decode,
    feed,
    make_decoder,
    make_engine,
    make_request,
    outputs,
    perturbed,
)
from engine_world import DRAFTERS, OUTPUT, V, World, build_world

from specbench.engine.decode import Engine
from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import Decoder
from specbench.engine.sampling import SamplingParams
from specbench.errors import CapacityError, InputError


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


# ---- state between steps, requests and runs


class WatchedEngine(Engine):
    """After every step, compares the target's cache with one computed from scratch."""

    scratch: Decoder
    num_compared = 0

    def _step(self, active: list, number: int) -> object:
        step = super()._step(active, number)
        for one in active:
            tokens = [*one.request.prompt_ids, *one.tokens]
            assert_cache_holds(self.target, self.scratch, one.slot, tokens[: one.num_cached])
            self.num_compared += 1
        return step


def assert_cache_holds(decoder: Decoder, scratch: Decoder, slot: int, tokens: Sequence[int]) -> None:
    """K and V of all layers, for all of `tokens`, are those of a fresh pass over them."""
    length = len(tokens)
    assert decoder.kv.lengths[slot] == length
    if not length:
        return
    feed(scratch, [tokens], last_only=True)
    for layer in range(decoder.spec.num_layers):
        for found, expected in zip(
            decoder.kv.read(layer, slot, length), scratch.kv.read(layer, 0, length), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    scratch.kv.close(0)


@pytest.mark.parametrize("name", ["draft model, near", "early exit", "ngram, vllm", "oracle"])
def test_the_cache_holds_just_the_committed_tokens_after_every_step(world: World, name: str) -> None:
    """Faults 31, 34, 38: values too, not lengths alone."""
    engine = WatchedEngine(
        world.target,
        make_engine(world.target).store,
        world.drafter(name),
        batch_size=3,
        depth=4,
        check=True,
    )
    engine.scratch = make_decoder(world.spec, world.weights, max_rows=96)
    assert outputs(engine.run(world.requests)) == world.truth
    assert engine.num_compared > 30


def test_a_draft_equal_to_its_target_is_always_right(world: World) -> None:
    """Fault 31: draft = target, depth 3, 30 steps and more: every draft accepted."""
    target = make_decoder(world.spec, world.weights, max_context=160)
    for drafter in (
        DraftModelDrafter(make_decoder(world.spec, world.weights, max_context=160), V),
        EarlyExitDrafter(target, world.spec.num_layers),
    ):
        trace = decode(target, [make_request(world.requests[0].prompt_ids, max_tokens=122)], drafter, depth=3)
        assert len(trace.step_s) >= 30
        assert accepted_share(trace) == 1.0
        assert set(trace.num_draft[:-1].tolist()) == {3}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_run_leaves_nothing_behind_for_the_next(world: World, name: str) -> None:
    """Fault 56: run A then run B on one engine drafts and accepts in B just what B alone does."""
    first, second = world.requests[:4], world.requests[3:]
    engine = make_engine(world.target, world.drafter(name), batch_size=2, depth=4)
    engine.run(first)
    after = engine.run(second)
    alone = decode(world.target, second, world.drafter(name), batch_size=2, depth=4)
    for field_name in ("num_draft", "num_accepted", "num_committed", "context_len", "flops", "query_tokens"):
        assert np.array_equal(getattr(after, field_name), getattr(alone, field_name)), field_name
    assert outputs(after) == outputs(alone)


class Breaks(DraftModelDrafter):
    """Raises in its second step."""

    steps = 0

    def propose(self, active: Sequence, depths: Sequence[int]) -> list:
        self.steps += 1
        if self.steps == 2:
            super().propose(active, [1] * len(active))
            raise RuntimeError("broken in step 2")
        return super().propose(active, depths)


def test_an_error_in_a_step_leaves_the_engine_clean(world: World) -> None:
    """Fault 32: drafts of 3, then an exception in step 2; the next run finds no slot, page or pass of the first."""
    decoder = make_decoder(world.spec, world.weights)
    engine = make_engine(world.target, Breaks(decoder, V), batch_size=3, depth=3)
    with pytest.raises(RuntimeError, match="broken in step 2"):
        engine.run(world.requests)
    for one in (world.target, decoder):
        assert one.kv.num_free_pages == one.kv.num_pages
        one.kv.check_integrity()
    again = engine.run(world.requests[3:])
    alone = decode(world.target, world.requests[3:], DraftModelDrafter(decoder, V), batch_size=3, depth=3)
    assert outputs(again) == outputs(alone)
    assert np.array_equal(again.flops, alone.flops)


def test_too_few_pages_end_the_run_and_nothing_else(world: World) -> None:
    target = make_decoder(world.spec, world.weights, num_pages=5, num_slots=3)
    engine = make_engine(target, EarlyExitDrafter(target, 1), batch_size=3)
    with pytest.raises(CapacityError, match="free pages"):
        engine.run(world.requests)
    assert target.kv.num_free_pages == 5
    target.kv.check_integrity()
    assert outputs(engine.run(world.requests[:1])) == {"r0": world.truth["r0"]}


def test_a_prompt_longer_than_the_cache_ends_the_run_and_nothing_else(world: World) -> None:
    engine = make_engine(world.target, EarlyExitDrafter(world.target, 1), batch_size=2)
    with pytest.raises(CapacityError, match="tokens of context"):
        engine.run([world.requests[1], make_request([1] * 200)])
    assert world.target.kv.num_free_pages == world.target.kv.num_pages
    assert outputs(engine.run(world.requests[:1])) == {"r0": world.truth["r0"]}


def test_requests_that_can_not_run_are_refused(world: World) -> None:
    with pytest.raises(InputError, match="prompt of one token or more"):
        decode(world.target, [make_request([])])
    with pytest.raises(InputError, match="leaves no room"):
        decode(world.target, [make_request([1, 2, 3], max_context=3)])
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        decode(world.target, [make_request([1, 2, 3], stop_strings=("a",))])
    assert world.target.kv.num_free_pages == world.target.kv.num_pages


# ---- faults put in on purpose must show


def test_a_wiped_cache_shows_in_the_output(world: World) -> None:
    """Fault 38: a rollback that wipes the history keeps every count right; only the tokens tell."""

    class Wipes(NgramDrafter):
        def commit(self, active, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
            super().commit(active, num_draft, num_accepted, path)
            pages = world.target.kv.block_table[active.slot, :1]
            world.target.kv.v_pool[:, torch.from_numpy(pages)] = 0

    trace = decode(world.target, world.requests[:3], Wipes(3, 1, "vllm", ()))
    assert all(len(one.token_ids) == OUTPUT for one in trace.requests)
    assert all(one.token_ids != world.truth[one.request_id] for one in trace.requests)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_commit_off_by_one_shows(world: World, monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    target = make_decoder(world.spec, world.weights)
    commit = PagedKVCache.commit

    def wrong(kv: PagedKVCache, slot: int, num_tokens: int) -> None:
        commit(kv, slot, max(0, num_tokens + change) if kv is target.kv and num_tokens <= 4 else num_tokens)

    monkeypatch.setattr(PagedKVCache, "commit", wrong)
    with pytest.raises(AssertionError, match="differ in length"):
        make_engine(target, world.drafter("oracle"), depth=3).run(world.requests[:1])


@pytest.mark.parametrize("name", ["draft model, near", "early exit"])
def test_a_draft_cache_that_keeps_rejected_tokens_shows_in_acceptance(world: World, name: str) -> None:
    """Fault 39: the output stays right whatever the drafter holds, so acceptance is what must be watched."""

    class KeepsAll(DraftModelDrafter):
        def commit(self, active, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
            """Rolls nothing back."""

        def _first_input(self, active) -> list[int]:
            return [active.pending]

    class Late(EarlyExitDrafter):
        def _context(self, active) -> int:
            return super()._context(active) - 1

    right = decode(world.target, world.requests, world.drafter(name), batch_size=3, depth=3)
    decoder = make_decoder(world.spec, perturbed(world.weights, 0.08), max_context=512)
    wrong = KeepsAll(decoder, V) if name.startswith("draft") else Late(world.target, 1)
    if isinstance(wrong, Late):
        # It writes over the last committed token's K and V in the target's own cache: that the output shows.
        trace = make_engine(world.target, wrong, batch_size=3, depth=3).run(world.requests)
        assert outputs(trace) != world.truth
        return
    trace = decode(world.target, world.requests, wrong, batch_size=3, depth=3)
    assert outputs(trace) == world.truth
    assert accepted_share(trace) < 0.7 * accepted_share(right)


# ---- numbers that are not finite


def broken_weights(world: World, token: int) -> Weights:
    weights = dict(world.weights)
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"].clone()
    weights["embed_tokens.weight"][token] = float("nan")
    return weights


class Poisoned(Engine):
    """Before step `at`, one request's first cached value turns into NaN, as an overflow would leave it."""

    victim = "r1"
    at = 3

    def _step(self, active: list, number: int) -> object:
        if number == self.at:
            slot = next(one.slot for one in active if one.request.request_id == self.victim)
            self.target.kv.v_pool[0, self.target.kv.block_table[slot, 0], :, 0] = float("nan")
        return super()._step(active, number)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", [None, "ngram, vllm", "draft model, near", "early exit"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_nan_logits_fail_one_request_alone(world: World, name: str | None, temperature: float, backend: str) -> None:
    """Fault 18: one request's cache breaks in step 3; it fails there by name, and the others do not notice."""
    target = make_decoder(world.spec, world.weights, backend=backend)

    def drafter() -> Drafter | None:
        if name == "early exit":
            return EarlyExitDrafter(target, 1)
        return world.drafter(name) if name else None

    params = SamplingParams(temperature, seed=4)
    requests = [
        make_request(one.prompt_ids, one.request_id, params=params, max_tokens=20) for one in world.requests[:5]
    ]
    right = outputs(decode(target, requests, drafter(), batch_size=3, depth=2, want_logprobs=True))
    store = make_engine(target).store
    engine = Poisoned(target, store, drafter(), batch_size=3, depth=2, check=True, want_logprobs=True)
    trace = engine.run(requests)
    found = by_id(trace)
    bad = found.pop("r1")
    assert {label: one.token_ids for label, one in found.items()} == {k: v for k, v in right.items() if k != "r1"}
    assert all(one.error is None for one in found.values())
    assert bad.finish_reason == "failed"
    assert bad.token_ids == right["r1"][: len(bad.token_ids)]
    assert 4 <= len(bad.token_ids) < 20
    assert len(bad.logprobs) == len(bad.token_ids)
    assert "request r1 in step 3" in str(bad.error)
    assert "row 0" in str(bad.error)
    assert "no distribution" in str(bad.error)
    assert not np.any((trace.row_request == 1) & (trace.row_step >= 3))
    assert target.kv.num_free_pages == target.kv.num_pages


def test_a_prompt_whose_logits_are_nan_fails_before_its_first_step(world: World) -> None:
    target = make_decoder(world.spec, broken_weights(world, 9))
    requests = [make_request((3, 9, 4), "bad"), make_request((3, 4), "good", max_tokens=2)]
    for drafter in (None, world.drafter("draft model, near")):
        found = by_id(decode(target, requests, drafter, batch_size=2))
        assert (found["bad"].finish_reason, found["bad"].token_ids) == ("failed", ())
        assert "row 0 of request bad" in str(found["bad"].error)
        assert found["good"].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_in_the_drafter_ends_that_draft_alone(world: World, temperature: float) -> None:
    """A draft model that overflows on one request drafts nothing for it: its output is the target's, unaided, and its
    neighbours are drafted for as before."""
    broken = make_decoder(world.spec, broken_weights(world, 9))
    whole = make_decoder(world.spec, world.weights)
    params = SamplingParams(temperature, seed=1)
    texts = {"bad": (3, 9, 4), "good": (3, 1, 4, 1)}
    requests = [make_request(text, label, params=params, max_tokens=7) for label, text in texts.items()]
    trace = decode(world.target, requests, DraftModelDrafter(broken, V), batch_size=2, depth=2)
    healthy = decode(world.target, requests, DraftModelDrafter(whole, V), batch_size=2, depth=2)
    assert not trace.num_draft[trace.row_request == 0].any()
    assert outputs(trace)["bad"] == outputs(decode(world.target, requests[:1]))["bad"]
    met = 9 in outputs(healthy)["good"]
    assert met or outputs(trace)["good"] == outputs(healthy)["good"]
    assert trace.num_draft[trace.row_request == 1][0] >= 1
    assert {one.finish_reason for one in trace.requests} == {"length"}
