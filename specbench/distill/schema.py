"""What a distillation's YAML may say: the target, the text, the drafter, the training. No torch.

specbench distill scenarios/distill/eagle.yaml
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import field_validator, model_validator

from specbench.distill.openers import Openers
from specbench.scenario.fields import (
    ScalarFault,
    Section,
    Seed,
    Text,
    as_items,
    choice,
    fault,
    read_integer,
    read_number,
    read_text,
    reader,
)
from specbench.scenario.schema import resolve_scenario_path, validated
from specbench.scenario.yaml_reader import plain, read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
DrafterKind = Literal["medusa", "eagle", "eagle3", "mtp", "draft_model"]
Count = Annotated[int, reader(read_integer, 1, 1_000_000_000)]
Share = Annotated[float, reader(read_number, 0, 1, open_low=True)]
Positive = Annotated[float, reader(read_number, 0, 1e6, open_low=True)]
NotNegative = Annotated[float, reader(read_number, 0, 1e6)]


class DistillTarget(Section):
    """The model that is drafted for; it writes all of the text itself."""

    model: Text
    revision: Text | None = None


class TextConfig(Section):
    """The self-written text. `answer_tokens` counts the answers' tokens, held-out ones too; `held_out` is the share of
    prompts that is kept from training. Prompts are drawn at temperature 1, with `prompt_min_p`; with `openers: kinds`
    the first words of most are given, so that they are of more kinds. Answers take turns through `temperatures`.
    `shard_prompts` prompts at a time, `batch_size` of them side by side."""

    seed: Seed = 0
    answer_tokens: Count = 300_000
    held_out: Annotated[float, reader(read_number, 0, 0.5, open_low=True)] = 0.05
    answer_len: Annotated[int, reader(read_integer, 8, 100_000)] = 192
    prompt_len: Annotated[int, reader(read_integer, 8, 100_000)] = 96
    prompt_min_p: Annotated[float, reader(read_number, 0, 1, open_high=True)] = 0.02
    openers: Annotated[Openers, choice("none", "kinds")] = "none"
    temperatures: tuple[Annotated[float, reader(read_number, 0, 10)], ...] = (0.0, 0.7, 0.0, 1.0)
    shard_prompts: Count = 192
    batch_size: Annotated[int, reader(read_integer, 1, 4096)] = 48

    @field_validator("temperatures", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return as_items(value)


class HeadConfig(Section):
    """The drafter. `draft_vocab_size` bounds its vocabulary, which is as small as covers `coverage` of the answers'
    tokens; 1 keeps every token that occurs. `intermediate_size` are the neurons kept of a layer of the target,
    `num_heads` Medusa's heads, `kv_heads` (more than the target's) are for EAGLE-3. `layers`: which of the target's
    layers a draft model starts from, negative ones counted from the end."""

    kind: Annotated[DrafterKind, choice("medusa", "eagle", "eagle3", "mtp", "draft_model")]
    intermediate_size: Count | None = None
    draft_vocab_size: Count = 8192
    coverage: Share = 0.98
    num_heads: Annotated[int, reader(read_integer, 1, 16)] | None = None
    kv_heads: Count | None = None
    layers: tuple[Annotated[int, reader(read_integer, -1000, 1000)], ...] | None = None

    @field_validator("layers", mode="before")
    @classmethod
    def _tuple_of_layers(cls, value: object) -> object:
        return None if value is None else as_items(value)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> HeadConfig:
        for key, kinds in (
            ("intermediate_size", ("eagle", "eagle3", "mtp", "draft_model")),
            ("num_heads", ("medusa",)),
            ("kv_heads", ("eagle3",)),
            ("layers", ("draft_model",)),
        ):
            given = getattr(self, key) is not None
            if given and self.kind not in kinds:
                raise fault(f"a drafter of kind {self.kind} has no {key}", f"drop {key}", key)
        if self.kind != "medusa" and self.intermediate_size is None:
            raise fault("has no intermediate_size", "say how many neurons of a target's layer are kept", "kind")
        return self


class TrainConfig(Section):
    """How it is trained: for `minutes`, or for `steps` of the optimiser (with which a run can be repeated exactly).
    `depth` draft steps; a step reads `rows` answer tokens, and `chain_share` of them are followed beyond the first."""

    minutes: Positive | None = None
    steps: Count | None = None
    depth: Annotated[int, reader(read_integer, 1, 16)] = 4
    rows: Count = 1024
    chain_share: Share = 0.5
    decay: Share = 0.8
    feature_weight: NotNegative = 0.0
    rate: Positive = 1e-3
    warmup: Count = 20
    weight_decay: NotNegative = 0.01
    clip: Positive = 1.0
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.minutes is None) == (self.steps is None):
            raise fault("give either minutes or steps", "write minutes: 15, or steps: 1000")
        return self


def _read_name(value: object) -> str:
    text = read_text(value)
    if not _NAME.fullmatch(text):
        remedy = "use up to 80 letters, digits, `.`, `_` and `-`, the first a letter or a digit"
        raise ScalarFault(f"{text[:40]!r} can't name a folder", remedy)
    return text


class Distillation(Section):
    """A whole distillation, defaults filled in. `name` also names the folder of its results."""

    name: Annotated[str, reader(_read_name)]
    target: DistillTarget
    text: TextConfig = TextConfig()
    head: HeadConfig
    train: TrainConfig


def load_distillation(path: Path | str) -> Distillation:
    """The distillation at `path` (an installed one too); InputError with file, line, key and remedy."""
    file = resolve_scenario_path(path)
    root = read_yaml(file)
    return validated(Distillation, plain(root), root, file)
