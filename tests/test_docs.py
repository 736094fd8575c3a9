"""The README promises nothing that isn't there: commands, options, the scenario, the files it links to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from specbench.cli import app
from specbench.scenario.cases import expand
from specbench.scenario.schema import load_scenario

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/log.md", "docs/ci/README.md", "benchmarks/README.md")


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_of_commands_is_the_command_line() -> None:
    table = re.finditer(r"^\| `specbench ((?:baseline )?\w+)(.*?)` \|", readme(), re.M)
    told = {m[1]: set(re.findall(r"--[a-z-]+", m[2])) for m in table}
    assert told == dict(options(typer.main.get_command(app)))


def options(group: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command of a group, those of its groups too, with its options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from options(command, f"{prefix}{name} ")
        else:
            opts = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
            yield prefix + name, opts


def test_the_scenario_of_the_readme_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", readme(), re.S)
    file = tmp_path / "scenario.yaml"
    file.write_text(block, encoding="utf-8")
    assert len(expand(load_scenario(file))) == 2 * 2 * 4 * 2 * 2


def test_the_quickstart_has_as_many_cases_as_promised() -> None:
    (told,) = re.findall(r"measures (\d+) cases", readme())
    assert len(expand(load_scenario(ROOT / "scenarios" / "quickstart.yaml"))) == int(told)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (file.parent / link).exists()] == []
