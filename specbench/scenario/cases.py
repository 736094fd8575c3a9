"""Cases: the axes of a scenario, bound point by point. A case has a short name for a page and a hash for resume.

The hash is sha256 over the canonical JSON of everything that changes what is measured: target, drafter, depth,
workload, sampling. `measure` is left out on purpose: blocks, budget, warm-up and the order seed say how well a case is
measured, not what it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import product
from math import prod

from specbench.errors import InputError
from specbench.scenario.drafter_schema import DrafterConfig
from specbench.scenario.schema import PROMPT_NAMES, Scenario, SyntheticSource

MAX_CASES = 10_000
Scalar = str | int | float | bool | None
Option = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True)
class TargetSpec:
    """The model under test: `model` (a known name, a hub id, or an absolute path), or `shape` with dummy weights."""

    model: str | None = None
    shape: str | None = None
    weights: str | None = None
    dtype: str = "bf16"
    revision: str | None = None
    backend: str = "auto"

    @property
    def name(self) -> str:
        """The model's short name: a path loses its folders."""
        return _short(self.model or self.shape or "")


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter with every option bound; `options` is kept sorted by key."""

    kind: str
    options: tuple[tuple[str, Option], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options, key=lambda item: item[0])))

    def option(self, key: str) -> Option:
        """The value of option `key`; KeyError where this kind has no such option."""
        return dict(self.options)[key]

    @property
    def name(self) -> str:
        """Short: `ngram(3)`, `early_exit(8)`, `none`. The chief option comes first; others only if not the default."""
        parts = [_worded(key, value) for key, value in sorted(self.options, key=_chief) if _telling(key, value)]
        return f"{self.kind}({', '.join(parts)})" if parts else self.kind


_CHIEF = ("max_ngram", "layers", "model", "length", "rates")
_BARE = (*_CHIEF, "rule", "dtype")
_QUIET = {"min_ngram": 1, "rule": "transformers"}


def _chief(item: tuple[str, Option]) -> tuple[int, str]:
    return (_CHIEF.index(item[0]) if item[0] in _CHIEF else len(_CHIEF), item[0])


def _telling(key: str, value: Option) -> bool:
    return value is not None and _QUIET.get(key) != value


def _worded(key: str, value: Option) -> str:
    if isinstance(value, tuple):
        text = "/".join(_number(item) for item in value)
    elif isinstance(value, str):
        text = _short(value)
    else:
        text = _number(value)
    return text if key in _BARE else f"{key.removesuffix('_ngram').replace('_', ' ')} {text}"


@dataclass(frozen=True)
class SamplingSpec:
    """Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class SyntheticPrompts:
    """`count` prompts of `words` words, of which the share `copy_rate` of phrases repeats earlier ones."""

    count: int
    words: int
    copy_rate: float


@dataclass(frozen=True)
class PromptSpec:
    """Where prompts come from. `source`: "builtin", "humaneval", "synthetic" (then `synthetic` is set), or a path.

    `sha256` is that of a file's bytes, so that an edited file makes another case; None for other sources.
    """

    source: str = "builtin"
    categories: tuple[str, ...] | None = None
    synthetic: SyntheticPrompts | None = None
    num_prompts: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """For a row: the source, a file without its folder."""
        if self.synthetic is None:
            return _short(self.source)
        made = self.synthetic
        return f"synthetic({made.count} × {made.words} words, copy {_number(made.copy_rate)})"

    def locator(self, seed: int = 0) -> str:
        """What `load_prompts` takes as its source."""
        if self.synthetic is None:
            return self.source
        made = self.synthetic
        return f"synthetic:count={made.count},words={made.words},copy_rate={made.copy_rate!r},seed={seed}"


@dataclass(frozen=True)
class Workload:
    """What is asked of the target. `context_len` is a prompt length in tokens; None leaves prompts as they are."""

    prompts: PromptSpec = PromptSpec()
    context_len: int | None = None
    output_len: int = 64
    batch_size: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Case:
    """One point of the sweep. `label` tells cases of one sweep apart in `name`, and is no part of what the case is."""

    target: TargetSpec
    drafter: DrafterSpec
    depth: int
    workload: Workload
    sampling: SamplingSpec = SamplingSpec()
    label: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """`ngram(3) · depth 5 · batch 8 · T 0`, then whatever else varies in the sweep."""
        parts = (
            self.drafter.name,
            f"depth {self.depth}",
            f"batch {self.workload.batch_size}",
            f"T {_number(self.sampling.temperature)}",
        )
        return " · ".join((*parts, *self.label))

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of the canonical JSON of the case; stable over processes, and 1 and 1.0 are the same."""
        return hashlib.sha256(canonical_json(self.content()).encode()).hexdigest()

    def content(self) -> dict[str, object]:
        """Everything that makes the case what it is, JSON-able. A prompt file counts by its name and its bytes, not
        by its folder, so another checkout gives the same case."""
        content = asdict(self)
        del content["label"]
        content["drafter"] = {"kind": self.drafter.kind, "options": dict(self.drafter.options)}
        if self.workload.prompts.sha256 is not None:
            content["workload"]["prompts"]["source"] = self.workload.prompts.name
        return content

    @property
    def axes(self) -> dict[str, Scalar]:
        """The axes as a result row stores them."""
        return {
            "target": self.target.name,
            "dtype": self.target.dtype,
            "backend": self.target.backend,
            "drafter": self.drafter.name,
            "drafter_kind": self.drafter.kind,
            "depth": self.depth,
            "batch_size": self.workload.batch_size,
            "context_len": self.workload.context_len,
            "output_len": self.workload.output_len,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "min_p": self.sampling.min_p,
            "prompts": self.workload.prompts.name,
            "seed": self.workload.seed,
        }


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces; a float that is a whole number is written as one."""
    return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def expand(scenario: Scenario) -> list[Case]:
    """The cases of a scenario, each once, in the order they run.

    Ordered by target, dtype and backend as written, batch size ascending, then what else the AR arm depends on
    (context, output length, prompts, sampling, seed), drafter as written with its options, depth ascending; so cases
    that share an AR arm stand together. Raises InputError above 10,000 cases.
    """
    target, sweep, workload, sampling = scenario.target, scenario.sweep, scenario.workload, scenario.sampling
    targets = [
        TargetSpec(model, shape, target.weights, dtype, target.revision, backend)
        for model, shape in product(target.model or (None,), target.shape or (None,))
        for dtype, backend in product(target.dtype, target.backend)
    ]
    axes: tuple[tuple[int | None, ...] | tuple[float, ...], ...] = (
        sweep.batch_size,
        sweep.context_len,
        workload.output_len,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        workload.seed,
    )
    num_drafters = sum(
        prod(map(len, drafter.options.values())) * len(scenario.depths_of(drafter)) for drafter in scenario.drafters
    )
    num_cases = len(targets) * len(workload.prompts) * prod(map(len, axes)) * num_drafters
    if num_cases > MAX_CASES:
        raise InputError(
            f"the axes make {num_cases} cases, more than {MAX_CASES}", key="sweep", remedy="shorten some lists"
        )
    drafters = [
        (drafter, depth)
        for config in scenario.drafters
        for drafter in _drafters(config)
        for depth in sorted(scenario.depths_of(config))
    ]
    cells = [
        (Workload(prompts, context, length, batch, seed, workload.stop, workload.ignore_eos), SamplingSpec(*law))
        for batch in sorted(sweep.batch_size)
        for context, length in product(sweep.context_len, workload.output_len)
        for prompts in _prompts(scenario)
        for law in product(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        for seed in workload.seed
    ]
    cases: dict[str, Case] = {}
    for target_spec, (work, law), (drafter, depth) in product(targets, cells, drafters):
        case = Case(target_spec, drafter, depth, work, law)
        cases.setdefault(case.hash, case)
    return _labelled(list(cases.values()))


def _drafters(config: DrafterConfig) -> Iterator[DrafterSpec]:
    options = config.options
    for values in product(*options.values()):
        yield DrafterSpec(config.kind, tuple(zip(options, values, strict=True)))


def _prompts(scenario: Scenario) -> list[PromptSpec]:
    categories, num_prompts = scenario.workload.categories, scenario.workload.num_prompts
    specs = []
    for source in scenario.workload.prompts:
        if isinstance(source, SyntheticSource):
            made = SyntheticPrompts(**source.synthetic.model_dump())
            specs.append(PromptSpec("synthetic", categories, made, num_prompts))
        else:
            specs.append(PromptSpec(source, categories, None, num_prompts, _file_sha256(source)))
    return specs


def _file_sha256(source: str) -> str | None:
    if source in PROMPT_NAMES or not os.path.isfile(source):
        return None
    try:
        with open(source, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror}", file=source, remedy="check its permissions") from None


def _labelled(cases: list[Case]) -> list[Case]:
    """Adds to each name the axes that vary in this sweep; where that isn't enough, the head of the hash."""
    named = ("drafter", "drafter_kind", "depth", "batch_size", "temperature")
    points = [case.axes for case in cases]
    words = {"context_len": "context", "output_len": "output", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
    varying = [key for key in (points[0] if points else ()) if len({point[key] for point in points}) > 1]
    labelled = []
    for case, point in zip(cases, points, strict=True):
        parts = []
        for key in varying:
            if key not in named and point[key] is not None:
                text = _number(point[key])
                parts.append(text if key in ("target", "dtype", "backend") else f"{words.get(key, key)} {text}")
        labelled.append(replace(case, label=tuple(parts)))
    uses = Counter(case.name for case in labelled)
    return [
        replace(case, label=(*case.label, f"#{case.hash[:8]}")) if uses[case.name] > 1 else case for case in labelled
    ]


def filter_cases(cases: Sequence[Case], filters: Sequence[str]) -> list[Case]:
    """The cases that meet every filter KEY=VAL or KEY=VAL,VAL (any of the values).

    KEY is an axis of the row; `drafter` takes a kind or a full name, `null` stands for no value. Raises InputError,
    listing what there is, for a filter that can't be read, an unknown key or a value that no case has.
    """
    kept = list(cases)
    seen: set[str] = set()
    for text in filters:
        key, equals, wanted = (part.strip() for part in text.partition("="))
        if not equals or not wanted:
            raise InputError(f"{text!r} is not KEY=VALUE", key="--only", remedy="write --only batch_size=4,8")
        if not cases:
            break
        axes = cases[0].axes
        if key not in axes:
            near = get_close_matches(key, list(axes), n=1)
            start = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{key!r} is not an axis", key="--only", remedy=f"{start}choose from: {', '.join(axes)}")
        if key in seen:
            raise InputError(f"{key!r} is given twice", key="--only", remedy=f"write --only {key}=VALUE,VALUE")
        seen.add(key)
        values = [value.strip() for value in re.split(r",(?![^()]*\))", wanted)]
        for value in values:
            if not any(_matches(case, key, value) for case in cases):
                there = ", ".join(dict.fromkeys(_number(case.axes[key]) for case in cases))
                raise InputError(f"no case has {key}={value}", key="--only", remedy=f"there is: {there}")
        kept = [case for case in kept if any(_matches(case, key, value) for value in values)]
    if cases and not kept:
        raise InputError(
            f"no case meets all of: {', '.join(filters)}", key="--only", remedy="drop a filter, or see --dry-run"
        )
    return kept


def _matches(case: Case, key: str, text: str) -> bool:
    value = case.axes[key]
    if key == "drafter":
        return text in (case.drafter.kind, case.drafter.name)
    if value is None:
        return text == "null"
    if isinstance(value, str):
        return text == value
    try:
        return float(text) == value if isinstance(value, float) else int(text) == value
    except ValueError:
        return False


def _number(value: Scalar) -> str:
    """Short where that loses nothing: 0.0 is "0", 0.1 is "0.1"; None is "null"."""
    if value is None:
        return "null"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def _short(text: str) -> str:
    """A path without its folders; names and hub ids as they are."""
    return os.path.basename(text) if os.path.isabs(text) else text
