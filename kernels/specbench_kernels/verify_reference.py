"""Float64 references of the sampling kernels, written literally over whole distributions: plain numpy, no kernel code.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (chains), Miao et al. 2024 "SpecInfer" (recursive rejection, with
replacement), Jeon et al. 2024 (without replacement), Sun et al. 2024, arXiv 2403.10444 (block verification).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Verdict = tuple[tuple[int, ...], int]
"""(accepted nodes from the root down, next token)."""

CHOSEN, INDEPENDENT, WITHOUT_REPLACEMENT = 0, 1, 2
GREEDY_EPSILON = 1e-5


def _column(parameter: torch.Tensor | None, rows: int, off: float) -> Floats:
    return np.full(rows, off) if parameter is None else parameter.double().cpu().numpy()


def _kept(scaled: Floats, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Which tokens of one row of scaled logits [V] the filters leave."""
    kept = np.ones(len(scaled), dtype=bool)
    if 0 < top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-top_k]
    if top_p < 1:
        mass = np.where(kept, np.exp(scaled), 0.0)
        mass /= mass.sum()
        # A token stays while the mass of strictly better tokens is below top_p.
        order = np.argsort(-scaled, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(mass[order])[:-1]])
        kept &= scaled >= scaled[order][before < top_p].min()
    if min_p > 0:
        kept &= np.exp(scaled) >= min_p
    return kept


def row_stats_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The fields of RowStats in float64 from logits [N, V], by sorting."""
    rows = logits.shape[0]
    values = logits.double().cpu().numpy()
    columns = [_column(each, rows, off) for each, off in ((temperature, 0.0), (top_p, 1.0), (min_p, 0.0), (top_k, 0.0))]
    found: dict[str, list[float]] = {
        name: [] for name in ("argmax", "maximum", "inv_temperature", "floor", "log_z", "bad")
    }
    for row, t, p, least, k in zip(values, *columns, strict=True):
        if np.isnan(row).any() or not np.isfinite(row.max()):
            stats = (-1, 0.0, 0.0, 0.0, 0.0, 1)
        elif t <= GREEDY_EPSILON:
            stats = (int(row.argmax()), row.max(), 0.0, 0.0, 0.0, 0)
        else:
            scaled = (row - row.max()) / t
            kept = _kept(scaled, int(k), p, least)
            filtered = 0 < k < len(row) or p < 1 or least > 0
            floor = scaled[kept & np.isfinite(scaled)].min() if filtered else -np.inf
            stats = (int(row.argmax()), row.max(), 1 / t, floor, np.log(np.exp(scaled[kept]).sum()), 0)
        for name, value in zip(found, stats, strict=True):
            found[name].append(value)
    integers = ("argmax", "bad")
    return {
        name: torch.tensor(column, dtype=torch.int64 if name in integers else torch.float64, device=logits.device)
        for name, column in found.items()
    }


def distribution_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [N, V]: the distribution of each row, NaN throughout a bad one."""
    stats = row_stats_reference(logits, temperature, top_p, min_p, top_k)
    values = logits.double()
    scaled = (values - stats["maximum"][:, None]) * stats["inv_temperature"][:, None].clamp(min=1e-300)
    # The floor is a scaled logit of this row, but rounded by another route: half a unit of slack keeps its own token.
    slack = 1e-12 * stats["floor"].abs()[:, None]
    p = torch.where(scaled >= stats["floor"][:, None] - slack, (scaled - stats["log_z"][:, None]).exp(), 0.0)
    for row in (stats["inv_temperature"] == 0).nonzero().flatten().tolist():
        p[row] = 0.0
        p[row, int(stats["argmax"][row])] = 1.0
    p[stats["bad"] == 1] = torch.nan
    return p


def sample_reference(mass: Floats, u: float) -> int:
    """The token at u of the inverse CDF of `mass` [V], which need not sum to 1; never one without mass."""
    cdf = np.cumsum(mass)
    above = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    return min(above, int(np.flatnonzero(mass)[-1]))


def greedy_reference(argmax: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Verdict:
    """Walk from the root to the child that holds the argmax, as long as there is one."""
    path: list[int] = []
    at = 0
    while True:
        children = [i for i in range(1, len(tokens)) if parents[i] == at and tokens[i] == argmax[at]]
        if not children:
            return tuple(path), int(argmax[at])
        at = children[0]
        path.append(at)


def sequential_reference(
    p: Floats, tokens: Sequence[int], parents: Sequence[int], q: Floats | None, siblings: int, coins: Floats
) -> Verdict:
    """One request's tree under the sequential rule: chosen siblings, or recursive rejection of sampled ones.

    `p` [T, V] row i the target's law after node i, `q` [T, V] row i the law that node i's position was drawn from,
    `coins` [T]: coin i judges node i, coin 0 draws the emitted token.
    """
    path: list[int] = []
    at = 0
    while True:
        children = [i for i in range(1, len(tokens)) if parents[i] == at]
        law = p[at].copy()
        draft = q[children[0]].copy() if q is not None and siblings != CHOSEN and children else None
        taken = None
        for node in children:
            token = tokens[node]
            if draft is None:
                if coins[node] < law[token]:
                    taken = node
                    break
                rest = law.copy()
                rest[token] = 0.0
            else:
                if draft.sum() <= 0:
                    break
                if coins[node] < law[token] / draft[token]:
                    taken = node
                    break
                rest = np.maximum(law - draft, 0.0)
                if siblings == WITHOUT_REPLACEMENT:
                    draft[token] = 0.0
                    draft /= max(draft.sum(), 1e-300)
            if rest.sum() > 0:
                law = rest / rest.sum()
        if taken is None:
            return tuple(path), sample_reference(law, float(coins[0]))
        path.append(taken)
        at = taken


def block_reference(
    p: Floats, tokens: Sequence[int], parents: Sequence[int], q: Floats | None, siblings: int, coins: Floats
) -> Verdict:
    """Block verification of one chain; arguments as `sequential_reference`."""
    last = len(tokens) - 1
    draft = np.zeros_like(p)
    for node in range(1, last + 1):
        if q is None or siblings == CHOSEN:
            draft[node, tokens[node]] = 1.0
        else:
            draft[node] = q[node]
    ratio, best, best_ratio = 1.0, 0, 1.0
    for node in range(1, last + 1):
        ratio = min(1.0, ratio * p[node - 1, tokens[node]] / draft[node, tokens[node]])
        if node == last:
            accept = ratio
        else:
            rest = np.maximum(ratio * p[node] - draft[node + 1], 0.0).sum()
            accept = rest / (rest + 1.0 - ratio) if rest + 1.0 - ratio > 0 else 1.0
        if coins[node] < accept:
            best, best_ratio = node, ratio
    law = p[best] if best == last else np.maximum(best_ratio * p[best] - draft[best + 1], 0.0)
    if law.sum() <= 0:
        law = p[best]
    return tuple(range(1, best + 1)), sample_reference(law, float(coins[0]))


def verify_sampled_reference(
    p: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    query_start: torch.Tensor,
    q: torch.Tensor | None,
    siblings: torch.Tensor,
    uniforms: torch.Tensor,
    greedy: torch.Tensor,
    method: str,
    width: int,
) -> dict[str, torch.Tensor]:
    """The packed batch, request by request, from the distributions `p` float64 [N, V]; a row with a NaN is bad.

    `greedy` bool [N]. Returns accepted, path [B, width], next_token and bad.
    """
    starts = query_start.tolist()
    found: dict[str, list[object]] = {"accepted": [], "path": [], "next_token": [], "bad": []}
    laws = p.cpu().numpy()
    drafts = None if q is None else q.double().cpu().numpy()
    rule = block_reference if method == "block" else sequential_reference
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        rows = slice(start, end)
        path: tuple[int, ...] = ()
        token, bad = -1, int(np.isnan(laws[rows]).any())
        if end > start and not bad:
            own, above = tokens[rows].tolist(), parents[rows].tolist()
            if bool(greedy[start]):
                path, token = greedy_reference(laws[rows].argmax(axis=1).tolist(), own, above)
            else:
                kind = int(siblings[index])
                draft = None if drafts is None else drafts[rows]
                path, token = rule(laws[rows], own, above, draft, kind, uniforms[rows].cpu().numpy())
        found["accepted"].append(len(path))
        found["path"].append([*path, *[-1] * (width - len(path))])
        found["next_token"].append(token)
        found["bad"].append(bad)
    return {
        name: torch.tensor(column, dtype=torch.int64 if name == "next_token" else torch.int32, device=p.device)
        for name, column in found.items()
    }
