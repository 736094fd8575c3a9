"""Tokens/s beside transformers' `generate`: autoregressive at batch 1 and 8, and prompt lookup on copying prompts."""

from __future__ import annotations

from benchmarks.blocks import Rounds, Sample
from benchmarks.figures import Bound, Figure, Report, at_least
from benchmarks.settings import CATEGORIES, Settings
from benchmarks.sides import DTYPE_NAMES, Ours, Theirs, chat_prompts, shortened
from specbench.engine.drafters.lookup import NgramDrafter

AR_TARGETS = {(1, "fp32"): 2.0, (1, "bf16"): 2.0, (8, "fp32"): 2.5, (8, "bf16"): 2.0}
LOOKUP_TARGET = 1.3
WARMUP_TOKENS = 4


def speed_figures(key: str, what: str, rounds: Rounds, bound: Bound | None, dtype: str) -> tuple[Figure, ...]:
    """Ratios ours over theirs in the decode window (with the target) and end to end, both rates, and equal outputs."""
    disturbed = rounds.disturbed
    equal_bound = at_least(1.0) if dtype == "fp32" else None
    decode, total = "decode_tokens_per_s", "total_tokens_per_s"
    ours, theirs = "ours", "theirs"
    return (
        Figure(f"{key}.decode", f"{what}, decode", "x", rounds.ratio(ours, theirs, decode), bound, None, disturbed),
        Figure(
            f"{key}.end_to_end",
            f"{what}, prefill included",
            "x",
            rounds.ratio(ours, theirs, total),
            disturbed=disturbed,
        ),
        Figure(
            f"{key}.outputs",
            f"{what}, requests with equal outputs",
            "share",
            rounds.equal_share(ours, theirs),
            equal_bound,
        ),
        Figure(
            f"{key}.common",
            f"{what}, tokens before the first difference",
            "share",
            rounds.common_share(ours, theirs),
        ),
        *(
            Figure(f"{key}.{name}.{arm}", f"{arm}, {label}", "tok/s", rounds.values(arm, value), disturbed=disturbed)
            for name, value, label in (("decode", decode, "decode"), ("end_to_end", total, "prefill included"))
            for arm in (ours, theirs)
        ),
    )


def ar(settings: Settings) -> Report:
    """AR greedy decoding of the same prompts, EOS ignored on both sides, so that both do equal work."""
    figures: list[Figure] = []
    raw: dict[str, object] = {}
    notes: list[str] = []
    for dtype in DTYPE_NAMES:
        settings.tell(f"ar {dtype}: loading")
        engine = Ours(dtype)
        other = Theirs(engine.spec, engine.target, dtype)
        for batch in (1, 8):
            rounds = _ar_rounds(settings, engine, other, batch)
            key = f"ar.{dtype}.batch{batch}"
            bound = at_least(AR_TARGETS[batch, dtype])
            figures += speed_figures(
                key, f"AR {dtype}, batch {batch}: tokens/s over transformers", rounds, bound, dtype
            )
            raw[key] = rounds.to_list()
        notes.append(f"{dtype}: transformers {other.version}, attention {other.attention}")
    notes.append(f"{settings.output_len} new tokens a request, the same prompts in both arms, EOS ignored")
    return Report("ar", tuple(figures), raw, tuple(notes))


def _ar_rounds(settings: Settings, engine: Ours, other: Theirs, batch: int) -> Rounds:
    wanted = batch * settings.blocks
    prompts = chat_prompts(engine.target, CATEGORIES, wanted, settings.seed)
    requests = engine.bind(prompts, batch_size=batch, output_len=settings.output_len)

    def chosen(index: int) -> list[int]:
        return [(index * batch + i) % len(requests) for i in range(batch)]

    def ours(index: int) -> Sample:
        return engine.run([requests[i] for i in chosen(index)], together=True)

    def theirs(index: int) -> Sample:
        return other.run([requests[i].prompt_ids for i in chosen(index)], settings.output_len, together=True)

    first = [requests[i] for i in chosen(0)]
    engine.run(shortened(first, WARMUP_TOKENS), together=True)
    other.run([one.prompt_ids for one in first], WARMUP_TOKENS, together=True)
    return settings.rounds(f"ar {engine.dtype} batch {batch}", {"ours": ours, "theirs": theirs})


def prompt_lookup(settings: Settings) -> Report:
    """n-gram drafting at batch 1 on editing prompts: the same rule, n-grams and depth; EOS ends a request."""
    figures: list[Figure] = []
    raw: dict[str, object] = {}
    for dtype in DTYPE_NAMES:
        settings.tell(f"prompt_lookup {dtype}: loading")
        engine = Ours(dtype)
        other = Theirs(engine.spec, engine.target, dtype)
        rounds = _lookup_rounds(settings, engine, other)
        key = f"prompt_lookup.{dtype}"
        what = f"prompt lookup {dtype}, batch 1: tokens/s over transformers"
        figures += speed_figures(key, what, rounds, at_least(LOOKUP_TARGET), dtype)
        figures += [
            Figure(
                f"{key}.tokens_per_step.{arm}", f"{arm}, tokens a step", "tokens", rounds.values(arm, "tokens_per_step")
            )
            for arm in ("ours", "theirs")
        ]
        raw[key] = rounds.to_list()
    note = (
        f"editing prompts, {settings.lookup_prompts} a block, up to {settings.lookup_output_len} new tokens each, "
        f"depth {settings.lookup_depth}, n-grams up to {settings.lookup_ngram}"
    )
    return Report("prompt_lookup", tuple(figures), raw, (note,))


def _lookup_rounds(settings: Settings, engine: Ours, other: Theirs) -> Rounds:
    count, depth, ngram = settings.lookup_prompts, settings.lookup_depth, settings.lookup_ngram
    prompts = chat_prompts(engine.target, ("editing",), count * settings.blocks, settings.seed)
    length = settings.lookup_output_len
    requests = engine.bind(prompts, batch_size=1, output_len=length, depth=depth, ignore_eos=False)
    eos = engine.spec.eos_token_ids

    def chosen(index: int) -> list[int]:
        return [(index * count + i) % len(requests) for i in range(count)]

    def drafter() -> NgramDrafter:
        return NgramDrafter(ngram, 1, "transformers", eos)

    def ours(index: int) -> Sample:
        return engine.run([requests[i] for i in chosen(index)], together=False, drafter=drafter(), depth=depth)

    def theirs(index: int) -> Sample:
        prompts = [requests[i].prompt_ids for i in chosen(index)]
        return other.run(prompts, length, together=False, eos_ids=eos, lookup=(depth, ngram))

    first = [requests[i] for i in chosen(0)]
    engine.run(shortened(first, WARMUP_TOKENS), together=False, drafter=drafter(), depth=depth)
    other.run([one.prompt_ids for one in first], WARMUP_TOKENS, together=False, eos_ids=eos, lookup=(depth, ngram))
    return settings.rounds(f"prompt_lookup {engine.dtype}", {"ours": ours, "theirs": theirs})
