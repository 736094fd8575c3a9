"""Which steps share a captured graph, and the graphs themselves.

A graph replays fixed sizes, so a step is padded to its bucket: pad rows write nothing (slot -1), pad requests are
empty.
Sizes that a full, uniform batch has are buckets of their own, so that no measured step computes rows that nobody asked
for; only ragged ones are rounded up. What decides is pure; the capture is a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from specbench.errors import SpecbenchError

SHORTEST_KEYS = 512
"""Sequences up to this long are one class: splitting them further gives nothing."""


class GraphCaptureError(SpecbenchError):
    """A bucket that can't be captured. It is never run another way instead: turn graphs off to do that."""


def octave_class(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: two classes an octave."""
    power = next_power(count)
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def next_power(count: int) -> int:
    """The next power of two, 1 for nothing."""
    return 1 << max(0, count - 1).bit_length()


def row_class(rows: int, num_slots: int, most: int) -> int:
    """Rows of a pass rounded up to an octave class or a multiple of the batch, whichever is less, and to `most`."""
    assert rows <= most, "more rows than the buffers hold"
    return min(octave_class(rows), -(-rows // num_slots) * num_slots, most) if rows else 0


def request_class(requests: int, num_slots: int) -> int:
    """Requests of a pass rounded up; a full batch is itself."""
    return min(octave_class(requests), num_slots)


def key_class(keys: int, max_context: int) -> int:
    """The sequence length that the split of the attention is made for."""
    return min(max(SHORTEST_KEYS, next_power(keys)), max_context)


@dataclass(frozen=True)
class Bucket:
    """Sizes that a forward pass is padded to.

    `nodes` is the most rows of one request, `keys` the class of the longest sequence, `words` the int64 words of a
    row's mask (0: chains), `selected` the rows with logits.
    """

    rows: int
    requests: int
    nodes: int
    keys: int
    words: int
    selected: int


@dataclass(frozen=True)
class Sizes:
    """What a pass needs, before rounding."""

    rows: int
    requests: int
    nodes: int
    keys: int
    words: int
    selected: int


def exact(sizes: Sizes, max_context: int) -> Bucket:
    """No padding: how a pass runs without graphs. The split of the attention is that of the graphs all the same."""
    keys = key_class(sizes.keys, max_context)
    return Bucket(sizes.rows, sizes.requests, next_power(sizes.nodes), keys, sizes.words, sizes.selected)


def bucket_of(sizes: Sizes, *, num_slots: int, max_rows: int, max_selected: int, max_context: int) -> Bucket:
    """The bucket of a pass. Logits are wanted of all rows, or of one row a request."""
    rows = row_class(sizes.rows, num_slots, max_rows)
    requests = request_class(sizes.requests, num_slots)
    if sizes.selected == sizes.rows:
        # All rows of a pad row's kind are selected too, as far as there is room for their logits.
        selected = min(rows, max_selected)
    else:
        selected = min(row_class(sizes.selected, num_slots, max_selected), max_selected)
    return Bucket(
        rows, requests, next_power(sizes.nodes), key_class(sizes.keys, max_context), sizes.words, max(1, selected)
    )


def attention_shapes(num_slots: int, max_rows: int, max_context: int) -> list[tuple[int, int, int, int]]:
    """(requests, nodes, keys, rows) of every attention that a pass can ask for, by classes; rows are the most."""
    batches = sorted({request_class(count, num_slots) for count in range(1, num_slots + 1)})
    nodes = [1 << power for power in range(next_power(max_rows).bit_length())]
    lengths = sorted({key_class(keys, max_context) for keys in (1 << p for p in range(max_context.bit_length() + 1))})
    return [
        (batch, most, length, min(max_rows, octave_class(batch * most)))
        for batch in batches
        for most in nodes
        for length in lengths
    ]


class Recorder(Protocol):
    """Makes a replay of a call that issues work on fixed addresses; the call itself may run several times meanwhile."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device, warmups: int = 2) -> None:
        self._device, self._warmups = device, warmups
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        # Kernels compile and libraries take their workspaces in the runs before: a capture allows neither.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(self._warmups):
                call()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            call()
        return graph.replay


class Graphs:
    """Captured calls by key. Without a recorder every call runs as it is (`graphs: off`).

    `num_captured` grows by one with each new key, `captured_in_all` with those of every instance: a step in which it
    grew has spent time on that.
    """

    captured_in_all: ClassVar[int] = 0

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self.num_captured = 0
        self.num_replayed = 0

    @property
    def on(self) -> bool:
        return self._recorder is not None

    def missing(self, key: Hashable) -> bool:
        """Whether `key` has still to be captured."""
        return self._recorder is not None and key not in self._replays

    def capture(self, key: Hashable, call: Callable[[], None]) -> None:
        """Capture `call` on the inputs as they stand. Raises GraphCaptureError; memory errors pass as they are."""
        assert self._recorder is not None, "graphs are off"
        try:
            self._replays[key] = self._recorder.record(call)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise GraphCaptureError(f"{key} can't be captured: {error}", remedy="set graphs: off") from error
        self.num_captured += 1
        Graphs.captured_in_all += 1

    def run(self, key: Hashable, call: Callable[[], None]) -> None:
        """Replay `key`, or run `call` where graphs are off."""
        if self._recorder is None:
            call()
            return
        self._replays[key]()
        self.num_replayed += 1
