"""docs/validation.md: the published curves, the closed forms, and a page made from a run of known truth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from specbench.errors import ExitCode
from specbench.predict.acceptance import read_acceptance
from specbench.predict.cells import Device, Predictor
from specbench.predict.closed_forms import checks, worst
from specbench.predict.command import device_for, predict_scenario
from specbench.predict.fitting import context_from_flops, fit_run, read_run
from specbench.predict.published import EAGLE_LINE, FITTED_BATCHES, curves
from specbench.predict.rows import row_of, write_rows
from specbench.predict.validation import held_against, main
from specbench.roofline.fit import MOST_CELLS
from specbench.roofline.model import Roof
from specbench.roofline.shapes import named_shape
from specbench.roofline.step_model import Efficiency, StepModel
from specbench.scenario.cases import expand
from specbench.scenario.schema import Scenario, load_scenario

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = """
name: known
question: Does the fit find what made the rows?
target: {model: smollm2-135m-instruct, dtype: bf16}
drafters:
  - {kind: ngram, depth: [2, 4]}
  - {kind: eagle, depth: [1, 3, 5]}
  - {kind: early_exit, layers: 8, depth: 2}
  - {kind: oracle, depth: [1, 3]}
sweep: {batch_size: [1, 2, 4, 8, 16]}
workload: {output_len: 64}
"""
TRUTH = Efficiency(
    compute=0.7, memory=0.8, overlap=4.0, pass_s=2e-4, step_s=2e-4, sample_step_s=3e-4, verdict_s=3e-4, token_s=3e-5,
    draft_pass_s=4e-4, draft_token_s=1e-4, lookup_s=5e-5, source="made up",
)  # fmt: skip
ROOFS = {"bf16": Roof(144e9, 20e9)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `specbench run` leaves it, whose rows a known engine made."""
    folder = tmp_path_factory.mktemp("known")
    file = folder / "known.yaml"
    file.write_text(SCENARIO, encoding="utf-8")
    scenario = load_scenario(file)
    device = Device("this CPU", ROOFS, None, TRUTH, "measured")
    predictor = Predictor(device, read_acceptance(None))
    rows = []
    for case in expand(scenario):
        cell = predictor.predict(case)
        assert cell.result is not None
        content: dict[str, Any] = row_of(cell, device, "2026-01-01T00:00:00+00:00")
        del content["conditions"]["predicted"]
        metrics = content["metrics"]
        accepted = [round(1000 * value) for value in [1.0, *metrics["acceptance_at"]]]
        drops = [a - b for a, b in zip(accepted, [*accepted[1:], 0], strict=True)]
        metrics |= {
            "accepted_histogram": drops,
            "num_steps": 1000,
            "num_draft_tokens": round(1000 * cell.result.nodes),
            "speedup_low": metrics["speedup"] * 0.98,
            "speedup_high": metrics["speedup"] * 1.02,
        }
        rows.append(content)
    out = folder / "results"
    write_rows(out, rows)
    measured = {
        "bandwidth_bytes_per_s": 20e9, "bandwidth_limit_bytes_per_s": 21e9, "gemm_flops_per_s": {"bf16": 144e9},
        "flops_limit_per_s": {"bf16": 150e9}, "skinny": [],
    }  # fmt: skip
    manifest = {
        "scenario": scenario.to_dict(),
        "device": "this CPU",
        "roofs": {"measured": measured},
        "environment": {},
    }
    (out / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return out


def test_a_run_is_read_as_the_model_counts_it(run: Path) -> None:
    found = read_run(run)
    assert len(found.cells) == len(found.cases) == 40
    assert found.left_out == 0
    for case, cell in zip(found.cases, found.cells, strict=True):
        assert cell.batch == case.workload.batch_size
        assert cell.context_len == pytest.approx(found.cells[0].context_len, rel=1e-6)


def test_the_context_is_read_off_the_flops() -> None:
    spec = named_shape("smollm2-135m")
    model = StepModel(spec, ROOFS["bf16"])
    assert context_from_flops(spec, model.target_cost(3, 1, 145.5).flops, 3) == pytest.approx(145.5)


def test_no_fitted_cell_is_counted_as_predicted(run: Path) -> None:
    held = held_against(run)
    fitted = {held.run.rows[index].case_hash for index in held.fit.fitted}
    assert len(fitted) == MOST_CELLS
    assert not fitted & {cell.case_hash for cell in held.comparison.cells}
    assert len(held.comparison.cells) == 40 - MOST_CELLS


def test_rows_of_a_known_engine_are_predicted(run: Path) -> None:
    held = held_against(run)
    assert median(abs(cell.step_error) for cell in held.comparison.cells) < 0.03
    assert median(abs(cell.gap) for cell in held.comparison.cells) < 0.03
    assert fit_run(held.run).fit.left_out_error is not None


def test_the_page_and_its_plots_are_made_by_one_command(run: Path, tmp_path: Path) -> None:
    assert main(["--results", str(run), "--out", str(tmp_path)]) == ExitCode.DONE
    text = (tmp_path / "validation.md").read_text(encoding="utf-8")
    for part in (
        "## 1. Against a measured sweep",
        "## 2. Against published curves",
        "## 3. Closed forms",
        "Leave-one-out",
    ):
        assert part in text
    for name in ("cells", "series", "published"):
        assert f"validation/{name}.svg" in text
        assert (tmp_path / "validation" / f"{name}.svg").stat().st_size > 5000
    assert main(["--results", str(tmp_path), "--out", str(tmp_path)]) == ExitCode.BAD_INPUT


def test_predict_fits_a_run_and_tells_the_errors(run: Path, tmp_path: Path) -> None:
    done = predict_scenario(run.parent / "known.yaml", hardware_name=None, fit=run, out=tmp_path / "out")
    assert done.comparison is not None
    assert len(done.comparison.cells) == 40 - MOST_CELLS
    summary = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "Leave-one-out" in summary
    assert "### Crossing, predicted and measured" in summary
    assert "### Best depth by tokens/s" in summary


def test_a_fit_is_taken_over_to_another_device(run: Path) -> None:
    found = read_run(run)
    fit = fit_run(found)
    over = device_for("h100-sxm", found, fit)
    assert "taken over" in over.efficiency.source
    assert (over.name, over.roof_source) == ("h100-sxm", "datasheet")
    own = device_for(None, found, fit)
    assert (own.name, own.roof_source) == ("this CPU", "measured")
    assert own.efficiency == fit.fit.efficiency


def test_one_set_of_efficiencies_an_engine_and_device() -> None:
    by_engine: dict[str, set[object]] = {}
    for curve in curves():
        by_engine.setdefault(f"{curve.engine}, {curve.source}", set()).add(replace(curve.efficiency, source=""))
        assert curve.assumed
        assert curve.tested
    assert all(len(found) == 1 for found in by_engine.values())
    sglang = {replace(curve.efficiency, source="") for curve in curves() if curve.engine == "SGLang on H100"}
    assert len(sglang) == 1


def test_what_was_fitted_on_is_no_test() -> None:
    line = next(curve for curve in curves() if curve.name.startswith("SGLang 0.4.4"))
    assert {point.batch for point in line.points if point.fitted} == set(FITTED_BATCHES)
    assert all(point.what.startswith("EAGLE,") for point in line.points if point.fitted)
    assert len(line.tested) == 2 * len(EAGLE_LINE) - len(FITTED_BATCHES)


LIMITS = {
    "constant acceptance": 1e-9,
    "memory bound, batch 1": 0.02,
    "linear layers alone, free drafts": 0.02,
    "the same with η_c 0.6, η_m 0.85": 0.02,
    "break-even acceptance": 1e-6,
}


def test_closed_forms_hold_in_their_limits() -> None:
    found = worst(checks())
    assert set(found) == set(LIMITS)
    for limit, check in found.items():
        assert abs(check.error) <= LIMITS[limit], f"{limit}: {check.case} {check.error:+.2%}"


def test_the_committed_page_is_of_the_committed_rows() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    assert "Remade by `python -m specbench.predict.validation`" in page
    assert "results/drafters-smollm2" in page
    for name in ("cells", "series", "published"):
        assert (ROOT / "docs" / "validation" / f"{name}.svg").is_file()


def test_a_scenario_in_a_manifest_is_read_back(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert Scenario.from_dict(manifest["scenario"]).name == "known"
