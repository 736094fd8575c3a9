"""What a KV cache holds, and what a rollback policy moves in it."""

from __future__ import annotations

from specbench.errors import InputError
from specbench.roofline.formats import dtype_bytes
from specbench.roofline.matrices import layer_kinds
from specbench.roofline.model_spec import ModelSpec

POLICIES = ("compact", "index", "realloc")


def kv_bytes_held(spec: ModelSpec, num_tokens: float, dtype: str, *, drop_window: bool = False) -> float:
    """Bytes that one request of `num_tokens` tokens holds.

    Compressed attention keeps a window of fixed size beside its entries. `drop_window`: windowed layers keep the tokens
    in their window alone, as hybrid allocators do; our engine keeps all.
    """
    width = dtype_bytes(dtype)
    held = num_tokens * spec.kv_values_per_token * width
    for kind, count in layer_kinds(spec, spec.num_layers):
        if kind.window is None:
            continue
        near = min(num_tokens, kind.window)
        if kind.ratio is not None:
            held += count * near * spec.head_dim * width
        elif drop_window:
            held -= count * (num_tokens - near) * 2 * spec.num_kv_heads * spec.head_dim * width
    return held


def rollback_bytes(
    policy: str, spec: ModelSpec, accepted: float, nodes: float, kv_dtype: str, *, chain: bool = True
) -> float:
    """Bytes of K and V that a policy copies for one request in a step of `nodes` drafts, `accepted` kept; a copy counts
    once, as in kv_bytes_moved, and moves twice as much through memory.

    index: none, the slot index is permuted. realloc: the pending token and all accepted drafts, (1 + a) cells. compact:
    a chain's accepted drafts are a prefix and stay; of a tree (`chain` False) at most all `accepted` are copied down.
    """
    if policy not in POLICIES:
        raise InputError(f"unknown rollback policy {policy!r}", key="kv.rollback", remedy=f"one of {list(POLICIES)}")
    if not 0 <= accepted <= nodes:
        raise InputError(f"{accepted} accepted of {nodes} drafts", key="accepted", remedy="choose 0 to the drafts")
    cell = spec.kv_values_per_token * dtype_bytes(kv_dtype)
    if policy == "index":
        return 0.0
    if policy == "realloc":
        return (1 + accepted) * cell
    return 0.0 if chain else accepted * cell
