"""Cases: the axes of a scenario, bound point by point. A case has a short name for a page and a hash for resume.

The hash is sha256 over the canonical JSON of everything that changes what is measured: target, drafter, depth,
workload, sampling. `measure` is left out on purpose: blocks, budget, warm-up and the order seed say how well a case is
measured, not what it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod

from specbench.errors import InputError
from specbench.scenario.drafter_fields import DrafterConfig
from specbench.scenario.drafter_spec import DrafterSpec, Scalar, short, shown
from specbench.scenario.schema import PROMPT_NAMES, Scenario, SyntheticSource

MAX_CASES = 10_000


@dataclass(frozen=True)
class TargetSpec:
    """The model under test: `model` (a known name, a hub id, or an absolute path), or `shape` with dummy weights."""

    model: str | None = None
    shape: str | None = None
    weights: str | None = None
    dtype: str = "bf16"
    revision: str | None = None
    backend: str = "auto"
    graphs: bool | None = None

    @property
    def name(self) -> str:
        """The model's short name: a path loses its folders."""
        return short(self.model or self.shape or "")


@dataclass(frozen=True)
class SamplingSpec:
    """Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; `verification` as in SamplingConfig."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: str = "token"


@dataclass(frozen=True)
class KvSpec:
    """The KV cache: how rejected drafts are rolled back (compact, index, realloc), and tokens a page."""

    rollback: str = "compact"
    page_size: int = 16


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
            return short(self.source)
        made = self.synthetic
        return f"synthetic({made.count} × {made.words} words, copy {shown(made.copy_rate)})"

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
    """One point of the sweep. `depth_policy` "auto": each step chooses its depth, up to `depth`. `label` tells cases of
    one sweep apart in `name`, and is no part of what the case is."""

    target: TargetSpec
    drafter: DrafterSpec
    depth: int
    workload: Workload
    sampling: SamplingSpec = SamplingSpec()
    kv: KvSpec = KvSpec()
    depth_policy: str = "fixed"
    label: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """`ngram(3) · depth 5 · batch 8 · T 0`, verification, rollback and page size where they are not the default,
        then whatever else varies in the sweep."""
        parts = [
            self.drafter.name,
            f"depth {self.depth}" if self.depth_policy == "fixed" else f"depth auto, at most {self.depth}",
            f"batch {self.workload.batch_size}",
            f"T {shown(self.sampling.temperature)}",
        ]
        if self.sampling.verification != "token":
            parts.append(self.sampling.verification)
        if self.kv.rollback != "compact":
            parts.append(self.kv.rollback)
        if self.kv.page_size != 16:
            parts.append(f"page {self.kv.page_size}")
        return " · ".join((*parts, *self.label))

    @property
    def num_nodes(self) -> int:
        """Most nodes of one draft: `depth` for a chain, those of its first `depth` levels for a static tree."""
        return self.drafter.num_nodes(self.depth)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of the canonical JSON of the case; stable over processes, and 1 and 1.0 are the same."""
        return hashlib.sha256(canonical_json(self.content()).encode()).hexdigest()

    def content(self) -> dict[str, object]:
        """Everything that makes the case what it is, JSON-able. A prompt file counts by its name and its bytes, not
        by its folder, so another checkout gives the same case. Keys that came later are left out at their defaults, so
        that cases keep their hashes."""
        content = asdict(self)
        del content["label"]
        for section, spec in (("target", self.target), ("sampling", self.sampling), ("kv", self.kv)):
            for name, default in _LATER[section].items():
                if getattr(spec, name) == default:
                    del content[section][name]
        if not content["kv"]:
            del content["kv"]
        if self.depth_policy == "fixed":
            del content["depth_policy"]
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
            "verification": self.sampling.verification,
            "rollback": self.kv.rollback,
            "page_size": self.kv.page_size,
            "depth_policy": self.depth_policy,
        }

    def at_batch(self, batch_size: int) -> Case:
        """The same case at another batch size."""
        return replace(self, workload=replace(self.workload, batch_size=batch_size))


_LATER_OPTIONS = (
    "nodes",
    "top_k",
    "recycle",
    "tree",
    "children",
    "stop_below",
    "stop_gamma",
    "stop_target",
    "entropy_budget",
)
_LATER: dict[str, dict[str, Scalar]] = {
    "target": {"graphs": None},
    "sampling": {"verification": "token"},
    "kv": {"rollback": "compact", "page_size": 16},
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
    (context, output length, prompts, sampling, seed, KV cache), verification, drafter as written with its options,
    depth ascending; so cases that share an AR arm stand together. Where batch sizes are searched there is one case a
    series, at the batch that the search begins with. Raises InputError above 10,000 cases.
    """
    target, sweep, workload, sampling = scenario.target, scenario.sweep, scenario.workload, scenario.sampling
    targets = [
        TargetSpec(model, shape, target.weights, dtype, target.revision, backend, target.graphs)
        for model, shape in product(target.model or (None,), target.shape or (None,))
        for dtype, backend in product(target.dtype, target.backend)
    ]
    axes: tuple[Sequence[Scalar], ...] = (
        sweep.batch_sizes,
        sweep.context_len,
        workload.output_len,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        workload.seed,
        sampling.verification,
        scenario.kv.rollback,
        scenario.kv.page_size,
    )
    num_drafters = sum(
        prod(map(len, drafter.options.values())) * len(scenario.depth_points(drafter)) for drafter in scenario.drafters
    )
    num_cases = len(targets) * len(workload.prompts) * prod(map(len, axes)) * num_drafters
    if num_cases > MAX_CASES:
        raise InputError(
            f"the axes make {num_cases} cases, more than {MAX_CASES}", key="sweep", remedy="shorten some lists"
        )
    drafters = [
        (drafter, point)
        for config in scenario.drafters
        for drafter in _drafters(config)
        for point in scenario.depth_points(config)
    ]
    cells = [
        (
            Workload(prompts, context, length, batch, seed, workload.stop, workload.ignore_eos),
            SamplingSpec(*law, rule),
            KvSpec(*pages),
        )
        for batch in sorted(sweep.batch_sizes)
        for context, length in product(sweep.context_len, workload.output_len)
        for prompts in _prompts(scenario)
        for law in product(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        for seed in workload.seed
        for pages in product(scenario.kv.rollback, scenario.kv.page_size)
        for rule in sampling.verification
    ]
    cases: dict[str, Case] = {}
    for target_spec, (work, law, pages), (drafter, point) in product(targets, cells, drafters):
        case = Case(target_spec, drafter, point.levels, work, law, pages, point.policy)
        cases.setdefault(case.hash, case)
    return _labelled(list(cases.values()))


def _drafters(config: DrafterConfig) -> Iterator[DrafterSpec]:
    """Options that came later are left out where they are not given, so that cases keep their hashes."""
    options = config.options
    for values in product(*options.values()):
        bound = zip(options, values, strict=True)
        given = (
            (key, value)
            for key, value in bound
            if (value is not None or key not in _LATER_OPTIONS) and (key, value) != ("branches", 1)
        )
        yield DrafterSpec(config.kind, tuple(given))


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
    named = (
        "drafter",
        "drafter_kind",
        "depth",
        "batch_size",
        "temperature",
        "verification",
        "rollback",
        "page_size",
        "depth_policy",
    )
    points = [case.axes for case in cases]
    words = {"context_len": "context", "output_len": "output", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
    varying = [key for key in (points[0] if points else ()) if len({point[key] for point in points}) > 1]
    labelled = []
    for case, point in zip(cases, points, strict=True):
        parts = []
        for key in varying:
            if key not in named and point[key] is not None:
                text = shown(point[key])
                parts.append(text if key in ("target", "dtype", "backend") else f"{words.get(key, key)} {text}")
        named_case = replace(case, label=tuple(parts))
        vars(named_case)["hash"] = case.hash  # the label is no part of it
        labelled.append(named_case)
    uses = Counter(case.name for case in labelled)
    return [
        replace(case, label=(*case.label, f"#{case.hash[:8]}")) if uses[case.name] > 1 else case for case in labelled
    ]
