"""Backend `cpu`: the decoder's operations recorded once as a program, then replayed for each batch.

Weights live in one arena, packed into panels of 16 output columns ([panel, k, 16]) so that a matrix product streams
them once, front to back. Storage is bf16, fp16, fp32 or fp64; arithmetic is fp32 (fp64 for fp64 storage).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.ops import layout, program
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.layout import (
    ATTENTION,
    EMBED_PANELS,
    EMBED_ROWS,
    FIELDS,
    LINEAR,
    NUM_KINDS,
    QUERY_TILE,
    RMS_NORM,
    ROPE_STORE,
    SELECT_ROWS,
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
    EMBED_ROWS: "embed",
    EMBED_PANELS: "embed",
}


def _padded(width: int) -> int:
    return -(-width // PANEL) * PANEL


def pack_panels(weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write weight [n, k] into `out` [panels, k, 16]; columns beyond n are zero."""
    n, k = weight.shape
    full = n // PANEL
    out[:full] = weight[: full * PANEL].view(full, PANEL, k).transpose(1, 2)
    if full < len(out):
        out[full].zero_()
        out[full, :, : n - full * PANEL] = weight[full * PANEL :].T


def _link_linears(ops: NDArray[np.int64], itemsize: int) -> None:
    """Tell each linear layer of a program which one follows (the first follows the last), for its last prefetch."""
    linears = np.flatnonzero(ops[:, 0] == LINEAR)
    for here, there in zip(linears, np.roll(linears, -1), strict=True):
        weights, k, num_panels = ops[there, 3], ops[there, 6], ops[there, 7]
        ops[here, 9:12] = (weights, num_panels, k * PANEL * itemsize)


class CpuWeights:
    """The packed weights of one model: fused q/k/v and gate/up, panels in one arena, norms and biases beside it."""

    def __init__(self, spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
        self.real = torch.float64 if dtype == torch.float64 else torch.float32
        self.panels: dict[str, torch.Tensor] = {}
        self.small: dict[str, torch.Tensor] = {}
        self.table: torch.Tensor | None = None
        self._spec = spec
        shapes = dict(self._panel_shapes())
        arena = torch.empty(sum(_padded(n) * k for n, k in shapes.values()), dtype=dtype)
        at = 0
        for name, (n, k) in shapes.items():
            size = _padded(n) * k
            self.panels[name] = arena[at : at + size].view(-1, k, PANEL)
            at += size
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            self._place(name, tensor, waiting)
            del tensor
        assert not waiting, f"tensors missing for {sorted(waiting)}"

    def _panel_shapes(self) -> Iterable[tuple[str, tuple[int, int]]]:
        s = self._spec
        for i in range(s.num_layers):
            yield f"layers.{i}.qkv", ((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden_size)
            yield f"layers.{i}.o", (s.hidden_size, s.num_heads * s.head_dim)
            yield f"layers.{i}.gate_up", (2 * s.intermediate_size, s.hidden_size)
            yield f"layers.{i}.down", (s.hidden_size, s.intermediate_size)
        yield "lm_head", (s.vocab_size, s.hidden_size)

    def _place(self, name: str, tensor: torch.Tensor, waiting: dict[str, dict[str, torch.Tensor]]) -> None:
        parts = name.split(".")
        if name == "embed_tokens.weight" and not self._spec.tie_word_embeddings:
            self.table = tensor.contiguous()
        elif name in ("embed_tokens.weight", "lm_head.weight"):
            pack_panels(tensor, self.panels["lm_head"])
        elif parts[-2].endswith("norm"):
            self.small[name] = tensor.to(self.real).contiguous()
        else:
            layer, projection, what = ".".join(parts[:2]), parts[-2], parts[-1]
            fused, members = next(
                (f, m)
                for f, m in (
                    ("qkv", ("q_proj", "k_proj", "v_proj")),
                    ("gate_up", ("gate_proj", "up_proj")),
                    ("o", ("o_proj",)),
                    ("down", ("down_proj",)),
                )
                if projection in m
            )
            target = f"{layer}.{fused}"
            group = waiting.setdefault(f"{target}.{what}", {})
            group[projection] = tensor
            if len(group) < len(members):
                return
            whole = torch.cat([group[m] for m in members])
            del waiting[f"{target}.{what}"]
            if what == "weight":
                pack_panels(whole, self.panels[target])
            else:
                bias = torch.zeros(_padded(len(whole)), dtype=self.real)
                bias[: len(whole)] = whole
                self.small[f"{target}.bias"] = bias


class CpuOps:
    """Records a decoder's operations over preallocated buffers, then runs them on a batch in one launch.

    `max_rows` bounds the rows of a batch, `max_selected` the rows with logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: CpuWeights,
        kv: PagedKVCache,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        max_rows: int,
        max_selected: int,
        num_threads: int,
    ) -> None:
        self.spec, self.weights, self.kv = spec, weights, kv
        self.max_rows, self.max_selected = max_rows, max_selected
        self._rope = tuple(t.to(weights.real).contiguous() for t in rope)
        self._dtype = weights.panels["lm_head"].dtype
        self._kernel = program.kernel_address(STORAGE[self._dtype])
        self.num_threads = self.usable_threads(num_threads)
        self._buffers: dict[str, torch.Tensor] = {}
        self._programs: dict[int, np.ndarray] = {}
        self._entries: list[list[int]] = []
        self._state = np.zeros(layout.STATE_FIELDS, dtype=np.int64)
        self.cycles = np.zeros(NUM_KINDS, dtype=np.int64)
        group = spec.num_heads // spec.num_kv_heads
        real_size = 8 if weights.real == torch.float64 else 4
        per_row = spec.head_dim + _padded(spec.head_dim) + _padded(kv.max_context) + PANEL
        stride = QUERY_TILE * group * per_row * real_size
        self._scratch = torch.empty(self.num_threads * stride, dtype=torch.uint8)
        state = self._state
        state[layout.NUM_THREADS] = self.num_threads
        state[layout.BLOCK_TABLE] = kv.block_table.ctypes.data
        state[layout.BLOCK_TABLE_STRIDE] = kv.block_table.shape[1]
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
            self._buffers[name] = torch.zeros(rows, _padded(width), dtype=self.weights.real)
        return self._buffers[name]

    def _add(self, *fields: int, selected: bool = False) -> None:
        self._entries.append([*fields, *([0] * (FIELDS - 1 - len(fields))), int(selected)])

    @staticmethod
    def _bits(value: float) -> int:
        return int(np.float64(value).view(np.int64))

    def embed(self, out: str) -> None:
        spec = self.spec
        target = self._buffer(out, spec.hidden_size)
        kind, table = EMBED_PANELS, self.weights.panels["lm_head"]
        if self.weights.table is not None:
            kind, table = EMBED_ROWS, self.weights.table
        self._add(kind, table.data_ptr(), target.data_ptr(), target.shape[1], spec.hidden_size)

    def rms_norm(self, weight: str, x: str, out: str, *, add: str | None = None, selected: bool = False) -> None:
        width = self.spec.hidden_size
        rows = self.max_selected if selected else self.max_rows
        source, target = self._buffers[x], self._buffer(out, width, rows)
        added = self._buffers[add] if add else None
        self._add(
            RMS_NORM,
            source.data_ptr(),
            source.shape[1],
            added.data_ptr() if added is not None else 0,
            added.shape[1] if added is not None else 0,
            self.weights.small[weight].data_ptr(),
            target.data_ptr(),
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

    def run(self, record: Callable[[CpuOps], None], key: int, batch: ForwardBatch) -> Mapping[str, torch.Tensor]:
        """Run the program `key` (recorded by `record` at first use) on `batch`; returns the buffers' used rows."""
        if key not in self._programs:
            self._entries = []
            record(self)
            ops = np.array(self._entries, dtype=np.int64)
            _link_linears(ops, self._dtype.itemsize)
            self._programs[key] = np.concatenate([ops.ravel(), np.zeros(len(ops), dtype=np.int64)])
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
    """One linear layer of this backend by itself: y [m, n] = x [m, k] @ weight [n, k]^T, for measuring roofs."""

    def __init__(self, weight: torch.Tensor, num_threads: int) -> None:
        n, k = weight.shape
        self._n = n
        self._real = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._panels = torch.empty(_padded(n) // PANEL, k, PANEL, dtype=weight.dtype)
        pack_panels(weight, self._panels)
        self._kernel = program.kernel_address(STORAGE[weight.dtype])
        self._threads = CpuOps.usable_threads(num_threads)
        self._state = np.zeros(layout.STATE_FIELDS, dtype=np.int64)
        self._cycles = np.zeros(NUM_KINDS, dtype=np.int64)
        self._op = np.zeros(FIELDS + 1, dtype=np.int64)
        self._op[[0, 3, 6, 7]] = (LINEAR, self._panels.data_ptr(), k, len(self._panels))
        _link_linears(self._op[None, :FIELDS], weight.itemsize)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._real).contiguous()
        y = torch.empty(len(x), len(self._panels) * PANEL, dtype=self._real)
        self._op[[1, 2, 4, 5]] = (x.data_ptr(), x.shape[1], y.data_ptr(), y.shape[1])
        self._op[FIELDS] = 0
        state = self._state
        state[:] = 0
        state[layout.NUM_OPS] = 1
        state[layout.NUM_THREADS] = self._threads
        state[layout.NUM_ROWS] = len(x)
        state[layout.TABLE] = self._op.ctypes.data
        state[layout.COUNTERS] = self._op[FIELDS:].ctypes.data
        state[layout.CYCLES] = self._cycles.ctypes.data
        parallel(self._kernel, state.ctypes.data, self._threads)
        return y[:, : self._n]


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
