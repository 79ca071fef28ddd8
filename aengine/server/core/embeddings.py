"""The embeddings that one call asks for, whichever door it came by."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from aengine.api.engine import EmbeddingFields
from aengine.api.errors import InvalidRequestError, RequestEndedError
from aengine.api.outputs import Embedding
from aengine.api.request import ChatFields, Prompt, RequestOptions
from aengine.server.core.calls_in_flight import CURRENT_CALL, current_caller
from aengine.server.core.core import Backend
from aengine.server.core.errors import ServiceError

MAX_INPUTS = 2048
MAX_AT_ONCE = 32
"""Inputs of a call in the engine: enough to fill its steps. Tokenizing so many short ones holds up the event loop for some ten ms."""


async def embed_all(
    backend: Backend,
    model: str,
    inputs: Sequence[tuple[Prompt, RequestOptions]],
    fields: EmbeddingFields,
    deadline: float | None = None,
) -> tuple[str, list[Embedding]]:
    """The name of the model that `model` means, and the embeddings in the order of the `inputs`. No more are submitted at a time than the
    engine runs or lets wait, so that a long list is not too long for its queue. `deadline`: of the call, on time.monotonic.

    The first failure of one fails all; what is wrong with the prompt of input i is named `inputs[i]`, with its options for chats
    `inputs[i].tools` and so on. Raises what `AsyncEngine.embed` raises, and `ServiceError`.
    """
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequestError.of("inputs", f"{len(inputs)} inputs are not 1 to {MAX_INPUTS}")
    engine, caller, call = backend.engine, current_caller(), CURRENT_CALL.get()
    info, adapter = backend.require_model(model)
    limits = engine.engine_info
    if 4 * len(inputs) * min(fields.get("dimensions") or info.hidden_size, info.hidden_size) > (room := backend.max_message_bytes):
        raise ServiceError("ANSWER_TOO_LARGE", f"{len(inputs)} embeddings take more than {room} bytes, which one message may have")
    left = iter(enumerate(inputs))
    found: dict[int, Embedding] = {}

    async def work() -> None:
        for index, (prompt, options) in left:
            timeouts = [options.timeout, None if deadline is None else max(1e-9, deadline - time.monotonic())]
            timeout = min((seconds for seconds in timeouts if seconds is not None), default=None)
            try:
                backend.require_model(model, options.adapter)
                engine_id = backend.engine_id(options.request_id, caller) or uuid.uuid4().hex
                request_id = options.request_id or engine_id
                options = replace(
                    options,
                    request_id=engine_id,
                    adapter=adapter or options.adapter,
                    timeout=timeout,
                    tenant=options.tenant or caller.tenant,
                )
                backend.embeddings.add_request(request_id, caller, engine_id)
                try:
                    found[index] = embedding = await engine.embed(prompt, options, **fields)
                finally:
                    backend.embeddings.discard(request_id, engine_id)
            except InvalidRequestError as error:
                raise error.moved(partial(of_input, index)) from error
            except RequestEndedError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise ServiceError("DEADLINE_PASSED", "the deadline passed before the embeddings were done") from error
                raise
            if call is not None:
                call.prompt_tokens += embedding.num_tokens

    at_once = min(len(inputs), limits.max_num_seqs, limits.max_queued_requests or MAX_AT_ONCE, MAX_AT_ONCE)
    with backend.admission.enter_generation(at_once):
        tasks = [asyncio.create_task(work()) for _ in range(at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return adapter or info.name, [found[index] for index in range(len(inputs))]


def of_input(index: int, field: str) -> str:
    """The name of a field of one of the inputs."""
    if field == "prompt":
        return f"inputs[{index}]"
    return f"inputs[{index}].{field}" if field in ChatFields.__annotations__ else field
