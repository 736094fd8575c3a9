"""Rendering a model's own chat template, in a sandbox. No torch.

The environment is the one that chat templates are written for (transformers' apply_chat_template): trim_blocks and
lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML characters alone.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbench.errors import InputError

# Templates that print today's date get this one: the same prompt has the same tokens every day.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)


def render_chat(
    template: str, turns: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, special_tokens: Mapping[str, str]
) -> str:
    """The text of a conversation of {"role": …, "content": …} turns; InputError if a turn or the template is bad."""
    for i, turn in enumerate(turns):
        if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
            raise InputError(f"turn {i} needs a role and a content, both strings, is {dict(turn)!r}", key="turns")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    try:
        return environment.from_string(template).render(
            **special_tokens,
            messages=[dict(turn) for turn in turns],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
    # A template is a checkpoint's code: whatever it raises is a fault of the input.
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"the model's chat template failed: {type(error).__name__}: {error}",
            key="chat_template",
            remedy="check the roles and their order, or give the prompt as plain text",
        ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
