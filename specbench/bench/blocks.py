"""Timed blocks of a case: both arms on the same prompts, in seeded order, until the interval is narrow enough.

A disturbed pair of blocks is repeated, not averaged. A pair whose outputs part, or in which a request fails, ends the
case at once: no further number of it would be worth anything.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from specbench import metrics as m
from specbench.bench.block_facts import block_facts
from specbench.bench.outputs import OutputCheck, compare_outputs
from specbench.bench.target import Target, prompt_id
from specbench.bench.telemetry import BlockConditions, LoadMonitor
from specbench.engine.decode import Engine
from specbench.engine.models.decoder import Capture
from specbench.engine.request import Request
from specbench.engine.trace import Trace
from specbench.scenario.cases import Case
from specbench.scenario.schema import MeasureConfig
from specbench.stats import Interval, bootstrap_rate, bootstrap_ratio, stopping

Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass
class Block:
    """One timed block of one arm; `facts` as `store.BlockFacts`."""

    order: int
    arm: str
    index: int
    trace: Trace
    conditions: BlockConditions
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.trace.num_committed[self.trace.in_window[self.trace.row_step]].sum())

    @property
    def wall_s(self) -> float:
        return float(self.trace.step_s[self.trace.in_window].sum())

    def sample(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "arm": self.arm,
            "block": self.index,
            "tokens": self.tokens,
            "wall_s": self.wall_s,
            "steps": int(self.trace.in_window.sum()),
            "valid": self.conditions.valid,
            "marks": list(self.conditions.marks),
            **({"facts": self.facts} if self.facts else {}),
        }


class Timer:
    """Where a case's time goes: measured windows, prefill, warm-up; the rest is the harness's own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, call: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def prefill(target: Target, requests: Sequence[Request], capture: Capture) -> None:
    """Prefill what is new among the requests' prompts, so that no block waits for one; `capture` as the drafter's."""
    for one in requests:
        target.store.get(one.prompt_ids, 0, capture)


class BlockRun:
    """Runs blocks of both arms until the interval is narrow enough, the blocks or the seconds are used up.

    `fault` says why the case is invalid, or is None.
    """

    def __init__(
        self,
        target: Target,
        case: Case,
        arms: Mapping[str, Engine],
        settings: MeasureConfig,
        timer: Timer,
        monitor: LoadMonitor,
        tell: Tell,
    ) -> None:
        self._target, self._case, self._arms, self._settings = target, case, arms, settings
        self._timer, self._monitor, self._tell = timer, monitor, tell
        drafters = [engine.drafter for engine in arms.values() if engine.drafter is not None]
        self._capture: Capture = drafters[0].capture if drafters else ()
        self._order = random.Random(f"{settings.seed}/{case.hash}")
        self._kept: list[list[Block]] = []
        self._failure: str | None = None
        self.blocks: list[Block] = []
        self.check = OutputCheck()
        self.interval: Interval | None = None

    @property
    def fault(self) -> str | None:
        return self._failure or self.check.reason

    def measure(self, source: Iterator[list[Request]]) -> str:
        """Returns why it stopped: "target", "max_blocks", "budget", "fault" or "disturbed"."""
        begin = time.perf_counter()
        count = disturbed = 0
        limits, budget = self._settings.blocks, self._settings.budget_s or float("inf")
        requests = next(source)
        while True:
            self._tell(f"block {count + 1}")
            pair = self._pair(requests, count)
            self.blocks += pair
            undisturbed = all(block.conditions.valid for block in pair)
            if undisturbed or self.fault is not None:
                count += 1
                self._kept.append(pair)
                self.interval = self._interval()
            else:
                disturbed += 1
            if self.fault is not None:
                return "fault"
            elapsed = time.perf_counter() - begin
            reason = stopping(
                self.interval, count, limits.min, limits.max, self._settings.target_interval, elapsed, budget
            )
            if reason is not None and (count or reason != "budget"):
                return reason
            if disturbed > limits.max or (disturbed and elapsed > 2 * budget):
                return "disturbed"
            if undisturbed:
                requests = next(source)
                self._timer.run("prefill", functools.partial(prefill, self._target, requests, self._capture))

    def _arm_order(self, requests: Sequence[Request]) -> list[str]:
        """Seeded; but a drafter that replays the AR output comes second where that output is not known yet."""
        order = list(self._arms)
        self._order.shuffle(order)
        replays = self._case.drafter.kind in ("oracle", "forced")
        if replays and any(one.reference is None for one in requests):
            order.sort()
        return order

    def _pair(self, requests: Sequence[Request], index: int) -> list[Block]:
        requests = [replace(one, reference=self._known(one)) for one in requests]
        pair: dict[str, Block] = {}
        for arm in self._arm_order(requests):
            if "ar" in pair:
                requests = [replace(one, reference=self._known(one)) for one in requests]
            self._monitor.start()
            block = functools.partial(self._arms[arm].run, requests, itertools.cycle(requests))
            trace = self._timer.run("measured", block)
            conditions, order = self._monitor.stop(), len(self.blocks) + len(pair)
            pair[arm] = Block(order, arm, index, trace, conditions, block_facts(requests, trace))
            if arm == "ar":
                self._learn(requests, trace)
        failed = [r for block in pair.values() for r in block.trace.requests if r.error is not None]
        if failed:
            self._failure = f"request {failed[0].request_id} failed: {failed[0].error}"
        elif "spec" in pair and self._case.sampling.temperature == 0:
            compare_outputs(self.check, self._target, requests, pair["ar"].trace, pair["spec"].trace)
        return list(pair.values())

    def _known(self, request: Request) -> tuple[int, ...] | None:
        return self._target.references.get(self._target.reference_key(request))

    def _learn(self, requests: Sequence[Request], ar: Trace) -> None:
        """Keep the AR outputs; the trace begins with the block's own requests, all of which ran to their ends."""
        for one, done in zip(requests, ar.requests, strict=False):
            if done.error is None:
                self._target.references[self._target.reference_key(one)] = done.token_ids

    def kept(self, arm: str) -> list[Trace]:
        """Traces of one arm from the pairs that nothing disturbed, and from the one that holds the fault."""
        return [block.trace for pair in self._kept for block in pair if block.arm == arm]

    def prompt_samples(self) -> list[dict[str, Any]]:
        """Each prompt's tokens and seconds in both arms, all of its rounds together."""
        ar = _by_prompt(self.kept("ar"))
        spec = _by_prompt(self.kept("spec")) if "spec" in self._arms else ar
        return [
            {
                "id": name,
                "category": category,
                "ar_tokens": tokens,
                "ar_s": seconds,
                "spec_tokens": spec[name][1],
                "spec_s": spec[name][2],
            }
            for name, (category, tokens, seconds) in ar.items()
            if name in spec
        ]

    def samples(self) -> list[dict[str, Any]]:
        """`prompt_samples`, with each prompt's drafts by position where anything was drafted for it."""
        drafts: dict[str, dict[str, list[int]]] = {}
        for one in m.prompt_acceptance(*self.kept("spec")):
            seen = drafts.setdefault(prompt_id(one.request_id), {})
            for name in ("offered_at", "tried_at", "accepted_at"):
                pairs = itertools.zip_longest(seen.get(name, []), getattr(one, name), fillvalue=0)
                seen[name] = [a + b for a, b in pairs]
        return [sample | drafts.get(sample["id"], {}) for sample in self.prompt_samples()]

    def _interval(self) -> Interval:
        samples = self.prompt_samples()
        return speedup_interval(samples) if "spec" in self._arms else rate_interval(samples, "ar")


def _by_prompt(traces: Sequence[Trace]) -> dict[str, tuple[str, int, float]]:
    """Prompt id -> (category, tokens, seconds)."""
    totals: dict[str, tuple[str, int, float]] = {}
    for cost in m.prompt_costs(*traces):
        name = prompt_id(cost.request_id)
        _, tokens, seconds = totals.get(name, ("", 0, 0.0))
        totals[name] = (cost.category, tokens + cost.tokens, seconds + cost.seconds)
    return totals


def speedup_interval(samples: Sequence[Mapping[str, Any]]) -> Interval:
    """The paired ratio of tokens/s over a row's prompt samples, with its bootstrap interval."""
    tokens, seconds, ar_tokens, ar_seconds = (
        [sample[name] for sample in samples] for name in ("spec_tokens", "spec_s", "ar_tokens", "ar_s")
    )
    return bootstrap_ratio(tokens, seconds, ar_tokens, ar_seconds)


def rate_interval(samples: Sequence[Mapping[str, Any]], arm: str) -> Interval:
    """tokens/s of one arm over a row's prompt samples, with its bootstrap interval."""
    return bootstrap_rate([s[f"{arm}_tokens"] for s in samples], [s[f"{arm}_s"] for s in samples])
