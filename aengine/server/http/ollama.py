"""The API of Ollama, for programs that speak no other: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, and what is served:
`/api/tags`, `/api/show`, `/api/ps`, `/api/version`.

A body is written as one of OpenAI's, which reads and checks it, and the response as lines of JSON. Owns the names of both. Knows nothing
of how a request is served.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.engine import EmbeddingFields
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, Accepts, FieldChecks, integer, is_not
from aengine.api.outputs import ModelInfo
from aengine.api.request import RequestOptions
from aengine.api.stream import TokenStream
from aengine.chat.preparation import GenerationRequest
from aengine.chat.text_source import CallEnded, ContentDelta, MessageBuilder, ReasoningDelta
from aengine.server.core.core import Backend, Core
from aengine.server.core.errors import ServiceError
from aengine.server.core.generation import embed_all, submit
from aengine.server.http import chat_completions, completions
from aengine.server.http.bodies import OBJECT, STRING, Fields, read_body, read_generation
from aengine.server.http.body_parameters import BodyParameters
from aengine.server.http.chat_output import OutputReader, Piece, TokenTexts, chat_logprobs
from aengine.server.http.http_errors import ErrorStyle, to_json
from aengine.server.http.http_exchange import HttpExchange

LINES = b"application/x-ndjson"
ERRORS = ErrorStyle(lambda error, status, debug: {"error": error.message}, start=b"", end=b"\n")
SPOKEN_VERSION = "0.12.0"
"""The version of Ollama that clients are told: some ask for one that has tools and structured outputs."""
_LATEST = ":latest"
_STARTED = time.time()
_OPTIONS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
"""Names of sampling parameters in `options`, and ours."""
IGNORED: Mapping[str, str] = {
    "keep_alive": "the model stays, where there is but one",
    "context": "prefixes are cached; it is the messages that say what came before",
    "template": "it is the model's",
    "truncate": "what is too long is refused",
    "verbose": "all that is told is told",
}
"""Fields that change nothing here, and why."""
_DURATION = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_FOR_EVER = 1e9  # seconds
_UNLIMITED = (-1, -2)  # of num_predict: to the end of the context
_NO_OPTION = "it is of how Ollama runs models"
_FORMAT = Accepts(lambda value: value in ("", "json") or isinstance(value, dict), "json, or a JSON schema")
_THINK = Accepts(lambda value: isinstance(value, bool | str), "true, false, or an effort such as high")
_INPUT = Accepts(lambda value: isinstance(value, str | list), "a text, or a list of texts")


@dataclass(frozen=True, slots=True)
class _Asked:
    request: GenerationRequest
    parameters: BodyParameters
    is_stream: bool
    is_chat: bool  # the response has a message, and not a text


# ---- generation ----------------------------------------------------------------------------------------------------------


async def chat(core: Core, exchange: HttpExchange) -> None:
    """`/api/chat`: respond with the answer to a conversation, as lines unless `stream` is false."""
    check = FieldChecks()
    given = await read_generation(exchange, check)
    messages = given.take_field("messages", Accepts(lambda value: isinstance(value, list), "a list of messages"), [])
    tools = given.take_field("tools", Accepts(lambda value: isinstance(value, list), "a list of tools"))
    body = {"messages": [*_messages(messages)], **({"tools": tools} if tools else {})}
    await _generate(core, exchange, given, body, is_empty=not messages, is_chat=True)


async def generate(core: Core, exchange: HttpExchange) -> None:
    """`/api/generate`: respond with what follows a text: by the chat template, unless `raw` is true or the model has none."""
    check = FieldChecks()
    given = await read_generation(exchange, check)
    prompt, system = given.take_field("prompt", STRING, ""), given.take_field("system", STRING, "")
    images = given.take_field("images", Accepts(lambda value: isinstance(value, list), "a list of images in base64"))
    if given.take_field("suffix", STRING, ""):
        given.refuse("suffix", "is not possible: nothing is filled in between texts")
    if given.take_field("raw", FLAG, False) or not core.engine.model_info.chat_template:
        body: dict[str, Any] = {"prompt": system + prompt}
    else:
        begin = [{"role": "system", "content": system}] if system else []
        body = {"messages": [*_messages([*begin, {"role": "user", "content": prompt, "images": images}])]}
    await _generate(core, exchange, given, body, is_empty=not prompt and not images, is_chat=False)


def _seconds_of(value: Any) -> float | None:
    match = _DURATION.fullmatch(str(value)) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    if match is None:
        return None
    seconds = float(match[1]) * _SECONDS[match[2]]
    return seconds if seconds >= 0 else _FOR_EVER


def _keep(core: Core, given: Fields, model: str) -> None:
    """`keep_alive`: seconds without a request after which one of several models begins to give its memory back."""
    models, value = core.backend.models, given.peek("keep_alive")
    if models is None or value is None:
        return
    if (seconds := _seconds_of(value)) is None:
        raise InvalidRequestError.of("keep_alive", is_not(value, "a number of seconds, or one with ms, s, m or h"))
    models.find(model).keep_alive = seconds


async def _generate(core: Core, exchange: HttpExchange, given: Fields, body: dict[str, Any], *, is_empty: bool, is_chat: bool) -> None:
    model = _model_name(core, given.take_field("model", STRING, ""))
    _keep(core, given, model)
    if is_empty:  # which asks for the model to be loaded
        info, _ = core.backend.require_model(model)
        text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        await exchange.respond_json({**_head(info.name), **text, "done": True, "done_reason": "load"})
        return
    asked = _read(given, {**body, "model": model}, is_chat=is_chat)
    asked.parameters.tell_ignored(core, exchange)
    with asked.parameters.located():
        async with await submit(core.backend, asked.request) as generation:
            await generation.stream.started()
            writer = _Writer(core, asked, generation.model)
            reader = OutputReader(generation, writer.texts)
            if asked.is_stream:
                await exchange.begin_events(LINES)
            async for (piece,) in reader.pieces():
                lines = writer.lines(piece)
                if asked.is_stream and lines:
                    await exchange.send(lines)
        last = writer.end(generation.stream)
        if asked.is_stream:
            await exchange.end_events(last)
        else:
            await exchange.respond(last)


def _read(given: Fields, body: dict[str, Any], *, is_chat: bool) -> _Asked:
    """Read the fields of a request whose messages, tools or prompt are in `body`, in OpenAI's words. Raises `InvalidRequestError` with all
    violations."""
    check, is_stream = given.check, given.take_field("stream", FLAG, True)
    ignored = {name: IGNORED[name] for name in given.take_all(IGNORED)}
    options = given.sub("options") or given.within("options", {})
    body |= {_OPTIONS[name]: value for name, value in options.take_all(_OPTIONS).items()}
    if body.get("max_tokens") in (None, *_UNLIMITED):
        body["max_tokens"] = -1
    ignored |= {f"options.{name}": _NO_OPTION for name in options.rest()}
    form, think = given.take_field("format", _FORMAT, ""), given.take_field("think", _THINK)
    if "messages" in body:
        if form:
            as_schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
            body["response_format"] = as_schema if isinstance(form, dict) else {"type": "json_object"}
        if isinstance(think, bool):
            body["chat_template_kwargs"] = {"enable_thinking": think}
        elif think is not None:
            body["reasoning_effort"] = think
    elif form:
        body |= {"json_schema": form} if isinstance(form, dict) else {"structured_outputs": {"json_object": True}}
    body |= given.take_all(("session",))
    wanted, top = given.take_field("logprobs", FLAG, False), given.take_field("top_logprobs", integer(0), 0)
    if wanted:
        body |= {"logprobs": True, "top_logprobs": top} if "messages" in body else {"logprobs": top}
    given.refuse_rest(("model", "stream", "options", "format", "think", *IGNORED), "there is no field {}")
    written = Fields(body, "", check)
    if "messages" in body:
        chat = chat_completions.read_request(written, check)
        request, parameters = chat.request, chat.parameters
    else:
        text = completions.read_request(written, check)
        (request,), parameters = text.requests, text.parameters
    for what, why in ignored.items():
        parameters.note_ignored(what, why)
    parameters.names |= {ours: f"options.{name}" for name, ours in _OPTIONS.items()}
    return _Asked(request, parameters, is_stream, is_chat)


def _messages(given: Iterable[Any]) -> Iterable[Any]:
    """Messages of Ollama's as OpenAI's; what is none is left to be refused."""
    open_calls: list[tuple[str, str]] = []  # ids of calls and their tools, whose results have not come
    for index, message in enumerate(given):
        if not isinstance(message, dict):
            yield message
            continue
        written = {name: value for name, value in message.items() if value is not None and name not in ("images", "tool_calls", "thinking")}
        if message.get("thinking"):
            written["reasoning_content"] = message["thinking"]
        if message.get("images"):
            images = message["images"] if isinstance(message["images"], list) else [message["images"]]
            sources = [{"type": "image", "source": {"type": "base64", "data": image}} for image in images]
            written["content"] = [{"type": "text", "text": message.get("content") or ""}, *sources]
        if message.get("tool_calls"):
            written["tool_calls"] = [*_calls(message["tool_calls"], index)]
            open_calls = [(call["id"], call["function"].get("name")) for call in written["tool_calls"] if "function" in call]
            written.setdefault("content", "")
        if message.get("role") == "tool":
            name = written.pop("tool_name", None) or written.pop("name", None)
            at = next((at for at, (_, tool) in enumerate(open_calls) if tool == name), 0)
            identity = open_calls.pop(at)[0] if open_calls else "call"
            written.setdefault("tool_call_id", identity)
            if name is not None:
                written["name"] = name
        yield written


def _calls(given: Any, index: int) -> Iterable[Any]:
    for number, call in enumerate(given if isinstance(given, list) else [given]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            yield call
            continue
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        identity = call.get("id") or f"call_{index}_{number}"
        yield {"id": identity, "type": "function", "function": {"name": function.get("name"), "arguments": text}}


class _Writer:
    """Writes the output of one generation."""

    def __init__(self, core: Core, asked: _Asked, model: str) -> None:
        self._asked, self._model = asked, model
        self.texts = TokenTexts(core.engine) if asked.request.params.logprobs is not None else None
        self._builder = MessageBuilder()
        self._text: list[str] = []  # of an output that is not parsed
        self._logprobs: list[dict[str, Any]] = []
        self._begin = time.monotonic()
        self._reason = "stop"

    def lines(self, piece: Piece) -> bytes:
        """The lines of a piece; empty if there is nothing to say yet."""
        if piece.last.finish_reason is not None:
            self._reason = "length" if piece.last.finish_reason.cuts else "stop"
        content, thinking, calls = "", "", []
        for event in piece.events:
            self._builder.add_event(event)
            if isinstance(event, ContentDelta):
                content += event.text
            elif isinstance(event, ReasoningDelta):
                thinking += event.text
            elif isinstance(event, CallEnded):
                calls.append(_call(self._builder, event.index))
        if not isinstance(self._asked.request.prompt, list):
            content = "".join([token.text for token in piece.tokens])
            self._text.append(content)
        logprobs = [] if self.texts is None else chat_logprobs(piece.tokens, self.texts, with_ids=False)
        self._logprobs += logprobs
        if not content and not thinking and not calls and not logprobs:
            return b""
        ours = {"logprobs": logprobs} if logprobs else {}
        return to_json({**_head(self._model), **self._shaped(content, thinking, calls), "done": False, **ours}) + b"\n"

    def end(self, stream: TokenStream) -> bytes:
        """The last line, or, of what is no stream, the whole response."""
        usage, timing = stream.usage, stream.timing
        if self._asked.is_stream:
            shaped = self._shaped("", "", [])
        else:
            message = self._builder.message()
            content = message.content if isinstance(self._asked.request.prompt, list) else "".join(self._text)
            shaped = self._shaped(content, message.reasoning, [_call(self._builder, at) for at in range(len(message.tool_calls))])
            if self.texts is not None:
                shaped["logprobs"] = self._logprobs
        told = {
            "total_duration": int((time.monotonic() - self._begin) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int((timing.first_token or 0.0) * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((timing.decode or 0.0) * 1e9),
        }
        line = to_json({**_head(self._model), **shaped, "done": True, "done_reason": self._reason, **told})
        return line + b"\n" if self._asked.is_stream else line

    def _shaped(self, content: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ours: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._asked.is_chat:
            return {"response": content, **ours}
        return {"message": {"role": "assistant", "content": content, **ours, **({"tool_calls": calls} if calls else {})}}


def _call(builder: MessageBuilder, index: int) -> dict[str, Any]:
    call = builder.message().tool_calls[index]
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:  # it was cut
        arguments = {}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


# ---- embeddings ----------------------------------------------------------------------------------------------------------


async def embed(core: Core, exchange: HttpExchange) -> None:
    """`/api/embed`: respond with the embedding of each text."""
    await _embed(core, exchange, "input")


async def embed_one(core: Core, exchange: HttpExchange) -> None:
    """`/api/embeddings`, the older one: respond with the embedding of one text."""
    await _embed(core, exchange, "prompt")


async def _embed(core: Core, exchange: HttpExchange, name: str) -> None:
    begin, check = time.monotonic(), FieldChecks()
    given = await read_body(exchange, check)
    model = _model_name(core, given.take_field("model", STRING, ""))
    value = given.need(name, _INPUT if name == "input" else STRING, "")
    texts = value if isinstance(value, list) else [value]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            given.refuse(f"{name}[{index}]", "is not a string")
    fields = EmbeddingFields(dimensions=given.take_field("dimensions", integer(1)), normalize=name == "input")
    given.take_field("options", OBJECT)
    _keep(core, given, model)
    given.drop(IGNORED)
    given.refuse_rest(("model", name, "dimensions", "options", *IGNORED), "there is no field {}")
    check.finish(InvalidRequestError)
    try:
        served, found = await embed_all(core.backend, model, [(text, RequestOptions()) for text in texts], fields) if texts else (model, [])
    except InvalidRequestError as error:
        raise error.moved(lambda field: field.replace("inputs", name)) from error
    vectors = [one.values.tolist() for one in found]
    if name == "prompt":
        await exchange.respond_json({"embedding": vectors[0]})
        return
    told = {"total_duration": int((time.monotonic() - begin) * 1e9), "load_duration": 0}
    await exchange.respond_json({"model": served, "embeddings": vectors, **told, "prompt_eval_count": sum(one.num_tokens for one in found)})


# ---- what is served ------------------------------------------------------------------------------------------------------


async def tags(core: Core, exchange: HttpExchange) -> None:
    """`/api/tags`: respond with the model under each of its names, and its adapters."""
    described = [{**_described(core.backend, name), "modified_at": _written(_STARTED)} for name in core.backend.listed_names]
    await exchange.respond_json({"models": described})


async def running(core: Core, exchange: HttpExchange) -> None:
    """`/api/ps`: respond with the models that are loaded."""
    found = []
    for backend in core.backend.every:
        info = backend.model_info
        ours = {"expires_at": "9999-12-31T23:59:59Z", "context_length": info.max_model_len}
        described = _described(backend, info.name)
        found.append({**described, **ours, "size_vram": described["size"] if info.device.startswith("cuda") else 0})
    await exchange.respond_json({"models": found})


async def show(core: Core, exchange: HttpExchange) -> None:
    """`/api/show`: respond with what a model is and can do."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    older = given.take_field("name", STRING, "")
    info, _ = core.backend.require_model(_model_name(core, given.take_field("model", STRING, older)))
    architecture = info.family or "model"
    can = {
        "completion": info.output_head,
        "tools": bool(info.call_format),
        "thinking": bool(info.reasoning_format),
        "vision": info.max_images > 0,
        "embedding": info.hidden_size > 0,
    }
    facts = {
        "general.architecture": architecture,
        "general.basename": info.name,
        "general.parameter_count": info.num_parameters,
        f"{architecture}.context_length": info.max_model_len,
        f"{architecture}.embedding_length": info.hidden_size,
        f"{architecture}.vocab_size": info.vocab_size,
    }
    await exchange.respond_json(
        {
            **{"modelfile": f"FROM {info.name}", "parameters": "", "template": "", "license": ""},
            "details": _details(info),
            "model_info": facts,
            "capabilities": [name for name, has in can.items() if has],
            "modified_at": _written(_STARTED),
        }
    )


async def version(core: Core, exchange: HttpExchange) -> None:
    """`/api/version`: respond with the version of Ollama whose API this is."""
    await exchange.respond_json({"version": SPOKEN_VERSION})


def _model_name(core: Core, name: str) -> str:
    """The name of a model without the tag that clients add."""
    if not name.endswith(_LATEST):
        return name
    try:
        core.backend.require_model(name)
    except ServiceError:
        return name.removesuffix(_LATEST)
    return name


def _described(backend: Backend, name: str) -> dict[str, Any]:
    if (info := backend.info_of(name)) is None:
        return {"name": name, "model": name, "size": 0, "digest": sha256(name.encode()).hexdigest(), "details": {}}
    size = info.num_parameters * (4 if info.dtype == "float32" else 2)
    digest = sha256(f"{name} {info.architecture} {info.num_parameters}".encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(info)}


def _details(info: ModelInfo) -> dict[str, Any]:
    count = info.num_parameters
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    kind = info.quantization or info.dtype
    return {
        **{"parent_model": "", "format": "safetensors", "family": info.family, "families": [info.family]},
        **{"parameter_size": size, "quantization_level": kind},
    }


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": _written(time.time())}


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
