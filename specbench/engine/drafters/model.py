"""Drafters that run a model: a second checkpoint, or the target's own first layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.drafters.base import EMPTY, DraftPass
from specbench.engine.kv_cache import KVSnapshot
from specbench.engine.models.decoder import Decoder
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import RequestGenerator, bad_rows, draw
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal


class _ChainDrafter:
    """Drafts a chain token by token: greedy requests take the argmax (a point mass), sampled ones hand over their q.

    A request's draft coins are a stream of its own, apart from the verifier's.
    """

    synthetic = False

    def __init__(self, decoder: Decoder, target_vocab: int, num_layers: int | None) -> None:
        self._decoder = decoder
        self._target_vocab = target_vocab
        self._num_layers = num_layers
        self._coins: dict[int, RequestGenerator] = {}
        self._passes: list[DraftPass] = []

    def start(self, active: ActiveRequest) -> None:
        seed = active.generator.seed
        self._coins[active.slot] = RequestGenerator(seed, f"draft/{active.request.request_id}")

    def finish(self, active: ActiveRequest) -> None:
        self._coins.pop(active.slot, None)

    def take_passes(self) -> list[DraftPass]:
        passes, self._passes = self._passes, []
        return passes

    def _forward(self, tokens: list[list[int]], slots: list[int], contexts: list[int]) -> torch.Tensor:
        """Logits [B, V_target] after each request's last token; ids that only one side has can't be drafted."""
        batch = ForwardBatch.of([self._known(ids) for ids in tokens], slots, contexts, last_only=True)
        logits = self._decoder.forward(batch, self._num_layers)
        lens = tuple(len(t) for t in tokens)
        self._passes.append(DraftPass(self._decoder.spec, self._decoder.dtype, lens, tuple(contexts), self._num_layers))
        missing = self._target_vocab - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._target_vocab]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Ids as the drafter's embedding has them: an id of the target's padding reads as the drafter's last one."""
        last = self._decoder.spec.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _choose(self, logits: torch.Tensor, active: Sequence[ActiveRequest]) -> tuple[NDArray[np.int64], torch.Tensor]:
        params = [one.request.params for one in active]
        if all(p.is_greedy for p in params):
            return logits.argmax(dim=-1).cpu().numpy(), logits
        return draw(logits, params, [self._coins[one.slot] for one in active])

    def _first_input(self, active: ActiveRequest) -> list[int]:
        """Committed tokens the cache lacks, the pending one last."""
        raise AssertionError("defined by each drafter")

    def _wrote(self, active: ActiveRequest, count: int) -> None:
        """`count` more tokens stand in the drafter's cache."""

    def _context(self, active: ActiveRequest, written: int) -> int:
        raise AssertionError("defined by each drafter")

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        drafted: dict[int, list[int]] = {one.slot: [] for one in active}
        laws: dict[int, list[torch.Tensor]] = {one.slot: [] for one in active}
        written = {one.slot: 0 for one in active}
        wanted = {one.slot: depth for one, depth in zip(active, depths, strict=True)}
        for level in range(max(depths, default=0)):
            busy = [one for one in active if wanted[one.slot] > level]
            if not busy:
                break
            inputs = [self._first_input(one) if level == 0 else drafted[one.slot][-1:] for one in busy]
            contexts = [self._context(one, written[one.slot]) for one in busy]
            logits = self._forward(inputs, [one.slot for one in busy], contexts)
            for one, tokens in zip(busy, inputs, strict=True):
                written[one.slot] += len(tokens)
                self._wrote(one, len(tokens))
            # Logits without a distribution end that request's draft; the others go on.
            usable = (~bad_rows(logits)).nonzero().flatten().tolist()
            for row in set(range(len(busy))) - set(usable):
                wanted[busy[row].slot] = level
            if not usable:
                break
            rows = logits if len(usable) == len(busy) else logits[usable]
            chosen, law = self._choose(rows, [busy[row] for row in usable])
            for place, row in enumerate(usable):
                one = busy[row]
                drafted[one.slot].append(int(chosen[place]))
                if not one.request.params.is_greedy:
                    laws[one.slot].append(law[place].clone())
        proposals = []
        for one in active:
            if not drafted[one.slot]:
                proposals.append(EMPTY)
                continue
            tree = TokenTree.chain(np.array(drafted[one.slot], dtype=np.int64))
            q = torch.stack(laws[one.slot]) if laws[one.slot] else None
            proposals.append(Proposal(tree, q))
        return proposals


class EarlyExitDrafter(_ChainDrafter):
    """The target's first n layers with its own norm and head.

    It writes K and V of the drafted tokens into the target's own cache, layers 0..n-1, at the places where the verify
    pass then writes the same values: no cache and no weights of its own.
    """

    def __init__(self, target: Decoder, num_layers: int) -> None:
        super().__init__(target, target.spec.vocab_size, num_layers)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        return [active.pending]

    def _context(self, active: ActiveRequest, written: int) -> int:
        return active.num_cached + written

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int) -> None:
        """The target's cache is rolled back by the engine."""


class DraftModelDrafter(_ChainDrafter):
    """A second checkpoint over the same vocabulary, with a KV cache of its own.

    Invariant between steps: its cache holds a prefix of the committed tokens. After full acceptance it lacks the last
    draft, which the next step's first pass feeds beside the pending token.
    """

    def __init__(self, decoder: Decoder, target_vocab: int) -> None:
        super().__init__(decoder, target_vocab, None)
        self._prompts: dict[tuple[int, ...], KVSnapshot] = {}

    def start(self, active: ActiveRequest) -> None:
        super().start(active)
        kv, prompt = self._decoder.kv, active.request.prompt_ids
        if prompt in self._prompts:
            kv.restore(active.slot, self._prompts[prompt])
            return
        self._decoder.prefill(self._known(prompt), active.slot)
        self._prompts[prompt] = kv.snapshot(active.slot)

    def finish(self, active: ActiveRequest) -> None:
        super().finish(active)
        self._decoder.kv.close(active.slot)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        known = int(self._decoder.kv.lengths[active.slot])
        total = len(active.request.prompt_ids) + len(active.tokens)
        return [active.token_at(index) for index in range(known, total)]

    def _forward(self, tokens: list[list[int]], slots: list[int], contexts: list[int]) -> torch.Tensor:
        for slot, ids in zip(slots, tokens, strict=True):
            self._decoder.kv.reserve(slot, len(ids))
        return super()._forward(tokens, slots, contexts)

    def _wrote(self, active: ActiveRequest, count: int) -> None:
        self._decoder.kv.commit(active.slot, count)

    def _context(self, active: ActiveRequest, written: int) -> int:
        return int(self._decoder.kv.lengths[active.slot])

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int) -> None:
        kv = self._decoder.kv
        committed_inputs = len(active.request.prompt_ids) + len(active.tokens) - 1
        kv.truncate(active.slot, min(int(kv.lengths[active.slot]), committed_inputs))
