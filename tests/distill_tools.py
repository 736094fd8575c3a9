"""Tiny targets, heads and conversations for the distiller's tests, and a literal drafting loop to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from specbench.distill.corpus import Batch, Corpus
from specbench.distill.generate import Conversation, recorded_states
from specbench.distill.layer import Rope, every_position, plain_layer, rms_norm
from specbench.distill.shards import write_shard
from specbench.distill.start import Target
from specbench.engine.heads.spec import FINAL, HeadKind, HeadSpec, head_tensor_shapes
from specbench.engine.models.loader import load_weights
from specbench.engine.models.sources import ModelSource
from specbench.engine.ops.cpu import rope_tables
from specbench.roofline.shapes import NAMED_SHAPES

TINY = NAMED_SHAPES["tiny-llama-test"]
SPEC = replace(TINY, name="tiny", num_layers=7, tie_word_embeddings=True)


def tiny_head(kind: HeadKind, **changes: object) -> HeadSpec:
    """A head of one layer (Medusa: three heads) for TINY, over its whole vocabulary unless `changes` say otherwise."""
    layer = replace(TINY, num_layers=3 if kind == "medusa" else 1, intermediate_size=48)
    options: dict[str, object] = {
        "states": (0, 1, 2) if kind == "eagle3" else (FINAL,),
        "num_modules": 3 if kind == "medusa" else 1,
        "recycle": "post_norm" if kind == "mtp" else "pre_norm",
        "fc_bias": kind == "eagle",
        **changes,
    }
    return HeadSpec(kind, "tiny", layer, TINY.hidden_size, TINY.vocab_size, **options)  # type: ignore[arg-type]


def random_tensors(spec: HeadSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Canonical tensors but draft_ids: norms around 1, weights N(0, 1 / in)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in head_tensor_shapes(spec).items():
        if name == "draft_ids":
            continue
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            tensors[name] = (1 + 0.1 * values).to(dtype)
        else:
            tensors[name] = (values / shape[-1] ** 0.5).to(dtype)
    return tensors


def random_batch(lengths: list[int], prompt_lens: list[int], width: int, seed: int = 0) -> Batch:
    """Conversations of random tokens and states, float64."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return Batch(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lens=np.array(prompt_lens, dtype=np.int64),
        tokens=torch.randint(0, TINY.vocab_size, (total,), generator=generator),
        states=torch.randn(total, width, generator=generator, dtype=torch.float64),
        final=torch.randn(total, TINY.hidden_size, generator=generator, dtype=torch.float64),
    )


class LiteralDrafter:
    """Drafts as an engine does, one pair at a time, in float64: true pairs fill a cache, drafted ones are thrown away.

    Written from the formulas of HeadSpec alone.
    """

    def __init__(self, spec: HeadSpec, tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
        self.spec, self.t, self.embedding = spec, tensors, embedding
        self.cos, self.sin = rope_tables(spec.layer, 256)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.spec.layer.rms_norm_eps) * self.t[f"{name}.weight"]

    def map(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.t[f"{name}.weight"] @ x
        return y + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else y

    def turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = len(x) // 2
        cos, sin = self.cos[position], self.sin[position]
        a, b = x[:half], x[half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    def pair(self, state: torch.Tensor, token: int, position: int, recycled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the unembedding reads, what is recycled) after one pair; K and V are appended."""
        spec, e = self.spec, self.embedding[token]
        if spec.kind == "eagle":
            x = self.map("fc", torch.cat([e, state]))
            read = x
        elif spec.kind == "mtp":
            pair = torch.cat([self.norm("modules.0.enorm", e), self.norm("modules.0.hnorm", state)])
            x = self.map("modules.0.eh_proj", pair)
            read = self.norm("layers.0.input_layernorm", x)
        else:
            if not recycled:
                if spec.norm_before_fc:
                    state = self.norm("input_norm", state)
                if spec.fc_norms:
                    width = spec.target_hidden_size
                    parts = [self.norm(f"fc_norms.{i}", state[i * width : (i + 1) * width]) for i in range(3)]
                    state = torch.cat(parts)
                state = self.map("fc", state)
            hidden = self.norm("layers.0.hidden_norm", state)
            read = torch.cat([self.norm("layers.0.input_layernorm", e), hidden])
            x = hidden if spec.norm_before_residual else state
        x = x + self.map("layers.0.self_attn.o_proj", self.attention(read, position))
        m = self.norm("layers.0.post_attention_layernorm", x)
        gated = functional.silu(self.map("layers.0.mlp.gate_proj", m)) * self.map("layers.0.mlp.up_proj", m)
        x = x + self.map("layers.0.mlp.down_proj", gated)
        if spec.kind == "eagle":
            return x, x
        normed = self.norm("modules.0.norm" if spec.kind == "mtp" else "norm", x)
        return normed, normed if spec.recycle == "post_norm" else x

    def attention(self, read: torch.Tensor, position: int) -> torch.Tensor:
        layer = self.spec.layer
        heads, kv, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q = self.map("layers.0.self_attn.q_proj", read).view(heads, width)
        k = self.map("layers.0.self_attn.k_proj", read).view(kv, width)
        if layer.qk_norm:
            q = torch.stack([self.norm("layers.0.self_attn.q_norm", head) for head in q])
            k = torch.stack([self.norm("layers.0.self_attn.k_norm", head) for head in k])
        self.keys.append(torch.stack([self.turned(head, position) for head in k]))
        self.values.append(self.map("layers.0.self_attn.v_proj", read).view(kv, width))
        out = []
        for head in range(heads):
            own = head // (heads // kv)
            query = self.turned(q[head], position)
            scores = torch.stack([query @ key[own] for key in self.keys]) / width**0.5
            out.append(sum(w * value[own] for w, value in zip(scores.softmax(0), self.values, strict=True)))
        return torch.cat(out)

    def forget(self, count: int) -> None:
        """Throw the last `count` pairs away."""
        if count:
            del self.keys[-count:], self.values[-count:]


@dataclass(frozen=True)
class World:
    target: Target
    corpus: Corpus


def tiny_world(folder: Path) -> World:
    """A tiny target with random weights, and text over 40 tokens with the states that it has there."""
    weights = load_weights(ModelSource("dummy", None, None, "tiny"), SPEC, torch.float32)
    # Sharper logits than random embeddings give: something to learn.
    weights["embed_tokens.weight"] *= 20
    target, stream = Target(SPEC, weights, "tiny@0"), np.random.default_rng(5)
    group = [_conversation(target, stream, number) for number in range(60)]
    write_shard(folder, 0, group, SPEC.hidden_size)
    return World(target, Corpus(folder, 60 * 17, 0.2))


def _conversation(target: Target, stream: np.random.Generator, number: int) -> Conversation:
    length = int(stream.integers(22, 26))
    tokens = stream.integers(0, 40, length).tolist()
    every, rope = every_position([length]), Rope(SPEC, 64, torch.float32)
    x = functional.embedding(torch.tensor(tokens), target.embedding)
    streams = {}
    for layer in range(SPEC.num_layers):
        streams[layer] = x
        x = plain_layer(x, target.tensors, f"layers.{layer}", SPEC, rope, every, [0, length])
    final = rms_norm(x, target.tensors["norm.weight"], SPEC.rms_norm_eps)
    states = torch.cat([final, *(streams[layer] for layer in recorded_states(SPEC.num_layers)[1:])], dim=1)
    states[-1] = 0
    return Conversation(f"prompt {number}", tuple(tokens), 5, 0.7 * (number % 2), states.to(torch.bfloat16))
