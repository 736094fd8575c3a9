"""Predicted cells as rows of the store's own kind: same axes, same metrics, marked `predicted`, without samples.

An interval is null, because a model has no spread; so is what only a run can tell. Each null has its reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench.predict.cells import Device, PredictedCell
from specbench.result_row import SCHEMA_VERSION, ResultRow, resume_key
from specbench.roofline.breakeven import implied_overhead
from specbench.roofline.cost import ZERO, Cost
from specbench.roofline.model import roof_fraction, time_s
from specbench.roofline.step_model import StepTimes
from specbench.store import ROWS_FILE
from specbench.version import __version__

NO_SPREAD = "a prediction has no interval"
NOT_RUN = "nothing was run"
NO_DRAFT = "nothing is drafted"
REVISION = f"specbench-{__version__} model"
_INTERVALS = tuple(
    f"{name}_{end}" for name in ("speedup", "output_tokens_per_s", "ar_output_tokens_per_s") for end in ("low", "high")
)
_UNKNOWN = {
    **dict.fromkeys(_INTERVALS, NO_SPREAD),
    **dict.fromkeys(("ttft_s", "itl_p50_s", "itl_p99_s", "looping_share", "end_to_end_tokens_per_s"), NOT_RUN),
    **dict.fromkeys(("joules_per_token", "rollback_s", "num_blocks"), NOT_RUN),
    "commit_s": "it is part of host_s in a prediction",
    "ar_commit_s": "it is part of ar_host_s in a prediction",
    "roof_fraction_measured": "the prediction is from the datasheet's roof",
    "ar_roof_fraction_measured": "the prediction is from the datasheet's roof",
}


def environment_of(device: Device) -> str:
    """Stands where a measured row has its machine's fingerprint."""
    return f"predicted:{device.name}"


def row_of(cell: PredictedCell, device: Device, started_at: str) -> dict[str, Any]:
    """The cell as a row's content, ready for the store's own check."""
    case = cell.case
    environment = environment_of(device)
    curve = cell.curve
    kind = case.drafter.kind
    notes = [cell.drafting.assumed] if cell.drafting.assumed else []
    if curve is not None and case.depth > 0:
        notes.append(f"acceptance {curve.status}: {curve.source}")
    weights = f"{case.target.name}, not loaded"
    return {
        "schema_version": SCHEMA_VERSION,
        "key": resume_key(case.hash, REVISION, environment),
        "case_hash": case.hash,
        "case_name": case.name,
        "status": "skipped" if cell.skip is not None else "ok",
        "reason": cell.skip,
        "axes": case.axes,
        "conditions": {
            "lossless": True,
            "synthetic": kind in ("oracle", "forced"),
            "output_check": None,
            "device": device.name,
            "weights": weights,
            "drafter_weights": None,
            "prompt_categories": list(case.workload.prompts.categories or ()),
            "predicted": True,
        },
        "metrics": None if cell.skip is not None else metrics_of(cell, device),
        "samples": {"blocks": [], "prompts": []},
        "warnings": notes,
        "environment": environment,
        "code_revision": REVISION,
        "started_at": started_at,
        "duration_s": 0.0,
    }


def metrics_of(cell: PredictedCell, device: Device) -> dict[str, Any]:
    """A predicted cell's metrics under their names of definitions.py."""
    result, case = cell.result, cell.case
    assert result is not None
    batch, depth = case.workload.batch_size, cell.depth
    step, ar, tokens = result.step, result.ar, result.tokens_per_step
    values: dict[str, Any] = dict.fromkeys(_UNKNOWN)
    reasons: dict[str, str] = dict(_UNKNOWN)
    values |= _acceptance(cell, reasons)
    values |= _times(step, "") | _times(ar, "ar_")
    values |= {
        "tokens_per_step": tokens,
        "output_tokens_per_s": batch * tokens / step.total_s,
        "ar_output_tokens_per_s": batch / ar.total_s,
        "tpot_s": step.total_s / tokens,
        "ar_tpot_s": ar.total_s,
        "effective_batch": float(batch),
        "ar_effective_batch": float(batch),
        "peak_memory_bytes": None if cell.memory is None else int(cell.memory.total),
        "drafter_params": cell.drafting.params or None,
    }
    reasons |= {"peak_memory_bytes": "unknown"} if cell.memory is None else {}
    if not cell.drafting.params:
        reasons["drafter_params"] = NO_DRAFT if depth == 0 else "it drafts without weights of its own"
    decoding = cell.decoding
    verifying, passes = result.verifying.total, result.drafting
    drafting = sum((one.total for one in passes), ZERO)
    values |= _roofline(verifying + drafting, step.total_s, device, case.target.dtype, "", reasons)
    values |= _roofline(decoding, ar.total_s, device, case.target.dtype, "ar_", reasons)
    values["drafter_step_flops"] = drafting.flops or None
    values["drafter_step_bytes"] = drafting.bytes or None
    if not passes:
        reasons |= dict.fromkeys(("drafter_step_flops", "drafter_step_bytes"), "drafting makes no forward pass")
    roof = device.roof(case.target.dtype)
    values["draft_cost_ratio_roof"] = time_s(drafting, roof) / time_s(decoding, roof) if passes else None
    if not passes:
        reasons["draft_cost_ratio_roof"] = "drafting makes no forward pass"
    drafts = case.depth > 0
    if case.depth_policy == "auto":
        values["step_depth_mean"] = float(depth)
    values |= {
        "speedup": result.value if drafts else None,
        "draft_cost_ratio": step.draft_s / ar.total_s if drafts else None,
        "target_efficiency": ar.total_s / step.verify_s,
        "implied_overhead": implied_overhead(tokens, result.value) if drafts else None,
    }
    if not drafts:
        reasons |= dict.fromkeys(("speedup", "speedup_low", "speedup_high"), "this is the AR arm itself")
        reasons |= dict.fromkeys(("draft_cost_ratio", "implied_overhead"), NO_DRAFT)
    return values | {"null_reasons": {name: why for name, why in reasons.items() if values.get(name) is None}}


def _acceptance(cell: PredictedCell, reasons: dict[str, str]) -> dict[str, Any]:
    depth, curve, result = cell.depth, cell.curve, cell.result
    assert curve is not None
    assert result is not None
    names = ("acceptance_rate", "depth_acceptance_rate", "draft_efficiency", "acceptance_length")
    if depth == 0:
        reasons |= dict.fromkeys(names, NO_DRAFT)
        return {**dict.fromkeys(names), "acceptance_at": [], "acceptance_conditional_at": []}
    joint = curve.joint(depth)
    accepted = result.tokens_per_step - 1
    most = cell.case.drafter.num_nodes(depth)
    tree = most > depth
    if tree:
        reasons["acceptance_rate"] = "drafts are trees: see draft_efficiency and depth_acceptance_rate"
    levels = result.nodes if not tree else depth * result.nodes / most
    by_node = min(1.0, accepted / result.nodes) if result.nodes else None
    by_level = min(1.0, accepted / levels) if levels else None
    for name, value in (("draft_efficiency", by_node), ("depth_acceptance_rate", by_level)):
        if value is None:
            reasons[name] = NO_DRAFT
    if by_node is None and not tree:
        reasons["acceptance_rate"] = NO_DRAFT
    return {
        "acceptance_rate": None if tree else by_node,
        "depth_acceptance_rate": by_level,
        "draft_efficiency": by_node,
        "acceptance_length": 1 + sum(joint),
        "acceptance_at": list(joint),
        "acceptance_conditional_at": list(curve.rates(depth)),
    }


def _times(times: StepTimes, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}step_s": times.total_s,
        f"{prefix}draft_s": times.draft_s,
        f"{prefix}verify_s": times.verify_s,
        f"{prefix}sample_s": times.sample_s,
        f"{prefix}host_s": times.host_s,
    }


def _roofline(
    cost: Cost, seconds: float, device: Device, dtype: str, prefix: str, reasons: dict[str, str]
) -> dict[str, Any]:
    fraction = roof_fraction(cost, seconds, device.roof(dtype))
    measured = device.roof_source == "measured"
    name, other = ("measured", "datasheet") if measured else ("datasheet", "measured")
    reasons[f"{prefix}roof_fraction_{other}"] = f"the prediction is from the {name} roof"
    return {
        f"{prefix}flops": cost.flops,
        f"{prefix}bytes": cost.bytes,
        f"{prefix}intensity": cost.intensity,
        f"{prefix}achieved_flops_per_s": cost.flops / seconds,
        f"{prefix}achieved_bytes_per_s": cost.bytes / seconds,
        f"{prefix}roof_fraction_{name}": fraction,
        f"{prefix}roof_fraction_{other}": None,
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def contents_of(cells: Iterable[PredictedCell], device: Device) -> Iterator[dict[str, Any]]:
    """The cells as rows' contents."""
    started = now()
    for cell in cells:
        yield row_of(cell, device, started)


def checked_rows(cells: Iterable[PredictedCell], device: Device) -> Iterator[ResultRow]:
    """The cells as rows that the store's own rules accept."""
    return map(ResultRow.model_validate, contents_of(cells, device))


def write_rows(directory: Path, contents: Iterable[Mapping[str, Any]]) -> int:
    """DIR/rows.jsonl as a whole (temporary file, sync, rename), each row checked by the store's rules; how many rows.

    Predictions cost nothing to make again, so an earlier prediction is replaced; measured rows never are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{ROWS_FILE}.tmp"
    count = 0
    with temporary.open("w", encoding="ascii") as handle:
        for content in contents:
            ResultRow.model_validate(content)
            handle.write(json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n")
            count += 1
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(directory / ROWS_FILE)
    return count


def holds_measured_rows(directory: Path) -> bool:
    """Whether DIR/rows.jsonl has a row that was measured."""
    file = directory / ROWS_FILE
    if not file.is_file():
        return False
    with file.open(encoding="utf-8") as lines:
        return any(not _is_predicted(line) for line in lines if line.strip())


def _is_predicted(line: str) -> bool:
    try:
        row: Mapping[str, Any] = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, Mapping) and bool(row.get("conditions", {}).get("predicted"))


def as_dicts(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    return [row.model_dump() for row in rows]
