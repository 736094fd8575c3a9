"""The same requests decoded through CUDA graphs, through single launches, and through torch.

Graphs replay the very kernels that single launches run, so tokens and log-probabilities must be the same bits. Torch
rounds otherwise: its tokens must be equal in fp32 (on the CPU), and on a GPU their share is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.drafters.lookup import ReplayDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.models.loader import iter_weights
from specbench.engine.models.sources import resolve_model
from specbench.engine.request import Request
from specbench.engine.sampling import SamplingParams
from specbench.engine.stops import StopRules
from specbench.roofline.shapes import named_shape

RATES = (0.9, 0.8, 0.7)
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DEPTH = 3
Output = list[tuple[tuple[int, ...], tuple[float, ...]]]


def decoder(shape: str, device: torch.device, dtype: str, backend: str, *, graphs: bool, batch: int) -> Decoder:
    """Dummy weights of `shape`: the same values for all backends of one device."""
    spec = named_shape(shape)
    kv = PagedKVCache(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_slots=batch,
        max_context=128,
        dtype=DTYPES[dtype],
        device=device,
        layout="rows",
    )
    tensors = iter_weights(resolve_model(f"dummy:{shape}"), spec, DTYPES[dtype], device=str(device))
    rows = batch * (len(TREE) + 1)
    limits = DecoderLimits(max(32, rows), rows)
    return Decoder(spec, tensors, dtype=dtype, backend=backend, kv=kv, limits=limits, device=str(device), graphs=graphs)


def requests(vocab_size: int, batch: int, length: int, references: Sequence[tuple[int, ...]] | None) -> list[Request]:
    """Random prompts of different lengths, greedy, with the AR output to replay where it is known."""
    stream = np.random.default_rng(1)
    made = []
    for i in range(batch):
        prompt = tuple(int(token) for token in stream.integers(0, vocab_size, 5 + 3 * i))
        known = references[i] if references is not None else None
        made.append(Request(f"r{i}", "random", prompt, SamplingParams(), StopRules(max_tokens=length), known))
    return made


def decode(target: Decoder, asked: Sequence[Request], mode: str) -> Output:
    """Tokens and log-probabilities of each request; `mode` is "ar", "chain" or "tree"."""
    tree = StaticTree(TREE) if mode == "tree" else None
    drafter = None if mode == "ar" else ReplayDrafter(target.spec.vocab_size, rates=RATES, tree=tree)
    depth = 0 if mode == "ar" else DEPTH
    engine = Engine(
        target, PrefillStore(target), drafter, batch_size=len(asked), depth=depth, check=True, want_logprobs=True
    )
    trace = engine.run(asked)
    return [(one.token_ids, one.logprobs) for one in trace.requests]


def same_bits(ours: Output, theirs: Output) -> tuple[bool, str]:
    """Equal tokens and equal log-probabilities."""
    tokens = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    bits = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return bits == len(theirs), f"{tokens} of {len(theirs)} outputs and {bits} of their log-probabilities are equal"


def same_tokens(ours: Output, theirs: Output) -> tuple[bool, str]:
    """Equal tokens; the largest difference of log-probabilities is told."""
    tokens = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    gaps = [
        abs(x - y) for a, b in zip(ours, theirs, strict=True) if a[0] == b[0] for x, y in zip(a[1], b[1], strict=True)
    ]
    return tokens == len(
        theirs
    ), f"{tokens} of {len(theirs)} outputs are equal, log-probabilities to {max(gaps, default=0.0):.2g}"


def compare_paths(device: torch.device) -> list[dict[str, Any]]:
    """All comparisons that `device` allows, each with whether it is as it must be."""
    on_gpu = device.type == "cuda"
    shape, dtype, batch, length = ("smollm2-135m", "bf16", 4, 24) if on_gpu else ("tiny-llama-test", "fp32", 2, 8)
    settings: dict[str, Any] = {"shape": shape, "device": device, "dtype": dtype, "batch": batch}
    torch_target = decoder(**settings, backend="torch", graphs=False)
    launched = decoder(**settings, backend="triton", graphs=False)
    captured = decoder(**settings, backend="triton", graphs=True) if on_gpu else None
    vocab = torch_target.spec.vocab_size
    references: list[tuple[int, ...]] | None = None
    found = []
    for mode in ("ar", "chain", "tree"):
        asked = requests(vocab, batch, length, references)
        by_launches = decode(launched, asked, mode)
        references = references or [tokens for tokens, _ in by_launches]
        ok, told = same_tokens(by_launches, decode(torch_target, asked, mode))
        pairs = [(f"{mode}, triton against torch", ok or on_gpu, told)]
        if captured is not None:
            pairs.append(
                (f"{mode}, graphs against single launches", *same_bits(decode(captured, asked, mode), by_launches))
            )
        if mode != "ar":
            ok = all(tokens == wanted for (tokens, _), wanted in zip(by_launches, references, strict=True))
            pairs.append((f"{mode} against AR", ok or on_gpu, "equal tokens" if ok else "other tokens (near ties)"))
        found += [
            {"shape": shape, "dtype": dtype, "pair": pair, "ok": good, "told": text} for pair, good, text in pairs
        ]
    return found
