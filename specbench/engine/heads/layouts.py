"""What a layout is: how the tensors of a published draft head stand for the canonical ones. No torch.

A reader (`layouts_eagle`, `layouts_medusa`, `layouts_mtp`) looks at a head's config and at the names and shapes of its
tensors and answers with a `Reading`: the spec, and for each canonical tensor a `Recipe` of stored ones. A writer's
`Layout` gives config and recipes for a spec, so that a recipe is written down once and used in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specbench.engine.heads.spec import HeadKind, HeadSpec, head_tensor_shapes
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
INTEGER_TYPES = ("I64", "I32")
MASK_TYPES = ("BOOL", "U8", "I8", "I32", "I64")
D2T, T2D, TOKEN_MAP = "d2t", "t2d", "token_map"

Op = Literal["copy", "plus_one", "hidden_first", "join", "same", "zeros", "offsets", "sorted_map", "map_rows"]


@dataclass(frozen=True)
class Recipe:
    """How one canonical tensor is made of `stored` ones.

    copy          the stored tensor
    plus_one      stored + 1 (Gemma's norms store the distance from 1)
    hidden_first  the stored columns are [state, embedding]; canonical is [embedding, state]
    join          columns of two: [embedding's, state's]
    same          several stored copies, which must be equal
    zeros         nothing is stored
    offsets       id + stored[id] (d2t)
    sorted_map    the stored ids in ascending order (token_map)
    map_rows      of (weight, token_map): the rows of the kept tokens, in ascending order of their ids
    """

    stored: tuple[str, ...]
    op: Op = "copy"


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type ("F16", "I64", ... as safetensors names them) of a stored tensor, and the file it is in."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True)
class HeadFile:
    """A head's config and the headers of its tensors, under their stored names. `path` is its folder."""

    name: str
    path: Path
    keys: Keys
    tensors: Mapping[str, TensorInfo]

    def where(self, stored: str) -> Path:
        """The file of a tensor; the folder for one that is not there."""
        info = self.tensors.get(stored)
        return info.file if info else self.path


@dataclass(frozen=True)
class Reading:
    """What a reader found.

    `ignored`: stored tensors that carry nothing. `mask`: the t2d tensor, checked against the draft's ids.
    `whole_map`: a d2t although the draft has the target's whole vocabulary; it must be all zeros.
    """

    spec: HeadSpec
    recipes: Mapping[str, Recipe]
    ignored: frozenset[str] = field(default_factory=frozenset)
    mask: str | None = None
    whole_map: str | None = None


@dataclass(frozen=True)
class Layout:
    """A layout that can be written: config(spec), recipes(spec, config). `masked`: a t2d tensor stands beside d2t."""

    kind: HeadKind
    config: Callable[[HeadSpec], dict[str, Any]]
    recipes: Callable[[HeadSpec, Mapping[str, Any]], dict[str, Recipe]]
    masked: bool = False


def is_buffer(name: str) -> bool:
    """Whether a stored tensor follows from the config (rotary tables) and is never read."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


def stored_shapes(recipe: Recipe, shape: tuple[int, ...], spec: HeadSpec) -> list[tuple[int, ...] | None]:
    """The shape that each stored tensor of a recipe must have; None: checked where it is read."""
    if recipe.op == "join":
        return [(shape[0], spec.hidden_size), (shape[0], shape[1] - spec.hidden_size)]
    if recipe.op == "map_rows":
        return [None, (shape[0],)]
    return [shape for _ in recipe.stored]


def check_reading(reading: Reading, file: HeadFile) -> None:
    """InputError unless the stored tensors are just those of the reading: none missing, none more, each as expected."""
    shapes = head_tensor_shapes(reading.spec)
    used: set[str] = set(reading.ignored)
    for name, shape in shapes.items():
        recipe = reading.recipes[name]
        for stored, expected in zip(recipe.stored, stored_shapes(recipe, shape, reading.spec), strict=True):
            used.add(stored)
            _check_tensor(file, stored, expected, whole=name == "draft_ids" or stored.endswith(TOKEN_MAP))
    if reading.whole_map is not None:
        used.add(reading.whole_map)
    if reading.mask is not None:
        used.add(reading.mask)
        info = file.tensors[reading.mask]
        if info.shape != (reading.spec.target_vocab_size,) or info.dtype not in MASK_TYPES:
            raise InputError(
                f"{info.dtype} of shape {list(info.shape)}, but a mask over the target's "
                f"{reading.spec.target_vocab_size} tokens is expected",
                file=info.file,
                key=reading.mask,
                remedy="this head is for a target with another vocabulary, or the file is damaged",
            )
    extra = sorted(set(file.tensors) - used)
    if extra:
        raise InputError(
            f"unexpected tensor: a head of kind {reading.spec.kind} with this config has none of this name"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""),
            file=file.where(extra[0]),
            key=extra[0],
            remedy="check the drafter's kind; docs/heads.md lists the layouts that are read",
        )


def _check_tensor(file: HeadFile, stored: str, expected: tuple[int, ...] | None, *, whole: bool) -> None:
    info = file.tensors.get(stored)
    if info is None:
        raise InputError(
            "the tensor is missing",
            file=file.path,
            key=stored,
            remedy="the checkpoint is incomplete, or of another kind than the scenario says; "
            "docs/heads.md lists the layouts that are read",
        )
    if info.dtype not in (INTEGER_TYPES if whole else FLOAT_TYPES):
        wanted = "whole numbers are expected" if whole else "quantised heads are not read"
        raise InputError(
            f"stored as {info.dtype}; {wanted}",
            file=info.file,
            key=stored,
            remedy="fetch the file again" if whole else "use the unquantised checkpoint (bf16, fp16 or fp32)",
        )
    if expected is not None and info.shape != expected:
        raise InputError(
            f"shape {list(info.shape)}, but config and target say {list(expected)}",
            file=info.file,
            key=stored,
            remedy="this head is for another target, its config is another head's, or the file is damaged",
        )


def copies(spec: HeadSpec, rename: Callable[[str], str]) -> dict[str, Recipe]:
    """A recipe for every canonical tensor: copied from the stored name `rename` gives; draft_ids from d2t."""
    recipes = {name: Recipe((rename(name),)) for name in head_tensor_shapes(spec)}
    if spec.reduced_vocabulary:
        recipes["draft_ids"] = Recipe((rename(D2T),), "offsets")
    return recipes


def read_as(
    file: HeadFile,
    spec: HeadSpec,
    recipes: Mapping[str, Recipe],
    *,
    ignored: Iterable[str] = (),
    stored: Callable[[str], str] = str,
) -> Reading:
    """A reading, with the vocabulary maps that the file has; `stored` gives a name as it is stored."""
    d2t, t2d = stored(D2T), stored(T2D)
    return Reading(
        spec,
        recipes,
        frozenset(ignored),
        mask=t2d if t2d in file.tensors else None,
        whole_map=d2t if d2t in file.tensors and not spec.reduced_vocabulary else None,
    )


def map_shape(file: HeadFile, stored: Callable[[str], str] = str) -> tuple[int, ...] | None:
    """Shape of d2t; None without one."""
    info = file.tensors.get(stored(D2T))
    return info.shape if info else None


def check_widths(spec: HeadSpec, file: HeadFile) -> None:
    """A head as wide as its target may share its embedding and unembedding; any other must bring both."""
    for own, what, key in (
        (spec.own_embedding, "embedding (embed_tokens.weight)", "embed_tokens.weight"),
        (spec.own_head, "unembedding (lm_head.weight)", "lm_head.weight"),
    ):
        if spec.hidden_size != spec.target_hidden_size and not own:
            raise InputError(
                f"the head is {spec.hidden_size} wide, its target {spec.target_hidden_size}, so it can't share the "
                f"target's {what}, and it has none of its own",
                file=file.path,
                key=key,
                remedy="check that this head was trained for this target",
            )


def check_target(keys: Keys, key: str, value: int, expected: int) -> None:
    """InputError if the config says the head is for a target of another width or vocabulary."""
    if value != expected:
        raise keys.error(
            key,
            f"{value}, but the target's is {expected}: this head is for another target",
            remedy="name the target that the head was trained for, or another head",
        )
