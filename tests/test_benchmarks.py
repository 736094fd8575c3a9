"""The pieces of `benchmarks/`: ratios, windows, order, tables. Times come from a fake clock or are made up."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import make_decoder, make_request, tiny_spec, wide_weights

from benchmarks import __main__ as program_main
from benchmarks import generation, memory, program, rows, steps
from benchmarks.blocks import Outputs, Round, Rounds, Sample, Spread, common_share, equal_share, run_rounds
from benchmarks.figures import Figure, Report, at_least, at_most, fill_readme, merge_table, text_table
from benchmarks.settings import QUICK, Settings
from benchmarks.sides import TokenTimes, cut_after_eos, kernel_times, pooled, rates, shortened, trace_window
from specbench.bench.clock import FakeClock
from specbench.bench.telemetry import BlockConditions
from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.trace import Trace
from specbench.errors import InputError, InvalidEnvironmentError

QUIET = BlockConditions(0.0, 0.0, 0)
BUSY = BlockConditions(0.5, 0.0, 0, ("foreign load 50%",))


class Script:
    """A monitor that tells conditions from a list, then quiet ones."""

    def __init__(self, *conditions: BlockConditions) -> None:
        self._left = list(conditions)
        self.open = False

    def start(self) -> None:
        assert not self.open
        self.open = True

    def stop(self) -> BlockConditions:
        assert self.open
        self.open = False
        return self._left.pop(0) if self._left else QUIET


def silent(_: str) -> None:
    """Nobody watches."""


def made(values: Sequence[tuple[float, float]], busy: Sequence[int] = (), wanted: int | None = None) -> Rounds:
    """Rounds of arms "ours" and "theirs" with a figure "rate"."""
    every = tuple(
        Round(
            i,
            ("ours", "theirs"),
            {"ours": Sample({"rate": a}, ((1, 2),)), "theirs": Sample({"rate": b}, ((1, 2),))},
            {"ours": BUSY.marks if i in busy else (), "theirs": ()},
        )
        for i, (a, b) in enumerate(values)
    )
    return Rounds(every, len(values) - len(busy) if wanted is None else wanted)


# ---- rounds and ratios ----


def test_a_ratio_is_taken_within_each_round() -> None:
    """Ratios 2, 3 and 1 of rounds at different speeds; medians first would give 20 / 10."""
    found = made([(20, 10), (300, 100), (5, 5)]).ratio("ours", "theirs", "rate")
    assert found == Spread(2.0, 1.0, 3.0, 3)


def test_disturbed_rounds_do_not_count_where_enough_are_clean() -> None:
    rounds = made([(20, 10), (900, 1), (30, 10)], busy=[1])
    assert not rounds.disturbed
    assert rounds.ratio("ours", "theirs", "rate") == Spread(2.5, 2.0, 3.0, 2)
    assert rounds.values("theirs", "rate") == Spread(10, 10, 10, 2)


def test_too_few_clean_rounds_are_told() -> None:
    rounds = made([(20, 10), (40, 10)], busy=[1], wanted=2)
    assert rounds.disturbed
    assert rounds.ratio("ours", "theirs", "rate").count == 2


def test_rounds_run_every_arm_once_in_a_seeded_order() -> None:
    def names(seed: int) -> list[tuple[str, ...]]:
        ran: list[str] = []
        arms = {name: lambda _, name=name: (ran.append(name), Sample({"rate": 1.0}))[1] for name in "abc"}
        rounds = run_rounds(arms, blocks=6, seed=seed, monitor=Script(), tell=silent, settle=int)
        orders = [one.order for one in rounds.every]
        assert ran == [name for order in orders for name in order]
        assert all(sorted(order) == ["a", "b", "c"] for order in orders)
        return orders

    assert names(0) == names(0)
    assert names(0) != names(1)
    assert len(set(names(0))) > 1


def test_a_disturbed_round_repeats_the_same_work() -> None:
    seen: list[int] = []
    arms = {"a": lambda index: (seen.append(index), Sample({"rate": 1.0}))[1]}
    rounds = run_rounds(arms, blocks=3, seed=0, monitor=Script(QUIET, BUSY, BUSY), tell=silent, settle=int)
    assert seen == [0, 1, 1, 1, 2]
    assert [one.clean for one in rounds.every] == [True, False, False, True, True]
    assert len(rounds.used) == 3


def test_rounds_end_on_a_machine_that_is_always_busy() -> None:
    rounds = run_rounds(
        {"a": lambda _: Sample({"rate": 1.0})}, blocks=3, seed=0, monitor=Script(*[BUSY] * 9), tell=silent, settle=int
    )
    assert len(rounds.every) == 6
    assert rounds.disturbed
    assert rounds.to_list()[0]["marks"] == {"a": ["foreign load 50%"]}


def test_outputs_are_compared_whole() -> None:
    assert equal_share(((1, 2), (3,)), ((1, 2), (3,))) == 1.0
    assert equal_share(((1, 2), (3,)), ((1, 2), (3, 4))) == 0.5
    with pytest.raises(ValueError, match="can't be compared"):
        equal_share(((1, 2),), ((1, 2), (3,)))
    with pytest.raises(ValueError, match="can't be compared"):
        equal_share((), ())


def outputs_of(*pairs: tuple[Outputs, Outputs]) -> Rounds:
    every = [{"a": Sample({}, left), "b": Sample({}, right)} for left, right in pairs]
    return Rounds(
        tuple(Round(i, ("a", "b"), samples, {"a": (), "b": ()}) for i, samples in enumerate(every)), len(pairs)
    )


def test_one_wrong_output_among_many_shows() -> None:
    """A median over rounds would say that all are equal."""
    right = (((1,), (2,)), ((1,), (2,)))
    wrong = (((1,), (2,), (3,), (4,)), ((1,), (2,), (3,), (5,)))
    found = outputs_of(right, right, wrong).equal_share("a", "b")
    assert found == Spread(pytest.approx(7 / 8), 0.75, 1.0, 3)


def test_tokens_before_the_first_difference() -> None:
    """2 of 4, and 1 of 2: what agrees again after a difference, or beyond the shorter output, does not count."""
    assert common_share(((1, 2, 3, 4), (5,)), ((1, 2, 9, 4), (5, 6))) == 0.5
    assert outputs_of((((1, 2),), ((1, 2),)), (((1, 2),), ((3, 2),))).common_share("a", "b") == Spread(0.5, 0.0, 1.0, 2)


# ---- windows of a generation ----


def test_the_window_of_generate_leaves_out_prompt_and_prefill() -> None:
    """Prompt at 0 (not read), first tokens of two requests at 5 s, then 2 x 2 tokens in 3 s."""
    times = TokenTimes(FakeClock([5.0, 1.0, 2.0]))
    times.put(torch.zeros(2, 7))
    for _ in range(3):
        times.put(torch.zeros(2))
    times.end()
    assert times.window() == (4, 3.0)


def trace(step_s: Sequence[float], end_s: Sequence[float], committed: Sequence[int], **parts: Sequence[float]) -> Trace:
    count = len(step_s)
    zeros = np.zeros(count)
    fields: dict[str, Any] = {field.name: zeros for field in dataclasses.fields(Trace)}
    fields |= {
        "batch_size": 1,
        "step_s": np.array(step_s, dtype=float),
        "end_s": np.array(end_s, dtype=float),
        "num_committed": np.array(committed),
        "requests": (),
    }
    return Trace(**(fields | {name: np.array(values, dtype=float) for name, values in parts.items()}))


def test_the_window_of_a_trace_starts_with_its_first_step() -> None:
    """Prefill until 5 s, a step of 1 s, half a second between steps, a step of 2 s."""
    assert trace_window(trace([1.0, 2.0], [6.0, 8.5], [1, 3])) == (4, 3.5)
    assert trace_window(trace([], [], [])) == (0, 0.0)


def test_the_engine_on_a_fake_clock_has_the_window_of_its_steps() -> None:
    """Each reading of the clock takes a second: a step reads it nine times, so two steps span 17 s."""
    decoder = make_decoder(tiny_spec(), wide_weights(tiny_spec()), backend="torch")
    clock = FakeClock([1.0] * 100)
    engine = Engine(decoder, PrefillStore(decoder, clock.now), None, batch_size=1, depth=0, now=clock.now)
    done = engine.run([make_request([1, 2, 3], max_tokens=3)])
    assert trace_window(done) == (2, 17.0)


def test_rates_keep_decode_and_prefill_apart() -> None:
    found = rates(decode_tokens=60, decode_s=2.0, all_tokens=64, wall_s=4.0, steps=20)
    assert found["decode_tokens_per_s"] == 30.0
    assert found["total_tokens_per_s"] == 16.0
    assert found["tokens_per_step"] == 3.0


def test_several_generations_are_pooled_by_sums() -> None:
    """10 tokens in 1 s and 10 in 4 s are 4 tokens/s, not the mean of 10 and 2.5."""
    found = pooled([(10, 1.0, 11, 2.0, 10), (10, 4.0, 11, 5.0, 5)])
    assert found["decode_tokens_per_s"] == 4.0
    assert found["total_tokens_per_s"] == pytest.approx(22 / 7)
    assert found["tokens_per_step"] == pytest.approx(20 / 15)


def test_eos_ends_an_output_and_is_kept() -> None:
    assert cut_after_eos((5, 6, 2, 2, 2), (2,)) == (5, 6, 2)
    assert cut_after_eos((5, 6), (2,)) == (5, 6)
    assert cut_after_eos((5, 6, 2), ()) == (5, 6, 2)


def test_shortened_requests_keep_their_prompts() -> None:
    request = make_request([1, 2], max_tokens=9)
    assert shortened([request], 4)[0].stops.max_tokens == 4
    assert shortened([request], 20)[0].stops.max_tokens == 9
    assert shortened([request], 4)[0].prompt_ids == (1, 2)


def test_kernel_times_see_each_launch() -> None:
    decoder = make_decoder(tiny_spec(), wide_weights(tiny_spec()), dtype="fp32", backend="cpu")
    clock = FakeClock([0.0, 2.0, 0.0, 3.0])
    with kernel_times(clock) as spans:
        decoder.prefill([1, 2, 3], 0)
        decoder.prefill([4], 1)
    assert spans == [2.0, 3.0]
    decoder.prefill([1], 2)
    assert len(spans) == 2


def test_speed_figures_hold_the_target_to_the_decode_window() -> None:
    def sample(decode: float, total: float) -> Sample:
        return Sample({"decode_tokens_per_s": decode, "total_tokens_per_s": total}, ((1, 2),))

    one = Round(0, ("ours", "theirs"), {"ours": sample(30, 12), "theirs": sample(10, 8)}, {"ours": (), "theirs": ()})
    figures = generation.speed_figures("ar", "AR", Rounds((one,), 1), at_least(2.0), "fp32")
    found = {figure.key: figure for figure in figures}
    assert found["ar.decode"].spread == Spread(3.0, 3.0, 3.0, 1)
    assert found["ar.decode"].met is True
    assert found["ar.end_to_end"].spread == Spread(1.5, 1.5, 1.5, 1)
    assert found["ar.end_to_end"].bound is None
    assert found["ar.outputs"].met is True
    bf16 = generation.speed_figures("ar", "AR", Rounds((one,), 1), at_least(2.0), "bf16")
    assert next(figure for figure in bf16 if figure.key == "ar.outputs").bound is None


# ---- inside a step ----


def staircase(*times: Sequence[float]) -> Rounds:
    every = [Sample({rows.name_of(t): s for t, s in zip(rows.ROWS, one, strict=True)}) for one in times]
    return Rounds(tuple(Round(i, ("passes",), {"passes": one}, {"passes": ()}) for i, one in enumerate(every)), 1)


def test_the_staircase() -> None:
    rising = staircase([1.0, 1.1, 1.2, 1.8])
    assert rows.inversion(rising).median == pytest.approx(1.1 / 1.2)
    assert rows.jump(rising).median == pytest.approx(1.5)
    assert rows.inversion(staircase([1.0, 3.0, 2.0, 1.5])).median == 2.0


def test_noise_makes_no_inversion() -> None:
    """Each round has its own slow size, and no size is slow in most of them."""
    noisy = staircase([2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2], [1, 1, 1, 1])
    assert rows.inversion(noisy) == Spread(1.0, 0.5, 2.0, 5)
    assert rows.jump(noisy).median == 1.0


def test_a_verify_step_is_one_of_full_depth() -> None:
    """Steps of 8 tokens take 3, 4 and 9 s without drafting; the last one, cut short by the output's end, is no such."""
    taken = trace([4, 5, 10, 1], [4, 9, 19, 20], [8, 8, 8, 1], draft_s=[1, 1, 1, 0], query_tokens=[8, 8, 8, 2])
    assert rows.median_step(taken, 8) == 4.0


def test_a_step_taken_apart() -> None:
    """Two steps of 10 s: 16 s in kernels (3/4 linear, 1/8 attention), 2 s sampling. 20 - 14 - 2 = 4 s are host."""
    taken = trace([10, 10], [10, 20], [1, 1], sample_s=[0.5, 1.5])
    shares = {"linear": 0.75, "attention": 0.125, "norm": 0.125}
    found = steps.step_figures(taken, 16.0, shares)
    assert found["step_s"] == 10.0
    assert found["linear_s"] == 6.0
    assert found["linear_share"] == pytest.approx(0.6)
    assert found["attention_share"] == pytest.approx(0.1)
    assert found["sample_share"] == pytest.approx(0.1)
    assert found["host_share"] == pytest.approx(0.2)
    assert found["outside_kernel_share"] == pytest.approx(0.1)


def test_linear_bytes_are_the_weights_a_step_reads() -> None:
    """Tied and untied alike: the embedding's rows are looked up, the unembedding is read whole."""
    for tied in (True, False):
        spec = tiny_spec(tie_word_embeddings=tied)
        weights = wide_weights(spec)
        linears = sum(t.numel() for name, t in weights.items() if t.ndim == 2 and "embed" not in name)
        expected = linears + (weights["embed_tokens.weight"].numel() if tied else 0)
        assert steps.linear_bytes(spec, "fp32") == 4 * expected
        assert steps.linear_bytes(spec, "bf16") == 2 * expected


# ---- memory and the program around ----


def test_the_peak_is_over_weights_and_kv() -> None:
    assert memory.peak_ratio({"peak_bytes": 250.0, "weight_bytes": 150.0, "kv_bytes": 50.0}) == 1.25


def test_status_fields_are_in_kib() -> None:
    text = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    assert memory.status_bytes(text, "VmHWM") == 2 << 20
    with pytest.raises(InvalidEnvironmentError, match="VmSwap"):
        memory.status_bytes(text, "VmSwap")


def test_the_meter_sees_an_allocation_that_is_gone() -> None:
    """64 MiB touched and freed stand in the peak; 16 MiB of slack for what else a process does."""
    meter = memory.PeakMeter.start()
    block = np.ones(64 << 17)
    assert block.nbytes == 64 << 20
    del block
    assert meter.above() > 48 << 20
    if meter.how == "VmHWM":
        assert memory.PeakMeter.start().above() < 16 << 20


def manifest(folder: Path, seconds: dict[str, float] | None) -> Path:
    content: dict[str, Any] = {"schema_version": 1}
    if seconds is not None:
        content["sweep_seconds"] = seconds
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


SECONDS = {"measured": 60.0, "prefill": 5.0, "warm-up": 10.0, "loading": 5.0, "roofs": 6.0, "total": 100.0}


def test_the_harness_is_what_no_part_names(tmp_path: Path) -> None:
    assert program.harness_share(SECONDS) == pytest.approx(0.20)
    report = program.harness(Settings(results=manifest(tmp_path, SECONDS)))
    assert report.figures[0].met is False
    assert {figure.key for figure in report.figures} >= {"harness.roofs", "harness.measured"}
    whole = program.sweep(Settings(results=tmp_path)).figures[0]
    assert whole.spread == Spread(100.0, 100.0, 100.0, 1)
    assert whole.met is True


def test_a_sweep_that_has_not_ended_gives_a_reason(tmp_path: Path) -> None:
    figure = program.sweep(Settings(results=manifest(tmp_path, None))).figures[0]
    assert figure.spread is None
    assert figure.met is None
    assert figure.reason == "the manifest has no sweep_seconds"
    assert figure.cells()[1:3] == ("not measured", figure.reason)


def test_help_is_a_command_that_ends_well() -> None:
    command = program.help_command()
    assert command[-1] == "--help"
    with pytest.raises(InvalidEnvironmentError, match="ended with 3"):
        program._help_once([command[0] if len(command) > 2 else program.sys.executable, "-c", "exit(3)"], 0)


# ---- figures, tables, README ----


def figure(key: str = "ar.fp32", median: float = 2.5, **changes: Any) -> Figure:
    fields = {"key": key, "what": "AR", "unit": "x", "spread": Spread(median, 2.0, 3.0, 5), "bound": at_least(2.0)}
    return Figure(**(fields | changes))


def test_a_target_is_met_by_the_median() -> None:
    assert figure().met is True
    assert figure(median=1.9).met is False
    assert figure(bound=at_most(2.0)).met is False
    assert figure(bound=None).met is None
    assert figure(median=2.0).met is True


def test_cells_say_target_median_spread_and_verdict() -> None:
    assert figure().cells() == ("≥ 2.00 ×", "2.50 ×", "2.00 × to 3.00 ×", "met")
    assert figure(median=1.5, disturbed=True).cells()[3] == "missed (busy machine)"
    share = figure(unit="share", spread=Spread(0.07, 0.06, 0.08, 5), bound=at_most(0.08))
    assert share.cells() == ("≤ 8.0 %", "7.0 %", "6.0 % to 8.0 %", "met")


def test_the_text_table_lines_up() -> None:
    lines = text_table([figure(), figure("a.much.longer.key", bound=None)]).splitlines()
    assert len(lines) == 4
    assert len({line.index("2.50 ×") for line in lines[2:]}) == 1


SECTIONS = ("targets", "figures", "runs")
README = "".join(["# B\n", *(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in SECTIONS), "end\n"])


def test_the_readme_is_filled_and_filled_again() -> None:
    first = fill_readme(README, [figure(), figure("rows"), figure("x", bound=None)], "run1", "machine one")
    assert "| `ar.fp32` | AR | ≥ 2.00 × | 2.50 × | 2.00 × to 3.00 × | met | run1 |" in first
    assert "| `x` | AR | 2.50 × | 2.00 × to 3.00 × | run1 |" in first
    assert "| `run1` | machine one |" in first
    again = fill_readme(first, [figure(median=2.75)], "run2", "machine two")
    assert again.count("`ar.fp32`") == 1
    assert "2.75 ×" in again
    assert again.index("`ar.fp32`") < again.index("`rows`")
    assert "| `run1` | machine one |" in again
    assert again.endswith("<!-- /runs -->\nend\n")
    whole = [figure(), figure("rows"), figure("x", bound=None)]
    last = fill_readme(again, whole, "run3", "machine three")
    assert "run1" not in last
    assert "run2" not in last
    assert fill_readme(last, whole, "run3", "machine three") == last


def test_a_readme_without_its_markers_is_an_error() -> None:
    with pytest.raises(InputError, match="no section"):
        merge_table("# B\n", "targets", ("figure",), {})


def test_the_committed_readme_has_its_sections() -> None:
    text = program_main.README.read_text()
    filled = fill_readme(text, [figure("new"), figure("other", bound=None)], "run9", "machine")
    assert "| `new` | AR |" in filled
    assert "| `other` | AR |" in filled
    assert "| `run9` | machine |" in filled


# ---- the command ----


def test_options_become_settings() -> None:
    full = program_main.settings_of(program_main.parse([]))
    assert full.blocks >= 5
    quick = program_main.settings_of(program_main.parse(["--quick"]))
    assert quick.output_len == QUICK["output_len"]
    assert program_main.settings_of(program_main.parse(["--quick", "--blocks", "3"])).blocks == 3


def test_quick_figures_do_not_go_into_the_readme() -> None:
    with pytest.raises(InputError, match="mean nothing"):
        program_main.settings_of(program_main.parse(["--quick", "--markdown"]))
    with pytest.raises(InputError, match="0 blocks"):
        program_main.settings_of(program_main.parse(["--blocks", "0"]))


def test_every_name_has_a_benchmark() -> None:
    assert tuple(program_main._benchmarks()) == program_main.NAMES


def test_the_document_holds_the_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("ar", (figure(), figure("ar.fp32.rate", bound=None)), {"ar": []}, ("a note",))
    monkeypatch.setattr(program_main, "_benchmarks", lambda: dict.fromkeys(program_main.NAMES, lambda _: report))
    monkeypatch.setattr(program_main, "_conditions", lambda options: {"quick": options.quick})
    out = tmp_path / "figures.json"
    options: argparse.Namespace = program_main.parse(["--only", "ar", "--out", str(out)])
    document = program_main.run(options)
    assert json.loads(out.read_text()) == document
    assert list(document["benchmarks"]) == ["ar"]
    assert list(document["ratios"]) == ["ar.fp32"]
    assert document["ratios"]["ar.fp32"]["median"] == 2.5
    assert document["ratios"]["ar.fp32"]["met"] is True
    assert document["benchmarks"]["ar"]["notes"] == ["a note"]
