"""The axes of a sweep: batch sizes as a list or as a search, depths as numbers or `auto`, context lengths.

sweep: {batch_size: {search: crossing, max: 256}, depth: [3, auto], max_depth: 8}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Discriminator, Tag, model_validator

from specbench.scenario.drafter_fields import AUTO, AnyDepth, DrafterConfig, MaxDepth
from specbench.scenario.fields import TAG, Axis, Section, choice, fault, read_integer, reader

SEARCH = "search"
BatchSize = Annotated[int, reader(read_integer, 1, 4096)]


class CrossingSearch(Section):
    """Batch sizes chosen one by one, between `min` and `max`, to find where the speedup falls through 1.0: by
    bisection over powers of two, then between their neighbours until two batches are no further apart than the factor
    1 + `within_percent`/100 (or are next to each other): 25 ends at a bracket (8, 10], 100 at powers of two."""

    search: Annotated[Literal["crossing"], choice("crossing")]
    max: Annotated[int, reader(read_integer, 2, 4096)]
    min: BatchSize = 1
    within_percent: Annotated[int, reader(read_integer, 1, 100)] = 25

    @model_validator(mode="after")
    def _ordered(self) -> CrossingSearch:
        if self.min >= self.max:
            raise fault(f"min {self.min} is not below max {self.max}", "give a larger max", "max")
        return self


def _is_search(value: object) -> str:
    given = isinstance(value, CrossingSearch) or (isinstance(value, dict) and SEARCH in value)
    return TAG + (SEARCH if given else "list")


BatchSizes = Annotated[
    Annotated[Axis[BatchSize], Tag(TAG + "list")] | Annotated[CrossingSearch, Tag(TAG + SEARCH)],
    Discriminator(_is_search),
]


class SweepConfig(Section):
    """The grid. `context_len` is a prompt length in tokens; null leaves prompts as they are.

    A depth `auto` is chosen anew for every step, up to `max_depth` levels (null: the deepest of the depths beside it,
    else what the drafter's own settings allow, else 5)."""

    batch_size: BatchSizes = (1,)
    depth: Axis[AnyDepth] | None = None
    max_depth: MaxDepth = None
    context_len: Axis[Annotated[int, reader(read_integer, 1, 10_000_000)] | None] = (None,)

    @property
    def crossing(self) -> CrossingSearch | None:
        """The search, or None where batch sizes are a list."""
        return self.batch_size if isinstance(self.batch_size, CrossingSearch) else None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The listed batch sizes; of a search the one it begins with."""
        return (self.batch_size.min,) if isinstance(self.batch_size, CrossingSearch) else self.batch_size

    @model_validator(mode="after")
    def _auto(self) -> SweepConfig:
        check_max_depth(self.depth, self.max_depth)
        return self


class DepthPoint(NamedTuple):
    """One depth of a case: `levels` at most, and whether each step chooses ("auto") or not ("fixed")."""

    levels: int
    policy: str = "fixed"


def check_max_depth(depths: Sequence[int | str] | None, max_depth: int | None, *at: str | int) -> None:
    """Refuse a largest depth where no depth is `auto`; `at` is the place of what holds it."""
    if max_depth is not None and AUTO not in (depths or ()):
        raise fault("belongs to depth auto", "write depth: auto, or drop max_depth", *at, "max_depth")


def depth_points(drafter: DrafterConfig, sweep: SweepConfig) -> tuple[DepthPoint, ...]:
    """The depths that `drafter` runs at, its own or the sweep's, fixed ones first; () where nothing is given."""
    given = drafter.depth or sweep.depth or ()
    fixed = [depth for depth in given if not isinstance(depth, str)]
    points = [DepthPoint(levels) for levels in sorted(fixed)]
    if AUTO in given:
        most = drafter.max_depth if drafter.depth is not None else drafter.max_depth or sweep.max_depth
        points.append(DepthPoint(most or max(fixed, default=0) or drafter.default_max_depth, "auto"))
    return tuple(points)
