"""Prompts as ids, by the server: what a request with logprobs of its prompt needs first, as these come without the ids."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.client.link import Link
from aengine.client.messages import write_token_ids
from aengine.errors import InvalidRequestError
from aengine.v1.generation_pb2 import GenerationSpec
from aengine.v1.tokenizer_service_pb2 import RenderChatRequest, TokenizeRequest
from aengine.wire import field_of


def needs_prompt_ids(spec: GenerationSpec) -> bool:
    return spec.output.HasField("prompt_logprobs")


async def write_prompt_ids(link: Link, spec: GenerationSpec) -> Sequence[int]:
    """Have the server turn the prompt of `spec` into ids, and put them in its place. Raises `AEngineError`."""
    prompt = spec.prompt
    try:
        match prompt.WhichOneof("content"):
            case "text":
                write_token_ids((await link.ask(link.tokenizer.Tokenize, TokenizeRequest(text=prompt.text))).token_ids, prompt)
            case "chat":
                write_token_ids((await link.ask(link.tokenizer.RenderChat, RenderChatRequest(chat=prompt.chat))).token_ids, prompt)
    except InvalidRequestError as error:
        raise error.moved(lambda field: field_of(f"spec.prompt.{field}")) from error
    return prompt.token_ids.ids
