"""The answer of `specbench size` in words, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specbench.roofline.footprint import size
from specbench.roofline.sizing import Option, Refusal, SizeRequest, Sizing
from specbench.scenario.size_schema import SizeTemplate

MAX_REFUSALS = 6
_SHORT = {"memory bandwidth": "memory", "host and launches": "host", "communication": "links"}
_WIDTHS = {"drafter": 10, "limit": 6, "bound by": 7}
NOTES = (
    "every figure is computed, none was measured",
    "prefills run alone, nobody waits for a slot, all requests are alike; memory is counted at each one's full length",
    "joules a token: all GPUs at their TDP, so at most",
)


def milliseconds(seconds: float) -> str:
    return f"{_three(1e3 * seconds)} ms"


def _three(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def lines(template: SizeTemplate, request: SizeRequest, found: Sizing) -> Iterator[str]:
    """The question, the answer, what limits it, and what it rests on."""
    best, model = found.best, request.model
    yield template.question or (
        f"{request.load.describe()} of {request.prompt_len} + {request.output_len} tokens with"
        f" {model.target.name} on {request.device.name}: how many GPUs?"
    )
    yield f"- {answer(best, request)}"
    yield f"- {limit_text(best, request)}"
    plain = next((one for one in found.options if not one.drafting.depth), None)
    if best.drafting.depth:
        beside = (
            f"without a drafter nothing within {request.max_gpus} GPUs meets the bounds"
            if plain is None
            else f"without a drafter: {_gpus(plain)}, {milliseconds(plain.tpot_s)} a token"
        )
        gain = (
            f"{best.moment.tokens_per_step:.2f} tokens a step, {best.moment.speedup:.2f} x plain decoding at this batch"
        )
        yield f"- {best.drafting.label} yields {gain}; {beside}"
    elif request.draftings:
        yield "- no drafter tried is better: plain decoding needs as few GPUs and is as quick, or quicker"
    for refusal in narrower(found, best):
        yield f"- {refusal.tensor_parallel} GPU{'s' * (refusal.tensor_parallel > 1)} a replica: {refusal.text}"
    yield f"- efficiency: {model.efficiency.source}"
    for text in dict.fromkeys(
        f"acceptance of {one.name}: {one.acceptance.status}, {one.acceptance.source}"
        for one in request.draftings
        if one.acceptance is not None
    ):
        yield f"- {text}"
    for note in NOTES:
        yield f"- {note}"


def _gpus(option: Option) -> str:
    return f"{option.gpus} GPU{'s' * (option.gpus > 1)}"


def answer(best: Option, request: SizeRequest) -> str:
    """One sentence: GPUs, split, batch, drafter, depth, and what a user sees."""
    copies = f"{best.replicas} replica{'s' * (best.replicas > 1)} of {best.tensor_parallel}"
    text = (
        f"{_gpus(best)} {request.device.name} ({copies}), {best.batch} busy slots a replica, {best.drafting.label}:"
        f" {milliseconds(best.tpot_s)} a token, {milliseconds(best.moment.ttft_s)} to the first,"
        f" {best.tokens_per_s:,.0f} tokens/s"
    )
    if best.cost_per_million is not None:
        text += f", {best.cost_per_million:.3g} a million tokens"
    if best.joules_per_token is not None:
        text += f", at most {best.joules_per_token:.2g} J a token"
    return text


def limit_text(best: Option, request: SizeRequest) -> str:
    """What limits the answer."""
    why = {
        "load": f"the load: up to {best.most_batch} slots a replica would do",
        "memory": f"memory: {best.most_batch} slots take {size(best.memory_bytes)} of each GPU",
        "TPOT": f"TPOT: one slot more than {best.most_batch} breaks {_bound(request.bounds.tpot_s)}",
        "TTFT": f"TTFT: one slot more than {best.most_batch} breaks {_bound(request.bounds.ttft_s)}",
        "compute": "compute: prefills fill the time",
        "max batch": f"the largest batch tried, {best.most_batch}",
    }[best.limit]
    return f"limited by {why}; a step at this batch is bound by {best.bound_by}"


def _bound(seconds: float | None) -> str:
    return "the bound" if seconds is None else milliseconds(seconds)


def narrower(found: Sizing, best: Option) -> list[Refusal]:
    """Why fewer GPUs a replica won't do: the nearest refusal of each smaller split."""
    kept: dict[int, Refusal] = {}
    for one in found.refusals:
        if one.tensor_parallel < best.tensor_parallel and all(
            option.tensor_parallel != one.tensor_parallel for option in found.options
        ):
            before = kept.get(one.tensor_parallel)
            if before is None or (one.tpot_s or 0) < (before.tpot_s or 0):
                kept[one.tensor_parallel] = one
    return list(kept.values())[:MAX_REFUSALS]


def table(found: Sizing, count: int) -> Table:
    """The best options, no two of the same drafter and split."""
    shown = Table(
        title="alternatives, best first (TPOT and TTFT in ms)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for head in ("GPUs", "TP", "drafter", "batch", "most", "TPOT", "TTFT", "tok/s", "J/tok", "limit", "bound by"):
        words = head in ("drafter", "limit", "bound by")
        shown.add_column(head, justify="left" if words else "right", overflow="fold", min_width=_WIDTHS.get(head, 4))
    for one in found.alternatives(count):
        drafter = f"{one.drafting.name} · {one.drafting.depth}" if one.drafting.depth else "none"
        cells = (
            *(str(one.gpus), str(one.tensor_parallel), drafter, str(one.batch), str(one.most_batch)),
            *(_three(1e3 * one.tpot_s), _three(1e3 * one.moment.ttft_s), f"{one.tokens_per_s:,.0f}"),
            "-" if one.joules_per_token is None else f"{one.joules_per_token:.2g}",
            *(one.limit, _SHORT.get(one.bound_by, one.bound_by)),
        )
        shown.add_row(*map(Text, cells))
    return shown


def as_dict(template: SizeTemplate, request: SizeRequest, found: Sizing) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
        "name": template.name,
        "predicted": True,
        "template": template.model_dump(mode="json"),
        "device": request.device.to_dict(),
        "efficiency": request.model.efficiency.to_dict(),
        "notes": list(NOTES),
        "options": [_option(one) for one in found.options],
        "refused": [
            {
                "tensor_parallel": one.tensor_parallel,
                "drafter": one.drafting.name,
                "depth": one.drafting.depth,
                "limit": one.limit,
                "reason": one.text,
            }
            for one in found.refusals
        ],
    }


def _option(one: Option) -> dict[str, Any]:
    return {
        "gpus": one.gpus,
        "tensor_parallel": one.tensor_parallel,
        "replicas": one.replicas,
        "drafter": one.drafting.name,
        "depth": one.drafting.depth,
        "batch_size": one.batch,
        "most_batch_size": one.most_batch,
        "limit": one.limit,
        "bound_by": one.bound_by,
        "tpot_s": one.tpot_s,
        "ttft_s": one.moment.ttft_s,
        "step_s": one.moment.step_s,
        "tokens_per_step": one.moment.tokens_per_step,
        "speedup": one.moment.speedup,
        "tokens_per_s": one.tokens_per_s,
        "memory_bytes_per_gpu": one.memory_bytes,
        "joules_per_token_at_most": one.joules_per_token,
        "cost_per_million_tokens": one.cost_per_million,
    }
