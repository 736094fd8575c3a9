"""What `specbench distill` does between parsing and exit code: progress, files, the last lines."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specbench.distill.acceptance import pooled
from specbench.distill.card import card_of, write_card, write_drafter
from specbench.distill.corpus import Corpus
from specbench.distill.optimise import Trainer
from specbench.distill.schema import Distillation, load_distillation
from specbench.distill.train import load_target, shown, train, with_minutes, write_text
from specbench.errors import ExitCode, SpecbenchError

RUNS = Path("runs") / "distill"

console = Console(highlight=False)


def distill(
    path: Path, *, out: Path | None, text: Path | None, resume: bool, minutes: float | None, threads: int | None
) -> ExitCode:
    """Write the text, train, and write drafter and card into `out`/drafter."""
    asked = with_minutes(load_distillation(path), minutes)
    folder = out or RUNS / asked.name
    text_folder = text or RUNS / "text"
    if threads:
        torch.set_num_threads(threads)
    words = ["specbench", "distill", str(path)]
    words += ["--minutes", f"{minutes:g}"] if minutes else []
    words += ["--threads", str(threads)] if threads else []
    command = shlex.join(words)
    try:
        _distill(asked, folder, text_folder, command, resume=resume)
    except KeyboardInterrupt:
        again = shlex.join([*words, "--out", str(folder), "--text", str(text_folder), "--resume"])
        remedy = f"go on with: {again} (without --resume if training had not begun)"
        raise SpecbenchError("interrupted; at most a minute of training is lost", remedy=remedy) from None
    return ExitCode.DONE


def _distill(asked: Distillation, folder: Path, text_folder: Path, command: str, *, resume: bool) -> None:
    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        writing = bar.add_task("writing text, answer tokens", total=asked.text.answer_tokens)
        write_text(
            asked,
            text_folder,
            os.cpu_count() or 1,
            lambda found, wanted: bar.update(writing, completed=min(found, wanted)),
        )
        corpus = Corpus(text_folder, asked.text.answer_tokens, asked.text.held_out)
        tell(
            f"text: {len(corpus.train)} conversations, {corpus.answer_tokens} answer tokens; "
            f"{len(corpus.held_out)} conversations held out"
        )
        tell(f"loading {asked.target.model}")
        target = load_target(asked)
        training = bar.add_task("training, steps", total=None)

        def progress(trainer: Trainer) -> None:
            state = trainer.progress
            loss = " ".join(f"{value:.3f}" for value in state.loss)
            bar.update(training, completed=state.step, total=state.total or None, description=f"training, loss {loss}")

        outcome = train(asked, target, corpus, folder, resume=resume, tell=tell, progress=progress)
    drafter = folder / "drafter"
    num_bytes = write_drafter(drafter, outcome)
    write_card(drafter, card_of(asked, outcome, target.label, command, num_bytes))
    tell(f"{drafter}: {num_bytes} bytes; {shown(pooled(outcome.acceptance))}")
