"""Where training starts: a head made of the target's own last layer, and of what least squares can say.

A head's input map starts as the linear map from a pair (embedding of token t + 1, state of t) to the target's state of
t + 1 that fits best; its layer starts as the target's last one, cut to the neurons that move the stream most and scaled
to the width of the state it works on. Medusa's blocks start near the linear map to the later state that their head
stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specbench.distill.corpus import Batch
from specbench.distill.layer import Rope, Tensors, every_position, linear, plain_layer, rms_norm
from specbench.distill.modules import MAX_POSITIONS
from specbench.engine.heads.layouts_eagle import default_states
from specbench.engine.heads.spec import FINAL, HeadKind, HeadSpec, head_tensor_shapes
from specbench.roofline.shapes import ModelSpec

LAYER_SHARE = 0.2
"""How much of its own output the target's last layer adds at the start: the input map has predicted most of it."""
MEDUSA_SHARE = 1.25
"""How much of a linear map a Medusa block starts with, so that about all of it comes through SiLU."""
RIDGE = 1e-3
_SMALL_NORM = 0.1


@dataclass(frozen=True)
class Target:
    """What training needs of the target: its spec, canonical tensors in float32, and their label."""

    spec: ModelSpec
    tensors: Tensors
    label: str

    @property
    def embedding(self) -> torch.Tensor:
        return self.tensors["embed_tokens.weight"]

    @property
    def unembedding(self) -> torch.Tensor:
        return self.tensors.get("lm_head.weight", self.embedding)

    def rows(self, draft_ids: NDArray[np.int64]) -> torch.Tensor:
        """The rows of the unembedding that a draft vocabulary uses."""
        return self.unembedding[torch.from_numpy(draft_ids)].contiguous()


def head_spec(
    kind: HeadKind,
    name: str,
    target: ModelSpec,
    *,
    draft_vocab: int,
    intermediate_size: int,
    kv_heads: int | None = None,
    num_heads: int = 3,
    depth: int = 3,
) -> HeadSpec:
    """The spec of a head that is trained here: one layer as wide as the target, sharing its two embeddings.

    `num_heads` counts Medusa's heads; `kv_heads` may be more than the target's (EAGLE-3 sees tokens through its values
    alone, which should not be narrower than they are).
    """
    layer = replace(
        target,
        name=name,
        num_layers=num_heads if kind == "medusa" else 1,
        vocab_size=draft_vocab,
        intermediate_size=intermediate_size,
        num_kv_heads=kv_heads or target.num_kv_heads,
        tie_word_embeddings=False,
    )
    return HeadSpec(
        kind=kind,
        name=name,
        layer=layer,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        states=default_states(target.num_layers) if kind == "eagle3" else (FINAL,),
        num_modules=num_heads if kind == "medusa" else 1,
        recycle="post_norm" if kind == "mtp" else "pre_norm",
        fc_bias=kind == "eagle",
        fc_norms=kind == "eagle3",
        trained_depth=depth,
    )


@dataclass(frozen=True)
class Watched:
    """The target at work on a sample: `scale`, the rms of the stream that leaves its last layer, and for each layer the
    `activity` of its neurons: the mean of |activation| times the norm of the column it writes."""

    scale: float
    activity: tuple[torch.Tensor, ...]


@torch.no_grad()
def watch(target: Target, sample: Batch) -> Watched:
    """Run the target's layers over a sample."""
    spec, tensors = target.spec, target.tensors
    every = every_position([sample.length(b) for b in range(sample.num_conversations)])
    rope, offsets = Rope(spec, MAX_POSITIONS, torch.float32), sample.offsets.tolist()
    x, activity = functional.embedding(sample.tokens, target.embedding), []
    for index in range(spec.num_layers):
        at = f"layers.{index}"
        # The MLP reads the stream behind the attention; before it will do for a ranking.
        normed = rms_norm(x, tensors[f"{at}.post_attention_layernorm.weight"], spec.rms_norm_eps)
        act = functional.silu(linear(normed, tensors, f"{at}.mlp.gate_proj")) * linear(
            normed, tensors, f"{at}.mlp.up_proj"
        )
        activity.append(act.abs().mean(0) * tensors[f"{at}.mlp.down_proj.weight"].norm(dim=0))
        x = plain_layer(x, tensors, at, spec, rope, every, offsets)
    return Watched(float(x.square().mean(-1).sqrt().median()), tuple(activity))


def cut_layer(
    tensors: Tensors, index: int, activity: torch.Tensor, width: int, *, out: str = "layers.0"
) -> dict[str, torch.Tensor]:
    """Layer `index` with the `width` most active neurons, its tensors named below `out`."""
    at = f"layers.{index}."
    layer = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
    kept = activity.topk(width).indices.sort().values
    for name in ("gate_proj", "up_proj"):
        layer[f"mlp.{name}.weight"] = layer[f"mlp.{name}.weight"][kept]
    layer["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"][:, kept]
    return {f"{out}.{name}": tensor.clone() for name, tensor in layer.items()}


def condition(tensors: dict[str, torch.Tensor], at: str, entry: str | None) -> None:
    """Rewrite a layer so that it computes the same from weights of like size, which one learning rate suits.

    The gains of its norms (`entry`: the one before the attention, if there is one) move into the maps behind them;
    values and output, and up and down, are scaled against each other until their rms agree.
    """
    for norm, maps in (
        (entry, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        if norm is not None:
            gain = tensors[f"{at}.{norm}.weight"]
            for name in maps:
                tensors[f"{at}.{name}.weight"] = tensors[f"{at}.{name}.weight"] * gain
            tensors[f"{at}.{norm}.weight"] = torch.ones_like(gain)
    for inner, outer in (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")):
        first, second = tensors[f"{at}.{inner}.weight"], tensors[f"{at}.{outer}.weight"]
        ratio = (second.square().mean() / first.square().mean()) ** 0.25
        tensors[f"{at}.{inner}.weight"], tensors[f"{at}.{outer}.weight"] = first * ratio, second / ratio
        if f"{at}.{inner}.bias" in tensors:
            tensors[f"{at}.{inner}.bias"] = tensors[f"{at}.{inner}.bias"] * ratio


class Fit:
    """Least squares: the map from inputs [R, I] (and 1, if `bias`) to outputs [R, O], from sums over batches."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        self.bias = bias
        self._xx = torch.zeros(num_in + bias, num_in + bias, dtype=torch.float64)
        self._xy = torch.zeros(num_in + bias, num_out, dtype=torch.float64)
        self._rows = 0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.bias:
            x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        self._xx += (x.T @ x).double()
        self._xy += (x.T @ y).double()
        self._rows += len(x)

    def solve(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight float32[O, I], bias float32[O] or None)."""
        ridge = RIDGE * self._xx.diagonal().mean()
        solution = torch.linalg.solve(self._xx + ridge * torch.eye(len(self._xx), dtype=torch.float64), self._xy)
        weight = solution.T.float().contiguous()
        return (weight[:, :-1].contiguous(), weight[:, -1].contiguous()) if self.bias else (weight, None)


def first_tensors(
    spec: HeadSpec, target: Target, watched: Watched, batches: Sequence[Batch]
) -> dict[str, torch.Tensor]:
    """The tensors a head starts from (without `draft_ids`); `batches` carry the states that it reads."""
    if spec.kind == "medusa":
        return _ordered(spec, _medusa_blocks(spec, batches))
    last = target.spec.num_layers - 1
    tensors = cut_layer(target.tensors, last, watched.activity[last], spec.layer.intermediate_size)
    gain = target.tensors["norm.weight"]
    eps = spec.layer.rms_norm_eps
    floor = _SMALL_NORM * gain.abs().median()
    safe = torch.where(gain < 0, -1.0, 1.0) * gain.abs().clamp(min=float(floor))
    # Streams have rms `scale`; the state of a head has rms 1 before the norm's gain, which only EAGLE's state carries.
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        tensors[name] *= LAYER_SHARE / watched.scale
    if spec.kind == "eagle":
        entry = tensors.pop("layers.0.input_layernorm.weight")
        for part in "qkv":
            tensors[f"layers.0.self_attn.{part}_proj.weight"] *= entry / safe
        for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
            tensors[name] *= gain[:, None]
        tensors["fc.weight"], bias = _fit_pairs(spec, target, batches, lambda e, s: (e, s), None, bias=True)
        assert bias is not None
        tensors["fc.bias"] = bias
        tensors["layers.0.post_attention_layernorm.weight"] *= gain.square().mean().sqrt() / safe
        condition(tensors, "layers.0", None)
        return _ordered(spec, tensors)
    tensors["norm.weight" if spec.kind == "eagle3" else "modules.0.norm.weight"] = gain.clone()
    condition(tensors, "layers.0", "input_layernorm")
    if spec.kind == "mtp":
        ones = torch.ones(spec.hidden_size)
        tensors["modules.0.enorm.weight"], tensors["modules.0.hnorm.weight"] = ones, ones.clone()
        tensors["modules.0.eh_proj.weight"], _ = _fit_pairs(
            spec, target, batches, lambda e, s: (rms_norm(e, ones, eps), rms_norm(s, ones, eps)), safe, bias=False
        )
        return _ordered(spec, tensors)
    for index in range(len(spec.states)):
        tensors[f"fc_norms.{index}.weight"] = torch.ones(spec.target_hidden_size)
    # A stream has a few columns that dwarf the others: each is brought to rms 1, so that one learning rate suits all.
    squares = torch.stack(
        [_normed_states(spec, tensors, batch.states[known(batch)]).square().mean(0) for batch in batches]
    )
    for index, column in enumerate(torch.split(squares.mean(0), spec.target_hidden_size)):
        tensors[f"fc_norms.{index}.weight"] = column.clamp(min=1e-6).rsqrt()
    fit = Fit(spec.state_width, spec.hidden_size, bias=False)
    for batch in batches:
        fit.add(_normed_states(spec, tensors, batch.states[known(batch)]), batch.final[known(batch)] / safe)
    tensors["fc.weight"], _ = fit.solve()
    step, _ = _fit_steps(spec, target, batches, tensors, safe)
    _see_tokens(spec, tensors, step)
    return _ordered(spec, tensors)


def _medusa_blocks(spec: HeadSpec, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Head i's first block starts near the linear map from a state to what is added to it i + 1 tokens later; SiLU lets
    between half and all of it through. Further blocks start at zero."""
    tensors = {}
    for name, shape in head_tensor_shapes(spec).items():
        if name != "draft_ids":
            tensors[name] = torch.zeros(shape)
    for head in range(spec.num_modules):
        fit = Fit(spec.hidden_size, spec.hidden_size, bias=True)
        for batch in batches:
            rows = _pairs(batch, head + 1)
            fit.add(batch.final[rows], batch.final[rows + head + 1] - batch.final[rows])
        weight, bias = fit.solve()
        assert bias is not None
        tensors[f"heads.{head}.blocks.0.weight"] = MEDUSA_SHARE * weight
        tensors[f"heads.{head}.blocks.0.bias"] = MEDUSA_SHARE * bias
    return tensors


def _normed_states(spec: HeadSpec, tensors: Tensors, states: torch.Tensor) -> torch.Tensor:
    """EAGLE-3's states, each under its own norm."""
    parts = torch.split(states, spec.target_hidden_size, dim=1)
    eps = spec.layer.rms_norm_eps
    return torch.cat([rms_norm(part, tensors[f"fc_norms.{i}.weight"], eps) for i, part in enumerate(parts)], dim=1)


def _see_tokens(spec: HeadSpec, tensors: dict[str, torch.Tensor], step: torch.Tensor) -> None:
    """EAGLE-3 sees tokens through its attention alone, which therefore starts by looking at its own row: queries and
    keys are the same slice of the normed embedding, whose product is largest with itself; values and output together
    are `step` [H, 2 H], the linear map from [embedding, state] to what the state must change by, in as many ranks as
    the values have columns. The target's own queries and keys are added for the state's half, for a small part."""
    layer, at = spec.layer, "layers.0.self_attn"
    kv, width, hidden = layer.num_kv_heads, layer.head_dim, spec.hidden_size
    group = layer.num_heads // kv
    # The norm's gain is in the maps by now.
    tensors["layers.0.hidden_norm.weight"] = tensors["layers.0.input_layernorm.weight"].clone()
    slices = torch.eye(hidden)[torch.arange(kv * width) % hidden].view(kv, width, hidden)
    for part, own in (("q", slices.repeat_interleave(group, dim=0)), ("k", slices)):
        theirs = tensors[f"{at}.{part}_proj.weight"].view(-1, width, hidden)
        theirs = theirs.repeat_interleave(len(own) // len(theirs), dim=0)
        whole = torch.cat([own.reshape(-1, hidden), LAYER_SHARE * theirs.reshape(-1, hidden)], dim=1)
        tensors[f"{at}.{part}_proj.weight"] = whole.contiguous()
    left, sizes, right = torch.linalg.svd(step, full_matrices=False)
    rank = kv * width
    half = torch.zeros(rank)
    half[: len(sizes)] = sizes[:rank].sqrt()
    values = torch.zeros(rank, 2 * hidden)
    values[: len(sizes)] = right[:rank]
    outputs = torch.zeros(hidden, rank)
    outputs[:, : len(sizes)] = left[:, :rank]
    tensors[f"{at}.v_proj.weight"] = half[:, None] * values
    outputs = (outputs * half).view(hidden, kv, width).repeat_interleave(group, dim=1) / group
    tensors[f"{at}.o_proj.weight"] = outputs.reshape(hidden, -1).contiguous()


def _fit_steps(
    spec: HeadSpec, target: Target, batches: Sequence[Batch], tensors: Tensors, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fit [normed embedding of t + 1, normed projected state of t] to the next state over `gain` less the projected."""
    ones, eps = torch.ones(spec.hidden_size), spec.layer.rms_norm_eps
    fit = Fit(2 * spec.hidden_size, spec.hidden_size, bias=False)
    for batch in batches:
        rows = _pairs(batch)
        state = functional.linear(_normed_states(spec, tensors, batch.states[rows]), tensors["fc.weight"])
        embedded = functional.embedding(batch.tokens[rows + 1], target.embedding)
        pair = torch.cat([rms_norm(embedded, ones, eps), rms_norm(state, ones, eps)], dim=1)
        fit.add(pair, batch.final[rows + 1] / gain - state)
    return fit.solve()


def known(batch: Batch) -> torch.Tensor:
    """bool[N]: tokens whose states were recorded: all but each conversation's last."""
    mask = torch.ones(len(batch.tokens), dtype=torch.bool)
    mask[torch.from_numpy(batch.offsets[1:] - 1)] = False
    return mask


def _pairs(batch: Batch, ahead: int = 1) -> torch.Tensor:
    """int64: rows whose state is known, and the states of the `ahead` rows behind it, in the same conversation."""
    mask = known(batch)
    rows = mask[: len(mask) - ahead].clone()
    # A conversation's last state is not known, so a run of known ones never crosses.
    for step in range(1, ahead + 1):
        rows &= mask[step : len(mask) - ahead + step]
    return rows.nonzero().flatten()


def _fit_pairs(
    spec: HeadSpec,
    target: Target,
    batches: Sequence[Batch],
    features: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    gain: torch.Tensor | None,
    *,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fit the pair (embedding of t + 1, state of t), each as `features` gives it, to the state of t + 1 over `gain`."""
    fit = Fit(spec.hidden_size + spec.state_width, spec.hidden_size, bias=bias)
    for batch in batches:
        rows = _pairs(batch)
        embedded = functional.embedding(batch.tokens[rows + 1], target.embedding)
        pair = torch.cat(features(embedded, batch.states[rows]), dim=1)
        wanted = batch.final[rows + 1]
        fit.add(pair, wanted if gain is None else wanted / gain)
    return fit.solve()


def _ordered(spec: HeadSpec, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` in the order of head_tensor_shapes, each checked against it."""
    shapes = {name: shape for name, shape in head_tensor_shapes(spec).items() if name != "draft_ids"}
    assert shapes.keys() == tensors.keys(), f"{sorted(shapes.keys() ^ tensors.keys())}"
    for name, shape in shapes.items():
        assert tuple(tensors[name].shape) == shape, f"{name}: {tuple(tensors[name].shape)}, not {shape}"
    return {name: tensors[name].contiguous() for name in shapes}
