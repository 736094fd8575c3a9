"""HeadSpec: the shape of a draft head that reads the target's hidden states, and its canonical tensors. No torch.

One description for four families (formulas: `head_program` in `program.py`):

medusa   K heads of residual SiLU blocks on the target's final state; head i predicts the token at offset 2 + i.
eagle    x = fc([emb, state]); a decoder layer without its first norm; no final norm. EAGLE-1 and EAGLE-2.
eagle3   state = fc(three streams); attention reads [input_layernorm(emb), hidden_norm(state)]; final norm for logits.
mtp      x = eh_proj([enorm(emb), hnorm(state)]); a whole decoder layer; final norm. One or several modules.

In all of them the head is fed pairs (state of position t, embedding of token t + 1) at position t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specbench.roofline.draft_cost import DraftShape
from specbench.roofline.shapes import ModelSpec

HeadKind = Literal["medusa", "eagle", "eagle3", "mtp"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
Recycle = Literal["pre_norm", "post_norm"]
FINAL = -1
"""In `HeadSpec.states`: the target's state after its final norm, which its lm_head reads."""


@dataclass(frozen=True)
class HeadSpec:
    """Shape of a draft head.

    `layer` gives width, attention, MLP, eps and RoPE of its decoder layers; `layer.num_layers` counts them over all
    modules, and `layer.vocab_size` is the draft vocabulary. Medusa has no decoder layers: only hidden_size, vocab_size
    and eps count. `states` says which of the target's states are read, side by side: layer numbers i (the residual
    stream entering layer i; i = number of layers: the stream that leaves the last one, before the final norm) or FINAL.

    `recycle` is the state that is fed back: before or after the final norm (EAGLE has none, so both are one).
    `norm_before_residual`: EAGLE-3's residual is hidden_norm(state) instead of the state. `norm_before_fc`: one norm
    over the concatenated states; `fc_norms`: one norm for each. `uses_fc` False: the single state is not projected.
    """

    kind: HeadKind
    name: str
    layer: ModelSpec
    target_hidden_size: int
    target_vocab_size: int
    states: tuple[int, ...] = (FINAL,)
    num_modules: int = 1
    num_blocks: int = 1
    recycle: Recycle = "pre_norm"
    fc_bias: bool = False
    uses_fc: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norms: bool = False
    own_embedding: bool = False
    own_head: bool = False
    trained_depth: int | None = None

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether draft ids differ from the target's: then tensor `draft_ids` maps them."""
        return self.draft_vocab_size != self.target_vocab_size

    @property
    def state_width(self) -> int:
        """Columns of the target's states, side by side."""
        return len(self.states) * self.target_hidden_size

    @property
    def layers_per_module(self) -> int:
        return self.layer.num_layers // self.num_modules if self.kind != "medusa" else 0

    @property
    def draft_shape(self) -> DraftShape:
        """What the cost model knows of this head."""
        return DraftShape(
            self.kind,
            layer=self.layer,
            num_modules=self.num_modules,
            num_blocks=self.num_blocks,
            state_width=self.state_width,
            uses_fc=self.uses_fc,
            own_embedding=self.own_embedding,
            own_head=self.own_head,
            target_vocab=self.target_vocab_size,
        )

    def weight_bytes(self, bytes_per_value: int, *, unembedding: bool = True) -> int:
        """Bytes of all weights a draft pass reads: the head's own, and, shared or not, the unembedding it uses."""
        shapes = head_tensor_shapes(self)
        skipped = {"embed_tokens.weight", "draft_ids"}
        own = sum(_size(shape) for name, shape in shapes.items() if name not in skipped)
        shared = 0 if self.own_head else self.draft_vocab_size * self.hidden_size
        heads = [name for name in shapes if name.endswith("lm_head.weight")]
        if not unembedding:
            own -= sum(_size(shapes[name]) for name in heads)
            shared = 0
        return (own + shared) * bytes_per_value


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for width in shape:
        size *= width
    return size


def head_tensor_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of a head: no more and no fewer. Weights are [out, in].

    Concatenations are embedding first; norms multiply by the weight itself (loaders add Gemma's 1). `draft_ids`
    int64[draft_vocab], strictly ascending target ids, is there only for a reduced vocabulary. `embed_tokens.weight`
    [V_target, H] and `lm_head.weight` are there only if the head brings its own; otherwise the target's are used (for
    a reduced vocabulary, the rows `draft_ids` of the target's unembedding).
    """
    hidden, vocab = spec.hidden_size, spec.draft_vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.kind == "medusa":
        for head in range(spec.num_modules):
            for block in range(spec.num_blocks):
                shapes[f"heads.{head}.blocks.{block}.weight"] = (hidden, hidden)
                shapes[f"heads.{head}.blocks.{block}.bias"] = (hidden,)
            if spec.own_head:
                shapes[f"heads.{head}.lm_head.weight"] = (vocab, hidden)
    else:
        _recurrent_shapes(spec, shapes)
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.target_vocab_size, hidden)
    if spec.reduced_vocabulary:
        shapes["draft_ids"] = (vocab,)
    return shapes


def _recurrent_shapes(spec: HeadSpec, shapes: dict[str, tuple[int, ...]]) -> None:
    hidden = spec.hidden_size
    if spec.kind == "eagle":
        shapes["fc.weight"] = (hidden, hidden + spec.state_width)
        if spec.fc_bias:
            shapes["fc.bias"] = (hidden,)
    if spec.kind == "eagle3":
        if spec.norm_before_fc:
            shapes["input_norm.weight"] = (spec.state_width,)
        for index in range(len(spec.states) if spec.fc_norms else 0):
            shapes[f"fc_norms.{index}.weight"] = (spec.target_hidden_size,)
        if spec.uses_fc:
            shapes["fc.weight"] = (hidden, spec.state_width)
            if spec.fc_bias:
                shapes["fc.bias"] = (hidden,)
    for module in range(spec.num_modules):
        if spec.kind == "mtp":
            shapes[f"modules.{module}.enorm.weight"] = (hidden,)
            shapes[f"modules.{module}.hnorm.weight"] = (spec.target_hidden_size,)
            shapes[f"modules.{module}.eh_proj.weight"] = (hidden, hidden + spec.target_hidden_size)
            shapes[f"modules.{module}.norm.weight"] = (hidden,)
            if spec.own_head:
                shapes[f"modules.{module}.lm_head.weight"] = (spec.draft_vocab_size, hidden)
    for index in range(spec.layer.num_layers):
        _layer_shapes(spec, index, shapes)
    if spec.kind == "eagle3":
        shapes["norm.weight"] = (hidden,)
    if spec.kind in ("eagle", "eagle3") and spec.own_head:
        shapes["lm_head.weight"] = (spec.draft_vocab_size, hidden)


def _layer_shapes(spec: HeadSpec, index: int, shapes: dict[str, tuple[int, ...]]) -> None:
    layer, at = spec.layer, f"layers.{index}"
    hidden, inner = layer.hidden_size, layer.intermediate_size
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    first = index == 0
    if not (spec.kind == "eagle" and first):
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
    if spec.kind == "eagle3" and first:
        shapes[f"{at}.hidden_norm.weight"] = (hidden,)
    reads = 2 * hidden if spec.kind == "eagle3" and first else hidden
    for name, num_out, num_in, bias in (
        ("self_attn.q_proj", query, reads, layer.qkv_bias),
        ("self_attn.k_proj", key, reads, layer.qkv_bias),
        ("self_attn.v_proj", key, reads, layer.qkv_bias),
        ("self_attn.o_proj", hidden, query, layer.output_bias),
        ("mlp.gate_proj", inner, hidden, layer.mlp_bias),
        ("mlp.up_proj", inner, hidden, layer.mlp_bias),
        ("mlp.down_proj", hidden, inner, layer.mlp_bias),
    ):
        shapes[f"{at}.{name}.weight"] = (num_out, num_in)
        if bias:
            shapes[f"{at}.{name}.bias"] = (num_out,)
    if layer.qk_norm:
        shapes[f"{at}.self_attn.q_norm.weight"] = (layer.head_dim,)
        shapes[f"{at}.self_attn.k_norm.weight"] = (layer.head_dim,)
    shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
