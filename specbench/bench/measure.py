"""One case -> one row's content: blocks of the AR arm and of the speculative arm, interleaved in seeded order.

Both arms of a block run the same prompts on the same target, minutes apart at most; their outputs are compared token by
token, and a speedup is made only from blocks that nothing disturbed and whose outputs agree.
"""

from __future__ import annotations

import functools
import itertools
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from specbench import metrics as m
from specbench.bench.outputs import OutputCheck, compare_outputs
from specbench.bench.target import PreparedPrompts, Target, blocks_of
from specbench.bench.telemetry import BlockConditions, LoadMonitor
from specbench.engine.decode import Engine
from specbench.engine.drafters.base import Drafter
from specbench.engine.request import Request
from specbench.engine.trace import Trace
from specbench.scenario.cases import Case
from specbench.scenario.schema import MeasureConfig
from specbench.stats import Interval, bootstrap_rate, bootstrap_ratio, stopping

WARMUP_TOKENS = 6
"""Output length of warm-up requests: enough steps to touch every buffer."""

Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class RoofsInUse:
    """Roofs of the device in this case's dtype; `limit` is the most any repetition reached, for the 105 % check."""

    measured: m.Roof | None
    datasheet: m.Roof | None
    limit: m.Roof | None


@dataclass
class Block:
    """One timed block of one arm."""

    order: int
    arm: str
    index: int
    trace: Trace
    conditions: BlockConditions

    @property
    def tokens(self) -> int:
        return int(self.trace.num_committed[self.trace.in_window[self.trace.row_step]].sum())

    @property
    def wall_s(self) -> float:
        return float(self.trace.step_s[self.trace.in_window].sum())

    def sample(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "arm": self.arm,
            "block": self.index,
            "tokens": self.tokens,
            "wall_s": self.wall_s,
            "steps": int(self.trace.in_window.sum()),
            "valid": self.conditions.valid,
            "marks": list(self.conditions.marks),
        }


@dataclass
class Outcome:
    """What measuring a case gave; the sweep makes the row of it."""

    status: str
    reason: str | None
    metrics: dict[str, Any]
    samples: dict[str, Any]
    conditions: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class _Timer:
    """Where a case's time goes: measured windows, prefill, warm-up; the rest is the harness's own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, call: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def measure_case(
    target: Target,
    case: Case,
    settings: MeasureConfig,
    roofs: RoofsInUse,
    *,
    tell: Tell = lambda _: None,
    monitor: LoadMonitor | None = None,
) -> Outcome:
    """Measure `case` on a loaded target. Raises CapacityError or InputError where the case can't be had."""
    begun = time.perf_counter()
    timer, monitor = _Timer(), monitor or LoadMonitor()
    prompts = timer.run("prefill", lambda: target.prompts(case.workload))
    target.bind(case, prompts)
    drafter = target.drafter(case, prompts.longest + case.workload.output_len + 1)
    batch = case.workload.batch_size

    def engine(arm_drafter: Drafter | None) -> Engine:
        depth = case.depth if arm_drafter is not None else 0
        return Engine(
            target.decoder, target.store, arm_drafter, batch_size=batch, depth=depth, token_bytes=target.token_bytes
        )

    arms = {"ar": engine(None)}
    if drafter is not None:
        arms["spec"] = engine(drafter)
    requests = target.requests(case, prompts)
    tell("prefill")
    source = blocks_of(requests, batch, len(prompts.categories))
    first = next(source)
    timer.run("prefill", functools.partial(prefill, target, first))
    tell("warm-up")
    timer.run("warm-up", lambda: _warm_up(target, arms, first, settings))
    run = _BlockRun(target, case, arms, settings, timer, monitor, tell)
    stop = run.measure(itertools.chain([first], source))
    outcome = _outcome(target, case, prompts, drafter, run, stop, roofs)
    outcome.seconds = {**timer.seconds, "total": time.perf_counter() - begun}
    return outcome


def prefill(target: Target, requests: Sequence[Request]) -> None:
    """Prefill what is new among the requests' prompts, so that no block waits for one."""
    for one in requests:
        target.store.get(one.prompt_ids, 0)


def _warm_up(target: Target, arms: Mapping[str, Engine], requests: Sequence[Request], settings: MeasureConfig) -> None:
    """Short untimed blocks of each arm until two in a row agree; requests keep their references' beginning."""
    short = []
    for one in requests:
        tokens = min(WARMUP_TOKENS, one.stops.max_tokens)
        short.append(replace(one, stops=replace(one.stops, max_tokens=tokens)))
    ar = arms["ar"].run(short)
    known = {request.request_id: request.token_ids for request in ar.requests}
    short = [replace(one, reference=known[one.request_id]) for one in short]
    config = settings.warmup
    for engine in arms.values():
        last = None
        for count in range(1, config.max + 1):
            trace = engine.run(short)
            step = float(trace.step_s.mean()) if len(trace.step_s) else 0.0
            stable = last is not None and abs(step - last) <= config.tolerance * max(step, last)
            if count >= config.min and (stable or count == config.max or step == 0.0):
                break
            last = step


class _BlockRun:
    """Runs blocks of both arms until the interval is narrow enough, the blocks or the seconds are used up."""

    def __init__(
        self,
        target: Target,
        case: Case,
        arms: Mapping[str, Engine],
        settings: MeasureConfig,
        timer: _Timer,
        monitor: LoadMonitor,
        tell: Tell,
    ) -> None:
        self._target, self._case, self._arms, self._settings = target, case, arms, settings
        self._timer, self._monitor, self._tell = timer, monitor, tell
        self._order = random.Random(f"{settings.seed}/{case.hash}")
        self.blocks: list[Block] = []
        self._good_pairs: list[list[Block]] = []
        self.check = OutputCheck()
        self.interval: Interval | None = None

    def _arm_order(self, requests: Sequence[Request]) -> list[str]:
        order = list(self._arms)
        self._order.shuffle(order)
        replays = self._case.drafter.kind in ("oracle", "forced")
        if replays and any(one.reference is None for one in requests):
            order.sort()
        return order

    def measure(self, source: Any) -> str:
        """Returns why it stopped: "target", "max_blocks", "budget", "diverged" or "disturbed"."""
        begin = time.perf_counter()
        count = disturbed = 0
        limits, budget = self._settings.blocks, self._settings.budget_s or float("inf")
        requests = next(source)
        while True:
            self._tell(f"block {count + 1}")
            pair = self._pair(requests, count)
            self.blocks += pair
            if self.check.verdict == "diverged":
                return "diverged"
            undisturbed = all(block.conditions.valid for block in pair)
            if undisturbed:
                count += 1
                self._good_pairs.append(pair)
                self.interval = self._speedup()
            else:
                disturbed += 1
            elapsed = time.perf_counter() - begin
            reason = stopping(
                self.interval, count, limits.min, limits.max, self._settings.target_interval, elapsed, budget
            )
            if reason is not None and (count or reason != "budget"):
                return reason
            if disturbed > limits.max or (disturbed and elapsed > 2 * budget):
                return "disturbed"
            if undisturbed:
                requests = next(source)
                self._timer.run("prefill", functools.partial(prefill, self._target, requests))

    def _pair(self, requests: Sequence[Request], index: int) -> list[Block]:
        pair: dict[str, Block] = {}
        for arm in self._arm_order(requests):
            known = [replace(one, reference=self._reference(one, pair)) for one in requests]
            self._monitor.start()
            block = functools.partial(self._arms[arm].run, known, itertools.cycle(known))
            trace = self._timer.run("measured", block)
            pair[arm] = Block(len(self.blocks) + len(pair), arm, index, trace, self._monitor.stop())
        for one, done in zip(requests, pair["ar"].trace.requests, strict=False):
            if done.finish_reason != "cut" and done.error is None:
                self._target.references[self._target.reference_key(one)] = done.token_ids
        if "spec" in pair and self._case.sampling.temperature == 0:
            compare_outputs(self.check, self._target, requests, pair["ar"].trace, pair["spec"].trace)
        return list(pair.values())

    def _reference(self, request: Request, pair: Mapping[str, Block]) -> tuple[int, ...] | None:
        """The request's AR output: this block's where the AR arm has just run, else an earlier one."""
        if "ar" in pair:
            for done in pair["ar"].trace.requests:
                if done.request_id == request.request_id and done.finish_reason != "cut":
                    return done.token_ids
        return self._target.references.get(self._target.reference_key(request))

    def valid(self, arm: str) -> list[Trace]:
        """Traces of one arm from the pairs that nothing disturbed."""
        return [block.trace for pair in self._good_pairs for block in pair if block.arm == arm]

    def prompt_samples(self) -> list[dict[str, Any]]:
        """Each prompt's tokens and seconds in both arms; a prompt of several rounds is one cluster of the bootstrap."""
        ar = {cost.request_id: cost for cost in m.prompt_costs(*self.valid("ar"))}
        spec = {cost.request_id: cost for cost in m.prompt_costs(*self.valid("spec"))} if "spec" in self._arms else ar
        return [
            {
                "id": name,
                "category": cost.category,
                "ar_tokens": cost.tokens,
                "ar_s": cost.seconds,
                "spec_tokens": spec[name].tokens,
                "spec_s": spec[name].seconds,
            }
            for name, cost in ar.items()
            if name in spec
        ]

    def _speedup(self) -> Interval | None:
        if "spec" not in self._arms:
            samples = self.prompt_samples()
            clusters = [s["id"].partition("#")[0] for s in samples]
            return bootstrap_rate([s["ar_tokens"] for s in samples], [s["ar_s"] for s in samples], clusters)
        return speedup_interval(self.prompt_samples())


def speedup_interval(samples: Sequence[Mapping[str, Any]]) -> Interval:
    """The paired ratio of tokens/s over prompts, with its bootstrap interval."""
    tokens, seconds, ar_tokens, ar_seconds = (
        [s[name] for s in samples] for name in ("spec_tokens", "spec_s", "ar_tokens", "ar_s")
    )
    return bootstrap_ratio(tokens, seconds, ar_tokens, ar_seconds, [s["id"].partition("#")[0] for s in samples])


def _rates(samples: Sequence[Mapping[str, Any]], arm: str, prefix: str) -> m.Metrics:
    """Interval of output_tokens_per_s by bootstrap over prompts; its middle comes from the traces."""
    clusters = [s["id"].partition("#")[0] for s in samples]
    interval = bootstrap_rate([s[f"{arm}_tokens"] for s in samples], [s[f"{arm}_s"] for s in samples], clusters)
    name = f"{prefix}output_tokens_per_s"
    out: dict[str, Any] = {f"{name}_low": interval.low, f"{name}_high": interval.high}
    missing = [key for key, value in out.items() if value is None]
    return {**out, "null_reasons": dict.fromkeys(missing, interval.reason or "too few prompts")}


def _speedup_metrics(interval: Interval | None, is_ar: bool) -> m.Metrics:
    names = ("speedup", "speedup_low", "speedup_high")
    if is_ar:
        reason = "this is the AR arm itself"
        return {**dict.fromkeys(names), "null_reasons": dict.fromkeys(names, reason)}
    assert interval is not None
    values = dict(zip(names, (interval.value, interval.low, interval.high), strict=True))
    reasons = {name: interval.reason or "too few prompts" for name, value in values.items() if value is None}
    return {**values, "null_reasons": reasons}


def _outcome(
    target: Target,
    case: Case,
    prompts: PreparedPrompts,
    drafter: Drafter | None,
    run: _BlockRun,
    stop: str,
    roofs: RoofsInUse,
) -> Outcome:
    ar, spec = run.valid("ar"), run.valid("spec") if drafter is not None else []
    main = spec if drafter is not None else ar
    samples = run.prompt_samples()
    sampled = case.sampling.temperature > 0
    conditions: dict[str, Any] = {
        "lossless": True,
        "synthetic": bool(drafter is not None and drafter.synthetic) or target.source.kind == "dummy",
        "output_check": None if drafter is None else "distribution" if sampled else run.check.verdict,
        "device": target.decoder.kv.k_pool.device.type,
        "weights": f"{target.source.label}, {prompts.source}"
        + (f" sha256 {prompts.sha256[:12]}" if prompts.sha256 else ""),
        "prompt_categories": prompts.categories,
    }
    blocks = {"blocks": [block.sample() for block in run.blocks], "prompts": samples}
    if not main or not ar:
        marks = sorted({mark for block in run.blocks for mark in block.conditions.marks})
        reason = f"no undisturbed block: {', '.join(marks)}"
        return Outcome("failed", reason, {}, {"blocks": [], "prompts": []}, conditions)
    metrics = m.merge_metrics(
        m.acceptance_metrics(main),
        {"by_category": m.metrics_by_category(main)},
        m.latency_metrics(main),
        m.latency_metrics(ar, prefix="ar_"),
        m.step_split(main),
        m.step_split(ar, prefix="ar_"),
        m.throughput(main),
        m.throughput(ar, prefix="ar_"),
        _rates(samples, "spec", ""),
        _rates(samples, "ar", "ar_"),
        m.end_to_end(main),
        m.roofline_metrics(main, roofs.measured, roofs.datasheet),
        m.roofline_metrics(ar, roofs.measured, roofs.datasheet, prefix="ar_"),
        m.looping_share(main),
        m.energy_metrics(None, 0, "this device has no energy counter that NVML reads"),
        _speedup_metrics(run.interval, drafter is None),
        {"num_blocks": len(main), "peak_memory_bytes": peak_memory_bytes(), "stopped_by": stop},
    )
    metrics = m.merge_metrics(metrics, m.derived_metrics(metrics))
    status, why, warnings = _judge(case, run, stop, main, ar, roofs, metrics)
    return Outcome(status, why, metrics, blocks, conditions, warnings)


def _judge(
    case: Case,
    run: _BlockRun,
    stop: str,
    main: Sequence[Trace],
    ar: Sequence[Trace],
    roofs: RoofsInUse,
    metrics: Mapping[str, Any],
) -> tuple[str, str | None, list[str]]:
    """Status, reason and warnings: a diverged output, an impossible rate or failed requests make the cell invalid."""
    warnings = list(run.check.notes)
    disturbed = [block for block in run.blocks if not block.conditions.valid]
    if disturbed:
        marks = sorted({mark.rsplit(" ", 1)[0] for block in disturbed for mark in block.conditions.marks})
        warnings.append(
            f"{len(disturbed)} of {len(run.blocks)} blocks were disturbed ({', '.join(marks)}) and repeated"
        )
    looping = metrics.get("looping_share")
    if looping:
        warnings.append(f"{looping:.0%} of the outputs end in a loop, which flatters lookup drafters")
    if run.check.verdict == "diverged":
        return "invalid", run.check.reason, warnings
    failed = [r for trace in (*main, *ar) for r in trace.requests if r.error is not None]
    if failed:
        return "invalid", f"request {failed[0].request_id} failed: {failed[0].error}", warnings
    limits = m.merge_metrics(
        m.roofline_metrics(main, roofs.limit, roofs.datasheet),
        m.roofline_metrics(ar, roofs.limit, roofs.datasheet, prefix="ar_"),
    )
    impossible = m.impossible_reason(limits)
    if impossible is not None:
        return "invalid", impossible, warnings
    if stop in ("budget", "disturbed") and metrics["num_blocks"] < 2:
        warnings.append("only one block fitted the budget: the interval says little")
    return "ok", None, warnings


def peak_memory_bytes() -> int:
    """Most memory this process has held so far: of the GPU where there is one, else resident memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
