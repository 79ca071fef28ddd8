"""`read_vocabulary`: the text of each token as bytes, found by experiments with the decoder. Knows no grammars.

A grammar speaks of the bytes of a text, so it can steer a model only if the text of a sequence is the text of its tokens, one
after the other. That is so for most tokenizers, but how a token's text is spelled in the vocabulary depends on the decoder. Rather
than repeat the rules of each decoder, the decoder is asked: what does a token add between two others, and at the start of a text?
Raw bytes, which are no text by themselves, are read from the spelling of the token.

`TokenBytes`: what each token stands for by itself.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from functools import cached_property

from aengine.api.errors import InvalidRequestError
from aengine.structured.grammars import GrammarCompiler, NotConcatenative, Vocabulary
from aengine.tokenizer.codecs import REPLACEMENT, byte_level_text
from aengine.tokenizer.tokenizer import Tokenizer

_BEGUN = "."  # a text that others follow
_TRIALS = 512  # random sequences whose text must be that of their tokens


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """`vocab_size`: of the model; may be larger or smaller than the tokenizer's. Takes microseconds per token.

    Raises `NotConcatenative`.
    """
    pieces = [tokenizer.piece(token_id) for token_id in range(vocab_size)]
    known = [token_id for token_id, piece in enumerate(pieces) if piece is not None]
    texts = _byte_level_texts(tokenizer, pieces) or _decoded_texts(tokenizer, pieces, known)
    known = [token_id for token_id in known if texts[token_id]]
    drops_first_space = _drops_first_space(tokenizer, texts, known)
    may_begin = [bool(text) and _begins_as_expected(tokenizer, token_id, text, drops_first_space) for token_id, text in enumerate(texts)]
    _check(tokenizer, texts, known, list(itertools.compress(range(vocab_size), may_begin)), drops_first_space)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    return Vocabulary(tuple(texts), drops_first_space, tuple(may_begin), encode)


def text_of_tokens(tokenizer: Tokenizer) -> Callable[[int], str]:
    """By id, the text that a token adds to one that has begun, of special tokens too; U+FFFD for a part of a character. Empty where the
    decoder fails, which is a program of others: this is called between steps too."""
    try:
        begun = tokenizer.encode(_BEGUN, add_special_tokens=False)
    except InvalidRequestError:  # it has no token for letters
        begun = []
    before = tokenizer.decode(begun, skip_special_tokens=False)

    @functools.lru_cache(1 << 18)
    def text_of(token_id: int) -> str:
        try:
            return tokenizer.decode([*begun, token_id], skip_special_tokens=False).removeprefix(before)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # panics of libraries in Rust are no Exceptions
            return ""

    return text_of


def ids_within(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text behind another one."""
    begun = tokenizer.encode(_BEGUN, add_special_tokens=False)
    ids = tokenizer.encode(_BEGUN + text, add_special_tokens=False)
    return ids[len(begun) :] if ids[: len(begun)] == begun else tokenizer.encode(text, add_special_tokens=False)


def _byte_level_texts(tokenizer: Tokenizer, pieces: Sequence[str | None]) -> list[bytes] | None:
    """For vocabularies whose letters each stand for a byte (GPT-2 and its many heirs); None for others."""
    ids = {piece: token_id for token_id, piece in enumerate(pieces) if piece is not None}
    space, letter = ids.get("\u0120"), ids.get("a")  # the letter that stands for a space
    if space is None or letter is None or tokenizer.decode([letter, space, letter]) != "a a":
        return None
    return [byte_level_text(piece or "") for piece in pieces]


def _decoded_texts(tokenizer: Tokenizer, pieces: Sequence[str | None], known: Sequence[int]) -> list[bytes]:
    """The text that the decoder adds for a token after another one."""
    texts = [b""] * len(pieces)
    anchor = next((token_id for token_id in known if (text := tokenizer.decode([token_id])).isascii() and text.isalnum()), None)
    if anchor is None:
        raise NotConcatenative("no token is a word or a letter")
    before = tokenizer.decode([anchor])
    after = _suffix(tokenizer.decode([anchor, anchor]), before, anchor)
    for token_id in known:
        if token_id in tokenizer.byte_ids:
            texts[token_id] = bytes.fromhex((pieces[token_id] or "")[3:5])
            continue
        text = _suffix(tokenizer.decode([anchor, token_id]), before, token_id)
        if tokenizer.decode([anchor, token_id, anchor]) != before + text + after:
            raise NotConcatenative(f"the text of token {token_id} depends on the tokens around it")
        texts[token_id] = b"" if REPLACEMENT in text else text.encode()
    return texts


def _suffix(text: str, prefix: str, token_id: int) -> str:
    if not text.startswith(prefix):
        raise NotConcatenative(f"token {token_id} changes the text before it")
    return text[len(prefix) :]


def _drops_first_space(tokenizer: Tokenizer, texts: Sequence[bytes], known: Sequence[int]) -> bool:
    for token_id in known:
        text = texts[token_id]
        if text[:1] == b" " and text[1:].isalnum() and text.isascii():
            return tokenizer.decode([token_id]) == text[1:].decode()
    return False


def _begins_as_expected(tokenizer: Tokenizer, token_id: int, text: bytes, drops_first_space: bool) -> bool:
    if drops_first_space:
        if text[:1] != b" ":
            return False
        text = text[1:]
    expected = text.decode(errors="replace")
    return REPLACEMENT in expected or tokenizer.decode([token_id]) == expected


def _check(tokenizer: Tokenizer, texts: Sequence[bytes], known: Sequence[int], begins: Sequence[int], drops_first_space: bool) -> None:
    """Compare the texts with the decoder on random sequences that are UTF-8. Raises `NotConcatenative`."""
    draw = random.Random(0)
    if not begins:
        raise NotConcatenative("no token begins a text")
    for _ in range(_TRIALS):
        ids = [draw.choice(begins), *draw.choices(known, k=3)]
        joined = b"".join(texts[token_id] for token_id in ids)
        try:
            expected = joined.decode()[drops_first_space:]
        except UnicodeDecodeError:
            continue
        if tokenizer.decode(ids) != expected:
            raise NotConcatenative(f"the text of tokens {ids} is not the text of each of them")


_ANCHOR = "a"


class TokenBytes:
    """The bytes that tokens stand for, each by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        piece = tokenizer.piece(token_id)
        if piece is None:  # special, or no token at all
            return tokenizer.decode([token_id], skip_special_tokens=False).encode()
        if token_id in tokenizer.byte_ids:
            return bytes.fromhex(piece[3:5])
        if self._is_byte_level:
            return byte_level_text(piece)
        # What the decoder adds behind another token: by itself many of them drop a space.
        anchor, before = self._anchor
        return tokenizer.decode([*anchor, token_id]).removeprefix(before).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the letters of the vocabulary each stand for a byte."""
        pieces = [self._tokenizer.piece(token_id) for token_id in self._tokenizer.encode("a a", add_special_tokens=False)]
        return "".join(piece or "" for piece in pieces) == "a\u0120a"

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._tokenizer.encode(_ANCHOR, add_special_tokens=False)
        return ids, self._tokenizer.decode(ids)


def grammar_compiler(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """What compiles grammars for a model. Reads nothing before the first one is asked for."""
    read, within = functools.partial(read_vocabulary, tokenizer, vocab_size), functools.partial(ids_within, tokenizer)
    return GrammarCompiler(read, eos_token_ids, text_of_tokens(tokenizer), within)
