"""Costs of routed, latent, sparse and compressed shapes, formats and caches: published tables, and brute force."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.roofline.cost import forward_cost, kv_bytes, uniform_cost
from specbench.roofline.cost_attention import chosen_keys, compressed_keys
from specbench.roofline.cost_moe import expected_experts, saturation_tokens, tokens_per_expert
from specbench.roofline.formats import dtype_bytes, storage_bytes, weight_format
from specbench.roofline.kv_cost import kv_bytes_held, rollback_bytes
from specbench.roofline.shapes import NAMED_SHAPES, IndexerSpec, MlaSpec, ModelSpec, MoeSpec, named_shape

HOME = Path(__file__).parent.parent / "specbench" / "heads" / "smollm2-135m-instruct"
DENSE = ModelSpec("dense", "llama", 2, 16, 24, 4, 2, 4, 100, True)
WINDOWED = replace(DENSE, name="windowed", sliding_window=5, sliding_layers=(True, False))
ROUTED = replace(DENSE, name="routed", moe=MoeSpec(8, 2, 12, num_shared=1, first_dense=1))
LATENT = replace(DENSE, name="latent", mla=MlaSpec(6, 8, 4, 2, 3))
SPARSE = replace(LATENT, name="sparse", indexer=IndexerSpec(2, 4, 6, full_layers=(True, False)))
V4 = replace(
    named_shape("deepseek-v4-flash"),
    name="compressed",
    num_layers=3,
    hidden_size=16,
    num_heads=4,
    head_dim=8,
    vocab_size=100,
    moe=MoeSpec(8, 2, 12),
    indexer=IndexerSpec(2, 4, 3),
    compressed=replace(
        named_shape("deepseek-v4-flash").compressed,  # type: ignore[type-var]
        ratios=(0, 4, 128),
        window=5,
        q_lora_rank=6,
        o_groups=2,
        o_lora_rank=4,
    ),
)
SHAPES = (DENSE, WINDOWED, ROUTED, LATENT, SPARSE, V4)

# E, k, N(1), N(4), N(8), N(32), N(128), T at 95 %, expert bytes of verify (4 tokens) / AR at batch 1, 8, 32
COVERAGE = {
    "Mixtral-8x7B": (8, 2, 2, 5.5, 7.2, 8.0, 8, 10.4, 2.73, 1.11, 1.00),
    "Qwen2-57B-A14B": (64, 8, 8, 26.5, 42.0, 63.1, 64, 22.4, 3.31, 1.50, 1.01),
    "Qwen3-30B-A3B": (128, 8, 8, 29.1, 51.6, 111.8, 128, 46.4, 3.64, 2.17, 1.14),
    "gpt-oss-120b": (128, 4, 4, 15.3, 28.7, 81.7, 125.8, 94.4, 3.82, 2.84, 1.54),
    "DeepSeek-V3": (256, 8, 8, 30.5, 57.4, 163.3, 251.6, 94.4, 3.82, 2.84, 1.54),
    "Kimi-K2": (384, 8, 8, 31.0, 59.5, 188.2, 358.1, 142, 3.88, 3.16, 1.90),
}


def last_digit(value: float) -> float:
    """A unit of the last digit that the table prints."""
    return 10.0 ** -(len(f"{value}".partition(".")[2]) if isinstance(value, float) else 0)


@pytest.mark.parametrize("name", COVERAGE)
def test_expert_coverage_table(name: str) -> None:
    experts, top_k, *row = COVERAGE[name]
    got = [expected_experts(experts, top_k, tokens) for tokens in (1, 4, 8, 32, 128)]
    got.append(saturation_tokens(experts, top_k, 0.95))
    got += [
        expected_experts(experts, top_k, 4 * batch) / expected_experts(experts, top_k, batch) for batch in (1, 8, 32)
    ]
    for value, want in zip(got, row, strict=True):
        assert value == pytest.approx(want, abs=last_digit(want)), (name, want)


def test_moesd_equations() -> None:
    assert expected_experts(512, 10, 4) == pytest.approx(38.8, abs=0.05)
    assert tokens_per_expert(8, 2, 1) == 1
    assert tokens_per_expert(8, 2, 1e6) == pytest.approx(2e6 / 8)
    for bad in (0.0, 1.0, -1.0):
        with pytest.raises(InputError, match="share"):
            saturation_tokens(8, 2, bad)


def test_named_moe_reads_its_distinct_experts() -> None:
    spec = named_shape("qwen3-30b-a3b")
    assert spec.moe is not None
    one = 3 * 2048 * 768 * 2.0
    for batch, query in ((1, 1), (1, 4), (8, 4), (32, 4)):
        step = uniform_cost(spec, batch, query, 100, weight_dtype="bf16")
        tokens = batch * query
        activations = tokens * 8 * (3 * (2048 + 768)) * 2
        assert step.experts.bytes == pytest.approx(
            48 * (expected_experts(128, 8, tokens) * one + activations), rel=1e-12
        )
        assert step.experts.flops == 48 * 2 * tokens * 8 * 3 * 2048 * 768
    # The knee of a saturated model: T* · E / k (facts: 4720 tokens for 128 / 8 on H100).
    assert 295 * 128 / 8 == 4720


def test_a_measured_union_takes_the_place_of_the_expectation() -> None:
    spec = named_shape("mixtral-8x7b")
    expected = uniform_cost(spec, 2, 4, 64, weight_dtype="bf16")
    measured = uniform_cost(spec, 2, 4, 64, weight_dtype="bf16", distinct_experts=4.0)
    one = 3 * 4096 * 14336 * 2
    assert expected.experts.bytes - measured.experts.bytes == pytest.approx(
        32 * (expected_experts(8, 2, 8) - 4) * one, rel=1e-12
    )
    assert measured.experts.flops == expected.experts.flops
    assert forward_cost(spec, [4, 4], [64, 64], weight_dtype="bf16", distinct_experts=4.0) == measured
    for union in (-1.0, 8.5, 17.0, math.nan):
        with pytest.raises(InputError, match="union"):
            uniform_cost(spec, 2, 4, 64, weight_dtype="bf16", distinct_experts=union)
    with pytest.raises(InputError, match="union"):
        uniform_cost(spec, 1, 1, 64, weight_dtype="bf16", distinct_experts=3.0)
    with pytest.raises(InputError, match="no experts"):
        uniform_cost(DENSE, 1, 1, 64, weight_dtype="bf16", distinct_experts=3.0)


def test_latent_attention_intensity() -> None:
    """2 K n_h (2 d_c + d_r) / ((d_c + d_r) b): 242 K for DeepSeek, so K = 2 is beyond an H100's knee."""
    spec = named_shape("deepseek-v3")
    for width in (1, 2, 4):
        attention = forward_cost(spec, [width] * 4, [60_000] * 4, weight_dtype="bf16").attention
        assert attention.intensity == pytest.approx(242 * width, rel=0.02)
    assert spec.kv_bytes_per_token("bf16") == 61 * 576 * 2
    dense = named_shape("llama-3.1-8b")
    assert forward_cost(dense, [4], [60_000], weight_dtype="bf16").attention.intensity == pytest.approx(16, rel=0.01)


def full_layers(freq: int, offset: int, layers: int = 78) -> list[int]:
    indexer = IndexerSpec(32, 128, 2048, share_group=freq, share_offset=offset)
    return [layer for layer in range(layers) if indexer.is_full(layer)]


def test_index_share_groups() -> None:
    assert full_layers(4, 3) == [0, 1, 2, *range(6, 75, 4)]
    assert full_layers(4, 2) == [0, 1, *range(5, 78, 4)]
    assert len(full_layers(4, 3)) == len(full_layers(4, 2)) == 21
    assert full_layers(1, 2) == list(range(78))


def test_index_share_saves_what_glm_says() -> None:
    """2.9 times fewer FLOPs a token at 1M tokens of context: indexers of 21 layers instead of 78."""
    spec = named_shape("glm-5.2")
    every = replace(spec, indexer=replace(spec.indexer, share_group=1))  # type: ignore[type-var]
    shared, alone = (uniform_cost(one, 1, 1, 1_048_576, weight_dtype="bf16") for one in (spec, every))
    assert alone.indexer.flops / shared.indexer.flops == pytest.approx(78 / 21, rel=1e-6)
    assert alone.flops / shared.flops == pytest.approx(2.9, rel=0.1)
    assert spec.kv_bytes_per_token("bf16") == 2 * (78 * 576 + 21 * 128)


def test_v4_needs_the_tenth_of_the_cache() -> None:
    """At 1M tokens V4-Pro keeps 10 % of V3.2's cache (61 layers, 576 + 128 values each)."""
    pro = kv_bytes_held(named_shape("deepseek-v4-pro"), 2**20, "bf16")
    assert pro / (2**20 * 61 * (576 + 128) * 2) == pytest.approx(0.10, abs=0.02)


@given(st.integers(0, 9), st.integers(0, 40), st.integers(1, 12))
def test_chosen_keys_equal_brute_force(query: int, context: int, top_k: int) -> None:
    seen = sum(min(context + j, top_k) for j in range(1, query + 1))
    keys = chosen_keys(query, context, top_k)
    assert keys.seen == seen
    assert keys.read == min(seen, context + query if query else 0)


@given(st.integers(0, 9), st.integers(0, 300), st.sampled_from([4, 7, 128]), st.one_of(st.none(), st.integers(1, 9)))
def test_compressed_keys_equal_brute_force(query: int, context: int, ratio: int, top_k: int | None) -> None:
    entries = [(context + j) // ratio for j in range(1, query + 1)]
    seen = sum(entries) if top_k is None else sum(min(count, top_k) for count in entries)
    keys = compressed_keys(query, context, ratio, top_k)
    assert keys.seen == seen
    last = entries[-1] if entries else 0
    assert keys.read == (last if top_k is None else min(seen, last))


@given(
    st.sampled_from(SHAPES),
    st.integers(0, 6),
    st.integers(0, 7),
    st.integers(0, 400),
    st.sampled_from(["fp32", "bf16", "int4-g8,head=bf16"]),
)
def test_uniform_cost_equals_forward_cost(spec: ModelSpec, batch: int, query: int, context: int, dtype: str) -> None:
    one = uniform_cost(spec, batch, query, context, weight_dtype=dtype)
    assert one == forward_cost(spec, [query] * batch, [context] * batch, weight_dtype=dtype)
    assert math.isfinite(one.flops)
    assert one.bytes >= 0


@given(st.sampled_from(SHAPES), st.integers(1, 6), st.integers(1, 7), st.integers(0, 400), st.sampled_from("bqs"))
def test_cost_rises_with_batch_depth_and_context(
    spec: ModelSpec, batch: int, query: int, context: int, grown: str
) -> None:
    less = uniform_cost(spec, batch, query, context, weight_dtype="bf16")
    sizes = (batch + (grown == "b"), query + (grown == "q"), context + (grown == "s"))
    more = uniform_cost(spec, *sizes, weight_dtype="bf16")
    assert more.flops >= less.flops
    assert more.bytes >= less.bytes
    if grown != "s":
        assert more.flops > less.flops
        assert more.bytes > less.bytes


@given(st.sampled_from(SHAPES), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), min_size=1, max_size=5))
def test_requests_add_up_and_their_order_does_not_matter(spec: ModelSpec, requests: list[tuple[int, int]]) -> None:
    queries, contexts = zip(*requests, strict=True)
    whole = forward_cost(spec, queries, contexts, weight_dtype="fp16")
    turned = forward_cost(spec, queries[::-1], contexts[::-1], weight_dtype="fp16")
    assert whole.flops == pytest.approx(turned.flops, rel=1e-12)
    apart = [forward_cost(spec, [q], [c], weight_dtype="fp16") for q, c in requests]
    assert whole.attention.flops == pytest.approx(sum(one.attention.flops for one in apart))
    assert whole.linear.flops == pytest.approx(sum(one.linear.flops for one in apart))
    assert whole.experts.bytes <= sum(one.experts.bytes for one in apart) * (1 + 1e-12)
    assert whole.linear.bytes <= sum(one.linear.bytes for one in apart) * (1 + 1e-12)


# ---- Formats


def test_storage_formats() -> None:
    assert [storage_bytes(name, 10, 64) for name in ("fp64", "fp32", "bf16", "fp16", "fp8", "int8", "int4")] == [
        *(5120, 2560, 1280, 1280, 640, 640, 320)
    ]
    assert storage_bytes("int4-g128", 3, 256) == 3 * (128 + 2 * 2)
    assert storage_bytes("int4-g128", 3, 257) == 3 * (128.5 + 3 * 2)
    assert storage_bytes("mxfp4", 4, 64) * 8 / (4 * 64) == 4.25
    assert storage_bytes("nvfp4", 4, 64) * 8 / (4 * 64) == 4.5
    for bad in ("int3", "int4-g0", "int4-g", "fp32-g8", ""):
        with pytest.raises(InputError, match="unknown dtype"):
            storage_bytes(bad, 1, 1)


def test_weight_formats_by_part() -> None:
    mixed = weight_format("int4-g64, head=bf16, experts=mxfp4")
    assert (mixed.linear.name, mixed.experts.name, mixed.head.name) == ("int4-g64", "mxfp4", "bf16")
    assert mixed.computed == "bf16"
    assert weight_format("fp32,experts=fp8").computed == "fp32"
    assert weight_format("int4").computed == "bf16"
    for bad in ("bf16,heads=int8", "bf16,int8"):
        with pytest.raises(InputError, match="part of a model"):
            weight_format(bad)
    with pytest.raises(InputError, match="weights only"):
        dtype_bytes("int4")


def test_quantised_weights_are_read_as_stored_and_compute_the_same() -> None:
    spec = named_shape("llama-3.1-8b")
    plain = uniform_cost(spec, 4, 4, 512, weight_dtype="bf16")
    packed = uniform_cost(spec, 4, 4, 512, weight_dtype="int4-g128,head=bf16")
    saved = spec.num_linear_params * (2 - 0.5 - 2 / 128)
    assert plain.linear.bytes - packed.linear.bytes == pytest.approx(saved, rel=1e-12)
    assert packed.flops == plain.flops
    assert packed.attention == plain.attention
    assert packed.head == plain.head
    assert uniform_cost(spec, 4, 4, 512, weight_dtype="bf16", kv_dtype="fp8").attention.bytes < plain.attention.bytes
    oss = named_shape("gpt-oss-120b")
    # 4.25 bits an expert weight and bf16 else: 65 GB, as its checkpoint on disk.
    assert oss.weight_bytes("bf16,experts=mxfp4") == pytest.approx(65.3e9, rel=0.01)


@pytest.mark.parametrize("name", ["draft_model"])
def test_weight_bytes_of_a_real_file(name: str) -> None:
    """The data section of a safetensors file that ships here: no bytes more and no fewer than its spec says."""
    from specbench.roofline.shapes_config import read_config

    spec = read_config(HOME / name)
    size, header = read_header(HOME / name / "model.safetensors")
    assert {entry["dtype"] for key, entry in header.items() if key != "__metadata__"} == {"BF16"}
    stored = {key for key in header if key != "__metadata__"}
    embedding = 0 if any("embed_tokens" in key for key in stored) else spec.num_head_params
    assert size == (spec.num_params - embedding) * 2
    if not embedding:
        assert spec.weight_bytes("bf16") == size


def read_header(file: Path) -> tuple[int, dict[str, dict[str, str]]]:
    """Bytes of a safetensors file's data, and its header: u64 length, JSON, data."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return len(raw) - 8 - length, json.loads(raw[8 : 8 + length])


def test_weight_bytes_of_a_file_written_by_transformers(tmp_path: Path) -> None:
    import transformers

    from specbench.roofline.shapes_config import read_config

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=64, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    size, _ = read_header(tmp_path / "model.safetensors")
    assert read_config(tmp_path).weight_bytes("fp32") == size


# ---- Caches


def test_fault_67_and_69_in_every_kind() -> None:
    """KV of one token by hand, and a tied embedding that is stored once and read once, as the head."""
    assert kv_bytes(named_shape("llama-3.1-70b"), 1, "fp16") == 2 * 80 * 8 * 128 * 2
    assert kv_bytes(named_shape("gpt-oss-120b"), 1, "bf16") == 2 * 36 * 8 * 64 * 2
    for spec in NAMED_SHAPES.values():
        step = uniform_cost(spec, 1, 1, 0, weight_dtype="bf16")
        assert step.head.flops == 2 * spec.vocab_size * spec.hidden_size
        assert step.embedding.flops == 0
        assert step.embedding.bytes == 2 * spec.hidden_size
        tied, untied = (replace(spec, tie_word_embeddings=tie) for tie in (True, False))
        assert untied.num_params - tied.num_params == spec.vocab_size * spec.hidden_size
        assert uniform_cost(tied, 3, 2, 9, weight_dtype="bf16") == uniform_cost(untied, 3, 2, 9, weight_dtype="bf16")
        if spec.mla is None and spec.compressed is None:
            per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
            assert spec.kv_bytes_per_token("bf16") == per_token
            assert step.kv_write.bytes == per_token


def test_what_a_request_holds() -> None:
    assert kv_bytes_held(WINDOWED, 20, "fp16") == 20 * WINDOWED.kv_bytes_per_token("fp16")
    assert kv_bytes_held(WINDOWED, 20, "fp16", drop_window=True) == (20 + 5) * 2 * 2 * 4 * 2
    assert kv_bytes_held(WINDOWED, 3, "fp16", drop_window=True) == 3 * WINDOWED.kv_bytes_per_token("fp16")
    # V4: windows of 5 on three layers, an entry and an index key every 4 tokens, an entry every 128.
    assert kv_bytes_held(V4, 256, "bf16") == 2 * (3 * 5 * 8 + 64 * (8 + 4) + 2 * 8)


def test_rollback_policies() -> None:
    cell = DENSE.kv_bytes_per_token("bf16")
    assert rollback_bytes("index", DENSE, 3, 4, "bf16") == 0
    assert rollback_bytes("realloc", DENSE, 3, 4, "bf16") == 4 * cell
    assert rollback_bytes("compact", DENSE, 3, 4, "bf16") == 0
    assert rollback_bytes("compact", DENSE, 2.5, 8, "bf16", chain=False) == 2.5 * cell
    with pytest.raises(InputError, match="rollback policy"):
        rollback_bytes("none", DENSE, 1, 2, "bf16")
    with pytest.raises(InputError, match="accepted"):
        rollback_bytes("index", DENSE, 3, 2, "bf16")


# ---- Named shapes and the engine


def test_uncertain_cells_are_listed() -> None:
    certain = {name for name, spec in NAMED_SHAPES.items() if not spec.uncertain_cells}
    assert set(NAMED_SHAPES) - certain == {"deepseek-v4-flash", "deepseek-v4-pro", "glm-5.2"}
    for spec in NAMED_SHAPES.values():
        assert set(spec.uncertain_cells) <= set(spec.__dataclass_fields__)
        assert all(spec.uncertain_cells.values())
    assert "1024" in named_shape("deepseek-v4-pro").uncertain_cells["indexer"]


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-120b", "deepseek-v3", "deepseek-v4-flash", "glm-5.2"])
def test_the_engine_refuses_what_it_does_not_run(name: str) -> None:
    from specbench.engine.models.config import read_model_spec
    from specbench.engine.models.sources import resolve_model

    with pytest.raises(InputError, match="does not run") as caught:
        read_model_spec(resolve_model(f"dummy:{name}"))
    assert "predict" in str(caught.value.remedy)


def test_absurd_sizes_are_refused() -> None:
    for query, context in ((-1, 0), (1, -1), (1, 1e13), (math.nan, 1), (math.inf, 1)):
        with pytest.raises(InputError, match="lengths"):
            uniform_cost(DENSE, 1, query, context, weight_dtype="bf16")
    with pytest.raises(InputError, match="batch"):
        uniform_cost(DENSE, -1, 1, 1, weight_dtype="bf16")


def test_means_lie_between() -> None:
    low, high = (uniform_cost(DENSE, 4, q, 50, weight_dtype="bf16") for q in (2, 3))
    mid = uniform_cost(DENSE, 4, 2.5, 50, weight_dtype="bf16")
    assert low.flops < mid.flops < high.flops
    assert mid.linear.flops == pytest.approx((low.linear.flops + high.linear.flops) / 2)
    assert np.isfinite(mid.bytes)
