"""Logprobs in the two shapes of OpenAI's, and the bytes of single tokens, which both show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aengine.api.engine import ServedEngine
from aengine.api.outputs import Token, TokenLogprob


class TokenTexts:
    """The bytes that tokens stand for, each by itself. They must be learned before they are asked for."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._known: dict[int, bytes] = {}

    async def learn(self, tokens: Iterable[Token | TokenLogprob | None]) -> None:
        """Ask the engine for the bytes of tokens and of their alternatives that are not known yet."""
        ids: set[int] = set()
        for token in tokens:
            if token is not None:
                ids.update((token.token_id,) if token.token_id >= 0 else (), token.top_logprobs or ())
        await self.learn_ids(ids)

    async def learn_ids(self, token_ids: Iterable[int]) -> None:
        missing = set(token_ids) - self._known.keys()
        if missing:
            self._known |= await self._engine.token_bytes(missing)

    def bytes_of(self, token_id: int) -> bytes:
        return self._known[token_id]

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


def chat_logprobs(tokens: Iterable[Token | TokenLogprob], texts: TokenTexts, *, with_ids: bool) -> list[dict[str, Any]]:
    """Logprobs in the shape of OpenAI's chat completions: an entry for each token that has one. `with_ids`: whether entries have the
    token's id beside its text, which is ours."""
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
        """The logprobs of the next tokens, in the shape of OpenAI's completions. A tuple is a token without logprobs. With `top`
        alternatives asked for, the token itself is among them."""
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
