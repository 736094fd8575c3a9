"""Interleaved blocks: every arm runs once a round, in a seeded random order, and a disturbed round is repeated.

Figures are ratios of two arms of the same round, so that what changes slowly on a machine touches both alike.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from specbench.bench.telemetry import BlockConditions

Tell = Callable[[str], None]
Outputs = tuple[tuple[int, ...], ...]


class Monitor(Protocol):
    """Brackets a block and says what disturbed it (`specbench.bench.telemetry.LoadMonitor`, or a test's own)."""

    def start(self) -> None: ...
    def stop(self) -> BlockConditions: ...


@dataclass(frozen=True)
class Sample:
    """What one arm did in one round: figures by name (rates, seconds, bytes), and the output ids of each request."""

    values: Mapping[str, float]
    outputs: Outputs = ()


Arm = Callable[[int], Sample]


@dataclass(frozen=True)
class Round:
    """One block of every arm. `order` is the order in which they ran; `marks` say by arm what disturbed it."""

    index: int
    order: tuple[str, ...]
    samples: Mapping[str, Sample]
    marks: Mapping[str, tuple[str, ...]]

    @property
    def clean(self) -> bool:
        return not any(self.marks.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; outputs are left out."""
        return {
            "round": self.index,
            "order": list(self.order),
            "values": {arm: dict(sample.values) for arm, sample in self.samples.items()},
            "marks": {arm: list(marks) for arm, marks in self.marks.items() if marks},
        }


@dataclass(frozen=True)
class Spread:
    """The median of `count` values, and the least and the greatest of them."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(statistics.median(found), min(found), max(found), len(found))


@dataclass(frozen=True)
class Rounds:
    """All rounds of one comparison, disturbed ones included; `wanted` of them should be clean."""

    every: tuple[Round, ...]
    wanted: int

    @property
    def disturbed(self) -> bool:
        """Fewer rounds than wanted were clean, so that disturbed ones count too."""
        return sum(one.clean for one in self.every) < self.wanted

    @property
    def used(self) -> tuple[Round, ...]:
        """The rounds that count: the clean ones, or all where too few are clean."""
        return self.every if self.disturbed else tuple(one for one in self.every if one.clean)

    def values(self, arm: str, name: str) -> Spread:
        """A figure of one arm over the rounds that count."""
        return Spread.of(one.samples[arm].values[name] for one in self.used)

    def ratio(self, top: str, bottom: str, name: str, bottom_name: str | None = None) -> Spread:
        """`name` of arm `top` over `name` (or `bottom_name`) of arm `bottom`, round by round."""
        below = bottom_name or name
        return Spread.of(one.samples[top].values[name] / one.samples[bottom].values[below] for one in self.used)

    def equal_share(self, left: str, right: str) -> Spread:
        """Share of all requests whose outputs are the same ids in both arms, of the same length too.

        Disturbed rounds count: outputs do not depend on time. `median` is the share of all requests, not a median:
        one wrong output among many must show.
        """
        pairs = [(one.samples[left].outputs, one.samples[right].outputs) for one in self.every]
        shares = [equal_share(a, b) for a, b in pairs]
        requests = [len(a) for a, _ in pairs]
        pooled = sum(share * count for share, count in zip(shares, requests, strict=True)) / sum(requests)
        return Spread(pooled, min(shares), max(shares), len(shares))

    def common_share(self, left: str, right: str) -> Spread:
        """Share of output ids before the first difference, of the longer output, over all requests and rounds."""
        pairs = [(one.samples[left].outputs, one.samples[right].outputs) for one in self.every]
        return Spread.of(common_share(a, b) for a, b in pairs)

    def to_list(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.every]


def equal_share(left: Outputs, right: Outputs) -> float:
    """Share of requests with the same ids, and as many of them, on both sides. Raises ValueError if a request lacks."""
    if len(left) != len(right) or not left:
        raise ValueError(f"outputs of {len(left)} and of {len(right)} requests can't be compared")
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)


def common_share(left: Outputs, right: Outputs) -> float:
    """Ids that come before the first difference, summed over requests, over the ids of the longer output of each."""
    agreed = longest = 0
    for a, b in zip(left, right, strict=True):
        agreed += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        longest += max(len(a), len(b))
    return agreed / longest


def run_rounds(
    arms: Mapping[str, Arm],
    *,
    blocks: int,
    seed: int,
    monitor: Monitor,
    tell: Tell,
    settle: Callable[[], object] = gc.collect,
) -> Rounds:
    """Run `blocks` clean rounds of all arms, and at most twice as many in all.

    An arm is called with the number of the clean round, so that a repeated round does the same work again. `settle`
    runs before each round.
    """
    order = random.Random(seed)
    rounds: list[Round] = []
    clean = 0
    while clean < blocks and len(rounds) < 2 * blocks:
        names = list(arms)
        order.shuffle(names)
        settle()
        samples: dict[str, Sample] = {}
        marks: dict[str, tuple[str, ...]] = {}
        for name in names:
            tell(f"block {clean + 1} of {blocks}: {name}")
            monitor.start()
            samples[name] = arms[name](clean)
            marks[name] = monitor.stop().marks
        rounds.append(Round(len(rounds), tuple(names), samples, marks))
        clean += rounds[-1].clean
    return Rounds(tuple(rounds), blocks)
