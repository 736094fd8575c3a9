"""Backend `cpu` against the torch reference in float64, and what it promises beyond it: bits and untouched memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_tools import Weights, empty, feed, history_logits, make_decoder, prompts, tiny_spec, wide_weights

from specbench.engine.models.decoder import DTYPES, Decoder
from specbench.engine.ops import revision
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.cpu import CpuOps, PackedLinear, pack_panels
from specbench.roofline.shapes import ModelSpec

# RMS difference from float64 arithmetic on the same stored weights, relative to the spread of the logits: about three
# times what was seen over 40 seeds. What is left to fp16 and bf16 is the rounding of the KV cache.
TOLERANCES = {"fp64": 1e-14, "fp32": 3e-6, "fp16": 2e-3, "bf16": 1.5e-2}
LARGEST = 20.0
SPECS = {
    "llama": tiny_spec(),
    "mistral": tiny_spec(
        family="mistral",
        sliding_window=9,
        sliding_layers=(True, False),
        num_kv_heads=1,
        head_dim=24,
        hidden_size=56,
        vocab_size=16,
    ),
    "qwen2": tiny_spec(
        family="qwen2",
        qkv_bias=True,
        mlp_bias=True,
        output_bias=True,
        tie_word_embeddings=True,
        num_heads=4,
        num_kv_heads=4,
        head_dim=80,
        vocab_size=33,
        intermediate_size=600,
    ),
    "qwen3": tiny_spec(family="qwen3", qk_norm=True, head_dim=96, tie_word_embeddings=True),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rounded(weights: Weights, dtype: str) -> Weights:
    """The stored values, in float64: only arithmetic and the KV cache's rounding differ then."""
    return {name: tensor.to(DTYPES[dtype]).double() for name, tensor in weights.items()}


def fresh_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: str, what: str) -> None:
    """RMS error within the dtype's tolerance, and no element further off than LARGEST times that."""
    errors = (found.double() - expected) / expected.std()
    rms, largest = float(errors.pow(2).mean().sqrt()), float(errors.abs().max())
    where = np.unravel_index(int(errors.abs().argmax()), tuple(errors.shape))
    message = f"{what}: RMS error {rms:.1e}, largest {largest:.1e} at {tuple(int(i) for i in where)}"
    assert rms < TOLERANCES[dtype], message
    assert largest < LARGEST * TOLERANCES[dtype], message


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SPECS)
def test_every_dtype_against_the_reference_in_float64(name: str, dtype: str) -> None:
    """New random weights and texts every time: one pass of ragged prefills, then verify passes of odd sizes."""
    spec, seed = SPECS[name], fresh_seed()
    weights = rounded(wide_weights(spec, seed), dtype)
    ours = make_decoder(spec, weights, dtype=dtype)
    reference = make_decoder(spec, weights, backend="torch")
    texts = prompts(spec, [17, 1, 30, 9], seed)
    stream = np.random.default_rng(seed)
    for _ in range(4):
        found, expected = feed(ours, texts), feed(reference, texts)
        assert found.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
        assert_near(found, expected, dtype, f"seed {seed}")
        texts = prompts(spec, [int(n) for n in stream.integers(1, 7, 4)], seed)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_number_of_rows(dtype: str) -> None:
    """1 to 40 rows of one request: every tile of the micro-kernel and of the attention, and pages begun midway."""
    spec, seed = SPECS["llama"], fresh_seed()
    weights = rounded(wide_weights(spec, seed), dtype)
    ours, reference = make_decoder(spec, weights, dtype=dtype), make_decoder(spec, weights, backend="torch")
    text = prompts(spec, [43], seed)[0]
    expected = feed(reference, [text])
    feed(ours, [text[:3]])
    for rows in range(1, 41):
        found = feed(ours, [text[3 : 3 + rows]], commit=False)
        assert_near(found, expected[3 : 3 + rows], dtype, f"{rows} rows, seed {seed}")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_stored_keys_and_values_are_rounded_to_nearest_even(name: str, dtype: str) -> None:
    """Layer 0's K and V are those of fp32 arithmetic on the same weights, rounded once, bit for bit."""
    spec, seed = SPECS[name], fresh_seed()
    weights = rounded(wide_weights(spec, seed), dtype)
    narrow, wide = make_decoder(spec, weights, dtype=dtype), make_decoder(spec, weights, dtype="fp32")
    texts = prompts(spec, [17, 1, 30, 9], seed)
    for decoder in (narrow, wide):
        feed(decoder, texts)
    for pool in ("k_pool", "v_pool"):
        assert torch.equal(getattr(narrow.kv, pool)[0], getattr(wide.kv, pool)[0].to(DTYPES[dtype])), f"seed {seed}"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SPECS)
def test_a_rows_logits_are_the_same_bits_in_every_batch(name: str, dtype: str) -> None:
    """Token by token, all at once, in pieces beside other requests, and on one thread or two."""
    spec = SPECS[name]
    weights = wide_weights(spec, 5)
    texts = prompts(spec, [37, 5, 18, 26])
    torch.set_num_threads(1)
    decoder = make_decoder(spec, weights, dtype=dtype, max_rows=96)
    one_by_one = [torch.cat([feed(decoder, [[token]]) for token in texts[0]])]
    empty(decoder)
    one_by_one += [history_logits(decoder, text) for text in texts[1:]]
    at_once = history_logits(decoder, texts[0])
    assert torch.equal(at_once, one_by_one[0])

    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        decoder = make_decoder(spec, weights, dtype=dtype, max_rows=96)
        assert decoder.ops.num_threads == num_threads
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            together = feed(decoder, [texts[i] for i in order], order)
            assert torch.equal(together, torch.cat([one_by_one[i] for i in order]))
            empty(decoder)
        done = [0, 0, 0, 0]
        stream = np.random.default_rng(num_threads)
        while any(at < len(text) for at, text in zip(done, texts, strict=True)):
            busy = [i for i in stream.permutation(4) if done[i] < len(texts[i])]
            pieces = [texts[i][done[i] : done[i] + int(stream.integers(1, 12))] for i in busy]
            found = feed(decoder, pieces, busy)
            expected = [one_by_one[i][done[i] : done[i] + len(p)] for i, p in zip(busy, pieces, strict=True)]
            assert torch.equal(found, torch.cat(expected))
            for i, piece in zip(busy, pieces, strict=True):
                done[i] += len(piece)


def poison(decoder: Decoder, value: float) -> None:
    """Fill the KV pool, every activation buffer and the scratch space."""
    decoder.kv.k_pool.fill_(value)
    decoder.kv.v_pool.fill_(value)
    if decoder.backend == "cpu":
        for buffer in decoder.ops._buffers.values():
            buffer.fill_(value)
        decoder.ops._scratch.fill_(255)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_poison_is_never_read_and_nothing_else_is_written(name: str, dtype: str, backend: str) -> None:
    """Fault 45. NaN everywhere but in what was fed gives the same bits; every other place of the pool keeps its NaN."""
    spec = SPECS[name]
    weights = wide_weights(spec, 6)
    clean = make_decoder(spec, weights, dtype=dtype, backend=backend)
    dirty = make_decoder(spec, weights, dtype=dtype, backend=backend)
    rounds = [[12, 3, 1], [4, 1, 2], [1, 5, 30]]
    feed(dirty, prompts(spec, [40]))
    empty(dirty)
    poison(dirty, float("nan"))
    for number, lengths in enumerate(rounds):
        texts = prompts(spec, lengths, number)
        slots = [3, 0, 1]
        expected, found = feed(clean, texts, slots), feed(dirty, texts, slots)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if backend == "cpu" else 1e-2)

    kv = dirty.kv
    written = torch.zeros(kv.num_pages, 16, dtype=torch.bool)
    for slot, length in enumerate(kv.lengths):
        for index in range(int(length)):
            written[kv.block_table[slot, index // 16], index % 16] = True
    nan_k, nan_v = kv.k_pool.isnan(), kv.v_pool[..., : spec.head_dim].isnan()
    assert torch.equal(nan_k.all(dim=3), (~written)[None, :, None].expand_as(nan_k.all(dim=3)))
    assert torch.equal(nan_k.any(dim=3), nan_k.all(dim=3))
    assert torch.equal(nan_v.all(dim=4), (~written)[None, :, None].expand_as(nan_v.all(dim=4)))
    assert torch.equal(nan_v.any(dim=4), nan_v.all(dim=4))
    # Columns that only pad the head dimension to 16 belong to no head: nothing is written there.
    assert kv.v_pool[..., spec.head_dim :].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_that_are_not_finite_show_where_the_reference_shows_them(dtype: str) -> None:
    """Fault 18: an overflown key or value of a request gives it no plausible logits; its neighbours keep theirs."""
    spec = SPECS["llama"]
    weights = wide_weights(spec, 7)
    ours = make_decoder(spec, weights, dtype=dtype)
    reference = make_decoder(spec, weights, dtype=dtype, backend="torch")
    for decoder in (ours, reference):
        feed(decoder, prompts(spec, [10, 20]))
    alone = feed(ours, [[5], [6]], commit=False)
    seen = []
    for dim in range(spec.head_dim):
        for pool in ("k_pool", "v_pool"):
            for value in (float("nan"), float("inf"), float("-inf")):
                finite = []
                for decoder in (ours, reference):
                    page = getattr(decoder.kv, pool)[0, decoder.kv.block_table[0, 0], 1]
                    cell = page[dim, 4:5] if pool == "k_pool" else page[4, dim : dim + 1]
                    before = cell.clone()
                    cell.fill_(value)
                    found = feed(decoder, [[5], [6]], commit=False)
                    cell.copy_(before)
                    finite.append(torch.isfinite(found[0]).tolist())
                    if decoder is ours:
                        assert torch.equal(found[1], alone[1])
                assert finite[0] == finite[1], (pool, dim, value)
                seen.append(any(finite[0]))
    assert seen.count(False) > 0.9 * len(seen)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(83, 40), (16, 1), (1, 7), (47, 33), (64, 16)])
def test_pack_panels_round_trip(shape: tuple[int, int], dtype: str) -> None:
    n, k = shape
    weight = torch.randn(n, k, dtype=torch.float64).to(DTYPES[dtype])
    panels = torch.full((-(-n // 16), k, 16), float("nan"), dtype=DTYPES[dtype])
    pack_panels(weight, panels)
    unpacked = panels.transpose(1, 2).reshape(-1, k)
    assert torch.equal(unpacked[:n], weight)
    assert not unpacked[n:].any()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_single_linear(dtype: str) -> None:
    """The product alone, at every tile height, against float64."""
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(83, 40, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
    linear = PackedLinear(weight, 1)
    for rows in (*range(1, 27), 40):
        x = torch.randn(rows, 40, generator=generator, dtype=torch.float64)
        x = x if dtype == "fp64" else x.float()
        expected = x.double() @ weight.double().T
        limit = 1e-13 if dtype == "fp64" else 2e-5
        assert (linear(x).double() - expected).abs().max() < limit, f"{rows} rows, seed {seed}"


def test_a_stack_of_linear_layers_runs_in_one_launch() -> None:
    """For measuring: each layer reads the same x, and the result is the last one's."""
    generator = torch.Generator().manual_seed(5)
    stack = torch.randn(3, 24, 40, generator=generator).bfloat16()
    linear = PackedLinear(stack, 2)
    assert linear.num_layers == 3
    for rows in (5, 1, 9):
        x = torch.randn(rows, 40, generator=generator)
        expected = x.double() @ stack[-1].double().T
        assert (linear(x).double() - expected).abs().max() < 2e-5


def test_the_record_is_kept_by_the_number_of_layers() -> None:
    """One launch a pass, recorded once; two depths do not mix, whichever comes first."""
    spec = SPECS["llama"]
    weights = wide_weights(spec)
    text = prompts(spec, [6])[0]
    decoder = make_decoder(spec, weights)
    assert isinstance(decoder.ops, CpuOps)
    shallow = history_logits(decoder, text, num_layers=1)
    deep = history_logits(decoder, text)
    assert len(decoder.ops._programs) == 2
    assert not torch.allclose(shallow, deep)
    assert torch.equal(history_logits(decoder, text, num_layers=1), shallow)
    assert torch.equal(history_logits(decoder, text), deep)
    assert len(decoder.ops._programs) == 2
    shares = decoder.ops.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert decoder.ops.activation_bytes > 0


def test_a_pass_of_many_requests() -> None:
    """More requests than threads, tiles and pages: 32 slots, each at another length."""
    spec: ModelSpec = SPECS["mistral"]
    weights = wide_weights(spec, 8)
    ours = make_decoder(spec, weights, num_slots=32, max_rows=600, max_context=48)
    reference = make_decoder(spec, weights, backend="torch", num_slots=32, max_rows=600, max_context=48)
    texts = prompts(spec, [1 + slot for slot in range(32)])
    torch.testing.assert_close(feed(ours, texts), feed(reference, texts), rtol=0, atol=1e-11)
    last = prompts(spec, [1] * 32, 1)
    torch.testing.assert_close(feed(ours, last), feed(reference, last), rtol=0, atol=1e-11)


def test_batches_describe_their_rows() -> None:
    batch = ForwardBatch.of([[5, 6], [7], [8, 9, 10]], [4, 0, 2], [3, 9, 0])
    assert batch.num_rows == 6
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.positions.tolist() == [3, 4, 9, 0, 1, 2]
    assert batch.row_request.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.query_start.tolist() == [0, 2, 3, 6]
    assert batch.query_lens.tolist() == [2, 1, 3]
    assert batch.slots.tolist() == [4, 0, 2]
    assert batch.selected_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert ForwardBatch.of([[5, 6], [7]], [0, 1], [0, 0], last_only=True).selected_rows.tolist() == [1, 2]


def test_the_kernels_revision_covers_all_that_is_compiled() -> None:
    """Every module of the CPU kernels that the compiled program is made of: a change of any makes caches expire."""
    home = Path(revision.__file__).parent
    found, waiting = set(), ["program"]
    while waiting:
        name = waiting.pop()
        found.add(name)
        text = (home / f"{name}.py").read_text(encoding="utf-8")
        used = set(re.findall(r"from specbench\.engine\.ops\.(\w+) import", text)) - {"revision"}
        waiting += sorted(used - found)
    assert found == set(revision.SOURCES)
