"""Where a backend runs, and whether its steps are graphs: said by the machine and the scenario, never in silence."""

from __future__ import annotations

import importlib.util

import pytest
from bench_tools import make_scenario

from specbench.bench import devices
from specbench.bench.devices import device_of, graphs_on, resolve_backend, sweep_device
from specbench.errors import InputError
from specbench.scenario.cases import TargetSpec, expand

TRITON = TargetSpec(shape="x", backend="triton")


def with_gpu(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: here)


def test_triton_runs_on_the_gpu_and_is_the_choice_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, True)
    assert resolve_backend(TRITON) == resolve_backend(TargetSpec(shape="x")) == "triton"
    assert device_of("triton") == "cuda"
    assert device_of("cpu") == device_of("torch") == "cpu"
    assert graphs_on(TRITON)
    assert not graphs_on(TargetSpec(shape="x", backend="triton", graphs=False))
    assert not graphs_on(TargetSpec(shape="x", backend="torch"))


def test_without_a_gpu_triton_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend(TRITON) == "triton"
    assert device_of("triton") == "cpu"
    assert not graphs_on(TRITON)
    assert resolve_backend(TargetSpec(shape="x")) == "cpu"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(InputError, match="needs a GPU, and there is none") as caught:
        resolve_backend(TRITON)
    assert "TRITON_INTERPRET=1" in str(caught.value.remedy)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with_gpu(monkeypatch, True)
    with pytest.raises(InputError, match="needs the package triton") as caught:
        resolve_backend(TRITON)
    assert "pip install" in str(caught.value.remedy)
    assert resolve_backend(TargetSpec(shape="x")) == "cpu"


@pytest.mark.parametrize("backend", ["cpu", "torch", "triton"])
def test_graphs_that_cant_be_had_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match="has no graphs") as caught:
        graphs_on(TargetSpec(shape="x", backend=backend, graphs=True))
    assert caught.value.key == "target.graphs"


def test_a_sweep_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, True)
    assert sweep_device([TRITON, TargetSpec(shape="x")]) == "cuda"
    assert sweep_device([TargetSpec(shape="x", backend="cpu")]) == sweep_device([]) == "cpu"
    with pytest.raises(InputError, match="one device"):
        sweep_device([TRITON, TargetSpec(shape="x", backend="cpu")])


def test_graphs_are_a_key_of_the_target_and_no_part_of_older_cases() -> None:
    target = {"shape": "tiny-llama-test", "weights": "dummy", "dtype": "fp32"}
    plain, on, off, false = (
        expand(make_scenario(target=target | more))[0]
        for more in ({}, {"graphs": "on"}, {"graphs": "off"}, {"graphs": False})
    )
    assert (plain.target.graphs, on.target.graphs, off.target.graphs) == (None, True, False)
    assert "graphs" not in str(plain.content())
    assert len({plain.hash, on.hash, off.hash}) == 3
    assert off.hash == false.hash
    with pytest.raises(InputError, match="must be on or off"):
        make_scenario(target=target | {"graphs": "sometimes"})
