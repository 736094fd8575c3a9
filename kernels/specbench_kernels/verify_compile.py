"""What to compile ahead of time of verify_sampled: as the wrapper launches it for a vocabulary of 128k."""

from __future__ import annotations

from typing import Any

from specbench_kernels.op import Compilation
from specbench_kernels.processors_compile import KINDS, divisible, stats_signature
from specbench_kernels.verify_kernels import nodes_kernel, ratios_kernel, residual_kernel, totals_kernel
from specbench_kernels.verify_walk_kernels import block_walk_kernel, draw_kernel, emission_kernel, walk_kernel

_LINKS = {"first_child": "*i32", "next_sibling": "*i32"}
_TREE = {"parents": "*i32", "query_start": "*i32"}
_MASSES = {"z": "*fp64", "d": "*fp64", "ratio": "*fp64"}
_EMIT = {"bad": "*i32", "emit_row": "*i32", "emit_stages": "*i32"}
_SIZES = {"vocab_size": "i32", "num_blocks": "i32"}
_OUT = {"accepted": "*i32", "path": "*i32", "path_stride": "i32"}


def _compilation(
    label: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int
) -> Compilation:
    return Compilation(label, kernel, signature, constants, num_warps=warps, divisible=divisible(signature))


def _law(logits: str) -> dict[str, str]:
    stats = stats_signature(KINDS[logits])
    stats.pop("bad")
    return {"logits": f"*{logits}", "row_stride": "i32"} | stats


def _by_logits(logits: str, has_q: bool, chain: bool, block: int) -> list[Compilation]:
    """The kernels that read logits, for logits of one type; q fp32."""
    q = {"q": "*fp32" if has_q else f"*{logits}", "q_stride": "i32"}
    label = f"{logits}{' q' if has_q else ''}{' block' if chain else ''}"
    switches = {"HAS_Q": has_q, "CHAIN": chain}
    emitting = (
        _law(logits)
        | {"tokens": "*i64"}
        | q
        | {"query_start": "*i32"}
        | _LINKS
        | {"mode": "*i32"}
        | _MASSES
        | _EMIT
        | {"partial": "*fp64"}
    )
    nodes = (
        _law(logits)
        | {"stats_bad": "*i32", "tokens": "*i64"}
        | _TREE
        | q
        | {"siblings": "*i32"}
        | _LINKS
        | {"num_children": "*i32", "mode": "*i32", "p_token": "*fp64", "q_token": "*fp64", "bad": "*i32"}
        | {"vocab_size": "i32", "max_siblings": "i32"}
    )
    drawing = emitting | {"uniforms": "*fp64"} | _OUT | {"next_token": "*i64"} | _SIZES
    found = [
        _compilation(f"nodes {label} T<=8", nodes_kernel, nodes, switches | {"NODES": 8}, 1),
        _compilation(f"nodes {label} T<=128", nodes_kernel, nodes, switches | {"NODES": 128}, 4),
        _compilation(f"emission {label}", emission_kernel, emitting | _SIZES, switches | {"BLOCK": block}, 4),
        _compilation(f"draw {label}", draw_kernel, drawing, switches | {"BLOCKS": 128, "BLOCK": block, "NODES": 8}, 16),
    ]
    if has_q:
        residual = (
            _law(logits)
            | {"tokens": "*i64"}
            | _TREE
            | {"num_requests": "i32"}
            | q
            | _LINKS
            | {"num_children": "*i32", "mode": "*i32", "ratio": "*fp64", "z": "*fp64", "d": "*fp64"}
            | {"partial": "*fp64"}
            | _SIZES
            | {"stages": "i32"}
        )
        found.append(_compilation(f"residual {label}", residual_kernel, residual, {"CHAIN": chain, "BLOCK": block}, 4))
    return found


def _without_logits(has_q: bool) -> list[Compilation]:
    label = " q" if has_q else ""
    verdict = _OUT | {"bad": "*i32", "emit_row": "*i32", "emit_stages": "*i32"}
    coins = {"uniforms": "*fp64", "inv_temperature": "*fp32"}
    walk = (
        _TREE
        | _LINKS
        | {"mode": "*i32", "p_token": "*fp64", "q_token": "*fp64", "z": "*fp64", "d": "*fp64"}
        | coins
        | verdict
    )
    chain = {"query_start": "*i32", "mode": "*i32", "p_token": "*fp64", "z": "*fp64"} | coins | verdict
    chain |= {"ratio": "*fp64"}
    ratios = {
        "query_start": "*i32",
        "p_token": "*fp64",
        "q_token": "*fp64",
        "mode": "*i32",
        "bad": "*i32",
        "ratio": "*fp64",
    }
    return [
        _compilation(f"walk{label} T<=128", walk_kernel, walk, {"HAS_Q": has_q, "NODES": 128}, 1),
        _compilation(f"walk{label} block T<=8", block_walk_kernel, chain, {"HAS_Q": has_q, "NODES": 8}, 1),
        _compilation(f"ratios{label}", ratios_kernel, ratios, {"HAS_Q": has_q}, 1),
    ]


def _totals(chain: bool) -> Compilation:
    signature = (
        _TREE
        | {"num_requests": "i32"}
        | _LINKS
        | {"num_children": "*i32", "mode": "*i32", "partial": "*fp64", "z": "*fp64", "d": "*fp64"}
        | {"num_blocks": "i32", "stages": "i32"}
    )
    label = f"totals{' block' if chain else ''}"
    return _compilation(label, totals_kernel, signature, {"CHAIN": chain, "BLOCKS": 128}, 1)


def compilations(block: int) -> list[Compilation]:
    found = []
    for logits in KINDS:
        for has_q, chain in ((False, False), (True, False), (True, True)):
            found += _by_logits(logits, has_q, chain, block)
    return [*found, *_without_logits(False), *_without_logits(True), _totals(False), _totals(True)]
