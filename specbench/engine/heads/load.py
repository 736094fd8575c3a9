"""Draft heads from their files: `resolve_head`, `read_head_spec`, `load_head`; and back: `write_head`.

What a head's files must look like, layout by layout, is told in docs/heads.md.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specbench.engine.heads.layouts import D2T, T2D, HeadFile, Layout, Reading, TensorInfo, check_reading
from specbench.engine.heads.layouts_eagle import EAGLE_LAYOUTS, read_eagle, read_eagle3
from specbench.engine.heads.layouts_files import open_head, wanted_shards, weight_files
from specbench.engine.heads.layouts_medusa import MEDUSA_LAYOUTS, read_medusa
from specbench.engine.heads.layouts_mtp import MTP_LAYOUTS, is_mtp_name, read_mtp, text_keys
from specbench.engine.heads.spec import HEAD_KINDS, HeadKind, HeadSpec, head_tensor_shapes
from specbench.engine.models.sources import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, files_digest, read_json_object
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys
from specbench.roofline.shapes import ModelSpec

if TYPE_CHECKING:
    import torch

BUILTIN_PREFIX = "builtin:"
LAYOUTS: dict[str, Layout] = {**EAGLE_LAYOUTS, **MEDUSA_LAYOUTS, **MTP_LAYOUTS}
READERS: dict[HeadKind, Callable[[HeadFile, ModelSpec], Reading]] = {
    "medusa": read_medusa,
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "mtp": read_mtp,
}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_METADATA_PATTERNS = ["config.json", "*.index.json"]
_WEIGHT_PATTERNS = ["*.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"]


@dataclass(frozen=True)
class HeadSource:
    """A head's folder. `revision` is the hub's commit hash or a digest of the files."""

    kind: Literal["builtin", "folder", "hub"]
    path: Path
    revision: str
    display_name: str

    @property
    def label(self) -> str:
        """Source and revision in one string, as stored in a result row."""
        return f"{self.display_name}@{self.revision}"


def resolve_head(name: str, *, target: ModelSpec, revision: str | None = None) -> HeadSource:
    """Find the head that `name` means: `builtin:<kind>`, a folder, or a hub id `org/name`.

    `revision` (branch, tag or commit) belongs to hub ids alone. Of a hub repository that is a whole model with MTP
    layers only the shards that hold them are fetched. Raises InputError, with the remedy, if there is no such head.
    """
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"a head is named by a non-empty string, not {name!r}", key="head")
    if name.startswith(BUILTIN_PREFIX):
        return _builtin(name, target)
    path = Path(name).expanduser()
    if path.is_dir():
        return HeadSource("folder", path, _digest(path), path.resolve().name)
    if path.is_file():
        raise InputError(
            "a head is a folder, not a file"
            + ("; the nextn tensors of a GGUF are not read" if path.suffix == ".gguf" else ""),
            file=path,
            remedy="pass the folder that holds config.json and the weights",
        )
    if _HUB_ID.fullmatch(name):
        return _hub(name, revision)
    raise InputError(
        f"no draft head called {name!r}: no such folder",
        key="head",
        remedy="give builtin:<kind>, a folder, or a hub id org/name",
    )


def _digest(folder: Path) -> str:
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise InputError(
            f"no {CONFIG_FILE} in this folder", file=folder, remedy="pass the folder that a draft head was saved to"
        )
    return files_digest([config, *(path for path in weight_files(folder) if path.is_file())])


def _builtin(name: str, target: ModelSpec) -> HeadSource:
    kind = name.removeprefix(BUILTIN_PREFIX)
    if kind not in HEAD_KINDS:
        raise InputError(f"no built-in heads of kind {kind!r}", key="head", remedy=f"one of {', '.join(HEAD_KINDS)}")
    if _PLAIN_NAME.fullmatch(target.name):
        folder = Path(str(importlib.resources.files("specbench").joinpath("heads", target.name, kind)))
        if (folder / CONFIG_FILE).is_file():
            return HeadSource("builtin", folder, _digest(folder), f"{target.name}/{kind}")
    raise InputError(
        f"no built-in {kind} head for the target {target.name}",
        key="head",
        remedy="train one with `specbench distill SCENARIO` and name its folder, or name a published head",
    )


def _hub(name: str, revision: str | None) -> HeadSource:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(
            f"no folder {name} here, and reading it from the hub needs huggingface_hub",
            key="head",
            remedy="pip install huggingface_hub, or pass a folder with the head's files",
        ) from None
    fetch = partial(huggingface_hub.snapshot_download, name, revision=revision)
    try:
        snapshot = Path(fetch(allow_patterns=_METADATA_PATTERNS))
        patterns = _WEIGHT_PATTERNS
        if (snapshot / INDEX_FILE).is_file():
            patterns = wanted_shards(snapshot / INDEX_FILE, _wanted(snapshot, "mtp"))
        snapshot = Path(fetch(allow_patterns=[*_METADATA_PATTERNS, *patterns]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no folder {name} here, and the hub did not give it: {first_line}",
            key="head",
            remedy="check the name, the revision and the network (gated repositories need `hf auth login`), "
            "or pass a folder with the head's files",
        ) from error
    if not (snapshot / CONFIG_FILE).is_file():
        raise InputError(f"the hub's {name} has no {CONFIG_FILE}", file=snapshot, key="head")
    # A snapshot's folder is named by its commit hash.
    return HeadSource("hub", snapshot, snapshot.name, name)


def _wanted(folder: Path, kind: HeadKind) -> Callable[[str], bool]:
    """Which stored tensors a head of this kind may have; a whole model's folder has others, besides MTP's."""
    if kind != "mtp":
        return lambda stored: True
    config_file = folder / CONFIG_FILE
    keys = text_keys(Keys(read_json_object(config_file), config_file))
    num_layers = keys.count("num_hidden_layers", 0)
    return lambda stored: is_mtp_name(stored, num_layers)


def read_head(source: HeadSource, target: ModelSpec, kind: HeadKind) -> tuple[HeadFile, Reading]:
    """The head's files and what they mean, all names, shapes and types checked. No torch for safetensors."""
    file = open_head(source.path, source.display_name, _wanted(source.path, kind))
    reading = READERS[kind](file, target)
    check_reading(reading, file)
    return file, reading


def read_head_spec(source: HeadSource, target: ModelSpec, kind: HeadKind) -> HeadSpec:
    """The spec of a resolved head, from its config and its tensors' names and shapes; no weights are read.

    Raises InputError, naming file and key, if a key or tensor is missing, unexpected, of another shape or type, or
    means something that the drafters do not compute, and if the head was made for another target.
    """
    return read_head(source, target, kind)[1].spec


def load_head(
    source: HeadSource,
    spec: HeadSpec,
    target: ModelSpec,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """The canonical tensors of `head_tensor_shapes(spec)`, in its order, contiguous, in `dtype` on `device`.

    `draft_ids` is int64, strictly ascending. `spec` is `read_head_spec`'s, or one that differs in how it is drafted
    with (recycle, states). Gemma's 1 is added before rounding. Raises InputError as `read_head_spec`, and if values
    are not finite in `dtype` or the vocabulary maps are wrong.
    """
    from specbench.engine.heads.layouts_files import read_tensors
    from specbench.engine.heads.layouts_tensors import canonical_tensors

    file, reading = read_head(source, target, spec.kind)
    if head_tensor_shapes(reading.spec) != head_tensor_shapes(spec):
        raise InputError(
            "the files changed: they hold another head than the one described",
            file=source.path,
            remedy="run again; the head's folder must not change during a run",
        )
    used = {stored for recipe in reading.recipes.values() for stored in recipe.stored}
    used |= {name for name in (reading.mask, reading.whole_map) if name is not None}
    return canonical_tensors(reading, file, read_tensors(file, used), dtype, device)


def write_head(
    folder: Path,
    spec: HeadSpec,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: str,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a head as config.json and model.safetensors in a published layout (a key of `LAYOUTS`).

    `tensors` are the canonical ones, exactly `head_tensor_shapes(spec)`; floats are stored in `dtype` (bfloat16 unless
    given). `extra` keys are added to the config and win over the layout's: `num_hidden_layers` with "mtp-deepseek" is
    the target's number of layers, behind which DeepSeek numbers its modules.

    What is written reads back as `spec`, names aside; ValueError if this layout has no way to say it.
    """
    import torch
    from safetensors.torch import save_file

    from specbench.engine.heads.layouts_tensors import stored_tensors

    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; one of {', '.join(LAYOUTS)}")
    form = LAYOUTS[layout]
    if form.kind != spec.kind:
        raise ValueError(f"layout {layout} is for heads of kind {form.kind}, not {spec.kind}")
    expected = head_tensor_shapes(spec)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ValueError(f"{wrong[0]}: shape {found.get(wrong[0])}, expected {expected.get(wrong[0])}")
    config = {**form.config(spec), **(extra or {})}
    dtype = torch.bfloat16 if dtype is None else dtype
    config.setdefault("torch_dtype", str(dtype).removeprefix("torch."))
    recipes = form.recipes(spec, config)
    stored = stored_tensors(recipes, spec, tensors, dtype, masked=form.masked)
    _check_says_all(layout, spec, config, {name: tuple(tensor.shape) for name, tensor in stored.items()}, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(stored, folder / SINGLE_FILE, metadata={"format": "pt"})


def _check_says_all(
    layout: str, spec: HeadSpec, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """ValueError unless the reader of this kind would find `spec` again."""
    integers = {D2T: "I64", "token_map": "I64", T2D: "BOOL"}
    infos = {name: TensorInfo(shape, integers.get(name, "F32"), folder / SINGLE_FILE) for name, shape in shapes.items()}
    keys = Keys(json.loads(json.dumps(dict(config))), folder / CONFIG_FILE)
    target = replace(
        spec.layer,
        hidden_size=spec.target_hidden_size,
        vocab_size=spec.target_vocab_size,
        num_layers=max(max(spec.states), 1),
    )
    file = HeadFile(spec.name, folder, keys, infos)
    found = READERS[spec.kind](file, target)
    for field in fields(HeadSpec):
        if field.name != "layer" and getattr(found.spec, field.name) != getattr(spec, field.name):
            raise ValueError(
                f"layout {layout} can't say {field.name} = {getattr(spec, field.name)!r}: it would be read as "
                f"{getattr(found.spec, field.name)!r}"
            )
    for field in fields(ModelSpec) if spec.kind != "medusa" else ():
        if field.name != "name" and getattr(found.spec.layer, field.name) != getattr(spec.layer, field.name):
            raise ValueError(
                f"layout {layout} can't say layer.{field.name} = {getattr(spec.layer, field.name)!r}: it would be read "
                f"as {getattr(found.spec.layer, field.name)!r}"
            )
    check_reading(found, file)
