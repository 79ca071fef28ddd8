"""`TokenizerService`: the model's tokenizer and chat template, as generation uses them.

All work on texts and ids is done in threads of its own, a step at a time, so that it holds up neither streams nor the prompts of
generations. That of a call whose client goes away ends with its step, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aengine.engine.workers import Steps, Workers
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.server.generation.backend import require_model
from aengine.server.generation.chat import read_chat
from aengine.v1.tokenizer_service_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer

if TYPE_CHECKING:
    import grpc

    from aengine.engine.async_engine import AsyncEngine
    from aengine.engine.tokenizer import Tokenizer

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_PIECES_TEXT_BYTES = 256 * 1024
"""Pieces and offsets are many times as large as their text, and are made with the GIL held."""
MAX_TOKEN_IDS = 1024 * 1024
MAX_NAMED_IDS = 16
"""Of the ids that are refused; one is as good as a million."""
QUICK_BYTES = 65536
"""Longer texts are worked on in a thread of their own."""

# Where the tokenizer's names are found in the requests.
_TEXT_PATHS = {"prompt": "text", "offsets": "with_pieces"}
_CHAT_PATHS = {"prompt": "chat"}

Answer = TypeVar("Answer")


class TokenizerServicer(TokenizerServiceServicer):
    """Answers with the tokenizer of `engine`. To be used from one event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._workers = Workers("aengine-tokenizer-service", quick=QUICK_BYTES)

    def close(self) -> None:
        """End the threads; calls whose work is not done end as cancelled."""
        self._workers.close()

    async def Tokenize(self, request: TokenizeRequest, context: grpc.ServicerContext) -> TokenizeResponse:
        require_model(self._engine, request.model)
        violations = []
        if request.count_only and request.with_pieces:
            violations.append(FieldViolation("with_pieces", "cannot be combined with count_only, which answers with the number alone"))
        limit = MAX_PIECES_TEXT_BYTES if request.with_pieces else MAX_TEXT_BYTES
        text = request.text
        _check_size("text", len(text) if text.isascii() else len(text.encode()), limit, violations)
        return await self._answer(_tokenize(self._engine.tokenizer, request), len(text), _TEXT_PATHS, violations)

    async def Detokenize(self, request: DetokenizeRequest, context: grpc.ServicerContext) -> DetokenizeResponse:
        vocab_size = require_model(self._engine, request.model).vocab_size
        violations = []
        if len(request.token_ids) > MAX_TOKEN_IDS:
            violations.append(FieldViolation("token_ids", f"{len(request.token_ids)} ids are more than {MAX_TOKEN_IDS}"))
        return await self._answer(_detokenize(self._engine.tokenizer, request, vocab_size), len(request.token_ids), {}, violations)

    async def RenderChat(self, request: RenderChatRequest, context: grpc.ServicerContext) -> RenderChatResponse:
        require_model(self._engine, request.model)
        violations: list[FieldViolation] = []
        if not request.chat.messages:
            violations.append(FieldViolation("chat.messages", "must not be empty"))
        _check_size("chat", request.chat.ByteSize(), MAX_TEXT_BYTES, violations)
        messages = read_chat(request.chat, "chat", violations)
        opened = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        steps = _render(self._engine.tokenizer, messages, opened)
        return await self._answer(steps, QUICK_BYTES + 1, _CHAT_PATHS, violations)  # never quick: the first one imports what renders it

    async def _answer(self, steps: Steps[Answer], size: int, paths: dict[str, str], violations: list[FieldViolation]) -> Answer:
        """What `steps` return, done by a worker unless there are `violations`; fields that they refuse are found at `paths`."""
        if violations:
            raise InvalidRequestError(violations)
        try:
            return await asyncio.wrap_future(self._workers.submit(steps, size))
        except InvalidRequestError as error:
            raise error.moved(lambda field: paths.get(field, field)) from error


def _check_size(field: str, size: int, limit: int, violations: list[FieldViolation]) -> None:
    if size > limit:
        violations.append(FieldViolation(field, f"{size} bytes are more than {limit}"))


def _tokenize(tokenizer: Tokenizer, request: TokenizeRequest) -> Steps[TokenizeResponse]:
    with_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    if request.with_pieces:
        tokens = tokenizer.encode_located(request.text, add_special_tokens=with_special)
        return TokenizeResponse(
            num_tokens=len(tokens.ids), token_ids=tokens.ids, pieces=tokens.pieces, start_offsets=tokens.starts, end_offsets=tokens.ends
        )
    yield len(request.text)
    ids = tokenizer.encode(request.text, add_special_tokens=with_special)
    return TokenizeResponse(num_tokens=len(ids), token_ids=() if request.count_only else ids)


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> Steps[RenderChatResponse]:
    text = tokenizer.chat_text(messages, add_generation_prompt=add_generation_prompt)
    yield len(text)
    return RenderChatResponse(text=text, token_ids=tokenizer.encode(text, add_special_tokens=False))


def _detokenize(tokenizer: Tokenizer, request: DetokenizeRequest, vocab_size: int) -> Steps[DetokenizeResponse]:
    ids = np.asarray(request.token_ids)
    yield len(ids)
    wrong = ((int(index), int(ids[index])) for index in np.flatnonzero(ids >= vocab_size))
    violations = [
        FieldViolation(f"token_ids[{index}]", f"{token_id} is not below vocab_size {vocab_size}")
        for index, token_id in islice(wrong, MAX_NAMED_IDS)
    ]
    if violations:
        raise InvalidRequestError(violations)
    skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return DetokenizeResponse(text=tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special))
