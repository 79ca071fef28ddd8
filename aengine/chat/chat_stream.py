"""`stream_chat`: a chat with an engine, in this process or behind a server, as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aengine.api.engine import EngineBase
from aengine.api.errors import InvalidRequestError
from aengine.api.outputs import FinishReason, Timing, Usage
from aengine.api.params import SamplingParams
from aengine.api.request import OptionFields, RequestOptions, check_params
from aengine.api.stream import TokenStream
from aengine.chat.formats import ChatFormat
from aengine.chat.preparation import ChatOutputOptions, check_chat, prepare_chat
from aengine.chat.text_source import ChatMessage, Event, MessageBuilder

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


def stream_chat(
    engine: EngineBase,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams | None = None,
    options: RequestOptions | None = None,
    *,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    max_reasoning_tokens: int | None = None,
    format: ChatFormat | None = None,
    **fields: Unpack[OptionFields],
) -> ChatStream:
    """Submit a chat when the result is iterated first. `params`, `options` and `fields` are those of `EngineBase.stream`, `tools` among
    them; `n` is 1.

    `tool_choice`: "auto", "none", "required" (one tool or several) or the name of a tool (this one, once). The last two are enforced by a
    grammar, so they go without a `structured_output`. `parallel_tool_calls`: false for one call at most, where calls are required.
    `max_reasoning_tokens`: 0..2^31-1; the reasoning is closed when it has so many, with 0 before it begins. `format`: how the model writes;
    by default what its chat template says.

    Raises `InvalidRequestError` here, and in the iteration what `EngineBase.stream` raises.
    """
    params, options = check_params(params), RequestOptions.of(options, fields)
    if params.n != 1:
        raise InvalidRequestError.of("n", f"{params.n} is not 1, the only possible number of outputs of a chat that is parsed")
    chat = ChatOutputOptions(
        tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, max_reasoning_tokens=max_reasoning_tokens, format=format
    )
    check_chat(engine, params, options, chat)
    return ChatStream(engine, messages, params, options, chat)


class ChatStream:
    """The events of one chat: an async iterator for one reader, and an async context manager, which cancels what still runs."""

    def __init__(
        self,
        engine: EngineBase,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        options: RequestOptions,
        chat: ChatOutputOptions,
    ) -> None:
        self._engine = engine
        self._messages = messages
        self._params = params
        self._options = options
        self._chat = chat
        self._built = MessageBuilder()
        self._stream: TokenStream | None = None
        self._events = self._run()

    @property
    def message(self) -> ChatMessage:
        """What the events so far add up to."""
        return self._built.message()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; None while it has not."""
        return self._stream.completion().finish_reason if self._stream is not None and self._stream.ended else None

    @property
    def usage(self) -> Usage:
        """Token counts of the request so far."""
        return self._stream.usage if self._stream is not None else Usage()

    @property
    def timing(self) -> Timing:
        """How long its phases took, as far as that is known."""
        return self._stream.timing if self._stream is not None else Timing()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._events)
        except InvalidRequestError as error:
            if self._params.structured_output is not None:
                raise
            raise error.moved(lambda field: "tools" if field.startswith("structured_output") else field) from error  # it was made of them
        self._built.add_event(event)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free."""
        if self._stream is not None:
            await self._stream.aclose()

    async def _run(self) -> AsyncIterator[Event]:
        prepared = await prepare_chat(self._engine, self._messages, self._params, self._options, self._chat)
        parser = prepared.parser()
        self._stream = self._engine.stream(prepared.prompt, prepared.params, prepared.options)
        cut = False
        async for token in self._stream:
            cut = token.finish_reason is not None and token.finish_reason.cuts
            for event in parser.feed(token.text):
                yield event
        for event in parser.finish(cut=cut):
            yield event
