"""What a block did, beside its time: counts and digests that the same code gives for the same prompts each time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from specbench import metrics as m
from specbench.bench.target import prompt_id
from specbench.engine.request import Request
from specbench.engine.trace import Trace

LATENCIES = ("tpot_s", "itl_p50_s", "itl_p99_s")


def block_facts(requests: Sequence[Request], trace: Trace) -> dict[str, Any]:
    """`store.BlockFacts` of one arm's block; the trace begins with its own `requests`, all run to their ends."""
    inside = trace.in_window[trace.row_step]
    latency = m.latency_metrics([trace])
    done = [[prompt_id(one.request_id), list(one.token_ids)] for one in trace.requests[: len(requests)]]
    return {
        "inputs": _digest([_asked(one) for one in requests]),
        "outputs": _digest(done),
        "num_draft_tokens": int(trace.num_draft[inside].sum()),
        "num_accepted_tokens": int(trace.num_accepted[inside].sum()),
        "flops": float(trace.flops[trace.in_window].sum()),
        "bytes": float(trace.bytes[trace.in_window].sum()),
        "kv_allocator_calls": int(trace.kv_allocator_calls[trace.in_window].sum()),
        **{name: latency[name] for name in LATENCIES},
    }


def _asked(request: Request) -> list[Any]:
    """What decides a request's output: its prompt, and where tokens are sampled its id, from which its numbers come."""
    sampled = request.params.temperature > 0
    return [list(request.prompt_ids), request.request_id if sampled else ""]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:16]
