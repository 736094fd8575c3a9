"""Tokens: SmolLM2's known ids, the models' own pre-tokenisers against transformers, chat, streams, differences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from specbench.engine.models.chat import render_chat
from specbench.engine.models.gguf_weights import open_gguf
from specbench.engine.models.sources import ModelSource, resolve_model
from specbench.engine.models.tokenizer import (
    TextStream,
    Tokenizer,
    first_vocab_difference,
    load_tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from specbench.errors import InputError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "The year 2024 costs $1,234.50, don't  you\tthink?",
    "naïve café 東京 ½ Ⅷ e\u0301 😀",
    "line\n\n  indented\r\n\r\n\ttab   \n",
    "   leading and trailing   ",
    "WE'LL they'Re x123y\u00a0z",
    "",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m-instruct"))


# ---- SmolLM2


def test_smollm2_ids(smollm2: Tokenizer) -> None:
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.decode([7042]) == " Paris"
    assert smollm2.encode("2024") == [smollm2.encode(digit)[0] for digit in "2024"]
    assert len(smollm2.encode("2024")) == 4
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, (2,))
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    # The file says add_bos_token = false.
    assert smollm2.encode("The capital", add_special=True) == smollm2.encode("The capital")


def test_smollm2_seven_spaces_are_counted_by_ids(smollm2: Tokenizer) -> None:
    """Ids are counted, never re-tokenised text: seven one-space tokens merge if their text is encoded again."""
    space = smollm2.encode(" ")
    assert len(space) == 1
    assert smollm2.decode(space * 7) == " " * 7
    assert len(smollm2.encode(" " * 7)) < 7


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    turns = [{"role": "user", "content": "hi"}]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert smollm2.chat_text(turns, add_generation_prompt=False) == text
    assert smollm2.chat_text(turns) == text + "<|im_start|>assistant\n"
    ids = smollm2.apply_chat(turns)
    assert ids == smollm2.encode(text + "<|im_start|>assistant\n")
    assert [token for token in ids if smollm2.is_special(token)] == [1, 2, 1, 2, 1]
    assert smollm2.decode(ids, skip_special=True) == f"system\n{system}\nuser\nhi\nassistant\n"
    own = smollm2.chat_text([{"role": "system", "content": "Be brief."}, *turns])
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>")


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"))))
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_every_token_decodes_as_the_library_does(smollm2: Tokenizer) -> None:
    for token_id in [*range(17), *range(17, smollm2.vocab_size, 97)]:
        assert smollm2.decode([token_id]) == smollm2.backend.decode([token_id], skip_special_tokens=False)
    ids = list(range(100, 49000, 331))
    assert smollm2.decode(ids) == smollm2.backend.decode(ids, skip_special_tokens=False)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), data=st.data())
def test_streamed_text_is_the_whole_text(smollm2: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    """Any split into pieces gives the same text, and no piece is ever taken back."""
    stream, pieces, start = TextStream(smollm2), [], 0
    while start < len(ids):
        stop = data.draw(st.integers(start + 1, len(ids)))
        pieces.append(stream.push(ids[start:stop]))
        assert smollm2.decode(ids[:stop]).startswith("".join(pieces))
        start = stop
    assert "".join(pieces) + stream.finish() == smollm2.decode(ids)


def test_stream_waits_for_whole_characters(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦜")
    assert len(ids) > 1
    stream = TextStream(smollm2)
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🦜"]
    assert stream.finish() == ""
    stream = TextStream(smollm2)
    assert stream.push(ids[:-1]) == ""
    assert stream.finish() == "\ufffd"
    stream = TextStream(smollm2, skip_special=True)
    assert stream.push([1, 4093, 2]) == "user"


@pytest.mark.parametrize("token_id", [-1, 49152, 10**6])
def test_ids_that_are_no_tokens(smollm2: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match="not a token"):
        smollm2.decode([504, token_id])


# ---- A small vocabulary, as a folder and as GGUF

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Trained = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Tokens and merges of a byte-level BPE of 400 tokens, trained on TEXTS; digits and newlines merge."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=CONTROL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def gguf_keys(trained: Trained, **changes: Any) -> dict[str, Any]:
    tokens, merges = trained
    ours = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [3 if token in CONTROL else 1 for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    keys = {f"tokenizer.ggml.{key}": value for key, value in {**ours, **changes}.items()}
    return {"tokenizer.chat_template": CHATML, **keys}


def from_gguf(folder: Path, trained: Trained, **changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(open_gguf(write_gguf(folder / "m.gguf", gguf_keys(trained, **changes))))


def save_backend(folder: Path, backend: Backend, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_backend(trained: Trained) -> Backend:
    tokens, merges = trained
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(merge.split()) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    return backend


def test_folder_and_gguf_agree(tmp_path: Path, trained: Trained) -> None:
    folder = save_backend(
        tmp_path / "model",
        byte_level_backend(trained),
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>", "lstrip": False},
        unk_token="<|endoftext|>",
        chat_template=CHATML,
    )
    ours, theirs = from_gguf(tmp_path, trained), load_tokenizer(ModelSource("folder", folder, None, "m"))
    assert first_vocab_difference(ours, theirs) is None
    assert ours.fingerprint() == theirs.fingerprint()
    assert (theirs.bos_id, theirs.eos_ids, theirs.vocab_size) == (1, (2,), len(trained[0]))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert theirs.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "smollm"])
def test_pre_tokenisers_equal_transformers(tmp_path: Path, trained: Trained, pre: str) -> None:
    """Each GGUF pre-tokeniser against the tokeniser class or converter that transformers has for it."""
    import transformers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokens, merges = trained
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split()) for merge in merges]
    if pre == "gpt-2":
        theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=pairs).backend_tokenizer
    elif pre == "qwen2":
        theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=pairs).backend_tokenizer
    else:
        theirs = byte_level_backend(trained)
        if pre == "llama-bpe":
            split = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")
            theirs.pre_tokenizer = pre_tokenizers.Sequence(
                [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
    ours = from_gguf(tmp_path, trained, pre=pre)
    for text in TEXTS:
        if pre == "smollm":
            # Digits stand alone; everything between them is split as GPT-2 splits it.
            pieces = split_digits(text)
            expected = [token for piece in pieces for token in theirs.encode(piece, add_special_tokens=False).ids]
        else:
            expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, text


def split_digits(text: str) -> list[str]:
    pieces = [""]
    for char in text:
        if char.isnumeric():
            pieces += [char, ""]
        else:
            pieces[-1] += char
    return pieces


def test_digits_by_pre_tokeniser(tmp_path: Path, trained: Trained) -> None:
    tokens, merges = trained
    more = (["20", "24", "2024"], ["2 0", "2 4", "20 24"])
    wider = (tokens + [t for t in more[0] if t not in tokens], [m for m in more[1] if m not in merges] + merges)
    counts = {pre: len(from_gguf(tmp_path, wider, pre=pre).encode("2024")) for pre in ("gpt-2", "smollm", "qwen2")}
    assert counts == {"gpt-2": 1, "smollm": 4, "qwen2": 4}


def test_llama3_takes_a_whole_word_that_is_a_token(tmp_path: Path, trained: Trained) -> None:
    """ignore_merges: a word in the vocabulary is one token though no merges lead to it."""
    wider = ([*trained[0], "zqzq"], trained[1])
    assert from_gguf(tmp_path, wider, pre="llama-bpe").encode("zqzq") == [len(trained[0])]
    assert len(from_gguf(tmp_path, wider, pre="qwen2").encode("zqzq")) > 1


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path: Path, trained: Trained) -> None:
    plain = from_gguf(tmp_path, trained)
    ids = plain.encode("the")
    assert plain.encode("the", add_special=True) == ids
    both = from_gguf(tmp_path, trained, add_bos_token=True, add_eos_token=True)
    assert both.encode("the", add_special=True) == [1, *ids, 2]
    assert both.encode("the") == ids
    # Llama 3's pre-tokeniser implies bos, unless the file says otherwise.
    assert from_gguf(tmp_path, trained, pre="llama-bpe").encode("the", add_special=True)[0] == 1
    assert from_gguf(tmp_path, trained, pre="llama-bpe", add_bos_token=False).encode("a", add_special=True)[0] != 1


def test_control_user_and_unused_tokens(tmp_path: Path, trained: Trained) -> None:
    tokens = [*trained[0], "<tool>", "[PAD401]", "<never>"]
    types = [3 if token in CONTROL else 1 for token in trained[0]] + [4, 5, 5]
    ours = from_gguf(tmp_path, (tokens, trained[1]), token_type=types, eot_token_id=1)
    size = len(trained[0])
    assert ours.encode("<tool>") == [size]
    assert ours.decode([size, 1], skip_special=True) == "<tool>"
    assert [ours.is_special(i) for i in (0, 1, 2, 3, size)] == [True, True, True, False, False]
    assert ours.eos_ids == (2, 1)
    assert ours.padding_ids == {size + 1, size + 2}
    # Added tokens stand for their own text, not for bytes of the alphabet: "ï" would be one broken byte.
    added = from_gguf(tmp_path, ([*trained[0], "<ïĠ>"], trained[1]), token_type=[*types[:-3], 4])
    assert added.encode("<ïĠ>") == [size]
    assert added.decode([size]) == "<ïĠ>"
    # A token with a character outside the alphabet stands for itself as a whole.
    odd = from_gguf(tmp_path, ([*trained[0], "▁ï"], trained[1]), token_type=[*types[:-3], 1])
    assert odd.decode([size]) == odd.backend.decode([size]) == "▁ï"


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"model": "llama"}, "model", "'llama' is not supported"),
        ({"model": None}, "model", "must be a string"),
        ({"pre": "deepseek-v3"}, "pre", "'deepseek-v3' is not supported"),
        ({"pre": None}, "pre", "must be a string"),
        ({"tokens": None}, "tokens", "list of str"),
        ({"token_type": [1, 2]}, "token_type", "2 types for"),
        ({"merges": ["a b c"]}, "merges", "not a merge"),
        ({"merges": ["a Ġ"]}, "merges", "not a merge"),
        ({"eos_token_id": 400}, "eos_token_id", "not the id of one of"),
        ({"add_bos_token": "yes"}, "add_bos_token", "true or false"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokens", "'a' stands twice"),
    ],
)
def test_bad_gguf_tokenizers(tmp_path: Path, trained: Trained, changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        from_gguf(tmp_path, trained, **changes)
    assert caught.value.key == f"tokenizer.ggml.{key}"
    assert caught.value.file == tmp_path / "m.gguf"


# ---- Folders


def test_template_places(tmp_path: Path, trained: Trained) -> None:
    backend = byte_level_backend(trained)
    turns = [{"role": "user", "content": "x"}]

    def text(**config: Any) -> str:
        return tokenizer_from_folder(save_backend(tmp_path, backend, **config)).chat_text(turns)

    assert text(chat_template="one") == "one"
    assert text(chat_template=[{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    with pytest.raises(InputError, match="no chat template"):
        text()
    with pytest.raises(InputError, match="must be a string"):
        text(chat_template=3)
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert text(chat_template="one", eos_token="<|im_end|>") == "file <|im_end|>"


def test_folder_errors(tmp_path: Path, trained: Trained) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json") as caught:
        tokenizer_from_folder(tmp_path)
    assert "save_pretrained" in str(caught.value)
    save_backend(tmp_path, byte_level_backend(trained), eos_token="</s>")
    with pytest.raises(InputError, match="'</s>' is not a token") as caught:
        tokenizer_from_folder(tmp_path)
    assert caught.value.key == "eos_token"
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "None"}}')
    with pytest.raises(InputError, match="not a tokenizer"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        tokenizer_from_folder(tmp_path)
    backend = byte_level_backend(trained)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="not supported") as caught:
        tokenizer_from_folder(save_backend(tmp_path, backend))
    assert caught.value.key == "decoder"


def test_byte_fallback_vocabulary(tmp_path: Path) -> None:
    """The Llama 2 and Mistral kind: "▁" for a space, <0xNN> for bytes without a token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    ours = tokenizer_from_folder(save_backend(tmp_path, backend, bos_token="<s>", eos_token="</s>"))
    for text in ("a ab b", "é\n a", "  b"):
        assert ours.decode(ours.encode(text)) == text
    assert ours.token_bytes(vocab["<0xC3>"]) == b"\xc3"
    assert ours.token_bytes(vocab["▁a"]) == b" a"
    assert ours.decode([1, vocab["a"], 2], skip_special=True) == "a"


def test_dummy_weights_have_no_tokenizer() -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        load_tokenizer(resolve_model("dummy:qwen3-8b"))


def test_saved_by_transformers(tmp_path: Path, trained: Trained) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(trained),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    theirs.save_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path)
    turns = [{"role": "user", "content": "naïve 2024\n"}, {"role": "assistant", "content": " ok"}]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert ours.chat_text(turns) == expected
    assert ours.apply_chat(turns) == theirs.encode(expected, add_special_tokens=False)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


# ---- Chat templates


def render(template: str, **options: Any) -> str:
    turns = options.pop("turns", [{"role": "user", "content": "<hi>"}])
    return render_chat(template, turns, add_generation_prompt=True, special_tokens={"bos_token": "<s>"}, **options)


def test_template_environment() -> None:
    loop = "{{ bos_token }}{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert render(loop) == "<s><hi>\n"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<hi>"}]'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ tools is none }} {{ missing is defined }}") == "True False"
    # The date is fixed, so the same prompt has the same tokens every day.
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ missing.content }}", "UndefinedError"),
    ],
)
def test_templates_that_fail(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        render(template)
    assert caught.value.key == "chat_template"


@pytest.mark.parametrize("turn", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": 3}])
def test_bad_turns(turn: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="turn 0"):
        render("x", turns=[turn])


# ---- Differences between vocabularies


def small_vocabulary(folder: Path, edit: Callable[[list[str]], list[str]] = list) -> Tokenizer:
    tokens = edit([f"t{i}" for i in range(32)])
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    shutil.rmtree(folder, ignore_errors=True)
    return tokenizer_from_folder(save_backend(folder, backend))


def test_two_swapped_tokens_are_named(tmp_path: Path) -> None:
    """Fault 50: with ids 5 and 6 swapped every draft is nonsense."""
    plain = small_vocabulary(tmp_path / "a")
    swapped = small_vocabulary(tmp_path / "b", lambda t: [*t[:5], t[6], t[5], *t[7:]])
    assert first_vocab_difference(plain, plain) is None
    assert first_vocab_difference(plain, swapped) == (5, "t5", "t6")
    assert first_vocab_difference(swapped, plain) == (5, "t6", "t5")
    assert plain.fingerprint() != swapped.fingerprint()


def test_padded_vocabularies_agree_and_real_tokens_do_not(tmp_path: Path) -> None:
    plain = small_vocabulary(tmp_path / "a")
    padded = small_vocabulary(tmp_path / "b", lambda t: [*t, "[PAD32]", "[PAD33]"])
    longer = small_vocabulary(tmp_path / "c", lambda t: [*t, "<|tool|>"])
    assert first_vocab_difference(plain, padded) is None
    assert first_vocab_difference(padded, plain) is None
    assert first_vocab_difference(plain, longer) == (32, None, "<|tool|>")
    assert first_vocab_difference(longer, padded) == (32, "<|tool|>", None)


def test_unused_gguf_rows_are_padding(tmp_path: Path, trained: Trained) -> None:
    plain = from_gguf(tmp_path, trained)
    types = [3 if token in CONTROL else 1 for token in trained[0]]
    (tmp_path / "other").mkdir()
    wider = from_gguf(tmp_path / "other", ([*trained[0], "<u0>"], trained[1]), token_type=[*types, 5])
    assert first_vocab_difference(plain, wider) is None
    real = from_gguf(tmp_path / "other", ([*trained[0], "<u0>"], trained[1]), token_type=[*types, 1])
    assert first_vocab_difference(plain, real) == (len(trained[0]), None, "<u0>")


def test_fingerprint_sees_merges_template_and_pre_tokeniser(tmp_path: Path, trained: Trained) -> None:
    plain = from_gguf(tmp_path, trained)
    assert from_gguf(tmp_path, trained).fingerprint() == plain.fingerprint()
    others = [
        from_gguf(tmp_path, (trained[0], trained[1][:-1])),
        from_gguf(tmp_path, trained, pre="smollm"),
        from_gguf(tmp_path, trained, eos_token_id=0),
        from_gguf(tmp_path, trained, token_type=[1] * len(trained[0])),
    ]
    write_gguf(tmp_path / "m.gguf", {**gguf_keys(trained), "tokenizer.chat_template": "x"})
    others.append(tokenizer_from_gguf(open_gguf(tmp_path / "m.gguf")))
    assert len({plain.fingerprint(), *(other.fingerprint() for other in others)}) == 6
