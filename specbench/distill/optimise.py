"""The training loop of one drafter: seeded order, soft cross-entropy over draft steps, cosine rate, checkpoints.

A run that stopped goes on where its last checkpoint was, and ends with the same tensors, bit for bit, as one that never
stopped (same machine, same threads): order and samples follow from the seed and the step's number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from specbench.distill.corpus import Batch, Placed
from specbench.distill.modules import Module, Step, all_rows, places
from specbench.errors import InputError


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained. `rows` answer tokens are read an optimiser step; of them `chain_share` are followed
    beyond the first draft step, `depth` steps in all, whose losses weigh `decay` to the power of the step.
    `feature_weight` is for a smooth L1 loss on recycled states that stand for the target's own."""

    depth: int
    rows: int = 1024
    chain_share: float = 0.5
    decay: float = 0.8
    feature_weight: float = 0.0
    rate: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0


@dataclass
class Progress:
    """Where a run stands: optimiser steps done and planned, tokens read, seconds spent, and the last losses by step."""

    step: int = 0
    total: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: tuple[float, ...] = ()


def batches_of(train: Sequence[Placed], rows: int, seed: int) -> Callable[[int], list[Placed]]:
    """Optimiser step -> its conversations: epochs in seeded order, cut into groups of `rows` answer tokens or more."""
    cuts: list[list[Placed]] = []
    state = {"epoch": 0}

    def extend() -> None:
        order = np.random.default_rng([seed, state["epoch"]]).permutation(len(train))
        state["epoch"] += 1
        before, group = len(cuts), []
        for index in order:
            group.append(train[index])
            if sum(one.num_rows for one in group) >= rows:
                cuts.append(group)
                group = []
        if len(cuts) == before:
            cuts.append(group)

    def at(step: int) -> list[Placed]:
        while step >= len(cuts):
            extend()
        return cuts[step]

    return at


def rate_at(step: int, total: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    through = (step - recipe.warmup) / max(1, total - recipe.warmup)
    return recipe.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, through)))


def losses(
    module: Module, batch: Batch, recipe: Recipe, generator: torch.Generator, feature_scale: float
) -> tuple[torch.Tensor, list[float]]:
    """(the loss to descend, the cross-entropy of each draft step) over a batch.

    The teacher is the target's distribution restricted to the draft vocabulary, from its final states.
    """
    rows = all_rows(batch)
    follow = torch.rand(len(rows), generator=generator) < recipe.chain_share
    teacher = _Teacher(module, batch, places(rows, batch, 1))
    total, weights, seen = torch.zeros(()), 0.0, []
    for number, step in enumerate(module.steps(batch, rows, recipe.depth, follow)):
        if not len(step.rows):
            break
        loss, states = _step_loss(teacher, batch, step, number, feature_scale)
        weight = recipe.decay**number
        total = total + weight * (loss + recipe.feature_weight * states)
        weights += weight
        seen.append(float(loss.detach()))
    return total / weights, seen


class _Teacher:
    """The target's distributions over the draft vocabulary at `positions` int64[P] of a batch, each made once."""

    @torch.no_grad()
    def __init__(self, module: Module, batch: Batch, positions: torch.Tensor) -> None:
        self._probs = functional.linear(batch.final[positions], module.unembedding).softmax(dim=-1)
        self._row = torch.full((len(batch.tokens),), -1)
        self._row[positions] = torch.arange(len(positions))

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """[R, V_draft] at positions int64[R] of the batch, all of them among those asked for."""
        rows = self._row[positions]
        assert bool((rows >= 0).all()), "a position without a distribution"
        return self._probs[rows]


def _step_loss(
    teacher: _Teacher, batch: Batch, step: Step, number: int, feature_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = places(step.rows, batch, number + 1)
    loss = (step.logits.logsumexp(dim=-1) - (teacher.at(positions) * step.logits).sum(dim=-1)).mean()
    if step.state is None or feature_scale == 0:
        return loss, torch.zeros(())
    wanted = batch.final[positions]
    return loss, functional.smooth_l1_loss(step.state / feature_scale, wanted / feature_scale)


class Trainer:
    """Descends a module's tensors over `train`. `load` makes a batch of conversations with the states it reads."""

    def __init__(
        self,
        module: Module,
        train: Sequence[Placed],
        load: Callable[[Sequence[Placed]], Batch],
        recipe: Recipe,
        feature_scale: float = 0.0,
    ) -> None:
        self.module, self.recipe, self.load = module, recipe, load
        self.feature_scale = feature_scale
        self.progress = Progress()
        self._group = batches_of(train, recipe.rows, recipe.seed)
        self._names = list(module.tensors)
        for tensor in module.tensors.values():
            tensor.requires_grad_(True)
        plain = [module.tensors[name] for name in self._names if module.tensors[name].ndim < 2]
        matrices = [module.tensors[name] for name in self._names if module.tensors[name].ndim >= 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=recipe.rate,
            betas=(0.9, 0.95),
        )

    def step(self) -> None:
        """One optimiser step; `progress` tells its losses."""
        number = self.progress.step
        group = self._group(number)
        batch = self.load(group)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + number)
        loss, seen = losses(self.module, batch, self.recipe, generator, self.feature_scale)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.tensors.values(), self.recipe.clip)
        for part in self.optimiser.param_groups:
            part["lr"] = rate_at(number, self.progress.total, self.recipe)
        self.optimiser.step()
        self.progress.step += 1
        self.progress.tokens += sum(one.num_rows for one in group)
        self.progress.loss = tuple(seen)

    def save(self, path: Path, settings: str) -> None:
        """Write tensors, the optimiser's moments and the progress; the file appears whole or not at all."""
        from safetensors.torch import save_file

        stored = {f"tensor.{name}": tensor.detach() for name, tensor in self.module.tensors.items()}
        for name in self._names:
            state = self.optimiser.state.get(self.module.tensors[name])
            if state:
                stored[f"first.{name}"], stored[f"second.{name}"] = state["exp_avg"], state["exp_avg_sq"]
        partial = path.with_name(f"{path.name}.partial")
        save_file(stored, partial, {"progress": json.dumps(asdict(self.progress)), "settings": settings})
        partial.replace(path)

    def restore(self, path: Path, settings: str) -> None:
        """Go on from a checkpoint; InputError if it is of other settings, or no checkpoint."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"not a checkpoint: {error}", file=path, remedy="start again without --resume") from None
        if about.get("settings") != settings:
            raise InputError(
                "this checkpoint is of other settings",
                file=path,
                remedy="start again without --resume, or in another --out",
            )
        progress = json.loads(about["progress"])
        self.progress = Progress(**{**progress, "loss": tuple(progress["loss"])})
        with torch.no_grad():
            for name in self._names:
                tensor = self.module.tensors[name]
                tensor.copy_(stored[f"tensor.{name}"])
                if self.progress.step:
                    self.optimiser.state[tensor] = {
                        "step": torch.tensor(float(self.progress.step)),
                        "exp_avg": stored[f"first.{name}"].clone(),
                        "exp_avg_sq": stored[f"second.{name}"].clone(),
                    }
