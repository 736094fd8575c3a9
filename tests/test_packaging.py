"""The sdist and the wheel hold what the program reads at run time; made offline, with this environment's setuptools."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "results", "reports")
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def run(arguments: list[str], folder: Path) -> str:
    """Run Python in `folder`; returns its output, and shows all of it where the run fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """The distribution that setuptools builds from the folder `source`."""
    return out / run(["-c", BUILD, f"build_{kind}", str(out)], source).split()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the unpacked sdist of this tree, the unpacked wheel built from that sdist)."""
    folder = tmp_path_factory.mktemp("packaging")
    tree, out, sdist, wheel = (folder / name for name in ("tree", "out", "sdist", "wheel"))
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    out.mkdir()
    with tarfile.open(build("sdist", tree, out)) as archive:
        archive.extractall(sdist, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = sdist.iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, out)) as archive:
        archive.extractall(wheel)
    return unpacked, wheel


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def package_files() -> set[str]:
    """Every file of the source tree that must be in the wheel, by its place there."""
    found = {name for name in files_under(ROOT / "specbench") if "__pycache__" not in name}
    scenarios = {f"scenarios/{name}" for name in files_under(ROOT / "scenarios") if "__pycache__" not in name}
    kernels = {name for name in files_under(ROOT / "kernels") if "__pycache__" not in name}
    return {f"specbench/{name}" for name in found | scenarios} | kernels


def test_wheel_holds_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    _, wheel = distributions
    assert {name for name in files_under(wheel) if ".dist-info/" not in name} == package_files()


def test_data_files_are_among_them() -> None:
    wanted = {
        "specbench/scenario/data/prompts.jsonl",
        "specbench/report/templates/report.html.j2",
        "specbench/roofline/hardware.yaml",
        "specbench/scenarios/quickstart.yaml",
    }
    assert wanted <= package_files()


def test_sdist_holds_sources_tests_and_papers(distributions: tuple[Path, Path]) -> None:
    sdist, _ = distributions
    tests = {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")}
    assert tests | {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "dev.py"} <= files_under(sdist)


def test_wheel_has_name_licence_and_command(distributions: tuple[Path, Path]) -> None:
    _, wheel = distributions
    (info,) = wheel.glob("*.dist-info")
    assert info.name.startswith("specbench_suite-")
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text(encoding="utf-8")
    assert "specbench = specbench.cli:main" in (info / "entry_points.txt").read_text(encoding="utf-8")
    assert (info / "licenses" / "LICENSE").is_file()


def test_wheel_finds_its_data_away_from_the_source(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = distributions
    code = f"""
import sys
sys.path.insert(0, {str(wheel)!r})
import specbench
from specbench.roofline.hardware import hardware
from specbench.scenario.prompts import load_prompt_set
from specbench.scenario.schema import load_scenario
assert specbench.__file__.startswith({str(wheel)!r}), specbench.__file__
print(load_scenario("scenarios/quickstart.yaml").name)
print(hardware("h100-sxm").name, len(load_prompt_set("builtin").prompts))
"""
    assert run(["-P", "-c", code], tmp_path).split()[0] == "quickstart"


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "specbench").rglob("__init__.py")}
    assert set(settings["packages"]) == {".".join(folder.parts) for folder in folders} | {
        "specbench.scenarios",
        "specbench_kernels",
    }
