"""A decoder layer of a draft head for training: whole conversations at once, and drafting steps on top of them.

A row is a start s of a draft. In step 0 it reads the target's states up to s. In step j it stands at position s + j,
reads the head's own output of step j - 1, and attends to the true keys up to s and its own keys of steps 1 .. j: what
a drafter sees that started at s. (EAGLE-3's training-time test, Li et al. 2025, with rows named by their start.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from specbench.engine.ops.cpu import rope_tables
from specbench.roofline.shapes import ModelSpec

Tensors = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


class Rope:
    """Half-split RoPE of a spec at given positions."""

    def __init__(self, spec: ModelSpec, length: int, dtype: torch.dtype) -> None:
        cos, sin = rope_tables(spec, length)
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [R, heads, D] turned to positions int64[R]."""
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


@dataclass
class Rows:
    """The rows of a draft step: `conversation` int64[R], non-decreasing, and `start` int64[R] within it, ascending.
    `bounds[b]`: rows of conversation b are bounds[b] .. bounds[b+1] (half-open)."""

    conversation: torch.Tensor
    start: torch.Tensor
    bounds: list[int]

    @classmethod
    def of(cls, conversation: torch.Tensor, start: torch.Tensor, num_conversations: int) -> Rows:
        counts = torch.bincount(conversation, minlength=num_conversations)
        return cls(conversation, start, [0, *counts.cumsum(0).tolist()])

    def __len__(self) -> int:
        return len(self.start)

    def keep(self, mask: torch.Tensor) -> Rows:
        return Rows.of(self.conversation[mask], self.start[mask], len(self.bounds) - 1)


@dataclass
class Memory:
    """Keys and values: of all true positions [N, kv, D] by conversation (`offsets`), and of the rows' own steps."""

    offsets: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    own_keys: list[torch.Tensor] = field(default_factory=list)
    own_values: list[torch.Tensor] = field(default_factory=list)

    def keep(self, mask: torch.Tensor) -> None:
        """Go on with some of the rows."""
        self.own_keys = [keys[mask] for keys in self.own_keys]
        self.own_values = [values[mask] for values in self.own_values]


def project(
    x: torch.Tensor, tensors: Tensors, at: str, names: str, spec: ModelSpec, rope: Rope, positions: torch.Tensor
) -> list[torch.Tensor]:
    """The maps `names` ("qkv", "kv", "q") of x [R, W] as [R, heads, D], q and k turned to `positions`."""
    outputs = []
    for name in names:
        heads = spec.num_heads if name == "q" else spec.num_kv_heads
        y = linear(x, tensors, f"{at}.self_attn.{name}_proj").view(len(x), heads, spec.head_dim)
        if name != "v":
            if spec.qk_norm:
                y = rms_norm(y, tensors[f"{at}.self_attn.{name}_norm.weight"], spec.rms_norm_eps)
            y = rope(y, positions)
        outputs.append(y)
    return outputs


def attend(query: torch.Tensor, memory: Memory, rows: Rows) -> torch.Tensor:
    """Attention [R, heads * D] of query [R, heads, D] to the true positions up to each row's start and its own keys."""
    count, heads, width = query.shape
    kv_heads = memory.keys.shape[1]
    group = heads // kv_heads
    scale = width**-0.5
    grouped = query.view(count, kv_heads, group, width) * scale
    own = [(grouped * keys[:, :, None]).sum(-1) for keys in memory.own_keys]
    parts = []
    for b, (first, last) in enumerate(zip(rows.bounds, rows.bounds[1:], strict=False)):
        if first == last:
            continue
        begin = memory.offsets[b]
        # Nothing behind the last start is seen by any row.
        end = begin + int(rows.start[last - 1]) + 1
        q = grouped[first:last].permute(1, 2, 0, 3).reshape(kv_heads, group * (last - first), width)
        scores = (q @ memory.keys[begin:end].permute(1, 2, 0)).view(kv_heads, group, last - first, end - begin)
        hidden = torch.arange(end - begin)[None, :] > rows.start[first:last, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        extra = [each[first:last].permute(1, 2, 0)[..., None] for each in own]
        weights = torch.cat([scores, *extra], dim=-1).softmax(dim=-1)
        true = weights[..., : end - begin].reshape(kv_heads, group * (last - first), end - begin)
        out = (true @ memory.values[begin:end].transpose(0, 1)).view(kv_heads, group, last - first, width)
        for step, values in enumerate(memory.own_values):
            each = weights[..., end - begin + step, None]
            out = out + each * values[first:last].transpose(0, 1)[:, None]
        parts.append(out.permute(2, 0, 1, 3).reshape(last - first, heads * width))
    return torch.cat(parts) if parts else query.new_zeros(0, heads * width)


def mlp(x: torch.Tensor, tensors: Tensors, at: str) -> torch.Tensor:
    gate, up = linear(x, tensors, f"{at}.mlp.gate_proj"), linear(x, tensors, f"{at}.mlp.up_proj")
    return linear(functional.silu(gate) * up, tensors, f"{at}.mlp.down_proj")


def plain_layer(
    x: torch.Tensor, tensors: Tensors, at: str, spec: ModelSpec, rope: Rope, rows: Rows, offsets: list[int]
) -> torch.Tensor:
    """An ordinary decoder layer over whole conversations: x [N, H], one row for each position of `rows`."""
    normed = rms_norm(x, tensors[f"{at}.input_layernorm.weight"], spec.rms_norm_eps)
    query, key, value = project(normed, tensors, at, "qkv", spec, rope, rows.start)
    x = x + linear(attend(query, Memory(offsets, key, value), rows), tensors, f"{at}.self_attn.o_proj")
    return x + mlp(rms_norm(x, tensors[f"{at}.post_attention_layernorm.weight"], spec.rms_norm_eps), tensors, at)


def every_position(lengths: list[int]) -> Rows:
    """A row for each position of conversations of these lengths."""
    starts = torch.cat([torch.arange(length) for length in lengths])
    return Rows.of(torch.repeat_interleave(torch.tensor(lengths)), starts, len(lengths))
