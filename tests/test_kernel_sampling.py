"""philox_uniforms, row_stats and probabilities, against their references and the host's own sampling."""

from __future__ import annotations

import dataclasses
import math
import secrets

import numpy as np
import pytest
import torch
from specbench_kernels import philox, processors
from specbench_kernels.op import Case, Op, Outputs
from specbench_kernels.philox import philox_reference, philox_uniforms, uniforms_reference
from specbench_kernels.processors import RowStats, StatsWorkspace, probabilities, row_stats
from specbench_kernels.verify_reference import distribution_reference

from specbench.engine.sampling import RequestGenerator, SamplingParams, distribution

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def assert_close(op: Op, case: Case, found: Outputs, expected: Outputs, seed: int) -> None:
    relative, absolute = op.tolerance(case)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        have = found[name].double()
        error = (have - want.double()).abs() - relative * want.double().abs()
        assert bool((error <= absolute).all()), f"{case.name}, seed {seed}: {name} is off by {float(error.max())}"


@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op.name} {case.name}") for op in (philox.OP, *processors.OPS) for case in op.small()],
)
def test_ops_equal_their_references(op: Op, case: Case) -> None:
    seed = secrets.randbits(32)
    inputs = op.inputs(case, CPU, seed)
    assert_close(op, case, op.run(inputs), op.reference(inputs), seed)


# Philox -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_published_vectors(word: int, expected: tuple[int, ...]) -> None:
    counter, key = np.full(4, word, dtype=np.uint32), np.full(2, word, dtype=np.uint32)
    assert tuple(philox_reference(counter, key).tolist()) == expected


def test_philox_gives_the_published_vector_of_pi() -> None:
    counter = np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], dtype=np.uint32)
    key = np.array([0xA4093822, 0x299F31D0], dtype=np.uint32)
    assert philox_reference(counter, key).tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_coins_are_those_of_the_hosts_generator() -> None:
    """Drafts get the next numbers in order, the root's row the last one; pads and neighbours change nothing."""
    counts, used = (3, 0, 1, 5), (0, 9, 41, 2**33)
    generators = [RequestGenerator(seed, f"request {seed}") for seed in range(4)]
    starts = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    keys = torch.from_numpy(np.array([each.key for each in generators], dtype=np.uint64).view(np.int64))
    out = torch.full((11,), -1.0, dtype=torch.float64)
    philox_uniforms(keys, torch.tensor(used), starts, out)
    for generator, count, first, start in zip(generators, counts, used, starts.tolist(), strict=False):
        generator.num_drawn = first
        coins = generator.uniforms(count)
        rows = out[start : start + count].tolist()
        assert rows[1:] + rows[:1] == coins.tolist()
        assert coins.tolist() == uniforms_reference(generator.key, first, count).tolist()
    assert out[9:].tolist() == [-1.0, -1.0]


def test_coins_refuse_what_does_not_fit() -> None:
    keys, starts = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="offsets"):
        philox_uniforms(keys, keys[:1], starts, out)
    with pytest.raises(ValueError, match="out is float32"):
        philox_uniforms(keys, keys, starts, out.float())
    with pytest.raises(ValueError, match="query_start"):
        philox_uniforms(keys, keys, starts[:2], out)


# The processors -----------------------------------------------------------------------------------------------------


def stats_of(logits: torch.Tensor, params: list[SamplingParams], **options: int) -> RowStats:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(each, name) for each in params], dtype=dtype)

    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return row_stats(
        logits,
        temperature=column("temperature", kind),
        top_p=column("top_p", kind),
        min_p=column("min_p", kind),
        top_k=column("top_k", torch.int32),
        **options,
    )


MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=2.5, top_k=9, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.0, top_k=2, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, top_k=1),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 50])
def test_distributions_are_the_hosts(dtype: torch.dtype, vocab_size: int) -> None:
    """Fresh logits; half precision makes many ties. The same tokens are kept, the same probabilities given."""
    seed = secrets.randbits(32)
    logits = (2 * torch.randn(len(MIXED), vocab_size, generator=torch.Generator().manual_seed(seed))).to(dtype)
    logits[0, 2] = -INF
    out = torch.full(logits.shape, NAN, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    p = probabilities(logits, stats_of(logits, MIXED), out)
    assert p is out
    expected = distribution(logits, MIXED)
    assert torch.equal(p > 0, expected > 0), f"seed {seed}"
    assert torch.allclose(p, expected, rtol=1e-12 if dtype == torch.float64 else 2e-6, atol=0), f"seed {seed}"


TIES = [
    ([1.0, 2.0, 2.0, 1.0, 1.0], {"top_k": 1}, [1, 2]),
    ([1.0, 2.0, 2.0, 1.0, 0.0], {"top_k": 3}, [0, 1, 2, 3]),
    ([0.0, 0.0, 0.0, 0.0, 0.0], {"top_p": 0.1}, [0, 1, 2, 3, 4]),
    ([5.0, 5.0, 0.0, 0.0, -9.0], {"top_p": 0.5}, [0, 1]),
    ([0.0, -INF, 0.0, -INF, 0.0], {"top_k": 4}, [0, 2, 4]),
    ([3.0, 1.0, 1.0, 1.0, 0.0], {"top_k": 2, "top_p": 0.9}, [0, 1, 2, 3]),
    ([3.0, 3.0, 1.0, 1.0, 0.0], {"min_p": 1.0}, [0, 1]),
    ([2.0, 1.0, 0.0, 0.0, -1.0], {"top_k": 5}, [0, 1, 2, 3, 4]),
    ([-0.0, 0.0, -1.0, -0.0, -1.0], {"top_k": 2}, [0, 1, 3]),
]


def test_tokens_tied_at_a_border_are_kept_together() -> None:
    for kind, cases in ((torch.float32, TIES), (torch.float64, TIES[1::3])):
        logits = torch.tensor([row for row, _, _ in cases], dtype=kind)
        params = [SamplingParams(temperature=1.0, **filters) for _, filters, _ in cases]  # type: ignore[arg-type]
        p = probabilities(logits, stats_of(logits, params))
        for row, (values, filters, kept) in enumerate(cases):
            assert (p[row] > 0).nonzero().flatten().tolist() == kept, (values, filters)
        assert torch.equal(p > 0, distribution(logits, params) > 0)


def test_neighbouring_floats_are_told_apart() -> None:
    """The threshold is exact to the last bit of the scaled logit."""
    # Distances from the best token: 3, and 3 plus 1 to 3 units of the last place.
    values = [torch.tensor(6.0), torch.tensor(3.0)]
    for _ in range(3):
        values.append(torch.nextafter(values[-1], torch.tensor(0.0)))
    logits = torch.stack(values).expand(4, 5).contiguous()
    p = probabilities(logits, stats_of(logits, [SamplingParams(temperature=1.0, top_k=k) for k in range(1, 5)]))
    assert (p > 0).sum(dim=1).tolist() == [1, 2, 3, 4]


def test_rows_at_temperature_zero_are_greedy_beside_sampled_ones() -> None:
    """Temperatures 0, 1e-6 and .8 in one batch: the lowest id among ties, one-hot, and a distribution."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF]] * 4)
    params = [SamplingParams(temperature=t) for t in (0.0, 1e-6, 0.8, 1e-5)]
    stats = stats_of(logits, params)
    p = probabilities(logits, stats)
    for row in (0, 1, 3):
        assert p[row].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert stats.inv_temperature.tolist() == pytest.approx([0, 0, 1.25, 0])
    assert torch.allclose(p[2], distribution(logits[2:3], params[2:3])[0])
    assert bool(torch.isfinite(p).all())


def test_rows_without_a_distribution_are_flagged_and_give_no_token() -> None:
    """V = 5 in one block of 16 and V = 37 in three: NaN, +inf and nothing but -inf, beside good rows."""
    for size in (5, 37):
        logits = torch.zeros(6, size)
        logits[1, size - 1] = NAN
        logits[2, 0] = INF
        logits[3] = -INF
        logits[4, 0], logits[4, size - 1] = INF, NAN
        params = [SamplingParams(temperature=1.0, top_k=2, top_p=0.5)] * 5 + [SamplingParams()]
        for rows in (logits, logits.double()):
            stats = stats_of(rows, params, block=16)
            assert stats.bad.tolist() == [0, 1, 1, 1, 1, 0]
            assert stats.argmax.tolist() == [0, -1, -1, -1, -1, 0]
            p = probabilities(rows, stats)
            assert bool(p[1:5].isnan().all())
            assert p[0].tolist() == [pytest.approx(1 / size)] * size
            assert p[5].tolist() == [1.0] + [0.0] * (size - 1)


def test_a_row_depends_neither_on_its_neighbours_nor_on_the_split() -> None:
    seed = secrets.randbits(32)
    logits = 3 * torch.randn(3, 300, generator=torch.Generator().manual_seed(seed))
    params = [MIXED[4], MIXED[2], MIXED[5]]
    whole = stats_of(logits, params)
    for row, each in enumerate(params):
        alone = stats_of(logits[row : row + 1], [each])
        for name, field in vars(whole).items():
            assert torch.equal(field[row : row + 1], getattr(alone, name)), f"seed {seed}: {name}"
    split = stats_of(logits, params, block=32)
    for name in ("argmax", "maximum", "inv_temperature", "floor", "bad"):
        assert torch.equal(getattr(whole, name), getattr(split, name)), f"seed {seed}: {name}"
    assert torch.allclose(whole.log_z, split.log_z, rtol=0, atol=1e-7)


def test_strided_rows_and_given_room() -> None:
    """Rows of a wider matrix; `out` and `workspace` are used as they are, poisoned before."""
    seed = secrets.randbits(32)
    wide = torch.randn(2, 40, generator=torch.Generator().manual_seed(seed))
    wide[:, 33:] = NAN
    logits, temperature = wide[:, :33], torch.tensor([1.0, 0.5])
    out = RowStats.empty(2, torch.float32, CPU)
    workspace = StatsWorkspace.empty(5, 33, torch.float32, CPU)
    for field in [*vars(out).values(), *vars(workspace).values()]:
        field.fill_(NAN if field.is_floating_point() else -9)
    assert row_stats(logits, temperature=temperature, out=out, workspace=workspace) is out
    room = torch.full((2, 50), NAN)
    p = probabilities(logits, out, room[:, :33])
    assert torch.allclose(p.double(), distribution_reference(logits, temperature), atol=1e-6), f"seed {seed}"
    assert bool(room[:, 33:].isnan().all())
    assert not workspace.block_max[:2].isnan().any()
    assert row_stats(logits[:0], temperature=temperature[:0]).argmax.shape == (0,)


def test_the_processors_refuse_what_does_not_fit() -> None:
    logits, temperature = torch.zeros(2, 8), torch.ones(2)
    with pytest.raises(ValueError, match="temperature has shape"):
        row_stats(logits, temperature=temperature[:1])
    with pytest.raises(ValueError, match="top_k is int64"):
        row_stats(logits, temperature=temperature, top_k=torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="stride"):
        row_stats(torch.zeros(8, 2).T, temperature=temperature)
    with pytest.raises(ValueError, match="logits is int64"):
        row_stats(logits.long(), temperature=temperature)
    with pytest.raises(ValueError, match="workspace has 1 rows"):
        row_stats(logits, temperature=temperature, workspace=StatsWorkspace.empty(1, 8, torch.float32, CPU))
    stats = row_stats(logits, temperature=temperature)
    with pytest.raises(ValueError, match=r"stats.maximum is float32"):
        probabilities(logits.double(), stats)
    with pytest.raises(ValueError, match=r"stats.argmax has shape"):
        probabilities(logits[:1], stats)
    with pytest.raises(ValueError, match="out is float64"):
        probabilities(logits, stats, logits.double())
    with pytest.raises(ValueError, match="not contiguous"):
        probabilities(logits, dataclasses.replace(stats, bad=torch.zeros(4, dtype=torch.int32)[::2]))
