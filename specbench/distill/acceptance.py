"""Held-out acceptance of a drafter, by position: greedy drafts against the target's own greedy choice.

Position i of a draft counts as accepted if the drafted tokens of all positions up to i are the target's argmax over its
whole vocabulary, each after the text that stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specbench.distill.corpus import Batch, Placed
from specbench.distill.modules import Module, all_rows, places


@dataclass(frozen=True)
class Acceptance:
    """`reached[i]`: drafts that could have a position i; `tried[i]`: those of them that are right up to the position
    before; `held[i]`: those that are right up to it."""

    reached: tuple[int, ...]
    tried: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of drafts accepted up to each position."""
        return tuple(held / reached if reached else 0.0 for held, reached in zip(self.held, self.reached, strict=True))

    @property
    def conditional(self) -> tuple[float, ...]:
        """Acceptance of each position where all before it were accepted."""
        return tuple(held / tried if tried else 0.0 for held, tried in zip(self.held, self.tried, strict=True))

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens of a draft of full depth, on the mean."""
        return sum(self.by_position)

    def __add__(self, other: Acceptance) -> Acceptance:
        def sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip(a, b, strict=True))

        return Acceptance(sums(self.reached, other.reached), sums(self.tried, other.tried), sums(self.held, other.held))


def best_tokens(batch: Batch, unembedding: torch.Tensor) -> NDArray[np.int64]:
    """int64[N]: the target's argmax after each position, over the whole vocabulary."""
    best = [functional.linear(part, unembedding).argmax(dim=-1) for part in torch.split(batch.final, 256)]
    return torch.cat(best).numpy()


@torch.no_grad()
def batch_acceptance(
    module: Module, batch: Batch, best: NDArray[np.int64], draft_ids: NDArray[np.int64], depth: int
) -> Acceptance:
    """Acceptance over all starts of a batch; `best` as `best_tokens` gives it for the same batch."""
    reached, tried, held = [], [], []
    right: dict[tuple[int, int], bool] = {}
    rows = all_rows(batch)
    for number, step in enumerate(module.steps(batch, rows, depth)):
        drafted = draft_ids[step.logits.argmax(dim=-1).numpy()]
        hits = drafted == best[places(step.rows, batch, number + 1).numpy()]
        keys = list(zip(step.rows.conversation.tolist(), step.rows.start.tolist(), strict=True))
        before = np.array([right.get(key, number == 0) for key in keys], dtype=bool)
        hits = hits & before
        right = dict(zip(keys, hits.tolist(), strict=True))
        reached.append(len(keys))
        tried.append(int(before.sum()))
        held.append(int(hits.sum()))
    missing = [0] * (depth - len(held))
    return Acceptance((*reached, *missing), (*tried, *missing), (*held, *missing))


class HeldOut:
    """The held-out conversations, ready to be measured on again and again."""

    def __init__(
        self,
        held_out: Sequence[Placed],
        load: Callable[[Sequence[Placed]], Batch],
        unembedding: torch.Tensor,
        draft_ids: NDArray[np.int64],
        limit: int,
    ) -> None:
        self._groups: list[tuple[float, Batch, NDArray[np.int64]]] = []
        self._draft_ids = draft_ids
        chosen = held_out[:limit]
        for temperature in sorted({one.temperature for one in chosen}):
            same = [one for one in chosen if one.temperature == temperature]
            for first in range(0, len(same), 8):
                batch = load(same[first : first + 8])
                self._groups.append((temperature, batch, best_tokens(batch, unembedding)))

    def measure(self, module: Module, depth: int) -> dict[float, Acceptance]:
        """Acceptance by the temperature that the text was written at."""
        result: dict[float, Acceptance] = {}
        for temperature, batch, best in self._groups:
            one = batch_acceptance(module, batch, best, self._draft_ids, depth)
            result[temperature] = result[temperature] + one if temperature in result else one
        return result


def pooled(parts: dict[float, Acceptance]) -> Acceptance:
    """All temperatures together."""
    total, *rest = parts.values()
    for one in rest:
        total = total + one
    return total
