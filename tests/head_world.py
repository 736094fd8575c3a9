"""Random draft heads for a small target, and what they should say: a literal restatement in float64, without caches.

Written from the published descriptions (EAGLE, EAGLE-3, DeepSeek-V3's MTP, Medusa), one row after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from engine_tools import Weights, make_decoder, tiny_spec

from specbench.engine.heads.head import Head
from specbench.engine.heads.spec import FINAL, HeadSpec, head_tensor_shapes
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.roofline.shapes import ModelSpec


def head_layer(target: ModelSpec, **changes: Any) -> ModelSpec:
    """The shape of a head's layer: the target's width, other heads, MLP and RoPE."""
    fields = {"num_layers": 1, "intermediate_size": 56, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500.0}
    return replace(target, name="head", **(fields | changes))


def head_spec(kind: str, target: ModelSpec, *, layer: dict[str, Any] | None = None, **changes: Any) -> HeadSpec:
    fields: dict[str, Any] = {
        "kind": kind,
        "name": f"a {kind} head",
        "layer": head_layer(target, **(layer or {})),
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
    }
    if kind == "eagle3":
        fields["states"] = (0, 1, target.num_layers)
        fields["own_head"] = True
    if kind == "medusa":
        fields["num_modules"] = 4
    if kind == "mtp":
        fields["recycle"] = "post_norm"
    return HeadSpec(**(fields | changes))


def head_weights(spec: HeadSpec, seed: int = 3, gain: float = 1.5) -> Weights:
    """float64: linears N(0, gain²/in), norms 1 + N(0, 0.2²), biases N(0, 0.3²); every third target id is drafted."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in head_tensor_shapes(spec).items():
        if name == "draft_ids":
            weights[name] = (torch.arange(shape[0]) * spec.target_vocab_size) // shape[0]
            continue
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 1:
            weights[name] = 1.0 + 0.2 * values if "norm" in name else 0.3 * values
        else:
            weights[name] = values if name.startswith("embed") else values * gain / shape[1] ** 0.5
    return weights


def make_head(
    spec: HeadSpec,
    weights: Weights,
    target: Decoder,
    *,
    num_slots: int = 4,
    max_context: int = 192,
    max_rows: int = 64,
    device: str = "cpu",
) -> Head:
    layer = spec.layer
    kv = PagedKVCache(
        num_layers=max(1, layer.num_layers),
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_slots=num_slots,
        max_context=max_context,
        dtype=DTYPES[target.dtype],
        device=device,
    )
    return Head(spec, weights, target, kv=kv, limits=DecoderLimits(max_rows, max_rows))


class LiteralTarget:
    """States and logits of a target from scratch, by its torch backend in float64."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec, self.weights = spec, weights
        self._decoder = make_decoder(spec, weights, backend="torch", max_rows=160, max_context=160)

    def states(self, tokens: Sequence[int], wanted: tuple[int, ...]) -> torch.Tensor:
        """[len(tokens), len(wanted) * H]"""
        _, states = self._decoder.prefill_states(list(tokens), 0, wanted)
        self._decoder.kv.close(0)
        assert states is not None
        return states

    @property
    def embedding(self) -> torch.Tensor:
        return self.weights["embed_tokens.weight"]

    @property
    def unembedding(self) -> torch.Tensor:
        return self.weights.get("lm_head.weight", self.embedding)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def _rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One head's vector, pairs (i, i + D/2) turned by position / theta^(2i/D)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position / theta ** (2 * i / len(x)), dtype=torch.float64)
        a, b = x[i], x[i + half]
        out[i], out[i + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


class LiteralHead:
    """One path of a recurrent head: rows are appended one by one, each sees all before it."""

    def __init__(self, spec: HeadSpec, weights: Weights, target: LiteralTarget, module: int = 0) -> None:
        self.spec, self.w, self.target, self.module = spec, weights, target, module
        self.rows: list[dict[str, list[torch.Tensor]]] = []
        self.state = torch.empty(0)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def feed(self, token: int, state: torch.Tensor, *, recycled: bool = False) -> torch.Tensor:
        """Logits [V_draft] after the pair (state, embedding of `token`); `self.state` is what is fed back."""
        spec, w, eps = self.spec, self.w, self.spec.layer.rms_norm_eps
        e = (w["embed_tokens.weight"] if spec.own_embedding else self.target.embedding)[token]
        lpm = spec.layers_per_module
        first = self.module * lpm
        row: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
        self.rows.append(row)
        residual = state
        if spec.kind == "eagle":
            residual = self._linear("fc", torch.cat([e, state]))
            read = residual
        elif spec.kind == "mtp":
            at = f"modules.{self.module}"
            pair = torch.cat([_norm(e, w[f"{at}.enorm.weight"], eps), _norm(state, w[f"{at}.hnorm.weight"], eps)])
            residual = self._linear(f"{at}.eh_proj", pair)
            read = _norm(residual, w[f"layers.{first}.input_layernorm.weight"], eps)
        else:
            if not recycled and spec.uses_fc:
                if spec.norm_before_fc:
                    state = _norm(state, w["input_norm.weight"], eps)
                if spec.fc_norms:
                    parts = state.chunk(len(spec.states))
                    state = torch.cat([_norm(p, w[f"fc_norms.{i}.weight"], eps) for i, p in enumerate(parts)])
                state = self._linear("fc", state)
            normed = _norm(state, w["layers.0.hidden_norm.weight"], eps)
            residual = normed if spec.norm_before_residual else state
            read = torch.cat([_norm(e, w["layers.0.input_layernorm.weight"], eps), normed])
        for index in range(lpm):
            if index:
                read = _norm(residual, w[f"layers.{first + index}.input_layernorm.weight"], eps)
            residual = residual + self._attention(first + index, index, read)
            at = f"layers.{first + index}"
            h = _norm(residual, w[f"{at}.post_attention_layernorm.weight"], eps)
            gate, up = self._linear(f"{at}.mlp.gate_proj", h), self._linear(f"{at}.mlp.up_proj", h)
            residual = residual + self._linear(f"{at}.mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)
        final = residual
        if spec.kind == "eagle3":
            final = _norm(residual, w["norm.weight"], eps)
        if spec.kind == "mtp":
            final = _norm(residual, w[f"modules.{self.module}.norm.weight"], eps)
        self.state = final if spec.recycle == "post_norm" and spec.kind != "eagle" else residual
        return self._unembedded(final)

    def _unembedded(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.own_head:
            name = "lm_head.weight" if self.spec.kind == "eagle3" else f"modules.{self.module}.lm_head.weight"
            return self.w.get(name, self.w.get("lm_head.weight")) @ x
        rows = self.target.unembedding
        return (rows[self.w["draft_ids"]] if self.spec.reduced_vocabulary else rows) @ x

    def _attention(self, layer: int, index: int, read: torch.Tensor) -> torch.Tensor:
        shape, at, position = self.spec.layer, f"layers.{layer}.self_attn", len(self.rows) - 1
        q, k, v = (self._linear(f"{at}.{n}_proj", read).view(-1, shape.head_dim) for n in "qkv")
        if shape.qk_norm:
            q = torch.stack([_norm(x, self.w[f"{at}.q_norm.weight"], shape.rms_norm_eps) for x in q])
            k = torch.stack([_norm(x, self.w[f"{at}.k_norm.weight"], shape.rms_norm_eps) for x in k])
        q = torch.stack([_rotated(x, position, shape.rope_theta) for x in q])
        k = torch.stack([_rotated(x, position, shape.rope_theta) for x in k])
        self.rows[-1]["k"].append(k)
        self.rows[-1]["v"].append(v)
        group = shape.num_heads // shape.num_kv_heads
        mixed = []
        for head in range(shape.num_heads):
            keys = torch.stack([row["k"][index][head // group] for row in self.rows])
            values = torch.stack([row["v"][index][head // group] for row in self.rows])
            mixed.append(torch.softmax(keys @ q[head] / shape.head_dim**0.5, dim=0) @ values)
        return self._linear(f"{at}.o_proj", torch.cat(mixed))


def literal_path(
    spec: HeadSpec, weights: Weights, target: LiteralTarget, tokens: Sequence[int], drafted: Sequence[int]
) -> torch.Tensor:
    """Logits [V_draft] of a recurrent head after `drafted`, with `tokens` committed, the last of them pending."""
    states = target.states(tokens[:-1], spec.states)
    head = LiteralHead(spec, weights, target)
    logits = torch.empty(0)
    for state, token in zip(states, tokens[1:], strict=True):
        logits = head.feed(token, state)
    for token in drafted:
        logits = head.feed(token, head.state, recycled=True)
    return logits


def literal_modules(
    spec: HeadSpec, weights: Weights, target: LiteralTarget, tokens: Sequence[int], drafted: Sequence[int]
) -> torch.Tensor:
    """Logits [V_draft] of MTP module len(drafted) after `drafted`, with `tokens` committed, the last of them pending.

    Every module runs over the whole text: row t reads what the module before left at t (the first: the target's state)
    and the token one further on than the module before did.
    """
    states = target.states(tokens[:-1], spec.states)
    text = torch.tensor([*tokens, *drafted])
    embedding = weights["embed_tokens.weight"] if spec.own_embedding else target.embedding
    final = states
    for module in range(len(drafted) + 1):
        shifted = text[1 + module : 1 + module + len(states)]
        layers, final = literal_module(spec, weights, module, states, embedding[shifted])
        states = final if spec.recycle == "post_norm" else layers
    unembedding = weights[f"modules.{len(drafted)}.lm_head.weight"] if spec.own_head else target.unembedding
    if spec.reduced_vocabulary and not spec.own_head:
        unembedding = unembedding[weights["draft_ids"]]
    return unembedding @ final[-1]


def literal_module(
    spec: HeadSpec, weights: Weights, module: int, states: torch.Tensor, embedded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole pass of one module over pairs [n, H] at positions 0 .. n - 1: its layers' output, and that normed."""
    shape, eps, count = spec.layer, spec.layer.rms_norm_eps, len(states)
    at = f"modules.{module}"

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return _norm(x, weights[f"{name}.weight"], eps)

    x = linear(f"{at}.eh_proj", torch.cat([norm(f"{at}.enorm", embedded), norm(f"{at}.hnorm", states)], dim=-1))
    half = torch.arange(shape.head_dim // 2, dtype=torch.float64)
    angle = torch.arange(count, dtype=torch.float64)[:, None] * shape.rope_theta ** (-2 * half / shape.head_dim)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    for layer in range(module * spec.layers_per_module, (module + 1) * spec.layers_per_module):
        name = f"layers.{layer}"
        h = norm(f"{name}.input_layernorm", x)
        q, k, v = (linear(f"{name}.self_attn.{n}_proj", h).view(count, -1, shape.head_dim) for n in "qkv")
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        if shape.qk_norm:
            q, k = norm(f"{name}.self_attn.q_norm", q), norm(f"{name}.self_attn.k_norm", k)
        group = shape.num_heads // shape.num_kv_heads
        k, v = (y.repeat_interleave(group, dim=0) for y in (rotated(k), v))
        scores = (rotated(q) @ k.mT / shape.head_dim**0.5).masked_fill(hidden, float("-inf"))
        x = x + linear(f"{name}.self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        h = norm(f"{name}.post_attention_layernorm", x)
        gate, up = linear(f"{name}.mlp.gate_proj", h), linear(f"{name}.mlp.up_proj", h)
        x = x + linear(f"{name}.mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)
    return x, norm(f"{at}.norm", x)


def literal_medusa(
    spec: HeadSpec, weights: Weights, target: LiteralTarget, tokens: Sequence[int], head: int
) -> torch.Tensor:
    """Logits [V_draft] of Medusa head `head`, with `tokens` committed, the last of them pending."""
    x = target.states(tokens[:-1], (FINAL,))[-1]
    for block in range(spec.num_blocks):
        y = weights[f"heads.{head}.blocks.{block}.weight"] @ x + weights[f"heads.{head}.blocks.{block}.bias"]
        x = x + y / (1 + torch.exp(-y))
    rows = weights[f"heads.{head}.lm_head.weight"] if spec.own_head else target.unembedding
    if spec.reduced_vocabulary and not spec.own_head:
        rows = rows[weights["draft_ids"]]
    return rows @ x


def tiny_target_spec(**changes: Any) -> ModelSpec:
    return tiny_spec(**({"vocab_size": 29, "num_layers": 3} | changes))
