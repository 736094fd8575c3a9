"""Two runs of one case -> the log of their ratio, with a standard error that outliers and correlated blocks can't fool.

Block k of both runs decodes the same prompts, so blocks of the same prompts are compared with each other and what the
prompts do cancels. The model of a block's value v (tokens/s, or its ratio to the AR block beside it) is

    log v[g, run, r] = group[g] + delta * [run is the candidate] + noise

over groups g of blocks with the same prompts and repetitions r; `delta` is the log ratio. With one repetition it is the
paired t-test, with one group the two-sample one. Everything is done for many tests at once: arrays are
float64[tests, groups, 2, repetitions] (run 0 is the baseline, 1 the candidate), NaN where there is no block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

HUBER = 1.5
"""Where the estimate starts: residuals beyond so many standard deviations count as if they stood there."""
TUKEY = 4.685
"""Residuals beyond so many of their standard deviations do not count at all; 95 % efficient on normal noise."""
MANY = 20
"""Degrees of freedom from which on blocks may be left out."""
ROUNDS = 6
TRACE = 1e-6
MAD_TO_SD = 1.4826
MAX_CORRELATION = 0.8


@dataclass(frozen=True)
class Fit:
    """One entry a test; NaN where there is nothing to say.

    `delta`: log(candidate / baseline). `se`: its standard error from the scatter of blocks, independent noise assumed.
    `dof`: degrees of freedom of that error. `pairs`: groups that both runs have. `below`, `above`: blocks of the
    candidate so far down or up that they hardly count. `residuals`: as the input.
    """

    delta: FloatArray
    se: FloatArray
    dof: FloatArray
    pairs: NDArray[np.int64]
    below: NDArray[np.int64]
    above: NDArray[np.int64]
    residuals: FloatArray


def fit(values: FloatArray) -> Fit:
    """Robust estimate of the log ratio of `values` (logs; float64[tests, groups, 2, repetitions], NaN: none).

    With at least `MANY` degrees of freedom an MM-estimate: Tukey's biweight, started at Huber's estimate and with its
    scale, the median absolute residual (Maronna, Martin, Yohai & Salibian-Barrera, Robust Statistics, 2nd ed., section
    5.4). With fewer, Huber's itself: a scale from few blocks is too uncertain to throw blocks away by it.
    """
    there: NDArray[np.bool_] = np.isfinite(values)
    # A group that only one run has tells nothing of the ratio.
    in_both: NDArray[np.bool_] = np.all(np.any(there, axis=3), axis=2)
    there &= in_both[:, :, None, None]
    y = np.where(there, values, 0.0)
    count = there.sum(axis=(1, 2, 3))
    pairs = np.all(np.any(there, axis=3), axis=2).sum(axis=1)
    dof = np.maximum(count - pairs - 1, 0)
    weights = there.astype(np.float64)
    plain = pairing_weights(weights).sum(axis=1)
    scale = np.zeros(len(values))
    residuals, delta = _residuals(y, weights, there)
    for _ in range(ROUNDS):
        scale = _scale(residuals, there, count, dof)
        bound = HUBER * scale[:, None, None, None]
        size = np.abs(residuals)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(there, np.where(size > bound, bound / size, 1.0), 0.0)
        residuals, delta = _residuals(y, weights, there)
    bound = HUBER * scale[:, None, None, None]
    psi = np.clip(residuals, -bound, bound)
    se = _error(psi, np.where(there & (np.abs(residuals) <= bound), 1.0, 0.0), count, dof, plain)
    # A residual is shorter than the block's noise, the more so the more groups were fitted.
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = TUKEY * scale * np.sqrt(dof / count)
    reach = np.where(np.isfinite(reach), reach, 0.0)[:, None, None, None]
    many = dof >= MANY
    if many.any():
        told = _tukey(y[many], residuals[many], there[many], reach[many])
        residuals[many], delta[many], psi, slope = told
        se[many] = _error(psi, slope, count[many], dof[many], plain[many])
    out = there & (_relative(residuals, reach) >= 1)
    known = (pairs > 0) & (dof > 0)
    return Fit(
        np.where(pairs > 0, delta, np.nan),
        np.where(known, se, np.nan),
        np.where(known, dof, 0).astype(np.float64),
        pairs.astype(np.int64),
        (out & (residuals < 0))[:, :, 1].sum(axis=(1, 2)).astype(np.int64),
        (out & (residuals > 0))[:, :, 1].sum(axis=(1, 2)).astype(np.int64),
        np.where(there, residuals, np.nan),
    )


def _tukey(
    y: FloatArray, residuals: FloatArray, there: NDArray[np.bool_], reach: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Residuals, delta, psi and its slope of Tukey's biweight, started at `residuals`."""
    delta = np.zeros(len(y))
    for _ in range(ROUNDS):
        # A block left out keeps a trace of weight, so that its group still has a mean to be far from.
        weights = np.where(there, np.maximum((1 - _relative(residuals, reach) ** 2) ** 2, TRACE), 0.0)
        residuals, delta = _residuals(y, weights, there)
    u = _relative(residuals, reach)
    psi = np.where(there, residuals * (1 - u**2) ** 2, 0.0)
    return residuals, delta, psi, np.where(there, (1 - u**2) * (1 - 5 * u**2), 0.0)


def _error(
    psi: FloatArray, slope: FloatArray, count: NDArray[np.int64], dof: NDArray[np.int64], plain: FloatArray
) -> FloatArray:
    """Standard error of an M-estimate (Huber & Ronchetti, Robust Statistics, 2nd ed., eq. 7.81): the root of
    K^2 [sum psi^2 / dof] / m^2 / sum w, with m the mean of psi' (`slope`), K = 1 + (p / N) var(psi') / m^2, and w the
    pairing weights of the model, `plain` their sum. NaN where it isn't known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = slope.sum(axis=(1, 2, 3)) / count
        variance = (slope**2).sum(axis=(1, 2, 3)) / count - mean**2
        spread = (psi**2).sum(axis=(1, 2, 3)) / dof
        correction = 1 + (count - dof) / count * variance / mean**2
        return np.asarray(correction * np.sqrt(spread / plain) / np.abs(mean), dtype=np.float64)


def _relative(residuals: FloatArray, reach: FloatArray) -> FloatArray:
    """|residual| / reach, at most 1; 0 where nothing scatters."""
    with np.errstate(divide="ignore", invalid="ignore"):
        u = np.abs(residuals) / reach
    return np.where(reach > 0, np.minimum(u, 1.0), 0.0)


def pairing_weights(weights: FloatArray) -> FloatArray:
    """float64[tests, groups]: what a group says of the ratio, 1 / (1 / baseline's weight + 1 / candidate's)."""
    total = weights.sum(axis=3)
    both = total.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(both > 0, total[:, :, 0] * total[:, :, 1] / both, 0.0)


def _residuals(y: FloatArray, weights: FloatArray, there: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """Weighted least squares: residuals and delta. The normal equations of the model have this closed form."""
    total = weights.sum(axis=3)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(total > 0, (weights * y).sum(axis=3) / total, 0.0)
        share = pairing_weights(weights)
        delta = (share * (mean[:, :, 1] - mean[:, :, 0])).sum(axis=1) / share.sum(axis=1)
        both = total.sum(axis=2)
        shifted = mean.copy()
        shifted[:, :, 1] -= delta[:, None]
        group = np.where(both > 0, (total * shifted).sum(axis=2) / both, 0.0)
    fitted = np.stack([group, group + delta[:, None]], axis=2)
    return np.where(there, y - fitted[..., None], 0.0), delta


def _scale(
    residuals: FloatArray, there: NDArray[np.bool_], count: NDArray[np.int64], dof: NDArray[np.int64]
) -> FloatArray:
    """Standard deviation of a block from the median absolute residual; residuals are shorter than the noise by
    sqrt(dof / count), since the groups were fitted to them."""
    size = np.sort(np.where(there, np.abs(residuals), np.inf).reshape(len(residuals), -1), axis=1)
    rows = np.arange(len(size))
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    high = np.minimum(high, np.maximum(count - 1, 0))
    middle = (size[rows, low] + size[rows, high]) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = MAD_TO_SD * middle * np.sqrt(count / dof)
    return np.where(np.isfinite(scale), scale, 0.0)


def serial(residuals: FloatArray, order: FloatArray) -> FloatArray:
    """float64[tests, 4]: what each test tells of the correlation of blocks that follow each other, for `pooled`.

    `order` has the shape of `residuals` and sorts the blocks of a run in time. Columns: sum of products of
    neighbours and its scale (both over the test's own variance), blocks, runs.
    """
    tests = len(residuals)
    flat = np.moveaxis(residuals, 2, 1).reshape(tests, 2, -1)
    ranks = np.moveaxis(np.where(np.isfinite(residuals), order, np.inf), 2, 1).reshape(tests, 2, -1)
    line = np.take_along_axis(flat, np.argsort(ranks, axis=2, kind="stable"), axis=2)
    # Winsorised as in the fit, or a single outlier would set the correlation of the whole family.
    bound = HUBER * MAD_TO_SD * _nan_median(np.abs(line).reshape(tests, -1))[:, None, None]
    line = np.clip(line, -bound, bound)
    product = np.nan_to_num(line[:, :, 1:] * line[:, :, :-1]).sum(axis=(1, 2))
    square = np.nan_to_num(line**2).sum(axis=2)
    size = np.isfinite(line).sum(axis=2)
    several = size > 1
    scaled = np.where(several, square * (size - 1) / np.maximum(size, 1), 0.0).sum(axis=1)
    runs = several.sum(axis=1)
    weight = np.where(scaled > 0, runs / np.where(scaled > 0, scaled, 1.0), 0.0)
    blocks = np.where(several, size, 0).sum(axis=1)
    return np.stack([product * weight, scaled * weight, blocks, runs], axis=1).astype(np.float64)


def pooled(told: FloatArray, family: NDArray[np.int64]) -> FloatArray:
    """Lag-1 correlation of the noise of a family's blocks, one value a test, from what `serial` tells of each.

    A run's residuals have their mean taken out, which pulls the plain estimate from n blocks down by about
    (1 + 3 rho) / n (Marriott & Pope, Biometrika 41, 1954); it is put back. Negative estimates count as none.
    """
    families = int(family.max(initial=-1)) + 1
    top, bottom, blocks, runs = (np.bincount(family, column, families) for column in told.T)
    plain = np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1.0), 0.0)
    size = blocks / np.maximum(runs, 1)
    back = np.where(size > 4, (plain + 1 / np.maximum(size, 1)) / (1 - 3 / np.maximum(size, 5)), plain)
    return np.asarray(np.clip(back, 0.0, MAX_CORRELATION)[family], dtype=np.float64)


def _nan_median(values: FloatArray) -> FloatArray:
    """The median of each row's finite values, 0 where there is none."""
    count = np.isfinite(values).sum(axis=1)
    ordered = np.sort(np.where(np.isfinite(values), values, np.inf), axis=1)
    rows, last = np.arange(len(values)), np.maximum(count - 1, 0)
    middle = (ordered[rows, last // 2] + ordered[rows, np.minimum(count // 2, last)]) / 2
    return np.where(count > 0, middle, 0.0)


def inflated(se: FloatArray, dof: FloatArray, rho: FloatArray, run_sd: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Standard error and degrees of freedom when blocks are correlated (AR(1) with `rho`) and runs differ by themselves
    (`run_sd`: sd of the log of a run's value from run to run, which no block of one run can show).

    The variance of a mean of correlated blocks is (1 + rho) / (1 - rho) times that of independent ones, and what they
    tell of the variance shrinks by (1 - rho^2) / (1 + rho^2); the two parts are joined as by Welch and Satterthwaite.
    """
    blocks = se**2 * (1 + rho) / (1 - rho)
    shrunk = np.maximum(dof * (1 - rho**2) / (1 + rho**2), 1.0)
    total = blocks + 2 * run_sd**2
    with np.errstate(divide="ignore", invalid="ignore"):
        joined = np.where(blocks > 0, shrunk * (total / np.where(blocks > 0, blocks, 1.0)) ** 2, np.inf)
    return np.sqrt(total), np.minimum(joined, 1e6)
