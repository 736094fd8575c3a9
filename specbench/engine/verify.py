"""Which drafted tokens stand: greedy and chain speculative sampling, exact for every drafter.

Chain speculative sampling (Leviathan et al. 2023; Chen et al. 2023): with x ~ q, keep x if u < p(x)/q(x); at the first
rejection emit y ~ norm(relu(p - q)) and stop; if all stand, emit y ~ p. A drafter without q (argmax, n-gram, a fixed
list) is a point mass: x is kept with probability p(x), and the residual is p without x. What is emitted then has the
law of the target, whatever the drafter is.

Logits come packed: request i with l_i drafts owns l_i + 1 consecutive rows; its row 0 follows the pending token, its
row j + 1 follows draft j. A sampled request takes exactly l_i + 1 uniforms a step, a greedy one none, whatever is
accepted and whoever shares the batch: coin j judges draft j, the last one draws the emitted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.sampling import (
    NumericalError,
    SamplingParams,
    UniformSource,
    distribution,
    sample,
    token_logprobs,
    top2_margins,
)
from specbench.engine.tree import TokenTree
from specbench.errors import InputError, SpecbenchError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class DraftContractError(SpecbenchError):
    """A drafter handed over tokens or probabilities that cannot be what it sampled: a bug of the drafter."""


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one request.

    `q` [l, V] holds the distributions the tokens were really sampled from, filters included; None says the tokens were
    chosen, not sampled (argmax, n-gram): a point mass.
    """

    tree: TokenTree
    q: torch.Tensor | None = None


@dataclass(frozen=True)
class Verification:
    """The verdict on one request's drafts.

    `accepted` is the length of the leading run that stands, `next_token` what the target emits after it, `tokens` both
    together. `logprobs` and `top2_margins` (one a token, from the raw target logits) are there when asked for. After a
    failure `error` is set, nothing is accepted and `tokens` is empty.
    """

    accepted: int
    next_token: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top2_margins: tuple[float, ...] = ()
    error: NumericalError | None = None

    @classmethod
    def failure(cls, error: NumericalError) -> Verification:
        return cls(accepted=0, next_token=-1, tokens=(), error=error)


@dataclass(frozen=True)
class VerifyBatch:
    """A checked batch as a backend gets it.

    `logits` [sum(l_i + 1), V]; request i owns rows [offsets[i], offsets[i + 1]); `drafts[i]` int64[l_i]; `q[i]`
    [l_i, V] or None; `uniforms[i]` float64[l_i + 1], empty for a greedy request.
    """

    logits: torch.Tensor
    offsets: IntArray
    drafts: tuple[IntArray, ...]
    q: tuple[torch.Tensor | None, ...]
    params: tuple[SamplingParams, ...]
    uniforms: tuple[FloatArray, ...]
    request_ids: tuple[str, ...]
    step: int | None

    def __len__(self) -> int:
        return len(self.drafts)

    def rows(self, index: int) -> slice:
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


Backend = Callable[[VerifyBatch], list[Verification]]


def verify_greedy_chain(target_argmax: IntArray, draft_tokens: IntArray) -> Verification:
    """Keep drafts while they equal the target's argmax; emit the argmax at the first mismatch, or the bonus.

    `target_argmax` int64[l + 1], `draft_tokens` int64[l].
    """
    assert len(target_argmax) == len(draft_tokens) + 1, "a chain of l drafts has l + 1 rows"
    wrong = np.flatnonzero(target_argmax[:-1] != draft_tokens)
    accepted = int(wrong[0]) if wrong.size else len(draft_tokens)
    return _verdict(draft_tokens, accepted, int(target_argmax[accepted]))


def verify_chain(p: torch.Tensor, draft_tokens: IntArray, q: torch.Tensor | None, uniforms: FloatArray) -> Verification:
    """Chain speculative sampling of one request; the formula is in the module's docstring.

    `p` [l + 1, V] target distributions, `draft_tokens` int64[l], `q` [l, V] draft distributions or None for a point
    mass, `uniforms` float64[l + 1]. Ratios and residuals are taken in float64. A residual that rounding left empty
    falls back to p. Raises DraftContractError when a drafted token has q = 0.
    """
    num_drafts = len(draft_tokens)
    assert len(p) == len(uniforms) == num_drafts + 1, "a chain of l drafts has l + 1 rows and l + 1 uniforms"
    p_drafted = _at_tokens(p[:-1], draft_tokens)
    q_drafted = [1.0] * num_drafts if q is None else _at_tokens(q, draft_tokens)
    if 0.0 in q_drafted:
        position = q_drafted.index(0.0)
        raise DraftContractError(f"draft {position} is token {draft_tokens[position]}, whose q is 0")
    accepted = 0
    while accepted < num_drafts and uniforms[accepted] < p_drafted[accepted] / q_drafted[accepted]:
        accepted += 1
    mass = _float64(p[accepted])
    if accepted < num_drafts:
        mass = _residual(mass, int(draft_tokens[accepted]), None if q is None else _float64(q[accepted]))
    return _verdict(draft_tokens, accepted, sample(mass, float(uniforms[num_drafts])))


def _residual(p: FloatArray, token: int, q: FloatArray | None) -> FloatArray:
    """relu(p - q) with q None a point mass at `token`; p itself where rounding left no mass."""
    if q is None:
        residual = p.copy()
        residual[token] = 0.0
    else:
        residual = np.maximum(p - q, 0.0)
    return residual if residual.sum() > 0 else p


def _verdict(draft_tokens: IntArray, accepted: int, next_token: int) -> Verification:
    return Verification(accepted, next_token, (*(int(token) for token in draft_tokens[:accepted]), next_token))


def _float64(row: torch.Tensor) -> FloatArray:
    return row.detach().cpu().double().numpy()


def _at_tokens(rows: torch.Tensor, tokens: IntArray) -> list[float]:
    """rows[i, tokens[i]] as float64 on the host."""
    chosen = torch.as_tensor(tokens, device=rows.device).unsqueeze(1)
    return rows.gather(1, chosen).squeeze(1).double().tolist()


def verify(
    proposals: Sequence[Proposal],
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[UniformSource],
    *,
    backend: str = "torch",
    step: int | None = None,
    want_logprobs: bool = False,
    want_margins: bool = False,
) -> list[Verification]:
    """Judge a ragged batch of proposals, each under its own request's parameters and coins.

    `logits` [sum(l_i + 1), V], raw target logits, packed as the module's docstring says. A request whose rows hold no
    distribution comes back with `error` set, naming request, row and step; the others are unaffected. Raises
    InputError for an unknown backend, a tree, or shapes that do not fit; DraftContractError for an impossible draft.
    """
    if backend not in BACKENDS:
        raise InputError(f"unknown verification backend {backend!r}", key="backend", remedy=f"one of {list(BACKENDS)}")
    batch = _checked_batch(proposals, logits, params, generators, backend, step)
    verdicts = BACKENDS[backend](batch)
    return [
        _with_scores(verdict, logits[batch.rows(index)], want_logprobs, want_margins)
        for index, verdict in enumerate(verdicts)
    ]


def sample_next(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[UniformSource],
    *,
    step: int | None = None,
    want_logprobs: bool = False,
    want_margins: bool = False,
) -> list[Verification]:
    """The next token of each request from `logits` [B, V]: the autoregressive arm and the end of a prefill.

    No draft, no verifier: the same law, scores and failures as `verify` with empty proposals, one uniform for a
    sampled request and none for a greedy one.
    """
    _check_lengths(logits, len(logits), params, generators)
    maxima, best = logits.max(dim=-1)
    bad = (~torch.isfinite(maxima)).tolist()
    sampled = [row for row, each in enumerate(params) if not each.is_greedy]
    coins = {row: float(generators[row].uniforms(1)[0]) for row in sampled}
    usable = [row for row in sampled if not bad[row]]
    probs = distribution(logits[usable], [params[row] for row in usable]) if usable else logits
    tokens = best.tolist()
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
    backend: str,
    step: int | None,
) -> VerifyBatch:
    if not all(proposal.tree.is_chain for proposal in proposals):
        raise InputError(
            f"tree verification is not available for backend {backend} yet", remedy="use a drafter that drafts chains"
        )
    lengths = np.array([len(proposal.tree) for proposal in proposals], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths + 1)])
    _check_lengths(logits, len(proposals), params, generators, num_rows=int(offsets[-1]))
    vocab_size = logits.shape[1]
    for proposal, generator in zip(proposals, generators, strict=True):
        tokens = proposal.tree.tokens
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            raise DraftContractError(
                f"request {generator.request_id}: a drafted id is outside the vocabulary of {vocab_size}"
            )
        if proposal.q is not None and tuple(proposal.q.shape) != (len(tokens), vocab_size):
            raise DraftContractError(
                f"request {generator.request_id}: q has shape {tuple(proposal.q.shape)}, not {len(tokens), vocab_size}"
            )
    return VerifyBatch(
        logits=logits,
        offsets=offsets,
        drafts=tuple(proposal.tree.tokens for proposal in proposals),
        q=tuple(proposal.q for proposal in proposals),
        params=tuple(params),
        uniforms=tuple(
            generator.uniforms(0 if each.is_greedy else int(length) + 1)
            for each, generator, length in zip(params, generators, lengths, strict=True)
        ),
        request_ids=tuple(generator.request_id for generator in generators),
        step=step,
    )


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
    """Scores of the emitted tokens from the request's own rows [l + 1, V]: row j emitted token j."""
    if verdict.error is not None or not (want_logprobs or want_margins):
        return verdict
    rows = logits[: len(verdict.tokens)]
    return replace(
        verdict,
        logprobs=tuple(token_logprobs(rows, verdict.tokens)) if want_logprobs else (),
        top2_margins=tuple(top2_margins(rows)) if want_margins else (),
    )


def verify_torch(batch: VerifyBatch) -> list[Verification]:
    """The reference backend, on any device. Greedy requests see one max and no softmax."""
    maxima, best = batch.logits.max(dim=-1)
    bad = (~torch.isfinite(maxima)).cpu().numpy()
    target_argmax = best.cpu().numpy()
    verdicts: dict[int, Verification] = {}
    sampled: list[int] = []
    for index in range(len(batch)):
        rows = batch.rows(index)
        if bad[rows].any():
            verdicts[index] = _no_distribution(int(bad[rows].argmax()), batch.request_ids[index], batch.step)
        elif batch.params[index].is_greedy:
            verdicts[index] = verify_greedy_chain(target_argmax[rows], batch.drafts[index])
        else:
            sampled.append(index)
    if sampled:
        counts = [len(batch.drafts[index]) + 1 for index in sampled]
        packed = torch.cat([batch.logits[batch.rows(index)] for index in sampled])
        row_params = [batch.params[index] for index, count in zip(sampled, counts, strict=True) for _ in range(count)]
        targets = distribution(packed, row_params)
        for index, count, end in zip(sampled, counts, np.cumsum(counts).tolist(), strict=True):
            verdicts[index] = _verify_sampled(batch, index, targets[end - count : end])
    return [verdicts[index] for index in range(len(batch))]


def _verify_sampled(batch: VerifyBatch, index: int, p: torch.Tensor) -> Verification:
    q = batch.q[index]
    request_id = batch.request_ids[index]
    if q is not None:
        sums = torch.where((q < 0).any(dim=-1), -1.0, q.double().sum(dim=-1)).cpu().numpy()
        unusable = np.flatnonzero(~np.isfinite(sums))
        if unusable.size:
            message = "the drafter's q is not finite"
            row = int(unusable[0])
            return Verification.failure(NumericalError(message, row=row, request_id=request_id, step=batch.step))
        if np.any(np.abs(sums - 1.0) > 1e-3):
            raise DraftContractError(f"request {request_id}: a row of q is not a distribution (sums {sums.tolist()})")
    return verify_chain(p, batch.drafts[index], q, batch.uniforms[index])


BACKENDS: dict[str, Backend] = {"torch": verify_torch}
