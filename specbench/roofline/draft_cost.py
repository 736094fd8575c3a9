"""What a drafter costs: its shape, and the forward passes that one step of it makes, each in FLOPs and bytes.

The engine prices the passes it really made with the same functions (`head_pass_cost` and cost.forward_cost), so a
predicted draft and a counted one differ only where their rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from specbench.errors import InputError
from specbench.roofline.cost import LOGIT_BYTES, Cost, StepCost, forward_cost, uniform_cost
from specbench.roofline.formats import storage_bytes, weight_format
from specbench.roofline.shapes import ModelSpec, named_shape

DraftKind = Literal[
    "none", "ngram", "suffix", "oracle", "forced", "early_exit", "draft_model",
    "medusa", "eagle", "eagle2", "eagle3", "mtp",
]  # fmt: skip
DRAFT_KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
HEAD_KINDS = ("medusa", "eagle", "eagle2", "eagle3", "mtp")
NO_PASS_KINDS = ("none", "ngram", "suffix", "oracle", "forced")
"""Kinds that run no model: they replay, or look tokens up."""
EAGLE3_VOCAB = 32000
EAGLE3_STATES = 3
EAGLE2_TOP_K = 10
MEDUSA_HEADS = 5
HEAD_DIM = 128
KV_HEADS = 8
"""Of a dense head on a target whose own attention is no GQA: what published EAGLE-3 heads for such targets have."""


@dataclass(frozen=True)
class DraftShape:
    """The shape of a drafter.

    `layer`: a draft model's own spec, or the decoder layers of a head: `layer.num_layers` counts them over all modules
    and `layer.vocab_size` is the draft vocabulary (Medusa has none: only hidden_size and vocab_size count).
    `num_layers`: the target's layers that early exit runs. `state_width`: columns of the target's states that a head
    reads. `uses_fc`: whether EAGLE-3 projects them. `levels`: nodes fed at each level of a static tree, the root first;
    None: a chain. `top_k`: nodes a level of a dynamic tree. `dtype`: the drafter's own weight format; None: the
    target's. `index_share`: draft passes behind the first reuse its sparse attention's choice of keys (IndexShare).
    `target_vocab`: rows of an own embedding; None: the draft vocabulary's.
    """

    kind: DraftKind
    layer: ModelSpec | None = None
    num_layers: int | None = None
    num_modules: int = 1
    num_blocks: int = 1
    state_width: int = 0
    uses_fc: bool = True
    own_embedding: bool = False
    own_head: bool = False
    levels: tuple[int, ...] | None = None
    top_k: int | None = None
    dtype: str | None = None
    index_share: bool = True
    target_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in DRAFT_KINDS:
            raise InputError(
                f"unknown drafter kind {self.kind!r}", key="kind", remedy="use one of: " + ", ".join(DRAFT_KINDS)
            )
        if self.layer is None and (self.kind in HEAD_KINDS or self.kind == "draft_model"):
            raise InputError(f"{self.kind} needs the shape of its layers", key="layer")
        if self.kind == "early_exit" and not self.num_layers:
            raise InputError("early_exit needs the number of layers it runs", key="layers", remedy="layers: 8")
        if self.num_modules < 1 or self.num_blocks < 1 or (self.top_k is not None and self.top_k < 1):
            raise InputError("modules, blocks and top_k must be 1 or more", key="drafters")

    @property
    def layers_per_module(self) -> int:
        return self.layer.num_layers // self.num_modules if self.layer is not None and self.kind != "medusa" else 0

    @property
    def own_params(self) -> int:
        """Values of the weights that the drafter brings; what it shares with the target is not counted. All of a draft
        model's own are, its embedding too (fc biases and norms of EAGLE-3's dialects are left out)."""
        layer = self.layer
        if layer is None:
            return 0
        if self.kind == "draft_model":
            return layer.num_params
        hidden = layer.hidden_size
        embedding = self.own_embedding * hidden * (self.target_vocab or layer.vocab_size)
        if self.kind == "medusa":
            blocks = self.num_modules * self.num_blocks * hidden * (hidden + 1)
            return blocks + self.num_modules * self.own_head * layer.num_head_params + embedding
        small = layer.num_small_params - hidden
        own_head = self.own_head * layer.num_head_params
        if self.kind == "eagle3":
            wide = hidden * (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
            extra = wide + (hidden * self.state_width if self.uses_fc else 0) + 2 * hidden
        elif self.kind == "mtp":
            of_one = hidden * (hidden + self.state_width) + 2 * hidden + self.state_width
            extra, own_head = self.num_modules * of_one, self.num_modules * own_head
        else:
            extra = hidden * (hidden + self.state_width) - hidden
        return layer.num_linear_params + small + extra + own_head + embedding


def drafter_shape(kind: str, target: ModelSpec, **fields: object) -> DraftShape:
    """The usual shape of a drafter of `kind` for `target`; `fields` replace those of DraftShape.

    eagle, eagle2: one decoder layer of the target's width, its embedding and head shared (facts/drafters.md §1.1).
    eagle3: the same layer over a state projected from three, a draft vocabulary of 32000 and its own head (§1.3).
    medusa: five heads of one block with an own unembedding each (§2). mtp: one whole layer of the target's own kind
    (§3). draft_model: `model` names a shape. early_exit: `num_layers`.
    """
    values: dict[str, object] = {}
    if kind in ("eagle", "eagle2"):
        values = {"layer": _one_layer(target), "state_width": target.hidden_size}
        if kind == "eagle2":
            values["top_k"] = EAGLE2_TOP_K
    elif kind == "mtp":
        values = {"layer": _mtp_layer(target), "state_width": target.hidden_size}
    elif kind == "eagle3":
        vocab = min(EAGLE3_VOCAB, target.vocab_size)
        layer = replace(_one_layer(target), vocab_size=vocab)
        values = {"layer": layer, "state_width": EAGLE3_STATES * target.hidden_size, "own_head": True}
    elif kind == "medusa":
        layer = replace(_one_layer(target), num_layers=0)
        values = {"layer": layer, "num_modules": MEDUSA_HEADS, "own_head": True}
    elif kind == "draft_model" and "model" in fields:
        values = {"layer": named_shape(str(fields["model"]))}
    values |= {key: value for key, value in fields.items() if key != "model"}
    return DraftShape(kind, **values)  # type: ignore[arg-type]


def _one_layer(target: ModelSpec) -> ModelSpec:
    """A dense layer as wide as the target's; where the target's attention is MLA or compressed, GQA of usual sizes."""
    heads, kv_heads, head_dim = target.num_heads, target.num_kv_heads, target.head_dim
    if target.mla is not None or target.compressed is not None:
        heads = max(1, target.hidden_size // HEAD_DIM)
        kv_heads, head_dim = min(KV_HEADS, heads), HEAD_DIM
    inner = target.intermediate_size
    if not inner and target.moe is not None:
        inner = target.moe.expert_intermediate * target.moe.top_k
    return replace(
        target,
        name=f"{target.name}/head",
        num_layers=1,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=None,
        sliding_layers=None,
        moe=None,
        mla=None,
        indexer=None,
        compressed=None,
        attention_sinks=False,
    )


def _mtp_layer(target: ModelSpec) -> ModelSpec:
    """One layer of the target's own kind: routed if the target is, full attention, with an indexer of its own."""
    return replace(
        target,
        name=f"{target.name}/mtp",
        num_layers=1,
        sliding_window=None,
        sliding_layers=None,
        moe=None if target.moe is None else replace(target.moe, moe_layers=None, first_dense=0),
        indexer=None if target.indexer is None else replace(target.indexer, full_layers=None, share_group=1),
        compressed=None if target.compressed is None else replace(target.compressed, ratios=(0,)),
    )


@lru_cache(maxsize=64)
def _with_chosen_keys(layer: ModelSpec) -> ModelSpec:
    """The layer reading keys that an earlier pass chose: no indexer is run."""
    if layer.indexer is None:
        return layer
    return replace(layer, indexer=replace(layer.indexer, full_layers=(False,) * layer.num_layers))


def catch_up_rows(shape: DraftShape, conditional: Sequence[float], depth: int) -> float:
    """Mean rows that the first pass of a draft feeds beside the pending token's, from conditional acceptance rates.

    A head feeds the true states of all drafts accepted last (EAGLE §1.2 of facts/drafters.md): Σ_j Π_{i≤j} a_i. A draft
    model lacks only the last token of a draft that was accepted whole: Π_i a_i. Others keep no cache of their own.
    """
    joint, product = [], 1.0
    for level in range(depth):
        product *= conditional[min(level, len(conditional) - 1)] if conditional else 0.0
        joint.append(product)
    if shape.kind in ("eagle", "eagle2", "eagle3", "mtp"):
        return sum(joint)
    return joint[-1] if shape.kind == "draft_model" and joint else 0.0


def draft_passes(
    shape: DraftShape,
    target: ModelSpec,
    batch: int,
    context_len: float,
    depth: int,
    *,
    weight_dtype: str,
    nodes: int | None = None,
    kv_dtype: str | None = None,
    catch_up: float = 0.0,
) -> tuple[StepCost, ...]:
    """The forward passes of one draft of `depth` levels for `batch` equal requests, in order.

    `context_len` tokens are in the target's cache, the pending one not among them. `catch_up`: see catch_up_rows.
    `nodes`, those that are verified, change no draft pass. Empty for kinds that run no model and for depth 0.
    """
    if depth < 0 or (nodes is not None and nodes < 0):
        raise InputError("a draft has no negative depth or size", key="depth", remedy="choose 0 or more")
    if shape.kind in NO_PASS_KINDS or depth == 0 or batch == 0:
        return ()
    stored = shape.dtype or weight_dtype
    if shape.kind == "medusa":
        return (_medusa_pass(shape, batch, stored),)
    passes = []
    if shape.kind == "mtp" and shape.num_modules > 1:
        for level in range(min(depth, shape.num_modules)):
            # Module k reads again the k rows that read drafts, and the pairs that have become true since.
            query = 1 + catch_up + level
            before = max(0.0, context_len - query)
            passes.append(_head_pass(shape, batch, query, before, batch, level > 0, stored, kv_dtype))
        return tuple(passes)
    # A head's pairs end one position before the pending token; a model is fed the pending token itself.
    written = context_len - (shape.kind not in ("early_exit", "draft_model"))
    for level, fed in enumerate(_fed(shape, depth)):
        query = 1 + catch_up if level == 0 else fed
        before = max(0.0, written - catch_up) if level == 0 else written
        selected = batch * fed
        if shape.kind in ("early_exit", "draft_model"):
            model = target if shape.kind == "early_exit" else shape.layer
            assert model is not None
            passes.append(
                uniform_cost(
                    *(model, batch, query, before),
                    weight_dtype=stored,
                    kv_dtype=kv_dtype,
                    head_tokens=selected,
                    num_layers=shape.num_layers,
                )
            )
        else:
            passes.append(_head_pass(shape, batch, query, before, selected, level > 0, stored, kv_dtype))
        written += fed
    return tuple(passes)


def _fed(shape: DraftShape, depth: int) -> tuple[int, ...]:
    """Rows of each pass, the first one's without catch-up: those whose children are wanted."""
    if shape.top_k is not None:
        return (1, *(shape.top_k,) * (depth - 1))
    if shape.levels is not None:
        return shape.levels[:depth]
    return (1,) * depth


def head_pass_cost(
    shape: DraftShape,
    query_tokens: Sequence[int],
    context_lens: Sequence[int],
    *,
    weight_dtype: str,
    head_tokens: int,
    recycled: bool,
) -> StepCost:
    """One pass of a head over a ragged batch. `recycled` passes read its own states: EAGLE-3 then has no fc to run, and
    with IndexShare no indexer is run."""
    if shape.kind == "medusa":
        return _medusa_pass(shape, sum(query_tokens), weight_dtype)
    layers = forward_cost(
        *(_layer_of(shape, recycled), query_tokens, context_lens),
        weight_dtype=weight_dtype,
        head_tokens=head_tokens,
        num_layers=shape.layers_per_module,
    )
    return _with_projections(shape, layers, sum(query_tokens), weight_dtype, recycled)


def _head_pass(
    shape: DraftShape,
    batch: int,
    query: float,
    context: float,
    selected: float,
    recycled: bool,
    weight_dtype: str,
    kv_dtype: str | None,
) -> StepCost:
    layers = uniform_cost(
        *(_layer_of(shape, recycled), batch, query, context),
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        head_tokens=selected,
        num_layers=shape.layers_per_module,
    )
    return _with_projections(shape, layers, batch * query, weight_dtype, recycled)


def _layer_of(shape: DraftShape, recycled: bool) -> ModelSpec:
    assert shape.layer is not None
    return _with_chosen_keys(shape.layer) if recycled and shape.index_share else shape.layer


def _with_projections(shape: DraftShape, layers: StepCost, rows: float, weight_dtype: str, recycled: bool) -> StepCost:
    """Beside the layers: EAGLE's fc and MTP's eh_proj [H, H + W], or EAGLE-3's fc [H, W] and the half of q, k and v
    that reads the embedding [(n_h + 2 n_kv) d_h, H]. 2 · rows · params FLOPs, the weights once."""
    layer = shape.layer
    assert layer is not None
    hidden, stored = layer.hidden_size, weight_format(weight_dtype)
    if shape.kind == "eagle3":
        matrices = [((layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim, hidden)]
        if shape.uses_fc and not recycled:
            matrices.append((hidden, shape.state_width))
    else:
        matrices = [(hidden, hidden + shape.state_width)]
    params = sum(num_out * num_in for num_out, num_in in matrices)
    weights = sum(storage_bytes(stored.linear, num_out, num_in) for num_out, num_in in matrices)
    return replace(layers, linear=layers.linear + Cost(2.0 * rows * params, weights))


def _medusa_pass(shape: DraftShape, rows: int, weight_dtype: str) -> StepCost:
    """All heads on one state a request: blocks [H, H], then an unembedding a head, the target's one if it has none."""
    layer = shape.layer
    assert layer is not None
    hidden, vocab, stored = layer.hidden_size, layer.vocab_size, weight_format(weight_dtype)
    blocks = shape.num_modules * shape.num_blocks
    matrices = shape.num_modules if shape.own_head else 1
    head = Cost(
        2.0 * rows * shape.num_modules * hidden * vocab,
        matrices * storage_bytes(stored.head, vocab, hidden) + LOGIT_BYTES * rows * shape.num_modules * vocab,
    )
    linear = Cost(2.0 * rows * blocks * hidden * hidden, blocks * storage_bytes(stored.linear, hidden, hidden))
    return StepCost(linear=linear, head=head)
