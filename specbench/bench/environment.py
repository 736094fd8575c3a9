"""What this machine and this software are, and a fingerprint that only a real change alters.

    python -c "from specbench.bench.environment import environment; print(environment())"

Readings that differ from boot to boot or with load (clock speed, bogomips, free memory, the kernel's share of it) are
never part of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
SOURCE_DIRS = ("specbench", "kernels")
DISTRIBUTION = "specbench-suite"
FINGERPRINT_KEYS = (
    "device",
    "device_name",
    "cpu_model",
    "cpu_isa",
    "cpu_cores_physical",
    "cpu_cores_usable",
    "llc_bytes",
    "machine",
    "os",
    "python",
    "torch",
    "numpy",
    "numba",
    "torch_threads",
    "numba_threads",
    "gpu",
)
GPU_FINGERPRINT_KEYS = ("name", "memory_gib", "sm_count", "capability", "driver", "cuda", "power_limit_w")


def parse_cpuinfo(text: str) -> dict[str, str]:
    """Model and instruction sets of the first CPU in /proc/cpuinfo text; readings of speed are dropped."""
    first = text.split("\n\n", 1)[0]
    fields = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", first, flags=re.MULTILINE))
    model = fields.get("model name") or fields.get("Processor") or fields.get("CPU part") or "unknown"
    ids = [fields[key] for key in ("cpu family", "model", "stepping") if key in fields]
    wanted = {"avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve"}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": " ".join([model, *(["family/model/stepping " + "/".join(ids)] if ids else [])]),
        "isa": " ".join(sorted(flags & wanted)),
    }


def _size_bytes(text: str) -> int:
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    text = text.strip()
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Bytes of the largest cache that CPU 0 sees, or None where the system does not say."""
    sizes = [_size_bytes(path.read_text()) for path in root.glob("index*/size")]
    return max(sizes, default=None)


def usable_cpus() -> list[int]:
    """The CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path, *args: str) -> str | None:
    command = ["git", "-C", str(root), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def code_revision(root: Path | None = None) -> str:
    """The source's revision: the last commit that touched it, "+dirty.<hash>" of its changes, or the package version.

    Commits and changes elsewhere (docs, results) leave it as it is, so that they do not make rows stale.
    """
    root = root or PACKAGE_ROOT.parent
    tracked = _git(root, "ls-files", "--error-unmatch", "specbench/__init__.py")
    commit = (_git(root, "log", "-1", "--format=%H", "--", *SOURCE_DIRS) or "").strip() if tracked else ""
    if not commit:
        return f"{DISTRIBUTION} {_version(DISTRIBUTION) or 'unknown'}"
    changes = _git(root, "diff", "HEAD", "--no-ext-diff", "--binary", "--", *SOURCE_DIRS) or ""
    new_files = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCE_DIRS) or ""
    digest = hashlib.sha256(changes.encode())
    names = sorted(name for name in new_files.split("\0") if name)
    for name in names:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return f"{commit[:12]}+dirty.{digest.hexdigest()[:8]}" if changes or names else commit[:12]


def _numba_threads() -> int | None:
    """Numba's thread count from its settings: asking its thread pool would start it, and that resets torch's count."""
    try:
        from numba import config
    except ImportError:
        return None
    return int(config.NUMBA_NUM_THREADS)


def _gpu(device: torch.device) -> dict[str, Any]:
    from specbench.bench.telemetry import describe_gpu

    props = torch.cuda.get_device_properties(device)
    uuid = getattr(props, "uuid", None)
    told = describe_gpu(str(uuid) if uuid is not None else None)
    return {
        "name": props.name,
        "memory_bytes": int(props.total_memory),
        "memory_gib": round(props.total_memory / 2**30),
        "sm_count": int(props.multi_processor_count),
        "capability": f"{props.major}.{props.minor}",
        "gfx": getattr(props, "gcnArchName", None) if torch.version.hip else None,
        "l2_bytes": int(getattr(props, "L2_cache_size", 0)) or None,
        "uuid": str(uuid) if uuid is not None else None,
        "cuda": torch.version.cuda or torch.version.hip,
        **told,
    }


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """JSON-able description of the machine and software that `device` runs under; a missing value is None."""
    device = torch.device(device)
    cpu = parse_cpuinfo(_read("/proc/cpuinfo") or f"model name : {platform.processor() or platform.machine()}")
    gpu = _gpu(device) if device.type == "cuda" else None
    memory = int(psutil.virtual_memory().total)
    return {
        "device": device.type,
        "device_name": gpu["name"] if gpu else cpu["model"],
        "cpu_model": cpu["model"],
        "cpu_isa": cpu["isa"],
        "cpu_cores_physical": psutil.cpu_count(logical=False),
        "cpu_cores_logical": psutil.cpu_count(logical=True),
        "cpu_cores_usable": len(usable_cpus()),
        "memory_bytes": memory,
        "memory_gib": round(memory / 2**30),
        "llc_bytes": last_level_cache_bytes(),
        "machine": platform.machine(),
        "os": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "triton": _version("triton"),
        "torch_threads": torch.get_num_threads(),
        "numba_threads": _numba_threads(),
        "gpu": gpu,
        "code_revision": code_revision(),
    }


def _read(path: str) -> str | None:
    file = Path(path)
    return file.read_text() if file.exists() else None


def fingerprint(env: dict[str, Any]) -> str:
    """16 hex digits over what makes results comparable; the code revision is a part of a row's key of its own."""
    kept = {key: env.get(key) for key in FINGERPRINT_KEYS}
    if env.get("gpu"):
        kept["gpu"] = {key: env["gpu"].get(key) for key in GPU_FINGERPRINT_KEYS}
    text = json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
