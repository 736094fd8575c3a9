"""First words of users' prompts, by which the target is led to write prompts of more kinds than it would by itself.

None is a prompt, and no prompt of the benchmark's own set begins with one; what follows each, the target writes.
"""

from __future__ import annotations

from typing import Literal

Openers = Literal["none", "kinds"]

# An empty opener leaves the whole prompt to the target.
_KINDS = (
    *("", "", ""),
    *("Tell me a story about", "Write an email to", "Write a product description for", "Describe"),
    *("Summarize the following text:\n\n", "Give the main points of this article:\n\n", "Shorten this:\n\n"),
    *("Answer the question from the text.\n\nText:", "Here is a passage:\n\n", "According to the text below,"),
    *("What is this in French:", "Translate the following sentence into Spanish:", "How do you say in German:"),
    *("Solve this problem step by step.", "Calculate", "A farmer has", "If"),
    *("Write a Python function that", "What does this code do?\n\n```python\n", "Fix the bug:\n\n```python\n"),
    *("Correct the grammar of this text:\n\n",),
    *("Rewrite this paragraph in simpler words:\n\n", "Make this more formal:\n\n"),
    *("List all names and dates in this text:\n\n", "Extract the facts as JSON:\n\n", "Turn this into a table:\n\n"),
    *("Hi, I", "I need advice.", "Explain why", "What is the difference between", "How can I"),
)


def openers_of(name: Openers) -> tuple[str, ...]:
    """The openers that prompts take in turn."""
    return ("",) if name == "none" else _KINDS
