"""Which drafter to use, at which depth, up to which batch: the decision that the first screen states.

At each batch size it takes the drafter and depth that is clearly faster than plain decoding (for predicted rows, whose
speedups have no interval: faster) and whose interval reaches the best one's; among those, the one that stays good for
most of the next batches, so that the advice has as few parts as the data allow. Forced acceptance and lossy drafters
are never advised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.report import rows as read
from specbench.report.series import Point, Series, batch_sizes


@dataclass(frozen=True)
class Advice:
    """Use `best` from the first to the last of `batches`; None stands for plain decoding."""

    batches: tuple[int, ...]
    best: Series | None

    @property
    def ends(self) -> tuple[Point, Point] | None:
        """The cells at the smallest and at the largest of its batches."""
        first, last = (self.best.at(batch) if self.best else None for batch in (self.batches[0], self.batches[-1]))
        return None if first is None or last is None else (first, last)


def pays(point: Point | None) -> bool:
    """True where the whole interval is above 1.0; a predicted speedup has none, and counts by its value."""
    if point is None or point.speedup is None:
        return False
    mean, low, _ = point.speedup
    return mean > 1.0 if read.is_predicted(point.row) else low is not None and low > 1.0


def value_of(point: Point) -> tuple[float, float, float]:
    """Speedup and the ends of its interval, which are the speedup itself where it has none."""
    mean, low, high = point.speedup or (0.0, None, None)
    return mean, mean if low is None else low, mean if high is None else high


def is_lossy(one: Series) -> bool:
    return any(read.section(point.row, "conditions").get("lossless") is False for point in one.points)


def advise(series: Sequence[Series]) -> list[Advice]:
    """Advice over all batch sizes of series that share a context, smallest batch first."""
    usable = [one for one in series if not one.control and not one.synthetic and not is_lossy(one)]
    batches = batch_sizes(usable)
    parts: list[Advice] = []
    place = 0
    while place < len(batches):
        good = {id(one): _run(one, usable, batches[place:]) for one in usable}
        length = max(good.values(), default=0)
        if not length:
            plain = 1
            while place + plain < len(batches) and not any(pays(one.at(batches[place + plain])) for one in usable):
                plain += 1
            parts.append(Advice(tuple(batches[place : place + plain]), None))
            place += plain
            continue
        best = max(
            (one for one in usable if good[id(one)] == length), key=lambda one: _mean_over(one, batches, place, length)
        )
        parts.append(Advice(tuple(batches[place : place + length]), best))
        place += length
    return parts


def _run(one: Series, rivals: Sequence[Series], batches: Sequence[int]) -> int:
    """For how many of the next batches this series pays and reaches the interval of the best that pays."""
    count = 0
    for batch in batches:
        point = one.at(batch)
        if not pays(point) or point is None:
            break
        best = max((value_of(p) for rival in rivals if (p := rival.at(batch)) is not None and pays(p)), default=None)
        if best is not None and value_of(point)[2] < best[1] and value_of(point)[0] < best[0]:
            break
        count += 1
    return count


def _mean_over(one: Series, batches: Sequence[int], place: int, length: int) -> float:
    points = [one.at(batch) for batch in batches[place : place + length]]
    return sum(value_of(point)[0] for point in points if point is not None) / length
