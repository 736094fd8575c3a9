"""Speculative greedy output is AR output, token for token: every drafter, depth, batch, order and stop.

All in float64 with the cache checked after every step. The truth comes from no engine at all: the whole text is run
again for every token (`greedy_from_scratch`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from engine_tools import (
    CountedForward,
    ScriptedDrafter,
    accepted_share,
    by_id,
    decode,
    make_decoder,
    make_request,
    outputs,
)
from engine_world import DRAFTERS, LENGTHS, OUTPUT, V, World, build_world
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engine import decode as decode_module
from specbench.engine.decode import with_reference
from specbench.engine.request import Request


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return {backend: build_world(backend) for backend in ("cpu", "torch")}


@pytest.fixture(scope="module")
def world(worlds: dict[str, World]) -> World:
    return worlds["cpu"]


def test_the_truth_has_no_pattern_to_hide_behind(world: World) -> None:
    for tokens in world.truth.values():
        assert len(set(tokens)) >= 6
    followers = {(a, b) for tokens in world.truth.values() for a, b in itertools.pairwise(tokens)}
    assert len(followers) > 2.5 * V


# ---- greedy


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_autoregression_is_the_truth(worlds: dict[str, World], backend: str) -> None:
    world = worlds[backend]
    for batch_size, order in ((1, 1), (3, -1), (4, 1)):
        trace = decode(world.target, world.requests[::order], batch_size=batch_size)
        assert outputs(trace) == world.truth
        assert not trace.num_draft.any()
        assert trace.num_committed.tolist() == [1] * len(trace.num_committed)


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_is_autoregression_token_for_token(world: World, name: str, depth: int) -> None:
    """Alone and in ragged batches of two orders."""
    for batch_size, order in ((1, 1), (3, 1), (4, -1)):
        requests = world.requests[::order] if batch_size > 1 else world.requests[:3]
        trace = decode(world.target, requests, world.drafter(name), batch_size=batch_size, depth=depth)
        assert outputs(trace) == {one.request_id: world.truth[one.request_id] for one in requests}
        assert trace.num_draft.max() == depth
        if name in ("oracle", "draft model, same") or (name == "forced length" and depth == 1):
            assert accepted_share(trace) == 1.0
        else:
            assert 0.02 < accepted_share(trace) < 0.98


@pytest.mark.parametrize("name", ["ngram, vllm", "draft model, near", "early exit", "forced length"])
def test_the_torch_backend_speculates_the_same(worlds: dict[str, World], name: str) -> None:
    world = worlds["torch"]
    trace = decode(world.target, world.requests, world.drafter(name), batch_size=3, depth=4)
    assert outputs(trace) == world.truth


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_drafts_of_mixed_lengths_keep_to_their_request(world: World, order: tuple[int, ...]) -> None:
    """Fault 44: drafts of 0, 4 and 1 tokens, half right, in all orders; fault 34 with accepts of 0, 2 and 3."""
    lengths, right = {"r0": 0, "r2": 4, "r4": 1, "r5": 4}, {"r0": 0, "r2": 2, "r4": 1, "r5": 3}
    chosen = [world.requests[(0, 2, 4)[i]] for i in order] + [world.requests[5]]

    def script(name: str, tokens: tuple[int, ...], depth: int) -> list[int]:
        draft = list(world.truth[name][len(tokens) : len(tokens) + min(depth, lengths[name])])
        return [token if i < right[name] else (token + 1) % V for i, token in enumerate(draft)]

    trace = decode(world.target, chosen, ScriptedDrafter(script), batch_size=3, depth=4)
    assert outputs(trace) == {one.request_id: world.truth[one.request_id] for one in chosen}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_drafted(world: World, data: st.DataObject) -> None:
    """Any tokens in any number from any step on: never another output, never a lost page."""
    stream = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    batch_size, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    order = data.draw(st.permutations(range(len(LENGTHS))))[: data.draw(st.integers(1, 5))]

    def script(name: str, tokens: tuple[int, ...], depth: int) -> list[int]:
        draft = np.array(world.truth[name][len(tokens) : len(tokens) + stream.integers(0, depth + 1)], dtype=np.int64)
        noise = stream.random(len(draft)) < 0.25
        return [int(t) for t in np.where(noise, stream.integers(0, V, len(draft)), draft)]

    chosen = [world.requests[i] for i in order]
    trace = decode(world.target, chosen, ScriptedDrafter(script), batch_size=batch_size, depth=depth)
    assert outputs(trace) == {one.request_id: world.truth[one.request_id] for one in chosen}


def test_fillers_keep_the_batch_full_and_are_cut(world: World) -> None:
    """All slots stay busy until the block's own requests end; a cut filler holds a beginning of its true output."""
    own = [make_request(world.requests[0].prompt_ids, "r0", max_tokens=10), *world.requests[1:3]]
    truth = {"r0": world.truth["r0"][:10], "r1": world.truth["r1"], "r2": world.truth["r2"]}

    def endless() -> Iterator[Request]:
        for i in itertools.count():
            yield make_request(own[i % 3].prompt_ids, f"filler {i}", max_tokens=OUTPUT)

    for drafter in (None, world.drafter("early exit")):
        trace = decode(world.target, own, drafter, fillers=endless(), batch_size=2, depth=3)
        found = by_id(trace)
        assert trace.in_window.all()
        assert trace.busy.tolist() == [2] * len(trace.busy)
        assert {name: found[name].token_ids for name in truth} == truth
        cut = [one for one in trace.requests if one.finish_reason == "cut"]
        assert len(cut) == 1
        for one in trace.requests[3:]:
            whole = world.truth[f"r{int(one.request_id.split()[1]) % 3}"]
            assert one.token_ids == whole[: len(one.token_ids)]
    # Without fillers the last steps run with idle slots, outside the window.
    trace = decode(world.target, own, batch_size=2)
    assert not trace.in_window.all()
    assert np.array_equal(trace.in_window, trace.busy == 2)


# ---- stops


@pytest.mark.parametrize("name", ["oracle", "draft model, same", "draft model, near", "ngram, vllm", "early exit"])
def test_eos_in_the_middle_of_a_block_ends_the_output(world: World, name: str) -> None:
    """Fault 22: AR first; declare one of its tokens EOS; the output ends with that token's first occurrence."""
    for position in (0, 1, 2, 5, 9):
        eos = world.truth["r0"][position]
        expected = world.truth["r0"][: world.truth["r0"].index(eos) + 1]
        for depth in (1, 4, 8):
            first = with_reference(
                make_request(world.requests[0].prompt_ids, "r0", max_tokens=OUTPUT, eos_ids=(eos,)), world.truth["r0"]
            )
            drafter = world.drafter(name)
            trace = decode(world.target, [first, world.requests[2]], drafter, batch_size=2, depth=depth)
            assert outputs(trace) == {"r0": expected, "r2": world.truth["r2"]}
            assert trace.requests[0].finish_reason == "stop"
            assert trace.requests[1].finish_reason == "length"


def test_third_token_is_eos_and_four_are_drafted(world: World) -> None:
    """Fault 22, the smallest case: prefill's token, then one step of 4 accepted drafts of which 2 tokens remain."""
    name = next(name for name, tokens in world.truth.items() if tokens[2] not in tokens[:2])
    request = world.requests[int(name[1:])]
    request = make_request(request.prompt_ids, max_tokens=OUTPUT, eos_ids=(world.truth[name][2],))
    trace = decode(world.target, [with_reference(request, world.truth[name])], world.drafter("oracle"), depth=4)
    assert trace.requests[0].token_ids == world.truth[name][:3]
    assert (trace.num_draft.tolist(), trace.num_accepted.tolist(), trace.num_committed.tolist()) == ([4], [4], [2])


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("depth", range(1, 9))
def test_a_block_across_the_cap_emits_just_the_cap(world: World, name: str, depth: int) -> None:
    """Fault 24: max_new 8 with every depth; no draft is verified that could not be emitted."""
    chosen = [
        make_request(one.prompt_ids, one.request_id, max_tokens=8, reference=one.reference)
        for one in world.requests[:3]
    ]
    trace = decode(world.target, chosen, world.drafter(name), batch_size=2, depth=depth)
    assert outputs(trace) == {one.request_id: world.truth[one.request_id][:8] for one in chosen}
    assert {one.finish_reason for one in trace.requests} == {"length"}
    assert trace.num_committed.sum() == 3 * 7
    assert np.array_equal(trace.num_committed, trace.num_accepted + 1)


def letters(token: int) -> bytes:
    return bytes([ord("a") + token])


@pytest.mark.parametrize("name", [None, "oracle", "draft model, near", "ngram, vllm"])
def test_stop_strings_cross_tokens_and_blocks(world: World, name: str | None) -> None:
    for request in world.requests[:4]:
        text = b"".join(letters(t) for t in world.truth[request.request_id]).decode()
        for first, length in ((3, 1), (4, 2), (7, 3), (10, 2)):
            needle = text[first : first + length]
            end = text.index(needle) + length
            asked = make_request(
                request.prompt_ids, max_tokens=OUTPUT, stop_strings=(needle, "zz"), reference=request.reference
            )
            drafter = world.drafter(name) if name else None
            trace = decode(world.target, [asked], drafter, depth=5, token_bytes=letters)
            assert trace.requests[0].token_ids == world.truth[request.request_id][:end]
            assert trace.requests[0].finish_reason == "stop"


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_the_context_limit_is_reached_and_not_crossed(world: World, name: str | None) -> None:
    """A cache with room for just the limit: drafts shrink at the end instead of overflowing."""
    target = make_decoder(world.spec, world.weights, max_context=24, num_slots=2)
    small = World(world.spec, world.weights, target, world.truth, world.requests)
    chosen = [
        make_request(
            world.requests[i].prompt_ids, f"r{i}", max_tokens=99, max_context=24, reference=world.truth[f"r{i}"]
        )
        for i in (2, 4, 6)
    ]
    for depth in (1, 3, 8):
        drafter = small.drafter(name) if name else None
        trace = decode(target, chosen, drafter, batch_size=2, depth=depth)
        for one in trace.requests:
            assert one.finish_reason == "context"
            assert one.prompt_len + len(one.token_ids) == 24
            assert one.token_ids == world.truth[one.request_id][: len(one.token_ids)]


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_one_token_needs_no_step(world: World, name: str | None) -> None:
    """max_tokens 1: prefill's token is all; no draft, no verify pass, every page back."""
    chosen = [make_request(one.prompt_ids, one.request_id, max_tokens=1) for one in world.requests]
    trace = decode(world.target, chosen, world.drafter(name) if name else None, batch_size=3)
    assert outputs(trace) == {name: tokens[:1] for name, tokens in world.truth.items()}
    assert len(trace.step_s) == len(trace.row_step) == 0
    two = [make_request(one.prompt_ids, one.request_id, max_tokens=2, reference=one.reference) for one in chosen]
    two = [with_reference(one, world.truth[one.request_id]) for one in two]
    trace = decode(world.target, two, world.drafter(name) if name else None, batch_size=3, depth=4)
    assert outputs(trace) == {name: tokens[:2] for name, tokens in world.truth.items()}
    assert not trace.num_draft.any()


# ---- what the AR arm is not


def test_the_ar_arm_has_neither_drafter_nor_verifier(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 55: k = 0 makes zero drafter and verify calls, and one pass of one token a request and step."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the AR arm called the verifier")

    monkeypatch.setattr(decode_module, "verify", refuse)
    target = make_decoder(world.spec, world.weights)
    counted = CountedForward(target)
    trace = decode(target, world.requests, None, batch_size=3, depth=0)
    assert outputs(trace) == world.truth
    steps = [call for call in counted.calls if call[1] != (0,)]
    assert len(steps) == len(trace.step_s)
    assert all(set(call[0]) == {1} for call in steps)
    assert not trace.draft_s.any() or trace.draft_s.max() < 1e-3


@pytest.mark.parametrize("name", [name for name in DRAFTERS if "length" not in name])
def test_depth_zero_inside_a_speculative_engine(world: World, name: str) -> None:
    trace = decode(world.target, world.requests, world.drafter(name), batch_size=3, depth=0)
    assert outputs(trace) == world.truth
    assert not trace.num_draft.any()
    assert trace.query_tokens.tolist() == trace.busy.tolist()
