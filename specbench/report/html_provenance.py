"""Where a run's numbers come from: machine, clocks, power, versions, code, scenario, seed and the command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from specbench.report import rows as read
from specbench.report.roofs import Roof
from specbench.report.rows import Row

_VERSIONS = ("python", "torch", "cuda", "triton", "numba", "numpy", "transformers", "os", "kernel")


def provenance(cells: Sequence[Row], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader needs to judge a number or to make it again; what wasn't recorded says so, and why if known."""
    machine = read.section(manifest, "environment")
    gpu = read.section(machine, "gpu")
    scenario = str(manifest.get("scenario_file") or "")
    seeds = list(
        dict.fromkeys(read.plain(read.axis(row, "seed")) for row in cells if read.axis(row, "seed") is not None)
    )
    order = read.section(read.section(manifest, "scenario"), "measure").get("seed")
    times = sorted(str(row["started_at"]) for row in cells if row.get("started_at"))
    span = dict.fromkeys((times[0], times[-1])) if times else {}
    return [
        ("device", _device(machine, gpu, manifest)),
        ("driver", _known(gpu, "driver") if gpu else "none: a CPU"),
        ("clocks", _clocks(gpu)),
        ("power limit", _power(gpu)),
        ("versions", _versions(machine, gpu)),
        ("code revision", _listed([manifest.get("code_revision"), *(row.get("code_revision") for row in cells)])),
        ("machine's fingerprint", _listed([manifest.get("fingerprint"), *(row.get("environment") for row in cells)])),
        ("scenario", read.plain(scenario or manifest.get("name") or "not recorded")),
        ("seeds", f"{read.listed(seeds)} (prompts, sampling), {read.plain(order)} (order of blocks)"),
        ("measured", " to ".join(read.plain(one) for one in span) or "not recorded"),
        ("the whole run again", run_command(scenario)),
    ]


def run_command(scenario: str) -> str:
    return shlex.join(["specbench", "run", read.plain(scenario or "SCENARIO.yaml"), "--fresh"])


def _device(machine: Mapping[str, Any], gpu: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    name = read.plain(manifest.get("device") or machine.get("device_name") or "not recorded")
    if gpu:
        parts = [("memory_gib", "{} GiB"), ("sm_count", "{} SMs"), ("capability", "compute capability {}")]
        told = [text.format(read.plain(gpu[key])) for key, text in parts if gpu.get(key) is not None]
    else:
        parts = [("cpu_isa", "{}"), ("torch_threads", "{} threads"), ("memory_gib", "{} GiB")]
        told = [text.format(read.plain(machine[key])) for key, text in parts if machine.get(key) is not None]
    return ", ".join([name, *told])


def _known(values: Mapping[str, Any], key: str) -> str:
    if values.get(key) is not None:
        return read.plain(values[key])
    return f"not known{f': {read.plain(why)}' if (why := values.get('nvml_reason')) else ''}"


def _clocks(gpu: Mapping[str, Any]) -> str:
    found = [f"{name.removesuffix('_mhz').replace('_', ' ')} {read.plain(value)} MHz" for name, value in gpu.items()
             if name.endswith("clock_mhz") and value is not None]  # fmt: skip
    if found:
        return ", ".join(found)
    return "not recorded: read during each block, which is left out if the device slowed down" if gpu else (
        "not recorded: a CPU's clock changes by itself; blocks of both arms are interleaved against it"
    )  # fmt: skip


def _power(gpu: Mapping[str, Any]) -> str:
    if not gpu:
        return "not recorded: this device tells none"
    limit, default = (read.number(gpu.get(key)) for key in ("power_limit_w", "power_limit_default_w"))
    if limit is None:
        return _known(gpu, "power_limit_w")
    if default is None or default == limit:
        return f"{limit:g} W"
    return f"{limit:g} W of a default of {default:g} W"


def _versions(machine: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    values = {**machine, **({"cuda": gpu.get("cuda")} if gpu else {})}
    found = [f"{name} {read.plain(values[name])}" for name in _VERSIONS if values.get(name) is not None]
    return ", ".join(found) or "not recorded"


def _listed(values: Iterable[object]) -> str:
    found = list(dict.fromkeys(read.plain(value) for value in values if value not in (None, "", [])))
    return ", ".join(found) or "not recorded"


def flat(value: object, name: str = "") -> list[tuple[str, str]]:
    """Nested provenance as dotted names and values."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flat(item, f"{name}.{key}" if name else str(key))]
    if value is None and not name:
        return []
    return [(read.plain(name), "not known" if value is None else read.plain(value))]


def scenario_text(scenario: object) -> str:
    """The scenario as YAML, without control or direction characters."""
    if not scenario:
        return ""
    text: str = yaml.safe_dump(scenario, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)
    return read.printable(text)


def roof_line(roof: Roof) -> tuple[str, str, str, str, str, str]:
    return (
        read.plain(roof.name),
        read.plain(roof.dtype),
        read.significant(roof.bytes_per_s, "B/s"),
        read.significant(roof.flops_per_s, "FLOP/s"),
        read.significant(roof.knee),
        read.plain(roof.source),
    )
