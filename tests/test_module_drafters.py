"""Drafts of several MTP modules against the literal restatement, in every step of real generations; outputs as AR's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from engine_tools import (
    Weights,
    decode,
    greedy_from_scratch,
    make_decoder,
    make_request,
    outputs,
    prompts,
    wide_weights,
)
from head_world import (
    LiteralTarget,
    head_spec,
    head_weights,
    literal_modules,
    literal_path,
    make_head,
    tiny_target_spec,
)

from specbench.engine.drafters.adaptive import AdaptiveRules
from specbench.engine.drafters.head import HeadDrafter
from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.decoder import Decoder
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams
from specbench.engine.trace import Trace
from specbench.engine.verify import Proposal
from specbench.errors import InputError

OUTPUT = 18
TARGET = tiny_target_spec()


def modules_spec(count: int, layers: int = 1, **changes: Any) -> HeadSpec:
    layer = {"num_layers": count * layers, **changes.pop("layer", {})}
    return head_spec("mtp", TARGET, num_modules=count, layer=layer, **changes)


VARIANTS: dict[str, HeadSpec] = {
    "three": modules_spec(3),
    "three, before the norm, q/k norms": modules_spec(3, recycle="pre_norm", layer={"qk_norm": True}),
    "two of two layers, biases, reduced vocabulary": modules_spec(2, 2, layer={"vocab_size": 13, "qkv_bias": True}),
    "four, own embedding and heads": modules_spec(4, own_embedding=True, own_head=True),
}


@cache
def target_weights() -> Weights:
    return wide_weights(TARGET, seed=5, gain=2.0)


@cache
def literal_target() -> LiteralTarget:
    return LiteralTarget(TARGET, target_weights())


@cache
def variant_weights(name: str) -> Weights:
    return head_weights(VARIANTS[name])


@cache
def truth(prompt: tuple[int, ...], length: int = OUTPUT) -> tuple[int, ...]:
    scratch = make_decoder(TARGET, target_weights(), backend="torch", max_rows=80)
    return greedy_from_scratch(scratch, prompt, length)


@cache
def literal_law(name: str, tokens: tuple[int, ...], drafted: tuple[int, ...]) -> torch.Tensor:
    """The law [V_target] of the token after `drafted`: softmax at temperature 1."""
    spec, weights = VARIANTS[name], variant_weights(name)
    logits = literal_modules(spec, weights, literal_target(), tokens, drafted)
    law = torch.zeros(spec.target_vocab_size, dtype=torch.float64)
    law[weights["draft_ids"] if spec.reduced_vocabulary else slice(None)] = logits.softmax(dim=-1)
    return law


def the_drafter(name: str, target: Decoder, depth: int | None = None, **options: Any) -> ModulesDrafter:
    return ModulesDrafter(make_head(VARIANTS[name], variant_weights(name), target, **options), depth)


class Checked(ModulesDrafter):
    """Every draft's laws are held against the restatement; `depths_of` may change the depths of a step."""

    name: str
    checked = 0
    drafted_in: list[int]
    depths_of: Callable[[int, list[int]], list[int]] = staticmethod(lambda step, depths: depths)

    @classmethod
    def of(cls, name: str, target: Decoder, depth: int | None = None, **options: Any) -> Checked:
        drafter = cls(make_head(VARIANTS[name], variant_weights(name), target, **options), depth)
        drafter.name, drafter.drafted_in = name, []
        return drafter

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        depths = self.depths_of(len(self.drafted_in), list(depths))
        proposals = super().propose(active, depths)
        self.drafted_in.append(sum(len(proposal.tree) for proposal in proposals))
        for one, proposal in zip(active, proposals, strict=True):
            committed = (*one.request.prompt_ids, *one.tokens)
            drafted = tuple(proposal.tree.tokens.tolist())
            for level, law in enumerate(proposal.q if proposal.q is not None else ()):
                expected = literal_law(self.name, committed, drafted[:level])
                torch.testing.assert_close(law, expected, rtol=1e-9, atol=1e-12)
                self.checked += 1
        return proposals


TEXTS = prompts(TARGET, (6, 1, 2, 19))
DRAWN = SamplingParams(temperature=1.0, seed=7)


def run(drafter: Any, target: Decoder, params: SamplingParams = DRAWN, **options: Any) -> Trace:
    requests = [make_request(text, f"r{i}", max_tokens=OUTPUT, params=params) for i, text in enumerate(TEXTS)]
    return decode(target, requests, drafter, **{"batch_size": 3, "depth": 4, **options})


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_level_is_drawn_from_its_modules_literal_law(name: str, backend: str) -> None:
    """Ragged batches, prompts of one token, refilled slots, rejected drafts, depths cut near the end."""
    target = make_decoder(TARGET, target_weights(), backend=backend)
    drafter = Checked.of(name, target)
    trace = run(drafter, target)
    deepest = VARIANTS[name].num_modules
    assert trace.draft_depth.max() == deepest
    assert set(trace.draft_depth.tolist()) >= {0, 1, deepest}
    assert trace.num_accepted.sum() > 0
    assert (trace.num_accepted < trace.draft_depth).sum() > 20
    assert drafter.checked == trace.num_draft.sum()


def test_one_module_says_what_a_head_that_feeds_itself_says_first() -> None:
    """The restatement of modules over the whole text, against the one of a head row by row."""
    spec = modules_spec(1, recycle="post_norm")
    weights = head_weights(spec)
    for text in TEXTS[1:]:
        tokens = (*text, 5, 3)
        whole = literal_modules(spec, weights, literal_target(), tokens, ())
        torch.testing.assert_close(whole, literal_path(spec, weights, literal_target(), tokens, ()))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_greedy_outputs_are_those_of_ar(backend: str) -> None:
    target = make_decoder(TARGET, target_weights(), backend=backend)
    for batch_size in (1, 3):
        trace = run(the_drafter("three", target), target, SamplingParams(), batch_size=batch_size)
        assert outputs(trace) == {f"r{i}": truth(text) for i, text in enumerate(TEXTS)}


def test_a_request_drafts_the_same_in_every_batch_and_order() -> None:
    target = make_decoder(TARGET, target_weights())
    params = SamplingParams(temperature=0.8, seed=3)
    requests = [make_request(text, f"r{i}", max_tokens=9, params=params) for i, text in enumerate(TEXTS[:3])]
    alone: dict[str, tuple[int, ...]] = {}
    for request in requests:
        alone |= outputs(decode(target, [request], the_drafter("three", target)))
    for order in itertools.permutations(requests):
        assert outputs(decode(target, order, the_drafter("three", target), batch_size=3)) == alone


@pytest.mark.parametrize("max_rows", [64, 7])
def test_levels_left_out_for_a_while_lose_nothing(max_rows: int) -> None:
    """Depths as a throttle would have them: what a module has not read waits, and is read in passes of max_rows."""
    pattern = [0, 0, 0, 0, 1, 1, 2, 1, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3]
    target = make_decoder(TARGET, target_weights())
    drafter = Checked.of("three", target, max_rows=max_rows)
    drafter.depths_of = lambda step, depths: [min(d, pattern[step % len(pattern)]) for d in depths]
    decode(target, [make_request(TEXTS[0], max_tokens=60, params=DRAWN)], drafter, depth=3)
    assert drafter.checked > 20


def test_paths_that_end_early_by_entropy_draft_from_the_same_laws() -> None:
    target = make_decoder(TARGET, target_weights())
    drafter = Checked.of("three", target)
    drafter.adapting(AdaptiveRules.of({"stop_below": 0.3, "stop_gamma": 0.2}))
    trace = run(drafter, target)
    assert {0, 1, 3} <= set(trace.draft_depth.tolist())


def test_modules_beyond_the_depth_are_not_run() -> None:
    target = make_decoder(TARGET, target_weights())
    drafter = Checked.of("four, own embedding and heads", target, 2)
    trace = run(drafter, target, depth=2)
    assert trace.draft_depth.max() == 2
    assert drafter.num_nodes(9) == 2


def test_prompts_seen_before_start_from_a_copy() -> None:
    target = make_decoder(TARGET, target_weights())
    drafter = Checked.of("three", target)
    requests = [make_request(TEXTS[i], f"r{n}", max_tokens=6, params=DRAWN) for n, i in enumerate((0, 1, 0, 3, 1, 3))]
    decode(target, requests, drafter, batch_size=2, depth=3)
    assert drafter.checked > 20


def test_nothing_is_drafted_beyond_the_heads_own_context() -> None:
    short = modules_spec(3, layer={"max_position_embeddings": 12})
    target = make_decoder(TARGET, target_weights())
    drafter = ModulesDrafter(make_head(short, head_weights(short), target))
    trace = decode(target, [make_request(TEXTS[0], "r0", max_tokens=OUTPUT)], drafter, depth=3)
    assert outputs(trace) == {"r0": truth(TEXTS[0])}
    # With n tokens cached the last row of every module stands at position n - 1.
    drafted = dict(zip(trace.context_len.tolist(), trace.draft_depth.tolist(), strict=True))
    room = {cached for cached in drafted if cached < len(TEXTS[0]) + OUTPUT - 2}
    assert {drafted[cached] > 0 for cached in room if cached <= 12} == {True}
    assert {drafted[cached] > 0 for cached in room if cached > 12} == {False}


@pytest.mark.parametrize("rollback", ["index", "realloc"])
def test_the_heads_cache_may_have_any_policy(rollback: str) -> None:
    from specbench.engine.kv_cache import PagedKVCache
    from specbench.engine.models.decoder import DTYPES, DecoderLimits

    target = make_decoder(TARGET, target_weights())
    drafter = Checked.of("three", target)
    head, layer = drafter._head, VARIANTS["three"].layer
    shape = {"num_layers": 3, "num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
    kv = PagedKVCache(**shape, num_slots=4, max_context=192, dtype=DTYPES["fp64"], rollback=rollback)  # type: ignore[arg-type]
    head.rebind(kv, DecoderLimits(64, 64))  # type: ignore[union-attr]
    run(drafter, target)
    assert drafter.checked > 50
    assert kv.num_free_pages == kv.num_pages


def test_a_pass_reads_one_modules_weights_and_rows_are_those_of_the_verdict_and_of_the_drafts() -> None:
    target = make_decoder(TARGET, target_weights())
    drafter = the_drafter("three", target)
    passes: list[list[Any]] = []
    take = drafter.take_passes
    drafter.take_passes = lambda: passes.append(found := take()) or found  # type: ignore[method-assign,func-returns-value]
    trace = decode(target, [make_request(TEXTS[0], max_tokens=OUTPUT)], drafter, depth=3)
    whole = sum(t.numel() for name, t in variant_weights("three").items() if "norm" not in name)
    unembedding = TARGET.vocab_size * TARGET.hidden_size
    accepted = 0
    for step, (found, depth) in enumerate(zip(passes, trace.draft_depth.tolist(), strict=False)):
        assert len(found) == depth
        for module, one in enumerate(found):
            assert one.query_lens == (1 + accepted + min(module, one.context_lens[0] + 1 + accepted),)
            weights = 8 * (whole / 3 + unembedding)
            assert one.cost().bytes == pytest.approx(weights, rel=0.3)  # beside them: K, V and logits
        accepted = int(trace.num_accepted[step])
        if depth < 3:
            break


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_of_other_kinds_are_refused(kind: str) -> None:
    target = make_decoder(TARGET, target_weights())
    spec = head_spec(kind, TARGET)
    with pytest.raises(InputError, match="no MTP modules"):
        ModulesDrafter(make_head(spec, head_weights(spec), target))
    several = VARIANTS["three"]
    with pytest.raises(InputError, match="3 modules"):
        HeadDrafter(make_head(several, head_weights(several), target))
