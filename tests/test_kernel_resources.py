"""docs/kernels.md holds every kernel on every architecture, without a broken promise; a sample is compiled again.

specbench kernels --compile-only --arch sm_80 --arch sm_90 --arch sm_100 --markdown docs/kernels.md
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from specbench_kernels import registry
from specbench_kernels.aot import jobs_of, parse_arch

from specbench.bench.kernel_tables import RESOURCE_COLUMNS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
ARCHS = ("sm_80", "sm_90", "sm_100")
BUDGET_S = 60
COMPILE = """
import json, sys, time
from specbench_kernels import aot, registry
jobs, budget_s, begin = json.loads(sys.argv[1]), float(sys.argv[2]), time.monotonic()
for op, index, arch in jobs:
    if time.monotonic() - begin > budget_s:
        break
    found = aot.compile_one(op, registry.find(op).compilations()[index], arch)
    spilled = found.spill_store_bytes + found.spill_load_bytes
    print(json.dumps([op, found.case, f"sm_{arch}", spilled, found.num_tensor_core, found.verdict, found.error]))
"""
Key = tuple[str, str, str]


def table() -> dict[Key, dict[str, str]]:
    """(op, case, arch) -> cells by column."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in lines]
    assert tuple(rows[0]) == RESOURCE_COLUMNS
    found = {}
    for row in rows[2:]:
        cells = dict(zip(RESOURCE_COLUMNS, (cell.replace("\0", "|") for cell in row), strict=True))
        found[cells["op"], cells["case"], cells["arch"]] = cells
    assert len(found) == len(rows) - 2, "a line stands twice"
    return found


def test_table_holds_every_kernel_on_every_architecture() -> None:
    wanted = {
        (name, compilation.label, arch): compilation.kernel.__name__
        for name in registry.names()
        for compilation in registry.find(name).compilations()
        for arch in ARCHS
        if parse_arch(arch) >= compilation.minimum_arch
    }
    told = {key: cells["kernel"] for key, cells in table().items()}
    assert told.keys() == wanted.keys(), "make the page anew: see its command"
    assert told == wanted


def test_nothing_that_is_promised_is_broken() -> None:
    promises = {
        (name, compilation.label): compilation
        for name in registry.names()
        for compilation in registry.find(name).compilations()
    }
    for (op, case, arch), cells in table().items():
        assert cells["verdict"] == "ok", (op, case, arch)
        promised = promises[op, case]
        assert int(cells["registers"]) > 0
        assert cells["spill st/ld B"] == "0/0" or not promised.no_spills, (op, case, arch)
        assert cells["tensor cores"] != "-" or not promised.uses_dot, (op, case, arch)


def sample(seed: int) -> list[tuple[str, int, int]]:
    """Two compilations of each op, in turn: one for sm_90, then one for sm_80 or sm_100."""
    stream = random.Random(seed)
    rounds = []
    for archs in ((90,), (80, 100)):
        chosen = [stream.choice(jobs_of([name], archs)) for name in registry.names()]
        stream.shuffle(chosen)
        rounds += [(job.op, job.index, job.arch) for job in chosen]
    return rounds


def test_sample_compiles_to_what_the_table_says(tmp_path: Path) -> None:
    """At least a quarter of the sample: as much as the time allows on a slow machine."""
    seed = int.from_bytes(os.urandom(4), "little")
    jobs = sample(seed)
    env = os.environ | {"PYTHONPATH": str(ROOT / "kernels"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, json.dumps(jobs), str(BUDGET_S)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) >= len(jobs) // 4
    told = table()
    for op, case, arch, spilled, tensor_core, verdict, error in results:
        cells = told[op, case, arch]
        place = f"seed {seed}: {op} · {case} · {arch}"
        assert verdict == cells["verdict"], f"{place}: {error}"
        assert (spilled == 0) == (cells["spill st/ld B"] == "0/0"), place
        assert (tensor_core > 0) == (cells["tensor cores"] != "-"), place


@pytest.mark.parametrize("arch", ARCHS)
def test_page_says_how_it_is_made(arch: str) -> None:
    assert f"--arch {arch}" in PAGE.read_text(encoding="utf-8")
