"""The CI files: valid by the services' own schemas, and in step with the command line and the action."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from specbench.cli import app
from specbench.gate.policy import load_policy

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / "docs" / "ci"
SCHEMAS = {
    ROOT / "action.yml": "vendor.github-actions",
    CI / "github-workflow.yml": "vendor.github-workflows",
    CI / "gitlab-ci.yml": "vendor.gitlab-ci",
}
FILES = pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)


def checked(file: Path, schema: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def scripts(value: Any) -> Iterator[str]:
    """Every `run:` and `script:` of a file, continued lines joined."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("run", "script"):
                yield "\n".join([item] if isinstance(item, str) else item).replace("\\\n", " ")
            else:
                yield from scripts(item)
    elif isinstance(value, list):
        for item in value:
            yield from scripts(item)


@FILES
def test_the_file_is_valid_by_its_services_schema(file: Path) -> None:
    done = checked(file, SCHEMAS[file])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (ROOT / "action.yml", "using: composite", "using: compositions"),
        (CI / "github-workflow.yml", "timeout-minutes: 60", "timeout_minutes: 60"),
        (CI / "gitlab-ci.yml", "when: always", "when: allways"),
    ],
)
def test_the_schema_would_see_a_fault(file: Path, old: str, new: str, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file.name).write_text(text.replace(old, new), encoding="utf-8")
    assert checked(tmp_path / file.name, SCHEMAS[file]).returncode == 1


@FILES
def test_commands_in_scripts_are_the_command_line(file: Path) -> None:
    group: Any = typer.main.get_command(app)
    found = []
    for line in "\n".join(scripts(read(file))).splitlines():
        for match in re.finditer(r"specbench\"? ((?:baseline )?[a-z]+) (.*)", line):
            command: Any = group
            for name in match[1].split():
                command = command.commands[name]
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(re.findall(r"(?<!\S)--[a-z-]+", match[2])) <= known, line
            found.append(match[1])
    assert {"run", "gate"} <= set(found)


@FILES
def test_no_text_from_outside_becomes_a_part_of_a_script(file: Path) -> None:
    """An expression in a script is pasted in before the shell reads it: a branch's name could be a command."""
    assert [script for script in scripts(read(file)) if "${{" in script] == []


def test_the_workflow_gives_the_action_what_it_takes() -> None:
    inputs = read(ROOT / "action.yml")["inputs"]
    steps = read(CI / "github-workflow.yml")["jobs"]["gate"]["steps"]
    (used,) = (step["with"] for step in steps if step.get("uses") == "./")
    assert set(used) <= set(inputs)
    assert {name for name, item in inputs.items() if item.get("required")} <= set(used)


def test_files_that_the_ci_names_are_there() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in SCHEMAS)
    for name in set(re.findall(r"(?:scenarios|docs/ci)/[a-z0-9.-]+\.ya?ml", text)):
        assert (ROOT / name).is_file(), name
    policy = load_policy(CI / "policy-counts.yaml")
    assert policy.gated("ratio") == policy.gated("single") == {}
    assert {"tokens", "acceptance_rate", "flops", "bytes"} <= set(policy.gated("exact"))


# ---- The action's own script, for real, with a stand-in for specbench


def gate_step(tmp_path: Path, code: int, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """Run the action's gate step where `specbench` ends with `code`: exit code, output, what it left in files."""
    (step,) = (step for step in read(ROOT / "action.yml")["runs"]["steps"] if step.get("id") == "gate")
    (tmp_path / "bin").mkdir(parents=True)
    stub = tmp_path / "bin" / "specbench"
    stub.write_text(f'#!/bin/bash\nprintf "%s|" "$@" > called\necho "# page" > "gate out/gate.md"\nexit {code}\n')
    stub.chmod(0o755)
    values = {"BASELINE": "base lines", "POLICY": "", "OUT": "runs/ci", "RESULTS": "gate out", "EXTEND": "0"}
    values |= {"ALLOW_INCONCLUSIVE": "false", "GITHUB_OUTPUT": "outputs", "GITHUB_STEP_SUMMARY": "summary"} | inputs
    assert set(step["env"]) == set(values) - {"GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"}
    env = os.environ | values | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    script = step["run"]
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    left = {name: (tmp_path / name).read_text() for name in ("called", "outputs", "summary")}
    return done.returncode, done.stdout, left


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4])
def test_the_action_ends_as_the_gate_does(code: int, tmp_path: Path) -> None:
    ended, _, left = gate_step(tmp_path, code)
    assert ended == code
    assert left["outputs"] == f"exit-code={code}\n"
    assert left["summary"] == "# page\n"
    assert left["called"].startswith("gate|runs/ci|--baseline|base lines|--junit|gate out/junit.xml|")
    assert "--policy" not in left["called"]
    assert "--extend" not in left["called"]


def test_the_action_may_let_inconclusive_pass_and_nothing_else(tmp_path: Path) -> None:
    ended, said, left = gate_step(tmp_path / "3", 3, ALLOW_INCONCLUSIVE="true", POLICY="my policy.yaml", EXTEND="12")
    assert (ended, left["outputs"]) == (0, "exit-code=3\n")
    assert "::warning" in said
    assert left["called"].endswith("|--policy|my policy.yaml|--extend|12|")
    for code in (1, 2, 4):
        assert gate_step(tmp_path / str(code), code, ALLOW_INCONCLUSIVE="true")[0] == code
