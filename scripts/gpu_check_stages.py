"""What the stages of the GPU check do; scripts/gpu_check.py runs each as a process of its own.

python scripts/gpu_check_stages.py --out OUT [--cpu] STAGE [OP]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check import CPU_OPS, ROOT

SEED = int.from_bytes(os.urandom(4), "little")
"""Of the kernels' random inputs: new in each run, and stored with the results."""
PROCESSES = 6
"""Ops checked at a time: compiling takes a CPU each, and their inputs must share the device's memory."""
FIRST = ("tree_attention", "row_stats", "probabilities", "verify_sampled")
"""Measured before the others, should time run out."""
CPU_SWEEP = {"batch_size": [1, 2], "context_len": 12}


def _write(out: Path, name: str, data: object) -> None:
    (out / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _device(cpu: bool) -> Any:
    import torch

    return torch.device("cpu" if cpu else "cuda:0")


def identity(out: Path, cpu: bool) -> int:
    """identity.json: machine, driver, versions, and which datasheet this device has."""
    import torch
    import triton

    from specbench.bench.environment import environment
    from specbench.roofline.hardware import identify

    told = environment(_device(cpu))
    match = identify(str(told["device_name"]))
    told["datasheet"] = match.hardware.name if match.hardware else None
    told |= {"torch": torch.__version__, "triton": triton.__version__, "platform": platform.platform()}
    smi = shutil.which("nvidia-smi")
    if smi and not cpu:
        shown = subprocess.run([smi], capture_output=True, text=True, timeout=10, check=False)
        print(shown.stdout + shown.stderr)
    _write(out, "identity.json", told)
    print(json.dumps(told, indent=1))
    print(f"{told['device_name']}, torch {torch.__version__}, triton {triton.__version__}")
    return 0


def roofs(out: Path, cpu: bool) -> int:
    """roofs.json: what this device reaches."""
    from specbench.bench.ceilings import measure_roofs

    dtypes = ("fp32", "bf16") if cpu else ("fp32", "fp16", "bf16")
    shape = (256, 256) if cpu else (4096, 4096)
    measured = measure_roofs(
        _device(cpu), dtypes=dtypes, skinny_shape=shape, budget_s=1.0 if cpu else 8.0, progress=print
    )
    _write(out, "roofs.json", measured.to_dict())
    rates = ", ".join(f"{reading.median / 1e12:.2f} TFLOP/s {dtype}" for dtype, reading in measured.gemm.items())
    print(f"{measured.bandwidth_bytes_per_s / 1e9:,.0f} GB/s, {rates}")
    return 0


def _ops(cpu: bool) -> tuple[str, ...]:
    from specbench_kernels import registry

    if cpu:
        return CPU_OPS
    return tuple(sorted(registry.names(), key=lambda name: (name not in FIRST, registry.names().index(name))))


def reference_of(out: Path, cpu: bool, op: str) -> int:
    """references/OP.json: the small cases of one op, and on a GPU the bench cases too, which compiles them."""
    from specbench.bench.kernel_tables import kernel_json
    from specbench.bench.kernels import check_bench, check_small

    device = _device(cpu)
    rows = check_small([op], device, SEED)
    rows += [] if cpu else check_bench([op], device, SEED)
    _write(out / "references", f"{op}.json", {"seed": SEED, "rows": [kernel_json(row) for row in rows]})
    return int(any(row.status != "ok" for row in rows))


def references(out: Path, cpu: bool) -> int:
    """references.json: all ops against their float64 references, several at a time."""
    (out / "references").mkdir(exist_ok=True)
    ops = _ops(cpu)
    rest = ["--out", str(out), *(["--cpu"] if cpu else []), "reference"]

    def run(op: str) -> tuple[str, int]:
        log = out / "references" / f"{op}.log"
        with log.open("w", encoding="utf-8") as file:
            command = [sys.executable, __file__, *rest, op]
            return op, subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode

    failed = []
    with concurrent.futures.ThreadPoolExecutor(1 if cpu else PROCESSES) as pool:
        for op, code in pool.map(run, ops):
            print(f"{op}: {'ok' if code == 0 else f'exit code {code}, see references/{op}.log'}", flush=True)
            failed += [op] if code else []
    found = {op: _read(out / "references" / f"{op}.json") for op in ops}
    _write(out, "references.json", found)
    rows = [row for one in found.values() if one for row in one["rows"]]
    bad = [row for row in rows if row["status"] != "ok"]
    for row in bad:
        print(f"{row['op']} · {row['case']}: {row['status']}: {row['reason']}")
    told = f"{len(rows) - len(bad)} of {len(rows)} cases are right"
    print(told + (f"; wrong or failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def kernels(out: Path, cpu: bool) -> int:
    """kernels.json, kernels.md: each op timed; written after every op, so that a stage out of time leaves its share."""
    from specbench.bench.kernel_tables import KERNEL_COLUMNS, kernel_cells, kernel_json, markdown_table
    from specbench.bench.kernels import check_small, measure_bench
    from specbench.roofline.model import Roof

    device = _device(cpu)
    measured = _read(out / "roofs.json")
    by_dtype = {}
    if measured is None:
        print("roofs.json is missing: times without a share of the roof")
    else:
        bandwidth = measured["bandwidth_bytes_per_s"]
        by_dtype = {dtype: Roof(rate, bandwidth) for dtype, rate in measured["gemm_flops_per_s"].items()}
    rows = []
    for op in _ops(cpu):
        rows += check_small([op], device, SEED) if cpu else measure_bench([op], device, SEED, by_dtype)
        _write(out, "kernels.json", {"seed": SEED, "rows": [kernel_json(row) for row in rows]})
        table = markdown_table(KERNEL_COLUMNS, [kernel_cells(row) for row in rows])
        (out / "kernels.md").write_text(f"# Kernels\n\n{table}", encoding="utf-8")
    bad = [row for row in rows if row.status != "ok"]
    print(f"{len(rows) - len(bad)} of {len(rows)} cases are right{'' if cpu else ' and measured'}")
    return int(bool(bad))


def equality(out: Path, cpu: bool) -> int:
    """equality.json: the same requests through graphs, through single launches and through torch."""
    from gpu_check_equality import compare_paths

    found = compare_paths(_device(cpu))
    _write(out, "equality.json", found)
    for one in found:
        print(f"{one['shape']}: {one['pair']}: {one['told']}")
    bad = [one for one in found if not one["ok"]]
    print(f"{len(found) - len(bad)} of {len(found)} pairs are equal as they must be")
    return int(bool(bad))


def cpu_scenario(out: Path) -> Path:
    """The GPU check's sweep cut down to a tiny model in the interpreter."""
    import yaml

    data = yaml.safe_load((ROOT / "scenarios" / "h100" / "gpu_check.yaml").read_text(encoding="utf-8"))
    data["target"] |= {"shape": "tiny-llama-test", "dtype": "fp32"}
    data["sweep"] = CPU_SWEEP
    data["workload"] |= {"output_len": 6, "num_prompts": 2}
    for drafter in data["drafters"]:
        if "depth" in drafter:
            drafter["depth"] = 3
    data["measure"] |= {"blocks": {"min": 1, "max": 1}, "warmup": {"min": 1, "max": 1}}
    file = out / "gpu_check_cpu.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return file


def sweep(out: Path, cpu: bool) -> int:
    """sweep/: scenarios/h100/gpu_check.yaml, or what is left of it on a CPU."""
    file = cpu_scenario(out) if cpu else ROOT / "scenarios" / "h100" / "gpu_check.yaml"
    command = [sys.executable, "-m", "specbench.cli", "run", str(file), "--out", str(out / "sweep")]
    code = subprocess.run(command, check=False).returncode
    rows = [json.loads(line) for line in (out / "sweep" / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = Counter(_became(row, cpu) for row in rows)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["failed"] or counts["invalid"]:
        return code or 1
    return 0 if rows else code or 1


def _became(row: dict[str, Any], cpu: bool) -> str:
    """A row's status. On a CPU nothing is timed for its own sake: a cell that ran beside other programs has run."""
    disturbed = row["status"] == "failed" and "was undisturbed" in row["reason"]
    return "disturbed" if cpu and disturbed else str(row["status"])


@dataclass(frozen=True)
class Target:
    """A figure to reach: the issue's words, the bound, and what was measured (None: not measured)."""

    what: str
    bound: float
    at_least: bool
    measured: float | None

    @property
    def line(self) -> str:
        sign = "≥" if self.at_least else "≤"
        if self.measured is None:
            return f"| {self.what} | {sign} {self.bound:.3g} | not measured | |"
        met = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        return f"| {self.what} | {sign} {self.bound:.3g} | {self.measured:.3f} | {'met' if met else 'MISSED'} |"


def _kernel(rows: Iterable[dict[str, Any]], op: str, case: str) -> dict[str, Any] | None:
    return next((r for r in rows if r["op"] == op and r["case"] == case and r["timing"] is not None), None)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


ATTENTION = {8: "batch 32, 4k, T 8 bfloat16", 1: "batch 32, 4k, T 1 bfloat16"}
ATTENTION_LONG = "batch 1, 32k, T 8 bfloat16"
SAMPLING = "float32 64x131072"


def all_targets(
    kernel_rows: Sequence[dict[str, Any]], bandwidth: float | None, sweep_rows: Sequence[dict[str, Any]]
) -> list[Target]:
    """The targets beside what the kernel table, the roofs and the sweep say."""

    def share(op: str, case: str) -> float | None:
        row = _kernel(kernel_rows, op, case)
        return _ratio(row["bytes_per_s"], bandwidth) if row else None

    def time(op: str, case: str) -> float | None:
        row = _kernel(kernel_rows, op, case)
        return row["timing"]["median_s"] if row else None

    def metrics(kind: str, depth: int) -> dict[str, Any]:
        wanted = {"drafter_kind": kind, "depth": depth, "batch_size": 1}
        found = [r for r in sweep_rows if r["metrics"] and all(r["axes"][k] == v for k, v in wanted.items())]
        chains = [row for row in found if "tree" not in row["axes"]["drafter"]]
        return chains[0]["metrics"] if chains else {}

    ar, chain = metrics("none", 0), metrics("forced", 7)

    def of_ar(name: str) -> float | None:
        return ar.get(f"ar_{name}", ar.get(name))

    return [
        Target(
            "tree_attention, 4k context, batch 32, T = 8: bandwidth", 0.85, True, share("tree_attention", ATTENTION[8])
        ),
        Target("tree_attention, 32k context, batch 1: bandwidth", 0.75, True, share("tree_attention", ATTENTION_LONG)),
        Target(
            "tree_attention, T = 8 over T = 1: time",
            *(1.05, False),
            _ratio(time("tree_attention", ATTENTION[8]), time("tree_attention", ATTENTION[1])),
        ),
        Target("row_stats, 128k vocabulary, batch 64: bandwidth", 0.70, True, share("row_stats", SAMPLING)),
        Target("8B decode step, batch 1: bandwidth", 0.88, True, _ratio(of_ar("achieved_bytes_per_s"), bandwidth)),
        Target("8B decode step, batch 1: host time", 0.03, False, _ratio(of_ar("host_s"), of_ar("step_s"))),
        Target(
            "8B verify of 8 tokens over the AR step, batch 1",
            *(1.06, False),
            _ratio(chain.get("verify_s"), chain.get("ar_verify_s")),
        ),
    ]


def targets(out: Path, cpu: bool) -> int:
    """targets.md: printed, not tested; a target that is missed fails nothing."""
    found, measured = _read(out / "kernels.json"), _read(out / "roofs.json")
    file = out / "sweep" / "rows.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    bandwidth = measured["bandwidth_bytes_per_s"] if measured else None
    table = [target.line for target in all_targets(found["rows"] if found else [], bandwidth, rows)]
    head = ["# Targets", "", "| what | target | measured | |", "| --- | ---: | ---: | --- |"]
    text = "\n".join([*head, *table]) + "\n"
    (out / "targets.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"{sum('| met |' in line for line in table)} of {len(table)} targets are met")
    return 0


STAGES: dict[str, Callable[[Path, bool], int]] = {
    "identity": identity,
    "roofs": roofs,
    "references": references,
    "kernels": kernels,
    "equality": equality,
    "sweep": sweep,
    "targets": targets,
}


def main(arguments: Sequence[str]) -> int:
    """Run one stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("stage", choices=[*STAGES, "reference"])
    parser.add_argument("op", nargs="?")
    given = parser.parse_args(arguments)
    if given.stage == "reference":
        return reference_of(given.out, given.cpu, given.op)
    return STAGES[given.stage](given.out, given.cpu)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
