"""Where a draft model's training starts: some of the target's layers, the last of them made to write what the target's
unembedding reads.

The maps by which the last layer writes into the stream are fitted by least squares to the target's final state, first
the attention's, then, on what is left, the MLP's. Without that, early layers, or a late one behind them, say nothing to
the unembedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from specbench.distill.corpus import Batch
from specbench.distill.layer import Memory, Rope, attend, every_position, linear, plain_layer, project, rms_norm
from specbench.distill.modules import MAX_POSITIONS
from specbench.distill.start import Fit, Target, Watched, condition, cut_layer, known
from specbench.engine.models.loader import tensor_shapes
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec


def draft_model_start(
    name: str, target: Target, layers: Sequence[int], width: int, watched: Watched, batches: Sequence[Batch]
) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """(spec, tensors without the embedding) of a draft model made of some of the target's layers, their MLPs cut to
    `width` neurons. InputError for a layer the target lacks."""
    count = target.spec.num_layers
    for layer in layers:
        if not -count <= layer < count:
            raise InputError(f"layer {layer} is none of the target's {count}", key="head.layers")
    spec = replace(target.spec, name=name, num_layers=len(layers), intermediate_size=width, tie_word_embeddings=True)
    tensors: dict[str, torch.Tensor] = {}
    for place, layer in enumerate(layers):
        tensors |= cut_layer(target.tensors, layer % count, watched.activity[layer], width, out=f"layers.{place}")
    tensors["norm.weight"] = target.tensors["norm.weight"].clone()
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        _fit_output(part, spec, target, tensors, batches)
    for place in range(len(layers)):
        condition(tensors, f"layers.{place}", "input_layernorm")
    names = [each for each in tensor_shapes(spec) if each != "embed_tokens.weight"]
    return spec, {each: tensors[each] for each in names}


@torch.no_grad()
def _fit_output(
    part: str, spec: ModelSpec, target: Target, tensors: dict[str, torch.Tensor], batches: Sequence[Batch]
) -> None:
    """Replace the last layer's map `part` by the one that brings the stream nearest to the normed final state."""
    at = f"layers.{spec.num_layers - 1}"
    gain = target.tensors["norm.weight"]
    safe = torch.where(gain < 0, -1.0, 1.0) * gain.abs().clamp(min=0.1 * float(gain.abs().median()))
    is_mlp = part.startswith("mlp")
    fit = Fit(spec.intermediate_size if is_mlp else spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
    rope = Rope(spec, MAX_POSITIONS, torch.float32)
    for batch in batches:
        every = every_position([batch.length(b) for b in range(batch.num_conversations)])
        offsets = batch.offsets.tolist()
        x = functional.embedding(batch.tokens, target.embedding)
        for index in range(spec.num_layers - 1):
            x = plain_layer(x, tensors, f"layers.{index}", spec, rope, every, offsets)
        normed = rms_norm(x, tensors[f"{at}.input_layernorm.weight"], spec.rms_norm_eps)
        query, key, value = project(normed, tensors, at, "qkv", spec, rope, every.start)
        inputs = attend(query, Memory(offsets, key, value), every)
        if is_mlp:
            x = x + linear(inputs, tensors, f"{at}.self_attn.o_proj")
            normed = rms_norm(x, tensors[f"{at}.post_attention_layernorm.weight"], spec.rms_norm_eps)
            inputs = functional.silu(linear(normed, tensors, f"{at}.mlp.gate_proj"))
            inputs = inputs * linear(normed, tensors, f"{at}.mlp.up_proj")
        rows = known(batch)
        fit.add(inputs[rows], batch.final[rows] / safe - x[rows])
    tensors[f"{at}.{part}.weight"], _ = fit.solve()
