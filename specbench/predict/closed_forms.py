"""The closed forms of facts/roofline.md §2.6 beside the full model, each in the limit in which they must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.breakeven import break_even_alpha, closed_form_batch, expected_tokens, find_crossing
from specbench.roofline.draft_cost import drafter_shape
from specbench.roofline.hardware import hardware
from specbench.roofline.model import critical_tokens
from specbench.roofline.shapes import ModelSpec, named_shape
from specbench.roofline.step_model import Efficiency, StepModel

GAMMAS = (1, 3, 5, 7)
ALPHAS = (0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Check:
    """A closed form's value and the model's in its limit; `error` is the model's relative to it."""

    limit: str
    case: str
    closed: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.closed - 1


def linear_only(spec: ModelSpec) -> ModelSpec:
    """What the two-regime form assumes: MLPs so wide that activations vanish beside weights, and nothing else."""
    wide = 1 << 17
    return replace(
        spec,
        num_layers=1,
        hidden_size=wide,
        intermediate_size=wide,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=64,
    )


def checks() -> tuple[Check, ...]:
    """Every closed form and the model, in the limits where they must be one."""
    roof = hardware("h100-sxm").known_roof("bf16")
    llama = named_shape("llama-3.1-8b")
    return (*_tokens(), *_memory_bound(StepModel(llama, roof)), *_batches(StepModel(linear_only(llama), roof)),
            *_efficiencies(linear_only(llama)), *_thresholds(StepModel(llama, roof)))  # fmt: skip


def _tokens() -> list[Check]:
    """(1 - α^(γ+1)) / (1 - α) is the curve's own sum where its rates are one constant (Leviathan, 2211.17192)."""
    return [
        Check("constant acceptance", f"tokens a step, α {alpha:g}, γ {gamma}", expected_tokens(alpha, gamma),
              AcceptanceCurve.constant(alpha).expected_tokens(gamma))
        for alpha in ALPHAS
        for gamma in GAMMAS
    ]  # fmt: skip


def _memory_bound(model: StepModel) -> list[Check]:
    """S = A / (1 + γc) where a verify pass costs an AR step: one request, no context, no host (2211.17192)."""
    draft = drafter_shape("eagle3", model.target)
    ar = model.ar_s(1, 0)
    found = []
    for gamma in GAMMAS:
        # c from one pass that feeds one row; the model's first pass feeds the accepted ones too
        cost = model.draft_s(1, 0, gamma, draft) / gamma / ar
        closed = expected_tokens(0.7, gamma) / (1 + gamma * cost)
        told = model.speedup(1, 0, gamma, draft, AcceptanceCurve.constant(0.7))
        found.append(Check("memory bound, batch 1", f"speedup, α 0.7, γ {gamma}, c {cost:.3f}", closed, told))
    return found


def _batches(model: StepModel, told: str = "linear layers alone, free drafts") -> list[Check]:
    """B_be = T*(A - γc) / (γ+1) with c = 0."""
    found = []
    critical = critical_tokens(model.roof, 2) * model.efficiency.compute / model.efficiency.memory
    for alpha in ALPHAS:
        for gamma in GAMMAS:
            closed = closed_form_batch(critical, expected_tokens(alpha, gamma), gamma, 0.0)
            crossing = _crossing(model, gamma, alpha)
            if closed is not None and crossing is not None:
                found.append(Check(told, f"break-even batch, α {alpha:g}, γ {gamma}", closed, crossing))
    return found


def _efficiencies(spec: ModelSpec) -> list[Check]:
    """T*_eff = T* η_c / η_m moves the crossing in proportion."""
    roof = hardware("h100-sxm").known_roof("bf16")
    model = StepModel(spec, roof, Efficiency(compute=0.6, memory=0.85))
    return [check for check in _batches(model, "the same with η_c 0.6, η_m 0.85") if "α 0.7" in check.case]


def _thresholds(model: StepModel) -> list[Check]:
    """α* with A(α*, γ) = R: an acceptance of just α* gives a speedup of 1."""
    found = []
    for gamma in (1, 3, 5):
        step = model.step(96, 512, gamma, drafter_shape("eagle3", model.target))
        ratio = step.total_s / model.ar_s(96, 512)
        alpha = break_even_alpha(ratio, gamma)
        if alpha is not None:
            gained = AcceptanceCurve.constant(alpha).expected_tokens(gamma) / ratio
            found.append(
                Check("break-even acceptance", f"speedup at α* = {alpha:.3f}, γ {gamma}, batch 96", 1.0, gained)
            )
    return found


def _crossing(model: StepModel, gamma: int, alpha: float) -> float | None:
    """The batch at which the model's speedup falls through 1, between whole batches."""
    curve = AcceptanceCurve.constant(alpha)

    def value(batch: int) -> float:
        return model.speedup(batch, 0, gamma, None, curve)

    low, high = 1, 4096
    if value(low) <= 1 or value(high) >= 1:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) > 1 else (low, middle)
    return find_crossing([low, high], [value(low), value(high)]).estimate


def worst(found: Sequence[Check]) -> dict[str, Check]:
    """Limit -> the check that is farthest off in it."""
    result: dict[str, Check] = {}
    for check in found:
        if check.limit not in result or abs(check.error) > abs(result[check.limit].error):
            result[check.limit] = check
    return result


__all__ = ["Check", "checks", "linear_only", "worst"]
