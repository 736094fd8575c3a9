"""A target of a small vocabulary, everything that drafts for it, and the truth of its greedy outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_tools import (
    Weights,
    assert_history_matters,
    greedy_from_scratch,
    make_decoder,
    make_request,
    perturbed,
    prompts,
    resized_vocabulary,
    small_vocabulary,
)

from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.lookup import NgramDrafter, ReplayDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.models.decoder import Decoder
from specbench.engine.request import Request
from specbench.roofline.shapes import ModelSpec

V = 11
LENGTHS = (5, 1, 16, 33, 17, 2, 15)
OUTPUT = 24


@dataclass
class World:
    """A target and everything that drafts for it."""

    spec: ModelSpec
    weights: Weights
    target: Decoder
    truth: dict[str, tuple[int, ...]]
    requests: list[Request]
    draft_decoders: dict[str, Decoder] = field(default_factory=dict)

    def draft_decoder(self, name: str) -> Decoder:
        if name not in self.draft_decoders:
            spec, weights = self.spec, self.weights
            if name == "draft model, near":
                weights = perturbed(weights, 0.08)
            elif name == "draft model, wider vocabulary":
                spec, weights = resized_vocabulary(spec, perturbed(weights, 0.08), V + 5)
            elif name == "draft model, narrower vocabulary":
                spec, weights = resized_vocabulary(spec, perturbed(weights, 0.08), V - 3)
            self.draft_decoders[name] = make_decoder(spec, weights, max_rows=20, backend=self.target.backend)
        return self.draft_decoders[name]

    def drafter(self, name: str) -> Drafter:
        if name.startswith("draft model"):
            return DraftModelDrafter(self.draft_decoder(name), V)
        return {
            "ngram, vllm": lambda: NgramDrafter(3, 1, "vllm", ()),
            "ngram, transformers": lambda: NgramDrafter(3, 1, "transformers", (4, 7)),
            "early exit": lambda: EarlyExitDrafter(self.target, 1),
            "oracle": lambda: ReplayDrafter(V),
            "forced length": lambda: ReplayDrafter(V, length=2.4),
            "forced rates": lambda: ReplayDrafter(V, rates=(0.8, 0.6, 0.9, 0.3)),
        }[name]()


DRAFTERS = (
    "ngram, vllm",
    "ngram, transformers",
    "draft model, same",
    "draft model, near",
    "draft model, wider vocabulary",
    "draft model, narrower vocabulary",
    "early exit",
    "oracle",
    "forced length",
    "forced rates",
)
SAMPLING_DRAFTERS = ("ngram, vllm", "draft model, near", "draft model, narrower vocabulary", "early exit")


def build_world(backend: str) -> World:
    spec, weights = small_vocabulary(V)
    target = make_decoder(spec, weights, backend=backend)
    scratch = make_decoder(spec, weights, backend="torch", max_rows=80)
    texts = prompts(spec, LENGTHS)
    assert_history_matters(scratch, texts[2])
    truth = {f"r{i}": greedy_from_scratch(scratch, text, OUTPUT) for i, text in enumerate(texts)}
    requests = [
        make_request(text, f"r{i}", max_tokens=OUTPUT, reference=truth[f"r{i}"]) for i, text in enumerate(texts)
    ]
    return World(spec, weights, target, truth, requests)
