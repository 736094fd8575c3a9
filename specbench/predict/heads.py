"""The shape of a draft head from its folder: config.json and the headers of its safetensors. No torch, no weights.

The readers are those of the engine, so a head means the same here as where it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from specbench.engine.heads.layouts import HeadFile, Reading, TensorInfo, check_reading, is_buffer
from specbench.engine.heads.layouts_eagle import read_eagle, read_eagle3
from specbench.engine.heads.layouts_medusa import read_medusa
from specbench.engine.heads.layouts_mtp import read_mtp
from specbench.engine.heads.spec import HeadKind, HeadSpec
from specbench.engine.models.sources import CONFIG_FILE, read_json_object, safetensors_files
from specbench.errors import InputError
from specbench.roofline.config_keys import Keys
from specbench.roofline.shapes import ModelSpec

_READERS: dict[HeadKind, Callable[[HeadFile, ModelSpec], Reading]] = {
    "medusa": read_medusa,
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "mtp": read_mtp,
}
MAX_HEADER_BYTES = 100 << 20


def head_spec(folder: Path, target: ModelSpec, kind: HeadKind) -> HeadSpec:
    """The head in `folder`. Raises InputError, naming file and key, for what the engine would refuse too, and for
    weights that are no safetensors: their shapes can't be read without loading them."""
    config = folder / CONFIG_FILE
    keys = Keys(read_json_object(config), config)
    tensors: dict[str, TensorInfo] = {}
    for path in safetensors_files(folder)[1]:
        tensors |= {name: info for name, info in safetensors_header(path).items() if not is_buffer(name)}
    file = HeadFile(folder.name, folder, keys, tensors)
    reading = _READERS[kind](file, target)
    check_reading(reading, file)
    return reading.spec


def safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and types of a safetensors file: eight bytes of length, little endian, then JSON of that length."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise InputError("is no safetensors file", file=path, remedy="fetch it again")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: TensorInfo(tuple(entry["shape"]), str(entry["dtype"]), path) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"can't be read: {error}", file=path, remedy="fetch it again") from None
