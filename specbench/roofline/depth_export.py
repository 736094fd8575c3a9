"""Depth by batch size in the forms that serving engines read. Facts of the formats, as of the sources named:

vLLM, `num_speculative_tokens_per_batch_size` of --speculative-config (docs/features/speculative_decoding/
dynamic_speculative_decoding.md): a list of [first batch, last batch, tokens], both ends inclusive. Ranges are sorted,
don't overlap, the first begins at 1, tokens >= 0 and at most `num_speculative_tokens`, which is above 0; the last
range's value goes on beyond its end. Its documentation says: tested with EAGLE, EAGLE-3 and DFlash; not with data
parallelism.

SGLang, the file of --speculative-adaptive-config (python/sglang/srt/speculative/adaptive_spec_params.py and
adaptive_step_router.py): a JSON object whose keys are batch sizes as text, each the lower end of its range, with
`candidate_steps`, a list of step counts >= 0. One candidate a key fixes the depth there. For EAGLE and EAGLE3 with
--speculative-eagle-topk 1 only; --speculative-num-steps must be one of the candidates. Older versions take one
`candidate_steps` for all batches, and no 0: such a version refuses or ignores this file.

Neither was run against an engine here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import InputError

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class DepthRange:
    """Batches `first` to `last`, both inclusive, draft `depth` levels."""

    first: int
    last: int
    depth: int


def depth_ranges(table: Mapping[int, int]) -> tuple[DepthRange, ...]:
    """Ranges from 1 to the largest batch of `table` (batch -> depth); neighbours of equal depth are one range.

    Between two batches of the table the depth changes at their geometric mean. Raises InputError for an empty table, a
    batch below 1 or a negative depth.
    """
    if not table:
        raise InputError("no batch size has a best depth", remedy="measure a drafter at several depths first")
    if min(table) < 1 or min(table.values()) < 0:
        raise InputError("batch sizes are 1 or more, depths 0 or more")
    batches = sorted(table)
    ranges: list[DepthRange] = []
    for place, batch in enumerate(batches):
        first = 1 if place == 0 else math.floor(math.sqrt(batches[place - 1] * batch)) + 1
        last = batch if place == len(batches) - 1 else math.floor(math.sqrt(batch * batches[place + 1]))
        depth = table[batch]
        if ranges and ranges[-1].depth == depth:
            ranges[-1] = DepthRange(ranges[-1].first, last, depth)
        else:
            ranges.append(DepthRange(first, last, depth))
    return tuple(ranges)


def export(engine: str, table: Mapping[int, int]) -> dict[str, Any]:
    """`table` (batch -> depth) as JSON for "vllm" or "sglang". Raises InputError for another engine, and where no batch
    drafts at all: then the engine is to run without speculation."""
    ranges = depth_ranges(table)
    deepest = max(one.depth for one in ranges)
    if deepest == 0:
        raise InputError("no batch size gains by drafting", remedy="run the engine without speculative decoding")
    if engine == "vllm":
        schedule = [[one.first, one.last, one.depth] for one in ranges]
        return {"num_speculative_tokens": deepest, "num_speculative_tokens_per_batch_size": schedule}
    if engine == "sglang":
        return {str(one.first): {"candidate_steps": [one.depth]} for one in ranges}
    raise InputError(f"{engine!r} is not known", key="engine", remedy=f"choose from: {', '.join(ENGINES)}")


def start_depth(table: Mapping[int, int]) -> int:
    """What SGLang's --speculative-num-steps must name: one of the candidates, here the deepest."""
    return max(one.depth for one in depth_ranges(table))
