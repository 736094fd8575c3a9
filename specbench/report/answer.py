"""The answer that a page begins with: which drafter, at which depth, up to which batch, how sure, what would change it.

`advice.py` decides; this module puts it into a sentence and a table, and chooses the lines of the first plot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.report import rows as read
from specbench.report.advice import Advice, advise, is_lossy, pays, value_of
from specbench.report.answer_reasons import change_of, sure_of
from specbench.report.badges import badges_of, target_interval
from specbench.report.rows import Row
from specbench.report.series import Point, Series, batch_sizes, crossing_text, series_of
from specbench.report.tables import NEAR_TIE, verdict_sentences

MAX_ADVICE = 4
MAX_LINES = 6


@dataclass(frozen=True)
class AnswerCell:
    """One drafter at one batch: its best depth there and what that earns. `meaning` is gain, loss, unclear or void."""

    text: str
    depth: str
    meaning: str
    chosen: bool
    badges: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerLine:
    """One drafter: its best depth by batch, and where it stops paying off."""

    drafter: str
    cells: tuple[AnswerCell, ...]
    stops: str
    chosen: bool
    badges: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What the first screen says. `lines` holds every drafter, the most useful first; `shown` of them fit the screen.

    `place` tells device, model and prompts ("" where nothing was measured), `said` what to do there; `sure_word` is
    firm, fair, weak, predicted or none.
    """

    place: str
    said: str
    advice: tuple[str, ...]
    batches: tuple[int, ...]
    lines: tuple[AnswerLine, ...]
    shown: int
    sure_word: str
    sure: tuple[str, ...]
    change: tuple[str, ...]
    plotted: tuple[Series, ...] = ()

    @property
    def sentence(self) -> str:
        return f"{self.place}: {self.said}" if self.place else self.said


# ---- words


def answer_of(rows: Iterable[Row], manifest: Mapping[str, Any]) -> Answer:
    """The whole first screen of one run, as text."""
    cells = read.latest(rows)
    series = [one for one in series_of(cells) if not one.control]
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(_context(one), []).append(one)
    advice = {context: advise(group) for context, group in groups.items()}
    told = [part for parts in advice.values() for part in parts]
    lines = _lines(series, {id(part.best): part.batches for part in told if part.best is not None}, manifest)
    real = [one for one in series if one.measured and not one.synthetic and not is_lossy(one)]
    batches, plotted = tuple(batch_sizes(series)), _plotted(series, told)
    if not real:
        said = verdict_sentences(cells, manifest)[0]
        return Answer("", said, (), batches, lines, MAX_LINES, "none", (), (), plotted)
    word, sure = sure_of(cells, manifest, told)
    texts = [
        _advice_text(parts, groups[context], context if len(groups) > 1 else "")
        for context, parts in advice.items()
        if any(one in real for one in groups[context])
    ]
    said, listed = (texts[0], []) if len(groups) == 1 else (f"it depends on {_varied(groups)}.", texts)
    if len(listed) > MAX_ADVICE:
        listed = [*listed[:MAX_ADVICE], _rest(len(listed))]
    change, place = change_of(cells, manifest, told), _place(cells, manifest)
    return Answer(place, said, tuple(listed), batches, lines, MAX_LINES, word, sure, change, plotted)


def _varied(contexts: Iterable[str]) -> str:
    """What tells the contexts from each other: "T", "context and T"; "the conditions" where they have no name."""
    parts = [set(context.split(" · ")) for context in contexts]
    same = set.intersection(*parts)
    names = {part.rsplit(" ", 1)[0] for one in parts for part in one - same if " " in part}
    words = {"T": "temperature (T)", "output": "output length", "context": "context length"}
    return read.listed(sorted(words.get(name, name) for name in names)) if names else "the conditions"


def _rest(count: int) -> str:
    return f"{count - MAX_ADVICE} more combinations of conditions are in the table."


_CHOICES = ("adaptive", "rollback", "page_size", "verification", "variant", "lossy")


def _context(one: Series) -> str:
    """The conditions that vary, without what is the user's to choose: those compete with each other."""
    return " · ".join(part for part in one.context.split(" · ") if part and not part.startswith(_CHOICES))


def _choice(one: Series) -> str:
    """What is chosen beside drafter and depth: " (rollback index)", or nothing."""
    found = [part for part in one.context.split(" · ") if part.startswith(_CHOICES)]
    return f" ({', '.join(found)})" if found else ""


def _place(cells: Sequence[Row], manifest: Mapping[str, Any]) -> str:
    device = read.plain(manifest.get("device") or "this device", 80)
    targets = list(dict.fromkeys(read.plain(read.axis(row, "target"), 60) for row in cells))
    dtypes = list(dict.fromkeys(read.plain(read.axis(row, "dtype")) for row in cells))
    model = f"{read.listed(targets)} ({read.listed(dtypes)})" if len(targets) <= 3 else f"{len(targets)} targets"
    start = "Predicted, not measured: on" if all(read.is_predicted(row) for row in cells) else "On"
    return f"{start} {device}, with {model} and {_prompts(cells)}"


def _prompts(cells: Sequence[Row]) -> str:
    found = [read.section(row, "conditions").get("prompt_categories") for row in cells]
    names = list(dict.fromkeys(read.plain(name, 30) for one in found if isinstance(one, list) for name in one))
    if not names:
        return "these prompts"
    return f"{read.listed(names)} prompts" if len(names) <= 4 else f"prompts of {len(names)} categories"


def _advice_text(parts: Sequence[Advice], group: Sequence[Series], context: str) -> str:
    batches = batch_sizes(group)
    start = f"At {context}: " if context else ""
    gains = [part for part in parts if part.best is not None]
    if not gains:
        return f"{start}no drafter pays off clearly at any batch measured (≤{max(batches)}): decode plainly."
    last = max(part.batches[-1] for part in gains)
    texts = []
    for part in gains:
        assert part.best is not None
        name = f"{part.best.drafter} at depth {part.best.depth}{_choice(part.best)}"
        texts.append(f"{name} {_reach(part)}{_earned(part)}")
    gaps = [batch for part in parts if part.best is None for batch in part.batches if batch < last]
    reach = f"up to batch {last}" if last > min(batches) else f"at batch {last}"
    reach += ", the only one measured" if len(batches) == 1 else ""
    reach += f" (though not at batch {read.listed(gaps)})" if gaps else ""
    text = f"{start}speculation pays off clearly {reach}. Use {_joined(texts)}.{_passed_over(gains[0], group)}"
    if last == max(batches):
        return text if len(batches) == 1 else f"{text} That is the largest batch measured."
    after = [batch for batch in batches if batch > last]
    where = f"batch {after[0]}" if len(after) == 1 else f"batch {after[0]} to {after[-1]}"
    return f"{text} At {where} nothing measured is clearly faster than plain decoding."


def _passed_over(part: Advice, group: Sequence[Series]) -> str:
    """What measured more at the advice's first batch, and why it is not advised; nothing where nothing did."""
    first = part.batches[0]
    here = part.best.at(first) if part.best is not None else None
    if here is None or read.is_predicted(here.row):
        return ""
    rivals = [
        (value_of(point)[0], one, point)
        for one in group
        if not (one.control or one.synthetic or is_lossy(one)) and (point := one.at(first)) is not None and pays(point)
    ]
    mean, one, point = max(rivals, key=lambda item: item[0])
    if one is part.best or mean <= value_of(here)[0]:
        return ""
    name = f"{one.drafter} at depth {one.depth}{_choice(one)}"
    return (
        f" At batch {first} {name} measured {speedup_words(point)}, not clearly more, and does worse at larger batches."
    )


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{'; '.join(texts[:-1])}; then {texts[-1]}"


def _reach(part: Advice) -> str:
    first, last = part.batches[0], part.batches[-1]
    if first == last:
        return f"at batch {first}"
    return f"up to batch {last}" if first == 1 else f"from batch {first} to {last}"


def _earned(part: Advice) -> str:
    ends = part.ends
    if ends is None:
        return ""
    first, last = ends
    if first is last:
        return f" ({speedup_words(first)})"
    return f" ({speedup_words(first)} at batch {first.batch_size}, {speedup_words(last)} at batch {last.batch_size})"


def speedup_words(point: Point) -> str:
    """ "1.42× [1.37 to 1.47]"; a predicted one has no interval and says "1.42×"."""
    if point.speedup is None:
        return "no speedup"
    mean, low, high = point.speedup
    return f"{mean:.2f}×" if low is None or high is None else f"{mean:.2f}× [{low:.2f} to {high:.2f}]"


# ---- the table


def _lines(
    series: Sequence[Series], chosen: Mapping[int, tuple[int, ...]], manifest: Mapping[str, Any]
) -> tuple[AnswerLine, ...]:
    batches, target = batch_sizes(series), target_interval(manifest)
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.drafter_label, []).append(one)
    ranked = []
    for label, group in groups.items():
        cells = tuple(_cell(group, batch, chosen, target) for batch in batches)
        best = furthest(group)
        badges = dict.fromkeys(name for cell in cells for name in cell.badges)
        line = AnswerLine(label, cells, crossing_text(best), any(cell.chosen for cell in cells), tuple(badges))
        reach = max((p.batch_size for one in group for p in one.points if pays(p)), default=0)
        peak = max((value_of(p)[0] for one in group for p in one.measured), default=0.0)
        ranked.append(((not line.chosen, best.synthetic, -reach, -peak), line))
    return tuple(line for _, line in sorted(ranked, key=lambda item: item[0]))


def furthest(group: Sequence[Series]) -> Series:
    """The depth of a drafter that pays off up to the largest batch; among equals the one with the highest speedup."""
    return max(
        group,
        key=lambda one: (
            max((p.batch_size for p in one.points if pays(p)), default=0),
            max((value_of(p)[0] for p in one.measured), default=0.0),
        ),
    )


def _cell(group: Sequence[Series], batch: int, chosen: Mapping[int, tuple[int, ...]], target: float) -> AnswerCell:
    here = [(one, point) for one in group if (point := one.at(batch)) is not None]
    advised = next(((one, point) for one, point in here if batch in chosen.get(id(one), ())), None)
    fast = [(one, point) for one, point in here if point.speedup is not None]
    if not fast:
        states = list(dict.fromkeys(point.status if not point.ok else read.DASH for _, point in here))
        return AnswerCell("/".join(states), "", "void", False, tuple(s for s in states if s != read.DASH))
    one, point = advised or max(fast, key=lambda item: (pays(item[1]), value_of(item[1])[0]))
    mean, low, high = point.speedup or (0.0, None, None)
    unclear = not read.is_predicted(point.row) and (low is None or high is None or low <= 1.0 <= high)
    meaning = "unclear" if unclear else "gain" if mean > 1.0 else "loss"
    badges = badges_of(point.row, target)
    text = f"{mean:.2f}×" + (f" {NEAR_TIE}" if "near tie" in badges else "")
    return AnswerCell(text, str(one.depth), meaning, advised is not None, badges)


def _plotted(series: Sequence[Series], told: Sequence[Advice]) -> tuple[Series, ...]:
    """The lines of the first plot: what is advised, then each further drafter at the depth that reaches furthest."""
    found: dict[str, list[Series]] = {}
    for part in told:
        if part.best is not None and part.best not in found.setdefault(part.best.drafter_label, []):
            found[part.best.drafter_label].append(part.best)
    groups: dict[str, list[Series]] = {}
    for one in series:
        if one.measured:
            groups.setdefault(one.drafter_label, []).append(one)
    rest = [furthest(group) for label, group in groups.items() if not found.get(label)]
    rest.sort(key=lambda one: (one.synthetic, -max(value_of(p)[0] for p in one.measured)))
    return tuple([one for group in found.values() for one in group] + rest)
