"""Typed fields of a scenario: what a number, a text, a flag and an axis are, and what is refused, with the remedy.

A value comes from a YAML file (a `YamlScalar`, whose text decides) or from Python (a plain value); both are read by the
same functions, so that a scenario written back as a dict reads the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from specbench.scenario.yaml_reader import YamlScalar, as_read, yaml_number

SEED_MAX = 2**63 - 1
TAG = "\0"
"""Begins the union tags that pydantic puts into an error's place; no key of a YAML file holds a NUL."""

_DECIMAL = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_LEADING_ZERO = re.compile(r"([-+]?)0+([0-9]+(?:\.[0-9]*)?)")


class ScalarFault(ValueError):
    """A scalar that is not what its field wants; whoever knows the place turns it into an InputError."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


def read_text(value: object, *, multiline: bool = False) -> str:
    """A string with something in it. `multiline` also lets line breaks and tabs through."""
    if isinstance(value, YamlScalar):
        if value.kind != "text":
            what = as_read(value)
            raise ScalarFault(f"YAML reads {value.text} as {what}, where text is wanted", f'quote it: "{value.text}"')
        value = value.text
    if not isinstance(value, str):
        raise ScalarFault(f"must be text, not {described(value)}", "write one word or a quoted text")
    bare = value.replace("\n", "").replace("\t", "") if multiline else value
    if not bare.isprintable() or not value:
        what = "holds a control character" if value else "is empty"
        raise ScalarFault(what, "write a text that can be printed")
    return value


def read_flag(value: object) -> bool:
    """true or false."""
    if isinstance(value, YamlScalar) and value.kind == "bool":
        return as_read(value) == "true"
    if isinstance(value, bool):
        return value
    raise ScalarFault(f"must be true or false, not {described(value)}", "write true or false")


def read_switch(value: object) -> bool:
    """on or off; true and false mean the same."""
    text = as_read(value) if isinstance(value, YamlScalar) else value
    if text in ("on", "off") or (isinstance(text, str) and text in ("true", "false")):
        return text in ("on", "true")
    if isinstance(value, bool):
        return value
    raise ScalarFault(f"must be on or off, not {described(value)}", "write on or off")


def read_integer(value: object, low: int, high: int) -> int:
    """A whole number in [low, high]; `8.0`, `010`, `0x8` and `true` are refused."""
    number = value
    if isinstance(value, YamlScalar):
        text = _decimal_text(value)
        if not _WHOLE.fullmatch(text):
            raise ScalarFault(f"must be a whole number, not {text}", f"write a whole number in {low}..{high}")
        number = int(text) if len(text) < 40 else high + 1 if text[0] != "-" else low - 1
    if isinstance(number, bool) or not isinstance(number, int):
        raise ScalarFault(f"must be a whole number, not {described(value)}", f"write a number in {low}..{high}")
    if not low <= number <= high:
        raise ScalarFault(f"{_shown(value)} is out of range", f"write a whole number in {low}..{high}")
    return number


def read_number(value: object, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> float:
    """A finite number in [low, high], an end left out where it is open; `1e-3` and `1.0e3` are numbers here."""
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    remedy = f"write a number in {interval}"
    number = float(_decimal_text(value)) if isinstance(value, YamlScalar) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ScalarFault(f"must be a number, not {described(value)}", remedy)
    if isinstance(number, float) and not math.isfinite(number):
        raise ScalarFault(f"must be a finite number, not {_shown(value)}", remedy)
    below = number <= low if open_low else number < low
    above = number >= high if open_high else number > high
    if below or above:
        raise ScalarFault(f"{_shown(value)} is out of range", remedy)
    return float(number) + 0.0  # -0.0 becomes 0.0


def _decimal_text(scalar: YamlScalar) -> str:
    """The text of a plain decimal number, or a ScalarFault that says what YAML read instead."""
    text = scalar.text
    if scalar.quoted:
        raise ScalarFault(f"must be a number, not the quoted text {text[:40]!r}", "write a number without quotes")
    if _DECIMAL.fullmatch(text):
        return text
    if text.lower().lstrip("+-.") in ("inf", "nan", "infinity"):
        raise ScalarFault(f"must be a finite number, not {text}", "write a finite number")
    zero = _LEADING_ZERO.fullmatch(text)
    if zero:
        plain_text = f"{zero[1].removeprefix('+')}{zero[2]}"
        octal = yaml_number(text) if scalar.kind == "number" and "." not in text else None
        if octal is not None:
            raise ScalarFault(f"YAML reads {text} as octal: {octal}", f"write {plain_text} or {octal}")
        message = f"{text} has a leading zero" if scalar.kind == "number" else f"YAML reads {text} as text"
        raise ScalarFault(message, f"write {plain_text}")
    if scalar.kind == "number":
        value = yaml_number(text)
        how = " (base 60)" if ":" in text else ""
        if value is None:
            raise ScalarFault(f"YAML reads {text} as a number it can't make", "write a plain decimal number")
        raise ScalarFault(f"YAML reads {text} as the number {value}{how}", f"write {value} if that is meant")
    if scalar.kind in ("bool", "date"):
        raise ScalarFault(f"YAML reads {text} as {as_read(scalar)}, where a number is wanted", "write a number")
    raise ScalarFault(f"must be a number, not the text {text[:40]!r}", "write a decimal number such as 8 or 0.5")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "the number"
    return (value.text if isinstance(value, YamlScalar) else str(value))[:40]


def described(value: object) -> str:
    """What kind of thing `value` is, in the words of an error."""
    if isinstance(value, YamlScalar):
        return repr(value.text[:40])
    if value is None:
        return "an empty value"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, Iterable):
        return "a list"
    return repr(value)[:40]


def fault(message: str, remedy: str, *at: str | int) -> PydanticCustomError:
    """An error with its remedy; `at` is the place below the model that raises it."""
    return PydanticCustomError("specbench", "{message}", {"message": message, "remedy": remedy, "at": at})


def reader(read: Callable[..., object], *args: Any, **options: Any) -> BeforeValidator:
    """A pydantic validator from a reader that raises ScalarFault."""

    def check(value: object) -> object:
        try:
            return read(value, *args, **options)
        except ScalarFault as error:
            raise fault(error.message, error.remedy) from None

    return BeforeValidator(check)


def choice(*choices: str) -> BeforeValidator:
    """A text that is one of `choices`."""

    def read(value: object) -> str:
        text = read_text(value)
        if text not in choices:
            raise ScalarFault(f"{text!r} is not known", suggest(text, choices))
        return text

    return reader(read)


def suggest(word: str, choices: Mapping[str, object] | tuple[str, ...]) -> str:
    """A remedy that names the nearest of `choices` and lists them all."""
    near = get_close_matches(word, list(choices), n=1)
    start = f"did you mean {near[0]}? " if near else ""
    return f"{start}choose from: {', '.join(choices)}" if choices else "nothing may stand here"


def as_items(value: object) -> object:
    """The items of a list, or one value as a tuple of one; an empty list is refused."""
    if isinstance(value, list | tuple):
        if not value:
            raise fault("the list is empty", "give at least one value, or leave the key out")
        return tuple(value)
    return (value,)


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values`, of which none may stand twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            shown = value if isinstance(value, str | int | float | None) else "the same entry"
            raise fault(f"{shown} stands here twice", "keep each value once", index)
    return values


T = TypeVar("T")
Text = Annotated[str, reader(read_text)]
Flag = Annotated[bool, reader(read_flag)]
Switch = Annotated[bool, reader(read_switch)]
Depth = Annotated[int, reader(read_integer, 0, 64)]
Dtype = Annotated[Literal["fp32", "bf16", "fp16", "fp64"], choice("fp32", "bf16", "fp16", "fp64")]
Seed = Annotated[int, reader(read_integer, 0, SEED_MAX)]
Rate = Annotated[float, reader(read_number, 0, 1)]
Axis = Annotated[tuple[T, ...], BeforeValidator(as_items), AfterValidator(distinct)]
"""One value or a list, never empty, each value once; a list is an axis of the sweep."""


class Section(BaseModel):
    """A mapping of the file: frozen, and no key is read that isn't named here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
