"""Sizing: the arithmetic of one replica by hand, what limits an answer, and what is said of impossible wishes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import ExitCode, InputError
from specbench.predict import size_command
from specbench.predict.size_command import request_of, sized
from specbench.predict.size_text import answer, limit_text, narrower
from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.draft_cost import drafter_shape
from specbench.roofline.hardware import hardware
from specbench.roofline.serving import Drafting, Link, Replica, why_not_split
from specbench.roofline.shapes import named_shape
from specbench.roofline.sizing import Bounds, Load, Option, SizeRequest, _largest, size_up
from specbench.roofline.step_model import ASSUMED_GPU, StepModel
from specbench.scenario.size_schema import load_template

ROOT = Path(__file__).resolve().parent.parent
EIGHT, SEVENTY = named_shape("llama-3.1-8b"), named_shape("llama-3.1-70b")
H100, H200 = hardware("h100-sxm"), hardware("h200-sxm")
LINK = Link(450e9, 10e-6)


def model(spec: Any = EIGHT, device: Any = H100) -> StepModel:
    return StepModel(spec, device.roof("bf16"), ASSUMED_GPU, "bf16", "bf16")


def eagle3(depth: int, rate: float = 0.75, spec: Any = EIGHT) -> Drafting:
    return Drafting("eagle3", drafter_shape("eagle3", spec), AcceptanceCurve.constant(rate), depth)


def request(**changes: Any) -> SizeRequest:
    values: dict[str, Any] = {
        "model": model(),
        "device": H100,
        "draftings": (eagle3(3),),
        "prompt_len": 1024,
        "output_len": 256,
        "load": Load(concurrency=16),
        "link": LINK,
    }
    return SizeRequest(**(values | changes))


def replica(gpus: int = 1, drafting: Drafting | None = None, **changes: Any) -> Replica:
    values = {"model": model(), "gpus": gpus, "link": LINK, "drafting": drafting or Drafting("none")}
    return Replica(**(values | {"prompt_len": 1024, "output_len": 257} | changes))


# ---- one replica


def test_communication_is_two_all_reduces_a_layer_and_a_gather() -> None:
    """Llama-3.1-8B over 4 GPUs, 8 tokens, by hand: 2 · 32 · (2 · 3/4 · 8 · 4096 · 2 / 450e9 + 10 µs) + the logits."""
    reduced = 2 * 0.75 * 8 * 4096 * 2 / 450e9 + 10e-6
    gathered = 0.75 * 8 * 128256 * 2 / 450e9 + 10e-6
    assert replica(4).communication_s(8, 32, 4096, 128256) == pytest.approx(64 * reduced + gathered, rel=1e-12)
    assert replica(1).communication_s(8, 32, 4096, 128256) == 0.0


def test_on_one_gpu_a_step_is_the_step_models() -> None:
    one = replica().at(16)
    assert one.step_s == pytest.approx(model().ar_s(16, 1024 + 257 / 2), rel=1e-12)
    drafted = replica(drafting=eagle3(3)).at(16)
    cell = model().cell(16, 1024 + 257 / 2, 3, eagle3(3).shape, AcceptanceCurve.constant(0.75), output_tokens=256)
    assert drafted.step_s == pytest.approx(cell.step.total_s, rel=1e-12)
    assert drafted.speedup == pytest.approx(cell.value, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_steady_state_keeps_littles_law(batch: int) -> None:
    """Slots = rate x stay, and a stay is the own prefill, the decode and everybody else's prefills."""
    one = replica()
    moment = one.at(batch)
    stay = one.prefill_s + 256 * moment.tpot_s
    assert moment.requests_per_s * stay == pytest.approx(batch, rel=1e-12)
    assert moment.tpot_s == pytest.approx(moment.step_s + (batch - 1) * one.prefill_s / 256, rel=1e-12)


def test_a_prefill_takes_its_flops() -> None:
    """1024 tokens of 8B at 60 % of 989 TFLOP/s: 2 · 1024 · 6.98e9 plus attention and one row of the head."""
    linear = 2 * 1024 * EIGHT.num_linear_params
    attention = 4 * 32 * 32 * 128 * 1024 * (1 + 1024) / 2
    expected = (linear + attention) / (0.6 * H100.peaks_flops_per_s["bf16"])
    assert replica().prefill_s == pytest.approx(expected + 0.5e-3, rel=0.03)


def test_more_gpus_are_faster_but_less_so_each() -> None:
    steps = [replica(n).at(8).step_s for n in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert all(a < 2 * b for a, b in pairwise(steps))
    slow = [replica(n, link=Link(1e9, 1e-4)).at(8).step_s for n in (1, 2, 4, 8)]
    assert slow[3] > slow[0], "over a slow link splitting loses"


def test_memory_is_split_but_for_copied_heads() -> None:
    held = [replica(n, model=model(SEVENTY, H200)).footprint(16) for n in (1, 2, 8, 16)]
    assert held[0].weights == pytest.approx(SEVENTY.num_params * 2)
    assert held[1].weights == held[0].weights / 2
    tokens = 16 * (1024 + 257)
    assert held[0].kv == SEVENTY.kv_bytes_per_token("bf16") * tokens
    assert held[2].kv == held[0].kv / 8
    assert held[3].kv == held[2].kv, "8 KV heads over 16 GPUs: each is stored twice"


@pytest.mark.parametrize(
    ("gpus", "reason"), [(3, "32 heads"), (0, "over 0 GPUs"), (1, None), (8, None), (16, None), (32, None)]
)
def test_heads_are_split_whole(gpus: int, reason: str | None) -> None:
    found = why_not_split(model(), gpus)
    assert found is None if reason is None else reason in str(found)


def test_gpus_that_share_need_a_link() -> None:
    with pytest.raises(InputError, match="rate of their link"):
        replica(2, link=None)
    with pytest.raises(InputError, match="link of 0"):
        Link(0.0)


# ---- the search


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300))
def test_the_largest_that_holds(limit: int, most: int) -> None:
    calls: list[int] = []

    def holds(n: int) -> bool:
        calls.append(n)
        return n <= limit

    assert _largest(holds, most) == min(limit, most)
    assert all(1 <= n <= most for n in calls)
    assert len(calls) <= 20


def best(**changes: Any) -> Option:
    return size_up(request(**changes)).best


def test_an_answer_holds_what_it_says() -> None:
    wished = request(load=Load(requests_per_s=30.0), bounds=Bounds(tpot_s=0.012, ttft_s=0.2), max_gpus=16)
    found = size_up(wished)
    assert len(found.options) >= 3
    for option in found.options:
        one = wished.replica(option.tensor_parallel, option.drafting)
        assert option.gpus == option.replicas * option.tensor_parallel <= 16
        assert one.at(option.batch).tpot_s <= 0.012
        assert one.at(option.batch).ttft_s <= 0.2
        assert one.at(option.batch).requests_per_s * option.replicas >= 30 * (1 - 1e-9)
        assert one.footprint(option.most_batch).total <= 0.9 * H100.memory_bytes
        assert option.batch <= option.most_batch
        if option.batch > 1:
            assert one.at(option.batch - 1).requests_per_s * option.replicas < 30, "fewer busy slots would not do"
    assert [one.rank for one in found.options] == sorted(one.rank for one in found.options)


def test_memory_limits() -> None:
    option = best(prompt_len=32768, load=Load(concurrency=40), draftings=(), splits=(1,))
    assert option.limit == "memory"
    one = request(prompt_len=32768).replica(1, option.drafting)
    assert one.footprint(option.most_batch).total <= 0.9 * 80e9 < one.footprint(option.most_batch + 1).total


def test_tpot_limits() -> None:
    option = best(load=Load(concurrency=300), bounds=Bounds(tpot_s=0.012), draftings=(), splits=(1,))
    assert option.limit == "TPOT"
    one = request().replica(1, option.drafting)
    assert one.at(option.most_batch).tpot_s <= 0.012 < one.at(option.most_batch + 1).tpot_s


def test_ttft_limits() -> None:
    free = best(load=Load(concurrency=400), draftings=(), splits=(1,), max_gpus=64)
    bound = 0.8 * free.moment.ttft_s
    option = best(load=Load(concurrency=400), draftings=(), splits=(1,), max_gpus=64, bounds=Bounds(ttft_s=bound))
    assert option.limit == "TTFT"
    assert option.gpus > free.gpus


def test_the_load_limits_where_there_is_room() -> None:
    option = best(load=Load(requests_per_s=0.5), splits=(1,))
    assert (option.gpus, option.limit) == (1, "load")
    assert option.batch < option.most_batch


def test_prefills_limit_long_prompts_with_short_answers() -> None:
    """16k tokens in, 4 out: nothing but prefills, whatever the batch."""
    with pytest.raises(InputError, match="the limit is compute"):
        size_up(request(prompt_len=16384, output_len=4, load=Load(requests_per_s=50.0), splits=(1,), max_gpus=2))


def test_a_drafter_is_chosen_where_it_helps_and_not_where_it_does_not() -> None:
    assert best(load=Load(concurrency=2), splits=(1,)).drafting.depth == 3
    worthless = (eagle3(3, 0.05),)
    assert best(load=Load(concurrency=2), splits=(1,), draftings=worthless).drafting.depth == 0
    many = (eagle3(1), eagle3(3), eagle3(7))
    few, crowd = (best(load=Load(concurrency=c), splits=(1,), draftings=many) for c in (1, 256))
    assert few.drafting.depth > crowd.drafting.depth, "the best depth shrinks as the batch grows"


@settings(max_examples=8, deadline=None)
@given(st.floats(0.5, 40), st.floats(1.0, 3.0))
def test_more_load_never_needs_fewer_gpus_and_neither_does_a_tighter_bound(rate: float, factor: float) -> None:
    base = {"max_gpus": 4096, "splits": (1, 2)}
    least = best(load=Load(requests_per_s=rate), bounds=Bounds(tpot_s=0.03), **base).gpus
    assert best(load=Load(requests_per_s=rate * factor), bounds=Bounds(tpot_s=0.03), **base).gpus >= least
    assert best(load=Load(requests_per_s=rate), bounds=Bounds(tpot_s=0.03 / factor), **base).gpus >= least


def test_energy_and_cost_are_of_all_gpus() -> None:
    option = best(load=Load(concurrency=64), price_per_gpu_hour=3.6)
    assert option.joules_per_token == pytest.approx(700 * option.gpus / option.tokens_per_s)
    assert option.cost_per_million == pytest.approx(1e6 * 3.6 * option.gpus / 3600 / option.tokens_per_s)
    assert best(device=replace(H100, tdp_w=None)).joules_per_token is None
    assert best().cost_per_million is None


# ---- impossible wishes


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"bounds": Bounds(tpot_s=1e-4)}, "no configuration keeps tpot_ms 0.1", "tpot_ms: "),
        ({"bounds": Bounds(ttft_s=1e-3)}, "no configuration keeps ttft_ms 1", "ttft_ms: "),
        ({"load": Load(requests_per_s=1e5)}, "GPUs at least, and max_gpus is 8", "max_gpus: "),
        ({"model": model(SEVENTY), "splits": (1,)}, "llama-3.1-70b does not fit: over 1 GPU", "more GPUs a replica"),
        ({"splits": (3,)}, "32 heads", "None"),
        ({"splits": (16,)}, "none of 16 GPUs can share the model: at most 8", "None"),
        ({"prompt_len": 131072}, "131072 + 256 tokens", "shorten"),
        ({"usable_share": 1.5}, "of the memory", "0.5 to 1"),
    ],
)
def test_what_can_not_be_had_says_what_would_have_to_give(changes: dict[str, Any], message: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        size_up(request(**changes))
    assert message in caught.value.message
    assert remedy in str(caught.value.remedy)


def test_the_remedy_for_latency_is_enough() -> None:
    with pytest.raises(InputError) as caught:
        size_up(request(load=Load(concurrency=1), bounds=Bounds(tpot_s=1e-4)))
    wanted = float(str(caught.value.remedy).split(",")[0].removeprefix("tpot_ms: ")) / 1e3
    assert size_up(request(load=Load(concurrency=1), bounds=Bounds(tpot_s=wanted))).options


def test_loads_that_are_none() -> None:
    for load in ({}, {"requests_per_s": 1.0, "concurrency": 1}, {"requests_per_s": 0.0}, {"requests_per_s": math.nan}):
        with pytest.raises(InputError):
            Load(**load)


# ---- templates and the command

TEMPLATE = """
name: t
model: {shape: llama-3.1-8b}
hardware: {device: h100-sxm, tensor_parallel: [1]}
workload: {prompt_len: 512, output_len: 128}
load: {concurrency: 8}
drafters: [{kind: eagle3, acceptance: [0.8, 0.7]}]
"""


def written(folder: Path, text: str = TEMPLATE, **swaps: str) -> Path:
    for old, new in swaps.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / "t.yaml"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["llama-3.1-8b-h100", "llama-3.1-70b-h200"])
def test_shipped_templates_are_answered(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "scenarios" / "size" / f"{name}.yaml"
    out = tmp_path / "size.json"
    assert size_command.size(path, out=out, alternatives=5) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "limited by" in text
    assert "assumed" in text
    told = json.loads(out.read_text(encoding="utf-8"), parse_constant=lambda word: pytest.fail(word))
    assert told["predicted"] is True
    first = told["options"][0]
    bound = load_template(path)[0].bounds.tpot_ms
    assert bound is not None
    assert first["tpot_s"] <= bound / 1e3
    assert first["drafter"] != "none"
    assert told["refused"] or len(told["options"]) > 3


def test_seventy_billion_do_not_fit_on_one_h200() -> None:
    found = sized(ROOT / "scenarios" / "size" / "llama-3.1-70b-h200.yaml")
    assert found.best.tensor_parallel >= 2
    assert {one.limit for one in found.refusals if one.tensor_parallel == 1} == {"memory"}
    (one,) = [refusal for refusal in narrower(found, found.best) if refusal.tensor_parallel == 1]
    assert "needs 131" in one.text or "GiB" in one.text


def test_the_words_name_the_answer(tmp_path: Path) -> None:
    template, file = load_template(written(tmp_path))
    asked = request_of(template, file.parent)
    option = size_up(asked).best
    assert answer(option, asked).startswith("1 GPU h100-sxm (1 replica of 1), 8 busy slots a replica, eagle3 · depth")
    assert limit_text(option, asked).startswith("limited by the load: up to ")


@pytest.mark.parametrize(
    ("swaps", "key", "message", "remedy"),
    [
        ({"llama-3.1-8b": "llama-9"}, "model.shape", "unknown model shape", "llama-3.1-8b"),
        ({"h100-sxm": "h100"}, "hardware", "unknown hardware", "h100-sxm"),
        ({"shape: llama-3.1-8b": "shape: llama-3.1-8b, weight_dtype: int3"}, "model.weight_dtype", "int3", "int4"),
        ({"shape: llama-3.1-8b": "shape: llama-3.1-8b, kv_dtype: int4-g64"}, "model.kv_dtype", "int4-g64", "fp8"),
        ({"shape: llama-3.1-8b": "shape: llama-3.1-8b, compute_dtype: fp64"}, "model.compute_dtype", "no fp64", "bf16"),
        ({"shape: llama-3.1-8b": ""}, "model", "either shape or config", "shape: llama"),
        ({"shape: llama-3.1-8b": "config: /nowhere/config.json"}, None, "can't be read", "config.json"),
        ({"concurrency: 8": "concurrency: 8, requests_per_s: 2"}, "load", "not both", "requests_per_s"),
        ({"concurrency: 8": "concurrency: 0"}, "load.concurrency", "out of range", "1.."),
        ({"concurrency: 8": "requests_per_s: -1"}, "load.requests_per_s", "out of range", "(0,"),
        ({"[0.8, 0.7]": "[0.8, 1.7]"}, "drafters[0].acceptance", "out of range", "[0, 1]"),
        ({"[0.8, 0.7]": "[0.8, x]"}, "drafters[0].acceptance", "must be a number", "decimal"),
        ({"kind: eagle3": "kind: eagle9"}, "drafters[0].kind", "not known", "eagle3"),
        ({"kind: eagle3": "kind: draft_model"}, "drafters[0]", "needs model", "llama-3.2-1b"),
        ({"kind: eagle3": "kind: draft_model, model: tiny"}, "drafters.model", "unknown model shape", "llama"),
        ({"kind: eagle3": "kind: early_exit, layers: 99"}, "drafters.layers", "of 32 layers", "1 to 31"),
        ({"kind: eagle3": "kind: eagle3, layers: 3"}, "drafters[0].layers", "has no layers", "drop"),
        ({"prompt_len: 512": "prompt_len: 0"}, "workload.prompt_len", "out of range", "1.."),
        ({"prompt_len: 512": "prompt_len: 200000"}, "workload", "131072", "shorten"),
        ({"tensor_parallel: [1]": "tensor_parallel: [2]"}, "link_gb_per_s", "link", "450"),
        ({"device:": "devise:"}, "hardware.devise", "not a known key", "device"),
    ],
)
def test_refusals_name_key_and_remedy(
    swaps: dict[str, str], key: str | None, message: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        size_command.size(written(tmp_path, **swaps), out=None, alternatives=3)
    assert message in caught.value.message
    assert remedy in str(caught.value.remedy)
    assert caught.value.file is not None
    if key is not None:
        assert str(caught.value.key).startswith(key)


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = sized(written(tmp_path, **{"shape: llama-3.1-8b": "config: config.json"})).best
    named = sized(written(tmp_path)).best
    assert (own.gpus, own.batch, own.tpot_s) == (named.gpus, named.batch, pytest.approx(named.tpot_s, rel=1e-6))


def test_the_command_never_imports_torch() -> None:
    code = (
        "import sys\nfrom specbench import cli\n"
        "sys.argv = ['specbench', 'size', 'scenarios/size/llama-3.1-8b-h100.yaml']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    print('exit', end.code)\n"
        "print('heavy', [name for name in ('torch', 'numba', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["exit 0", "heavy []"]
