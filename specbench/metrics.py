"""Metrics: each defined once, computed from traces, with its formula in `definitions.py`.

Words: a *row* is one verify step of one request (in the AR arm, one decode step of one request); l drafted tokens were
verified in it (nodes, for a tree), the first a of them accepted (the leading run, or the accepted path), c committed.
The *window* is the steps in which all slots were busy. Traces given together are pooled: sums over sums, never a mean
of rates. A value that can't be computed is None and `null_reasons` names why; it is never 0 and never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specbench.traces import FloatArray, IntArray, RequestLike, TraceLike

Metrics = dict[str, Any]

MAX_LOOP_PERIOD = 16
MIN_LOOP_REPEATS = 4
MIN_LOOP_TOKENS = 32
ROOF_LIMITS = {"roof_fraction_measured": 1.05, "roof_fraction_datasheet": 1.0}
STEP_PARTS = ("step_s", "draft_s", "verify_s", "sample_s", "commit_s", "host_s")
NO_WINDOW = "no step had all slots busy"


class Roof(NamedTuple):
    """The two ceilings of a device; None is unknown, never infinite."""

    flops_per_s: float | None
    bytes_per_s: float | None


class PromptCost(NamedTuple):
    """What one prompt got and took in the window."""

    request_id: str
    category: str
    tokens: int
    seconds: float


class PromptAcceptance(NamedTuple):
    """One prompt's drafts, counted by position i = 1, 2, ...: index i - 1 of `offered_at` counts drafts of depth >= i,
    of `tried_at` those whose first i - 1 tokens were accepted, of `accepted_at` those whose first i were."""

    request_id: str
    category: str
    offered_at: list[int]
    tried_at: list[int]
    accepted_at: list[int]


class _Rows(NamedTuple):
    """Rows of all traces. `table` int64[rows, 6]: proposed, drafted, depth, accepted, committed, index into `keys`."""

    table: IntArray
    keys: list[tuple[str, str]]  # distinct (request id, category)


def leading_run(passed: ArrayLike) -> IntArray:
    """Accepted tokens of bool[..., l]: the leading run only, so 1,0,1,1 gives 1. int64[...]."""
    return np.asarray(np.cumprod(np.asarray(passed, dtype=np.int64), axis=-1).sum(axis=-1), dtype=np.int64)


def accepted_from_emitted(num_emitted: ArrayLike, num_draft: ArrayLike) -> IntArray:
    """Accepted tokens of steps that only tell what they emitted: emitted - 1, in [0, l]; an empty step accepted 0."""
    return np.clip(np.asarray(num_emitted, dtype=np.int64) - 1, 0, np.asarray(num_draft, dtype=np.int64))


def merge_metrics(*parts: Mapping[str, Any]) -> Metrics:
    """One flat dict of several, their `null_reasons` joined; a name given twice is a bug."""
    merged: Metrics = {"null_reasons": {}}
    for part in parts:
        twice = set(part) & set(merged) - {"null_reasons"}
        assert not twice, f"metrics computed twice: {sorted(twice)}"
        merged["null_reasons"] |= part.get("null_reasons", {})
        merged |= {name: value for name, value in part.items() if name != "null_reasons"}
    return merged


def acceptance_metrics(traces: Sequence[TraceLike], window_only: bool = True) -> Metrics:
    """Acceptance, pooled over traces: counts, rates and the per-position curve.

    num_steps = rows; num_drafts = rows with l > 0; num_draft_tokens, num_accepted_tokens, num_committed_tokens =
    sums of l, a, c; num_discarded_tokens = sum(proposed - l), thrown away unverified and so neither accepted nor
    rejected. acceptance_rate = sum a / sum l; tokens_per_step = sum c / num_steps; acceptance_length =
    1 + sum a / num_drafts. Index i - 1 of `acceptance_at` is the share of drafts of depth >= i with a >= i, of
    `acceptance_conditional_at` the share of those with a >= i - 1 too. Index i of `accepted_histogram` counts drafts
    with a = i. Where any draft is a tree, acceptance_rate is None: draft_efficiency = sum a / nodes verified and
    depth_acceptance_rate = sum a / sum of depths are its metrics.
    """
    return _acceptance(_pool(traces, window_only))


def metrics_by_category(traces: Sequence[TraceLike], window_only: bool = True) -> dict[str, Metrics]:
    """The acceptance of each category of prompts, sorted by name, with num_requests = distinct request ids."""
    rows = _pool(traces, window_only)
    labels = np.array([category for _, category in rows.keys], dtype=object)[rows.table[:, 5]]
    names = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens")
    rates = ("acceptance_rate", "tokens_per_step", "acceptance_length", "draft_efficiency", "depth_acceptance_rate")
    result: dict[str, Metrics] = {}
    for category in sorted({category for _, category in rows.keys}):
        part = rows.table[labels == category]
        every = _acceptance(_Rows(part, rows.keys))
        reasons = {name: why for name, why in every["null_reasons"].items() if name in rates}
        result[category] = {name: every[name] for name in (*names, *rates)}
        result[category] |= {"num_requests": len(np.unique(part[:, 5])), "null_reasons": reasons}
    return result


def latency_metrics(traces: Sequence[TraceLike], prefix: str = "") -> Metrics:
    """What a request feels. A request that failed or emitted nothing counts as failed and gives no time.

    ttft_s = median of prefill_s. tpot_s = median over requests with at least 2 tokens of (sum of step_s over the
    request's rows / sum c), in the window: decode steps only, so no prefill is in it. itl_p50_s, itl_p99_s =
    quantiles of the time between two commits of a request that follow each other, both in the window; a stall by
    another request's prefill is in it.
    """
    ttft: list[float] = []
    tpot: list[FloatArray] = [np.zeros(0)]
    gaps: list[FloatArray] = [np.zeros(0)]
    total = 0
    for trace in traces:
        total += len(trace.requests)
        served = np.array([not is_failed(request) for request in trace.requests], dtype=bool)
        ttft += [request.prefill_s for request in trace.requests if not is_failed(request)]
        steps, owners, inside = trace.row_step, trace.row_request, trace.in_window[trace.row_step]
        size = len(trace.requests)
        seconds = np.bincount(owners[inside], trace.step_s[steps][inside], size)
        tokens = np.bincount(owners[inside], trace.num_committed[inside], size)
        several = np.array([len(request.token_ids) > 1 for request in trace.requests], dtype=bool)
        usable = served & several & (tokens > 0)
        tpot.append(seconds[usable] / tokens[usable])
        order = np.lexsort((steps, owners))
        owner, within, end = owners[order], inside[order], trace.end_s[steps[order]]
        pairs = (owner[1:] == owner[:-1]) & within[1:] & within[:-1] & served[owner[1:]]
        gaps.append(np.diff(end)[pairs])
    tpots, itl = np.concatenate(tpot), np.concatenate(gaps)
    none_served = "no request emitted a token" if total else "no requests"
    values = {
        "ttft_s": (_quantile(ttft, 0.5), none_served),
        "tpot_s": (_quantile(tpots, 0.5), "no request committed a token after its first in the window"),
        "itl_p50_s": (_quantile(itl, 0.5), "no request committed twice in the window"),
        "itl_p99_s": (_quantile(itl, 0.99), "no request committed twice in the window"),
    }
    counts = {"num_requests": total, "num_failed_requests": total - len(ttft)}
    return _with_reasons(counts, values, prefix)


def step_split(traces: Sequence[TraceLike], prefix: str = "") -> Metrics:
    """Mean seconds of a step in the window: step_s = draft_s + verify_s + sample_s + commit_s + host_s."""
    values = {part: (_mean(_window(traces, part)), NO_WINDOW) for part in STEP_PARTS}
    return _with_reasons({}, values, prefix)


def rollback_metrics(traces: Sequence[TraceLike], prefix: str = "") -> Metrics:
    """What keeping the accepted path cost the KV cache, mean of a step in the window.

    kv_bytes_moved = bytes of K and V copied in the target's cache; kv_allocator_calls = its pages taken and given back;
    rollback_s = time of committing paths, a part of commit_s (pages are taken before the step, in host_s).
    """
    names = ("kv_bytes_moved", "kv_allocator_calls", "rollback_s")
    return _with_reasons({}, {name: (_mean(_window(traces, name)), NO_WINDOW) for name in names}, prefix)


def throughput(traces: Sequence[TraceLike], prefix: str = "") -> Metrics:
    """output_tokens_per_s = sum c / sum step_s in the window, all requests; effective_batch = mean of busy in it."""
    tokens = sum(int(t.num_committed[t.in_window[t.row_step]].sum()) for t in traces)
    seconds = float(_window(traces, "step_s").sum())
    values = {
        "output_tokens_per_s": (_ratio(tokens, seconds), NO_WINDOW),
        "effective_batch": (_mean(_window(traces, "busy")), NO_WINDOW),
    }
    return _with_reasons({}, values, prefix)


def end_to_end(traces: Sequence[TraceLike], prefix: str = "") -> Metrics:
    """end_to_end_tokens_per_s = all token ids emitted, prefill's too / time from begin to last commit."""
    stepped = [trace for trace in traces if len(trace.end_s)]
    tokens = sum(len(request.token_ids) for trace in stepped for request in trace.requests)
    seconds = float(sum(trace.end_s.max() for trace in stepped))
    return _with_reasons({}, {"end_to_end_tokens_per_s": (_ratio(tokens, seconds), "no steps")}, prefix)


def roofline_metrics(
    traces: Sequence[TraceLike], measured: Roof | None, datasheet: Roof | None, prefix: str = ""
) -> Metrics:
    """The mean step's place on the roofline, window only.

    flops, bytes = sums over the forward passes really made / steps; intensity = sum flops / sum bytes;
    achieved_flops_per_s, achieved_bytes_per_s = sum flops (bytes) / sum step_s;
    roof_fraction = achieved_flops_per_s / min(roof flops/s, roof bytes/s * intensity), None if the roof is unknown.
    """
    flops, moved = _window(traces, "flops"), _window(traces, "bytes")
    seconds = float(_window(traces, "step_s").sum())
    unknown = "the cost of these steps is unknown" if len(flops) else NO_WINDOW
    known = bool(np.all(np.isfinite(flops)) and np.all(np.isfinite(moved)))
    sums = (float(flops.sum()), float(moved.sum())) if known else (0.0, 0.0)
    intensity, achieved = _ratio(*sums), (_ratio(sums[0] or None, seconds), _ratio(sums[1] or None, seconds))
    values = {
        "flops": (_ratio(sums[0] or None, len(flops)), unknown),
        "bytes": (_ratio(sums[1] or None, len(flops)), unknown),
        "intensity": (intensity or None, unknown),
        "achieved_flops_per_s": (achieved[0], unknown),
        "achieved_bytes_per_s": (achieved[1], unknown),
    }
    for kind, roof in (("measured", measured), ("datasheet", datasheet)):
        if roof is None or not roof.flops_per_s or not roof.bytes_per_s:
            values[f"roof_fraction_{kind}"] = (None, f"the {kind} roof of this device and dtype is unknown")
        elif achieved[0] is None or not intensity:
            values[f"roof_fraction_{kind}"] = (None, unknown)
        else:
            attainable = min(roof.flops_per_s, roof.bytes_per_s * intensity)
            values[f"roof_fraction_{kind}"] = (achieved[0] / attainable, unknown)
    return _with_reasons({}, values, prefix)


def draft_metrics(traces: Sequence[TraceLike]) -> Metrics:
    """drafter_step_flops, drafter_step_bytes = sums over the draft passes really made / steps, in the window; null
    where drafting made none."""
    flops, moved = _window(traces, "draft_flops"), _window(traces, "draft_bytes")
    why = "drafting made no forward pass" if len(flops) else NO_WINDOW
    means = [(_ratio(float(total.sum()) or None, len(total)), why) for total in (flops, moved)]
    return _with_reasons({}, dict(zip(("drafter_step_flops", "drafter_step_bytes"), means, strict=True)))


def impossible_reason(metrics: Mapping[str, Any]) -> str | None:
    """Why a cell's roof fractions can't be true: over 105 % of a measured roof or 100 % of a datasheet's. Else None."""
    for name, limit in ROOF_LIMITS.items():
        for prefix in ("", "ar_"):
            value = metrics.get(prefix + name)
            if value is not None and value > limit:
                return f"{prefix}{name} is {value:.1%}, over {limit:.0%}: work was skipped, or time was not counted"
    return None


def derived_metrics(metrics: Mapping[str, Any], measured: Roof | None = None) -> Metrics:
    """What follows from other metrics.

    target_efficiency = ar_step_s / verify_s; implied_overhead = tokens_per_step / speedup - 1; draft_cost_ratio =
    draft_s / ar_step_s, all drafting of a step; draft_cost_ratio_roof = the same from the cost model: least times under
    the measured roof, max(FLOPs / peak, bytes / bandwidth), of the mean step's draft passes over the AR step's pass.
    """
    overhead = _ratio(metrics.get("tokens_per_step"), metrics.get("speedup"))
    drafts = bool(metrics.get("num_drafts"))
    drafting = _least_s(metrics, ("drafter_step_flops", "drafter_step_bytes"), measured)
    decoding = _least_s(metrics, ("ar_flops", "ar_bytes"), measured)
    values = {
        "draft_cost_ratio": (
            _ratio(metrics.get("draft_s"), metrics.get("ar_step_s")) if drafts else None,
            "draft_s or ar_step_s is null" if drafts else "nothing was drafted",
        ),
        "draft_cost_ratio_roof": (_ratio(drafting, decoding), "measured roof, drafter_step_bytes or ar_bytes unknown"),
        "target_efficiency": (
            _ratio(metrics.get("ar_step_s"), metrics.get("verify_s")),
            "ar_step_s or verify_s is null",
        ),
        "implied_overhead": (None if overhead is None else overhead - 1, "tokens_per_step or speedup is null"),
    }
    return _with_reasons({}, values)


def _least_s(metrics: Mapping[str, Any], names: tuple[str, str], roof: Roof | None) -> float | None:
    """Least seconds of a cost under a roof, or None."""
    times = [_ratio(metrics.get(name), peak) for name, peak in zip(names, roof or (None, None), strict=True)]
    return None if None in times else max(time for time in times if time is not None)


def energy_metrics(joules: float | None, num_committed_tokens: int, reason: str | None = None) -> Metrics:
    """joules_per_token = energy of the window / committed tokens; `reason` says why the device told nothing."""
    value = _ratio(joules or None, num_committed_tokens)  # a counter that did not move told nothing
    why = "no tokens were committed" if joules else reason or "the device told no energy"
    result = _with_reasons({}, {"joules_per_token": (value, why)})
    return result | {"joules_per_token_reason": result["null_reasons"].get("joules_per_token")}


def prompt_costs(*traces: TraceLike) -> list[PromptCost]:
    """Tokens and seconds of each prompt in the window, in order of appearance; entries of one request id are joined.

    A step's time is shared equally among its busy slots: seconds = sum of step_s / busy over the request's rows. So
    the seconds of all prompts add up to the window, and a pooled ratio of sums is `output_tokens_per_s`.
    """
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for trace in traces:
        inside = trace.in_window[trace.row_step]
        owners, steps, size = trace.row_request[inside], trace.row_step[inside], len(trace.requests)
        seconds = np.bincount(owners, trace.step_s[steps] / trace.busy[steps], size)
        tokens = np.bincount(owners, trace.num_committed[inside], size)
        for index in np.unique(owners).tolist():
            key = (trace.requests[index].request_id, trace.requests[index].category)
            before = totals.get(key, (0, 0.0))
            totals[key] = (before[0] + int(tokens[index]), before[1] + float(seconds[index]))
    return [PromptCost(*key, *total) for key, total in totals.items()]


def prompt_acceptance(*traces: TraceLike) -> list[PromptAcceptance]:
    """The drafts of each prompt in the window, by position, in order of appearance; one request id is one entry.

    Summed over prompts, accepted_at / offered_at is `acceptance_at`, accepted_at / tried_at is
    `acceptance_conditional_at`, and sum of accepted_at / sum of offered_at is `depth_acceptance_rate`.
    """
    rows = _pool(traces, True)
    table = rows.table[rows.table[:, 1] > 0]
    order = np.argsort(table[:, 5], kind="stable")
    ends = np.searchsorted(table[order, 5], np.arange(len(rows.keys) + 1))
    found = []
    for (name, category), (begin, end) in zip(rows.keys, pairwise(ends.tolist()), strict=True):
        _, _, depth, accepted, _, _ = table[order[begin:end]].T
        if len(depth):
            found.append(PromptAcceptance(name, category, *_by_position(depth, accepted)))
    return found


def is_failed(request: RequestLike) -> bool:
    """True for a request with an error, and for one that ended without a single token."""
    return request.error is not None or request.finish_reason == "failed" or len(request.token_ids) == 0


def is_looping(token_ids: Sequence[int]) -> bool:
    """True if the output ends in a loop.

    For some period p <= 16 the last max(32, 4 p) tokens repeat with period p: at least 4 copies of one n-gram and at
    least 32 tokens. An output shorter than 32 tokens can't be called looping.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    for period in range(1, MAX_LOOP_PERIOD + 1):
        span = max(MIN_LOOP_TOKENS, MIN_LOOP_REPEATS * period)
        if len(ids) >= span and np.array_equal(ids[-span + period :], ids[-span:-period]):
            return True
    return False


def looping_share(traces: Sequence[TraceLike], prefix: str = "") -> Metrics:
    """looping_share = requests whose output ends in a loop (before the stop token) / requests that did not fail."""
    served = [request for trace in traces for request in trace.requests if not is_failed(request)]
    count = 0
    for request in served:
        stopped = request.finish_reason == "stop"
        count += is_looping(request.token_ids) or (stopped and is_looping(request.token_ids[:-1]))
    return _with_reasons({}, {"looping_share": (_ratio(count, len(served)), "no request emitted a token")}, prefix)


def _pool(traces: Sequence[TraceLike], window_only: bool) -> _Rows:
    index: dict[tuple[str, str], int] = {}
    parts: list[IntArray] = [np.zeros((0, 6), dtype=np.int64)]
    for trace in traces:
        keys = [(request.request_id, request.category) for request in trace.requests]
        lookup = np.array([index.setdefault(key, len(index)) for key in keys], dtype=np.int64)
        keep = trace.in_window[trace.row_step] if window_only else np.ones(len(trace.row_step), dtype=bool)
        counts = (trace.num_proposed, trace.num_draft, trace.draft_depth, trace.num_accepted, trace.num_committed)
        parts.append(np.stack([*counts, lookup[trace.row_request]], axis=1)[keep])
    table = np.concatenate(parts)
    proposed, drafted, depth, accepted, committed, _ = table.T
    ladder = (0 * accepted, accepted, depth, drafted, proposed)
    assert all(np.all(low <= high) for low, high in pairwise(ladder)), "0 <= accepted <= depth <= drafted <= proposed"
    assert np.all((depth > 0) == (drafted > 0)), "a draft without depth"
    assert np.all(committed >= 0), "a step took tokens back"
    return _Rows(table, list(index))


def _acceptance(rows: _Rows) -> Metrics:
    num_steps, num_committed = len(rows.table), int(rows.table[:, 4].sum())
    num_discarded = int((rows.table[:, 0] - rows.table[:, 1]).sum())
    _, drafted, depth, accepted, _, request = rows.table[rows.table[:, 1] > 0].T
    num_drafts, total_accepted = len(drafted), int(accepted.sum())
    deepest = int(depth.max()) if num_drafts else 0
    histogram = np.bincount(accepted, minlength=deepest + 1) if num_drafts else np.zeros(0, dtype=np.int64)
    offered, tried, reached = _by_position(depth, accepted)
    drafts_of = np.bincount(request, minlength=len(rows.keys))
    accepted_of = np.bincount(request, accepted, len(rows.keys))
    lengths = 1 + accepted_of[drafts_of > 0] / drafts_of[drafts_of > 0]
    no_drafts = "nothing was drafted"
    is_tree = bool(np.any(depth < drafted))
    efficiency = _ratio(total_accepted, int(drafted.sum()))
    tree = "drafts are trees: see draft_efficiency and depth_acceptance_rate"
    values = {
        "acceptance_rate": (None if is_tree else efficiency, tree if is_tree else no_drafts),
        "draft_efficiency": (efficiency, no_drafts),
        "depth_acceptance_rate": (_ratio(total_accepted, int(depth.sum())), no_drafts),
        "tokens_per_step": (_ratio(num_committed, num_steps), "no steps in the window"),
        "acceptance_length": (1 + total_accepted / num_drafts if num_drafts else None, no_drafts),
        "acceptance_length_by_request": (_mean(lengths), no_drafts),
    }
    conditional = [_ratio(k, n) for k, n in zip(reached, tried, strict=True)]
    counts = {
        "num_steps": num_steps,
        "num_drafts": num_drafts,
        "num_draft_tokens": int(drafted.sum()),
        "num_accepted_tokens": total_accepted,
        "num_committed_tokens": num_committed,
        "num_discarded_tokens": num_discarded,
        "acceptance_at": [_ratio(k, n) for k, n in zip(reached, offered, strict=True)],
        "acceptance_conditional_at": conditional,
        "accepted_histogram": [int(count) for count in histogram],
    }
    result = _with_reasons(counts, values)
    if None in conditional:
        result["null_reasons"]["acceptance_conditional_at"] = "no draft was accepted up to that position"
    return result


def _by_position(depth: IntArray, accepted: IntArray) -> tuple[list[int], list[int], list[int]]:
    """Drafts of depth >= i, those of them with a >= i - 1, and those with a >= i; for i in 1 .. the deepest."""
    deepest = int(depth.max(initial=0))
    return _at_least(depth, deepest), _at_least(np.minimum(accepted + 1, depth), deepest), _at_least(accepted, deepest)


def _at_least(values: IntArray, deepest: int) -> list[int]:
    """How many values are >= i, for i in 1..deepest."""
    return [int(count) for count in np.bincount(values, minlength=deepest + 1)[::-1].cumsum()[::-1][1:]]


def _window(traces: Iterable[TraceLike], name: str) -> FloatArray:
    """A per-step array of all traces, the steps in the window only."""
    return np.concatenate([np.zeros(0), *(getattr(trace, name)[trace.in_window] for trace in traces)])


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return float(numerator / denominator)


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: ArrayLike, probability: float) -> float | None:
    array = np.asarray(values, dtype=np.float64)
    return float(np.quantile(array, probability)) if array.size else None


def _with_reasons(
    plain: Mapping[str, Any], values: Mapping[str, tuple[float | None, str]], prefix: str = ""
) -> Metrics:
    """Prefixed names; each None gets its reason."""
    result: Metrics = {prefix + name: value for name, value in plain.items()}
    result |= {prefix + name: value for name, (value, _) in values.items()}
    assert all(value is None or math.isfinite(value) for value, _ in values.values()), f"not finite: {values}"
    reasons = {prefix + name: why for name, (value, why) in values.items() if value is None}
    return result | {"null_reasons": reasons}
