"""TwinHead: stands where a head would stand and drafts with the target itself, so every draft must be accepted.

A head's drafter hands over states, tokens, positions and a cache; a slip in any of them costs acceptance and changes no
output. The twin takes the same calls as a head. It runs the target over the fed tokens in a cache of its own and holds
what it is handed against what it knows: the position of each pair, and the state that its own pass left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specbench.engine.heads.head import HeadOutput
from specbench.engine.heads.spec import FINAL, HeadSpec
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import Decoder, DecoderLimits
from specbench.engine.ops.batch import ForwardBatch, IntArray
from specbench.engine.request import ActiveRequest
from specbench.errors import SpecbenchError

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 3e-2, "bf16": 8e-2}
"""Most relative error (2-norm) between two passes of the target over the same tokens."""


class CanaryError(SpecbenchError):
    """A drafter is fed with something else than what its kind is defined on."""


class TwinHead:
    """The target in the place of a head of shape `spec`.

    `kv` is the cache that the drafter keeps; the twin only reads its sizes. Pair t of module k feeds token t + 1 + k,
    so what a head has in cell t the twin has in cell t + 1 + k, and the prompt's first token in cell 0. The modules
    share those cells: the state that one leaves at t is that of token t + 1 + k, which the next one reads.
    """

    def __init__(self, spec: HeadSpec, target: Decoder, *, kv: PagedKVCache, own_kv: PagedKVCache, rows: int) -> None:
        layer = replace(
            spec.layer,
            vocab_size=target.spec.vocab_size,
            max_position_embeddings=target.spec.max_position_embeddings,
        )
        self.spec = replace(spec, name=f"the target in place of {spec.name}", layer=layer)
        self.dtype, self.kv, self.draft_ids = target.dtype, kv, None
        self.limits = DecoderLimits(rows, rows)
        self._twin = target.twin(own_kv, self.limits)
        self._capture = (*spec.states, FINAL)
        self._hidden = target.spec.hidden_size
        # [slots, cells, (states + 1) * H]: what the twin's pass left for the token in each cell.
        shape = (len(kv.lengths), own_kv.max_context, len(self._capture) * self._hidden)
        self._known = torch.zeros(shape, dtype=torch.float64 if target.dtype == "fp64" else torch.float32)
        self._active: dict[int, ActiveRequest] = {}

    def begin(self, active: ActiveRequest) -> None:
        """Empty the twin's cache and put the prompt's first token into it."""
        slot, kv = active.slot, self._twin.kv
        kv.close(slot)
        kv.open(slot, kv.max_context)
        kv.reserve(slot, kv.max_context)
        self._active[slot] = active
        self._run(ForwardBatch.of([[active.request.prompt_ids[0]]], [slot], [0]))

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the selected rows; the rows' states are kept by the cell of their token."""
        logits = self._twin.forward(batch, capture=self._capture)
        slots = batch.slots[batch.row_request]
        self._known[slots, batch.cache_index] = self._twin.states.to(self._known)
        return logits.clone()

    def forward(
        self,
        batch: ForwardBatch,
        states: torch.Tensor,
        *,
        module: int = 0,
        recycled: bool = False,
        every_state: bool = False,
    ) -> HeadOutput:
        """As Head.forward; raises CanaryError where position or state is not the one that the pair should have."""
        parents, ahead = self._check_positions(batch), 1 + module
        logits = self._run(replace(batch, context_lens=batch.context_lens + ahead, positions=batch.positions + ahead))
        # The state of a pair's position is that of the token before its own: one behind the parent pair's token.
        self._check_states(batch, states, parents + ahead, recycled)
        rows = np.arange(batch.num_rows) if every_state else batch.selected_rows
        slots, cells = batch.slots[batch.row_request[rows]], batch.cache_index[rows] + ahead
        final = self._known[slots, cells, -self._hidden :]
        return HeadOutput(logits, final.to(states.dtype) if recycled else final)

    @staticmethod
    def _check_positions(batch: ForwardBatch) -> IntArray:
        """The cell of each pair's parent (the pair before it); positions are counted from what each row sees."""
        parents = np.empty(batch.num_rows, dtype=np.int64)
        for request in range(len(batch.slots)):
            first, end = int(batch.query_start[request]), int(batch.query_start[request + 1])
            visible = batch.visible(request)
            for row in range(first, end):
                seen = np.flatnonzero(visible[row - first])
                if len(seen) - 1 != batch.positions[row]:
                    raise CanaryError(
                        f"position: a pair behind {len(seen) - 1} others was put at {int(batch.positions[row])}"
                    )
                parents[row] = seen[-2] if len(seen) > 1 else -1
        return parents

    def _check_states(self, batch: ForwardBatch, states: torch.Tensor, cells: IntArray, recycled: bool) -> None:
        """`cells`: the twin's cell whose state each row should have been handed."""
        slots = batch.slots[batch.row_request]
        columns = slice(-self._hidden, None) if recycled else slice(0, self.spec.state_width)
        for row in range(batch.num_rows):
            expected = self._known[slots[row], cells[row], columns]
            given = states[row, : len(expected)].to(expected)
            if self._error(given, expected) <= TOLERANCE[self.dtype]:
                continue
            every = self._known[slots[row], : max(int(batch.cache_index[row]), int(cells[row])) + 2, columns]
            nearest = int((every - given).norm(dim=-1).argmin())
            which = "fed back" if recycled else "of the target"
            raise CanaryError(
                f"state: the pair at position {int(batch.positions[row])} was handed a state {which} that is not its "
                f"own (relative error {self._error(given, expected):.2g}); nearest is that of cell {nearest}, not "
                f"{int(cells[row])}"
            )

    @staticmethod
    def _error(given: torch.Tensor, expected: torch.Tensor) -> float:
        return float((given - expected).norm() / expected.norm().clamp_min(1e-30))

    def parallel(self, states: torch.Tensor, slots: Sequence[int]) -> list[torch.Tensor]:
        """As Head.parallel, for requests whose AR output is known: head i names the token that it holds there."""
        levels = torch.zeros(self.spec.num_modules, len(slots), self._twin.spec.vocab_size)
        for row, slot in enumerate(slots):
            active = self._active[slot]
            cached = active.num_cached
            tokens = [active.token_at(index) for index in range(cached)]
            self._run(ForwardBatch.of([tokens], [slot], [0], last_only=True))
            expected = self._known[slot, cached - 1, : self.spec.state_width]
            error = self._error(states[row].to(expected), expected)
            if error > TOLERANCE[self.dtype]:
                raise CanaryError(
                    f"state: after {cached} tokens the heads were handed one that is not the last token's "
                    f"(relative error {error:.2g})"
                )
            assert active.request.reference is not None, "Medusa's canary follows the AR output"
            coming = active.request.reference[len(active.tokens) :][: self.spec.num_modules]
            for level, token in enumerate(coming):
                levels[level, row, token] = 10.0
        return list(levels)
