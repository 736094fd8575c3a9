"""Clocks wait for the work; the fake one is exact."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest
import torch
from engine_tools import make_decoder, make_engine, make_request, prompts, small_vocabulary

from specbench.bench.clock import CudaEventClock, EventMarks, FakeClock, WallClock, clock_for, time_call
from specbench.errors import InputError


class AsyncDevice:
    """Work runs on a thread; `issue` returns at once."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def issue(self, seconds: float) -> None:
        thread = threading.Thread(target=time.sleep, args=(seconds,))
        thread.start()
        self.threads.append(thread)

    def synchronize(self) -> None:
        while self.threads:
            self.threads.pop().join()


def test_fault_63_async_work_is_not_under_timed() -> None:
    device = AsyncDevice()
    clock = WallClock(synchronize=device.synchronize)
    assert time_call(clock, lambda: device.issue(0.030)) >= 0.030
    assert not device.threads
    device.issue(0.030)
    assert time_call(clock, lambda: None) < 0.030, "work issued before the span must not be in it"


def test_fake_clock_with_async_work() -> None:
    clock = FakeClock()
    assert time_call(clock, lambda: clock.issue(0.030)) == pytest.approx(0.030)

    def host_and_device() -> None:
        clock.issue(0.030)
        clock.advance(0.010)

    assert time_call(clock, host_and_device) == pytest.approx(0.030)
    assert time_call(clock, lambda: clock.advance(0.010)) == pytest.approx(0.010)


def test_fault_64_what_lies_outside_the_span_is_not_timed() -> None:
    clock = FakeClock()
    clock.issue(0.005)
    assert time_call(clock, lambda: clock.issue(0.001)) == pytest.approx(0.001)


def test_fake_clock_script() -> None:
    clock = FakeClock(ticks=[1.0, 0.5, 0.0, 0.25])
    assert time_call(clock, lambda: None) == 0.5
    assert time_call(clock, lambda: None) == 0.25
    with pytest.raises(AssertionError, match="script"):
        clock.now()


def test_clock_for_device() -> None:
    assert isinstance(clock_for("cpu"), WallClock)
    with pytest.raises(InputError, match="cpu or cuda"):
        WallClock("mps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_events_agree_with_the_wall() -> None:
    clock = clock_for("cuda")
    assert isinstance(clock, CudaEventClock)
    a = torch.randn(4096, 4096, device="cuda")
    wall = WallClock("cuda")
    run = lambda: [a @ a for _ in range(20)]  # noqa: E731
    run()
    outer = time_call(wall, run)
    inner = time_call(clock, run)
    assert 0 < inner <= outer * 1.5


# ---- Marks that do not wait


class FakeEvent:
    """An event of a device whose time is `now[0]` when it is recorded; keeps who waited for what."""

    now: ClassVar[list[float]] = [0.0]
    made: ClassVar[int] = 0
    waits: ClassVar[list[float]] = []

    def __init__(self) -> None:
        FakeEvent.made += 1
        self.at: float | None = None

    def record(self) -> None:
        FakeEvent.now[0] += 0.25
        self.at = FakeEvent.now[0]

    def synchronize(self) -> None:
        assert self.at is not None
        FakeEvent.waits.append(self.at)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None
        assert other.at is not None
        return (other.at - self.at) * 1e3


@pytest.fixture
def events() -> EventMarks:
    FakeEvent.now[:], FakeEvent.made, FakeEvent.waits[:] = [0.0], 0, []
    return EventMarks("cpu", FakeEvent)


def test_event_marks_are_read_after_the_run_and_used_again(events: EventMarks) -> None:
    for _ in range(2):
        marks = [events.mark() for _ in range(4)]
        assert events.seconds(marks).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert FakeEvent.waits == [1.0, 2.0], "one wait a run, for its last mark"
    assert FakeEvent.made == 4
    assert events.seconds([]).tolist() == []


def test_an_engine_with_event_marks_waits_once_a_run(events: EventMarks) -> None:
    """Every span of a step is a multiple of the marks between its ends, and nothing is read before the end."""
    spec, weights = small_vocabulary(num_layers=1)
    target = make_decoder(spec, weights, backend="torch")
    requests = [make_request(prompt, f"r{i}", max_tokens=5) for i, prompt in enumerate(prompts(spec, (4, 6)))]
    trace = make_engine(target, None, batch_size=2, marks=events).run(requests)
    assert len(trace.step_s) == 4
    assert len(FakeEvent.waits) == 1
    assert trace.step_s.tolist() == pytest.approx([8 * 0.25] * 4)
    for part, count in (("draft_s", 1), ("verify_s", 1), ("sample_s", 1), ("commit_s", 3), ("host_s", 2)):
        assert getattr(trace, part).tolist() == pytest.approx([count * 0.25] * 4), part
    assert trace.rollback_s.tolist() == pytest.approx([0.25] * 4)
    assert trace.end_s.tolist() == pytest.approx([9 * 0.25 * (i + 1) for i in range(4)])
