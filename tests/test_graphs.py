"""Buckets of captured steps, and what is replayed: pads change nothing, a bucket that can't be captured is an error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.engine.ops.graphs import (
    Bucket,
    GraphCaptureError,
    Graphs,
    Sizes,
    attention_shapes,
    bucket_of,
    exact,
    key_class,
    next_power,
    octave_class,
    request_class,
    row_class,
)
from specbench.engine.ops.staging import Field, Inputs, Outputs, layout


def test_two_classes_an_octave() -> None:
    classes = sorted({octave_class(count) for count in range(1, 129)})
    assert classes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert [next_power(count) for count in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]


@given(st.integers(1, 64), st.integers(1, 8))
def test_a_full_uniform_batch_is_never_padded(num_slots: int, nodes: int) -> None:
    """What a measured step computes is what was asked for: B requests of the same number of nodes have B x T rows."""
    rows = num_slots * nodes
    sizes = Sizes(rows, num_slots, nodes, 100, 0, rows)
    found = bucket_of(sizes, num_slots=num_slots, max_rows=64 * 8, max_selected=64 * 8, max_context=4096)
    assert (found.rows, found.requests, found.selected) == (rows, num_slots, rows)


@given(st.data(), st.integers(1, 40), st.integers(1, 9))
def test_a_bucket_holds_what_it_is_made_for(data: st.DataObject, num_slots: int, most_nodes: int) -> None:
    lens = data.draw(st.lists(st.integers(1, most_nodes), min_size=1, max_size=num_slots))
    max_rows = max(num_slots * most_nodes, 1)
    keys = data.draw(st.integers(max(lens), 5000))
    last_only = data.draw(st.booleans())
    sizes = Sizes(sum(lens), len(lens), max(lens), keys, 0, len(lens) if last_only else sum(lens))
    found = bucket_of(sizes, num_slots=num_slots, max_rows=max_rows, max_selected=max_rows, max_context=5000)
    assert sizes.rows <= found.rows <= max_rows
    assert sizes.requests <= found.requests <= num_slots
    assert found.nodes >= sizes.nodes
    assert sizes.keys <= found.keys <= 5000
    assert sizes.selected <= found.selected <= max_rows
    assert found.rows <= 1.5 * sizes.rows, "at most half as many rows again"
    again = Sizes(found.rows, found.requests, found.nodes, found.keys, 0, found.selected)
    if not last_only or found.selected == found.rows:
        limits = {"num_slots": num_slots, "max_rows": max_rows, "max_selected": max_rows, "max_context": 5000}
        assert bucket_of(again, **limits) == found, "a bucket's own sizes are that bucket"


def test_the_number_of_buckets_stays_small() -> None:
    """Batch 32, up to 8 nodes a request: all ragged batches share a few dozen sizes."""
    sizes = {row_class(rows, 32, 256) for rows in range(1, 257)}
    assert {32, 64, 96, 128, 160, 192, 224, 256} <= sizes
    assert len(sizes) < 20
    assert {request_class(count, 48) for count in range(1, 49)} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48}


def test_contexts_are_classes_of_the_split_and_end_with_the_cache() -> None:
    assert [key_class(keys, 5000) for keys in (1, 512, 513, 4096, 4097, 5000)] == [512, 512, 1024, 4096, 5000, 5000]
    assert key_class(3, 100) == 100


@given(st.integers(1, 20), st.integers(1, 12))
def test_every_attention_of_a_bucket_has_its_workspace_planned(num_slots: int, nodes: int) -> None:
    max_rows = num_slots * nodes
    planned = {(batch, most, keys): rows for batch, most, keys, rows in attention_shapes(num_slots, max_rows, 1000)}
    for active in range(1, num_slots + 1):
        for most in range(1, nodes + 1):
            for rows in {active, active + most - 1, active * most}:
                sizes = Sizes(rows, active, most, 700, 0, rows)
                found = bucket_of(
                    sizes, num_slots=num_slots, max_rows=max_rows, max_selected=max_rows, max_context=1000
                )
                assert planned[(found.requests, found.nodes, found.keys)] >= found.rows
                alone = exact(sizes, 1000)
                assert planned[(request_class(active, num_slots), alone.nodes, alone.keys)] >= rows


def test_without_graphs_nothing_is_padded() -> None:
    assert exact(Sizes(5, 2, 3, 40, 1, 5), 80) == Bucket(5, 2, 4, 80, 1, 5)


# ---- Capture and replay


class Again:
    """A recorder whose replay is the call itself; keeps what was recorded."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.recorded = error, 0

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        call()
        return call


def test_each_key_is_captured_once_and_replayed() -> None:
    recorder, calls = Again(), []
    graphs = Graphs(recorder)
    for key in ("a", "b", "a", "a"):
        if graphs.missing(key):
            graphs.capture(key, lambda key=key: calls.append(key))  # type: ignore[misc]
        graphs.run(key, lambda: pytest.fail("a captured key is replayed, not called"))
    assert recorder.recorded == graphs.num_captured == 2
    assert graphs.num_replayed == 4
    assert calls == ["a", "a", "b", "b", "a", "a"]


def test_a_bucket_that_cant_be_captured_is_an_error_each_time() -> None:
    graphs = Graphs(Again(RuntimeError("operation not permitted when stream is capturing")))
    for _ in range(2):
        assert graphs.missing("a")
        with pytest.raises(GraphCaptureError, match="can't be captured: operation not permitted") as caught:
            graphs.capture("a", lambda: None)
        assert caught.value.remedy == "set graphs: off"
    assert graphs.num_captured == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
def test_memory_that_runs_out_in_a_capture_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)):
        Graphs(Again(error)).capture("a", lambda: None)


def test_graphs_off_run_every_call() -> None:
    graphs, calls = Graphs(None), []
    for _ in range(2):
        assert not graphs.missing("a")
        graphs.run("a", lambda: calls.append(1))
    assert len(calls) == 2
    assert graphs.num_captured == graphs.num_replayed == 0


# ---- Staging

FIELDS = {
    "a": Field(torch.int64, (3,)),
    "b": Field(torch.int32, (5,)),
    "c": Field(torch.float64, (2, 2)),
    "table": Field(torch.int32, (4, 3)),
}


def test_fields_stand_apart_and_aligned() -> None:
    offsets, length = layout(FIELDS)
    assert offsets == {"a": 0, "b": 32, "c": 64, "table": 96}
    assert length == 144
    assert all(offset % 16 == 0 for offset in offsets.values())


def test_inputs_reach_their_fixed_places_in_one_copy() -> None:
    inputs = Inputs(FIELDS, torch.device("cpu"))
    places = {name: tensor.data_ptr() for name, tensor in inputs.device.items()}
    for value in (1, 2):
        inputs.begin()
        for name in FIELDS:
            inputs.host(name)[...] = value
        inputs.send("table", 2)
        assert all((inputs.device[name] == value).all() for name in ("a", "b", "c"))
        assert (inputs.device["table"][:2] == value).all()
        assert (inputs.device["table"][2:] == 0).all(), "rows beyond the count are not copied"
    assert places == {name: tensor.data_ptr() for name, tensor in inputs.device.items()}
    inputs.send()
    assert (inputs.device["table"] == 2).all()


def test_outputs_are_read_once_and_counted() -> None:
    outputs = Outputs(FIELDS, torch.device("cpu"))
    outputs.device["b"][:] = torch.arange(5, dtype=torch.int32)
    assert outputs.num_reads == 0
    back = outputs.read()
    assert np.array_equal(back["b"], np.arange(5))
    assert outputs.num_reads == 1
