"""`OpenAIClient`: chats and completions of a server with OpenAI's API over HTTP, aengine's own or another, as events and totals.

It is no `EngineBase`: over HTTP there are texts, and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aengine.api.errors import ConfigError, ConnectionLostError, ServerError
from aengine.api.fields import shown
from aengine.api.outputs import FinishReason, Timing, Usage
from aengine.api.params import StructuredOutput
from aengine.chat.events import ArgumentsDelta, CallEnded, CallStarted, ChatMessage, ContentDelta, Event, MessageBuilder, ReasoningDelta
from aengine.client.http import HttpConfig, HttpServer

_FINISH_REASONS = {
    "stop": FinishReason.EOS,
    "tool_calls": FinishReason.EOS,
    "function_call": FinishReason.EOS,
    "length": FinishReason.MAX_TOKENS,
}
"""Those that have another name become ERROR."""
_NAMES = {"template_kwargs": "chat_template_kwargs"}  # which more servers know


@dataclass(frozen=True, slots=True)
class HttpModel:
    """What a server over HTTP tells of its model."""

    name: str
    max_model_len: int | None = None  # of prompt and output; None: it does not tell
    chat_template: bool = True  # whether it answers chats; servers that do not tell do

    def describe(self) -> str:
        """Describe the model in one line for people."""
        return self.name + (f": context of {self.max_model_len:,} tokens" if self.max_model_len is not None else "")


class OpenAIClient:
    """Each request has a connection of its own. `model`: what to ask for; None: the first model that the server lists."""

    def __init__(self, config: HttpConfig, model: str | None = None) -> None:
        """Raises `ConfigError` for files that cannot be used."""
        self._server = HttpServer(config)
        self._asked = model
        self.model = HttpModel(model or "")  # once started
        self._limit: int | None = None

    async def start(self) -> None:
        """Find the model. Raises `ConfigError` for one that the server does not list, `ServerError` and `ConnectionLostError`."""
        try:
            listed = (await self._server.get("/models"))["data"]
            models = {str(one["id"]): one for one in listed}
        except ServerError:
            if self._asked is None:
                raise
            return  # some have no list
        except (KeyError, TypeError):
            raise ServerError(f"{self._server.address} lists no models as OpenAI's API does", "HTTP 200") from None
        name = self._asked or next(iter(models), None)
        if name is None:
            raise ServerError(f"{self._server.address} lists no model", "HTTP 200")
        if name not in models:
            raise ConfigError.of("model", f"{name!r} is not served at {self._server.address}; there is {shown(list(models))}")
        told = models[name]
        context = told.get("max_model_len")
        self.model = HttpModel(name, context if isinstance(context, int) else None, told.get("chat_template") is not False)
        if told.get("owned_by") == "aengine":
            self._limit = self.model.max_model_len

    def chat(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> OpenAIStream:
        """The answer to `messages`, in the form of chat templates. `fields`: parameters and options, by our names."""
        body = {**_body(self.model.name, fields), "messages": [_message(message) for message in messages]}
        if tools is not None:
            body["tools"] = list(tools)
        return OpenAIStream(self._server.events("/chat/completions", body))

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> OpenAIStream:
        """The continuation of a text. Where nothing limits it, that of an aengine goes on to the end of the context; others have defaults
        of their own."""
        limit = {} if self._limit is None else {"max_tokens": self._limit}
        return OpenAIStream(self._server.events("/completions", {**limit, **_body(self.model.name, fields), "prompt": prompt}))


class OpenAIStream:
    """The events of one answer: an async iterator for one reader. The request is made when it is first read."""

    timing = Timing()  # which servers do not tell

    def __init__(self, chunks: AsyncGenerator[Any, None]) -> None:
        self.usage = Usage()  # so far, if the server tells it
        self.finish_reason: FinishReason | None = None  # None while the output has not ended
        self._chunks = chunks
        self._built = MessageBuilder()
        self._calls: dict[int, int] = {}  # our numbers of calls, from 0, by those of the server
        self._open: dict[int, str] = {}  # arguments of calls that have not ended, by our numbers

    @property
    def message(self) -> ChatMessage:
        """What the events so far add up to."""
        return self._built.message()

    async def aclose(self) -> None:
        """End the request, whose events need not have been read."""
        await self._chunks.aclose()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for chunk in self._chunks:
            for event in self._read(chunk):
                self._built.add(event)
                yield event
        if self.finish_reason is None:
            raise ConnectionLostError("the answer broke off: the server did not say why it ended")

    def _read(self, chunk: Any) -> list[Event]:
        """Raises `ServerError` for a chunk of another form."""
        try:
            if usage := chunk.get("usage"):
                self.usage = _usage(usage)
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                events = self._read_delta(delta)
                if reason := choice.get("finish_reason"):
                    self.finish_reason = _FINISH_REASONS.get(reason, FinishReason.ERROR)
                    events += self._end_calls()
                return events
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"the server sent what is no chunk of OpenAI's API: {shown(chunk)}", "HTTP 200") from error
        return []

    def _read_delta(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            events.append(ReasoningDelta(text=reasoning))
        if content := delta.get("content") or delta.get("refusal"):
            events.append(ContentDelta(text=content))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", position), call.get("function") or {}
            if index not in self._calls:
                events += self._end_calls()
                self._calls[index] = len(self._calls)
                self._open[self._calls[index]] = ""
                events.append(CallStarted(index=self._calls[index], id=call["id"], name=function["name"]))
            if arguments := function.get("arguments"):
                self._open[self._calls[index]] += arguments
                events.append(ArgumentsDelta(index=self._calls[index], text=arguments))
        return events

    def _end_calls(self) -> list[Event]:
        ended: list[Event] = [CallEnded(index=index, complete=_is_object(arguments)) for index, arguments in self._open.items()]
        self._open.clear()
        return ended


def _body(model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    asked = {_NAMES.get(name, name): _plain(value) for name, value in fields.items()}
    return {"model": model, **asked, "stream": True, "stream_options": {"include_usage": True}}


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutput):
        return {name: given for name, given in asdict(value).items() if given not in (None, False, ())}
    return value


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of OpenAI's: arguments are text, and the reasoning of before is not sent, which some servers refuse."""
    written = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [{**call, "function": {**call["function"], "arguments": _as_text(call)}} for call in calls]
    return written


def _as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt, completion = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_prompt_tokens=int(prompt.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        reasoning_tokens=int(completion.get("reasoning_tokens") or 0),
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
