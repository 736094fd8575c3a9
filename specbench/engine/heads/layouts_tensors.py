"""A head's tensors from their stored form to the canonical one and back, recipe by recipe (`layouts.Recipe`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specbench.engine.heads.layouts import D2T, T2D, HeadFile, Reading, Recipe
from specbench.engine.heads.spec import HeadSpec, head_tensor_shapes
from specbench.errors import InputError

_MAP_REMEDY = "the vocabulary map is damaged or another target's: fetch the head again"


def canonical_tensors(
    reading: Reading,
    file: HeadFile,
    stored: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """All canonical tensors of a reading, in `dtype` on `device`, copies of their own (equal ones may be shared).

    Raises InputError, naming file and tensor, for values that are not finite in `dtype`, copies that differ, and
    vocabulary maps that leave the target's vocabulary, do not ascend, or disagree with their mask.
    """
    spec = reading.spec
    # Before the weights: map_rows relies on ids within the vocabulary.
    ids = _draft_ids(reading.recipes["draft_ids"], stored, spec, file) if spec.reduced_vocabulary else None
    found: dict[str, torch.Tensor] = {}
    made: dict[Recipe, torch.Tensor] = {}
    for name, shape in head_tensor_shapes(spec).items():
        recipe = reading.recipes[name]
        if name == "draft_ids" and ids is not None:
            found[name] = ids.to(device)
            continue
        # Heads that share one stored tensor (one unembedding for all) share the canonical one too.
        if recipe not in made or not recipe.stored:
            parts = [stored[part] for part in recipe.stored]
            value = _combine(recipe, parts, shape, spec, file)
            out = torch.empty(shape, dtype=dtype, device=device).copy_(value)
            if not bool(torch.isfinite(out).all()):
                raise InputError(
                    f"values that are not finite in {dtype}",
                    file=file.where(recipe.stored[0]),
                    key=recipe.stored[0],
                    remedy="use bf16 or fp32 if the dtype is fp16; otherwise the file is damaged: fetch it again",
                )
            made[recipe] = out
        found[name] = made[recipe]
    if reading.whole_map is not None and bool(stored[reading.whole_map].any()):
        raise InputError(
            "maps some of the draft's tokens to others, though the draft vocabulary is the whole of the target's",
            file=file.where(reading.whole_map),
            key=reading.whole_map,
            remedy=_MAP_REMEDY,
        )
    if reading.mask is not None:
        _check_mask(stored[reading.mask], ids, reading.mask, file)
    return found


def _combine(
    recipe: Recipe, parts: list[torch.Tensor], shape: tuple[int, ...], spec: HeadSpec, file: HeadFile
) -> torch.Tensor:
    if recipe.op == "zeros":
        return torch.zeros(shape)
    if recipe.op == "plus_one":
        return parts[0].double() + 1
    if recipe.op == "hidden_first":
        state = spec.target_hidden_size
        return torch.cat([parts[0][:, state:], parts[0][:, :state]], dim=1)
    if recipe.op == "join":
        return torch.cat(parts, dim=1)
    if recipe.op == "same":
        for name, part in zip(recipe.stored, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise InputError(
                    f"differs from {recipe.stored[0]}; modules with different embeddings are not supported",
                    file=file.where(name),
                    key=name,
                )
    if recipe.op == "map_rows":
        weight, ids = parts
        kept, order = ids.long().sort()
        return weight[kept] if weight.shape[0] != spec.draft_vocab_size else weight[order]
    return parts[0]


def _draft_ids(recipe: Recipe, stored: Mapping[str, torch.Tensor], spec: HeadSpec, file: HeadFile) -> torch.Tensor:
    """int64[draft_vocab], strictly ascending, of the target's vocabulary."""
    (name,) = recipe.stored
    ids = stored[name].long()
    ids = ids + torch.arange(len(ids)) if recipe.op == "offsets" else ids.sort().values
    outside = (ids < 0) | (ids >= spec.target_vocab_size)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise InputError(
            f"entry {at} means token {int(ids[at])}, outside the target's vocabulary of {spec.target_vocab_size}",
            file=file.where(name),
            key=name,
            remedy=_MAP_REMEDY,
        )
    steps = ids[1:] <= ids[:-1]
    if bool(steps.any()):
        at = int(steps.nonzero()[0]) + 1
        meaning = "d2t stores offsets, target id - draft id; " if recipe.op == "offsets" else ""
        raise InputError(
            f"token {int(ids[at])} of entry {at} does not ascend: the entry before means {int(ids[at - 1])}",
            file=file.where(name),
            key=name,
            remedy=meaning + _MAP_REMEDY,
        )
    return ids.contiguous()


def _check_mask(mask: torch.Tensor, ids: torch.Tensor | None, name: str, file: HeadFile) -> None:
    expected = torch.ones(len(mask), dtype=torch.bool)
    if ids is not None:
        expected = torch.zeros(len(mask), dtype=torch.bool)
        expected[ids] = True
    wrong = (mask.bool() != expected).nonzero()
    if len(wrong):
        raise InputError(
            f"disagrees with {D2T} on {len(wrong)} tokens, such as {int(wrong[0])}",
            file=file.where(name),
            key=name,
            remedy=_MAP_REMEDY,
        )


def stored_tensors(
    recipes: Mapping[str, Recipe],
    spec: HeadSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    masked: bool,
) -> dict[str, torch.Tensor]:
    """What to store so that the recipes give `tensors` again: floats in `dtype`, vocabulary maps int64, masks bool.

    ValueError if one stored tensor would have to hold two values, or if draft_ids do not ascend.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, recipe in recipes.items():
        for part, value in zip(recipe.stored, _parts(recipe, tensors[name].detach().cpu(), spec), strict=True):
            if value is None:
                continue
            value = (value if recipe.op in ("offsets", "sorted_map") else value.to(dtype)).contiguous().clone()
            if part in stored and not torch.equal(stored[part], value):
                raise ValueError(f"{part} would have to hold two different tensors: the modules do not share it")
            stored[part] = value
    if masked and spec.reduced_vocabulary:
        mask = torch.zeros(spec.target_vocab_size, dtype=torch.bool)
        mask[tensors["draft_ids"].cpu()] = True
        stored[T2D] = mask
    return stored


def _parts(recipe: Recipe, value: torch.Tensor, spec: HeadSpec) -> list[torch.Tensor | None]:
    """The stored tensors of a canonical one; None where another recipe stores it."""
    if recipe.op in ("offsets", "sorted_map"):
        ids = value.long()
        if bool((ids[1:] <= ids[:-1]).any()) or not 0 <= int(ids[0]) <= int(ids[-1]) < spec.target_vocab_size:
            raise ValueError("draft_ids must be strictly ascending tokens of the target")
        return [ids - torch.arange(len(ids)) if recipe.op == "offsets" else ids]
    if recipe.op == "plus_one":
        return [value.double() - 1]
    if recipe.op == "hidden_first":
        return [torch.cat([value[:, spec.hidden_size :], value[:, : spec.hidden_size]], dim=1)]
    if recipe.op == "join":
        return [value[:, : spec.hidden_size], value[:, spec.hidden_size :]]
    if recipe.op == "map_rows":
        return [value, None]
    return [value for _ in recipe.stored]
