"""Which version of the CPU kernels this is, by their sources."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

SOURCES = ("vector", "layout", "kernels", "attention", "program")


@cache
def kernel_revision() -> str:
    """16 hex digits of the sources' digest: compiled code and measured staircases of another version have expired."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]
