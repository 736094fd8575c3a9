"""What the drafters of a scenario share: depth, trees and how they come about. The kinds are in `drafter_schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from specbench.engine.drafters.static_tree import MAX_NODES, NAMED_TREES, StaticTree
from specbench.errors import InputError
from specbench.scenario.fields import (
    Axis,
    Rate,
    ScalarFault,
    Section,
    Text,
    as_items,
    choice,
    described,
    distinct,
    fault,
    read_integer,
    read_number,
    reader,
)
from specbench.scenario.yaml_reader import YamlScalar

AUTO = "auto"
MAX_DEPTH = 64


def _read_depth(value: object) -> int | str:
    if (value.text if isinstance(value, YamlScalar) else value) == AUTO:
        return AUTO
    try:
        return read_integer(value, 0, MAX_DEPTH)
    except ScalarFault as error:
        raise ScalarFault(error.message, f"{error.remedy}, or {AUTO}") from None


AnyDepth = Annotated[int | Literal["auto"], reader(_read_depth)]
"""Levels of a draft; `auto`: each step chooses."""
MaxDepth = Annotated[int, reader(read_integer, 1, MAX_DEPTH)] | None
NodeCount = Annotated[int, reader(read_integer, 1, MAX_NODES)]
"""Most nodes of a tree that the drafter grows as it goes."""


class DrafterConfig(Section):
    """What all drafters share. `depth` takes the place of sweep.depth, `max_depth` is the most that `depth: auto` may
    draft; the other fields are the kind's options."""

    kind: Text
    depth: Axis[AnyDepth] | None = None
    max_depth: MaxDepth = None

    @property
    def default_max_depth(self) -> int:
        """The most levels that `auto` drafts where nothing else says so."""
        return 5

    @property
    def options(self) -> dict[str, tuple[Any, ...]]:
        """Each option with its axis; an option that can't be an axis, or isn't given, has one value."""
        values = {
            key: getattr(self, key) for key in type(self).model_fields if key not in ("kind", "depth", "max_depth")
        }
        return {key: value if isinstance(value, tuple) else (value,) for key, value in values.items()}

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        """Refuse options that can't be had at one of `depths`; `at` is this drafter's place."""


def check_nodes(nodes: tuple[int | None, ...], depths: tuple[int, ...], *at: str | int) -> None:
    """Refuse trees of fewer nodes than levels."""
    fewest = min((count for count in nodes if count is not None), default=None)
    if fewest is not None and fewest < max(depths):
        message = f"{fewest} nodes can't have {max(depths)} levels"
        raise fault(message, f"give nodes: {max(depths)} or more, or smaller depths", *at, "nodes")


def _as_trees(value: object) -> object:
    """One tree is a list of paths, a path a list of ranks; an axis of trees is a list of such lists."""
    nested = value
    for _ in range(2):
        if not isinstance(nested, list | tuple) or not nested:
            return [value]
        nested = nested[0]
    return value if isinstance(nested, list | tuple) else [value]


def _as_paths(value: object) -> object:
    name = value.text if isinstance(value, YamlScalar) else value
    if isinstance(name, str) and name in NAMED_TREES:
        return NAMED_TREES[name].paths
    if not isinstance(value, list | tuple):
        raise fault(f"must be a list of paths, not {described(value)}", "write paths of ranks: [[0], [1], [0, 0]]")
    return as_items(value)


def _checked_tree(paths: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The paths in the order of the nodes, so that a tree is the same however it is written."""
    try:
        return StaticTree.of(paths).paths
    except InputError as error:
        raise fault(error.message, str(error.remedy)) from None


_Path = Annotated[tuple[Annotated[int, reader(read_integer, 0, MAX_NODES - 1)], ...], BeforeValidator(as_items)]
Trees = Annotated[
    tuple[Annotated[tuple[_Path, ...], BeforeValidator(_as_paths), AfterValidator(_checked_tree)], ...],
    AfterValidator(distinct),
    BeforeValidator(as_items),
    BeforeValidator(_as_trees),
]
Children = Annotated[
    Literal["top", "independent", "without_replacement"], choice("top", "independent", "without_replacement")
]


class TreeConfig(DrafterConfig):
    """What drafters of trees share: `tree`, a static tree as paths of ranks or by name (null: a chain); depth d cuts it
    to its first d levels."""

    tree: Trees | None = None

    @property
    def default_max_depth(self) -> int:
        levels = [StaticTree(paths).depth for paths in self.tree or ()]
        return min(levels, default=super().default_max_depth)

    def check_depths(self, depths: tuple[int, ...], *at: str | int) -> None:
        levels = [StaticTree(paths).depth for paths in self.tree or ()]
        if levels and min(levels) < max(depths):
            message = f"has {min(levels)} levels, and depth reaches {max(depths)}"
            raise fault(message, f"give depths up to {min(levels)} beside this tree", *at, "tree")


class ModelTreeConfig(TreeConfig):
    """`children` says how a sampled request's siblings come about: the model's best tokens ("top", the default of
    trees), or drawn from its law, with or without replacement (chains are drawn unless "top" is asked for).

    `stop_below` drafts on while the bound on acceptance, 1 - sqrt(gamma H) of the law's entropy H in nats, is not below
    it (AdaEDL; `stop_gamma` null: 0.2), and `stop_target` lets it adapt to hold that acceptance rate; `entropy_budget`
    gives no children to a node whose path was drafted from laws of more nats in all. Null switches each off."""

    children: Axis[Children] | None = None
    stop_below: Axis[Rate | None] = (None,)
    stop_gamma: Axis[Annotated[float, reader(read_number, 0, 100, open_low=True)]] | None = None
    stop_target: Axis[Rate | None] | None = None
    entropy_budget: Axis[Annotated[float, reader(read_number, 0, 1e6)] | None] = (None,)

    @model_validator(mode="after")
    def _one_stop(self) -> ModelTreeConfig:
        for key in ("stop_gamma", "stop_target"):
            if getattr(self, key) is not None and None in self.stop_below:
                raise fault("belongs to stop_below, which is not always given", "write stop_below: 0.7", key)
        return self
