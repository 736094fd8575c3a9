"""What each metric means: name, unit, formula. Reports print it; `metrics.py` computes it.

The words (row, window, l, a, c) are those of `metrics.py`.
"""

from __future__ import annotations

from typing import NamedTuple

# name | unit | formula | meaning
_TABLE = """
num_steps | 1 | rows in the window | verify steps, counted for each request
num_drafts | 1 | rows with l > 0 | verify steps that had a draft
num_draft_tokens | 1 | Σ l | drafted tokens (nodes, for trees) that were verified
num_accepted_tokens | 1 | Σ a | drafted tokens accepted: the leading run, or the accepted path
num_committed_tokens | 1 | Σ c | tokens committed after stops; prefill's token is not among them
num_discarded_tokens | 1 | Σ (proposed - l) | drafted tokens thrown away unverified, neither accepted nor rejected
acceptance_rate | 1 | Σ a / Σ l | share of drafted tokens accepted; null for trees
draft_efficiency | 1 | Σ a / nodes verified | share of verified nodes on an accepted path; for trees
depth_acceptance_rate | 1 | Σ a / Σ depth of the draft | share of the draft's depth accepted; for trees
tokens_per_step | 1 | Σ c / num_steps | tokens a request gains in a step
acceptance_length | 1 | 1 + Σ a / num_drafts | tokens of a step that had a draft, with the bonus token, pooled
acceptance_length_by_request | 1 | mean over requests of 1 + Σ a / num_drafts | every request weighs the same
acceptance_at | 1 | [i - 1]: drafts with a >= i / drafts of depth >= i | share of drafts whose first i tokens passed
acceptance_conditional_at | 1 | [i - 1]: drafts with a >= i / drafts of depth >= i with a >= i - 1 | rate at i
accepted_histogram | 1 | [i]: drafts with a = i | Σ = num_drafts, Σ i·[i] = num_accepted_tokens
step_depth_mean | 1 | Σ step_depth / steps in the window | levels that a step was to draft, where each step chooses
step_depth_share | 1 | [γ]: steps of depth γ / steps in the window | how often each depth was chosen
depth_step_seconds | s | [γ]: median step_s of depth γ in warm-up | the step times that depth auto chooses by
num_requests | 1 | requests seen | requests, the failed ones too (by category: distinct ids in the window)
num_failed_requests | 1 | requests with an error or without a token | requests that count in no time
ttft_s | s | median over requests of prefill_s | time to first token, from admission
tpot_s | s | median over requests of Σ step_s / Σ c in the window | decode time per output token after the first
itl_p50_s | s | median of end_s gaps between two commits of a request | inter-token latency, commit to commit
itl_p99_s | s | 99th percentile of the same gaps | inter-token latency, the tail
output_tokens_per_s | tokens/s | Σ c / Σ step_s in the window | decode throughput of all requests together
end_to_end_tokens_per_s | tokens/s | all tokens emitted / time from begin to last commit | throughput with prefill
speedup | 1 | (Σ tokens / Σ s) / (Σ ar_tokens / Σ ar_s) | paired ratio to the AR arm of the same case
effective_batch | 1 | mean of busy slots over steps in the window | requests decoded together
num_blocks | 1 | valid blocks of each arm | repetitions behind the numbers
looping_share | 1 | requests ending in a loop / requests not failed | outputs that inflate n-gram acceptance
step_s | s | mean wall time of a step in the window | = draft_s + verify_s + sample_s + commit_s + host_s
draft_s | s | mean of draft_s over steps in the window | time spent drafting
verify_s | s | mean of verify_s over steps in the window | the target's forward pass
sample_s | s | mean of sample_s over steps in the window | sampling and acceptance
commit_s | s | mean of commit_s over steps in the window | writing and trimming the KV cache
host_s | s | step_s less the other parts | everything else, on the host
rollback_s | s | mean of rollback_s over steps in the window | keeping the accepted path; a part of commit_s
kv_bytes_moved | B | K and V copied by rollback / steps in the window | what compaction or reallocation moves in a step
kv_allocator_calls | 1 | KV pages taken and given back / steps in the window | a page is one call
flops | FLOP | Σ flops / steps in the window | work of a step: every draft pass made and the verify pass
bytes | B | Σ bytes / steps in the window | memory traffic of the same passes
intensity | FLOP/B | Σ flops / Σ bytes | arithmetic intensity
achieved_flops_per_s | FLOP/s | Σ flops / Σ step_s | what the whole step achieved
achieved_bytes_per_s | B/s | Σ bytes / Σ step_s | what the whole step achieved
roof_fraction_measured | 1 | achieved_flops_per_s / min(peak, bandwidth·intensity) | against the roof measured here
roof_fraction_datasheet | 1 | achieved_flops_per_s / min(peak, bandwidth·intensity) | against the datasheet's roof
target_efficiency | 1 | ar_step_s / verify_s | how little wider verification costs the target
implied_overhead | 1 | tokens_per_step / speedup - 1 | what drafting and verifying cost, in AR steps
drafter_params | 1 | weights of the drafter's own model or head | what it adds to the target; shared ones don't count
drafter_step_flops | FLOP | Σ flops of the draft passes / steps in the window | work of a step's drafting
drafter_step_bytes | B | Σ bytes of the draft passes / steps in the window | its memory traffic, shared weights included
draft_cost_ratio | 1 | draft_s / ar_step_s | all drafting of a step, in AR steps (c)
draft_cost_ratio_roof | 1 | least draft time / least AR time, max(FLOPs/peak, bytes/bandwidth) | c on the measured roof
joules_per_token | J/token | energy of the window / Σ c | null where the device does not tell
peak_memory_bytes | B | largest memory in use | of the device, or of the process on a CPU
"""
_SPEC_ONLY = {
    *("speedup", "num_blocks", "joules_per_token", "target_efficiency", "implied_overhead", "peak_memory_bytes"),
    *("drafter_params", "drafter_step_flops", "drafter_step_bytes", "draft_cost_ratio", "draft_cost_ratio_roof"),
}


class Definition(NamedTuple):
    """A metric: its name, unit ("1" is a pure number), formula, and meaning."""

    name: str
    unit: str
    formula: str
    meaning: str


def _definitions() -> dict[str, Definition]:
    """The table, and the names made from it: ar_NAME for the AR arm, NAME_low and NAME_high for 95 % intervals."""
    rows = [Definition(*(cell.strip() for cell in line.split(" | "))) for line in _TABLE.strip().splitlines()]
    table = {row.name: row for row in rows}
    names = list(table)
    for name in names[names.index("num_requests") :]:  # acceptance, above, is not a matter of the AR arm
        if name not in _SPEC_ONLY:
            table[f"ar_{name}"] = table[name]._replace(name=f"ar_{name}", meaning=f"{table[name].meaning} (AR arm)")
    for name in ("output_tokens_per_s", "ar_output_tokens_per_s", "speedup"):
        for end in ("low", "high"):
            table[f"{name}_{end}"] = table[name]._replace(
                name=f"{name}_{end}", meaning=f"{end} end of {name}'s interval"
            )
    return table


DEFINITIONS: dict[str, Definition] = _definitions()
