"""The page over 2,000 cells of 200 samples each, made by `specbench report` in a process that may not import torch.

The rows are those of results/quickstart, repeated under other drafters, depths and batch sizes.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.blocks import Arm, Sample
from benchmarks.figures import Figure, Report, at_most
from benchmarks.settings import Settings
from specbench.errors import InvalidEnvironmentError

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "results" / "quickstart"
SECONDS_TARGET = 10.0
MEMORY_TARGET_BYTES = 500e6
SIZE_TARGET_BYTES = 5e6
DRAFTERS, DEPTHS, BATCHES, TEMPERATURES = 10, (1, 2, 3, 5, 7), tuple(2**k for k in range(8)), (0.0, 0.5, 0.7, 1.0, 1.2)
BLOCKS = 200
CODE = """
import json, sys, time
from pathlib import Path
sys.modules["torch"] = None
begin = time.perf_counter()
from specbench.report.command import write_page
page = write_page([Path(sys.argv[1])], Path(sys.argv[2]))
# Not ru_maxrss: that of a child begins at its parent's.
status = Path("/proc/self/status").read_text().splitlines()
peak = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
print(json.dumps({"wall_s": time.perf_counter() - begin, "peak_bytes": peak, "page_bytes": page.stat().st_size}))
"""


def rows(count: int) -> Iterator[dict[str, Any]]:
    """`count` rows with `BLOCKS` blocks each, all of them cases of their own."""
    with (SOURCE / "rows.jsonl").open(encoding="utf-8") as stream:
        sources = [row for line in stream if (row := json.loads(line))["status"] == "ok"]
    places = itertools.product(TEMPERATURES, range(DRAFTERS), DEPTHS, BATCHES)
    for number, (temperature, drafter, depth, batch) in enumerate(itertools.islice(places, count)):
        row = copy.deepcopy(sources[number % len(sources)])
        name = f"drafter {drafter}"
        row["axes"] |= {"drafter": name, "depth": depth, "batch_size": batch, "temperature": temperature}
        row["case_name"] = f"{name} · depth {depth} · batch {batch} · T {temperature:g}"
        row["case_hash"] = row["key"] = hashlib.sha256(row["case_name"].encode()).hexdigest()
        blocks = row["samples"]["blocks"]
        row["samples"]["blocks"] = [
            {**blocks[place % len(blocks)], "order": place, "block": place // 2} for place in range(BLOCKS)
        ]
        yield row


def write_run(folder: Path, count: int) -> None:
    (folder / "manifest.json").write_bytes((SOURCE / "manifest.json").read_bytes())
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows(count))


def _report_once(folder: Path) -> Sample:
    command = [sys.executable, "-c", CODE, str(folder), str(folder / "report.html")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidEnvironmentError(f"the report ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return Sample(json.loads(done.stdout))


def report(settings: Settings) -> Report:
    """Wall time (imports included), peak memory and page size of `specbench report` over 2,000 cells."""
    with tempfile.TemporaryDirectory() as scratch:
        write_run(Path(scratch), settings.report_cells)
        arms: dict[str, Arm] = {"report": lambda _: _report_once(Path(scratch))}
        rounds = settings.rounds("report", arms, min(settings.blocks, 3))
    what = f"specbench report, {settings.report_cells:,} cells"
    bounds = (
        ("seconds", "wall_s", "s", at_most(SECONDS_TARGET)),
        ("memory", "peak_bytes", "MB", at_most(MEMORY_TARGET_BYTES)),
        ("size", "page_bytes", "MB", at_most(SIZE_TARGET_BYTES)),
    )
    figures = tuple(
        Figure(f"report.{key}", f"{what}: {key}", unit, rounds.values("report", name), bound, None, rounds.disturbed)
        for key, name, unit, bound in bounds
    )
    return Report("report", figures, {"report": rounds.to_list()}, (f"{BLOCKS} samples a cell",))
