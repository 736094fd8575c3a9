"""What drafting costs beyond the passes it needs: EAGLE-2's whole draft, the tree's own work, memory over a long text.

A draft's passes are bytes of weights; all else (choosing candidates, masks, the tree) is ours, and should be small.
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.blocks import Sample, Spread
from benchmarks.figures import Figure, Report, at_most
from benchmarks.memory import status_bytes
from benchmarks.settings import CATEGORIES, Settings
from benchmarks.sides import Ours, chat_prompts
from specbench.bench.target import PreparedPrompts
from specbench.engine.decode import Engine
from specbench.engine.drafters.growth import DynamicDraft
from specbench.engine.drafters.head import HeadDrafter
from specbench.engine.heads.head import Head
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import Request
from specbench.scenario.cases import Case, Workload
from specbench.scenario.drafter_spec import DrafterSpec

DTYPE = "bf16"
NODES, TOP_K, DEPTH = 59, 10, 6
"""EAGLE-2's own defaults: 60 nodes with the root, 10 children a node; 6 levels."""
DRAFT_TARGET = 2.5
LINEAR_TARGET = 1.25
TREE_SIZES = ((4, 16), (6, 32), (9, 64), (10, 96), (12, 127))
"""(children a node, nodes kept) of the trees whose own work is timed."""
GROWTH_TARGET = 1e6


@dataclass
class Recorded:
    """A head that keeps what it was asked, to be asked again without the rest of the drafting."""

    calls: list[tuple[ForwardBatch, torch.Tensor, bool]]
    forward: Any

    @classmethod
    def of(cls, head: Head) -> Recorded:
        recorded = cls([], head.forward)

        def forward(batch: ForwardBatch, states: torch.Tensor, *, module: int = 0, recycled: bool = False) -> Any:
            recorded.calls.append((batch, states, recycled))
            return recorded.forward(batch, states, module=module, recycled=recycled)

        head.forward = forward  # type: ignore[method-assign]
        return recorded

    def replay(self) -> float:
        """Seconds of all passes, one after another."""
        begin = time.perf_counter()
        for batch, states, recycled in self.calls:
            self.forward(batch, states, recycled=recycled)
        return time.perf_counter() - begin


def _bound(engine: Ours, settings: Settings, output_len: int, prompts: int) -> tuple[Case, HeadDrafter, list[Request]]:
    options = (("head", "builtin"), ("nodes", NODES), ("top_k", TOP_K))
    work = Workload(output_len=output_len, batch_size=1, ignore_eos=True)
    case = Case(engine.target.target, DrafterSpec("eagle2", options), DEPTH, work)
    prepared = PreparedPrompts("builtin", "", tuple(chat_prompts(engine.target, CATEGORIES, prompts, settings.seed)))
    engine.target.bind(case, prepared)
    drafter = engine.target.drafter(case, prepared.longest + output_len + 1)
    assert isinstance(drafter, HeadDrafter)
    return case, drafter, engine.target.requests(case, prepared)


def tree_seconds(top_k: int, num_nodes: int, repeats: int) -> float:
    """Least seconds of a tree's own work on ready logits: candidates of DEPTH levels, the choice, the tree's mask."""
    stream = np.random.default_rng(0)
    tokens = stream.integers(0, 1000, (top_k, top_k))
    logprobs = -np.sort(stream.exponential(size=(top_k, top_k)))
    best = float("inf")
    for _ in range(repeats):
        draft = DynamicDraft(None, DEPTH, top_k, num_nodes, [1], 100)  # type: ignore[arg-type]
        begin = time.perf_counter()
        for level in range(DEPTH):
            frontier = draft.frontier(level)
            draft.feed(frontier)
            for node in frontier:
                draft.seen(node)
            draft.expand(frontier, tokens[: len(frontier)], logprobs[: len(frontier)])
        draft.proposal("top").tree.mask_words  # noqa: B018
        best = min(best, time.perf_counter() - begin)
    return best


def _linearity(repeats: int) -> tuple[float, dict[str, float]]:
    """Most that a named candidate costs over what it costs in the smallest tree, and the seconds of each size."""
    spans = {f"{k}/{nodes}": tree_seconds(k, nodes, repeats) for k, nodes in TREE_SIZES}
    candidates = [k * (1 + (DEPTH - 1) * k) for k, _ in TREE_SIZES]
    each = [span / count for span, count in zip(spans.values(), candidates, strict=True)]
    return max(each) / each[0], spans


def _growth(engine: Ours, settings: Settings) -> tuple[float, float]:
    """Bytes that a long generation added: Python's and numpy's by tracemalloc, and the process's resident ones.

    Counted from its first quarter on, when every buffer has been touched.
    """
    _, drafter, requests = _bound(engine, settings, settings.growth_tokens, 1)
    run = Engine(engine.target.decoder, engine.target.store, drafter, batch_size=1, depth=DEPTH)
    marks: list[tuple[int, int]] = []
    propose = drafter.propose

    def watched(active: Any, depths: Any) -> Any:
        found = propose(active, depths)
        if len(active[0].tokens) >= settings.growth_tokens // 4 and len(marks) % 8 == 0:
            resident = status_bytes(Path("/proc/self/status").read_text(), "VmRSS")
            marks.append((tracemalloc.get_traced_memory()[0], resident))
        elif marks:
            marks.append(marks[-1])
        return found

    drafter.propose = watched  # type: ignore[method-assign]
    tracemalloc.start()
    try:
        run.run(requests[:1])
    finally:
        tracemalloc.stop()
    first, last = marks[0], marks[-1]
    return float(last[0] - first[0]), float(last[1] - first[1])


def drafting(settings: Settings) -> Report:
    """EAGLE-2 with the builtin head at batch 1; its draft and its bare passes in the same round."""
    engine = Ours(DTYPE)
    _, drafter, requests = _bound(engine, settings, settings.step_tokens, settings.blocks)
    head = drafter._head
    assert isinstance(head, Head)
    recorded = Recorded.of(head)
    run = Engine(engine.target.decoder, engine.target.store, drafter, batch_size=1, depth=DEPTH)
    run.run(requests[:1])

    def draft(index: int) -> Sample:
        recorded.calls.clear()
        trace = run.run([requests[index % len(requests)]])
        return Sample({"draft_s": float(trace.draft_s.sum()), "steps": float(len(trace.step_s))})

    def bare(index: int) -> Sample:
        # The prompt's own passes belong to no step.
        recorded.calls = [call for call in recorded.calls if call[0].num_rows <= max(TOP_K, DEPTH + 1)]
        return Sample({"draft_s": recorded.replay()})

    def both(index: int) -> Sample:
        found = draft(index)
        return Sample({**found.values, "bare_s": bare(index).values["draft_s"]})

    rounds = settings.rounds("drafting", {"eagle2": both})
    ratio = rounds.ratio("eagle2", "eagle2", "draft_s", "bare_s")
    each = Spread.of(
        one.samples["eagle2"].values["draft_s"] / one.samples["eagle2"].values["steps"] for one in rounds.used
    )
    settings.tell("drafting: the tree's own work")
    linear, spans = _linearity(20 * settings.row_repeats)
    settings.tell("drafting: memory over a long text")
    traced, resident = _growth(engine, settings)
    title = f"EAGLE-2 draft of {NODES + 1} nodes"
    figures = (
        Figure(
            "drafting.eagle2",
            f"{title} over its bare passes",
            "x",
            ratio,
            at_most(DRAFT_TARGET),
            None,
            rounds.disturbed,
        ),
        Figure("drafting.eagle2.step", f"{title}, a step", "ms", each, None, None, rounds.disturbed),
        Figure(
            "drafting.tree",
            "a candidate's cost in larger trees over the smallest (1: linear)",
            "x",
            Spread(linear, linear, linear, 1),
            at_most(LINEAR_TARGET),
        ),
        Figure(
            "drafting.growth",
            f"memory traced after {settings.growth_tokens} tokens over a quarter of them",
            "MB",
            Spread(traced, traced, traced, 1),
            at_most(GROWTH_TARGET),
        ),
        Figure(
            "drafting.growth.resident",
            f"resident memory after {settings.growth_tokens} tokens over a quarter of them",
            "MB",
            Spread(resident, resident, resident, 1),
        ),
    )
    return Report("drafting", figures, {"drafting": rounds.to_list(), "drafting.tree_s": spans}, ())
