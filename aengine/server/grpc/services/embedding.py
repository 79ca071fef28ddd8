"""`EmbeddingService`: embeddings of the served model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

from grpc import ServicerContext

from aengine.api.engine import EmbeddingFields
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.request import Prompt, RequestOptions
from aengine.server.core.core import Backend
from aengine.server.core.embeddings import MAX_INPUTS, embed_all, of_input
from aengine.v1 import embedding_service_pb2 as messages
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceServicer
from aengine.wire.names import POOLINGS
from aengine.wire.request import read_chat_fields, read_prompt

READ_AT_ONCE = 16
"""Inputs that are read before the event loop gets its turn."""


class EmbeddingServicer(EmbeddingServiceServicer):
    """`EmbeddingService` on the engine of a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Embed(self, request: messages.EmbedRequest, context: ServicerContext) -> messages.EmbedResponse:
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        inputs, fields = await _read_request(request)
        try:
            model, embeddings = await embed_all(self._backend, request.model, inputs, fields, deadline)
        except InvalidRequestError as error:
            raise error.moved(_path_of) from error
        response = messages.EmbedResponse(model=model)
        for one in embeddings:
            response.embeddings.add(values=one.values.tolist(), num_tokens=one.num_tokens, cached_tokens=one.cached_tokens)
            await asyncio.sleep(0)  # thousands of numbers take a while to write
        return response


async def _read_request(request: messages.EmbedRequest) -> tuple[list[tuple[Prompt, RequestOptions]], EmbeddingFields]:
    """Raises `InvalidRequestError` with every violation that shows in the message."""
    check = FieldChecks()
    pooling = POOLINGS.get(request.pooling)
    if request.pooling and pooling is None:
        check.add_violation("pooling", f"{request.pooling} is none of 1 to {max(POOLINGS)}")
    options = RequestOptions()
    try:
        salt, adapter = request.cache.salt or None, request.adapter or None
        options = RequestOptions(priority=request.priority, tenant=request.tenant, cache_salt=salt, adapter=adapter)
    except InvalidRequestError as error:
        check.violations += error.moved(_path_of).violations
    inputs: list[tuple[Prompt, RequestOptions]] = []
    for index, message in enumerate(request.inputs[: MAX_INPUTS + 1]):  # with one too many it is refused
        if index % READ_AT_ONCE == 0:
            await asyncio.sleep(0)
        path = f"inputs[{index}]"
        prompt = read_prompt(message, path, check)
        chat = read_chat_fields(message.chat, f"{path}.chat", check) if message.HasField("chat") else {}
        try:
            inputs.append((prompt, replace(options, **chat) if chat else options))
        except InvalidRequestError as error:
            check.violations += error.moved(partial(of_input, index)).moved(_path_of).violations
    check.finish(InvalidRequestError)
    fields = EmbeddingFields(pooling=pooling, normalize=request.normalize if request.HasField("normalize") else True)
    if request.HasField("dimensions"):
        fields["dimensions"] = request.dimensions
    return inputs, fields


def _path_of(field: str) -> str:
    """Where a field of `embed_all` is found in the message."""
    return "cache.salt" if field == "cache_salt" else field.replace("].", "].chat.")
