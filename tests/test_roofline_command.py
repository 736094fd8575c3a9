"""`specbench roofline`: three roofs with knees and sources; what was measured is stored, told and reused."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specbench.bench import environment as environment_module
from specbench.bench import roof_measure, roofline_command
from specbench.bench.ceilings import MeasuredRoofs, Reading
from specbench.bench.ceilings_bandwidth import BandwidthPoint, LevelBandwidth
from specbench.bench.ceilings_skinny import make_point
from specbench.bench.roof_measure import linear_shapes
from specbench.errors import InputError, InvalidEnvironmentError
from specbench.roofline.hardware import catalogue
from specbench.roofline.shapes import ModelSpec, named_shape


def said(name: str | None = None, **options: Any) -> str:
    out = io.StringIO()
    code = roofline_command.roofline(Console(file=out, width=200, highlight=False), name, **options)
    assert code == 0
    return out.getvalue()


def made_roofs(spec: ModelSpec, bandwidth: float = 2e10) -> MeasuredRoofs:
    reading = Reading(bandwidth, bandwidth, 3, "made")
    peak = Reading(9e10, 9e10, 3, "made")
    own = tuple(make_point(m, n, k, "bf16", 1e-4 * m, "cpu") for n, k in linear_shapes(spec) for m in (1, 16))
    beside = tuple(dataclasses.replace(point, kernel="torch") for point in own)
    roofs = MeasuredRoofs("cpu", 1 << 28, reading, reading, reading, {"fp32": peak, "bf16": peak}, own, 1.0)
    return dataclasses.replace(
        roofs,
        model=spec.name,
        skinny_torch=beside,
        bandwidth=(BandwidthPoint("read", 1 << 20, 9e10, 3), BandwidthPoint("read", 1 << 28, 2e10, 3)),
        levels=(LevelBandwidth("L2", 1 << 20, {"read": 9e10, "copy": None, "triad": None}),),
        clock_hz=3.2e9,
        clock_how="made",
        measured_at="2026-11-30T02:00:00+00:00",
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """This machine is a CPU; `measure_everything` gives made figures; the user's cache is an empty folder."""
    told: dict[str, Any] = {"bandwidth": 2e10}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specbench.bench.devices.has_gpu", lambda: False)

    def measure_everything(device: str, spec: ModelSpec, **options: Any) -> MeasuredRoofs:
        told.update(device=device, spec=spec.name, **options)
        return made_roofs(spec, told["bandwidth"])

    monkeypatch.setattr(roof_measure, "measure_everything", measure_everything)
    return told


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_device_of_the_table_is_shown_with_its_sources(name: str) -> None:
    text = said(name)
    device = catalogue()[name]
    for dtype in device.peaks_flops_per_s:
        assert f"{dtype} peak" in text
    for cell in device.sources.values():
        assert cell.source in text
    assert "measured roof: none, this is another device" in text


def test_a_named_device_has_its_knee_and_what_it_means_for_a_model() -> None:
    text = said("h100-sxm", model="llama-3.1-8b")
    bf16 = next(line for line in text.splitlines() if line.split()[:1] == ["bf16"])
    assert bf16.split() == ["bf16", "989.4", "TFLOP/s", "295"]
    assert "3.35 TB/s" in text
    assert "108% of the datasheet's" in text
    assert "295 tokens in flight" in text
    assert "15.0 GB of weights read, at least 4.48 ms a pass" in text
    as_json = json.loads(said("h100-sxm", as_json=True))
    assert as_json["bandwidth_bytes_per_s"] == pytest.approx(3.35e12)
    assert as_json["sources"]["peak_bf16"].endswith("[V]")


def test_this_machine_before_and_after_measuring(measured: dict[str, Any], tmp_path: Path) -> None:
    before = said()
    assert before.startswith("device: ")
    assert "datasheet roof: " in before
    assert "measured roof: no measured roof of this device is stored; run with --measure" in before

    now = said(measure=True, model="tiny-llama-test", out=tmp_path / "charts")
    assert (measured["device"], measured["spec"], measured["skinny_dtype"]) == ("cpu", "tiny-llama-test", "bf16")
    assert "measured roof: now, stored in " in now
    assert "bandwidth by cache level" in now
    assert "clock under load: 3.20 GHz (made)" in now
    assert "100 µs" in now
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    endings = ("png", "svg", "csv")
    assert names == {"roofs.json", *(f"{n}.{e}" for n in ("bandwidth", "staircase") for e in endings)}
    assert json.loads((tmp_path / "charts" / "roofs.json").read_text())["model"] == "tiny-llama-test"

    after = said()
    assert "measured roof: measured 2026-11-30T02:00:00+00:00, stored, reused" in after
    bf16 = next(line for line in after.splitlines() if line.split()[:1] == ["bf16"])
    assert bf16.split()[-3:] == ["90.00", "GFLOP/s", "4.5"]
    told = json.loads(said(as_json=True))
    assert told["measured"]["read_bytes_per_s"] == 2e10
    assert told["measured"]["clock_hz"] == 3.2e9


def test_an_expired_roof_is_not_shown(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_command, "_write", lambda *args: [])
    said(measure=True, model="tiny-llama-test")
    environment = environment_module.environment
    monkeypatch.setattr(environment_module, "environment", lambda device: environment(device) | {"torch": "9.9"})
    text = said()
    assert "has expired: torch: " in text
    assert "GFLOP/s" not in text


def test_an_absurd_reading_is_an_error_and_not_stored(
    measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline_command, "_write", lambda *args: [])
    measured["bandwidth"] = 1.0
    with pytest.raises(InvalidEnvironmentError, match=r"can't be true: .*bandwidth"):
        said(measure=True, model="tiny-llama-test")
    assert "no measured roof of this device is stored" in said()


def test_a_model_that_is_not_named_is_the_cpus_own(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_command, "_write", lambda *args: [])
    said(measure=True)
    assert measured["spec"] == "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("h100-sxm", {"measure": True}, "this machine is no h100-sxm"),
        ("h100", {}, "unknown hardware 'h100'"),
        (None, {"model": "no-such-model"}, "no-such-model"),
        (None, {"measure": True, "dtype": "fp8"}, "no matmul of fp8 here"),
    ],
)
def test_input_that_is_wrong(name: str | None, options: dict[str, Any], message: str, measured: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=message) as caught:
        said(name, **options)
    assert caught.value.remedy
    assert "spec" not in measured, "nothing was measured"


def test_shapes_with_experts_are_refused() -> None:
    spec = named_shape("smollm2-135m")
    object.__setattr__(dense := dataclasses.replace(spec), "moe", object())
    with pytest.raises(InputError, match="has experts"):
        linear_shapes(dense)
