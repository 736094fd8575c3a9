"""What to compile ahead of time of row_stats and probabilities: as launched for a vocabulary of 128k."""

from __future__ import annotations

from specbench_kernels.op import Compilation
from specbench_kernels.processors_kernel import probabilities_kernel, row_blocks_kernel, row_stats_kernel

KINDS = {"fp32": "fp32", "fp16": "fp32", "bf16": "fp32", "fp64": "fp64"}
"""Type of the logits -> type of the arithmetic."""


def stats_signature(kind: str) -> dict[str, str]:
    """The pointers of RowStats for arithmetic in `kind`."""
    wide = ("maximum", "inv_temperature", "floor")
    return {"argmax": "*i64"} | dict.fromkeys(wide, f"*{kind}") | {"log_z": "*fp64", "bad": "*i32"}


def divisible(signature: dict[str, str]) -> tuple[str, ...]:
    """All pointers, and what is a multiple of 16 for the usual vocabularies."""
    sizes = ("row_stride", "q_stride", "out_stride", "vocab_size")
    return tuple(name for name, kind in signature.items() if kind.startswith("*") or name in sizes)


def row_stats_compilations(block: int, warps: int, search_warps: int) -> list[Compilation]:
    found = []
    for logits, kind in KINDS.items():
        partial = {"block_max": f"*{kind}", "block_argmax": "*i32", "block_sum": "*fp64"}
        head = {"logits": f"*{logits}", "row_stride": "i32", "temperature": "*fp32"}
        sizes = {"vocab_size": "i32", "num_blocks": "i32"}
        blocks = head | partial | sizes
        found.append(
            Compilation(
                f"blocks {logits}",
                row_blocks_kernel,
                blocks,
                {"BLOCK": block},
                num_warps=warps,
                divisible=divisible(blocks),
            )
        )
        filters = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
        rows = head | filters | partial | stats_signature(kind) | sizes
        for on in (False, True):
            switches = {
                "HAS_TOP_K": on,
                "HAS_TOP_P": on,
                "HAS_MIN_P": on,
                "BLOCKS": 32,
                "SEARCH": 1024 if kind == "fp64" else 2048,
            }
            found.append(
                Compilation(
                    f"rows {logits}" + (" top-k top-p min-p" if on else ""),
                    row_stats_kernel,
                    rows,
                    switches,
                    num_warps=search_warps if on else 1,
                    divisible=divisible(rows),
                )
            )
    return found


def probabilities_compilations(block: int, warps: int) -> list[Compilation]:
    found = []
    for logits, kind in KINDS.items():
        signature = (
            {"logits": f"*{logits}", "row_stride": "i32"}
            | stats_signature(kind)
            | {"out": f"*{kind}", "out_stride": "i32", "vocab_size": "i32"}
        )
        found.append(
            Compilation(
                logits,
                probabilities_kernel,
                signature,
                {"BLOCK": block},
                num_warps=warps,
                divisible=divisible(signature),
            )
        )
    return found
