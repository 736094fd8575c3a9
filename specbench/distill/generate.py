"""Self-generated training text: the target writes users' prompts after its chat template's header, then answers them.

The states that draft heads read are recorded on the way: a decoder that writes a token has computed them. A shard is a
fixed number of prompts; it depends on the settings and its own number alone, so shards are made in any order, by
several processes, and a run that stopped goes on with the shards that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.distill.openers import Openers, openers_of
from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.heads.layouts_eagle import default_states
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.decoder import DTYPES, FINAL, Capture, Decoder, DecoderLimits
from specbench.engine.models.loader import iter_weights
from specbench.engine.models.sources import resolve_model
from specbench.engine.models.tokenizer import Tokenizer, load_tokenizer
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest, Request
from specbench.engine.sampling import SamplingParams
from specbench.engine.stops import StopRules
from specbench.engine.trace import RequestTrace
from specbench.errors import InputError
from specbench.metrics import is_looping
from specbench.scenario.prompts import load_prompts

PREFILL_ROWS = 128
MIN_PROMPT_TOKENS = 3
MIN_ANSWER_TOKENS = 4
_PLACE = "\u2039the user's words\u203a"


@dataclass(frozen=True)
class TextSettings:
    """What text is made. Prompts are drawn at temperature 1 with `prompt_min_p`, behind openers in turn; an answer's
    temperature is taken in turn from `temperatures`. `shard_prompts` prompts are asked for in one shard."""

    model: str
    revision: str | None = None
    seed: int = 0
    shard_prompts: int = 192
    prompt_len: int = 96
    prompt_min_p: float = 0.02
    openers: Openers = "none"
    answer_len: int = 192
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    batch_size: int = 48


@dataclass(frozen=True)
class Conversation:
    """A prompt in the chat template and the target's answer, as token ids; `text` is the user's words.

    `states` bf16[n, S * H]: the states of every token but the last, which no pass has read (its row is zero); None
    where they were not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_len: int
    temperature: float
    states: torch.Tensor | None = None

    @property
    def answer_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


def user_header(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the chat template up to where the user's words begin."""
    text = tokenizer.chat_text([{"role": "user", "content": _PLACE}], add_generation_prompt=False)
    before, found, _ = text.partition(_PLACE)
    if not found:
        raise InputError("the chat template does not show the user's words", key="chat_template")
    return tuple(tokenizer.encode(before))


def normalised(text: str) -> str:
    """A text by which prompts are compared: lower case, one space between words."""
    return " ".join(text.lower().split())


def benchmark_texts() -> frozenset[str]:
    """Every turn of the built-in prompts, normalised: what training text may never equal."""
    return frozenset(normalised(turn) for prompt in load_prompts("builtin") for turn in prompt.turns)


def usable_prompt(token_ids: Sequence[int], text: str, finish_reason: str) -> bool:
    """Whether a written prompt is one: ended by itself, with words, without a loop. `token_ids` without the end."""
    return finish_reason == "stop" and len(token_ids) >= MIN_PROMPT_TOKENS and bool(text) and not is_looping(token_ids)


def usable_answer(token_ids: Sequence[int], finish_reason: str) -> bool:
    """Whether an answer teaches something: not failed, empty or looping. `token_ids` with its end, if it has one."""
    words = token_ids[:-1] if finish_reason == "stop" else token_ids
    return finish_reason in ("stop", "length") and len(words) >= MIN_ANSWER_TOKENS and not is_looping(words)


class RecordingDecoder(Decoder):
    """A decoder that keeps the states `recorded` of every token in the cache, bf16[slots, context, S * H]."""

    recorded: Capture = ()
    cells: torch.Tensor

    def record(self, states: Capture) -> None:
        """Keep `states` from now on."""
        self.recorded = states
        shape = (len(self.kv.lengths), self.kv.max_context, len(states) * self.spec.hidden_size)
        self.cells = torch.zeros(shape, dtype=torch.bfloat16)

    def forward(
        self,
        batch: ForwardBatch,
        num_layers: int | None = None,
        *,
        captured: bool | None = None,
        capture: Capture = (),
    ) -> torch.Tensor:
        logits = super().forward(batch, num_layers, captured=captured, capture=self.recorded)
        slots = torch.from_numpy(batch.slots[batch.row_request])
        self.cells[slots, torch.from_numpy(batch.positions)] = self.states.to(torch.bfloat16)
        return logits


class _RecordingEngine(Engine):
    """Takes a request's states out of its slot when it ends."""

    def __init__(self, decoder: RecordingDecoder, store: PrefillStore, batch_size: int) -> None:
        super().__init__(decoder, store, None, batch_size=batch_size, depth=0)
        self._cells = decoder.cells
        self.states: dict[str, torch.Tensor] = {}

    def _retire(self, active: ActiveRequest) -> None:
        count = active.num_cached
        states = torch.zeros(count + 1, self._cells.shape[-1], dtype=torch.bfloat16)
        states[:count] = self._cells[active.slot, :count]
        self.states[active.request.request_id] = states
        super()._retire(active)


class Writer:
    """The target, ready to write shards."""

    def __init__(self, settings: TextSettings) -> None:
        self.settings = settings
        source = resolve_model(settings.model, revision=settings.revision)
        self.label = source.label
        self.spec = read_model_spec(source)
        self.tokenizer = load_tokenizer(source)
        self.header = user_header(self.tokenizer)
        self._forbidden = benchmark_texts()
        batch = settings.batch_size
        # The generation header and the turn's end come to fewer tokens than the user's header and 32.
        opener = max(len(self.tokenizer.encode(text)) for text in openers_of(settings.openers))
        context = 2 * len(self.header) + 32 + opener + settings.prompt_len + settings.answer_len
        kv = PagedKVCache(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            num_slots=batch,
            max_context=min(context, self.spec.max_position_embeddings),
            dtype=torch.bfloat16,
            device="cpu",
            page_size=16,
            layout="panels",
        )
        self.decoder = RecordingDecoder(
            *(self.spec, iter_weights(source, self.spec, DTYPES["bf16"])),
            dtype="bf16",
            backend="cpu",
            kv=kv,
            limits=DecoderLimits(max(PREFILL_ROWS, batch), batch),
        )
        self.decoder.record(recorded_states(self.spec.num_layers))

    def shard(self, index: int) -> list[Conversation]:
        """The conversations of shard `index`: prompts written, sifted, answered, sifted."""
        prompts = self._prompts(index)
        law = self.settings.temperatures
        requests = []
        for number, text in enumerate(prompts):
            ids = tuple(self.tokenizer.apply_chat([{"role": "user", "content": text}]))
            params = SamplingParams(law[number % len(law)], seed=self.settings.seed)
            requests.append(self._request(f"answer-{index}-{number}", ids, params, self.settings.answer_len))
        kept = []
        traces, states = self._run(requests)
        for text, request, trace in zip(prompts, requests, traces, strict=True):
            if usable_answer(trace.token_ids, trace.finish_reason):
                ids, own = (*request.prompt_ids, *trace.token_ids), states[request.request_id]
                kept.append(Conversation(text, ids, len(request.prompt_ids), request.params.temperature, own))
        return kept

    def _prompts(self, index: int) -> list[str]:
        settings = self.settings
        params = SamplingParams(1.0, min_p=settings.prompt_min_p, seed=settings.seed)
        openers = openers_of(settings.openers)
        begins = [self.tokenizer.encode(openers[number % len(openers)]) for number in range(settings.shard_prompts)]
        requests = [
            self._request(f"prompt-{index}-{number}", (*self.header, *begin), params, settings.prompt_len)
            for number, begin in enumerate(begins)
        ]
        texts: dict[str, str] = {}
        for begin, trace in zip(begins, self._run(requests)[0], strict=True):
            ids = trace.token_ids[:-1]
            if any(self.tokenizer.is_special(token) for token in ids):
                continue
            text = self.tokenizer.decode((*begin, *ids)).strip()
            if usable_prompt(ids, text, trace.finish_reason) and normalised(text) not in self._forbidden:
                texts.setdefault(normalised(text), text)
        return list(texts.values())

    def _request(self, name: str, ids: tuple[int, ...], params: SamplingParams, length: int) -> Request:
        return Request(name, "distill", ids, params, StopRules(max_tokens=length, eos_ids=self.spec.eos_token_ids))

    def _run(self, requests: Sequence[Request]) -> tuple[tuple[RequestTrace, ...], dict[str, torch.Tensor]]:
        # A store of its own: prefills of prompts that never come again would pile up.
        engine = _RecordingEngine(self.decoder, PrefillStore(self.decoder), self.settings.batch_size)
        return engine.run(requests).requests, engine.states


def recorded_states(num_layers: int) -> Capture:
    """The states that the heads read, as they lie side by side in a shard: the final one, then EAGLE-3's three."""
    return (FINAL, *default_states(num_layers))
