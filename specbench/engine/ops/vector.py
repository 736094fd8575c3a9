"""LLVM building blocks of the CPU kernels: the panel micro-kernel, storage conversion, atomics.

Numba compiles the loops; what it can't express (explicit vectors, prefetch, atomics, bit casts) is emitted here as LLVM
through `intrinsic`. Nothing needs a C compiler.

Storage is told apart by the type of a *tag* argument: uint16 = bf16, int16 = fp16, float32, float64. Arithmetic is
float64 for float64 storage and float32 otherwise.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL = 16
"""Output columns of a weight panel, and tokens of a KV page."""

CACHE_LINE = 64
"""Bytes."""

_i8p = ir.IntType(8).as_pointer()
_i16 = ir.IntType(16)
_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_f32 = ir.FloatType()
_f64 = ir.DoubleType()


VECTOR_BITS = 512 if binding.get_host_cpu_features().get("avx512f") else 256
"""Vector width this host's micro-kernel is compiled for."""

MAX_TILE = 12 if VECTOR_BITS == 512 else 6
"""Rows the micro-kernel takes at once. AVX2: 6 rows x 2 vectors of 8 floats fill most of its 16 registers. AVX-512: 12
rows x 2 panels, a vector of 16 floats each, of its 32."""

PAIRED_ROWS = 1 << 62 if VECTOR_BITS == 512 else 2
"""Up to so many rows two panels stand side by side: enough independent sums to hide the latency of the multiply-add."""


class _Storage:
    """How one storage type is loaded into vectors of the arithmetic type."""

    def __init__(self, tag: Any) -> None:
        self.kind = {"uint16": "bf16", "int16": "fp16", "float32": "fp32", "float64": "fp64"}[str(tag)]
        self.size = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[self.kind]
        self.real = _f64 if self.kind == "fp64" else _f32
        self.real_size = 8 if self.kind == "fp64" else 4
        self.lanes = min(PANEL, VECTOR_BITS // (8 * self.real_size))
        self.vector = ir.VectorType(self.real, self.lanes)
        self.per_panel = PANEL // self.lanes

    def load_panel_row(self, builder: Any, address: Any) -> list[Any]:
        """Load PANEL stored values as `per_panel` vectors. bf16 in two vectors is (even columns, odd columns)."""
        if self.kind == "bf16" and self.per_panel == 1:
            stored, words = ir.VectorType(_i16, PANEL), ir.VectorType(_i32, PANEL)
            values = builder.zext(builder.load(builder.inttoptr(address, stored.as_pointer()), align=2), words)
            return [builder.bitcast(builder.shl(values, ir.Constant(words, [16] * PANEL)), self.vector)]
        if self.kind == "bf16":
            words = ir.VectorType(_i32, 8)
            pair = builder.load(builder.inttoptr(address, words.as_pointer()), align=2)
            even = builder.shl(pair, ir.Constant(words, [16] * 8))
            odd = builder.and_(pair, ir.Constant(words, [0xFFFF0000] * 8))
            return [builder.bitcast(even, self.vector), builder.bitcast(odd, self.vector)]
        stored = ir.VectorType(ir.HalfType(), self.lanes) if self.kind == "fp16" else self.vector
        out = []
        for index in range(self.per_panel):
            at = builder.add(address, ir.Constant(_i64, index * self.lanes * self.size))
            value = builder.load(builder.inttoptr(at, stored.as_pointer()), align=self.size)
            out.append(builder.fpext(value, self.vector) if self.kind == "fp16" else value)
        return out

    def in_order(self, builder: Any, vectors: list[Any]) -> list[Any]:
        """The vectors of one panel in column order (bf16's even and odd columns interleaved again)."""
        if self.kind != "bf16" or self.per_panel == 1:
            return vectors
        even, odd = vectors
        low = [i // 2 + (8 if i % 2 else 0) for i in range(8)]
        high = [4 + i // 2 + (8 if i % 2 else 0) for i in range(8)]
        mask = ir.VectorType(_i32, 8)
        return [
            builder.shuffle_vector(even, odd, ir.Constant(mask, low)),
            builder.shuffle_vector(even, odd, ir.Constant(mask, high)),
        ]


@intrinsic(prefer_literal=True)
def panel_kernel(typingctx, tag, panels, accumulate, rows, x, ldx, w, w_panel, w_row, y, ldy, k, ahead, ahead_step):  # type: ignore[no-untyped-def]
    """y[rows, panels x 16] (+)= x[rows, k] @ w[k, panels x 16]; every output sums over k in order.

    The order of the sum depends on nothing but k, so a row's result is the same bits whatever rows stand beside it.
    `x`, `w`, `y` are addresses; `ldx`, `ldy` elements; `w_row` bytes between rows of a panel, `w_panel` bytes between
    panels; `ahead` is prefetched, `ahead_step` bytes a row. `panels` and `accumulate` are compile-time literals;
    `rows` is 1 to MAX_TILE, each count of rows a piece of code of its own.
    """
    num_panels, adds = panels.literal_value, accumulate.literal_value
    storage = _Storage(tag)
    signature = types.void(tag, panels, accumulate, *([types.int64] * 11))

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        _, _, _, num_rows, *rest = args
        blocks = [b.append_basic_block(f"rows{count}") for count in range(1, MAX_TILE + 1)]
        done = b.append_basic_block("rows_done")
        switch = b.switch(num_rows, blocks[-1])
        for count, block in enumerate(blocks, 1):
            if count < MAX_TILE:
                switch.add_case(ir.Constant(_i64, count), block)
            b.position_at_end(block)
            _multiply(b, storage, count, num_panels, adds, *rest)
            b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


def _multiply(b: Any, storage: _Storage, num_rows: int, num_panels: int, adds: int, *args: Any) -> None:
    """The code of `panel_kernel` for one count of rows."""
    ax, aldx, aw, aw_panel, aw_row, ay, aldy, ak, aahead, astep = args
    vec, lanes, size = storage.vector, storage.lanes, storage.real_size
    num_vectors = num_panels * storage.per_panel
    name = f"llvm.fma.v{lanes}f{8 * size}"
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(vec, [vec, vec, vec]), name)
    prefetch = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [_i8p, _i32, _i32, _i32]), "llvm.prefetch.p0"
    )
    zero = ir.Constant(vec, [0.0] * lanes)
    acc = [[cgutils.alloca_once(b, vec) for _ in range(num_vectors)] for _ in range(num_rows)]
    for row in acc:
        for cell in row:
            b.store(zero, cell)

    def y_address(m: int, vector: int) -> Any:
        element = b.add(b.mul(aldy, ir.Constant(_i64, m)), ir.Constant(_i64, vector * lanes))
        return b.inttoptr(b.add(ay, b.mul(element, ir.Constant(_i64, size))), vec.as_pointer())

    with cgutils.for_range(b, ak) as loop:
        kk = loop.index
        for line in range(max(1, num_panels * PANEL * storage.size // CACHE_LINE)):
            at = b.add(b.add(aahead, b.mul(kk, astep)), ir.Constant(_i64, line * CACHE_LINE))
            b.call(prefetch, [b.inttoptr(at, _i8p), ir.Constant(_i32, 0), ir.Constant(_i32, 2), ir.Constant(_i32, 1)])
        weights = []
        for panel in range(num_panels):
            start = b.add(b.add(aw, b.mul(aw_panel, ir.Constant(_i64, panel))), b.mul(kk, aw_row))
            weights += storage.load_panel_row(b, start)
        for m in range(num_rows):
            element = b.add(b.mul(aldx, ir.Constant(_i64, m)), kk)
            at = b.add(ax, b.mul(element, ir.Constant(_i64, size)))
            scalar = b.load(b.inttoptr(at, storage.real.as_pointer()))
            first = b.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(_i32, 0))
            splat = ir.Constant(ir.VectorType(_i32, lanes), [0] * lanes)
            spread = b.shuffle_vector(first, ir.Constant(vec, ir.Undefined), splat)
            for v in range(num_vectors):
                b.store(b.call(fma, [spread, weights[v], b.load(acc[m][v])]), acc[m][v])
    for m in range(num_rows):
        for panel in range(num_panels):
            base = panel * storage.per_panel
            cells = [b.load(acc[m][base + v]) for v in range(storage.per_panel)]
            for v, value in enumerate(storage.in_order(b, cells)):
                at = y_address(m, base + v)
                result = b.fadd(b.load(at, align=size), value) if adds else value
                b.store(result, at, align=size)


@intrinsic
def load_stored(typingctx, tag, address):  # type: ignore[no-untyped-def]
    """One stored value at `address` as the arithmetic type."""
    storage = _Storage(tag)
    real = types.float64 if storage.kind == "fp64" else types.float32

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        if storage.kind == "bf16":
            word = b.zext(b.load(b.inttoptr(args[1], _i16.as_pointer())), _i32)
            return b.bitcast(b.shl(word, ir.Constant(_i32, 16)), _f32)
        if storage.kind == "fp16":
            return b.fpext(b.load(b.inttoptr(args[1], ir.HalfType().as_pointer())), _f32)
        return b.load(b.inttoptr(args[1], storage.real.as_pointer()))

    return real(tag, types.int64), codegen


@intrinsic
def store_stored(typingctx, tag, address, value):  # type: ignore[no-untyped-def]
    """Store `value` at `address`, rounded to nearest even where the storage is narrower."""
    storage = _Storage(tag)
    real = types.float64 if storage.kind == "fp64" else types.float32

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        _, address, value = args
        if storage.kind == "bf16":
            word = b.bitcast(value, _i32)
            odd = b.and_(b.lshr(word, ir.Constant(_i32, 16)), ir.Constant(_i32, 1))
            rounded = b.lshr(b.add(word, b.add(odd, ir.Constant(_i32, 0x7FFF))), ir.Constant(_i32, 16))
            quiet = b.or_(b.lshr(word, ir.Constant(_i32, 16)), ir.Constant(_i32, 0x40))
            is_nan = b.fcmp_unordered("uno", value, value)
            b.store(b.trunc(b.select(is_nan, quiet, rounded), _i16), b.inttoptr(address, _i16.as_pointer()))
        elif storage.kind == "fp16":
            b.store(b.fptrunc(value, ir.HalfType()), b.inttoptr(address, ir.HalfType().as_pointer()))
        else:
            b.store(value, b.inttoptr(address, storage.real.as_pointer()))
        return context.get_dummy_value()

    return types.void(tag, types.int64, real), codegen


@intrinsic
def real_pointer(typingctx, tag, address):  # type: ignore[no-untyped-def]
    """`address` as a pointer to the arithmetic type, for `carray`."""
    storage = _Storage(tag)
    real = types.float64 if storage.kind == "fp64" else types.float32

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.inttoptr(args[1], storage.real.as_pointer())

    return types.CPointer(real)(tag, types.int64), codegen


@intrinsic
def stored_pointer(typingctx, tag, address):  # type: ignore[no-untyped-def]
    """`address` as a pointer to stored values, as bits of the tag's own type: to copy them, not to reckon with."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.inttoptr(args[1], context.get_value_type(tag).as_pointer())

    return types.CPointer(tag)(tag, types.int64), codegen


@intrinsic
def int_pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """`address` as a pointer to int64, for `carray`."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], _i64.as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@intrinsic
def as_real(typingctx, tag, value):  # type: ignore[no-untyped-def]
    """A float64 value rounded to the arithmetic type of `tag`."""
    storage = _Storage(tag)
    real = types.float64 if storage.kind == "fp64" else types.float32

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return args[1] if storage.kind == "fp64" else b.fptrunc(args[1], _f32)

    return real(tag, types.float64), codegen


@intrinsic
def floor_float(typingctx, value):  # type: ignore[no-untyped-def]
    """floor of a float32 as a float32 (math.floor gives an int64, which does not vectorise)."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(_f32, [_f32]), "llvm.floor.f32")
        return b.call(function, [args[0]])

    return types.float32(types.float32), codegen


@intrinsic
def power_of_two(typingctx, exponent):  # type: ignore[no-untyped-def]
    """2 ** exponent for a whole float32 in [-126, 127], made from its bits."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        biased = b.add(b.fptosi(args[0], _i32), ir.Constant(_i32, 127))
        return b.bitcast(b.shl(biased, ir.Constant(_i32, 23)), _f32)

    return types.float32(types.float32), codegen


@intrinsic
def double_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float64 whose bit pattern is the int64 `bits`."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], _f64)

    return types.float64(types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, increment):  # type: ignore[no-untyped-def]
    """Atomic fetch-and-add on an int64."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _i64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):  # type: ignore[no-untyped-def]
    """Atomic load of an int64 with acquire ordering."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _i64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def cycles(typingctx):  # type: ignore[no-untyped-def]
    """The processor's time-stamp counter."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(_i64, []), "llvm.readcyclecounter")
        return b.call(function, [])

    return types.int64(), codegen
