"""Predicted draft passes against those that the engine made and counted; and what drafters bring and cost by shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from engine_tools import Weights, decode, make_decoder, make_request, perturbed, prompts, tiny_spec, wide_weights
from head_world import head_spec, head_weights, make_head

from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.head import HeadDrafter, MedusaDrafter
from specbench.engine.drafters.levels import DynamicShape
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.spec import HeadSpec, head_tensor_shapes
from specbench.engine.models.decoder import Decoder
from specbench.errors import InputError
from specbench.roofline.cost import ZERO, forward_cost
from specbench.roofline.draft_cost import DRAFT_KINDS, DraftShape, catch_up_rows, draft_passes, drafter_shape
from specbench.roofline.shapes import named_shape

TARGET = tiny_spec(num_layers=3)
DEPTH, OUTPUT = 3, 40
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
Made = tuple[Drafter, DraftShape]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return wide_weights(TARGET, gain=1.2)


@pytest.fixture(scope="module")
def target(weights: Weights) -> Decoder:
    return make_decoder(TARGET, weights)


def a_head(kind: str, target: Decoder, **changes: Any) -> tuple[HeadSpec, Any]:
    spec = head_spec(kind, TARGET, **changes)
    return spec, make_head(spec, head_weights(spec), target)


def shaped(spec: HeadSpec, **changes: Any) -> DraftShape:
    return replace(spec.draft_shape, **changes)


def drafters(target: Decoder, weights: Weights) -> dict[str, Callable[[], Made]]:
    def draft_model() -> Made:
        decoder = make_decoder(TARGET, perturbed(weights, 0.02))
        return DraftModelDrafter(decoder, TARGET.vocab_size), DraftShape("draft_model", layer=TARGET)

    def head(kind: str, tree: Any = None, levels: Any = None, **changes: Any) -> Made:
        spec, made = a_head(kind, target, **changes)
        top_k = tree.top_k if isinstance(tree, DynamicShape) else None
        named = "eagle2" if top_k else kind
        return HeadDrafter(made, tree), shaped(spec, kind=named, top_k=top_k, levels=levels)

    def modules() -> Made:
        spec, made = a_head("mtp", target, num_modules=3, layer={"num_layers": 3})
        return ModulesDrafter(made, DEPTH), shaped(spec)

    def medusa() -> Made:
        spec, made = a_head("medusa", target)
        return MedusaDrafter(made), shaped(spec)

    levels = tuple(len(nodes) for nodes in TREE.cut(DEPTH).inner)
    return {
        "ngram": lambda: (NgramDrafter(3, 1, "vllm", ()), DraftShape("ngram")),
        "early_exit": lambda: (EarlyExitDrafter(target, 2), DraftShape("early_exit", num_layers=2)),
        "early_exit, tree": lambda: (
            EarlyExitDrafter(target, 1, TREE),
            DraftShape("early_exit", num_layers=1, levels=levels),
        ),
        "draft_model": draft_model,
        "eagle": lambda: head("eagle"),
        "eagle, tree": lambda: head("eagle", TREE, levels),
        "eagle2": lambda: head("eagle", DynamicShape(3, 9)),
        "eagle3": lambda: head("eagle3"),
        "mtp": lambda: head("mtp"),
        "mtp, modules": modules,
        "medusa": medusa,
    }


KINDS = (
    *("ngram", "early_exit", "early_exit, tree", "draft_model", "eagle", "eagle, tree", "eagle2", "eagle3", "mtp"),
    *("mtp, modules", "medusa"),
)


def catch_up(kind: str, accepted: int) -> float:
    """Rows that the pass after a step of `accepted` drafts feeds beside the pending token's."""
    if kind == "draft_model":
        return float(accepted == DEPTH)
    return float(accepted) if kind in ("eagle", "eagle2", "eagle3", "mtp") else 0.0


@pytest.mark.parametrize("name", KINDS)
def test_predicted_passes_are_those_the_engine_counts(name: str, target: Decoder, weights: Weights) -> None:
    """One request: every step to rounding. Two at once, each at another length: the mean of a step to 1 %."""
    drafter, shape = drafters(target, weights)[name]()
    texts = prompts(TARGET, (9, 21))
    trace = decode(target, [make_request(texts[0], max_tokens=OUTPUT)], drafter, depth=DEPTH)
    accepted_before, produced, checked = 0, 1, 0
    for step, context in enumerate(trace.context_len.tolist()):
        if produced + DEPTH + 1 <= OUTPUT and name != "ngram":
            passes = draft_passes(
                *(shape, TARGET, 1, context, DEPTH), weight_dtype="fp64", catch_up=catch_up(shape.kind, accepted_before)
            )
            total = sum((one.total for one in passes), ZERO)
            assert trace.draft_flops[step] == pytest.approx(total.flops, rel=1e-12), step
            assert trace.draft_bytes[step] == pytest.approx(total.bytes, rel=1e-12), step
            checked += 1
        accepted_before = int(trace.num_accepted[step])
        produced += int(trace.num_committed[step])
    if name == "ngram":
        assert not trace.draft_flops.any()
        assert draft_passes(shape, TARGET, 1, 50, DEPTH, weight_dtype="fp64") == ()
        return
    assert checked > 5
    if name == "draft_model":
        assert (trace.num_accepted == DEPTH).any(), "no draft was accepted whole: nothing was caught up"

    pair = [make_request(text, f"r{i}", max_tokens=OUTPUT) for i, text in enumerate(texts)]
    both = decode(target, pair, drafters(target, weights)[name]()[0], batch_size=2, depth=DEPTH)
    first = np.flatnonzero(both.in_window)[1:6]
    rows = [np.flatnonzero(both.row_step == step) for step in first]
    before = [np.flatnonzero(both.row_step == step - 1) for step in first]
    counted = predicted = ZERO
    for step, now, last in zip(first, rows, before, strict=True):
        rest = float(np.mean([catch_up(shape.kind, int(a)) for a in both.num_accepted[last]]))
        passes = draft_passes(
            *(shape, TARGET, 2, float(both.context_len[now].mean()), DEPTH), weight_dtype="fp64", catch_up=rest
        )
        predicted += sum((one.total for one in passes), ZERO)
        counted += type(ZERO)(float(both.draft_flops[step]), float(both.draft_bytes[step]))
    assert predicted.flops == pytest.approx(counted.flops, rel=0.01)
    assert predicted.bytes == pytest.approx(counted.bytes, rel=0.01)


HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"own_head": True},
    "medusa, shared unembedding": {},
    "eagle": {},
    "eagle, own embedding": {"own_embedding": True},
    "eagle3": {"layer": {"vocab_size": 50}},
    "eagle3, one state": {"states": (-1,), "uses_fc": False},
    "mtp": {"own_head": True},
    "mtp, modules": {"num_modules": 2, "layer": {"num_layers": 2}},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_drafters_own_weights_are_its_tensors(name: str) -> None:
    spec = head_spec(name.partition(",")[0], TARGET, **HEADS[name])
    tensors = {key: shape for key, shape in head_tensor_shapes(spec).items() if key != "draft_ids"}
    assert spec.draft_shape.own_params == sum(prod(shape) for shape in tensors.values())


def test_published_heads_have_their_published_sizes() -> None:
    """EAGLE-3 for Llama-3.1-8B: 424.7 M parameters, two maps' norms among them (facts: 850 MB in fp16). DeepSeek-V3's
    MTP module: 11.5 B beside embedding and head. GLM-5.2's: 9.95 B."""
    llama = named_shape("llama-3.1-8b")
    assert drafter_shape("eagle3", llama).own_params == pytest.approx(424.7e6, rel=1e-3)
    assert drafter_shape("mtp", named_shape("deepseek-v3")).own_params == pytest.approx(11.5e9, rel=0.015)
    assert drafter_shape("mtp", named_shape("glm-5.2")).own_params == pytest.approx(9.95e9, rel=0.005)
    assert drafter_shape("draft_model", llama, model="llama-3.2-1b").own_params == 1_235_814_400
    assert drafter_shape("early_exit", llama, num_layers=4).own_params == 0


def test_index_share_of_draft_steps() -> None:
    """The first pass runs the MTP layer's indexer, the others reuse its choice."""
    spec = named_shape("glm-5.2")
    shared = drafter_shape("mtp", spec)
    alone = drafter_shape("mtp", spec, index_share=False)
    first, *rest = draft_passes(shared, spec, 1, 1_000_000, 5, weight_dtype="bf16")
    assert first.indexer.flops > 0
    assert all(one.indexer.flops == 0 and one.indexer.bytes == 0 for one in rest)
    assert all(one.attention.flops == pytest.approx(first.attention.flops) for one in rest)
    whole = draft_passes(alone, spec, 1, 1_000_000, 5, weight_dtype="bf16")
    assert all(one.indexer.flops == pytest.approx(first.indexer.flops, rel=1e-4) for one in whole)
    assert rest[0].kv_write.bytes < first.kv_write.bytes


def test_drafters_of_routed_targets() -> None:
    deepseek = named_shape("deepseek-v3")
    eagle, mtp = drafter_shape("eagle3", deepseek), drafter_shape("mtp", deepseek)
    assert eagle.layer is not None
    assert mtp.layer is not None
    assert (eagle.layer.moe, eagle.layer.mla) == (None, None)
    assert mtp.layer.moe is not None
    assert mtp.layer.moe.is_moe(0)
    passes = draft_passes(mtp, deepseek, 8, 4096, 3, weight_dtype="fp8,head=bf16")
    assert len(passes) == 3
    assert all(one.experts.flops == 2 * 8 * 8 * 3 * 7168 * 2048 for one in passes)
    for name in ("mixtral-8x7b", "gpt-oss-120b", "deepseek-v4-pro", "glm-5.2", "qwen3-30b-a3b"):
        target = named_shape(name)
        for kind in ("eagle", "eagle2", "eagle3", "medusa", "mtp"):
            found = draft_passes(drafter_shape(kind, target), target, 4, 1000, 4, weight_dtype="bf16")
            assert len(found) == (1 if kind == "medusa" else 4)
            assert all(one.flops > 0 and one.bytes > 0 for one in found)


def test_passes_by_shape() -> None:
    llama = named_shape("llama-3.1-8b")
    for kind in DRAFT_KINDS:
        fields: dict[str, Any] = {"early_exit": {"num_layers": 4}, "draft_model": {"model": "llama-3.2-1b"}}.get(
            kind, {}
        )
        shape = drafter_shape(kind, llama, **fields)
        assert draft_passes(shape, llama, 4, 100, 0, weight_dtype="bf16") == ()
        assert draft_passes(shape, llama, 0, 100, 3, weight_dtype="bf16") == ()
        shallow, deep = (
            sum(p.bytes for p in draft_passes(shape, llama, 4, 100, d, weight_dtype="bf16")) for d in (2, 4)
        )
        assert deep >= shallow
        if kind in ("early_exit", "draft_model", "eagle", "eagle2", "eagle3", "mtp"):
            assert deep > shallow
    model = drafter_shape("draft_model", llama, model="llama-3.2-1b", dtype="int4-g128")
    assert model.layer is not None
    (one,) = draft_passes(model, llama, 2, 100, 1, weight_dtype="bf16", catch_up=1.0)
    assert one == forward_cost(model.layer, [2, 2], [99, 99], weight_dtype="int4-g128", head_tokens=2)
    wide = draft_passes(drafter_shape("eagle2", llama, top_k=8), llama, 2, 100, 3, weight_dtype="bf16")
    assert [round(p.head.flops / (2 * llama.num_head_params)) for p in wide] == [2, 16, 16]


def test_a_pass_of_each_head_by_hand() -> None:
    """Llama-3.1-8B's size: linear FLOPs a row, and the weights that a pass reads, of first and recycled passes."""
    llama = named_shape("llama-3.1-8b")
    hidden, vocab, layer = 4096, 128256, llama.num_layer_linear_params
    wide = hidden * (32 + 16) * 128
    by_hand = {
        "eagle": ((layer + 2 * hidden**2, vocab), (layer + 2 * hidden**2, vocab)),
        "mtp": ((layer + 2 * hidden**2, vocab), (layer + 2 * hidden**2, vocab)),
        "eagle3": ((layer + wide + 3 * hidden**2, 32000), (layer + wide, 32000)),
        "medusa": ((5 * hidden**2, 5 * vocab),),
    }
    for kind, wanted in by_hand.items():
        passes = draft_passes(drafter_shape(kind, llama), llama, 2, 100, len(wanted), weight_dtype="bf16")
        for one, (params, head) in zip(passes, wanted, strict=True):
            assert one.linear.flops == 2 * 2 * params, kind
            assert one.head.flops == 2 * 2 * head * hidden, kind
            assert 0 <= one.linear.bytes - 2 * params < 1e6, kind  # a few rows of activations
            assert 2 * head * hidden <= one.head.bytes < 2.02 * head * hidden, kind


def test_catch_up_rows() -> None:
    rates = (0.8, 0.5, 0.25)
    llama = named_shape("llama-3.1-8b")
    assert catch_up_rows(drafter_shape("eagle", llama), rates, 3) == pytest.approx(0.8 + 0.4 + 0.1)
    assert catch_up_rows(drafter_shape("eagle", llama), rates, 4) == pytest.approx(1.3 + 0.025)
    assert catch_up_rows(drafter_shape("draft_model", llama, model="llama-3.2-1b"), rates, 3) == pytest.approx(0.1)
    for shape in (DraftShape("ngram"), drafter_shape("medusa", llama), DraftShape("early_exit", num_layers=3)):
        assert catch_up_rows(shape, rates, 3) == 0
    assert catch_up_rows(drafter_shape("eagle", llama), (), 3) == 0


def test_wrong_shapes_are_refused() -> None:
    llama = named_shape("llama-3.1-8b")
    with pytest.raises(InputError, match="unknown drafter kind") as caught:
        drafter_shape("eagel", llama)
    assert "eagle3" in str(caught.value.remedy)
    for kind, words in (("eagle", "layers"), ("draft_model", "layers"), ("early_exit", "number of layers")):
        with pytest.raises(InputError, match=words):
            DraftShape(kind)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="negative"):
        draft_passes(DraftShape("ngram"), llama, 1, 10, -1, weight_dtype="bf16")
    with pytest.raises(InputError, match="shape"):
        drafter_shape("draft_model", llama, model="llama-9")
