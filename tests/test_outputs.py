"""The output check: lengths count, a cut output is a beginning, rounding is told from a fault; fault rows B
29, C 38."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_tools import one_case, one_thread, tiny_target, wide
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.bench import outputs
from specbench.bench.outputs import NEAR_TIE, OutputCheck, compare_outputs, first_difference, logits_after
from specbench.bench.target import Target
from specbench.engine.request import Request
from specbench.engine.sampling import SamplingParams
from specbench.engine.stops import StopRules
from specbench.engine.trace import RequestTrace

TOKENS = st.lists(st.integers(0, 3), max_size=6)
EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}


@given(TOKENS, TOKENS, st.booleans())
@settings(deadline=None)
def test_first_difference_is_none_only_for_equal_outputs_or_a_beginning(
    ar: list[int], spec: list[int], cut: bool
) -> None:
    at = first_difference(ar, spec, spec_cut=cut)
    same = spec == ar or (cut and spec == ar[: len(spec)])
    assert (at is None) == same
    if at is not None:
        assert ar[:at] == spec[:at]
        assert ar[at : at + 1] != spec[at : at + 1]


def output(name: str, tokens: Sequence[int], reason: str = "length", error: str | None = None) -> RequestTrace:
    return RequestTrace(name, "c", 3, tuple(tokens), reason, 0.0, error=error)


def request(name: str) -> Request:
    return Request(name, "c", (1, 2, 3), SamplingParams(), StopRules(max_tokens=8))


def trace(*done: RequestTrace) -> Any:
    return SimpleNamespace(requests=done)


def target(dtype: str = "bf16") -> Any:
    return SimpleNamespace(decoder=SimpleNamespace(dtype=dtype))


def check(ar: Sequence[RequestTrace], spec: Sequence[RequestTrace], dtype: str = "bf16") -> OutputCheck:
    found = OutputCheck()
    names = dict.fromkeys(one.request_id for one in (*ar, *spec))
    compare_outputs(found, target(dtype), [request(name) for name in names], trace(*ar), trace(*spec))
    return found


def with_logits(monkeypatch: pytest.MonkeyPatch, rest: float = -5.0, **values: float) -> list[tuple[int, ...]]:
    """The target's logits are these wherever asked; returns the texts it is asked about."""
    asked: list[tuple[int, ...]] = []

    def logits(target: object, ids: tuple[int, ...]) -> torch.Tensor:
        asked.append(ids)
        out = torch.full((16,), rest, dtype=torch.float64)
        for name, value in values.items():
            out[int(name.removeprefix("t"))] = value
        return out

    monkeypatch.setattr(outputs, "logits_after", logits)
    return asked


def test_equal_outputs_are_identical() -> None:
    found = check([output("a", [4, 5]), output("b", [6])], [output("b", [6]), output("a", [4, 5])])
    assert (found.verdict, found.num_compared, found.notes) == ("identical", 2, [])


def test_nothing_compared_yet_is_no_verdict() -> None:
    assert OutputCheck().verdict is None


@pytest.mark.parametrize(("ar", "spec"), [([4, 5, 6], [4, 5]), ([4, 5], [4, 5, 6]), ([4], [])])
def test_lengths_are_compared_too(ar: list[int], spec: list[int]) -> None:
    """A truncated output passes a comparison by zip."""
    found = check([output("a", ar)], [output("a", spec)])
    assert found.verdict == "diverged"
    expected = f"request a parts from AR at token {min(len(ar), len(spec))}: {len(spec)} tokens where AR has {len(ar)}"
    assert found.reason == expected


def test_a_filler_that_was_cut_need_only_be_a_beginning() -> None:
    whole = [output("a", [4, 5, 6]), output("b", [7, 8])]
    assert check(whole, [*whole, output("a", [4, 5], "cut")]).verdict == "identical"
    assert check(whole, [*whole, output("a", [4, 5, 6, 7], "cut")]).verdict == "diverged"


def test_an_output_is_never_compared_with_one_that_was_cut_or_failed() -> None:
    ar = [output("a", [4, 5, 6]), output("a", [4], "cut"), output("b", [9], "failed", "NaN")]
    found = check(ar, [output("a", [4, 5, 6]), output("b", [7, 8])])
    assert (found.verdict, found.num_compared) == ("identical", 1)


@pytest.mark.parametrize("spec", [[], [output("a", [4], "cut")]])
def test_a_block_in_which_nothing_could_be_compared_is_not_identical(spec: list[RequestTrace]) -> None:
    found = check([output("a", [4, 5])], spec)
    assert found.verdict == "diverged"
    assert found.reason == "no request ended in both arms, so outputs could not be compared"


@pytest.mark.parametrize("dtype", list(NEAR_TIE))
def test_a_gap_that_rounding_explains_is_a_near_tie_and_ten_times_that_is_a_fault(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit goes with the size of the logits: flat logits are no excuse."""
    for size in (20.0, 0.1):
        for share, expected in ((0.9, "near_tie"), (10.0, "diverged")):
            gap = share * NEAR_TIE[dtype] * size
            with_logits(monkeypatch, rest=0.0, t5=size, t7=size - gap)
            found = check([output("a", [4, 5, 6])], [output("a", [4, 7, 8])], dtype)
            assert found.verdict == expected, (size, share)
    assert EPSILON[dtype] < NEAR_TIE[dtype] < 1024 * EPSILON[dtype], "some units in the last place"


def test_fault_29_a_gap_of_1e_7_in_bf16_is_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_logits(monkeypatch, t5=20.0, t7=20.0 - 1e-7)
    found = check([output("a", [4, 5, 6])], [output("a", [4, 7, 8])])
    assert found.verdict == "near_tie"
    assert asked == [(1, 2, 3, 4)], "asked after the common beginning"
    (note,) = found.notes
    assert note == (
        "near tie: request a parts from AR at token 1: AR 5, here 7; their logits are 0 and 1e-07 below the best, "
        "and rounding in bf16 explains 0.25"
    )


def test_three_tokens_may_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    with_logits(monkeypatch, t5=20.0, t7=19.99, t3=20.01)
    assert check([output("a", [5])], [output("a", [7])]).verdict == "near_tie"


@pytest.mark.parametrize(("ar", "spec"), [(5, 3), (3, 5)])
def test_a_token_far_from_the_best_is_a_fault_whichever_arm_took_it(
    ar: int, spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two logits tie, and one arm took a third token: nothing excuses that, in the AR arm neither."""
    with_logits(monkeypatch, t5=20.0, t7=20.0, t3=12.0)
    found = check([output("a", [ar])], [output("a", [spec])])
    assert found.verdict == "diverged"
    assert "8 below the best" in (found.reason or "") or "8 and 0 below" in (found.reason or "")


def test_logits_that_are_no_numbers_excuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_logits(monkeypatch, t5=float("nan"))
    assert check([output("a", [5])], [output("a", [7])]).verdict == "diverged"


def test_a_fault_outweighs_near_ties_and_the_first_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_logits(monkeypatch, t5=20.0, t7=20.0, t3=0.0)
    ar = [output(name, [5, 4]) for name in "abc"]
    found = check(ar, [output("a", [7, 4]), output("b", [3, 4]), output("c", [5])])
    assert (found.verdict, found.num_near_ties, found.num_compared) == ("diverged", 1, 3)
    assert (found.reason or "").startswith("request b parts")


# ---- The pass that judges


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    wide(monkeypatch)
    with one_thread():
        case = one_case(batch_size=3)
        loaded = tiny_target(case)
        loaded.bind(case, loaded.prompts(case.workload))
        yield loaded


def test_logits_after_is_a_pass_over_the_whole_text_and_leaves_no_trace(tiny: Target) -> None:
    """It takes an empty slot, gives its pages back, and reads nothing that other slots hold."""
    ids = tuple(int(token) for token in torch.randint(256, (30,), generator=torch.Generator().manual_seed(3)))
    alone = logits_after(tiny, ids).clone()
    tiny.decoder.prefill(ids[::-1], 0)
    held = tiny.decoder.kv.lengths.copy()
    assert torch.equal(logits_after(tiny, ids), alone)
    assert (tiny.decoder.kv.lengths == held).all()
    tiny.decoder.kv.check_integrity()
    assert not torch.allclose(logits_after(tiny, (ids[0] ^ 1, *ids[1:])), alone, atol=1e-2), "history matters"


def test_a_failing_pass_gives_its_pages_back(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(tiny.decoder, "forward", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        logits_after(tiny, (1, 2, 3))
    assert not tiny.decoder.kv.lengths.any()
    tiny.decoder.kv.check_integrity()
