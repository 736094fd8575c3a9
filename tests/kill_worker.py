"""Runs `specbench run` again and again in children of one process that has imported everything, for test_kill.py.

    python kill_worker.py SCENARIO LOG

Each line of stdin starts one life. "kill CASES SECONDS OPTIONS" ends it by SIGKILL that long after it began to measure
that many cases (0: after it started), "interrupt ..." by SIGINT; "finish OPTIONS" lets it end. The answer is one line:
the exit status, negative for a signal. A life notes in LOG when it begins to measure a case. The device's roofs and the
code revision are constants here, and no pages are made.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench_tools import ScriptedMonitor, constant_roofs

from specbench import cli
from specbench.bench import command, sweep  # noqa: F401 - imported before the forks
from specbench.bench.measure import Outcome, measure_case
from specbench.report import command as report_command


def measure(log: Path, *args: Any, **options: Any) -> Outcome:
    with log.open("a") as file:
        file.write(args[1].hash + "\n")
    return measure_case(*args, monitor=ScriptedMonitor(), **options)


def live(scenario: str, options: list[str], log: Path) -> None:
    """One life: the entry point with its arguments; never returns."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(os.open(f"{log}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sweep.measure_device = lambda *_: constant_roofs()
    sweep.code_revision = lambda: "r0"
    sweep.run_sweep = functools.partial(sweep.run_sweep, measure=functools.partial(measure, log))
    report_command.write_outputs = lambda *args: Path()  # type: ignore[assignment]
    sys.argv = ["specbench", "run", scenario, *options]
    try:
        cli.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(99)


def wait_for(log: Path, num_cases: int, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while num_cases and time.monotonic() < end:
        if log.exists() and log.read_bytes().count(b"\n") >= num_cases:
            return
        time.sleep(0.001)


def main() -> None:
    scenario, log = sys.argv[1], Path(sys.argv[2])
    # A shell starts its background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    for line in sys.stdin:
        order, *when = line.split()
        child = os.fork()
        if child == 0:
            live(scenario, when if order == "finish" else when[2:], log)
        if order != "finish":
            wait_for(log, int(when[0]))
            time.sleep(float(when[1]))
            os.kill(child, signal.SIGKILL if order == "kill" else signal.SIGINT)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
