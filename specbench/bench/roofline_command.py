"""`specbench roofline`: the three roofs of a device with their knees and sources, and measuring this one's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from specbench.errors import ExitCode, InputError, InvalidEnvironmentError
from specbench.report.rows import significant
from specbench.roofline.hardware import Hardware, Match, hardware, identify_environment
from specbench.roofline.model import Roof, critical_tokens
from specbench.roofline.roofs import clock_adjusted, measured_faults, three_roofs
from specbench.roofline.shapes import NAMED_SHAPES, ModelSpec, named_shape

if TYPE_CHECKING:
    from specbench.bench.ceilings import MeasuredRoofs

CPU_DTYPES = ("fp32", "bf16")
GPU_DTYPES = ("fp32", "fp16", "bf16")
TAGS = {"V": "read in the source", "D": "derived", "S": "secondary source", "M": "from memory, not re-checked"}
KINDS = ("datasheet", "clock-adjusted", "measured")
WHAT = {
    "sm_count": ("units", "{:,.0f}"),
    "clock_mhz": ("its clock", "{:,.0f} MHz"),
    "max_clock_mhz": ("highest clock", "{:,.0f} MHz"),
    "bandwidth_gb_per_s": ("bandwidth", "{:,.6g} GB/s"),
    "memory_gb": ("memory", "{:,.0f} GB"),
    "l2_mib": ("last cache", "{:,.0f} MiB"),
    "tdp_w": ("power", "{:,.0f} W"),
    "fp16_accumulation_tflops_per_s": ("fp16 with fp16 accumulation", "{:,.6g} TFLOP/s"),
}


def roofline(
    console: Console,
    name: str | None,
    *,
    measure: bool = False,
    model: str | None = None,
    dtype: str = "bf16",
    out: Path | None = None,
    as_json: bool = False,
) -> ExitCode:
    """Show a device's roofs; with `measure`, measure this machine's, store them, and write charts to `out`.

    Raises InputError for unknown names, for measuring a device that isn't this one, and for a dtype or a model shape
    whose staircase can't be measured; InvalidEnvironmentError where what was measured can't be true.
    """
    spec = model_spec(model) if model is not None else None
    if name is not None and not measure:
        return _named(console, hardware(name), spec, as_json)
    return _this(console, name, measure=measure, spec=spec, dtype=dtype, out=out, as_json=as_json)


def model_spec(name: str) -> ModelSpec:
    """The shape of a model: a published one by its short name, or whatever `target.model` takes in a scenario."""
    if name.strip().lower() in NAMED_SHAPES:
        return named_shape(name)
    from specbench.engine.models.config import read_model_spec
    from specbench.engine.models.sources import resolve_model

    try:
        return read_model_spec(resolve_model(name, weights=False))
    except InputError as error:
        shapes = ", ".join(sorted(NAMED_SHAPES))
        raise InputError(error.message, key="--model", remedy=f"use a model's folder, or one of: {shapes}") from None


def _named(console: Console, device: Hardware, spec: ModelSpec | None, as_json: bool) -> ExitCode:
    if as_json:
        console.print(json.dumps(device.to_dict(), indent=2), markup=False, soft_wrap=True)
        return ExitCode.DONE
    names = ", ".join((*device.device_names, *device.shared_names))
    console.print(f"{device.name}: {names}", markup=False)
    show_roofs(console, device, None)
    fastest = clock_adjusted(device, device.max_clock_hz) if device.max_clock_hz is not None else None
    if fastest is not None and device.clock_hz is not None and device.max_clock_hz is not None:
        share = device.max_clock_hz / device.clock_hz
        console.print(
            f"at its highest clock, {device.max_clock_hz / 1e6:.0f} MHz, peaks are {share:.0%} of the datasheet's:"
            " a measured peak above the datasheet's need not be a fault",
            markup=False,
        )
    console.print("measured roof: none, this is another device", markup=False)
    if spec is not None:
        _show_model(console, device.roof("bf16") or device.roof("fp16"), spec, device.name)
    return ExitCode.DONE


def _this(
    console: Console,
    name: str | None,
    *,
    measure: bool,
    spec: ModelSpec | None,
    dtype: str,
    out: Path | None,
    as_json: bool,
) -> ExitCode:
    from specbench.bench.ceilings_clock import clock_policy
    from specbench.bench.devices import has_gpu
    from specbench.bench.environment import environment
    from specbench.bench.roof_store import RoofFolder, conditions, default_folder

    kind = "cuda" if has_gpu() else "cpu"
    env = environment(kind)
    match = identify_environment(env)
    if name is not None and (match.hardware is None or match.hardware.name != hardware(name).name):
        raise InputError(
            f"this machine is no {name}: it is {env['device_name']}",
            key="--hardware",
            remedy="leave out --hardware to measure this machine, or leave out --measure for the datasheet",
        )
    store, known = RoofFolder(default_folder()), conditions(env, clock_policy(env))
    dtypes = GPU_DTYPES if kind == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        raise InputError(f"no matmul of {dtype} here", key="--dtype", remedy=f"use one of: {', '.join(dtypes)}")
    measured: Mapping[str, Any] | None
    charts: list[Path] = []
    if measure:
        shape = spec or named_shape("llama-3.1-8b" if kind == "cuda" else "smollm2-135m")
        roofs = _measure(console, kind, shape, dtypes, dtype, env)
        measured = roofs.to_dict()
        faults = measured_faults(measured, match.hardware)
        if faults:
            raise InvalidEnvironmentError(
                f"what was measured can't be true: {'; '.join(faults)}", remedy="measure again on an idle machine"
            )
        refused = store.save(known, measured, match.hardware)
        told = refused or f"stored in {store.file(known)}"
        charts = _write(roofs, shape, str(env["device_name"]), out or Path("runs/roofline"))
    else:
        found = store.load(known, (), sheet=match.hardware)
        measured, told = found.roofs, found.told
    if as_json:
        sheet = match.hardware.to_dict() if match.hardware else None
        text = {"datasheet": sheet, "datasheet_reason": match.reason, "measured": measured, "told": told}
        console.print(json.dumps(text, indent=2), markup=False, soft_wrap=True)
        return ExitCode.DONE
    _show_this(console, env, match, measured, told, measure=measure)
    if spec is not None and not measure:
        roof = next((one.roof for one in reversed(three_roofs("bf16", match.hardware, measured))), None)
        _show_model(console, roof, spec, "this machine")
    for path in charts:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return ExitCode.DONE


def _measure(
    console: Console, kind: str, spec: ModelSpec, dtypes: tuple[str, ...], dtype: str, env: Mapping[str, Any]
) -> MeasuredRoofs:
    from specbench.bench.roof_measure import measure_everything

    gpu = env.get("gpu") or {}
    with console.status("measuring") as status:
        return measure_everything(
            kind, spec, dtypes=dtypes, skinny_dtype=dtype, uuid=gpu.get("uuid"), tell=lambda text: status.update(text)
        )


def _write(roofs: MeasuredRoofs, spec: ModelSpec, device: str, folder: Path) -> list[Path]:
    from specbench.bench.roof_charts import write_charts

    written = write_charts(roofs, spec, device, folder)
    file = folder / "roofs.json"
    file.write_text(json.dumps(roofs.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return [*written, file]


def _show_this(
    console: Console,
    env: Mapping[str, Any],
    match: Match,
    measured: Mapping[str, Any] | None,
    told: str,
    *,
    measure: bool,
) -> None:
    console.print(f"device: {env['device_name']}", markup=False)
    sheet = match.hardware
    console.print(f"datasheet roof: {sheet.name if sheet else f'unknown ({match.reason})'}", markup=False)
    if measured is None:
        console.print(f"measured roof: {told}; run with --measure", markup=False)
    else:
        console.print(f"measured roof: {f'now, {told}' if measure else told}", markup=False)
    show_roofs(console, sheet, measured)
    if measured is not None:
        show_measured(console, measured)


def show_roofs(console: Console, sheet: Hardware | None, measured: Mapping[str, Any] | None) -> None:
    """Peak and knee of each roof by dtype, then the source of each cell."""
    dtypes = dict.fromkeys(
        (*(sheet.peaks_flops_per_s if sheet else ()), *((measured or {}).get("gemm_flops_per_s") or ()))
    )
    by_dtype = {dtype: {roof.kind: roof for roof in three_roofs(dtype, sheet, measured)} for dtype in dtypes}
    kinds = [kind for kind in KINDS if any(kind in roofs for roofs in by_dtype.values())]
    if not kinds:
        return
    console.print("roofs: peak, and knee in FLOP/byte")
    table = Table(box=None)
    table.add_column("dtype")
    for kind in kinds:
        table.add_column(kind, justify="right")
        table.add_column("knee", justify="right")
    for dtype, roofs in by_dtype.items():
        cells = [
            text for kind in kinds for text in (_roof_cells(roofs[kind].roof, dtype) if kind in roofs else ("-", "-"))
        ]
        table.add_row(dtype, *cells)
    rates = {"datasheet": sheet.bandwidth_bytes_per_s} if sheet else {}
    rates |= {"clock-adjusted": rates["datasheet"]} if "clock-adjusted" in kinds else {}
    rates |= {"measured": float(measured["bandwidth_bytes_per_s"])} if measured else {}
    table.add_row("memory", *[text for kind in kinds for text in (significant(rates.get(kind), "B/s"), "")])
    console.print(table)
    if sheet is not None:
        console.print(f"where {sheet.name}'s figures are from (dense, without sparsity)", markup=False)
        console.print(_source_table(sheet))
        used = sorted({cell.tag for cell in sheet.sources.values()})
        console.print("tags: " + " · ".join(f"{tag} {TAGS[tag]}" for tag in used), markup=False)


def _roof_cells(roof: Roof, dtype: str) -> tuple[str, str]:
    unit = "OP/s" if dtype.startswith("int") else "FLOP/s"
    return significant(roof.flops_per_s, unit, 4), f"{roof.knee:.3g}"


def _source_table(sheet: Hardware) -> Table:
    table = Table(box=None)
    for heading, right in (("cell", False), ("value", True), ("tag", False), ("source", False)):
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for key, cell in sheet.sources.items():
        label, form = WHAT.get(key, (f"{key.removeprefix('peak_')} peak", "{:,.6g} T/s"))
        table.add_row(label, form.format(cell.value), cell.tag, cell.source)
    return table


def show_measured(console: Console, measured: Mapping[str, Any]) -> None:
    """Bandwidth of each level, the clock, and the staircase of the model's linear layers."""
    levels = measured.get("levels") or []
    if levels:
        console.print("bandwidth by cache level")
        table = Table(box=None)
        for heading in ("level", "size", "read", "copy", "triad"):
            table.add_column(heading, justify="left" if heading == "level" else "right")
        for level in levels:
            size = "" if level["capacity_bytes"] is None else f"{level['capacity_bytes'] / 2**10:,.0f} KiB"
            rates = [significant(level["bytes_per_s"][kernel], "B/s") for kernel in ("read", "copy", "triad")]
            table.add_row(level["level"], size, *rates)
        console.print(table)
    clock = measured.get("clock_hz")
    how = measured.get("clock_how")
    if how:
        console.print(f"clock under load: {significant(clock, 'Hz') if clock else 'not known'} ({how})", markup=False)
    if measured.get("skinny"):
        name, held = measured.get("model") or "a model", measured["skinny"][0]["dtype"]
        console.print(f"time of one linear layer of {name} over M rows, {held}", markup=False)
        console.print(_staircase_table(measured))
    for text in (*(measured.get("marks") or ()), *(measured.get("notes") or ())):
        console.print(f"note: {text}", markup=False)


def _staircase_table(measured: Mapping[str, Any]) -> Table:
    """Time by M and layer, torch's beside where it was measured."""
    points = [*measured["skinny"], *(measured.get("skinny_torch") or [])]
    columns = dict.fromkeys((p["n"], p["k"], p["kernel"]) for p in points)
    table = Table(box=None)
    table.add_column("M", justify="right")
    for n, k, kernel in columns:
        table.add_column(f"{n}x{k}\n{kernel}", justify="right")
    times = {(p["m"], p["n"], p["k"], p["kernel"]): p["time_s"] for p in points}
    for m in sorted({p["m"] for p in points}):
        table.add_row(str(m), *[significant(times.get((m, *column)), "s") for column in columns])
    return table


def _show_model(console: Console, roof: Roof | None, spec: ModelSpec, device: str) -> None:
    """What the roof says of a model at once: time to read its weights, tokens in flight at the knee.

    An untied embedding is only looked up, so it is not read.
    """
    if roof is None:
        console.print(f"{spec.name}: no 16-bit roof of {device} is known", markup=False)
        return
    weights = 2 * (spec.num_linear_params + spec.num_head_params)
    console.print(
        f"{spec.name} in bf16 on {device}: {significant(weights, 'B')} of weights read, at least"
        f" {significant(weights / roof.bandwidth_bytes_per_s, 's')} a pass; linear layers turn compute bound at"
        f" {critical_tokens(roof, 2):,.0f} tokens in flight (batch x nodes)",
        markup=False,
    )
