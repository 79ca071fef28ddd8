"""`TokenizerService`: the model's tokenizer and chat template, as generation uses them.

All work on texts and ids is done in threads of its own, a step at a time, so that it holds up neither streams nor the prompts of
generations. That of a call whose client goes away ends with its step, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from grpc import ServicerContext

from aengine.chats import ChatFields
from aengine.checks import FieldChecks
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.tokenizer import Tokenizer
from aengine.engine.workers import Steps, Workers
from aengine.errors import InvalidRequestError
from aengine.server.generation.backend import require_model
from aengine.server.generation.convert import read_chat, read_chat_fields
from aengine.v1 import tokenizer_service_pb2 as messages
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer
from aengine.wire import CHAT

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_PIECES_TEXT_BYTES = 256 * 1024
"""Pieces and offsets are many times as large as their text, and are made with the GIL held."""
MAX_TOKEN_IDS = 1024 * 1024
MAX_NAMED_IDS = 16
"""Most refused ids that an error names."""
QUICK_BYTES = 65536
"""Longer texts are worked on in a thread of their own."""

# The tokenizer's names for fields, and the fields of the requests.
_TEXT_PATHS = {"prompt": "text", "offsets": "with_pieces"}
_CHAT_PATHS = {"prompt": "chat", **{name: f"chat.{name}" for name in CHAT}}

Response = TypeVar("Response")


class TokenizerServicer(TokenizerServiceServicer):
    """Serves the tokenizer of `engine`. To be used from one event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._workers = Workers("aengine-tokenizer-service", quick=QUICK_BYTES)

    def close(self) -> None:
        """End the threads; calls whose work is not done end as cancelled."""
        self._workers.close()

    async def Tokenize(self, request: messages.TokenizeRequest, context: ServicerContext) -> messages.TokenizeResponse:
        require_model(self._engine, request.model)
        check = FieldChecks()
        if request.count_only and request.with_pieces:
            check.add("with_pieces", "cannot be combined with count_only, which answers with the number alone")
        limit = MAX_PIECES_TEXT_BYTES if request.with_pieces else MAX_TEXT_BYTES
        text = request.text
        _check_size("text", len(text) if text.isascii() else len(text.encode()), limit, check)
        return await self._run(_tokenize(self._engine.tokenizer, request), len(text), check, _TEXT_PATHS)

    async def Detokenize(self, request: messages.DetokenizeRequest, context: ServicerContext) -> messages.DetokenizeResponse:
        vocab_size = require_model(self._engine, request.model).vocab_size
        check = FieldChecks()
        if len(request.token_ids) > MAX_TOKEN_IDS:
            check.add("token_ids", f"{len(request.token_ids)} ids are more than {MAX_TOKEN_IDS}")
        return await self._run(_detokenize(self._engine.tokenizer, request, vocab_size), len(request.token_ids), check)

    async def RenderChat(self, request: messages.RenderChatRequest, context: ServicerContext) -> messages.RenderChatResponse:
        require_model(self._engine, request.model)
        check = FieldChecks()
        if not request.chat.messages:
            check.add("chat.messages", "must not be empty")
        _check_size("chat", request.chat.ByteSize(), MAX_TEXT_BYTES, check)
        conversation = read_chat(request.chat, "chat", check)
        fields = read_chat_fields(request.chat, "chat", check)
        if request.HasField("add_generation_prompt"):
            fields["add_generation_prompt"] = request.add_generation_prompt
        steps = _render(self._engine.tokenizer, conversation, fields)
        return await self._run(steps, QUICK_BYTES + 1, check, _CHAT_PATHS)  # never quick: the first one imports what renders it

    async def _run(self, steps: Steps[Response], size: int, check: FieldChecks, paths: Mapping[str, str] = {}) -> Response:
        """The result of `steps`, run by a worker unless `check` has violations. Fields in their errors are renamed by `paths`."""
        check.finish(InvalidRequestError)
        try:
            return await asyncio.wrap_future(self._workers.submit(steps, size))
        except InvalidRequestError as error:
            raise error.moved(lambda field: paths.get(field, field)) from error


def _check_size(field: str, size: int, limit: int, check: FieldChecks) -> None:
    if size > limit:
        check.add(field, f"{size} bytes are more than {limit}")


def _tokenize(tokenizer: Tokenizer, request: messages.TokenizeRequest) -> Steps[messages.TokenizeResponse]:
    with_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    if request.with_pieces:
        tokens = tokenizer.encode_located(request.text, add_special_tokens=with_special)
        return messages.TokenizeResponse(
            num_tokens=len(tokens.ids), token_ids=tokens.ids, pieces=tokens.pieces, start_offsets=tokens.starts, end_offsets=tokens.ends
        )
    yield len(request.text)
    ids = tokenizer.encode(request.text, add_special_tokens=with_special)
    return messages.TokenizeResponse(num_tokens=len(ids), token_ids=() if request.count_only else ids)


def _render(tokenizer: Tokenizer, conversation: Sequence[Mapping[str, Any]], fields: ChatFields) -> Steps[messages.RenderChatResponse]:
    text = tokenizer.chat_text(conversation, **fields)
    yield len(text)
    return messages.RenderChatResponse(text=text, token_ids=tokenizer.encode(text, add_special_tokens=False))


def _detokenize(tokenizer: Tokenizer, request: messages.DetokenizeRequest, vocab_size: int) -> Steps[messages.DetokenizeResponse]:
    ids = np.asarray(request.token_ids)
    yield len(ids)
    check = FieldChecks()
    for index in islice(np.flatnonzero(ids >= vocab_size), MAX_NAMED_IDS):
        check.add(f"token_ids[{index}]", f"{ids[index]} is not below vocab_size {vocab_size}")
    check.finish(InvalidRequestError)
    skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return messages.DetokenizeResponse(text=tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special))
