"""A stored roof is used only while device, driver, dtype and clocks are the same and its figures can be true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.roof_store import RoofFolder, conditions, default_folder
from specbench.roofline.hardware import hardware

WHEN = "2026-11-30T02:00:00+00:00"
GPU: dict[str, Any] = {
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "torch": "2.13.0",
    "gpu": {
        "name": "NVIDIA H200",
        "uuid": "abc",
        "memory_gib": 140,
        "sm_count": 132,
        "driver": "550.54",
        "cuda": "12.8",
    },
}
CPU: dict[str, Any] = {
    "device": "cpu",
    "device_name": "AMD EPYC",
    "cpu_model": "AMD EPYC",
    "cpu_isa": "avx2",
    "cpu_cores_usable": 2,
    "llc_bytes": 1 << 25,
    "torch_threads": 2,
    "torch": "2.13.0",
    "numba": "0.61",
    "gpu": None,
}
POLICY = {"power_limit_w": 700.0, "application_clock_mhz": 1980}


def roofs(**changes: Any) -> dict[str, Any]:
    return {
        "measured_at": WHEN,
        "bandwidth_bytes_per_s": 4.2e12,
        "bandwidth_limit_bytes_per_s": 4.3e12,
        "gemm_flops_per_s": {"fp32": 300e12, "bf16": 700e12},
        "flops_limit_per_s": {"fp32": 300e12, "bf16": 700e12},
        "skinny": [{"m": 1, "n": 64, "k": 32, "dtype": "bf16", "kernel": "cpu", "time_s": 1e-5}],
        "marks": [],
        **changes,
    }


def changed(env: dict[str, Any], **gpu: Any) -> dict[str, Any]:
    return env | {"gpu": env["gpu"] | gpu}


def test_what_was_stored_is_found_and_its_time_told(tmp_path: Path) -> None:
    store, known = RoofFolder(tmp_path / "a" / "b"), conditions(GPU, POLICY)
    assert store.load(known, ["bf16"]).roofs is None
    assert "no measured roof of this device is stored" in store.load(known, ["bf16"]).told
    assert store.save(known, roofs()) is None
    found = store.load(known, ["bf16", "fp32"], shapes=[(64, 32)], skinny_dtype="bf16")
    assert found.roofs == roofs()
    assert found.told == f"measured {WHEN}, stored, reused"
    assert [file.name for file in store.folder.iterdir()] == [store.file(known).name], "no part is left behind"
    assert store.file(known).name.startswith("nvidia-h200-")


@pytest.mark.parametrize(
    ("env", "policy", "reason"),
    [
        (changed(GPU, driver="560.35"), POLICY, "driver: 550.54 -> 560.35"),
        (changed(GPU, cuda="12.9"), POLICY, "cuda: 12.8 -> 12.9"),
        (GPU | {"torch": "2.14.1"}, POLICY, "torch: 2.13.0 -> 2.14.1"),
        (GPU, POLICY | {"power_limit_w": 500.0}, "power_limit_w: 700.0 -> 500.0"),
        (GPU, POLICY | {"application_clock_mhz": 1200}, "application_clock_mhz: 1980 -> 1200"),
    ],
)
def test_driver_and_clock_changes_make_it_expire(
    env: dict[str, Any], policy: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    store = RoofFolder(tmp_path)
    store.save(conditions(GPU, POLICY), roofs())
    found = store.load(conditions(env, policy), ["bf16"])
    assert found.roofs is None
    assert f"the roof measured {WHEN} has expired: {reason}" in found.told


@pytest.mark.parametrize("other", [changed(GPU, uuid="def"), changed(GPU, name="NVIDIA H100 NVL"), CPU])
def test_another_device_has_a_roof_of_its_own(other: dict[str, Any], tmp_path: Path) -> None:
    store = RoofFolder(tmp_path)
    store.save(conditions(GPU, POLICY), roofs())
    assert "no measured roof of this device" in store.load(conditions(other, POLICY), ["bf16"]).told
    store.save(conditions(other, POLICY), roofs(bandwidth_bytes_per_s=1e12))
    assert store.load(conditions(GPU, POLICY), ["bf16"]).roofs == roofs()


@pytest.mark.parametrize("key", ["cpu_cores_usable", "torch_threads", "cpu_isa", "numba"])
def test_a_cpu_with_other_cores_threads_or_libraries_is_measured_again(key: str, tmp_path: Path) -> None:
    store = RoofFolder(tmp_path)
    store.save(conditions(CPU, {"governor": None}), roofs())
    assert store.load(conditions(CPU, {"governor": None}), ["bf16"]).roofs
    assert store.load(conditions(CPU | {key: 9}, {"governor": None}), ["bf16"]).roofs is None
    assert store.load(conditions(CPU, {"governor": "powersave"}), ["bf16"]).roofs is None
    known = conditions(CPU, {"governor": None})
    faster = known | {"driver": known["driver"] | {"kernels": "0123456789abcdef"}}
    assert "kernels: " in store.load(faster, ["bf16"]).told, "a staircase of other kernels says nothing of these"


def test_a_dtype_or_a_shape_that_was_not_measured_is_no_hit(tmp_path: Path) -> None:
    store, known = RoofFolder(tmp_path), conditions(GPU, POLICY)
    store.save(known, roofs())
    assert "has no fp16" in store.load(known, ["bf16", "fp16"]).told
    assert "n, k = 64, 33" in store.load(known, [], shapes=[(64, 32), (64, 33)]).told
    assert "n, k = 64, 32" in store.load(known, [], shapes=[(64, 32)], skinny_dtype="fp32").told
    assert "n, k = 64, 32" in store.load(known, [], shapes=[(64, 32)], kernel="torch").told
    assert store.load(known, [], shapes=[(64, 32)], kernel="cpu").roofs


@pytest.mark.parametrize(
    "absurd",
    [
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": 9e12},
        {"gemm_flops_per_s": {}},
        {"gemm_flops_per_s": {"bf16": -1.0}},
        {"flops_limit_per_s": None},
    ],
)
def test_absurd_figures_are_neither_stored_nor_used(absurd: dict[str, Any], tmp_path: Path) -> None:
    store, known, sheet = RoofFolder(tmp_path), conditions(GPU, POLICY), hardware("h200-sxm")
    assert "not stored" in (store.save(known, roofs(**absurd), sheet) or "")
    assert not store.file(known).exists()
    store.save(known, roofs())
    stored = json.loads(store.file(known).read_text())
    store.file(known).write_text(json.dumps(stored | {"roofs": roofs(**absurd)}))
    found = store.load(known, ["bf16"], sheet=sheet)
    assert found.roofs is None
    assert "can't be true" in found.told


def test_a_busy_machine_stores_nothing(tmp_path: Path) -> None:
    store, known = RoofFolder(tmp_path), conditions(GPU, POLICY)
    assert store.save(known, roofs(marks=["foreign load 50%"])) == "not stored: foreign load 50%"
    assert store.load(known, ["bf16"]).roofs is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"conditions": 1, "roofs": 2}',
        '{"conditions": {}, "roofs": {"measured_at": "x", "skinny": [1]}}',
    ],
)
def test_a_broken_file_is_told_and_replaced(text: str, tmp_path: Path) -> None:
    store, known = RoofFolder(tmp_path), conditions(GPU, POLICY)
    store.file(known).parent.mkdir(parents=True, exist_ok=True)
    store.file(known).write_text(text)
    assert "can't be read" in store.load(known, ["bf16"]).told
    assert store.save(known, roofs()) is None
    assert store.load(known, ["bf16"]).roofs


def test_a_folder_that_can_not_be_written_costs_the_store_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = RoofFolder(tmp_path / "file" / "roofs").save(conditions(GPU, POLICY), roofs())
    assert told is not None
    assert told.startswith("not stored: ")


def test_the_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own" / "roofs"
    monkeypatch.delenv("SPECBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "specbench" / "roofs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "specbench" / "roofs"
