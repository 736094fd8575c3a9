"""Shards of training text on disk: token ids and states, written whole or not at all, read through memory maps."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.distill.generate import Conversation, TextSettings, Writer
from specbench.engine.models.sources import read_json_object
from specbench.errors import InputError

MANIFEST = "manifest.json"
FORMAT = 1


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:04d}.npz"


def states_path(folder: Path, index: int, part: str) -> Path:
    """`part` "final": uint16[T, H], the bits of bf16 states after the final norm; "streams": uint16[T, 3 H]."""
    return folder / f"shard-{index:04d}.{part}.npy"


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("wb") as file:
        write(file)
    partial.replace(path)


def write_shard(folder: Path, index: int, conversations: Sequence[Conversation], hidden_size: int) -> None:
    """The states' files, then the .npz that makes the shard valid: token_ids int32[T] (all conversations, one after
    another), lengths, prompt_lens, temperatures, texts."""
    states = [one.states for one in conversations if one.states is not None]
    assert len(states) == len(conversations), "a conversation without its states"
    bits = torch.cat(states).view(torch.uint16).numpy() if states else np.zeros((0, 4 * hidden_size), np.uint16)
    for part, columns in (("final", slice(hidden_size)), ("streams", slice(hidden_size, None))):
        array = np.ascontiguousarray(bits[:, columns])
        _write_whole(states_path(folder, index, part), lambda file, array=array: np.save(file, array))  # type: ignore[misc]
    table: dict[str, NDArray[Any]] = {
        "token_ids": np.array([token for one in conversations for token in one.token_ids], dtype=np.int32),
        "lengths": np.array([len(one.token_ids) for one in conversations], dtype=np.int32),
        "prompt_lens": np.array([one.prompt_len for one in conversations], dtype=np.int32),
        "temperatures": np.array([one.temperature for one in conversations], dtype=np.float32),
        "texts": np.frombuffer(json.dumps([one.text for one in conversations]).encode(), dtype=np.uint8),
    }
    _write_whole(shard_path(folder, index), lambda file: np.savez(file, **table))  # type: ignore[arg-type]


def read_shard(folder: Path, index: int) -> list[Conversation]:
    """The conversations of a shard, without states; InputError for a file that is no shard."""
    path = shard_path(folder, index)
    try:
        with np.load(path, allow_pickle=False) as stored:
            tokens, lengths = stored["token_ids"], stored["lengths"]
            prompt_lens, temperatures = stored["prompt_lens"], stored["temperatures"]
            texts = json.loads(stored["texts"].tobytes().decode())
    except (OSError, ValueError, KeyError) as error:
        remedy = "delete it: it is made again"
        raise InputError(f"not a shard of training text: {error}", file=path, remedy=remedy) from None
    ends = np.cumsum(lengths)
    return [
        Conversation(text, tuple(tokens[end - length : end].tolist()), int(prompt_len), float(temperature))
        for text, end, length, prompt_len, temperature in zip(
            texts, ends, lengths, prompt_lens, temperatures, strict=True
        )
    ]


def answer_tokens_in(folder: Path, wanted: int) -> tuple[int, int]:
    """(shards, answer tokens) of the shortest unbroken row 0, 1, ... that holds `wanted` tokens, or of all there is."""
    total, count = 0, 0
    while total < wanted and shard_path(folder, count).is_file():
        with np.load(shard_path(folder, count), allow_pickle=False) as stored:
            total += int(stored["lengths"].sum()) - int(stored["prompt_lens"].sum())
        count += 1
    return count, total


def write_manifest(folder: Path, settings: TextSettings, label: str) -> None:
    """Say what the folder holds, or check that it holds just that: InputError for text of other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST
    manifest = json.loads(json.dumps({"format": FORMAT, "target": label, **dataclasses.asdict(settings)}))
    if path.is_file():
        found = read_json_object(path)
        differing = sorted(key for key in {*manifest, *found} if found.get(key) != manifest.get(key))
        if differing:
            key = differing[0]
            raise InputError(
                f"this text was made with {key} {found.get(key)!r}, and {manifest.get(key)!r} is asked for",
                file=path,
                key=key,
                remedy="give another folder, or the settings that this one was made with",
            )
        return
    _write_whole(path, lambda file: file.write((json.dumps(manifest, indent=2) + "\n").encode()))


def work_on_shards(settings: TextSettings, folder: Path, first: int, stride: int, answer_tokens: int) -> None:
    """Write shards first, first + stride, ... that are missing, until the folder's unbroken row of shards holds
    `answer_tokens` answer tokens. One process of several; each uses one thread."""
    torch.set_num_threads(1)
    writer: Writer | None = None
    index = first
    while answer_tokens_in(folder, answer_tokens)[1] < answer_tokens:
        if not shard_path(folder, index).is_file():
            if writer is None:
                writer = Writer(settings)
                write_manifest(folder, settings, writer.label)
            begin = time.monotonic()
            conversations = writer.shard(index)
            write_shard(folder, index, conversations, writer.spec.hidden_size)
            count = sum(one.answer_len for one in conversations)
            seconds = time.monotonic() - begin
            print(f"shard {index}: {len(conversations)} answers, {count} tokens, {count / seconds:.0f}/s", flush=True)
        index += stride
