"""One replica that serves requests: tensor parallelism over n GPUs, steps, prefills, and what a user waits for.

Time of a step = the step model's on n times the roofs + communication. A pass over t tokens makes two all-reduces a
layer of t · d values and gathers the logits; on a ring each all-reduce moves 2 (n - 1) / n of its bytes over a GPU's
link (Patarasu, Yuan, JPDC 2009) and waits for one latency:

    comm = 2 L (2 (n-1)/n · t d b / link + latency) + (n-1)/n · t V b / link + latency      (n > 1)

K and V are split by heads: over more GPUs than KV heads they are copied, and read more often.

Continuous batching in its steady state: with B slots, a decode of D tokens after the first at τ = T_step / E[tokens]
each, and a prefill of P seconds, which all slots wait for, a request stays P + D τ + (B - 1) P, so

    TPOT = τ + (B - 1) P / D,    requests/s = B / (D τ + B P)      (Little's law)

Prefills run alone, not in chunks beside decoding, and no request waits for a slot: TTFT = T_step + P.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from specbench.errors import InputError
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.cost import uniform_cost
from specbench.roofline.draft_cost import DraftShape
from specbench.roofline.footprint import Footprint, footprint
from specbench.roofline.formats import dtype_bytes
from specbench.roofline.model import Roof
from specbench.roofline.step_model import StepModel

ALL_REDUCES = 2
"""Of a layer: behind attention and behind the MLP."""


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a replica: bytes/s of one GPU in one direction, and seconds of a collective's start."""

    bytes_per_s: float
    latency_s: float = 10e-6

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0:
            raise InputError(f"a link of {self.bytes_per_s:g} B/s", key="link_gb_per_s", remedy="give a positive rate")


@dataclass(frozen=True)
class Drafting:
    """A drafter at one depth: name, shape (None: none is run), acceptance, and the levels of a draft (0: none)."""

    name: str
    shape: DraftShape | None = None
    acceptance: AcceptanceCurve | None = None
    depth: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} · depth {self.depth}" if self.depth else "no drafter"


@dataclass(frozen=True)
class Shares:
    """Where the verify pass of a step goes, in seconds: what each kind of limit alone would take."""

    compute_s: float
    memory_s: float
    communication_s: float
    host_s: float

    @property
    def bound_by(self) -> str:
        """The largest of them, in words."""
        named = {
            "compute": self.compute_s,
            "memory bandwidth": self.memory_s,
            "communication": self.communication_s,
            "host and launches": self.host_s,
        }
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class Moment:
    """A replica with `batch` busy slots."""

    batch: int
    step_s: float
    ar_step_s: float
    tokens_per_step: float
    tpot_s: float
    ttft_s: float
    requests_per_s: float

    @property
    def speedup(self) -> float:
        """Decoding alone, over the same replica without the drafter."""
        return self.tokens_per_step * self.ar_step_s / self.step_s


@dataclass(frozen=True)
class Replica:
    """`model` is that of one GPU; `gpus` of them share every pass."""

    model: StepModel
    gpus: int
    link: Link | None
    drafting: Drafting
    prompt_len: int
    output_len: int

    def __post_init__(self) -> None:
        reason = why_not_split(self.model, self.gpus)
        if reason is not None:
            raise InputError(reason, key="tensor_parallel", remedy="choose a number that divides the heads")
        if self.gpus > 1 and self.link is None:
            message = f"tensor parallelism over {self.gpus} GPUs needs the rate of their link"
            raise InputError(
                message, key="link_gb_per_s", remedy="450 for NVLink of H100 and H200, 64 for PCIe 5.0 x16"
            )

    @cached_property
    def whole(self) -> StepModel:
        """The step model on all GPUs' roofs together."""
        roof = self.model.roof
        return replace(
            self.model, roof=Roof(roof.flops_per_s * self.gpus, roof.bandwidth_bytes_per_s * self.gpus), staircase=None
        )

    @property
    def context_len(self) -> float:
        """Mean tokens cached while a request decodes."""
        return self.prompt_len + self.output_len / 2

    @property
    def kv_copies(self) -> float:
        """How often a token's K and V are stored over all GPUs."""
        spec = self.model.target
        heads = 1 if spec.mla is not None else spec.num_kv_heads
        return max(1.0, self.gpus / heads)

    def communication_s(self, tokens: float, layers: int, hidden: int, vocab: int) -> float:
        """Of one pass over `tokens` tokens; 0 on one GPU."""
        if self.gpus == 1 or self.link is None:
            return 0.0
        share = (self.gpus - 1) / self.gpus
        wide = dtype_bytes(self.model.activation_dtype)
        reduced = 2 * share * tokens * hidden * wide / self.link.bytes_per_s + self.link.latency_s
        gathered = share * tokens * vocab * wide / self.link.bytes_per_s + self.link.latency_s
        return ALL_REDUCES * layers * reduced + gathered

    def _target_communication_s(self, tokens: float) -> float:
        spec = self.model.target
        return self.communication_s(tokens, spec.num_layers, spec.hidden_size, spec.vocab_size)

    def _draft_communication_s(self, batch: int) -> float:
        shape, depth = self.drafting.shape, self.drafting.depth
        if shape is None or depth == 0:
            return 0.0
        passes = len(self.whole.draft_costs(batch, self.context_len, depth, shape))
        spec = shape.layer or self.model.target
        layers = shape.num_layers or (shape.layers_per_module if shape.kind == "mtp" else spec.num_layers)
        return passes * self.communication_s(batch, layers, spec.hidden_size, spec.vocab_size)

    def _copied_kv_s(self, batch: int) -> float:
        """Reading K and V that other GPUs read too, beyond the even split of the step model."""
        spec, model = self.model.target, self.whole
        kv = spec.kv_bytes_per_token(model.kv_dtype or model.activation_dtype) * batch * self.context_len
        return (self.kv_copies - 1) * kv / (model.efficiency.memory * model.roof.bandwidth_bytes_per_s)

    @cached_property
    def prefill_s(self) -> float:
        """Seconds of one request's prefill, the head on its last token alone."""
        model = self.whole
        cost = uniform_cost(
            *(model.target, 1, self.prompt_len, 0),
            weight_dtype=model.weight_dtype,
            kv_dtype=model.kv_dtype,
            activation_dtype=model.activation_dtype,
            head_tokens=1,
        )
        host = model.efficiency.pass_s + model.efficiency.step_s
        spec = model.target
        communicated = self.communication_s(self.prompt_len, spec.num_layers, spec.hidden_size, 0)
        return model.pass_s(cost) + host + communicated

    def at(self, batch: int) -> Moment:
        """The steady state with `batch` busy slots."""
        drafting, extra = self.drafting, self._copied_kv_s(batch)
        curve = drafting.acceptance or AcceptanceCurve((0.0,))
        cell = self.whole.cell(
            *(batch, self.context_len, drafting.depth, drafting.shape, curve), output_tokens=self._decoded
        )
        ar = cell.ar.total_s + extra + self._target_communication_s(batch)
        step = ar
        if drafting.depth:
            verified = self._target_communication_s(batch * (1 + cell.nodes))
            step = cell.step.total_s + extra + verified + self._draft_communication_s(batch)
        each = step / cell.tokens_per_step
        resident = self._decoded * each + batch * self.prefill_s
        return Moment(
            batch=batch,
            step_s=step,
            ar_step_s=ar,
            tokens_per_step=cell.tokens_per_step,
            tpot_s=each + (batch - 1) * self.prefill_s / self._decoded,
            ttft_s=step + self.prefill_s,
            requests_per_s=batch / resident,
        )

    @property
    def _decoded(self) -> int:
        """Tokens after the first, which is the prefill's; one where there is none, so that rates stay finite."""
        return max(1, self.output_len - 1)

    def shares(self, batch: int) -> Shares:
        """What limits the target's pass at `batch`."""
        model = self.whole
        curve = self.drafting.acceptance
        gained = curve.step_yield(self.drafting.depth, self._decoded) if curve is not None else None
        rows = 1 + (self.drafting.depth * gained.drafted_share if gained is not None else 0.0)
        cost = model.target_cost(batch, rows, self.context_len)
        reached, roof = model.efficiency, model.roof
        moved = cost.bytes / (reached.memory * roof.bandwidth_bytes_per_s) + self._copied_kv_s(batch)
        return Shares(
            compute_s=cost.flops / (reached.compute * roof.flops_per_s),
            memory_s=moved,
            communication_s=self._target_communication_s(batch * rows),
            host_s=reached.pass_s + model.host_s(batch),
        )

    def footprint(self, batch: int) -> Footprint:
        """Bytes on each GPU with every request at its full length."""
        model, shape, depth = self.model, self.drafting.shape, self.drafting.depth
        held = footprint(
            model.target,
            batch,
            self.prompt_len + self.output_len + depth,
            batch * (1 + depth),
            weight_dtype=model.weight_dtype,
            kv_dtype=model.kv_dtype or model.activation_dtype,
            draft=shape,
            draft_params=shape.own_params if shape is not None else 0,
            draft_dtype=model.activation_dtype,
        )
        n = self.gpus
        return Footprint(held.weights / n, held.kv * self.kv_copies / n, held.drafter / n, held.logits / n)


def why_not_split(model: StepModel, gpus: int) -> str | None:
    """Why the target can't be split over `gpus` GPUs, or None: heads go whole, KV heads whole or in equal copies."""
    spec = model.target
    if gpus < 1:
        return f"tensor parallelism over {gpus} GPUs"
    if spec.num_heads % gpus:
        return f"{spec.num_heads} heads of {spec.name} can't be split over {gpus} GPUs"
    kv_heads = spec.num_kv_heads
    if spec.mla is None and kv_heads % gpus and gpus % kv_heads:
        return f"{kv_heads} KV heads of {spec.name} can't be split over {gpus} GPUs"
    return None
