"""`Tokenizer`: text and chat messages to ids, ids to text. Owns the tokenizer files of a model directory.

Knows nothing of models, requests or the event loop. All methods may be called from several threads at once.

Which rules are honoured. A `tokenizer.json` is the whole truth about text and ids, read by the `tokenizers` library without
transformers. In particular special tokens are added as its post-processor says: `add_bos_token` and `add_eos_token` of
`tokenizer_config.json` are ignored, just as transformers 5 ignores them when there is a tokenizer.json, so a file whose
post-processor lacks BOS yields no BOS. `legacy` is ignored too; transformers passes it to a few classes (LlamaTokenizer) that
rebuild their pre-tokenizer rather than take the file's. Truncation and padding stored in the file are switched off.
From `tokenizer_config.json` come only the names of special tokens: those are left out of decoded text even when the file
does not mark them. `clean_up_tokenization_spaces` is not applied (transformers applies it to no BPE tokenizer either).
A directory without tokenizer.json is read by transformers' AutoTokenizer, which applies all of these by its own rules.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from aengine.engine.detokenizer import Detokenizer
from aengine.errors import FieldViolation, InvalidRequestError, ModelLoadError

_HEX = "0123456789abcdefABCDEF"
_MANY_IDS = 1000  # decoding so many takes about as long as another thread should wait for the GIL
_BYTE_TOKENS = tuple(f"<0x{high}{low}>" for high, low in itertools.product(_HEX, _HEX))  # as SentencePiece writes raw bytes


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text, in columns."""

    ids: list[int]
    pieces: list[str]  # as the vocabulary spells them
    starts: list[int]  # where each begins in the text, in bytes of UTF-8
    ends: list[int]  # where it ends


class _Codec(Protocol):
    """What a tokenizer library must do for us."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def count(self, text: str, add_special_tokens: bool) -> int: ...
    def located(self, text: str, add_special_tokens: bool) -> TokenizedText | None: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def omits(self, token_id: int, skip_special_tokens: bool) -> bool: ...
    def piece(self, token_id: int) -> str | None: ...
    def byte_ids(self) -> frozenset[int]: ...
    def vocab_size(self) -> int: ...


class Tokenizer:
    """The tokenizer of one model. Made by `Tokenizer.load`."""

    def __init__(self, codec: _Codec, load_template: Callable[[], Any] | None) -> None:
        """`load_template`: gives the transformers tokenizer that renders chats; None for a model without a chat template."""
        self._codec = codec
        self._load_template = load_template
        self._template: Any = None
        self._template_lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Reads the tokenizer of a local model directory. Raises `ModelLoadError` when there is none that can be read."""
        config = _read_config(model_dir)
        path = model_dir / "tokenizer.json"
        if path.is_file():
            try:
                core = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise ModelLoadError(f"{path} is not a tokenizer that can be read: {error}") from error
            _mark_special(core, config)
            has_chat_template = (model_dir / "chat_template.jinja").is_file() or bool(config.get("chat_template"))
            return cls(_TokenizersCodec(core), (lambda: _auto_tokenizer(model_dir)) if has_chat_template else None)
        auto = _auto_tokenizer(model_dir)
        codec = _TokenizersCodec(auto.backend_tokenizer) if auto.is_fast else _TransformersCodec(auto)
        return cls(codec, (lambda: auto) if auto.chat_template else None)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._load_template is not None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. A model's embedding may have more rows."""
        return self._codec.vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens that the post-processor adds. Long texts do not hold the GIL.

        Special tokens written out in `text` become their ids. Raises `InvalidRequestError` (prompt) for text that is not Unicode.
        """
        _check_unicode(text, "prompt")
        return self._codec.encode(text, add_special_tokens)

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """How many ids `encode` gives. Raises `InvalidRequestError` (prompt) for text that is not Unicode."""
        _check_unicode(text, "prompt")
        return self._codec.count(text, add_special_tokens)

    def encode_located(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `encode` gives, and where in `text` they come from.

        A token that is only a part of a character has the whole character's place; an added special token is empty, where the token
        before it ends. Raises `InvalidRequestError` (prompt) for text that is not Unicode, and (offsets) when the model's tokenizer
        cannot tell places.
        """
        _check_unicode(text, "prompt")
        tokens = self._codec.located(text, add_special_tokens)
        if tokens is None:
            raise _refusal("this model's tokenizer does not tell where its tokens are in the text", "offsets")
        return tokens

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation as a prompt: its `chat_text` with the opening of the assistant's turn.

        The template writes the special tokens itself, none are added. Raises what `chat_text` raises.
        """
        return self.encode(self.chat_text(messages), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as the model's chat template writes it, with or without the opening of the assistant's turn.

        A message has a string `role` and a `content` that is a string or a list of parts; the template decides what else it reads.
        The first call imports transformers.
        Raises `InvalidRequestError` (prompt) for messages the template cannot render, or a model without a template.
        """
        if self._load_template is None:
            raise _refusal("chat messages need a chat template and this model has none; give text or token ids")
        _check_messages(messages)
        with self._template_lock:  # not at the import and the files by every thread at once
            if self._template is None:
                self._template = self._load_template()
        try:
            plain = [dict(message) for message in messages]
            text = self._template.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: it may raise anything
            raise _refusal(f"the model's chat template refuses these messages: {error}") from error
        return str(text)

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write `word`, each once and none empty: as a text begins with it, behind a space (which belongs
        to the sequence) and behind a line break (which does not). A space that `word` itself begins with is that space.

        No special tokens are added; one written out in `word` becomes its id. The line break matters to tokenizers that put a
        space before every text: elsewhere it gives what the start of a text gives. Other ways to cut the same characters into
        tokens are not listed. Empty if the tokenizer drops the word. Raises `InvalidRequestError` (bad_words) for text that is
        not Unicode.
        """
        _check_unicode(word, "bad_words")
        bare = word.removeprefix(" ")
        start, behind_space, line, behind_line = (self._codec.encode(text, False) for text in (bare, f" {bare}", "\n", f"\n{bare}"))
        sequences = [start, behind_space]
        if behind_line[: len(line)] == line:  # else the two merge into tokens of both
            sequences.append(behind_line[len(line) :])
        return tuple(dict.fromkeys(tuple(ids) for ids in sequences if ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` (each >= 0). Ids without a token are left out, and special tokens if they are to be skipped; bytes that
        are not UTF-8 become U+FFFD."""
        return self._codec.decode(ids, skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Fresh incremental decoding of one sequence; its pieces add up to `decode` of the sequence."""
        codec = self._codec
        return Detokenizer(
            lambda ids: codec.decode(ids, skip_special_tokens),
            lambda token_id: codec.omits(token_id, skip_special_tokens),
            self.byte_ids,
        )

    def piece(self, token_id: int) -> str | None:
        """A token (id >= 0) as the vocabulary spells it, which is not its text; None for ids that `decode` leaves out."""
        return None if self._codec.omits(token_id, True) else self._codec.piece(token_id)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids that stand for one raw byte, spelled `<0x41>`."""
        return self._codec.byte_ids()


class _TokenizersCodec:
    """The `tokenizers` library, alone."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._special = frozenset(token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special)

    # Batch calls release the GIL while they work; those for one text hold it.

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def count(self, text: str, add_special_tokens: bool) -> int:
        return len(self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0])

    def located(self, text: str, add_special_tokens: bool) -> TokenizedText:
        encoding = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids = encoding.ids
        places = _byte_offsets(text)[np.asarray(encoding.offsets, dtype=np.int64).reshape(len(ids), 2)]  # the library counts characters
        added = np.asarray(encoding.special_tokens_mask, dtype=bool)
        reached = np.maximum.accumulate(np.where(added, 0, places[:, 1]))
        starts, ends = (np.where(added, reached, places[:, side]).tolist() for side in (0, 1))
        return TokenizedText(ids, encoding.tokens, starts, ends)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) < _MANY_IDS:
            return self._core.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._core.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def omits(self, token_id: int, skip_special_tokens: bool) -> bool:
        return (skip_special_tokens and token_id in self._special) or self._core.id_to_token(token_id) is None

    def piece(self, token_id: int) -> str | None:
        return self._core.id_to_token(token_id)

    def byte_ids(self) -> frozenset[int]:
        decoder = self._core.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return frozenset()  # the decoder does not read such tokens as bytes
        return frozenset(token_id for token in _BYTE_TOKENS if (token_id := self._core.token_to_id(token)) is not None)

    def vocab_size(self) -> int:
        return self._core.get_vocab_size(with_added_tokens=True)


class _TransformersCodec:
    """A tokenizer that transformers runs in Python. It holds the GIL."""

    def __init__(self, auto: Any) -> None:
        self._auto = auto
        self._special = frozenset(auto.all_special_ids)
        # Of other ids its own methods raise what they will. Two ids may be spelled alike, and ids may be left out between the others.
        self._known = frozenset(range(auto.vocab_size)).union(auto.get_vocab().values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._auto.encode(text, add_special_tokens=add_special_tokens))

    def count(self, text: str, add_special_tokens: bool) -> int:
        return len(self.encode(text, add_special_tokens))

    def located(self, text: str, add_special_tokens: bool) -> None:
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if token_id in self._known]
        # Cleaning up would take back spaces that were handed out already.
        return str(self._auto.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def omits(self, token_id: int, skip_special_tokens: bool) -> bool:
        return token_id not in self._known or (skip_special_tokens and token_id in self._special)

    def piece(self, token_id: int) -> str | None:
        return str(self._auto.convert_ids_to_tokens(token_id)) if token_id in self._known else None

    def byte_ids(self) -> frozenset[int]:
        vocab = self._auto.get_vocab()
        return frozenset(vocab[token] for token in _BYTE_TOKENS if token in vocab)

    def vocab_size(self) -> int:
        return len(self._auto)


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return config


def _mark_special(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Marks the tokens that the config names as special. Names without an id stay out: the model has no embedding for them."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or ()
        named.extend(extra.values() if isinstance(extra, dict) else extra)
    contents = {value.get("content") if isinstance(value, dict) else value for value in named}
    marked = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    for content in sorted(content for content in contents if isinstance(content, str) and content not in marked):
        if core.token_to_id(content) is not None:
            core.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _auto_tokenizer(model_dir: Path) -> Any:
    # Imported here: it takes seconds, and most models never need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # depends on the tokenizer's class what is raised
        raise ModelLoadError(f"{model_dir} has no tokenizer that can be read: {error}") from error


def _refusal(description: str, field: str = "prompt") -> InvalidRequestError:
    return InvalidRequestError([FieldViolation(field, description)])


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(f"not valid Unicode: {error.reason} at character {error.start}", field) from None


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """Where each character of `text` begins in UTF-8, and where the last one ends."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate(([0], np.cumsum(lengths)))


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise _refusal("there are no messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refusal(f"message {index} is a {type(message).__name__}, not a dict with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _refusal(f"message {index} has role {role!r}, which is not a non-empty string")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
            continue
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _refusal(f"message {index} has content of type {type(content).__name__}, not a string or a list of parts")
