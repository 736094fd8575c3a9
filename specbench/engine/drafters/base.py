"""What a drafter is to the engine, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specbench.engine.request import ActiveRequest
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal
from specbench.roofline.shapes import ModelSpec

EMPTY = Proposal(TokenTree.chain(np.empty(0, dtype=np.int64)))


@dataclass(frozen=True)
class DraftPass:
    """One forward pass that a drafter really made: query tokens and cached tokens of each request in it."""

    spec: ModelSpec
    dtype: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_layers: int | None = None


class Drafter(Protocol):
    """Proposes tokens for a batch of requests.

    The engine calls `start` once a request has its first token, then in every step `propose` for the whole batch and
    `commit` for each request, and `finish` when the request leaves. State is per request: nothing a drafter does for
    one depends on which others stand in the batch.
    """

    synthetic: bool

    def start(self, active: ActiveRequest) -> None: ...

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        """At most depths[i] tokens for active[i]; the target's KV cache has room for them."""
        ...

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int) -> None:
        """`active.tokens` now ends with the accepted drafts and the target's own token."""
        ...

    def finish(self, active: ActiveRequest) -> None: ...

    def take_passes(self) -> list[DraftPass]:
        """The forward passes made since the last call."""
        ...
