"""The law of whole generations through heads, by exact enumeration: it is the target's, whatever the head says."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from coin_law import ForcedCoins, TinyLaw, Tokens, assert_volumes_are_the_law, tree_coin_paths
from engine_tools import decode, make_decoder, make_request, outputs
from head_world import (
    LiteralTarget,
    head_spec,
    head_weights,
    literal_medusa,
    literal_modules,
    literal_path,
    make_head,
)

from specbench.engine import decode as decode_module
from specbench.engine.drafters import levels as level_drafters
from specbench.engine.drafters.growth import Children
from specbench.engine.drafters.head import HeadDrafter, MedusaDrafter
from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.sampling import SamplingParams, distribution

CHAIN = StaticTree.chain(2)
FORK = StaticTree.of([[0], [1]])
TALL = StaticTree.of([[0], [1], [1, 0]])
WARM = SamplingParams(1.4, top_k=2, seed=0)
ALL = SamplingParams(1.0, seed=0)


@pytest.mark.parametrize(
    ("kind", "fields", "shape", "children", "params"),
    [
        ("eagle", {}, CHAIN, "independent", ALL),
        ("eagle3", {"states": (0, 1, 2)}, CHAIN, "independent", WARM),
        ("mtp", {}, FORK, "without_replacement", ALL),
        ("mtp", {}, TALL, "without_replacement", WARM),
        ("medusa", {}, TALL, "top", ALL),
        ("medusa", {}, FORK, "without_replacement", ALL),
        ("mtp", {"num_modules": 2, "layer": {"num_layers": 2}}, CHAIN, "independent", ALL),
    ],
    ids=["eagle", "eagle3", "mtp, fork", "mtp, tall", "medusa, best", "medusa, drawn", "mtp, two modules"],
)
def test_the_whole_engine_has_the_targets_law_through_heads(
    kind: str,
    fields: dict[str, Any],
    shape: StaticTree,
    children: Children,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All coins of a request, cut into the cells on which its output is constant: each cell's midpoint is run through
    the engine and must give the output that the definitions and the head's literal law say; the volumes must add up
    to the target's law."""
    tiny = TinyLaw(3, params)
    spec = head_spec(kind, tiny.spec, **fields)
    weights = head_weights(spec)
    literal = LiteralTarget(tiny.spec, tiny.weights)

    @cache
    def draft_law(tokens: Tokens, path: Tokens) -> np.ndarray:
        logits = literal_logits(spec, weights, literal, (*tiny.prompt, *tokens), path)
        return distribution(logits[None], [params])[0].numpy()

    length = shape.depth + 2
    paths = list(tree_coin_paths(tiny, draft_law, shape, children, length))
    assert len(paths) > 40
    assert_volumes_are_the_law(paths, tiny.output_law(length))
    ForcedCoins.paths = {str(i): path for i, path in enumerate(paths)}
    monkeypatch.setattr(decode_module, "RequestGenerator", ForcedCoins)
    monkeypatch.setattr(level_drafters, "RequestGenerator", ForcedCoins)
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16, max_rows=96)
    head = make_head(spec, weights, target, num_slots=16, max_rows=96)
    drafter: HeadDrafter | MedusaDrafter | ModulesDrafter
    if kind == "medusa":
        drafter = MedusaDrafter(head, shape, children)
    elif spec.num_modules > 1:
        drafter = ModulesDrafter(head, children=children)
    else:
        drafter = HeadDrafter(head, shape, children)
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=params) for i in range(len(paths))]
    found = outputs(decode(target, requests, drafter, batch_size=16, depth=shape.depth))
    assert {str(i): path.output for i, path in enumerate(paths)} == found


def literal_logits(
    spec: HeadSpec, weights: dict[str, torch.Tensor], target: LiteralTarget, tokens: Tokens, path: Tokens
) -> torch.Tensor:
    if spec.kind == "medusa":
        return literal_medusa(spec, weights, target, tokens, len(path))
    literal = literal_path if spec.num_modules == 1 else literal_modules
    return literal(spec, weights, target, tokens, path)
