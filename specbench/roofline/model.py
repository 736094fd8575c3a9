"""The roofline itself: what a device can reach at an intensity, and how long a cost takes under its roofs.

Williams, Waterman, Patterson, CACM 52(4), 2009: attainable = min(peak, bandwidth · intensity), FLOP per DRAM byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.roofline.cost import Cost, StepCost


@dataclass(frozen=True)
class Roof:
    """One compute peak (FLOP/s) under one memory bandwidth (byte/s)."""

    flops_per_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.bandwidth_bytes_per_s > 0):
            raise ValueError(f"a roof must be positive, got {self}")

    @property
    def knee(self) -> float:
        """Intensity in FLOP/byte at which the device turns from memory bound to compute bound."""
        return self.flops_per_s / self.bandwidth_bytes_per_s


def attainable_flops_per_s(roof: Roof, intensity: float) -> float:
    """min(peak, bandwidth · intensity), in FLOP/s."""
    return min(roof.flops_per_s, roof.bandwidth_bytes_per_s * intensity)


def time_s(cost: Cost, roof: Roof) -> float:
    """Least time of one op under the roof: max(FLOPs / peak, bytes / bandwidth)."""
    return max(cost.flops / roof.flops_per_s, cost.bytes / roof.bandwidth_bytes_per_s)


def step_time_s(step: StepCost, roof: Roof) -> float:
    """Least time of a forward pass: the sum over op classes of their own max, because classes run one after another."""
    return sum(time_s(cost, roof) for cost in step.by_class().values())


def roof_fraction(cost: Cost, duration_s: float, roof: Roof) -> float | None:
    """Achieved / attainable FLOP/s at the cost's own intensity, as a share (1.0 = on the roof).

    For a cost without FLOPs it is the share of the bandwidth. None where nothing was done or no time passed.
    """
    if duration_s <= 0 or (cost.flops <= 0 and cost.bytes <= 0):
        return None
    return time_s(cost, roof) / duration_s


def critical_tokens(roof: Roof, weight_bytes_per_param: float) -> float:
    """T*: tokens in flight at which linear layers turn compute bound, (peak / bandwidth) · b_w / 2."""
    return roof.knee * weight_bytes_per_param / 2
