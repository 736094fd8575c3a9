"""Clocks wait for the work; the fake one is exact."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from specbench.bench.clock import CudaEventClock, FakeClock, WallClock, clock_for, time_call
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
