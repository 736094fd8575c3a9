"""The manifest of a prediction: a run's own keys, and what the numbers rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbench.predict.acceptance import AcceptanceBook
from specbench.predict.cells import CHARS_PER_TOKEN, TEMPLATE_TOKENS, Device
from specbench.predict.fitting import RunFit
from specbench.predict.rows import REVISION, environment_of
from specbench.result_row import SCHEMA_VERSION
from specbench.roofline.gaps import Comparison
from specbench.roofline.hardware import hardware
from specbench.scenario.schema import Scenario

REFERENCE_DEVICE = "h100-sxm"


def manifest_of(
    scenario: Scenario,
    path: Path,
    device: Device,
    book: AcceptanceBook,
    found: RunFit | None = None,
    comparison: Comparison | None = None,
) -> dict[str, Any]:
    """`predicted` tells all that was assumed or fitted, and how it compares; `roofs` are those predicted with."""
    name = f"{device.name} (predicted)"
    return {
        "schema_version": SCHEMA_VERSION,
        "name": scenario.name,
        "question": scenario.question,
        "scenario": scenario.to_dict(),
        "scenario_file": str(path),
        "environment": {"device": device.name, "device_name": name, "memory_bytes": device.memory_bytes},
        "fingerprint": environment_of(device),
        "code_revision": REVISION,
        "device": name,
        "roofs": _roofs(device),
        "predicted": {
            "hardware": device.name,
            "roof": device.roof_source,
            "efficiency": device.efficiency.to_dict(),
            "acceptance": book.label,
            "curves": [
                {
                    "drafter": entry.drafter,
                    "rates": list(entry.curve.conditional),
                    "status": entry.curve.status,
                    "source": entry.curve.source,
                    "depth": entry.depth,
                    "temperature": entry.temperature,
                }
                for entry in book.entries
            ],
            "prompt_tokens": f"{CHARS_PER_TOKEN:g} characters a token and {TEMPLATE_TOKENS} tokens of the chat template"
            " where no context_len is given",
            "fit": None if found is None else _fit(found),
            "comparison": None if comparison is None else comparison.to_dict(),
        },
    }


def _roofs(device: Device) -> dict[str, Any]:
    reference = hardware(REFERENCE_DEVICE).to_dict()
    if device.hardware is not None:
        return {"measured": None, "datasheet": device.hardware.to_dict(), "datasheet_reason": None, "h100": reference}
    peaks = {dtype: roof.flops_per_s for dtype, roof in device.roofs.items()}
    bandwidth = next(iter(device.roofs.values())).bandwidth_bytes_per_s
    measured = {
        "device": device.name,
        "bandwidth_bytes_per_s": bandwidth,
        "bandwidth_limit_bytes_per_s": bandwidth,
        "gemm_flops_per_s": peaks,
        "flops_limit_per_s": peaks,
        "skinny": [],
        "notes": ["as the run that was fitted on measured them"],
        "marks": [],
    }
    reason = "the roofs are those that were measured"
    return {"measured": measured, "datasheet": None, "datasheet_reason": reason, "h100": reference}


def _fit(found: RunFit) -> dict[str, Any]:
    return {
        "cells": [cell.name for cell in found.fit.cells],
        "used_staircase": found.used_staircase,
        "errors": {one.name: one.error for one in found.fit.errors},
        "left_out": {one.name: one.error for one in found.fit.left_out},
        "left_out_error": found.fit.left_out_error,
    }
