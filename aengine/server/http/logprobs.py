"""Logprobs in the two shapes of OpenAI's, and the bytes of single tokens, which both show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from aengine.engine.tokenizer import Tokenizer
from aengine.engine.vocabulary import byte_level_alphabet
from aengine.outputs import Token, TokenLogprob

_ANCHOR = "a"


class TokenTexts:
    """The bytes that tokens stand for, each by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """What is no character by itself becomes U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The text, or `bytes:\\xe2\\x80` for a token that is no character by itself, so that tokens stay apart."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _read(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        piece = tokenizer.piece(token_id)
        if piece is None:  # special, or no token at all
            return tokenizer.decode([token_id], skip_special_tokens=False).encode()
        if token_id in tokenizer.byte_ids:
            return bytes.fromhex(piece[3:5])
        if self._is_byte_level:
            alphabet = byte_level_alphabet()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode()
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


def chat_logprobs(tokens: Iterable[Token | TokenLogprob], texts: TokenTexts, *, with_ids: bool) -> list[dict[str, Any]]:
    """Those of chat completions. `with_ids`: ours, the ids of tokens beside their texts."""
    entries = []
    for token in tokens:
        if token.logprob is None or token.token_id < 0:
            continue
        entry = _chat_entry(token.token_id, token.logprob, texts, with_ids)
        entry["top_logprobs"] = [_chat_entry(*one, texts, with_ids) for one in (token.top_logprobs or {}).items()]
        entries.append(entry)
    return entries


def _chat_entry(token_id: int, logprob: float, texts: TokenTexts, with_ids: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": texts.text_of(token_id), "logprob": _finite(logprob), "bytes": list(texts.bytes_of(token_id))}
    if with_ids:
        entry["token_id"] = token_id
    return entry


class CompletionLogprobs:
    """The columns of completions, piece by piece: `text_offset` counts the characters of one sequence from its start."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def columns(self, tokens: Sequence[Token | TokenLogprob | tuple[int]], top: int) -> dict[str, Any]:
        """Of the next tokens. A tuple is a token without logprobs. With `top` alternatives asked for, the token itself is among them."""
        names: list[str] = []
        logprobs: list[float | None] = []
        alternatives: list[Mapping[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            token_id = token[0] if isinstance(token, tuple) else token.token_id
            if token_id < 0:
                continue
            logprob = None if isinstance(token, tuple) or token.logprob is None else _finite(token.logprob)
            name = self._texts.name_of(token_id)
            names.append(name)
            offsets.append(self._offset)
            self._offset += len(self._texts.text_of(token_id))
            logprobs.append(logprob)
            if isinstance(token, tuple) or logprob is None:
                alternatives.append(None)
                continue
            found: dict[str, float] = {}
            for one, value in (token.top_logprobs or {}).items():
                found.setdefault(self._texts.name_of(one), _finite(value))  # of equal names the likeliest
            if top:
                found.setdefault(name, logprob)
            alternatives.append(found)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": alternatives if top else None, "text_offset": offsets}


def prompt_entries(entries: Sequence[TokenLogprob | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Ours, those of a prompt; the first token has none."""
    return [None if entry is None else chat_logprobs((entry,), texts, with_ids=True)[0] for entry in entries]


def _finite(logprob: float) -> float:
    """JSON has no infinity. OpenAI writes so for what is impossible."""
    return logprob if logprob > -9999.0 else -9999.0
