"""Drafters that run a head on the target's own states: EAGLE, EAGLE-2, EAGLE-3, one-module MTP; and Medusa.

Alignment (all EAGLE versions, DeepSeek-V3): with tokens x_0 .. x_n committed, x_n pending, the target's states f_0 ..
f_(n-1) are known. The head is fed pairs (f_t, x_(t+1)) at position t; its output at n - 1 drafts x_(n+1). A drafted
token is fed with the state that its parent's pass left, one position further. After the verdict the head's cache keeps
the pairs of true states alone: accepted drafts are fed again with what the target says of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.drafters.growth import Children, Draft, fed_nodes
from specbench.engine.drafters.levels import AnyDraft, Busy, DynamicShape, LevelDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.canary import TwinHead
from specbench.engine.heads.head import Head, HeadPass
from specbench.engine.kv_cache import KVSnapshot
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams, distribution
from specbench.engine.verify import Proposal
from specbench.errors import InputError

MAX_WAITING = 512
"""Most states of a request that wait for a draft."""


class VocabularyMap:
    """Draft ids to the target's, where a head has a vocabulary of its own."""

    def __init__(self, head: Head | TwinHead) -> None:
        self._ids = head.draft_ids
        self._size = head.spec.target_vocab_size
        self._columns = None if self._ids is None else torch.as_tensor(self._ids)

    def tokens(self, drafted: NDArray[np.int64]) -> NDArray[np.int64]:
        return drafted if self._ids is None else self._ids[drafted]

    def laws(self, drafted: torch.Tensor) -> torch.Tensor:
        """[R, V_draft] -> [R, V_target]: tokens that can't be drafted have no mass."""
        if self._columns is None:
            return drafted
        whole = drafted.new_zeros(len(drafted), self._size)
        whole[:, self._columns.to(drafted.device)] = drafted
        return whole


class MappedDrafter(LevelDrafter):
    """Drafts level by level with a head, whose own ids `_map` translates."""

    _map: VocabularyMap
    _head: Head | TwinHead

    @property
    def _max_rows(self) -> int:
        return self._head.limits.max_rows

    def _as_target(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._map.tokens(tokens)

    def _laws(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        return self._map.laws(distribution(logits, params))


class HeadDrafter(MappedDrafter):
    """A chain, a static or a dynamic tree from a recurrent head (eagle, eagle3, mtp with one module).

    Invariant between steps: the head's cache holds the pairs of positions 0 .. L - 1 and `_true[slot]` the target's
    states of positions L .. n - 1, which the next draft feeds first. Beyond the head's own context nothing is drafted.
    """

    def __init__(
        self, head: Head | TwinHead, tree: StaticTree | DynamicShape | None = None, children: Children | None = None
    ) -> None:
        if head.spec.kind == "medusa" or head.spec.num_modules != 1:
            raise InputError(
                f"{head.spec.name} has {head.spec.num_modules} modules, and one feeds itself", key="drafters.head"
            )
        super().__init__(head.spec.draft_vocab_size, tree, children)
        self.capture = head.spec.states
        self._head, self._map = head, VocabularyMap(head)
        self._true: dict[int, torch.Tensor] = {}
        self._prompts: dict[tuple[int, ...], KVSnapshot] = {}
        self._left: torch.Tensor
        self._row_of: dict[tuple[int, int], int] = {}

    def start(self, active: ActiveRequest) -> None:
        super().start(active)
        assert active.states is not None, "the engine leaves the prompt's states"
        kv, prompt, slot = self._head.kv, active.request.prompt_ids, active.slot
        kv.open(slot, kv.max_context)
        self._head.begin(active)
        known = self._prompts.get(prompt)
        if known is None:
            # The last state's pair waits for the first token of the answer.
            self._feed_true(slot, prompt[1:], active.states[:-1])
            self._passes.clear()  # a prefill is no step's
            self._prompts[prompt] = kv.snapshot(slot)
        else:
            kv.restore(slot, known)
        self._true[slot] = active.states[-1:]

    def _feed_true(self, slot: int, tokens: Sequence[int], states: torch.Tensor) -> None:
        """Extend the cache of `slot` by pairs of true states and the tokens after them, in passes of max_rows."""
        kv, rows = self._head.kv, self._head.limits.max_rows
        for first in range(0, len(tokens), rows):
            chunk = list(tokens[first : first + rows])
            kv.reserve(slot, len(chunk))
            batch = ForwardBatch.of([chunk], [slot], [int(kv.lengths[slot])], last_only=True)
            output = self._head.forward(batch, states[first : first + rows])
            self._note(batch, len(output.logits), recycled=False)
            kv.commit(slot, len(chunk))

    def _note(self, batch: ForwardBatch, num_head_rows: int, *, recycled: bool) -> None:
        self._passes.append(
            HeadPass(
                *(self._head.spec, self._head.dtype, tuple(batch.query_lens.tolist())),
                context_lens=tuple((batch.context_lens + batch.written).tolist()),
                num_head_rows=num_head_rows,
                recycled=recycled,
            )
        )

    def _catch_up(self, active: ActiveRequest, rows: int) -> None:
        waiting = self._true[active.slot]
        if len(waiting) > rows:
            self._true[active.slot] = self._fed_but(active, waiting, rows)

    def _fed_but(self, active: ActiveRequest, waiting: torch.Tensor, rows: int) -> torch.Tensor:
        """Feed the pairs of `waiting` but the last `rows`, which are returned."""
        first, count = self._context(active), len(waiting) - rows
        tokens = [active.token_at(first + 1 + index) for index in range(count)]
        self._feed_true(active.slot, tokens, waiting[:count])
        return waiting[count:]

    def finish(self, active: ActiveRequest) -> None:
        super().finish(active)
        self._true.pop(active.slot, None)
        self._head.kv.close(active.slot)

    def _new_draft(self, active: ActiveRequest, depth: int) -> AnyDraft:
        last = active.num_cached - 1 + depth - 1  # the position of the deepest pair that is fed
        return super()._new_draft(active, depth if last < self._head.spec.layer.max_position_embeddings else 0)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        first = self._context(active)
        return [active.token_at(first + 1 + index) for index in range(len(self._true[active.slot]))]

    def _context(self, active: ActiveRequest) -> int:
        return int(self._head.kv.lengths[active.slot])

    def _make_room(self, draft: AnyDraft) -> None:
        self._head.kv.reserve(draft.active.slot, draft.num_inputs + fed_nodes(draft))

    def _logits(self, busy: Busy, level: int, batch: ForwardBatch) -> torch.Tensor:
        if level == 0:
            states = torch.cat([self._true[draft.active.slot] for draft, _ in busy])
        else:
            parents = [
                self._row_of[draft.active.slot, draft.parent(place)] for draft, frontier in busy for place in frontier
            ]
            states = self._left[parents]
        output = self._head.forward(batch, states, recycled=level > 0)
        self._left = output.states
        fed = [(draft.active.slot, place) for draft, frontier in busy for place in frontier]
        self._row_of = {key: row for row, key in enumerate(fed)}
        self._note(batch, len(output.logits), recycled=level > 0)
        return output.logits

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        assert active.states is not None, "the engine leaves the committed tokens' states"
        slot = active.slot
        draft = self._drafts.pop(slot, None)
        if draft is not None:
            self._head.kv.commit(slot, draft.num_inputs)
            self._true[slot] = active.states
            return
        # No draft in this step: the pairs wait for the next one, up to MAX_WAITING of them.
        waiting = torch.cat([self._true[slot], active.states])
        self._true[slot] = waiting if len(waiting) <= MAX_WAITING else self._fed_but(active, waiting, 1)


class MedusaDrafter(MappedDrafter):
    """All levels from one state: head i drafts the token 2 + i behind the last known state's, whatever its parents are.

    The state is that of the last token in the target's cache; the pending token is what its own lm_head gave.
    """

    def __init__(self, head: Head | TwinHead, tree: StaticTree | None = None, children: Children | None = None) -> None:
        if head.spec.kind != "medusa":
            raise InputError(f"{head.spec.name} is no Medusa head", key="drafters.head")
        super().__init__(head.spec.draft_vocab_size, tree, children)
        self.capture = head.spec.states
        self._head, self._map = head, VocabularyMap(head)
        self._state: dict[int, torch.Tensor] = {}
        self._levels: list[torch.Tensor] = []

    def start(self, active: ActiveRequest) -> None:
        super().start(active)
        assert active.states is not None, "the engine leaves the prompt's states"
        self._head.begin(active)
        self._state[active.slot] = active.states[-1:]

    def finish(self, active: ActiveRequest) -> None:
        super().finish(active)
        self._state.pop(active.slot, None)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        return [active.pending]

    def _context(self, active: ActiveRequest) -> int:
        return active.num_cached

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        heads = self._head.spec.num_modules
        drafting = [one for one, depth in zip(active, depths, strict=True) if self.num_nodes(min(depth, heads))]
        self._row_of = {one.slot: row for row, one in enumerate(drafting)}
        if drafting:
            self._levels = self._head.parallel(
                torch.cat([self._state[one.slot] for one in drafting]), [one.slot for one in drafting]
            )
            lens = (1,) * len(drafting)
            self._passes.append(HeadPass(self._head.spec, self._head.dtype, lens, (0,) * len(lens), len(lens)))
        return super().propose(active, [min(depth, heads) for depth in depths])

    def _forward(self, busy: Busy, level: int) -> torch.Tensor:
        rows = []
        for draft, frontier in busy:
            assert isinstance(draft, Draft), "Medusa's trees are static"
            draft.feed(frontier)
            rows += [self._row_of[draft.active.slot]] * len(frontier)
        return self._levels[level][rows]

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        assert active.states is not None, "the engine leaves the committed tokens' states"
        self._drafts.pop(active.slot, None)
        self._state[active.slot] = active.states[-1:]
