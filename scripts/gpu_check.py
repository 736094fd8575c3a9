"""The stages of scripts/gpu_check.sh, one after another, each with its own time limit; none stops the others.

    scripts/gpu_check.sh OUT           # on a Hopper GPU: at most 8 minutes, nothing to download
    scripts/gpu_check.sh --cpu OUT     # the same stages on tiny shapes, in Triton's interpreter

OUT then holds summary.md (what each stage did, and the targets), logs/, identity.json, roofs.json, references.json,
kernels.json and kernels.md, equality.json and sweep/ with its report.html. Exit codes: 0 all stages are ok, 1 one
failed, 2 usage, 4 there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BODIES = Path(__file__).resolve().with_name("gpu_check_stages.py")
BUDGET_S = 480
CPU_PATIENCE = 6
"""The interpreter's stages may take this many times their limits."""
OLDEST = {"torch": (2, 11), "triton": (3, 6)}
OLDEST_PYTHON = (3, 11)
NEEDED = {
    "numpy": "numpy",
    "psutil": "psutil",
    "rich": "rich",
    "typer": "typer",
    "yaml": "pyyaml",
    "pydantic": "pydantic",
    "gguf": "gguf",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "scipy": "scipy",
    "numba": "numba",
}
"""Module -> what to install for it."""
KERNEL_MODULES = ("torch", "triton", "numpy", "psutil", "rich", "typer", "yaml")
CPU_OPS = ("rmsnorm", "silu_mul", "philox_uniforms", "verify_greedy")
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


@dataclass(frozen=True)
class Stage:
    """One command with its limit in seconds. `needs` are modules without which it is not started."""

    name: str
    what: str
    limit_s: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = KERNEL_MODULES
    skip: str | None = None


@dataclass(frozen=True)
class Result:
    """What became of a stage: ok, failed, or skipped, with the reason."""

    stage: Stage
    status: str
    reason: str
    seconds: float


def stages(out: Path, *, cpu: bool) -> list[Stage]:
    """All stages in order; their limits add up to at most BUDGET_S."""
    python = sys.executable
    body = (python, str(BODIES), "--out", str(out), *(["--cpu"] if cpu else []))
    program = (python, "-m", "specbench.cli")
    everything = (*KERNEL_MODULES, *NEEDED)
    sanitizer = next((found for found in map(shutil.which, SANITIZER) if found), None)
    why = "the CPU has no compute-sanitizer" if cpu else ("" if sanitizer else "compute-sanitizer is not installed")
    ops = [word for name in CPU_OPS for word in ("--op", name)] if cpu else []
    checked = ("--tool", "memcheck", "--error-exitcode", "3", *program, "kernels", "--check", *ops)
    sweep = str(out / "sweep")
    return [
        Stage("identity", "the device and the software", 15, (*body, "identity")),
        Stage("roofs", "measured bandwidth and matmul rates", 25, (*body, "roofs")),
        Stage("references", "all kernels against float64", 95, (*body, "references")),
        Stage("sanitizer", "memory accesses on small shapes", 60, (sanitizer or "", *checked), skip=why or None),
        Stage("kernels", "times, GB/s, TFLOP/s, share of the roof", 90, (*body, "kernels")),
        Stage("equality", "graphs against single launches, triton against torch", 30, (*body, "equality"), everything),
        Stage("sweep", "batch x depth x {chain, tree}", 140, (*body, "sweep"), everything),
        Stage("report", "one page of the sweep", 20, (*program, "report", sweep), everything),
        Stage("targets", "measured shares beside the targets", 5, (*body, "targets"), ()),
    ]


def missing(modules: Sequence[str]) -> list[str]:
    """What is not installed of `modules`."""
    return [name for name in dict.fromkeys(modules) if importlib.util.find_spec(name) is None]


def too_old() -> list[str]:
    """Versions below what specbench runs with."""
    found = []
    if sys.version_info[:2] < OLDEST_PYTHON:
        found.append(f"Python {sys.version_info[0]}.{sys.version_info[1]} is older than 3.11")
    for name, oldest in OLDEST.items():
        if importlib.util.find_spec(name) is not None:
            version = importlib.metadata.version(name)
            if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < oldest:
                found.append(f"{name} {version} is older than {'.'.join(map(str, oldest))}")
    return found


def environment(*, cpu: bool) -> dict[str, str]:
    """The stages' environment: this tree's sources first; kernels compiled on a GPU, interpreted on a CPU."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    env.pop("TRITON_INTERPRET", None)
    return env | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if cpu else env


def run_stage(stage: Stage, out: Path, env: dict[str, str], patience: float = 1) -> Result:
    """Run one stage into logs/NAME.log; at `patience` times its limit it and its children are killed."""
    begin = time.monotonic()

    def result(status: str, reason: str = "") -> Result:
        return Result(stage, status, reason, time.monotonic() - begin)

    if stage.skip is not None:
        return result("skipped", stage.skip)
    absent = missing(stage.needs)
    if absent:
        remedy = " ".join(NEEDED.get(name, name) for name in absent)
        return result("failed", f"not installed: {', '.join(absent)}; pip install {remedy}")
    log = out / "logs" / f"{stage.name}.log"
    sanitized = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if stage.name == "sanitizer" else {}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, env=env | sanitized, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(stage.limit_s * patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return result("failed", f"not done within {stage.limit_s * patience:.0f} s; see logs/{log.name}")
    if code == 0:
        return result("ok", _last_line(log))
    return result("failed", f"exit code {code}: {_last_line(log)}; see logs/{log.name}")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no output"


def summary(results: Sequence[Result], out: Path) -> str:
    """summary.md: a line a stage, then the targets where that stage wrote them."""
    lines = ["# GPU check", "", "| stage | what | | seconds | |", "| --- | --- | --- | ---: | --- |"]
    for one in results:
        said = one.reason.replace("|", "/")
        lines.append(f"| {one.stage.name} | {one.stage.what} | {one.status} | {one.seconds:.0f} | {said} |")
    targets = out / "targets.md"
    return "\n".join(lines) + "\n" + ("\n" + targets.read_text(encoding="utf-8") if targets.exists() else "")


def has_gpu() -> bool:
    """Asked in another process: this one must not hold memory of the device."""
    code = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 4)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Parse, run all stages, write the summary."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="All that needs a Hopper GPU, in 8 minutes.")
    parser.add_argument("out", nargs="?", default=os.environ.get("OUT"), type=Path, help="output folder (or $OUT)")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes in the interpreter: proves the script itself")
    given = parser.parse_args(arguments)
    if given.out is None:
        parser.error("give an output folder, or set OUT")
    out = given.out.resolve()
    for fault in too_old():
        print(f"warning: {fault}", flush=True)
    if not given.cpu and not has_gpu():
        print("error: there is no CUDA GPU here\n  remedy: run on one, or use --cpu to try the script", file=sys.stderr)
        return 4
    (out / "logs").mkdir(parents=True, exist_ok=True)
    env, begin = environment(cpu=given.cpu), time.monotonic()
    patience = CPU_PATIENCE if given.cpu else 1
    results = []
    for stage in stages(out, cpu=given.cpu):
        print(f"{stage.name}: {stage.what} (at most {stage.limit_s * patience:.0f} s) ...", flush=True)
        results.append(run_stage(stage, out, env, patience))
        last = results[-1]
        print(f"  {last.status} after {last.seconds:.0f} s{': ' + last.reason if last.reason else ''}", flush=True)
    text = summary(results, out)
    (out / "summary.md").write_text(text, encoding="utf-8")
    told = [{"stage": r.stage.name, "status": r.status, "reason": r.reason, "seconds": r.seconds} for r in results]
    (out / "summary.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"\n{text}\n{time.monotonic() - begin:.0f} s in all; everything is in {out}")
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
