"""The command line: parse, call, print, exit code; nothing else. Heavy modules are imported by the command that needs
them, so that `specbench --help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specbench.errors import ExitCode, InputError, SpecbenchError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Where does speculative decoding stop paying off on this hardware, and why?",
)

ScenarioPath = Annotated[Path, typer.Argument(help="A scenario in YAML, such as scenarios/quickstart.yaml")]


@app.command()
def run(
    scenario: ScenarioPath,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: runs/NAME)")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new folder instead of resuming")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="KEY=VAL", help="Narrow to some cases")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cases, measure nothing")] = False,
) -> None:
    """Run a scenario, or resume it; write rows, plots and report.html, and print the verdict last."""
    from specbench.bench import command

    raise typer.Exit(command.run(scenario, out=out, fresh=fresh, only=only or [], dry_run=dry_run))


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(help="Folders of results")],
    out: Annotated[Path | None, typer.Option(help="The page (default: report.html in the first folder)")] = None,
) -> None:
    """Make one self-contained HTML page of one run or several."""
    from specbench.report.command import write_page

    try:
        typer.echo(f"wrote {write_page(directories, out)}")
    except OSError as error:
        message = f"can't be written: {error.strerror or error}"
        raise InputError(message, file=error.filename, remedy="give another file to --out") from None


@app.command()
def roofline(
    hardware: Annotated[str | None, typer.Option(help="A device of the table, such as h100-sxm")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this device's own roofs")] = False,
) -> None:
    """Show the roofs of a device: datasheet, and measured."""
    from specbench.bench import command

    raise typer.Exit(command.roofline(hardware, measure=measure))


@app.command()
def doctor() -> None:
    """What this machine can run, and what is missing, with the remedy."""
    from specbench.bench import command

    raise typer.Exit(command.doctor())


def main() -> None:
    """Entry point: every SpecbenchError becomes its message on stderr and its exit code."""
    try:
        app()
    except SpecbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(int(ExitCode.BAD_ENVIRONMENT)) from None


if __name__ == "__main__":
    main()
