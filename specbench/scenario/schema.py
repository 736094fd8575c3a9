"""Scenario: what a YAML file may say. Unknown keys are refused, and an error names the file, the line and the key.

    specbench run scenarios/quickstart.yaml

Wherever a field is an `Axis`, one value or a list may stand; a list becomes an axis of the sweep (see cases.py). A new
kind of drafter is one small class in drafter_schema.py.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from specbench.errors import InputError
from specbench.scenario.drafter_fields import DrafterConfig
from specbench.scenario.drafter_schema import KINDS, AnyDrafter, DraftModelDrafter, NoneDrafter
from specbench.scenario.fields import (
    TAG,
    Axis,
    Dtype,
    Flag,
    Rate,
    ScalarFault,
    Section,
    Seed,
    Switch,
    Text,
    as_items,
    choice,
    described,
    distinct,
    fault,
    read_integer,
    read_number,
    read_text,
    reader,
    suggest,
)
from specbench.scenario.sweep_schema import (
    SEARCH,
    CrossingSearch,
    DepthPoint,
    SweepConfig,
    check_max_depth,
    depth_points,
)
from specbench.scenario.yaml_reader import YamlMapping, YamlNode, YamlScalar, YamlSequence, plain, read_yaml

KNOWN_MODELS = ("smollm2-135m-instruct",)
"""Names that are never taken for a folder beside the scenario."""
PROMPT_NAMES = ("builtin", "humaneval")
MAX_ERRORS = 20
S = TypeVar("S", bound=Section)
PAGE_SIZES = (1, 16, 32, 64)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
Verification = Annotated[
    Literal["token", "greedy", "chain", "block", "target_only", "recursive", "traversal"],
    choice("token", "greedy", "chain", "block", "target_only", "recursive", "traversal"),
]
Backend = Annotated[Literal["auto", "torch", "cpu", "triton"], choice("auto", "torch", "cpu", "triton")]


class TargetConfig(Section):
    """The model under test: `model` (a known name, a folder, a hub id, a .gguf), or `shape` with dummy weights.

    `graphs` on or off: whether the steps of backend triton are captured as graphs of the GPU; by default they are.
    """

    model: Axis[Text] | None = None
    shape: Axis[Text] | None = None
    weights: Annotated[Literal["dummy"], choice("dummy")] | None = None
    dtype: Axis[Dtype] = ("bf16",)
    revision: Text | None = None
    backend: Axis[Backend] = ("auto",)
    graphs: Switch | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TargetConfig:
        if (self.model is None) == (self.shape is None):
            message = "give either model or shape" + (", not both" if self.model else "")
            raise fault(message, "write model: NAME, or shape: NAME with weights: dummy")
        if self.shape is not None and self.weights is None:
            raise fault("a shape has no weights of its own", "add weights: dummy", "shape")
        if self.model is not None and self.weights is not None:
            raise fault("a model brings its own weights", "drop weights, or name a shape", "weights")
        if self.shape is not None and self.revision is not None:
            raise fault("a shape has no revision", "drop revision", "revision")
        return self


class SyntheticConfig(Section):
    """`count` prompts of `words` words; `copy_rate` is the share of phrases that repeat earlier ones."""

    count: Annotated[int, reader(read_integer, 1, 100_000)]
    words: Annotated[int, reader(read_integer, 16, 1_000_000)]
    copy_rate: Rate


class SyntheticSource(Section):
    """The mapping {synthetic: {count, words, copy_rate}}."""

    synthetic: SyntheticConfig


def _read_prompt_name(value: object) -> str:
    text = read_text(value)
    if text.partition(":")[0] == "synthetic":
        remedy = "write {synthetic: {count: 64, words: 120, copy_rate: 0.5}}"
        raise ScalarFault("synthetic prompts need their settings", remedy)
    if text not in PROMPT_NAMES and not re.search(r"[./\\]", text):
        raise ScalarFault(f"{text!r} is not known", f"{suggest(text, PROMPT_NAMES)}; or give the path of a .jsonl file")
    return text


PromptSource = Annotated[
    Annotated[str, reader(_read_prompt_name), Tag(TAG + "named")] | Annotated[SyntheticSource, Tag(TAG + "synthetic")],
    Discriminator(lambda value: TAG + ("synthetic" if isinstance(value, dict | SyntheticSource) else "named")),
]


class WorkloadConfig(Section):
    """What is asked. `num_prompts` bounds the queue that fills the slots (null: all prompts)."""

    prompts: Axis[PromptSource] = ("builtin",)
    categories: Axis[Text] | None = None  # a list is one value here, not an axis; so it is for stop
    output_len: Axis[Annotated[int, reader(read_integer, 1, 100_000)]] = (64,)
    num_prompts: Annotated[int, reader(read_integer, 1, 1_000_000)] | None = None
    seed: Axis[Seed] = (0,)
    stop: Annotated[
        tuple[Annotated[str, reader(read_text, multiline=True)], ...],
        AfterValidator(distinct),
        BeforeValidator(lambda value: () if value in ([], ()) else as_items(value)),
    ] = ()
    ignore_eos: Flag = False


class SamplingConfig(Section):
    """Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `verification` names the rule of sampled requests. "token" goes down the draft child by child with the rule that
    fits how it came about; the others are one rule each and are skipped where they are not exact: "greedy"
    (temperature 0), "chain" and "block" (chains), "target_only" (chosen drafts: best tokens, n-gram), "recursive" and
    "traversal" (drafts sampled by the drafter, trees too)."""

    temperature: Axis[Annotated[float, reader(read_number, 0, 10)]] = (0.0,)
    top_k: Axis[Annotated[int, reader(read_integer, 0, 1_000_000)]] = (0,)
    top_p: Axis[Annotated[float, reader(read_number, 0, 1, open_low=True)]] = (1.0,)
    min_p: Axis[Annotated[float, reader(read_number, 0, 1, open_high=True)]] = (0.0,)
    verification: Axis[Verification] = ("token",)


class KvConfig(Section):
    """The KV cache: how rejected drafts are rolled back, and tokens a page (other than 16 with backend triton only)."""

    rollback: Axis[Annotated[Literal["compact", "index", "realloc"], choice("compact", "index", "realloc")]] = (
        "compact",
    )
    page_size: Axis[Annotated[int, reader(read_integer, 1, 1024)]] = (16,)

    @field_validator("page_size")
    @classmethod
    def _known_sizes(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        for index, size in enumerate(sizes):
            if size not in PAGE_SIZES:
                known = ", ".join(map(str, PAGE_SIZES))
                raise fault(f"pages of {size} tokens are not to be had", f"choose from: {known}", index)
        return sizes


class BlocksConfig(Section):
    """How many timed blocks an arm gets."""

    min: Annotated[int, reader(read_integer, 1, 1000)] = 5
    max: Annotated[int, reader(read_integer, 1, 1000)] = 12

    @model_validator(mode="after")
    def _ordered(self) -> BlocksConfig:
        if self.min > self.max:
            raise fault(f"min {self.min} is above max {self.max}", "keep min at or below max", "min")
        return self


class WarmupConfig(BlocksConfig):
    """Untimed blocks before: at least `min`, until two in a row agree within `tolerance`, at most `max`."""

    min: Annotated[int, reader(read_integer, 1, 1000)] = 1
    max: Annotated[int, reader(read_integer, 1, 1000)] = 5
    tolerance: Annotated[float, reader(read_number, 0, 1, open_low=True)] = 0.1


class MeasureConfig(Section):
    """How well it is measured. `target_interval` is the relative width of the speedup's interval to stop at;
    `budget_s` is in seconds a case (null: no bound); `seed` draws the order of blocks. `canary` "self" lets each kind
    of drafter with a cache or states draft with the target itself first: it must accept everything."""

    blocks: BlocksConfig = BlocksConfig()
    warmup: WarmupConfig = WarmupConfig()
    target_interval: Annotated[float, reader(read_number, 0, 1, open_low=True)] = 0.04
    budget_s: Annotated[float, reader(read_number, 0, 1e6, open_low=True)] | None = None
    seed: Seed = 0
    canary: Annotated[Literal["self", "off"], choice("self", "off")] = "self"


class CompareConfig(Section):
    """Two kinds of drafters, the first held against the second cell by cell: `claim` is the ratio of their acceptance
    that is said to hold (1.25: a quarter more), and the report tells what the intervals say of it."""

    drafters: Annotated[tuple[Annotated[str, choice(*KINDS)], ...], AfterValidator(distinct), BeforeValidator(as_items)]
    claim: Annotated[float, reader(read_number, 0, 100, open_low=True)] | None = None

    @model_validator(mode="after")
    def _two(self) -> CompareConfig:
        if len(self.drafters) != 2:
            raise fault(f"names {len(self.drafters)}, and two are compared", "write [eagle, draft_model]", "drafters")
        return self


def _read_name(value: object) -> str:
    text = read_text(value)
    if not _NAME.fullmatch(text):
        remedy = "use up to 80 letters, digits, `.`, `_` and `-`, the first a letter or a digit"
        raise ScalarFault(f"{text[:40]!r} can't name a folder", remedy)
    return text


def _read_question(value: object) -> str:
    return " ".join(read_text(value, multiline=True).split())


class Scenario(Section):
    """A whole scenario, defaults filled in. `name` also names the folder of results."""

    name: Annotated[str, reader(_read_name)]
    question: Annotated[str, reader(_read_question)]
    target: TargetConfig
    drafters: Axis[AnyDrafter]
    sweep: SweepConfig = SweepConfig()
    workload: WorkloadConfig = WorkloadConfig()
    sampling: SamplingConfig = SamplingConfig()
    kv: KvConfig = KvConfig()
    measure: MeasureConfig = MeasureConfig()
    compare: CompareConfig | None = None

    @model_validator(mode="after")
    def _compared(self) -> Scenario:
        kinds = tuple(dict.fromkeys(drafter.kind for drafter in self.drafters))
        for index, kind in enumerate(self.compare.drafters if self.compare is not None else ()):
            if kind not in kinds:
                raise fault(f"no drafter is of kind {kind}", suggest(kind, kinds), "compare", "drafters", index)
        return self

    @model_validator(mode="after")
    def _depths(self) -> Scenario:
        for index, drafter in enumerate(self.drafters):
            depths = self.depths_of(drafter)
            check_max_depth(drafter.depth or self.sweep.depth, drafter.max_depth, "drafters", index)
            if not depths:
                raise fault("has no depth", "give depth here, or sweep.depth for all", "drafters", index)
            drafter.check_depths(depths, "drafters", index)
            if self.sweep.crossing is not None and min(depths) == 0:
                message = f"{drafter.kind} at depth 0 drafts nothing, so there is no crossing to search"
                raise fault(message, "drop it, or give a list of batch sizes", "drafters", index)
        return self

    @model_validator(mode="after")
    def _page_sizes(self) -> Scenario:
        other = [size for size in self.kv.page_size if size != 16]
        if other and "triton" not in self.target.backend:
            message = f"pages of {other[0]} tokens need backend triton"
            raise fault(message, "write page_size: 16, or target.backend: triton", "kv", "page_size")
        return self

    def depths_of(self, drafter: DrafterConfig) -> tuple[int, ...]:
        """The most levels that `drafter` drafts in its cases; (0,) for none, () where no depth is given."""
        return tuple(dict.fromkeys(point.levels for point in self.depth_points(drafter)))

    def depth_points(self, drafter: DrafterConfig) -> tuple[DepthPoint, ...]:
        """The depths `drafter` runs at: its own, or sweep.depth; depth 0 for none, () where nothing is given."""
        if isinstance(drafter, NoneDrafter):
            return (DepthPoint(0),)
        return depth_points(drafter, self.sweep)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it, for the manifest; `Scenario.model_validate` reads it back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Scenario:
        """Read what `to_dict` wrote, or a scenario made in Python. Raises InputError, with keys but no lines."""
        return _validated(data, None, None)


def load_scenario(path: Path | str) -> Scenario:
    """The scenario at `path` (see `resolve_scenario_path`), with its relative paths made absolute where they exist:
    beside the scenario first, else in the working directory.

    Raises InputError with file, line, key and remedy; further errors of the same file follow in the text.
    """
    file = resolve_scenario_path(path)
    root = read_yaml(file)
    return _with_paths(_validated(plain(root), root, file), file.parent)


def resolve_scenario_path(path: Path | str) -> Path:
    """`path` itself where it exists; else scenarios/NAME.yaml, or scenarios/h100/NAME.yaml, may be an installed one."""
    given = Path(path)
    if os.path.lexists(given) or given.parts[:1] != ("scenarios",) or ".." in given.parts:
        return given
    try:
        shipped = Path(str(resources.files("specbench.scenarios").joinpath(*given.parts[1:])))
    except ModuleNotFoundError:
        return given
    return shipped if shipped.is_file() else given


def _with_paths(scenario: Scenario, folder: Path) -> Scenario:
    def local(text: str, names: tuple[str, ...]) -> str:
        if text in names:
            return text
        places = (os.path.join(folder, text), text)
        return next((os.path.abspath(place) for place in places if os.path.exists(place)), text)

    def models(names: tuple[str, ...] | None, known: tuple[str, ...] = KNOWN_MODELS) -> tuple[str, ...] | None:
        return None if names is None else tuple(local(name, known) for name in names)

    drafters = tuple(
        drafter.model_copy(update={"model": models(drafter.model, (*KNOWN_MODELS, "builtin"))})
        if isinstance(drafter, DraftModelDrafter)
        else drafter
        for drafter in scenario.drafters
    )
    prompts = tuple(local(item, PROMPT_NAMES) if isinstance(item, str) else item for item in scenario.workload.prompts)
    return scenario.model_copy(
        update={
            "target": scenario.target.model_copy(update={"model": models(scenario.target.model)}),
            "drafters": drafters,
            "workload": scenario.workload.model_copy(update={"prompts": prompts}),
        }
    )


def _validated(data: object, root: YamlMapping | None, file: Path | None) -> Scenario:
    return validated(Scenario, data, root, file)


def validated(section: type[S], data: object, root: YamlMapping | None, file: Path | None) -> S:
    """`data` as a `section`; InputError with file, line, key and remedy, all further faults in its text."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        faults = [_input_error(section, detail, root, file) for detail in error.errors(include_url=False)]
    faults.sort(
        key=lambda each: (each.line or 0, each.message == "is missing")
    )  # a misspelt key explains a missing one
    first, rest = faults[0], faults[1:MAX_ERRORS]
    more = [f"... and {len(faults) - MAX_ERRORS} more"] if len(faults) > MAX_ERRORS else []
    remedy = "\n".join([str(first.remedy), *map(str, rest), *more])
    raise InputError(first.message, remedy=remedy, file=file, line=first.line, key=first.key)


def _input_error(section: type[Section], detail: Any, root: YamlMapping | None, file: Path | None) -> InputError:
    """One error of pydantic's, with the line and the key it belongs to."""
    loc: tuple[str | int, ...] = detail["loc"]
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "specbench":
        loc = (*loc, *context["at"])
        message, remedy = context["message"], context["remedy"]
    elif kind == "missing":
        message, remedy = "is missing", f"add {loc[-1]}: ..."
    elif kind == "extra_forbidden":
        message, remedy = "is not a known key", suggest(str(loc[-1]), _keys_at(section, loc[:-1]))
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        message = f"must be a mapping, not {described(detail['input'])}"
        remedy = f"write keys below it: {', '.join(_keys_at(section, loc))}"
    else:
        message, remedy = detail["msg"], "correct this value"
    line, key = _place(root, loc)
    return InputError(message, remedy=remedy, file=file, line=line, key=key)


def _keys_at(section: type[Section], loc: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys that the section at `loc` of a `section` knows."""
    for part in loc:
        if isinstance(part, str) and part.startswith(TAG):
            name = part.removeprefix(TAG)
            section = CrossingSearch if name == SEARCH else KINDS.get(name, SyntheticSource)
        elif isinstance(part, str):
            annotation = section.model_fields[part].annotation
            inner = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
            section = next((each for each in inner if issubclass(each, Section)), section)
    return tuple(section.model_fields)


def _place(root: YamlMapping | None, loc: tuple[str | int, ...]) -> tuple[int | None, str | None]:
    """(line, dotted key) of an error. A single value that stands for an axis has no index of its own."""
    node: YamlNode | None = root
    line = root.line if root is not None else None
    key = ""
    for index, part in enumerate(loc):
        if isinstance(part, str):
            if part.startswith(TAG):
                continue
            key += f".{part}" if key else part
            known = isinstance(node, YamlMapping) and part in node.entries
            if isinstance(node, YamlMapping) and known:
                line, node = node.key_lines[part], node.entries[part]
            else:
                node = None
        elif isinstance(node, YamlSequence) and loc[index - 1] == "tree" and _nesting(node) < 3:
            continue  # one tree stands for an axis of trees
        elif isinstance(node, YamlSequence) and part < len(node.items):
            item = node.items[part]
            if isinstance(item, YamlScalar) and any(isinstance(later, int) for later in loc[index + 1 :]):
                continue
            line, node, key = item.line, item, f"{key}[{part}]"
        elif root is None:
            key += f"[{part}]"
    return line, key or None


def _nesting(node: YamlNode) -> int:
    """How deep lists stand in one another: 0 for what is no list."""
    return 1 + max(map(_nesting, node.items), default=0) if isinstance(node, YamlSequence) else 0
