"""One draft pass of a head, written once against the decoder's operations (models/decoder.py).

Rows are pairs: the state of position t and the embedding of token t + 1, at RoPE position t.

eagle    x = fc([emb, state]); layer 0 reads x without a norm; out = x; logits = U x.
eagle3   x = fc(norms(states)), or the state itself where it is recycled; layer 0's attention reads
         [input_layernorm(emb), hidden_norm(x)]; residual x (or hidden_norm(x)); logits = U norm(x).
mtp      x = eh_proj([enorm(emb), hnorm(state)]); whole layers; logits = U norm(x).
medusa   h_i = state; h_i += silu(W h_i + b) for each block; logits_i = U_i h_i.

Sources: EAGLE (SafeAI lab, cnets), vLLM and SGLang for EAGLE-3's dialects, DeepSeek-V3's released weights, Medusa.
"""

from __future__ import annotations

from typing import Any

from specbench.engine.heads.spec import HeadSpec
from specbench.engine.models.decoder import layer_tail

STATE_INPUT = "state"
PAIR = "pair"


def state_place(spec: HeadSpec, recycled: bool) -> tuple[str, int]:
    """The buffer and the first column that a pass's states are put into before it runs."""
    if spec.kind == "eagle":
        return PAIR, spec.hidden_size
    if spec.kind == "eagle3" and (recycled or not spec.uses_fc):
        return "x", 0
    return STATE_INPUT, 0


def record_head(ops: Any, spec: HeadSpec, module: int, recycled: bool, every_state: bool = False) -> None:
    """One pass of `module`: leaves "last" (before the final norm), "features" (after it, where there is one) and
    "logits" of the selected rows. `recycled`: the states are the head's own. `every_state` (mtp): leaves "x" (before
    the final norm) and "h" (after it) of all rows too."""
    if spec.kind == "medusa":
        _medusa(ops, spec)
        return
    {"eagle": _eagle_front, "eagle3": _eagle3_front, "mtp": _mtp_front}[spec.kind](ops, spec, module, recycled)
    ops.select_rows("x", "proj", "last")
    final = "last"
    if spec.kind != "eagle":
        norm = f"modules.{module}.norm.weight" if spec.kind == "mtp" else "norm.weight"
        ops.rms_norm(norm, "last", "features", selected=True)
        final = "features"
    ops.linear(unembedding(spec, module), final, "logits", selected=True)
    if every_state:
        ops.rms_norm(f"modules.{module}.norm.weight", "x", "h", add="proj")


def unembedding(spec: HeadSpec, module: int) -> str:
    """The name of the unembedding that `module` uses."""
    if spec.own_head and spec.kind in ("mtp", "medusa") and module:
        return f"lm_head.{module}"
    return "lm_head"


def _eagle_front(ops: Any, spec: HeadSpec, module: int, recycled: bool) -> None:
    ops.input(PAIR, spec.hidden_size + spec.state_width)
    ops.embed(PAIR, columns=spec.hidden_size + spec.state_width)
    ops.linear("fc", PAIR, "x")
    layer_tail(ops, 0, "x")
    _later_layers(ops, range(1, spec.layer.num_layers))


def _eagle3_front(ops: Any, spec: HeadSpec, module: int, recycled: bool) -> None:
    hidden, width = spec.hidden_size, spec.state_width
    place, _ = state_place(spec, recycled)
    ops.input(place, width if place == STATE_INPUT else hidden)
    if place == STATE_INPUT:
        source = STATE_INPUT
        if spec.norm_before_fc:
            ops.rms_norm("input_norm.weight", source, "normed")
            source = "normed"
        elif spec.fc_norms:
            each = spec.target_hidden_size
            for index in range(len(spec.states)):
                at = index * each
                ops.rms_norm(f"fc_norms.{index}.weight", source, "normed", x_at=at, at=at, columns=width)
            source = "normed"
        ops.linear("fc", source, "x")
    ops.embed("e")
    ops.rms_norm("layers.0.input_layernorm.weight", "e", PAIR, columns=2 * hidden)
    ops.rms_norm("layers.0.hidden_norm.weight", "x", PAIR, at=hidden, columns=2 * hidden)
    if spec.norm_before_residual:
        ops.copy(PAIR, "x", width=hidden, x_at=hidden)
    layer_tail(ops, 0, PAIR)
    _later_layers(ops, range(1, spec.layer.num_layers))


def _mtp_front(ops: Any, spec: HeadSpec, module: int, recycled: bool) -> None:
    hidden, at = spec.hidden_size, f"modules.{module}"
    columns = hidden + spec.target_hidden_size
    ops.input(STATE_INPUT, spec.target_hidden_size)
    ops.embed("e")
    ops.rms_norm(f"{at}.enorm.weight", "e", PAIR, columns=columns)
    ops.rms_norm(f"{at}.hnorm.weight", STATE_INPUT, PAIR, at=hidden, columns=columns)
    ops.linear(f"{at}.eh_proj", PAIR, "x")
    first = module * spec.layers_per_module
    ops.rms_norm(f"layers.{first}.input_layernorm.weight", "x", "h")
    layer_tail(ops, first, "h")
    _later_layers(ops, range(first + 1, first + spec.layers_per_module))


def _later_layers(ops: Any, layers: range) -> None:
    for index in layers:
        ops.rms_norm(f"layers.{index}.input_layernorm.weight", "x", "h", add="proj")
        layer_tail(ops, index, "h")


def _medusa(ops: Any, spec: HeadSpec) -> None:
    ops.input(STATE_INPUT, spec.hidden_size)
    for head in range(spec.num_modules):
        ops.copy(STATE_INPUT, "x", width=spec.hidden_size)
        for block in range(spec.num_blocks):
            ops.linear(f"heads.{head}.blocks.{block}", "x", "h")
            ops.silu_add("h", "x")
        ops.linear(unembedding(spec, head), "x", f"logits.{head}")
