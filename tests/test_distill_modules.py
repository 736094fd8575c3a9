"""The training modules compute what a drafter does: every step's logits against a literal drafting loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distill_tools import TINY, LiteralDrafter, random_batch, random_tensors, tiny_head
from torch.nn import functional

from specbench.distill.modules import DraftModelModule, HeadModule, Step, all_rows
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.loader import tensor_shapes

DEPTH = 4
LENGTHS, PROMPTS = [13, 7, 9], [4, 3, 2]

HEADS = {
    "eagle": tiny_head("eagle"),
    "eagle, no bias": tiny_head("eagle", fc_bias=False),
    "eagle3": tiny_head("eagle3"),
    "eagle3, norms and post-norm": tiny_head(
        "eagle3", norm_before_residual=True, fc_norms=True, recycle="post_norm", own_head=True
    ),
    "eagle3, one norm": tiny_head("eagle3", norm_before_fc=True),
    "mtp": tiny_head("mtp"),
    "mtp, pre-norm": tiny_head("mtp", recycle="pre_norm"),
    "qk norm and biases": replace(
        tiny_head("mtp"), layer=replace(tiny_head("mtp").layer, qk_norm=True, qkv_bias=True, mlp_bias=True)
    ),
}


def _target() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    shape = (TINY.vocab_size, TINY.hidden_size)
    embedding = torch.randn(shape, generator=generator, dtype=torch.float64)
    return embedding, torch.randn(shape, generator=generator, dtype=torch.float64)


def _module(spec: HeadSpec) -> tuple[HeadModule, LiteralDrafter]:
    embedding, unembedding = _target()
    tensors = random_tensors(spec)
    return HeadModule(spec, tensors, embedding, unembedding), LiteralDrafter(spec, tensors, embedding)


@pytest.mark.parametrize("name", HEADS)
def test_every_step_of_every_start_is_what_a_drafter_computes(name: str) -> None:
    """Prefill the true pairs up to a start, then draft along the true tokens: the same logits, row for row."""
    spec = HEADS[name]
    module, literal = _module(spec)
    batch = random_batch(LENGTHS, PROMPTS, spec.state_width)
    compared = 0
    found = list(module.steps(batch, all_rows(batch), DEPTH))
    assert len(found) == DEPTH
    for b, (length, prompt_len) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        first = int(batch.offsets[b])
        tokens, states = batch.tokens[first : first + length].tolist(), batch.states[first : first + length]
        literal.keys, literal.values = [], []
        for position in range(length - 1):
            out, state = literal.pair(states[position], tokens[position + 1], position, False)
            drafted = 0
            for step in range(DEPTH):
                if position < prompt_len - 1 or position + step + 2 >= length:
                    break
                if step:
                    out, state = literal.pair(state, tokens[position + step + 1], position + step, True)
                    drafted += 1
                unembedding = module.tensors.get("lm_head.weight", module.unembedding)
                rows = found[step].rows
                row = ((rows.conversation == b) & (rows.start == position)).nonzero().flatten()
                assert len(row) == 1
                torch.testing.assert_close(found[step].logits[row[0]], unembedding @ out, rtol=1e-9, atol=1e-9)
                compared += 1
            literal.forget(drafted)
    assert compared == sum(len(step.rows) for step in found) > 40


def _keys(step: Step) -> list[tuple[int, int]]:
    return list(zip(step.rows.conversation.tolist(), step.rows.start.tolist(), strict=True))


def test_rows_that_do_not_follow_stop_after_the_first_step_and_change_nothing_for_the_others() -> None:
    module, _ = _module(HEADS["eagle"])
    batch = random_batch(LENGTHS, PROMPTS, module.spec.state_width)
    rows = all_rows(batch)
    follow = torch.arange(len(rows)) % 3 != 0
    whole = list(module.steps(batch, rows, 3))
    part = list(module.steps(batch, rows, 3, follow))
    assert torch.equal(part[0].logits, whole[0].logits)
    for some, all_of_them in zip(part[1:], whole[1:], strict=True):
        where = {key: row for row, key in enumerate(_keys(all_of_them))}
        keys = _keys(some)
        assert 0 < len(keys) < len(where)
        same = all_of_them.logits[torch.tensor([where[key] for key in keys])]
        torch.testing.assert_close(some.logits, same, rtol=1e-10, atol=1e-10)


def test_medusa_heads_read_the_final_state_of_the_start() -> None:
    spec = tiny_head("medusa")
    module, _ = _module(spec)
    batch = random_batch(LENGTHS, PROMPTS, spec.state_width)
    for head, step in enumerate(module.steps(batch, all_rows(batch), 5)):
        for row in range(len(step.rows)):
            b, start = int(step.rows.conversation[row]), int(step.rows.start[row])
            h = batch.final[int(batch.offsets[b]) + start]
            block = f"heads.{head}.blocks.0"
            h = h + functional.silu(module.tensors[f"{block}.weight"] @ h + module.tensors[f"{block}.bias"])
            torch.testing.assert_close(step.logits[row], module.unembedding @ h, rtol=1e-9, atol=1e-9)
    assert head == 2


def test_draft_model_against_a_plain_decoder() -> None:
    """The layers over whole conversations, one conversation at a time, with a dense mask."""
    spec = replace(TINY, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape, dtype=torch.float64)
        if len(shape) == 1
        else torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
        for name, shape in tensor_shapes(spec).items()
        if name != "embed_tokens.weight"
    }
    embedding, _ = _target()
    module = DraftModelModule(spec, tensors, embedding, embedding)
    batch = random_batch(LENGTHS, PROMPTS, TINY.hidden_size)
    steps = list(module.steps(batch, all_rows(batch), 3))
    for b, length in enumerate(LENGTHS):
        first = int(batch.offsets[b])
        x = embedding[batch.tokens[first : first + length]]
        for index in range(spec.num_layers):
            x = _dense_layer(spec, tensors, index, x, module)
        x = functional.rms_norm(x, (spec.hidden_size,), tensors["norm.weight"], spec.rms_norm_eps)
        for number, step in enumerate(steps):
            own = step.rows.conversation == b
            want = x[step.rows.start[own] + number + 1] @ embedding.T
            torch.testing.assert_close(step.logits[own], want, rtol=1e-9, atol=1e-9)


def _dense_layer(spec, tensors, index, x, module):  # type: ignore[no-untyped-def]
    at, positions = f"layers.{index}", torch.arange(len(x))

    def norm(name, value):  # type: ignore[no-untyped-def]
        return functional.rms_norm(value, (spec.hidden_size,), tensors[f"{at}.{name}.weight"], spec.rms_norm_eps)

    h = norm("input_layernorm", x)
    q, k, v = ((h @ tensors[f"{at}.self_attn.{part}_proj.weight"].T).view(len(x), -1, spec.head_dim) for part in "qkv")
    q, k = module.rope(q, positions), module.rope(k, positions)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )[0]
    x = x + out.transpose(0, 1).reshape(len(x), -1) @ tensors[f"{at}.self_attn.o_proj.weight"].T
    h = norm("post_attention_layernorm", x)
    gate, up = h @ tensors[f"{at}.mlp.gate_proj.weight"].T, h @ tensors[f"{at}.mlp.up_proj.weight"].T
    return x + (functional.silu(gate) * up) @ tensors[f"{at}.mlp.down_proj.weight"].T
