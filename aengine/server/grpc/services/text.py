"""The services that generate nothing: `EmbeddingService`, embeddings of the served model, and `TokenizerService`, its tokenizer and chat
template as generation uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import replace

from grpc import ServicerContext

from aengine.api.engine import EmbeddingFields
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.request import NamedImage, Prompt, RequestOptions
from aengine.server.core.core import MAX_TEXT_BYTES, Backend, Core, check_size
from aengine.server.core.generation import MAX_INPUTS, embed_all
from aengine.server.grpc.services.generation import deadline_of
from aengine.v1 import embedding_service_pb2 as embeddings_v1
from aengine.v1 import generation_pb2
from aengine.v1 import tokenizer_service_pb2 as tokenizer_v1
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceServicer
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer
from aengine.wire.names import CHAT, POOLINGS, images_in
from aengine.wire.request import read_chat, read_chat_fields, read_prompt
from aengine.wire.response import write_hidden_states

READ_AT_ONCE = 16
"""Inputs that are read before the event loop gets its turn."""


class EmbeddingServicer(EmbeddingServiceServicer):
    """`EmbeddingService` on the engine of a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Embed(self, request: embeddings_v1.EmbedRequest, context: ServicerContext) -> embeddings_v1.EmbedResponse:
        inputs, fields = await _read_request(request)
        try:
            model, embeddings = await embed_all(self._backend, request.model, inputs, fields, deadline_of(context))
        except InvalidRequestError as error:
            raise error.moved(_path_of) from error
        response = embeddings_v1.EmbedResponse(model=model)
        for one in embeddings:
            response.embeddings.add(values=one.values.tolist(), num_tokens=one.num_tokens, cached_tokens=one.cached_tokens)
            await asyncio.sleep(0)  # thousands of numbers take a while to write
        return response

    async def StreamHiddenStates(
        self, request: embeddings_v1.StreamHiddenStatesRequest, context: ServicerContext
    ) -> AsyncGenerator[embeddings_v1.StreamHiddenStatesResponse, None]:
        check = FieldChecks()
        prompt, options = _read_input(request.prompt, "prompt", _read_options(request, check), check)
        check.finish(InvalidRequestError)
        fields = EmbeddingFields(pooling="tokens", normalize=False, first_token=request.first_token, experts=request.experts)
        if request.layers:
            fields["layers"] = tuple(request.layers)
        try:
            _, (found,) = await embed_all(self._backend, request.model, [(prompt, options)], fields, deadline_of(context))
        except InvalidRequestError as error:
            raise error.moved(lambda field: _path_of(field).replace("inputs[0]", "prompt")) from error
        for piece in write_hidden_states(found):
            yield piece


async def _read_request(request: embeddings_v1.EmbedRequest) -> tuple[list[tuple[Prompt, RequestOptions]], EmbeddingFields]:
    """Raises `InvalidRequestError` with every violation that shows in the message."""
    check = FieldChecks()
    pooling = POOLINGS.get(request.pooling)
    if request.pooling and pooling is None:
        check.add_violation("pooling", f"{request.pooling} is none of 1 to {max(POOLINGS)}")
    options = _read_options(request, check)
    inputs: list[tuple[Prompt, RequestOptions]] = []
    for index, message in enumerate(request.inputs[: MAX_INPUTS + 1]):  # with one too many it is refused
        if index % READ_AT_ONCE == 0:
            await asyncio.sleep(0)
        inputs.append(_read_input(message, f"inputs[{index}]", options, check))
    check.finish(InvalidRequestError)
    fields = EmbeddingFields(pooling=pooling, normalize=request.normalize if request.HasField("normalize") else True)
    if request.HasField("dimensions"):
        fields["dimensions"] = request.dimensions
    return inputs, fields


def _read_options(request: embeddings_v1.EmbedRequest | embeddings_v1.StreamHiddenStatesRequest, check: FieldChecks) -> RequestOptions:
    try:
        salt, adapter = request.cache.salt or None, request.adapter or None
        return RequestOptions(priority=request.priority, tenant=request.tenant, cache_salt=salt, adapter=adapter)
    except InvalidRequestError as error:
        check.violations += error.moved(_path_of).violations
        return RequestOptions()


def _read_input(message: generation_pb2.Prompt, path: str, options: RequestOptions, check: FieldChecks) -> tuple[Prompt, RequestOptions]:
    prompt = read_prompt(message, path, check)
    chat = read_chat_fields(message.chat, f"{path}.chat", check) if message.HasField("chat") else {}
    try:
        return prompt, replace(options, **chat) if chat else options
    except InvalidRequestError as error:
        check.violations += error.moved(lambda field: f"{path}.chat.{field}").violations
        return prompt, options


def _path_of(field: str) -> str:
    """Where a field of `embed_all` is found in the message."""
    return "cache.salt" if field == "cache_salt" else field.replace("].", "].chat.")


_CHAT_PATHS = {"prompt": "chat", **{name: f"chat.{theirs}" for name, theirs in CHAT.items()}}


class TokenizerServicer(TokenizerServiceServicer):
    """Serves the tokenizers of the models of `core`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Tokenize(self, request: tokenizer_v1.TokenizeRequest, context: ServicerContext) -> tokenizer_v1.TokenizeResponse:
        with ExitStack() as held:
            return await _tokenize(await self._core.of_model(request.model, held), request)

    async def Detokenize(self, request: tokenizer_v1.DetokenizeRequest, context: ServicerContext) -> tokenizer_v1.DetokenizeResponse:
        with ExitStack() as held:
            return await _detokenize(await self._core.of_model(request.model, held), request)

    async def RenderChat(self, request: tokenizer_v1.RenderChatRequest, context: ServicerContext) -> tokenizer_v1.RenderChatResponse:
        with ExitStack() as held:
            return await _renderchat(await self._core.of_model(request.model, held), request)


async def _tokenize(core: Core, request: tokenizer_v1.TokenizeRequest) -> tokenizer_v1.TokenizeResponse:
    core.backend.require_model(request.model)
    with_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    if request.count_only and request.with_pieces:
        raise InvalidRequestError.of("with_pieces", "cannot be combined with count_only, which answers with the number alone")
    if request.with_pieces and request.literals:
        raise InvalidRequestError.of("literals", "cannot be combined with with_pieces")
    if request.with_pieces:
        tokens = await core.texts.locate(request.text, add_special_tokens=with_special)
        return tokenizer_v1.TokenizeResponse(
            num_tokens=len(tokens.ids), token_ids=tokens.ids, pieces=tokens.pieces, start_offsets=tokens.starts, end_offsets=tokens.ends
        )
    if request.HasField("pair"):
        if request.with_pieces or request.literals:
            raise InvalidRequestError.of("pair", "cannot be combined with with_pieces or literals")
        ids = await core.texts.tokenize_pair(request.text, request.pair)
    else:
        literals = [(place.start, place.end) for place in request.literals]
        ids = await core.texts.tokenize(request.text, add_special_tokens=with_special, literals=literals)
    return tokenizer_v1.TokenizeResponse(num_tokens=len(ids), token_ids=() if request.count_only else ids)


async def _detokenize(core: Core, request: tokenizer_v1.DetokenizeRequest) -> tokenizer_v1.DetokenizeResponse:
    core.backend.require_model(request.model)
    skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    ids = request.token_ids
    response = tokenizer_v1.DetokenizeResponse(text=await core.texts.detokenize(ids, skip_special_tokens=skip_special))
    if request.with_token_bytes:
        known = await core.backend.engine.token_bytes(set(ids))
        response.token_bytes.extend([known[token_id] for token_id in ids])
    return response


async def _renderchat(core: Core, request: tokenizer_v1.RenderChatRequest) -> tokenizer_v1.RenderChatResponse:
    core.backend.require_model(request.model)
    check = FieldChecks()
    if not request.chat.messages:
        check.add_violation("chat.messages", "must not be empty")
    check_size("chat", request.chat.ByteSize() - sum(image.ByteSize() for image in images_in(request.chat)), MAX_TEXT_BYTES)
    conversation = read_chat(request.chat, "chat", check)
    fields = read_chat_fields(request.chat, "chat", check)
    check.finish(InvalidRequestError)
    if request.HasField("add_generation_prompt"):
        fields["add_generation_prompt"] = request.add_generation_prompt
    try:
        text, token_ids = await core.texts.render(conversation, fields)
    except InvalidRequestError as error:
        raise error.moved(lambda field: _CHAT_PATHS.get(field, field)) from error
    literals = [tokenizer_v1.TextSpan(start=start, end=end) for start, end in text.literals]
    images = [tokenizer_v1.ImageNames(token_id=one.token_id, names=one.names) for one in text.images if isinstance(one, NamedImage)]
    return tokenizer_v1.RenderChatResponse(text=text.text, token_ids=token_ids, literals=literals, images=images)
