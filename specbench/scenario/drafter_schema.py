"""The drafters a scenario may name. A new kind is one class, with its place in `KINDS` and in `AnyDrafter`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, model_validator

from specbench.engine.drafters.static_tree import MAX_NODES, StaticTree, check_first_children
from specbench.errors import InputError
from specbench.scenario.drafter_fields import (
    DrafterConfig,
    ModelTreeConfig,
    NodeCount,
    TreeConfig,
    check_nodes,
)
from specbench.scenario.fields import (
    TAG,
    Axis,
    Dtype,
    Rate,
    ScalarFault,
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
from specbench.scenario.yaml_reader import YamlScalar

Ngram = Annotated[int, reader(read_integer, 1, 64)]


class ReplayTreeConfig(TreeConfig):
    """The AR output runs along the first children, so they must reach the deepest level."""

    @model_validator(mode="after")
    def _first_children(self) -> ReplayTreeConfig:
        for index, paths in enumerate(self.tree or ()):
            try:
                check_first_children(StaticTree(paths))
            except InputError as error:
                raise fault(error.message, str(error.remedy), "tree", index) from None
        return self


class NoneDrafter(DrafterConfig):
    """No speculation: the AR arm alone, at depth 0."""

    kind: Annotated[Literal["none"], choice("none")]

    @model_validator(mode="after")
    def _no_depth(self) -> NoneDrafter:
        if self.depth not in (None, (0,)):
            raise fault("the drafter none drafts nothing", "drop depth", "depth")
        return self


class NgramDrafter(DrafterConfig):
    """Prompt lookup: the longest suffix of max_ngram down to min_ngram tokens that occurred before, at its earliest
    place. `rule` "transformers" ends a draft at EOS; "vllm" only where the context ends. `branches` above 1 drafts a
    tree of so many places' continuations, of at most `nodes` nodes (null: all of them)."""

    kind: Annotated[Literal["ngram"], choice("ngram")]
    max_ngram: Axis[Ngram] = (3,)
    min_ngram: Axis[Ngram] = (1,)
    rule: Axis[Annotated[Literal["vllm", "transformers"], choice("vllm", "transformers")]] = ("transformers",)
    branches: Axis[Annotated[int, reader(read_integer, 1, 16)]] = (1,)
    nodes: Axis[NodeCount | None] = (None,)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if max(self.min_ngram) > min(self.max_ngram):
            message = f"min_ngram {max(self.min_ngram)} is above max_ngram {min(self.max_ngram)}"
            raise fault(message, "keep every min_ngram at or below every max_ngram", "min_ngram")
        if self.nodes != (None,) and min(self.branches) == 1:
            raise fault("limits trees, and one branch is a chain", "give branches of 2 or more, or drop nodes", "nodes")
        return self

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        check_nodes(self.nodes, depths, *at)
        most = max(self.branches) * max(depths)
        if None in self.nodes and max(self.branches) > 1 and most > MAX_NODES:
            message = f"{max(self.branches)} branches of {max(depths)} tokens may have {most} nodes"
            raise fault(message, f"give nodes: {MAX_NODES} or fewer", *at, "branches")


class SuffixDrafter(DrafterConfig):
    """Suffix decoding, with the published options and defaults. `responses` "others" never drafts from a prompt's own
    earlier response; "all" is the published cache. `nodes` drafts trees of at most so many nodes (null: chains)."""

    kind: Annotated[Literal["suffix"], choice("suffix")]
    max_tree_depth: Axis[Annotated[int, reader(read_integer, 2, 256)]] = (24,)
    max_spec_factor: Axis[Annotated[float, reader(read_number, 0, 64)]] = (1.0,)
    max_spec_offset: Axis[Annotated[float, reader(read_number, -64, 64)]] = (0.0,)
    min_token_prob: Axis[Rate] = (0.1,)
    max_cached_requests: Axis[Annotated[int, reader(read_integer, 0, 1_000_000)]] = (10_000,)
    responses: Axis[Annotated[Literal["others", "all"], choice("others", "all")]] = ("others",)
    nodes: Axis[NodeCount | None] = (None,)

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        check_nodes(self.nodes, depths, *at)
        deepest = min(self.max_tree_depth) - 1
        if max(depths) > deepest:
            message = f"a suffix tree of depth {deepest + 1} drafts at most {deepest} tokens, and depth reaches"
            raise fault(f"{message} {max(depths)}", "give a deeper tree or smaller depths", *at, "max_tree_depth")


class DraftModelDrafter(ModelTreeConfig):
    """A smaller model of the same vocabulary. `dtype` null: the target's."""

    kind: Annotated[Literal["draft_model"], choice("draft_model")]
    model: Axis[Text]
    dtype: Axis[Dtype | None] = (None,)
    revision: Text | None = None


class EarlyExitDrafter(ModelTreeConfig):
    """The target's own first `layers` layers with its head."""

    kind: Annotated[Literal["early_exit"], choice("early_exit")]
    layers: Axis[Annotated[int, reader(read_integer, 1, 1000)]]


def _as_curves(value: object) -> object:
    """One curve is a list of rates; an axis of curves is a list of lists."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, list | tuple) for item in value):
        return value
    return [value]


Curves = Annotated[
    tuple[Annotated[tuple[Rate, ...], BeforeValidator(as_items)], ...],
    AfterValidator(distinct),
    BeforeValidator(as_items),
    BeforeValidator(_as_curves),
]


class ForcedDrafter(ReplayTreeConfig):
    """Acceptance that is set, so such rows are synthetic: `length` is the acceptance length wanted (bonus token
    included, 1 to depth + 1), or `rates` is a curve with one rate a position, of which the first `depth` count."""

    kind: Annotated[Literal["forced"], choice("forced")]
    length: Axis[Annotated[float, reader(read_number, 1, 65)]] | None = None
    rates: Curves | None = None

    @model_validator(mode="after")
    def _one_law(self) -> ForcedDrafter:
        if (self.length is None) == (self.rates is None):
            message = "give either length or rates" + (", not both" if self.length else "")
            raise fault(message, "write length: 2.5, or rates: [0.8, 0.6, 0.4]")
        return self

    @property
    def default_max_depth(self) -> int:
        return min(map(len, self.rates)) if self.rates is not None else super().default_max_depth

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        super().check_depths(depths, *at)
        low, high = min(depths), max(depths)
        if self.length is not None and max(self.length) > low + 1:
            message = f"a length of {max(self.length):g} can't be had at depth {low}"
            raise fault(message, f"depth d allows lengths up to d + 1, here {low + 1}", *at, "length")
        if self.rates is not None and min(map(len, self.rates)) < high:
            message = f"has {min(map(len, self.rates))} rates, and depth reaches {high}"
            raise fault(message, "give one rate for each position", *at, "rates")


class OracleDrafter(ReplayTreeConfig):
    """Drafts what the target will say: the ceiling."""

    kind: Annotated[Literal["oracle"], choice("oracle")]


class HeadConfig(ModelTreeConfig):
    """A draft head on the target's states. `head`: "builtin", a folder, or a hub id; docs/heads.md tells which files
    are read."""

    head: Axis[Text] = ("builtin",)
    revision: Text | None = None


class EagleDrafter(HeadConfig):
    """EAGLE: one layer on the target's last state; a chain, or a static tree."""

    kind: Annotated[Literal["eagle"], choice("eagle")]


class DynamicHeadConfig(HeadConfig):
    """`nodes` grows dynamic trees of so many drafts (null: a chain, or `tree`), `top_k` children a node."""

    nodes: Axis[NodeCount | None] = (None,)
    top_k: Axis[Annotated[int, reader(read_integer, 1, 32)]] | None = None

    @model_validator(mode="after")
    def _one_shape(self) -> DynamicHeadConfig:
        if self.nodes != (None,):
            for key in ("tree", "children"):
                if getattr(self, key) is not None:
                    raise fault("a tree of `nodes` is one of best tokens, with a shape of its own", f"drop {key}", key)
        elif self.top_k is not None:
            raise fault("belongs to trees of `nodes`", "write nodes: 60", "top_k")
        return self

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        super().check_depths(depths, *at)
        check_nodes(self.nodes, depths, *at)


class Eagle2Drafter(DynamicHeadConfig):
    """EAGLE-2: EAGLE's head, whose tree grows where it is surest."""

    kind: Annotated[Literal["eagle2"], choice("eagle2")]
    nodes: Axis[NodeCount] = (59,)


class Eagle3Drafter(DynamicHeadConfig):
    """EAGLE-3: one layer on three of the target's states, with a vocabulary of its own."""

    kind: Annotated[Literal["eagle3"], choice("eagle3")]


class MtpDrafter(DynamicHeadConfig):
    """A multi-token-prediction module, fed with its own output beyond the depth it was trained for; `recycle` null: as
    the checkpoint's family does."""

    kind: Annotated[Literal["mtp"], choice("mtp")]
    recycle: Axis[Annotated[Literal["pre_norm", "post_norm"], choice("pre_norm", "post_norm")] | None] = (None,)


class MedusaDrafter(HeadConfig):
    """Medusa: a head for each level, all on the target's last state; verified exactly."""

    kind: Annotated[Literal["medusa"], choice("medusa")]

    @property
    def default_max_depth(self) -> int:
        return min(3, super().default_max_depth)


KINDS: dict[str, type[DrafterConfig]] = {
    "none": NoneDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft_model": DraftModelDrafter,
    "early_exit": EarlyExitDrafter,
    "medusa": MedusaDrafter,
    "eagle": EagleDrafter,
    "eagle2": Eagle2Drafter,
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
    "forced": ForcedDrafter,
    "oracle": OracleDrafter,
}


def _kind_of(value: object) -> str:
    kind = value["kind"] if isinstance(value, dict) else getattr(value, "kind", "")
    return f"{TAG}{kind.text if isinstance(kind, YamlScalar) else kind}"


def _check_kind(value: object) -> object:
    if isinstance(value, DrafterConfig):
        return value
    if not isinstance(value, dict):
        raise fault(f"must be a mapping with a kind, not {described(value)}", "write {kind: ngram, max_ngram: 3}")
    if "kind" not in value:
        raise fault("has no kind", f"add kind: one of {', '.join(KINDS)}")
    try:
        kind = read_text(value["kind"])
    except ScalarFault as error:
        raise fault(error.message, suggest("", KINDS), "kind") from None
    if kind not in KINDS:
        raise fault(f"{kind!r} is not a drafter", suggest(kind, KINDS), "kind")
    return value


AnyDrafter = Annotated[
    Annotated[NoneDrafter, Tag(TAG + "none")]
    | Annotated[NgramDrafter, Tag(TAG + "ngram")]
    | Annotated[SuffixDrafter, Tag(TAG + "suffix")]
    | Annotated[DraftModelDrafter, Tag(TAG + "draft_model")]
    | Annotated[EarlyExitDrafter, Tag(TAG + "early_exit")]
    | Annotated[MedusaDrafter, Tag(TAG + "medusa")]
    | Annotated[EagleDrafter, Tag(TAG + "eagle")]
    | Annotated[Eagle2Drafter, Tag(TAG + "eagle2")]
    | Annotated[Eagle3Drafter, Tag(TAG + "eagle3")]
    | Annotated[MtpDrafter, Tag(TAG + "mtp")]
    | Annotated[ForcedDrafter, Tag(TAG + "forced")]
    | Annotated[OracleDrafter, Tag(TAG + "oracle")],
    Discriminator(_kind_of),
    BeforeValidator(_check_kind),
]
