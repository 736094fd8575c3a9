"""`kill -9` at random moments of a sweep: the running case is lost at most, and the rows are complete in the end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_tools import scenario_data, write_scenario

from specbench.scenario.cases import expand
from specbench.scenario.schema import Scenario
from specbench.store import ROWS_FILE, read_manifest, read_rows

ROOT = Path(__file__).parent.parent
NUM_KILLS = 10
SWEEP: dict[str, Any] = {
    "drafters": [{"kind": "none"}, {"kind": "oracle"}, {"kind": "forced", "rates": [0.8, 0.6, 0.4]}],
    "sweep": {"batch_size": [1, 2, 3, 4, 5, 6, 7, 8], "depth": [1, 2, 3]},
    "workload": {"num_prompts": 8, "output_len": 16},
    "measure": {"blocks": {"min": 3, "max": 3}, "warmup": {"max": 1}},
}


class Worker:
    """A process that has imported everything and runs the command in its children; see kill_worker.py."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "begun.log"
        write_scenario(folder / "s.yaml", **SWEEP)
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests" / "kill_worker.py"), "s.yaml", str(self.log)]
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._answer() == "ready"
        assert self.live("finish --out compiled --only batch_size=1 --only depth=1,0") == 0, self.said()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def live(self, order: str) -> int:
        """One life of the command; returns its exit status."""
        assert self.process.stdin is not None
        self.log.unlink(missing_ok=True)
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return int(self._answer())

    def begun(self) -> list[str]:
        """Hashes of the cases that the last life began to measure."""
        return self.log.read_text().split() if self.log.exists() else []

    def said(self) -> str:
        return Path(f"{self.log}.err").read_text()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    started = Worker(tmp_path_factory.mktemp("kill"))
    yield started
    started.process.communicate(timeout=60)


def test_kill_9_at_random_moments_loses_the_running_case_at_most(worker: Worker) -> None:
    """After every kill: what was on disk before still is, byte by byte; a row more for each case that was begun, but
    for the one that ran. A row is never written twice, and no case that has one is measured again."""
    folder, stream = worker.folder / "runs" / "tiny", random.Random(20)
    file = folder / ROWS_FILE
    expected = {case.hash for case in expand(Scenario.from_dict(scenario_data(**SWEEP)))}
    complete, done, killed_while_measuring = b"", set[str](), 0
    assert len(expected) == 8 * 7
    for _ in range(NUM_KILLS):
        when = f"{stream.choice([0, 1, 1, 2, 5])} {stream.uniform(0.0, 0.2):.4f}"
        assert worker.live(f"kill {when}") == -9
        data = file.read_bytes() if file.exists() else b""
        assert data.startswith(complete), "rows of an earlier life were touched"
        rows = read_rows(folder) if file.exists() else []
        hashes = [row.case_hash for row in rows]
        assert len(set(hashes)) == len(hashes), "a row was written twice"
        assert all(row.status == "ok" for row in rows)
        begun = worker.begun()
        assert not done & set(begun), "a case that has a row was measured again"
        new = hashes[len(done) :]
        assert begun[: len(new)] == new
        assert len(begun) - len(new) <= 1, "more than the running case was lost"
        killed_while_measuring += len(begun) - len(new)
        complete, done = data[: data.rfind(b"\n") + 1], set(hashes)
    assert killed_while_measuring > 0, "the kills came too early or too late to mean anything"
    assert worker.live("finish") == 0, worker.said()
    rows = read_rows(folder)
    assert [row.status for row in rows] == ["ok"] * len(expected)
    assert {row.case_hash for row in rows} == expected
    assert file.read_bytes().startswith(complete)
    assert file.read_bytes().count(b"\n") == len(expected)
    assert read_manifest(folder)["roofs"]["measured"]
    assert worker.live("finish") == 0
    assert worker.begun() == [], "a finished sweep measures nothing"


def test_ctrl_c_says_how_to_resume(worker: Worker) -> None:
    assert worker.live("interrupt 2 0.02 --out stopped --only depth=0,1,2") == 1
    assert worker.said() == (
        "error: interrupted; at most the running case is lost\n"
        "  remedy: resume with: specbench run s.yaml --out stopped --only depth=0,1,2\n"
    )
    assert len(read_rows(worker.folder / "stopped")) >= len(worker.begun()) - 1 >= 1
