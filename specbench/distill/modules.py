"""Draft heads as they are trained: the formulas of engine/heads/spec.py over whole conversations, steps and all.

`steps` gives for each draft step the logits and the state of every row; step j of the row with start s predicts token
s + j + 2, from the true token s + j + 1 and, for j >= 1, the head's own states. Parameters carry canonical names, so
what is trained is what is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from specbench.distill.corpus import Batch
from specbench.distill.layer import (
    Memory,
    Rope,
    Rows,
    Tensors,
    attend,
    every_position,
    linear,
    mlp,
    plain_layer,
    project,
    rms_norm,
)
from specbench.engine.heads.spec import HeadSpec
from specbench.roofline.shapes import ModelSpec

MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Step:
    """What a draft step leaves: its rows, their logits [R, V_draft], and the state [R, H] that is recycled (None: none
    is). `final` says that the state stands for the target's state after its final norm."""

    rows: Rows
    logits: torch.Tensor
    state: torch.Tensor | None


def all_rows(batch: Batch) -> Rows:
    """Every start in the answers whose first drafted token, s + 2, is known: from the prompt's last token on."""
    starts, conversations = [], []
    for b in range(batch.num_conversations):
        own = torch.arange(int(batch.prompt_lens[b]) - 1, batch.length(b) - 2)
        starts.append(own)
        conversations.append(torch.full_like(own, b))
    return Rows.of(torch.cat(conversations), torch.cat(starts), batch.num_conversations)


def goes_on(rows: Rows, batch: Batch, step: int, follow: torch.Tensor | None = None) -> torch.Tensor:
    """bool[R]: whether the token that `step` predicts, s + step + 2, is known; for step 1 also `follow`."""
    lengths = torch.tensor([batch.length(b) for b in range(batch.num_conversations)])
    known = rows.start + step + 2 < lengths[rows.conversation]
    return known & follow if step == 1 and follow is not None else known


def places(rows: Rows, batch: Batch, ahead: int) -> torch.Tensor:
    """int64[R]: where in the batch's rows position s + ahead of each row's conversation is."""
    return torch.from_numpy(batch.offsets)[rows.conversation] + rows.start + ahead


class HeadModule:
    """A head of one layer (or Medusa's blocks). `tensors` has exactly head_tensor_shapes(spec), without `draft_ids`;
    `embedding` [V, H] and `unembedding` [V_draft, H] are the target's, and are not trained."""

    def __init__(
        self, spec: HeadSpec, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, unembedding: torch.Tensor
    ) -> None:
        if spec.kind != "medusa":
            assert spec.layer.num_layers == spec.num_modules == 1, "heads of one layer are trained"
        assert not spec.own_embedding, "the target's embedding is used"
        self.spec, self.tensors = spec, tensors
        self.embedding, self.unembedding = embedding, unembedding
        dtype = next(iter(tensors.values())).dtype
        self.rope = Rope(spec.layer, min(MAX_POSITIONS, spec.layer.max_position_embeddings), dtype)

    def steps(self, batch: Batch, rows: Rows, depth: int, follow: torch.Tensor | None = None) -> Iterator[Step]:
        """Steps 0 .. depth - 1 (Medusa: of its heads), each with the rows whose next token is known; of `rows`, those
        that bool[R] `follow` says go on beyond step 0."""
        if self.spec.kind == "medusa":
            yield from self._medusa(batch, rows, depth, follow)
            return
        read = self._true_rows(batch)
        x, attention_in = self._enter(batch.states[read], self._embed(batch.tokens[read + 1]), recycled=False)
        memory = self._memory(batch, attention_in)
        # One row less a conversation: the last token has no successor.
        own = places(rows, batch, 0) - rows.conversation
        step_in, step_x, state = attention_in[own], x[own], None
        for step in range(depth):
            if step:
                mask = goes_on(rows, batch, step, follow)
                assert state is not None
                rows, state = rows.keep(mask), state[mask]
                memory.keep(mask)
                embedded = self._embed(batch.tokens[places(rows, batch, step + 1)])
                step_x, step_in = self._enter(state, embedded, recycled=True)
                key, value = project(step_in, self.tensors, "layers.0", "kv", *self._at(rows.start + step))
                memory.own_keys.append(key)
                memory.own_values.append(value)
            x = self._layer(step_x, step_in, memory, rows, rows.start + step)
            logits, state = self._leave(x)
            yield Step(rows, logits, state)

    def _true_rows(self, batch: Batch) -> torch.Tensor:
        """int64: the batch's rows that have a next token."""
        lasts = torch.zeros(len(batch.tokens), dtype=torch.bool)
        lasts[torch.from_numpy(batch.offsets[1:] - 1)] = True
        return (~lasts).nonzero().flatten()

    def _memory(self, batch: Batch, attention_in: torch.Tensor) -> Memory:
        offsets = [int(offset) - b for b, offset in enumerate(batch.offsets)]
        counts = torch.tensor([batch.length(b) - 1 for b in range(batch.num_conversations)])
        positions = torch.cat([torch.arange(int(count)) for count in counts])
        keys, values = project(attention_in, self.tensors, "layers.0", "kv", *self._at(positions))
        return Memory(offsets, keys, values)

    def _at(self, positions: torch.Tensor) -> tuple[ModelSpec, Rope, torch.Tensor]:
        return self.spec.layer, self.rope, positions

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.embedding)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.spec.layer.rms_norm_eps)

    def _enter(
        self, state: torch.Tensor, embedded: torch.Tensor, *, recycled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the residual [R, H], what the layer's attention reads) of pairs (state, embedding)."""
        spec = self.spec
        if spec.kind == "eagle":
            x = linear(torch.cat([embedded, state], dim=-1), self.tensors, "fc")
            return x, x
        if spec.kind == "mtp":
            at = "modules.0"
            pair = torch.cat([self._norm(f"{at}.enorm", embedded), self._norm(f"{at}.hnorm", state)], dim=-1)
            x = linear(pair, self.tensors, f"{at}.eh_proj")
            return x, self._norm("layers.0.input_layernorm", x)
        if not recycled:
            state = self._eagle3_states(state)
        normed = self._norm("layers.0.hidden_norm", state)
        attention_in = torch.cat([self._norm("layers.0.input_layernorm", embedded), normed], dim=-1)
        return (normed if spec.norm_before_residual else state), attention_in

    def _eagle3_states(self, state: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if spec.norm_before_fc:
            state = self._norm("input_norm", state)
        if spec.fc_norms:
            parts = torch.split(state, spec.target_hidden_size, dim=-1)
            state = torch.cat([self._norm(f"fc_norms.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return linear(state, self.tensors, "fc") if spec.uses_fc else state

    def _layer(
        self, x: torch.Tensor, attention_in: torch.Tensor, memory: Memory, rows: Rows, positions: torch.Tensor
    ) -> torch.Tensor:
        at = "layers.0"
        (query,) = project(attention_in, self.tensors, at, "q", *self._at(positions))
        x = x + linear(attend(query, memory, rows), self.tensors, f"{at}.self_attn.o_proj")
        return x + mlp(self._norm(f"{at}.post_attention_layernorm", x), self.tensors, at)

    def _leave(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, the state that is recycled) of the layer's output."""
        spec = self.spec
        if spec.kind == "eagle":
            return self._unembed(x, "lm_head.weight"), x
        name = "modules.0." if spec.kind == "mtp" else ""
        normed = self._norm(f"{name}norm", x)
        return self._unembed(normed, f"{name}lm_head.weight"), normed if spec.recycle == "post_norm" else x

    def _unembed(self, x: torch.Tensor, own: str) -> torch.Tensor:
        return functional.linear(x, self.tensors[own] if self.spec.own_head else self.unembedding)

    def _medusa(self, batch: Batch, rows: Rows, depth: int, follow: torch.Tensor | None) -> Iterator[Step]:
        for head in range(min(depth, self.spec.num_modules)):
            rows = rows.keep(goes_on(rows, batch, head, follow))
            h = batch.final[places(rows, batch, 0)]
            for block in range(self.spec.num_blocks):
                h = h + functional.silu(linear(h, self.tensors, f"heads.{head}.blocks.{block}"))
            yield Step(rows, self._unembed(h, f"heads.{head}.lm_head.weight"), None)


class DraftModelModule:
    """A small decoder over the target's tokens. `tensors` are those of models/loader.tensor_shapes(spec) but the
    embedding, which is the target's, tied: `embedding` [V, H] for all tokens, `unembedding` rows for the loss."""

    def __init__(
        self, spec: ModelSpec, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, unembedding: torch.Tensor
    ) -> None:
        assert spec.tie_word_embeddings, "the draft model shares the target's embedding"
        self.spec, self.tensors = spec, tensors
        self.embedding, self.unembedding = embedding, unembedding
        dtype = next(iter(tensors.values())).dtype
        self.rope = Rope(spec, min(MAX_POSITIONS, spec.max_position_embeddings), dtype)

    def steps(self, batch: Batch, rows: Rows, depth: int, follow: torch.Tensor | None = None) -> Iterator[Step]:
        """As a head's: step j of start s is what the model says after the tokens up to s + j + 1."""
        every = every_position([batch.length(b) for b in range(batch.num_conversations)])
        x = functional.embedding(batch.tokens, self.embedding)
        for index in range(self.spec.num_layers):
            x = plain_layer(x, self.tensors, f"layers.{index}", self.spec, self.rope, every, batch.offsets.tolist())
        for step in range(depth):
            rows = rows.keep(goes_on(rows, batch, step, follow))
            last = x[places(rows, batch, step + 1)]
            last = rms_norm(last, self.tensors["norm.weight"], self.spec.rms_norm_eps)
            yield Step(rows, functional.linear(last, self.unembedding), None)


Module = HeadModule | DraftModelModule


def trainable(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of `tensors` that gradients flow to."""
    return {name: tensor.clone().requires_grad_(True) for name, tensor in tensors.items()}
