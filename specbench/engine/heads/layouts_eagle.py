"""EAGLE-1/2 and EAGLE-3 heads as they are published, in all dialects; no torch.

Names are those of the authors' repository (SafeAI), of SpecForge and SGLang, and of vLLM and speculators. Where the
dialects give one key two meanings, the place of the key decides: `eagle_config.eagle_aux_hidden_state_layer_ids` counts
the layers whose output is read, the top-level key the layers whose input is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specbench.engine.heads.head_config import (
    draft_vocabulary,
    read_layers,
    refuse_sliding,
    trained_depth,
    write_layers,
)
from specbench.engine.heads.layouts import (
    HeadFile,
    Layout,
    Reading,
    Recipe,
    check_target,
    check_widths,
    copies,
    map_shape,
    read_as,
)
from specbench.engine.heads.spec import FINAL, HeadSpec
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys
from specbench.roofline.shapes import ModelSpec

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_LEGACY_FC_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


def default_states(num_layers: int) -> tuple[int, ...]:
    """The streams EAGLE-3 reads if nothing else is said: those that enter layers 2, N // 2 and N - 3."""
    return (2, num_layers // 2, num_layers - 3)


def _resolver(file: HeadFile) -> Callable[[str], str]:
    """Stored name of a name: as it is, or below "model." as some converters write."""

    def stored(name: str) -> str:
        return f"model.{name}" if name not in file.tensors and f"model.{name}" in file.tensors else name

    return stored


# ---- EAGLE-1 and EAGLE-2


def read_eagle(file: HeadFile, target: ModelSpec) -> Reading:
    """fc with or without bias, as the file has it; a `bias` key that contradicts the file is an error."""
    keys, stored = file.keys, _resolver(file)
    names = {name.removeprefix("model.") for name in file.tensors}
    if any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in names):
        raise InputError(
            "these tensors are an EAGLE-3 head's", file=file.path, key=min(names), remedy="use a drafter of kind eagle3"
        )
    if keys.values.get("speculators_model_type") is not None:
        raise keys.error(
            "speculators_model_type",
            f"{keys.values['speculators_model_type']!r} is not read as an EAGLE-1 head",
            remedy="of the speculators library's types, eagle3 and mtp are read",
        )
    fc_bias = "fc.bias" in names
    if keys.values.get("bias") is not None and keys.flag("bias", fc_bias) != fc_bias:
        raise keys.error(
            "bias",
            f"{str(keys.values['bias']).lower()}, but the file has {'an' if fc_bias else 'no'} fc.bias",
            remedy="config and weights are of different heads: fetch both again",
        )
    check_target(keys, "hidden_size", keys.integer("hidden_size"), target.hidden_size)
    vocab = keys.integer("vocab_size")
    check_target(keys, "vocab_size", vocab, target.vocab_size)
    refuse_sliding(keys)
    layer = read_layers(
        keys,
        file.name,
        stored("layers.0.self_attn.q_proj.weight").removesuffix("self_attn.q_proj.weight"),
        file.tensors,
        num_layers=keys.integer("num_hidden_layers", 1),
        vocab=draft_vocabulary(keys, map_shape(file, stored), vocab),
    )
    spec = HeadSpec(
        kind="eagle",
        name=file.name,
        layer=layer,
        target_hidden_size=target.hidden_size,
        target_vocab_size=vocab,
        fc_bias=fc_bias,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        trained_depth=trained_depth(keys, None),
    )
    return read_as(file, spec, copies(spec, stored), stored=stored)


def eagle_config(spec: HeadSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **write_layers(spec.layer, vocab=spec.target_vocab_size),
        "bias": spec.fc_bias,
        **_extension(spec),
    }


def _extension(spec: HeadSpec) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if spec.reduced_vocabulary or spec.kind == "eagle3":
        config["draft_vocab_size"] = spec.draft_vocab_size
    if spec.trained_depth is not None:
        config["trained_depth"] = spec.trained_depth
    return config


# ---- EAGLE-3


def read_eagle3(file: HeadFile, target: ModelSpec) -> Reading:
    """Any dialect of EAGLE-3 (the table in docs/heads.md); P-EAGLE and block drafters are refused by name."""
    keys, stored = file.keys, _resolver(file)
    names = {name.removeprefix("model.") for name in file.tensors}
    layer_keys = _layer_keys(keys)
    _refuse_parallel(file, names)
    if not any(name.endswith("hidden_norm.weight") for name in names):
        raise InputError(
            "not an EAGLE-3 head: it has no hidden_norm",
            file=file.path,
            key="midlayer.hidden_norm.weight",
            remedy="use a drafter of kind eagle for an EAGLE-1 or EAGLE-2 head; docs/heads.md lists the layouts",
        )
    hidden_size, vocab = layer_keys.integer("hidden_size"), layer_keys.integer("vocab_size")
    check_target(layer_keys, "vocab_size", vocab, target.vocab_size)
    target_hidden = keys.integer("target_hidden_size", hidden_size)
    check_target(keys, "target_hidden_size", target_hidden, target.hidden_size)
    refuse_sliding(layer_keys)
    middle = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    states = _states(keys, target)
    norms = [name for name in _LEGACY_FC_NORMS if f"{name}.weight" in names]
    fc_norms = bool(norms) or any(name.startswith("fc_norm.") for name in names)
    _agrees(keys, ("use_aux_norm", "fc_norm"), fc_norms, "fc_norm")
    norm_before_fc = "input_norm.weight" in names
    _agrees(keys, ("norm_before_fc",), norm_before_fc, "input_norm")
    layer = read_layers(
        layer_keys,
        file.name,
        stored(f"{middle}.self_attn.q_proj.weight").removesuffix("self_attn.q_proj.weight"),
        file.tensors,
        num_layers=layer_keys.integer("num_hidden_layers", 1),
        vocab=draft_vocabulary(keys, map_shape(file, stored), vocab),
    )
    spec = HeadSpec(
        kind="eagle3",
        name=file.name,
        layer=layer,
        target_hidden_size=target_hidden,
        target_vocab_size=vocab,
        states=states,
        recycle="post_norm" if keys.flag("norm_output", False) else "pre_norm",
        fc_bias="fc.bias" in names,
        uses_fc="fc.weight" in names,
        norm_before_residual=keys.flag("norm_before_residual", False),
        norm_before_fc=norm_before_fc,
        fc_norms=fc_norms,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        trained_depth=trained_depth(keys, None),
    )
    if not spec.uses_fc and spec.state_width != hidden_size:
        raise InputError(
            f"the tensor is missing: {len(states)} states of width {target_hidden} must be projected to {hidden_size}",
            file=file.path,
            key="fc.weight",
            remedy="the checkpoint is incomplete, or eagle_config.use_aux_hidden_state should be false",
        )
    check_widths(spec, file)
    legacy = {f"fc_norm.{index}.weight": f"{name}.weight" for index, name in enumerate(norms)}
    recipes = _eagle3_recipes(spec, middle, lambda name: stored(legacy.get(name, name)))
    # SGLang calls the only norm before the attention of a later layer hidden_norm, vLLM input_layernorm.
    for index in range(1, layer.num_layers):
        sglang = stored(f"layers.{index}.hidden_norm.weight")
        if sglang in file.tensors:
            recipes[f"layers.{index}.input_layernorm.weight"] = Recipe((sglang,))
    ignored = (name for name in file.tensors if name.startswith("verifier_"))
    return read_as(file, spec, recipes, ignored=ignored, stored=stored)


def _layer_keys(keys: Keys) -> Keys:
    """The keys of the layers: nested in the speculators library's configs, top-level in all others."""
    kind = keys.values.get("speculators_model_type")
    if kind is None:
        return keys
    if kind != "eagle3":
        raise keys.error(
            "speculators_model_type",
            f"{kind!r} is not supported as an EAGLE-3 head",
            remedy="of the speculators library's types, eagle3 and mtp are read; dflash, dflash2, dspark, xpress and "
            "peagle draft whole blocks and are not",
        )
    return nested_keys(keys, "transformer_layer_config")


def nested_keys(keys: Keys, key: str) -> Keys:
    """The object at `key`, read with its name in front of every key's."""
    values = keys.values.get(key)
    if not isinstance(values, dict):
        raise keys.error(key, f"must be an object, is {values!r}")
    return Keys(values, keys.file, f"{key}.")


def _refuse_parallel(file: HeadFile, names: set[str]) -> None:
    keys = file.keys
    reason = "P-EAGLE heads draft all positions in one pass from a learned mask state, and are not supported"
    if keys.flag("parallel_drafting", False):
        raise keys.error("parallel_drafting", reason, remedy="use an EAGLE-3 head that drafts one token a pass")
    if "mask_hidden" in names:
        raise InputError(
            reason,
            file=file.where("mask_hidden"),
            key="mask_hidden",
            remedy="use an EAGLE-3 head that drafts one token a pass",
        )


def _agrees(keys: Keys, names: tuple[str, ...], found: bool, tensor: str) -> None:
    """InputError if a key asks for norms that the file lacks, or denies those it has."""
    for name in names:
        if keys.values.get(name) is not None and keys.flag(name, found) != found:
            raise keys.error(
                name,
                f"{str(keys.values[name]).lower()}, but the file has {'' if found else 'no '}{tensor} tensors",
                remedy="config and weights are of different heads: fetch both again",
            )


def _states(keys: Keys, target: ModelSpec) -> tuple[int, ...]:
    """Which of the target's states the head reads, as the numbers of the layers they enter (or FINAL)."""
    nested = nested_keys(keys, "eagle_config") if keys.values.get("eagle_config") is not None else Keys({}, keys.file)
    count = keys.integer("num_aux_hidden_states", 3)
    if not nested.flag("use_aux_hidden_state", True):
        return (FINAL,)
    # The place says what is counted: outputs of layers in eagle_config, inputs at the top level.
    outputs, inputs = _ids(nested), _ids(keys)
    for where, ids, shift in ((nested, outputs, 1), (keys, inputs, 0)):
        for layer in ids or ():
            if not 0 <= layer + shift <= target.num_layers:
                raise where.error(AUX_IDS, f"layer {layer} is none of the target's {target.num_layers}")
    entering = tuple(layer + 1 for layer in outputs) if outputs is not None else inputs
    if outputs is not None and inputs is not None and entering != inputs:
        raise nested.error(
            AUX_IDS,
            f"{list(outputs)} (outputs of layers) contradicts the top-level key, {list(inputs)} (inputs of layers)",
            remedy="keep one of the two keys",
        )
    if entering is None:
        entering = default_states(target.num_layers)
        if not 0 <= entering[0] < entering[1] < entering[2]:
            raise keys.error(AUX_IDS, f"the key is missing, and there is no default for {target.num_layers} layers")
    if keys.values.get("num_aux_hidden_states") is not None and count != len(entering):
        raise keys.error(
            "num_aux_hidden_states",
            f"{count}, but {len(entering)} states are read ({', '.join(map(str, entering))})",
            remedy=f"say which in {AUX_IDS}",
        )
    return entering


def _ids(keys: Keys) -> tuple[int, ...] | None:
    value = keys.values.get(AUX_IDS)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value)
    ):
        raise keys.error(AUX_IDS, f"must be a list of layer numbers, is {value!r}")
    return tuple(value)


def _eagle3_recipes(spec: HeadSpec, middle: str, stored: Callable[[str], str]) -> dict[str, Recipe]:
    def rename(name: str) -> str:
        if name.startswith("layers.0."):
            name = f"{middle}.{name.removeprefix('layers.0.')}"
        return stored(name.replace("fc_norms.", "fc_norm."))

    return copies(spec, rename)


def eagle3_config(spec: HeadSpec) -> dict[str, Any]:
    """A config in the authors' keys, with the states as the top-level key of vLLM."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **write_layers(spec.layer, vocab=spec.target_vocab_size),
        **_eagle3_flags(spec),
        **({"eagle_config": {"use_aux_hidden_state": False}} if spec.states == (FINAL,) else _top_ids(spec)),
    }


def specforge_config(spec: HeadSpec) -> dict[str, Any]:
    ids: dict[str, Any] = {"use_aux_hidden_state": spec.states != (FINAL,)}
    if spec.states != (FINAL,):
        ids[AUX_IDS] = [layer - 1 for layer in spec.states]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **write_layers(spec.layer, vocab=spec.target_vocab_size),
        **_eagle3_flags(spec),
        "eagle_config": ids,
    }


def speculators_eagle3_config(spec: HeadSpec) -> dict[str, Any]:
    states = {"eagle_config": {"use_aux_hidden_state": False}} if spec.states == (FINAL,) else _top_ids(spec)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": write_layers(spec.layer, vocab=spec.target_vocab_size),
        "speculators_config": proposal("eagle3", spec.trained_depth or 5),
        **_eagle3_flags(spec),
        **states,
    }


def proposal(algorithm: str, num_tokens: int) -> dict[str, Any]:
    """The speculators library's section on how to draft: greedily, `num_tokens` a step."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "proposal_methods": [greedy],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": None, "architectures": []},
    }


def _top_ids(spec: HeadSpec) -> dict[str, Any]:
    return {AUX_IDS: list(spec.states)}


def _eagle3_flags(spec: HeadSpec) -> dict[str, Any]:
    return {
        "target_hidden_size": spec.target_hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norms,
        "norm_output": spec.recycle == "post_norm",
        **_extension(spec),
    }


def _with_middle(middle: str) -> Callable[[HeadSpec, Mapping[str, Any]], dict[str, Recipe]]:
    return lambda spec, config: _eagle3_recipes(spec, middle, lambda name: name)


EAGLE_LAYOUTS = {
    "eagle": Layout("eagle", eagle_config, lambda spec, config: copies(spec, lambda name: name)),
    "eagle3": Layout("eagle3", eagle3_config, _with_middle("midlayer"), masked=True),
    "eagle3-specforge": Layout("eagle3", specforge_config, _with_middle("midlayer"), masked=True),
    "eagle3-speculators": Layout("eagle3", speculators_eagle3_config, _with_middle("layers.0"), masked=True),
}
