"""Text to token ids and back, with the model's own vocabulary and chat template. No torch, no transformers.

Built over the `tokenizers` library from a Hugging Face folder (tokenizer.json) or from a GGUF's keys.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specbench.engine.models.chat import render_chat
from specbench.engine.models.gguf_weights import GGUFFile, open_gguf
from specbench.engine.models.sources import ModelSource, read_json_object
from specbench.errors import InputError

# GGUF token types.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_PADDING_TOKEN = re.compile(r"\[PAD\d+\]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Pre-tokenisers of the GPT-2 kind: splits before byte-level BPE. Sources: the models' own tokenizer.json files.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SUPPORTED_PRE = ("smollm", "gpt-2", "llama-bpe", "qwen2")
# Fixed text whose ids show what a pre-tokeniser does; part of the fingerprint.
_PROBE = "The year 2024's  cost:\t$1,234.50\n\n don't\r\n  naïve 東京 ½ é\u0301 <|x|>   end "


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and its rules. Build one with `load_tokenizer`, `tokenizer_from_folder` or `tokenizer_from_gguf`.

    `vocab_size` is one more than the largest id; a model may have more rows than that (padding), whose ids are no
    tokens. `byte_level` says how a token's string maps to bytes: GPT-2's alphabet, or "▁" and <0xNN>.
    """

    backend: tokenizers.Tokenizer
    byte_level: bool
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    padding_ids: frozenset[int] = frozenset()

    @cached_property
    def tokens(self) -> tuple[str | None, ...]:
        """Token string by id; None where no token has the id."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        table: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            table[token_id] = token
        return tuple(table)

    @cached_property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        """Tokens matched as whole strings in the text, special ones among them, by id."""
        added: Mapping[int, AddedToken] = self.backend.get_added_tokens_decoder()
        return added

    @property
    def vocab_size(self) -> int:
        """Number of ids: one more than the largest."""
        return len(self.tokens)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens in the text are recognised; `add_special` adds bos and the like."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of the tokens; incomplete UTF-8 shows as U+FFFD. ValueError on an id that is no token.

        With "▁" vocabularies the space of the first token stays. For text that grows use `TextStream`.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], skip_special: bool = False) -> bytes:
        """The bytes of the tokens, one after another; bytes of a prefix are a prefix of the bytes."""
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token (bos, end of turn, …)."""
        return token_id in self.added_tokens and self.added_tokens[token_id].special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text. ValueError if the id is no token (padding rows, out of range)."""
        token = self.tokens[token_id] if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise ValueError(f"id {token_id} is not a token of this vocabulary of {self.vocab_size}")
        if token_id in self.added_tokens:
            return token.encode()
        if self.byte_level:
            # A token with a character outside the alphabet stands for itself, as in the tokenizers library.
            known = all(char in _BYTE_OF for char in token)
            return bytes(_BYTE_OF[char] for char in token) if known else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    def apply_chat(self, turns: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's own chat template. `turns` are {"role": …, "content": …}."""
        return self.encode(self.chat_text(turns, add_generation_prompt))

    def chat_text(self, turns: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat` encodes. InputError if there is no template or it refuses the turns."""
        if self.chat_template is None:
            raise InputError(
                "the model has no chat template",
                key="chat_template",
                remedy="use an instruction-tuned model, or give the prompts as plain text",
            )
        return render_chat(
            self.chat_template,
            turns,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
        )

    @cached_property
    def _fingerprint(self) -> str:
        parts = {
            "tokens": self.tokens,
            "added": [[i, token.content, token.special] for i, token in sorted(self.added_tokens.items())],
            "merges": json.loads(self.backend.to_str())["model"].get("merges"),
            "probe": self.encode(_PROBE, add_special=True),
            "chat_template": self.chat_template,
            "special": [self.bos_id, self.eos_ids],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def fingerprint(self) -> str:
        """sha256 (hex) over vocabulary, merges, special tokens, chat template and the ids of a fixed text."""
        return self._fingerprint


class TextStream:
    """Decodes a growing sequence: text comes out only when its characters are complete, so it is never taken back.

    The pieces and `finish()` joined are `decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; bytes of an unfinished character are kept for later."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids, skip_special=self._skip_special))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)


def first_vocab_difference(a: Tokenizer, b: Tokenizer) -> tuple[int, str | None, str | None] | None:
    """The lowest id that means different tokens in `a` and `b`, with both; None if drafts of one fit the other.

    Unused and padding rows count as no token, so vocabularies padded to different sizes agree. None for a token says
    that this side has none there.
    """
    for token_id in range(max(a.vocab_size, b.vocab_size)):
        pair = tuple(
            side.tokens[token_id] if token_id < side.vocab_size and token_id not in side.padding_ids else None
            for side in (a, b)
        )
        if pair[0] != pair[1]:
            return token_id, pair[0], pair[1]
    return None


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a resolved model. Dummy weights have none: InputError."""
    if source.path is None:
        raise InputError(
            f"{source.display_name} has no tokenizer", key="model", remedy="use a real model for prompts of text"
        )
    if source.kind == "gguf":
        return tokenizer_from_gguf(open_gguf(source.path))
    return tokenizer_from_folder(source.path)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """From tokenizer.json, with special tokens and template from tokenizer_config.json and chat_template.jinja."""
    path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.is_file():
        raise InputError(
            "no tokenizer.json in this folder",
            file=folder,
            remedy="write one once with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    raw = read_json_object(path)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    # The library raises bare Exception for whatever it can't build.
    except Exception as error:
        raise InputError(f"not a tokenizer: {error}", file=path) from error
    # Padding and truncation saved by a training run are no part of the vocabulary.
    backend.no_padding()
    backend.no_truncation()
    config = read_json_object(config_path) if config_path.is_file() else {}
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        token = value.get("content") if isinstance(value, dict) else value
        if token is None:
            continue
        if not isinstance(token, str) or backend.token_to_id(token) is None:
            raise InputError(f"{token!r} is not a token of tokenizer.json", file=config_path, key=key)
        special[key] = token
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    vocab = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend=backend,
        byte_level=_is_byte_level(raw.get("decoder"), path),
        bos_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        eos_ids=() if eos is None else (eos,),
        chat_template=_folder_template(folder, config, config_path),
        special_tokens=special,
        padding_ids=frozenset(i for token, i in vocab.items() if _PADDING_TOKEN.fullmatch(token)),
    )


def tokenizer_from_gguf(gguf: GGUFFile) -> Tokenizer:
    """From a GGUF's `tokenizer.ggml.*` keys: byte-level BPE (model "gpt2") with a pre-tokeniser of SUPPORTED_PRE."""
    read = _GGUFKeys(gguf)
    model, pre = read.text("model"), read.text("pre")
    if model != "gpt2":
        raise read.error("model", f"{model!r} is not supported", "supported: gpt2; or use the Hugging Face folder")
    if pre not in SUPPORTED_PRE:
        raise read.error(
            "pre", f"{pre!r} is not supported", f"supported: {', '.join(SUPPORTED_PRE)}; or use the Hugging Face folder"
        )
    tokens, merges = read.items("tokens", str), read.items("merges", str)
    types = read.items("token_type", int)
    if len(types) != len(tokens):
        raise read.error("token_type", f"{len(types)} types for {len(tokens)} tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise read.error("tokens", f"the token {twice!r} stands twice")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise read.error("merges", f"{' '.join(pair)!r} is not a merge of two tokens into a third")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer, backend.normalizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    special = {}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in names.items():
        token_id = read.token_id(f"{key}_token_id", len(tokens))
        if token_id is not None:
            special[name] = tokens[token_id]
    eot = read.token_id("eot_token_id", len(tokens))
    eos = [vocab[special["eos_token"]]] if "eos_token" in special else []
    first = [special["bos_token"]] if read.flag("add_bos_token", pre == "llama-bpe") and "bos_token" in special else []
    last = [special["eos_token"]] if read.flag("add_eos_token", False) and "eos_token" in special else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[(token, vocab[token]) for token in {*first, *last}]
        )
    template = gguf.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        byte_level=True,
        bos_id=vocab[special["bos_token"]] if "bos_token" in special else None,
        eos_ids=tuple(dict.fromkeys([*eos, *([] if eot is None else [eot])])),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=special,
        padding_ids=frozenset(
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _UNUSED or _PADDING_TOKEN.fullmatch(token)
        ),
    )


class _GGUFKeys:
    """Typed access to `tokenizer.ggml.*`, with file and key in every error."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf

    def error(self, key: str, message: str, remedy: str | None = None) -> InputError:
        return InputError(message, file=self.gguf.path, key=f"tokenizer.ggml.{key}", remedy=remedy)

    def _get(self, key: str) -> Any:
        return self.gguf.metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {value!r}", "use a GGUF with a tokenizer, or the HF folder")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(key, f"must be a list of {kind.__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return default if value is None else value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._get(key)
        if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
            raise self.error(key, f"{value!r} is not the id of one of {num_tokens} tokens")
        return value


def _pre_tokenizer(pre: str) -> tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None]:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return gpt2, None
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), None
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT if pre == "llama-bpe" else _QWEN2_SPLIT), "isolated")
    sequence = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return sequence, normalizers.NFC() if pre == "qwen2" else None


def _is_byte_level(decoder: Any, path: Path) -> bool:
    """True for GPT-2's byte alphabet, False for "▁" with <0xNN> byte fallback; anything else is refused."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {step.get("type") for step in steps if isinstance(step, dict)}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"Metaspace", "ByteFallback"}:
        return False
    raise InputError(
        f"a decoder of {sorted(map(str, kinds)) or 'no kind'} is not supported",
        file=path,
        key="decoder",
        remedy="supported: ByteLevel (Llama 3, Qwen, SmolLM) and Metaspace or ByteFallback (Llama 2, Mistral)",
    )


def _folder_template(folder: Path, config: Mapping[str, Any], config_path: Path) -> str | None:
    """chat_template.jinja where there is one, else `chat_template` of the config: a string or named templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise InputError(f"must be a string, is {type(value).__name__}", file=config_path, key="chat_template")
    return value
