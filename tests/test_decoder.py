"""The decoder against transformers: every family and head shape, prefill and decode, ragged batches, both backends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import (
    Weights,
    assert_history_matters,
    empty,
    feed,
    history_logits,
    make_decoder,
    prompts,
    tiny_spec,
    wide_weights,
)

from specbench.engine.models.config import read_model_spec
from specbench.engine.models.loader import load_weights
from specbench.engine.models.sources import resolve_model
from specbench.engine.ops.batch import ForwardBatch
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

SHAPE = {
    "hidden_size": 42,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 83,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, 6/1 heads of 24": (
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "llama3 rope, 4/4 heads of 80": (
        "Llama",
        {
            "hidden_size": 44,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 80,
            "rope_parameters": LLAMA3,
        },
    ),
    "linear rope, biases": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral window 7": ("Mistral", {"sliding_window": 7}),
    "mistral window 20, 6/1 heads of 96": (
        "Mistral",
        {"sliding_window": 20, "num_key_value_heads": 1, "head_dim": 96},
    ),
    "qwen2 tied": ("Qwen2", {"head_dim": None, "hidden_size": 96, "tie_word_embeddings": True}),
    "qwen2 window on layer 1": (
        "Qwen2",
        {
            "head_dim": None,
            "hidden_size": 96,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3 heads of 80": ("Qwen3", {"head_dim": 80}),
    "qwen3 tied, 4/4 heads of 24": (
        "Qwen3",
        {
            "hidden_size": 44,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    ),
}
LENGTHS = (21, 1, 40, 16)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Oracle:
    """A model of transformers, read back through its saved folder, and its logits [T, V] on the test's texts."""

    spec: ModelSpec
    weights: Weights
    texts: list[tuple[int, ...]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    import transformers

    found = {}
    for number, (name, (family, options)) in enumerate(CONFIGS.items()):
        torch.manual_seed(number)
        fields = {key: value for key, value in (SHAPE | options).items() if value is not None}
        config = getattr(transformers, f"{family}Config")(**fields)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, 1.0, 0.2)
            elif parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 0.0, 0.3)
            else:
                torch.nn.init.normal_(parameter, 0.0, 1.5 / parameter.shape[1] ** 0.5)
        folder: Path = tmp_path_factory.mktemp(f"oracle{number}")
        model.save_pretrained(folder)
        source = resolve_model(str(folder))
        spec = read_model_spec(source)
        texts = prompts(spec, LENGTHS, seed=number)
        with torch.inference_mode():
            logits = [model(torch.tensor([text])).logits[0] for text in texts]
        found[name] = Oracle(spec, load_weights(source, spec, torch.float32), texts, logits)
    return found


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(oracles: dict[str, Oracle], name: str, backend: str) -> None:
    """Whole texts alone and together, then the same texts fed in uneven pieces, as prefill, verify and decode do."""
    oracle = oracles[name]
    decoder = make_decoder(oracle.spec, oracle.weights, dtype="fp32", backend=backend, max_rows=96)
    assert oracle.logits[2].std() > 0.5
    if oracle.spec.sliding_window is None:
        assert_history_matters(decoder, oracle.texts[0])

    for text, expected in zip(oracle.texts, oracle.logits, strict=True):
        torch.testing.assert_close(history_logits(decoder, text), expected, rtol=0, atol=TOLERANCE)

    slots = [2, 0, 3, 1]
    together = feed(decoder, oracle.texts, slots)
    torch.testing.assert_close(together, torch.cat(oracle.logits), rtol=0, atol=TOLERANCE)
    empty(decoder)

    stream = np.random.default_rng(3)
    done = [0] * len(LENGTHS)
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        busy = [i for i in stream.permutation(len(LENGTHS)) if done[i] < LENGTHS[i]]
        counts = [min(int(stream.integers(1, 9)), LENGTHS[i] - done[i]) for i in busy]
        pieces = [oracle.texts[i][done[i] : done[i] + n] for i, n in zip(busy, counts, strict=True)]
        logits = feed(decoder, pieces, [slots[i] for i in busy])
        expected = torch.cat([oracle.logits[i][done[i] : done[i] + n] for i, n in zip(busy, counts, strict=True)])
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        for i, n in zip(busy, counts, strict=True):
            done[i] += n


@pytest.mark.parametrize("name", ["llama", "mistral window 7", "qwen3 heads of 80"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_rejected_tokens_leave_no_trace(oracles: dict[str, Oracle], name: str, backend: str) -> None:
    """Fault 34: rows that accepted 0, 2 and 3 of 4 wrong drafts continue as if the drafts had never been."""
    oracle = oracles[name]
    decoder = make_decoder(oracle.spec, oracle.weights, dtype="fp32", backend=backend)
    texts, starts, keep = oracle.texts, (2, 5, 9), (0, 2, 3)
    rows = [0, 2, 3]
    feed(decoder, [texts[row][:start] for row, start in zip(rows, starts, strict=True)])
    drafts = [
        [*texts[row][start : start + kept], *([7] * (4 - kept))]
        for row, start, kept in zip(rows, starts, keep, strict=True)
    ]
    feed(decoder, drafts, commit=False)
    for slot, kept in enumerate(keep):
        decoder.kv.reserve(slot, 4)
        decoder.kv.commit(slot, kept)
    decoder.kv.check_integrity()
    ends = [start + kept for start, kept in zip(starts, keep, strict=True)]
    logits = feed(decoder, [texts[row][end : end + 3] for row, end in zip(rows, ends, strict=True)])
    expected = torch.cat([oracle.logits[row][end : end + 3] for row, end in zip(rows, ends, strict=True)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_verify_pass_keeps_to_the_sliding_window(backend: str) -> None:
    """Fault 47: window 4, prefix 6, 3 nodes: each node sees its last 4 tokens, itself included, and nothing before."""
    spec = tiny_spec(family="mistral", num_layers=1, sliding_window=4, sliding_layers=(True,))
    decoder = make_decoder(spec, wide_weights(spec), backend=backend)
    text = prompts(spec, [9])[0]
    feed(decoder, [text[:6]])
    verified = feed(decoder, [text[6:]])
    empty(decoder)
    for node in range(3):
        end = 7 + node
        outside = [(token + 1) % 83 for token in text[: end - 4]]
        same = history_logits(decoder, [*outside, *text[end - 4 : end]])[-1]
        torch.testing.assert_close(verified[node], same, rtol=0, atol=1e-12)
        edge = [*text[: end - 4], (text[end - 4] + 1) % 83, *text[end - 3 : end]]
        assert (history_logits(decoder, edge)[-1] - verified[node]).abs().max() > 1e-2


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_early_layers_are_the_first_layers_of_the_same_model(backend: str) -> None:
    spec = tiny_spec(num_layers=3)
    weights = wide_weights(spec)
    decoder = make_decoder(spec, weights, backend=backend)
    cut = tiny_spec(num_layers=2)
    short = make_decoder(cut, {name: t for name, t in weights.items() if "layers.2" not in name}, backend=backend)
    text = prompts(spec, [20])[0]
    expected = history_logits(short, text)
    torch.testing.assert_close(history_logits(decoder, text, num_layers=2), expected, rtol=0, atol=1e-12)
    # A pass over two layers in the middle of a text neither reads nor disturbs the third layer's cache.
    whole = history_logits(decoder, text)
    feed(decoder, [text[:10]])
    cut_logits = feed(decoder, [text[10:14]], num_layers=2, commit=False)
    torch.testing.assert_close(cut_logits, expected[10:14], rtol=0, atol=1e-12)
    torch.testing.assert_close(feed(decoder, [text[10:]]), whole[10:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_last_only_selects_the_last_row_of_each_request(backend: str) -> None:
    spec = tiny_spec()
    decoder = make_decoder(spec, wide_weights(spec), backend=backend)
    texts = prompts(spec, [3, 1, 18])
    every = feed(decoder, texts)
    empty(decoder)
    torch.testing.assert_close(feed(decoder, texts, last_only=True), every[[2, 3, 21]], rtol=0, atol=1e-12)


def test_rebinding_keeps_the_weights() -> None:
    spec = tiny_spec()
    weights = wide_weights(spec)
    decoder = make_decoder(spec, weights, max_rows=24, max_context=32)
    other = make_decoder(spec, weights, max_rows=40, max_context=64, num_slots=2)
    text = prompts(spec, [24])[0]
    expected = history_logits(decoder, text)
    decoder.rebind(other.kv, other.limits)
    assert decoder.kv is other.kv
    assert torch.equal(history_logits(decoder, text), expected)


def test_what_is_wrong_is_refused() -> None:
    spec = tiny_spec()
    with pytest.raises(InputError, match="unknown backend 'gpu'"):
        make_decoder(spec, wide_weights(spec), backend="gpu")
    decoder = make_decoder(spec, wide_weights(spec), max_rows=8)
    with pytest.raises(AssertionError, match="more rows"):
        decoder.forward(ForwardBatch.of([list(range(9))], [0], [0]))
    decoder.kv.reserve(0, 1)
    for token in (-1, spec.vocab_size):
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            decoder.forward(ForwardBatch.of([[token]], [0], [0]))
