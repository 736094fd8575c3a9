"""`specbench distill`: text, then training, then the drafter's files and its card, all in one folder.

specbench distill scenarios/distill/eagle.yaml --out runs/distill/eagle --resume
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.distill.acceptance import Acceptance, HeldOut, pooled
from specbench.distill.corpus import Batch, Corpus, Placed
from specbench.distill.generate import TextSettings, recorded_states
from specbench.distill.modules import DraftModelModule, HeadModule, Module
from specbench.distill.optimise import Recipe, Trainer
from specbench.distill.schema import Distillation
from specbench.distill.shards import answer_tokens_in, work_on_shards, write_manifest
from specbench.distill.start import Target, first_tensors, head_spec, watch
from specbench.distill.start_model import draft_model_start
from specbench.engine.heads.spec import FINAL, HeadSpec
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.loader import load_weights
from specbench.engine.models.sources import resolve_model
from specbench.errors import InputError, SpecbenchError
from specbench.roofline.shapes import ModelSpec

CALIBRATION_STEPS = (3, 15)
"""Optimiser steps whose mean time turns minutes into a number of steps: first and last (half-open)."""
CHECKPOINT_S = 60.0
MEASURES = 6
"""How often held-out acceptance is measured while training, the end included."""
MEASURED_CONVERSATIONS = 64
MEASURED_DEPTH = 5
FIT_TOKENS = 60_000
WATCHED = 6
CHECKPOINT = "checkpoint.safetensors"
Tell = Callable[[str], None]


def text_settings(asked: Distillation) -> TextSettings:
    text = asked.text
    return TextSettings(
        model=asked.target.model,
        revision=asked.target.revision,
        seed=text.seed,
        shard_prompts=text.shard_prompts,
        prompt_len=text.prompt_len,
        prompt_min_p=text.prompt_min_p,
        openers=text.openers,
        answer_len=text.answer_len,
        temperatures=text.temperatures,
        batch_size=text.batch_size,
    )


def write_text(asked: Distillation, folder: Path, workers: int, progress: Callable[[int, int], None]) -> None:
    """Make the shards that are missing, in `workers` processes of one thread each. `progress` hears of (answer tokens
    there are, wanted)."""
    settings, wanted = text_settings(asked), asked.text.answer_tokens
    write_manifest(folder, settings, resolve_model(settings.model, revision=settings.revision).label)
    workers = min(workers, -(-wanted // (settings.shard_prompts * settings.answer_len)))
    # A fork would inherit OpenMP's threads, which it can't use.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work_on_shards, args=(settings, folder, first, workers, wanted), daemon=True)
        for first in range(workers)
    ]
    _, found = answer_tokens_in(folder, wanted)
    if found >= wanted:
        progress(found, wanted)
        return
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            progress(answer_tokens_in(folder, wanted)[1], wanted)
            time.sleep(1)
            if any(process.exitcode for process in processes):
                raise SpecbenchError("writing text failed; its error is above")
    finally:
        for process in processes:
            process.terminate()
            process.join()
    progress(answer_tokens_in(folder, wanted)[1], wanted)


def load_target(asked: Distillation) -> Target:
    source = resolve_model(asked.target.model, revision=asked.target.revision)
    spec = read_model_spec(source)
    # Training sees the weights that the bf16 engine runs with.
    weights = load_weights(source, spec, torch.bfloat16)
    return Target(spec, {name: tensor.float() for name, tensor in weights.items()}, source.label)


@dataclass(frozen=True)
class Drafter:
    """What is trained: its module, the spec of what is written, and the draft vocabulary."""

    module: Module
    spec: HeadSpec | ModelSpec
    draft_ids: NDArray[np.int64]
    states: tuple[int, ...]
    feature_scale: float


def build(asked: Distillation, target: Target, corpus: Corpus) -> Drafter:
    """The drafter where its training starts."""
    config, states = asked.head, (FINAL,)
    draft_ids = corpus.vocabulary(config.draft_vocab_size, config.coverage)
    sample = loader(corpus, target, states)(corpus.train[:WATCHED])
    watched = watch(target, sample)
    scale = float(sample.final.square().mean(-1).sqrt().median())
    if config.kind == "draft_model":
        width = config.intermediate_size or target.spec.intermediate_size
        batches = fit_batches(corpus, loader(corpus, target, states))
        spec, tensors = draft_model_start(asked.name, target, config.layers or (0, 1), width, watched, batches)
        draft = DraftModelModule(spec, tensors, target.embedding, target.rows(draft_ids))
        return Drafter(draft, spec, draft_ids, states, 0.0)
    head = head_spec(
        config.kind,
        asked.name,
        target.spec,
        draft_vocab=len(draft_ids),
        intermediate_size=config.intermediate_size or target.spec.intermediate_size,
        kv_heads=config.kv_heads,
        num_heads=config.num_heads or 3,
        depth=asked.train.depth,
    )
    load = loader(corpus, target, head.states)
    tensors = first_tensors(head, target, watched, fit_batches(corpus, load))
    module = HeadModule(head, tensors, target.embedding, target.rows(draft_ids))
    is_final = head.kind == "eagle" or (head.kind == "mtp" and head.recycle == "post_norm")
    return Drafter(module, head, draft_ids, head.states, scale if is_final else 0.0)


def loader(corpus: Corpus, target: Target, states: tuple[int, ...]) -> Callable[[Sequence[Placed]], Batch]:
    """Conversations -> the batch of them with the states that a drafter reads."""
    recorded = recorded_states(target.spec.num_layers)
    return lambda chosen: corpus.batch(chosen, states, recorded)


def fit_batches(corpus: Corpus, load: Callable[[Sequence[Placed]], Batch]) -> list[Batch]:
    """The first conversations, FIT_TOKENS tokens of them, in batches."""
    chosen, total = [], 0
    for one in corpus.train:
        if total >= FIT_TOKENS:
            break
        chosen.append(one)
        total += len(one.tokens)
    return [load(chosen[first : first + 16]) for first in range(0, len(chosen), 16)]


def recipe_of(asked: Distillation) -> Recipe:
    train = asked.train
    return Recipe(
        depth=1 if asked.head.kind == "draft_model" else train.depth,
        rows=train.rows,
        chain_share=train.chain_share,
        decay=train.decay,
        feature_weight=train.feature_weight,
        rate=train.rate,
        warmup=train.warmup,
        weight_decay=train.weight_decay,
        clip=train.clip,
        seed=train.seed,
    )


@dataclass(frozen=True)
class Outcome:
    """A finished training."""

    drafter: Drafter
    trainer: Trainer
    corpus: Corpus
    acceptance: dict[float, Acceptance]
    first_acceptance: Acceptance


def train(
    asked: Distillation,
    target: Target,
    corpus: Corpus,
    out: Path,
    *,
    resume: bool,
    tell: Tell,
    progress: Callable[[Trainer], None] = lambda _: None,
) -> Outcome:
    """Train to the end, from a checkpoint in `out` if `resume`; held-out acceptance is told on the way."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint, settings = out / CHECKPOINT, _settings(asked)
    if resume and not checkpoint.is_file():
        raise InputError("no checkpoint here to resume from", file=checkpoint, remedy="start without --resume")
    drafter = build(asked, target, corpus)
    load = loader(corpus, target, drafter.states)
    trainer = Trainer(drafter.module, corpus.train, load, recipe_of(asked), drafter.feature_scale)
    held_out = HeldOut(corpus.held_out, load, target.unembedding, drafter.draft_ids, MEASURED_CONVERSATIONS)
    depth = measured_depth(asked)
    first = pooled(held_out.measure(drafter.module, depth))
    tell(f"at the start: {shown(first)}")
    if resume:
        trainer.restore(checkpoint, settings)
        tell(f"resumed at step {trainer.progress.step} of {trainer.progress.total}")
    _descend(asked, trainer, checkpoint, settings, tell, progress, lambda: held_out.measure(drafter.module, depth))
    with torch.no_grad():
        # What is written is bf16, so that is what is measured.
        for tensor in drafter.module.tensors.values():
            tensor.copy_(tensor.to(torch.bfloat16))
    everyone = HeldOut(corpus.held_out, load, target.unembedding, drafter.draft_ids, len(corpus.held_out))
    acceptance = everyone.measure(drafter.module, depth)
    tell(f"at the end, all held-out prompts: {shown(pooled(acceptance))}")
    return Outcome(drafter, trainer, corpus, acceptance, first)


def measured_depth(asked: Distillation) -> int:
    """Positions whose acceptance is measured: also some that the head was not trained for, but by its own recycling."""
    return asked.head.num_heads or 3 if asked.head.kind == "medusa" else max(asked.train.depth, MEASURED_DEPTH)


def _settings(asked: Distillation) -> str:
    """What a checkpoint belongs to; `minutes` may change on the way."""
    stored = asked.model_dump(mode="json")
    stored["train"].pop("minutes")
    return json.dumps(stored, sort_keys=True)


def _descend(
    asked: Distillation,
    trainer: Trainer,
    checkpoint: Path,
    settings: str,
    tell: Tell,
    progress: Callable[[Trainer], None],
    measure: Callable[[], dict[float, Acceptance]],
) -> None:
    state = trainer.progress
    if asked.train.steps:
        state.total = asked.train.steps
    first, last = CALIBRATION_STEPS
    saved = time.monotonic()
    seconds: list[float] = []
    while not state.total or state.step < state.total:
        begin = time.monotonic()
        trainer.step()
        now = time.monotonic()
        seconds.append(now - begin)
        state.seconds += now - begin
        if not state.total and len(seconds) == last:
            each = sum(seconds[first:]) / (last - first)
            state.total = max(state.step + 1, round((asked.train.minutes or 0) * 60 / each))
            tell(f"{each:.2f} s a step: {state.total} steps in {asked.train.minutes:g} minutes")
        progress(trainer)
        ends = bool(state.total) and state.step == state.total
        if now - saved > CHECKPOINT_S or ends:
            trainer.save(checkpoint, settings)
            saved = now
        if state.total and state.step % max(1, state.total // MEASURES) == 0 and not ends:
            loss = " ".join(f"{value:.3f}" for value in state.loss)
            rate = state.tokens / state.seconds
            tell(f"step {state.step}: loss {loss}; {rate:.0f} tokens/s; held out {shown(pooled(measure()))}")


def shown(acceptance: Acceptance) -> str:
    """Acceptance up to each position, and of each position alone."""
    up_to = " ".join(f"{value:.3f}" for value in acceptance.by_position)
    alone = " ".join(f"{value:.3f}" for value in acceptance.conditional)
    return f"accepted up to each position {up_to} (each alone {alone}), {acceptance.mean_accepted:.2f} of a draft"


def final_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The trained tensors as they are written: with `draft_ids` where the vocabulary is reduced."""
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.module.tensors.items()}
    if isinstance(drafter.spec, HeadSpec) and drafter.spec.reduced_vocabulary:
        tensors["draft_ids"] = torch.from_numpy(drafter.draft_ids.copy())
    return tensors


def with_minutes(asked: Distillation, minutes: float | None) -> Distillation:
    """The distillation, but for `minutes`."""
    if minutes is None:
        return asked
    settings = {**asked.train.model_dump(), "minutes": minutes, "steps": None}
    return asked.model_copy(update={"train": type(asked.train).model_validate(settings)})
