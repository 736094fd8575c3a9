"""What a template of `specbench size` may say; read like a scenario, so an error names file, line, key and remedy.

specbench size scenarios/size/llama-3.1-8b-h100.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from specbench.scenario.fields import (
    Axis,
    Rate,
    Section,
    Text,
    as_items,
    choice,
    distinct,
    fault,
    read_integer,
    read_number,
    reader,
)
from specbench.scenario.schema import resolve_scenario_path, validated
from specbench.scenario.yaml_reader import plain, read_yaml

SIZE_KINDS = ("none", "ngram", "suffix", "draft_model", "early_exit", "medusa", "eagle", "eagle3", "mtp")
"""Drafters whose drafts are chains: a tree's yield is no curve by position."""
DEPTHS = (1, 2, 3, 4, 5, 6, 7)
Kind = Annotated[
    Literal["none", "ngram", "suffix", "draft_model", "early_exit", "medusa", "eagle", "eagle3", "mtp"],
    choice(*SIZE_KINDS),
]
Positive = Annotated[float, reader(read_number, 0, 1e9, open_low=True)]
Tokens = Annotated[int, reader(read_integer, 1, 10_000_000)]
Gpus = Annotated[int, reader(read_integer, 1, 4096)]


class SizeModel(Section):
    """`shape`: a known name; or `config`: a config.json or its folder. Weights and KV cache by format; `compute_dtype`
    null: the weights' own where they are floats or int8, else bf16."""

    shape: Text | None = None
    config: Text | None = None
    weight_dtype: Text = "bf16"
    kv_dtype: Text = "bf16"
    compute_dtype: Text | None = None

    @model_validator(mode="after")
    def _one_source(self) -> SizeModel:
        if (self.shape is None) == (self.config is None):
            raise fault("give either shape or config", "write shape: llama-3.1-8b, or config: path/to/config.json")
        return self


class SizeHardware(Section):
    """`link_gb_per_s`: one GPU's rate to its neighbours in one direction, needed for more than one GPU a replica.
    `memory_share`: how much of the memory may be used. `price_per_hour`: of one GPU, in any currency."""

    device: Text
    max_gpus: Gpus = 8
    tensor_parallel: Axis[Gpus] = (1, 2, 4, 8)
    memory_share: Annotated[float, reader(read_number, 0, 1, open_low=True)] = 0.9
    link_gb_per_s: Positive | None = None
    link_latency_us: Annotated[float, reader(read_number, 0, 1e6)] = 10.0
    price_per_hour: Positive | None = None


class SizeWorkload(Section):
    """Tokens of a prompt and of its answer, in the mean."""

    prompt_len: Tokens
    output_len: Tokens


class SizeLoad(Section):
    """Requests that arrive each second, or that are under way at once."""

    requests_per_s: Positive | None = None
    concurrency: Annotated[int, reader(read_integer, 1, 10_000_000)] | None = None

    @model_validator(mode="after")
    def _one_load(self) -> SizeLoad:
        if (self.requests_per_s is None) == (self.concurrency is None):
            message = "give either requests_per_s or concurrency" + (", not both" if self.concurrency else "")
            raise fault(message, "write requests_per_s: 10, or concurrency: 64")
        return self


class SizeBounds(Section):
    """Most milliseconds a token after the first, and to the first one."""

    tpot_ms: Positive | None = None
    ttft_ms: Positive | None = None


class SizeDrafter(Section):
    """`acceptance`: conditional rates by position, the last one holds beyond; null: what is assumed of this kind
    (scenarios/predict/acceptance.json). `drafted`: share of the depth that is drafted on average, for lookup drafters.
    `model`: the shape of a draft model; `layers`: what early exit runs."""

    kind: Kind
    depth: Annotated[
        tuple[Annotated[int, reader(read_integer, 1, 64)], ...], AfterValidator(distinct), BeforeValidator(as_items)
    ] = DEPTHS
    acceptance: Annotated[tuple[Rate, ...], BeforeValidator(as_items)] | None = None
    drafted: Rate | None = None
    model: Text | None = None
    layers: Annotated[int, reader(read_integer, 1, 1000)] | None = None

    @model_validator(mode="after")
    def _own_fields(self) -> SizeDrafter:
        for key, kind, example in (("model", "draft_model", "llama-3.2-1b"), ("layers", "early_exit", "8")):
            given = getattr(self, key) is not None
            if given != (self.kind == kind):
                message = f"{self.kind} has no {key}" if given else f"a {kind} needs {key}"
                raise fault(message, f"drop {key}" if given else f"write {key}: {example}", *([key] if given else []))
        if self.drafted is not None and self.acceptance is None:
            raise fault("belongs to acceptance", "give acceptance: [0.5, 0.7] beside it", "drafted")
        return self


class SizeEfficiency(Section):
    """What the engine reaches of the roofs, and what it spends beside them; null: what is assumed of a GPU."""

    compute: Annotated[float, reader(read_number, 0, 2, open_low=True)] | None = None
    memory: Annotated[float, reader(read_number, 0, 2, open_low=True)] | None = None
    step_ms: Annotated[float, reader(read_number, 0, 1e5)] | None = None
    pass_ms: Annotated[float, reader(read_number, 0, 1e5)] | None = None
    draft_pass_ms: Annotated[float, reader(read_number, 0, 1e5)] | None = None


class SizeTemplate(Section):
    """A whole template, defaults filled in."""

    name: Text
    question: Text | None = None
    model: SizeModel
    hardware: SizeHardware
    workload: SizeWorkload
    load: SizeLoad
    bounds: SizeBounds = SizeBounds()
    drafters: Axis[SizeDrafter] = (SizeDrafter(kind="none"),)
    efficiency: SizeEfficiency = SizeEfficiency()


def load_template(path: Path | str) -> tuple[SizeTemplate, Path]:
    """The template at `path` (or a shipped one: scenarios/size/NAME.yaml) and the file it was read from. Raises
    InputError with file, line, key and remedy."""
    file = resolve_scenario_path(path)
    root = read_yaml(file)
    return validated(SizeTemplate, plain(root), root, file), file
