"""AcceptanceCurve: what share of a drafter's tokens is accepted, position by position, and what that yields a step.

Real acceptance falls with the position, so a curve of conditional rates is kept, never one constant (facts: MTP on
GLM-4.5-Air 0.92, 0.68, 0.38). Tokens a step = 1 + Σ_j Π_{i≤j} a_i, the bonus token included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from specbench.errors import InputError
from specbench.roofline.breakeven import expected_tokens_curve

MAX_DEPTH = 1024
LONG_OUTPUT = 4096
"""Above so many tokens a request's end no longer changes the mean step, and is left out."""
RISING = 1e-9


class StepYield(NamedTuple):
    """The mean step of a request: tokens it gains, and the levels it drafts over the depth asked for (0 to 1)."""

    tokens: float
    drafted_share: float


@dataclass(frozen=True)
class AcceptanceCurve:
    """Acceptance by position: `conditional[i - 1]` is the rate at position i where all before it were accepted.

    Beyond its length the last rate holds. `drafted` is the mean nodes verified a step over the most nodes of a draft,
    where that was seen: lookup drafters often find nothing; None means every step drafts in full, but for a request's
    end. A curve that was seen holds those ends already. `source` says where it is from, and `status` what it is:
    measured, published, forced (by the scenario) or assumed.
    """

    conditional: tuple[float, ...]
    drafted: float | None = None
    source: str = ""
    status: str = "assumed"

    def __post_init__(self) -> None:
        if not self.conditional:
            raise InputError("an acceptance curve without rates", remedy="give a rate for position 1 at least")
        if len(self.conditional) > MAX_DEPTH:
            raise InputError(f"an acceptance curve of {len(self.conditional)} positions", remedy=f"give {MAX_DEPTH}")
        _check_rates(self.conditional, "conditional acceptance")
        if self.drafted is not None:
            _check_rates((self.drafted,), "drafted share")

    @classmethod
    def from_joint(cls, joint: Sequence[float], **told: Any) -> AcceptanceCurve:
        """From the shares of drafts whose first i tokens were all accepted (acceptance_at): they can only fall.

        Raises InputError where they rise or leave [0, 1].
        """
        _check_rates(joint, "joint acceptance")
        before, rates = 1.0, []
        for position, value in enumerate(joint, start=1):
            if value > before + RISING:
                raise InputError(
                    f"joint acceptance rises from {before:g} to {value:g} at position {position}",
                    key="acceptance",
                    remedy="the share of drafts accepted up to a position can only fall; are these conditional rates?",
                )
            rates.append(min(1.0, value / before) if before > 0 else 0.0)
            before = value
        return cls(tuple(rates), **told)

    @classmethod
    def from_row(cls, metrics: Mapping[str, Any], num_nodes: int | None = None, **told: Any) -> AcceptanceCurve:
        """From a row's metrics: over all steps of the window, those without a draft too, so that 1 + Σ joint is the
        accepted tokens a step. `num_nodes`: the most nodes of one draft; with it, `drafted` is known.

        Where the row has no histogram, acceptance_conditional_at, then acceptance_at. Raises InputError for neither.
        """
        told.setdefault("status", "measured")
        histogram, steps = metrics.get("accepted_histogram"), metrics.get("num_steps")
        if isinstance(histogram, list | tuple) and len(histogram) > 1 and steps:
            at_least = [sum(histogram[i:]) / steps for i in range(1, len(histogram))]
            drafted = None
            if num_nodes and metrics.get("num_draft_tokens") is not None:
                drafted = min(1.0, float(metrics["num_draft_tokens"]) / (float(steps) * num_nodes))
            return cls.from_joint(at_least, drafted=drafted, **told)
        conditional = metrics.get("acceptance_conditional_at")
        if isinstance(conditional, list | tuple) and conditional:
            return cls(tuple(0.0 if rate is None else float(rate) for rate in conditional), **told)
        joint = metrics.get("acceptance_at")
        if isinstance(joint, list | tuple) and joint:
            return cls.from_joint([0.0 if rate is None else float(rate) for rate in joint], **told)
        raise InputError("the row has no acceptance by position", key="metrics", remedy="give a row of a drafter")

    @classmethod
    def constant(cls, rate: float, **told: Any) -> AcceptanceCurve:
        """The same rate at every position: the i.i.d. assumption of the closed forms."""
        return cls((rate,), **told)

    @classmethod
    def of_length(cls, length: float, depth: int, **told: Any) -> AcceptanceCurve:
        """Acceptance of floor(length - 1) tokens and, with the rest as its probability, of one more: what a `forced`
        drafter of that acceptance length does. The length is 1 to depth + 1."""
        if not 1 <= length <= depth + 1:
            raise InputError(f"a length of {length:g} can't be had at depth {depth}", remedy=f"give 1 to {depth + 1}")
        whole = int(length - 1)
        rates = [1.0] * whole + [length - 1 - whole] + [0.0]
        return cls(tuple(rates), **told)

    def rates(self, depth: int) -> tuple[float, ...]:
        """`depth` conditional rates; the last known one is held beyond the curve's end."""
        if depth < 0:
            raise InputError(f"a depth of {depth}", key="depth", remedy="give 0 or more")
        known = self.conditional[:depth]
        return known + (self.conditional[-1],) * (depth - len(known))

    def joint(self, depth: int) -> tuple[float, ...]:
        """P(the first i tokens are accepted) for i = 1 .. depth."""
        values, product = [], 1.0
        for rate in self.rates(depth):
            product *= rate
            values.append(product)
        return tuple(values)

    def expected_tokens(self, depth: int, output_tokens: int | None = None) -> float:
        """E[tokens a step] at `depth`, bonus token included; see `step_yield` for `output_tokens`."""
        return self.step_yield(depth, output_tokens).tokens

    def step_yield(self, depth: int, output_tokens: int | None = None) -> StepYield:
        """The mean step of a request of `output_tokens` decoded tokens (None: endless).

        A request's last steps draft less, and what goes beyond its length is lost, so short outputs yield less than
        1 + Σ joint. A curve that was seen (`drafted` is set) holds its requests' ends already.
        """
        if depth == 0:
            return StepYield(1.0, 0.0)
        if self.drafted is not None or output_tokens is None or output_tokens > LONG_OUTPUT:
            share = 1.0 if self.drafted is None else self.drafted
            return StepYield(expected_tokens_curve(self.rates(depth)), share)
        if output_tokens < 1:
            raise InputError(f"an output of {output_tokens} tokens", key="output_len", remedy="give 1 or more")
        return _finite_yield(self.rates(depth), output_tokens)

    def named(self, source: str, status: str | None = None) -> AcceptanceCurve:
        """The same curve, saying where it is from."""
        return replace(self, source=source, status=status or self.status)


@lru_cache(maxsize=4096)
def _finite_yield(rates: tuple[float, ...], output_tokens: int) -> StepYield:
    """Renewal over the remaining tokens r: a step drafts min(depth, r - 1) levels, gains 1 + the accepted ones, and
    the request goes on with what is left. Mean step = tokens / E[steps]; exact for acceptance that is independent."""
    depth = len(rates)
    # law[d]: P(accepted = 0 .. d) of a draft of d levels
    laws = []
    for levels in range(depth + 1):
        reach, law = 1.0, []
        for rate in rates[:levels]:
            law.append(reach * (1 - rate))
            reach *= rate
        laws.append([*law, reach])
    steps, drafted = [0.0], [0.0]
    for left in range(1, output_tokens + 1):
        levels = min(depth, left - 1)
        more = [(chance, left - 1 - accepted) for accepted, chance in enumerate(laws[levels]) if chance]
        steps.append(1.0 + sum(chance * steps[rest] for chance, rest in more))
        drafted.append(levels + sum(chance * drafted[rest] for chance, rest in more))
    total = steps[output_tokens]
    return StepYield(output_tokens / total, drafted[output_tokens] / (total * depth))


def _check_rates(rates: Sequence[float], what: str) -> None:
    for position, rate in enumerate(rates, start=1):
        usable = isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)
        if not usable or not 0 <= rate <= 1:
            raise InputError(
                f"{what} at position {position} is {rate!r}",
                key="acceptance",
                remedy="rates are shares between 0 and 1, such as 0.8 (80 % is 0.8)",
            )
