"""A target ready to run: weights, tokenizer, prompts as requests, drafters; and what a case needs of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specbench.bench.clock import WallClock
from specbench.bench.devices import device_of, graphs_on, resolve_backend
from specbench.bench.drafters import PREFILL_ROWS, DrafterShop
from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.drafters.base import Drafter
from specbench.engine.kv_cache import PagedKVCache, pages_needed
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.models.loader import embedding_of, iter_weights, shares_embedding
from specbench.engine.models.sources import ModelSource, resolve_model
from specbench.engine.models.tokenizer import Tokenizer, first_vocab_difference, load_tokenizer
from specbench.engine.request import Request
from specbench.engine.sampling import SamplingParams
from specbench.engine.stops import StopRules
from specbench.errors import CapacityError, InputError
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import Case, KvSpec, TargetSpec, Workload
from specbench.scenario.prompts import Prompt, load_prompt_set

DUMMY_PROMPT_LEN = 128
DUMMY_PROMPTS = 64


def source_of(target: TargetSpec) -> ModelSource:
    """Where a target's weights come from."""
    if target.shape is not None:
        return resolve_model(f"dummy:{target.shape}")
    return resolve_model(target.model or "", revision=target.revision)


def case_bytes(spec: ModelSpec, case: Case, longest_prompt: int) -> int:
    """Memory a case needs for its target: weights, KV of all slots, and the logits of one verify pass. Activations are
    small beside; the drafter's own are `drafters.drafter_bytes`.

    Prompts of unknown length count as `longest_prompt` tokens.
    """
    work = case.workload
    context = (work.context_len or longest_prompt) + work.output_len + 1 + case.num_nodes - case.depth
    rows = work.batch_size * (case.num_nodes + 1)
    pages = pages_needed(work.batch_size, context, case.kv.page_size, case.kv.rollback)
    kv = spec.kv_bytes_per_token(case.target.dtype) * pages * case.kv.page_size
    return spec.weight_bytes(case.target.dtype) + kv + 4 * rows * spec.vocab_size


@dataclass(frozen=True)
class PreparedPrompts:
    """A case's prompts as token ids, with ids and categories; `source` and its hash go into the row."""

    source: str
    sha256: str
    prompts: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def longest(self) -> int:
        return max(len(ids) for _, _, ids in self.prompts)

    @property
    def categories(self) -> list[str]:
        return sorted({category for _, category, _ in self.prompts})


class Target:
    """One model in memory, used by all of its cases. Loading is `Target(...)`; `bind` sizes it for a case."""

    def __init__(self, target: TargetSpec, tell: Callable[[str], None] = lambda _: None) -> None:
        self.target = target
        self.backend, self.graphs = resolve_backend(target), graphs_on(target)
        self.device = device_of(self.backend)
        self.source = source_of(target)
        self.spec = read_model_spec(self.source)
        self.tokenizer: Tokenizer | None = None
        if self.source.kind != "dummy":
            self.tokenizer = load_tokenizer(self.source)
        tell(f"loading {self.source.display_name}")
        self.decoder = self.load(self.source, self.spec, target.dtype)
        self.store = PrefillStore(self.decoder, WallClock(self.device).now)
        self._prompts: dict[tuple[object, ...], PreparedPrompts] = {}
        self.drafters = DrafterShop(self)
        self.canaries: dict[object, str | None] = {}
        self.references: dict[tuple[object, ...], tuple[int, ...]] = {}

    def load(self, source: ModelSource, spec: ModelSpec, dtype: str) -> Decoder:
        """A model on this target's backend; one that shares the target's embedding is given it."""
        kv = self.kv_cache(spec, dtype, 1, PREFILL_ROWS)
        shared = embedding_of(self.source, self.spec, DTYPES[dtype]) if shares_embedding(source) else None
        tensors = iter_weights(source, spec, DTYPES[dtype], device=self.device, shared=shared)
        limits = DecoderLimits(PREFILL_ROWS, 1)
        return Decoder(
            *(spec, tensors),
            dtype=dtype,
            backend=self.backend,
            kv=kv,
            limits=limits,
            device=self.device,
            graphs=self.graphs,
        )

    def kv_cache(self, spec: ModelSpec, dtype: str, slots: int, context: int, kv: KvSpec | None = None) -> PagedKVCache:
        kv = kv or KvSpec()
        return PagedKVCache(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_slots=slots,
            max_context=context,
            dtype=DTYPES[dtype],
            device=self.device,
            page_size=kv.page_size,
            layout="rows" if self.backend == "triton" else "panels",
            rollback=kv.rollback,
        )

    def bind(self, case: Case, prompts: PreparedPrompts) -> None:
        """Size KV cache and buffers for `case`. Raises CapacityError if the model's context is too short."""
        batch = case.workload.batch_size
        context = prompts.longest + case.workload.output_len + 1
        if context > self.spec.max_position_embeddings:
            raise CapacityError(
                f"{context} tokens of context are needed, and the model has {self.spec.max_position_embeddings}"
            )
        rows = batch * (case.num_nodes + 1)
        limits = DecoderLimits(max(PREFILL_ROWS, rows), max(rows, batch))
        # The nodes of a draft take cells beside those on its path.
        context += case.num_nodes - case.depth
        kept = self.decoder.kv.page_size
        self.decoder.rebind(self.kv_cache(self.spec, case.target.dtype, batch, context, case.kv), limits)
        if kept != case.kv.page_size:
            self.store = PrefillStore(self.decoder, WallClock(self.device).now)  # prefills are kept as pages

    def drafter(self, case: Case, context: int) -> Drafter | None:
        """The case's drafter, with no state left from another case; `context` is the most tokens a request will have.

        Raises InputError where it can't be had.
        """
        return self.drafters.drafter(case, context)

    def check_vocabulary(self, drafter: ModelSource) -> None:
        """Raise InputError, naming the first difference, unless both sides give every id the same token.

        A model that shares the target's embedding has no tokens of its own to compare.
        """
        if self.tokenizer is None or shares_embedding(drafter):
            return
        difference = first_vocab_difference(self.tokenizer, load_tokenizer(drafter))
        if difference is not None:
            token_id, ours, theirs = difference
            raise InputError(
                f"target and drafter disagree on the vocabulary: id {token_id} is {ours!r} for the target "
                f"and {theirs!r} for {drafter.display_name}",
                key="drafters.model",
                remedy="choose a drafter with the target's own tokenizer",
            )

    def prompts(self, work: Workload) -> PreparedPrompts:
        """The workload's prompts through the chat template, cut or filled to `context_len` where it is given."""
        key = (work.prompts, work.context_len, work.seed, work.output_len if work.context_len is None else 0)
        if key not in self._prompts:
            self._prompts[key] = self._prepare(work)
        return self._prompts[key]

    def _prepare(self, work: Workload) -> PreparedPrompts:
        if self.tokenizer is None:
            stream = np.random.default_rng(work.seed)
            length = work.context_len or DUMMY_PROMPT_LEN
            ids = stream.integers(0, self.spec.vocab_size, (work.prompts.num_prompts or DUMMY_PROMPTS, length))
            rows = tuple((f"random-{i}", "random", tuple(int(t) for t in row)) for i, row in enumerate(ids))
            return PreparedPrompts("random token ids (dummy weights)", "", rows)
        spec = work.prompts
        chosen = load_prompt_set(
            spec.locator(work.seed), categories=spec.categories, limit=spec.num_prompts, seed=work.seed
        )
        ready = [(p.question_id, p.category, self._conversation(p, work)) for p in chosen.prompts]
        if work.context_len is not None:
            ready = [(name, kind, ids) for name, kind, ids in ready if len(ids) <= (work.context_len or 0)]
            if not ready:
                raise CapacityError(f"no prompt is as short as context_len {work.context_len}")
            filler = [token for p in chosen.prompts for token in self.tokenizer.encode(p.turns[0] + "\n\n")]
            ready = [(name, kind, self._filled(ids, filler, work.context_len)) for name, kind, ids in ready]
        return PreparedPrompts(chosen.name, chosen.sha256, tuple(ready))

    @staticmethod
    def _filled(ids: tuple[int, ...], filler: Sequence[int], length: int) -> tuple[int, ...]:
        """`ids` with text of other prompts before them, `length` tokens in all."""
        missing = length - len(ids)
        repeated = list(filler) * (missing // max(1, len(filler)) + 1)
        return (*repeated[:missing], *ids)

    def _conversation(self, prompt: Prompt, work: Workload) -> tuple[int, ...]:
        """Token ids up to the last turn's answer; the target writes the answers to the turns before, greedily."""
        assert self.tokenizer is not None
        messages = [{"role": "user", "content": prompt.turns[0]}]
        for turn in prompt.turns[1:]:
            ids = tuple(self.tokenizer.apply_chat(messages))
            reply = self._answer(ids, work.output_len)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": turn}]
        return tuple(self.tokenizer.apply_chat(messages))

    def _answer(self, ids: tuple[int, ...], length: int) -> str:
        assert self.tokenizer is not None
        pages = KvSpec(page_size=self.decoder.kv.page_size)
        kv = self.kv_cache(self.spec, self.target.dtype, 1, len(ids) + length + 1, pages)
        self.decoder.rebind(kv, DecoderLimits(PREFILL_ROWS, 1))
        stops = StopRules(max_tokens=length, eos_ids=self.spec.eos_token_ids)
        request = Request("turn", "turn", ids, SamplingParams(), stops)
        trace = Engine(self.decoder, self.store, None, batch_size=1, depth=0).run([request])
        return self.tokenizer.decode(trace.requests[0].token_ids, skip_special=True)

    def requests(self, case: Case, prompts: PreparedPrompts) -> list[Request]:
        """All requests of a case, in the prompts' order, each with its AR output where that is known."""
        work, law = case.workload, case.sampling
        eos = () if work.ignore_eos or self.tokenizer is None else self.spec.eos_token_ids
        stops = StopRules(max_tokens=work.output_len, eos_ids=eos, stop_strings=work.stop)
        requests = []
        for name, category, ids in prompts.prompts:
            params = SamplingParams(law.temperature, law.top_k, law.top_p, law.min_p, seed=work.seed)
            request = Request(name, category, ids, params, stops)
            requests.append(replace(request, reference=self.references.get(self.reference_key(request))))
        return requests

    @staticmethod
    def reference_key(request: Request) -> tuple[object, ...]:
        return (request.prompt_ids, request.stops, request.params)

    @property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        return self.tokenizer.token_bytes if self.tokenizer else None


def blocks_of(requests: Sequence[Request], batch_size: int, categories: int) -> Iterator[list[Request]]:
    """Endless blocks of requests, each at least a full batch and one of every category, walking over all prompts.

    A prompt may stand several times in a batch larger than the prompt set: its requests are told apart by their round.
    """
    size = max(batch_size, min(categories, len(requests)))
    at = 0
    while True:
        yield [_of_round(requests, at + i) for i in range(size)]
        at = (at + size) % math.lcm(len(requests), size)


def _of_round(requests: Sequence[Request], index: int) -> Request:
    round_, place = divmod(index, len(requests))
    return replace(requests[place], request_id=f"{requests[place].request_id}#{round_}")


def prompt_id(request_id: str) -> str:
    """The prompt that a request of a block is made of."""
    return request_id.rpartition("#")[0]


def device_bytes() -> int:
    """Memory that this process can still get."""
    import psutil

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
