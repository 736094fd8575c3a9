"""Verification choices by name: the rule that each runs, and what each refuses. No torch here.

A choice is refused where it would not be exact, or would not be what its name says. Greedy requests are judged greedily
under every choice; a choice without a name of its own, `sequential`, takes the sequential rule that fits each draft.
"""

from __future__ import annotations

from typing import Literal, get_args

Method = Literal["sequential", "greedy", "chain", "block", "target_only", "recursive", "traversal"]
METHODS: tuple[Method, ...] = get_args(Method)
Rule = Literal["sequential", "block", "traversal"]
RULES: dict[Method, Rule] = {
    "sequential": "sequential",
    "greedy": "sequential",
    "chain": "sequential",
    "block": "block",
    "target_only": "sequential",
    "recursive": "sequential",
    "traversal": "traversal",
}
"""The rule of sampled requests. Chain, target-only and recursive are the sequential rule on what they do not refuse."""

NO_TRAVERSAL = "traversal verification has no kernel for backend triton"
NO_TRAVERSAL_REMEDY = "verify with recursive or token, or choose backend cpu or torch"
NEEDS_Q: tuple[Method, ...] = ("recursive", "traversal")


def refusal(
    method: Method, *, is_greedy: bool, drawn: bool | None, branches: bool | None, what: str = "a draft"
) -> tuple[str, str] | None:
    """Why `method` does not judge such drafts, and the remedy; None where it does.

    `drawn`: the drafts were sampled and come with their q (True), or were chosen (False: best tokens, n-gram);
    `branches`: a node may have several children. None for either says that it is not known, or that there is no draft.
    """
    if method == "greedy" and not is_greedy:
        return "greedy verification is exact at temperature 0 only", "set temperature: 0, or verification: token"
    if method in ("chain", "block") and branches:
        choices = "token, target_only, recursive or traversal"
        return f"{method} verification judges chains, and {what} branches", f"verify trees with {choices}"
    if is_greedy:
        return None
    if method == "target_only" and drawn:
        return (
            f"target_only verification is for chosen drafts, and {what} was sampled: its q would go unused",
            "write children: top, or verify with recursive, traversal or token",
        )
    if method in NEEDS_Q and drawn is False:
        return (
            f"{method} verification needs the law that drafts were sampled from, and {what} was chosen",
            "write children: without_replacement (or independent), or verify with target_only or token",
        )
    return None
