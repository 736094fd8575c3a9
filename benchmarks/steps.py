"""One AR step at batch 1, taken apart: the bandwidth of the linear layers, and what is neither they nor attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from benchmarks.blocks import Arm, Sample
from benchmarks.figures import Figure, Report, at_least, at_most
from benchmarks.settings import CATEGORIES, Settings
from benchmarks.sides import DTYPE_NAMES, Ours, chat_prompts, kernel_times, shortened
from specbench.bench.ceilings import measure_roofs
from specbench.engine.ops.cpu import PackedLinear
from specbench.engine.request import Request
from specbench.engine.trace import Trace
from specbench.roofline.shapes import DTYPE_BYTES, ModelSpec

BANDWIDTH_TARGET = 0.60
HOST_TARGET = 0.08


def linear_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the weights that a step's linear layers read: all layers' and the unembedding, once."""
    return (spec.num_linear_params + spec.num_head_params) * DTYPE_BYTES[dtype]


def step_figures(trace: Trace, kernel_s: float, shares: Mapping[str, float]) -> dict[str, float]:
    """Where the time of an AR trace went.

    `kernel_s` are the seconds within the steps' kernel launches, `shares` the shares of it by kind of operation.
    `host_share` = (step - kernel_s * (linear + attention) - sampling) / step. It holds norms, RoPE and activations;
    `outside_kernel_share` = (step - kernel_s - sampling) / step is Python's part alone.
    """
    step, sample = float(trace.step_s.sum()), float(trace.sample_s.sum())
    core = kernel_s * (shares["linear"] + shares["attention"])
    return {
        "step_s": step / len(trace.step_s),
        "linear_s": kernel_s * shares["linear"] / len(trace.step_s),
        "linear_share": kernel_s * shares["linear"] / step,
        "attention_share": kernel_s * shares["attention"] / step,
        "sample_share": sample / step,
        "host_share": (step - core - sample) / step,
        "outside_kernel_share": (step - kernel_s - sample) / step,
    }


def _step_arm(settings: Settings, engine: Ours) -> Arm:
    """An arm that decodes one prompt at batch 1, prefilled before, and takes its steps apart."""
    prompts = chat_prompts(engine.target, CATEGORIES, settings.blocks, settings.seed)
    requests = engine.bind(prompts, batch_size=1, output_len=settings.step_tokens)
    decode = partial(_decode_apart, engine)
    decode(shortened(requests, 4)[0])
    return lambda index: decode(requests[index % len(requests)])


def _decode_apart(engine: Ours, request: Request) -> Sample:
    runner = engine.engine(1)
    runner.store.get(request.prompt_ids, 0)
    ops = engine.target.decoder.ops
    ops.cycles[:] = 0
    with kernel_times(engine.clock) as spans:
        trace = runner.run([request])
    assert len(spans) == len(trace.step_s), "each step is one kernel launch"
    return Sample(step_figures(trace, sum(spans), ops.shares()))


def linear_bandwidth(settings: Settings) -> Report:
    """Bytes/s of the linear layers in real steps over the read bandwidth measured beside them."""
    figures: list[Figure] = []
    raw: dict[str, object] = {}
    for dtype in DTYPE_NAMES:
        settings.tell(f"linear_bandwidth {dtype}: loading")
        engine = Ours(dtype)
        step = _step_arm(settings, engine)
        size = linear_bytes(engine.spec, dtype)
        arms: dict[str, Arm] = {
            "step": partial(_with_rate, step, size),
            "roof": partial(_read_roof, dtype, settings.roof_budget_s),
        }
        rounds = settings.rounds(f"linear_bandwidth {dtype}", arms)
        key, busy = f"linear_bandwidth.{dtype}", rounds.disturbed
        share = rounds.ratio("step", "roof", "bytes_per_s")
        figures += [
            Figure(
                key,
                f"linear layers' bytes/s over measured read bandwidth, {dtype}",
                "share",
                share,
                at_least(BANDWIDTH_TARGET),
                None,
                busy,
            ),
            Figure(f"{key}.linear", f"linear layers, {dtype}", "GB/s", rounds.values("step", "bytes_per_s")),
            Figure(f"{key}.read", "read bandwidth", "GB/s", rounds.values("roof", "bytes_per_s")),
        ]
        raw[key] = rounds.to_list()
    return Report("linear_bandwidth", tuple(figures), raw, ("weights' bytes only, in AR steps at batch 1",))


def _with_rate(step: Arm, size: int, index: int) -> Sample:
    sample = step(index)
    return Sample({**sample.values, "bytes_per_s": size / sample.values["linear_s"]})


def _read_roof(dtype: str, budget_s: float, _: int) -> Sample:
    """The best of torch's reads and of our own linear layer alone, over buffers that no cache holds."""
    threads = torch.get_num_threads()
    roofs = measure_roofs(
        "cpu",
        dtypes=(dtype,),
        skinny_dtype=dtype,
        rows=(1,),
        make_linear=lambda weight: PackedLinear(weight, threads),
        budget_s=budget_s,
    )
    return Sample({"bytes_per_s": roofs.read.median})


def host(settings: Settings) -> Report:
    """The share of an AR step at batch 1 that is neither in linear layers, nor in attention, nor in sampling."""
    figures: list[Figure] = []
    raw: dict[str, object] = {}
    for dtype in DTYPE_NAMES:
        settings.tell(f"host {dtype}: loading")
        engine = Ours(dtype)
        rounds = settings.rounds(f"host {dtype}", {"step": _step_arm(settings, engine)})
        key, busy = f"host.{dtype}", rounds.disturbed
        what = f"share of a step not in linear layers, attention or sampling, {dtype}"
        figures.append(
            Figure(key, what, "share", rounds.values("step", "host_share"), at_most(HOST_TARGET), None, busy)
        )
        for name, label in (
            ("outside_kernel_share", "outside the kernel launch and sampling (Python)"),
            ("linear_share", "in linear layers"),
            ("attention_share", "in attention"),
            ("sample_share", "in sampling"),
        ):
            what = f"share of a step {label}, {dtype}"
            figures.append(Figure(f"{key}.{name}", what, "share", rounds.values("step", name), disturbed=busy))
        figures.append(
            Figure(f"{key}.step", f"AR step, {dtype}", "ms", rounds.values("step", "step_s"), disturbed=busy)
        )
        raw[key] = rounds.to_list()
    return Report("host", tuple(figures), raw)
