"""Routed experts: how many distinct ones a pass reads, and what they cost.

Each token multiplies its top_k experts, but a pass reads each expert that any token chose only once. For T tokens that
choose k of E independently and evenly, N(T) = E (1 - (1 - k/E)^T) are read (MoESD, arXiv 2505.19645, eq. 8). That is an
upper bound: uneven routing reads fewer (the function is concave), and neighbouring draft tokens choose alike, so a
measured union takes its place where there is one.
"""

from __future__ import annotations

import math

from specbench.errors import InputError
from specbench.roofline.cost_types import ZERO, Cost
from specbench.roofline.formats import Format, storage_bytes
from specbench.roofline.matrices import Matrix
from specbench.roofline.model_spec import MoeSpec


def expected_experts(num_experts: int, top_k: int, tokens: float) -> float:
    """N(T) = E (1 - (1 - k/E)^T): distinct experts that `tokens` tokens choose (MoESD eq. 8)."""
    return num_experts * (1.0 - math.pow(1.0 - top_k / num_experts, tokens))


def saturation_tokens(num_experts: int, top_k: int, share: float) -> float:
    """Tokens at which a `share` of all experts is read: ln(1 - share) / ln(1 - k/E) (MoESD eq. 9)."""
    if not 0 < share < 1:
        raise InputError(f"a share of {share}", key="share", remedy="choose a share between 0 and 1")
    return math.log(1 - share) / math.log(1 - top_k / num_experts) if top_k < num_experts else 0.0


def tokens_per_expert(num_experts: int, top_k: int, tokens: float) -> float:
    """Mean tokens of an expert that is read: T k / N(T) (MoESD eq. 10)."""
    return tokens * top_k / expected_experts(num_experts, top_k, tokens) if tokens else 0.0


def distinct_experts(moe: MoeSpec, tokens: float, measured: float | None) -> float:
    """Experts that one routed layer reads: the measured union (a mean over layers), or N(T).

    Raises InputError for a union that `tokens` tokens can't have.
    """
    if measured is None:
        return expected_experts(moe.num_experts, moe.top_k, tokens)
    if not 0 <= measured <= moe.num_experts or measured > moe.top_k * tokens * (1 + 1e-9):
        raise InputError(
            f"a union of {measured} experts of {moe.num_experts} for {tokens:g} tokens of {moe.top_k} each",
            key="distinct_experts",
            remedy="give the mean number of distinct experts a layer and pass",
        )
    return measured


def experts_cost(
    matrices: tuple[Matrix, ...], moe: MoeSpec, tokens: float, distinct: float, stored: Format, value_bytes: int
) -> Cost:
    """One routed layer: `matrices` of all E experts, 2 · T · k · 3 · d · d_e FLOPs, the weights of N experts, and T · k
    rows of activations in and out."""
    if not matrices or not tokens:
        return ZERO
    share, rows = 1 / moe.num_experts, tokens * moe.top_k
    params = sum(matrix.params for matrix in matrices) * share
    weights = sum(matrix.copies * storage_bytes(stored, matrix.rows, matrix.cols) for matrix in matrices) * share
    values = sum(matrix.values for matrix in matrices) * share
    return Cost(2.0 * rows * params, distinct * weights + rows * values * value_bytes)
