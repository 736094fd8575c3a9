"""Cost and StepCost: FLOPs and bytes, alone and by op class of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes moved to and from device memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float | None:
        """FLOP per byte; None where no byte moves."""
        return self.flops / self.bytes if self.bytes > 0 else None

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flops * times, self.bytes * times)

    __rmul__ = __mul__


ZERO = Cost(0.0, 0.0)


@dataclass(frozen=True)
class StepCost:
    """A forward pass by op class; `kv_write` and `embedding` have bytes only.

    `linear`: attention's maps, dense MLPs, shared experts, routers. `experts`: routed experts. `indexer`: its maps and
    its scores over all keys. `attention`: scores and sums over the keys that are read.
    """

    linear: Cost = ZERO
    attention: Cost = ZERO
    kv_write: Cost = ZERO
    embedding: Cost = ZERO
    head: Cost = ZERO
    experts: Cost = ZERO
    indexer: Cost = ZERO

    def by_class(self) -> dict[str, Cost]:
        """Op class -> cost, in the order of a forward pass; experts and indexer only in a model that has them."""
        classes = {
            "embedding": self.embedding,
            "linear": self.linear,
            "kv_write": self.kv_write,
            "indexer": self.indexer,
            "attention": self.attention,
            "experts": self.experts,
            "head": self.head,
        }
        return {name: cost for name, cost in classes.items() if name not in ("experts", "indexer") or cost.bytes}

    @property
    def total(self) -> Cost:
        return Cost(sum(cost.flops for cost in self._all), sum(cost.bytes for cost in self._all))

    @property
    def _all(self) -> tuple[Cost, ...]:
        return (
            *(self.linear, self.attention, self.kv_write, self.embedding),
            *(self.head, self.experts, self.indexer),
        )

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self._all)

    @property
    def bytes(self) -> float:
        return sum(cost.bytes for cost in self._all)

    @property
    def intensity(self) -> float | None:
        return self.total.intensity

    def __add__(self, other: StepCost) -> StepCost:
        names = (field.name for field in fields(StepCost))
        return StepCost(**{name: getattr(self, name) + getattr(other, name) for name in names})
