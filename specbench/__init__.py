"""specbench: where does speculative decoding stop paying off on your hardware, and why?

import specbench
specbench.run("scenarios/quickstart.yaml")      # as the command `specbench run`
frame = specbench.load("runs/quickstart")       # a pandas.DataFrame of the rows
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.version import __version__

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["__version__", "load", "run"]


def run(path: Path | str, *, out: Path | str | None = None, fresh: bool = False, only: list[str] | None = None) -> Path:
    """Run or resume the scenario at `path`; returns the folder of the results. Raises SpecbenchError."""
    from specbench.bench.command import run_scenario

    return run_scenario(Path(path), out=Path(out) if out else None, fresh=fresh, only=only or []).directory


def load(directory: Path | str) -> pd.DataFrame:
    """The rows of a results folder as a frame: one line a case, axes and scalar metrics as columns."""
    from specbench.store import load as load_rows

    return load_rows(directory)
