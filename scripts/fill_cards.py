"""Write into the cards of the built-in drafters what is accepted of them on the built-in prompts, category by category.

    specbench run scenarios/trained-heads.yaml --out results/trained-heads
    python scripts/fill_cards.py results/trained-heads

Takes each drafter's deepest greedy chain at batch 1. A drafter whose weights are not those in the package is refused.
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "kernels")]

from specbench.distill.card import CARD, set_categories  # noqa: E402
from specbench.engine.models.sources import CONFIG_FILE, SINGLE_FILE, files_digest  # noqa: E402
from specbench.result_row import ResultRow  # noqa: E402
from specbench.store import read_rows  # noqa: E402

HEADS = Path(str(importlib.resources.files("specbench"))) / "heads"


def acceptance_by_category(prompts: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Accepted drafts over those tried, at each position that was tried, pooled over each category's prompts."""
    tried: dict[str, list[int]] = defaultdict(list)
    accepted: dict[str, list[int]] = defaultdict(list)
    for prompt in prompts:
        for sums, key in ((tried, "tried_at"), (accepted, "accepted_at")):
            mine, more = sums[prompt["category"]], prompt[key]
            mine += [0] * (len(more) - len(mine))
            for position, count in enumerate(more):
                mine[position] += count
    return {
        name: [good / all_ for good, all_ in zip(accepted[name], counts, strict=True) if all_]
        for name, counts in tried.items()
    }


def deepest(rows: Iterable[ResultRow]) -> dict[str, ResultRow]:
    """By kind of drafter, its valid greedy row of the greatest depth at batch 1."""
    found: dict[str, ResultRow] = {}
    for row in rows:
        axes = row.axes
        if row.status != "ok" or axes["batch_size"] != 1 or axes["temperature"] != 0 or row.metrics is None:
            continue
        kind = axes["drafter_kind"]
        if kind not in found or axes["depth"] > found[kind].axes["depth"]:
            found[kind] = row
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill the cards of the built-in drafters.")
    parser.add_argument("run", type=Path, help="results of scenarios/trained-heads.yaml")
    folder = parser.parse_args().run
    rows = deepest(read_rows(folder))
    for kind, row in sorted(rows.items()):
        home = HEADS / row.axes["target"] / kind
        if not (home / CARD).is_file():
            print(f"{kind}: no card at {home}", file=sys.stderr)
            return 2
        weights = files_digest([home / CONFIG_FILE, home / SINGLE_FILE])
        measured = str(row.conditions.get("drafter_weights"))
        if not measured.endswith(f"@{weights}"):
            print(f"{kind}: the run drafted with {measured}, and {home} holds {weights}: run it again", file=sys.stderr)
            return 2
        categories = acceptance_by_category(row.samples["prompts"])
        set_categories(home, categories)
        print(f"{kind}: depth {row.axes['depth']}, {len(row.samples['prompts'])} prompts, {len(categories)} categories")
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
