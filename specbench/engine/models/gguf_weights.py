"""GGUF files: header, tensors by canonical name, dequantisation block by block. No torch.

The header is parsed here, with every length checked against the file, because a GGUF's vocabulary has hundreds of
thousands of strings (the gguf library's reader takes seconds for them) and a damaged length must be an error, not a
long loop. Quantised values are decoded by the gguf library.

Format: magic, version, tensor count, key count; keys; tensor infos (dimensions innermost first); aligned data.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError

# Types that the loader decodes, by GGML's number. Each is covered by a test.
SUPPORTED_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 14: "Q6_K", 30: "BF16"}
# Block elements and bytes per block.
_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q6_K": (256, 210),
}
# Architectures whose q and k rows are stored permuted, for interleaved RoPE.
PERMUTED_ARCHITECTURES = frozenset({"llama"})
ROPE_FACTORS = "rope_freqs.weight"

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

_TOP_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place: shape outermost first, type, and bytes [offset, offset + num_bytes) of the file.

    `num_bytes` is None where the type is not one of SUPPORTED_TYPES.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int
    num_bytes: int | None

    @property
    def type_name(self) -> str:
        """GGML's name of the type, or its number where this program does not decode it."""
        return SUPPORTED_TYPES.get(self.type_number, f"type {self.type_number}")


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. `metadata` maps keys to plain Python values (numbers, strings, lists)."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def float_blocks(
        self, name: str, *, row_order: NDArray[np.int64] | None = None, max_elements: int = 1 << 18
    ) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """Yield (start, stop, values) over the rows of a tensor, values float32 [stop - start, row length].

        Row i of the result is stored row `row_order[i]`. A 1-D tensor counts as rows of one element. At most about
        `max_elements` values are held at once.
        """
        from gguf import GGMLQuantizationType, quants

        tensor = self.tensors[name]
        if tensor.num_bytes is None:
            raise InputError(
                f"tensor {name} is of {tensor.type_name}, which is not decoded here",
                file=self.path,
                key=name,
                remedy=f"use a file with {', '.join(SUPPORTED_TYPES.values())}",
            )
        num_rows, row_length = tensor.shape[0], int(np.prod(tensor.shape[1:], dtype=np.int64))
        stored = np.memmap(self.path, mode="r", offset=tensor.offset, shape=(num_rows, tensor.num_bytes // num_rows))
        step = max(1, max_elements // row_length)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            rows = stored[start:stop] if row_order is None else stored[row_order[start:stop]]
            # A copy in memory, for the map is read-only and may be unaligned; as one long row, which the library
            # decodes in one go.
            flat = np.array(rows, order="C").reshape(1, -1)
            values = quants.dequantize(flat, GGMLQuantizationType(tensor.type_number))
            yield start, stop, np.ascontiguousarray(values, dtype=np.float32).reshape(stop - start, row_length)

    def values(self, name: str) -> NDArray[np.float32]:
        """A whole tensor as float32 in its own shape, rows as stored."""
        parts = [values for _, _, values in self.float_blocks(name)]
        return np.concatenate(parts).reshape(self.tensors[name].shape)


def open_gguf(path: Path) -> GGUFFile:
    """Parse a GGUF v2 or v3 header, little-endian. InputError if it is truncated, damaged or of another kind."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))
    except (OSError, ValueError) as error:
        raise InputError(f"can't be read: {error}", file=path) from None


def canonical_name(name: str) -> str | None:
    """The canonical (Hugging Face) name of a GGUF tensor; None if it is not part of a Llama-like decoder."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def half_split_order(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Stored row for each half-split row: q and k of the llama architecture -> pairs (i, i + D/2).

    A converter permutes each head's rows 0, D/2, 1, D/2 + 1, …; so half-split row i lies at 2·i, and row D/2 + i at
    2·i + 1. Whole rows move, so it holds for quantised rows too. Pass the number of KV heads for k.
    """
    within = np.arange(head_dim, dtype=np.int64).reshape(head_dim // 2, 2).T.reshape(-1)
    heads = np.arange(num_heads, dtype=np.int64)[:, None] * head_dim
    return (heads + within[None, :]).reshape(-1)


class _Cursor:
    """Reads forward through a header; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0

    def error(self, message: str) -> InputError:
        return InputError(message, file=self.path, remedy="the file is damaged or incomplete: fetch it again")

    def take(self, num_bytes: int) -> int:
        """Advance by num_bytes and return where they start."""
        start, end = self.offset, self.offset + num_bytes
        if end > len(self.data):
            raise self.error(f"truncated GGUF: needs bytes up to {end}, has {len(self.data)}")
        self.offset = end
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"a string at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise self.error(f"unknown value type {kind} at byte {self.offset}")

    def array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            item = struct.calcsize(f"<{_SCALARS[kind]}")
            start = self.take(item * length)
            return list(struct.unpack_from(f"<{length}{_SCALARS[kind]}", self.data, start))
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        raise self.error(f"unsupported array of type {kind} at byte {self.offset}")


def _parse(cursor: _Cursor) -> GGUFFile:
    start = cursor.take(4)
    if cursor.data[start : start + 4] != _MAGIC:
        raise InputError("not a GGUF file (wrong magic)", file=cursor.path)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise InputError(f"GGUF version {version} (or big-endian) is not read; 2 and 3 are", file=cursor.path)
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"key {key} stands twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if name in infos or not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.error(f"tensor {name} stands twice or has {num_dims} dimensions")
        dims = tuple(cursor.scalar("Q") for _ in range(num_dims))
        infos[name] = (dims[::-1], cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two, is {alignment!r}")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {name: _placed(cursor, name, data_start, *info) for name, info in infos.items()}
    return GGUFFile(cursor.path, metadata, tensors)


def _placed(
    cursor: _Cursor, name: str, data_start: int, shape: tuple[int, ...], type_number: int, offset: int
) -> GGUFTensor:
    if min(shape) == 0:
        raise cursor.error(f"tensor {name} has an empty shape {list(shape)}")
    num_bytes: int | None = None
    if type_number in SUPPORTED_TYPES:
        block, block_bytes = _BLOCKS[SUPPORTED_TYPES[type_number]]
        # A 1-D tensor is read as rows of one element, so its type must not be blocked.
        if shape[-1] % block or (len(shape) == 1 and block > 1):
            raise cursor.error(f"tensor {name} {list(shape)} does not fit blocks of {block}")
        num_elements = 1
        for size in shape:
            num_elements *= size
        num_bytes = num_elements // block * block_bytes
        if data_start + offset + num_bytes > len(cursor.data):
            raise cursor.error(
                f"truncated GGUF: tensor {name} ends at byte {data_start + offset + num_bytes}, "
                f"the file has {len(cursor.data)}"
            )
    return GGUFTensor(name, shape, type_number, data_start + offset, num_bytes)
