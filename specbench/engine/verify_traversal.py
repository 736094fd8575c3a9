"""Traversal verification of one request's sampled tree: from the leaves up, so that a leaf's whole path stands at once.

Each node carries its target law P, the law Q of the children it still has, and r, the share of it that is left to
accept. r = 1 at the root, which always stands; a child x has r = min(1, r P(x)/Q(x)), with its parent's r, P and Q.
Nodes are tested as leaves in the order of a walk that leaves a node after its children: with u < r the path to the
leaf stands and y ~ P. Else the leaf goes, and with S the sum of relu(r P - Q) its parent has

    P <- norm(relu(r P - Q)),    r <- S/(S + 1 - r) (1 for 0/0),    Q <- norm(Q without x) where siblings were drawn
                                                                         without replacement

A node whose children are all gone is a leaf. On a chain this is block verification, coin by coin. (Weng et al. 2025,
arXiv 2505.12398; the update of r is the one that keeps the target's law, as the tests prove by enumeration.)

The reference, on the host, in float64. A node is tested once at most, so coin j judges node j and the last draws y.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specbench.engine.sampling import sample
from specbench.engine.tree import TokenTree
from specbench.engine.verify_rules import (
    FloatArray,
    Siblings,
    Verification,
    check_sibling,
    drafted,
    float64,
    normalised,
    without,
)


@dataclass(frozen=True)
class _Walk:
    p: torch.Tensor
    tree: TokenTree
    q: torch.Tensor | None
    siblings: Siblings
    uniforms: FloatArray

    def below(self, node: int, ratio: float) -> tuple[list[int], FloatArray] | None:
        """The path from `node` down that stands, `node` included, and the law after it; None: the node goes.

        `ratio` is the node's r; the root, -1, is in no path.
        """
        law = float64(self.p[node + 1])
        children = self.tree.children[node + 1]
        mass: FloatArray | None = None
        for child in children:
            assert self.q is not None, "a drawn tree has its q"
            token = int(self.tree.tokens[child])
            if mass is None:
                mass = float64(self.q[child])
            else:
                check_sibling(self.q, child, children[0], float(mass[token]))
            found = self.below(child, min(1.0, ratio * float(law[token]) / float(mass[token])))
            if found is not None:
                path, rest = found
                return ([node, *path] if node >= 0 else path), rest
            left = np.maximum(ratio * law - mass, 0.0)
            total = float(left.sum())
            law = normalised(left, law)
            ratio = total / (total + 1.0 - ratio) if total + 1.0 - ratio > 0 else 1.0
            if self.siblings == "without_replacement":
                others = without(mass, token)
                mass = normalised(others, others)
        if node < 0:
            return [], law
        return ([node], law) if self.uniforms[node] < ratio else None


def verify_traversal(
    p: torch.Tensor, tree: TokenTree, q: torch.Tensor | None, siblings: Siblings, uniforms: FloatArray
) -> Verification:
    """Traversal verification for one request; the formula is in the module's docstring.

    Shapes are those of `verify_sequential`, but `q` is None for a tree without nodes only: chosen nodes have no law to
    be judged by. Raises DraftContractError when a drafted token has q = 0, or siblings have different laws.
    """
    num_nodes = len(tree)
    assert len(p) == len(uniforms) == num_nodes + 1, "a tree of n nodes has n + 1 rows and n + 1 uniforms"
    assert q is not None or not num_nodes, "chosen nodes can't be judged by traversal"
    drafted(p, tree, q)  # raises where a token has no q
    found = _Walk(p, tree, q, siblings, uniforms).below(-1, 1.0)
    assert found is not None, "the root always stands"
    path, law = found
    return Verification.of(tree, path, sample(law, float(uniforms[num_nodes])))
