"""Rules of the layout that an import linter can't see: what is loaded when, and how long a file may grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 450
HEAVY = ("torch", "numba", "llvmlite", "pandas", "matplotlib", "scipy", "transformers", "triton")
ENGINE_ONLY = ("torch", "numba", "llvmlite", "triton", "transformers")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocked(names: tuple[str, ...]) -> str:
    """Code after which an import of any of `names` fails, as where they are not installed."""
    return f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_the_blocker_blocks() -> None:
    code = blocked(("torch",)) + "try:\n    import torch\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert run(code).strip() == "blocked: torch"


def test_help_loads_nothing_heavy() -> None:
    code = f"""
import sys
from specbench import cli
sys.argv = ["specbench", "--help"]
try:
    cli.main()
except SystemExit as end:
    print("exit code", end.code)
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    lines = run(code).splitlines()
    assert any("--help" in line for line in lines)
    assert lines[-2:] == ["exit code 0", "heavy: []"]


def modules(*places: str) -> list[str]:
    """Dotted names of all modules of the given rooms."""
    paths = [path for place in places for path in (ROOT / "specbench").glob(place)]
    assert len(paths) >= len(places)
    names = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    return sorted(".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names)


@pytest.mark.parametrize(
    "room",
    [
        ("report/*.py",),
        ("scenario/*.py",),
        ("roofline/*.py",),
        ("*.py",),
        ("engine/models/config.py", "engine/models/sources.py"),
    ],
    ids=["report", "scenario", "roofline", "top level", "model sources"],
)
def test_room_runs_without_torch(room: tuple[str, ...]) -> None:
    names = modules(*room)
    code = blocked(ENGINE_ONLY) + f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    run(code + "\nprint(sum(name.startswith('specbench.') for name in sys.modules))")


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "specbench").rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_kernels_is_a_source_root_and_no_package() -> None:
    """A package called `kernels` at the root would shadow the one that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
