"""The throttle: how many levels to draft in the next step, 0 allowed, from batch, context and what was accepted so far.

Before every step it takes the depth γ with the most tokens a second,

    argmax over γ of (1 + Σ_{j <= γ} Π_{i <= j} c_i) / T(B, S, γ),

T from a step model (measured step times, or a fitted `StepModel`), c_i the running chance that position i is accepted
once all before it were, where nothing offered counts as not accepted (TurboSpec's goodput, arXiv 2406.14066, with a
curve by position in the place of one rate). It reads past steps alone, so a sampled request keeps the target's law.

    specbench run scenario.yaml        # with sweep: {depth: [1, 3, 5, auto]}

Evidence fades by `decay` a step. A position without evidence is taken to be as good as the one before it, the first one
as good as `prior`: so a depth that is not drafted is tried again once what spoke against it has faded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbench.errors import InputError

PRIOR = 0.7
"""Acceptance of the first position before anything was seen."""
WEIGHT = 4.0
"""Observations that a position's prior weighs."""
DECAY = 0.98
"""What a step leaves of the evidence before it: half is gone after 34 steps."""
CONTEXT_BUCKET = 64
"""Contexts of one bucket share their step times."""


class StepTimer(Protocol):
    """What a step takes, in seconds, all of it: drafting `depth` levels, verifying them, and the host."""

    def step_times(self, batch: int, context_len: int, depth: int) -> float: ...


class DepthPolicy(Protocol):
    """What the engine asks before every step, and tells after it."""

    def depth(self, batch: int, context_len: int) -> int: ...
    def observe(self, drafted: int, accepted: int, asked: int | None = None) -> None: ...


@dataclass(frozen=True)
class FixedDepth:
    """A policy that always says the same."""

    levels: int

    def depth(self, batch: int, context_len: int) -> int:
        return self.levels

    def observe(self, drafted: int, accepted: int, asked: int | None = None) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Step times by depth as measured at one batch and context, which are taken to hold for the whole cell.

    `seconds[γ]` is a step of depth γ; each must be finite and positive (InputError).
    """

    seconds: tuple[float, ...]
    batch_size: int

    def __post_init__(self) -> None:
        if not self.seconds:
            raise InputError("no step time was measured", key="depth")
        for depth, value in enumerate(self.seconds):
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"a step of depth {depth} took {value} s", key="depth")

    def step_times(self, batch: int, context_len: int, depth: int) -> float:
        return self.seconds[depth]


class CachedSteps:
    """Step times of a model, each asked for once: contexts are rounded to the middle of their bucket."""

    def __init__(self, model: StepTimer) -> None:
        self._model = model
        self._known: dict[tuple[int, int, int], float] = {}

    def step_times(self, batch: int, context_len: int, depth: int) -> float:
        bucket = context_len // CONTEXT_BUCKET
        key = (batch, bucket, depth)
        if key not in self._known:
            middle = bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2
            self._known[key] = self._model.step_times(batch, middle, depth)
        return self._known[key]


class RunningAcceptance:
    """Chances by position from faded counts: `rate(j)` is that position j + 1 is accepted once all before it were.

    `prior` is the first position's rate, or a curve with one a position (beyond its end each position's prior is the
    rate before it); it weighs `weight` observations. Raises InputError outside of [0, 1].
    """

    def __init__(self, max_depth: int, prior: float | Sequence[float], weight: float, decay: float) -> None:
        curve = (prior,) if isinstance(prior, int | float) else tuple(prior)
        if not curve or any(not 0 <= rate <= 1 for rate in curve):
            raise InputError(f"acceptance of {list(curve)}", key="prior", remedy="give rates in [0, 1]")
        if not weight > 0 or not 0 < decay <= 1:
            raise InputError(f"weight {weight} and decay {decay}", remedy="weight above 0, decay in (0, 1]")
        self._curve, self._weight, self._decay = curve, weight, decay
        self._tried = [0.0] * max_depth
        self._accepted = [0.0] * max_depth

    def fade(self) -> None:
        """A step passed."""
        for counts in (self._tried, self._accepted):
            for place in range(len(counts)):
                counts[place] *= self._decay

    def observe(self, asked: int, accepted: int) -> None:
        """A request was to draft `asked` levels, and `accepted` of them stand: position i was tried if it was asked for
        and all before it were accepted."""
        for place in range(min(asked, accepted + 1, len(self._tried))):
            self._tried[place] += 1
            self._accepted[place] += place < accepted

    def rates(self) -> list[float]:
        rates: list[float] = []
        for place, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            prior = self._curve[place] if place < len(self._curve) else rates[-1]
            rates.append((accepted + self._weight * prior) / (tried + self._weight))
        return rates

    def expected_tokens(self) -> list[float]:
        """Index γ: tokens of a step that drafts γ levels, the target's own included."""
        tokens, joint = [1.0], 1.0
        for rate in self.rates():
            joint *= rate
            tokens.append(tokens[-1] + joint)
        return tokens


class Throttle:
    """Picks the depth of each step, in [0, max_depth]. One throttle a cell: what it learned is not for the next one.

    `steps` tells what a step takes. `depth` is asked once a step, before anything is drafted; `observe` is told of each
    request after it.
    """

    def __init__(
        self,
        steps: StepTimer,
        max_depth: int,
        *,
        prior: float | Sequence[float] = PRIOR,
        weight: float = WEIGHT,
        decay: float = DECAY,
    ) -> None:
        if max_depth < 1:
            raise InputError(f"a largest depth of {max_depth}", key="max_depth", remedy="give 1 or more")
        self._steps, self._settings = steps, (prior, weight, decay)
        self.max_depth = max_depth
        self.reset()

    def reset(self) -> None:
        """Forget all that was seen."""
        self.acceptance = RunningAcceptance(self.max_depth, *self._settings)

    def depth(self, batch: int, context_len: int) -> int:
        """The depth of the next step for `batch` busy slots with `context_len` tokens each in the mean. Among depths
        that are as good the smallest."""
        self.acceptance.fade()
        return best_depth(self._steps, self.acceptance.expected_tokens(), batch, context_len)

    def observe(self, drafted: int, accepted: int, asked: int | None = None) -> None:
        """One request's step: `drafted` levels were verified, `accepted` stand. `asked` levels were to be drafted, of
        which a drafter may offer fewer (None: it offered all)."""
        asked = drafted if asked is None else asked
        assert 0 <= accepted <= drafted <= asked, "accepted <= drafted <= asked"
        self.acceptance.observe(asked, accepted)


def best_depth(steps: StepTimer, expected_tokens: Sequence[float], batch: int, context_len: int) -> int:
    """argmax over γ of expected_tokens[γ] / T(batch, context_len, γ), the smallest of equals."""
    best, best_rate = 0, 0.0
    for depth, tokens in enumerate(expected_tokens):
        rate = tokens / steps.step_times(batch, context_len, depth)
        if rate > best_rate * (1 + 1e-12):
            best, best_rate = depth, rate
    return best


def depth_table(
    steps: StepTimer, expected_tokens: Sequence[float], context_len: int, batches: Sequence[int]
) -> dict[int, int]:
    """Batch -> best depth, for an acceptance that is known."""
    return {batch: best_depth(steps, expected_tokens, batch, context_len) for batch in batches}
