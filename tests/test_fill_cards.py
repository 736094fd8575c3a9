"""scripts/fill_cards.py: acceptance by category of a run into the cards of the drafters it ran."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbench.engine.models.sources import files_digest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fill_cards.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("fill_cards", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt(category: str, tried: list[int], accepted: list[int]) -> dict[str, Any]:
    return {"category": category, "tried_at": tried, "accepted_at": accepted}


def test_counts_are_pooled_over_prompts_not_averaged(script: Any) -> None:
    prompts = [prompt("qa", [10, 4], [4, 1]), prompt("qa", [2, 2, 1], [2, 1, 0]), prompt("maths", [5, 0], [0, 0])]
    assert script.acceptance_by_category(prompts) == {"qa": [6 / 12, 2 / 6, 0.0], "maths": [0.0]}


def row(depth: int, batch: int = 1, temperature: float = 0.0, status: str = "ok", weights: str = "") -> Any:
    axes = {"drafter_kind": "eagle", "depth": depth, "batch_size": batch, "temperature": temperature, "target": "m"}
    samples = {"prompts": [prompt("qa", [2], [1])]}
    return SimpleNamespace(
        axes=axes, status=status, metrics={}, samples=samples, conditions={"drafter_weights": weights}
    )


def test_the_deepest_valid_greedy_chain_at_batch_1_counts(script: Any) -> None:
    rows = [row(1), row(3), row(5, batch=2), row(5, temperature=1.0), row(5, status="invalid")]
    assert script.deepest(rows)["eagle"].axes["depth"] == 3


def test_a_run_of_other_weights_is_refused(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "m" / "eagle"
    home.mkdir(parents=True)
    for name in ("card.json", "config.json", "model.safetensors"):
        (home / name).write_text("{}")
    own = files_digest([home / "config.json", home / "model.safetensors"])
    filled: list[Path] = []
    monkeypatch.setattr(script, "HEADS", tmp_path)
    monkeypatch.setattr(script, "set_categories", lambda folder, acceptance: filled.append(folder))
    monkeypatch.setattr("sys.argv", ["fill_cards.py", str(tmp_path)])
    monkeypatch.setattr(script, "read_rows", lambda folder: [row(3, weights="m/eagle@sampled-sha256:0")])
    assert script.main() == 2
    assert "run it again" in capsys.readouterr().err
    assert not filled
    monkeypatch.setattr(script, "read_rows", lambda folder: [row(3, weights=f"m/eagle@{own}")])
    assert script.main() == 0
    assert filled == [home]
