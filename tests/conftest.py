"""What every test rests on.

Where there is no GPU, Triton kernels run in the interpreter: this must be decided before triton is imported. Measured
roofs of the user's own cache are neither read nor written.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def own_roof_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache folder of its own for each test; it does not exist until something is stored."""
    folder: Path = tmp_path_factory.getbasetemp() / f"cache-{abs(hash(request.node.nodeid))}"
    os.environ["SPECBENCH_CACHE"] = str(folder)
