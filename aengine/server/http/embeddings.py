"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass

from aengine.api.engine import EmbeddingFields
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, Accepts, FieldChecks, integer, is_not, one_of
from aengine.api.outputs import Embedding
from aengine.api.request import Prompt, RequestOptions
from aengine.server.core.core import Core
from aengine.server.core.generation import embed_all
from aengine.server.http.bodies import IDS, STRING, Fields, read_body
from aengine.server.http.body_parameters import OPTIONS, BodyParameters
from aengine.server.http.http_errors import to_json
from aengine.server.http.http_exchange import HttpExchange

TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "input": "a text, token ids, or a list of texts or of token ids",
    "encoding_format": "float, or base64 of float32, little-endian",
    "dimensions": "so many of the first, made a unit vector again",
    "user": "tenant",
    "prompt_cache_key": "session",
    "pooling": "ours: last or mean",
    "normalize": "ours: false for vectors as they are",
}
"""The fields beside those of ours, and what becomes of them."""
_INPUT = Accepts(lambda value: isinstance(value, str | list), "a text, token ids, or a list of them")
_PROMPT = Accepts(lambda value: isinstance(value, str) or (value and IDS.test(value)), "a text or a list of token ids")


@dataclass(frozen=True, slots=True)
class EmbeddingsAsked:
    """A request to `/v1/embeddings`, as its body was read."""

    model: str
    inputs: list[tuple[Prompt, RequestOptions]]
    is_list: bool  # whether the inputs have numbers
    fields: EmbeddingFields
    in_base64: bool
    parameters: BodyParameters  # has the client's names for fields

    def name_of(self, field: str) -> str:
        """The client's name for a field of `embed_all`."""
        if field.startswith("inputs"):
            return field.replace("inputs", "input") if self.is_list else "input"
        return self.parameters.name_of(field)


async def embeddings(core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    asked = read_request(await read_body(exchange, check), check)
    try:
        model, found = await embed_all(core.backend, asked.model, asked.inputs, asked.fields)
    except InvalidRequestError as error:
        raise error.moved(asked.name_of) from error
    num_tokens = sum(one.num_tokens for one in found)
    head = {"object": "list", "model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
    data = []
    for index, one in enumerate(found):
        data.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (index, _written(one, asked.in_base64)))
        await asyncio.sleep(0)  # thousands of numbers take a while to write
    await exchange.respond(to_json(head)[:-1] + b',"data":[' + b",".join(data) + b"]}")


def _written(embedding: Embedding, in_base64: bool) -> bytes:
    if in_base64:
        return b'"%s"' % base64.b64encode(embedding.values.astype("<f4").tobytes())
    return to_json(embedding.values.tolist())


def read_request(given: Fields, check: FieldChecks) -> EmbeddingsAsked:
    """Read the body of a request to `/v1/embeddings`. Raises `InvalidRequestError` with all violations."""
    parameters = BodyParameters(given)
    model = given.take_field("model", STRING, "")
    value = given.need("input", _INPUT, " ")
    is_list = isinstance(value, list) and not IDS.test(value)
    prompts: list[Prompt] = value if is_list else [value]
    for index, prompt in enumerate(prompts):
        if not _PROMPT.test(prompt):
            given.refuse(f"input[{index}]" if is_list else "input", is_not(prompt, _PROMPT.words))
    in_base64 = given.take_field("encoding_format", one_of("float", "base64"), "float") == "base64"
    fields = EmbeddingFields(
        pooling=given.take_field("pooling", STRING),
        normalize=given.take_field("normalize", FLAG, True),
        dimensions=given.take_field("dimensions", integer(1)),
    )
    parameters.take_openai()
    parameters.take_options(OPTIONS)
    given.refuse_rest((*TAKEN, *OPTIONS))
    options = parameters.options()
    if options.request_id is not None and is_list:
        given.refuse("request_id", "is only possible with one input")
    check.finish(InvalidRequestError)
    return EmbeddingsAsked(model, [(prompt, options) for prompt in prompts], is_list, fields, in_base64, parameters)
