"""Shapes that follow the draft's own certainty: a stop by entropy (AdaEDL) and a budget of entropy along a path.

Both decide from the laws after kept tokens alone, before anything is drawn from them, so they keep the target's law. A
rule that drops a sampled token because of that token's own probability does not: the tests show the law it gives.

Stop (AdaEDL, arXiv 2410.18351): with H the entropy in nats of the law about to be drafted from, 1 - sqrt(gamma H) is
an estimate, from below, of its acceptance; where that is less than lambda nothing is drafted from this law. The first
level always is. Where a rate to hold is given, lambda adapts after each step of a request:

    rate <- 1/2 rate + 1/2 accepted/drafted
    lambda' = lambda + 1/100 if rate < target; lambda if a draft of full depth was accepted whole; else lambda - 1/100
    lambda <- 9/10 lambda + 1/10 lambda'

Budget: a node whose path was drafted from laws with more entropy in all than the budget gets no children, so a draft
goes deep where the text is certain and stays shallow where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specbench.engine.request import ActiveRequest

GAMMA = 0.2
RATE_KEPT = 0.5
BOUND_KEPT = 0.9
BOUND_STEP = 0.01


def entropies(laws: torch.Tensor) -> list[float]:
    """The entropy, in nats, of each row of probabilities `laws` [R, V]. Row by row: its bits depend on no neighbour."""
    return torch.stack([torch.special.entr(row).sum() for row in laws]).tolist()


@dataclass(frozen=True)
class StopRule:
    """`below`: lambda, the bound on acceptance below which nothing is drafted; `gamma` of the bound; `target`: the
    acceptance rate that lambda adapts to hold, None: it stays."""

    below: float
    gamma: float = GAMMA
    target: float | None = None


@dataclass
class EntropyStopper:
    """The stop for one request. `bound` is lambda and `rate` the smoothed acceptance, as of now."""

    rule: StopRule
    bound: float = field(init=False)
    rate: float = field(init=False)

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.bound = self.rule.below
        self.rate = self.rule.target or 0.0

    def start(self, request: ActiveRequest | None) -> None:
        """A new request: nothing stays of the one before."""
        self._reset()

    def allows(self, entropy: float, level: int) -> bool:
        """Whether to draft from a law of `entropy` nats whose tokens would stand at `level` (0: the first)."""
        return level == 0 or 1.0 - math.sqrt(self.rule.gamma * entropy) >= self.bound

    def observe(self, num_drafted: int, num_accepted: int, max_depth: int) -> None:
        """A step's outcome: levels drafted, levels accepted, and the levels there was room for."""
        target = self.rule.target
        if target is None or num_drafted == 0:
            return
        self.rate = RATE_KEPT * self.rate + (1 - RATE_KEPT) * num_accepted / num_drafted
        wanted = self.bound
        if self.rate < target:
            wanted += BOUND_STEP
        elif not num_accepted == num_drafted == max_depth:
            wanted -= BOUND_STEP
        self.bound = BOUND_KEPT * self.bound + (1 - BOUND_KEPT) * wanted


@dataclass(frozen=True)
class EntropyBudget:
    """At most `nats` of entropy above a node that gets children."""

    nats: float

    def allows(self, spent: float) -> bool:
        """Whether a node gets children whose path was drafted from laws of `spent` nats in all (0: the root)."""
        return spent <= self.nats


@dataclass(frozen=True)
class AdaptiveRules:
    """What a drafter was asked for; None switches a rule off."""

    stop: StopRule | None = None
    budget: EntropyBudget | None = None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> AdaptiveRules | None:
        """From a drafter's options `stop_below`, `stop_gamma`, `stop_target` and `entropy_budget`; None without any."""

        def number(key: str) -> float | None:
            value = options.get(key)
            return None if value is None else float(str(value))

        below, gamma, nats = number("stop_below"), number("stop_gamma"), number("entropy_budget")
        stop = None
        if below is not None:
            stop = StopRule(below, GAMMA if gamma is None else gamma, number("stop_target"))
        budget = None if nats is None else EntropyBudget(nats)
        return None if stop is None and budget is None else cls(stop, budget)


class AdaptiveShape:
    """One request's shape, draft by draft. Nodes are named by whatever the drafter names them; the root is -1.

    A drafter calls `start` with the request and `begin` with each draft, asks `feeds` before it runs the model on a
    node and `expands` before it gives the node children, and tells `grown` of the children.
    """

    def __init__(self, rules: AdaptiveRules) -> None:
        self.stopper = EntropyStopper(rules.stop) if rules.stop is not None else None
        self.budget = rules.budget
        self._spent: dict[int, float] = {-1: 0.0}
        self._level: dict[int, int] = {-1: 0}
        self._max_depth = 0
        self._num_tokens: int | None = None

    def start(self, request: ActiveRequest | None) -> None:
        self._num_tokens = None
        if self.stopper is not None:
            self.stopper.start(request)

    def begin(self, max_depth: int, num_tokens: int) -> None:
        """A new draft, of `max_depth` levels at most, after `num_tokens` tokens of output: those that came since the
        last draft are what it had accepted and the target's own token."""
        if self.stopper is not None and self._num_tokens is not None:
            accepted = num_tokens - self._num_tokens - 1
            self.stopper.observe(max(self._level.values()), accepted, self._max_depth)
        self._num_tokens = num_tokens
        self._spent, self._level, self._max_depth = {-1: 0.0}, {-1: 0}, max_depth

    def feeds(self, node: int) -> bool:
        """Whether the budget leaves `node` children."""
        return self.budget is None or self.budget.allows(self._spent[node])

    def expands(self, node: int, entropy: float) -> bool:
        """Whether children are drafted from the law after `node`, of `entropy` nats."""
        return self.stopper is None or self.stopper.allows(entropy, self._level[node])

    def grown(self, node: int, children: Sequence[int], entropy: float) -> None:
        """`children` were drafted from the law after `node`."""
        for child in children:
            self._spent[child] = self._spent[node] + entropy
            self._level[child] = self._level[node] + 1
