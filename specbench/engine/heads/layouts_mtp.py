"""MTP modules as the model families publish them, alone or inside the whole checkpoint of their target. No torch.

Read are modules with a dense layer: grouped-query attention and a gated MLP. Latent attention, experts, output gates
and hyper-connections are refused, each by its name. After every pass the state behind the final norm is fed back, as in
DeepSeek's code; config key `recycle: pre_norm` (an extension) says otherwise, since engines disagree on GLM-4.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specbench.engine.heads.head_config import draft_vocabulary, read_layers, trained_depth, write_layers
from specbench.engine.heads.layouts import (
    D2T,
    HeadFile,
    Layout,
    Op,
    Reading,
    Recipe,
    check_target,
    map_shape,
    read_as,
)
from specbench.engine.heads.layouts_eagle import nested_keys, proposal
from specbench.engine.heads.spec import HeadSpec, Recycle, head_tensor_shapes
from specbench.engine.models.config import MTP_COUNTS
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys
from specbench.roofline.shapes import ModelSpec

_ELSEWHERE = re.compile(r"(model\.)?(mtp\.|mtp_layers\.)|model\.layers\.(\d+)\.|d2t$|t2d$")
_V4_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn.wq",
    "self_attn.k_proj": "attn.wk",
    "self_attn.v_proj": "attn.wv",
    "self_attn.o_proj": "attn.wo",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
}
_DENSE = "supported: modules whose layer is dense (q, k, v, o projections with grouped queries, gate, up and down)"
_UNSUPPORTED = (
    (r"\.(kv_a_proj|kv_b_proj|q_a_proj|wkv|wq_a|kv_proj)\b|kv_a_proj_with_mqa", "latent attention (MLA)"),
    (r"\.indexer\.", "sparse attention with an indexer"),
    (r"\.(experts|shared_experts|shared_expert)\.|mlp\.gate\.", "a mixture of experts (MoE)"),
    (r"\.linear_attn\.", "linear attention"),
    (r"\.attn_sink|\.sinks$|attention_sink", "attention sinks"),
    (r"\bhc_|_hc\.", "hyper-connections (several residual streams, DeepSeek-V4's hc_mult 4)"),
    (r"(markov|confidence)_head|main_proj", "DSpark stages, which draft whole blocks"),
    (r"^model\.mtp\.layers\.", "MiMo-V2's modules (sliding window with sinks)"),
)


@dataclass(frozen=True)
class _Names:
    """A family's names: `prefix(i)` of module i, its own parts, its layer's. `norm_op`: plus_one for Gemma's norms."""

    prefix: Callable[[int], str]
    enorm: str
    hnorm: str
    proj: str
    norm: str
    layer: Callable[[int], str]
    proj_op: Op = "copy"
    norm_op: Op = "copy"
    head: str | None = None
    embedding: str | None = None
    parts: Mapping[str, str] | None = None


def _flat(name: str) -> Callable[[int], str]:
    return lambda module: name.format(module)


def _deepseek(first: int) -> _Names:
    return _Names(
        lambda module: f"model.layers.{first + module}.",
        *("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        layer=lambda module: f"model.layers.{first + module}.",
        head="shared_head.head.weight",
        embedding="embed_tokens.weight",
    )


_MIMO = _Names(
    _flat("model.mtp_layers.{}."),
    *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    layer=_flat("model.mtp_layers.{}."),
    proj_op="hidden_first",
)
_QWEN3_NEXT = _Names(
    _flat("mtp."),
    *("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    layer=_flat("mtp.layers.{}."),
    norm_op="plus_one",
)
_DEEPSEEK_V4 = _Names(
    _flat("mtp.{}."),
    *("enorm", "hnorm", "e_proj h_proj", "norm"),
    layer=_flat("mtp.{}."),
    proj_op="join",
    parts=_V4_PARTS,
)


def _speculators(model_type: object) -> _Names:
    """The speculators library's names; its norms are those of the layer's own family."""
    gemma = isinstance(model_type, str) and model_type.startswith(("qwen3_next", "qwen3_5"))
    return _Names(
        _flat("mtp_layers.{}."),
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        layer=_flat("mtp_layers.{}."),
        norm_op="plus_one" if gemma else "copy",
    )


def is_mtp_name(name: str, num_layers: int | None) -> bool:
    """Whether a stored tensor may belong to an MTP module; `num_layers` is the target's, whose own layers are not."""
    match = _ELSEWHERE.match(name)
    return match is not None and (match[3] is None or num_layers is None or int(match[3]) >= num_layers)


def text_keys(keys: Keys) -> Keys:
    """The keys of the language model: nested in speculators' and multimodal configs."""
    for key in ("transformer_layer_config", "text_config"):
        if keys.values.get(key) is not None:
            return nested_keys(keys, key)
    return keys


def read_mtp(file: HeadFile, target: ModelSpec) -> Reading:
    """The family shows in the names. A whole checkpoint's other tensors are not in `file.tensors` (`is_mtp_name`)."""
    keys = file.keys
    layers = text_keys(keys)
    kind = keys.values.get("speculators_model_type")
    if kind not in (None, "mtp"):
        raise keys.error(
            "speculators_model_type",
            f"{kind!r} is not an MTP head",
            remedy="of the library's types, eagle3 and mtp are read",
        )
    _refuse_unsupported(file)
    if layers.values.get("hc_mult") not in (None, 1):
        raise layers.error("hc_mult", "hyper-connections over several residual streams are not supported; hc_mult 1 is")
    if layers.flag("attn_output_gate", False):
        raise layers.error("attn_output_gate", _gate_reason(), remedy=_DENSE)
    names, num_modules = _family(file, layers)
    for key in MTP_COUNTS:
        for where in {id(each): each for each in (keys, layers)}.values():
            if where.values.get(key) is not None and where.integer(key) != num_modules:
                raise where.error(
                    key,
                    f"{where.values[key]}, but the file holds {num_modules} modules",
                    remedy="the checkpoint is incomplete, or its config is another model's",
                )
    check_target(layers, "hidden_size", layers.integer("hidden_size"), target.hidden_size)
    vocab = layers.integer("vocab_size")
    check_target(layers, "vocab_size", vocab, target.vocab_size)
    _refuse_gate(file, layers, names)
    first = names.layer(0)
    stored = (
        first + _canonical_part(name.removeprefix(first), names) for name in file.tensors if name.startswith(first)
    )
    layer = read_layers(
        layers, file.name, first, stored, num_layers=num_modules, vocab=draft_vocabulary(keys, map_shape(file), vocab)
    )
    spec = HeadSpec(
        kind="mtp",
        name=file.name,
        layer=layer,
        target_hidden_size=target.hidden_size,
        target_vocab_size=vocab,
        num_modules=num_modules,
        recycle=_recycle(keys),
        own_embedding=names.embedding is not None and f"{names.prefix(0)}{names.embedding}" in file.tensors,
        own_head=names.head is not None and f"{names.prefix(0)}{names.head}" in file.tensors,
        trained_depth=trained_depth(keys, num_modules),
    )
    return read_as(file, spec, _recipes(spec, names))


def _recycle(keys: Keys) -> Recycle:
    value = keys.values.get("recycle", "post_norm")
    if value not in ("pre_norm", "post_norm"):
        raise keys.error("recycle", f"must be pre_norm or post_norm, is {value!r}")
    return "pre_norm" if value == "pre_norm" else "post_norm"


def _refuse_unsupported(file: HeadFile) -> None:
    for pattern, what in _UNSUPPORTED:
        found = next((name for name in sorted(file.tensors) if re.search(pattern, name)), None)
        if found is not None:
            raise InputError(
                f"{what} in an MTP module is not supported", file=file.where(found), key=found, remedy=_DENSE
            )


def _gate_reason() -> str:
    return "attention with an output gate (q_proj of twice the rows) is not supported in an MTP module"


def _refuse_gate(file: HeadFile, keys: Keys, names: _Names) -> None:
    num_heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    rows = num_heads * keys.integer("head_dim", max(1, hidden // num_heads))
    query = f"{names.layer(0)}self_attn.q_proj.weight"
    info = file.tensors.get(query)
    if info is not None and info.shape[:1] == (2 * rows,):
        raise InputError(_gate_reason(), file=info.file, key=query, remedy=_DENSE)


def _family(file: HeadFile, keys: Keys) -> tuple[_Names, int]:
    """The family's names and the number of modules."""
    tensors = file.tensors
    if any(name.startswith("model.mtp_layers.") for name in tensors):
        return _MIMO, _count(file, r"model\.mtp_layers\.(\d+)\.input_proj\.weight")
    if "mtp.fc.weight" in tensors:
        return _QWEN3_NEXT, _count(file, r"mtp\.layers\.(\d+)\.self_attn\.q_proj\.weight")
    if any(name.endswith(".e_proj.weight") for name in tensors):
        return _DEEPSEEK_V4, _count(file, r"mtp\.(\d+)\.e_proj\.weight")
    if any(name.startswith("mtp_layers.") for name in tensors):
        count = _count(file, r"mtp_layers\.(\d+)\.input_proj\.weight")
        return _speculators(keys.values.get("model_type")), count
    first = keys.count("num_hidden_layers", 0)
    return _deepseek(first), _count(file, r"model\.layers\.(\d+)\.eh_proj\.weight", first)


def _count(file: HeadFile, pattern: str, first: int = 0) -> int:
    found = sorted(int(match[1]) for name in file.tensors if (match := re.fullmatch(pattern, name)))
    if not found or found != list(range(first, first + len(found))):
        plain = pattern.replace("\\", "").replace("(d+)", str(first))
        raise InputError(
            f"MTP modules are numbered from {first} on, and this file has {found or 'none'}",
            file=file.path,
            key=plain,
            remedy="the checkpoint holds no MTP modules, or not all of them; docs/heads.md lists the layouts",
        )
    return len(found)


def _canonical_part(part: str, names: _Names) -> str:
    """A layer's part by its canonical name: attn.wq.weight -> self_attn.q_proj.weight."""
    for canonical, stored in (names.parts or {}).items():
        if part.startswith(f"{stored}."):
            return canonical + part.removeprefix(stored)
    return part


def _stored_part(part: str, names: _Names) -> str:
    base, kind = part.rsplit(".", 1)
    return f"{(names.parts or {}).get(base, base)}.{kind}"


def _recipes(spec: HeadSpec, names: _Names) -> dict[str, Recipe]:
    own = {"enorm": names.enorm, "hnorm": names.hnorm, "norm": names.norm}
    recipes: dict[str, Recipe] = {}
    for name in head_tensor_shapes(spec):
        if name == "draft_ids":
            recipes[name] = Recipe((D2T,), "offsets")
        elif name == "embed_tokens.weight":
            copies = tuple(f"{names.prefix(module)}{names.embedding}" for module in range(spec.num_modules))
            recipes[name] = Recipe(copies, "same") if len(copies) > 1 else Recipe(copies)
        elif name.startswith("layers."):
            _, module, part = name.split(".", 2)
            stored = f"{names.layer(int(module))}{_stored_part(part, names)}"
            recipes[name] = Recipe((stored,), names.norm_op if part.endswith("norm.weight") else "copy")
        else:
            _, module, part = name.split(".", 2)
            prefix, part = names.prefix(int(module)), part.removesuffix(".weight")
            if part == "eh_proj":
                stored_parts = tuple(f"{prefix}{each}.weight" for each in names.proj.split())
                recipes[name] = Recipe(stored_parts, names.proj_op)
            elif part == "lm_head":
                recipes[name] = Recipe((f"{prefix}{names.head}",))
            else:
                recipes[name] = Recipe((f"{prefix}{own[part]}.weight",), names.norm_op)
    return recipes


# ---- Writing


def _config(spec: HeadSpec) -> dict[str, Any]:
    """`num_hidden_layers` is the target's number of layers where the target's whole config is at hand (`extra`)."""
    layers = write_layers(spec.layer, vocab=spec.target_vocab_size)
    return {**layers, "num_nextn_predict_layers": spec.num_modules, **_flags(spec)}


def _flags(spec: HeadSpec) -> dict[str, Any]:
    return {
        "recycle": spec.recycle,
        "trained_depth": spec.trained_depth,
        **({"draft_vocab_size": spec.draft_vocab_size} if spec.reduced_vocabulary else {}),
    }


def _speculators_config(spec: HeadSpec) -> dict[str, Any]:
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "transformer_layer_config": write_layers(spec.layer, vocab=spec.target_vocab_size),
        "speculators_config": proposal("mtp", spec.trained_depth or 3),
        "num_nextn_predict_layers": spec.num_modules,
        **_flags(spec),
    }


def _written(names: _Names) -> Callable[[HeadSpec, Mapping[str, Any]], dict[str, Recipe]]:
    return lambda spec, config: _recipes(spec, names)


def _written_deepseek(spec: HeadSpec, config: Mapping[str, Any]) -> dict[str, Recipe]:
    return _recipes(spec, _deepseek(int(config["num_hidden_layers"])))


MTP_LAYOUTS = {
    "mtp-deepseek": Layout("mtp", _config, _written_deepseek),
    "mtp-mimo": Layout("mtp", _config, _written(_MIMO)),
    "mtp-qwen3-next": Layout("mtp", _config, _written(_QWEN3_NEXT)),
    "mtp-speculators": Layout("mtp", _speculators_config, _written(_speculators(None))),
    "mtp-deepseek-v4": Layout("mtp", _config, _written(_DEEPSEEK_V4)),
}
