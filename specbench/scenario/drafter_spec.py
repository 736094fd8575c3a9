"""DrafterSpec: a drafter with every option bound, how many nodes it drafts, and its short name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from specbench.engine.drafters.static_tree import StaticTree

Scalar = str | int | float | bool | None
Option = Scalar | tuple[Scalar | tuple[Scalar, ...], ...]


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter with every option bound; `options` is kept sorted by key."""

    kind: str
    options: tuple[tuple[str, Option], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options, key=lambda item: item[0])))

    def option(self, key: str) -> Option:
        """The value of option `key`; KeyError where this kind has no such option."""
        return dict(self.options)[key]

    @property
    def tree(self) -> StaticTree | None:
        """The static tree, or None for a chain."""
        paths = dict(self.options).get("tree")
        return StaticTree(paths) if paths else None  # type: ignore[arg-type]

    @property
    def grows_trees(self) -> bool:
        """Whether each draft has a shape of its own: lookup with branches, suffix decoding and heads with nodes."""
        options = dict(self.options)
        return "branches" in options or (self.kind != "ngram" and "nodes" in options)

    @property
    def top_k(self) -> int | None:
        """Children a node of a head's dynamic tree; None for all else."""
        options = dict(self.options)
        if self.kind not in HEAD_KINDS or "nodes" not in options:
            return None
        return int(str(options.get("top_k", TOP_K)))

    def num_nodes(self, depth: int) -> int:
        """Most nodes of a draft of `depth` levels: `depth` for a chain."""
        if self.tree is not None:
            return len(self.tree.cut(depth))
        if not self.grows_trees or depth == 0:
            return depth
        options = {key: int(str(value)) for key, value in self.options if key in ("branches", "nodes")}
        most = options["branches"] * depth if "branches" in options else options["nodes"]
        if self.top_k is not None:
            most = self.top_k * (1 + (depth - 1) * self.top_k)
        return min(most, options.get("nodes", most))

    @cached_property
    def name(self) -> str:
        """Short: `ngram(3)`, `early_exit(8)`, `none`. The chief option comes first; others only if not the default."""
        told = [item for item in sorted(self.options, key=_chief) if _telling(*item)]
        parts = [_worded(key, value, alone=key == told[0][0] == "nodes") for key, value in told]
        return f"{self.kind}({', '.join(parts)})" if parts else self.kind


HEAD_KINDS = ("medusa", "eagle", "eagle2", "eagle3", "mtp")
"""Drafters that run a head on the target's states."""
TOP_K = 10
"""Children a node of a dynamic tree where the scenario does not say (EAGLE-2's own default)."""

_CHIEF = ("head", "max_ngram", "layers", "model", "length", "rates", "nodes")
_BARE = (*_CHIEF[:-1], "rule", "dtype", "children", "tree", "recycle")
_QUIET = {
    "min_ngram": 1,
    "rule": "transformers",
    "max_tree_depth": 24,
    "max_spec_factor": 1.0,
    "max_spec_offset": 0.0,
    "min_token_prob": 0.1,
    "max_cached_requests": 10_000,
    "responses": "others",
    "head": "builtin",
    "top_k": TOP_K,
}


def _chief(item: tuple[str, Option]) -> tuple[int, str]:
    return (_CHIEF.index(item[0]) if item[0] in _CHIEF else len(_CHIEF), item[0])


def _telling(key: str, value: Option) -> bool:
    return value is not None and _QUIET.get(key) != value


def _worded(key: str, value: Option, alone: bool) -> str:
    if key == "tree" and isinstance(value, tuple):
        text = f"tree {len(value)}"
    elif isinstance(value, tuple):
        text = "/".join(shown(item) for item in value if not isinstance(item, tuple))
    elif isinstance(value, str):
        text = short(value)
    else:
        text = shown(value)
    return text if alone or key in _BARE else f"{key.removesuffix('_ngram').replace('_', ' ')} {text}"


def shown(value: Scalar) -> str:
    """Short where that loses nothing: 0.0 is "0", 0.1 is "0.1"; None is "null"."""
    if value is None:
        return "null"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def short(text: str) -> str:
    """A path without its folders; names and hub ids as they are."""
    return os.path.basename(text) if os.path.isabs(text) else text
