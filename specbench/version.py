"""The version of the package, for rooms that must not import the whole of it."""

from __future__ import annotations

__version__ = "0.1.0"
