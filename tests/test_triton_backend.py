"""Backend triton: the decoder and the engine over the Triton kernels, against backend torch; fault rows B, C, D.

Without a GPU the kernels run in Triton's interpreter, about 2 ms a program, so models are one or two layers wide enough
that history matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_tools import ScriptedMonitor, constant_device, make_scenario, one_thread, wide
from engine_tools import (
    Weights,
    greedy_from_scratch,
    make_request,
    outputs,
    perturbed,
    prompts,
    random_tree,
    small_vocabulary,
    tiny_spec,
    wide_weights,
)

from specbench.bench.measure import measure_case
from specbench.bench.sweep import run_sweep
from specbench.engine import verify_triton
from specbench.engine.decode import Engine, PrefillStore
from specbench.engine.drafters.base import Drafter, DraftPass
from specbench.engine.drafters.lookup import ReplayDrafter
from specbench.engine.drafters.model import DraftModelDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.kv_cache import PagedKVCache
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.ops import triton_ops
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.ops.graphs import Graphs
from specbench.engine.ops.triton_ops import CellCopies
from specbench.engine.request import ActiveRequest, Request
from specbench.engine.sampling import RequestGenerator, SamplingParams, distribution
from specbench.engine.trace import Trace
from specbench.engine.tree import TokenTree
from specbench.engine.verify import DraftContractError, Proposal, Verification, verify
from specbench.engine.verify_triton import TritonVerifier
from specbench.errors import InputError
from specbench.roofline.shapes import ModelSpec
from specbench.scenario.cases import expand

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_decoder(
    spec: ModelSpec,
    weights: Weights,
    *,
    backend: str = "triton",
    dtype: str = "fp64",
    rollback: str = "compact",
    page_size: int = 4,
    num_slots: int = 3,
    max_context: int = 40,
    max_rows: int = 24,
    **options: Any,
) -> Decoder:
    kv = PagedKVCache(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_slots=num_slots,
        max_context=max_context,
        dtype=DTYPES[dtype],
        device=DEVICE,
        page_size=page_size,
        layout="rows",
        rollback=rollback,
    )
    tensors = ((name, tensor.to(DTYPES[dtype])) for name, tensor in weights.items())
    limits = DecoderLimits(max_rows=max_rows, max_selected=max_rows)
    return Decoder(spec, tensors, dtype=dtype, backend=backend, kv=kv, limits=limits, device=DEVICE, **options)


MODELS: dict[str, dict[str, Any]] = {
    "6/2 heads of 16": {},
    "6/1 heads of 24, window 5": {"num_kv_heads": 1, "head_dim": 24, "sliding_window": 5},
    "qwen3 norms, 4/4 heads": {"num_heads": 4, "num_kv_heads": 4, "qk_norm": True},
    "biases, tied": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


def step(decoder: Decoder, trees: list[TokenTree], slots: list[int]) -> torch.Tensor:
    """One verify pass over the slots' next tokens; commits nothing."""
    contexts = [int(decoder.kv.lengths[slot]) for slot in slots]
    for slot, tree in zip(slots, trees, strict=True):
        decoder.kv.reserve(slot, len(tree) + 1)
    tokens = [np.concatenate([np.array([7], dtype=np.int64), tree.tokens]) for tree in trees]
    return decoder.forward(ForwardBatch.of(tokens, slots, contexts, trees=trees)).clone()


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, "fp64", 1e-9) for name in MODELS] + [("6/1 heads of 24, window 5", "fp32", 1e-4)],
)
def test_logits_equal_those_of_torch(name: str, dtype: str, tolerance: float) -> None:
    """Prefill, a ragged step of trees, one of chains; over pages, in rows that share none."""
    spec = tiny_spec(num_layers=1, **MODELS[name])
    weights = wide_weights(spec)
    both = [make_decoder(spec, weights, backend=backend, dtype=dtype) for backend in ("torch", "triton")]
    stream = np.random.default_rng()
    texts = prompts(spec, (6, 1, 3))
    trees = [random_tree(stream, nodes, spec.vocab_size) for nodes in (3, 0, 5)]
    chains = [TokenTree.chain(stream.integers(0, spec.vocab_size, length)) for length in (2, 3, 0)]
    results = []
    for decoder in both:
        first = [decoder.prefill(text, slot).clone() for slot, text in enumerate(texts)]
        results.append([*first, step(decoder, trees, [0, 1, 2]), step(decoder, chains, [2, 0, 1])])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < tolerance, f"{name}: {(a - b).abs().max():.1e} for trees {trees}"


def test_a_tree_drafted_level_by_level_equals_torch() -> None:
    """Passes that see cells written earlier in the step: the root, its two children, a child of the second."""
    spec = tiny_spec(num_layers=1, sliding_window=5)
    weights = wide_weights(spec)
    mask = functools.partial(np.array, dtype=np.int64)
    levels = [
        ([[7]], [0], [mask([[1]])], [[0]]),
        ([[3, 9]], [1], [mask([[0b011], [0b101]])], [[1, 1]]),
        ([[4]], [3], [mask([[0b1101]])], [[2]]),
    ]
    results = []
    for backend in ("torch", "triton"):
        decoder = make_decoder(spec, weights, backend=backend)
        decoder.prefill(prompts(spec, (6,))[0], 1)
        decoder.kv.reserve(1, 4)
        results.append(
            torch.cat(
                [
                    decoder.forward(
                        ForwardBatch.of(tokens, [1], [6], written=written, masks=masks, depths=depths)
                    ).clone()
                    for tokens, written, masks, depths in levels
                ]
            )
        )
    assert (results[0] - results[1]).abs().max() < 1e-9


def test_bf16_is_no_further_from_the_truth_than_torch_is() -> None:
    """Rounding differs in places (rotation is fp32 here), so what is compared is the distance from float64."""
    spec = tiny_spec(num_layers=1)
    weights = {name: tensor.bfloat16().double() for name, tensor in wide_weights(spec).items()}
    stream = np.random.default_rng()
    text, tree = prompts(spec, (3,))[0], random_tree(stream, 4, spec.vocab_size)
    found = {}
    for backend, dtype in (("torch", "fp64"), ("torch", "bf16"), ("triton", "bf16")):
        decoder = make_decoder(spec, weights, backend=backend, dtype=dtype)
        decoder.prefill(text, 0)
        found[backend, dtype] = step(decoder, [tree], [0]).double()
        assert found[backend, dtype].isfinite().all()
    truth = found["torch", "fp64"]
    errors = {backend: (found[backend, "bf16"] - truth).pow(2).mean().sqrt() for backend in ("torch", "triton")}
    assert errors["triton"] < 1.5 * errors["torch"], f"{errors}, tree {tree}"


# ---- The engine: the same tokens as backend torch


V = 11
TREE = StaticTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
LAWS = {"greedy": SamplingParams(seed=3), "sampled": SamplingParams(temperature=0.8, seed=3)}


class RandomTrees:
    """Chosen trees from (request, step) alone; nodes that a small vocabulary often accepts."""

    synthetic = True
    capture = ()

    def start(self, active: ActiveRequest) -> None: ...

    def num_nodes(self, depth: int) -> int:
        return 2 * depth

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        found = []
        for one, depth in zip(active, depths, strict=True):
            stream = np.random.default_rng([len(one.tokens), *one.request.request_id.encode()])
            found.append(Proposal(random_tree(stream, int(stream.integers(0, self.num_nodes(depth) + 1)), V)))
        return found

    def commit(self, active: ActiveRequest, num_draft: int, num_accepted: int, path: tuple[int, ...]) -> None: ...

    def finish(self, active: ActiveRequest) -> None: ...

    def take_passes(self) -> list[DraftPass]:
        return []


@dataclass
class World:
    """A small model, its decoders by (backend, rollback), and requests that know their greedy outputs."""

    spec: ModelSpec
    weights: Weights
    requests: list[Request]
    prefill: Decoder
    decoders: dict[tuple[str, str], Decoder] = field(default_factory=dict)

    def decoder(self, backend: str, rollback: str = "compact") -> Decoder:
        key = (backend, rollback)
        if key not in self.decoders:
            self.decoders[key] = make_decoder(
                self.spec, self.weights, backend=backend, rollback=rollback, num_slots=2, max_rows=20
            )
        return self.decoders[key]

    def drafter(self, name: str) -> Drafter | None:
        if name.startswith("model"):
            near = make_decoder(self.spec, perturbed(self.weights, 0.08), backend="torch", num_slots=2)
            tree = TREE if "tree" in name else None
            return DraftModelDrafter(near, V, tree, "without_replacement" if tree else None)
        return {
            "none": lambda: None,
            "replayed tree": lambda: ReplayDrafter(V, length=2.4, tree=TREE),
            "replayed chain": lambda: ReplayDrafter(V, length=2.4),
            "random trees": RandomTrees,
        }[name]()

    def run(self, backend: str, name: str, rollback: str, law: str, **options: Any) -> Trace:
        """One block of two requests and a third that takes the first free slot."""
        target = self.decoder(backend, rollback)
        requests = [replace(one, params=LAWS[law]) for one in self.requests]
        # Prefills come from backend torch: what is under test is the step.
        store = PrefillStore(self.prefill)
        engine = Engine(target, store, self.drafter(name), batch_size=2, depth=3, check=True, **options)
        return engine.run(requests)


@pytest.fixture(scope="module")
def world() -> World:
    spec, weights = small_vocabulary(V, num_layers=1, head_dim=24)
    prefill = make_decoder(spec, weights, backend="torch", num_slots=2)
    requests = []
    for index, text in enumerate(prompts(spec, (5, 2, 3))):
        truth = greedy_from_scratch(prefill, text, 6)
        requests.append(make_request(text, f"r{index}", max_tokens=6, reference=truth))
    return World(spec, weights, requests, prefill)


STEPS = [
    ("none", "compact", "greedy", "sequential"),
    ("none", "compact", "sampled", "sequential"),
    ("replayed tree", "compact", "greedy", "sequential"),
    ("replayed tree", "index", "greedy", "sequential"),
    ("replayed chain", "realloc", "greedy", "sequential"),
    ("random trees", "compact", "sampled", "sequential"),
    ("random trees", "realloc", "sampled", "sequential"),
    ("model, tree", "index", "sampled", "sequential"),
    ("model, chain", "compact", "sampled", "block"),
]
COUNTS = (
    "row_step",
    "num_draft",
    "num_accepted",
    "num_committed",
    "context_len",
    "kv_bytes_moved",
    "kv_allocator_calls",
)


@pytest.mark.parametrize(("name", "rollback", "law", "method"), STEPS)
def test_the_same_tokens_as_backend_torch(world: World, name: str, rollback: str, law: str, method: str) -> None:
    """Token for token and count for count: drafts, acceptance, what the cache moved and took. One wait a step."""
    right = world.run("torch", name, rollback, law, method=method)
    target = world.decoder("triton", rollback)
    verifier, copies = target.verifier, target.kv.mover
    assert isinstance(verifier, TritonVerifier)
    assert isinstance(copies, CellCopies)
    reads, launches = verifier.num_reads, copies.num_launches
    trace = world.run("triton", name, rollback, law, method=method)
    assert outputs(trace) == outputs(right)
    for count in COUNTS:
        assert np.array_equal(getattr(trace, count), getattr(right, count)), count
    assert verifier.num_reads - reads == len(trace.step_s), "the host waits once a step"
    if rollback == "compact":
        assert copies.num_launches - launches == (trace.kv_bytes_moved > 0).sum(), (
            "one launch moves all cells of a step"
        )
    if "tree" in name:
        assert trace.num_accepted.max() >= 1
    if law == "greedy":
        truth = {one.request_id: one.reference for one in world.requests}
        assert outputs(trace) == truth, "and it is the target's own greedy output"


# ---- Graphs: padded, captured on nothing, replayed on fixed places


class Again:
    """A recorder for a device without graphs: a replay is the recorded call, with its sizes and places as they were."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        return call


def with_graphs(decoder: Decoder) -> Decoder:
    """As on a GPU, but for the recorder."""
    verifier = decoder.verifier
    assert isinstance(verifier, TritonVerifier)
    verifier.graphs = Graphs(Again())
    decoder.ops.graphs = Graphs(Again())
    decoder.graphs = True
    return decoder


def test_a_padded_pass_equals_the_exact_one_and_pads_write_nothing(world: World) -> None:
    """Fault D45: every cell that no row of the pass is assigned holds what it held, in both."""
    sizes = {"num_slots": 7, "max_rows": 20, "max_context": 16}
    exact, padded = (make_decoder(world.spec, world.weights, **sizes) for _ in range(2))
    with_graphs(padded)
    stream = np.random.default_rng()
    for decoder in (exact, padded):
        for pool in (decoder.kv.k_pool, decoder.kv.v_pool):
            pool.fill_(77.0)
        for slot in range(7):
            decoder.kv.restore(slot, PrefillStore(world.prefill).get(world.requests[slot % 2].prompt_ids, 0).kv)
    passes = [([[-1, -1, 0], []], [0, 2]), ([[-1], [-1, -1]], [4, 1]), ([[]] * 5, [6, 5, 3, 1, 0])]
    for parents, slots in passes:
        trees = [TokenTree(stream.permutation(V)[: len(one)], np.array(one, dtype=np.int64)) for one in parents]
        before = padded.kv.k_pool.clone()
        logits = [step(decoder, trees, slots) for decoder in (exact, padded)]
        assert torch.equal(*logits), f"{trees} in slots {slots}"
        assert torch.equal(exact.kv.k_pool, padded.kv.k_pool)
        assert torch.equal(exact.kv.v_pool, padded.kv.v_pool)
        cells = (padded.kv.k_pool != before).any(-1).any(2).any(0).flatten().nonzero().flatten().tolist()
        assigned = {
            int(cell)
            for slot, tree in zip(slots, trees, strict=True)
            for cell in padded.kv.slot_index[slot, int(padded.kv.lengths[slot]) :][: len(tree) + 1]
        }
        assert cells
        assert set(cells) <= assigned
        for decoder in (exact, padded):
            for slot in slots:
                decoder.kv.commit(slot, 0)
    graphs = padded.ops.graphs
    assert (graphs.num_captured, graphs.num_replayed) == (2, 3), "the first two passes share a bucket"


@pytest.mark.parametrize(
    ("name", "rollback", "law"), [("replayed tree", "compact", "greedy"), ("random trees", "index", "sampled")]
)
def test_captured_steps_give_the_same_tokens(world: World, name: str, rollback: str, law: str) -> None:
    right = world.run("torch", name, rollback, law)
    target = make_decoder(world.spec, world.weights, rollback=rollback, num_slots=2, max_rows=20)
    world.decoders["graphs", rollback] = with_graphs(target)
    trace = world.run("graphs", name, rollback, law)
    assert outputs(trace) == outputs(right)
    forward, verify = target.ops.graphs, target.verifier.graphs
    assert forward.num_replayed == verify.num_replayed == len(trace.step_s)
    assert 0 < forward.num_captured <= len(trace.step_s)
    assert not trace.in_window[0], "a step that captured is in no number"
    if law == "sampled":
        return
    again = world.run("graphs", name, rollback, law)
    assert outputs(again) == outputs(right)
    assert again.in_window.any()
    assert (again.in_window == (again.busy == 2)).all(), "the second time nothing is left to capture"


def test_graphs_without_a_gpu_are_refused(world: World) -> None:
    if DEVICE == "cpu":
        with pytest.raises(InputError, match="has no graphs"):
            make_decoder(world.spec, world.weights, graphs=True)
    decoder = make_decoder(world.spec, world.weights)
    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 24, "num_slots": 1, "max_context": 16}
    kv = PagedKVCache(**shape, dtype=torch.float64, device=DEVICE)
    with pytest.raises(InputError, match="layout rows"):
        decoder.rebind(kv, DecoderLimits(4, 4))


# ---- One wait a step, and nothing allocated in it


def test_a_step_waits_once_and_allocates_nothing_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are stubs here: what is left is the host's side, where every read of a tensor would be a wait."""
    target = make_decoder(world.spec, world.weights, num_slots=2, max_rows=20)
    for module, names in (
        (triton_ops, ("kv_write", "rmsnorm", "silu_mul", "tree_attention", "kv_compact")),
        (verify_triton, ("row_stats", "philox_uniforms", "verify_greedy", "verify_sampled")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *args, **options: None)
    verifier = target.verifier
    assert isinstance(verifier, TritonVerifier)
    waits: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        inner = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _inner: Any = inner, _name: str = name, **options: Any) -> Any:
            if stepping:
                waits.append(_name)
            return _inner(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    stepping: list[bool] = []
    reads: list[int] = []

    class Watched(Engine):
        def _step(self, active: list[ActiveRequest], number: int) -> Any:
            before = verifier.num_reads
            stepping.append(True)
            try:
                return super()._step(active, number)
            finally:
                stepping.clear()
                reads.append(verifier.num_reads - before)

    for name, law in (("none", "greedy"), ("random trees", "sampled"), ("replayed tree", "greedy")):
        requests = [replace(one, params=LAWS[law]) for one in world.requests]
        places = {buffer: tensor.data_ptr() for buffer, tensor in target.ops._whole.items()}
        Watched(target, PrefillStore(world.prefill), world.drafter(name), batch_size=2, depth=3).run(requests)
        assert places == {buffer: tensor.data_ptr() for buffer, tensor in target.ops._whole.items()}
    assert reads
    assert set(reads) == {1}
    assert not waits


# ---- Verdicts one by one: faults B through the kernels, as through backend torch


def verdicts(backend: str, seed: int = 0) -> list[Verification]:
    """Many requests of one batch: greedy and sampled, trees and chains, with and without q, good rows and a bad one."""
    stream = np.random.default_rng(seed)
    random = torch.Generator().manual_seed(seed)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8),
    ]
    trees = [random_tree(stream, count, V) for count in (4, 2, 4, 2, 3, 3, 2, 0)]
    trees[3] = trees[6] = TokenTree.chain(stream.permutation(V)[:2])
    logits = 2 * torch.randn(sum(len(tree) + 1 for tree in trees), V, generator=random, dtype=torch.float64)
    starts = np.cumsum([0, *(len(tree) + 1 for tree in trees)])
    # Draft and target agree throughout: the residual is empty, and a rejection by rounding falls back to p.
    agreed = distribution(logits[starts[3] : starts[3] + 2], [params[3]] * 2)
    drawn = torch.rand(2, V, generator=random, dtype=torch.float64)
    proposals = [Proposal(tree) for tree in trees]
    proposals[3] = Proposal(trees[3], agreed)
    proposals[6] = Proposal(trees[6], drawn / drawn.sum(-1, keepdim=True))
    logits[starts[2] + 1, 4] = float("nan")
    generators = [RequestGenerator(seed, f"r{at}") for at in range(len(trees))]
    for generator in generators:
        generator.uniforms(2)
    found = verify(proposals, logits.to(DEVICE), params, generators, backend=backend, step=7)
    assert [one.num_drawn for one in generators] == [2, 2, 7, 5, 6, 6, 5, 3], "coins that were not needed are taken too"
    return found


def test_every_verdict_of_a_mixed_batch_is_that_of_torch() -> None:
    """Faults B12, B14, B15, B17, B18, B20: same paths, tokens and coins; only the request with a NaN row fails."""
    seed = int(np.random.default_rng().integers(1 << 30))
    expected, found = verdicts("torch", seed), verdicts("triton", seed)
    for at, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (a.path, a.tokens, str(a.error)) == (b.path, b.tokens, str(b.error)), f"request {at}, seed {seed}"
    assert [one.error is not None for one in found] == [False, False, True, False, False, False, False, False]
    assert str(found[2].error).startswith("row 1 of request r2 in step 7:")


class Forced:
    """Coins that a test sets: they have no key, so the host hands them over."""

    request_id = "forced"

    def __init__(self, coins: list[float]) -> None:
        self.coins = coins

    def uniforms(self, count: int) -> Any:
        assert count == len(self.coins)
        return np.array(self.coins)


@pytest.mark.parametrize("coins", [[0.0, 0.0], [1 - 2**-53, 1 - 2**-53], [1 - 2**-53, 0.0]])
def test_forced_coins_at_the_edges(coins: list[float]) -> None:
    """Fault B17: p = q, a coin of almost 1, and whatever is left has a token with mass."""
    logits = torch.zeros(2, 4, dtype=torch.float64, device=DEVICE)
    logits[:, 3] = -torch.inf
    law = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]], dtype=torch.float64, device=DEVICE)
    proposal = Proposal(TokenTree.chain(np.array([1])), law)
    params = [SamplingParams(temperature=1.0)]
    a, b = (verify([proposal], logits, params, [Forced(coins)], backend=name)[0] for name in ("torch", "triton"))
    assert (a.path, a.tokens) == (b.path, b.tokens)
    assert 3 not in b.tokens


@pytest.mark.parametrize(
    ("law", "error"),
    [
        ([0.5, 0.5, 0.0, 0.0], "q"),
        ([0.5, 0.5, 0.5, 0.5], "not a distribution"),
        ([0.0, 0.0, float("nan"), 1.0], "not finite"),
    ],
)
def test_a_q_that_cant_be_is_refused_as_by_torch(law: list[float], error: str) -> None:
    """Fault B11: a drafted token without q, rows that are no law; a row that is not finite fails its request."""
    logits = torch.zeros(2, 4, dtype=torch.float64, device=DEVICE)
    proposal = Proposal(TokenTree.chain(np.array([2])), torch.tensor([law], dtype=torch.float64, device=DEVICE))
    for backend in ("torch", "triton"):
        call = functools.partial(
            verify, [proposal], logits, [SamplingParams(temperature=1.0)], [Forced([0.5, 0.5])], backend=backend
        )
        if error == "not finite":
            assert error in str(call()[0].error)
        else:
            with pytest.raises(DraftContractError, match=error):
                call()


# ---- A whole scenario


def test_a_scenario_gives_the_same_tokens_through_both_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From YAML's mapping to rows: torch and triton, a tree, two policies; outputs of both arms, and what rows say."""
    constant_device(monkeypatch)
    wide(monkeypatch)
    rows, tokens = {}, {}
    for backend in ("torch", "triton"):
        scenario = make_scenario(
            target={"shape": "tiny-llama-test", "weights": "dummy", "dtype": "fp64", "backend": backend},
            drafters=[{"kind": "forced", "length": 2.5, "tree": [[0], [1], [0, 0]], "depth": 2}],
            sweep={"batch_size": 1, "context_len": 2},
            workload={"num_prompts": 1, "output_len": 4},
            kv={"rollback": ["compact", "index"]},
            measure={"blocks": {"min": 1, "max": 1}, "warmup": {"min": 1, "max": 1}},
        )
        traces: list[Trace] = []
        run = Engine.run

        def recorded(engine: Engine, *args: Any, _run: Any = run, _traces: list[Trace] = traces) -> Trace:
            _traces.append(_run(engine, *args))
            return _traces[-1]

        with monkeypatch.context() as patched, one_thread():
            patched.setattr(Engine, "run", recorded)
            measure = functools.partial(measure_case, monitor=ScriptedMonitor())
            result = run_sweep(scenario, expand(scenario), tmp_path / backend, measure=measure)
        rows[backend] = result.rows
        tokens[backend] = [outputs(trace) for trace in traces]
    assert tokens["triton"] == tokens["torch"]
    assert any(len(ids) == 4 for one in tokens["triton"] for ids in one.values())
    assert [row.status for row in rows["triton"]] == ["ok", "ok"], [row.reason for row in rows["triton"]]
    for a, b in zip(rows["torch"], rows["triton"], strict=True):
        assert b.axes == a.axes | {"backend": "triton"}
        assert b.conditions["output_check"] == "identical"
        assert b.conditions["graphs"] is (DEVICE == "cuda")
        assert b.conditions["device"] == DEVICE
        assert a.metrics is not None
        assert b.metrics is not None
        for name in ("acceptance_rate", "tokens_per_step", "num_steps", "num_draft_tokens"):
            assert a.metrics[name] == b.metrics[name]
