"""Texts and ids: `/tokenize`, `/detokenize` and `/tokenizer_info`, with the fields that vLLM gives them."""

from __future__ import annotations

from typing import Any, cast

from aengine.chat_prompts import ChatFields
from aengine.checks import FLAG, FieldChecks
from aengine.errors import InvalidRequestError
from aengine.server.core.backend import require_model
from aengine.server.core.core import Core
from aengine.server.http.bodies import IDS, STRING, Fields, read_body
from aengine.server.http.chat_input import read_messages, read_tools
from aengine.server.http.exchange import Exchange
from aengine.server.http.parameters import CHAT_OPTIONS, Parameters

_TEXT = ("model", "prompt", "add_special_tokens", "with_pieces")
_CHAT = ("model", "messages", "add_special_tokens", *CHAT_OPTIONS)


async def tokenize(core: Core, exchange: Exchange) -> None:
    """`{"prompt": text}` or `{"messages": [...]}` -> `{"tokens": [ids], "count", "max_model_len"}`; with_pieces, of a text, adds `pieces`,
    `start_offsets` and `end_offsets`, in bytes of UTF-8."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    info, _ = require_model(core.engine, given.take("model", STRING, ""))
    found = await (_tokenize_chat if "messages" in given else _tokenize_text)(core, given)
    await exchange.respond_json({**found, "count": len(found["tokens"]), "max_model_len": info.max_model_len})


async def _tokenize_text(core: Core, given: Fields) -> dict[str, Any]:
    text = given.need("prompt", STRING, "")
    with_special, with_pieces = given.take("add_special_tokens", FLAG, True), given.take("with_pieces", FLAG, False)
    _finish(given, _TEXT)
    try:
        if not with_pieces:
            return {"tokens": await core.texts.tokenize(text, add_special_tokens=with_special)}
        located = await core.texts.locate(text, add_special_tokens=with_special)
    except InvalidRequestError as error:
        raise error.moved(lambda field: "prompt" if field == "text" else field) from error
    return {"tokens": located.ids, "pieces": located.pieces, "start_offsets": located.starts, "end_offsets": located.ends}


async def _tokenize_chat(core: Core, given: Fields) -> dict[str, Any]:
    parameters = Parameters(given)
    parameters.names["prompt"] = "messages"
    messages = read_messages(given)
    parameters.put("tools", read_tools(given), "tools")
    parameters.take_options(CHAT_OPTIONS)
    given.drop(("add_special_tokens",))  # the template writes those that there are
    options = parameters.options()
    _finish(given, _CHAT)
    with parameters.located():
        rendered = await core.texts.render(messages, cast(ChatFields, {name: getattr(options, name) for name in CHAT_OPTIONS}))
    return {"tokens": rendered.token_ids}


async def detokenize(core: Core, exchange: Exchange) -> None:
    """`{"tokens": [ids]}` -> `{"prompt": text}`."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    require_model(core.engine, given.take("model", STRING, ""))
    ids, skips = given.need("tokens", IDS, ()), given.take("skip_special_tokens", FLAG, False)
    _finish(given, ("model", "tokens", "skip_special_tokens"))
    try:
        text = await core.texts.detokenize(ids, skip_special_tokens=skips)
    except InvalidRequestError as error:
        raise error.moved(lambda field: field.replace("token_ids", "tokens")) from error
    await exchange.respond_json({"prompt": text})


async def tokenizer_info(core: Core, exchange: Exchange) -> None:
    """What evaluations ask before they leave tokenizing to the server: the text of the token that ends an output."""
    ids = core.engine.model_info.eos_token_ids[:1]
    await exchange.respond_json({"eos_token": await core.texts.detokenize(ids, skip_special_tokens=False) if ids else None})


def _finish(given: Fields, known: tuple[str, ...]) -> None:
    given.refuse_rest(known)
    given.check.finish(InvalidRequestError)
