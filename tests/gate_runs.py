"""Runs made of numbers, for tests of the gate: a manifest and rows whose blocks have the rates asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 120
MACHINE = "89945f791d1a4ab2"
REVISION = "0123456789ab"
Row = dict[str, Any]


def manifest(**changes: Any) -> dict[str, Any]:
    """As a sweep writes it; `changes` of the environment go by their names, others under `top`."""
    top = changes.pop("top", {})
    env = {
        "device": "cpu",
        "device_name": "Example CPU family/model/stepping 25/1/1",
        "cpu_model": "Example CPU family/model/stepping 25/1/1",
        "cpu_isa": "avx2 fma",
        "cpu_cores_physical": 2,
        "cpu_cores_usable": 2,
        "memory_bytes": 25_276_063_744,
        "memory_gib": 24,
        "machine": "x86_64",
        "os": "Linux",
        "kernel": "6.1.0",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "numba": "0.68.1",
        "torch_threads": 2,
        "numba_threads": 2,
        "gpu": None,
    } | changes
    return {
        "schema_version": 1,
        "name": "quickstart",
        "environment": env,
        "fingerprint": MACHINE,
        "code_revision": REVISION,
        "device": env["device_name"],
    } | top


def rates(seed: int, blocks: int = 24, middle: float = 100.0, noise: float = 0.004) -> list[float]:
    """tokens/s of blocks: log-normal about `middle`."""
    return [float(rate) for rate in middle * np.exp(noise * np.random.default_rng(seed).normal(size=blocks))]


def sample(arm: str, index: int, rate: float, order: int, *, facts: bool = True, **changes: Any) -> Row:
    """One block of `TOKENS` tokens; the work it did depends on its number and arm alone."""
    steps = TOKENS if arm == "ar" else TOKENS // 2
    block: Row = {
        "order": order,
        "arm": arm,
        "block": index,
        "tokens": TOKENS,
        "wall_s": TOKENS / rate,
        "steps": steps,
        "valid": True,
        "marks": [],
    }
    if facts:
        block["facts"] = {
            "inputs": f"in{index % 6}",
            "outputs": f"out{index % 6}",
            "num_draft_tokens": 0 if arm == "ar" else 2 * steps,
            "num_accepted_tokens": 0 if arm == "ar" else steps + index % 6,
            "flops": 2.5e9 * steps,
            "bytes": 3.5e8 * steps,
            "kv_allocator_calls": 8,
            "tpot_s": 1 / rate,
            "itl_p50_s": 1 / rate,
            "itl_p99_s": 2 / rate,
        }
    for name, value in changes.items():
        (block["facts"] if name in block.get("facts", {}) else block)[name] = value
    return block


def make_row(
    name: str = "ngram(3) · depth 4 · batch 1 · T 0",
    spec: Sequence[float] | None = None,
    ar: Sequence[float] | None = None,
    *,
    status: str = "ok",
    reason: str | None = None,
    facts: bool = True,
    axes: Row | None = None,
    conditions: Row | None = None,
    metrics: Row | None = None,
    change: Callable[[Row], None] = lambda block: None,
    **top: Any,
) -> Row:
    """A row whose AR and speculative blocks have these rates; `change` may alter each block."""
    spec, ar = spec if spec is not None else rates(1, middle=140), ar if ar is not None else rates(2)
    blocks = []
    for index, both in enumerate(zip(ar, spec, strict=True)):
        for place, (arm, rate) in enumerate(zip(("ar", "spec"), both, strict=True)):
            block = sample(arm, index, rate, 2 * index + place, facts=facts)
            change(block)
            blocks.append(block)
    made: Row = {
        "num_steps": 1,
        "output_tokens_per_s": float(np.mean(spec)),
        "ar_output_tokens_per_s": float(np.mean(ar)),
        "speedup": float(np.mean(spec) / np.mean(ar)),
        "peak_memory_bytes": 7e8,
        "null_reasons": {},
    } | (metrics or {})
    measured = status in ("ok", "invalid")
    if status == "invalid":
        made = {key: value for key, value in made.items() if key != "speedup"}
    return {
        "schema_version": 1,
        "key": f"key of {name}",
        "case_hash": f"hash of {name}",
        "case_name": name,
        "status": status,
        "reason": reason if status == "ok" else reason or "it did not work",
        "axes": {"backend": "cpu", "drafter": "ngram(3)", "depth": 4, "batch_size": 1, "temperature": 0.0}
        | (axes or {}),
        "conditions": {
            "lossless": True,
            "synthetic": False,
            "output_check": "identical",
            "device": "cpu",
            "weights": "smollm2 @ 1, builtin sha256 39a3",
            "prompt_categories": ["qa"],
        }
        | (conditions or {}),
        "metrics": made if measured else None,
        "samples": {"blocks": blocks if measured else [], "prompts": []},
        "warnings": [],
        "environment": MACHINE,
        "code_revision": REVISION,
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 1.0,
    } | top


def write_run(place: Path, rows: Sequence[Row], about: dict[str, Any] | None = None) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "manifest.json").write_text(json.dumps(about or manifest()), encoding="utf-8")
    return place


def slower(values: Sequence[float], factor: float) -> list[float]:
    return [value * factor for value in values]
