"""Logits -> distribution -> token: the one definition that target, drafter and verifier share.

The order is temperature -> top_k -> top_p -> min_p, each on what the step before left. Every filter is a threshold on
the logits, so tokens tied at the border are kept together and the result depends neither on the order of the ids nor
on the stability of a sort. Temperatures up to GREEDY_EPSILON are greedy: a one-hot row at the argmax, the lowest id
among ties.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.errors import InputError, SpecbenchError

GREEDY_EPSILON = 1e-5
NUCLEUS_GUESS = 1024
AHEAD = 256
"""Numbers of a stream that are made at once: ten rounds cost the same for one number as for these."""
_WORD = 0xFFFFFFFF


class NumericalError(SpecbenchError):
    """A row of logits or probabilities has no distribution: NaN, +inf, or no token with any mass.

    `row` counts within the array at hand (for a verified request: 0 is the root); the request and the step are named
    where they are known, so that only that request fails.
    """

    def __init__(self, message: str, *, row: int, request_id: str | None = None, step: int | None = None) -> None:
        self.reason = message
        where = f"row {row}"
        where += f" of request {request_id}" if request_id is not None else ""
        where += f" in step {step}" if step is not None else ""
        super().__init__(f"{where}: {message}")
        self.row = row
        self.request_id = request_id
        self.step = step

    def named(self, request_id: str, step: int | None = None) -> NumericalError:
        """The same failure with the request (and step) it belongs to."""
        return NumericalError(self.reason, row=self.row, request_id=request_id, step=step)


@dataclass(frozen=True)
class SamplingParams:
    """How a request turns logits into a token. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off.

    Raises InputError for a value outside its range. Penalties are not offered: they depend on rejected drafts.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature {self.temperature} is not a finite number >= 0", key="temperature")
        if not _is_count(self.top_k):
            raise InputError(f"top_k {self.top_k!r} is not an integer >= 0", key="top_k", remedy="use 0 to keep all")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} is not in (0, 1]", key="top_p", remedy="use 1 to keep all")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p {self.min_p} is not in [0, 1]", key="min_p", remedy="use 0 to keep all")
        if self.seed is not None and not _is_count(self.seed):
            raise InputError(f"seed {self.seed!r} is not an integer >= 0", key="seed")

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_EPSILON


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


class UniformSource(Protocol):
    """Where a request's coins come from; a test may feed forced ones."""

    @property
    def request_id(self) -> str: ...

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """float64[count] in [0, 1)."""
        ...


class RequestGenerator:
    """A request's own stream of uniforms, a function of (seed, request id) alone: never of the batch around it.

    Number n of the stream is Philox4x32-10 at counter n under `key`, 64 bits of a SHA-256 of both (see `philox4x32`);
    `num_drawn` is the number that comes next, so a device can make the same numbers from the two. A seed of None is
    drawn from the system's entropy; `seed` holds what was used.
    """

    def __init__(self, seed: int | None, request_id: str) -> None:
        if seed is not None and not _is_count(seed):
            raise InputError(f"seed {seed!r} is not an integer >= 0", key="seed")
        self.request_id = request_id
        self.seed = secrets.randbits(63) if seed is None else int(seed)
        self.num_drawn = 0
        self.key = int.from_bytes(hashlib.sha256(f"{self.seed}/{request_id}".encode()).digest()[:8], "little")
        self._ahead: NDArray[np.float64] = np.empty(0)
        self._first = 0

    def uniform(self) -> float:
        """The next uniform in [0, 1)."""
        return float(self.uniforms(1)[0])

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """float64[count] in [0, 1): the same numbers as `count` calls of `uniform`."""
        begin = self.num_drawn - self._first
        if not 0 <= begin <= begin + count <= len(self._ahead):
            self._first, begin = self.num_drawn, 0
            self._ahead = philox_uniforms(self.key, self._first, max(count, AHEAD))
        self.num_drawn += count
        return self._ahead[begin : begin + count]

    def skip(self, count: int) -> None:
        """Pass over `count` numbers that were drawn elsewhere from the same key."""
        self.num_drawn += count


def philox4x32(counters: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al. 2011) on counters [4, n], words of 32 bits held in uint64, under a 64-bit key.

    Returns the four output words [4, n]. Products of two words fit 64 bits, so nothing overflows.
    """
    c0, c1, c2, c3 = counters.astype(np.uint64)
    k0, k1 = key & _WORD, key >> 32 & _WORD
    low = np.uint64(_WORD)
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            right >> np.uint64(32) ^ c1 ^ np.uint64(k0),
            right & low,
            left >> np.uint64(32) ^ c3 ^ np.uint64(k1),
            left & low,
        )
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return np.stack([c0, c1, c2, c3])


def philox_uniforms(key: int, first: int, count: int) -> NDArray[np.float64]:
    """Numbers first .. first + count - 1 of the stream of `key`: float64[count] in [0, 1), 53 random bits each.

    The counter of number n is the words (n mod 2^32, n >> 32, 0, 0); of the output the first two words are used.
    """
    numbers = np.arange(first, first + count, dtype=np.uint64)
    nothing = np.zeros_like(numbers)
    counters = np.stack([numbers & np.uint64(_WORD), numbers >> np.uint64(32), nothing, nothing])
    high, low, _, _ = philox4x32(counters, key)
    words = (high >> np.uint64(5)).astype(np.float64) * 2.0**26 + (low >> np.uint64(6)).astype(np.float64)
    return np.asarray(words * 2.0**-53, dtype=np.float64)


def bad_rows(logits: torch.Tensor) -> torch.Tensor:
    """bool[R]: rows of `logits` [R, V] with a NaN, a +inf, or nothing but -inf. One pass, no softmax."""
    return ~torch.isfinite(logits.amax(dim=-1))


def best_tokens(logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The argmax int64[R] of each row of `logits` [R, V], the lowest id among ties, and bool[R] as `bad_rows`.

    On the host numpy does both in one vectorised pass: torch's own max with indices takes ten times as long there.
    """
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        rows = logits.detach().numpy()
        best = rows.argmax(axis=-1)
        maxima = rows[np.arange(len(rows)), best]
        # A NaN anywhere in a row is its argmax for numpy.
        return best, ~np.isfinite(maxima)
    maxima, indices = logits.max(dim=-1)
    return indices.cpu().numpy(), (~torch.isfinite(maxima)).cpu().numpy()


def distribution(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities [R, V] of `logits` [R, V], one SamplingParams a row; float64 stays, all else becomes float32.

    Raises NumericalError for the first bad row (ask `bad_rows` first to fail one request only), InputError when the
    shapes do not fit.
    """
    if logits.ndim != 2 or len(params) != logits.shape[0]:
        raise InputError(f"logits of shape {tuple(logits.shape)} do not fit {len(params)} rows of parameters")
    broken = bad_rows(logits).nonzero().flatten().tolist()
    if broken:
        raise NumericalError("the logits have no distribution (NaN, +inf or all -inf)", row=broken[0])
    logits = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    greedy = [row for row, each in enumerate(params) if each.is_greedy]
    sampled = [row for row, each in enumerate(params) if not each.is_greedy]
    if not greedy:
        return _sampled_distribution(logits, params)
    probs = torch.zeros_like(logits)
    rows = torch.tensor(greedy, device=logits.device)
    probs[rows, logits[rows].argmax(dim=-1)] = 1.0
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        probs[rows] = _sampled_distribution(logits[rows], [params[row] for row in sampled])
    return probs


def _sampled_distribution(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Softmax of what the filters leave. Invariant: the best token has scaled logit 0 and is never filtered out."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= column([each.temperature for each in params], logits.dtype)
    vocab_size = logits.shape[1]

    rows = [row for row, each in enumerate(params) if 0 < each.top_k < vocab_size]
    if rows:
        kept = scaled[rows]
        counts = column([params[row].top_k for row in rows], torch.int64)
        best = kept.topk(int(counts.max()), dim=-1).values
        scaled[rows] = kept.masked_fill(kept < best.gather(1, counts - 1), -math.inf)

    rows = [row for row, each in enumerate(params) if each.top_p < 1]
    if rows:
        kept = scaled[rows]
        floor = _nucleus_floor(kept, column([params[row].top_p for row in rows], torch.float64), NUCLEUS_GUESS)
        scaled[rows] = kept.masked_fill(kept < floor, -math.inf)

    rows = [row for row, each in enumerate(params) if each.min_p > 0]
    if rows:
        kept = scaled[rows]
        floor = column([params[row].min_p for row in rows], logits.dtype)
        scaled[rows] = kept.masked_fill(kept.exp() < floor, -math.inf)

    return scaled.softmax(dim=-1)


def _nucleus_floor(scaled: torch.Tensor, top_p: torch.Tensor, guess: int) -> torch.Tensor:
    """The least logit [S, 1] of the smallest set of best tokens whose mass reaches top_p [S, 1].

    Looks among the best `guess` tokens first; only rows whose nucleus is wider are sorted whole, each on its own
    account, so a row's result does not depend on its neighbours.
    """
    vocab_size = scaled.shape[1]
    guess = min(guess, vocab_size)
    ordered = scaled.topk(guess, dim=-1).values
    mass = (ordered.double() - scaled.double().logsumexp(dim=-1, keepdim=True)).exp()
    mass_before = mass.cumsum(dim=-1) - mass
    counts = (mass_before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    floor = ordered.gather(1, counts - 1)
    wider = (counts == guess).flatten()
    if guess < vocab_size and bool(wider.any()):
        floor[wider] = _nucleus_floor(scaled[wider], top_p[wider], vocab_size)
    return floor


def sample(probs: torch.Tensor | NDArray[np.floating], u: float) -> int:
    """The token at `u` in [0, 1] of the inverse CDF of `probs` [V], in float64 on the host.

    The mass need not sum to 1 (it is scaled by its own sum). A token without mass is never returned, whatever the
    rounding and even for u = 1. Raises NumericalError when there is no mass at all, or a NaN.
    """
    assert 0.0 <= u <= 1.0, f"u = {u} is not a uniform"
    row = probs.detach().cpu().double().numpy() if isinstance(probs, torch.Tensor) else np.asarray(probs, np.float64)
    cdf = np.cumsum(row)
    total = float(cdf[-1])
    if not (math.isfinite(total) and total > 0):
        raise NumericalError(f"the probabilities sum to {total}", row=0)
    first_above = int(np.searchsorted(cdf, u * total, side="right"))
    last_with_mass = int(np.searchsorted(cdf, total, side="left"))
    return min(first_above, last_with_mass)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[UniformSource]
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Tokens int64[R] and the very distributions [R, V] they were drawn from: what a sampling drafter hands over as q.

    A greedy row takes no uniform, any other row one. Raises NumericalError naming the request of the first bad row.
    """
    try:
        probs = distribution(logits, params)
    except NumericalError as error:
        raise error.named(generators[error.row].request_id) from error
    best = probs.argmax(dim=-1).tolist()
    tokens = [
        best[row] if each.is_greedy else sample(probs[row], float(generators[row].uniforms(1)[0]))
        for row, each in enumerate(params)
    ]
    return np.array(tokens, dtype=np.int64), probs


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Log-probability of tokens[r] under the raw logits of row r [R, V]: no temperature, no filter."""
    logits = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    return (logits.gather(1, chosen).squeeze(1) - logits.logsumexp(dim=-1)).tolist()


def top2_margins(logits: torch.Tensor) -> list[float]:
    """Best minus second-best raw logit of each row [R, V], V >= 2; inf where only one token is possible."""
    if logits.shape[-1] < 2:
        raise InputError("a margin needs a vocabulary of two tokens or more")
    best = logits.topk(2, dim=-1).values.double()
    return (best[:, 0] - best[:, 1]).tolist()
