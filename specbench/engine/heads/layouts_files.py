"""A draft head's files: where they are, their headers without torch, and their tensors.

Safetensors are preferred. A pickle (.bin, .pt: what EAGLE's and Medusa's authors published) is read by torch's
restricted unpickler, which builds tensors and plain containers and runs no code of the file's.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.engine.heads.layouts import HeadFile, TensorInfo, is_buffer
from specbench.engine.models.sources import CONFIG_FILE, INDEX_FILE, read_json_object, safetensors_files
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys

if TYPE_CHECKING:
    import torch

_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth"}
_DAMAGED = "the file is damaged or incomplete: fetch it again"


def weight_files(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """The files of `folder` that hold tensors whose name is `wanted`, sorted.

    Of a sharded checkpoint only those shards must be there: a target's MTP layers are read without its other weights.
    """
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).is_file():
        index, files = safetensors_files(folder)
        return files if index is None else [folder / shard for shard in wanted_shards(index, wanted)]
    for name in _PICKLES:
        if (folder / name).is_file():
            return [folder / name]
    found = sorted(path for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if len(found) == 1:
        return found
    if found:
        raise InputError(
            f"{len(found)} pickle files ({found[0].name}, ...), and none is called {' or '.join(_PICKLES)}",
            file=folder,
            remedy="keep the head's weights alone in the folder",
        )
    raise InputError(
        "no weights here",
        file=folder,
        remedy="a head's folder holds config.json and model.safetensors, pytorch_model.bin or medusa_lm_head.pt",
    )


def wanted_shards(index: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Names of the shards that hold a wanted tensor, sorted; InputError if the index is malformed or names none."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("must map tensor names to files", file=index, key="weight_map")
    shards = set()
    for name, shard in weight_map.items():
        # A shard's name is a plain file name: an index must not point out of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{shard!r} is not a file name", file=index, key=f"weight_map.{name}")
        if wanted(name):
            shards.add(shard)
    if not shards:
        raise InputError(
            "none of these tensors belongs to a draft head",
            file=index,
            key="weight_map",
            remedy="pass a checkpoint that holds MTP layers, or the folder of a draft head",
        )
    return sorted(shards)


def open_head(folder: Path, name: str, wanted: Callable[[str], bool] = lambda name: True) -> HeadFile:
    """Config and tensor headers of the head in `folder`; no values are read. Rotary tables are left out."""
    config_file = folder / CONFIG_FILE
    keys = Keys(read_json_object(config_file), config_file)
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder, wanted):
        if not path.is_file():
            raise InputError(f"the shard is missing; {INDEX_FILE} names it", file=path, remedy=_DAMAGED)
        for stored, info in _headers(path):
            if is_buffer(stored) or not wanted(stored):
                continue
            if stored in tensors:
                raise InputError("the tensor stands in two files", file=path, key=stored)
            tensors[stored] = info
    if not tensors:
        raise InputError("no tensors of a draft head here", file=folder, remedy=_DAMAGED)
    return HeadFile(name, folder, keys, tensors)


def _headers(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    if path.suffix == ".safetensors":
        with _opened(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                view = file.get_slice(name)
                yield name, TensorInfo(tuple(view.get_shape()), view.get_dtype(), path)
        return
    for name, tensor in _unpickled(path, "meta").items():
        yield name, TensorInfo(tuple(tensor.shape), _type_name(tensor.dtype), path)


def read_tensors(file: HeadFile, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The stored tensors of these names, on the CPU, as stored. They may lie in a map of the file."""
    by_file: dict[Path, list[str]] = {}
    for name in sorted(set(names)):
        by_file.setdefault(file.tensors[name].file, []).append(name)
    found: dict[str, torch.Tensor] = {}
    for path, wanted in by_file.items():
        if path.suffix == ".safetensors":
            with _opened(path, "pt") as opened:
                found.update((name, opened.get_tensor(name)) for name in wanted)
        else:
            stored = _unpickled(path, "cpu")
            found.update((name, stored[name]) for name in wanted)
    return found


def _opened(path: Path, framework: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise InputError(f"not a whole safetensors file: {error}", file=path, remedy=_DAMAGED) from None
    except OSError as error:
        raise InputError(f"can't be read: {error}", file=path) from None


def _unpickled(path: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a pickle; on device "meta" shapes and types alone."""
    import torch

    try:
        stored = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"not a plain file of tensors: {(str(error).splitlines() or ['no reason given'])[0]}",
            file=path,
            remedy="the file is damaged, or holds code, which is never run; convert it to safetensors",
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"can't be read as a file of tensors: {reason}", file=path, remedy=_DAMAGED) from None
    if not isinstance(stored, dict) or not all(isinstance(value, torch.Tensor) for value in stored.values()):
        raise InputError(
            "a pickle of something else than named tensors",
            file=path,
            remedy="save the head's state_dict alone: torch.save(model.state_dict(), file), or safetensors",
        )
    return {str(name): value for name, value in stored.items()}


def _type_name(dtype: torch.dtype) -> str:
    """A torch type by safetensors' name of it."""
    import torch

    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    return names.get(dtype, str(dtype).removeprefix("torch."))
