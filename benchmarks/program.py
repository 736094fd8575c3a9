"""The program around the engine: how fast `--help` is, and where a sweep's time goes, read from its manifest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.blocks import Arm, Sample, Spread
from benchmarks.figures import Bound, Figure, Report, at_most
from benchmarks.settings import Settings
from specbench.errors import InputError, InvalidEnvironmentError
from specbench.store import read_manifest

ROOT = Path(__file__).resolve().parent.parent
HELP_TARGET_S = 0.4
HARNESS_TARGET = 0.10
SWEEP_TARGET_S = 300.0
WORK = ("measured", "prefill", "warm-up", "loading")
"""Parts of a sweep that are not the harness's own; what remains, the measuring of roofs included, is."""
RESULTS = ("results/quickstart", "runs/quickstart")


def help_command() -> list[str]:
    """The installed command beside this interpreter, or the same function from the checkout."""
    script = shutil.which("specbench", path=str(Path(sys.executable).parent))
    if script is not None:
        return [script, "--help"]
    return [sys.executable, "-c", "from specbench.cli import main; main()", "--help"]


def _help_once(command: list[str], _: int) -> Sample:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - begin
    if done.returncode or "roofline" not in done.stdout:
        raise InvalidEnvironmentError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return Sample({"wall_s": elapsed})


def help_time(settings: Settings) -> Report:
    """Wall time of `specbench --help`, a process each, after one that warms the file cache."""
    command = help_command()
    _help_once(command, 0)
    arms: dict[str, Arm] = {"help": lambda index: _help_once(command, index)}
    rounds = settings.rounds("help", arms, settings.help_runs)
    spread = rounds.values("help", "wall_s")
    figure = Figure("help", "specbench --help", "s", spread, at_most(HELP_TARGET_S), None, rounds.disturbed)
    how = "the installed command" if len(command) == 2 else "specbench.cli.main from the checkout"
    return Report("help", (figure,), {"help": rounds.to_list()}, (how,))


def results_folder(chosen: Path | None) -> Path:
    """The folder whose manifest is read: the one given, or the first of RESULTS that is there."""
    if chosen is not None:
        return chosen
    for name in RESULTS:
        if (ROOT / name / "manifest.json").is_file():
            return ROOT / name
    raise InputError(
        f"no manifest in {' or '.join(RESULTS)}",
        key="--results",
        remedy="specbench run scenarios/quickstart.yaml, or name a folder of results",
    )


def sweep_seconds(chosen: Path | None) -> dict[str, float]:
    """Seconds by part of a finished sweep. Raises InputError where the manifest does not tell."""
    folder = results_folder(chosen)
    manifest: Mapping[str, Any] = read_manifest(folder)
    seconds = manifest.get("sweep_seconds")
    if not seconds or not seconds.get("total"):
        raise InputError(
            "the manifest has no sweep_seconds",
            file=folder / "manifest.json",
            key="sweep_seconds",
            remedy="let the sweep run to its end: specbench run scenarios/quickstart.yaml",
        )
    return {str(name): float(value) for name, value in seconds.items()}


def harness_share(seconds: Mapping[str, float]) -> float:
    """Share of the sweep that is none of WORK."""
    return 1.0 - sum(seconds.get(name, 0.0) for name in WORK) / seconds["total"]


def _from_manifest(
    settings: Settings, name: str, what: str, unit: str, bound: Bound, value: str
) -> tuple[Figure, dict[str, float]]:
    """One figure of the manifest; without one the figure says why, and the other benchmarks go on."""
    try:
        seconds = sweep_seconds(settings.results)
    except InputError as error:
        return Figure(name, what, unit, None, bound, error.message), {}
    found = harness_share(seconds) if value == "harness" else seconds["total"]
    return Figure(name, what, unit, Spread.of([found]), bound), seconds


def harness(settings: Settings) -> Report:
    """Share of a sweep's time outside measured windows, prefill, warm-up and loading."""
    what = "share of a sweep not measured, prefill, warm-up or loading"
    figure, seconds = _from_manifest(settings, "harness", what, "share", at_most(HARNESS_TARGET), "harness")
    parts = [
        Figure(f"harness.{name}", f"sweep: {name}", "s", Spread.of([value]))
        for name, value in seconds.items()
        if name != "total"
    ]
    return Report("harness", (figure, *parts), {"sweep_seconds": seconds})


def sweep(settings: Settings) -> Report:
    """Time of the whole quickstart sweep."""
    figure, seconds = _from_manifest(settings, "sweep", "the quickstart's sweep", "s", at_most(SWEEP_TARGET_S), "total")
    return Report("sweep", (figure,), {"sweep_seconds": seconds})
