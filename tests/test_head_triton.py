"""Heads beside a target on backend triton (Triton's interpreter without a GPU): its states, and the same drafts."""

from __future__ import annotations

import pytest
import torch
from engine_tools import decode, make_request, outputs, prompts, wide_weights
from head_world import head_spec, head_weights, make_head, tiny_target_spec
from test_triton_backend import DEVICE, make_decoder

from specbench.engine.drafters.head import HeadDrafter, MedusaDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.models.decoder import FINAL, Decoder
from specbench.engine.sampling import SamplingParams

TARGET = tiny_target_spec(num_layers=2)
WEIGHTS = wide_weights(TARGET, seed=5, gain=2.0)
FORK = StaticTree.of([[0], [1], [0, 0]])


def both() -> tuple[Decoder, Decoder]:
    return make_decoder(TARGET, WEIGHTS, max_context=48), make_decoder(TARGET, WEIGHTS, backend="torch", max_context=48)


def test_the_states_are_those_of_backend_torch() -> None:
    """Widths in turn, as the drafters of a sweep ask for them, over passes of two sizes."""
    triton, reference = both()
    for capture in ((FINAL,), (0, 1, 2), (FINAL,)):
        for count in (5, 9):
            text = prompts(TARGET, (count,))[0]
            found = triton.prefill_states(text, 0, capture)[1]
            expected = reference.prefill_states(text, 0, capture)[1]
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
            triton.kv.close(0)
            reference.kv.close(0)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "medusa"])
def test_outputs_are_those_of_backend_torch(kind: str) -> None:
    """Sampled, so that every step's q counts: a tree without replacement, two requests of unlike lengths."""
    spec = head_spec(kind, TARGET)
    weights = head_weights(spec)
    params = SamplingParams(temperature=0.9, seed=4)
    found = []
    for target in both():
        head = make_head(spec, weights, target, max_context=48, device=DEVICE)
        drafter = (MedusaDrafter if kind == "medusa" else HeadDrafter)(head, FORK, "without_replacement")
        requests = [
            make_request(text, f"r{i}", max_tokens=4, params=params) for i, text in enumerate(prompts(TARGET, (3, 7)))
        ]
        found.append(outputs(decode(target, requests, drafter, batch_size=2, depth=2)))
    assert found[0] == found[1]
