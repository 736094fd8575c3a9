"""What a drafter is to the engine, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specbench.engine.models.decoder import Capture
from specbench.engine.request import ActiveRequest
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal
from specbench.roofline.cost import Cost, forward_cost
from specbench.roofline.shapes import ModelSpec

EMPTY = Proposal(TokenTree.chain(np.empty(0, dtype=np.int64)))


@dataclass(frozen=True)
class DraftPass:
    """One forward pass that a drafter really made: query tokens of each request in it, and the cells before them.

    `head_tokens` rows went through the head; None: one a request.
    """

    spec: ModelSpec
    dtype: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_layers: int | None = None
    head_tokens: int | None = None

    @property
    def num_head_rows(self) -> int:
        return len(self.query_lens) if self.head_tokens is None else self.head_tokens

    def cost(self) -> Cost:
        """FLOPs and bytes in closed form (roofline/cost.py)."""
        return forward_cost(
            *(self.spec, self.query_lens, self.context_lens),
            weight_dtype=self.dtype,
            head_tokens=self.num_head_rows,
            num_layers=self.num_layers,
        ).total


class AnyPass(Protocol):
    """A pass of a model or of a head."""

    def cost(self) -> Cost: ...


class Drafter(Protocol):
    """Proposes tokens for a batch of requests.

    The engine calls `start` once a request has its first token, then in every step `propose` for the whole batch and
    `commit` for each request, and `finish` when the request leaves. State is per request: nothing a drafter does for
    one depends on which others stand in the batch.
    """

    synthetic: bool
    capture: Capture
    """States of the target that the engine leaves in `active.states` before `start` and before each `commit`."""

    def start(self, active: ActiveRequest) -> None: ...

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        """At most depths[i] levels for active[i]; the target's KV cache has room for num_nodes(depths[i]) nodes."""
        ...

    def num_nodes(self, depth: int) -> int:
        """Most nodes that a draft of `depth` levels has: `depth` for a chain. It does not fall as depth rises."""
        ...

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        """`active.tokens` now ends with the accepted drafts and the target's own token. `path` holds the nodes of the
        accepted drafts, root's child first (TokenTree numbering): 0, 1, .. for a chain."""
        ...

    def finish(self, active: ActiveRequest) -> None: ...

    def take_passes(self) -> Sequence[AnyPass]:
        """The forward passes made since the last call."""
        ...
