"""Which drafted tokens stand, for a ragged batch of requests: greedy, or by the rule of a named choice.

The rules are in `verify_rules.py` and `verify_traversal.py`, the choices in `verify_choices.py`; here a batch is
checked, handed to a backend and scored. Logits come packed: request i with n_i drafted nodes owns n_i + 1 consecutive
rows; its row 0 follows the pending token, its row j + 1 follows node j. A sampled request takes exactly n_i + 1
uniforms a step, a greedy one none, whatever is accepted and whoever shares the batch: coin j judges node j, the last
one draws the emitted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from specbench.engine.sampling import (
    NumericalError,
    SamplingParams,
    UniformSource,
    best_tokens,
    distribution,
    sample,
    token_logprobs,
    top2_margins,
)
from specbench.engine.tree import TokenTree
from specbench.engine.verify_choices import METHODS, RULES, Method, Rule, refusal
from specbench.engine.verify_rules import (
    SIBLINGS,
    DraftContractError,
    FloatArray,
    IntArray,
    Siblings,
    Verification,
    verify_block,
    verify_chain,
    verify_greedy,
    verify_greedy_chain,
    verify_sequential,
)
from specbench.engine.verify_traversal import verify_traversal
from specbench.errors import InputError


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one request.

    `q` [n, V]: row i is the whole distribution that node i's position was really sampled from, filters included and
    before siblings were taken out, so siblings have equal rows. None says that the tokens were chosen, not sampled
    (argmax, top-k, n-gram). `siblings` says how the children of one node came about; it is of no matter to a chain.
    """

    tree: TokenTree
    q: torch.Tensor | None = None
    siblings: Siblings = "chosen"


@dataclass(frozen=True)
class VerifyBatch:
    """A checked batch as a backend gets it.

    `logits` [sum(n_i + 1), V]; request i owns rows [offsets[i], offsets[i + 1]); `q[i]` [n_i, V] or None. A backend
    takes the coins of all requests once: from `uniforms`, or, where it makes them itself from a generator's `key` and
    `num_drawn`, by `skip(num_coins[i])` on each generator.
    """

    logits: torch.Tensor
    offsets: IntArray
    trees: tuple[TokenTree, ...]
    q: tuple[torch.Tensor | None, ...]
    siblings: tuple[Siblings, ...]
    params: tuple[SamplingParams, ...]
    generators: tuple[UniformSource, ...]
    method: Method
    step: int | None

    def __len__(self) -> int:
        return len(self.trees)

    def rows(self, index: int) -> slice:
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    @property
    def rule(self) -> Rule:
        """What `method` runs for sampled requests."""
        return RULES[self.method]

    @property
    def num_coins(self) -> tuple[int, ...]:
        """Coins of each request: one a node and one for the emitted token, none for a greedy request."""
        return tuple(0 if each.is_greedy else len(tree) + 1 for tree, each in zip(self.trees, self.params, strict=True))

    @cached_property
    def uniforms(self) -> tuple[FloatArray, ...]:
        """float64[num_coins[i]] of each request, drawn when first asked for."""
        return tuple(
            generator.uniforms(count) for generator, count in zip(self.generators, self.num_coins, strict=True)
        )


Backend = Callable[[VerifyBatch], list[Verification]]


def verify(
    proposals: Sequence[Proposal],
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[UniformSource],
    *,
    backend: str | Backend = "torch",
    method: Method = "sequential",
    step: int | None = None,
    want_logprobs: bool = False,
    want_margins: bool = False,
) -> list[Verification]:
    """Judge a ragged batch of proposals, each under its own request's parameters and coins.

    `logits` [sum(n_i + 1), V], raw target logits, packed as the module's docstring says; `method` is the choice by
    name. A request whose rows hold no distribution comes back with `error` set, naming request, row and step; the
    others are unaffected. Raises InputError for an unknown backend or method, a draft that `method` refuses, or shapes
    that do not fit; DraftContractError for an impossible draft.
    """
    judge = _backend(backend)
    batch = _checked_batch(proposals, logits, params, generators, method, step)
    verdicts = judge(batch)
    return [
        _with_scores(verdict, logits[batch.rows(index)], want_logprobs, want_margins)
        for index, verdict in enumerate(verdicts)
    ]


def _backend(backend: str | Backend) -> Backend:
    if not isinstance(backend, str):
        return backend
    if backend not in BACKENDS:
        raise InputError(f"unknown verification backend {backend!r}", key="backend", remedy=f"one of {list(BACKENDS)}")
    return BACKENDS[backend]


def sample_next(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[UniformSource],
    *,
    backend: str | Backend = "torch",
    step: int | None = None,
    want_logprobs: bool = False,
    want_margins: bool = False,
) -> list[Verification]:
    """The next token of each request from `logits` [B, V]: the autoregressive arm and the end of a prefill.

    No draft to verify: the same law, scores and failures as `verify` with empty proposals, one uniform for a
    sampled request and none for a greedy one.
    """
    _check_lengths(logits, len(logits), params, generators)
    if backend != "torch":
        nothing = [Proposal(TokenTree.chain(np.empty(0, dtype=np.int64)))] * len(logits)
        return verify(
            *(nothing, logits, params, generators),
            backend=backend,
            step=step,
            want_logprobs=want_logprobs,
            want_margins=want_margins,
        )
    best, bad = best_tokens(logits)
    sampled = [row for row, each in enumerate(params) if not each.is_greedy]
    coins = {row: float(generators[row].uniforms(1)[0]) for row in sampled}
    usable = [row for row in sampled if not bad[row]]
    probs = distribution(logits[usable], [params[row] for row in usable]) if usable else logits
    tokens: list[int] = best.tolist()
    for position, row in enumerate(usable):
        tokens[row] = sample(probs[position], coins[row])
    verdicts = []
    for row, is_bad in enumerate(bad):
        if is_bad:
            verdicts.append(_no_distribution(0, generators[row].request_id, step))
        else:
            plain = Verification(0, tokens[row], (tokens[row],))
            verdicts.append(_with_scores(plain, logits[row : row + 1], want_logprobs, want_margins))
    return verdicts


def _checked_batch(
    proposals: Sequence[Proposal],
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[UniformSource],
    method: Method,
    step: int | None,
) -> VerifyBatch:
    if method not in METHODS:
        raise InputError(f"unknown verification {method!r}", key="method", remedy=f"one of {list(METHODS)}")
    lengths = np.array([len(proposal.tree) for proposal in proposals], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths + 1)])
    _check_lengths(logits, len(proposals), params, generators, num_rows=int(offsets[-1]))
    for proposal, generator in zip(proposals, generators, strict=True):
        fault = _fault(proposal, logits.shape[1])
        if fault is not None:
            raise DraftContractError(f"request {generator.request_id}: {fault}")
    if method != "sequential":
        for proposal, each, generator in zip(proposals, params, generators, strict=True):
            _refuse(method, proposal, each.is_greedy, generator.request_id)
    return VerifyBatch(
        logits=logits,
        offsets=offsets,
        trees=tuple(proposal.tree for proposal in proposals),
        q=tuple(proposal.q for proposal in proposals),
        siblings=tuple(proposal.siblings for proposal in proposals),
        params=tuple(params),
        generators=tuple(generators),
        method=method,
        step=step,
    )


def _refuse(method: Method, proposal: Proposal, is_greedy: bool, request_id: str) -> None:
    tree = proposal.tree
    drawn = proposal.q is not None if len(tree) else None
    refused = refusal(method, is_greedy=is_greedy, drawn=drawn, branches=not tree.is_chain)
    if refused is not None:
        message, remedy = refused
        raise InputError(f"request {request_id}: {message}", key="sampling.verification", remedy=remedy)


def _fault(proposal: Proposal, vocab_size: int) -> str | None:
    """What is impossible about a proposal's nodes and the shape of its q, or None."""
    tree, q = proposal.tree, proposal.q
    tokens = tree.tokens
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        return f"a drafted id is outside the vocabulary of {vocab_size}"
    if q is not None and tuple(q.shape) != (len(tokens), vocab_size):
        return f"q has shape {tuple(q.shape)}, not {len(tokens), vocab_size}"
    if proposal.siblings not in SIBLINGS:
        return f"siblings are {proposal.siblings!r}, not one of {list(SIBLINGS)}"
    if tree.is_chain or all(len(nodes) < 2 for nodes in tree.children):
        return None
    if (q is None) != (proposal.siblings == "chosen"):
        with_q = "without the q they were drawn from" if q is None else "with a q"
        return f"{proposal.siblings} siblings come {with_q}"
    if proposal.siblings != "independent" and tree.has_equal_siblings:
        return "siblings hold the same token"
    return None


def _check_lengths(
    logits: torch.Tensor,
    num_requests: int,
    params: Sequence[SamplingParams],
    generators: Sequence[UniformSource],
    num_rows: int | None = None,
) -> None:
    num_rows = num_requests if num_rows is None else num_rows
    if logits.ndim != 2 or len(logits) != num_rows:
        raise InputError(f"logits have shape {tuple(logits.shape)}, expected [{num_rows}, V]")
    if not len(params) == len(generators) == num_requests:
        raise InputError(f"{num_requests} requests, {len(params)} parameters, {len(generators)} generators")


def _no_distribution(row: int, request_id: str, step: int | None) -> Verification:
    message = "the target's logits have no distribution (NaN, +inf or all -inf)"
    return Verification.failure(NumericalError(message, row=row, request_id=request_id, step=step))


def _with_scores(verdict: Verification, logits: torch.Tensor, want_logprobs: bool, want_margins: bool) -> Verification:
    """Scores of the emitted tokens from the request's own rows [n + 1, V]: those of the root and of the path."""
    if verdict.error is not None or not (want_logprobs or want_margins):
        return verdict
    rows = logits[[0, *(node + 1 for node in verdict.path)]]
    return replace(
        verdict,
        logprobs=tuple(token_logprobs(rows, verdict.tokens)) if want_logprobs else (),
        top2_margins=tuple(top2_margins(rows)) if want_margins else (),
    )


def verify_torch(batch: VerifyBatch) -> list[Verification]:
    """The reference backend, on any device. Greedy requests see one max and no softmax."""
    uniforms = batch.uniforms
    target_argmax, bad = best_tokens(batch.logits)
    verdicts: dict[int, Verification] = {}
    sampled: list[int] = []
    for index, tree in enumerate(batch.trees):
        rows = batch.rows(index)
        if bad[rows].any():
            request_id = batch.generators[index].request_id
            verdicts[index] = _no_distribution(int(bad[rows].argmax()), request_id, batch.step)
        elif batch.params[index].is_greedy:
            verdicts[index] = verify_greedy(target_argmax[rows], tree)
        else:
            sampled.append(index)
    if sampled:
        counts = [len(batch.trees[index]) + 1 for index in sampled]
        packed = torch.cat([batch.logits[batch.rows(index)] for index in sampled])
        row_params = [batch.params[index] for index, count in zip(sampled, counts, strict=True) for _ in range(count)]
        targets = distribution(packed, row_params)
        for index, count, end in zip(sampled, counts, np.cumsum(counts).tolist(), strict=True):
            verdicts[index] = _verify_sampled(batch, index, targets[end - count : end], uniforms[index])
    return [verdicts[index] for index in range(len(batch))]


def _verify_sampled(batch: VerifyBatch, index: int, p: torch.Tensor, uniforms: FloatArray) -> Verification:
    q, tree = batch.q[index], batch.trees[index]
    request_id = batch.generators[index].request_id
    if q is not None:
        sums = torch.where((q < 0).any(dim=-1), -1.0, q.double().sum(dim=-1)).cpu().numpy()
        unusable = np.flatnonzero(~np.isfinite(sums))
        if unusable.size:
            message = "the drafter's q is not finite"
            row = int(unusable[0])
            return Verification.failure(NumericalError(message, row=row, request_id=request_id, step=batch.step))
        if np.any(np.abs(sums - 1.0) > 1e-3):
            raise DraftContractError(f"request {request_id}: a row of q is not a distribution (sums {sums.tolist()})")
    if batch.rule == "block":
        return verify_block(p, tree.tokens, q, uniforms)
    if batch.rule == "traversal":
        return verify_traversal(p, tree, q, batch.siblings[index], uniforms)
    return verify_sequential(p, tree, q, batch.siblings[index], uniforms)


def verify_triton(batch: VerifyBatch) -> list[Verification]:
    """The Triton kernels, on a GPU or in Triton's interpreter."""
    from specbench.engine.verify_triton import verify_triton as judge

    return judge(batch)


BACKENDS: dict[str, Backend] = {"torch": verify_torch, "triton": verify_triton}

__all__ = [
    "BACKENDS",
    "METHODS",
    "SIBLINGS",
    "Backend",
    "DraftContractError",
    "FloatArray",
    "IntArray",
    "Method",
    "Proposal",
    "Siblings",
    "Verification",
    "VerifyBatch",
    "sample_next",
    "verify",
    "verify_block",
    "verify_chain",
    "verify_greedy",
    "verify_greedy_chain",
    "verify_sequential",
    "verify_torch",
    "verify_traversal",
]
