"""Which tools an output calls, as a grammar: JSON that every model can write, whatever its own format is.

The grammar leaves a model no list without an end but those that a schema itself has: there are at most `MAX_CALLS` calls, and an object has
the properties that its schema lists, and no others, unless the schema says that it may. Numbers have an end, too.

`prepare_chat`: what a chat is as a request, and how its outputs are parsed. `stream_chat`: a chat with an engine, in this process or behind
a server, as events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aengine.api.dataclass import dataclass
from aengine.api.engine import EngineBase
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import MAX_INT32
from aengine.api.outputs import ChatIds, FinishReason, Timing, Usage
from aengine.api.params import Reasoning, SamplingParams, StructuredOutput
from aengine.api.request import OptionFields, Prompt, RequestOptions, check_params
from aengine.api.stream import TokenStream
from aengine.chat.formats import CALLS, REASONING, ChatFormat
from aengine.chat.parser import ChatParser
from aengine.chat.text_source import ChatMessage, Event, MessageBuilder, random_id, tools_of

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


MAX_CALLS = 8
"""Most calls that are required together."""
MAX_NUMBER = 10**15 - 1
"""Largest of a number for which a schema has no limit of its own; a weak model would write digits for ever."""
MAX_DEPTH = 64
"""The most schemas within one another; what lies deeper is refused where the grammar is compiled."""
CHOICES = ("auto", "none", "required")


def check_choice(choice: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises `InvalidRequestError` (tool_choice) for what is neither a tool nor one of `CHOICES`, and for "required" without tools."""
    names = tools_of(tools)
    if choice not in CHOICES and choice not in names:
        raise InvalidRequestError.of("tool_choice", f"{choice!r} is not one of {', '.join([*CHOICES, *names])}")
    if choice == "required" and not names:
        raise InvalidRequestError.of("tool_choice", "'required' needs tools")


def grammar_of(choice: str, tools: Sequence[Mapping[str, Any]] | None, *, parallel: bool) -> StructuredOutput | None:
    """For "required" a list of up to `MAX_CALLS` calls, `{"name": ..., "arguments": {...}}`, of one where not `parallel`; for the name of a
    tool its arguments alone; else None."""
    known = tools_of(tools)
    if choice in ("auto", "none"):
        return None
    if choice != "required":
        return StructuredOutput(json_schema=_arguments(known[choice]))
    places = {name: f"tool{index}" for index, name in enumerate(known)}
    definitions = {place: _moved(_arguments(known[name]), f"#/$defs/{place}") for name, place in places.items()}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    most = MAX_CALLS if parallel else 1
    return StructuredOutput(json_schema={"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}, "$defs": definitions})


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, closed."""
    named = schema if any(keyword in schema for keyword in _TOGETHER) else {"properties": {}, **schema}
    whole = {**named, "type": "object"}
    joined: set[str] = set()
    _find_joined(whole, False, joined, 0)
    found: dict[str, Any] = _closed(whole, False, joined, 0)
    return found


_VALUES = ("enum", "const")  # which have properties of their own
_TOGETHER = (*_VALUES, "$ref", "allOf", "anyOf", "oneOf")  # what they say holds beside the other keywords
_BRANCHES = ("allOf", "anyOf", "oneOf")
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of a schema that speak of values within its own, each with the keyword."""
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, Mapping):
            yield from ((keyword, one) for one in value.values())
        elif keyword in ("items", "prefixItems", "additionalItems", "additionalProperties", *_BRANCHES):
            yield from ((keyword, one) for one in (value if isinstance(value, list | tuple) else (value,)))


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether several of the schemas that hold together here may list properties, so that none may be closed."""
    listing = [keyword for keyword in ("properties", *_VALUES, "$ref", "anyOf", "oneOf") if keyword in schema and _lists(schema, keyword)]
    every = schema.get("allOf")
    return len(listing) + (sum(_lists({"allOf": [one]}, "allOf") for one in every) if isinstance(every, list | tuple) else 0) > 1


def _lists(schema: Mapping[str, Any], keyword: str) -> bool:
    if keyword in ("properties", *_VALUES, "$ref"):
        return True
    branches = schema[keyword]
    return isinstance(branches, list | tuple) and any(
        isinstance(one, Mapping) and any(name in one and _lists(one, name) for name in ("properties", *_TOGETHER)) for one in branches
    )


def _find_joined(schema: Any, joined: bool, found: set[str], depth: int) -> None:
    """Adds to `found` what is referred to where it holds together with others."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    joins = joined or _joins(schema)
    if joins and isinstance(schema.get("$ref"), str):
        found.add(schema["$ref"])
    for keyword, part in _parts(schema):
        _find_joined(part, joins and keyword in _BRANCHES, found, depth + 1)


def _closed(schema: Any, joined: bool, open_ones: set[str], depth: int) -> Any:
    """A copy in which an object has no other properties than those that are listed, unless it says so. `joined`: it holds together with
    another one that may list some."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    joins = joined or _joins(schema)
    closed: dict[str, Any] = {}
    for keyword, value in schema.items():
        within = joins and keyword in _BRANCHES
        if keyword in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, Mapping):
            closed[keyword] = {
                name: _closed(one, keyword in _DEFINITIONS and f"#/{keyword}/{name}" in open_ones, open_ones, depth + 1)
                for name, one in value.items()
            }
        elif keyword in ("items", "prefixItems", "additionalItems", "additionalProperties", *_BRANCHES):
            many = isinstance(value, list | tuple)
            closed[keyword] = (
                [_closed(one, within, open_ones, depth + 1) for one in value] if many else _closed(value, within, open_ones, depth + 1)
            )
        else:
            closed[keyword] = value
    if "properties" in schema and not joins and not _is_open(schema):
        closed["additionalProperties"] = False
    if schema.get("type") in ("integer", "number") and not any(keyword in schema for keyword in _VALUES):
        for limit, exclusive, most in (("minimum", "exclusiveMinimum", -MAX_NUMBER), ("maximum", "exclusiveMaximum", MAX_NUMBER)):
            if limit not in schema and exclusive not in schema:
                closed[limit] = most
    return closed


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object says that it has properties which it does not list."""
    listed, required = schema["properties"], schema.get("required")
    if any(keyword in schema for keyword in _OPENING):
        return True
    if not isinstance(listed, Mapping) or not isinstance(required, list | tuple):
        return False
    return any(isinstance(name, str) and name not in listed for name in required)


def _moved(schema: Any, place: str) -> Any:
    """A schema in which references to places in itself are to those at `place` of another schema."""
    if isinstance(schema, Mapping):
        return {
            key: f"{place}{value[1:]}" if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list | tuple) else schema


_LEAST_SECONDS = 1e-9
"""The time limit of a request whose time passed while it was prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutputOptions:
    """What a chat is asked for, beside parameters and options."""

    tool_choice: str = "auto"
    """"auto", "none", "required" (one tool or several) or the name of a tool (this one, once). The last two are enforced by a grammar, so
    they go without a `structured_output`."""
    parallel_tool_calls: bool = True
    """False for one call at most, where calls are required."""
    max_reasoning_tokens: int | None = None
    """0..2^31-1; the reasoning is closed when it has so many, with 0 before it begins."""
    format: ChatFormat | None = None
    """How the model writes; by default what its chat template says."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat as a request: what `EngineBase.stream` takes, and the parsers of its outputs."""

    prompt: list[int]
    params: SamplingParams
    options: RequestOptions  # without those of chats, with what is left of the time limit
    format: ChatFormat  # of the outputs
    tools: Sequence[Mapping[str, Any]] | None  # that may be called
    opened: bool  # the prompt ends within reasoning
    only: str | None  # the tool of which the output is the arguments

    def parser(self, make_id: Callable[[], str] = random_id) -> ChatParser:
        """Return a new parser, for the output of one sequence. `make_id`: of a call of a tool."""
        is_structured = self.params.structured_output is not None
        return ChatParser(self.format, self.tools, opened=self.opened, structured=is_structured, only=self.only, make_id=make_id)


def check_chat(engine: EngineBase, params: SamplingParams, options: RequestOptions, chat: ChatOutputOptions) -> None:
    """Raises `InvalidRequestError` for what `prepare_chat` refuses before it does anything."""
    check_choice(chat.tool_choice, options.tools)
    if options.known_outputs is not None:
        raise InvalidRequestError.of("known_outputs", "is not possible where outputs are parsed, from their beginnings on")
    if params.detokenize is False:
        raise InvalidRequestError.of("detokenize", "false is not possible: a chat is parsed as text")
    if params.structured_output is not None and chat.tool_choice not in ("auto", "none"):
        raise InvalidRequestError.of("structured_output", f"cannot be combined with tool_choice {chat.tool_choice!r}")
    budget = chat.max_reasoning_tokens
    if budget is not None and not 0 <= budget <= MAX_INT32:
        raise InvalidRequestError.of("max_reasoning_tokens", f"{budget} is not in [0, {MAX_INT32}]")
    if budget is None and params.reasoning is None:
        return
    is_known = REASONING[_format(engine, chat).reasoning] is not None
    if budget is not None and not is_known:
        raise InvalidRequestError.of("max_reasoning_tokens", "is not possible: it is not known how this model marks its reasoning")
    if params.reasoning is not None and is_known:
        raise InvalidRequestError.of(
            "reasoning", "is not possible beside the format of the chat, which says the same; see max_reasoning_tokens"
        )


async def prepare_chat(
    engine: EngineBase, messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: RequestOptions, chat: ChatOutputOptions
) -> PreparedChat:
    """Renders the chat, and says what its outputs must look like; a time limit counts from now on. Raises `InvalidRequestError`, and what
    `engine` raises."""
    start = time.monotonic()
    check_chat(engine, params, options, chat)
    format, choice = _format(engine, chat), chat.tool_choice
    prompt = await engine.render_chat(
        messages,
        tools=options.tools if choice != "none" else None,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        template_kwargs=options.template_kwargs,
        keep_history=options.keep_history,
        session=options.session,
        tenant=options.tenant,
    )
    grammar = grammar_of(choice, options.tools, parallel=chat.parallel_tool_calls) or params.structured_output
    markers, opened, reasoning = REASONING[format.reasoning], format.opens_reasoning(prompt.text), None
    if markers is None:
        prompt += CALLS[format.calls].answer if grammar is not None else ""
    elif not prompt.text.rstrip().endswith(markers.closing):
        before, behind = markers.space
        closing = before + markers.closing + behind
        if chat.max_reasoning_tokens == 0:
            prompt, opened = prompt + ("" if opened else markers.opening + before) + closing + (markers.answer if grammar else ""), False
        else:
            if grammar is not None and markers.answer and not opened and not options.continue_final_message:
                prompt, opened = prompt + markers.opening, True
            budget = chat.max_reasoning_tokens
            reasoning = Reasoning(opening=markers.opening, closing=closing, opened=opened, answer=markers.answer, max_tokens=budget)
    if grammar is not None and reasoning is None:
        format = replace(format, reasoning="")
    if format.special_tokens:
        params = replace(params, skip_special_tokens=False)
    if grammar is not None:
        format = replace(format, calls="json" if choice == "required" else "")
    token_ids = await engine.tokenize(prompt.text, add_special_tokens=False, for_prompt=True, literals=prompt.literals)
    timeout = None if options.timeout is None else max(options.timeout - (time.monotonic() - start), _LEAST_SECONDS)
    return PreparedChat(
        prompt=token_ids if options.session is None else ChatIds((*prompt.history, *token_ids), messages),
        params=replace(params, structured_output=grammar, reasoning=reasoning or params.reasoning),
        options=options.for_ids(timeout=timeout, images=prompt.images),
        format=format,
        tools=options.tools if choice != "none" else None,
        opened=opened,
        only=choice if grammar is not None and choice not in CHOICES else None,
    )


def _format(engine: EngineBase, chat: ChatOutputOptions) -> ChatFormat:
    return chat.format or ChatFormat(engine.model_info.call_format, engine.model_info.reasoning_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A generation as a door asks for it."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions
    model: str = ""  # the served one, or an adapter; empty: the served one
    chat: ChatOutputOptions | None = None  # the prompt is a chat, and its output is parsed


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
