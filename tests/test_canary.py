"""Drafting with the target itself accepts everything; a slip of position, state or cache is caught and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_tools import accepted_share, decode, greedy_from_scratch, make_decoder, make_request, prompts, wide_weights
from head_world import head_spec, tiny_target_spec

from specbench.engine.drafters.head import HeadDrafter, MedusaDrafter
from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.canary import CanaryError, TwinHead
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest, Request
from specbench.engine.trace import Trace

FORK = StaticTree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])
TARGET = tiny_target_spec()
WEIGHTS = wide_weights(TARGET, seed=5, gain=2.0)
KINDS = ("eagle", "eagle3", "mtp", "medusa")


def cache(spec: Any, target: Decoder, slots: int, context: int = 96) -> PagedKVCache:
    return PagedKVCache(
        num_layers=max(1, spec.num_layers),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_slots=slots,
        max_context=context,
        dtype=DTYPES[target.dtype],
    )


def twin(kind: str, target: Decoder, slots: int = 3) -> TwinHead:
    spec = head_spec(kind, TARGET)
    return TwinHead(spec, target, kv=cache(spec.layer, target, slots), own_kv=cache(TARGET, target, slots, 97), rows=96)


def drafter_of(kind: str, head: TwinHead, tree: StaticTree | None) -> HeadDrafter | MedusaDrafter:
    return MedusaDrafter(head, tree) if kind == "medusa" else HeadDrafter(head, tree)


def requests(output: int = 15) -> list[Request]:
    scratch = make_decoder(TARGET, WEIGHTS, backend="torch", max_rows=80)
    return [
        make_request(text, f"r{i}", max_tokens=output, reference=greedy_from_scratch(scratch, text, output))
        for i, text in enumerate(prompts(TARGET, (6, 1, 2, 19)))
    ]


def run(kind: str, tree: StaticTree | None, backend: str = "cpu") -> Trace:
    target = make_decoder(TARGET, WEIGHTS, backend=backend)
    drafter = drafter_of(kind, twin(kind, target), tree)
    return decode(target, requests(), drafter, batch_size=3, depth=3)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("tree", [None, FORK], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_accepted(kind: str, tree: StaticTree | None, backend: str) -> None:
    trace = run(kind, tree, backend)
    assert (trace.num_accepted == trace.draft_depth).all()
    assert trace.num_accepted.sum() > 30
    if tree is None:
        assert accepted_share(trace) == 1.0


def shifted(states: torch.Tensor) -> torch.Tensor:
    return torch.cat([states[:1], states[:-1]])


def sabotage_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the token before: the commonest slip."""
    commit = HeadDrafter.commit

    def slipped(self: HeadDrafter, active: ActiveRequest, *args: Any) -> None:
        assert active.states is not None
        active.states = shifted(active.states)
        commit(self, active, *args)

    monkeypatch.setattr(HeadDrafter, "commit", slipped)


def sabotage_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's states, one late."""
    start = HeadDrafter.start

    def slipped(self: HeadDrafter, active: ActiveRequest) -> None:
        assert active.states is not None
        active.states = shifted(active.states)
        start(self, active)

    monkeypatch.setattr(HeadDrafter, "start", slipped)


def sabotage_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of the tokens instead of the states'."""
    forward = TwinHead.forward

    def slipped(self: TwinHead, batch: ForwardBatch, states: torch.Tensor, **options: Any) -> Any:
        return forward(self, replace(batch, positions=batch.positions + 1), states, **options)

    monkeypatch.setattr(TwinHead, "forward", slipped)


def sabotage_fed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node of a level gets the first node's state."""
    forward = TwinHead.forward

    def slipped(self: TwinHead, batch: ForwardBatch, states: torch.Tensor, **options: Any) -> Any:
        if options.get("recycled"):
            states = states[:1].expand(len(states), -1)
        return forward(self, batch, states, **options)

    monkeypatch.setattr(TwinHead, "forward", slipped)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (sabotage_states, "a state of the target that is not its own"),
        (sabotage_prompt, "a state of the target that is not its own"),
        (sabotage_positions, "position: a pair behind"),
        (sabotage_fed_back, "a state fed back that is not its own"),
    ],
)
def test_a_slip_is_named(
    kind: str, sabotage: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(CanaryError, match=words):
        run(kind, FORK)


def test_medusas_state_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = MedusaDrafter.commit

    def slipped(self: MedusaDrafter, active: ActiveRequest, *args: Any) -> None:
        assert active.states is not None
        before = self._state[active.slot]
        commit(self, active, *args)
        self._state[active.slot] = before

    monkeypatch.setattr(MedusaDrafter, "commit", slipped)
    with pytest.raises(CanaryError, match="not the last token's"):
        run("medusa", None)


def run_modules(batch_size: int = 3, backend: str = "cpu") -> Trace:
    target = make_decoder(TARGET, WEIGHTS, backend=backend)
    spec = head_spec("mtp", TARGET, num_modules=3, layer={"num_layers": 3})
    head = TwinHead(spec, target, kv=cache(spec.layer, target, 3), own_kv=cache(TARGET, target, 3, 97), rows=96)
    return decode(target, requests(), ModulesDrafter(head), batch_size=batch_size, depth=3)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_everything_is_accepted_of_several_modules(backend: str) -> None:
    trace = run_modules(backend=backend)
    assert (trace.num_accepted == trace.draft_depth).all()
    assert trace.draft_depth.max() == 3
    assert accepted_share(trace) == 1.0


def sabotage_module_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second module is handed the target's states as the first one was."""
    run_pass, given = ModulesDrafter._run, {}

    def slipped(self: ModulesDrafter, tokens: Any, slots: Any, module: int, states: torch.Tensor) -> Any:
        given[module] = states
        use = given[0][: len(states)] if module == 1 and len(given[0]) >= len(states) else states
        return run_pass(self, tokens, slots, module, use)

    monkeypatch.setattr(ModulesDrafter, "_run", slipped)


def sabotage_module_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's waiting states, one late."""
    keep = ModulesDrafter._keep

    def slipped(self: ModulesDrafter, slot: int, module: int, left: torch.Tensor, num_true: int) -> torch.Tensor:
        return keep(self, slot, module, shifted(left) if module == 1 else left, num_true)

    monkeypatch.setattr(ModulesDrafter, "_keep", slipped)


def sabotage_module_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third module's place is taken by the second."""
    forward = TwinHead.forward

    def slipped(self: TwinHead, batch: ForwardBatch, states: torch.Tensor, *, module: int = 0, **options: Any) -> Any:
        return forward(self, batch, states, module=min(module, 1), **options)

    monkeypatch.setattr(TwinHead, "forward", slipped)


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (sabotage_module_states, "a state fed back that is not its own"),
        (sabotage_module_order, "a state fed back that is not its own"),
        (sabotage_module_number, "a state fed back that is not its own"),
        (sabotage_positions, "position: a pair behind"),
    ],
)
def test_a_slip_between_modules_is_named(
    sabotage: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(CanaryError, match=words):
        run_modules()


def test_a_cache_that_keeps_a_guess_is_seen_in_the_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair too many kept after each verdict (fault 39): the next states no longer fit their positions."""
    commit = HeadDrafter.commit

    def slipped(self: HeadDrafter, active: ActiveRequest, *args: Any) -> None:
        draft = self._drafts.get(active.slot)
        commit(self, active, *args)
        if draft is not None and draft.num_inputs > 1:
            self._head.kv.truncate(active.slot, int(self._head.kv.lengths[active.slot]) - 1)

    monkeypatch.setattr(HeadDrafter, "commit", slipped)
    with pytest.raises(CanaryError):
        run("eagle", None)


def test_the_twin_leaves_the_targets_own_cache_alone() -> None:
    target = make_decoder(TARGET, WEIGHTS)
    other = target.twin(cache(TARGET, target, 1), target.limits)
    assert other.kv is not target.kv
    assert other.weights is target.weights
    assert target.ops is not other.ops


def test_sequences_of_slots_are_told_apart() -> None:
    """Refilled slots: the twin's knowledge of an earlier request does not leak into the next one's check."""
    target = make_decoder(TARGET, WEIGHTS)
    drafter = HeadDrafter(twin("eagle", target, 1))
    some: Sequence[Request] = requests(8)
    trace = decode(target, some, drafter, batch_size=1, depth=2)
    assert (trace.num_accepted == trace.draft_depth).all()
