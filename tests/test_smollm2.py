"""The real model on the cpu backend: known figures, transformers' greedy output, speculation without a changed bit."""

from __future__ import annotations

import pytest
import torch
from engine_tools import accepted_share, decode, feed, make_decoder, make_request, outputs

from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.model import EarlyExitDrafter
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.decoder import Decoder
from specbench.engine.models.loader import load_weights
from specbench.engine.models.sources import resolve_model
from specbench.engine.models.tokenizer import load_tokenizer
from specbench.engine.request import Request
from specbench.roofline.shapes import ModelSpec

FRANCE = (504, 3575, 282, 4649, 314)  # "The capital of France is"
GREEDY = (7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33)
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village by the sea,",
    "Q: What is 17 + 25?\nA:",
    "The three most important things to know about photosynthesis are",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "import numpy as np\n\ndef softmax(x):\n",
    "Water",
)
NUM_TOKENS = 64


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return read_model_spec(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return load_weights(resolve_model("smollm2-135m-instruct"), spec, torch.float32)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m-instruct"))
    return [tuple(tokenizer.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def fp32(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> Decoder:
    return make_decoder(spec, weights, dtype="fp32", num_slots=8, max_context=128, max_rows=128)


@pytest.fixture(scope="module")
def bf16(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> Decoder:
    return make_decoder(spec, weights, dtype="bf16", num_slots=4, max_context=128, max_rows=64)


def requests(prompts: list[tuple[int, ...]], count: int, max_tokens: int) -> list[Request]:
    """Without an EOS: every output has its whole length."""
    return [make_request(ids, f"p{i}", max_tokens=max_tokens) for i, ids in enumerate(prompts[:count])]


def test_the_known_figures(fp32: Decoder, prompts: list[tuple[int, ...]]) -> None:
    """Mean NLL 3.692 of the prompt; wrong q/k orders give 4.210 or 3.928 and still answer " Paris"."""
    assert prompts[0] == FRANCE
    logits = feed(fp32, [FRANCE])
    fp32.kv.close(0)
    nll = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(FRANCE[1:]))
    assert nll.item() == pytest.approx(3.692, abs=0.01)
    assert logits[-1].max().item() == pytest.approx(17.371, abs=0.01)
    assert outputs(decode(fp32, [make_request(FRANCE, max_tokens=12)])) == {"r": GREEDY}


def transformers_logits(
    spec: ModelSpec, weights: dict[str, torch.Tensor], texts: list[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Logits [T, V] of transformers' own Llama on the same weights, in one padded pass with the mask it needs."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.eval()
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    longest = max(len(ids) for ids in texts)
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        hidden = model.model(ids, attention_mask=mask).last_hidden_state
        return [model.lm_head(hidden[i, : len(text)]) for i, text in enumerate(texts)]


def test_eight_outputs_equal_transformers(
    spec: ModelSpec, weights: dict[str, torch.Tensor], fp32: Decoder, prompts: list[tuple[int, ...]]
) -> None:
    """Token for token: each of our 64 tokens is transformers' argmax after the text before it, so by induction its
    greedy output is ours."""
    ours = outputs(decode(fp32, requests(prompts, 8, NUM_TOKENS), batch_size=8, check=False))
    texts = [(*ids, *ours[f"p{i}"]) for i, ids in enumerate(prompts)]
    assert texts[0][: len(FRANCE) + 12] == FRANCE + GREEDY
    for ids, text, logits in zip(prompts, texts, transformers_logits(spec, weights, texts), strict=True):
        assert len(text) == len(ids) + NUM_TOKENS
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == list(text[len(ids) :])


def test_a_rows_logits_are_the_same_bits_in_every_batch(bf16: Decoder, prompts: list[tuple[int, ...]]) -> None:
    text = prompts[5]
    at_once = feed(bf16, [text, prompts[1]])[: len(text)]
    bf16.kv.close(0)
    assert torch.equal(torch.cat([feed(bf16, [[token]]) for token in text]), at_once)
    bf16.kv.close(0)
    bf16.kv.close(1)


def test_speculation_changes_no_token_in_bf16(bf16: Decoder, prompts: list[tuple[int, ...]]) -> None:
    """Near ties included: the logits are the same bits in every batch, so there is nothing to turn them around."""
    asked = requests(prompts, 4, 48)
    expected = decode(bf16, asked, batch_size=4)
    drafters: list[tuple[Drafter, int]] = [(NgramDrafter(3, 1, "vllm", ()), 4), (EarlyExitDrafter(bf16, 8), 2)]
    for drafter, depth in drafters:
        found = decode(bf16, asked, drafter, batch_size=4, depth=depth)
        assert outputs(found) == outputs(expected)
        assert 0 < accepted_share(found) < 1


def test_bf16_stays_near_fp32(fp32: Decoder, bf16: Decoder) -> None:
    """Rounding of weights and cache alone: arithmetic is fp32 in both."""
    wide, narrow = feed(fp32, [FRANCE]), feed(bf16, [FRANCE])
    fp32.kv.close(0)
    bf16.kv.close(0)
    assert (narrow - wide).abs().max() < 0.5
    assert (narrow - wide).pow(2).mean().sqrt() < 0.1
