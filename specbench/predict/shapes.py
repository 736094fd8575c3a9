"""Which shapes a case means: the target's and the drafter's, from names and local files; nothing is fetched.

A hub id that is not a folder here is read as the published model of that name where its shape is known, and a head on
the hub as the usual head of its kind: shapes suffice. What was taken for granted is told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from math import prod
from pathlib import Path

from specbench.engine.heads.spec import HeadKind, HeadSpec, head_tensor_shapes
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.sources import CONFIG_FILE, KNOWN_MODELS, ModelSource
from specbench.errors import InputError
from specbench.predict.heads import head_spec
from specbench.roofline.draft_cost import DraftKind, DraftShape, drafter_shape
from specbench.roofline.shapes import NAMED_SHAPES, ModelSpec, named_shape
from specbench.roofline.shapes_config import read_config
from specbench.scenario.cases import Case, TargetSpec
from specbench.scenario.drafter_spec import HEAD_KINDS, DrafterSpec

_SUFFIXES = ("instruct", "chat", "it", "base", "hf", "bf16", "fp8", "awq", "gptq", "2507", "thinking")


@dataclass(frozen=True)
class Drafting:
    """How a case drafts: its shape (None: nothing is drafted), the values of its own weights, the most levels it has
    (None: any), and what had to be assumed."""

    shape: DraftShape | None
    params: int = 0
    most_depth: int | None = None
    assumed: str | None = None


@lru_cache(maxsize=256)
def target_spec(target: TargetSpec) -> ModelSpec:
    """The target's shape. Raises InputError where no shape of that name is known and no local file tells it."""
    if target.shape is not None:
        return named_shape(target.shape)
    return model_spec(str(target.model), "target.model")


@lru_cache(maxsize=256)
def model_spec(name: str, key: str) -> ModelSpec:
    """The shape of a model by name: a folder's config.json, a .gguf, a known name, or a hub id whose shape is known."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise InputError(f"no {CONFIG_FILE} in this folder", file=path, key=key, remedy="give a model's own folder")
        return read_config(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError("a single file must be a .gguf", file=path, key=key, remedy="give the model's folder")
        return read_model_spec(ModelSource("gguf", path, None, path.stem))
    found = shape_by_name(name)
    if found is None:
        known = ", ".join(sorted(NAMED_SHAPES))
        raise InputError(
            f"the shape of {name!r} is not known, and there is no such folder or file here",
            key=key,
            remedy=f"give a folder that holds its {CONFIG_FILE}, or one of: {known}",
        )
    return found


def shape_by_name(name: str) -> ModelSpec | None:
    """The named shape that a model's id means: its last part in lower case, without words such as "instruct"."""
    plain = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-gguf")
    plain = re.sub(r"[\s_]+", "-", plain)
    if name in KNOWN_MODELS:
        plain = name
    while True:
        for candidate in (plain, plain.replace("llama-3-", "llama-3.1-")):
            if candidate in NAMED_SHAPES:
                return NAMED_SHAPES[candidate]
        shorter, dash, last = plain.rpartition("-")
        if not dash or not (last in _SUFFIXES or re.fullmatch(r"v\d+(\.\d+)?", last)):
            return None
        plain = shorter


def drafting(case: Case) -> Drafting:
    """How `case` drafts. Raises InputError for a draft model of unknown shape or files that can't be read."""
    return _drafting(case.drafter, case.target, case.depth)


@lru_cache(maxsize=4096)
def _drafting(drafter: DrafterSpec, target: TargetSpec, depth: int) -> Drafting:
    kind, options = drafter.kind, dict(drafter.options)
    if kind == "none" or depth == 0:
        return Drafting(None)
    tree = drafter.tree
    levels = None if tree is None else tuple(len(nodes) for nodes in tree.cut(depth).inner)
    if kind in ("ngram", "suffix", "oracle", "forced"):
        return Drafting(DraftShape(kind))  # type: ignore[arg-type]
    spec = target_spec(target)
    if kind == "early_exit":
        layers = int(str(options["layers"]))
        if layers >= spec.num_layers:
            raise InputError(f"early exit after {layers} of {spec.num_layers} layers", key="drafters.layers")
        return Drafting(DraftShape("early_exit", num_layers=layers, levels=levels))
    if kind == "draft_model":
        model, shared = _draft_model(str(options["model"]), target.name)
        dtype = options.get("dtype")
        shape = DraftShape("draft_model", layer=model, levels=levels, dtype=None if dtype is None else str(dtype))
        return Drafting(shape, model.num_params - (model.num_head_params if shared else 0))
    assert kind in HEAD_KINDS, kind
    return _head(drafter, spec, target.name, levels)


def _draft_model(name: str, target_name: str) -> tuple[ModelSpec, bool]:
    """A draft model's shape, and whether it shares the target's embedding."""
    if name != "builtin":
        return model_spec(name, "drafters.model"), False
    folder = Path(str(resources.files("specbench").joinpath("heads", target_name, "draft_model")))
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(
            f"no built-in draft model for the target {target_name}",
            key="drafters.model",
            remedy="name a model whose shape is known, such as llama-3.2-1b, or a folder",
        )
    return read_model_spec(ModelSource("folder", folder, None, f"{target_name}/draft_model")), True


def _head(drafter: DrafterSpec, target: ModelSpec, target_name: str, levels: tuple[int, ...] | None) -> Drafting:
    options = dict(drafter.options)
    name = str(options.get("head") or "builtin")
    read: HeadKind = "eagle" if drafter.kind == "eagle2" else drafter.kind  # type: ignore[assignment]
    builtin = Path(str(resources.files("specbench").joinpath("heads", target_name, read)))
    folder = builtin if name == "builtin" else Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        if folder.exists():
            raise InputError(f"no {CONFIG_FILE} in this folder", file=folder, key="drafters.head")
        usual = drafter_shape(drafter.kind, target, levels=levels, top_k=drafter.top_k)
        most = usual.num_modules if drafter.kind == "medusa" else None
        named = "" if name == "builtin" else f" for {name}"
        what = f"the usual {drafter.kind} head's shape{named}, because its files are not here"
        return Drafting(usual, usual.own_params, most, what)
    head = head_spec(folder, replace(target, name=target_name), read)
    shapes = head_tensor_shapes(head)
    params = sum(prod(shape) for key, shape in shapes.items() if key != "draft_ids")
    most = head.num_modules if head.kind == "medusa" or (head.kind == "mtp" and head.num_modules > 1) else None
    return Drafting(head_shape(head, drafter.kind, levels, drafter.top_k), params, most)


def head_shape(
    head: HeadSpec, kind: str, levels: tuple[int, ...] | None = None, top_k: int | None = None
) -> DraftShape:
    """The cost model's view of a head that was read from its files; `kind` tells eagle from eagle2."""
    chosen: DraftKind = kind  # type: ignore[assignment]
    return replace(head.draft_shape, kind=chosen, levels=levels, top_k=top_k)
