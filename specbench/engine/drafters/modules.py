"""MTP with several modules: level k of a chain comes from module k, which reads the whole text one token further on.

Alignment (DeepSeek-V3, arXiv 2412.19437 §2.2; vLLM, transformers): with tokens x_0 .. x_n committed, x_n pending, and
the target's states f_0 .. f_(n-1), module 0 reads pairs (f_t, x_(t+1)) at positions t = 0 .. n - 1; its output at n - 1
drafts d_0. Module k reads at position t the state that module k - 1 left there and the token t + 1 + k, of the drafts
where it lies behind x_n; its output at n - 1 drafts d_k. So the last k rows of module k read drafts: they are run again
with the true tokens once these are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.engine.drafters.growth import Children, Draft
from specbench.engine.drafters.head import MappedDrafter, VocabularyMap
from specbench.engine.drafters.levels import AnyDraft, Busy
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.canary import TwinHead
from specbench.engine.heads.head import Head, HeadPass
from specbench.engine.kv_cache import KVSnapshot
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest
from specbench.engine.verify import Proposal
from specbench.errors import InputError


@dataclass
class _Text:
    """What the modules have read of one request.

    Invariant between passes: module k's layers hold rows 0 .. lengths[k] - 1, of true tokens all, and `waiting[k]`
    [.., H] are the states that it has yet to read: those of positions lengths[k] .. lengths[k - 1] - 1 (module 0: up to
    the target's last). Cells behind `lengths[k]` may hold rows of drafts, which are written over.
    """

    lengths: list[int]
    waiting: list[torch.Tensor]

    def copy(self) -> _Text:
        return _Text(list(self.lengths), list(self.waiting))


class ModulesDrafter(MappedDrafter):
    """Chains from an MTP head of several modules, at most as long as there are modules.

    All modules' layers share one KV cache, and cell t of a slot is position t in each of them; how many rows a module
    has there the drafter keeps itself, the cache's own length is module 0's. Modules that `depth` never reaches are not
    run. Beyond the head's own context nothing is drafted.
    """

    def __init__(self, head: Head | TwinHead, depth: int | None = None, children: Children | None = None) -> None:
        spec = head.spec
        if spec.kind != "mtp":
            raise InputError(f"{spec.name} has no MTP modules", key="drafters.head")
        assert spec.state_width == spec.hidden_size, "every module reads states of the target's width"
        super().__init__(spec.draft_vocab_size, None, children)
        self.capture = spec.states
        self._num_modules = spec.num_modules if depth is None else max(1, min(depth, spec.num_modules))
        self._head, self._map = head, VocabularyMap(head)
        self._texts: dict[int, _Text] = {}
        self._prompts: dict[tuple[int, ...], tuple[KVSnapshot, _Text]] = {}
        # What the module of this level left in rows that read drafts, by slot: [min(level, n), H].
        self._guesses: dict[int, torch.Tensor] = {}

    def num_nodes(self, depth: int) -> int:
        return min(depth, self._num_modules)

    def _shape(self, depth: int) -> StaticTree:
        return StaticTree.chain(min(depth, self._num_modules))

    def start(self, active: ActiveRequest) -> None:
        super().start(active)
        assert active.states is not None, "the engine leaves the prompt's states"
        kv, prompt, slot = self._head.kv, active.request.prompt_ids, active.slot
        kv.open(slot, kv.max_context)
        self._head.begin(active)
        known = self._prompts.get(prompt)
        if known is not None:
            kv.restore(slot, known[0])
            self._texts[slot] = known[1].copy()
            return
        none = active.states[:0]
        text = _Text([0] * self._num_modules, [active.states, *[none] * (self._num_modules - 1)])
        self._texts[slot] = text
        # Rows whose token is the prompt's: module k reads token t + 1 + k.
        for module in range(self._num_modules):
            self._advance(active, module, max(0, len(prompt) - 1 - module))
        self._passes.clear()  # a prefill is no step's
        self._prompts[prompt] = (kv.snapshot(slot), text.copy())

    def finish(self, active: ActiveRequest) -> None:
        super().finish(active)
        self._texts.pop(active.slot, None)
        self._guesses.pop(active.slot, None)
        self._head.kv.close(active.slot)

    def _new_draft(self, active: ActiveRequest, depth: int) -> AnyDraft:
        last = active.num_cached - 1  # the position of every module's last row
        return super()._new_draft(active, depth if last < self._head.spec.layer.max_position_embeddings else 0)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        return [active.pending]

    def _context(self, active: ActiveRequest) -> int:
        return self._texts[active.slot].lengths[0]

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        return super().propose(active, [min(depth, self._num_modules) for depth in depths])

    def _advance(self, active: ActiveRequest, module: int, length: int) -> None:
        """Run `module` over its true rows up to position `length`, in passes of max_rows."""
        text, slot, most = self._texts[active.slot], active.slot, self._head.limits.max_rows
        while text.lengths[module] < length:
            first = text.lengths[module]
            end = min(length, first + most)
            self._reserve(slot, module, end)
            tokens = [active.token_at(position + 1 + module) for position in range(first, end)]
            left, _ = self._run([tokens], [slot], module, text.waiting[module][: end - first])
            self._keep(slot, module, left, end - first)

    def _reserve(self, slot: int, module: int, length: int) -> None:
        """Cells for `module`'s rows before `length`; later modules have no more rows than the first."""
        if module == 0:
            self._head.kv.reserve(slot, length - self._texts[slot].lengths[0])

    def _keep(self, slot: int, module: int, left: torch.Tensor, num_true: int) -> torch.Tensor:
        """Count the first `num_true` rows of a pass as read and hand on their states; returns those of the others."""
        text = self._texts[slot]
        text.lengths[module] += num_true
        text.waiting[module] = text.waiting[module][num_true:]
        if module == 0:
            self._head.kv.commit(slot, num_true)
        if module + 1 < self._num_modules:
            text.waiting[module + 1] = torch.cat([text.waiting[module + 1], left[:num_true]])
        return left[num_true:]

    def _run(
        self, tokens: list[list[int]], slots: list[int], module: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of `module`, each request's rows behind those it has: states [N, H] and last rows' logits [B, V]."""
        contexts = [self._texts[slot].lengths[module] for slot in slots]
        batch = ForwardBatch.of(tokens, slots, contexts, last_only=True)
        output = self._head.forward(batch, states, module=module, recycled=module > 0, every_state=True)
        self._passes.append(
            HeadPass(
                *(self._head.spec, self._head.dtype, tuple(batch.query_lens.tolist()), tuple(contexts)),
                num_head_rows=len(slots),
                recycled=module > 0,
            )
        )
        return output.states.clone(), output.logits

    def _forward(self, busy: Busy, level: int) -> torch.Tensor:
        """Logits [B, V] of module `level` at each request's last position."""
        share = self._head.limits.max_rows // len(busy)
        tokens, slots, parts, true = [], [], [], []
        for draft, _ in busy:
            assert isinstance(draft, Draft), "modules draft chains"
            active, slot = draft.active, draft.active.slot
            count = active.num_cached
            # Rows beyond the request's share of a pass (levels left out for a while) are read before it.
            self._advance(active, level, count - share)
            text = self._texts[slot]
            first = text.lengths[level]
            self._reserve(slot, level, count)
            tokens.append([self._token(draft, position + 1 + level) for position in range(first, count)])
            slots.append(slot)
            parts.append(text.waiting[level])
            if level:
                parts.append(self._guesses[slot])
            true.append(max(0, count - level) - first)
        left, logits = self._run(tokens, slots, level, torch.cat(parts))
        row = 0
        for slot, ids, num_true in zip(slots, tokens, true, strict=True):
            self._guesses[slot] = self._keep(slot, level, left[row : row + len(ids)], num_true)
            row += len(ids)
        return logits

    @staticmethod
    def _token(draft: Draft, index: int) -> int:
        """Token `index` of the committed text and the draft behind it."""
        behind = index - draft.active.num_cached - 1
        return draft.active.token_at(index) if behind < 0 else draft.tokens[behind]

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        assert active.states is not None, "the engine leaves the committed tokens' states"
        self._drafts.pop(active.slot, None)
        if active.num_cached <= self._head.spec.layer.max_position_embeddings:
            waiting = self._texts[active.slot].waiting
            waiting[0] = torch.cat([waiting[0], active.states])
