"""philox_uniforms: the coins of a step, drawn on the device from each request's own Philox4x32-10 stream.

A request's stream is a function of its key alone: number n of it is the first two words of Philox at counter n, so
what a request draws depends neither on the batch around it nor on what others accepted.
Source of the generator: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from specbench_kernels.checks import require_device, require_tensor
from specbench_kernels.op import Case, Compilation, Cost, Inputs, Op, Outputs

NAME = "philox_uniforms"
BLOCK = 32
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)


@triton.jit
def philox_uniforms_kernel(keys, offsets, query_start, out, BLOCK: tl.constexpr):
    """One program a request: row 1 + j gets number offset + j, row 0 the last one, number offset + T - 1."""
    request = tl.program_id(0)
    start = tl.load(query_start + request).to(tl.int64)
    count = tl.load(query_start + request + 1).to(tl.int64) - start
    key = tl.load(keys + request)
    first = tl.load(offsets + request)
    for done in range(0, count, BLOCK):
        node = done + tl.arange(0, BLOCK).to(tl.int64)
        number = first + tl.where(node == 0, count - 1, node - 1)
        low = (number & 0xFFFFFFFF).to(tl.uint32)
        high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
        none = tl.zeros([BLOCK], tl.uint32)
        w0, w1, _, _ = tl.philox(key, low, high, none, none)
        # 27 + 26 bits: an integer below 2^53, exact in fp64.
        whole = (w0 >> 5).to(tl.int64) * 67108864 + (w1 >> 6).to(tl.int64)
        tl.store(out + start + node, whole.to(tl.float64) * 1.1102230246251565e-16, mask=node < count)


def philox_uniforms(
    keys: torch.Tensor, offsets: torch.Tensor, query_start: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Fill `out` float64[N] with the coins in [0, 1) of a packed step; rows behind the last request stay as they were.

    `keys` int64[B] (64 bits as a pattern), `offsets` int64[B] how many numbers of its stream a request has used,
    `query_start` int32[B + 1]. Row 1 + j of request b (draft j) gets number offsets[b] + j, its row 0 (the emitted
    token) number offsets[b] + T_b - 1. Raises ValueError for a wrong shape, dtype, device or stride.
    """
    require_tensor(NAME, "keys", keys, [None], [torch.int64])
    device, requests = keys.device, keys.shape[0]
    require_tensor(NAME, "offsets", offsets, [requests], [torch.int64], device)
    require_tensor(NAME, "query_start", query_start, [requests + 1], [torch.int32], device)
    require_tensor(NAME, "out", out, [None], [torch.float64], device)
    require_device(NAME, device)
    if requests:
        philox_uniforms_kernel[(requests,)](keys, offsets, query_start, out, BLOCK=BLOCK, num_warps=1)
    return out


def philox_reference(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10 of `counters` uint32[..., 4] under `keys` uint32[..., 2]: uint32[..., 4]."""
    c = [counters[..., word].astype(np.uint64) for word in range(4)]
    k = [keys[..., word].astype(np.uint64) for word in range(2)]
    for _ in range(10):
        first, second = np.uint64(_MULTIPLIERS[0]) * c[0], np.uint64(_MULTIPLIERS[1]) * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ k[0],
            second & _WORD,
            (first >> np.uint64(32)) ^ c[3] ^ k[1],
            first & _WORD,
        ]
        k = [(word + np.uint64(step)) & _WORD for word, step in zip(k, _WEYL, strict=True)]
    return np.stack(c, axis=-1).astype(np.uint32)


def uniforms_reference(key: int, first: int, count: int) -> NDArray[np.float64]:
    """Numbers first .. first + count - 1 of the stream of the 64-bit `key`: float64[count] in [0, 1)."""
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(first)
    zeros = np.zeros(count, dtype=np.uint64)
    counters = np.stack([numbers & _WORD, numbers >> np.uint64(32), zeros, zeros], axis=-1).astype(np.uint32)
    words = np.array([key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF], dtype=np.uint32)
    random = philox_reference(counters, words).astype(np.uint64)
    whole = (random[:, 0] >> np.uint64(5)) * np.uint64(1 << 26) + (random[:, 1] >> np.uint64(6))
    return whole.astype(np.float64) * 2.0**-53


def _inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    random = np.random.default_rng(seed)
    requests, nodes = case["requests"], case["nodes"]
    counts = random.integers(0, nodes + 1, requests)
    starts = np.concatenate([[0], np.cumsum(counts)])
    keys = random.integers(-(2**63), 2**63, requests, dtype=np.int64)
    offsets = random.integers(0, 2**34, requests, dtype=np.int64)
    return {
        "keys": torch.from_numpy(keys).to(device),
        "offsets": torch.from_numpy(offsets).to(device),
        "query_start": torch.from_numpy(starts.astype(np.int32)).to(device),
        "out": torch.full((int(starts[-1]) + 2,), -1.0, dtype=torch.float64, device=device),
    }


def _run(inputs: Inputs) -> Outputs:
    out = inputs["out"].clone()
    return {"out": philox_uniforms(inputs["keys"], inputs["offsets"], inputs["query_start"], out)}


def _reference(inputs: Inputs) -> Outputs:
    out = inputs["out"].cpu().clone()
    starts = inputs["query_start"].tolist()
    keys, offsets = inputs["keys"].tolist(), inputs["offsets"].tolist()
    for key, offset, start, end in zip(keys, offsets, starts[:-1], starts[1:], strict=True):
        coins = torch.from_numpy(uniforms_reference(key, offset, end - start))
        out[start:end] = coins.roll(1)
    return {"out": out.to(inputs["out"].device)}


def _case(requests: int, nodes: int) -> Case:
    return Case(f"B={requests} T<={nodes}", torch.float64, {"requests": requests, "nodes": nodes})


def _compilations() -> list[Compilation]:
    pointers = {"keys": "*i64", "offsets": "*i64", "query_start": "*i32", "out": "*fp64"}
    return [
        Compilation("fp64", philox_uniforms_kernel, pointers, {"BLOCK": BLOCK}, num_warps=1, divisible=tuple(pointers))
    ]


OP = Op(
    name=NAME,
    small=lambda: [_case(3, 4), _case(2, 70)],
    bench=lambda: [_case(64, 8), _case(256, 64)],
    inputs=_inputs,
    run=_run,
    reference=_reference,
    # 10 rounds of two 32 x 32 bit products and six additions or exclusive ors.
    cost=lambda case: Cost(flops=80.0 * case["requests"] * case["nodes"], bytes=8.0 * case["requests"] * case["nodes"]),
    tolerance=lambda case: (0.0, 0.0),
    compilations=_compilations,
)
