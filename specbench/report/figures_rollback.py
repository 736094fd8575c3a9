"""The KV rollback policies side by side: what keeping the accepted path costs under each of them.

Cells that differ in nothing but the policy stand together; a run with one policy has nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.report import rows as read
from specbench.report import style
from specbench.report.rows import DAGGER, Row
from specbench.report.style import Drawn

POLICIES = ("compact", "index", "realloc")
ROLLBACK_TITLE = "KV rollback policies: what keeping the accepted path costs in a step"
ROLLBACK_HEADER = (
    "drafter", "depth", "batch_size", "rollback", "rollback_s", "commit_s", "kv_bytes_moved", "kv_allocator_calls",
    "step_s", "output_tokens_per_s", "output_tokens_per_s_low", "output_tokens_per_s_high", "speedup", "speedup_low",
    "speedup_high",
)  # fmt: skip
_MEASURES = (
    ("rollback_s", "time (µs a step)", 1e6),
    ("kv_bytes_moved", "K and V moved (kB a step)", 1e-3),
    ("kv_allocator_calls", "pages taken and given back (a step)", 1.0),
)


@dataclass(frozen=True)
class RollbackGroup:
    """One drafter, depth and batch size, everything else alike; `cells` by policy."""

    drafter: str
    depth: int
    batch_size: int
    cells: Mapping[str, Row]


def policies(rows: Iterable[Row]) -> list[str]:
    """The policies that were run, in a fixed order."""
    found = {str(read.axis(row, "rollback")) for row in rows if read.axis(row, "rollback") is not None}
    return [name for name in POLICIES if name in found] + sorted(found - set(POLICIES))


def rollback_groups(rows: Iterable[Row]) -> list[RollbackGroup]:
    """Groups in which at least two policies were measured, drafters in their first order, then depth and batch."""
    order: dict[tuple[str, str], int] = {}
    groups: dict[tuple[int, int, int], RollbackGroup] = {}
    for row in read.latest(rows):
        policy, batch = read.axis(row, "rollback"), read.batch_size(row)
        if policy is None or batch is None or not read.is_ok(row) or read.is_control(row):
            continue
        axes = read.section(row, "axes")
        rest = {name: value for name, value in axes.items() if name not in ("rollback", "batch_size", "depth")}
        name = read.drafter(row) + (f" {DAGGER}synthetic" if read.is_synthetic(row) else "")
        place = order.setdefault((name, str(sorted(rest.items(), key=str))), len(order))
        key = (place, read.depth(row), batch)
        cells = dict(groups[key].cells) if key in groups else {}
        groups[key] = RollbackGroup(name, key[1], batch, cells | {str(policy): row})
    return [group for _, group in sorted(groups.items()) if len(group.cells) > 1]


def rollback_table(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Lines of text for the page: drafter, depth, batch, policy, time, bytes, pages, tokens/s, speedup."""
    lines: list[tuple[str, ...]] = []
    for group in rollback_groups(rows):
        for policy in policies(group.cells.values()):
            row = group.cells[policy]
            found = read.speedup(row)
            lines.append(
                (
                    group.drafter,
                    str(group.depth),
                    str(group.batch_size),
                    policy,
                    read.significant(read.metric(row, "rollback_s"), "s"),
                    read.significant(read.metric(row, "kv_bytes_moved"), "B"),
                    read.fixed(read.metric(row, "kv_allocator_calls")),
                    read.rate(read.metric(row, "output_tokens_per_s")),
                    read.DASH if found is None else read.with_interval(*found),
                )
            )
    return lines


def draw_rollback(rows: Sequence[Row]) -> Drawn:
    """Three panels (time, bytes, allocator calls a step) by batch size; one line a policy, one style a drafter."""
    groups = rollback_groups(rows)
    data = tuple(_data(group, policy) for group in groups for policy in policies(group.cells.values()))
    if not groups:
        return style.left(ROLLBACK_TITLE, "fewer than two policies were measured", ROLLBACK_HEADER, data)
    lines: dict[tuple[str, int], list[RollbackGroup]] = {}
    for group in groups:
        lines.setdefault((group.drafter, group.depth), []).append(group)
    chosen = _deepest(list(lines.items()))
    names = policies([row for group in groups for row in group.cells.values()])
    entries = [
        (style.handle(**_look(names, policy, 0)), f"{policy}: {_MEANING.get(policy, policy)}") for policy in names
    ]
    if len(chosen) > 1:
        entries += [
            (style.handle(color=style.GREY, linestyle=_DASHES[place], linewidth=1.5), f"{name} · depth {depth}")
            for place, ((name, depth), _) in enumerate(chosen)
        ]
    figure = style.new_figure(3.3 + style.legend_height(entries) + 0.4)
    panels = figure.subplots(1, len(_MEASURES), squeeze=False)[0]
    batches = sorted({group.batch_size for _, members in chosen for group in members})
    for axes, (measure, label, scale) in zip(panels, _MEASURES, strict=True):
        for place, (_, members) in enumerate(chosen):
            for policy in names:
                points = [
                    (group.batch_size, value * scale)
                    for group in members
                    if policy in group.cells and (value := read.metric(group.cells[policy], measure)) is not None
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), **_look(names, policy, place), clip_on=False, zorder=3)
        style.batch_axis(axes, batches)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size")
        axes.set_ylabel(label)
    style.legend_below(figure, entries)
    shown = style.left_out(len(chosen), len(lines), "drafters and depths")
    caption = (
        "Time is a part of the step's commit; bytes are K and V copied, all layers; pages count each one taken or given"
        f" back. Cells differ in nothing but the policy.{shown}"
    )
    return Drawn(figure, ROLLBACK_TITLE, caption, _words(groups), ROLLBACK_HEADER, data)


_MEANING = {
    "compact": "accepted K/V are copied into place",
    "index": "slot indices are permuted",
    "realloc": "pages taken and freed each step",
}
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))


def _look(names: Sequence[str], policy: str, place: int) -> dict[str, Any]:
    return style.look(names.index(policy)) | {"linestyle": _DASHES[place], "markersize": 5}


def _deepest(
    lines: Sequence[tuple[tuple[str, int], list[RollbackGroup]]],
) -> list[tuple[tuple[str, int], list[RollbackGroup]]]:
    """One entry a drafter, at its greatest depth, three at most: where rollback has the most to do."""
    best: dict[str, tuple[tuple[str, int], list[RollbackGroup]]] = {}
    for entry in lines:
        name, depth = entry[0]
        if name not in best or depth > best[name][0][1]:
            best[name] = entry
    return list(best.values())[: len(_DASHES)]


def _data(group: RollbackGroup, policy: str) -> tuple[object, ...]:
    row = group.cells[policy]
    numbers = (read.metric(row, name) for name in ROLLBACK_HEADER[4:])
    return (group.drafter, group.depth, group.batch_size, policy, *numbers)


def _words(groups: Sequence[RollbackGroup]) -> str:
    """The plot in words: the largest batch of the first drafter."""
    last = max((group for group in groups if group.drafter == groups[0].drafter), key=lambda group: group.batch_size)
    parts = []
    for policy, row in last.cells.items():
        moved = read.significant(read.metric(row, "kv_bytes_moved"), "B")
        pages = read.fixed(read.metric(row, "kv_allocator_calls"))
        time = read.significant(read.metric(row, "rollback_s"), "s")
        parts.append(f"{policy} moves {moved} and takes or gives back {pages} pages in {time}")
    return f"{last.drafter} at batch {last.batch_size}, a step: {'; '.join(parts)}."
