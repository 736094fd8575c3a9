"""Text with a copy rate that is set, to see how acceptance by prompt lookup depends on repetition.

A text is a row of sentences, and each sentence a clause and a tail made from real English words. With probability
`copy_rate` a phrase repeats an earlier phrase of its kind from the same text, word for word; otherwise it is new. The
draws that decide are the same at every copy rate, so raising the rate only turns new phrases into copies.

The rate is a property of the prompt. What is accepted depends on how far the target goes on copying, and is measured.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from specbench.errors import InputError
from specbench.scenario.prompts import SYNTHETIC, Prompt

INSTRUCTION = "Continue the text below in the same style."
MIN_WORDS = 16


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


_PEOPLE = _words(
    "baker carpenter captain child cook doctor driver farmer fisherman florist gardener grocer guard guide hunter "
    "innkeeper jeweller judge keeper lawyer librarian mason mechanic merchant miller musician nurse painter pilot "
    "plumber poet porter postman potter priest printer sailor scholar shepherd singer smith soldier stranger student "
    "tailor teacher trader traveller visitor waiter weaver widow writer"
)
_QUALITIES = _words(
    "ancient angry anxious blind bold brave bright broken calm careful cheap cheerful clever clumsy cold crooked "
    "curious damp dark dusty eager early empty famous fearless foreign forgotten fragile generous gentle grey heavy "
    "honest humble hungry idle jealous lonely loyal lucky modest narrow nervous noisy patient pleasant polite proud "
    "quiet rusty sleepy small solemn stubborn sturdy tall thirsty tired weary wise young"
)
_ACTIONS = _words(
    "admired avoided borrowed bought broke brought built buried carried caught chose cleaned collected counted covered "
    "delivered described discovered dropped examined fetched finished followed found gathered guarded hid ignored "
    "inspected kept lifted lost measured mended missed moved noticed offered opened packed painted praised protected "
    "pushed recognised refused removed repaired returned sold searched sketched stole studied threw touched traded "
    "washed watched weighed wrapped"
)
_THINGS = _words(
    "anchor apron arrow basket bell blanket boat book bottle bowl box bridle broom bucket button candle carpet chair "
    "chest clock cloak coat coin compass crate cup curtain diary door drum feather fence flag flute gate glove hammer "
    "harp hat kettle key knife ladder lamp lantern letter lock map mirror necklace needle net oar oven paddle parcel "
    "pillow plough pot ring rope saddle sail sandal shield shovel spoon statue stove sword table telescope tent "
    "trumpet umbrella vase violin wagon wheel whistle window"
)
_PLACES = _words(
    "abbey barn bay bridge canal castle cave cellar chapel church cliff cottage courtyard dock farm field forest "
    "fountain garden harbour hill inn island kitchen lake library lighthouse market meadow mill mountain orchard "
    "palace park path pier prison quarry river road school shore square stable station street tavern temple theatre "
    "tower tunnel valley village wall well workshop"
)
_RELATIONS = _words("across against along behind below beneath beside beyond inside near opposite outside past under")
_TIMES = _words(
    "all morning|at dawn|at midnight|at noon|before breakfast|by mistake|during the storm|every winter|for a week|"
    "in silence|in the fog|in the rain|last autumn|on Sunday|once again|one evening|that summer|without a word",
    separator="|",
)


@dataclass(frozen=True)
class SyntheticSpec:
    """`count` prompts with a text of `words` words each; `copy_rate` in [0, 1] is the share of phrases copied."""

    count: int = 64
    words: int = 120
    copy_rate: float = 0.5
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "synthetic" or "synthetic:copy_rate=0.8,words=120,count=64,seed=0" (any part may be left out)."""
        kinds = {"count": int, "words": int, "copy_rate": float, "seed": int}
        values: dict[str, int | float] = {}
        _, _, options = text.partition(":")
        for option in options.split(",") if options else []:
            key, equals, value = (part.strip() for part in option.partition("="))
            if key not in kinds or not equals or key in values:
                raise InputError(
                    f"{option.strip()!r} in {text!r} can't be read",
                    key="prompts",
                    remedy=f"write synthetic:KEY=VALUE,... with each of {', '.join(kinds)} at most once",
                )
            try:
                values[key] = kinds[key](value)
            except ValueError:
                raise InputError(
                    f"{value!r} isn't a number", key=key, remedy=f"give a number of type {kinds[key].__name__}"
                ) from None
        return cls(**values)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The short name that stands in a row."""
        return f"{SYNTHETIC}(copy {self.copy_rate:g}, {self.words} words)"

    def prompts(self) -> list[Prompt]:
        """The prompts themselves; see `synthetic_prompts`."""
        return synthetic_prompts(self.count, self.words, self.copy_rate, self.seed)


def synthetic_prompts(count: int, words: int, copy_rate: float, seed: int) -> list[Prompt]:
    """`count` prompts of category "synthetic": an instruction, a blank line, and a text of exactly `words` words.

    Raises InputError for a count below 1, fewer than MIN_WORDS words, or a copy rate outside [0, 1].
    """
    if count < 1:
        raise InputError(f"must be at least 1, not {count}", key="count", remedy="ask for one prompt or more")
    if words < MIN_WORDS:
        raise InputError(f"must be at least {MIN_WORDS}, not {words}", key="words", remedy="ask for a longer text")
    if not 0.0 <= copy_rate <= 1.0:
        raise InputError(f"must lie in [0, 1], not {copy_rate}", key="copy_rate", remedy="0 copies nothing, 1 all")
    return [
        Prompt(f"{SYNTHETIC}-{index}", SYNTHETIC, (f"{INSTRUCTION}\n\n{_text(words, copy_rate, seed, index)}",))
        for index in range(count)
    ]


def _text(words: int, copy_rate: float, seed: int, index: int) -> str:
    """Sentences, cut at `words` words; the cut may fall inside a sentence, which is what asks to be continued."""
    decide, source, fresh = (random.Random(f"{seed}:{index}:{name}") for name in ("decide", "source", "fresh"))
    clauses: list[str] = []
    tails: list[str] = []
    text: list[str] = []
    while len(text) < words:
        for kind, new in ((clauses, _clause(fresh)), (tails, _tail(fresh))):
            # Every stream advances by the same number of draws whether or not the phrase is a copy.
            copies, earlier = decide.random() < copy_rate, source.random()
            kind.append(kind[int(earlier * len(kind))] if kind and copies else new)
        text.extend(f"{clauses[-1]} {tails[-1]}.".split())
    return " ".join(text[:words])


def _clause(rng: random.Random) -> str:
    return (
        f"The {_pick(rng, _QUALITIES)} {_pick(rng, _PEOPLE)} {_pick(rng, _ACTIONS)} "
        f"the {_pick(rng, _QUALITIES)} {_pick(rng, _THINGS)}"
    )


def _tail(rng: random.Random) -> str:
    return f"{_pick(rng, _RELATIONS)} the {_pick(rng, _QUALITIES)} {_pick(rng, _PLACES)} {_pick(rng, _TIMES)}"


def _pick(rng: random.Random, items: tuple[str, ...]) -> str:
    return items[int(rng.random() * len(items))]
