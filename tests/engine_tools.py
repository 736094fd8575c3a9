"""Tiny models, requests and engines for tests of the engine.

Weights are wide enough that the next token depends on the whole history (`assert_history_matters` checks it): with the
usual small random weights a model repeats one token, and a fault of cache, mask or position would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.drafters.base import Drafter, DraftPass
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.models.loader import tensor_shapes
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest, Request
from specbench.engine.sampling import SamplingParams
from specbench.engine.stops import StopRules
from specbench.engine.trace import RequestTrace, Trace
from specbench.engine.tree import TokenTree
from specbench.engine.verify import Proposal
from specbench.roofline.shapes import ModelSpec

Weights = dict[str, torch.Tensor]
GREEDY = SamplingParams()


def tiny_spec(**changes: Any) -> ModelSpec:
    """Odd sizes throughout: hidden 40, inner 72, vocabulary 83, groups of 3 query heads."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 83,
        "tie_word_embeddings": False,
    }
    return ModelSpec(**(fields | changes))


def wide_weights(spec: ModelSpec, seed: int = 0, gain: float = 1.5) -> Weights:
    """float64 weights: linears N(0, gain²/in), embeddings N(0, 1), norms 1 + N(0, 0.2²), biases N(0, 0.3²)."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(spec).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.2 * values
        elif len(shape) == 1:
            weights[name] = 0.3 * values
        elif name == "embed_tokens.weight":
            weights[name] = values
        else:
            weights[name] = values * gain / shape[1] ** 0.5
    return weights


def perturbed(weights: Weights, share: float, seed: int = 1) -> Weights:
    """The same weights with noise of `share` times each tensor's own spread: a draft model that is often right."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + share * tensor.std() * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in weights.items()
    }


def resized_vocabulary(spec: ModelSpec, weights: Weights, vocab_size: int, seed: int = 2) -> tuple[ModelSpec, Weights]:
    """The same model with rows of embedding and head cut off or added: a vocabulary of another padding."""
    other = tiny_spec(**{**spec.__dict__, "vocab_size": vocab_size})
    added = wide_weights(other, seed)
    out = dict(weights)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            kept = min(vocab_size, spec.vocab_size)
            out[name] = torch.cat([weights[name][:kept], added[name][kept:]])
    return other, out


def make_decoder(
    spec: ModelSpec,
    weights: Weights,
    *,
    dtype: str = "fp64",
    backend: str = "cpu",
    num_slots: int = 4,
    max_context: int = 128,
    max_rows: int = 64,
    num_pages: int | None = None,
    rollback: str = "compact",
) -> Decoder:
    torch_dtype = DTYPES[dtype]
    kv = PagedKVCache(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_slots=num_slots,
        max_context=max_context,
        dtype=torch_dtype,
        num_pages=num_pages,
        rollback=rollback,
    )
    tensors = ((name, tensor.to(torch_dtype)) for name, tensor in weights.items())
    limits = DecoderLimits(max_rows=max_rows, max_selected=max_rows)
    return Decoder(spec, tensors, dtype=dtype, backend=backend, kv=kv, limits=limits)


def feed(
    decoder: Decoder,
    tokens: Sequence[Sequence[int]],
    slots: Sequence[int] | None = None,
    *,
    last_only: bool = False,
    num_layers: int | None = None,
    commit: bool = True,
) -> torch.Tensor:
    """One pass over a ragged batch that continues each slot; returns a copy of the logits."""
    slots = list(range(len(tokens))) if slots is None else list(slots)
    contexts = [int(decoder.kv.lengths[slot]) for slot in slots]
    for slot, ids in zip(slots, tokens, strict=True):
        decoder.kv.reserve(slot, len(ids))
    batch = ForwardBatch.of([list(ids) for ids in tokens], slots, contexts, last_only=last_only)
    logits = decoder.forward(batch, num_layers).clone()
    for slot, ids in zip(slots, tokens, strict=True):
        decoder.kv.commit(slot, len(ids) if commit else 0)
    return logits


def empty(decoder: Decoder) -> None:
    for slot in range(len(decoder.kv.lengths)):
        decoder.kv.close(slot)


def history_logits(decoder: Decoder, tokens: Sequence[int], num_layers: int | None = None) -> torch.Tensor:
    """Logits [len(tokens), V] computed from scratch in slot 0, which must be empty; it is left empty."""
    assert decoder.kv.lengths[0] == 0
    logits = feed(decoder, [tokens], num_layers=num_layers)
    decoder.kv.close(0)
    return logits


def assert_history_matters(decoder: Decoder, tokens: Sequence[int]) -> None:
    """The last logits move when the first token is another one."""
    spec = decoder.spec
    changed = [(tokens[0] + 1) % spec.vocab_size, *tokens[1:]]
    difference = (history_logits(decoder, tokens)[-1] - history_logits(decoder, changed)[-1]).abs().max()
    assert difference > 1e-2, f"the first token moves the last logits by {difference:.1e} only"


def prompts(spec: ModelSpec, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    stream = np.random.default_rng(seed)
    return [tuple(int(t) for t in stream.integers(0, spec.vocab_size, length)) for length in lengths]


def make_request(
    prompt: Sequence[int],
    name: str = "r",
    *,
    max_tokens: int = 16,
    params: SamplingParams = GREEDY,
    reference: tuple[int, ...] | None = None,
    category: str = "test",
    **stops: Any,
) -> Request:
    rules = StopRules(max_tokens=max_tokens, **stops)
    return Request(name, category, tuple(prompt), params, rules, reference)


def make_engine(target: Decoder, drafter: Drafter | None = None, **options: Any) -> Engine:
    """An engine that checks the KV cache after every step."""
    settings: dict[str, Any] = {"batch_size": 1, "depth": 3, "check": True}
    return Engine(target, PrefillStore(target), drafter, **(settings | options))


def decode(
    target: Decoder,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    *,
    fillers: Iterator[Request] | None = None,
    **options: Any,
) -> Trace:
    """Run one block and check that all pages came back."""
    trace = make_engine(target, drafter, **options).run(requests, fillers)
    assert target.kv.num_free_pages == target.kv.num_pages
    assert not target.kv.lengths.any()
    return trace


def outputs(trace: Trace) -> dict[str, tuple[int, ...]]:
    return {request.request_id: request.token_ids for request in trace.requests}


def by_id(trace: Trace) -> dict[str, RequestTrace]:
    return {request.request_id: request for request in trace.requests}


def accepted_share(trace: Trace) -> float:
    return float(trace.num_accepted.sum() / max(1, trace.num_draft.sum()))


@dataclass
class CountedForward:
    """Wraps a decoder's `forward` and keeps what each call ran over: (query lengths, cells before them, head rows,
    layers)."""

    decoder: Decoder
    calls: list[tuple[tuple[int, ...], tuple[int, ...], int, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        inner = self.decoder.forward

        def forward(batch: ForwardBatch, num_layers: int | None = None) -> torch.Tensor:
            lens = tuple(int(n) for n in batch.query_lens)
            contexts = tuple(int(n) for n in batch.context_lens + batch.written)
            self.calls.append((lens, contexts, len(batch.selected_rows), num_layers))
            return inner(batch, num_layers)

        self.decoder.forward = forward  # type: ignore[method-assign]


def greedy_from_scratch(decoder: Decoder, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Greedy output without an engine, a cache or a batch: the whole text is run again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(history_logits(decoder, tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def small_vocabulary(vocab_size: int = 11, **changes: Any) -> tuple[ModelSpec, Weights]:
    """A model whose texts repeat their n-grams by chance, so that lookup drafts are sometimes right."""
    spec = tiny_spec(vocab_size=vocab_size, **changes)
    return spec, wide_weights(spec, seed=10, gain=2.0)


@dataclass(eq=False)
class ScriptedDrafter:
    """Drafts set by the test: `script(request id, tokens so far, depth)` gives the tokens of a chain, or a tree of at
    most `max_nodes` nodes."""

    script: Callable[[str, tuple[int, ...], int], Sequence[int] | TokenTree]
    synthetic: bool = True
    capture: tuple[int, ...] = ()
    max_nodes: int | None = None
    calls: list[str] = field(default_factory=list)

    def start(self, active: ActiveRequest) -> None:
        self.calls.append(f"start {active.request.request_id}")

    def num_nodes(self, depth: int) -> int:
        return depth if self.max_nodes is None else self.max_nodes

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        self.calls.append("propose")
        drafts = [
            self.script(one.request.request_id, tuple(one.tokens), depth)
            for one, depth in zip(active, depths, strict=True)
        ]
        return [
            Proposal(draft if isinstance(draft, TokenTree) else TokenTree.chain(np.array(draft, dtype=np.int64)))
            for draft in drafts
        ]

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None:
        assert len(path) == num_accepted
        self.calls.append(f"commit {active.request.request_id} {num_accepted}/{num_draft}")

    def finish(self, active: ActiveRequest) -> None:
        self.calls.append(f"finish {active.request.request_id}")

    def take_passes(self) -> list[DraftPass]:
        return []


def random_tree(stream: np.random.Generator, num_nodes: int, vocab_size: int, *, reach: int = 4) -> TokenTree:
    """Any tree: each node hangs under one of the last `reach` nodes or the root; siblings hold distinct tokens."""
    parents = [int(stream.integers(max(-1, node - reach), node)) for node in range(num_nodes)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        tokens.append(int(stream.choice([t for t in range(vocab_size) if t not in taken])))
    return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


def random_path(stream: np.random.Generator, tree: TokenTree) -> tuple[int, ...]:
    """The way to any node, or to none."""
    return tree.path_to(int(stream.integers(-1, len(tree))))


def feed_trees(
    decoder: Decoder, roots: Sequence[int], trees: Sequence[TokenTree], slots: Sequence[int] | None = None
) -> torch.Tensor:
    """One verify pass over roots and their trees, not committed; logits [sum(1 + nodes), V]."""
    slots = list(range(len(trees))) if slots is None else list(slots)
    for slot, tree in zip(slots, trees, strict=True):
        decoder.kv.reserve(slot, 1 + len(tree))
    tokens = [np.array([root, *tree.tokens], dtype=np.int64) for root, tree in zip(roots, trees, strict=True)]
    contexts = [int(decoder.kv.lengths[slot]) for slot in slots]
    return decoder.forward(ForwardBatch.of(tokens, slots, contexts, trees=trees)).clone()


def step_cells(decoder: Decoder, slot: int, cells: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies [L, H, n, D] of K and V in the cells `cells` behind the committed ones."""
    kv = decoder.kv
    places = kv.slot_index[slot, int(kv.lengths[slot]) + np.array(cells, dtype=np.int64)]
    pages, within = torch.from_numpy(places // kv.page_size), torch.from_numpy(places % kv.page_size)
    k, v = (rows[:, pages, :, within].permute(1, 2, 0, 3).clone() for rows in (kv.k_rows, kv.v_rows))
    return k, v


def cached(decoder: Decoder, slot: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies [L, H, n, D] of K and V of the committed cells from `first` on, as `read` gives them."""
    length = int(decoder.kv.lengths[slot])
    layers = [decoder.kv.read(layer, slot, length) for layer in range(decoder.spec.num_layers)]
    k, v = (torch.stack([layer[which][:, first:] for layer in layers]) for which in (0, 1))
    return k, v
