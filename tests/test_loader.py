"""Weights come out the same whatever they were stored as; damaged, wrong or foreign files are refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf_files import converted, permute, spec_keys, stored_name, write_gguf
from safetensors.torch import save_file

from specbench.engine.models import loader
from specbench.engine.models.config import read_model_spec, spec_from_gguf
from specbench.engine.models.gguf_weights import half_split_order, open_gguf
from specbench.engine.models.loader import load_weights, tensor_shapes
from specbench.engine.models.sources import ModelSource, resolve_model
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec, named_shape

TINY = ModelSpec(
    name="m",
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=40,
    tie_word_embeddings=False,
)
Weights = dict[str, torch.Tensor]


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(spec).items()}


def prefixed(weights: Weights) -> Weights:
    return {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in weights.items()}


def folder_source(folder: Path) -> ModelSource:
    return ModelSource("folder", folder, None, "m")


def save_folder(folder: Path, weights: Weights) -> ModelSource:
    save_file(prefixed(weights), folder / "model.safetensors")
    return folder_source(folder)


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous()


# ---- Which tensors there are


@pytest.mark.parametrize(
    "spec",
    [
        TINY,
        replace(TINY, tie_word_embeddings=True, qkv_bias=True),
        replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
        replace(TINY, qk_norm=True, head_dim=32),
        named_shape("smollm2-135m"),
        named_shape("qwen3-8b"),
    ],
)
def test_tensor_shapes_add_up_to_the_parameters(spec: ModelSpec) -> None:
    shapes = tensor_shapes(spec)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == spec.num_params
    assert ("lm_head.weight" in shapes) is not spec.tie_word_embeddings


# ---- transformers' own models, saved by transformers

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaConfig", "LlamaForCausalLM", {}),
    ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("MistralConfig", "MistralForCausalLM", {"head_dim": 32, "sliding_window": 8}),
    ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
]


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize(("config_class", "model_class", "options"), FAMILIES)
def test_transformers_round_trip(
    tmp_path: Path, config_class: str, model_class: str, options: dict[str, Any], max_shard_size: str
) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SHAPE, bos_token_id=1, eos_token_id=2, **options)
    model = getattr(transformers, model_class)(config)
    # Fresh norms are all ones and biases zeros: make every tensor tell its name.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() is (max_shard_size == "20KB")
    theirs = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}

    source = resolve_model(str(tmp_path))
    spec = read_model_spec(source)
    weights = load_weights(source, spec, torch.float32)
    if spec.tie_word_embeddings:
        assert "lm_head.weight" not in weights
        theirs.pop("lm_head.weight")
    assert weights.keys() == theirs.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, theirs[name]), name
    half = load_weights(source, spec, torch.bfloat16)
    assert all(torch.equal(half[name], tensor.to(torch.bfloat16)) for name, tensor in weights.items())


# ---- safetensors


def test_inv_freq_buffers_and_missing_prefix_are_fine(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(weights | buffer, tmp_path / "model.safetensors")
    assert_same(load_weights(folder_source(tmp_path), TINY, torch.float32), weights)


def test_loaded_weights_do_not_depend_on_the_file(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    source = save_folder(tmp_path, weights)
    found = load_weights(source, TINY, torch.float32)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert_same(found, weights)


def test_redundant_head_of_a_tied_model(tmp_path: Path) -> None:
    tied = replace(TINY, tie_word_embeddings=True)
    weights = random_weights(tied)
    source = save_folder(tmp_path, weights | {"lm_head.weight": weights["embed_tokens.weight"].clone()})
    assert_same(load_weights(source, tied, torch.float32), weights)
    source = save_folder(tmp_path, weights | {"lm_head.weight": weights["embed_tokens.weight"] + 1})
    with pytest.raises(InputError, match="differs from the embeddings") as caught:
        load_weights(source, tied, torch.float32)
    assert caught.value.key == "lm_head.weight"


def change(name: str, tensor: torch.Tensor | None) -> Callable[[Weights], None]:
    def apply(weights: Weights) -> None:
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor

    return apply


@pytest.mark.parametrize(
    ("edit", "key", "message"),
    [
        (change("layers.1.mlp.up_proj.weight", None), "layers.1.mlp.up_proj.weight", "missing"),
        (change("lm_head.weight", None), "lm_head.weight", "missing"),
        (change("layers.2.mlp.up_proj.weight", torch.ones(96, 64)), "model.layers.2.mlp.up_proj.weight", "unexpected"),
        (
            change("layers.0.self_attn.q_proj.bias", torch.ones(64)),
            "model.layers.0.self_attn.q_proj.bias",
            "unexpected",
        ),
        (change("norm.weight", torch.ones(63)), "model.norm.weight", r"shape \[63\], but the config says \[64\]"),
        (
            change("layers.0.mlp.down_proj.weight", torch.ones(96, 64)),
            "model.layers.0.mlp.down_proj.weight",
            r"shape \[96, 64\], but the config says \[64, 96\]",
        ),
        (change("norm.weight", torch.ones(64, dtype=torch.int8)), "model.norm.weight", "stored as I8"),
        (change("norm.weight", torch.full((64,), torch.nan)), "norm.weight", "not finite"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, edit: Callable[[Weights], None], key: str, message: str) -> None:
    weights = random_weights(TINY)
    edit(weights)
    with pytest.raises(InputError, match=message) as caught:
        load_weights(save_folder(tmp_path, weights), TINY, torch.float32)
    assert caught.value.key == key
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


def test_a_missing_head_points_at_tying(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    del weights["lm_head.weight"]
    with pytest.raises(InputError, match="check tie_word_embeddings"):
        load_weights(save_folder(tmp_path, weights), TINY, torch.float32)


def test_overflow_in_fp16_is_an_error(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weights["norm.weight"][3] = 1e5
    source = save_folder(tmp_path, weights)
    assert load_weights(source, TINY, torch.bfloat16)["norm.weight"][3] > 9e4
    with pytest.raises(InputError, match=r"not finite in torch\.float16"):
        load_weights(source, TINY, torch.float16)


@pytest.mark.parametrize("keep", [0, 4, 100, -64])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    source = save_folder(tmp_path, random_weights(TINY))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="safetensors") as caught:
        load_weights(source, TINY, torch.float32)
    assert caught.value.file == path


def sharded(folder: Path, weights: Weights) -> dict[str, str]:
    """Two shards and their index; returns the weight map."""
    names = sorted(prefixed(weights))
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: prefixed(weights)[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_checkpoints(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weight_map = sharded(tmp_path, weights)
    source = folder_source(tmp_path)
    assert_same(load_weights(source, TINY, torch.float32), weights)
    # A file that the index does not name is not read.
    save_file({"other": torch.ones(1)}, tmp_path / "adapter.safetensors")
    assert_same(load_weights(source, TINY, torch.float32), weights)

    write_index(tmp_path, weight_map | {"model.norm.weight": "model-00003-of-00003.safetensors"})
    with pytest.raises(InputError, match="the shard is missing") as caught:
        load_weights(source, TINY, torch.float32)
    assert caught.value.file == tmp_path / "model-00003-of-00003.safetensors"

    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    swapped = {name: other.get(shard, min(other)) for name, shard in weight_map.items() if name == "model.norm.weight"}
    write_index(tmp_path, weight_map | swapped)
    with pytest.raises(InputError, match="the tensor is missing") as caught:
        load_weights(source, TINY, torch.float32)
    assert caught.value.key == "model.norm.weight"

    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "twice.safetensors")
    write_index(tmp_path, weight_map | {"model.norm.weight": "twice.safetensors"})
    with pytest.raises(InputError, match="stands in two files"):
        load_weights(source, TINY, torch.float32)


@pytest.mark.parametrize(
    "weight_map", [None, {}, [], {"model.norm.weight": 1}, {"model.norm.weight": "../x.safetensors"}]
)
def test_bad_indexes(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(InputError) as caught:
        load_weights(folder_source(tmp_path), TINY, torch.float32)
    assert caught.value.key is not None
    assert caught.value.key.startswith("weight_map")


# ---- GGUF

# Row lengths are multiples of every block size.
WIDE = replace(TINY, num_layers=1, hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
Q = GGMLQuantizationType
# Largest error allowed, as a share of a block's largest magnitude (Q4_1: of its range).
TOLERANCE = {
    Q.F32: 0.0,
    Q.F16: 2**-11,
    Q.BF16: 2**-8,
    Q.Q8_0: 0.5 / 127 + 1e-3,
    Q.Q4_0: 1 / 8 + 1e-3,
    Q.Q4_1: 0.5 / 15 + 2e-3,
}


def gguf_source(
    path: Path, spec: ModelSpec, weights: Weights, kind: Q, *, arch: str = "llama", **options: Any
) -> ModelSource:
    arrays = converted({name: t.numpy() for name, t in weights.items()}, spec, permuted=arch == "llama")
    types = {name: kind for name, array in arrays.items() if array.ndim == 2}
    write_gguf(path, spec_keys(spec, arch), arrays, arch=arch, types=types, **options)
    return ModelSource("gguf", path, None, "m")


@pytest.mark.parametrize("kind", TOLERANCE)
def test_gguf_types(tmp_path: Path, kind: Q) -> None:
    weights = random_weights(WIDE)
    source = gguf_source(tmp_path / "m.gguf", WIDE, weights, kind)
    assert read_model_spec(source) == WIDE
    found = load_weights(source, WIDE, torch.float32)
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            assert torch.equal(found[name], tensor), name
            continue
        block = 1 if kind in (Q.F32, Q.F16, Q.BF16) else 32
        error = (found[name] - tensor).abs().reshape(-1, block)
        expected = tensor.reshape(-1, block)
        scale = expected.amax(1) - expected.amin(1) if kind == Q.Q4_1 else expected.abs().amax(1)
        assert (error.amax(1) <= TOLERANCE[kind] * scale + 1e-7).all(), name
        assert kind == Q.F32 or error.max() > 0


@pytest.mark.parametrize(("arch", "changes"), [("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})])
def test_gguf_of_qwen_is_not_permuted(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    spec = replace(WIDE, family=arch, tie_word_embeddings=True, **changes)
    weights = random_weights(spec)
    source = gguf_source(tmp_path / "m.gguf", spec, weights, Q.F32, arch=arch)
    assert read_model_spec(source) == spec
    assert_same(load_weights(source, spec, torch.float32), weights)


def test_gguf_llama_biases_are_permuted_too(tmp_path: Path) -> None:
    spec = replace(TINY, qkv_bias=True)
    weights = random_weights(spec)
    source = gguf_source(tmp_path / "m.gguf", spec, weights, Q.F32)
    assert_same(load_weights(source, spec, torch.float32), weights)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (1, 8), (3, 8), (9, 64)])
def test_half_split_order_undoes_the_converter(num_heads: int, head_dim: int) -> None:
    rows = np.arange(num_heads * head_dim)
    assert permute(rows, num_heads)[half_split_order(num_heads, head_dim)].tolist() == rows.tolist()
    if (num_heads, head_dim) == (1, 8):
        assert permute(rows, 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def q6_k_value(block: bytes, i: int) -> float:
    """Element i of a Q6_K block, read by the format's definition: ql 128 B, qh 64 B, 16 int8 scales, fp16 d."""
    half, within = divmod(i, 128)
    quarter, lane = divmod(within, 32)
    low = block[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
    high = block[128 + 32 * half + lane] >> (2 * quarter) & 3
    scale, d = struct.unpack_from("<b", block, 192 + i // 16)[0], struct.unpack_from("<e", block, 208)[0]
    return float(d) * scale * ((low | high << 4) - 32)


def test_gguf_q6_k(tmp_path: Path) -> None:
    weights = random_weights(WIDE)
    name = "layers.0.mlp.up_proj.weight"
    blocks = np.random.default_rng(0).integers(0, 256, (256, 210), dtype=np.uint8)
    blocks[:, 208:] = np.frombuffer(struct.pack("<e", 0.01), np.uint8)
    arrays = converted({key: t.numpy() for key, t in weights.items()}, WIDE, permuted=True)
    stored = stored_name(name)
    keys = spec_keys(WIDE, "llama")
    write_gguf(tmp_path / "m.gguf", keys, arrays, types={stored: Q.Q6_K}, raw={stored: blocks})
    found = load_weights(ModelSource("gguf", tmp_path / "m.gguf", None, "m"), WIDE, torch.float32)[name]
    for row in (0, 100, 255):
        expected = [q6_k_value(blocks[row].tobytes(), i) for i in range(256)]
        np.testing.assert_allclose(found[row].numpy(), np.array(expected, np.float32), rtol=1e-6)


def test_gguf_blocks_of_rows_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are read in pieces; tiny pieces must give the same weights."""
    weights = random_weights(WIDE)
    source = gguf_source(tmp_path / "m.gguf", WIDE, weights, Q.Q8_0)
    whole = load_weights(source, WIDE, torch.float32)
    file_blocks = loader.GGUFFile.float_blocks
    sizes = []

    def small(self: Any, name: str, **options: Any) -> Any:
        for start, stop, values in file_blocks(self, name, **options, max_elements=1000):
            sizes.append(values.size)
            yield start, stop, values

    monkeypatch.setattr(loader.GGUFFile, "float_blocks", small)
    assert_same(load_weights(source, WIDE, torch.float32), whole)
    assert max(sizes) <= 1000


def test_gguf_errors(tmp_path: Path) -> None:
    weights = random_weights(WIDE)
    path = tmp_path / "m.gguf"
    source = gguf_source(path, WIDE, weights, Q.Q8_0)
    with pytest.raises(InputError, match="shape") as caught:
        load_weights(source, replace(WIDE, vocab_size=39), torch.float32)
    assert (caught.value.file, caught.value.key) == (path, "token_embd.weight")
    with pytest.raises(InputError, match="missing") as caught:
        load_weights(source, replace(WIDE, num_layers=2), torch.float32)
    assert caught.value.key == "layers.1.input_layernorm.weight"

    extra = {"blk.0.attn_qkv.weight": np.ones((4, 4), np.float32)}
    arrays = converted({name: t.numpy() for name, t in weights.items()}, WIDE, permuted=True)
    write_gguf(path, spec_keys(WIDE, "llama"), arrays | extra)
    with pytest.raises(InputError, match="unexpected") as caught:
        load_weights(source, WIDE, torch.float32)
    assert caught.value.key == "blk.0.attn_qkv.weight"

    stored = "blk.0.ffn_up.weight"
    raw = {stored: np.zeros((256, 144), np.uint8)}
    write_gguf(path, spec_keys(WIDE, "llama"), arrays, types={stored: Q.Q4_K}, raw=raw)
    assert spec_from_gguf(open_gguf(path), "m") == WIDE
    with pytest.raises(InputError, match="not decoded here") as caught:
        load_weights(source, WIDE, torch.float32)
    assert caught.value.key == stored
    assert "Q4_1" in str(caught.value)


def test_every_truncation_of_a_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        {"general.name": "name", "list": [1, 2, 3], "texts": ["a", "bc"], "flag": True},
        {"token_embd.weight": np.ones((4, 8), np.float32)},
    )
    whole = path.read_bytes()
    assert open_gguf(path).metadata["texts"] == ["a", "bc"]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError) as caught:
            open_gguf(path)
        assert caught.value.file == path


def test_damaged_gguf_headers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"list": [1, 2, 3]}, {"token_embd.weight": np.ones((4, 8), np.float32)})
    whole = path.read_bytes()
    place = whole.index(b"list") + 4
    for start, damage, message in [
        (0, b"GGML", "wrong magic"),
        (4, struct.pack(">I", 3), "version"),
        (16, struct.pack("<Q", 2**60), "truncated|value type|UTF-8"),
        (place, struct.pack("<I", 99), "unknown value type 99"),
        # An array of 2^60 elements must be an error at once, not a long loop.
        (place + 8, struct.pack("<Q", 2**60), "truncated"),
        (place - 4, b"\xff\xfe\xff\xfe", "not UTF-8"),
    ]:
        path.write_bytes(whole[:start] + damage + whole[start + len(damage) :])
        with pytest.raises(InputError, match=message):
            open_gguf(path)
    with pytest.raises(InputError, match="can't be read"):
        open_gguf(tmp_path / "none.gguf")


# ---- SmolLM2-135M-Instruct


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelSource, ModelSpec]:
    source = resolve_model("smollm2-135m-instruct")
    return source, read_model_spec(source)


def test_smollm2_header_equals_the_gguf_library(smollm2: tuple[ModelSource, ModelSpec], tmp_path: Path) -> None:
    path = smollm2[0].path
    assert path is not None
    gguf = open_gguf(path)
    types = [tensor.type_name for tensor in gguf.tensors.values()]
    assert {kind: types.count(kind) for kind in set(types)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert len(gguf.metadata) == 33
    assert gguf.tensors["token_embd.weight"].offset == 1785664
    # The library's reader takes seconds for a vocabulary: compare on a file that holds every type of value.
    small = tmp_path / "m.gguf"
    keys = {"a.text": "Ġé", "a.flag": False, "a.int": 7, "a.float": 0.1, "a.ints": [3, -1], "a.texts": ["x", "", "yz"]}
    write_gguf(small, keys, {"a": np.ones((3, 5), np.float32), "b": np.ones(7, np.float32)})
    ours, theirs = open_gguf(small), GGUFReader(small)
    assert {
        key: value.contents() for key, value in theirs.fields.items() if not key.startswith("GGUF.")
    } == ours.metadata
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.shape, mine.offset) == (tuple(tensor.shape[::-1].tolist()), tensor.data_offset)
        assert mine.num_bytes == tensor.n_bytes


def test_smollm2_negative_log_likelihood(smollm2: tuple[ModelSource, ModelSpec]) -> None:
    """The known figure of this file. Wrong q/k orders give 4.210 or 3.928 and still answer " Paris"."""
    source, spec = smollm2
    weights = load_weights(source, spec, torch.float32)
    assert len(weights) == 272
    ids = torch.tensor([504, 3575, 282, 4649, 314])
    logits = forward(weights, spec, ids)
    nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert nll.item() == pytest.approx(3.692, abs=2e-3)
    assert int(logits[-1].argmax()) == 7042
    assert logits[-1, 7042].item() == pytest.approx(17.371, abs=5e-3)


def forward(weights: Weights, spec: ModelSpec, ids: torch.Tensor) -> torch.Tensor:
    """A plain Llama, half-split RoPE, full causal attention: logits [T, V] of ids [T]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt() * weights[name]

    def rope(x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(len(ids))[:, None, None] * spec.rope_theta ** -(
            torch.arange(0, spec.head_dim, 2) / spec.head_dim
        )
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = weights["embed_tokens.weight"][ids]
    for i in range(spec.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): t for name, t in weights.items() if name.startswith(f"layers.{i}.")}
        h = norm(x, f"layers.{i}.input_layernorm.weight")
        q, k, v = (
            (h @ layer[f"self_attn.{part}_proj.weight"].T).view(len(ids), -1, spec.head_dim) for part in ("q", "k", "v")
        )
        q, k = rope(q), rope(k)
        repeats = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
        x = x + out @ layer["self_attn.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(h @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x, "norm.weight") @ weights["embed_tokens.weight"].T


# ---- Dummy weights


def test_dummy_weights() -> None:
    source = resolve_model("dummy:tiny-llama-test")
    spec = read_model_spec(source)
    weights = load_weights(source, spec, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == tensor_shapes(spec)
    assert_same(load_weights(source, spec, torch.float32), weights)
    other = load_weights(source, spec, torch.float32, seed=1)
    assert not any(torch.equal(other[name], tensor) for name, tensor in weights.items())
    # Each tensor has its own seed: fewer layers leave the rest as they are, and layers differ.
    fewer = load_weights(source, replace(spec, num_layers=1), torch.float32)
    assert all(torch.equal(weights[name], tensor) for name, tensor in fewer.items())
    assert not torch.equal(weights["layers.0.mlp.up_proj.weight"], weights["layers.1.mlp.up_proj.weight"])
    half = load_weights(source, spec, torch.bfloat16)
    assert all(torch.equal(half[name], tensor.to(torch.bfloat16)) for name, tensor in weights.items())
    assert weights["norm.weight"].mean().item() == pytest.approx(1.0, abs=0.02)
    assert weights["layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert weights["embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_weights_are_floating_point() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        load_weights(resolve_model("dummy:tiny-llama-test"), named_shape("tiny-llama-test"), torch.int8)
