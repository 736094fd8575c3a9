"""The drafters a scenario may name. A new kind is one class, with its place in `KINDS` and in `AnyDrafter`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, model_validator

from specbench.scenario.fields import (
    TAG,
    Axis,
    Depth,
    Dtype,
    Rate,
    ScalarFault,
    Section,
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


class DrafterConfig(Section):
    """What all drafters share. `depth` takes the place of sweep.depth; the other fields are the kind's options."""

    kind: Text
    depth: Axis[Depth] | None = None

    @property
    def options(self) -> dict[str, tuple[Any, ...]]:
        """Each option with its axis; an option that can't be an axis, or isn't given, has one value."""
        values = {key: getattr(self, key) for key in type(self).model_fields if key not in ("kind", "depth")}
        return {key: value if isinstance(value, tuple) else (value,) for key, value in values.items()}

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        """Refuse options that can't be had at one of `depths`; `at` is this drafter's place."""


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
    place. `rule` "transformers" ends a draft at EOS; "vllm" only where the context ends."""

    kind: Annotated[Literal["ngram"], choice("ngram")]
    max_ngram: Axis[Ngram] = (3,)
    min_ngram: Axis[Ngram] = (1,)
    rule: Axis[Annotated[Literal["vllm", "transformers"], choice("vllm", "transformers")]] = ("transformers",)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if max(self.min_ngram) > min(self.max_ngram):
            message = f"min_ngram {max(self.min_ngram)} is above max_ngram {min(self.max_ngram)}"
            raise fault(message, "keep every min_ngram at or below every max_ngram", "min_ngram")
        return self


class DraftModelDrafter(DrafterConfig):
    """A smaller model of the same vocabulary. `dtype` null: the target's."""

    kind: Annotated[Literal["draft_model"], choice("draft_model")]
    model: Axis[Text]
    dtype: Axis[Dtype | None] = (None,)
    revision: Text | None = None


class EarlyExitDrafter(DrafterConfig):
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


class ForcedDrafter(DrafterConfig):
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

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        low, high = min(depths), max(depths)
        if self.length is not None and max(self.length) > low + 1:
            message = f"a length of {max(self.length):g} can't be had at depth {low}"
            raise fault(message, f"depth d allows lengths up to d + 1, here {low + 1}", *at, "length")
        if self.rates is not None and min(map(len, self.rates)) < high:
            message = f"has {min(map(len, self.rates))} rates, and depth reaches {high}"
            raise fault(message, "give one rate for each position", *at, "rates")


class OracleDrafter(DrafterConfig):
    """Drafts what the target will say: the ceiling."""

    kind: Annotated[Literal["oracle"], choice("oracle")]


KINDS: dict[str, type[DrafterConfig]] = {
    "none": NoneDrafter,
    "ngram": NgramDrafter,
    "draft_model": DraftModelDrafter,
    "early_exit": EarlyExitDrafter,
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
    | Annotated[DraftModelDrafter, Tag(TAG + "draft_model")]
    | Annotated[EarlyExitDrafter, Tag(TAG + "early_exit")]
    | Annotated[ForcedDrafter, Tag(TAG + "forced")]
    | Annotated[OracleDrafter, Tag(TAG + "oracle")],
    Discriminator(_kind_of),
    BeforeValidator(_check_kind),
]
