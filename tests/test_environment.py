"""The fingerprint changes with the machine and the software, not with the boot or the load."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from specbench.bench.environment import (
    FINGERPRINT_KEYS,
    code_revision,
    environment,
    fingerprint,
    last_level_cache_bytes,
    parse_cpuinfo,
)

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C
stepping\t: 8
cpu MHz\t\t: {mhz}
cache size\t: 107520 KB
flags\t\t: fpu avx avx2 fma amx_bf16 avx512f
bogomips\t: {bogomips}

processor\t: 1
model name\t: other
"""


@pytest.fixture(scope="module")
def env() -> dict[str, object]:
    return environment("cpu")


def test_environment_is_json_complete_and_repeatable(env: dict[str, object]) -> None:
    assert json.loads(json.dumps(env, allow_nan=False)) == env
    assert set(FINGERPRINT_KEYS) <= set(env)
    assert env["device"] == "cpu"
    assert env["device_name"] == env["cpu_model"]
    assert env["gpu"] is None
    assert env["torch"]
    assert fingerprint(env) == fingerprint(environment("cpu"))


def test_fault_90_readings_of_speed_do_not_matter() -> None:
    first = parse_cpuinfo(CPUINFO.format(mhz="2699.998", bogomips="10678.00"))
    second = parse_cpuinfo(CPUINFO.format(mhz="3100.001", bogomips="10681.00"))
    assert first == second
    assert first["model"] == "Intel(R) Xeon(R) Platinum 8481C family/model/stepping 6/143/8"
    assert first["isa"] == "amx_bf16 avx avx2 avx512f fma"


@pytest.mark.parametrize("key", ["kernel", "memory_bytes", "memory_gib", "code_revision"])
def test_what_may_change_on_one_machine_is_left_out(env: dict[str, object], key: str) -> None:
    assert fingerprint({**env, key: "changed"}) == fingerprint(env)


@pytest.mark.parametrize(
    "key",
    [
        "device",
        "device_name",
        "cpu_model",
        "cpu_isa",
        "cpu_cores_physical",
        "cpu_cores_usable",
        "llc_bytes",
        "machine",
        "os",
        "python",
        "torch",
        "numpy",
        "numba",
        "torch_threads",
        "numba_threads",
    ],
)
def test_what_makes_another_machine_is_in(env: dict[str, object], key: str) -> None:
    assert fingerprint({**env, key: "changed"}) != fingerprint(env)


def test_gpu_part(env: dict[str, object]) -> None:
    gpu = {"name": "NVIDIA H200", "memory_gib": 140, "driver": "570.1", "power_limit_w": 700.0, "uuid": "a"}
    base = fingerprint({**env, "gpu": gpu})
    assert base != fingerprint(env)
    assert fingerprint({**env, "gpu": {**gpu, "uuid": "b", "memory_bytes": 1}}) == base
    for key in ("name", "memory_gib", "driver", "power_limit_w"):
        assert fingerprint({**env, "gpu": {**gpu, key: 1}}) != base


def test_last_level_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "512K", "32M")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 32 << 20
    assert last_level_cache_bytes(tmp_path / "absent") is None


def _git(root: Path, *args: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *args], check=True, capture_output=True)


def test_code_revision(tmp_path: Path) -> None:
    source = tmp_path / "specbench" / "__init__.py"
    source.parent.mkdir()
    source.write_text("a = 1\n")
    assert code_revision(tmp_path).startswith("specbench-suite")
    _git(tmp_path, "init", "-q")
    assert code_revision(tmp_path).startswith("specbench-suite"), "an untracked copy is not the repository's source"
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "one")
    clean = code_revision(tmp_path)
    assert len(clean) == 12
    (tmp_path / "notes.md").write_text("results")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "two")
    assert code_revision(tmp_path) == clean, "a commit elsewhere does not make rows stale"
    source.write_text("a = 2\n")
    changed = code_revision(tmp_path)
    assert changed.startswith(f"{clean}+dirty.")
    source.write_text("a = 3\n")
    assert code_revision(tmp_path) != changed
    source.write_text("a = 1\n")
    assert code_revision(tmp_path) == clean
    (source.parent / "new.py").write_text("b = 1\n")
    with_new = code_revision(tmp_path)
    assert with_new.startswith(f"{clean}+dirty.")
    (source.parent / "new.py").write_text("b = 2\n")
    assert code_revision(tmp_path) != with_new
