"""Where training starts: least squares, pairs within conversations, and starts that are better than chance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from distill_tools import SPEC, TINY, World, random_batch, random_tensors, tiny_world

from specbench.distill import train as training
from specbench.distill.modules import HeadModule
from specbench.distill.optimise import Recipe, losses
from specbench.distill.schema import Distillation
from specbench.distill.start import Fit, _pairs, cut_layer, known, watch
from specbench.engine.heads.spec import HeadSpec
from specbench.errors import InputError


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_world(tmp_path_factory.mktemp("text"))
    torch.set_num_threads(threads)


def asked_for(kind: str, **head: object) -> Distillation:
    full = {"kind": kind, "draft_vocab_size": 32, "coverage": 1.0, **head}
    train = {"steps": 1, "depth": 3}
    return Distillation.model_validate({"name": kind, "target": {"model": "tiny"}, "head": full, "train": train})


@pytest.mark.parametrize("bias", [False, True])
def test_a_fit_finds_the_map_from_parts(bias: bool) -> None:
    stream = torch.Generator().manual_seed(4)
    weight, offset = torch.randn(3, 5, generator=stream), torch.randn(3, generator=stream) * bias
    fit = Fit(5, 3, bias=bias)
    for rows in (7, 30, 400):
        x = torch.randn(rows, 5, generator=stream)
        fit.add(x, x @ weight.T + offset)
    found, constant = fit.solve()
    # The ridge pulls by about its own share.
    torch.testing.assert_close(found, weight, rtol=0, atol=0.01)
    assert (constant is None) == (not bias)
    if constant is not None:
        torch.testing.assert_close(constant, offset, rtol=0, atol=0.01)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_pairs_never_cross_conversations_nor_touch_unknown_states(ahead: int) -> None:
    lengths = [5, 2, 9, 1, 4]
    batch = random_batch(lengths, [1] * 5, TINY.hidden_size)
    wanted, first = [], 0
    for length in lengths:
        wanted += [first + i for i in range(length) if i + ahead <= length - 2]
        first += length
    assert _pairs(batch, ahead).tolist() == wanted
    assert known(batch).sum() == sum(lengths) - len(lengths)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("eagle", {"intermediate_size": 32}),
        ("mtp", {"intermediate_size": 32}),
        ("eagle3", {"intermediate_size": 32, "kv_heads": 4}),
        ("eagle3", {"intermediate_size": 32}),
        ("medusa", {"num_heads": 3}),
    ],
)
def test_a_start_is_better_than_chance_at_every_step(world: World, kind: str, head: dict[str, object]) -> None:
    drafter = training.build(asked_for(kind, **head), world.target, world.corpus)
    spec, module = drafter.spec, drafter.module
    assert isinstance(spec, HeadSpec)
    batch = training.loader(world.corpus, world.target, spec.states)(world.corpus.held_out)
    recipe, stream = Recipe(depth=3, chain_share=1.0), torch.Generator().manual_seed(0)
    other = HeadModule(spec, random_tensors(spec, dtype=torch.float32), module.embedding, module.unembedding)
    with torch.no_grad():
        ours, theirs = (losses(each, batch, recipe, stream, 0.0)[1] for each in (module, other))
    assert all(a < b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_a_draft_model_starts_better_with_its_last_layer_fitted(world: World) -> None:
    drafter = training.build(asked_for("draft_model", intermediate_size=48, layers=[0, 1]), world.target, world.corpus)
    module, load = drafter.module, training.loader(world.corpus, world.target, (-1,))
    batch, recipe = load(world.corpus.held_out), Recipe(depth=1)
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        fitted = losses(module, batch, recipe, stream, 0.0)[1][0]
        for name, tensor in cut_layer(
            world.target.tensors, 1, watch(world.target, batch).activity[1], 48, out="layers.1"
        ).items():
            module.tensors[name] = tensor
        plain = losses(module, batch, recipe, stream, 0.0)[1][0]
    assert fitted < plain


def test_a_layer_the_target_lacks_is_refused(world: World) -> None:
    asked = asked_for("draft_model", intermediate_size=48, layers=[0, SPEC.num_layers])
    with pytest.raises(InputError, match="layer 7 is none of the target's 7"):
        training.build(asked, world.target, world.corpus)


def test_the_most_active_neurons_are_kept(world: World) -> None:
    activity = torch.arange(SPEC.intermediate_size, dtype=torch.float32) % 7
    layer = cut_layer(world.target.tensors, 2, activity, 18)
    kept = [i for i in range(SPEC.intermediate_size) if i % 7 == 6]
    assert len(kept) == 18
    for name in ("gate_proj", "up_proj"):
        whole = world.target.tensors[f"layers.2.mlp.{name}.weight"]
        assert torch.equal(layer[f"layers.0.mlp.{name}.weight"], whole[kept])
    whole = world.target.tensors["layers.2.mlp.down_proj.weight"]
    assert torch.equal(layer["layers.0.mlp.down_proj.weight"], whole[:, kept])
