"""The exact checker of verification laws.

A verdict is piecewise constant in the uniforms, with rational breakpoints made of p and q: `outcomes` feeds 3 points
of every cell, insists on one verdict a cell, and weighs it by the exact volume of the cell, so laws are compared as
fractions, with no tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as F

import numpy as np
import torch

from specbench.engine.verify import Verification

Row = tuple[F, ...]
Context = tuple[int, ...]
Model = Callable[[Context], Row]
Rule = Callable[[torch.Tensor, np.ndarray, torch.Tensor | None, np.ndarray], Verification]


def tensor(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def normalised(weights: Sequence[F | int]) -> Row:
    total = sum(weights)
    return tuple(F(weight) / total for weight in weights)


def residual(p: Row, q: Row) -> Row:
    left = [max(a - b, F(0)) for a, b in zip(p, q, strict=True)]
    return normalised(left) if sum(left) else p


def point_mass(token: int, size: int) -> Row:
    return tuple(F(int(token == other)) for other in range(size))


def cells(breakpoints: Iterator[F] | Sequence[F]) -> list[tuple[F, F]]:
    inner = sorted({F(0), F(1), *(x for x in breakpoints if 0 < x < 1)})
    return list(itertools.pairwise(inner))


def outcomes(rule: Rule, p: Sequence[Row], draft: Context, q: Sequence[Row] | None) -> dict[Context, F]:
    """Law of what `rule` emits for one draft: {emitted tokens: probability}."""
    size, count = len(p[0]), len(draft)
    given_q = [point_mass(token, size) for token in draft] if q is None else list(q)
    coins = [cells([p[i][x] / given_q[i][x]]) for i, x in enumerate(draft)]
    finals = [p[count], *(residual(p[i], given_q[i]) for i in range(count))]
    coins.append(cells([cut for row in finals for cut in itertools.accumulate(row)]))
    law: dict[Context, F] = defaultdict(F)
    arguments = tensor(p), np.array(draft, dtype=np.int64), None if q is None else tensor(q)
    for cell in itertools.product(*coins):
        seen = set()
        for share in (F(1, 1000), F(1, 2), F(999, 1000)):
            uniforms = np.array([float(low + (high - low) * share) for low, high in cell])
            seen.add(rule(*arguments, uniforms).tokens)
        assert len(seen) == 1, f"the verdict changes within the cell {cell}: {seen}"
        law[seen.pop()] += math.prod(high - low for low, high in cell)
    return law


def sequence_law(target: Model, length: int, root: Context = ()) -> dict[Context, F]:
    law = {root: F(1)}
    for _ in range(length):
        law = {
            (*context, token): mass * share
            for context, mass in law.items()
            for token, share in enumerate(target(context))
            if mass * share
        }
    return law


def emitted_law(rule: Rule, target: Model, draft: Model, depth: int, hand_over: Model | None = None) -> dict:
    """Law of one step's emission, over all drafts of `depth` tokens sampled from `draft`.

    `hand_over` is the q that the verifier is told, where it isn't the one that was sampled from; None means the same.
    """
    law: dict[Context, F] = defaultdict(F)
    for tokens, mass in sequence_law(draft, depth).items():
        prefixes = [tokens[:i] for i in range(depth + 1)]
        told = [(hand_over or draft)(prefix) for prefix in prefixes[:-1]]
        for emitted, share in outcomes(rule, [target(prefix) for prefix in prefixes], tokens, told).items():
            law[emitted] += mass * share
    return law


def chosen_law(rule: Rule, target: Model, tokens: Context) -> dict[Context, F]:
    return outcomes(rule, [target(tokens[:i]) for i in range(len(tokens) + 1)], tokens, None)


def completed(law: dict[Context, F], target: Model, length: int) -> dict[Context, F]:
    """Emissions, continued by the target to `length` tokens."""
    result: dict[Context, F] = defaultdict(F)
    for emitted, mass in law.items():
        for sequence, share in sequence_law(target, length - len(emitted), emitted).items():
            result[sequence] += mass * share
    return {sequence: mass for sequence, mass in result.items() if mass}


def first_token_law(law: dict[Context, F], size: int) -> Row:
    return tuple(sum((mass for emitted, mass in law.items() if emitted[0] == token), F(0)) for token in range(size))


def mean_emitted(law: dict[Context, F]) -> F:
    return sum((len(emitted) * mass for emitted, mass in law.items()), F(0))


def constant(*row: F | float | str) -> Model:
    exact = tuple(F(str(x)) if isinstance(x, float) else F(x) for x in row)
    return lambda context: exact


def history_target(context: Context) -> Row:
    k = (7 * sum((i + 1) * (t + 1) for i, t in enumerate(context)) + 3 * len(context)) % 5
    return normalised((1 + k, 3 + (2 * k) % 4, 2 + (3 * k) % 5))


def history_draft(context: Context) -> Row:
    k = (5 * sum((i + 2) * (t + 1) for i, t in enumerate(context)) + len(context)) % 4
    return normalised((4 - k, 1 + k, 2))


def four_tokens(context: Context) -> Row:
    """A target with impossible tokens."""
    k = (3 * sum((i + 1) * (t + 2) for i, t in enumerate(context)) + len(context)) % 4
    return normalised((k, 4 - k, 0 if k == 2 else 1, 2))


def four_drafts(context: Context) -> Row:
    """A drafter with impossible tokens, not those of `four_tokens`."""
    k = (sum(context) + 2 * len(context)) % 3
    return normalised((1, k, 2, 0 if k == 1 else 3))
