"""Result rows made from a formula: an AR step of a + b·B, a verify step that grows faster, drafting by depth.

The formula is a small machine (memory-bound at batch 1, compute-bound later), so speedups cross 1.0 inside the grid for
some drafters, never for others, and at once for one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from specbench.result_row import diagnostics_only

# name -> (kind, acceptance of one token, cost of one draft pass in AR steps, synthetic)
DRAFTERS: dict[str, tuple[str, float, float, bool]] = {
    "ngram(3)": ("ngram", 0.45, 0.01, False),
    "early_exit(8)": ("early_exit", 0.72, 0.26, False),
    "suffix": ("suffix", 0.55, 0.01, False),
    "eagle2(16)": ("eagle2", 0.74, 0.07, False),
    "mtp": ("mtp", 0.68, 0.05, False),
    "draft smollm2-15m": ("draft_model", 0.62, 0.15, False),
    "medusa(4)": ("medusa", 0.52, 0.03, False),
    "prompt_lookup": ("prompt_lookup", 0.2, 0.12, False),
    "oracle(0.8)": ("oracle", 0.8, 0.0, True),
}
CATEGORIES = {"editing": 1.15, "coding": 1.05, "qa": 0.9, "writing": 0.75}
THREE = ("ngram(3)", "early_exit(8)", "oracle(0.8)")
PARAMETERS = 134.5e6


def tokens_per_step(alpha: float, depth: int) -> float:
    """(1 − α^(γ+1)) / (1 − α): committed tokens of a step with independent acceptances."""
    return (1 - alpha ** (depth + 1)) / (1 - alpha)


def step_s(tokens: int) -> float:
    """Seconds of one forward pass over `tokens` tokens: 8 ms of weights, then 0.45 ms a token."""
    return 8e-3 + 0.45e-3 * tokens


def make_row(
    name: str,
    depth: int,
    batch: int,
    *,
    status: str = "ok",
    reason: str | None = None,
    output_check: str = "identical",
    axes: dict[str, Any] | None = None,
    conditions: dict[str, Any] | None = None,
    blocks: int = 6,
    drafter: tuple[str, float, float, bool] | None = None,
) -> dict[str, Any]:
    """One row as rows.jsonl holds it; `drafter` overrides the table for names that aren't in it."""
    kind, alpha, cost, synthetic = drafter or DRAFTERS[name]
    full_axes = {
        "target": "smollm2-135m-instruct", "dtype": "bf16", "backend": "reference", "drafter": name,
        "drafter_kind": kind,
        "depth": depth, "batch_size": batch, "context_len": None, "output_len": 64, "temperature": 0.0, "top_k": 0,
        "top_p": 1.0, "min_p": 0.0, "prompts": "builtin", "seed": 0,
    } | (axes or {})  # fmt: skip
    digest = hashlib.sha256(repr(sorted(full_axes.items(), key=str)).encode()).hexdigest()
    metrics, samples = _measured(alpha, cost, depth, batch, blocks, random.Random(digest))
    if status == "invalid":
        metrics = diagnostics_only(metrics)
    return {
        "schema_version": 1,
        "key": digest,
        "case_hash": digest[:16],
        "case_name": f"{name} · depth {depth} · batch {batch} · T {full_axes['temperature']:g}",
        "status": status,
        "reason": reason,
        "axes": full_axes,
        "conditions": {
            "lossless": True, "synthetic": synthetic,
            "output_check": "diverged" if status == "invalid" else output_check,
            "device": "Example CPU, 2 cores", "weights": "smollm2-135m-instruct @ 0123abcd",
            "prompt_categories": list(CATEGORIES),
        } | (conditions or {}),
        "metrics": metrics if status in ("ok", "invalid") else None,
        "samples": samples if status == "ok" else {"blocks": [], "prompts": []},
        "warnings": [],
        "environment": "f00dfeedcafe0001",
        "code_revision": "1a5af79",
        "started_at": "2025-11-29T15:25:00+00:00",
        "duration_s": 12.5,
    }  # fmt: skip


def _measured(
    alpha: float, cost: float, depth: int, batch: int, blocks: int, noise: random.Random
) -> tuple[dict[str, Any], dict[str, Any]]:
    def split(pass_s: float, draft_s: float) -> dict[str, float]:
        parts = {
            "draft_s": draft_s,
            "verify_s": pass_s,
            "sample_s": 2e-4 + 4e-5 * batch,
            "commit_s": 1e-4,
            "host_s": 4e-4,
        }
        return parts | {"step_s": sum(parts.values())}

    spec = split(step_s(batch * (depth + 1)), depth * cost * step_s(batch))
    ar = split(step_s(batch), 0.0)
    per_step = tokens_per_step(alpha, depth)
    speed = per_step * ar["step_s"] / spec["step_s"] * noise.uniform(0.985, 1.015)
    half = 0.02 + 0.03 * noise.random()
    ar_rate = batch / ar["step_s"]
    drafts = 400
    histogram = [round(drafts * alpha**i * (1 - alpha if i < depth else 1)) for i in range(depth + 1)]
    accepted = sum(i * n for i, n in enumerate(histogram))

    def work(tokens: int, seconds: float) -> dict[str, float]:
        flops, bytes_ = 2 * PARAMETERS * tokens, 2 * PARAMETERS + 4e5 * tokens
        intensity = flops / bytes_
        roof = min(45e9 * intensity, 600e9)
        return {
            "flops": flops, "bytes": bytes_, "intensity": intensity, "achieved_flops_per_s": flops / seconds,
            "achieved_bytes_per_s": bytes_ / seconds, "roof_fraction_measured": flops / seconds / roof,
        }  # fmt: skip

    def count(scale: float, requests: int) -> dict[str, Any]:
        rate = min(accepted / (drafts * max(depth, 1)) * scale, 0.99)
        return {
            "num_steps": drafts // 4, "num_drafts": drafts // 4, "num_draft_tokens": drafts // 4 * depth,
            "num_accepted_tokens": round(rate * (drafts // 4) * depth), "num_committed_tokens": drafts // 2,
            "acceptance_rate": rate, "tokens_per_step": 1 + rate * depth, "acceptance_length": 1 + rate * depth,
            "num_requests": requests,
        }  # fmt: skip

    metrics: dict[str, Any] = {
        "num_steps": drafts, "num_drafts": drafts, "num_draft_tokens": drafts * depth, "num_accepted_tokens": accepted,
        "num_committed_tokens": accepted + drafts, "num_discarded_tokens": 0,
        "acceptance_rate": accepted / (drafts * depth) if depth else None, "tokens_per_step": per_step,
        "acceptance_length": per_step, "acceptance_length_by_request": per_step,
        "acceptance_at": [alpha ** (i + 1) for i in range(depth)], "acceptance_conditional_at": [alpha] * depth,
        "accepted_histogram": histogram,
        "by_category": {category: count(scale, 4) for category, scale in CATEGORIES.items()},
        "output_tokens_per_s": speed * ar_rate, "output_tokens_per_s_low": (speed - half) * ar_rate,
        "output_tokens_per_s_high": (speed + half) * ar_rate, "ar_output_tokens_per_s": ar_rate,
        "ar_output_tokens_per_s_low": ar_rate * 0.98, "ar_output_tokens_per_s_high": ar_rate * 1.02,
        "speedup": speed, "speedup_low": speed - half, "speedup_high": speed + half,
        "end_to_end_tokens_per_s": 0.9 * speed * ar_rate, "ttft_s": 0.12, "tpot_s": spec["step_s"] / per_step,
        "ar_tpot_s": ar["step_s"], "itl_p50_s": spec["step_s"], "itl_p99_s": 1.4 * spec["step_s"],
        "effective_batch": float(batch), "num_blocks": blocks, "looping_share": 0.0,
        "target_efficiency": ar["step_s"] / spec["verify_s"], "implied_overhead": per_step / speed - 1,
        "joules_per_token": None, "joules_per_token_reason": "this device has no energy counter",
        "peak_memory_bytes": 600e6 + 2e6 * batch, "roof_fraction_datasheet": None, "ar_roof_fraction_datasheet": None,
        "null_reasons": {"joules_per_token": "this device has no energy counter",
                         "roof_fraction_datasheet": "no datasheet roof is known for this device",
                         "ar_roof_fraction_datasheet": "no datasheet roof is known for this device"},
    }  # fmt: skip
    if num_passes := depth * (cost > 0.02):
        params = 2.9e6 + 5e7 * cost
        moved = {"drafter_step_flops": 2 * params * num_passes * batch, "drafter_step_bytes": 2 * params * num_passes}
        metrics |= moved | {"drafter_params": int(params), "draft_cost_ratio_roof": 0.7 * depth * cost}
    else:
        why = {"drafter_params": "it drafts without a model", "draft_cost_ratio_roof": "drafter_step_bytes is null"}
        why |= dict.fromkeys(("drafter_step_flops", "drafter_step_bytes"), "drafting made no forward pass")
        metrics |= dict.fromkeys(why)
        metrics["null_reasons"] |= why
    metrics["draft_cost_ratio"] = spec["draft_s"] / ar["step_s"]
    metrics |= spec | work(batch * (depth + 1), spec["step_s"])
    metrics |= {f"ar_{key}": value for key, value in (ar | work(batch, ar["step_s"])).items()}
    samples = {
        "blocks": [
            {
                "order": 2 * block + arm, "arm": ("ar", "spec")[arm], "block": block, "tokens": 256 * batch,
                "wall_s": 256 * batch / (ar_rate * (1.0, speed)[arm] * noise.uniform(0.97, 1.03)), "steps": 100,
                "valid": True, "marks": [],
            }
            for block in range(blocks)
            for arm in (0, 1)
        ],
        "prompts": [],
    }  # fmt: skip
    return metrics, samples


def with_prompts(
    row: dict[str, Any], rates: Sequence[float], *, per_category: int = 6, drafts: int = 30, scale: float = 1.0
) -> dict[str, Any]:
    """The row with acceptance by prompt: every draft goes as deep as the row's depth, and position i + 1 is accepted
    with `rates[i]` (the last one further on) times its category's own factor to the power of `scale`."""
    noise, depth = random.Random(str((row["key"], tuple(rates)))), row["axes"]["depth"]
    row["samples"]["prompts"] = []
    for category, factor in CATEGORIES.items():
        for place in range(per_category):
            tried, accepted, alive = [], [], drafts
            for position in range(depth):
                rate = min(0.98, rates[min(position, len(rates) - 1)] * factor**scale * noise.uniform(0.85, 1.15))
                tried.append(alive)
                alive = sum(noise.random() < rate for _ in range(alive))
                accepted.append(alive)
            row["samples"]["prompts"].append(
                {
                    "id": f"{category}-{place}", "category": category, "ar_tokens": 64, "ar_s": 1.0,
                    "spec_tokens": 64, "spec_s": 0.6, "offered_at": [drafts] * depth, "tried_at": tried,
                    "accepted_at": accepted,
                }
            )  # fmt: skip
    return row


def make_rows(
    drafters: Sequence[str] = THREE,
    depths: Sequence[int] = (1, 3, 5),
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    faults: bool = True,
    blocks: int = 6,
) -> list[dict[str, Any]]:
    """A whole sweep; with `faults`, one cell each is invalid, failed, skipped and a near tie."""
    rows = [make_row(name, depth, batch, blocks=blocks) for name in drafters for depth in depths for batch in batches]
    if faults:
        first, last, top = drafters[0], drafters[min(1, len(drafters) - 1)], max(batches)
        swaps = {
            (first, depths[-1], batches[1]): ("invalid", "token 17 of prompt qa-2 differs from the AR arm"),
            (last, depths[-1], top): ("failed", "out of memory: 3.1 GB asked, 2.2 GB free"),
            (last, depths[0], top): ("skipped", "needs 130 KV pages, the pool holds 128"),
        }
        for index, row in enumerate(rows):
            place = (row["axes"]["drafter"], row["axes"]["depth"], row["axes"]["batch_size"])
            if place in swaps:
                rows[index] = make_row(*place, status=swaps[place][0], reason=swaps[place][1])
            elif place == (first, depths[0], batches[0]):
                rows[index] = make_row(*place, output_check="near_tie", blocks=blocks)
                rows[index]["warnings"] = ["1 of 16 prompts parts from AR at a near tie (top-2 margin 0.004)"]
    return rows


def make_manifest(**changes: Any) -> dict[str, Any]:
    """The manifest of a run on an example CPU without a datasheet roof."""
    return {
        "schema_version": 1,
        "name": "quickstart",
        "question": "On this CPU, up to which batch does each drafter pay off for SmolLM2-135M?",
        "scenario": {
            "name": "quickstart",
            "target": {"model": "smollm2-135m-instruct", "dtype": "bf16"},
            "drafters": [{"kind": "ngram", "max_ngram": 3}, {"kind": "early_exit", "layers": 8}],
            "sweep": {"batch_size": [1, 2, 4, 8, 16], "depth": [1, 3, 5]},
            "measure": {"blocks": {"min": 5, "max": 12}, "seed": 0},
        },
        "scenario_file": "quickstart.yaml",
        "environment": {"python": "3.11.7", "torch": "2.13.0", "cpu": {"name": "Example CPU", "cores": 2}},
        "fingerprint": "f00dfeedcafe0001",
        "code_revision": "1a5af79",
        "device": "Example CPU, 2 cores",
        "roofs": {
            "measured": {
                "bandwidth_bytes_per_s": 45e9,
                "read_bytes_per_s": 45e9, "copy_bytes_per_s": 38e9, "triad_bytes_per_s": 40e9,
                "gemm_flops_per_s": {"bf16": 600e9, "fp32": 310e9},
                "skinny": [{"m": m, "flops_per_s": min(45e9 * m, 560e9)} for m in (1, 2, 4, 8, 16, 32, 64)],
            },
            "datasheet": None,
            "h100": {
                "name": "NVIDIA H100 80GB HBM3", "bandwidth_bytes_per_s": 3350e9,
                "peaks_flops_per_s": {"bf16": 989.4e12, "fp32": 66.9e12},
                "sources": {"peak_bf16": "H100 datasheet, dense [V]", "bandwidth_gb_per_s": "H100 datasheet [V]"},
            },
        },
    } | changes  # fmt: skip
