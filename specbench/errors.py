"""Errors and exit codes: one home, so that every command ends the same way.

0 done · 1 regression, or every case failed · 2 the user's input is wrong · 3 the evidence is inconclusive ·
4 the environment or the baseline is invalid.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """The exit codes of every command."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    INCONCLUSIVE = 3
    BAD_ENVIRONMENT = 4


class SpecbenchError(Exception):
    """A failure that a person can act on: what is wrong, where, and the remedy."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        file: Path | str | None = None,
        line: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.file = file
        self.line = line
        self.key = key

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        text = f"{where}: " if where else ""
        text += f"{self.key}: " if self.key else ""
        text += self.message
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text


class InputError(SpecbenchError):
    """The user's input (a scenario, an option, a checkpoint, a prompt file) is wrong."""

    exit_code = ExitCode.BAD_INPUT


class InvalidEnvironmentError(SpecbenchError):
    """This machine, or the rows on disk, can't give a valid answer."""

    exit_code = ExitCode.BAD_ENVIRONMENT


class CapacityError(SpecbenchError):
    """A case needs more memory or context than there is; the case is skipped with this reason."""
