"""The ids of a prompt before it is generated from, where its user wants to hear of each: the logprobs of a prompt travel without ids."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.client.link import Link
from aengine.client.request import write_token_ids
from aengine.errors import InvalidRequestError
from aengine.v1.generation_pb2 import Prompt
from aengine.v1.tokenizer_service_pb2 import RenderChatRequest, TokenizeRequest


async def settle_prompt(link: Link, prompt: Prompt) -> Sequence[int]:
    """Have the server turn `prompt` into ids, put them in its place and return them. Raises `AEngineError`."""
    try:
        match prompt.WhichOneof("content"):
            case "text":
                ids = (await link.ask(link.tokenizer.Tokenize, TokenizeRequest(text=prompt.text))).token_ids
            case "chat":
                ids = (await link.ask(link.tokenizer.RenderChat, RenderChatRequest(chat=prompt.chat))).token_ids
            case _:
                return prompt.token_ids.ids
    except InvalidRequestError as error:
        raise error.moved(lambda _: "prompt") from error
    write_token_ids(ids, prompt)
    return prompt.token_ids.ids
