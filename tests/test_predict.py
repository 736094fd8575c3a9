"""`specbench predict`: the folder of a run without running, what it rests on, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbench.cli import app
from specbench.errors import ExitCode, InputError
from specbench.predict.acceptance import parse_curve, read_acceptance, read_book
from specbench.predict.cells import Predictor, device_of
from specbench.predict.command import predict_cases, predict_scenario
from specbench.predict.heads import safetensors_header
from specbench.predict.shapes import drafting, model_spec, shape_by_name
from specbench.roofline.hardware import hardware
from specbench.scenario.cases import Case, expand
from specbench.scenario.schema import load_scenario
from specbench.store import latest_rows, read_manifest

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ROOT / "scenarios"
SMALL = """
name: small
question: Up to which batch?
target: {model: meta-llama/Llama-3.1-8B-Instruct, dtype: bf16, backend: triton}
drafters:
  - {kind: none}
  - {kind: eagle3, head: nobody/no-such-head, depth: [1, 3]}
  - {kind: ngram, depth: 3}
sweep: {batch_size: [1, 64, 256], context_len: [512, 32768]}
workload: {output_len: 64}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("scenario") / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def predicted(small: Path) -> Path:
    out = small.parent / "predicted"
    predict_scenario(small, hardware_name="h100-sxm", out=out)
    return out


def cells(text: str, device: str = "h100-sxm", acceptance: str | None = None, **kept: Any) -> Any:
    cases = expand(load_scenario(SCENARIOS / text))
    return Predictor(device_of(hardware(device)), read_acceptance(acceptance)), cases


def test_it_writes_the_folder_of_a_run(predicted: Path) -> None:
    for name in ("rows.jsonl", "manifest.json", "summary.md", "report.html", "plots"):
        assert (predicted / name).exists(), name
    rows = latest_rows(predicted)
    assert len(rows) == 24
    assert all(row.conditions.get("predicted") is True for row in rows)
    assert all(row.samples == {"blocks": [], "prompts": []} for row in rows)
    assert read_manifest(predicted)["predicted"]["hardware"] == "h100-sxm"
    summary = (predicted / "summary.md").read_text(encoding="utf-8")
    assert "Predicted, not measured" in summary
    assert "assumed" in summary


def test_cells_that_do_not_fit_are_skipped_with_the_reason(predicted: Path) -> None:
    rows = {(row.axes["batch_size"], row.axes["context_len"], row.axes["drafter_kind"], row.axes["depth"]): row
            for row in latest_rows(predicted)}  # fmt: skip
    full = rows[256, 32768, "none", 0]
    assert full.status == "skipped"
    assert full.reason is not None
    assert "KV cache" in full.reason
    assert "h100-sxm has" in full.reason
    assert rows[1, 32768, "none", 0].status == "ok"
    assert rows[256, 512, "eagle3", 3].status == "ok"


def test_a_predicted_row_says_what_it_rests_on(predicted: Path) -> None:
    row = next(row for row in latest_rows(predicted) if row.axes["drafter_kind"] == "eagle3" and row.status == "ok")
    assert any("acceptance assumed" in text for text in row.warnings)
    assert any("its files are not here" in text for text in row.warnings)
    metrics: dict[str, Any] = row.metrics or {}
    for name in ("speedup_low", "speedup_high"):
        assert metrics[name] is None
        assert metrics["null_reasons"][name] == "a prediction has no interval"
    parts = sum(metrics[f"{part}_s"] for part in ("draft", "verify", "sample", "host"))
    assert parts == pytest.approx(metrics["step_s"])
    assert metrics["speedup"] == pytest.approx(metrics["tokens_per_step"] * metrics["ar_step_s"] / metrics["step_s"])
    assert metrics["implied_overhead"] == pytest.approx(metrics["tokens_per_step"] / metrics["speedup"] - 1)
    assert 0 < metrics["roof_fraction_datasheet"] < 1


def test_measured_rows_are_never_replaced(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    line = json.dumps({"conditions": {"device": "cpu"}}) + "\n"
    (folder / "rows.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(InputError, match="measured rows"):
        predict_scenario(small, hardware_name="h100-sxm", out=folder)
    assert (folder / "rows.jsonl").read_text(encoding="utf-8") == line


def test_a_prediction_is_made_again_in_place(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots and page are left out here: the rows are what is replaced."""
    monkeypatch.setattr("specbench.report.command.write_outputs", lambda folder, rows, manifest: None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.md").write_text("", encoding="utf-8")
    before = predict_scenario(small, hardware_name="h100-sxm", out=out)
    after = predict_scenario(small, hardware_name="h100-sxm", out=out, acceptance="0.9")
    assert len(latest_rows(out)) == len(before.rows) == len(after.rows) == 24
    speeds = [
        next((row.metrics or {})["speedup"] for row in done.rows if row.axes["drafter_kind"] == "eagle3")
        for done in (before, after)
    ]
    assert speeds[0] < speeds[1]


@pytest.mark.parametrize("name", [path.name for path in sorted((SCENARIOS / "h100").glob("*.yaml"))])
def test_every_h100_scenario_is_predicted(name: str) -> None:
    predictor, cases = cells(f"h100/{name}")
    found = [predictor.predict(case) for case in cases]
    assert any(cell.result is not None for cell in found)
    assert all((cell.result is None) != (cell.skip is None) for cell in found)


def test_quickstart_and_the_llama_scenario_are_predicted() -> None:
    for name in ("quickstart.yaml", "predict/llama-3.1-8b-h100.yaml", "drafters-smollm2.yaml"):
        predictor, cases = cells(name)
        found = [predictor.predict(case) for case in cases]
        assert sum(cell.result is not None for cell in found) > len(found) / 2, name


def test_the_llama_scenario_tells_a_story_a_person_can_act_on() -> None:
    """Up to 256 requests at 512 tokens EAGLE-3 stops paying off; at batch 1 it is worth more than 1.5x."""
    predictor, cases = cells("predict/llama-3.1-8b-h100.yaml")
    by = {(c.drafter.kind, c.depth, c.workload.batch_size, c.workload.context_len): c for c in cases}
    at = {key: predictor.predict(case).result for key, case in by.items()}
    assert at["eagle3", 3, 1, 512].value > 1.5
    assert at["eagle3", 7, 256, 512].value < 1 < at["eagle3", 7, 1, 512].value
    assert at["eagle3", 3, 64, 4096].value > at["eagle3", 3, 64, 512].value


def test_a_search_gives_both_sides_of_the_crossing(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    text = SMALL.replace("[1, 64, 256], context_len: [512, 32768]", "{search: crossing, max: 256}, context_len: 512")
    file.write_text(text.replace("  - {kind: none}\n", ""), encoding="utf-8")
    scenario = load_scenario(file)
    found = predict_cases(
        scenario, expand(scenario), Predictor(device_of(hardware("h100-sxm")), read_acceptance("0.6"))
    )
    deep = {cell.case.workload.batch_size: cell.result.value for cell in found if cell.case.depth == 3 and cell.result
            and cell.case.drafter.kind == "eagle3"}  # fmt: skip
    losing = min(batch for batch, value in deep.items() if value < 1)
    assert deep[losing - 1] > 1


def test_drafters_by_name_and_by_file() -> None:
    _, cases = cells("drafters-smollm2.yaml")
    seen: dict[str, Any] = {}
    for case in cases:
        seen.setdefault(case.drafter.kind, drafting(case))
    assert seen["eagle3"].assumed is None
    assert seen["eagle3"].shape.layer.vocab_size == 6144
    assert seen["draft_model"].shape.layer.num_layers == 2
    assert seen["medusa"].most_depth == 3
    assert seen["ngram"].params == 0
    assert shape_by_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == shape_by_name("llama-3.1-8b")
    assert shape_by_name("Qwen/Qwen3-8B-FP8") is not None
    assert shape_by_name("smollm2-135m-instruct") is not None
    assert shape_by_name("nobody/nothing") is None


def test_an_unknown_model_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match="not known") as caught:
        model_spec("nobody/nothing-9b", "target.model")
    assert "config.json" in str(caught.value.remedy)
    with pytest.raises(InputError, match=r"no config\.json"):
        model_spec(str(ROOT / "docs"), "target.model")


def test_a_config_with_missing_keys_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        model_spec(str(tmp_path), "target.model")
    assert caught.value.key == "num_attention_heads"
    assert "config.json" in str(caught.value.file)


def test_a_broken_safetensors_header_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"", b"\xff" * 40, (5).to_bytes(8, "little") + b"{no}!"):
        file.write_bytes(content)
        with pytest.raises(InputError):
            safetensors_header(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "h100-xxl"], "unknown hardware"),
        ([], "no device to predict for"),
        (["--hardware", "v100-sxm2-16gb"], "no bf16"),
        (["--hardware", "h100-sxm", "--acceptance", "1.2"], "position 1 is 1.2"),
        (["--hardware", "h100-sxm", "--acceptance", "0.8,x"], "neither a curve nor a file"),
        (["--hardware", "h100-sxm", "--acceptance", "missing.json"], "no such file"),
        (["--hardware", "h100-sxm", "--fit", "no-such-run"], "no manifest"),
    ],
)
def test_wrong_input_ends_with_the_remedy_and_code_2(
    options: list[str], message: str, small: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["predict", str(small), "--out", str(tmp_path / "out"), *options])
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
    assert done.exception.exit_code == ExitCode.BAD_INPUT
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ([], "no list of curves"),
        ([{"drafter": "eagle9", "rates": [0.5]}], "is no drafter"),
        ([{"drafter": "eagle", "rates": []}], "needs a list"),
        ([{"drafter": "eagle", "rates": [0.5, 1.5]}], "position 2 is 1.5"),
        ([{"drafter": "eagle", "rates": [0.5, 0.6], "kind": "joint"}], "rises"),
        ([{"drafter": "eagle", "rates": [0.5], "drafted": 2}], "drafted share"),
        ([{"drafter": "eagle", "rates": [0.5], "status": "true"}], "is no status"),
        ([{"drafter": "eagle", "rate": [0.5]}], "'rate' is not known"),
        (["eagle"], "must be an object"),
    ],
)
def test_a_wrong_curve_file_names_its_place(curves: list[Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    file.write_text(json.dumps({"curves": curves}), encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_book(file)
    assert caught.value.file == file
    assert str(caught.value.key).startswith("curves")


def test_the_shipped_curves_each_say_what_they_are() -> None:
    book = read_acceptance(None)
    assert {entry.curve.status for entry in book.entries} <= {"published", "assumed"}
    assert all(entry.curve.source for entry in book.entries)


def case_of(kind: str, depth: int, temperature: float = 0.0) -> Case:
    _, cases = cells("drafters-smollm2.yaml")
    return next(c for c in cases if (c.drafter.kind, c.depth, c.sampling.temperature) == (kind, depth, temperature))


def test_the_curve_that_fits_best_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    entries = [
        {"drafter": "any", "rates": [0.1]},
        {"drafter": "eagle", "rates": [0.2], "temperature": 0},
        {"drafter": "eagle", "rates": [0.3], "temperature": 1},
        {"drafter": "ngram(3)", "rates": [0.4]},
    ]
    file.write_text(json.dumps({"curves": entries}), encoding="utf-8")
    book = read_book(file)
    rates = [
        book.curve(case).conditional[0]
        for case in (case_of("eagle", 3), case_of("eagle", 3, 1.0), case_of("ngram", 4), case_of("mtp", 3))
    ]
    assert rates == [0.2, 0.3, 0.4, 0.1]
    assert book.curve(case_of("oracle", 3)).conditional == (1.0,)
    assert parse_curve("0.8,0.7").conditional == (0.8, 0.7)
    lone = tmp_path / "lone.json"
    lone.write_text(json.dumps({"curves": entries[1:3]}), encoding="utf-8")
    with pytest.raises(InputError, match="no acceptance curve for the drafter mtp"):
        read_book(lone).curve(case_of("mtp", 3))


def test_prediction_never_imports_torch(small: Path, tmp_path: Path) -> None:
    """Not even where it is installed: the whole command, from YAML to page."""
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numba", "llvmlite", "triton", "transformers"):
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocker())
from specbench import cli
sys.argv = ["specbench", "predict", {str(small)!r}, "--hardware", "h100-sxm", "--out", {str(tmp_path / "out")!r}]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Predicted by the cost model" in " ".join(done.stdout.split())
