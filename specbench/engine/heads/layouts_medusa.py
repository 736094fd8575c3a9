"""Medusa heads as they are published: the authors', their first version, and vLLM's. No torch.

How many heads there are is counted in the file: the published configs say 2 where the files hold 5.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from specbench.engine.heads.head_config import draft_vocabulary, trained_depth
from specbench.engine.heads.layouts import (
    D2T,
    TOKEN_MAP,
    HeadFile,
    Layout,
    Reading,
    Recipe,
    check_target,
    map_shape,
    read_as,
)
from specbench.engine.heads.spec import HeadSpec, head_tensor_shapes
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

_PREFIXES = ("medusa_head.", "medusa_heads.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


def read_medusa(file: HeadFile, target: ModelSpec) -> Reading:
    """The authors' layout, with or without unembeddings (v0: the target's is used), or vLLM's."""
    prefix = next((prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in file.tensors)), "")
    names = {name.removeprefix(prefix): name for name in file.tensors}
    if any(_VLLM_BLOCK.fullmatch(name) for name in names):
        return _read_vllm(file, target, names)
    heads, blocks = _count(file, _BLOCK, names, "0.0.linear.weight")
    own_head = f"0.{blocks}.weight" in names

    def stored(name: str) -> str:
        return names.get(name, prefix + name)

    vocab = draft_vocabulary(file.keys, map_shape(file, stored), target.vocab_size)
    spec = _spec(file, target, heads, blocks, own_head, vocab)
    recipes = {
        name: replace(recipe, stored=tuple(stored(each) for each in recipe.stored))
        for name, recipe in medusa_recipes(spec).items()
    }
    return read_as(file, spec, recipes, stored=stored)


def _count(file: HeadFile, pattern: re.Pattern[str], names: dict[str, str], first: str) -> tuple[int, int]:
    """(heads, blocks of each) from the names of the residual blocks; holes are found as missing tensors later."""
    found = [(int(match[1]), int(match[2])) for name in names if (match := pattern.fullmatch(name))]
    if not found:
        raise InputError(
            "not a Medusa head: it has no residual blocks",
            file=file.path,
            key=first,
            remedy="check the drafter's kind; docs/heads.md lists the layouts that are read",
        )
    return 1 + max(head for head, _ in found), 1 + max(block for _, block in found)


def _spec(file: HeadFile, target: ModelSpec, heads: int, blocks: int, own_head: bool, vocab: int) -> HeadSpec:
    keys = file.keys
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        # Medusa's own configs name neither.
        if keys.values.get(key) is not None:
            check_target(keys, key, keys.integer(key), expected)
    return HeadSpec(
        kind="medusa",
        name=file.name,
        layer=replace(target, name=file.name, num_layers=0, vocab_size=vocab),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        num_modules=heads,
        num_blocks=blocks,
        own_head=own_head,
        trained_depth=trained_depth(keys, heads),
    )


def medusa_recipes(spec: HeadSpec) -> dict[str, Recipe]:
    recipes = {}
    for name in head_tensor_shapes(spec):
        stored = name.removeprefix("heads.").replace("lm_head.", f"{spec.num_blocks}.")
        stored = re.sub(r"blocks\.(\d+)\.", r"\1.linear.", stored)
        recipes[name] = Recipe((stored,))
    if spec.reduced_vocabulary:
        recipes["draft_ids"] = Recipe((D2T,), "offsets")
    return recipes


def medusa_config(spec: HeadSpec) -> dict[str, Any]:
    return {
        "medusa_num_heads": spec.num_modules,
        "medusa_num_layers": spec.num_blocks,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.target_vocab_size,
        "trained_depth": spec.trained_depth,
        **({"draft_vocab_size": spec.draft_vocab_size} if spec.reduced_vocabulary else {}),
    }


# ---- vLLM's layout


def _read_vllm(file: HeadFile, target: ModelSpec, names: dict[str, str]) -> Reading:
    """Biases may be absent (zero), unembeddings may be one for all heads, and token_map keeps the frequent tokens."""
    keys = file.keys
    heads, blocks = _count(file, _VLLM_BLOCK, names, "blocks.0.layers.0.weight")
    kept = keys.integer("truncated_vocab_size", target.vocab_size)
    if kept > target.vocab_size:
        raise keys.error("truncated_vocab_size", f"{kept} tokens are more than the target's {target.vocab_size}")
    bias = "blocks.0.layers.0.bias" in names
    if keys.values.get("medusa_fc_bias") is not None and keys.flag("medusa_fc_bias", bias) != bias:
        raise keys.error("medusa_fc_bias", f"{str(not bias).lower()}, but the file has {'' if bias else 'no '}biases")
    shared = keys.flag("original_lm_head", False)
    head = next((name for name in ("lm_head.weight", "lm_heads.0.weight") if name in names), None)
    spec = _spec(file, target, heads, blocks, head is not None, kept)
    recipes = {}
    for name, recipe in _vllm_recipes(spec).items():
        stored = recipe.stored
        if name.endswith("lm_head.weight") and shared and head is not None:
            stored = (head, *stored[1:])
        recipes[name] = Recipe(tuple(names.get(each, each) for each in stored), recipe.op)
        if name.endswith(".bias") and not bias:
            recipes[name] = Recipe((), "zeros")
    ignored = {names[TOKEN_MAP]} if TOKEN_MAP in names and not spec.reduced_vocabulary else set()
    if spec.reduced_vocabulary and TOKEN_MAP in names:
        _check_rows(file, names, spec, recipes)
    if shared:
        # One unembedding for all: further copies are never read by vLLM either.
        ignored |= {stored for name, stored in names.items() if name.startswith("lm_head") and name != head}
    return Reading(spec, recipes, frozenset(ignored))


def _check_rows(file: HeadFile, names: dict[str, str], spec: HeadSpec, recipes: dict[str, Recipe]) -> None:
    """An unembedding has the kept tokens' rows, or all of the target's, of which the kept ones are taken."""
    allowed = [(rows, spec.hidden_size) for rows in (spec.draft_vocab_size, spec.target_vocab_size)]
    for recipe in recipes.values():
        info = file.tensors.get(recipe.stored[0]) if recipe.op == "map_rows" else None
        if info is not None and info.shape not in allowed:
            raise InputError(
                f"shape {list(info.shape)}, but config and target say {list(allowed[0])} or {list(allowed[1])}",
                file=info.file,
                key=recipe.stored[0],
                remedy="this head is for another target, its config is another head's, or the file is damaged",
            )


def _vllm_recipes(spec: HeadSpec) -> dict[str, Recipe]:
    recipes = {}
    for name in head_tensor_shapes(spec):
        if name == "draft_ids":
            recipes[name] = Recipe((TOKEN_MAP,), "sorted_map")
            continue
        _, head, rest = name.split(".", 2)
        if rest == "lm_head.weight":
            stored = f"lm_heads.{head}.weight"
            recipes[name] = (
                Recipe((stored, TOKEN_MAP), "map_rows") if spec.reduced_vocabulary else Recipe((stored,), "copy")
            )
        else:
            recipes[name] = Recipe((f"blocks.{head}.{rest.replace('blocks.', 'layers.')}",))
    return recipes


def vllm_medusa_config(spec: HeadSpec) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.target_vocab_size,
        "truncated_vocab_size": spec.draft_vocab_size,
        "num_heads": spec.num_modules,
        "num_hidden_layers": spec.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "trained_depth": spec.trained_depth,
    }


def _v0_config(spec: HeadSpec) -> dict[str, Any]:
    return {**medusa_config(spec), "version": "0"}


MEDUSA_LAYOUTS = {
    "medusa": Layout("medusa", medusa_config, lambda spec, config: medusa_recipes(spec)),
    "medusa-v0": Layout("medusa", _v0_config, lambda spec, config: medusa_recipes(spec)),
    "medusa-vllm": Layout("medusa", vllm_medusa_config, lambda spec, config: _vllm_recipes(spec)),
}
