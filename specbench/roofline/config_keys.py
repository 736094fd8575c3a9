"""Reading a model's config key by key, so that an error names the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.errors import InputError


class Keys:
    """A mapping read key by key, with the file and the key in every error. JSON null counts as absent."""

    def __init__(self, values: Mapping[str, Any], file: Path | str | None, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def error(self, key: str, message: str, *, remedy: str | None = None) -> InputError:
        return InputError(message, file=self.file, key=f"{self.prefix}{key}", remedy=remedy)

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "the key is missing", remedy=f"it must be {what}")
            return default
        # bool is an int to Python, but never a size.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(key, f"must be {what}, is {value!r}")
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, None, (str,), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, (bool,), "true or false"))

    def count(self, key: str, default: int) -> int:
        value = int(self._get(key, default, (int,), "a whole number"))
        if value < 0:
            raise self.error(key, f"must not be negative, is {value}")
        return value

    def optional_integer(self, key: str, absent: int) -> int | None:
        """None if the key is null; `absent` if it is not there."""
        return None if self.values.get(key, absent) is None else self.integer(key, absent)

    def integer(self, key: str, default: int | None = None) -> int:
        value = int(self._get(key, default, (int,), "a positive whole number"))
        if value <= 0:
            raise self.error(key, f"must be a positive whole number, is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, default, (int, float), "a positive number"))
        if not 0 < value < math.inf:
            raise self.error(key, f"must be a positive number, is {value}")
        return value

    def refuse_unless(self, key: str, supported: Any) -> None:
        """InputError if the key is there with another value than the one this decoder computes."""
        value = self.values.get(key)
        if value is not None and value != supported:
            raise self.error(key, f"{value!r} is not supported" + (f"; {supported!r} is" if supported else ""))
