"""The two sides of a comparison: our engine and transformers' `generate`, on the very same weights and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.blocks import Outputs, Sample
from specbench.bench.clock import Clock, WallClock
from specbench.bench.target import PreparedPrompts, Target
from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.drafters.base import Drafter
from specbench.engine.models.decoder import DTYPES
from specbench.engine.models.loader import load_weights
from specbench.engine.ops.openmp import parallel
from specbench.engine.request import Request
from specbench.engine.trace import Trace
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import Case, TargetSpec, Workload
from specbench.scenario.drafter_spec import DrafterSpec
from specbench.scenario.prompts import load_prompt_set

MODEL = "smollm2-135m-instruct"
DTYPE_NAMES = ("fp32", "bf16")
Ids = tuple[int, ...]


def rates(decode_tokens: int, decode_s: float, all_tokens: int, wall_s: float, steps: int) -> dict[str, float]:
    """The figures of one generation.

    `decode_tokens` are those after the prefill's own, over the time from the first decode step's begin to the last
    token; `all_tokens` over the whole call, prefill included.
    """
    return {
        "decode_tokens_per_s": decode_tokens / decode_s,
        "total_tokens_per_s": all_tokens / wall_s,
        "tokens_per_step": decode_tokens / steps,
        "decode_s": decode_s,
        "wall_s": wall_s,
    }


def pooled(parts: Sequence[tuple[int, float, int, float, int]]) -> dict[str, float]:
    """`rates` of several generations one after another: sums of tokens over sums of seconds."""
    tokens, decode_s, every, wall_s, steps = (sum(column) for column in zip(*parts, strict=True))
    return rates(int(tokens), decode_s, int(every), wall_s, int(steps))


def trace_window(trace: Trace) -> tuple[int, float]:
    """(tokens committed by steps, seconds from the first step's begin to the last step's commit)."""
    if not len(trace.step_s):
        return 0, 0.0
    begin = float(trace.end_s[0] - trace.step_s[0])
    return int(trace.num_committed.sum()), float(trace.end_s[-1]) - begin


class TokenTimes:
    """A streamer for `generate`: when each step's tokens were there. `generate` hands over the prompt first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(self._clock.now())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is held back."""

    def window(self) -> tuple[int, float]:
        """(tokens, seconds) after the first step, which holds the prefill."""
        return sum(self.counts[1:]), self.times[-1] - self.times[0]


def chat_prompts(target: Target, categories: Sequence[str], limit: int, seed: int) -> list[tuple[str, str, Ids]]:
    """(id, category, token ids) of built-in prompts with one turn, through the model's chat template."""
    tokenizer = target.tokenizer
    assert tokenizer is not None, "a real model has a tokenizer"
    chosen = load_prompt_set("builtin", categories=categories, seed=seed).prompts
    single = [prompt for prompt in chosen if len(prompt.turns) == 1][:limit]
    return [
        (p.question_id, p.category, tuple(tokenizer.apply_chat([{"role": "user", "content": p.turns[0]}])))
        for p in single
    ]


class Ours:
    """Our engine with backend `cpu`."""

    def __init__(self, dtype: str, clock: Clock | None = None) -> None:
        self.dtype = dtype
        self.clock = clock or WallClock()
        self.target = Target(TargetSpec(model=MODEL, dtype=dtype, backend="cpu"))

    @property
    def spec(self) -> ModelSpec:
        return self.target.spec

    def bind(
        self,
        prompts: Sequence[tuple[str, str, Ids]],
        *,
        batch_size: int,
        output_len: int,
        depth: int = 0,
        ignore_eos: bool = True,
    ) -> list[Request]:
        """Size the KV cache for `prompts` and return them as greedy requests."""
        work = Workload(output_len=output_len, batch_size=batch_size, ignore_eos=ignore_eos)
        case = Case(self.target.target, DrafterSpec("none"), depth, work)
        prepared = PreparedPrompts("builtin", "", tuple(prompts))
        self.target.bind(case, prepared)
        return self.target.requests(case, prepared)

    def engine(self, batch_size: int, drafter: Drafter | None = None, depth: int = 0) -> Engine:
        """An engine that has prefilled nothing yet, so that a run pays for its prompts."""
        store = PrefillStore(self.target.decoder, self.clock.now)
        return Engine(self.target.decoder, store, drafter, batch_size=batch_size, depth=depth, now=self.clock.now)

    def run(
        self, requests: Sequence[Request], *, together: bool, drafter: Drafter | None = None, depth: int = 0
    ) -> Sample:
        """Generate for all requests in one batch, or one after another."""
        parts, outputs = [], []
        for batch in [requests] if together else [[one] for one in requests]:
            engine = self.engine(len(batch), drafter, depth)
            begin = self.clock.now()
            trace = engine.run(batch)
            wall_s = self.clock.now() - begin
            tokens, decode_s = trace_window(trace)
            outputs += [one.token_ids for one in trace.requests]
            parts.append(
                (tokens, decode_s, sum(len(one.token_ids) for one in trace.requests), wall_s, len(trace.step_s))
            )
        return Sample(pooled(parts), tuple(outputs))


@dataclass(frozen=True)
class Generated:
    """Output ids of each request, cut after the first EOS where one ends it."""

    outputs: Outputs
    times: TokenTimes
    wall_s: float


class Theirs:
    """transformers' LlamaForCausalLM with the tensors that our loader gives, and its `generate` with greedy search."""

    def __init__(self, spec: ModelSpec, target: Target, dtype: str, clock: Clock | None = None) -> None:
        if spec.family != "llama" or spec.rope_scaling is not None:
            raise InputError(f"{spec.name} is no plain Llama", key="model", remedy="compare on smollm2-135m-instruct")
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            max_position_embeddings=spec.max_position_embeddings,
            tie_word_embeddings=spec.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
            attention_bias=spec.qkv_bias,
            mlp_bias=spec.mlp_bias,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
        weights = load_weights(target.source, spec, DTYPES[dtype])
        heads = {name for name in weights if name.startswith("lm_head")}
        state = {name if name in heads else f"model.{name}": tensor for name, tensor in weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
        assert set(missing) <= tied, f"tensors missing: {missing}"
        assert not unexpected, f"tensors unexpected: {unexpected}"
        # A rotary table computed from bf16 frequencies would be another model.
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        self.attention: str = config._attn_implementation
        self.version: str = transformers.__version__
        self._config_class: Any = transformers.GenerationConfig
        self._model: Any = model
        self._pad = spec.eos_token_ids[0] if spec.eos_token_ids else 0
        self.clock = clock or WallClock()

    def generate(
        self,
        prompts: Sequence[Ids],
        max_new_tokens: int,
        *,
        eos_ids: Sequence[int] = (),
        lookup: tuple[int, int] | None = None,
    ) -> Generated:
        """Greedy outputs of `prompts` as one batch, padded on the left and masked; `lookup` is (tokens, max n-gram)."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": self._pad}
        options["eos_token_id"] = list(eos_ids) or None
        if lookup is not None:
            options |= {"prompt_lookup_num_tokens": lookup[0], "max_matching_ngram_size": lookup[1]}
        config = self._config_class(**options)
        times = TokenTimes(self.clock)
        begin = self.clock.now()
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=config, streamer=times)
        wall_s = self.clock.now() - begin
        rows = tuple(cut_after_eos(tuple(int(t) for t in row), eos_ids) for row in out[:, longest:])
        return Generated(rows, times, wall_s)

    def run(
        self,
        prompts: Sequence[Ids],
        max_new_tokens: int,
        *,
        together: bool,
        eos_ids: Sequence[int] = (),
        lookup: tuple[int, int] | None = None,
    ) -> Sample:
        """Generate for all prompts in one batch, or one after another."""
        parts: list[tuple[int, float, int, float, int]] = []
        outputs: list[Ids] = []
        for batch in [prompts] if together else [[one] for one in prompts]:
            done = self.generate(batch, max_new_tokens, eos_ids=eos_ids, lookup=lookup)
            tokens, decode_s = done.times.window()
            steps = len(done.times.times) - 1
            parts.append((tokens, decode_s, sum(len(row) for row in done.outputs), done.wall_s, steps))
            outputs += done.outputs
        return Sample(pooled(parts), tuple(outputs))


def cut_after_eos(row: Ids, eos_ids: Sequence[int]) -> Ids:
    """The ids up to the first EOS, which is kept; all of them without one."""
    end = next((i for i, token in enumerate(row) if token in eos_ids), len(row))
    return row[: end + 1]


@contextmanager
def kernel_times(clock: Clock | None = None) -> Iterator[list[float]]:
    """Seconds of each kernel launch of the cpu backend while the context is open, as a list that grows."""
    timer = clock or WallClock()
    spans: list[float] = []

    def timed(kernel: int, argument: int, num_threads: int) -> None:
        begin = timer.now()
        parallel(kernel, argument, num_threads)
        spans.append(timer.now() - begin)

    with mock.patch("specbench.engine.ops.cpu.parallel", timed):
        yield spans


def shortened(requests: Sequence[Request], tokens: int) -> list[Request]:
    """The same requests, cut after `tokens` output tokens: for warming up."""
    return [replace(one, stops=replace(one.stops, max_tokens=min(tokens, one.stops.max_tokens))) for one in requests]
