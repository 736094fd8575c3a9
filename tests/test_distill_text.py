"""Self-written text: what is kept, how it is split and stored, and that states are those of the words beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specbench.distill import generate, shards
from specbench.distill.corpus import Corpus, is_held_out
from specbench.distill.generate import Conversation, TextSettings, Writer, usable_answer, usable_prompt, user_header
from specbench.distill.openers import openers_of
from specbench.distill.shards import answer_tokens_in, read_shard, shard_path, write_manifest, write_shard
from specbench.engine.heads.spec import FINAL
from specbench.errors import InputError
from specbench.scenario.prompts import load_prompts

HIDDEN = 8
RECORDED = (FINAL, 2, 3, 5)


def conversation(number: int, length: int = 9, text: str | None = None) -> Conversation:
    """Tokens and states that say where they are from."""
    tokens = tuple(100 * number + i for i in range(length))
    states = torch.arange(length, dtype=torch.float32)[:, None] + torch.arange(4 * HIDDEN) / 64 + number
    return Conversation(text or f"prompt {number}", tokens, 3, 0.0, states.to(torch.bfloat16))


def write(folder: Path, *groups: list[Conversation]) -> Path:
    folder.mkdir(exist_ok=True)
    for index, group in enumerate(groups):
        write_shard(folder, index, group, HIDDEN)
    return folder


def test_shards_come_back_as_they_were_written(tmp_path: Path) -> None:
    group = [conversation(1), conversation(2, 12)]
    write(tmp_path, group)
    assert [replace(one, states=None) for one in group] == read_shard(tmp_path, 0)
    assert answer_tokens_in(tmp_path, 100) == (1, 6 + 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shard-0000.final.npy",
        "shard-0000.npz",
        "shard-0000.streams.npy",
    ]


def test_only_an_unbroken_row_of_shards_counts(tmp_path: Path) -> None:
    write(tmp_path, [conversation(1)], [conversation(2)], [conversation(3)])
    shard_path(tmp_path, 1).unlink()
    assert answer_tokens_in(tmp_path, 100) == (1, 6)


def test_a_damaged_shard_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, [conversation(1)])
    shard_path(tmp_path, 0).write_bytes(b"PK no")
    with pytest.raises(InputError, match="not a shard") as error:
        read_shard(tmp_path, 0)
    assert "delete" in str(error.value)


def test_states_in_a_batch_are_those_of_the_tokens_beside_them(tmp_path: Path) -> None:
    groups = [[conversation(n, 8 + n) for n in range(5)], [conversation(n, 8 + n) for n in range(5, 12)]]
    write(tmp_path, *groups)
    corpus = Corpus(tmp_path, 60, 0.3)
    chosen = [corpus.train[i] for i in (3, 0, 4)]
    for states, columns in (((FINAL,), [0]), ((3, 5), [2, 3])):
        batch = corpus.batch(chosen, states, RECORDED)
        for b, one in enumerate(chosen):
            rows = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
            number = int(one.tokens[0]) // 100
            source = conversation(number, 8 + number)
            assert batch.tokens[rows].tolist() == list(source.token_ids)
            assert source.states is not None
            wanted = [source.states[:, c * HIDDEN : (c + 1) * HIDDEN].float() for c in columns]
            assert torch.equal(batch.states[rows], torch.cat(wanted, dim=1))
            assert torch.equal(batch.final[rows], source.states[:, :HIDDEN].float())


def test_split_is_by_prompt_and_leaves_out_repeats_and_benchmark_prompts(tmp_path: Path) -> None:
    forbidden = load_prompts("builtin")[0].turns[0]
    group = [conversation(n) for n in range(40)]
    again = [conversation(50, text="PROMPT   3"), conversation(51, text=forbidden.upper()), conversation(52)]
    write(tmp_path, group, again)
    corpus = Corpus(tmp_path, 41 * 6, 0.25)
    first = {int(one.tokens[0]) // 100 for one in (*corpus.train, *corpus.held_out)}
    assert first == {*range(40), 52}
    held = {int(one.tokens[0]) // 100 for one in corpus.held_out}
    assert held == {n for n in (*range(40), 52) if is_held_out(f"prompt {n}", 0.25)}
    assert 3 < len(held) < 20
    assert is_held_out("A  b", 0.25) == is_held_out("a B", 0.25)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [conversation(1), conversation(2)])
    with pytest.raises(InputError, match="holds 12 answer tokens, and 13"):
        Corpus(tmp_path, 13, 0.5)
    with pytest.raises(InputError, match="too few"):
        Corpus(tmp_path, 12, 1e-9)


def test_vocabulary_is_the_most_frequent_tokens_as_few_as_cover(tmp_path: Path) -> None:
    rows = [
        Conversation(f"p{n}", (9, 9, 9, 5, 5, 7, 5, 2, 7, 5, 1), 3, 0.0, conversation(0, 11).states) for n in range(9)
    ]
    write(tmp_path, rows)
    corpus = Corpus(tmp_path, 72, 0.3)
    assert corpus.vocabulary(100, 1.0).tolist() == [1, 2, 5, 7]
    assert corpus.vocabulary(100, 0.75).tolist() == [5, 7]
    assert corpus.vocabulary(1, 1.0).tolist() == [5]
    assert corpus.coverage(np.array([5, 7])) == pytest.approx(6 / 8)


def test_what_is_kept() -> None:
    assert usable_prompt([1, 2, 3], "a b c", "stop")
    assert not usable_prompt([1, 2, 3], "a b c", "length")
    assert not usable_prompt([1, 2], "a b", "stop")
    assert not usable_prompt([1, 2, 3], "", "stop")
    assert not usable_prompt([1, 2] * 40, "loop", "stop")
    assert usable_answer([1, 2, 3, 4], "length")
    assert not usable_answer([1, 2, 3, 4], "stop"), "the end is no word"
    assert not usable_answer([1, 2, 3, 4], "failed")
    assert not usable_answer([*range(9), *[4, 5] * 40, 0], "stop"), "a loop before the end"


def test_a_folder_holds_text_of_one_kind(tmp_path: Path) -> None:
    settings = TextSettings("m", seed=1)
    write_manifest(tmp_path, settings, "m@1")
    write_manifest(tmp_path, settings, "m@1")
    with pytest.raises(InputError, match="made with seed 1, and 2 is asked for"):
        write_manifest(tmp_path, TextSettings("m", seed=2), "m@1")
    with pytest.raises(InputError, match="target"):
        write_manifest(tmp_path, settings, "m@2")
    assert json.loads((tmp_path / shards.MANIFEST).read_text())["answer_len"] == 192


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Writer(TextSettings("smollm2-135m-instruct", shard_prompts=3, batch_size=3, answer_len=12, prompt_len=40))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def written(writer: Writer) -> list[Conversation]:
    return writer.shard(1)


def test_the_target_writes_prompts_behind_its_own_header_and_answers_them(
    writer: Writer, written: list[Conversation]
) -> None:
    assert writer.tokenizer.decode(user_header(writer.tokenizer)).endswith("<|im_start|>user\n")
    assert written
    for one in written:
        asked = tuple(writer.tokenizer.apply_chat([{"role": "user", "content": one.text}]))
        assert one.token_ids[: one.prompt_len] == asked
        assert 4 <= one.answer_len <= 12


def test_openers_are_the_first_words_of_prompts_and_of_no_built_in_one(writer: Writer) -> None:
    openers = openers_of("kinds")
    assert len(openers) == len({*openers}) + openers.count("") - 1
    turns = [turn.casefold() for prompt in load_prompts("builtin") for turn in prompt.turns]
    for opener in openers:
        if len(opener.split()) > 1:
            assert not [turn for turn in turns if turn.startswith(opener.strip().casefold())], opener
    settings = replace(writer.settings, openers="kinds", shard_prompts=8, prompt_len=64)
    free, led = writer.settings, settings
    writer.settings = led
    try:
        prompts = writer._prompts(0)
    finally:
        writer.settings = free
    assert len(prompts) >= 3
    told = [opener for opener in openers[:8] if opener]
    assert sum(any(text.startswith(opener.strip()) for opener in told) for text in prompts) >= len(prompts) - 3


def test_recorded_states_give_the_tokens_that_were_chosen(writer: Writer, written: list[Conversation]) -> None:
    """Greedy answers are the argmax of the final states' logits; every token but the last has states."""
    embedding = None
    for name, tensor in generate.iter_weights(
        generate.resolve_model("smollm2-135m-instruct"), writer.spec, torch.bfloat16
    ):
        if name == "embed_tokens.weight":
            embedding = tensor.float()
    assert embedding is not None
    greedy = [one for one in written if one.temperature == 0]
    assert greedy
    hidden = writer.spec.hidden_size
    for one in greedy:
        assert one.states is not None
        assert one.states.shape == (len(one.token_ids), 4 * hidden)
        assert bool((one.states[:-1].abs().sum(1) > 0).all())
        assert float(one.states[-1].abs().sum()) == 0
        rows = one.states[one.prompt_len - 1 : -1, :hidden].float()
        logits = rows @ embedding.T
        chosen = torch.tensor(one.token_ids[one.prompt_len :])
        best, second = logits.topk(2).values.T
        # States rounded to bf16 may turn a near tie round.
        sure = best - second > 0.2
        assert torch.equal(logits.argmax(-1)[sure], chosen[sure])
        assert sure.float().mean() > 0.7


def test_shards_depend_on_their_number_alone(writer: Writer, written: list[Conversation]) -> None:
    writer.shard(0)
    again = writer.shard(1)
    assert [replace(one, states=None) for one in again] == [replace(one, states=None) for one in written]
    for one, other in zip(again, written, strict=True):
        assert one.states is not None
        assert other.states is not None
        assert torch.equal(one.states, other.states)
