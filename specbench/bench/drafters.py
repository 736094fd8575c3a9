"""The drafter that a case names, on a loaded target: models and heads are read once and kept for the target's cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.engine.drafters.adaptive import AdaptiveRules
from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.head import HeadDrafter, MedusaDrafter
from specbench.engine.drafters.levels import DynamicShape
from specbench.engine.drafters.lookup import NgramDrafter, ReplayDrafter
from specbench.engine.drafters.model import DraftModelDrafter, EarlyExitDrafter
from specbench.engine.drafters.modules import ModulesDrafter
from specbench.engine.drafters.static_tree import StaticTree
from specbench.engine.drafters.suffix import SuffixDrafter
from specbench.engine.heads.canary import TwinHead
from specbench.engine.heads.head import Head
from specbench.engine.heads.load import HeadSource, load_head, read_head_spec, resolve_head
from specbench.engine.heads.spec import HeadKind, HeadSpec, head_tensor_shapes
from specbench.engine.kv_cache import PAGE_SIZE, pages_needed
from specbench.engine.models.config import read_model_spec
from specbench.engine.models.decoder import DTYPES, Decoder, DecoderLimits
from specbench.engine.models.loader import shares_embedding
from specbench.engine.models.sources import CONFIG_FILE, ModelSource, resolve_model
from specbench.errors import InputError
from specbench.roofline.shapes import DTYPE_BYTES, ModelSpec
from specbench.scenario.cases import Case
from specbench.scenario.drafter_spec import HEAD_KINDS, DrafterSpec

if TYPE_CHECKING:
    from specbench.bench.target import Target

BUILTIN = "builtin"
"""The head or draft model that comes with the package for a known target."""
PREFILL_ROWS = 128


@dataclass(frozen=True)
class OwnWeights:
    """The weights that a drafter brings: where from, and how many values; or why it has none."""

    label: str | None = None
    params: int | None = None
    reason: str | None = None

    @property
    def null_reasons(self) -> dict[str, str]:
        return {} if self.reason is None else {"drafter_params": self.reason}


def draft_model_source(drafter: DrafterSpec, target_name: str, *, weights: bool = True) -> ModelSource:
    """The files of a draft model: "builtin" means specbench/heads/<target_name>/draft_model, else as resolve_model.

    Raises InputError, with the remedy, where there is no such model.
    """
    options = dict(drafter.options)
    name, revision = str(options["model"]), options.get("revision")
    if name != BUILTIN:
        return resolve_model(name, revision=None if revision is None else str(revision), weights=weights)
    folder = Path(str(resources.files("specbench").joinpath("heads", target_name, "draft_model")))
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(
            f"no built-in draft model for the target {target_name}",
            key="drafters.model",
            remedy="train one with `specbench distill scenarios/distill/draft_model.yaml` and name its folder",
        )
    return replace(resolve_model(str(folder), weights=weights), display_name=f"{target_name}/draft_model")


def head_source(drafter: DrafterSpec, target: ModelSpec, target_name: str) -> tuple[HeadSource, HeadSpec]:
    """The files of a head and its shape, read without its weights. `target_name` names the folder of builtin heads.

    Raises InputError, with the remedy, where there is no such head or it is for another target.
    """
    options = dict(drafter.options)
    kind = head_kind(drafter)
    name, revision = str(options["head"]), options.get("revision")
    if name == BUILTIN:
        name = f"builtin:{kind}"
    named = replace(target, name=target_name)
    source = resolve_head(name, target=named, revision=None if revision is None else str(revision))
    spec = read_head_spec(source, named, kind)
    recycle: Any = options.get("recycle")
    return source, spec if recycle is None else replace(spec, recycle=recycle)


def head_kind(drafter: DrafterSpec) -> HeadKind:
    """The head that a drafter runs: EAGLE-2 has EAGLE's."""
    return "eagle" if drafter.kind == "eagle2" else drafter.kind  # type: ignore[return-value]


def why_not_drafted(case: Case, head: HeadSpec) -> tuple[str, str, str] | None:
    """What this head can't draft in this case: the reason, the scenario's key and the remedy; None if it can."""
    most, parts = head.num_modules, "heads" if head.kind == "medusa" else "modules"
    if head.kind not in ("medusa", "mtp") or (head.kind == "mtp" and most == 1):
        return None
    if case.depth > most:
        reason = f"a draft of {case.depth} levels, and the head has {most} {parts}"
        return reason, "depth", f"choose depths up to {most}"
    if head.kind == "mtp" and (case.drafter.tree is not None or case.drafter.top_k is not None):
        return f"a tree, and MTP with {most} modules drafts chains", "drafters.tree", "drop tree, top_k and nodes"
    return None


def drafter_bytes(case: Case, target: ModelSpec, context: int) -> int:
    """Memory that a case's drafter needs beside the target: its own weights and the K and V of all slots, sized as
    DrafterShop sizes them; `context` is the most tokens a request will have. 0 for kinds without a model of their own.

    Raises InputError where its files can't be had.
    """
    spec, batch = case.drafter, case.workload.batch_size
    if spec.kind == "draft_model":
        source = draft_model_source(spec, case.target.name, weights=False)
        model = read_model_spec(source)
        dtype = str(dict(spec.options).get("dtype") or case.target.dtype)
        shared = model.num_head_params if shares_embedding(source) else 0
        pages = pages_needed(batch, context + _cells_off_path(case), case.kv.page_size, case.kv.rollback)
        held = pages * case.kv.page_size * model.kv_bytes_per_token(dtype)
        return model.weight_bytes(dtype) - shared * DTYPE_BYTES[dtype] + held
    if spec.kind in HEAD_KINDS:
        _, head = head_source(spec, target, case.target.name)
        layer = replace(head.layer, num_layers=max(1, head.layer.num_layers))
        pages = pages_needed(batch, context + _cells_off_path(case))
        held = pages * PAGE_SIZE * layer.kv_bytes_per_token(case.target.dtype)
        return own_values(head) * DTYPE_BYTES[case.target.dtype] + held
    return 0


def own_values(head: HeadSpec) -> int:
    """Values of a head's own weights; the map of its vocabulary is not counted."""
    shapes = head_tensor_shapes(head)
    return sum(prod(shapes[key]) for key in shapes if key != "draft_ids")


def _cells_off_path(case: Case) -> int:
    """Cells of a drafter's cache beyond the most tokens a request has: the nodes of a tree that are fed beside its
    path; a head's cache, which ends one pair earlier, counts all that are fed below the root."""
    spec, depth = case.drafter, case.depth
    shape = StaticTree.chain(depth) if spec.tree is None else spec.tree.cut(depth)
    inner = sum(len(nodes) for nodes in shape.inner)
    if spec.kind == "draft_model":
        return inner - shape.depth
    return max(0, (depth - 1) * spec.top_k if spec.top_k is not None else inner - 1)


class DrafterShop:
    """Makes drafters for one target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._models: dict[tuple[object, ...], Decoder] = {}
        self._heads: dict[tuple[object, ...], Head] = {}
        self._weights: dict[DrafterSpec, OwnWeights] = {}

    def drafter(self, case: Case, context: int) -> Drafter | None:
        """See Target.drafter."""
        spec, target = case.drafter, self._target
        options = dict(spec.options)
        if spec.kind == "none":
            return None
        if spec.kind == "ngram":
            eos = target.spec.eos_token_ids
            tree = {key: options[key] for key in ("branches", "nodes") if key in options}
            law = (options["max_ngram"], options["min_ngram"], options["rule"])
            return NgramDrafter(*law, eos, **tree)  # type: ignore[arg-type]
        if spec.kind == "suffix":
            return SuffixDrafter(**options)  # type: ignore[arg-type]
        if spec.kind in ("oracle", "forced"):
            return self._replay(case)
        if spec.kind == "early_exit":
            return self._early_exit(case)
        if spec.kind == "draft_model":
            return self._draft_model(case, context)
        if spec.kind in HEAD_KINDS:
            return self._head(case, context)
        raise InputError(f"unknown drafter {spec.kind}", key="drafters.kind")

    def weights(self, case: Case) -> OwnWeights:
        """What the case's drafter adds to the target; a matrix that it shares with the target is not counted."""
        if case.drafter not in self._weights:
            self._weights[case.drafter] = self._own_weights(case.drafter)
        return self._weights[case.drafter]

    def _own_weights(self, drafter: DrafterSpec) -> OwnWeights:
        name = self._target.target.name
        if drafter.kind == "draft_model":
            model = draft_model_source(drafter, name)
            spec = read_model_spec(model)
            return OwnWeights(model.label, spec.num_params - spec.num_head_params * shares_embedding(model))
        if drafter.kind in HEAD_KINDS:
            source, head = head_source(drafter, self._target.spec, name)
            return OwnWeights(source.label, own_values(head))
        if drafter.kind == "early_exit":
            return OwnWeights(reason="it runs the target's own layers")
        return OwnWeights(reason="nothing is drafted" if drafter.kind == "none" else "it drafts without a model")

    def canary(self, case: Case, context: int, tree: StaticTree | None) -> Drafter | None:
        """The case's kind of drafter with the target itself in the place of its model or head; None for kinds that
        have neither cache nor states. `tree` None: chains."""
        target, spec, batch = self._target, case.drafter, case.workload.batch_size
        own = target.kv_cache(target.spec, case.target.dtype, batch, context + 1, case.kv)
        if spec.kind == "early_exit":
            return EarlyExitDrafter(target.decoder, target.spec.num_layers, tree)
        if spec.kind == "draft_model":
            rows = max(PREFILL_ROWS, batch * (case.num_nodes + 1))
            return DraftModelDrafter(target.decoder.twin(own, DecoderLimits(rows, rows)), target.spec.vocab_size, tree)
        if spec.kind not in HEAD_KINDS:
            return None
        _, shape = head_source(spec, target.spec, target.target.name)
        layer = replace(shape.layer, num_layers=max(1, shape.layer.num_layers))
        kv = target.kv_cache(layer, case.target.dtype, batch, context)
        rows = max(PREFILL_ROWS, context, batch * (case.num_nodes + 1))
        twin = TwinHead(shape, target.decoder, kv=kv, own_kv=own, rows=rows)
        if spec.kind == "medusa":
            return MedusaDrafter(twin, tree)
        if shape.num_modules > 1:
            return ModulesDrafter(twin, case.depth) if tree is None else None
        return HeadDrafter(twin, tree)

    def _replay(self, case: Case) -> Drafter:
        options = dict(case.drafter.options)
        if case.sampling.temperature > 0:
            raise InputError(
                f"{case.drafter.kind} replays the AR output, which is fixed at temperature 0 only",
                key="sampling.temperature",
                remedy="set temperature: 0, or use another drafter",
            )
        length: Any = options.get("length")
        rates: Any = options.get("rates")
        vocab_size, seed = self._target.spec.vocab_size, case.workload.seed
        return ReplayDrafter(vocab_size, length=length, rates=rates, seed=seed, tree=case.drafter.tree)

    def _early_exit(self, case: Case) -> Drafter:
        options: dict[str, Any] = dict(case.drafter.options)
        layers, most = int(options["layers"]), self._target.spec.num_layers - 1
        if not 1 <= layers <= most:
            raise InputError(
                f"early exit after {layers} of {most + 1} layers", key="drafters.layers", remedy=f"choose 1 to {most}"
            )
        drafter = EarlyExitDrafter(self._target.decoder, layers, case.drafter.tree, options.get("children"))
        return drafter.adapting(AdaptiveRules.of(options))

    def _draft_model(self, case: Case, context: int) -> Drafter:
        target, options = self._target, dict(case.drafter.options)
        dtype = str(options.get("dtype") or case.target.dtype)
        revision = options.get("revision")
        source = draft_model_source(case.drafter, target.target.name)
        spec = read_model_spec(source)
        target.check_vocabulary(source)
        batch = case.workload.batch_size
        key = (options["model"], revision, dtype)
        if key not in self._models:
            self._models[key] = target.load(source, spec, dtype)
        decoder = self._models[key]
        tree = case.drafter.tree
        shape = StaticTree.chain(case.depth) if tree is None else tree.cut(case.depth)
        # A pass feeds one level: its nodes that have children, or at the root the pending token and one before it.
        rows = batch * max(2, shape.most_fed)
        limits = DecoderLimits(max(PREFILL_ROWS, rows), batch * max(1, shape.most_fed))
        context += _cells_off_path(case)
        decoder.rebind(target.kv_cache(spec, dtype, batch, context, case.kv), limits)
        children: Any = options.get("children")
        drafter = DraftModelDrafter(decoder, target.spec.vocab_size, tree, children)
        return drafter.adapting(AdaptiveRules.of(options))

    def _head(self, case: Case, context: int) -> Drafter:
        target, spec, depth = self._target, case.drafter, case.depth
        options: dict[str, Any] = dict(spec.options)
        batch = case.workload.batch_size
        dynamic = None if spec.top_k is None else DynamicShape(spec.top_k, int(options["nodes"]))
        shape = StaticTree.chain(depth) if spec.tree is None else spec.tree.cut(depth)
        most_fed = shape.most_fed if dynamic is None else dynamic.top_k
        # A pass feeds one level, or at the root the pairs of the path that was accepted last and of its next token; of
        # several MTP modules each feeds that path's pairs and one a draft before it.
        rows = batch * max(2 * depth, depth + 1, most_fed)
        limits = DecoderLimits(max(PREFILL_ROWS, rows), batch * max(1, most_fed))
        key = (head_kind(spec), options["head"], options.get("revision"), options.get("recycle"))
        if key not in self._heads:
            source, shape_of = head_source(spec, target.spec, target.target.name)
            layer = replace(shape_of.layer, num_layers=max(1, shape_of.layer.num_layers))
            kv = target.kv_cache(layer, case.target.dtype, batch, context)
            tensors = load_head(source, shape_of, target.spec, DTYPES[case.target.dtype])
            self._heads[key] = Head(shape_of, tensors, target.decoder, kv=kv, limits=limits)
        head = self._heads[key]
        layer = replace(head.spec.layer, num_layers=max(1, head.spec.layer.num_layers))
        head.rebind(target.kv_cache(layer, case.target.dtype, batch, context + _cells_off_path(case)), limits)
        reason = why_not_drafted(case, head.spec)
        if reason is not None:
            raise InputError(reason[0], key=reason[1], remedy=reason[2])
        children = options.get("children")
        drafter: HeadDrafter | MedusaDrafter | ModulesDrafter
        if spec.kind == "medusa":
            drafter = MedusaDrafter(head, spec.tree, children)
        elif head.spec.num_modules > 1:
            drafter = ModulesDrafter(head, depth, children)
        else:
            drafter = HeadDrafter(head, dynamic or spec.tree, children)
        return drafter.adapting(AdaptiveRules.of(options))
