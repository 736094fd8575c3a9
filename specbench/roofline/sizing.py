"""Sizing: GPUs, tensor parallelism, batch, drafter and depth for a model, a load and bounds on latency.

    specbench size scenarios/size/llama-3.1-8b-h100.yaml

For each way of splitting the model and each drafter and depth: the largest batch that memory and the bounds allow, the
fewest replicas that carry the load with it, and the batch that is then really busy. What stands in the way of fewer
GPUs is named: memory, TPOT, TTFT, compute (prefills alone fill the time) or the load itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.errors import InputError
from specbench.roofline.footprint import size
from specbench.roofline.hardware import Hardware
from specbench.roofline.serving import Drafting, Link, Moment, Replica, why_not_split
from specbench.roofline.step_model import StepModel

Limit = Literal["memory", "TPOT", "TTFT", "compute", "load", "max batch"]
MAX_BATCH = 1024
USABLE_SHARE = 0.9
"""Of a GPU's memory, for weights, KV cache and logits; the rest is for activations, graphs and the allocator."""


@dataclass(frozen=True)
class Load:
    """Requests that arrive each second, or that are under way at once; one of the two."""

    requests_per_s: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.requests_per_s is None) == (self.concurrency is None):
            raise InputError("give either requests_per_s or concurrency", key="load", remedy="requests_per_s: 10")
        value = self.requests_per_s if self.requests_per_s is not None else self.concurrency
        if value is None or not (value > 0 and math.isfinite(value)):
            raise InputError(f"a load of {value}", key="load", remedy="give a positive number")

    def describe(self) -> str:
        return f"{self.requests_per_s:g} requests/s" if self.requests_per_s else f"{self.concurrency} requests at once"


@dataclass(frozen=True)
class Bounds:
    """Most seconds a token after the first, and to the first one; None: any."""

    tpot_s: float | None = None
    ttft_s: float | None = None

    def broken(self, moment: Moment) -> Limit | None:
        """The bound that a moment breaks, TPOT first."""
        if self.tpot_s is not None and moment.tpot_s > self.tpot_s:
            return "TPOT"
        return "TTFT" if self.ttft_s is not None and moment.ttft_s > self.ttft_s else None


@dataclass(frozen=True)
class SizeRequest:
    """What is asked. `model` is the step model of one GPU, `draftings` every drafter and depth to try (plain decoding
    is always tried), `splits` the numbers of GPUs that may share a replica."""

    model: StepModel
    device: Hardware
    draftings: tuple[Drafting, ...]
    prompt_len: int
    output_len: int
    load: Load
    bounds: Bounds = Bounds()
    splits: tuple[int, ...] = (1, 2, 4, 8)
    max_gpus: int = 8
    link: Link | None = None
    usable_share: float = USABLE_SHARE
    price_per_gpu_hour: float | None = None
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        longest = self.model.target.max_position_embeddings
        if self.prompt_len + self.output_len > longest:
            message = f"{self.prompt_len} + {self.output_len} tokens, and {self.model.target.name} has {longest}"
            raise InputError(message, key="workload", remedy="shorten the prompt or the output")
        if not 0 < self.usable_share <= 1:
            raise InputError(f"{self.usable_share} of the memory", key="memory_share", remedy="give 0.5 to 1")

    def replica(self, gpus: int, drafting: Drafting) -> Replica:
        return Replica(self.model, gpus, self.link, drafting, self.prompt_len, self.output_len)


@dataclass(frozen=True)
class Option:
    """One configuration that carries the load within its bounds.

    `batch` slots of each replica are busy at this load, `most_batch` could be: `limit` says what stops there, or "load"
    where a smaller number of GPUs would do but for the whole replica. `joules_per_token` assumes all GPUs at their TDP,
    so it is the most; None where it is not known. `cost_per_million` in the price's currency.
    """

    gpus: int
    tensor_parallel: int
    replicas: int
    drafting: Drafting
    batch: int
    most_batch: int
    limit: Limit
    bound_by: str
    moment: Moment
    memory_bytes: float
    tokens_per_s: float
    joules_per_token: float | None
    cost_per_million: float | None

    @property
    def tpot_s(self) -> float:
        return self.moment.tpot_s

    @property
    def rank(self) -> tuple[float, ...]:
        """Fewest GPUs first, then the quickest tokens, then the plainer drafter."""
        return (self.gpus, self.tpot_s, self.drafting.depth)


@dataclass(frozen=True)
class Refusal:
    """Why one configuration can't be had."""

    tensor_parallel: int
    drafting: Drafting
    limit: Limit
    text: str
    gpus_needed: int | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None


@dataclass(frozen=True)
class Sizing:
    """Options, best first, and what was refused. `best` of each drafter and split is in `options`."""

    options: tuple[Option, ...]
    refusals: tuple[Refusal, ...]

    @property
    def best(self) -> Option:
        return self.options[0]

    def alternatives(self, count: int) -> tuple[Option, ...]:
        """The best options, no two of the same drafter and split."""
        seen: set[tuple[str, int]] = set()
        kept = []
        for option in self.options:
            key = (option.drafting.name if option.drafting.depth else "", option.tensor_parallel)
            if key not in seen:
                seen.add(key)
                kept.append(option)
        return tuple(kept[:count])


def size_up(request: SizeRequest) -> Sizing:
    """Every configuration, best first. Raises InputError, saying what would have to give, where none can be had."""
    options: list[Option] = []
    refusals: list[Refusal] = []
    splits = [n for n in request.splits if n <= request.max_gpus and why_not_split(request.model, n) is None]
    if not splits:
        shown = ", ".join(map(str, request.splits))
        reason = why_not_split(request.model, request.splits[0]) or f"at most {request.max_gpus} GPUs are allowed"
        raise InputError(f"none of {shown} GPUs can share the model: {reason}", key="tensor_parallel")
    plain = Drafting("none")
    for gpus in splits:
        for drafting in (plain, *(one for one in request.draftings if one.depth > 0)):
            found = _option(request, request.replica(gpus, drafting))
            (options if isinstance(found, Option) else refusals).append(found)  # type: ignore[arg-type]
    if not options:
        raise _impossible(request, refusals)
    return Sizing(tuple(sorted(options, key=lambda option: option.rank)), tuple(refusals))


def _option(request: SizeRequest, replica: Replica) -> Option | Refusal:
    n, drafting = replica.gpus, replica.drafting
    memory = request.device.memory_bytes
    usable = request.usable_share * memory
    most, limit = _largest_batch(request, replica, usable)
    if most == 0:
        moment, held = replica.at(1), replica.footprint(1).total
        text = {
            "memory": f"needs {size(held)} on each GPU, and {size(usable)} of {size(memory)} are to use",
            "TPOT": f"a token takes {1e3 * moment.tpot_s:.3g} ms at batch 1",
            "TTFT": f"the first token takes {1e3 * moment.ttft_s:.3g} ms at batch 1",
        }[limit]
        return Refusal(n, drafting, limit, text, None, moment.tpot_s, moment.ttft_s)
    best = replica.at(most)
    replicas, batch = _replicas(request.load, replica, best)
    gpus = replicas * n
    if gpus > request.max_gpus:
        # Where slots hardly add anything any more, it is the prefills that fill the time.
        full = replica.prefill_s * best.requests_per_s > 0.9
        why: Limit = "compute" if full else limit
        text = f"carries {best.requests_per_s:.3g} requests/s at batch {most}, so {gpus} GPUs are needed"
        return Refusal(n, drafting, why, text, gpus, best.tpot_s, best.ttft_s)
    moment = replica.at(batch)
    rate = moment.requests_per_s * replicas
    tokens = (request.load.requests_per_s or rate) * request.output_len
    watts = None if request.device.tdp_w is None else request.device.tdp_w * gpus
    price = None if request.price_per_gpu_hour is None else request.price_per_gpu_hour * gpus / 3600
    return Option(
        gpus=gpus,
        tensor_parallel=n,
        replicas=replicas,
        drafting=drafting,
        batch=batch,
        most_batch=most,
        limit="load" if replicas == 1 and batch < most else limit,
        bound_by=replica.shares(batch).bound_by,
        moment=moment,
        memory_bytes=replica.footprint(most).total,
        tokens_per_s=tokens,
        joules_per_token=None if watts is None else watts / tokens,
        cost_per_million=None if price is None else 1e6 * price / tokens,
    )


def _largest_batch(request: SizeRequest, replica: Replica, usable: float) -> tuple[int, Limit]:
    """The largest batch that memory and bounds allow, 0 for none, and what refuses the next one."""
    fits = _largest(lambda batch: replica.footprint(batch).total <= usable, request.max_batch)
    if fits == 0:
        return 0, "memory"
    within = _largest(lambda batch: request.bounds.broken(replica.at(batch)) is None, fits)
    if within < fits:
        return within, request.bounds.broken(replica.at(within + 1)) or "TPOT"
    return within, "memory" if fits < request.max_batch else "max batch"


def _replicas(load: Load, replica: Replica, best: Moment) -> tuple[int, int]:
    """The fewest replicas that carry the load, `best` being the most that one of them can do, and the slots that are
    busy in each."""
    if load.concurrency is not None:
        replicas = math.ceil(load.concurrency / best.batch)
        return replicas, math.ceil(load.concurrency / replicas)
    assert load.requests_per_s is not None
    replicas = max(1, math.ceil(load.requests_per_s / best.requests_per_s - 1e-9))
    each = load.requests_per_s / replicas
    too_few = _largest(lambda batch: replica.at(batch).requests_per_s < each, best.batch)
    return replicas, min(best.batch, too_few + 1)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in [0, most] with holds(1) .. holds(n), for a condition that once broken stays so."""
    if most < 1 or not holds(1):
        return 0
    low, high = 1, most + 1
    step = 1
    while low + step < high and holds(low + step):
        low += step
        step *= 2
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _impossible(request: SizeRequest, refusals: Sequence[Refusal]) -> InputError:
    """What would have to give, from the refusal that is nearest to an answer."""
    model = request.model.target.name
    needed = [one for one in refusals if one.gpus_needed is not None]
    if needed:
        nearest = min(needed, key=lambda one: one.gpus_needed or 0)
        message = (
            f"{request.load.describe()} need {nearest.gpus_needed} GPUs at least, and max_gpus is {request.max_gpus}"
        )
        how = f"TP {nearest.tensor_parallel}, {nearest.drafting.label}: it {nearest.text}; the limit is {nearest.limit}"
        return InputError(
            f"{message} ({how})", key="max_gpus", remedy=f"max_gpus: {nearest.gpus_needed}, or a smaller load"
        )
    late = [one for one in refusals if one.limit in ("TPOT", "TTFT")]
    if late:
        quickest = min(late, key=lambda one: one.tpot_s or math.inf)
        if quickest.limit == "TPOT":
            wanted, found, key = request.bounds.tpot_s, quickest.tpot_s, "tpot_ms"
        else:
            quickest = min(late, key=lambda one: one.ttft_s or math.inf)
            wanted, found, key = request.bounds.ttft_s, quickest.ttft_s, "ttft_ms"
        assert wanted is not None
        assert found is not None
        how = f"TP {quickest.tensor_parallel}, {quickest.drafting.label}"
        message = f"no configuration keeps {key} {1e3 * wanted:g}: the quickest has {1e3 * found:.3g} ({how}, batch 1)"
        remedy = f"{key}: {_above(1e3 * found)}, more GPUs a replica, a smaller format of weights, or another device"
        return InputError(message, key=f"bounds.{key}", remedy=remedy)
    widest = max(refusals, key=lambda one: one.tensor_parallel)
    message = f"{model} does not fit: over {widest.tensor_parallel} GPUs it {widest.text}"
    remedy = (
        "more GPUs a replica, shorter contexts, a smaller format of weights or KV cache, or a device with more memory"
    )
    return InputError(message, key="tensor_parallel", remedy=remedy)


def _above(value: float) -> str:
    """Two digits, rounded up."""
    scale = 10 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / scale) * scale:g}"
