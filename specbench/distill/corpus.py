"""The training text as one table: conversations of all shards, split by prompt; states are read through memory maps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.distill.generate import Conversation, benchmark_texts, normalised
from specbench.distill.shards import answer_tokens_in, read_shard, shard_path, states_path
from specbench.engine.heads.spec import FINAL
from specbench.errors import InputError


@dataclass(frozen=True)
class Placed:
    """Where a conversation is: its shard, the first row of its states there, tokens int64[n], the prompt's length."""

    shard: int
    first_row: int
    tokens: NDArray[np.int64]
    prompt_len: int
    temperature: float

    @property
    def num_rows(self) -> int:
        """Rows a head can be trained on: starts from the prompt's last token whose next but one token is known."""
        return max(0, len(self.tokens) - 1 - self.prompt_len)


@dataclass(frozen=True)
class Batch:
    """Conversations side by side, N tokens in all. `offsets` int64[B+1]: conversation b is rows offsets[b] ..
    offsets[b+1] (half-open). `tokens` int64[N]; `states` [N, S * H] of the states asked for, and `final` [N, H];
    `prompt_lens` int64[B]."""

    offsets: NDArray[np.int64]
    prompt_lens: NDArray[np.int64]
    tokens: torch.Tensor
    states: torch.Tensor
    final: torch.Tensor

    @property
    def num_conversations(self) -> int:
        return len(self.prompt_lens)

    def length(self, index: int) -> int:
        return int(self.offsets[index + 1] - self.offsets[index])


def is_held_out(text: str, share: float) -> bool:
    """Whether a prompt is kept from training: a function of its words alone, so equal prompts are on one side."""
    digest = hashlib.sha256(normalised(text).encode()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


class Corpus:
    """The first shards of `folder` that hold `answer_tokens` answer tokens: `train` and `held_out` conversations.

    Raises InputError if the folder holds less. A prompt that came before, or that is one of the built-in ones, is left
    out.
    """

    def __init__(self, folder: Path, answer_tokens: int, held_out: float) -> None:
        self.folder = folder
        self.num_shards, found = answer_tokens_in(folder, answer_tokens)
        if found < answer_tokens:
            raise InputError(
                f"holds {found} answer tokens, and {answer_tokens} are asked for", file=folder, key="data.answer_tokens"
            )
        self.train: list[Placed] = []
        self.held_out: list[Placed] = []
        seen = set(benchmark_texts())
        for shard in range(self.num_shards):
            row = 0
            for one in read_shard(folder, shard):
                key = normalised(one.text)
                if key not in seen and len(one.token_ids) - 1 > one.prompt_len:
                    side = self.held_out if is_held_out(one.text, held_out) else self.train
                    side.append(_placed(one, shard, row))
                seen.add(key)
                row += len(one.token_ids)
        if not self.train or not self.held_out:
            raise InputError(
                f"{len(self.train)} conversations to train on and {len(self.held_out)} held out are too few",
                file=folder,
                key="data",
                remedy="ask for more answer_tokens, or change held_out",
            )
        self._maps: dict[tuple[int, str], NDArray[np.uint16]] = {}

    @property
    def answer_tokens(self) -> int:
        return sum(len(one.tokens) - one.prompt_len for one in self.train)

    def vocabulary(self, size: int, coverage: float) -> NDArray[np.int64]:
        """The ids, ascending, of the most frequent answer tokens: `size` of them, or fewer if those cover `coverage`
        of all answer tokens (they are then as few as do)."""
        counts = np.bincount(np.concatenate([one.tokens[one.prompt_len :] for one in self.train]))
        order = np.argsort(-counts, kind="stable")
        shares = np.cumsum(counts[order]) / counts.sum()
        needed = int(np.searchsorted(shares, coverage)) + 1
        chosen = order[: min(size, needed)]
        return np.sort(chosen[counts[chosen] > 0]).astype(np.int64)

    def coverage(self, ids: NDArray[np.int64]) -> float:
        """Share of the held-out answer tokens that are in `ids`."""
        tokens = np.concatenate([one.tokens[one.prompt_len :] for one in self.held_out])
        return float(np.isin(tokens, ids).mean())

    def batch(self, chosen: Sequence[Placed], states: tuple[int, ...], recorded: tuple[int, ...]) -> Batch:
        """`chosen` with their `states` (HeadSpec.states) in float32; `recorded` is the order of the shards' states."""
        parts = [self._states(one, states, recorded) for one in chosen]
        lengths = [len(one.tokens) for one in chosen]
        return Batch(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lens=np.array([one.prompt_len for one in chosen], dtype=np.int64),
            tokens=torch.from_numpy(np.concatenate([one.tokens for one in chosen])),
            states=torch.cat([part[0] for part in parts]),
            final=torch.cat([part[1] for part in parts]),
        )

    def _states(
        self, one: Placed, states: tuple[int, ...], recorded: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        final = self._rows(one, "final")
        if states == (FINAL,):
            return final, final
        streams = self._rows(one, "streams")
        width = final.shape[1]
        columns = [recorded[1:].index(state) * width for state in states]
        return torch.cat([streams[:, at : at + width] for at in columns], dim=1), final

    def _rows(self, one: Placed, part: str) -> torch.Tensor:
        key = (one.shard, part)
        if key not in self._maps:
            path = states_path(self.folder, one.shard, part)
            try:
                self._maps[key] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise InputError(
                    f"the shard's states can't be read: {error}",
                    file=path,
                    remedy=f"delete {shard_path(self.folder, one.shard).name}: the shard is made again",
                ) from None
        rows = np.array(self._maps[key][one.first_row : one.first_row + len(one.tokens)])
        return torch.from_numpy(rows).view(torch.bfloat16).float()


def _placed(one: Conversation, shard: int, row: int) -> Placed:
    return Placed(shard, row, np.array(one.token_ids, dtype=np.int64), one.prompt_len, one.temperature)
