"""The rules by which one request's drafts stand: greedy, sequential rejection on a tree, block verification.

Sequential rule, from the root down (a chain is the tree with one child a node). At a node with target law P, its
children in order:

- chosen (argmax, top-k, n-gram: a function of the context): keep x if u < P(x), else take x out of P and renormalise;
- sampled from Q: keep x if u < P(x)/Q(x), else P <- norm(relu(P - Q)); siblings drawn without replacement also take x
  out of Q. (Recursive rejection: SpecInfer with replacement, EAGLE-1 and Sequoia without.)

A child that stands is the next node. Where none does, y ~ what is left of P. For a chain this is speculative sampling
(Leviathan et al. 2023; Chen et al. 2023); for a chosen tree it is sampling from P and going on while a child is hit.

Block verification of a chain (Sun et al. 2024, arXiv 2403.10444): r_0 = 1, r_i = min(1, r_(i-1) p(x_i)/q(x_i)); with
S_i the sum of relu(r_i p - q) after i drafts, h_i = S_i/(S_i + 1 - r_i) and h_last = r_last, the longest i with
u_i < h_i stands, and y ~ norm(relu(r_i p - q)), or p after all drafts. It keeps no fewer tokens than the sequential
rule, on average.

What is emitted has the target's law under each rule, whatever drafts. Coin j judges node j, the last coin draws y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.engine.sampling import NumericalError, sample
from specbench.engine.tree import TokenTree
from specbench.errors import SpecbenchError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Siblings = Literal["chosen", "independent", "without_replacement"]
SIBLINGS: tuple[Siblings, ...] = ("chosen", "independent", "without_replacement")


class DraftContractError(SpecbenchError):
    """A drafter handed over tokens or probabilities that cannot be what it sampled: a bug of the drafter."""


@dataclass(frozen=True)
class Verification:
    """The verdict on one request's drafts.

    `accepted` is how many drafts stand and `path` their nodes (TokenTree numbering, from the root down; where it is
    not given, a chain's leading run), `next_token` what the target emits after them, `tokens` all together. `logprobs`
    and `top2_margins` (one a token, from the raw target logits) are there when asked for. After a failure `error` is
    set, nothing is accepted and `tokens` is empty.
    """

    accepted: int
    next_token: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top2_margins: tuple[float, ...] = ()
    error: NumericalError | None = None
    path: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.path:
            object.__setattr__(self, "path", tuple(range(self.accepted)))
        assert len(self.path) == self.accepted, "the path is what is accepted"

    @classmethod
    def failure(cls, error: NumericalError) -> Verification:
        return cls(accepted=0, next_token=-1, tokens=(), error=error)

    @classmethod
    def of(cls, tree: TokenTree, path: list[int], next_token: int) -> Verification:
        """The nodes of `path` stand, and `next_token` follows them."""
        tokens = (*(int(tree.tokens[node]) for node in path), next_token)
        return cls(len(path), next_token, tokens, path=tuple(path))


def verify_greedy(target_argmax: IntArray, tree: TokenTree) -> Verification:
    """Walk from the root to the child that holds the target's argmax, while there is one; then emit the argmax.

    `target_argmax` int64[n + 1]: after the root, then after each node. Of siblings with one token the first is taken.
    """
    assert len(target_argmax) == len(tree) + 1, "a tree of n nodes has n + 1 rows"
    children, tokens, best = tree.children, tree.tokens.tolist(), target_argmax.tolist()
    path: list[int] = []
    row = 0
    while (hit := next((node for node in children[row] if tokens[node] == best[row]), None)) is not None:
        path.append(hit)
        row = hit + 1
    return Verification.of(tree, path, best[row])


def verify_greedy_chain(target_argmax: IntArray, draft_tokens: IntArray) -> Verification:
    """`verify_greedy` on a chain: drafts stand while they equal the argmax. int64[l + 1] and int64[l]."""
    return verify_greedy(target_argmax, TokenTree.chain(draft_tokens))


def verify_sequential(
    p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: Siblings, uniforms: FloatArray
) -> Verification:
    """The sequential rule for one request; the formula is in the module's docstring.

    `p` [n + 1, V] target laws after the root and after each node; `q` [n, V] the whole law that each node's position
    was drawn from, equal for siblings, or None for chosen nodes; `uniforms` float64[n + 1]. Ratios and residuals are
    float64. A residual that rounding left empty falls back to what it was made from. Raises DraftContractError when a
    drafted token has q = 0, or siblings have different laws.
    """
    num_nodes = len(tree)
    assert len(p) == len(uniforms) == num_nodes + 1, "a tree of n nodes has n + 1 rows and n + 1 uniforms"
    p_nodes, q_nodes = drafted(p, tree, q)
    children = tree.children
    path: list[int] = []
    row = 0
    while True:
        law: FloatArray | None = None
        q_law: FloatArray | None = None
        stands = None
        for node in children[row]:
            token = int(tree.tokens[node])
            if law is None:
                ratio = p_nodes[node] / q_nodes[node]
            elif q is None or q_law is None:
                ratio = float(law[token])
            else:
                check_sibling(q, node, children[row][0], float(q_law[token]))
                ratio = float(law[token]) / float(q_law[token])
            if uniforms[node] < ratio:
                stands = node
                break
            law = float64(p[row]) if law is None else law
            if q is None:
                law = normalised(without(law, token), law)
            else:
                q_law = float64(q[node]) if q_law is None else q_law
                law = normalised(np.maximum(law - q_law, 0.0), law)
                if siblings == "without_replacement" and node != children[row][-1]:
                    rest = without(q_law, token)
                    q_law = normalised(rest, rest)
        if stands is None:
            mass = float64(p[row]) if law is None else law
            return Verification.of(tree, path, sample(mass, float(uniforms[num_nodes])))
        path.append(stands)
        row = stands + 1


def verify_chain(p: torch.Tensor, draft_tokens: IntArray, q: torch.Tensor | None, uniforms: FloatArray) -> Verification:
    """Chain speculative sampling: `verify_sequential` on a chain. `p` [l + 1, V], int64[l], [l, V], float64[l + 1]."""
    return verify_sequential(p, TokenTree.chain(draft_tokens), q, "independent", uniforms)


def verify_block(p: torch.Tensor, draft_tokens: IntArray, q: torch.Tensor | None, uniforms: FloatArray) -> Verification:
    """Block verification of a chain; the formula is in the module's docstring, the shapes are those of `verify_chain`.

    Raises DraftContractError when a drafted token has q = 0.
    """
    tree = TokenTree.chain(draft_tokens)
    num_drafts = len(tree)
    assert len(p) == len(uniforms) == num_drafts + 1, "a chain of l drafts has l + 1 rows and l + 1 uniforms"
    p_drafted, q_drafted = drafted(p, tree, q)
    ratio, accepted = 1.0, 0
    mass = _block_residual(p, tree, q, 0, 1.0)
    for count in range(1, num_drafts + 1):
        ratio = min(1.0, ratio * p_drafted[count - 1] / q_drafted[count - 1])
        left = float64(p[count]) if count == num_drafts else _block_residual(p, tree, q, count, ratio)
        if count == num_drafts:
            threshold = ratio
        else:
            total = float(left.sum())
            threshold = total / (total + 1.0 - ratio) if total + 1.0 - ratio > 0 else 1.0
        if uniforms[count - 1] < threshold:
            accepted, mass = count, left
    if not mass.sum() > 0:
        mass = float64(p[accepted])
    return Verification.of(tree, list(range(accepted)), sample(mass, float(uniforms[num_drafts])))


def _block_residual(p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, count: int, ratio: float) -> FloatArray:
    """relu(ratio·p - q) after `count` drafts, not normalised; p itself after all of them."""
    law = float64(p[count])
    if count == len(tree):
        return law
    scaled = ratio * law
    return without(scaled, int(tree.tokens[count])) if q is None else np.maximum(scaled - float64(q[count]), 0.0)


def drafted(p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None) -> tuple[list[float], list[float]]:
    """p after its parent and q of each node's token, float64; the q of a chosen node is 1."""
    rows = torch.as_tensor(tree.parents + 1, device=p.device)
    tokens = torch.as_tensor(tree.tokens, device=p.device)
    p_nodes = p[rows, tokens].double().tolist()
    q_nodes = [1.0] * len(tree) if q is None else _at_tokens(q, tree.tokens)
    if 0.0 in q_nodes:
        node = q_nodes.index(0.0)
        raise DraftContractError(f"draft {node} is token {tree.tokens[node]}, whose q is 0")
    return p_nodes, q_nodes


def check_sibling(q: torch.Tensor, node: int, first: int, mass: float) -> None:
    if not torch.equal(q[node], q[first]):
        raise DraftContractError(f"node {node} and its sibling {first} have different q")
    if not mass > 0:
        raise DraftContractError(f"node {node} holds a token that its siblings have left no mass for")


def without(law: FloatArray, token: int) -> FloatArray:
    left = law.copy()
    left[token] = 0.0
    return left


def normalised(law: FloatArray, fallback: FloatArray) -> FloatArray:
    """`law` over its sum; `fallback` where nothing is left."""
    total = law.sum()
    return law / total if total > 0 else fallback


def float64(row: torch.Tensor) -> FloatArray:
    return row.detach().cpu().double().numpy()


def _at_tokens(rows: torch.Tensor, tokens: IntArray) -> list[float]:
    """rows[i, tokens[i]] as float64 on the host."""
    chosen = torch.as_tensor(tokens, device=rows.device).unsqueeze(1)
    return rows.gather(1, chosen).squeeze(1).double().tolist()
