"""`Texts`: the model's tokenizer and chat template for callers, as requests use them.

All work is done in threads of its own, a step at a time, so that it holds up neither streams nor the prompts of requests. That of a caller
who goes away ends with its step, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aengine.aio.edge import LoopEdge
from aengine.api.errors import EngineStateError, InvalidRequestError, NoTokenizerError
from aengine.api.fields import FieldChecks
from aengine.api.outputs import RenderedChat, TokenizedText
from aengine.api.request import ChatFields, ChatOptions
from aengine.engine.requests import QUICK_CHARACTERS, Limits, chat_size, check_literals, encode_text, render_chat
from aengine.engine.workers import Steps, Workers
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import TokenBytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

MAX_NAMED_IDS = 16
"""Most refused ids that an error names."""
BYTES_AT_ONCE = 1024
"""Tokens of one step, of which the bytes are read."""


class Texts:
    """Works with `tokenizer`, if there is one. To be used in the loop of `edge`. Methods raise `NoTokenizerError`, and `EngineStateError`
    once it is closed."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits, edge: LoopEdge) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._edge = edge
        self._workers = Workers("aengine-texts", quick=QUICK_CHARACTERS)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizerError("the model has no tokenizer; only token ids go in and come out")
        return self._tokenizer

    def close(self) -> None:
        """End the threads; callers whose work is not done get `EngineStateError`."""
        self._workers.close()

    async def tokenize(self, text: str, *, add_special_tokens: bool, for_prompt: bool, literals: Sequence[tuple[int, int]]) -> list[int]:
        check_literals(literals, len(text))
        limits = self._limits if for_prompt else None
        steps = encode_text(text, self.tokenizer, limits, add_special_tokens=add_special_tokens, literals=literals)
        return await self._run(steps, len(text))

    async def locate(self, text: str, *, add_special_tokens: bool) -> TokenizedText:
        return await self._run(_locate(self.tokenizer, text, add_special_tokens), len(text))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._run(_detokenize(self.tokenizer, token_ids, self._limits.model.vocab_size, skip_special_tokens), len(token_ids))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        return await self._run(_read_bytes(self._bytes, tuple(token_ids)), len(token_ids))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> RenderedChat:
        options = ChatOptions(**fields)
        return await self._run(render_chat(messages, self.tokenizer, options), chat_size(messages, options))

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    async def _run(self, steps: Steps[T], size: int) -> T:
        try:
            return await self._edge.wait(self._workers.submit(steps, size))
        except CancelledError:  # of the work: the threads have ended
            raise EngineStateError("the engine is closed") from None


def _locate(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Steps[TokenizedText]:
    yield len(text)
    return tokenizer.encode_located(text, add_special_tokens=add_special_tokens)


def _detokenize(tokenizer: Tokenizer, token_ids: Sequence[int], vocab_size: int, skip_special_tokens: bool) -> Steps[str]:
    ids = np.asarray(token_ids, np.int64)
    yield len(ids)
    check = FieldChecks()
    for index in islice(np.flatnonzero((ids >= vocab_size) | (ids < 0)), MAX_NAMED_IDS):
        check.add(f"token_ids[{index}]", f"{ids[index]} is not below vocab_size {vocab_size}")
    check.finish(InvalidRequestError)
    return tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)


def _read_bytes(known: TokenBytes, token_ids: Sequence[int]) -> Steps[dict[int, bytes]]:
    found: dict[int, bytes] = {}
    for start in range(0, len(token_ids), BYTES_AT_ONCE):
        yield len(token_ids) - start
        found |= {token_id: known[token_id] for token_id in token_ids[start : start + BYTES_AT_ONCE]}
    return found
