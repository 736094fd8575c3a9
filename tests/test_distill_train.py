"""Training on a tiny target: losses fall, an interrupted run ends as a straight one, what is written drafts so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distill_tools import SPEC, LiteralDrafter, World, tiny_world
from torch.nn import functional
from typer.testing import CliRunner

from specbench.cli import app
from specbench.distill import command
from specbench.distill import train as training
from specbench.distill.acceptance import Acceptance, batch_acceptance, pooled
from specbench.distill.card import card_of, set_categories, write_card, write_drafter
from specbench.distill.layer import Rope, every_position, plain_layer
from specbench.distill.modules import HeadModule, Step, all_rows
from specbench.distill.optimise import Trainer, batches_of, rate_at
from specbench.distill.schema import Distillation
from specbench.distill.start import condition
from specbench.engine.heads.load import HeadSource, load_head, read_head_spec
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.loader import load_weights
from specbench.engine.models.sources import ModelSource
from specbench.errors import InputError

HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"intermediate_size": 32},
    "mtp": {"intermediate_size": 32},
    "eagle3": {"intermediate_size": 32, "kv_heads": 4},
    "medusa": {"num_heads": 3},
    "draft_model": {"intermediate_size": 48, "layers": [0, 1]},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_world(tmp_path_factory.mktemp("text"))
    torch.set_num_threads(threads)


def asked_for(kind: str, **changes: Any) -> Distillation:
    train = {"steps": 30, "depth": 3, "rows": 64, "rate": 0.003, "warmup": 5, **changes}
    head = {"kind": kind, "draft_vocab_size": 32, "coverage": 1.0, **HEADS[kind]}
    return Distillation.model_validate({"name": kind, "target": {"model": "tiny"}, "head": head, "train": train})


def outcome_of(world: World, asked: Distillation, out: Path, **options: Any) -> training.Outcome:
    options = {"resume": False, "tell": lambda line: None, **options}
    return training.train(asked, world.target, world.corpus, out, **options)


@pytest.mark.parametrize("kind", HEADS)
def test_losses_fall_at_every_draft_step(world: World, kind: str, tmp_path: Path) -> None:
    seen = []
    outcome = outcome_of(world, asked_for(kind), tmp_path, progress=lambda t: seen.append(t.progress.loss))
    losses = np.array(seen)
    assert losses.shape == (30, 1 if kind == "draft_model" else 3)
    assert np.all(losses[-6:].mean(0) < 0.98 * losses[:6].mean(0)), (losses[:6].mean(0), losses[-6:].mean(0))
    assert outcome.trainer.progress.step == 30


class Stopped(Exception):
    """What ends a run early here."""


@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_a_resumed_run_ends_as_a_straight_one_bit_for_bit(
    world: World, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_for(kind, steps=24)
    straight = outcome_of(world, asked, tmp_path / "straight")
    monkeypatch.setattr(training, "CHECKPOINT_S", 0.0)

    def stop(trainer: Trainer) -> None:
        if trainer.progress.step == 11:
            raise Stopped

    with pytest.raises(Stopped):
        outcome_of(world, asked, tmp_path / "parts", progress=stop)
    steps = []
    resumed = outcome_of(
        world, asked, tmp_path / "parts", resume=True, progress=lambda trainer: steps.append(trainer.progress.step)
    )
    # The checkpoint of step 11 was not written any more.
    assert steps == list(range(11, 25))
    for name, tensor in straight.drafter.module.tensors.items():
        assert torch.equal(tensor, resumed.drafter.module.tensors[name]), name
    assert resumed.acceptance == straight.acceptance
    assert resumed.trainer.progress.tokens == straight.trainer.progress.tokens


def test_resume_refuses_what_it_can_not_go_on_from(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        outcome_of(world, asked_for("eagle"), tmp_path, resume=True)
    outcome_of(world, asked_for("eagle", steps=2), tmp_path)
    with pytest.raises(InputError, match="other settings"):
        outcome_of(world, asked_for("eagle", steps=3), tmp_path, resume=True)
    (tmp_path / training.CHECKPOINT).write_bytes(b"no")
    with pytest.raises(InputError, match="not a checkpoint"):
        outcome_of(world, asked_for("eagle", steps=2), tmp_path, resume=True)


def test_minutes_become_a_number_of_steps(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves a hundredth of a second at each look, a step takes just that."""
    looks = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(looks) / 100))
    lines: list[str] = []
    outcome = outcome_of(world, asked_for("medusa", steps=None, minutes=0.008), tmp_path, tell=lines.append)
    assert outcome.trainer.progress.total == outcome.trainer.progress.step == 48
    assert any("0.01 s a step: 48 steps in 0.008 minutes" in line for line in lines)
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [f"step {n}" for n in (16, 24, 32, 40)]
    assert training.with_minutes(asked_for("eagle"), 3.0).train.minutes == 3.0


@pytest.mark.parametrize("kind", ["eagle", "mtp", "eagle3", "medusa"])
def test_what_is_written_is_drafted_with_as_it_was_trained(world: World, kind: str, tmp_path: Path) -> None:
    """The files are read back, and a literal loop in float64 with their tensors gives the logits of every draft step
    that the module has with the same tensors."""
    outcome = outcome_of(world, asked_for(kind, steps=20), tmp_path)
    num_bytes = write_drafter(tmp_path / "drafter", outcome)
    assert num_bytes == (tmp_path / "drafter" / "model.safetensors").stat().st_size
    trained = outcome.drafter.spec
    assert isinstance(trained, HeadSpec)
    source = HeadSource("folder", tmp_path / "drafter", "0", trained.name)
    spec = read_head_spec(source, SPEC, trained.kind)
    layer = spec.layer if spec.kind == "medusa" else replace(trained.layer, name=spec.layer.name)
    assert spec == replace(trained, name=spec.name, layer=layer, trained_depth=spec.trained_depth)
    loaded = load_head(source, spec, SPEC, torch.float64)
    assert loaded.pop("draft_ids").tolist() == outcome.drafter.draft_ids.tolist()
    for name, tensor in outcome.drafter.module.tensors.items():
        assert torch.equal(tensor.detach().to(torch.bfloat16).double(), loaded[name]), name

    embedding = world.target.embedding.double()
    unembedding = world.target.rows(outcome.drafter.draft_ids).double()
    module = HeadModule(spec, loaded, embedding, unembedding)
    load = training.loader(world.corpus, world.target, spec.states)
    batch = load(world.corpus.held_out[:2])
    batch = replace(batch, states=batch.states.double(), final=batch.final.double())
    steps = list(module.steps(batch, all_rows(batch), 3))
    for b in range(2):
        for start in (4, 9, 15):
            for number, logits in enumerate(_drafted(spec, loaded, embedding, unembedding, batch, b, start)):
                found = _row(steps[number], b, start)
                torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-9)


def _row(step: Step, b: int, start: int) -> torch.Tensor:
    return step.logits[((step.rows.conversation == b) & (step.rows.start == start)).nonzero().flatten()[0]]


def _drafted(spec, tensors, embedding, unembedding, batch, b, start):  # type: ignore[no-untyped-def]
    """The logits of three draft steps from `start`, along the text."""
    first = int(batch.offsets[b])
    tokens, states = batch.tokens[first:], batch.states[first:]
    if spec.kind == "medusa":
        for head in range(3):
            block = f"heads.{head}.blocks.0"
            h = states[start]
            h = h + functional.silu(tensors[f"{block}.weight"] @ h + tensors[f"{block}.bias"])
            yield unembedding @ h
        return
    literal = LiteralDrafter(spec, tensors, embedding)
    for position in range(start + 1):
        out, state = literal.pair(states[position], int(tokens[position + 1]), position, False)
    yield unembedding @ out
    for step in (1, 2):
        out, state = literal.pair(state, int(tokens[start + step + 1]), start + step, True)
        yield unembedding @ out


def test_the_command_trains_and_writes_drafter_and_card(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "write_text", lambda asked, folder, workers, progress: progress(1, 1))
    monkeypatch.setattr(command, "Corpus", lambda folder, answer_tokens, held_out: world.corpus)
    monkeypatch.setattr(command, "load_target", lambda asked: world.target)
    file = tmp_path / "mine.yaml"
    head = "{kind: eagle, intermediate_size: 32, draft_vocab_size: 32, coverage: 1}"
    train = "{steps: 3, depth: 2, rows: 32}"
    file.write_text(f"name: mine\ntarget: {{model: tiny}}\nhead: {head}\ntrain: {train}\n", encoding="utf-8")
    words = ["distill", str(file), "--out", str(tmp_path / "out"), "--threads", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "at the start: accepted up to each position" in done.output
    names = sorted(path.name for path in (tmp_path / "out" / "drafter").iterdir())
    assert names == ["README.md", "card.json", "config.json", "model.safetensors"]
    card = json.loads((tmp_path / "out" / "drafter" / "card.json").read_text())
    assert card["command"] == f"specbench distill {file} --threads 1"
    assert len(card["held_out"]["all"]["accepted_up_to_position"]) == 5
    again = CliRunner().invoke(
        app, ["distill", str(file), "--out", str(tmp_path / "out"), "--threads", "1", "--resume"]
    )
    assert "resumed at step 3 of 3" in again.output
    resumed = json.loads((tmp_path / "out" / "drafter" / "card.json").read_text())
    assert resumed["held_out"] == card["held_out"]


def test_the_draft_model_shares_the_embedding(world: World, tmp_path: Path) -> None:
    outcome = outcome_of(world, asked_for("draft_model", steps=3), tmp_path)
    write_drafter(tmp_path / "drafter", outcome)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["shares_embeddings"] == "target"
    assert config["num_hidden_layers"] == 2
    source = ModelSource("folder", tmp_path / "drafter", None, "drafter")
    from specbench.engine.models.config import read_model_spec

    spec = read_model_spec(source)
    shared = {"embed_tokens.weight": world.target.embedding}
    weights = load_weights(source, spec, torch.float32, shared=shared)
    assert torch.equal(weights.pop("embed_tokens.weight"), world.target.embedding)
    assert weights.keys() == outcome.drafter.module.tensors.keys()
    with pytest.raises(InputError, match="shares its target's embedding"):
        load_weights(source, spec, torch.float32)


def test_card_and_readme(world: World, tmp_path: Path) -> None:
    asked = asked_for("eagle", steps=4)
    outcome = outcome_of(world, asked, tmp_path)
    card = card_of(asked, outcome, "tiny@0", "specbench distill x.yaml", 1234)
    write_card(tmp_path, card)
    stored = json.loads((tmp_path / "card.json").read_text())
    assert stored["held_out"]["all"]["accepted_up_to_position"] == [
        round(v, 4) for v in pooled(outcome.acceptance).by_position
    ]
    assert sum(outcome.acceptance[t].reached[0] for t in outcome.acceptance) == stored["held_out"]["drafts"]
    assert stored["training"]["steps"] == 4
    set_categories(tmp_path, {"qa": [0.5, 0.25], "coding": [0.75]})
    page = (tmp_path / "README.md").read_text()
    assert "    specbench distill x.yaml\n" in page
    assert "| qa | 0.500 | 0.250 |" in page
    assert "| coding | 0.750 | – |" in page
    assert "seed" in json.dumps(stored["distillation"])


class Parrot:
    """Drafts the tokens it is told: `said[step][(conversation, start)]`."""

    def __init__(self, said: list[dict[tuple[int, int], int]], rows: list[Any]) -> None:
        self.said, self.rows = said, rows

    def steps(self, batch: Any, rows: Any, depth: int, follow: Any = None) -> Iterator[Step]:
        for said, own in zip(self.said[:depth], self.rows, strict=False):
            keys = zip(own.conversation.tolist(), own.start.tolist(), strict=True)
            yield Step(own, functional.one_hot(torch.tensor([said[key] for key in keys]), 4).float(), None)


def test_a_position_counts_only_behind_accepted_ones(world: World) -> None:
    """Two starts: the first is right, wrong, right; the second right, right, and has no third."""
    load = training.loader(world.corpus, world.target, (-1,))
    batch = load(world.corpus.held_out[:1])
    rows = all_rows(batch)
    last = int(rows.start[-1])
    pair = rows.keep((rows.start == 5) | (rows.start == last - 1))
    alone = rows.keep(rows.start == 5)
    best = np.arange(len(batch.tokens)) % 50
    ids = np.array([11, 22, 33, 44])
    best[6], best[7], best[8], best[last], best[last + 1] = 11, 22, 33, 44, 11
    said = [{(0, 5): 0, (0, last - 1): 3}, {(0, 5): 2, (0, last - 1): 0}, {(0, 5): 2}]
    parrot: Any = Parrot(said, [pair, pair, alone])
    found = batch_acceptance(parrot, batch, best, ids, 4)
    assert found == Acceptance((2, 2, 1, 0), (2, 2, 0, 0), (2, 1, 0, 0))
    assert found.by_position == (1.0, 0.5, 0.0, 0.0)
    assert found.conditional == (1.0, 0.5, 0.0, 0.0)
    assert found.mean_accepted == 1.5
    # Of two drafts only the wrong one could have a third token: nothing was tried there.
    assert (found + found).tried == (4, 4, 0, 0)


def test_order_is_seeded_and_every_conversation_comes_once_an_epoch(world: World) -> None:
    at = batches_of(world.corpus.train, 64, 3)
    groups = [at(step) for step in range(30)]
    assert all(sum(one.num_rows for one in group) >= 64 for group in groups)
    again = batches_of(world.corpus.train, 64, 3)
    assert again(17) == groups[17], "a step's group does not depend on the steps asked for before"
    assert batches_of(world.corpus.train, 64, 4)(0) != groups[0]
    few = batches_of(world.corpus.train[:2], 10_000, 0)
    assert len(few(0)) == len(few(5)) == 2, "fewer rows than a step wants: the whole epoch"


def test_rate_warms_up_and_falls_to_nothing(world: World) -> None:
    recipe = training.recipe_of(asked_for("eagle", warmup=10, rate=1.0))
    rates = [rate_at(step, 100, recipe) for step in range(101)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[100] == 0.0


def test_conditioned_layers_compute_the_same_from_weights_of_like_size(world: World) -> None:
    tensors = {name: t.clone() for name, t in world.target.tensors.items() if name.startswith("layers.3.")}
    stream = torch.Generator().manual_seed(1)
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] *= 0.5 + torch.rand(tensors[name].shape, generator=stream)
    tensors["layers.3.mlp.down_proj.weight"] *= 0.01
    rope, every = Rope(SPEC, 64, torch.float32), every_position([20])
    x = torch.randn(20, SPEC.hidden_size, generator=stream)
    before = plain_layer(x, tensors, "layers.3", SPEC, rope, every, [0, 20])
    condition(tensors, "layers.3", "input_layernorm")
    after = plain_layer(x, tensors, "layers.3", SPEC, rope, every, [0, 20])
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    up, down = (tensors[f"layers.3.mlp.{name}_proj.weight"].square().mean() for name in ("up", "down"))
    assert float(up / down) == pytest.approx(1, rel=1e-3)
    assert bool((tensors["layers.3.input_layernorm.weight"] == 1).all())
