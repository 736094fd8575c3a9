"""`specbench size TEMPLATE`: how many GPUs, how split, which batch, drafter and depth; and what limits it. No torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specbench.errors import ExitCode, InputError
from specbench.predict.acceptance import assumed_book
from specbench.predict.size_text import as_dict, lines, table
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.draft_cost import DraftShape, drafter_shape
from specbench.roofline.formats import dtype_bytes, weight_format
from specbench.roofline.hardware import hardware
from specbench.roofline.serving import Drafting, Link
from specbench.roofline.shapes import ModelSpec, named_shape
from specbench.roofline.shapes_config import read_config
from specbench.roofline.sizing import Bounds, Load, SizeRequest, Sizing, size_up
from specbench.roofline.step_model import ASSUMED_GPU, FLOAT_DTYPES, Efficiency, StepModel
from specbench.scenario.size_schema import SizeDrafter, SizeEfficiency, SizeTemplate, load_template

COMPUTED_AS_STORED = (*FLOAT_DTYPES, "fp8", "int8")


def size(path: Path, *, out: Path | None, alternatives: int) -> ExitCode:
    """Print the answer and its alternatives; `out` gets all of it as JSON."""
    template, file = load_template(path)
    try:
        request = request_of(template, file.parent)
        found = size_up(request)
    except InputError as error:
        error.file = error.file or file
        raise
    console = Console(highlight=False)
    for line in lines(template, request, found):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(table(found, alternatives))
    if out is not None:
        out.write_text(
            json.dumps(as_dict(template, request, found), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        console.print(f"wrote {out}", markup=False, soft_wrap=True)
    return ExitCode.DONE


def sized(path: Path | str) -> Sizing:
    """The sizing of a template, for Python."""
    template, file = load_template(path)
    return size_up(request_of(template, file.parent))


def request_of(template: SizeTemplate, folder: Path) -> SizeRequest:
    """The template with its names looked up. Raises InputError for unknown models, devices and formats."""
    device, asked = hardware(template.hardware.device), template.hardware
    target = _target(template, folder)
    for key, known in (("weight_dtype", weight_format), ("kv_dtype", dtype_bytes)):
        try:
            known(getattr(template.model, key))
        except InputError as error:
            error.key = f"model.{key}"
            raise
    stored = template.model.weight_dtype
    dtype = template.model.compute_dtype or (stored if stored in COMPUTED_AS_STORED else "bf16")
    roof = device.roof(dtype)
    if roof is None:
        has = ", ".join(sorted(device.peaks_flops_per_s))
        remedy = f"compute_dtype: bf16 where the weights are widened first; {device.name} has: {has}"
        raise InputError(f"{device.name} has no {dtype} units", key="model.compute_dtype", remedy=remedy)
    efficiency = _efficiency(template.efficiency)
    model = StepModel(target, roof, efficiency, stored, template.model.kv_dtype)
    bounds, load = template.bounds, template.load
    return SizeRequest(
        model=model,
        device=device,
        draftings=tuple(one for drafter in template.drafters for one in _draftings(drafter, target)),
        prompt_len=template.workload.prompt_len,
        output_len=template.workload.output_len,
        load=Load(load.requests_per_s, load.concurrency),
        bounds=Bounds(
            None if bounds.tpot_ms is None else bounds.tpot_ms / 1e3,
            None if bounds.ttft_ms is None else bounds.ttft_ms / 1e3,
        ),
        splits=tuple(sorted(asked.tensor_parallel)),
        max_gpus=asked.max_gpus,
        link=None if asked.link_gb_per_s is None else Link(asked.link_gb_per_s * 1e9, asked.link_latency_us / 1e6),
        usable_share=asked.memory_share,
        price_per_gpu_hour=asked.price_per_hour,
    )


def _target(template: SizeTemplate, folder: Path) -> ModelSpec:
    if template.model.shape is not None:
        try:
            return named_shape(template.model.shape)
        except InputError as error:
            error.key = "model.shape"
            raise
    given = Path(str(template.model.config)).expanduser()
    path = given if given.is_absolute() or not (folder / given).exists() else folder / given
    return read_config(path / "config.json" if path.is_dir() else path)


def _efficiency(given: SizeEfficiency) -> Efficiency:
    """What is assumed of a GPU, with what the template says in its place."""
    fields: dict[str, Any] = {
        "compute": given.compute,
        "memory": given.memory,
        "step_s": None if given.step_ms is None else given.step_ms / 1e3,
        "pass_s": None if given.pass_ms is None else given.pass_ms / 1e3,
        "draft_pass_s": None if given.draft_pass_ms is None else given.draft_pass_ms / 1e3,
    }
    told = {key: value for key, value in fields.items() if value is not None}
    if not told:
        return ASSUMED_GPU
    words = ", ".join(f"{key} {value:g}" for key, value in told.items())
    return replace(ASSUMED_GPU, **told, source=f"the template: {words}; for the rest, {ASSUMED_GPU.source}")


def _draftings(drafter: SizeDrafter, target: ModelSpec) -> list[Drafting]:
    if drafter.kind == "none":
        return []
    curve, shape = _curve(drafter), _shape(drafter, target)
    most = shape.num_modules if shape.kind == "medusa" else max(drafter.depth)
    name = {"draft_model": f"draft_model({drafter.model})", "early_exit": f"early_exit({drafter.layers})"}
    return [
        Drafting(name.get(drafter.kind, drafter.kind), shape, curve, depth) for depth in drafter.depth if depth <= most
    ]


def _curve(drafter: SizeDrafter) -> AcceptanceCurve:
    if drafter.acceptance is not None:
        return AcceptanceCurve(drafter.acceptance, drafter.drafted, "the template", "assumed")
    book = assumed_book()
    found = next((one.curve for one in book.entries if one.drafter == drafter.kind), None)
    if found is None:
        remedy = "give acceptance: [0.8, 0.7, 0.6]"
        raise InputError(f"nothing is assumed of {drafter.kind}", key="drafters.acceptance", remedy=remedy)
    return found


def _shape(drafter: SizeDrafter, target: ModelSpec) -> DraftShape:
    if drafter.kind == "draft_model":
        try:
            return drafter_shape("draft_model", target, model=drafter.model)
        except InputError as error:
            error.key = "drafters.model"
            raise
    if drafter.kind == "early_exit":
        if (drafter.layers or 0) >= target.num_layers:
            message = f"early exit after {drafter.layers} of {target.num_layers} layers"
            raise InputError(message, key="drafters.layers", remedy=f"choose 1 to {target.num_layers - 1}")
        return drafter_shape("early_exit", target, num_layers=drafter.layers)
    return drafter_shape(drafter.kind, target)
