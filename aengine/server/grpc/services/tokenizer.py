"""`TokenizerService`: the model's tokenizer and chat template, as generation uses them."""

from __future__ import annotations

from grpc import ServicerContext

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.server.core.core import Backend
from aengine.server.core.texts import MAX_TEXT_BYTES, ServedTexts, check_size
from aengine.v1 import tokenizer_service_pb2 as messages
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer
from aengine.wire.names import CHAT
from aengine.wire.request import read_chat, read_chat_fields

_CHAT_PATHS = {"prompt": "chat", **{name: f"chat.{name}" for name in CHAT}}


class TokenizerServicer(TokenizerServiceServicer):
    """Serves the tokenizer of the backend's engine, with which `texts` works."""

    def __init__(self, backend: Backend, texts: ServedTexts) -> None:
        self._backend = backend
        self._texts = texts

    async def Tokenize(self, request: messages.TokenizeRequest, context: ServicerContext) -> messages.TokenizeResponse:
        self._backend.require_model(request.model)
        with_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        if request.count_only and request.with_pieces:
            raise InvalidRequestError.of("with_pieces", "cannot be combined with count_only, which answers with the number alone")
        if request.with_pieces and request.literals:
            raise InvalidRequestError.of("literals", "cannot be combined with with_pieces")
        if request.with_pieces:
            tokens = await self._texts.locate(request.text, add_special_tokens=with_special)
            return messages.TokenizeResponse(
                num_tokens=len(tokens.ids), token_ids=tokens.ids, pieces=tokens.pieces, start_offsets=tokens.starts, end_offsets=tokens.ends
            )
        ids = await self._texts.tokenize(
            request.text, add_special_tokens=with_special, literals=[(place.start, place.end) for place in request.literals]
        )
        return messages.TokenizeResponse(num_tokens=len(ids), token_ids=() if request.count_only else ids)

    async def Detokenize(self, request: messages.DetokenizeRequest, context: ServicerContext) -> messages.DetokenizeResponse:
        self._backend.require_model(request.model)
        skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ids = request.token_ids
        response = messages.DetokenizeResponse(text=await self._texts.detokenize(ids, skip_special_tokens=skip_special))
        if request.with_token_bytes:
            known = await self._backend.engine.token_bytes(set(ids))
            response.token_bytes.extend([known[token_id] for token_id in ids])
        return response

    async def RenderChat(self, request: messages.RenderChatRequest, context: ServicerContext) -> messages.RenderChatResponse:
        self._backend.require_model(request.model)
        check = FieldChecks()
        if not request.chat.messages:
            check.add_violation("chat.messages", "must not be empty")
        check_size("chat", request.chat.ByteSize(), MAX_TEXT_BYTES)
        conversation = read_chat(request.chat, "chat", check)
        fields = read_chat_fields(request.chat, "chat", check)
        check.finish(InvalidRequestError)
        if request.HasField("add_generation_prompt"):
            fields["add_generation_prompt"] = request.add_generation_prompt
        try:
            text, token_ids = await self._texts.render(conversation, fields)
        except InvalidRequestError as error:
            raise error.moved(lambda field: _CHAT_PATHS.get(field, field)) from error
        literals = [messages.TextSpan(start=start, end=end) for start, end in text.literals]
        return messages.RenderChatResponse(text=text.text, token_ids=token_ids, literals=literals)
