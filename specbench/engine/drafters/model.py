"""Drafters that run a model: a second checkpoint, or the target's own first layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbench.engine.drafters.base import DraftPass
from specbench.engine.drafters.growth import Children, fed_nodes
from specbench.engine.drafters.levels import AnyDraft, Busy, DynamicShape, LevelDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.kv_cache import KVSnapshot
from specbench.engine.models.decoder import Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest

Shape = StaticTree | DynamicShape


class _ModelDrafter(LevelDrafter):
    """Drafts with a decoder, over `num_layers` of its layers (None: all)."""

    def __init__(
        self,
        decoder: Decoder,
        target_vocab: int,
        num_layers: int | None,
        tree: Shape | None,
        children: Children | None,
    ) -> None:
        super().__init__(min(target_vocab, decoder.spec.vocab_size), tree, children)
        self._decoder = decoder
        self._target_vocab = target_vocab
        self._num_layers = num_layers

    @property
    def _max_rows(self) -> int:
        return self._decoder.limits.max_rows

    def _logits(self, busy: Busy, level: int, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V_target]; ids that only one side has can't be drafted."""
        logits = self._forward_noted(batch)
        missing = self._target_vocab - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._target_vocab]

    def _forward_noted(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self._decoder.forward(batch, self._num_layers)
        self._passes.append(
            DraftPass(
                self._decoder.spec,
                self._decoder.dtype,
                tuple(batch.query_lens.tolist()),
                tuple((batch.context_lens + batch.written).tolist()),
                self._num_layers,
                len(logits),
            )
        )
        return logits

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Ids as the drafter's embedding has them: an id of the target's padding reads as the drafter's last one."""
        last = self._decoder.spec.vocab_size - 1
        return [min(token, last) for token in tokens]


class EarlyExitDrafter(_ModelDrafter):
    """The target's first n layers with its own norm and head.

    It writes K and V of the fed nodes into the target's own cache, layers 0..n-1, into cells that the verify pass then
    writes anew: no cache and no weights of its own.
    """

    def __init__(
        self, target: Decoder, num_layers: int, tree: StaticTree | None = None, children: Children | None = None
    ) -> None:
        super().__init__(target, target.spec.vocab_size, num_layers, tree, children)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        return [active.pending]

    def _context(self, active: ActiveRequest) -> int:
        return active.num_cached

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        """The target's cache is rolled back by the engine."""


class DraftModelDrafter(_ModelDrafter):
    """A second checkpoint over the same vocabulary, with a KV cache of its own.

    Invariant between steps: its cache holds a prefix of the committed tokens. It lacks the last of an accepted path
    that was not fed, and all that came while nothing was drafted; the next draft's first passes feed them beside the
    pending token.
    """

    def __init__(
        self, decoder: Decoder, target_vocab: int, tree: Shape | None = None, children: Children | None = None
    ) -> None:
        super().__init__(decoder, target_vocab, None, tree, children)
        self._prompts: dict[tuple[int, ...], KVSnapshot] = {}

    def start(self, active: ActiveRequest) -> None:
        super().start(active)
        kv, prompt = self._decoder.kv, active.request.prompt_ids
        kv.open(active.slot, kv.max_context)
        if prompt in self._prompts:
            kv.restore(active.slot, self._prompts[prompt])
            return
        self._decoder.prefill(self._known(prompt), active.slot)
        self._prompts[prompt] = kv.snapshot(active.slot)

    def finish(self, active: ActiveRequest) -> None:
        super().finish(active)
        self._decoder.kv.close(active.slot)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        total = len(active.request.prompt_ids) + len(active.tokens)
        return [active.token_at(index) for index in range(self._context(active), total)]

    def _context(self, active: ActiveRequest) -> int:
        return int(self._decoder.kv.lengths[active.slot])

    def _catch_up(self, active: ActiveRequest, rows: int) -> None:
        slot, kv = active.slot, self._decoder.kv
        while (behind := len(active.request.prompt_ids) + len(active.tokens) - self._context(active)) > rows:
            first = self._context(active)
            count = min(behind - rows, self._max_rows)
            chunk = self._known([active.token_at(index) for index in range(first, first + count)])
            kv.reserve(slot, count)
            self._forward_noted(ForwardBatch.of([chunk], [slot], [first], last_only=True))
            kv.commit(slot, count)

    def _make_room(self, draft: AnyDraft) -> None:
        num_inner = fed_nodes(draft)
        self._decoder.kv.reserve(draft.active.slot, draft.num_inputs + num_inner)

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        draft = self._drafts.pop(active.slot, None)
        if draft is None:
            return
        cells = [*range(draft.num_inputs), *draft.fed_cells(path)]
        committed_inputs = len(active.request.prompt_ids) + len(active.tokens) - 1
        self._decoder.kv.commit_paths([active.slot], [cells[: committed_inputs - draft.context]])
