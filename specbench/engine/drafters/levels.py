"""Drafting level by level, whatever makes the logits: a chain token by token, a static tree, or a dynamic one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.drafters.adaptive import AdaptiveRules, AdaptiveShape, entropies
from specbench.engine.drafters.base import AnyPass
from specbench.engine.drafters.growth import CHILDREN, Children, Draft, DynamicDraft, rows_of_bits
from specbench.engine.drafters.static_tree import MAX_NODES, StaticTree
from specbench.engine.models.decoder import Capture
from specbench.engine.ops.batch import ForwardBatch
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import RequestGenerator, SamplingParams, bad_rows, distribution, sample
from specbench.engine.verify import Proposal
from specbench.errors import InputError

AnyDraft = Draft | DynamicDraft
Busy = list[tuple[AnyDraft, list[int]]]


@dataclass(frozen=True)
class DynamicShape:
    """A dynamic tree: `top_k` children a node and nodes a level, `num_nodes` drafts verified (the root not counted)."""

    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        for key, value in (("top_k", self.top_k), ("nodes", self.num_nodes)):
            if not 1 <= value <= MAX_NODES:
                raise InputError(f"{value} is out of range", key=key, remedy=f"choose 1 to {MAX_NODES}")

    def candidates(self, depth: int) -> int:
        """Nodes named by `depth` levels: k + (depth - 1) k^2."""
        return self.top_k * (1 + (depth - 1) * self.top_k) if depth > 0 else 0


class LevelDrafter:
    """Drafts level by level: a chain token by token, or a static tree of the model's best or drawn children.

    `children` says how a sampled request's children come about: "top" takes the model's best tokens (chosen, no q),
    the others draw them from the model's law, which is handed over as q. Greedy requests always take the best. A law
    with too few tokens gives fewer siblings without replacement. A request's draft coins are a stream of its own,
    apart from the verifier's, one for each child wanted.
    """

    synthetic = False
    capture: Capture = ()

    def __init__(
        self, vocab_size: int, tree: StaticTree | DynamicShape | None = None, children: Children | None = None
    ) -> None:
        """`vocab_size`: how many tokens it can draft; `tree` None: chains."""
        self._tree = tree
        self._children: Children = children or ("independent" if tree is None else "top")
        if self._children not in CHILDREN:
            raise InputError(f"unknown children {children!r}", key="children", remedy=f"one of {list(CHILDREN)}")
        if isinstance(tree, DynamicShape):
            widest = tree.top_k
            if self._children != "top":
                raise InputError("a dynamic tree is one of best tokens", key="children", remedy="drop children")
        else:
            widest = max((len(nodes) for nodes in tree.children), default=1) if tree is not None else 1
        if widest > vocab_size:
            raise InputError(f"{widest} children of a vocabulary of {vocab_size}", key="tree")
        self._rules: AdaptiveRules | None = None
        self._shapes: dict[int, AdaptiveShape] = {}
        self._coins: dict[int, RequestGenerator] = {}
        self._drafts: dict[int, AnyDraft] = {}
        self._passes: list[AnyPass] = []

    def adapting(self, rules: AdaptiveRules | None) -> Self:
        """The drafter itself, whose paths now end early by `rules`: by the entropy of the law that children are drawn
        from, or for chosen children of the model's plain softmax. To be called before any request starts."""
        self._rules = rules
        return self

    def start(self, active: ActiveRequest) -> None:
        seed = active.generator.seed
        self._coins[active.slot] = RequestGenerator(seed, f"draft/{active.request.request_id}")
        if self._rules is not None:
            self._shapes[active.slot] = AdaptiveShape(self._rules)
            self._shapes[active.slot].start(active)

    def finish(self, active: ActiveRequest) -> None:
        self._coins.pop(active.slot, None)
        self._shapes.pop(active.slot, None)
        self._drafts.pop(active.slot, None)

    def take_passes(self) -> list[AnyPass]:
        passes, self._passes = self._passes, []
        return passes

    def num_nodes(self, depth: int) -> int:
        if isinstance(self._tree, DynamicShape):
            return min(self._tree.num_nodes, self._tree.candidates(depth))
        return len(self._shape(depth))

    def _shape(self, depth: int) -> StaticTree:
        assert not isinstance(self._tree, DynamicShape), "a dynamic tree has no shape beforehand"
        return StaticTree.chain(depth) if self._tree is None else self._tree.cut(depth)

    def _new_draft(self, active: ActiveRequest, depth: int) -> AnyDraft:
        wanted = self.num_nodes(depth) > 0
        inputs, context = (self._first_input(active), self._context(active)) if wanted else ([], 0)
        if isinstance(self._tree, DynamicShape):
            return DynamicDraft(active, depth, self._tree.top_k, self._tree.num_nodes, inputs, context)
        return Draft(active, self._shape(depth), inputs, context)

    def _first_input(self, active: ActiveRequest) -> list[int]:
        """Committed tokens the cache lacks, the pending one last."""
        raise AssertionError("defined by each drafter")

    @property
    def _max_rows(self) -> int:
        """Rows that a pass may have."""
        raise AssertionError("defined by each drafter")

    def _context(self, active: ActiveRequest) -> int:
        """Committed cells before them."""
        raise AssertionError("defined by each drafter")

    def _make_room(self, draft: AnyDraft) -> None:
        """Room in the cache for all that this draft feeds."""

    def _catch_up(self, active: ActiveRequest, rows: int) -> None:
        """Feed what came while nothing was drafted, until the first pass of a draft needs at most `rows` rows."""

    def propose(self, active: Sequence[ActiveRequest], depths: Sequence[int]) -> list[Proposal]:
        self._drafts.clear()
        drafts = []
        share = max(1, self._max_rows // max(1, len(active)))
        for one, depth in zip(active, depths, strict=True):
            if self.num_nodes(depth) > 0:
                self._catch_up(one, share)
            draft = self._new_draft(one, depth)
            drafts.append(draft)
            if self._rules is not None:
                self._shapes[one.slot].begin(depth, len(one.tokens))
            if draft.inputs:
                self._drafts[one.slot] = draft
                self._make_room(draft)
        for level in range(max(depths, default=0)):
            busy = [(draft, frontier) for draft in drafts if (frontier := self._fed(draft, level))]
            if not busy:
                break
            logits = self._forward(busy, level)
            self._expand(busy, logits)
        return [draft.proposal(self._children) for draft in drafts]

    def _fed(self, draft: AnyDraft, level: int) -> list[int]:
        """The nodes of `level` that the model runs on."""
        frontier = draft.frontier(level)
        if self._rules is None:
            return frontier
        shape = self._shapes[draft.active.slot]
        return [place for place in frontier if shape.feeds(place)]

    def _forward(self, busy: Busy, level: int) -> torch.Tensor:
        """Logits [R, V] after the fed nodes, request by request."""
        contexts = [draft.context for draft, _ in busy]
        before = [draft.written for draft, _ in busy]
        tokens = [self._known(draft.feed(frontier)) for draft, frontier in busy]
        masks = depths = None
        if not all(draft.is_chain for draft, _ in busy):
            masks = [rows_of_bits(draft, frontier) for draft, frontier in busy]
            depths = [
                list(range(draft.num_inputs)) if level == 0 else [draft.num_inputs - 1 + level] * len(frontier)
                for draft, frontier in busy
            ]
        slots = [draft.active.slot for draft, _ in busy]
        batch = ForwardBatch.of(
            tokens, slots, contexts, last_only=level == 0, written=before, masks=masks, depths=depths
        )
        return self._logits(busy, level, batch)

    def _logits(self, busy: Busy, level: int, batch: ForwardBatch) -> torch.Tensor:
        """Run `batch` and note the pass: logits [R, V] of the selected rows."""
        raise AssertionError("defined by each drafter")

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Ids as the drafter's embedding has them."""
        return list(tokens)

    def _as_target(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The target's ids of tokens that are columns of the logits."""
        return tokens

    def _expand(self, busy: Busy, logits: torch.Tensor) -> None:
        """Give the fed nodes their children. Logits without a distribution end that request's draft; others go on."""
        bad = bad_rows(logits).cpu().numpy()
        best: list[tuple[Draft, int, int]] = []
        drawn: list[tuple[Draft, int, int]] = []
        dynamic: list[tuple[DynamicDraft, list[int], range]] = []
        first = 0
        for draft, frontier in busy:
            rows = range(first, first + len(frontier))
            first += len(frontier)
            if bad[rows.start : rows.stop].any():
                draft.over = True
                continue
            if isinstance(draft, DynamicDraft):
                dynamic.append((draft, frontier, rows))
                continue
            chosen = self._children == "top" or draft.active.request.params.is_greedy
            (best if chosen else drawn).extend((draft, place, row) for place, row in zip(frontier, rows, strict=True))
        if dynamic:
            ids, logprobs = best_logprobs(logits, min(draft.top_k for draft, _, _ in dynamic))
            for one, frontier, rows in dynamic:
                kept = self._going_on(one, frontier, logits[rows.start : rows.stop], ids.shape[1])
                named = [rows[index] for index in kept]
                one.expand([frontier[index] for index in kept], self._as_target(ids[named]), logprobs[named])
        if best and self._rules is not None:
            plain = _picked(logits, [row for _, _, row in best]).softmax(dim=-1)
            best = [best[index] for index in self._expanding([(draft, place) for draft, place, _ in best], plain)]
        if best:
            counts = [draft.num_children(place) for draft, place, _ in best]
            ranked = self._as_target(best_children(_picked(logits, [row for _, _, row in best]), max(counts)))
            for (draft, place, _), tokens, count in zip(best, ranked.tolist(), counts, strict=True):
                draft.grow(place, tokens[:count], None)
        if drawn:
            params = [draft.active.request.params for draft, _, _ in drawn]
            laws = self._laws(_picked(logits, [row for _, _, row in drawn]), params)
            if self._rules is not None:
                kept = self._expanding([(draft, place) for draft, place, _ in drawn], laws)
                drawn, laws = [drawn[index] for index in kept], laws[kept]
            for (draft, place, _), law in zip(drawn, laws, strict=True):
                coins = self._coins[draft.active.slot].uniforms(draft.num_children(place))
                draft.grow(place, self._drawn(law, coins), law)

    def _expanding(self, nodes: list[tuple[Draft, int]], laws: torch.Tensor) -> list[int]:
        """Which of the fed `nodes` get children, given the laws [len(nodes), V] after them."""
        kept = []
        for index, ((draft, place), entropy) in enumerate(zip(nodes, entropies(laws), strict=True)):
            shape = self._shapes[draft.active.slot]
            if shape.expands(place, entropy):
                shape.grown(place, draft.shape.children[place + 1], entropy)
                kept.append(index)
        return kept

    def _going_on(self, draft: DynamicDraft, frontier: list[int], logits: torch.Tensor, width: int) -> list[int]:
        """Which of the fed nodes of a dynamic tree get `width` children, given the logits [len(frontier), V] after
        them; their children's numbers follow those of all candidates so far."""
        if self._rules is None:
            return list(range(len(frontier)))
        shape, first, kept = self._shapes[draft.active.slot], len(draft.tokens), []
        for index, (node, entropy) in enumerate(zip(frontier, entropies(logits.softmax(dim=-1)), strict=True)):
            if shape.expands(node, entropy):
                shape.grown(node, range(first, first + width), entropy)
                first += width
                kept.append(index)
        return kept

    def _laws(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """What children are drawn from, and what is handed over as q: [R, V_target]."""
        return distribution(logits, params)

    def _drawn(self, law: torch.Tensor, coins: NDArray[np.float64]) -> list[int]:
        mass = law.detach().cpu().double().numpy().copy()
        tokens: list[int] = []
        for coin in coins.tolist():
            if not mass.sum() > 0:
                break
            tokens.append(sample(mass, coin))
            if self._children == "without_replacement":
                mass[tokens[-1]] = 0.0
        return tokens


def _picked(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def best_children(logits: torch.Tensor, count: int) -> NDArray[np.int64]:
    """int64[R, count]: the best tokens of each row of `logits` [R, V], best first, the lowest id among ties."""
    if count == 1:
        return logits.argmax(dim=-1, keepdim=True).cpu().numpy()
    left = logits.clone()
    ranks = []
    for _ in range(count):
        ranks.append(left.argmax(dim=-1, keepdim=True))
        left.scatter_(1, ranks[-1], float("-inf"))
    return torch.cat(ranks, dim=1).cpu().numpy()


def best_logprobs(logits: torch.Tensor, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The best `count` tokens of each row of `logits` [R, V], best first: int64[R, count], and their log-probabilities.

    Among ties the lowest ids, in their order.
    """
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    values, ids = wide.topk(count, dim=-1)
    norm = wide.logsumexp(dim=-1, keepdim=True)
    found = ids.cpu().numpy()
    least = values[:, -1:].cpu()
    if bool(((wide.cpu() >= least).sum(dim=-1) > count).any()) or bool((values[:, 1:] == values[:, :-1]).any()):
        found = best_children(wide, count)  # topk names ties in no order
        values = wide.gather(1, torch.as_tensor(found, device=wide.device))
    return found, (values - norm).double().cpu().numpy()
