"""The canary: before a kind of drafter is measured, it drafts with the target itself and must accept everything.

It runs a few short greedy requests through the case's own engine, cache and backend: along a chain and along a tree.
A slip of position or state is named by `TwinHead`; one of the drafter's cache shows as a draft that was refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.engine.decode import Engine
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.heads.canary import CanaryError
from specbench.engine.request import Request
from specbench.scenario.cases import Case
from specbench.scenario.drafter_spec import DrafterSpec

if TYPE_CHECKING:
    from specbench.bench.target import PreparedPrompts, Target

NUM_PROMPTS, OUTPUT_LEN, DEPTH = 3, 14, 3
TREE = StaticTree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])
LEAST_ELSEWHERE = 0.9
"""Least share of drafts accepted on a backend whose rows depend on what shares the batch: its near ties may part."""


def check_once(target: Target, case: Case, prompts: PreparedPrompts) -> None:
    """`check_drafter`, once for each kind of drafter and depth on a target; a kind that failed fails again."""
    options = dict(case.drafter.options)
    key = (case.drafter.kind, options.get("head"), options.get("recycle"), case.kv, min(DEPTH, case.depth))
    if case.depth == 0 or case.drafter.kind == "none":
        return
    if key not in target.canaries:
        target.canaries[key] = None
        try:
            check_drafter(target, case, prompts)
        except CanaryError as error:
            target.canaries[key] = error.message
    found = target.canaries[key]
    if found is not None:
        raise CanaryError(f"canary: {found}", remedy="measure: {canary: off} runs it all the same")


def _cut(request: Request) -> Request:
    stops = replace(request.stops, max_tokens=min(OUTPUT_LEN, request.stops.max_tokens))
    return replace(request, stops=stops, reference=None)


def check_drafter(target: Target, case: Case, prompts: PreparedPrompts) -> None:
    """Raise CanaryError unless the case's kind of drafter accepts all that the target itself drafts."""
    few = replace(prompts, prompts=prompts.prompts[:NUM_PROMPTS])
    depth = min(DEPTH, case.depth)
    for tree in (None, TREE.cut(depth)):
        options = tuple((key, value) for key, value in case.drafter.options if key not in ("nodes", "top_k", "tree"))
        if tree is not None:
            options = (*options, ("tree", tree.paths))
        short = replace(
            case,
            drafter=DrafterSpec(case.drafter.kind, options),
            depth=depth,
            workload=replace(case.workload, batch_size=min(2, case.workload.batch_size), output_len=OUTPUT_LEN),
            sampling=replace(case.sampling, temperature=0.0, verification="token"),
        )
        target.bind(short, few)
        drafter = target.drafters.canary(short, few.longest + OUTPUT_LEN + 1 + short.num_nodes, tree)
        if drafter is None:
            return
        requests = [_cut(one) for one in target.requests(short, few)]
        plain = Engine(target.decoder, target.store, None, batch_size=short.workload.batch_size, depth=0)
        known = {one.request_id: one.token_ids for one in plain.run(requests).requests}
        engine = Engine(target.decoder, target.store, drafter, batch_size=short.workload.batch_size, depth=depth)
        trace = engine.run([replace(one, reference=known[one.request_id]) for one in requests])
        accepted, drafted = int(trace.num_accepted.sum()), int(trace.draft_depth.sum())
        least = 1.0 if target.backend == "cpu" else LEAST_ELSEWHERE
        if accepted < least * drafted:
            shape = "a chain" if tree is None else "a tree"
            raise CanaryError(
                f"{case.drafter.kind}: drafting {shape} with the target itself, {accepted} of {drafted} levels were "
                "accepted: its cache does not hold what was committed"
            )
