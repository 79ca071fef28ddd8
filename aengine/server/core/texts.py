"""The model's tokenizer and chat template for calls, as generation uses them.

All work on texts and ids is done in threads of its own, a step at a time, so that it holds up neither streams nor the prompts of
generations. That of a call whose client goes away ends with its step, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from aengine.chat_prompts import ChatFields
from aengine.checks import FieldChecks
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.token_codecs import TokenizedText
from aengine.engine.tokenizer import Tokenizer
from aengine.engine.workers import Steps, Workers
from aengine.errors import InvalidRequestError

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_PIECES_TEXT_BYTES = 256 * 1024
"""Pieces and offsets are many times as large as their text, and are made with the GIL held."""
MAX_TOKEN_IDS = 1024 * 1024
MAX_NAMED_IDS = 16
"""Most refused ids that an error names."""
QUICK_BYTES = 65536
"""Longer texts are worked on in a thread of their own."""

Result = TypeVar("Result")


class RenderedChat(NamedTuple):
    """A chat as the template writes it."""

    text: str
    token_ids: list[int]


class Texts:
    """Works with the tokenizer of `engine`. To be used from one event loop. Fields in errors have the names of the arguments."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._workers = Workers("aengine-texts", quick=QUICK_BYTES)

    def close(self) -> None:
        """End the threads; calls whose work is not done end as cancelled."""
        self._workers.close()

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `InvalidRequestError`."""
        check_size("text", _num_bytes(text), MAX_TEXT_BYTES)
        return await self._run(_tokenize(self._engine.tokenizer, text, add_special_tokens), len(text), {"prompt": "text"})

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `with_pieces` where the tokenizer
        cannot tell places."""
        check_size("text", _num_bytes(text), MAX_PIECES_TEXT_BYTES)
        steps = _locate(self._engine.tokenizer, text, add_special_tokens)
        return await self._run(steps, len(text), {"prompt": "text", "offsets": "with_pieces"})

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises `InvalidRequestError` for ids that the model does not have."""
        if len(token_ids) > MAX_TOKEN_IDS:
            raise InvalidRequestError.of("token_ids", f"{len(token_ids)} ids are more than {MAX_TOKEN_IDS}")
        vocab_size = self._engine.model_info.vocab_size
        return await self._run(_detokenize(self._engine.tokenizer, token_ids, vocab_size, skip_special_tokens), len(token_ids))

    async def render(self, messages: Sequence[Mapping[str, Any]], fields: ChatFields) -> RenderedChat:
        """Raises `InvalidRequestError`, of `prompt` for the messages and of the names of `fields`."""
        steps = _render(self._engine.tokenizer, messages, fields)
        return await self._run(steps, QUICK_BYTES + 1)  # never quick: the first one imports what renders it

    async def _run(self, steps: Steps[Result], size: int, paths: Mapping[str, str] = {}) -> Result:
        """The result of `steps`, run by a worker. Fields in their errors are renamed by `paths`."""
        try:
            return await asyncio.wrap_future(self._workers.submit(steps, size))
        except InvalidRequestError as error:
            raise error.moved(lambda field: paths.get(field, field)) from error


def check_size(field: str, size: int, limit: int) -> None:
    """Raises `InvalidRequestError` for more bytes than `limit`."""
    if size > limit:
        raise InvalidRequestError.of(field, f"{size} bytes are more than {limit}")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _tokenize(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Steps[list[int]]:
    yield len(text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _locate(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Steps[TokenizedText]:
    yield len(text)
    return tokenizer.encode_located(text, add_special_tokens=add_special_tokens)


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], fields: ChatFields) -> Steps[RenderedChat]:
    text = tokenizer.chat_text(messages, **fields)
    yield len(text)
    return RenderedChat(text, tokenizer.encode(text, add_special_tokens=False))


def _detokenize(tokenizer: Tokenizer, token_ids: Sequence[int], vocab_size: int, skip_special_tokens: bool) -> Steps[str]:
    ids = np.asarray(token_ids, np.int64)
    yield len(ids)
    check = FieldChecks()
    for index in islice(np.flatnonzero((ids >= vocab_size) | (ids < 0)), MAX_NAMED_IDS):
        check.add(f"token_ids[{index}]", f"{ids[index]} is not below vocab_size {vocab_size}")
    check.finish(InvalidRequestError)
    return tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)
