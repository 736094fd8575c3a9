"""Small sweeps for tests: a tiny target, a clock whose readings are a tick apart, a monitor that follows a script.

Weights are `engine_tools.wide_weights`, whose next token depends on the whole history, so that a fault of the cache
shows in the output.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from engine_tools import tiny_spec, wide_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbench.bench import measure as measure_module
from specbench.bench import sweep as sweep_module
from specbench.bench import target as target_module
from specbench.bench.ceilings import MeasuredRoofs, Reading
from specbench.bench.measure import Outcome, RoofsInUse, measure_case
from specbench.bench.target import PreparedPrompts, Target
from specbench.bench.telemetry import BlockConditions
from specbench.engine.decode import Engine
from specbench.engine.request import Request
from specbench.metrics import Roof
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import Case, TargetSpec, Workload, expand
from specbench.scenario.schema import MeasureConfig, Scenario

TICK_S = 0.001
STEP_S = 8 * TICK_S
"""A step reads the clock nine times."""

HIGH = Roof(1e15, 1e15)
ROOFS = RoofsInUse(HIGH, None, HIGH)


# ---- Scenarios and cases


def scenario_data(**changes: Any) -> dict[str, Any]:
    """A scenario of the tiny target, as YAML gives it."""
    data: dict[str, Any] = {
        "name": "tiny",
        "question": "Does it run?",
        "target": {"shape": "tiny-llama-test", "weights": "dummy", "dtype": "fp32"},
        "drafters": [{"kind": "oracle"}],
        "sweep": {"batch_size": 2, "depth": 2},
        "workload": {"num_prompts": 4, "output_len": 8},
        "measure": {"blocks": {"min": 2, "max": 2}, "warmup": {"max": 1}},
    }
    return data | changes


def write_scenario(file: Path, **changes: Any) -> Path:
    file.write_text(yaml.safe_dump(scenario_data(**changes), sort_keys=False), encoding="utf-8")
    return file


def make_scenario(**changes: Any) -> Scenario:
    return Scenario.from_dict(scenario_data(**changes))


def one_case(drafter: dict[str, Any] | None = None, depth: int = 2, batch_size: int = 2, **changes: Any) -> Case:
    """The only case of a scenario with one drafter."""
    sweep = {"batch_size": batch_size, "depth": depth}
    (case,) = expand(make_scenario(drafters=[drafter or {"kind": "oracle"}], sweep=sweep, **changes))
    return case


def blocks(least: int = 2, most: int | None = None, **changes: Any) -> MeasureConfig:
    """Settings that stop at `most` blocks, if nothing else says so; without a canary, whose runs tests would count."""
    data: dict[str, Any] = {"blocks": {"min": least, "max": most or least}, "warmup": {"max": 1}, "canary": "off"}
    return make_scenario(measure=data | {"target_interval": 1e-9} | changes).measure


# ---- Targets


def wide(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Dummy targets get weights that make the history matter."""

    def iter_weights(
        source: object, spec: ModelSpec, dtype: torch.dtype, **_: object
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor.to(dtype)) for name, tensor in wide_weights(spec, seed).items())

    monkeypatch.setattr(target_module, "iter_weights", iter_weights)


def tiny_target(case: Case, kind: type[Target] = Target) -> Target:
    return kind(case.target)


class ScriptedTarget(Target):
    """A target whose prompts and output lengths are given: (id, category, prompt length, output length) each."""

    script: tuple[tuple[str, str, int, int], ...] = ()

    def prompts(self, work: Workload) -> PreparedPrompts:
        stream = torch.Generator().manual_seed(work.seed)
        rows = []
        for name, category, length, _ in self.script:
            ids = torch.randint(self.spec.vocab_size, (length,), generator=stream)
            rows.append((name, category, tuple(ids.tolist())))
        return PreparedPrompts("script", "", tuple(rows))

    def requests(self, case: Case, prompts: PreparedPrompts) -> list[Request]:
        lengths = {name: length for name, _, _, length in self.script}
        return [
            replace(one, stops=replace(one.stops, max_tokens=lengths[one.request_id]))
            for one in super().requests(case, prompts)
        ]


# ---- Time and load


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Kernels on one thread: on a busy machine two that wait for each other are many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TickClock:
    """Each reading is `tick_s` after the one before."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self.tick_s, self.time_s = tick_s, 0.0

    def __call__(self) -> float:
        self.time_s += self.tick_s
        return self.time_s


def with_clock(monkeypatch: pytest.MonkeyPatch) -> TickClock:
    """Engines read this clock: every step takes STEP_S, so a speedup is a ratio of tokens per step."""
    clock = TickClock()
    monkeypatch.setattr(measure_module, "Engine", functools.partial(Engine, now=clock))
    return clock


@dataclass
class ScriptedMonitor:
    """Says of block i what `marks[i]` says; blocks beyond the script get the last entry."""

    marks: Sequence[tuple[str, ...]] = ((),)
    clock: TickClock | None = None
    count: int = 0

    def start(self) -> None:
        """A disturbed block is ten times as slow."""
        if self.clock is not None:
            self.clock.tick_s = TICK_S * (10 if self._now() else 1)

    def stop(self) -> BlockConditions:
        marks = self._now()
        self.count += 1
        return BlockConditions(0.0, 0.0, 0, marks)

    def _now(self) -> tuple[str, ...]:
        return tuple(self.marks[min(self.count, len(self.marks) - 1)])


def measured(
    case: Case, settings: MeasureConfig | None = None, target: Target | None = None, **options: Any
) -> Outcome:
    """measure_case on an undisturbed machine, on a target of its own unless one is given."""
    options = {"monitor": ScriptedMonitor(), "roofs": ROOFS} | options
    roofs = options.pop("roofs")
    return measure_case(target or tiny_target(case), case, settings or blocks(), roofs, **options)


# ---- Sweeps without measuring


def constant_roofs() -> MeasuredRoofs:
    reading = Reading(1e11, 1.1e11, 3, "constant")
    gemm = {"fp32": reading, "bf16": reading}
    return MeasuredRoofs("cpu", 1 << 27, reading, reading, reading, gemm, (), 0.0)


def constant_device(monkeypatch: pytest.MonkeyPatch, revision: str = "r0") -> None:
    """A device and a code revision that are always the same and cost nothing to look at."""
    monkeypatch.setattr(sweep_module, "measure_device", lambda *_: constant_roofs())
    monkeypatch.setattr(sweep_module, "code_revision", lambda: revision)


@dataclass
class NoTarget:
    """Stands for a loaded target in sweeps that measure nothing."""

    target: TargetSpec

    @classmethod
    def open(cls, spec: TargetSpec, tell: object) -> NoTarget:
        return cls(spec)


def some_outcome(status: str = "ok", reason: str | None = None, **metrics: Any) -> Outcome:
    conditions = {
        "lossless": True,
        "synthetic": True,
        "output_check": "identical",
        "device": "cpu",
        "weights": "none",
        "prompt_categories": ["random"],
    }
    samples: dict[str, Any] = {"blocks": [], "prompts": []}
    return Outcome(status, reason, {"speedup": 1.25, "null_reasons": {}} | metrics, samples, conditions)


# ---- A model with a tokenizer, in a folder

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def text_model(folder: Path, *, seed: int = 0, swap: tuple[int, int] | None = None, context: int = 1024) -> Path:
    """A tiny llama over bytes, with ChatML; `swap` gives two ids each other's token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap is not None:
        alphabet[swap[0]], alphabet[swap[1]] = alphabet[swap[1]], alphabet[swap[0]]
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    eos = backend.token_to_id("<|im_end|>")
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = tiny_spec(vocab_size=backend.get_vocab_size(), eos_token_ids=(eos,), max_position_embeddings=context)
    shape = {
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "eos_token_id": eos,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    weights = {
        name if name == "lm_head.weight" else f"model.{name}": tensor.float()
        for name, tensor in wide_weights(spec, seed).items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def write_prompts(file: Path, *prompts: tuple[str, str, list[str]]) -> Path:
    """Prompts as (question_id, category, turns)."""
    lines = [json.dumps({"question_id": name, "category": kind, "turns": turns}) for name, kind, turns in prompts]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
