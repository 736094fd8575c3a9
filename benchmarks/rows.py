"""What more tokens in one pass cost at batch 1: forward passes of 1, 2, 4 and 8 tokens, and whole verify steps of 8.

A speculative step pays off only if its pass over several tokens costs little more than the pass over one.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from benchmarks.blocks import Rounds, Sample, Spread
from benchmarks.figures import Figure, Report, at_most
from benchmarks.settings import CATEGORIES, Settings
from benchmarks.sides import DTYPE_NAMES, Ours, chat_prompts
from specbench.engine.decode import with_reference
from specbench.engine.drafters.lookup import ReplayDrafter
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import Request
from specbench.engine.trace import Trace

ROWS = (1, 2, 4, 8)
VERIFY_ROWS = ROWS[-1]
VERIFY_TARGET = 1.25
SMOOTH_TARGET = 1.05


def name_of(count: int) -> str:
    return f"forward_{count}_s"


def greatest_ratio(rounds: Rounds, pairs: Iterable[tuple[int, int]]) -> Spread:
    """The ratio of time of `top` over `bottom` tokens, pair by pair, with the greatest median; its own spread.

    A maximum within each round would be biased upwards by noise wherever sizes cost alike.
    """
    ratios = (rounds.ratio("passes", "passes", name_of(top), name_of(bottom)) for top, bottom in pairs)
    return max(ratios, key=lambda spread: spread.median)


def inversion(rounds: Rounds) -> Spread:
    """The most that a pass costs over a pass of more tokens: 1 or less where the cost only rises."""
    return greatest_ratio(rounds, itertools.combinations(ROWS, 2))


def jump(rounds: Rounds) -> Spread:
    """The most that a pass costs over the next smaller one."""
    return greatest_ratio(rounds, ((b, a) for a, b in itertools.pairwise(ROWS)))


def rows(settings: Settings) -> Report:
    """Forward passes with the logits of each token after the same cached text; verify steps beside AR steps."""
    figures: list[Figure] = []
    raw: dict[str, object] = {}
    for dtype in DTYPE_NAMES:
        settings.tell(f"rows {dtype}: loading")
        engine = Ours(dtype)
        passes = _passes(settings, engine)
        steps = _steps(settings, engine)
        figures += _figures(dtype, passes, steps)
        raw |= {f"rows.{dtype}": passes.to_list(), f"rows.{dtype}.steps": steps.to_list()}
    note = (
        f"passes: context {settings.context_len} tokens, all sizes in turn, median of {settings.row_repeats} a block; "
        f"steps: medians over {settings.verify_output_len - 1} tokens of one prompt, every draft accepted"
    )
    return Report("rows", tuple(figures), raw, (note,))


def _figures(dtype: str, passes: Rounds, steps: Rounds) -> list[Figure]:
    def one(key: str, what: str, spread: Spread, limit: float | None, rounds: Rounds, unit: str = "x") -> Figure:
        bound = at_most(limit) if limit is not None else None
        return Figure(f"rows.{dtype}.{key}", f"{what}, {dtype}", unit, spread, bound, None, rounds.disturbed)

    limit = VERIFY_TARGET if dtype == "bf16" else None
    verify = steps.ratio("verify", "ar", "step_s")
    return [
        one("verify_over_step", f"verify step of {VERIFY_ROWS} tokens over AR step", verify, limit, steps),
        one("inversion", "greatest time of fewer tokens over more tokens", inversion(passes), SMOOTH_TARGET, passes),
        one("jump", "greatest rise from one size to the next", jump(passes), None, passes),
        *(
            one(
                f"{t}_over_1",
                f"forward of {t} tokens over 1 token",
                passes.ratio("passes", "passes", name_of(t), name_of(1)),
                limit if t == VERIFY_ROWS else None,
                passes,
            )
            for t in ROWS[1:]
        ),
        *(one(f"{t}", f"forward of {t} tokens", passes.values("passes", name_of(t)), None, passes, "ms") for t in ROWS),
        *(
            one(f"step.{arm}", f"{arm} step", steps.values(arm, "step_s"), None, steps, "ms")
            for arm in ("ar", "verify")
        ),
    ]


def _passes(settings: Settings, engine: Ours) -> Rounds:
    """Passes of all sizes in turn, in a new random order each time, so that a slow second touches all alike."""
    context, most = settings.context_len, max(ROWS)
    prompts = chat_prompts(engine.target, CATEGORIES, 8, settings.seed)
    text = [token for _, _, ids in prompts for token in ids]
    engine.bind([("text", "text", tuple(text[:context]))], batch_size=1, output_len=most, depth=most - 1)
    decoder, now = engine.target.decoder, engine.clock.now
    decoder.prefill(text[:context], 0)
    order = random.Random(settings.seed)

    def timed(count: int) -> float:
        decoder.kv.reserve(0, count)
        batch = ForwardBatch.of([text[context : context + count]], [0], [context])
        begin = now()
        decoder.forward(batch)
        span = now() - begin
        decoder.kv.commit(0, 0)
        return span

    def passes(_: int) -> Sample:
        spans: dict[int, list[float]] = {count: [] for count in ROWS}
        for _turn in range(settings.row_repeats):
            for count in order.sample(ROWS, len(ROWS)):
                spans[count].append(timed(count))
        return Sample({name_of(count): statistics.median(found) for count, found in spans.items()})

    for count in ROWS:
        timed(count)
    found = settings.rounds(f"rows {engine.dtype}", {"passes": passes})
    decoder.kv.close(0)
    return found


def median_step(trace: Trace, query_tokens: int) -> float:
    """Median seconds, drafting left out, of the steps that verified just `query_tokens` tokens."""
    chosen = trace.query_tokens == query_tokens
    return float(np.median((trace.step_s - trace.draft_s)[chosen]))


def _steps(settings: Settings, engine: Ours) -> Rounds:
    """Whole steps of the engine on the same prompt: AR, and verify steps in which every draft is right."""
    prompts = chat_prompts(engine.target, CATEGORIES, settings.blocks, settings.seed)
    depth, length = VERIFY_ROWS - 1, settings.verify_output_len
    requests = engine.bind(prompts, batch_size=1, output_len=length, depth=depth)
    plain = engine.engine(1)
    oracle = engine.engine(1, ReplayDrafter(engine.spec.vocab_size), depth)
    oracle.store = plain.store
    known: dict[int, Request] = {}

    def of(index: int) -> Request:
        at = index % len(requests)
        if at not in known:
            known[at] = with_reference(requests[at], plain.run([requests[at]]).requests[0].token_ids)
        return known[at]

    def ar(index: int) -> Sample:
        return Sample({"step_s": median_step(plain.run([replace(of(index), reference=None)]), 1)})

    def verify(index: int) -> Sample:
        return Sample({"step_s": median_step(oracle.run([of(index)]), VERIFY_ROWS)})

    for index in range(settings.blocks):
        of(index)
    return settings.rounds(f"steps {engine.dtype}", {"ar": ar, "verify": verify})
