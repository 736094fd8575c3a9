"""row_stats and probabilities: temperature, top-k, top-p and min-p as a few numbers a row, for target and drafter.

The order is temperature -> top_k -> top_p -> min_p, each on what the step before left; every filter is a threshold on
the logits, so tokens tied at a border are kept together. Temperatures up to 1e-5 are greedy. From `RowStats` p(x) is
evaluated wherever it is needed, so the target's distribution is never written; `probabilities` writes it, for q.

Without filters the logits are read once by `row_stats` and once by `probabilities`. A row with a top-k or a top-p reads
itself again 16 times a filter (32 in fp64) plus 2, out of L2, in one program: some 0.1 ms for 128k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from specbench_kernels.checks import FLOATS, require, require_device, require_tensor
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs
from specbench_kernels.processors_compile import probabilities_compilations, row_stats_compilations
from specbench_kernels.processors_kernel import probabilities_kernel, row_blocks_kernel, row_stats_kernel
from specbench_kernels.verify_reference import distribution_reference, row_stats_reference

NAME = "row_stats"
WIDTH = 4096
"""Tokens of one block of `row_stats`: a function of the vocabulary alone, so a row's result is that of any batch."""


@dataclass(frozen=True)
class RowStats:
    """What p(x) of each row of logits [N, V] needs: p(x) = exp(s - log_z) where s >= floor, else 0, with
    s = (logit - maximum) * inv_temperature.

    `argmax` int64 (lowest id among ties; -1 in a bad row), `maximum`, `inv_temperature` (0 marks a greedy row, one-hot
    at its argmax) and `floor` (the least scaled logit that is kept, -inf where no filter is on) fp32 or fp64 (for fp64
    logits), `log_z` fp64, `bad` int32 (1: a NaN, a +inf or nothing but -inf); each [N].
    """

    argmax: torch.Tensor
    maximum: torch.Tensor
    inv_temperature: torch.Tensor
    floor: torch.Tensor
    log_z: torch.Tensor
    bad: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device) -> RowStats:
        """Room for the stats of `num_rows` rows of logits of `dtype`."""
        wide = _compute_type(dtype)

        def room(kind: torch.dtype) -> torch.Tensor:
            return torch.empty(num_rows, dtype=kind, device=device)

        return cls(room(torch.int64), room(wide), room(wide), room(wide), room(torch.float64), room(torch.int32))

    def check(self, op: str, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError unless the fields fit `num_rows` rows of logits of `dtype` on `device`."""
        wide = [_compute_type(dtype)]
        require_tensor(op, "stats.argmax", self.argmax, [num_rows], [torch.int64], device)
        for name, field in (
            ("maximum", self.maximum),
            ("inv_temperature", self.inv_temperature),
            ("floor", self.floor),
        ):
            require_tensor(op, f"stats.{name}", field, [num_rows], wide, device)
        require_tensor(op, "stats.log_z", self.log_z, [num_rows], [torch.float64], device)
        require_tensor(op, "stats.bad", self.bad, [num_rows], [torch.int32], device)


@dataclass(frozen=True)
class StatsWorkspace:
    """Partial results of `row_stats`: maximum, argmax and sum of each (row, block)."""

    block_max: torch.Tensor
    block_argmax: torch.Tensor
    block_sum: torch.Tensor

    @classmethod
    def empty(
        cls, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, block: int | None = None
    ) -> StatsWorkspace:
        """Room for `num_rows` rows (or fewer) of logits [., vocab_size] of `dtype`."""
        shape = (num_rows, triton.cdiv(vocab_size, block or block_size(vocab_size, WIDTH)))
        return cls(
            torch.empty(shape, dtype=_compute_type(dtype), device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.float64, device=device),
        )

    def check(self, op: str, num_rows: int, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        kinds = (
            (self.block_max, _compute_type(dtype)),
            (self.block_argmax, torch.int32),
            (self.block_sum, torch.float64),
        )
        for tensor, kind in kinds:
            require_tensor(op, "workspace", tensor, [None, num_blocks], [kind], device)
            require(tensor.shape[0] >= num_rows, op, f"workspace has {tensor.shape[0]} rows, {num_rows} are needed")


def _compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_size(vocab_size: int, width: int) -> int:
    """Tokens of one block: a power of two, at most `width`, from the vocabulary alone."""
    return max(16, min(width, triton.next_power_of_2(vocab_size)))


def row_stats(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    out: RowStats | None = None,
    workspace: StatsWorkspace | None = None,
    block: int | None = None,
) -> RowStats:
    """The stats of each row of `logits` [N, V] (rows may be strided) under its own parameters.

    `temperature`, `top_p`, `min_p` fp32 or fp64 [N], `top_k` int32 [N]; top_k outside 1..V-1, top_p 1 and min_p 0
    switch a filter off for a row, None for all (and its code is not run). fp64 logits keep fp64 arithmetic, all else is
    fp32 with sums over blocks in fp64. `block` overrides the block of the split. Nothing is read back.
    Raises ValueError for a wrong shape, dtype, device or stride.
    """
    require_tensor(NAME, "logits", logits, [None, None], FLOATS, contiguous=False)
    rows, vocab_size = logits.shape
    device = logits.device
    require(0 < vocab_size < 2**30, NAME, f"a vocabulary of {vocab_size}")
    for name, parameter in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if parameter is not None:
            require_tensor(NAME, name, parameter, [rows], [torch.float32, torch.float64], device)
    if top_k is not None:
        require_tensor(NAME, "top_k", top_k, [rows], [torch.int32], device)
    require_device(NAME, device)
    block = block or block_size(vocab_size, WIDTH)
    num_blocks = triton.cdiv(vocab_size, block)
    out = RowStats.empty(rows, logits.dtype, device) if out is None else out
    out.check(NAME, rows, logits.dtype, device)
    if workspace is None:
        workspace = StatsWorkspace.empty(rows, vocab_size, logits.dtype, device, block)
    workspace.check(NAME, rows, num_blocks, logits.dtype, device)
    if rows == 0:
        return out
    partial = (workspace.block_max, workspace.block_argmax, workspace.block_sum)
    row_blocks_kernel[(rows, num_blocks)](
        logits, logits.stride(0), temperature, *partial, vocab_size, num_blocks, BLOCK=block, num_warps=_warps(block)
    )
    filtered = top_k is not None or top_p is not None or min_p is not None
    row_stats_kernel[(rows,)](
        logits,
        logits.stride(0),
        temperature,
        top_k if top_k is not None else out.bad,
        top_p if top_p is not None else temperature,
        min_p if min_p is not None else temperature,
        *partial,
        out.argmax,
        out.maximum,
        out.inv_temperature,
        out.floor,
        out.log_z,
        out.bad,
        vocab_size,
        num_blocks,
        HAS_TOP_K=top_k is not None,
        HAS_TOP_P=top_p is not None,
        HAS_MIN_P=min_p is not None,
        BLOCKS=triton.next_power_of_2(num_blocks),
        SEARCH=search_size(vocab_size, logits.dtype),
        num_warps=search_warps(vocab_size) if filtered else 1,
    )
    return out


def search_size(vocab_size: int, dtype: torch.dtype) -> int:
    """Tokens that the search for thresholds reads at a time: its three sums a token stay in registers."""
    return block_size(vocab_size, 1024 if dtype == torch.float64 else 2048)


def search_warps(vocab_size: int) -> int:
    return 16 if vocab_size >= 2048 else 1


def _warps(block: int) -> int:
    """Warps of a program of `block` elements."""
    return 8 if block >= 2048 else 4 if block >= 512 else 1


def probabilities(logits: torch.Tensor, stats: RowStats, out: torch.Tensor | None = None) -> torch.Tensor:
    """The distributions [N, V] of `logits` [N, V] with these stats, written to `out` (fp32; fp64 for fp64 logits).

    A bad row is NaN throughout. Raises ValueError for a wrong shape, dtype, device or stride.
    """
    name = "probabilities"
    require_tensor(name, "logits", logits, [None, None], FLOATS, contiguous=False)
    rows, vocab_size = logits.shape
    require(0 < vocab_size < 2**30, name, f"a vocabulary of {vocab_size}")
    stats.check(name, rows, logits.dtype, logits.device)
    kind = _compute_type(logits.dtype)
    out = torch.empty(rows, vocab_size, dtype=kind, device=logits.device) if out is None else out
    require_tensor(name, "out", out, [rows, vocab_size], [kind], logits.device, contiguous=False)
    require_device(name, logits.device)
    if rows == 0:
        return out
    block = block_size(vocab_size, WIDTH)
    probabilities_kernel[(rows, triton.cdiv(vocab_size, block))](
        logits,
        logits.stride(0),
        stats.argmax,
        stats.maximum,
        stats.inv_temperature,
        stats.floor,
        stats.log_z,
        stats.bad,
        out,
        out.stride(0),
        vocab_size,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def random_logits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Peaked as a model's are: a few hundred tokens hold almost all the mass."""
    random = torch.Generator(device=device).manual_seed(seed)
    return (3.0 * torch.randn(shape, generator=random, device=device, dtype=torch.float32)).to(dtype)


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    rows, filtered = case["rows"], bool(case["filters"])
    cycle = torch.arange(rows, device=device)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1e-6, 1.3], device=device)[cycle % 5]
    found: Inputs = {
        "logits": random_logits((rows, case["vocab"]), case.dtype, device, seed),
        "temperature": temperature if filtered else temperature.clamp(min=0.5),
        "top_k": None,
        "top_p": None,
        "min_p": None,
    }
    if filtered:
        found["top_k"] = torch.tensor([0, 5, 40, 1 << 20], device=device, dtype=torch.int32)[cycle % 4]
        found["top_p"] = torch.tensor([1.0, 0.9, 0.55], device=device)[cycle % 3]
        found["min_p"] = torch.tensor([0.0, 0.02], device=device)[cycle % 2]
    return found


_FIELDS = ("argmax", "maximum", "inv_temperature", "floor", "log_z", "bad")


def _run(inputs: Inputs) -> Outputs:
    stats = row_stats(**inputs)
    return _comparable({name: getattr(stats, name) for name in _FIELDS})


def _reference(inputs: Inputs) -> Outputs:
    return _comparable(row_stats_reference(**inputs))


def _comparable(fields: Outputs) -> Outputs:
    """No floor is a finite number far below all others, so that differences are numbers."""
    return fields | {"floor": fields["floor"].clamp(min=-1e30)}


def _run_probabilities(inputs: Inputs) -> Outputs:
    return {"p": probabilities(inputs["logits"], row_stats(**inputs))}


def _reference_probabilities(inputs: Inputs) -> Outputs:
    return {"p": distribution_reference(**inputs)}


def _cost(case: Case) -> Cost:
    """One pass; a filter's passes stay in L2 and are not counted."""
    elements = case["rows"] * case["vocab"]
    return Cost(flops=4.0 * elements, bytes=float(elements * case.dtype.itemsize))


def _cost_probabilities(case: Case) -> Cost:
    elements = case["rows"] * case["vocab"]
    written = 8 if case.dtype == torch.float64 else 4
    return Cost(flops=8.0 * elements, bytes=float(elements * (2 * case.dtype.itemsize + written)))


def _case(dtype: torch.dtype, rows: int, vocab: int, filters: bool) -> Case:
    kind = str(dtype).removeprefix("torch.")
    name = f"{kind} {rows}x{vocab}" + (" top-k top-p min-p" if filters else "")
    return Case(name, dtype, {"rows": rows, "vocab": vocab, "filters": int(filters)})


def _small() -> list[Case]:
    return [_case(dtype, 5, vocab, filters) for dtype in FLOATS for vocab, filters in ((33, True), (5000, False))]


def _bench() -> list[Case]:
    sizes = [(64, 131072), (64, 262144), (512, 131072)]
    return [
        _case(dtype, *size, filters)
        for filters in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
        for size in sizes
    ]


def _compilations() -> list[Compilation]:
    return row_stats_compilations(WIDTH, _warps(WIDTH), search_warps(131072))


def _probabilities_compilations() -> list[Compilation]:
    return probabilities_compilations(WIDTH, _warps(WIDTH))


def _tolerance(case: Case) -> tuple[float, float]:
    return (1e-12, 1e-12) if case.dtype == torch.float64 else (2e-6, 2e-6)


OPS = (
    Op(NAME, _small, _bench, _inputs, _run, _reference, _cost, _tolerance, _compilations),
    Op(
        "probabilities",
        _small,
        _bench,
        _inputs,
        _run_probabilities,
        _reference_probabilities,
        _cost_probabilities,
        _tolerance,
        _probabilities_compilations,
    ),
)
