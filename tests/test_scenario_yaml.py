"""The YAML reader: every refusal names the file, the line, the key and a remedy, and nothing else ever escapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.errors import ExitCode, InputError
from specbench.scenario.yaml_reader import MAX_BYTES, YamlMapping, YamlScalar, YamlSequence, parse_yaml, read_yaml

FILE = "s.yaml"


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, file=FILE)
    assert caught.value.file == FILE
    assert caught.value.remedy
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    return caught.value


def test_every_key_and_value_remembers_its_line() -> None:
    root = parse_yaml("# top\na: 1\nb:\n  - x\n  - {c: [y,\n      z]}\n", file=FILE)
    assert root.key_lines == {"a": 2, "b": 3}
    assert root.line == 2
    items = root.entries["b"]
    assert isinstance(items, YamlSequence)
    assert [item.line for item in items.items] == [4, 5]
    inner = items.items[1]
    assert isinstance(inner, YamlMapping)
    assert inner.key_lines == {"c": 5}
    last = inner.entries["c"]
    assert isinstance(last, YamlSequence)
    assert last.items[1] == YamlScalar("z", "text", False, 6)


@pytest.mark.parametrize(
    ("text", "kind", "quoted"),
    [
        ("010", "number", False),
        ("08", "text", False),
        ("12:30", "number", False),
        ("1e-3", "text", False),
        ("1.0e3", "text", False),
        ("no", "bool", False),
        ("2001-01-01", "date", False),
        ("~", "null", False),
        ("'no'", "text", True),
        ('"8"', "text", True),
        ("=", "text", False),
    ],
)
def test_a_scalar_keeps_its_text_and_says_what_yaml_reads(text: str, kind: str, quoted: bool) -> None:
    value = parse_yaml(f"a: {text}", file=FILE).entries["a"]
    assert value == YamlScalar(text.strip("'\""), kind, quoted, 1)


@pytest.mark.parametrize(
    ("text", "line", "key", "message", "remedy"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a", "line 1 already", "keep one"),
        ("a: {b: 1,\n  b: 2}\n", 2, "b", "line 1 already", "keep one"),
        ("a: 1\n\tb: 2\n", 2, None, "tab", "spaces"),
        ("a:\n  b: 1\n \tc: 2\n", 3, None, "tab", "spaces"),
        ("a: 1\nb:\tx\n", 2, None, "\\t", "spaces"),
        ("a: 1\n2: x\n", 2, "2", "number 2", "quote"),
        ("a: 1\non: x\n", 2, "on", "true", "quote"),
        ("a: 1\n~: x\n", 2, "~", "null", "quote"),
        ("a: 1\n2001-01-01: x\n", 2, "2001-01-01", "a date", "quote"),
        ("a: 1\n? [b]\n: x\n", 2, None, "a list", "word"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "<<", "merge", "write the values"),
        ("a: 1\n---\nb: 2\n", 2, None, "second document", "drop"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2, None, "python/object/apply", "drop the tag"),
        ("a: 1\nb: !!str 1\n", 2, None, "!!str", "drop the tag"),
        ("a: 1\nb: ! x\n", 2, None, "tag !", "drop the tag"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, None, "not YAML", "bracket"),
        ("a: 1\nb: x: y\n", 2, None, "mapping values", "quote"),
        ("a: 1\nb: 'x\n", 3, None, "not YAML", "quote"),
        ("a: 1\nb: *x\n", 2, None, "alias *x", "write the value"),
        ("a: &x [1, *x]\n", 1, None, "alias *x", "write the value"),
        ("a: 1\nb: \x07\n", 2, None, "not allowed", "delete"),
        ('a: 1\nb: "\\ud800"\n', 2, None, "surrogate", "whole"),
        ("a: 1\nb: " + "[" * 30 + "]" * 30, 2, None, "nested", "levels"),
        ("a: 1\nb: [" + "1, " * 10_000 + "]", 2, None, "10000 values", "fewer"),
        ("- a\n", 1, None, "a list", "name:"),
        ("\nword\n", 2, None, "one value", "name:"),
        ("%YAML 3.0\n---\na: 1\n", 1, None, "not YAML", "indentation"),
    ],
)
def test_refusals_name_line_key_and_remedy(text: str, line: int, key: str | None, message: str, remedy: str) -> None:
    error = refused(text)
    assert (error.line, error.key) == (line, key)
    assert message in error.message
    assert remedy in str(error.remedy)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "---\n...\n", "\n\n"])
def test_an_empty_file_is_refused(text: str) -> None:
    assert "is empty" in refused(text).message


def test_an_alias_bomb_is_counted_as_it_unfolds() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    error = refused("\n".join(rows))
    assert "unfolds" in error.message
    assert error.line == 4


def test_a_few_aliases_are_read() -> None:
    root = parse_yaml("a: &x [1, 2]\nb: *x\n", file=FILE)
    assert root.entries["a"] == root.entries["b"]


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(path).key_lines == {"a": 1, "b": 2}


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: caf\xe9\n")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    expected = {
        tmp_path / "absent.yaml": (None, "no such file"),
        tmp_path: (None, "a folder"),
        latin: (2, "0xe9 is not UTF-8"),
        large: (None, "larger than"),
        fifo: (None, "not a regular file"),
        Path("/dev/zero"): (None, "not a regular file"),
        tmp_path / ("x" * 5000): (None, "can't be read"),
        Path("a\0b"): (None, "can't be read"),
    }
    for path, (line, message) in expected.items():
        with pytest.raises(InputError) as caught:
            read_yaml(path)
        assert (caught.value.file, caught.value.line) == (path, line)
        assert message in caught.value.message
        assert caught.value.remedy


def test_a_file_without_read_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("a: 1")

    def deny(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(InputError, match="can't be read: Permission denied"):
        read_yaml(path)


STRUCTURE = [
    "b: ",
    "- ",
    "\n",
    "\n  ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    ": ",
    "? ",
    "|",
    ">-",
    "'",
    '"',
    "#",
    "---\n",
    "...\n",
]
SPECIAL = ["&x ", "*x", "!!int ", "!", "<<", "=", "%", "@", "%YAML 1.1\n", "\\", "\\UFFFFFFFF", "\\ud800", "\ufeff"]
VALUES = ["a", "0x_", "0b_", "-_", "1:99:", ".inf", "no", "2001-99-99", "08", "9" * 60, "\t", "\r", "\x85", "\u2028"]
PIECES = st.sampled_from([*STRUCTURE, *SPECIAL, *VALUES])


def fault_of(read: Callable[[], object]) -> InputError | None:
    """Anything but an InputError goes through, and fails the test."""
    try:
        read()
    except InputError as error:
        return error
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=25).map("".join)))
def test_random_text_never_raises_anything_else(text: str) -> None:
    error = fault_of(lambda: parse_yaml(text, file=FILE))
    assert error is None or (error.remedy and error.file == FILE)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_random_bytes_never_raise_anything_else(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(data)
    error = fault_of(lambda: read_yaml(path))
    assert error is None or (error.remedy and error.file == path)
