"""One case's result as a row: what it may hold, which claims its status allows, and the key it is found by.

A row is strict JSON: a missing value is null with its reason, and NaN and Infinity are refused anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

SCHEMA_VERSION: Literal[1] = 1

Status = Literal["ok", "invalid", "failed", "skipped"]
LATER_AXES: dict[str, JsonValue] = {
    "verification": "token",
    "rollback": "compact",
    "page_size": 16,
    "depth_policy": "fixed",
}
"""Axes that came after the first rows, with what held before there was a choice."""
SPEEDUP_CLAIMS = ("speedup", "speedup_low", "speedup_high", "implied_overhead")


_FORBID = ConfigDict(extra="forbid")
KNOWN_FINITE = {"finite": True}
"""The context of a validation whose numbers are known to be finite, so that they are not looked through again."""


@with_config(_FORBID)
class Conditions(TypedDict):
    """What a number holds under. `output_check`: how the tokens compared with the AR arm's. `graphs`: whether steps
    were captured as graphs of the device; `drafter_weights`: source and revision of the drafter's own model or head,
    null where it has none (the reason is drafter_params'). `predicted`: nothing was run, the cost model computed it.
    Older rows do not say."""

    lossless: bool
    synthetic: bool
    output_check: Literal["identical", "near_tie", "diverged", "distribution"] | None
    device: str
    graphs: NotRequired[bool]
    weights: str
    drafter_weights: NotRequired[str | None]
    depth_model: NotRequired[str]
    predicted: NotRequired[bool]
    prompt_categories: list[str]


@with_config(_FORBID)
class BlockFacts(TypedDict):
    """What a block did, whatever the machine's mood: digests of the prompts asked and of the tokens that came out, sums
    over the window, and how long its requests waited (seconds as in metrics.py; null where it has no such gap)."""

    inputs: str
    outputs: str
    num_draft_tokens: int
    num_accepted_tokens: int
    flops: float
    bytes: float
    kv_allocator_calls: int
    tpot_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


@with_config(_FORBID)
class BlockSample(TypedDict):
    """One timed block of one arm; `marks` say what disturbed it. Older rows have no `facts`."""

    order: int
    arm: Literal["ar", "spec"]
    block: int
    tokens: int
    wall_s: float
    steps: int
    valid: bool
    marks: list[str]
    facts: NotRequired[BlockFacts]


@with_config(_FORBID)
class PromptSample(TypedDict):
    """One prompt's tokens and seconds in both arms, for the paired bootstrap; and, where anything was drafted for it,
    its drafts by position (metrics.PromptAcceptance), which older rows do not have."""

    id: str
    category: str
    ar_tokens: int
    ar_s: float
    spec_tokens: int
    spec_s: float
    offered_at: NotRequired[list[int]]
    tried_at: NotRequired[list[int]]
    accepted_at: NotRequired[list[int]]


@with_config(_FORBID)
class Samples(TypedDict):
    """The raw samples, from which statistics can be computed anew."""

    blocks: list[BlockSample]
    prompts: list[PromptSample]


def _no_samples() -> Samples:
    return {"blocks": [], "prompts": []}


class ResultRow(BaseModel):
    """One case's result; `status` decides which fields may exist.

    ok: metrics, no reason. invalid: a reason and diagnostics, no speedup. failed, skipped: a reason, neither metrics
    nor samples. A metric that is None has its reason in `metrics["null_reasons"]` (or in NAME_reason). NaN and
    Infinity are refused anywhere. Raises pydantic.ValidationError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str = Field(min_length=1)
    case_hash: str
    case_name: str
    status: Status
    reason: str | None = None
    axes: Annotated[dict[str, JsonValue], AfterValidator(lambda axes: axes | LATER_AXES | axes)]
    conditions: Conditions
    metrics: dict[str, JsonValue] | None = None
    samples: Samples = Field(default_factory=_no_samples)
    warnings: list[str] = Field(default_factory=list)
    environment: str
    code_revision: str
    started_at: str
    duration_s: float = Field(ge=0)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        known = info.context == KNOWN_FINITE or _all_finite(vars(self))
        found = None if known else non_finite(vars(self))
        if found is not None:
            raise ValueError(f"{found} is not a finite number; a missing value is null, with a reason")
        if (self.status == "ok") != (self.reason is None) or self.reason == "":
            raise ValueError(f"a row that is {self.status} has {'no reason' if self.status == 'ok' else 'a reason'}")
        if self.status in ("ok", "invalid"):
            if self.metrics is None:
                raise ValueError(f"a row that is {self.status} has metrics")
            _check_metrics(self.metrics, allow_speedup=self.status == "ok")
        elif self.metrics is not None or self.samples["blocks"] or self.samples["prompts"]:
            raise ValueError(f"a row that is {self.status} has neither metrics nor samples")
        return self

    def to_json_line(self) -> str:
        """Strict JSON in ASCII and a newline, so that a row is one line whatever its strings hold."""
        return json.dumps(self.model_dump(), allow_nan=False, separators=(",", ":")) + "\n"


def diagnostics_only(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What an invalid row may keep: everything but the speedup and what is computed from it."""
    kept = {name: value for name, value in metrics.items() if name not in SPEEDUP_CLAIMS}
    reasons = {name: why for name, why in metrics.get("null_reasons", {}).items() if name not in SPEEDUP_CLAIMS}
    return kept | {"null_reasons": reasons}


def resume_key(case_hash: str, code_revision: str, environment: str, schema_version: int = SCHEMA_VERSION) -> str:
    """Key of a row: sha256 of its case, code, machine and schema. Rows of equal keys answer the same question."""
    text = json.dumps([case_hash, code_revision, environment, schema_version])
    return hashlib.sha256(text.encode()).hexdigest()


def _check_metrics(metrics: Mapping[str, JsonValue], *, allow_speedup: bool) -> None:
    """Raise ValueError on a claim that may not be made, or on a null without a reason."""
    claims = [name for name in SPEEDUP_CLAIMS if metrics.get(name) is not None]
    if claims and not allow_speedup:
        raise ValueError(f"an invalid row claims {', '.join(claims)}")
    reasons = metrics.get("null_reasons", {})
    if not isinstance(reasons, dict):
        raise ValueError("null_reasons is not an object")
    for name, value in metrics.items():
        is_reason = name.endswith("_reason")
        if value is None and not is_reason and not (reasons.get(name) or metrics.get(f"{name}_reason")):
            raise ValueError(f"metrics.{name} is null without a reason in null_reasons")


def _all_finite(values: Mapping[str, Any]) -> bool:
    """The same question for the usual answer, without paths and without a call for each value."""
    pending: list[Any] = [values]
    while pending:
        item = pending.pop()
        for value in item.values() if isinstance(item, Mapping) else item:
            kind = type(value)
            if kind is float:
                if not math.isfinite(value):
                    return False
            elif kind is not int and kind is not str and isinstance(value, Mapping | list | tuple):
                pending.append(value)
    return True


def non_finite(value: Any, path: str = "") -> str | None:
    """The path of the first NaN or Infinity anywhere inside, or None."""
    if value is None or isinstance(value, str | int):
        return None
    if isinstance(value, float):
        return path if not math.isfinite(value) else None
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        found = non_finite(item, f"{path}.{key}" if path else str(key))
        if found is not None:
            return found
    return None
