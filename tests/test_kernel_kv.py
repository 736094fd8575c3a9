"""kv_write and kv_compact: values against float64 and bit for bit, slots that are nobody's, paths over themselves."""

from __future__ import annotations

import cmath
import math
import secrets
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, assert_close, bits, check
from specbench_kernels import kv_compact as compact_module
from specbench_kernels import kv_write as write_module
from specbench_kernels.checks import FP8
from specbench_kernels.kv_compact import kv_compact
from specbench_kernels.kv_write import encode_fp8, kv_write
from specbench_kernels.kv_write_reference import to_fp8
from specbench_kernels.op import Case


def generator() -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(secrets.randbits(31))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), device=DEVICE, dtype=torch.float32).to(dtype)


def anything(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, NaNs with payloads among them."""
    octets = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator(), device=DEVICE, dtype=torch.uint8)
    return octets.view(dtype)[..., 0]


def integers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---- kv_write


@pytest.mark.parametrize("case", write_module.OP.small(), ids=lambda case: case.name)
def test_kv_write_against_float64(case: Case) -> None:
    inputs, _ = check(write_module.OP, case)
    mapping, size = inputs["slot_mapping"], case["page_size"]
    real = mapping >= 0
    pages, offsets = mapping[real] // size, mapping[real] % size
    assert int((~real).sum()) == case["pads"]
    for name in ("k", "v"):
        # Slots that the step was not given keep every bit, and each given slot was written.
        after, before = (bits(inputs[f"{name}_{when}"]).clone() for when in ("cache", "before"))
        assert (after[pages, :, offsets] != before[pages, :, offsets]).any(-1).all()
        after[pages, :, offsets] = before[pages, :, offsets]
        assert torch.equal(after, before)
    assert torch.equal(bits(inputs["q_out"])[~real], bits(inputs["q_before"])[~real])
    v = inputs["qkv"].view(case["rows"], -1, case["head_dim"])[real, case["heads"] + case["kv_heads"] :]
    stored = inputs["v_cache"][pages, :, offsets]
    wanted = to_fp8(v, inputs["v_scale"], stored.dtype) if case["fp8_mantissa"] else v
    assert torch.equal(bits(stored), bits(wanted))


def arguments(
    rows: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 8, pages: int = 3, size: int = 4
) -> dict[str, Any]:
    dtype = torch.float64
    angles = torch.rand(32, dim // 2, generator=generator(), device=DEVICE, dtype=dtype) * 6
    return {
        "qkv": normal(rows, (heads + 2 * kv_heads) * dim, dtype=dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": torch.arange(rows, dtype=torch.int32, device=DEVICE),
        "slot_mapping": torch.arange(rows, device=DEVICE),
        "k_cache": normal(pages, kv_heads, size, dim, dtype=dtype),
        "v_cache": normal(pages, kv_heads, size, dim, dtype=dtype),
        "q_out": torch.full((rows, heads, dim), float("nan"), dtype=dtype, device=DEVICE),
        "num_heads": heads,
    }


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_rotation_is_multiplication_by_a_unit_complex_number(norm: bool) -> None:
    """Values i and i + D/2 of a head are one complex number; position p turns it by p times its frequency."""
    made = arguments(2, heads=3, kv_heads=1, dim=12)
    frequencies = [1.0 / 100.0 ** (2 * i / 12) for i in range(6)]
    angles = torch.tensor([[p * f for f in frequencies] for p in range(32)], dtype=torch.float64, device=DEVICE)
    weights = (normal(12, dtype=torch.float64), normal(12, dtype=torch.float64))
    made |= {"cos": angles.cos(), "sin": angles.sin(), "positions": integers(31, 7, dtype=torch.int32)}
    made |= {"slot_mapping": integers(9, 2), "q_norm": weights[0], "k_norm": weights[1], "eps": 0.5} if norm else {}
    out = kv_write(**made)
    assert out is made["q_out"]
    for row, position in enumerate((31, 7)):
        slot = int(made["slot_mapping"][row])
        for head in range(4):
            x = made["qkv"][row, head * 12 : head * 12 + 12].tolist()
            if norm:
                root = math.sqrt(math.fsum(value * value for value in x) / 12 + 0.5)
                x = [value / root * gain for value, gain in zip(x, weights[head == 3].tolist(), strict=True)]
            turned = [complex(x[i], x[i + 6]) * cmath.exp(1j * position * frequencies[i]) for i in range(6)]
            want = torch.tensor([z.real for z in turned] + [z.imag for z in turned], dtype=torch.float64)
            got = out[row, head] if head < 3 else made["k_cache"][slot // 4, 0, slot % 4]
            assert_close("turned", got.cpu(), want, (1e-13, 1e-13), f"row {row}, head {head}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pads_write_nothing(dtype: torch.dtype) -> None:
    """Two requests of drafts 4 and 1 in rows padded to 5 each: only their own slots change, bit for bit."""
    data = torch.float16 if dtype in FP8 else dtype
    rows, kv_heads, dim, size = 10, 2, 24, 4
    # A page before and a page behind each pool, where a wrong slot would fall.
    wholes = [anything((8, kv_heads, size, dim), dtype) for _ in range(2)]
    pools = [whole[1:-1] for whole in wholes]
    before = [bits(whole).clone() for whole in wholes]
    mapping = integers(13, 14, 15, 4, 5, 22, 20, -1, -1, -1)
    positions = integers(5, 6, 7, 8, 9, 2, 3, -1, 9, 0, dtype=torch.int32)
    q_out = anything((rows, 6, dim), data)
    q_before = bits(q_out).clone()
    kv_write(
        normal(rows, (6 + 2 * kv_heads) * dim, dtype=data),
        normal(10, dim // 2),
        normal(10, dim // 2),
        positions=positions,
        slot_mapping=mapping,
        k_cache=pools[0],
        v_cache=pools[1],
        q_out=q_out,
        num_heads=6,
    )
    for whole, old in zip(wholes, before, strict=True):
        changed = (bits(whole) != old).any(-1).any(1).flatten()
        assert changed.nonzero().flatten().tolist() == sorted((mapping[mapping >= 0] + size).tolist())
    assert (bits(q_out) != q_before).flatten(1).any(-1).tolist() == [True] * 7 + [False] * 3


def test_pools_and_projections_may_be_strided() -> None:
    made = arguments(5)
    plain = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in made.items()}
    want = kv_write(**plain)
    wide = torch.full((5, 80), float("nan"), dtype=torch.float64, device=DEVICE)
    wide[:, 8:72] = made["qkv"]
    # Layer 1 of K [pages, P, H, 5 layers, D] and of V [H, 5 layers, P, pages, D]: all strides are different.
    wholes = [
        torch.full(shape, 7.0, dtype=torch.float64, device=DEVICE) for shape in ((3, 4, 2, 5, 8), (2, 5, 4, 3, 8))
    ]
    layers = [wholes[0].permute(3, 0, 2, 1, 4), wholes[1].permute(1, 3, 0, 2, 4)]
    pools = [layer[1] for layer in layers]
    for pool, name in zip(pools, ("k_cache", "v_cache"), strict=True):
        pool.copy_(made[name])
    got = kv_write(**made | {"qkv": wide[:, 8:72], "k_cache": pools[0], "v_cache": pools[1]})
    assert torch.equal(got, want)
    assert torch.equal(pools[0], plain["k_cache"])
    assert torch.equal(pools[1], plain["v_cache"])
    assert all((layer[[0, 2, 3, 4]] == 7.0).all() for layer in layers)


@triton.jit
def encode_all(x, out, n, MANTISSA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, encode_fp8(tl.load(x + at, mask=at < n, other=0.0), MANTISSA), mask=at < n)


@pytest.mark.parametrize(
    ("dtype", "mantissa"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)], ids=["e4m3", "e5m2"]
)
def test_fp8_bytes_are_the_nearest(dtype: torch.dtype, mantissa: int) -> None:
    """Every finite byte, the midpoints between neighbours and their next floats, all fp16 values, infinities, NaN."""
    finite = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(to)) for to in (math.inf, 0.0))
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    special = torch.tensor([0.0, -0.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 1e-45, 1e-38])
    x = torch.cat([finite, middle, up, down, -middle, -up, -down, halves, special]).to(DEVICE)
    out = torch.full(x.shape, 0xAA, dtype=torch.uint8, device=DEVICE)
    encode_all[(triton.cdiv(x.numel(), 16384),)](x, out, x.numel(), MANTISSA=mantissa, BLOCK=16384)
    largest = torch.finfo(dtype).max
    got, want = out.view(dtype).float(), x.clamp(-largest, largest).to(dtype).float()
    assert torch.equal(got.isnan(), x.isnan())
    real = ~x.isnan()
    assert torch.equal(bits(got[real]), bits(want[real]))


def test_fp8_pools_hold_value_over_scale() -> None:
    made = arguments(4)
    made |= {name: made[name].float() for name in ("qkv", "q_out", "cos", "sin")}
    made["cos"].fill_(1.0)
    made["sin"].fill_(0.0)
    for name, scale in (("k", 0.5), ("v", 0.02)):
        made |= {
            f"{name}_cache": torch.zeros(3, 2, 4, 8, dtype=torch.float8_e4m3fn, device=DEVICE),
            f"{name}_scale": scale,
        }
    made["qkv"][0, 32] = 1e6
    kv_write(**made)
    rows = made["qkv"].view(4, 8, 8)
    for name, heads, scale in (("k", slice(4, 6), 0.5), ("v", slice(6, 8), 0.02)):
        stored = made[f"{name}_cache"].permute(0, 2, 1, 3).flatten(0, 1)[:4]
        assert torch.equal(bits(stored), bits(to_fp8(rows[:, heads], scale, stored.dtype)))
        inside = rows[:, heads].abs() < 448 * scale
        error = (stored.float() * scale - rows[:, heads]).abs()[inside]
        assert (error <= rows[:, heads].abs()[inside] / 16 + scale * 2**-10).all()
    assert made["k_cache"][0, 0, 0, 0].float() == 448.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qkv": torch.zeros(2, 60, dtype=torch.float64)}, r"qkv has shape \[2, 60\], expected \[2, 64\]"),
        ({"qkv": torch.zeros(2, 64)}, "qkv is float32, expected float64"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions is int64"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions has shape"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is int32"),
        ({"cos": torch.zeros(32, 8)}, "cos has shape"),
        ({"sin": torch.zeros(31, 4)}, "sin has shape"),
        ({"k_cache": torch.zeros(3, 2, 4, 8)}, "k_cache is float32, expected float64"),
        ({"k_cache": torch.zeros(3, 2, 8, 4, dtype=torch.float64).mT}, "k_cache has stride"),
        ({"v_cache": torch.zeros(3, 1, 4, 8, dtype=torch.float64)}, "v_cache has shape"),
        ({"k_cache": torch.zeros(3, 8, dtype=torch.float64)}, "k_cache has 2 dimensions"),
        ({"k_cache": torch.zeros(3, 2, 4, 8, dtype=torch.float8_e5m2)}, "k_cache is float8_e5m2"),
        ({"q_out": torch.zeros(2, 4, 7, dtype=torch.float64)}, "head dim 7"),
        ({"q_norm": torch.zeros(8, dtype=torch.float64)}, "go together"),
        ({"q_norm": torch.zeros(8), "k_norm": torch.zeros(8)}, "q_norm is float32"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"k_scale": 0.5}, "k_scale is 0.5, and the pools are not fp8"),
        ({"v_scale": 0.0}, "v_scale is 0.0"),
        ({"v_scale": math.inf}, "v_scale is inf"),
    ],
)
def test_kv_write_refuses(wrong: dict[str, Any], message: str) -> None:
    there = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in wrong.items()}
    with pytest.raises(ValueError, match=message):
        kv_write(**arguments(2) | there)


def test_kv_write_of_no_rows() -> None:
    assert kv_write(**arguments(0)).shape == (0, 4, 8)


# ---- kv_compact


@pytest.mark.parametrize("case", compact_module.OP.small(), ids=lambda case: case.name)
def test_kv_compact_bit_for_bit(case: Case) -> None:
    inputs, got = check(compact_module.OP, case)
    want = compact_module.OP.reference(inputs)
    for name in ("k", "v"):
        assert torch.equal(bits(got[name]), bits(want[name]))


ALL_TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, *FP8]


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
def test_path_over_its_own_slots(dtype: torch.dtype) -> None:
    """Parents -1, 0, 0, 1, 2, path 0, 2, 4 behind 3 cells: node 2's cell is source of a pair, target of the next."""
    table = [5, 2, 7, 0]  # cells 0.. lie in these pages of 2
    slots = [page * 2 + offset for page in table for offset in range(2)]
    pools = [anything((2, 8, 3, 2, 24), dtype) for _ in range(2)]
    before = [bits(pool).clone() for pool in pools]
    path, context = (0, 2, 4), 3
    source = integers(*(slots[context + node] for node in path), -1)[None]
    target = integers(*(slots[context + place] for place in range(3)), -1)[None]
    kv_compact(pools[0], pools[1], source=source, target=target)
    for pool, old in zip(pools, before, strict=True):
        want = old.clone()
        for place, node in enumerate(path):
            there, here = slots[context + place], slots[context + node]
            want[:, there // 2, :, there % 2] = old[:, here // 2, :, here % 2]
        assert torch.equal(bits(pool), want)
        # In the wrong order node 4 would have been moved twice.
        assert not torch.equal(want[:, slots[4] // 2, :, slots[4] % 2], want[:, slots[5] // 2, :, slots[5] % 2])


@pytest.mark.parametrize("moves", [7, 8, 9, 20])
def test_paths_longer_than_a_block(moves: int) -> None:
    """Sources 2, 4, 6, ... to 1, 2, 3, ...: a target of one block was a source of an earlier one."""
    pools = [anything((1, 11, 1, 4, 8), torch.bfloat16) for _ in range(2)]
    before = [bits(pool).clone() for pool in pools]
    target = torch.arange(1, moves + 1, device=DEVICE)[None]
    source = 2 * target
    assert compact_module._block_moves(moves) == min(8, triton.next_power_of_2(moves))
    kv_compact(pools[0], pools[1], source=source, target=target)
    for pool, old in zip(pools, before, strict=True):
        want = old.clone()
        for slot in range(1, moves + 1):
            want[:, slot // 4, :, slot % 4] = old[:, 2 * slot // 4, :, 2 * slot % 4]
        assert torch.equal(bits(pool), want)


def test_half_pairs_move_nothing() -> None:
    # A page before and a page behind each pool, where a wrong slot would fall.
    wholes = [anything((1, 5, 2, 4, 8), torch.float32) for _ in range(2)]
    pools = [whole[:, 1:-1] for whole in wholes]
    before = [bits(whole).clone() for whole in wholes]
    kv_compact(*pools, source=integers(-1, 3, 5, -1)[None], target=integers(2, -1, 5, -1)[None])
    kv_compact(*pools, source=integers()[None], target=integers()[None])
    kv_compact(*pools, source=integers()[:, None], target=integers()[:, None])
    for whole, old in zip(wholes, before, strict=True):
        assert torch.equal(bits(whole), old)


def test_compaction_of_strided_pools() -> None:
    """K as [pages, L, ...] seen as [L, pages, ...], V with the page's offset outermost: strides of their own each."""
    k = anything((5, 3, 2, 4, 8), torch.float16).transpose(0, 1)
    v = anything((4, 3, 5, 2, 8), torch.float16).permute(1, 2, 3, 0, 4)
    source, target = integers(9, 17, 6, -1).view(2, 2), integers(2, 9, 4, -1).view(2, 2)
    want = [compact_module.kv_compact_reference(pool.contiguous(), source, target) for pool in (k, v)]
    kv_compact(k, v, source=source, target=target)
    for pool, moved in zip((k, v), want, strict=True):
        assert torch.equal(bits(pool.contiguous()), bits(moved))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k_pool": torch.zeros(2, 3, 4, 8)}, "k_pool has 4 dimensions"),
        ({"k_pool": torch.zeros(1, 2, 3, 4, 8, dtype=torch.int32)}, "k_pool is int32"),
        ({"v_pool": torch.zeros(1, 2, 3, 4, 8, dtype=torch.float16)}, "v_pool is float16, expected float32"),
        ({"v_pool": torch.zeros(1, 2, 3, 4, 9)}, "v_pool has shape"),
        ({"v_pool": torch.zeros(1, 2, 3, 8, 4).mT}, "v_pool has stride"),
        ({"source": torch.zeros(2, 3, dtype=torch.int32)}, "source is int32"),
        ({"target": torch.zeros(2, 2, dtype=torch.int64)}, "target has shape"),
    ],
)
def test_kv_compact_refuses(wrong: dict[str, torch.Tensor], message: str) -> None:
    whole = {name: torch.zeros(1, 2, 3, 4, 8, device=DEVICE) for name in ("k_pool", "v_pool")}
    whole |= {name: torch.zeros(2, 3, dtype=torch.int64, device=DEVICE) for name in ("source", "target")}
    with pytest.raises(ValueError, match=message):
        kv_compact(**whole | {name: tensor.to(DEVICE) for name, tensor in wrong.items()})
