"""Head: a draft head beside its target, with a KV cache of its own.

It runs on the target's backend: our kernels on backend cpu, plain torch operations on backends torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbench.engine.heads.program import record_head, state_place
from specbench.engine.heads.spec import HeadSpec
from specbench.engine.heads.weights import CpuHeadWeights, TorchHeadWeights
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.cpu_weights import PackedWeights
from specbench.engine.request import ActiveRequest
from specbench.errors import InputError
from specbench.roofline.cost import Cost
from specbench.roofline.draft_cost import head_pass_cost


@dataclass(frozen=True)
class HeadOutput:
    """One pass: logits [R, V_draft] in fp32 (fp64 for fp64) of the selected rows, and states to feed back: [R, H] of
    the same rows, or [N, H] of all rows where `every_state` asked for them. Valid until the next pass."""

    logits: torch.Tensor
    states: torch.Tensor


class Head:
    """A draft head on its target's backend, in the target's dtype.

    `tensors` are canonical (`head_tensor_shapes`). Raises InputError where the head is for another target.
    """

    def __init__(
        self,
        spec: HeadSpec,
        tensors: Mapping[str, torch.Tensor],
        target: Decoder,
        *,
        kv: PagedKVCache,
        limits: DecoderLimits,
    ) -> None:
        self.spec, self.dtype, self.kv, self.limits = spec, target.dtype, kv, limits
        self._check_target(spec, target)
        self.draft_ids = tensors["draft_ids"].numpy() if spec.reduced_vocabulary else None
        self._shape = spec.layer
        if spec.kind == "medusa":  # no layer: what attention there is to size needs one head of the least width
            self._shape = replace(spec.layer, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
        dtype, weights = DTYPES[target.dtype], target.weights
        self._weights: CpuHeadWeights | TorchHeadWeights
        if isinstance(weights, PackedWeights):
            self._weights = CpuHeadWeights(spec, tensors, dtype, weights)
        else:
            self._weights = TorchHeadWeights(spec, tensors, dtype, weights)
        self.rebind(kv, limits)

    @staticmethod
    def _check_target(spec: HeadSpec, target: Decoder) -> None:
        theirs, ours = target.spec, spec
        for what, mine, its in (
            ("hidden size", ours.target_hidden_size, theirs.hidden_size),
            ("vocabulary", ours.target_vocab_size, theirs.vocab_size),
        ):
            if mine != its:
                raise InputError(
                    f"the head {ours.name} is for a target of {what} {mine}, and {theirs.name} has {its}",
                    key="drafters.head",
                    remedy="choose a head that was trained for this target",
                )
        if max(ours.states) > theirs.num_layers:
            raise InputError(
                f"the head {ours.name} reads the state entering layer {max(ours.states)}, and {theirs.name} has "
                f"{theirs.num_layers} layers",
                key="drafters.head",
                remedy="choose a head that was trained for this target",
            )
        if ours.hidden_size != theirs.hidden_size and not ours.own_embedding:
            raise InputError(
                f"the head {ours.name} has width {ours.hidden_size} and no embedding of its own", key="drafters.head"
            )

    def rebind(self, kv: PagedKVCache, limits: DecoderLimits) -> None:
        """Use another KV cache and other limits with the same weights (the next case of a sweep)."""
        from specbench.engine.ops.cpu import CpuOps, rope_tables
        from specbench.engine.ops.torch_ops import TorchOps

        self.kv, self.limits = kv, limits
        rope = rope_tables(self._shape, kv.max_context)
        self.ops: Any
        if isinstance(self._weights, CpuHeadWeights):
            self.ops = CpuOps(
                *(self._shape, self._weights, kv, rope),
                max_rows=limits.max_rows,
                max_selected=limits.max_selected,
                num_threads=torch.get_num_threads(),
            )
        else:
            self.ops = TorchOps(self._shape, self._weights, kv, rope)  # type: ignore[arg-type]

    def begin(self, active: ActiveRequest) -> None:
        """A request takes its slot. A head has no state but its cache, which the drafter fills."""

    def forward(
        self,
        batch: ForwardBatch,
        states: torch.Tensor,
        *,
        module: int = 0,
        recycled: bool = False,
        every_state: bool = False,
    ) -> HeadOutput:
        """One pass of an eagle, eagle3 or mtp head over `batch`, whose rows have `states` [N, W]: true ones of the
        target (W = state_width) or, `recycled`, the head's own (W = H). K and V of every row are written.
        `every_state` (mtp) leaves the states of all rows, not of the selected ones."""
        assert batch.num_rows <= self.limits.max_rows, "more rows than the head's buffers hold"
        assert len(batch.selected_rows) <= self.limits.max_selected, "more logits than the head's buffers hold"
        assert len(states) == batch.num_rows, "one state a row"
        place, column = state_place(self.spec, recycled)
        # Only EAGLE-3 reads its own states in another way than the target's.
        variant = recycled and self.spec.kind == "eagle3"
        assert self.spec.kind == "mtp" or not every_state, "only MTP's modules hand on the states of all rows"
        record: Callable[[Any], None] = lambda ops: record_head(  # noqa: E731
            ops, self.spec, module, recycled, every_state
        )
        buffers: Any = self.ops.run(record, (module, variant, every_state), batch, {place: (states, column)})
        rows = len(batch.selected_rows)
        fed_back = ("last", "features") if not every_state else ("x", "h")
        left = buffers[fed_back[self.spec.recycle == "post_norm" and self.spec.kind != "eagle"]]
        num_states = batch.num_rows if every_state else rows
        return HeadOutput(self._logits(buffers["logits"], rows), left[:num_states, : self.spec.hidden_size])

    def parallel(self, states: torch.Tensor, slots: Sequence[int]) -> list[torch.Tensor]:
        """Medusa: the logits [B, V_draft] of every head after the target's final states [B, H] of `slots`."""
        rows = len(states)
        assert len(slots) == rows, "one state a slot"
        batch = ForwardBatch.of([[0]] * rows, [0] * rows, [0] * rows)
        record: Callable[[Any], None] = lambda ops: record_head(ops, self.spec, 0, False)  # noqa: E731
        buffers: Any = self.ops.run(record, 0, batch, {"state": (states, 0)})
        return [self._logits(buffers[f"logits.{head}"], rows) for head in range(self.spec.num_modules)]

    def _logits(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        logits = buffer[:rows, : self.spec.draft_vocab_size]
        return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class HeadPass:
    """One pass of a head, as base.DraftPass is one of a model. `recycled` passes skip EAGLE-3's fc."""

    spec: HeadSpec
    dtype: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_head_rows: int
    recycled: bool = False

    def cost(self) -> Cost:
        """FLOPs and bytes of the module's layers, its projections and its unembedding (roofline/draft_cost.py)."""
        return head_pass_cost(
            *(self.spec.draft_shape, self.query_lens, self.context_lens),
            weight_dtype=self.dtype,
            head_tokens=self.num_head_rows,
            recycled=self.recycled,
        ).total
