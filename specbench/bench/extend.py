"""`specbench gate --extend N`: N more blocks of the cases that the gate could not decide, measured as the run was.

They are written to RUN/extend-1, extend-2, ...: nothing of the run is touched, and the gate reads them with it. The
prompts begin from the first block again, so that each block has its counterpart in the baseline.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from specbench.bench.command import ProgressWatcher
from specbench.bench.devices import sweep_device
from specbench.bench.environment import code_revision, environment, fingerprint
from specbench.bench.sweep import Watcher, run_sweep
from specbench.errors import InputError, InvalidEnvironmentError
from specbench.gate.evidence import EXTENSIONS
from specbench.scenario.cases import expand
from specbench.scenario.schema import Scenario
from specbench.store import MANIFEST_FILE, read_manifest


def extend_run(run: Path, blocks: int, case_hashes: Collection[str], *, watcher: Watcher | None = None) -> Path:
    """Measure `blocks` more blocks of the run's cases of these hashes; returns the folder they are in.

    Raises InputError where none of the cases is the run's own, InvalidEnvironmentError where this is another machine or
    other code than the run was measured with: blocks of two programs must not be pooled.
    """
    if blocks < 1:
        raise InputError(f"{blocks} blocks", key="--extend", remedy="give a number of blocks, 1 or more")
    manifest = read_manifest(run)
    scenario = Scenario.from_dict(manifest["scenario"])
    cases = [case for case in expand(scenario) if case.hash in case_hashes]
    if not cases:
        raise InputError("none of these cases is in the run's scenario", file=run, remedy="run the scenario anew")
    here, code = fingerprint(environment(sweep_device(case.target for case in cases))), code_revision()
    if (manifest["fingerprint"], manifest["code_revision"]) != (here, code):
        message = f"was measured by {manifest['code_revision']}, this is {code}, or on another machine"
        raise InvalidEnvironmentError(
            message, remedy="extend where the run was made, before the code changes", file=run
        )
    fixed = {"blocks": {"min": blocks, "max": blocks}, "budget_s": None, "target_interval": 1e-9}
    longer = Scenario.from_dict(scenario.to_dict() | {"measure": scenario.to_dict()["measure"] | fixed})
    place = _next_place(run)
    place.mkdir()
    shutil.copyfile(
        run / MANIFEST_FILE, place / MANIFEST_FILE
    )  # its roofs are this device's, and are not measured again
    if watcher is not None:
        run_sweep(longer, cases, place, watcher=watcher)
        return place
    with ProgressWatcher() as bar:
        run_sweep(longer, cases, place, watcher=bar)
    return place


def _next_place(run: Path) -> Path:
    taken = len(list(run.glob(EXTENSIONS)))
    while (place := run / EXTENSIONS.replace("*", str(taken + 1))).exists():
        taken += 1
    return place
