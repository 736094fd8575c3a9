"""A request on its way: what was asked, and where its decoding stands."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specbench.engine.sampling import RequestGenerator, SamplingParams
from specbench.engine.stops import StopRules, StopState


@dataclass(frozen=True)
class Request:
    """What is asked of the target. `reference` is its AR output, for drafters that replay it (oracle, forced)."""

    request_id: str
    category: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stops: StopRules
    reference: tuple[int, ...] | None = None


@dataclass
class ActiveRequest:
    """A request in a slot.

    Invariant between steps: the KV cache of `slot` holds the prompt and all of `tokens` but the last, which is pending.
    """

    request: Request
    slot: int
    generator: RequestGenerator
    stop_state: StopState
    prefill_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    # Target states [n, W] of the tokens committed last (at the start: of the prompt), where the drafter reads any.
    states: torch.Tensor | None = None

    @property
    def pending(self) -> int:
        return self.tokens[-1]

    @property
    def num_cached(self) -> int:
        """Tokens in the target's KV cache."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1

    def token_at(self, index: int) -> int:
        """Token `index` of prompt and output together."""
        prompt = self.request.prompt_ids
        return prompt[index] if index < len(prompt) else self.tokens[index - len(prompt)]
