"""Outputs end at the first event, wherever in a block it falls, and what is emitted is what is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engine.stops import StopRules, StopState
from specbench.errors import InputError

PIECES = [b"a", b"b", b"ab", b"ba", b"", "é".encode()[:1], "é".encode()[1:], b"\n"]


def piece(token: int) -> bytes:
    return PIECES[token]


def run(state: StopState, output: Sequence[int], block: int) -> tuple[list[int], str | None]:
    """Push `output` in blocks, as steps would; returns what is kept."""
    kept: list[int] = []
    for start in range(0, len(output), block):
        tokens = output[start : start + block]
        count, reason = state.push(tokens)
        kept += tokens[:count]
        if reason is not None:
            return kept, reason
        assert count == len(tokens)
    return kept, None


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("accepted", range(9))
def test_a_block_across_the_cap_emits_exactly_the_cap(k: int, accepted: int) -> None:
    state = StopState(StopRules(max_tokens=8))
    assert state.push([50]) == (1, None)
    emitted = 1
    while state.reason is None:
        count, _ = state.push(list(range(min(accepted, k) + 1)))
        emitted += count
    assert emitted == state.num_tokens == 8
    assert (state.reason, state.remaining) == ("length", 0)


@pytest.mark.parametrize("k", range(9))
def test_eos_accepted_inside_a_block_is_the_last_token(k: int) -> None:
    autoregressive = [11, 12, 13, 14, 15, 16]
    state = StopState(StopRules(max_tokens=64, eos_ids=(13,)))
    assert run(state, autoregressive, k + 1) == ([11, 12, 13], "stop")
    assert state.num_tokens == 3


def test_every_eos_id_counts_and_the_first_one_wins() -> None:
    assert StopState(StopRules(9, eos_ids=(7, 3))).push([1, 3, 7, 2]) == (2, "stop")
    assert StopState(StopRules(9, eos_ids=())).push([1, 3, 7, 2]) == (4, None)


def test_stop_goes_before_a_cap_at_the_same_token() -> None:
    assert StopState(StopRules(2, eos_ids=(5,))).push([1, 5, 6]) == (2, "stop")
    assert StopState(StopRules(2, eos_ids=(5,))).push([1, 2, 5]) == (2, "length")


def test_the_context_is_a_cap_of_its_own() -> None:
    rules = StopRules(max_tokens=10, max_context=8)
    assert StopState(rules, prompt_len=5).push([1, 2, 3, 4]) == (3, "context")
    assert StopState(StopRules(max_tokens=3, max_context=8), prompt_len=5).push([1, 2, 3, 4]) == (3, "length")
    with pytest.raises(InputError, match="prompt of 8 tokens leaves no room in a context of 8"):
        StopState(rules, prompt_len=8)
    with pytest.raises(InputError, match="leaves no room"):
        StopState(StopRules(max_tokens=1, max_context=8), prompt_len=9)


def test_remaining_bounds_the_next_draft() -> None:
    state = StopState(StopRules(max_tokens=10, max_context=8), prompt_len=4)
    assert state.remaining == 4
    state.push([1])
    assert state.remaining == 3


def test_a_stop_string_may_cross_tokens_and_characters() -> None:
    def state(*strings: str) -> StopState:
        return StopState(StopRules(99, stop_strings=strings), token_bytes=piece)

    assert state("bab").push([0, 1, 2, 0]) == (3, "stop")
    assert state("é").push([5, 6, 0]) == (2, "stop")
    assert state("aaa").push([0, 0, 4, 0, 1]) == (4, "stop")
    assert state("zz", "\n").push([0, 7, 1]) == (2, "stop")
    assert state("bb").push([1, 0, 1, 0]) == (4, None)


def test_a_stop_string_may_cross_blocks_but_not_begin_in_the_prompt() -> None:
    state = StopState(StopRules(99, stop_strings=("abab",)), prompt_len=1, token_bytes=piece)
    assert state.push([1, 2]) == (2, None)
    assert state.push([0, 1, 2, 0]) == (2, "stop")


@settings(deadline=None)
@given(
    output=st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    blocks=st.integers(1, 9),
    strings=st.lists(st.text("abé\n", min_size=1, max_size=4), max_size=3),
    eos=st.lists(st.integers(0, len(PIECES) - 1), max_size=1),
    cap=st.integers(1, 20),
)
def test_the_cut_is_the_earliest_event_whatever_the_blocks(
    output: list[int], blocks: int, strings: list[str], eos: list[int], cap: int
) -> None:
    expected: tuple[list[int], str | None] = (output, None)
    for length in range(1, len(output) + 1):
        text = b"".join(piece(token) for token in output[:length])
        if output[length - 1] in eos or any(string.encode() in text for string in strings):
            expected = (output[:length], "stop")
            break
        if length == cap:
            expected = (output[:length], "length")
            break
    state = StopState(StopRules(cap, tuple(eos), tuple(strings)), token_bytes=piece)
    assert run(state, output, blocks) == expected
    assert state.num_tokens == len(expected[0])
    assert state.reason == expected[1]


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="max_tokens 0"):
        StopRules(max_tokens=0)
    with pytest.raises(InputError, match="non-empty"):
        StopRules(max_tokens=1, stop_strings=("",))
    with pytest.raises(InputError, match="a list of"):
        StopRules(max_tokens=1, stop_strings="stop")
    with pytest.raises(InputError, match="need a tokenizer"):
        StopState(StopRules(max_tokens=1, stop_strings=("x",)))


def test_a_finished_request_takes_nothing_more() -> None:
    state = StopState(StopRules(1))
    state.push([4])
    with pytest.raises(AssertionError, match="finished"):
        state.push([5])
