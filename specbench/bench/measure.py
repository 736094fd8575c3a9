"""One case -> one row's content: blocks of the AR arm and of the speculative arm, interleaved in seeded order.

Both arms of a block run the same prompts on the same target, minutes apart at most; their outputs are compared token by
token, and a speedup is made only from blocks that nothing disturbed and whose outputs agree.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbench import metrics as m
from specbench.bench.blocks import BlockRun, Tell, Timer, prefill, rate_interval
from specbench.bench.canary import check_once
from specbench.bench.choices import METHOD_OF
from specbench.bench.clock import EventMarks
from specbench.bench.memory import PeakMemory
from specbench.bench.target import PreparedPrompts, Target, blocks_of
from specbench.bench.telemetry import LoadMonitor
from specbench.bench.throttled import described, throttle_for
from specbench.engine.decode import Engine
from specbench.engine.drafters.base import Drafter
from specbench.engine.request import Request
from specbench.engine.trace import Trace
from specbench.errors import CapacityError, SpecbenchError
from specbench.metrics_depth import depth_metrics
from specbench.roofline.throttle import MeasuredSteps
from specbench.scenario.cases import Case
from specbench.scenario.schema import MeasureConfig
from specbench.stats import Interval

WARMUP_TOKENS = 6
"""Output length of warm-up requests: enough steps to touch every buffer."""


@dataclass(frozen=True)
class RoofsInUse:
    """Roofs of the device in this case's dtype; `limit` is the most any repetition reached, for the 105 % check."""

    measured: m.Roof | None
    datasheet: m.Roof | None
    limit: m.Roof | None


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
    peak = PeakMemory(target.decoder.kv.k_pool.device)
    timer, monitor = Timer(), monitor or LoadMonitor()
    prompts = timer.run("prefill", lambda: target.prompts(case.workload))
    if settings.canary == "self":
        tell("canary")
        timer.run("canary", lambda: check_once(target, case, prompts))
    target.bind(case, prompts)
    drafter = target.drafter(case, prompts.longest + case.workload.output_len + 1)
    batch = case.workload.batch_size

    device = target.decoder.kv.k_pool.device
    # On a GPU a step's times are events in its stream; on a CPU a call is over when it returns.
    marks: dict[str, Any] = {"marks": EventMarks(device)} if device.type == "cuda" else {}

    def engine(arm_drafter: Drafter | None) -> Engine:
        depth = case.depth if arm_drafter is not None else 0
        return Engine(
            *(target.decoder, target.store, arm_drafter),
            batch_size=batch,
            depth=depth,
            token_bytes=target.token_bytes,
            method=METHOD_OF[case.sampling.verification],
            **marks,
        )

    arms = {"ar": engine(None)}
    if drafter is not None:
        arms["spec"] = engine(drafter)
    requests = target.requests(case, prompts)
    tell("prefill")
    source = blocks_of(requests, batch, len(prompts.categories))
    first = next(source)
    run = BlockRun(target, case, arms, settings, timer, monitor, tell)
    try:
        timer.run("prefill", functools.partial(prefill, target, first, drafter.capture if drafter is not None else ()))
        tell("warm-up")
        timer.run("warm-up", lambda: _warm_up(target, arms, first, settings))
        steps: MeasuredSteps | None = None
        if case.depth_policy == "auto" and drafter is not None:
            tell("step times by depth")
            throttle, steps = timer.run("warm-up", lambda: throttle_for(arms["spec"], arms["ar"], first))
            arms["spec"].policy = throttle
        stop = run.measure(itertools.chain([first], source))
    except CapacityError as error:  # bind() made room for all of it: a fault of the engine, no reason to skip
        raise SpecbenchError(f"the cache filled up while decoding: {error.message}") from error
    outcome = _outcome(target, case, prompts, drafter, run, stop, roofs, peak, steps)
    outcome.seconds = {**timer.seconds, "total": time.perf_counter() - begun}
    return outcome


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


def _rates(samples: Sequence[Mapping[str, Any]], arm: str, prefix: str) -> m.Metrics:
    """Interval of output_tokens_per_s by bootstrap over prompts; its middle comes from the traces."""
    interval = rate_interval(samples, arm)
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
    run: BlockRun,
    stop: str,
    roofs: RoofsInUse,
    peak: PeakMemory,
    steps: MeasuredSteps | None,
) -> Outcome:
    ar, spec = run.kept("ar"), run.kept("spec") if drafter is not None else []
    main = spec if drafter is not None else ar
    samples = run.samples()
    own = target.drafters.weights(case)
    sampled = case.sampling.temperature > 0
    conditions: dict[str, Any] = {
        "lossless": True,
        "synthetic": bool(drafter is not None and drafter.synthetic) or target.source.kind == "dummy",
        "output_check": None if drafter is None else "distribution" if sampled else run.check.verdict,
        "device": target.decoder.kv.k_pool.device.type,
        "graphs": target.graphs,
        "weights": f"{target.source.label}, {prompts.source}"
        + (f" sha256 {prompts.sha256[:12]}" if prompts.sha256 else ""),
        "drafter_weights": own.label,
        "prompt_categories": prompts.categories,
    }
    blocks = {"blocks": [block.sample() for block in run.blocks], "prompts": samples}
    if not main or not ar:
        reason = f"none of {len(run.blocks)} blocks was undisturbed: {_marks(run)}; run again when the machine is idle"
        return Outcome("failed", reason, {}, {"blocks": [], "prompts": []}, conditions)
    metrics = m.merge_metrics(
        m.acceptance_metrics(main),
        {"by_category": m.metrics_by_category(main)},
        m.latency_metrics(main),
        m.latency_metrics(ar, prefix="ar_"),
        m.step_split(main),
        m.step_split(ar, prefix="ar_"),
        m.rollback_metrics(main),
        m.rollback_metrics(ar, prefix="ar_"),
        m.throughput(main),
        m.throughput(ar, prefix="ar_"),
        _rates(samples, "spec", ""),
        _rates(samples, "ar", "ar_"),
        m.end_to_end(main),
        m.roofline_metrics(main, roofs.measured, roofs.datasheet),
        m.roofline_metrics(ar, roofs.measured, roofs.datasheet, prefix="ar_"),
        m.draft_metrics(main),
        m.looping_share(main),
        m.energy_metrics(None, 0, "this device has no energy counter that NVML reads"),
        _speedup_metrics(run.interval, drafter is None),
        peak.metrics(),
        {"num_blocks": len(main), "stopped_by": stop, "drafter_params": own.params, "null_reasons": own.null_reasons},
    )
    metrics = m.merge_metrics(metrics, m.derived_metrics(metrics, roofs.measured))
    if steps is not None:
        metrics = m.merge_metrics(metrics, depth_metrics(spec, case.depth, steps.seconds))
        conditions["depth_model"] = described(steps)
    status, why, warnings = _judge(run, stop, main, ar, roofs, metrics)
    return Outcome(status, why, metrics, blocks, conditions, warnings)


def _judge(
    run: BlockRun,
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
        warnings.append(f"{len(disturbed)} of {len(run.blocks)} blocks were disturbed ({_marks(run)}) and left out")
    looping = metrics.get("looping_share")
    if looping:
        warnings.append(f"{looping:.0%} of the outputs end in a loop, which flatters lookup drafters")
    if run.fault is not None:
        return "invalid", run.fault, warnings
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


def _marks(run: BlockRun) -> str:
    """What disturbed the blocks, each once, without its figure."""
    return ", ".join(sorted({mark.rsplit(" ", 1)[0] for block in run.blocks for mark in block.conditions.marks}))
