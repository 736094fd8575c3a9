"""Predict one case, or thousands: a case in, a predicted cell (or the reason why it can't run) out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from specbench.errors import InputError
from specbench.predict.acceptance import AcceptanceBook
from specbench.predict.shapes import Drafting, drafting, target_spec
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.cost import ZERO, Cost
from specbench.roofline.footprint import Footprint, footprint
from specbench.roofline.hardware import Hardware
from specbench.roofline.model import Roof
from specbench.roofline.shapes import ModelSpec
from specbench.roofline.staircase import Staircase
from specbench.roofline.step_model import ASSUMED_CPU, ASSUMED_GPU, Efficiency, Speedup, StepModel, StepTimes
from specbench.scenario.cases import Case, Workload
from specbench.scenario.prompts import load_prompt_set

DUMMY_PROMPT_LEN = 128
"""Tokens of a prompt where dummy weights have none of their own (bench/target.py)."""
CHARS_PER_TOKEN = 4.0
TEMPLATE_TOKENS = 30


@dataclass(frozen=True)
class Device:
    """What is predicted for: roofs by dtype, memory, what an engine is taken to reach, and where each is from."""

    name: str
    roofs: Mapping[str, Roof]
    memory_bytes: float | None
    efficiency: Efficiency
    roof_source: str
    staircases: Mapping[str, Staircase] = field(default_factory=dict)
    hardware: Hardware | None = None

    def roof(self, dtype: str) -> Roof:
        found = self.roofs.get(dtype)
        if found is None:
            raise InputError(
                f"{self.name} has no {dtype} roof",
                key="target.dtype",
                remedy=f"choose a dtype that it has: {', '.join(self.roofs)}",
            )
        return found


def device_of(hardware: Hardware, efficiency: Efficiency | None = None) -> Device:
    """A device of the table; without a fit its engine's efficiency is assumed."""
    roofs = {dtype: roof for dtype in hardware.peaks_flops_per_s if (roof := hardware.roof(dtype)) is not None}
    assumed = ASSUMED_CPU if hardware.kind == "cpu" else ASSUMED_GPU
    chosen = efficiency or assumed
    return Device(hardware.name, roofs, hardware.memory_bytes, chosen, "datasheet", {}, hardware)


@dataclass(frozen=True)
class PredictedCell:
    """A case and what the model says of it: `result`, or `skip` with the reason why it can't run there. `depth`: the
    case's own, or for `depth: auto` the one that the model would choose, 0 among them. `decoding`: an AR step's work.
    """

    case: Case
    context_len: float
    drafting: Drafting
    curve: AcceptanceCurve | None
    result: Speedup | None
    memory: Footprint | None
    skip: str | None
    decoding: Cost = ZERO
    depth: int = 0


class Predictor:
    """Predicts cases on one device. What cases share (shapes, prompts' lengths, AR steps) is computed once."""

    def __init__(self, device: Device, book: AcceptanceBook) -> None:
        self.device, self.book = device, book
        self._context: Callable[[Case], tuple[float, int]] = _by(
            _prompt_tokens, lambda c: (c.target, _queue(c.workload))
        )
        self._models: dict[tuple[object, ...], StepModel] = {}
        self._curves: dict[tuple[object, ...], AcceptanceCurve] = {}
        self._ar: dict[tuple[object, ...], tuple[StepTimes, Cost]] = {}

    def predict(self, case: Case, context_len: float | None = None) -> PredictedCell:
        """`context_len`: the mean cached tokens of its steps, where they are known; else from its prompts.

        Raises InputError where shape, dtype or acceptance can't be had: that is no cell to skip.
        """
        spec = target_spec(case.target)
        model = self._model(case, spec)
        work = case.workload
        exact = work.context_len
        mean_prompt, longest_prompt = self._context(case) if exact is None else (float(exact), exact)
        context = mean_prompt + work.output_len / 2 if context_len is None else context_len
        longest = longest_prompt + work.output_len + 1
        drafts = drafting(case)
        if longest > spec.max_position_embeddings:
            reason = f"needs {longest} tokens of context, and the model has {spec.max_position_embeddings}"
            return PredictedCell(case, context, drafts, None, None, None, reason)
        nodes = case.num_nodes
        held = footprint(
            *(spec, work.batch_size, longest + nodes - case.depth, work.batch_size * (nodes + 1.0)),
            weight_dtype=case.target.dtype,
            draft=drafts.shape,
            draft_params=drafts.params,
            draft_dtype=model.activation_dtype,
        )
        if self.device.memory_bytes is not None:
            full = held.why_not(self.device.memory_bytes, self.device.name)
            if full is not None:
                return PredictedCell(case, context, drafts, None, None, held, full)
        why = _why_not_drafted(case, drafts)
        if why is not None:
            return PredictedCell(case, context, drafts, None, None, held, why)
        curve = self._curve(case)
        key = (case.target, model.sampled, work.batch_size, context)
        if key not in self._ar:
            cost = model.target_cost(work.batch_size, 1, context).total
            self._ar[key] = (model.ar_step(work.batch_size, context), cost)
        ar, decoding = self._ar[key]
        ends = max(1, work.output_len - 1)
        depths = range(case.depth + 1) if case.depth_policy == "auto" else (case.depth,)
        results = {
            depth: model.cell(
                *(work.batch_size, context, depth, drafts.shape, curve, case.drafter.num_nodes(depth), ends),
                ar=ar,
            )
            for depth in depths
        }
        chosen = max(results, key=lambda depth: (results[depth].value, -depth)) if len(results) > 1 else case.depth
        return PredictedCell(case, context, drafts, curve, results[chosen], held, None, decoding, chosen)

    def _curve(self, case: Case) -> AcceptanceCurve:
        key = (case.drafter, case.depth, case.sampling.temperature)
        if key not in self._curves:
            self._curves[key] = self.book.curve(case)
        return self._curves[key]

    def _model(self, case: Case, spec: ModelSpec) -> StepModel:
        dtype, sampled = case.target.dtype, case.sampling.temperature > 0
        key = (case.target, sampled)
        if key not in self._models:
            roof, stairs = self.device.roof(dtype), self.device.staircases.get(dtype)
            self._models[key] = StepModel(spec, roof, self.device.efficiency, dtype, None, stairs, sampled)
        return self._models[key]


def _why_not_drafted(case: Case, drafts: Drafting) -> str | None:
    if case.drafter.kind in ("oracle", "forced") and case.sampling.temperature > 0:
        return f"{case.drafter.kind} replays the AR output, which is fixed at temperature 0 only"
    if drafts.most_depth is not None and case.depth > drafts.most_depth:
        return f"a draft of {case.depth} levels, and the head has {drafts.most_depth}"
    return None


def _queue(work: Workload) -> Workload:
    """What the prompts' lengths depend on."""
    return replace(work, batch_size=1)


def _by(
    compute: Callable[[Case], tuple[float, int]], key: Callable[[Case], object]
) -> Callable[[Case], tuple[float, int]]:
    known: dict[object, tuple[float, int]] = {}

    def found(case: Case) -> tuple[float, int]:
        at = key(case)
        if at not in known:
            known[at] = compute(case)
        return known[at]

    return found


def _prompt_tokens(case: Case) -> tuple[float, int]:
    """(mean, longest) tokens of the case's prompts. Text counts as CHARS_PER_TOKEN characters a token and
    TEMPLATE_TOKENS of the chat template, because no tokenizer is loaded."""
    if case.target.weights == "dummy":
        return float(DUMMY_PROMPT_LEN), DUMMY_PROMPT_LEN
    return _text_tokens(case.workload)


@cache
def _text_tokens(work: Workload) -> tuple[float, int]:
    spec = work.prompts
    chosen = load_prompt_set(
        spec.locator(work.seed), categories=spec.categories, limit=spec.num_prompts, seed=work.seed
    )
    replies = [(len(prompt.turns) - 1) * work.output_len for prompt in chosen.prompts]
    lengths = [
        sum(len(turn) for turn in prompt.turns) / CHARS_PER_TOKEN + TEMPLATE_TOKENS + reply
        for prompt, reply in zip(chosen.prompts, replies, strict=True)
    ]
    return sum(lengths) / len(lengths), int(max(lengths)) + 1
