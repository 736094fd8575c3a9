"""Suffix decoding: the tree against a recount of its texts, drafts against the published rule restated by scanning,
what a prompt may see of earlier responses, and greedy and sampled output through the whole engine."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from chosen_law import chosen_coin_paths
from coin_law import ForcedCoins, TinyLaw, Tokens
from engine_tools import by_id, decode, make_decoder, make_request, outputs
from engine_world import World, build_world
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engine import decode as decode_module
from specbench.engine.drafters.base import Drafter
from specbench.engine.drafters.lookup import NgramDrafter
from specbench.engine.drafters.ngram import NgramLookup
from specbench.engine.drafters.suffix import PastResponses, SuffixDrafter
from specbench.engine.drafters.suffix_tree import Place, SuffixTree
from specbench.engine.request import ActiveRequest
from specbench.engine.sampling import SamplingParams
from specbench.engine.tree import TokenTree
from specbench.errors import InputError

Texts = Sequence[Sequence[int]]
TEXT = st.lists(st.integers(0, 2), max_size=20)

# The tree ------------------------------------------------------------------------------------------------------------


def counted(texts: Texts, run: Sequence[int]) -> int:
    """Occurrences of `run` in `texts`."""
    run = tuple(run)
    return sum(tuple(text[i : i + len(run)]) == run for text in texts for i in range(len(text) - len(run) + 1))


def recount(texts: Texts, max_depth: int) -> dict[tuple[int, ...], int]:
    """Occurrences of every run of 1 to max_depth tokens."""
    runs: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for start, size in itertools.product(range(len(text)), range(1, max_depth + 1)):
            if start + size <= len(text):
                runs[tuple(text[start : start + size])] += 1
    return dict(runs)


def contents(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """What the tree says of every run in it, and that all its ways of asking agree."""
    runs: dict[tuple[int, ...], int] = {}

    def walk(run: tuple[int, ...], place: Place) -> None:
        children = place.children()
        assert place.likeliest() == min(children, key=lambda item: (-item[1].occurrences, item[0]), default=None)
        for token, child in children:
            longer = (*run, token)
            assert longer not in runs
            runs[longer] = child.occurrences
            assert place.after(token) == child == tree.find(longer)
            walk(longer, child)

    root = tree.find(())
    assert root is not None
    walk((), root)
    return runs


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(TEXT, max_size=4), max_depth=st.integers(2, 7))
def test_a_growing_text_is_counted_token_by_token(pieces: list[list[int]], max_depth: int) -> None:
    tree = SuffixTree(max_depth)
    text: list[int] = []
    for piece in pieces:
        tree.extend(np.array(piece, dtype=np.int64))
        text += piece
        assert tree.text == text
        expected = recount([text], max_depth)
        assert contents(tree) == expected
        assert tree.num_nodes <= len(expected) <= len(text) * max_depth
        # Every suffix that something may follow; one without a node of its own occurs once, so nothing follows it.
        places = tree.suffixes()
        for size, place in enumerate(places, start=1):
            assert place == tree.find(text[-size:])
        rest = range(len(places) + 1, min(max_depth, len(text) + 1))
        assert all(counted([text], text[-size:]) == 1 for size in rest)
        assert [place.occurrences for place in tree.suffixes_of(text)] == [
            expected[tuple(text[-size:])] for size in range(1, min(max_depth, len(text) + 1))
        ]
    assert tree.find([3]) is None
    assert tree.suffixes_of([*text, 3]) == []


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=6),
    max_depth=st.integers(2, 6),
    kept=st.integers(0, 4),
    more=TEXT,
)
def test_forgotten_texts_leave_exactly_the_counts_of_the_rest(
    texts: list[list[int]], max_depth: int, kept: int, more: list[int]
) -> None:
    """Oldest first, the counts asked in between (so that nothing stale is cached), the newest text growing on."""
    tree = SuffixTree(max_depth)
    known: list[tuple[list[int], list[int]]] = []
    for text in texts:
        known.append((tree.add(text), list(text)))
        assert contents(tree) == recount([text for _, text in known], max_depth)
        while len(known) > kept:
            tree.remove(known.pop(0)[0])
            assert contents(tree) == recount([text for _, text in known], max_depth)
    tree.extend(more)
    rest = [text for _, text in known]
    assert contents(tree) == recount([*rest[:-1], rest[-1] + more] if rest else [more], max_depth)
    for handle, _ in known[:-1]:
        tree.remove(handle)
    tree.remove(tree.text)
    assert (contents(tree), tree.num_nodes, tree.text) == ({}, 0, [])


def test_nodes_are_spent_on_what_re_occurs() -> None:
    """A text without repetition costs a node a token at most; a loop of period p costs about p * max_depth."""
    tree = SuffixTree(24)
    tree.extend(range(1000))
    assert tree.num_nodes == 1000
    loop = SuffixTree(24)
    loop.extend(list(range(10)) * 100)
    assert loop.num_nodes <= 10 * 24


def test_a_tree_of_single_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="depth 1 knows no continuation") as caught:
        SuffixTree(1)
    assert caught.value.key == "max_tree_depth"


# The drafts, restated by scanning ------------------------------------------------------------------------------------


class Rule:
    """§5.4 of the published rule, by counting runs in the texts for every question. Nothing is shared with the tree."""

    def __init__(self, *, depth: int = 24, factor: float = 1, offset: float = 0, low: float = 0.1) -> None:
        self.depth, self.factor, self.offset, self.low = depth, factor, offset, low

    def following(self, texts: Texts, run: Sequence[int]) -> list[tuple[int, int]]:
        """(count, token) of every continuation, the best first."""
        if len(run) >= self.depth:
            return []
        tokens = {token for text in texts for token in text}
        counts = [(counted(texts, [*run, token]), token) for token in tokens]
        return sorted(((count, token) for count, token in counts if count), key=lambda one: (-one[0], one[1]))

    def chain(self, texts: Texts, match: Sequence[int], most: int) -> tuple[float, list[int], list[int]]:
        draft: list[int] = []
        score, prob = 0.0, 1.0
        while len(draft) < most:
            run = [*match, *draft]
            following = self.following(texts, run)
            if not following:
                break
            prob *= following[0][0] / counted(texts, run)
            if prob < self.low:
                break
            draft.append(following[0][1])
            score += prob
        return score, draft, list(range(-1, len(draft) - 1))

    def tree(self, texts: Texts, match: Sequence[int], most: int, levels: int) -> tuple[float, list[int], list[int]]:
        paths: list[tuple[int, ...]] = []
        probs = {(): 1.0}
        score = 0.0
        while len(paths) < most:
            offers = []
            for place, path in enumerate([(), *paths]):
                if len(path) < levels:
                    whole = counted(texts, [*match, *path])
                    for count, token in self.following(texts, [*match, *path]):
                        prob = probs[path] * (count / whole)
                        if prob >= self.low and (*path, token) not in probs:
                            offers.append((-prob, len(path), place, token, path))
            if not offers:
                break
            negative, _, _, token, path = min(offers)
            paths.append((*path, token))
            probs[paths[-1]] = -negative
            score -= negative
        order = {path: node for node, path in enumerate(paths)} | {(): -1}
        return score, [path[-1] for path in paths], [order[path[:-1]] for path in paths]

    def best(
        self, texts: Texts, text: Sequence[int], limit: int, nodes: int | None
    ) -> tuple[float, list[int], list[int]]:
        best: tuple[float, list[int], list[int]] = (0.0, [], [])
        for m in range(1, min(self.depth, len(text) + 1)):
            match = text[len(text) - m :]
            if not counted(texts, match):
                break
            most = min(limit if nodes is None else nodes, int(m * self.factor + self.offset + 1e-6))
            found = (
                self.chain(texts, match, most)
                if nodes is None
                else self.tree(texts, match, most if limit else 0, limit)
            )
            if found[0] >= best[0]:
                best = found
        return best

    def draft(
        self, own: Sequence[int], past: Texts, limit: int, nodes: int | None = None
    ) -> tuple[list[int], list[int]]:
        local = self.best([own], own, limit, nodes)
        best = self.best(past, own, limit, nodes)
        return best[1:] if best[0] > local[0] else local[1:]


def started(prompt: Sequence[int], tokens: Sequence[int], slot: int = 0, name: str = "r") -> ActiveRequest:
    active = ActiveRequest(make_request(prompt, name), slot, generator=None, stop_state=None)  # type: ignore[arg-type]
    active.tokens = list(tokens)
    return active


def answered(drafter: SuffixDrafter, prompt: Sequence[int], tokens: Sequence[int], reason: str = "stop") -> None:
    """A request that comes, answers and goes."""
    active = started(prompt, tokens[:1], slot=9)
    drafter.start(active)
    active.tokens += tokens[1:]
    drafter.commit(active, 0, 0, ())
    active.finish_reason = reason
    drafter.finish(active)


def drafted(drafter: SuffixDrafter, active: ActiveRequest, depth: int) -> tuple[list[int], list[int]]:
    proposal = drafter.propose([active], [depth])[0]
    assert (proposal.q, proposal.siblings) == (None, "chosen")
    tree = proposal.tree
    assert len(tree) <= drafter.num_nodes(depth)
    assert tree.depth <= depth
    assert not tree.has_equal_siblings
    return tree.tokens.tolist(), tree.parents.tolist()


OPTIONS = st.fixed_dictionaries(
    {
        "depth": st.integers(2, 7),
        "factor": st.sampled_from([0.0, 0.34, 1.0, 1.5, 3.0]),
        "offset": st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
        "low": st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    }
)
WORD = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    options=OPTIONS,
    nodes=st.one_of(st.none(), st.integers(1, 12)),
    limit=st.integers(0, 6),
    prompt=WORD,
    pieces=st.lists(WORD, min_size=1, max_size=3),
    past=st.lists(WORD, max_size=4),
    capacity=st.integers(0, 3),
)
def test_a_draft_is_the_published_rules(
    options: dict[str, Any],
    nodes: int | None,
    limit: int,
    prompt: list[int],
    pieces: list[list[int]],
    past: list[list[int]],
    capacity: int,
) -> None:
    """Step by step, over what is left of the past responses."""
    limit = min(limit, nodes or limit)
    drafter = SuffixDrafter(
        *(options["depth"], options["factor"], options["offset"], options["low"], capacity), nodes=nodes
    )
    for number, response in enumerate(past):
        answered(drafter, [number, 7], response)
    active = started(prompt, pieces[0])
    drafter.start(active)
    seen = past[len(past) - min(capacity, len(past)) :]
    rule = Rule(**options)
    for piece in [*pieces[1:], []]:
        text = [*prompt, *active.tokens]
        assert drafted(drafter, active, limit) == rule.draft(text, seen, limit, nodes)
        active.tokens += piece
        drafter.commit(active, 0, 0, ())


def chain(drafter: SuffixDrafter, prompt: Sequence[int], tokens: Sequence[int], depth: int = 8) -> list[int]:
    active = started(prompt, tokens)
    drafter.start(active)
    found, parents = drafted(drafter, active, depth)
    assert parents == list(range(-1, len(found) - 1))
    return found


def test_by_hand() -> None:
    """Longer matches draft more; the likeliest child is followed until its probability is too low."""
    assert chain(SuffixDrafter(), [1, 2, 3, 4, 5, 1, 2], [3]) == [4, 5, 1]
    assert chain(SuffixDrafter(), [1, 2, 3, 4, 5, 1, 2], [3], depth=2) == [4, 5]
    # After 1, 2 the counts are 3: twice, 4: once, and the suffix itself ends there: 2/4, then 2/4 again.
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1]
    assert chain(SuffixDrafter(), text, [2]) == [3, 1]
    assert chain(SuffixDrafter(min_token_prob=0.3), text, [2]) == [3]
    assert chain(SuffixDrafter(min_token_prob=0.6), text, [2]) == []
    # A match of 2 tokens and a factor of 1/2 leave one draft; an offset adds to it.
    assert chain(SuffixDrafter(max_spec_factor=0.5), [1, 2, 3, 4, 1], [2]) == [3]
    assert chain(SuffixDrafter(max_spec_factor=0.5, max_spec_offset=1), [1, 2, 3, 4, 1], [2]) == [3, 4]
    assert chain(SuffixDrafter(), [1], [2]) == []


def test_past_responses_win_only_when_strictly_better() -> None:
    drafter = SuffixDrafter()
    own = [5, 6, 7, 5]
    assert chain(drafter, own, [6]) == [7, 5]
    # One response: 6 follows 5 once and 8 follows that: both probabilities are 1, and 1/2 each in the text itself.
    answered(drafter, [0], [5, 6, 8, 8])
    assert chain(drafter, own, [6]) == [8, 8]
    # A second one that splits the same way as the text: equal scores, so the text's own draft stays.
    answered(drafter, [1], [5, 6])
    assert chain(drafter, own, [6]) == [7, 5]


def test_ties_go_to_the_lowest_token_and_the_longer_match() -> None:
    drafter = SuffixDrafter(max_spec_factor=0, max_spec_offset=1, min_token_prob=0)
    assert chain(drafter, [1, 9, 1, 4, 1, 6], [1]) == [4]
    # 2 is followed by 3 and, after 1, by 4: each match has a probability of 1/2, and that of two tokens is the longer.
    assert chain(drafter, [2, 3, 2, 3, 1, 2, 4, 1], [2]) == [4]


# Trees ---------------------------------------------------------------------------------------------------------------


def test_a_tree_takes_the_most_probable_node_next() -> None:
    # 1 occurs four times: 2 follows twice (then 8 once and 9 once), 3 once (then 1), and once the text ends there.
    text = [1, 2, 8, 1, 2, 9, 1, 3]
    active = started(text, [1])
    for nodes, tokens, parents in (
        (1, [2], [-1]),
        (4, [2, 3, 8, 9], [-1, -1, 0, 0]),
        (6, [2, 3, 8, 9, 1, 1], [-1, -1, 0, 0, 1, 2]),
    ):
        drafter = SuffixDrafter(max_spec_offset=10, min_token_prob=0, nodes=nodes)
        drafter.start(active)
        assert drafted(drafter, active, 4) == (tokens, parents)
    drafter = SuffixDrafter(max_spec_offset=10, min_token_prob=0, nodes=4)
    drafter.start(active)
    assert drafted(drafter, active, 1) == ([2, 3], [-1, -1])
    assert drafted(drafter, active, 0) == ([], [])
    assert [drafter.num_nodes(depth) for depth in range(4)] == [0, 4, 4, 4]


# What a prompt may see -----------------------------------------------------------------------------------------------

ANSWER = [3, 1, 4, 1, 5, 9, 2, 6]


def replayed(drafter: SuffixDrafter, prompt: Sequence[int], answer: Sequence[int]) -> list[list[int]]:
    """All drafts while `answer` is given to `prompt`; the request is then cut, so that nothing is learnt."""
    active = started(prompt, answer[:1])
    drafter.start(active)
    found = []
    for token in answer[1:]:
        found.append(drafted(drafter, active, 8)[0])
        active.tokens.append(token)
        drafter.commit(active, 0, 0, ())
    active.finish_reason = "cut"
    drafter.finish(active)
    return found


def test_a_prompt_never_profits_from_its_own_earlier_response() -> None:
    """Under "all" it does, and so does another prompt with the same answer."""
    prompt, cold = (7, 8, 7), replayed(SuffixDrafter(), [7, 8, 7], ANSWER)
    drafter, published = SuffixDrafter(), SuffixDrafter(responses="all")
    for _ in range(3):
        answered(drafter, prompt, ANSWER)
        answered(published, prompt, ANSWER)
        assert replayed(drafter, prompt, ANSWER) == cold
    warm = replayed(published, prompt, ANSWER)
    assert sum(map(len, warm)) > sum(map(len, cold)) + 5
    assert warm[-1] == ANSWER[-1:]
    other = replayed(drafter, (7, 8), ANSWER)
    assert sum(map(len, other)) == sum(map(len, warm))


@settings(max_examples=100, deadline=None)
@given(
    history=st.lists(st.tuples(st.integers(0, 2), WORD), max_size=7),
    text=WORD,
    capacity=st.integers(1, 4),
    nodes=st.sampled_from([None, 6]),
)
def test_the_past_is_that_of_other_prompts_each_once(
    history: list[tuple[int, list[int]]], text: list[int], capacity: int, nodes: int | None
) -> None:
    """The newest response of each prompt, the oldest of them evicted; the asking prompt's own left out."""
    drafter = SuffixDrafter(5, 1.0, 1.0, 0.0, capacity, nodes=nodes)
    kept: dict[int, list[int]] = {}
    for prompt, response in history:
        answered(drafter, [prompt], response)
        kept.pop(prompt, None)
        kept[prompt] = response
        kept = dict(list(kept.items())[-capacity:])
    rule = Rule(depth=5, offset=1, low=0)
    for prompt in range(3):
        active = started([prompt], text)
        drafter.start(active)
        others = [response for other, response in kept.items() if other != prompt]
        assert drafted(drafter, active, 4) == rule.draft([prompt, *text], others, 4, nodes)


def test_evictions_are_first_in_first_out_and_exact() -> None:
    stream = np.random.default_rng(4)
    for responses in ("all", "others"):
        past = PastResponses(5, 3, responses)  # type: ignore[arg-type]
        kept: list[list[int]] = []
        for number in range(40):
            response = stream.integers(0, 4, stream.integers(1, 30)).tolist()
            past.add((number,), response)
            kept = [*kept, response][-3:]
            assert len(past) == len(kept)
            assert contents(past.tree) == recount(kept, 5)
        assert past.tree.num_nodes <= 5 * sum(map(len, kept))


@pytest.mark.parametrize(("reason", "kept"), [("stop", 1), ("length", 1), ("context", 1), ("cut", 0), ("failed", 0)])
def test_only_whole_responses_are_kept(reason: str, kept: int) -> None:
    drafter = SuffixDrafter()
    answered(drafter, [1], ANSWER, reason)
    assert len(drafter._past) == kept


def test_without_a_cache_only_the_request_itself_is_asked() -> None:
    drafter = SuffixDrafter(max_cached_requests=0, responses="all")
    cold = replayed(drafter, [7], ANSWER)
    answered(drafter, [8], ANSWER)
    assert len(drafter._past) == 0
    assert replayed(drafter, [7], ANSWER) == cold


def test_requests_share_nothing_but_the_past() -> None:
    """Fault 44: the same drafts alone and side by side, in every order, with mixed depths."""
    texts = {0: [1, 2, 3, 1, 2], 1: [4, 4, 4], 2: [1, 2, 9, 9, 1, 2], 3: [6]}
    depths = {0: 0, 1: 4, 2: 1, 3: 3}

    def proposals(slots: Sequence[int]) -> dict[int, list[int]]:
        drafter = SuffixDrafter()
        active = [started(texts[slot], [2], slot, f"{slot}") for slot in slots]
        for one in active:
            drafter.start(one)
        found = drafter.propose(active, [depths[slot] for slot in slots])
        return {slot: proposal.tree.tokens.tolist() for slot, proposal in zip(slots, found, strict=True)}

    alone = {slot: proposals([slot])[slot] for slot in texts}
    assert alone[2] != []
    assert alone[0] == []
    for order in itertools.permutations(texts):
        assert proposals(order) == alone


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_tree_depth": 1}, "max_tree_depth"),
        ({"max_spec_factor": -0.1}, "max_spec_factor"),
        ({"min_token_prob": -0.1}, "min_token_prob"),
        ({"min_token_prob": float("nan")}, "min_token_prob"),
        ({"max_cached_requests": -1}, "max_cached_requests"),
        ({"nodes": 0}, "nodes"),
        ({"responses": "mine"}, "responses"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        SuffixDrafter(**options)
    assert caught.value.key == key
    assert caught.value.remedy


# Costs ---------------------------------------------------------------------------------------------------------------


def test_a_step_costs_the_same_however_long_the_text() -> None:
    """Every node that is touched is counted, in a text that loops and in one that doesn't repeat."""

    class Counting(dict):
        touched = 0

        def get(self, *arguments: object) -> Any:
            Counting.touched += 1
            return super().get(*arguments)

    stream = np.random.default_rng(0)
    for text in (list(range(7)) * 600, stream.integers(0, 50, 4200).tolist()):
        costs = []
        tree = SuffixTree(8)
        for token in text:
            before = Counting.touched
            tree.extend([token])
            for node in tree._open:
                if node.children is not None and type(node.children) is dict:
                    node.children = Counting(node.children)
            costs.append(Counting.touched - before)
        assert 0 < max(costs) <= 8
        assert tree.num_nodes <= 8 * len(text)


def test_drafting_leaves_nothing_behind_but_the_trees_nodes() -> None:
    """2000 tokens of a loop: once the loop's runs are known, memory grows by the text's own tokens only."""
    drafter = SuffixDrafter()
    active = started([1, 2, 3], [4])
    drafter.start(active)
    loop = itertools.cycle(range(12))

    def run(steps: int) -> int:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for token in itertools.islice(loop, steps):
            active.tokens.append(token)
            drafter.propose([active], [8])
            drafter.commit(active, 0, 0, ())
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        run(400)
        nodes = drafter._texts[0].num_nodes
        # Two lists of tokens (the request's and the tree's), over-allocated by an eighth, and counts above 256.
        assert run(1600) < 2 * 1600 * 8 * 2 + 64 * nodes
        assert drafter._texts[0].num_nodes == nodes
    finally:
        tracemalloc.stop()


# Through the engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("cpu")


KINDS: dict[str, Callable[[], SuffixDrafter]] = {
    "chain": SuffixDrafter,
    "eager": lambda: SuffixDrafter(max_spec_factor=2, max_spec_offset=1, min_token_prob=0),
    "tree": lambda: SuffixDrafter(max_spec_factor=3, min_token_prob=0, nodes=9),
    "published cache": lambda: SuffixDrafter(responses="all", max_cached_requests=2),
}


@pytest.mark.parametrize("name", KINDS)
def test_greedy_output_is_autoregression(world: World, name: str) -> None:
    """Alone and in ragged batches of two orders; the second block has seen the first."""
    drafter = KINDS[name]()
    shares = []
    target = make_decoder(world.spec, world.weights, max_rows=96, max_context=144)
    for batch_size, order, depth in ((1, 1, 4), (3, 1, 5), (4, -1, 8), (2, 1, 1)):
        trace = decode(target, world.requests[::order], drafter, batch_size=batch_size, depth=depth)
        assert outputs(trace) == world.truth
        assert trace.draft_depth.max() <= depth
        assert trace.num_draft.max() <= drafter.num_nodes(depth)
        shares.append(int(trace.num_accepted.sum()))
        assert drafter._texts == {}
    assert min(shares) > 0
    if name == "tree":
        assert trace.num_draft.max() > trace.draft_depth.max()


def test_the_published_cache_replays_and_the_default_does_not(world: World) -> None:
    """Block after block of the same prompts: the default's acceptance does not move, once every prompt was asked."""
    counts: dict[str, list[int]] = {}
    for responses in ("others", "all"):
        drafter = SuffixDrafter(responses=responses)  # type: ignore[arg-type]
        counts[responses] = [
            int(decode(world.target, world.requests, drafter, depth=4).num_accepted.sum()) for _ in range(4)
        ]
    assert counts["others"][1:] == [counts["others"][1]] * 3
    assert counts["all"][1] > counts["others"][1] + 30


def token_bytes(token: int) -> bytes:
    return f"<{token}>".encode()


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_an_output_ends_where_autoregression_ends_it(world: World, name: str) -> None:
    """Faults 22 and 24, with a drafter that knows the whole answer: EOS inside a path, caps, stop strings, context."""
    one, truth = world.requests[2], world.truth["r2"]
    drafter = SuffixDrafter(responses="all", max_spec_factor=3, nodes=9 if name == "tree" else None)
    decode(world.target, [one], drafter, depth=4)
    cases: list[tuple[dict[str, Any], tuple[int, ...], str]] = []
    for place in range(12):
        first = truth.index(truth[place])
        cases.append(({"eos_ids": (truth[place],)}, truth[: first + 1], "stop"))
    for place in range(1, 8):
        text = b"".join(map(token_bytes, truth))
        needle = token_bytes(truth[place - 1])[1:] + token_bytes(truth[place])[:2]
        ends = [i for i in range(len(truth)) if needle in text[: len(b"".join(map(token_bytes, truth[: i + 1])))]]
        cases.append(({"stop_strings": (needle.decode(),)}, truth[: ends[0] + 1], "stop"))
    for length in range(1, 12):
        cases.append(({"max_tokens": length}, truth[:length], "length"))
        cases.append(({"max_context": len(one.prompt_ids) + length}, truth[:length], "context"))
    requests = [
        make_request(one.prompt_ids, f"{index}", **({"max_tokens": len(truth)} | stops))
        for index, (stops, _, _) in enumerate(cases)
    ]
    trace = decode(world.target, requests, drafter, batch_size=4, depth=5, token_bytes=token_bytes)
    assert trace.num_accepted.max() >= 3
    for index, (stops, expected, reason) in enumerate(cases):
        found = by_id(trace)[f"{index}"]
        assert (found.token_ids, found.finish_reason) == (expected, reason), stops


@pytest.mark.parametrize("params", [SamplingParams(1.0, seed=0), SamplingParams(1.4, top_k=3, top_p=0.95, seed=0)])
@pytest.mark.parametrize("name", ["suffix chain", "suffix tree", "ngram tree"])
def test_sampled_output_has_the_targets_law_exactly(
    name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All coins of a request, cut into the cells on which its output is constant; drafts by the rule restated here."""
    tiny = TinyLaw(4, params)
    nodes = 4 if name == "suffix tree" else None
    rule = Rule(factor=2, low=0)

    def draft(tokens: Tokens, room: int) -> TokenTree:
        text = (*tiny.prompt, *tokens)
        if name == "ngram tree":
            lookup = NgramLookup(3, 1, "vllm", branches=3)
            lookup.append(text)
            return lookup.propose_tree(room, 5)
        return TokenTree(*map(np.array, rule.draft(text, [], room, nodes)))  # type: ignore[arg-type]

    drafter: Drafter = NgramDrafter(3, 1, "vllm", (), branches=3, nodes=5)
    if name != "ngram tree":
        drafter = SuffixDrafter(max_spec_factor=2, min_token_prob=0, max_cached_requests=0, nodes=nodes)
    depth, length = 2, 4
    paths = list(chosen_coin_paths(tiny.target, draft, depth, length))
    ForcedCoins.paths = {str(i): path for i, path in enumerate(paths)}
    monkeypatch.setattr(decode_module, "RequestGenerator", ForcedCoins)
    target = make_decoder(tiny.spec, tiny.weights, num_slots=16, max_rows=128)
    requests = [make_request(tiny.prompt, str(i), max_tokens=length, params=params) for i in range(len(paths))]
    trace = decode(target, requests, drafter, batch_size=16, depth=depth)
    assert trace.num_accepted.max() == 2
    assert (trace.num_draft > trace.draft_depth).any() == (name != "suffix chain")
    emitted: Counter[Tokens] = Counter()
    for i, (path, found) in enumerate(zip(paths, trace.requests, strict=True)):
        assert found.request_id == str(i)
        assert found.token_ids == path.output
        emitted[found.token_ids] += path.volume  # type: ignore[assignment]
    expected = tiny.output_law(length)
    assert set(emitted) == set(expected)
    for tokens, probability in expected.items():
        assert emitted[tokens] == pytest.approx(probability, abs=1e-9)


def test_a_failed_block_leaves_no_request_behind(world: World) -> None:
    class Failing(SuffixDrafter):
        def commit(self, *arguments: Any) -> None:
            raise RuntimeError("no more")

    drafter = Failing()
    with pytest.raises(RuntimeError, match="no more"):
        decode(world.target, world.requests, drafter, batch_size=3, depth=3)
    assert (drafter._texts, len(drafter._past)) == ({}, 0)
