"""What answers a chat: an engine, in this process or behind gRPC, or a server over HTTP. To the chat both are a `Partner`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from aengine.api.engine import EngineBase
from aengine.api.errors import AEngineError
from aengine.api.outputs import FinishReason, Timing, Usage
from aengine.api.params import SamplingParams
from aengine.api.stream import TokenStream
from aengine.chat import ChatMessage, ChatStream, ContentDelta, Event, stream_chat
from aengine.client.openai import OpenAIClient, OpenAIStream
from aengine.terminal.conversation import ChatParameters, Conversation

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

Tools = Sequence[Mapping[str, Any]] | None


class Output(Protocol):
    """One answer as it comes; the request is submitted when it is first read."""

    @property
    def message(self) -> ChatMessage:
        """The message of the assistant, as far as it came."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it has not ended."""

    @property
    def usage(self) -> Usage: ...

    @property
    def timing(self) -> Timing: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""


class Partner(Protocol):
    """What answers a chat, as an async context manager: it answers while it is entered."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

    @property
    def title(self) -> str:
        """The name of the model that answers."""

    @property
    def max_model_len(self) -> int | None:
        """The context in tokens, if that is known."""

    @property
    def defaults(self) -> SamplingParams:
        """The model's, as far as they are known."""

    @property
    def has_template(self) -> bool:
        """Whether it answers messages; else it continues their text."""

    def describe(self) -> str:
        """Return one line about the model, for people."""

    async def prepare(self) -> None:
        """Do beforehand what the first answer would wait for."""

    def ask(self, conversation: Conversation, parameters: ChatParameters, tools: Tools) -> Output:
        """The answer to the unanswered exchange. Raises `AEngineError`."""


class EnginePartner:
    """A `Partner` over an engine, in this process or behind gRPC, which it starts and closes."""

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine

    async def __aenter__(self) -> Self:
        await self._engine.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self._engine.aclose()

    @property
    def title(self) -> str:
        return self._engine.model_info.name

    @property
    def max_model_len(self) -> int:
        return self._engine.model_info.max_model_len

    @property
    def defaults(self) -> SamplingParams:
        return self._engine.model_info.generation_defaults

    @property
    def has_template(self) -> bool:
        return self._engine.model_info.chat_template

    def describe(self) -> str:
        return self._engine.model_info.describe()

    async def prepare(self) -> None:
        """Render an empty chat, so that the template is loaded before the first answer. Errors are ignored."""
        with suppress(AEngineError):  # some take no empty message, and some models have none
            await self._engine.render_chat([{"role": "user", "content": ""}])

    def ask(self, conversation: Conversation, parameters: ChatParameters, tools: Tools) -> ChatStream | TextOutput:
        params, options = parameters.params, parameters.options
        if not self.has_template:
            return TextOutput(self._engine.stream(conversation.text, params, options))
        budget = parameters.chat.max_reasoning_tokens
        return stream_chat(self._engine, conversation.messages, params, replace(options, tools=tools), max_reasoning_tokens=budget)


class TextOutput:
    """A stream of tokens, as an answer without reasoning and calls."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(self._stream.completion().text)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.completion().finish_reason if self._stream.ended else None

    @property
    def usage(self) -> Usage:
        return self._stream.usage

    @property
    def timing(self) -> Timing:
        return self._stream.timing

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        async for token in self._stream:
            yield ContentDelta(text=token.text)

    async def aclose(self) -> None:
        await self._stream.aclose()


class HttpPartner:
    """A `Partner` over a server with OpenAI's API."""

    defaults = SamplingParams()  # they are not told

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client

    async def __aenter__(self) -> Self:
        await self._client.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        pass  # each request has a connection of its own

    @property
    def title(self) -> str:
        return self._client.model.name

    @property
    def max_model_len(self) -> int | None:
        return self._client.model.max_model_len

    @property
    def has_template(self) -> bool:
        return self._client.model.chat_template

    def describe(self) -> str:
        return self._client.model.describe()

    async def prepare(self) -> None:
        pass

    def ask(self, conversation: Conversation, parameters: ChatParameters, tools: Tools) -> OpenAIStream:
        if self.has_template:
            return self._client.chat(conversation.messages, parameters.given, tools)
        return self._client.complete(conversation.text, parameters.given)
