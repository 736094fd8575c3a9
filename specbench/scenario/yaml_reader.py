"""Safe YAML that remembers where everything stood, so that an error can name the file, the line and the key.

PyYAML's events are composed here rather than by its own loader: nesting, size and aliases are bounded, duplicate keys,
tags and second documents are refused, and a scalar keeps the text it was written with. That text is what the typed
readers in fields.py look at, because YAML 1.1 reads `010` as 8, `12:30` as 750, `no` as false and `1e-3` as a string.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specbench.errors import InputError

MAX_BYTES = 1_000_000
MAX_NODES = 10_000
MAX_DEPTH = 20

_KINDS = {"null": "null", "bool": "bool", "int": "number", "float": "number", "timestamp": "date"}


@dataclass(frozen=True)
class YamlScalar:
    """A leaf. `kind` is what YAML 1.1 reads the plain text as ("null", "bool", "number", "date", "text"); a quoted or
    block scalar is "text" with `quoted` set."""

    text: str
    kind: str
    quoted: bool
    line: int


@dataclass(frozen=True)
class YamlSequence:
    """A list; `line` is where it starts."""

    items: tuple[YamlNode, ...]
    line: int


@dataclass(frozen=True)
class YamlMapping:
    """A mapping; `key_lines` holds the line of each key."""

    entries: dict[str, YamlNode]
    key_lines: dict[str, int]
    line: int


YamlNode = YamlScalar | YamlSequence | YamlMapping


def plain(node: YamlNode) -> object:
    """dicts and lists with `YamlScalar` leaves, null as None: what the typed readers and pydantic take."""
    if isinstance(node, YamlMapping):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, YamlSequence):
        return [plain(item) for item in node.items]
    return None if node.kind == "null" else node


def read_yaml(path: Path | str) -> YamlMapping:
    """The mapping in the YAML file at `path`.

    Raises InputError for a file that can't be read or isn't UTF-8, is empty or over 1 MB, for syntax errors, tabs as
    indentation, duplicate or non-string keys, tags, several documents, and what unfolds to over 10,000 nodes.
    """
    return parse_yaml(_read_text(path), file=path)


def parse_yaml(text: str, *, file: Path | str) -> YamlMapping:
    """As `read_yaml`, from a text; `file` is only named in errors."""
    for number, row in enumerate(text.split("\n"), start=1):
        if "\t" in row[: len(row) - len(row.lstrip())] and row.strip():
            raise InputError("a tab indents this line", file=file, line=number, remedy="indent with spaces")
    try:
        root = _Composer(text, file).document()
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise InputError(
            f"the character {error.character!r} is not allowed", file=file, line=line, remedy="delete it"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise InputError(f"not YAML: {_problem(error)}", file=file, line=line, remedy=_syntax_remedy(error)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(
            f"not YAML: {error}", file=file, remedy="look for a broken \\ escape or a broken %YAML line"
        ) from None
    if isinstance(root, YamlMapping):
        return root
    what = "a list" if isinstance(root, YamlSequence) else "one value"
    raise InputError(f"holds {what}, not keys", file=file, line=root.line, remedy="start with `name: ...`")


def _problem(error: yaml.MarkedYAMLError) -> str:
    return " ".join(str(part) for part in (error.context, error.problem) if part)


def _syntax_remedy(error: yaml.MarkedYAMLError) -> str:
    problem = _problem(error)
    if "'\\t'" in problem:
        return "use spaces where the tab stands"
    if "mapping values are not allowed" in problem:
        return "quote the value that holds a colon, or check the indentation"
    if "alias" in problem:
        return "write the value out"
    return "check the indentation, and that every quote and bracket is closed"


def _read_text(path: Path | str) -> str:
    remedy = "give the path of a YAML file"
    if os.path.isdir(path):
        raise InputError("this is a folder, not a YAML file", file=path, remedy=remedy)
    if os.path.lexists(path) and not os.path.isfile(path):
        raise InputError("this is not a regular file", file=path, remedy=remedy)
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError("no such file", file=path, remedy=remedy) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"can't be read: {reason}", file=path, remedy=remedy) from None
    if len(data) > MAX_BYTES:
        raise InputError(f"is larger than {MAX_BYTES} bytes", file=path, remedy="a scenario is a page of text")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            file=path,
            line=data[: error.start].count(b"\n") + 1,
            remedy="save the file as UTF-8",
        ) from None


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


class _Composer:
    """Builds one document from PyYAML's events, counting nodes as they unfold."""

    def __init__(self, text: str, file: Path | str) -> None:
        self.file = file
        self.loader: Any = yaml.SafeLoader(text)
        self.anchors: dict[str, tuple[YamlNode, int]] = {}
        self.num_nodes = 0

    def document(self) -> YamlNode:
        self._next()  # the start of the stream
        start = self._next()
        if isinstance(start, yaml.StreamEndEvent):
            raise InputError("is empty", file=self.file, remedy="start with `name: ...`")
        event = self._next()
        node = self._node(event, 0)
        self._next()  # the end of the document
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._fault(after, "a second document starts here", "keep one scenario a file; drop the `---`")
        if isinstance(node, YamlScalar) and not node.quoted and not node.text:
            raise InputError("is empty", file=self.file, remedy="start with `name: ...`")
        return node

    def _next(self) -> yaml.Event:
        event: yaml.Event = self.loader.get_event()
        return event

    def _fault(self, event: yaml.Event, message: str, remedy: str, key: str | None = None) -> InputError:
        return InputError(message, file=self.file, line=_line(event), key=key, remedy=remedy)

    def _count(self, event: yaml.Event, num_nodes: int) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            raise self._fault(event, f"unfolds to more than {MAX_NODES} values", "write fewer values or aliases")

    def _node(self, event: yaml.Event, depth: int) -> YamlNode:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self._fault(event, f"the alias *{event.anchor} has no value yet", "write the value out")
            node, size = self.anchors[event.anchor]
            self._count(event, size)
            return node
        if depth > MAX_DEPTH:
            raise self._fault(event, f"is nested more than {MAX_DEPTH} deep", "a scenario needs four levels")
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            raise self._fault(event, "a value is missing here", "check the indentation and the brackets")
        if event.tag is not None:
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._fault(event, f"the tag {shown} is not read", "drop the tag; quote the value to keep it text")
        before = self.num_nodes
        self._count(event, 1)
        node = self._untagged(event, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, self.num_nodes - before)
        return node

    def _untagged(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, depth: int) -> YamlNode:
        line = _line(event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, line)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := self._next(), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            return YamlSequence(tuple(items), line)
        entries: dict[str, YamlNode] = {}
        key_lines: dict[str, int] = {}
        while not isinstance(key_event := self._next(), yaml.MappingEndEvent):
            key = self._key(key_event, depth)
            if key in entries:
                message = f"the key stands on line {key_lines[key]} already"
                raise self._fault(key_event, message, "keep one of the two", key)
            key_lines[key] = _line(key_event)
            entries[key] = self._node(self._next(), depth + 1)
        return YamlMapping(entries, key_lines, line)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> YamlScalar:
        quoted = not event.implicit[0]
        if any("\ud800" <= character <= "\udfff" for character in event.value):
            raise self._fault(event, "holds half of a surrogate pair", "write the character whole")
        if quoted:
            return YamlScalar(event.value, "text", True, line)
        tag: str = self.loader.resolve(yaml.ScalarNode, event.value, (True, False))
        return YamlScalar(event.value, _KINDS.get(tag.rpartition(":")[2], "text"), False, line)

    def _key(self, event: yaml.Event, depth: int) -> str:
        node = self._node(event, depth + 1)
        if not isinstance(node, YamlScalar):
            raise self._fault(event, "a key is a list or a mapping", "use a word as the key")
        if node.text == "<<" and not node.quoted:
            raise self._fault(event, "merge keys are not read", "write the values out", "<<")
        if node.kind != "text":
            what = as_read(node) or "null"
            raise self._fault(event, f"YAML reads this key as {what}", "use a word, or quote it", node.text or None)
        return node.text


def as_read(scalar: YamlScalar) -> str:
    """What YAML 1.1 makes of a plain scalar, in words."""
    if scalar.kind == "bool":
        return "true" if scalar.text.lower() in ("yes", "true", "on") else "false"
    if scalar.kind == "null":
        return "null"
    if scalar.kind == "date":
        return "a date"
    if scalar.kind == "number":
        value = yaml_number(scalar.text)
        return f"the number {value}" if value is not None else "a number"
    return "text"


def yaml_number(text: str) -> int | float | None:
    """The value YAML 1.1 gives a number's text; None where Python can't make one of it."""
    digits = text.replace("_", "").lower()
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits.removeprefix("+"))
    try:
        if ":" in digits:
            total: int | float = 0
            for part in digits.split(":"):
                total = total * 60 + (float(part) if "." in part else int(part))
            return sign * total
        if digits.startswith(("0b", "0x")):
            return sign * int(digits, 0)
        if digits in (".inf", ".nan"):
            return sign * float(digits[1:])
        if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
            return sign * int(digits, 8)
        return sign * (float(digits) if "." in digits or "e" in digits else int(digits))
    except (ValueError, OverflowError):
        return None
