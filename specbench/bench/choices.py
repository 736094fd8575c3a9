"""Why a case's verification choice is not run, as far as the case alone tells; the verifier refuses the rest."""

from __future__ import annotations

from specbench.engine.sampling import GREEDY_EPSILON
from specbench.engine.verify_choices import METHODS, NO_TRAVERSAL, NO_TRAVERSAL_REMEDY, Method, refusal
from specbench.scenario.cases import Case
from specbench.scenario.drafter_spec import HEAD_KINDS

METHOD_OF: dict[str, Method] = {"token" if method == "sequential" else method: method for method in METHODS}
"""The verifier's name of a scenario's `sampling.verification`."""
CHOSEN_KINDS = ("ngram", "suffix", "oracle", "forced")
"""Drafters whose tokens are never sampled."""
MODEL_KINDS = ("draft_model", "early_exit", *HEAD_KINDS)
"""Drafters that sample chains, and trees where `children` says so."""


def why_not_verified(case: Case, backend: str) -> str | None:
    """Why `case`, run on `backend`, is skipped for its verification; None where it is not, or where only the drafts
    themselves can tell."""
    choice, kind = case.sampling.verification, case.drafter.kind
    if choice == "token":
        return None
    if kind == "none":
        return f"no draft to verify as {choice}"
    is_greedy = case.sampling.temperature <= GREEDY_EPSILON
    if is_greedy and choice != "greedy":
        return f"{choice} verification is that of sampled requests: at temperature 0 it is no other than greedy"
    drawn, branches = _drawn(case), _branches(case)
    refused = refusal(METHOD_OF[choice], is_greedy=is_greedy, drawn=drawn, branches=branches, what=_what(case))
    if refused is None and choice == "traversal" and backend == "triton":
        refused = NO_TRAVERSAL, NO_TRAVERSAL_REMEDY
    return None if refused is None else "; ".join(refused)


def _drawn(case: Case) -> bool | None:
    children = dict(case.drafter.options).get("children")
    if children is not None:
        return children != "top"
    if case.drafter.kind in CHOSEN_KINDS or case.drafter.grows_trees:
        return False
    return case.drafter.tree is None if case.drafter.kind in MODEL_KINDS else None


def _branches(case: Case) -> bool | None:
    tree = case.drafter.tree
    if tree is not None:
        return not tree.cut(case.depth).is_chain
    if case.drafter.grows_trees:
        return True
    return False if case.drafter.kind in (*CHOSEN_KINDS, *MODEL_KINDS) else None


def _what(case: Case) -> str:
    return "this draft" if case.drafter.tree is None else "this tree"
