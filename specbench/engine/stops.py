"""Where a request's output ends: EOS, a stop string, or a cap, wherever in a block of tokens it falls.

A verify step may commit several tokens at once. `StopState.push` cuts the block at the earliest event, so that what is
emitted, what is counted and what autoregressive decoding would have emitted are the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.errors import InputError

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class StopRules:
    """When to stop: after an id of `eos_ids`, after the token that completes one of `stop_strings`, after `max_tokens`
    output tokens (prefill's token counts), or when prompt and output together hold `max_context` tokens.
    """

    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    max_context: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens {self.max_tokens} is below 1", key="max_tokens")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise InputError("stop_strings must be a list of non-empty strings", key="stop_strings")


class StopState:
    """One request's progress towards its stop rules.

    `token_bytes` gives the bytes of one id; it is needed for stop strings only. Strings are sought in the bytes of the
    output alone, so they may cross token borders and split a character. Raises InputError when the prompt leaves no
    room for a token.
    """

    def __init__(
        self, rules: StopRules, *, prompt_len: int = 0, token_bytes: Callable[[int], bytes] | None = None
    ) -> None:
        if rules.stop_strings and token_bytes is None:
            raise InputError("stop strings need a tokenizer", key="stop_strings", remedy="use eos_ids instead")
        self.rules = rules
        self.num_tokens = 0
        self.reason: FinishReason | None = None
        self._eos_ids = frozenset(rules.eos_ids)
        self._needles = tuple(text.encode() for text in rules.stop_strings)
        self._token_bytes = token_bytes
        self._tail = b""
        self._tail_len = max((len(needle) for needle in self._needles), default=1) - 1
        self._cap, self._cap_reason = self._first_cap(rules, prompt_len)

    @staticmethod
    def _first_cap(rules: StopRules, prompt_len: int) -> tuple[int, FinishReason]:
        if rules.max_context is None or rules.max_tokens <= rules.max_context - prompt_len:
            return rules.max_tokens, "length"
        if prompt_len >= rules.max_context:
            raise InputError(
                f"a prompt of {prompt_len} tokens leaves no room in a context of {rules.max_context}",
                remedy="shorten the prompt or use a target with a longer context",
            )
        return rules.max_context - prompt_len, "context"

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted: a step that drafts more than remaining - 1 verifies some for nothing."""
        return 0 if self.reason is not None else self._cap - self.num_tokens

    def push(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Take a block of new tokens; return how many are kept and why the output ended, if it did.

        At the same token a stop goes before a cap. Invariant: the kept tokens do not depend on how the output is
        divided into blocks.
        """
        assert self.reason is None, "a finished request was pushed to"
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            if token in self._eos_ids or self._completes_a_string(token):
                self.reason = "stop"
            elif self.num_tokens >= self._cap:
                self.reason = self._cap_reason
            if self.reason is not None:
                return index + 1, self.reason
        return len(tokens), None

    def _completes_a_string(self, token: int) -> bool:
        """The tail is one byte shorter than the longest string, and no string lies wholly within it."""
        if self._token_bytes is None or not self._needles:
            return False
        window = self._tail + self._token_bytes(int(token))
        self._tail = window[len(window) - min(len(window), self._tail_len) :]
        return any(needle in window for needle in self._needles)
