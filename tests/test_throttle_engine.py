"""Depth chosen step by step in the engine: the target's law and tokens, caches that catch up, nothing left for the next
cell; faults E 55 and 56."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from coin_law import CoinPath, Draft, ForcedCoins, Law, TinyLaw, Tokens, cells
from engine_tools import accepted_share, decode, make_decoder, make_engine, make_request, outputs
from engine_world import DRAFTERS, V, World, build_world

from specbench.engine import decode as decode_module
from specbench.engine.drafters import levels as model_drafters
from specbench.engine.drafters.model import DraftModelDrafter
from specbench.engine.sampling import SamplingParams
from specbench.roofline.throttle import MeasuredSteps, Throttle


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


class Scripted:
    """A policy that plays a pattern of depths, over and over, and keeps what it is told."""

    def __init__(self, pattern: list[int]) -> None:
        self.pattern, self.asked, self.told = pattern, list[tuple[int, int]](), list[tuple[int, int, int]]()

    def depth(self, batch: int, context_len: int) -> int:
        self.asked.append((batch, context_len))
        return self.pattern[(len(self.asked) - 1) % len(self.pattern)]

    def observe(self, drafted: int, accepted: int, asked: int | None = None) -> None:
        assert asked is not None
        self.told.append((drafted, accepted, asked))


PATTERN = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 1, 0, 4]


def nimble() -> Throttle:
    """A throttle that changes its mind at every step."""
    return Throttle(MeasuredSteps((1.0, 1.3, 1.55, 1.9, 2.2), 3), 4, prior=0.6, weight=1.0, decay=0.7)


# ---- tokens and law


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("policy", [lambda: Scripted(PATTERN), nimble], ids=["pattern", "throttle"])
def test_greedy_tokens_are_those_of_plain_decoding(world: World, name: str, policy: Callable[[], object]) -> None:
    """Caches of 20 rows a pass, three requests: a draft behind 11 steps of none has more to read than a pass holds."""
    trace = decode(
        world.target, world.requests, world.drafter(name), batch_size=3, depth=4, policy=policy(), check=True
    )
    assert outputs(trace) == world.truth
    assert len(set(trace.step_depth.tolist())) >= 2
    assert np.all(trace.draft_depth <= trace.step_depth[trace.row_step])


def test_a_drafter_that_is_its_target_is_right_after_any_pause(world: World) -> None:
    """Were one token of the pause missing in its cache, or in the wrong cell, a draft would be refused."""
    decoder = make_decoder(world.spec, world.weights, max_rows=8)
    policy = Scripted(PATTERN)
    trace = decode(world.target, world.requests, DraftModelDrafter(decoder, V), batch_size=3, depth=4, policy=policy)
    assert outputs(trace) == world.truth
    assert trace.num_draft.sum() > 40
    assert accepted_share(trace) == 1.0


def test_steps_of_depth_zero_draft_nothing_and_cost_nothing(world: World) -> None:
    """Fault 55; what is read later is counted where it is read."""
    drafter = world.drafter("draft model, near")
    trace = decode(world.target, world.requests[:3], drafter, batch_size=3, depth=4, policy=Scripted(PATTERN))
    idle = trace.step_depth == 0
    assert idle.any()
    assert not trace.draft_flops[idle].any()
    assert (trace.query_tokens[idle] == trace.busy[idle]).all()
    always = decode(world.target, world.requests[:3], world.drafter("draft model, near"), batch_size=3, depth=3)
    paused = trace.draft_flops[(trace.step_depth == 3) & (trace.busy == 3)]
    assert paused.min() > 1.5 * np.median(always.draft_flops[always.busy == 3])


def test_the_policy_is_asked_before_the_draft_and_told_after_it(world: World) -> None:
    policy = Scripted([3])
    trace = decode(world.target, world.requests[:2], world.drafter("oracle"), batch_size=2, depth=4, policy=policy)
    assert len(policy.asked) == len(trace.step_s)
    assert policy.asked[0] == (2, (len(world.requests[0].prompt_ids) + len(world.requests[1].prompt_ids)) // 2)
    assert len(policy.told) == len(trace.row_step)
    assert [told[0] for told in policy.told] == trace.draft_depth.tolist()
    assert [told[1] for told in policy.told] == trace.num_accepted.tolist()
    assert max(trace.draft_depth) == 3, "at most what the policy says"
    capped = decode(world.target, world.requests[:2], world.drafter("oracle"), depth=2, policy=Scripted([9]))
    assert max(capped.draft_depth) == 2, "and at most the engine's own depth"


def laws_throttle() -> Throttle:
    return Throttle(MeasuredSteps((1.0, 1.3, 1.55), 1), 2, prior=0.6, weight=0.5, decay=0.6)


History = tuple[tuple[int, int, int], ...]


def depth_after(history: History) -> int:
    """What the throttle says after these steps (drafted, accepted, asked), from the beginning."""
    throttle = laws_throttle()
    for step in history:
        throttle.depth(1, 0)
        throttle.observe(*step)
    return throttle.depth(1, 0)


def adaptive_paths(target: Law, drafts: Callable[[Tokens, int], Iterator[Draft]], length: int) -> Iterator[CoinPath]:
    """Every way that `length` tokens can come about where each step's depth follows from the steps before it, written
    from the definitions alone."""

    def continued(history: History, tokens: Tokens, coins: Tokens, draft_coins: Tokens, volume: float) -> Iterator:
        if len(tokens) == length:
            yield CoinPath(coins, draft_coins, tokens, volume)
            return
        room = min(depth_after(history), length - len(tokens) - 1)
        for draft, more_draft_coins, q, share in drafts(tokens, room):
            p = [target((*tokens, *draft[:j])) for j in range(len(draft) + 1)]
            ratios = [min(1.0, p[j][x] / q[j][x]) for j, x in enumerate(draft)]
            for accepted in range(len(draft) + 1):
                judged = [ratios[j] / 2 for j in range(accepted)]
                chance = float(np.prod(ratios[:accepted]))
                law = p[accepted]
                if accepted < len(draft):
                    chance *= 1 - ratios[accepted]
                    judged += [(1 + ratios[accepted]) / 2, *[0.5] * (len(draft) - accepted - 1)]
                    law = np.maximum(p[accepted] - q[accepted], 0)
                if chance < 1e-12:
                    continue
                for token, probability, middle in cells(law):
                    yield from continued(
                        (*history, (len(draft), accepted, room)),
                        (*tokens, *draft[:accepted], token),
                        (*coins, *judged, middle),
                        (*draft_coins, *more_draft_coins),
                        volume * share * chance * probability,
                    )

    for token, probability, middle in cells(target(())):
        yield from continued((), (token,), (middle,), (), probability)


@pytest.mark.parametrize(("name", "length"), [("ngram", 5), ("draft model", 4), ("early exit", 4)])
def test_the_whole_engine_keeps_the_law_exactly(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All coins, cut into the cells on which depths and output are constant: each midpoint, run through engine and
    throttle, gives the output the definitions say, and the volumes add up to the target's law."""
    tiny = TinyLaw(3, SamplingParams(1.2, top_k=2, seed=0))
    paths = list(adaptive_paths(tiny.target, tiny.drafts(name), length))
    ForcedCoins.paths = {str(i): path for i, path in enumerate(paths)}
    monkeypatch.setattr(decode_module, "RequestGenerator", ForcedCoins)
    monkeypatch.setattr(model_drafters, "RequestGenerator", ForcedCoins)
    target = make_decoder(tiny.spec, tiny.weights, num_slots=1)
    throttle = laws_throttle()
    engine = make_engine(target, tiny.drafter(name, target), batch_size=1, depth=2, policy=throttle)
    emitted: Counter[Tokens] = Counter()
    chosen: Counter[int] = Counter()
    for i, path in enumerate(paths):
        throttle.reset()
        trace = engine.run([make_request(tiny.prompt, str(i), max_tokens=length, params=tiny.params)])
        assert outputs(trace)[str(i)] == path.output
        emitted[path.output] += path.volume  # type: ignore[assignment]
        chosen.update(trace.step_depth.tolist())
    assert {0, 2} <= set(chosen), "the depth never changed"
    expected = tiny.output_law(length)
    assert set(emitted) == set(expected)
    for tokens, probability in expected.items():
        assert emitted[tokens] == pytest.approx(probability, abs=1e-9)
