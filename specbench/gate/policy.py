"""The gate's policy: which metrics are gated, from which size a change counts, and how sure it must be.

    metrics:
      speedup: {min_effect: 0.05}
      output_tokens_per_s: {min_effect: 0.08, run_sd: 0.01}
      ar_output_tokens_per_s: off
    expected:
      - {case: "ngram*", metric: speedup}

What a file leaves out has the default; a key that isn't known is refused with its line. Defaults are 5 % for speed, 1 %
for memory, and exact for what can be counted.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from specbench.errors import InputError
from specbench.gate.types import Direction
from specbench.scenario.fields import ScalarFault, read_integer, read_number, read_text
from specbench.scenario.yaml_reader import (
    YamlMapping,
    YamlNode,
    YamlScalar,
    YamlSequence,
    as_read,
    parse_yaml,
    read_yaml,
)

Kind = Literal["ratio", "single", "exact"]
"""ratio: blocks of both runs, an interval. single: one figure a run, and the effect. exact: equal or not."""
Missing = Literal["inconclusive", "regression", "ignore"]
T = TypeVar("T")


@dataclass(frozen=True)
class MetricPolicy:
    """How one metric is gated. `min_effect`: the relative change from which on it counts (0 for exact). `run_sd`: how
    much a case's value differs from run to run by itself (sd of its log), which no block within a run can show."""

    kind: Kind
    direction: Direction
    min_effect: float
    run_sd: float = 0.0
    on: bool = True


# name: kind, direction, minimum effect, run_sd, gated by default
METRICS: dict[str, MetricPolicy] = {
    "speedup": MetricPolicy("ratio", "up", 0.05, 0.003),
    "output_tokens_per_s": MetricPolicy("ratio", "up", 0.05, 0.004),
    "ar_output_tokens_per_s": MetricPolicy("ratio", "up", 0.05, 0.004),
    "tokens_per_step": MetricPolicy("ratio", "both", 0.05),
    "step_s": MetricPolicy("ratio", "down", 0.05, 0.004, on=False),
    "tpot_s": MetricPolicy("ratio", "down", 0.05, 0.004, on=False),
    "itl_p50_s": MetricPolicy("ratio", "down", 0.05, 0.004, on=False),
    "itl_p99_s": MetricPolicy("ratio", "down", 0.05, 0.004, on=False),
    "peak_memory_bytes": MetricPolicy("single", "down", 0.01),
    "tokens": MetricPolicy("exact", "both", 0.0),
    "acceptance_rate": MetricPolicy("exact", "both", 0.0),
    "flops": MetricPolicy("exact", "down", 0.0),
    "bytes": MetricPolicy("exact", "down", 0.0),
    "kv_allocator_calls": MetricPolicy("exact", "down", 0.0),
    "kernel_launches": MetricPolicy("exact", "down", 0.0),
    "spill_bytes": MetricPolicy("exact", "down", 0.0),
    "predicted": MetricPolicy("exact", "both", 0.0),
}


@dataclass(frozen=True)
class Expectation:
    """An improvement that is known: of cases whose name matches the pattern `case`, in `metric` ("*" for all)."""

    case: str
    metric: str = "*"

    def covers(self, case_name: str, metric: str) -> bool:
        return self.metric in ("*", metric) and fnmatch.fnmatchcase(case_name, self.case)


@dataclass(frozen=True)
class Policy:
    """What the gate promises and how it decides.

    `confidence`: of the two-sided interval that must lie on the good side of the minimum effect for a PASS.
    `false_discovery`: the Benjamini-Hochberg level of a regression over all cases and ratio metrics. `false_alarms`:
    the most runs without any change that may be called regressions; the self-test holds the gate to it. `min_blocks`:
    with fewer blocks in common a case is inconclusive. `missing`: what a case that the candidate lacks amounts to.
    `unexplained`: improvements beyond so many minimum effects are reported unless they are `expected`.
    """

    name: str = "default"
    confidence: float = 0.9998
    false_discovery: float = 0.01
    false_alarms: float = 0.02
    min_blocks: int = 8
    missing: Missing = "inconclusive"
    unexplained: float = 3.0
    metrics: Mapping[str, MetricPolicy] = field(default_factory=lambda: dict(METRICS))
    expected: tuple[Expectation, ...] = ()

    def gated(self, kind: Kind) -> dict[str, MetricPolicy]:
        """The metrics of a kind that are on."""
        return {name: one for name, one in self.metrics.items() if one.kind == kind and one.on}

    def is_expected(self, case_name: str, metric: str) -> bool:
        return any(one.covers(case_name, metric) for one in self.expected)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; metrics that are off are left out."""
        metrics = {
            name: {"kind": one.kind, "direction": one.direction, "min_effect": one.min_effect, "run_sd": one.run_sd}
            for name, one in self.metrics.items()
            if one.on
        }
        return {
            "name": self.name,
            "confidence": self.confidence,
            "false_discovery": self.false_discovery,
            "false_alarms": self.false_alarms,
            "min_blocks": self.min_blocks,
            "missing": self.missing,
            "unexplained": self.unexplained,
            "metrics": metrics,
            "expected": [{"case": one.case, "metric": one.metric} for one in self.expected],
        }


DEFAULT = Policy()


def load_policy(path: Path | str) -> Policy:
    """The policy in the YAML file at `path`. Raises InputError with file, line, key and remedy."""
    return _policy(read_yaml(path), path)


def parse_policy(text: str, *, file: Path | str = "policy") -> Policy:
    """As `load_policy`, from a text; `file` is only named in errors."""
    return _policy(parse_yaml(text, file=file), file)


def _policy(root: YamlMapping, file: Path | str) -> Policy:
    readers: dict[str, Callable[[YamlNode, str, int], Any]] = {
        "name": lambda node, key, line: _scalar(node, file, key, line, read_text),
        "confidence": _number(file, 0.5, 1, open_ends=True),
        "false_discovery": _number(file, 0, 0.5, open_ends=True),
        "false_alarms": _number(file, 0, 0.5, open_ends=True),
        "min_blocks": lambda node, key, line: _scalar(node, file, key, line, lambda v: read_integer(v, 2, 10_000)),
        "missing": lambda node, key, line: _choice(node, file, key, line, ("inconclusive", "regression", "ignore")),
        "unexplained": _number(file, 1, 1000),
        "metrics": lambda node, key, line: _metrics(node, file, key, line),
        "expected": lambda node, key, line: _expected(node, file, key, line),
    }
    _refuse_unknown(root, tuple(readers), file, "")
    found = {key: readers[key](node, key, root.key_lines[key]) for key, node in root.entries.items()}
    return replace(DEFAULT, **found)


def _metrics(node: YamlNode, file: Path | str, key: str, line: int) -> dict[str, MetricPolicy]:
    mapping = _mapping(node, file, key, line, "write metrics: {speedup: {min_effect: 0.05}}")
    _refuse_unknown(mapping, tuple(METRICS), file, f"{key}.")
    out = dict(METRICS)
    for name, entry in mapping.entries.items():
        out[name] = _metric(entry, METRICS[name], file, f"{key}.{name}", mapping.key_lines[name])
    return out


def _metric(node: YamlNode, default: MetricPolicy, file: Path | str, key: str, line: int) -> MetricPolicy:
    """`off`, `on`, or a mapping; an exact metric takes neither an effect nor a run_sd."""
    if isinstance(node, YamlScalar):
        switch = as_read(node) if node.kind == "bool" else node.text
        if switch in ("true", "on", "false", "off"):
            return replace(default, on=switch in ("true", "on"))
        raise InputError(
            f"is {node.text!r}, which says nothing", file=file, line=line, key=key, remedy="write on, off or {...}"
        )
    mapping = _mapping(node, file, key, line, "write {min_effect: 0.05}")
    readers: dict[str, Callable[[YamlNode, str, int], Any]] = {
        "direction": lambda one, name, at: _choice(one, file, name, at, ("up", "down", "both"))
    }
    if default.kind != "exact":
        readers["min_effect"] = _number(file, 0, 1, open_ends=True)
    if default.kind == "ratio":
        readers["run_sd"] = _number(file, 0, 0.5)
    _refuse_unknown(mapping, tuple(readers), file, f"{key}.")
    found = {
        name: readers[name](one, f"{key}.{name}", mapping.key_lines[name]) for name, one in mapping.entries.items()
    }
    return replace(default, on=True, **found)


def _expected(node: YamlNode, file: Path | str, key: str, line: int) -> tuple[Expectation, ...]:
    remedy = 'write a list: - {case: "ngram*", metric: speedup}'
    if not isinstance(node, YamlSequence):
        raise InputError("is not a list", file=file, line=line, key=key, remedy=remedy)
    out = []
    for item in node.items:
        mapping = _mapping(item, file, key, item.line, remedy)
        _refuse_unknown(mapping, ("case", "metric"), file, f"{key}.")
        if "case" not in mapping.entries:
            raise InputError("names no case", file=file, line=mapping.line, key=key, remedy=remedy)
        texts = {
            name: _scalar(one, file, f"{key}.{name}", mapping.key_lines[name], read_text)
            for name, one in mapping.entries.items()
        }
        if texts.get("metric", "*") not in ("*", *METRICS):
            raise _unknown(texts["metric"], tuple(METRICS), file, mapping.key_lines["metric"], f"{key}.")
        out.append(Expectation(**texts))
    return tuple(out)


def _refuse_unknown(mapping: YamlMapping, known: tuple[str, ...], file: Path | str, prefix: str) -> None:
    for name, line in mapping.key_lines.items():
        if name not in known:
            raise _unknown(name, known, file, line, prefix)


def _unknown(name: str, known: tuple[str, ...], file: Path | str, line: int, prefix: str) -> InputError:
    near = get_close_matches(name, known, 1)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return InputError("is not known here", file=file, line=line, key=f"{prefix}{name}", remedy=remedy)


def _mapping(node: YamlNode, file: Path | str, key: str, line: int, remedy: str) -> YamlMapping:
    if not isinstance(node, YamlMapping):
        raise InputError("is not a mapping", file=file, line=line, key=key, remedy=remedy)
    return node


def _scalar(node: YamlNode, file: Path | str, key: str, line: int, read: Callable[[object], T]) -> T:
    if not isinstance(node, YamlScalar):
        raise InputError("is not one value", file=file, line=line, key=key, remedy="write one value")
    try:
        return read(node)
    except ScalarFault as fault:
        raise InputError(fault.message, file=file, line=line, key=key, remedy=fault.remedy) from None


def _number(file: Path | str, low: float, high: float, *, open_ends: bool = False) -> Callable[..., float]:
    def read(node: YamlNode, key: str, line: int) -> float:
        return _scalar(
            node, file, key, line, lambda value: read_number(value, low, high, open_low=open_ends, open_high=open_ends)
        )

    return read


def _choice(node: YamlNode, file: Path | str, key: str, line: int, words: tuple[str, ...]) -> str:
    text = _scalar(node, file, key, line, read_text)
    if text not in words:
        raise InputError(f"is {text!r}", file=file, line=line, key=key, remedy=f"write one of {', '.join(words)}")
    return text
