"""How numbers are stored, and what a matrix of them takes: plain dtypes, integers with group scales, mxfp4.

A weight format is one name for every matrix (`bf16`, `int4-g128`), or a name and the parts that differ from it:
`bf16,experts=mxfp4` (gpt-oss), `int4-g128,head=bf16` (AWQ and GPTQ leave the head alone). Parts: linear, experts, head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from specbench.errors import InputError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes of one value in formats that activations, K and V may have too."""
SCALE_BYTES = 2
"""A group scale of int4, int8 and fp8 is fp16 or bf16 (GPTQ, AWQ, Marlin: symmetric, no zero points)."""
_BITS = {**{name: 8 * size for name, size in DTYPE_BYTES.items()}, "int4": 4, "mxfp4": 4, "nvfp4": 4}
_BLOCKS = {"mxfp4": (32, 1), "nvfp4": (16, 1)}
"""Values that share a scale, and its bytes. mxfp4: OCP Microscaling v1.0, 32 values and an E8M0 scale, 4.25 bits a
value; nvfp4: 16 values and an E4M3 scale, 4.5 bits."""
_GROUPED = re.compile(r"(int4|int8|fp8)-g([1-9][0-9]*)")
_FLOATS = ("fp64", "fp32", "bf16", "fp16")
PARTS = ("linear", "experts", "head")


@dataclass(frozen=True)
class Format:
    """One storage format. `group` values along a row share a scale of `scale_bytes`; None: no scales are counted."""

    name: str
    bits: int
    group: int | None = None
    scale_bytes: int = 0


@dataclass(frozen=True)
class WeightFormat:
    """The format of each part of a model, and `computed`, the dtype of activations, K, V and norms beside it."""

    linear: Format
    experts: Format
    head: Format
    computed: str


def _unknown(name: str) -> InputError:
    known = ", ".join([*_BITS, "int4-g128"])
    return InputError(f"unknown dtype {name!r}", remedy=f"use one of: {known}", key="dtype")


@lru_cache(maxsize=256)
def parse_format(name: str) -> Format:
    """A format by its name; raises InputError listing the known ones."""
    grouped = _GROUPED.fullmatch(name)
    if grouped:
        return Format(name, _BITS[grouped[1]], int(grouped[2]), SCALE_BYTES)
    if name not in _BITS:
        raise _unknown(name)
    group, scale = _BLOCKS.get(name, (None, 0))
    return Format(name, _BITS[name], group, scale)


@lru_cache(maxsize=256)
def weight_format(text: str) -> WeightFormat:
    """`bf16`, or `int4-g128,head=bf16`: the format of all parts, then of those that differ."""
    base, *rest = (part.strip() for part in text.split(","))
    chosen = dict.fromkeys(PARTS, base)
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or name not in PARTS:
            raise InputError(
                f"{part!r} names no part of a model",
                key="dtype",
                remedy="write for example int4-g128,head=bf16; parts: " + ", ".join(PARTS),
            )
        chosen[name] = value
    named = next((chosen[part] for part in PARTS if chosen[part] in _FLOATS), "bf16")
    computed = base if base in _FLOATS else named
    linear, experts, head = (parse_format(chosen[part]) for part in PARTS)
    return WeightFormat(linear, experts, head, computed)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value of an activation, key or value; raises InputError for a format that these can't have."""
    if dtype not in DTYPE_BYTES:
        if dtype in _BITS or _GROUPED.fullmatch(dtype):
            raise InputError(
                f"{dtype!r} stores weights only", key="dtype", remedy="use one of: " + ", ".join(DTYPE_BYTES)
            )
        raise _unknown(dtype)
    return DTYPE_BYTES[dtype]


def storage_bytes(stored: str | Format, rows: int, cols: int) -> float:
    """Bytes of a matrix [rows, cols] whose rows are split into groups: values and one scale a group begun.

    rows · (cols · bits / 8 + ⌈cols / group⌉ · scale_bytes). int4-g128 takes 0.5 + 2/128 bytes a value.
    """
    kind = parse_format(stored) if isinstance(stored, str) else stored
    scales = -(-cols // kind.group) * kind.scale_bytes if kind.group is not None else 0
    return rows * (cols * kind.bits / 8 + scales)
