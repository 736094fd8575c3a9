"""`specbench distill` from the outside: its YAML, its errors, its folders; and the files that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbench.cli import app
from specbench.distill import command
from specbench.distill.schema import Distillation, load_distillation
from specbench.distill.train import text_settings
from specbench.engine.heads.spec import HEAD_KINDS
from specbench.errors import InputError

FILES = sorted((Path(__file__).resolve().parent.parent / "scenarios" / "distill").glob("*.yaml"))
GOOD = """\
name: mine
target: {model: smollm2-135m-instruct}
head: {kind: eagle, intermediate_size: 768}
train: {minutes: 1}
"""


def read(folder: Path, text: str) -> Distillation:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return load_distillation(file)


def test_every_kind_is_shipped_and_all_use_one_text() -> None:
    shipped = [load_distillation(file) for file in FILES]
    assert {each.head.kind for each in shipped} == {*HEAD_KINDS, "draft_model"}
    assert [each.name for each in shipped] == [file.stem for file in FILES]
    assert len({text_settings(each) for each in shipped}) == 1
    assert len({(each.text.answer_tokens, each.text.held_out) for each in shipped}) == 1


@pytest.mark.parametrize(
    ("change", "line", "key", "message"),
    [
        (("intermediate_size: 768", "intermediate_sise: 768"), 3, "head.intermediate_sise", "not a known key"),
        (("intermediate_size: 768", "intermediate_size: 768, num_heads: 3"), 3, "head.num_heads", "has no num_heads"),
        ((", intermediate_size: 768", ""), 3, "head.kind", "no intermediate_size"),
        (("minutes: 1", "minutes: 1, steps: 10"), 4, "train", "either minutes or steps"),
        (("minutes: 1", "depth: 2"), 4, "train", "either minutes or steps"),
        (("minutes: 1", "minutes: 0"), 4, "train.minutes", "out of range"),
        (("kind: eagle", "kind: eagl"), 3, "head.kind", "not known"),
        (("name: mine", "name: a/b"), 1, "name", "can't name a folder"),
        (("train:", "also: 1\ntrain:"), 4, "also", "not a known key"),
        (("train:", "text: {temperatures: [0, x]}\ntrain:"), 4, "text.temperatures[1]", "must be a number"),
    ],
)
def test_faults_are_named_with_line_and_key(
    tmp_path: Path, change: tuple[str, str], line: int, key: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, GOOD.replace(*change))
    assert (error.value.line, error.value.key) == (line, key)
    assert error.value.remedy


def test_defaults(tmp_path: Path) -> None:
    asked = read(tmp_path, GOOD)
    assert asked.text.temperatures == (0.0, 0.7, 0.0, 1.0)
    assert asked.train.depth == 4
    assert read(tmp_path, GOOD.replace("train:", "text: {temperatures: 0.5}\ntrain:")).text.temperatures == (0.5,)


def test_options_reach_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def instead(asked: Distillation, folder: Path, text: Path, words: str, *, resume: bool) -> None:
        seen.update(asked=asked, folder=folder, text=text, words=words, resume=resume)

    monkeypatch.setattr(command, "_distill", instead)
    read(tmp_path, GOOD)
    file, out = str(tmp_path / "mine.yaml"), str(tmp_path / "out")
    done = CliRunner().invoke(app, ["distill", file, "--out", out, "--resume", "--minutes", "2.5"])
    assert done.exit_code == 0, done.output
    assert seen["asked"].train.minutes == 2.5
    assert (seen["folder"], seen["resume"]) == (Path(out), True)
    assert seen["words"] == f"specbench distill {file} --minutes 2.5"
    done = CliRunner().invoke(app, ["distill", file])
    assert seen["folder"] == Path("runs/distill/mine")
    assert seen["text"] == Path("runs/distill/text")


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_distill", interrupt)
    read(tmp_path, GOOD)
    with pytest.raises(Exception, match="--resume"):
        CliRunner().invoke(app, ["distill", str(tmp_path / "mine.yaml")], catch_exceptions=False)
