"""Peak memory of loading the model and decoding a batch of 8, over its weights and KV cache.

    python -m benchmarks.memory --dtype bf16 --tokens 64

runs in a process of its own, as the benchmark `memory` does. The resident size before loading, with everything
imported and the kernels compiled and warmed on a tiny model, is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.blocks import Arm, Sample
from benchmarks.figures import Figure, Report, at_most
from benchmarks.settings import CATEGORIES, Settings
from benchmarks.sides import DTYPE_NAMES, Ours, chat_prompts
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.models.loader import iter_weights
from specbench.engine.models.sources import ModelSource
from specbench.errors import InvalidEnvironmentError
from specbench.roofline.shapes import ModelSpec

ROOT = Path(__file__).resolve().parent.parent
MEMORY_TARGET = 1.25
BATCH = 8
TINY = ModelSpec("tiny", "llama", 2, 64, 128, 4, 2, 16, 256, True)


def status_bytes(text: str, field: str) -> int:
    """A field of /proc/self/status ("VmHWM", "VmRSS"), which stands there in kB."""
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise InvalidEnvironmentError(f"/proc/self/status has no {field}", remedy="run this benchmark on Linux")


@dataclass(frozen=True)
class PeakMeter:
    """Peak resident bytes above those at `start`. `how` says whether the kernel's own mark could be reset."""

    base: int
    how: str

    @classmethod
    def start(cls) -> PeakMeter:
        gc.collect()
        base = status_bytes(Path("/proc/self/status").read_text(), "VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            # Without a reset the peak of the imports stays in the mark, so that a ratio can only come out too high.
            return cls(base, "ru_maxrss")
        return cls(base, "VmHWM")

    def above(self) -> int:
        if self.how == "VmHWM":
            peak = status_bytes(Path("/proc/self/status").read_text(), "VmHWM")
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak - self.base


def _warm_kernels(dtype: str) -> None:
    """Compile and run every kernel on a tiny model, so that neither code nor thread stacks count as the model's."""
    kv = PagedKVCache(
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        num_slots=1,
        max_context=16,
        dtype=DTYPES[dtype],
    )
    tensors = iter_weights(ModelSource("dummy", None, "", "tiny"), TINY, DTYPES[dtype])
    decoder = Decoder(TINY, tensors, dtype=dtype, backend="cpu", kv=kv, limits=DecoderLimits(16, 1))
    decoder.prefill([1, 2, 3], 0)


def measure(dtype: str, tokens: int, seed: int) -> dict[str, float]:
    """Load, decode `tokens` tokens for a batch of 8 real prompts, and read the peak. Run once in a fresh process."""
    _warm_kernels(dtype)
    meter = PeakMeter.start()
    engine = Ours(dtype)
    loaded = meter.above()
    prompts = chat_prompts(engine.target, CATEGORIES, BATCH, seed)
    requests = engine.bind(prompts, batch_size=BATCH, output_len=tokens)
    engine.run(requests, together=True)
    weights, kv = engine.spec.weight_bytes(dtype), engine.target.decoder.kv.bytes
    return {
        "base_bytes": meter.base,
        "loaded_bytes": loaded,
        "peak_bytes": meter.above(),
        "weight_bytes": weights,
        "kv_bytes": kv,
        "reset": float(meter.how == "VmHWM"),
    }


def peak_ratio(found: dict[str, float]) -> float:
    """Peak above the baseline over weights and KV cache."""
    return found["peak_bytes"] / (found["weight_bytes"] + found["kv_bytes"])


def _in_process(dtype: str, settings: Settings, _: int) -> Sample:
    options = ["--dtype", dtype, "--tokens", str(settings.output_len), "--seed", str(settings.seed)]
    command = [sys.executable, "-m", "benchmarks.memory", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidEnvironmentError(f"the memory run ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return Sample({**found, "ratio": peak_ratio(found)})


def memory(settings: Settings) -> Report:
    """Peak resident memory over weights and KV cache, in fp32 and bf16."""
    figures: list[Figure] = []
    raw: dict[str, object] = {}
    for dtype in DTYPE_NAMES:
        arms: dict[str, Arm] = {"run": partial(_in_process, dtype, settings)}
        rounds = settings.rounds(f"memory {dtype}", arms, settings.memory_runs)
        key = f"memory.{dtype}"
        what = f"peak memory over weights + KV, batch {BATCH}, {dtype}"
        figures.append(Figure(key, what, "x", rounds.values("run", "ratio"), at_most(MEMORY_TARGET)))
        for name, label in (
            ("peak_bytes", "peak above the baseline"),
            ("loaded_bytes", "peak while loading"),
            ("weight_bytes", "weights"),
            ("kv_bytes", "KV cache"),
            ("base_bytes", "baseline, not counted"),
        ):
            short = name.removesuffix("_bytes")
            figures.append(Figure(f"{key}.{short}", f"{label}, {dtype}", "MB", rounds.values("run", name)))
        raw[key] = rounds.to_list()
    reset = all(one["values"]["run"]["reset"] for rounds in raw.values() for one in rounds)  # type: ignore[attr-defined]
    note = "the peak is the kernel's high-water mark, reset before loading"
    if not reset:
        note = "the high-water mark could not be reset: the baseline's own peak may be in it"
    return Report("memory", tuple(figures), raw, (note,))


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one load and one batch-8 run, as JSON.")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, required=True)
    parser.add_argument("--tokens", type=int, default=Settings.output_len)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(measure(options.dtype, options.tokens, options.seed)))


if __name__ == "__main__":
    main()
