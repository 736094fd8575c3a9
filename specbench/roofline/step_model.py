"""StepModel: how long a decode step takes, from shapes, a roof and what an engine reaches of it; and what it is worth.

A forward pass of op classes c takes Σ_c max(FLOPs_c / (η_c Π), bytes_c / (η_m β)) + launch (facts/roofline.md §2.1);
where the device's skinny matmuls were measured, their staircase stands in place of the linear layers' max. A step is
drafting + verifying + sampling + host, and

    speedup(B, γ) = E[tokens a step] · T(1, B) / (T_draft + T_verify + T_sample + T_host)        (§2.6)

with the acceptance curve by position, not a constant.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from specbench.errors import InputError
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.breakeven import predicted_speedup
from specbench.roofline.cost import LOGIT_BYTES, Cost, StepCost, uniform_cost
from specbench.roofline.draft_cost import NO_PASS_KINDS, DraftShape, catch_up_rows, draft_passes
from specbench.roofline.model import Roof
from specbench.roofline.shapes import ModelSpec
from specbench.roofline.staircase import Staircase

SAMPLING_READS = 3
"""How often sampling reads the logits: facts/roofline.md §2.4 gives three to six."""
FLOAT_DTYPES = ("fp64", "fp32", "bf16", "fp16")
MAX_ROWS = 1 << 24
"""Batch x rows a request above this is no sensible step."""
MAX_CONTEXT = 1 << 32


@dataclass(frozen=True)
class Efficiency:
    """What an engine reaches of a device's roofs, and what it spends beside them; all times in seconds.

    `compute`, `memory`: η_c and η_m. `overlap`: the p of the p-norm that joins compute and memory time; infinite is
    the roofline's max. `pass_s`: launches of one forward pass of the target. `step_s`, `request_s`: host time of a step
    and of each request in it. `sample_step_s`: sampling's own start, once a step, and `verdict_s` that of accepting
    drafts. `token_s`: choosing a token of one row, all rows of a greedy step at once. At temperatures above 0 each row
    costs `sampled_row_s` and each that is judged `sampled_token_s` more (None: as greedy), and a chain's drafted node
    is drawn from its law for `sampled_draft_token_s`. `draft_pass_s`: launches and host of one draft pass;
    `draft_token_s`: choosing one drafted node; `lookup_s`: a request's lookup in a drafter without a model. `stairs`: a
    measured staircase's times are divided by it. `source` says where the figures are from.
    """

    compute: float = 1.0
    memory: float = 1.0
    pass_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    draft_pass_s: float = 0.0
    draft_token_s: float = 0.0
    lookup_s: float = 0.0
    request_s: float = 0.0
    sample_step_s: float = 0.0
    verdict_s: float = 0.0
    sampled_token_s: float | None = None
    sampled_row_s: float = 0.0
    sampled_draft_token_s: float = 0.0
    overlap: float = math.inf
    stairs: float = 1.0
    source: str = "the roofs themselves"

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "stairs", "overlap"):
            value = getattr(self, name)
            if not value > 0 or (name != "overlap" and not math.isfinite(value)):
                raise InputError(f"an efficiency of {value!r}", key=name, remedy="give a positive share, such as 0.8")
        if self.overlap < 1:
            raise InputError(f"an overlap of {self.overlap!r}", key="overlap", remedy="1 (a sum) to infinity (the max)")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and value is not None and not (value >= 0 and math.isfinite(value)):
                raise InputError(f"{value!r} is no time in seconds", key=field.name, remedy="give 0 or more")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: an infinite overlap is null."""
        values = asdict(self)
        return values | {"overlap": None if math.isinf(self.overlap) else self.overlap}


IDEAL = Efficiency()
ASSUMED_GPU = Efficiency(
    compute=0.6,
    memory=0.85,
    step_s=0.5e-3,
    draft_pass_s=0.1e-3,
    source="assumed: 60 % of the peak, 85 % of the bandwidth, 0.5 ms of host a step, 0.1 ms of launch a draft pass",
)
"""What is assumed of an engine on a GPU that was not measured (η of facts/roofline.md §2.6)."""
ASSUMED_CPU = Efficiency(
    compute=0.6,
    memory=0.85,
    step_s=0.2e-3,
    draft_pass_s=0.2e-3,
    token_s=0.3e-3,
    source="assumed: 60 % of the peak, 85 % of the bandwidth, 0.2 ms of host a step and a draft pass, 0.3 ms a row",
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by part: drafting, verifying, sampling with acceptance, and the host (commit with it)."""

    draft_s: float
    verify_s: float
    sample_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s + self.host_s


@dataclass(frozen=True)
class Speedup:
    """One predicted cell: tokens a step, AR and speculative step times, and their ratio. `nodes`: mean nodes verified
    a step of a request; `verifying`, `drafting`: what its passes cost in FLOPs and bytes."""

    tokens_per_step: float
    ar: StepTimes
    step: StepTimes
    nodes: float
    verifying: StepCost
    drafting: tuple[StepCost, ...] = ()

    @property
    def value(self) -> float:
        other = self.step.sample_s + self.step.host_s
        return predicted_speedup(self.tokens_per_step, self.ar.total_s, self.step.verify_s, self.step.draft_s, other)


@dataclass(frozen=True)
class StepModel:
    """Step times of one engine on one device for one target. `sampled`: whether temperatures are above 0."""

    target: ModelSpec
    roof: Roof
    efficiency: Efficiency = IDEAL
    weight_dtype: str = "bf16"
    kv_dtype: str | None = None
    staircase: Staircase | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.staircase is not None and self.staircase.dtype != self.weight_dtype:
            raise InputError(
                f"the staircase was measured in {self.staircase.dtype}, the weights are {self.weight_dtype}",
                remedy="measure it in the weights' dtype, or leave it out",
            )

    def with_efficiency(self, efficiency: Efficiency) -> StepModel:
        return replace(self, efficiency=efficiency)

    @property
    def activation_dtype(self) -> str:
        """Activations and draft weights stay in 16 bits where the target's weights are packed."""
        return self.weight_dtype if self.weight_dtype in FLOAT_DTYPES else "bf16"

    def seconds(self, cost: Cost) -> float:
        """One op class: max(FLOPs / (η_c Π), bytes / (η_m β)), or their p-norm where the engine overlaps them less."""
        reached = self.efficiency
        compute = cost.flops / (reached.compute * self.roof.flops_per_s)
        memory = cost.bytes / (reached.memory * self.roof.bandwidth_bytes_per_s)
        longer, shorter = (compute, memory) if compute >= memory else (memory, compute)
        if math.isinf(reached.overlap) or shorter <= 0:
            return longer
        power = reached.overlap
        return float(longer * (1.0 + (shorter / longer) ** power) ** (1 / power))

    def pass_s(self, cost: StepCost) -> float:
        """A forward pass under the roofs, without its launches: the sum over its op classes."""
        return sum(self.seconds(one) for one in cost.by_class().values())

    @cached_property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(n, k, count) of a dense target's weights as an engine multiplies them: q, k and v joined, gate and up too;
        the unembedding last."""
        spec = self.target
        q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
        return (
            (q_dim + 2 * kv_dim, hidden, layers),
            (hidden, q_dim, layers),
            (2 * inner, hidden, layers),
            (hidden, inner, layers),
            (spec.vocab_size, hidden, 1),
        )

    @cached_property
    def _has_stairs(self) -> bool:
        spec = self.target
        special = (getattr(spec, name, None) for name in ("moe", "mla", "indexer"))
        return self.staircase is not None and bool(self.staircase.points) and all(kind is None for kind in special)

    def stairs_s(self, rows: float) -> tuple[float, float] | None:
        """(layers, unembedding) seconds of the linear maps over `rows` from the measured staircase; None where any of
        the matrices lies outside what was measured."""
        if not self._has_stairs or rows <= 0:
            return None
        assert self.staircase is not None
        times = []
        for n, k, count in self.matrices:
            one = self._stair(rows, n, k)
            if one is None:
                return None
            times.append(count * one / self.efficiency.stairs)
        return sum(times[:-1]), times[-1]

    def _stair(self, rows: float, n: int, k: int) -> float | None:
        """Between two whole numbers of rows the mean of both, weighted: mean rows come from steps of either."""
        assert self.staircase is not None
        low = math.floor(rows)
        below = self.staircase.time_s(max(low, 1), n, k)
        if below is None or rows == low or low < 1:
            return below
        above = self.staircase.time_s(low + 1, n, k)
        return None if above is None else below + (rows - low) * (above - below)

    def target_pass_s(self, batch: int, query_tokens: float, context_len: float) -> float:
        """Seconds of the target's pass over `query_tokens` rows of each of `batch` requests, launches included."""
        return self._verify_s(self.target_cost(batch, query_tokens, context_len), batch * query_tokens)

    def _verify_s(self, cost: StepCost, rows: float) -> float:
        stairs = self.stairs_s(rows)
        if stairs is None:
            return self.pass_s(cost) + self.efficiency.pass_s
        rest = (self.seconds(one) for name, one in cost.by_class().items() if name not in ("linear", "head"))
        return sum(stairs) + sum(rest) + self.efficiency.pass_s

    def target_cost(self, batch: int, query_tokens: float, context_len: float) -> StepCost:
        """FLOPs and bytes of that pass. Raises InputError for sizes that no step has."""
        _check_sizes(batch, query_tokens, context_len)
        return uniform_cost(
            *(self.target, batch, query_tokens, context_len),
            weight_dtype=self.weight_dtype,
            kv_dtype=self.kv_dtype,
            activation_dtype=self.activation_dtype,
        )

    def draft_costs(
        self, batch: int, context_len: float, depth: int, draft: DraftShape | None, catch_up: float = 0.0
    ) -> tuple[StepCost, ...]:
        """The draft passes of a step, each in FLOPs and bytes."""
        if draft is None or depth == 0:
            return ()
        return draft_passes(
            *(draft, self.target, batch, context_len, depth),
            weight_dtype=self.activation_dtype,
            kv_dtype=self.kv_dtype if self.kv_dtype in FLOAT_DTYPES else None,
            catch_up=catch_up,
        )

    def sample_s(self, rows: float, judged: float | None = None, accepting: bool = False) -> float:
        """Choosing tokens of `rows` rows: their logits are read SAMPLING_READS times, and a row costs token_s. Above
        temperature 0 only the `judged` ones (default: all) become a distribution each. `accepting`: drafts are held
        against them."""
        reached = self.efficiency
        chosen = rows * reached.token_s
        if self.sampled and reached.sampled_token_s is not None:
            chosen = rows * reached.sampled_row_s + (rows if judged is None else judged) * reached.sampled_token_s
        moved = SAMPLING_READS * LOGIT_BYTES * rows * self.target.vocab_size
        start = reached.sample_step_s + (reached.verdict_s if accepting else 0.0)
        return start + moved / (reached.memory * self.roof.bandwidth_bytes_per_s) + chosen

    def host_s(self, batch: int) -> float:
        return self.efficiency.step_s + batch * self.efficiency.request_s

    def ar_step(self, batch: int, context_len: float) -> StepTimes:
        """The autoregressive step by part."""
        verify = self.target_pass_s(batch, 1, context_len)
        return StepTimes(0.0, verify, self.sample_s(batch), self.host_s(batch))

    def ar_s(self, batch: int, context_len: float) -> float:
        """T(1, B): seconds of an autoregressive step."""
        return self.ar_step(batch, context_len).total_s

    def step(
        self,
        batch: int,
        context_len: float,
        depth: int,
        draft: DraftShape | None = None,
        nodes: float | None = None,
        catch_up: float = 0.0,
        tokens: float | None = None,
    ) -> StepTimes:
        """A speculative step that drafts `depth` levels and verifies `nodes` of them a request (default: a chain's)
        beside the pending token. `catch_up`: draft_cost.catch_up_rows. `tokens`: what the step yields a request, as
        many rows as are judged one by one at temperatures above 0. Depth 0 is an AR step.

        Raises InputError for sizes that no step has.
        """
        if depth < 0:
            raise InputError(f"a depth of {depth}", key="depth", remedy="give 0 or more")
        if depth == 0:
            return self.ar_step(batch, context_len)
        drafted = float(depth if nodes is None else nodes)
        verifying = self.target_cost(batch, 1 + drafted, context_len)
        drafting = self.draft_costs(batch, context_len, depth, draft, catch_up)
        return self._step(batch, depth, draft, drafted, verifying, drafting, tokens)

    def _step(
        self,
        batch: int,
        depth: int,
        draft: DraftShape | None,
        drafted: float,
        verifying: StepCost,
        drafting: tuple[StepCost, ...],
        tokens: float | None,
    ) -> StepTimes:
        rows = batch * (1 + drafted)
        judged = None if tokens is None else batch * tokens
        return StepTimes(
            self._draft_s(batch, depth, draft, drafting),
            self._verify_s(verifying, rows),
            self.sample_s(rows, judged, accepting=True),
            self.host_s(batch),
        )

    def draft_s(
        self, batch: int, context_len: float, depth: int, draft: DraftShape | None, catch_up: float = 0.0
    ) -> float:
        """Seconds of drafting: its passes under the roofs with their launches, and choosing the nodes."""
        return self._draft_s(batch, depth, draft, self.draft_costs(batch, context_len, depth, draft, catch_up))

    def _draft_s(self, batch: int, depth: int, draft: DraftShape | None, costs: tuple[StepCost, ...]) -> float:
        reached = self.efficiency
        if draft is None or depth == 0:
            return 0.0
        if draft.kind in NO_PASS_KINDS:
            return batch * reached.lookup_s if draft.kind in ("ngram", "suffix") else 0.0
        each = reached.draft_token_s
        if self.sampled and draws(draft):
            each += reached.sampled_draft_token_s
        chosen = batch * chosen_rows(draft, depth)
        return sum(self.pass_s(cost) + reached.draft_pass_s for cost in costs) + chosen * each

    def cell(
        self,
        batch: int,
        context_len: float,
        depth: int,
        draft: DraftShape | None,
        acceptance: AcceptanceCurve,
        nodes: float | None = None,
        output_tokens: int | None = None,
        ar: StepTimes | None = None,
    ) -> Speedup:
        """One cell: `nodes` are the most of a draft; what is verified on average follows from the curve. `ar`: the AR
        step of this batch and context, where it is known already."""
        gained = acceptance.step_yield(depth, output_tokens)
        most = float(depth if nodes is None else nodes)
        drafted = most * gained.drafted_share
        catch_up = 0.0
        if draft is not None and depth > 0:
            catch_up = catch_up_rows(draft, acceptance.rates(depth), depth)
        ar = self.ar_step(batch, context_len) if ar is None else ar
        verifying = self.target_cost(batch, 1 + drafted, context_len)
        if depth == 0:
            return Speedup(gained.tokens, ar, ar, 0.0, verifying)
        drafting = self.draft_costs(batch, context_len, depth, draft, catch_up)
        step = self._step(batch, depth, draft, drafted, verifying, drafting, gained.tokens)
        return Speedup(gained.tokens, ar, step, drafted, verifying, drafting)

    def speedup(
        self,
        batch: int,
        context_len: float,
        depth: int,
        draft: DraftShape | None,
        acceptance: AcceptanceCurve,
        nodes: float | None = None,
        output_tokens: int | None = None,
    ) -> float:
        """speedup(B, γ): tokens a step times the AR step over the speculative step."""
        return self.cell(batch, context_len, depth, draft, acceptance, nodes, output_tokens).value


def draws(draft: DraftShape) -> bool:
    """Whether a drafter draws its tokens from its law where the request is sampled: chains do, trees take the best."""
    return draft.kind not in NO_PASS_KINDS and draft.levels is None and draft.top_k is None


def chosen_rows(draft: DraftShape, depth: int) -> int:
    """Rows of a request whose next tokens a drafter chooses in one draft: one a pass of a chain, one a fed node of a
    tree, one a head for Medusa."""
    if draft.kind == "medusa":
        return min(depth, draft.num_modules)
    if draft.top_k is not None:
        return 1 + draft.top_k * (depth - 1)
    return sum(draft.levels[:depth]) if draft.levels is not None else depth


def _check_sizes(batch: int, query_tokens: float, context_len: float) -> None:
    if batch < 1 or query_tokens <= 0 or batch * query_tokens > MAX_ROWS:
        raise InputError(
            f"a step of {batch} requests with {query_tokens:g} rows each",
            key="batch_size",
            remedy=f"give 1 or more requests, and at most {MAX_ROWS} rows in all",
        )
    if not 0 <= context_len <= MAX_CONTEXT:
        raise InputError(
            f"a context of {context_len:g} tokens", key="context_len", remedy=f"give 0 to {MAX_CONTEXT} tokens"
        )
