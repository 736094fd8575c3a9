"""What a sweep will do, before it does it: each case's memory need, an estimate of its time, and why it is skipped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbench.bench.choices import why_not_verified
from specbench.bench.devices import graphs_on, resolve_backend
from specbench.bench.drafters import draft_model_source, drafter_bytes, head_source, why_not_drafted
from specbench.bench.target import DUMMY_PROMPT_LEN, case_bytes, device_bytes, source_of
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.kv_cache import PAGE_SIZE
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.loader import shares_embedding
from specbench.engine.models.sources import ModelSource
from specbench.engine.models.tokenizer import first_vocab_difference, load_tokenizer
from specbench.errors import InputError
from specbench.roofline.cost import forward_cost
from specbench.roofline.model import Roof, step_time_s
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import Case, TargetSpec, Workload
from specbench.scenario.drafter_spec import HEAD_KINDS
from specbench.scenario.prompts import load_prompt_set
from specbench.scenario.schema import MeasureConfig


@dataclass(frozen=True)
class PlannedCase:
    """One case with its memory need in bytes, an estimate in seconds, and the reason if it will be skipped."""

    case: Case
    memory_bytes: int | None
    estimate_s: float | None
    skip: str | None


class Planner:
    """Plans cases from shapes, prompts and roofs alone: no weights are read.

    `free_bytes` and `roof` say what the machine has; `roof` None leaves the time unknown.
    """

    def __init__(self, settings: MeasureConfig, roof: Roof | None, free_bytes: int | None = None) -> None:
        self._settings, self._roof = settings, roof
        self._free = device_bytes() if free_bytes is None else free_bytes
        self._lengths: Callable[[TargetSpec, Workload], Sequence[int]] = functools.cache(self._prompt_lengths)
        self._source: Callable[[TargetSpec], ModelSource] = functools.cache(source_of)
        self._spec: Callable[[TargetSpec], ModelSpec] = functools.cache(lambda t: read_model_spec(self._source(t)))

    def _prompt_lengths(self, target: TargetSpec, work: Workload) -> Sequence[int]:
        if work.context_len is not None:
            return (work.context_len,)
        source = self._source(target)
        if source.kind == "dummy":
            return (DUMMY_PROMPT_LEN,)
        spec = work.prompts
        chosen = load_prompt_set(
            spec.locator(work.seed), categories=spec.categories, limit=spec.num_prompts, seed=work.seed
        )
        tokenizer = load_tokenizer(source)
        lengths = []
        for prompt in chosen.prompts:
            turns = [{"role": "user", "content": prompt.turns[0]}]
            for turn in prompt.turns[1:]:  # the target's answers are not known yet, but their length is bounded
                turns += [{"role": "assistant", "content": ""}, {"role": "user", "content": turn}]
            replies = (len(prompt.turns) - 1) * work.output_len
            lengths.append(len(tokenizer.apply_chat(turns)) + replies)
        return tuple(lengths)

    def plan(self, case: Case) -> PlannedCase:
        """The plan of one case. Raises InputError where the target itself can't be had: that is no case to skip."""
        graphs_on(case.target)  # raises where backend or graphs can't be had
        spec = self._spec(case.target)
        lengths = self._lengths(case.target, replace(case.workload, batch_size=1))
        longest = max(lengths)
        memory = case_bytes(spec, case, longest) + self._drafter_bytes(case, spec, longest)
        estimate = self._estimate(spec, case, lengths) if self._roof is not None else None
        return PlannedCase(case, memory, estimate, self._why_skipped(case, spec, longest, memory))

    @staticmethod
    def _drafter_bytes(case: Case, spec: ModelSpec, longest: int) -> int:
        """What the drafter adds; nothing where it can't be had, which is why the case will be skipped."""
        try:
            return drafter_bytes(case, spec, longest + case.workload.output_len + 1)
        except InputError:
            return 0

    def _why_skipped(self, case: Case, spec: ModelSpec, longest: int, memory: int) -> str | None:
        context = longest + case.workload.output_len + 1
        if context > spec.max_position_embeddings:
            return f"needs {context} tokens of context, and the model has {spec.max_position_embeddings}"
        if memory > self._free:
            return f"needs {_size(memory)}, and {_size(self._free)} are free"
        kind, options = case.drafter.kind, dict(case.drafter.options)
        if case.kv.page_size != PAGE_SIZE and resolve_backend(case.target) != "triton":
            return f"pages of {case.kv.page_size} tokens need backend triton"
        unverified = why_not_verified(case, resolve_backend(case.target))
        if unverified is not None:
            return unverified
        if kind in ("oracle", "forced") and case.sampling.temperature > 0:
            return f"{kind} replays the AR output, which is fixed at temperature 0 only"
        if kind == "early_exit" and int(str(options["layers"])) >= spec.num_layers:
            return f"early exit after {options['layers']} of {spec.num_layers} layers"
        source = self._source(case.target)
        if source.kind == "dummy" and kind not in ("none", "oracle", "forced"):
            return "acceptance on dummy weights means nothing: use forced, oracle or none"
        if kind in HEAD_KINDS:
            return self._head(case, spec)
        if kind == "draft_model":
            return self._vocabularies(case, source)
        return None

    @staticmethod
    def _head(case: Case, spec: ModelSpec) -> str | None:
        try:
            _, head = head_source(case.drafter, spec, case.target.name)
        except InputError as error:
            return error.message
        reason = why_not_drafted(case, head)
        return None if reason is None else reason[0]

    @staticmethod
    def _vocabularies(case: Case, target: ModelSource) -> str | None:
        try:
            other = draft_model_source(case.drafter, case.target.name, weights=False)
            if shares_embedding(other):
                return None
            difference = first_vocab_difference(load_tokenizer(target), load_tokenizer(other))
        except InputError as error:
            return error.message
        if difference is None:
            return None
        token_id, ours, theirs = difference
        return f"drafter and target disagree on the vocabulary: id {token_id} is {theirs!r} there and {ours!r} here"

    def _estimate(self, spec: ModelSpec, case: Case, lengths: Sequence[int]) -> float:
        """Seconds of the least number of blocks, both arms, with no draft accepted; at most the case's budget."""
        assert self._roof is not None
        work, dtype = case.workload, case.target.dtype
        batch, mean = work.batch_size, sum(lengths) / len(lengths)
        contexts = [int(mean + work.output_len / 2)] * batch
        ar = step_time_s(forward_cost(spec, [1] * batch, contexts, weight_dtype=dtype), self._roof)
        rows = [case.num_nodes + 1] * batch
        spec_step = step_time_s(forward_cost(spec, rows, contexts, weight_dtype=dtype), self._roof)
        if case.drafter.kind == "early_exit":
            layers = int(str(dict(case.drafter.options)["layers"]))
            layers = min(layers, spec.num_layers)
            shape = case.drafter.tree or StaticTree.chain(case.depth)
            for nodes in shape.cut(case.depth).inner:
                fed = [len(nodes)] * batch
                draft = forward_cost(spec, fed, contexts, weight_dtype=dtype, num_layers=layers)
                spec_step += step_time_s(draft, self._roof)
        categories = len(work.prompts.categories or ()) or 1
        waves = max(1, -(-categories // batch))
        arms = ar + (spec_step if case.drafter.kind != "none" else 0.0)
        blocks = self._settings.blocks.min
        return min(blocks * waves * work.output_len * arms, self._settings.budget_s or float("inf"))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def quick_roof() -> Roof:
    """A rough roof of this CPU in about a second: enough to tell minutes from hours, not to be quoted."""
    import torch

    from specbench.bench.ceilings import measure_bandwidth, measure_gemm
    from specbench.bench.clock import clock_for

    device = torch.device("cpu")
    clock = clock_for(device)
    read, _, _ = measure_bandwidth(clock, device, 1 << 27, 0.3)
    return Roof(measure_gemm(clock, device, "fp32", 512, 0.2).best, read.best)
