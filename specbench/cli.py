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
def distill(
    scenario: Annotated[Path, typer.Argument(help="A distillation in YAML, such as scenarios/distill/eagle.yaml")],
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: runs/distill/NAME)")] = None,
    text: Annotated[Path | None, typer.Option(help="Folder of the training text (default: runs/distill/text)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out")] = False,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Train so long, whatever the file says")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the training (default: torch's)")] = None,
) -> None:
    """Train a drafter for a target, from text the target writes itself; write it with its card."""
    from specbench.distill import command

    done = command.distill(scenario, out=out, text=text, resume=resume, minutes=minutes, threads=threads)
    raise typer.Exit(done)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(help="Folders of results")],
    out: Annotated[Path | None, typer.Option(help="The page (default: report.html in the first folder)")] = None,
    plots: Annotated[Path | None, typer.Option(help="Keep the figures here too: SVG, PNG, CSV")] = None,
) -> None:
    """Make one self-contained HTML page of one run, or of several side by side."""
    from specbench.report.command import write_page

    try:
        typer.echo(f"wrote {write_page(directories, out, plots)}")
    except OSError as error:
        message = f"can't be written: {error.strerror or error}"
        raise InputError(message, file=error.filename, remedy="give another file to --out") from None


@app.command()
def predict(
    scenario: ScenarioPath,
    hardware: Annotated[str | None, typer.Option(help="A device of the table, such as h100-sxm")] = None,
    acceptance: Annotated[
        str | None, typer.Option(metavar="FILE|CURVE", help="A curve file, measured rows, or rates: 0.8,0.7,0.6")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="A measured run: fit on a few of its cells, predict the rest")
    ] = None,
    fit_cells: Annotated[int, typer.Option(min=2, max=8, help="Cells to fit on at most")] = 8,
    only: Annotated[list[str] | None, typer.Option(metavar="KEY=VAL", help="Narrow to some cases")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: runs/NAME-predicted)")] = None,
) -> None:
    """The same sweep from the cost model, without running it: rows, plots and page, marked as predicted."""
    from specbench.predict import command

    done = command.predict(
        scenario,
        hardware_name=hardware,
        acceptance=acceptance,
        fit=fit,
        fit_cells=fit_cells,
        only=only or [],
        out=out,
    )
    raise typer.Exit(done)


@app.command()
def size(
    template: Annotated[Path, typer.Argument(help="A template in YAML, such as scenarios/size/llama-3.1-8b-h100.yaml")],
    out: Annotated[Path | None, typer.Option(help="Write every option and refusal to this file, as JSON")] = None,
    alternatives: Annotated[int, typer.Option(min=1, help="Lines of the table")] = 8,
) -> None:
    """How many GPUs a load needs: split, batch, drafter and depth, computed, with what limits them."""
    from specbench.predict import size_command

    raise typer.Exit(size_command.size(template, out=out, alternatives=alternatives))


@app.command()
def throttle(
    directory: Annotated[Path, typer.Argument(help="A folder of results, measured or predicted")],
    engine: Annotated[str, typer.Option(help="Who reads the table: vllm or sglang")] = "vllm",
    drafter: Annotated[str | None, typer.Option(help="Whose depths, where several were measured")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file (default: stdout)")] = None,
) -> None:
    """The best depth for each batch size of a run, in the form that a serving engine reads."""
    from specbench.report import throttle_command

    raise typer.Exit(throttle_command.throttle(directory, engine, drafter, out))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of results")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one")],
    out: Annotated[Path | None, typer.Option(help="Also write a page with both")] = None,
) -> None:
    """Show two runs beside each other: answers, cells in common, conditions that differ."""
    from specbench.report.command import compare as show

    raise typer.Exit(show(first, second, out))


@app.command()
def gate(
    candidate: Annotated[Path, typer.Argument(help="Folder of the run to judge")],
    baseline: Annotated[Path | None, typer.Option(help="Folder of baselines, or of another run")] = None,
    policy: Annotated[Path | None, typer.Option(help="A policy in YAML (default: docs/gate.md's)")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown for a step summary")] = None,
    comment: Annotated[Path | None, typer.Option(help="Write Markdown for a comment, under 65,000 characters")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON")] = None,
    github_benchmark: Annotated[Path | None, typer.Option(help="Write FILE.bigger.json and FILE.smaller.json")] = None,
    extend: Annotated[int | None, typer.Option(min=1, metavar="N", help="Measure N more blocks if undecided")] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Hold the run against itself, A/A")] = False,
) -> None:
    """Hold a run against a baseline: exit 0 passed, 1 regression, 3 inconclusive, 4 nothing that can be compared."""
    from specbench.gate import command

    measure: command.Measure | None = None
    if extend is not None:
        from specbench.bench.extend import extend_run

        measure = extend_run
    done = command.gate(
        candidate,
        baseline=baseline,
        policy_file=policy,
        outputs=command.Outputs(junit, markdown, comment, json, github_benchmark),
        with_self_test=self_test,
        extend=extend,
        measure=measure,
    )
    raise typer.Exit(done)


baseline_app = typer.Typer(no_args_is_help=True, help="Baselines of the gate: who put them there, when, and why.")
app.add_typer(baseline_app, name="baseline")
Who = Annotated[str, typer.Option(help="Who says so; kept in the file")]
Why = Annotated[str, typer.Option(help="Why; kept in the file")]


@baseline_app.command("update")
def baseline_update(
    run: Annotated[Path, typer.Argument(help="Folder of the run that becomes the baseline")],
    who: Who,
    why: Why,
    baseline: Annotated[Path, typer.Option(help="Folder of baselines")] = Path("results/baselines"),
    drop_missing: Annotated[bool, typer.Option("--drop-missing", help="Let go of cases that this run lacks")] = False,
) -> None:
    """Append a run to its scenario's and machine's baseline; nothing is overwritten."""
    from specbench.gate import command

    raise typer.Exit(command.baseline_update(run, baseline, who=who, why=why, drop_missing=drop_missing))


@baseline_app.command("pin")
def baseline_pin(
    file: Annotated[Path, typer.Argument(help="A baseline file")],
    who: Who,
    why: Why,
    entry: Annotated[int | None, typer.Option(help="Which entry (default: the latest)")] = None,
) -> None:
    """Say which entry drift over many small steps is seen against (at first: the first)."""
    from specbench.gate import command

    raise typer.Exit(command.baseline_pin(file, entry=entry, who=who, why=why))


@baseline_app.command("show")
def baseline_show(
    folder: Annotated[Path, typer.Argument(help="Folder of baselines, or one file")] = Path("results/baselines"),
) -> None:
    """List baselines, their entries and pins."""
    from specbench.gate import command

    raise typer.Exit(command.baseline_show(folder))


@app.command()
def history(
    directory: Annotated[Path, typer.Argument(help="A folder that holds folders of runs, or baselines")],
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these metrics")] = None,
    policy: Annotated[Path | None, typer.Option(help="A policy in YAML, for the smallest step that counts")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the history as JSON")] = None,
) -> None:
    """The trend of each case over stored runs, with steps marked."""
    from specbench.gate import command

    raise typer.Exit(command.history(directory, metrics=metric or [], policy_file=policy, json_file=json))


@app.command()
def roofline(
    hardware: Annotated[str | None, typer.Option(help="A device of the table, such as h100-sxm")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this device's own roofs, in about a minute")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Whose linear layers to measure, such as smollm2-135m")] = None,
    dtype: Annotated[str, typer.Option(help="For --measure: dtype of the linear layers")] = "bf16",
    out: Annotated[Path | None, typer.Option(help="For --measure: folder of charts (default: runs/roofline)")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON instead")] = False,
) -> None:
    """Show the roofs of a device, with knees and sources: datasheet, at the measured clock, and measured."""
    from specbench.bench import command, roofline_command

    done = roofline_command.roofline(
        command.console, hardware, measure=measure, model=model, dtype=dtype, out=out, as_json=json
    )
    raise typer.Exit(done)


@app.command()
def kernels(
    op: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these ops (default: all)")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only the small cases against their references")] = False,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile, without a GPU")] = False,
    arch: Annotated[list[str] | None, typer.Option(help="For --compile-only: sm_90 (the default), sm_80 ...")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="For --compile-only: processes (default: one a CPU)")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file")] = None,
) -> None:
    """Each kernel against its reference and its roof; or what it uses once compiled."""
    from specbench.bench import kernels as tool

    raise typer.Exit(
        tool.kernels(
            op or [],
            compile_only=compile_only,
            archs=arch or [],
            check_only=check,
            jobs=jobs,
            seed=seed,
            outputs=tool.Outputs(json, markdown),
            command=tool.shown_command(sys.argv[1:]),
        )
    )


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
