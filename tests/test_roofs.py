"""Three roofs of a device, and no absurd stored roof is ever used."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specbench.errors import InputError
from specbench.roofline.hardware import hardware
from specbench.roofline.roofs import clock_adjusted, measured_faults, measured_roof, three_roofs

H100 = hardware("h100-sxm")


def stored(**changes: Any) -> dict[str, Any]:
    return {
        "bandwidth_bytes_per_s": 3.0e12,
        "bandwidth_limit_bytes_per_s": 3.1e12,
        "gemm_flops_per_s": {"fp32": 300e12, "bf16": 700e12},
        "flops_limit_per_s": {"fp32": 310e12, "bf16": 720e12},
        "clock_hz": 1.98e9,
        "measured_at": "2026-11-30T02:00:00+00:00",
        **changes,
    }


def test_the_clock_scales_peaks_and_not_bandwidth() -> None:
    """132 SM x 4096 x 1.98 GHz = 1070 TFLOP/s: a measured 103 % of the datasheet is no fault."""
    adjusted = clock_adjusted(H100, 1.98e9)
    assert adjusted is not None
    assert adjusted.peak_flops_per_s("bf16") == pytest.approx(1070.5e12, rel=1e-3)
    assert adjusted.bandwidth_bytes_per_s == H100.bandwidth_bytes_per_s
    assert "1980 instead of 1830 MHz" in adjusted.sources["peak_bf16"].source
    assert clock_adjusted(hardware("h20-96gb"), 1.9e9) is None, "its cap is not a clock cap"
    for absurd in (0.0, math.nan, math.inf, 1.98e3, 1.98e12):
        with pytest.raises(InputError, match="clock"):
            clock_adjusted(H100, absurd)


def test_three_roofs_with_their_knees() -> None:
    roofs = three_roofs("bf16", H100, stored())
    assert [roof.kind for roof in roofs] == ["datasheet", "clock-adjusted", "measured"]
    assert [round(roof.roof.knee) for roof in roofs] == [295, 320, 233]
    assert "2026-11-30" in roofs[2].source
    assert [roof.kind for roof in three_roofs("fp8", H100, stored())] == ["datasheet", "clock-adjusted"]
    assert [roof.kind for roof in three_roofs("bf16", H100, stored(clock_hz=None))] == ["datasheet", "measured"]
    assert [roof.kind for roof in three_roofs("bf16", None, stored())] == ["measured"]
    assert three_roofs("bf16", None, None) == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s is 0"),
        ({"bandwidth_bytes_per_s": -3e12}, "bandwidth_bytes_per_s is -3e"),
        ({"bandwidth_bytes_per_s": math.nan}, "nan"),
        ({"bandwidth_limit_bytes_per_s": math.inf}, "inf"),
        ({"bandwidth_bytes_per_s": None}, "None, not a number"),
        ({"bandwidth_bytes_per_s": "fast"}, "'fast', not a number"),
        ({"bandwidth_bytes_per_s": True}, "True, not a number"),
        ({"bandwidth_bytes_per_s": 3000.0}, "3000 per second"),
        ({"bandwidth_bytes_per_s": 3.8e12, "bandwidth_limit_bytes_per_s": 3.9e12}, "113% of h100-sxm's datasheet"),
        ({"gemm_flops_per_s": {}}, "no dtype"),
        ({"gemm_flops_per_s": None}, "no dtype"),
        ({"gemm_flops_per_s": {"bf16": 0.0}}, "bf16 is 0"),
        ({"gemm_flops_per_s": {"bf16": 1979e12}}, "bf16 peak is 200%"),
        ({"flops_limit_per_s": {"fp32": 1e12}}, "flops_limit_per_s of bf16 is None"),
    ],
)
def test_an_absurd_roof_is_an_error_and_never_used(changes: dict[str, Any], reason: str) -> None:
    assert any(reason in fault for fault in measured_faults(stored(**changes), H100))
    with pytest.raises(InputError, match="can't be true") as caught:
        measured_roof(stored(**changes), "bf16", H100)
    assert "roofline --measure" in (caught.value.remedy or "")


def test_a_sound_roof_is_used() -> None:
    assert measured_faults(stored(), H100) == ()
    assert measured_faults(stored()) == ()
    assert measured_roof(stored(), "bf16").knee == pytest.approx(700 / 3)
    with pytest.raises(InputError, match="no fp8 roof was measured"):
        measured_roof(stored(), "fp8", H100)
