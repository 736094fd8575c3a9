"""`--only KEY=VALUE`: the cases of a sweep that meet every filter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from specbench.errors import InputError
from specbench.scenario.cases import Case
from specbench.scenario.drafter_spec import shown


def filter_cases(cases: Sequence[Case], filters: Sequence[str]) -> list[Case]:
    """The cases that meet every filter KEY=VAL or KEY=VAL,VAL (any of the values).

    KEY is an axis of the row; `drafter` takes a kind or a full name, `null` stands for no value. Raises InputError,
    listing what there is, for a filter that can't be read, an unknown key or a value that no case has.
    """
    kept = list(cases)
    seen: set[str] = set()
    for text in filters:
        key, equals, wanted = (part.strip() for part in text.partition("="))
        if not equals or not wanted:
            raise InputError(f"{text!r} is not KEY=VALUE", key="--only", remedy="write --only batch_size=4,8")
        if not cases:
            break
        axes = cases[0].axes
        if key not in axes:
            near = get_close_matches(key, list(axes), n=1)
            start = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{key!r} is not an axis", key="--only", remedy=f"{start}choose from: {', '.join(axes)}")
        if key in seen:
            raise InputError(f"{key!r} is given twice", key="--only", remedy=f"write --only {key}=VALUE,VALUE")
        seen.add(key)
        values = [value.strip() for value in re.split(r",(?![^()]*\))", wanted)]
        for value in values:
            if not any(_matches(case, key, value) for case in cases):
                there = ", ".join(dict.fromkeys(shown(case.axes[key]) for case in cases))
                raise InputError(f"no case has {key}={value}", key="--only", remedy=f"there is: {there}")
        kept = [case for case in kept if any(_matches(case, key, value) for value in values)]
    if cases and not kept:
        raise InputError(
            f"no case meets all of: {', '.join(filters)}", key="--only", remedy="drop a filter, or see --dry-run"
        )
    return kept


def _matches(case: Case, key: str, text: str) -> bool:
    value = case.axes[key]
    if key == "drafter":
        return text in (case.drafter.kind, case.drafter.name)
    if value is None:
        return text == "null"
    if isinstance(value, str):
        return text == value
    try:
        return float(text) == value if isinstance(value, float) else int(text) == value
    except ValueError:
        return False
