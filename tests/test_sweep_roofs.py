"""A sweep's roofs: the folder's own, else the stored ones, else measured; which it was is in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_tools import constant_device, constant_roofs, one_case

from specbench.bench import sweep_roofs
from specbench.bench.ceilings import MeasuredRoofs
from specbench.bench.environment import environment
from specbench.bench.roof_store import RoofFolder, default_folder
from specbench.bench.sweep_roofs import Linears, roofs_of_sweep, sweep_linears, target_linears
from specbench.roofline.shapes import named_shape
from specbench.scenario.cases import TargetSpec

ENV = environment("cpu")
H100: dict[str, Any] = {
    "device": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3",
    "torch": "2.13.0",
    "gpu": {"name": "NVIDIA H100 80GB HBM3", "uuid": None, "memory_bytes": 85_017_755_648, "sm_count": 132},
}


class Measure:
    """Counts how often it is asked to measure, and for what."""

    def __init__(self) -> None:
        self.calls: list[Linears | None] = []

    def __call__(self, linears: Linears | None) -> MeasuredRoofs:
        self.calls.append(linears)
        return constant_roofs()


def test_measured_once_then_stored_then_reused(tmp_path: Path) -> None:
    measure, told = Measure(), list[str]()
    first = roofs_of_sweep(None, ENV, measure, store=RoofFolder(tmp_path), tell=told.append)
    assert "by this run" in first["measured_told"]
    assert "no measured roof of this device is stored" in told[0]
    again = roofs_of_sweep(None, ENV, measure, store=RoofFolder(tmp_path), tell=told.append)
    assert len(measure.calls) == 1
    when = first["measured"]["measured_at"]
    assert again["measured_told"] == f"measured {when}, stored, reused"
    assert again["measured_told"] in again["measured"]["notes"], "the report prints notes"
    assert again["measured"]["gemm_flops_per_s"] == first["measured"]["gemm_flops_per_s"]
    roofs_of_sweep(None, ENV | {"numba": "0.0"}, measure, store=RoofFolder(tmp_path), tell=told.append)
    assert "has expired: numba" in told[-1]
    roofs_of_sweep(None, ENV, measure, tell=told.append)
    assert len(measure.calls) == 3, "without a store every folder is measured"


def test_a_stored_roof_without_the_targets_layers_is_measured_again(tmp_path: Path) -> None:
    measure = Measure()
    roofs_of_sweep(None, ENV, measure, store=RoofFolder(tmp_path))
    linears = Linears("cpu", "bf16", ((64, 32),))
    roofs_of_sweep(None, ENV, measure, linears=linears, store=RoofFolder(tmp_path))
    assert measure.calls == [None, linears]


def test_the_folders_roofs_stand_unless_they_can_not_be_true() -> None:
    measure, told = Measure(), list[str]()
    kept = roofs_of_sweep(None, ENV, measure)
    assert roofs_of_sweep(kept, ENV, measure) == kept
    assert len(measure.calls) == 1
    zero = kept | {"measured": kept["measured"] | {"bandwidth_bytes_per_s": 0.0}}
    anew = roofs_of_sweep(zero, ENV, measure, tell=told.append)
    assert len(measure.calls) == 2
    assert anew["measured"]["bandwidth_bytes_per_s"] == 1e11
    assert "bandwidth_bytes_per_s is 0" in told[0]


def test_nothing_is_measured_where_nothing_runs() -> None:
    roofs = roofs_of_sweep(None, ENV, None)
    assert (roofs["measured"], roofs["measured_told"]) == (None, "nothing was measured")
    assert roofs["h100"]["bandwidth_bytes_per_s"] > 3e12
    assert (roofs["datasheet"] is None) == bool(roofs["datasheet_reason"])


def test_the_clock_adjusted_roof_stands_beside_the_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(linears: Linears | None) -> MeasuredRoofs:
        roofs = constant_roofs()
        object.__setattr__(roofs, "clock_hz", 1.755e9)
        return roofs

    roofs = roofs_of_sweep(None, H100, measure)
    assert roofs["datasheet"]["name"] == "h100-sxm"
    ratio = roofs["clock_adjusted"]["peaks_flops_per_s"]["bf16"] / roofs["datasheet"]["peaks_flops_per_s"]["bf16"]
    assert ratio == pytest.approx(1755 / 1830)
    assert roofs_of_sweep(None, H100, Measure())["clock_adjusted"] is None


def test_the_layers_of_a_sweep_are_those_of_its_one_target() -> None:
    spec = named_shape("tiny-llama-test")
    target = one_case().target
    linears = sweep_linears([target, target], lambda _: spec)
    assert linears == target_linears(target, spec)
    assert linears is not None
    assert (linears.kernel, linears.dtype) == ("cpu", target.dtype)
    assert (spec.vocab_size, spec.hidden_size) in linears.shapes
    other = TargetSpec(**{**vars(target), "dtype": "fp64"})
    assert sweep_linears([other], lambda _: spec) is None
    assert sweep_linears([target, other], lambda _: spec) is None


def test_measuring_a_device_measures_its_targets_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_roofs, "ROOFS_S", 0.05)
    monkeypatch.setattr(sweep_roofs, "STAIRCASE_S", 0.2)
    monkeypatch.setattr("specbench.bench.ceilings.MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr("specbench.bench.ceilings.last_level_cache_bytes", lambda: 1 << 18)
    told: list[str] = []
    roofs = sweep_roofs.measure_device(told.append, "cpu", Linears("cpu", "bf16", ((64, 32), (32, 64))))
    assert {(point.n, point.k, point.kernel) for point in roofs.skinny} == {(64, 32, "cpu"), (32, 64, "cpu")}
    assert any("linear layers of the target" in text for text in told)
    plain = sweep_roofs.measure_device(told.append)
    assert {(point.n, point.k, point.kernel) for point in plain.skinny} == {(1536, 576, "cpu")}


def test_a_run_uses_the_users_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`specbench run` hands the store on; tests have an empty one each."""
    import specbench
    from specbench.bench import sweep as sweep_module

    monkeypatch.chdir(tmp_path)
    constant_device(monkeypatch)
    seen: list[Any] = []

    def run_sweep(*args: Any, **options: Any) -> Any:
        seen.append(options["roof_store"].folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "run_sweep", run_sweep)
    (tmp_path / "s.yaml").write_text(
        "name: tiny\nquestion: Does it run?\ntarget: {shape: tiny-llama-test, weights: dummy}\n"
        "drafters: [{kind: oracle}]\nsweep: {batch_size: [1], depth: 2}\n"
    )
    with pytest.raises(KeyboardInterrupt):
        specbench.run("s.yaml")
    assert seen == [default_folder()]
