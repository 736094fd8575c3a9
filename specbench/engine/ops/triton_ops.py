"""Backend `triton`: the decoder over preallocated buffers, with the Triton kernels and the library's matrix products.

Nothing is allocated in a step. Token ids, positions, slots, lengths, tables and masks reach the device in one copy
that does not wait (staging.py); the whole pass is then one captured graph (graphs.py) or, with graphs off, the same
calls one by one. On a CPU the kernels run in Triton's interpreter: for tests, not for speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping

import torch
from specbench_kernels.kv_compact import kv_compact
from specbench_kernels.kv_write import kv_write
from specbench_kernels.rmsnorm import rmsnorm
from specbench_kernels.silu_mul import silu_mul
from specbench_kernels.tree_attention import tree_attention
from specbench_kernels.tree_attention_launch import num_multiprocessors, plan, workspace_size

from specbench.engine.kv_cache import IntArray, PagedKVCache
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.graphs import Bucket, Graphs, Sizes, attention_shapes, bucket_of, exact, request_class
from specbench.engine.ops.staging import Field, Inputs
from specbench.engine.ops.torch_ops import TorchWeights
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec

MASK_WORDS = 2
"""Words of a row's mask that there is room for: 128 uncommitted cells of a request."""


class TritonOps:
    """The decoder's operations over fixed buffers of `max_rows` rows.

    `rope` is (cos, sin) [max_context, D/2] in float64. `graphs` captures whole passes, or runs them as they are.
    """

    num_threads = 1

    def __init__(
        self,
        spec: ModelSpec,
        weights: TorchWeights,
        kv: PagedKVCache,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        max_rows: int,
        max_selected: int,
        graphs: Graphs,
    ) -> None:
        if kv.layout != "rows":
            raise InputError(f"backend triton needs a KV cache of layout rows, and this one has {kv.layout}")
        self.spec, self.weights, self.kv, self.graphs = spec, weights, kv, graphs
        self.max_rows, self.max_selected = max_rows, max_selected
        self._device = kv.k_pool.device
        self._dtype = weights.tensors["embed_tokens.weight"].dtype
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._rope = tuple(table.to(device=self._device, dtype=wide).contiguous() for table in rope)
        self._num_slots = len(kv.lengths)
        # Pages are the table's entries only where a cell's place within its page never changes.
        self._granularity = kv.page_size if kv.pages_in_order else 1
        table = kv.block_table if kv.pages_in_order else kv.slot_index
        self._inputs = Inputs(
            {
                "token_ids": Field(torch.int64, (max_rows,)),
                "slot_mapping": Field(torch.int64, (max_rows,)),
                "mask": Field(torch.int64, (max_rows * MASK_WORDS,)),
                "selected": Field(torch.int64, (max_selected,)),
                "positions": Field(torch.int32, (max_rows,)),
                "query_start": Field(torch.int32, (self._num_slots + 1,)),
                "context_lens": Field(torch.int32, (self._num_slots,)),
                "seq_lens": Field(torch.int32, (self._num_slots,)),
                "table": Field(torch.int32, (self._num_slots, table.shape[1])),
            },
            self._device,
        )
        self._whole = self._allocate(wide)
        self._buffers: dict[str, torch.Tensor] = {}
        self._selected: dict[str, torch.Tensor] = {}
        self._states: dict[str, torch.Tensor] = {}
        self._kept: dict[Hashable, str] = {}
        self._key: Hashable = None
        self._bucket: Bucket
        kv.mover = CellCopies(self._num_slots, 64 * MASK_WORDS, self._device)
        self._workspace = self._new_workspace(wide)

    # ---- Buffers

    def _allocate(self, wide: torch.dtype) -> dict[str, torch.Tensor]:
        """Every activation at its largest. `logits` is fp32 (fp64 for fp64), whatever the weights are."""
        spec, rows, selected = self.spec, self.max_rows, self.max_selected
        heads, groups, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
        widths = {
            "x": spec.hidden_size,
            "h": spec.hidden_size,
            "proj": spec.hidden_size,
            "qkv": heads + 2 * groups,
            "q": heads,
            "attn": heads,
            "gate_up": 2 * inner,
            "act": inner,
        }

        def new(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, width, dtype=dtype, device=self._device)

        whole = {name: new(rows, width, self._dtype) for name, width in widths.items()}
        for name in ("last", "added", "features"):
            whole[name] = new(selected, spec.hidden_size, self._dtype)
        whole["logits"] = new(selected, spec.vocab_size, wide)
        whole["head"] = whole["logits"] if wide == self._dtype else new(selected, spec.vocab_size, self._dtype)
        return whole

    def _new_workspace(self, wide: torch.dtype) -> torch.Tensor:
        """Partial results of the split attention, for any bucket that the buffers hold."""
        spec = self.spec
        windows = {0, spec.sliding_window or 0}
        shapes = attention_shapes(self._num_slots, self.max_rows, self.kv.max_context)
        size = max(
            workspace_size(rows, spec.num_heads, spec.head_dim, self._splits(requests, nodes, keys, window))
            for requests, nodes, keys, rows in shapes
            for window in windows
        )
        return torch.zeros(size, dtype=wide, device=self._device)

    def _splits(self, requests: int, nodes: int, keys: int, window: int) -> int:
        """Splits of the attention by classes alone, so that a padded pass and an exact one sum in the same order."""
        return plan(
            self._dtype,
            self.spec.head_dim,
            self.spec.num_heads // self.spec.num_kv_heads,
            batch=request_class(requests, self._num_slots),
            num_kv_heads=self.spec.num_kv_heads,
            max_nodes=nodes,
            max_seq_len=keys,
            num_sms=num_multiprocessors(self._device),
            window=window,
        ).num_splits

    @property
    def bytes(self) -> int:
        """Device bytes of buffers, inputs and workspace."""
        own = {tensor.data_ptr(): tensor.nbytes for tensor in self._whole.values()}
        return sum(own.values()) + self._workspace.nbytes

    # ---- The decoder's operations

    def copy(self, x: str, out: str, *, width: int, x_at: int = 0, at: int = 0, columns: int = 0) -> None:
        """`out` is a buffer [max_rows, columns] of states, for good: captured graphs hold its address."""
        if out not in self._states:
            self._states[out] = torch.zeros(self.max_rows, columns, dtype=self._dtype, device=self._device)
        self._kept[self._key] = out
        self._show_states()
        self._selected[out][:, at : at + width] = self._buffers[x][:, x_at : x_at + width]

    def _show_states(self) -> None:
        """Cut the states that the program `_key` leaves to the bucket's rows."""
        if self._key in self._kept:
            name = self._kept[self._key]
            self._selected[name] = self._states[name][: self._bucket.rows]

    def embed(self, out: str) -> None:
        ids = self._inputs.device["token_ids"][: self._bucket.rows]
        torch.index_select(self.weights.tensors["embed_tokens.weight"], 0, ids, out=self._buffers[out])

    def rms_norm(self, weight: str, x: str, out: str, *, add: str | None = None, selected: bool = False) -> None:
        buffers = self._selected if selected else self._buffers
        residual = buffers[x] if add is not None else None
        rmsnorm(
            buffers[x if add is None else add],
            self.weights.tensors[weight],
            eps=self.spec.rms_norm_eps,
            residual=residual,
            out=buffers[out],
        )

    def linear(self, weight: str, x: str, out: str, *, selected: bool = False) -> None:
        buffers = self._selected if selected else self._buffers
        matrix = self.weights.tensors[f"{weight}.weight"].t()
        bias = self.weights.tensors.get(f"{weight}.bias")
        target = buffers["head" if out == "logits" else out]
        if bias is None:
            torch.mm(buffers[x], matrix, out=target)
        else:
            torch.addmm(bias, buffers[x], matrix, out=target)
        if out == "logits" and target is not buffers["logits"]:
            buffers["logits"].copy_(target)

    def rope_and_store(self, layer: int, qkv: str) -> None:
        spec, tensors, rows = self.spec, self.weights.tensors, self._bucket.rows
        at = f"layers.{layer}.self_attn"
        kv_write(
            self._buffers[qkv],
            *self._rope,
            positions=self._inputs.device["positions"][:rows],
            slot_mapping=self._inputs.device["slot_mapping"][:rows],
            k_cache=self.kv.k_pool[layer],
            v_cache=self.kv.v_pool[layer],
            q_out=self._buffers["q"].view(rows, spec.num_heads, spec.head_dim),
            num_heads=spec.num_heads,
            q_norm=tensors[f"{at}.q_norm.weight"] if spec.qk_norm else None,
            k_norm=tensors[f"{at}.k_norm.weight"] if spec.qk_norm else None,
            eps=spec.rms_norm_eps,
        )

    def attention(self, layer: int, qkv: str, out: str) -> None:
        spec, bucket, inputs = self.spec, self._bucket, self._inputs.device
        slides = spec.sliding_window is not None and (spec.sliding_layers is None or spec.sliding_layers[layer])
        window = (spec.sliding_window or 0) if slides else 0
        mask = inputs["mask"][: bucket.rows * bucket.words].view(bucket.rows, bucket.words) if bucket.words else None
        shape = (bucket.rows, spec.num_heads, spec.head_dim)
        tree_attention(
            self._buffers["q"].view(shape),
            self.kv.k_pool[layer],
            self.kv.v_pool[layer],
            table=inputs["table"][: bucket.requests],
            granularity=self._granularity,
            context_lens=inputs["context_lens"][: bucket.requests],
            seq_lens=inputs["seq_lens"][: bucket.requests],
            query_start=inputs["query_start"][: bucket.requests + 1],
            mask=mask,
            positions=inputs["positions"][: bucket.rows] if slides else None,
            scale=spec.head_dim**-0.5,
            window=window,
            max_nodes=bucket.nodes,
            max_seq_len=bucket.keys,
            num_splits=self._splits(bucket.requests, bucket.nodes, bucket.keys, window),
            out=self._buffers[out].view(shape),
            workspace=self._workspace,
        )

    def silu_mul(self, gate_up: str, out: str) -> None:
        silu_mul(self._buffers[gate_up], out=self._buffers[out])

    def select_rows(self, x: str, add: str, out: str) -> None:
        rows = self._inputs.device["selected"][: self._bucket.selected]
        torch.index_select(self._buffers[x], 0, rows, out=self._selected[out])
        torch.index_select(self._buffers[add], 0, rows, out=self._selected["added"])
        self._selected[out].add_(self._selected["added"])

    # ---- A pass

    def run(
        self, record: Callable[[TritonOps], None], key: Hashable, batch: ForwardBatch, *, captured: bool = True
    ) -> Mapping[str, torch.Tensor]:
        """Run the decoder on `batch` (`key` names what `record` records); returns the buffers of the selected rows.

        `captured=False` runs the calls one by one even with graphs on: prefill, whose sizes do not come again.
        """
        self._key = key
        sizes = self._sizes(batch)
        if self.graphs.on and captured:
            bucket = bucket_of(
                sizes,
                num_slots=self._num_slots,
                max_rows=self.max_rows,
                max_selected=self.max_selected,
                max_context=self.kv.max_context,
            )
        else:
            bucket = exact(sizes, self.kv.max_context)
        with torch.inference_mode():
            call = functools.partial(self._call, record, bucket)
            if self.graphs.on and captured:
                if self.graphs.missing((key, bucket)):
                    self._stage_nothing(bucket)
                    self.graphs.capture((key, bucket), call)
                self._stage(batch, bucket)
                self.graphs.run((key, bucket), call)
                self._view(bucket)
                self._show_states()
            else:
                self._stage(batch, bucket)
                call()
        return self._selected

    def _call(self, record: Callable[[TritonOps], None], bucket: Bucket) -> None:
        self._view(bucket)
        record(self)

    def _view(self, bucket: Bucket) -> None:
        """Cut the buffers to the bucket's rows."""
        self._bucket = bucket
        rows = ("x", "h", "proj", "qkv", "q", "attn", "gate_up", "act")
        self._buffers = {name: self._whole[name][: bucket.rows] for name in rows}
        selected = ("last", "added", "features", "logits")
        self._selected = {name: self._whole[name][: bucket.selected] for name in selected}
        same = self._whole["head"] is self._whole["logits"]
        self._selected["head"] = self._selected["logits"] if same else self._whole["head"][: bucket.selected]

    def _sizes(self, batch: ForwardBatch) -> Sizes:
        keys = batch.num_keys
        words = 0 if batch.tree_mask is None else batch.tree_mask.shape[1]
        if words > MASK_WORDS:
            raise InputError(f"a tree of {int(batch.query_lens.max())} nodes is wider than {MASK_WORDS * 64} cells")
        return Sizes(
            rows=batch.num_rows,
            requests=len(batch.slots),
            nodes=int(batch.query_lens.max()),
            keys=int(keys.max()),
            words=words,
            selected=len(batch.selected_rows),
        )

    def _stage(self, batch: ForwardBatch, bucket: Bucket) -> None:
        """Fill the inputs for `batch`, pads beyond it: slot -1, no rows, no keys."""
        inputs, rows, requests = self._inputs, batch.num_rows, len(batch.slots)
        inputs.begin()
        for name, values, end in (
            ("token_ids", batch.token_ids, bucket.rows),
            ("positions", batch.positions, bucket.rows),
            ("selected", batch.selected_rows, bucket.selected),
            ("context_lens", batch.context_lens, bucket.requests),
            ("seq_lens", batch.num_keys, bucket.requests),
        ):
            here = inputs.host(name)
            here[: len(values)] = values
            here[len(values) : end] = 0
        mapping = inputs.host("slot_mapping")
        mapping[:rows] = self.kv.slot_index[batch.slots[batch.row_request], batch.cache_index]
        mapping[rows : bucket.rows] = -1
        starts = inputs.host("query_start")
        starts[: requests + 1] = batch.query_start
        starts[requests + 1 : bucket.requests + 1] = rows
        if batch.tree_mask is not None:
            mask = inputs.host("mask")[: bucket.rows * bucket.words].reshape(bucket.rows, bucket.words)
            mask[:rows] = batch.tree_mask
            mask[rows:] = 0
        table = self.kv.block_table if self.kv.pages_in_order else self.kv.slot_index
        inputs.host("table")[:requests] = table[batch.slots]
        inputs.host("table")[requests : bucket.requests] = 0
        inputs.send("table", bucket.requests)

    def _stage_nothing(self, bucket: Bucket) -> None:
        """Inputs of a pass over no request at all, for a capture: it writes no K and no V."""
        inputs = self._inputs
        inputs.begin()
        for name in ("token_ids", "positions", "selected", "context_lens", "seq_lens", "query_start", "mask", "table"):
            inputs.host(name)[...] = 0
        inputs.host("slot_mapping")[...] = -1
        inputs.send()


class CellCopies:
    """kv_cache's CellMover on the device: all cells of a commit, in all layers, by one launch that nobody waits for."""

    def __init__(self, num_slots: int, max_nodes: int, device: torch.device) -> None:
        size = num_slots * max_nodes
        self._inputs = Inputs({"source": Field(torch.int64, (size,)), "target": Field(torch.int64, (size,))}, device)
        self.num_launches = 0

    def __call__(self, k_pool: torch.Tensor, v_pool: torch.Tensor, source: IntArray, target: IntArray) -> None:
        inputs, size = self._inputs, source.size
        inputs.begin()
        for name, values in (("source", source), ("target", target)):
            inputs.host(name)[:size] = values.ravel()
        inputs.send()
        source_there, target_there = (inputs.device[name][:size].view(source.shape) for name in ("source", "target"))
        kv_compact(k_pool, v_pool, source=source_there, target=target_there)
        self.num_launches += 1
