"""The gate over 2,000 cells, in a process of its own, where it may not import torch."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.blocks import Arm, Sample
from benchmarks.figures import Figure, Report, at_most
from benchmarks.settings import Settings
from specbench.errors import InvalidEnvironmentError

ROOT = Path(__file__).resolve().parent.parent
TARGET_S = 5.0
BLOCKS = 12
PROMPTS = 6
"""Blocks until the same prompts come again."""
CODE = """
import sys
from pathlib import Path
from specbench.gate.command import Outputs, gate
code = gate(Path(sys.argv[1]), baseline=Path(sys.argv[2]), policy_file=None, outputs=Outputs())
print("torch" in sys.modules, int(code))
"""


def write_run(place: Path, cells: int, seed: int) -> None:
    """A run of `cells` cells with 12 pairs of blocks each, as a sweep stores them."""
    place.mkdir(parents=True)
    rng = random.Random(seed)
    manifest = {
        "name": "bench",
        "fingerprint": "made up",
        "code_revision": f"r{seed}",
        "environment": {"device": "cpu"},
    }
    (place / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with (place / "rows.jsonl").open("w", encoding="utf-8") as file:
        for cell in range(cells):
            file.write(json.dumps(row(cell, rng)) + "\n")


def row(cell: int, rng: random.Random) -> dict[str, Any]:
    blocks = [block(arm, index, rng) for index in range(BLOCKS) for arm in ("ar", "spec")]
    names = [f"metric_{number}" for number in range(70)]
    metrics = dict.fromkeys(names, 1.25) | {"output_tokens_per_s": 140.0, "speedup": 1.4, "null_reasons": {}}
    return {
        "schema_version": 1,
        "key": f"k{cell}",
        "case_hash": f"{cell:064x}",
        "case_name": f"ngram(3) · depth {cell % 40} · batch {cell // 40} · T 0",
        "status": "ok",
        "reason": None,
        "axes": {
            "backend": "cpu",
            "drafter": "ngram(3)",
            "depth": cell % 40,
            "batch_size": cell // 40,
            "temperature": 0.0,
        },
        "conditions": {
            "lossless": True,
            "synthetic": False,
            "output_check": "identical",
            "device": "cpu",
            "weights": "made up",
            "prompt_categories": ["qa"],
        },
        "metrics": metrics,
        "samples": {"blocks": blocks, "prompts": []},
        "warnings": [],
        "environment": "made up",
        "code_revision": "r",
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 1.0,
    }


def block(arm: str, index: int, rng: random.Random) -> dict[str, Any]:
    rate = (140.0 if arm == "spec" else 100.0) * math.exp(rng.gauss(0, 0.005))
    facts = {"inputs": f"in{index % PROMPTS}", "outputs": "out", "num_draft_tokens": 240, "num_accepted_tokens": 60}
    facts |= {
        "flops": 1e12,
        "bytes": 1e11,
        "kv_allocator_calls": 8,
        "tpot_s": 1e-2,
        "itl_p50_s": 1e-2,
        "itl_p99_s": 2e-2,
    }
    return {
        "order": 2 * index + (arm == "spec"),
        "arm": arm,
        "block": index,
        "tokens": 120,
        "wall_s": 120 / rate,
        "steps": 60,
        "valid": True,
        "marks": [],
        "facts": facts,
    }


def _gate_once(place: Path) -> Sample:
    command = [sys.executable, "-c", CODE, str(place / "candidate"), str(place / "baseline")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - begin
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode or not last or last[0].split()[0] != "False" or last[0].split()[1] not in ("0", "3"):
        raise InvalidEnvironmentError(f"the gate ended with {done.returncode}, {last}: {done.stderr.strip()[-500:]}")
    return Sample({"wall_s": elapsed})


def gate(settings: Settings) -> Report:
    """Wall time of `specbench gate` over 2,000 cells a side, process start and terminal table included."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for seed, name in enumerate(("baseline", "candidate")):
            write_run(place / name, settings.gate_cells, seed)
        arms: dict[str, Arm] = {"gate": lambda _: _gate_once(place)}
        rounds = settings.rounds("gate", arms)
    spread = rounds.values("gate", "wall_s")
    what = f"specbench gate, {settings.gate_cells:,} cells"
    figure = Figure("gate", what, "s", spread, at_most(TARGET_S), None, rounds.disturbed)
    return Report("gate", (figure,), {"gate": rounds.to_list()}, (f"{BLOCKS} pairs of blocks a cell",))
