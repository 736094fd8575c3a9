"""Backend `cpu`: the decoder's operations recorded once as a program, then replayed for each batch.

Storage of weights and KV is bf16, fp16, fp32 or fp64; arithmetic is fp32 (fp64 for fp64 storage).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.ops import layout, program
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.cpu_weights import PackedWeights, pack_panels, padded
from specbench.engine.ops.layout import (
    ATTENTION,
    COPY,
    EMBED_PANELS,
    EMBED_ROWS,
    FIELDS,
    LINEAR,
    NUM_KINDS,
    QUERY_TILE,
    RMS_NORM,
    ROPE_STORE,
    SELECT_ROWS,
    SILU_ADD,
    SILU_MUL,
)
from specbench.engine.ops.openmp import parallel
from specbench.engine.ops.vector import PANEL
from specbench.roofline.shapes import ModelSpec

STORAGE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
KIND_NAMES = {
    LINEAR: "linear",
    ATTENTION: "attention",
    RMS_NORM: "norm",
    ROPE_STORE: "rope_store",
    SILU_MUL: "silu_mul",
    SELECT_ROWS: "select",
    COPY: "copy",
    SILU_ADD: "silu_add",
    EMBED_ROWS: "embed",
    EMBED_PANELS: "embed",
}


def _link_linears(ops: NDArray[np.int64], itemsize: int) -> None:
    """Tell each linear layer of a program which one follows (the first follows the last), for its last prefetch."""
    linears = np.flatnonzero(ops[:, 0] == LINEAR)
    for here, there in zip(linears, np.roll(linears, -1), strict=True):
        weights, k, num_panels = ops[there, 3], ops[there, 6], ops[there, 7]
        ops[here, 9:12] = (weights, num_panels, k * PANEL * itemsize)


class CpuOps:
    """Records a decoder's operations over preallocated buffers, then runs them on a batch in one launch.

    `max_rows` bounds the rows of a batch, `max_selected` the rows with logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        kv: PagedKVCache,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        max_rows: int,
        max_selected: int,
        num_threads: int,
    ) -> None:
        assert kv.layout == "panels", "the CPU kernels read pages of panels"
        self.spec, self.weights, self.kv = spec, weights, kv
        self.max_rows, self.max_selected = max_rows, max_selected
        self._rope = tuple(t.to(weights.real).contiguous() for t in rope)
        self._dtype = weights.dtype
        self._kernel = program.kernel_address(STORAGE[self._dtype])
        self.num_threads = self.usable_threads(num_threads)
        self._buffers: dict[str, torch.Tensor] = {}
        self._programs: dict[Hashable, np.ndarray] = {}
        self._entries: list[list[int]] = []
        self._state = np.zeros(layout.STATE_FIELDS, dtype=np.int64)
        self.cycles = np.zeros(NUM_KINDS, dtype=np.int64)
        group = spec.num_heads // spec.num_kv_heads
        real_size = 8 if weights.real == torch.float64 else 4
        per_row = spec.head_dim + padded(spec.head_dim) + padded(kv.max_context) + PANEL
        # Behind the rows' scratch: one panel of K or V, for cells that don't stand side by side.
        stride = QUERY_TILE * group * per_row * real_size + padded(spec.head_dim) * PANEL * self._dtype.itemsize
        self._scratch = torch.empty(self.num_threads * stride, dtype=torch.uint8)
        state = self._state
        state[layout.NUM_THREADS] = self.num_threads
        state[layout.BLOCK_TABLE] = kv.block_table.ctypes.data
        state[layout.BLOCK_TABLE_STRIDE] = kv.block_table.shape[1]
        if not kv.pages_in_order:
            state[layout.SLOT_INDEX] = kv.slot_index.ctypes.data
            state[layout.SLOT_INDEX_STRIDE] = kv.slot_index.shape[1]
        state[layout.CYCLES] = self.cycles.ctypes.data
        state[layout.SCRATCH] = self._scratch.data_ptr()
        state[layout.SCRATCH_STRIDE] = stride

    @staticmethod
    def usable_threads(wanted: int) -> int:
        """Threads that the runtime really gives: the barrier waits for just as many."""
        counter = np.zeros(1, dtype=np.int64)
        parallel(program.kernel_address("threads"), counter.ctypes.data, wanted)
        return int(counter[0])

    def _buffer(self, name: str, width: int, rows: int | None = None) -> torch.Tensor:
        rows = self.max_rows if rows is None else rows
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(rows, padded(width), dtype=self.weights.real)
        return self._buffers[name]

    def _add(self, *fields: int, selected: bool = False) -> None:
        self._entries.append([*fields, *([0] * (FIELDS - 1 - len(fields))), int(selected)])

    @staticmethod
    def _bits(value: float) -> int:
        return int(np.float64(value).view(np.int64))

    def embed(self, out: str, *, columns: int = 0) -> None:
        spec = self.spec
        target = self._buffer(out, columns or spec.hidden_size)
        kind, table = EMBED_PANELS, self.weights.embedding
        if self.weights.table is not None:
            kind, table = EMBED_ROWS, self.weights.table
        self._add(kind, table.data_ptr(), target.data_ptr(), target.shape[1], spec.hidden_size)

    def input(self, name: str, width: int) -> None:
        """A buffer that `run` fills, wholly or in part, before the first operation."""
        self._buffer(name, width)

    def _at(self, name: str, column: int) -> int:
        buffer = self._buffers[name]
        assert column < buffer.shape[1], "a column beyond the buffer"
        return buffer.data_ptr() + column * buffer.element_size()

    def copy(self, x: str, out: str, *, width: int, x_at: int = 0, at: int = 0, columns: int = 0) -> None:
        source, target = self._buffers[x], self._buffer(out, columns or width)
        self._add(COPY, self._at(x, x_at), source.shape[1], self._at(out, at), target.shape[1], width)

    def silu_add(self, x: str, out: str) -> None:
        source, target = self._buffers[x], self._buffers[out]
        self._add(
            *(SILU_ADD, source.data_ptr(), source.shape[1], target.data_ptr(), target.shape[1]), self.spec.hidden_size
        )

    def rms_norm(
        self,
        weight: str,
        x: str,
        out: str,
        *,
        add: str | None = None,
        selected: bool = False,
        x_at: int = 0,
        at: int = 0,
        columns: int = 0,
    ) -> None:
        scale = self.weights.small[weight]
        width = len(scale)
        rows = self.max_selected if selected else self.max_rows
        source, target = self._buffers[x], self._buffer(out, columns or width, rows)
        added = self._buffers[add] if add else None
        self._add(
            RMS_NORM,
            self._at(x, x_at),
            source.shape[1],
            added.data_ptr() if added is not None else 0,
            added.shape[1] if added is not None else 0,
            scale.data_ptr(),
            self._at(out, at),
            target.shape[1],
            width,
            self._bits(self.spec.rms_norm_eps),
            selected=selected,
        )

    def linear(self, weight: str, x: str, out: str, *, selected: bool = False) -> None:
        panels = self.weights.panels[weight]
        source = self._buffers[x]
        rows = self.max_selected if selected else self.max_rows
        target = self._buffer(out, panels.shape[0] * PANEL, rows)
        bias = self.weights.small.get(f"{weight}.bias")
        self._add(
            LINEAR,
            source.data_ptr(),
            source.shape[1],
            panels.data_ptr(),
            target.data_ptr(),
            target.shape[1],
            panels.shape[1],
            panels.shape[0],
            bias.data_ptr() if bias is not None else 0,
            selected=selected,
        )

    def rope_and_store(self, layer: int, qkv: str) -> None:
        spec, small, source = self.spec, self.weights.small, self._buffers[qkv]
        norms = [small.get(f"layers.{layer}.self_attn.{n}_norm.weight") for n in ("q", "k")]
        self._add(
            ROPE_STORE,
            source.data_ptr(),
            source.shape[1],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._rope[0].data_ptr(),
            self._rope[1].data_ptr(),
            self.kv.k_pool[layer].data_ptr(),
            self.kv.v_pool[layer].data_ptr(),
            *(n.data_ptr() if n is not None else 0 for n in norms),
            self._bits(spec.rms_norm_eps),
        )

    def attention(self, layer: int, qkv: str, out: str) -> None:
        spec, source = self.spec, self._buffers[qkv]
        target = self._buffer(out, spec.num_heads * spec.head_dim)
        slides = spec.sliding_window is not None and (spec.sliding_layers is None or spec.sliding_layers[layer])
        self._add(
            ATTENTION,
            source.data_ptr(),
            source.shape[1],
            target.data_ptr(),
            target.shape[1],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self.kv.k_pool[layer].data_ptr(),
            self.kv.v_pool[layer].data_ptr(),
            spec.sliding_window or 0 if slides else 0,
        )

    def silu_mul(self, gate_up: str, out: str) -> None:
        source, width = self._buffers[gate_up], self.spec.intermediate_size
        target = self._buffer(out, width)
        self._add(SILU_MUL, source.data_ptr(), source.shape[1], target.data_ptr(), target.shape[1], width)

    def select_rows(self, x: str, add: str, out: str) -> None:
        source, added, width = self._buffers[x], self._buffers[add], self.spec.hidden_size
        target = self._buffer(out, width, self.max_selected)
        self._add(
            SELECT_ROWS,
            source.data_ptr(),
            source.shape[1],
            added.data_ptr(),
            added.shape[1],
            target.data_ptr(),
            target.shape[1],
            width,
            selected=True,
        )

    def run(
        self,
        record: Callable[[CpuOps], None],
        key: Hashable,
        batch: ForwardBatch,
        inputs: Mapping[str, tuple[torch.Tensor, int]] | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Run the program `key` (recorded by `record` at first use) on `batch`; returns the buffers.

        `inputs` are rows of buffers declared by `input`: name -> (values [N, w], first column).
        """
        if key not in self._programs:
            self._entries = []
            record(self)
            ops = np.array(self._entries, dtype=np.int64)
            _link_linears(ops, self._dtype.itemsize)
            self._programs[key] = np.concatenate([ops.ravel(), np.zeros(len(ops), dtype=np.int64)])
        for name, (values, column) in (inputs or {}).items():
            self._buffers[name][: len(values), column : column + values.shape[1]] = values
        code = self._programs[key]
        num_ops = len(code) // (FIELDS + 1)
        counters = code[num_ops * FIELDS :]
        counters[:] = 0
        state = self._state
        state[layout.NUM_OPS] = num_ops
        state[layout.BARRIER] = 0
        state[layout.THREAD] = 0
        state[layout.NUM_ROWS] = batch.num_rows
        state[layout.NUM_REQUESTS] = len(batch.slots)
        state[layout.NUM_SELECTED] = len(batch.selected_rows)
        state[layout.TOKEN_IDS] = batch.token_ids.ctypes.data
        state[layout.POSITIONS] = batch.positions.ctypes.data
        state[layout.ROW_REQUEST] = batch.row_request.ctypes.data
        state[layout.QUERY_START] = batch.query_start.ctypes.data
        state[layout.CONTEXT_LENS] = batch.context_lens.ctypes.data
        state[layout.WRITTEN] = batch.written.ctypes.data
        mask = batch.tree_mask
        state[layout.TREE_MASK] = 0 if mask is None else mask.ctypes.data
        state[layout.MASK_WORDS] = 0 if mask is None else mask.shape[1]
        state[layout.SELECTED_ROWS] = batch.selected_rows.ctypes.data
        state[layout.SLOTS] = batch.slots.ctypes.data
        state[layout.TABLE] = code.ctypes.data
        state[layout.COUNTERS] = counters.ctypes.data
        parallel(self._kernel, state.ctypes.data, self.num_threads)
        return self._buffers

    @property
    def activation_bytes(self) -> int:
        return sum(t.nbytes for t in self._buffers.values()) + self._scratch.nbytes

    def shares(self) -> dict[str, float]:
        """Share of the time in forward passes by kind of operation, since the counters were last cleared."""
        total = max(1, int(self.cycles.sum()))
        out: dict[str, float] = {}
        for kind, name in KIND_NAMES.items():
            out[name] = out.get(name, 0.0) + float(self.cycles[kind]) / total
        return out


class PackedLinear:
    """A linear layer of this backend by itself: y [m, n] = x [m, k] @ weight [n, k]^T, for measuring roofs.

    A stack of weights [c, n, k] runs as c such layers over one x in a single launch, as a pass runs its layers. The
    result, that of the last layer, holds until the next call.
    """

    def __init__(self, weight: torch.Tensor, num_threads: int) -> None:
        stack = weight if weight.dim() == 3 else weight[None]
        count, n, k = stack.shape
        self._n = n
        self._real = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._panels = torch.empty(count, padded(n) // PANEL, k, PANEL, dtype=weight.dtype)
        for one, panels in zip(stack, self._panels, strict=True):
            pack_panels(one, panels)
        self._kernel = program.kernel_address(STORAGE[weight.dtype])
        self._threads = CpuOps.usable_threads(num_threads)
        self._state = np.zeros(layout.STATE_FIELDS, dtype=np.int64)
        self._cycles = np.zeros(NUM_KINDS, dtype=np.int64)
        self._counters = np.zeros(count, dtype=np.int64)
        self._ops = np.zeros((count, FIELDS), dtype=np.int64)
        for op, panels in zip(self._ops, self._panels, strict=True):
            op[[0, 3, 6, 7]] = (LINEAR, panels.data_ptr(), k, len(panels))
        _link_linears(self._ops, weight.itemsize)
        self._y = torch.empty(0, dtype=self._real)

    @property
    def num_layers(self) -> int:
        """Layers that one call runs."""
        return len(self._ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._real).contiguous()
        width = self._panels.shape[1] * PANEL
        if len(self._y) < len(x) * width:
            self._y = torch.empty(len(x) * width, dtype=self._real)
        self._ops[:, [1, 2, 4, 5]] = (x.data_ptr(), x.shape[1], self._y.data_ptr(), width)
        self._counters[:] = 0
        state = self._state
        state[:] = 0
        state[layout.NUM_OPS] = len(self._ops)
        state[layout.NUM_THREADS] = self._threads
        state[layout.NUM_ROWS] = len(x)
        state[layout.TABLE] = self._ops.ctypes.data
        state[layout.COUNTERS] = self._counters.ctypes.data
        state[layout.CYCLES] = self._cycles.ctypes.data
        parallel(self._kernel, state.ctypes.data, self._threads)
        return self._y[: len(x) * width].view(len(x), width)[:, : self._n]


def rope_tables(spec: ModelSpec, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, D/2] in float64, with llama3 or linear scaling (formulas as in transformers' rope utils)."""
    half = spec.head_dim // 2
    inverse = 1.0 / spec.rope_theta ** (torch.arange(half, dtype=torch.float64) * 2 / spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        wavelength = 2 * math.pi / inverse
        old = scaling.original_max_position_embeddings
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
        inverse = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    return angles.cos(), angles.sin()
