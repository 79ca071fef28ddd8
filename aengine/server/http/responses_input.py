"""What a client of `/v1/responses` wants: the fields of the body -> a generation.

What came before is in the input, or in stored responses. To the model all tools are functions; custom tools, which take a text, and those
of a namespace are told apart by `ToolShape` where their calls are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, Accepts, FieldChecks, integer, one_of, shown
from aengine.chat.preparation import CHOICES, ChatOutputOptions, GenerationRequest
from aengine.server.http.bodies import LIST, OBJECT, STRING, Fields
from aengine.server.http.body_parameters import CHAT_OPTIONS, EFFORT, OF_OTHERS, OPTIONS, PARAMS, BodyParameters
from aengine.server.http.chat_input import (
    ROLES,
    allowed_of,
    call_of,
    name_results,
    read_allowed,
    read_content,
    read_function,
    read_response_format,
)

TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "input": "a text, or items: message, reasoning, calls of functions and custom tools, their outputs; images for models that take some",
    "instructions": "the first message, of the system",
    "max_output_tokens": "max_tokens; -1: no limit",
    "include": "message.output_text.logprobs; others are ignored",
    "top_logprobs": "logprobs, where they are included",
    "text": "format: structured_output; verbosity is ignored",
    "tools": "functions, custom tools and namespaces of these; others are ignored. A grammar of a custom tool is not enforced",
    "tool_choice": "auto, none, required, a function, a custom tool, or allowed_tools; required ones are enforced",
    "parallel_tool_calls": "false: one call at most, where calls are required",
    "reasoning": "effort: a variable of the chat template; none: enable_thinking is false. All reasoning is in the output",
    "background": "the response is answered at once, and read again by its id while it is made; needs store",
    "store": "the response can be read again and gone on from, by its id; true by default",
    "previous_response_id": "a stored response: its input and output, and what was before it, come before the input",
    "truncation": "disabled; auto is ignored: what is too long is refused",
    "stream": "server-sent events",
    "stream_options": "nothing changes",
    "service_tier": "priority",
    "user": "tenant",
    "metadata": "comes back",
    "prompt_cache_key": "comes back; session",
    "safety_identifier": "comes back",
    "max_reasoning_tokens": "ours: the reasoning is closed when it has so many",
    "chat_template_kwargs": "template_kwargs, by vLLM's name",
    "receipt": "ours: `receipts` with one entry in the response that has ended, from which every token can be derived again",
}
"""The fields beside those of ours, and what becomes of them."""
REFUSED: Mapping[str, str] = {
    "conversation": "there are none; previous_response_id or the input has all that came before",
    "prompt": "no prompts are stored; the input has all that came before",
    "n": "a response is one output",
    "prompt_logprobs": "a response has no place for them",
}
"""Fields that would change the answer, and cannot."""
IGNORED: Mapping[str, str] = {
    "background_options": "what runs in the background has no options",
    "client_metadata": "it is for those who store requests",
    "context_management": "nothing is left out of the input",
    "max_tool_calls": "it is for tools of a server, of which there are none",
    "moderation": "nothing is moderated",
    "prompt_cache_options": "the prefix cache finds what is equal",
    "prompt_cache_retention": "prefixes stay until their pages are needed",
}
"""Fields of OpenAI's that change nothing here, and why; beside those of `parameters`."""
_CHOICE = Accepts(lambda value: isinstance(value, dict) or value in CHOICES, "one of auto, none, required, or an object")
_LOGPROBS = "message.output_text.logprobs"
_METADATA = Accepts(lambda value: isinstance(value, dict) and len(value) <= 16, "an object of at most 16 fields")
_TRUNCATIONS = one_of("disabled", "auto")
_CUSTOM_INPUT = "input"
"""The argument of the function that a custom tool is to the model."""


@dataclass(frozen=True, slots=True)
class ToolShape:
    """What a tool is to the client, whose name for the model may be another one."""

    name: str
    namespace: str | None = None
    custom: bool = False  # takes a text

    @property
    def for_model(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    def input_of(self, arguments: str) -> str:
        """The text in the arguments of a call of a custom tool; where the model wrote others, all of them."""
        given = json.loads(arguments).get(_CUSTOM_INPUT)
        return given if isinstance(given, str) else arguments


@dataclass(frozen=True, slots=True)
class ResponseAsked:
    """A request to `/v1/responses`, as its body was read."""

    request: GenerationRequest
    parameters: BodyParameters  # has the client's names for fields
    stream: bool
    background: bool
    input: Sequence[Any]  # the items of `input`
    repeated: Mapping[str, Any]  # the fields of the response that repeat those of the request
    shapes: Mapping[str, ToolShape] = field(default_factory=dict)  # of tools that are no plain functions, by their names for the model


def read_request(given: Fields, check: FieldChecks, before: Sequence[Any] = ()) -> ResponseAsked:
    """Read the body of a request to `/v1/responses`. `before`: the items that come before its input. Raises `InvalidRequestError` with all
    violations."""
    items = input_items(given.peek("input"))
    parameters = BodyParameters(given)
    parameters.names["prompt"] = "input"
    repeated: dict[str, Any] = {name: given.take_field(name, STRING) for name in ("instructions", "prompt_cache_key", "safety_identifier")}
    parameters.put_session(repeated["prompt_cache_key"])
    repeated["metadata"] = given.take_field("metadata", _METADATA, {})
    model = given.take_field("model", STRING, "")
    messages: list[dict[str, Any]] = []
    if before:
        read_input(Fields({"input": before}, "", FieldChecks()), messages)
    read_input(given, messages)
    if repeated["instructions"]:
        messages.insert(0, {"role": "system", "content": repeated["instructions"]})
    choice, shapes = _take_tools(given, parameters, repeated)
    repeated["parallel_tool_calls"] = given.take_field("parallel_tool_calls", FLAG, True)
    repeated["max_output_tokens"] = parameters.take_limit("max_output_tokens")
    _take_logprobs(given, parameters, repeated)
    repeated["text"] = _take_text(given, parameters)
    repeated["reasoning"] = _take_reasoning(given, parameters)
    repeated["previous_response_id"] = given.take_field("previous_response_id", STRING)
    repeated["store"] = given.take_field("store", FLAG, True)
    repeated["background"] = background = given.take_field("background", FLAG, False)
    if background and not repeated["store"]:
        given.refuse("background", "is not possible without store")
    if given.take_field("truncation", _TRUNCATIONS) == "auto":
        parameters.note_ignored("truncation", "what is too long is refused")
    repeated["truncation"] = "disabled"
    stream = given.take_field("stream", FLAG, False)
    if (options := given.sub("stream_options")) is not None:
        options.take_field("include_obfuscation", FLAG)
        options.refuse_rest(("include_obfuscation",))
    chat = ChatOutputOptions(
        tool_choice=choice,
        parallel_tool_calls=repeated["parallel_tool_calls"],
        max_reasoning_tokens=given.take_field("max_reasoning_tokens", integer(0)),
    )
    parameters.ignore(IGNORED)
    repeated["service_tier"] = parameters.take_openai()
    given.refuse_all(REFUSED)
    parameters.take_ours((*OPTIONS, *CHAT_OPTIONS, "receipt"))
    given.refuse_rest((*TAKEN, *PARAMS, *OF_OTHERS, *OPTIONS, *CHAT_OPTIONS))
    params, of_request = parameters.params(), parameters.options()
    check.finish(InvalidRequestError)
    repeated["user"] = of_request.tenant or None
    request = GenerationRequest(prompt=messages, params=params, options=of_request, model=model, chat=chat)
    return ResponseAsked(request, parameters, stream, background, items, repeated, shapes)


def _take_logprobs(given: Fields, parameters: BodyParameters, repeated: dict[str, Any]) -> None:
    included = given.take_field("include", LIST, ())
    for value in included:
        if value != _LOGPROBS:
            parameters.note_ignored(f"include: {value}", "there is nothing of it")
    repeated["top_logprobs"] = top = given.take_field("top_logprobs", integer(0), 0)
    if _LOGPROBS in included:
        parameters.put_field("logprobs", top, "top_logprobs")


def _take_text(given: Fields, parameters: BodyParameters) -> dict[str, Any]:
    text: dict[str, Any] = given.take_field("text", OBJECT, {})
    fields = Fields(text, "text.", given.check)
    parameters.ignore({"verbosity": "the model knows none"}, fields)
    form = fields.sub("format")
    fields.refuse_rest(("format", "verbosity"))
    if form is None:
        return {"format": {"type": "text"}, **text}
    if (structured := read_response_format(form, "")) is not None:
        parameters.put_field("structured_output", structured, "text.format")
        parameters.names["structured_output.json_schema"] = "text.format.schema"
        if structured.json_schema is not None:
            form.need("name", STRING)
    return text


def _take_reasoning(given: Fields, parameters: BodyParameters) -> dict[str, Any]:
    reasoning: dict[str, Any] = given.take_field("reasoning", OBJECT, {})
    fields = Fields(reasoning, "reasoning.", given.check)
    effort = fields.take_field("effort", EFFORT)
    fields.drop(("summary", "generate_summary", "context", "mode"))
    fields.refuse_rest(("effort", "summary"))
    parameters.put_effort(effort, "reasoning.effort")
    return {"effort": effort, "summary": None}


# ---- tools -------------------------------------------------------------------------------------------------------------


def _take_tools(given: Fields, parameters: BodyParameters, repeated: dict[str, Any]) -> tuple[str, Mapping[str, ToolShape]]:
    """The choice of tools, as `ChatOutputOptions` have it, and the shapes of those that are no plain functions."""
    read = _Tools(parameters)
    repeated["tools"] = [tool for fields in given.objects("tools") if (tool := read.add(fields)) is not None]
    choice, allowed = _take_choice(given, repeated)
    if tools := allowed_of(read.functions, allowed):
        parameters.put_field("tools", tools, "tools")
    return parameters.checked_choice(choice), read.shapes


class _Tools:
    """Reads tools."""

    def __init__(self, parameters: BodyParameters) -> None:
        self.functions: list[dict[str, Any]] = []  # as templates take them
        self.shapes: dict[str, ToolShape] = {}  # of those that are no plain functions, by the names of their functions
        self._parameters = parameters

    def add(self, fields: Fields, namespace: str | None = None) -> dict[str, Any] | None:
        """One of a list of tools. Returns it as the response repeats it, None for one that is left out."""
        kind = fields.need("type", STRING, "function")
        if kind == "namespace" and namespace is None:
            name = fields.need("name", STRING, "")
            tools = [inner for tool in fields.objects("tools") if (inner := self.add(tool, name)) is not None]
            return {"type": kind, "name": name, "description": fields.take_field("description", STRING, ""), "tools": tools}
        if kind not in ("function", "custom"):
            self._parameters.leave_out_tool(kind)
            return None
        strict = fields.take_field("strict", FLAG, False)
        form = fields.sub("format") if kind == "custom" else None
        tool = read_function(fields)
        function = tool["function"]
        shape = ToolShape(function["name"], namespace, kind == "custom")
        told = {"type": kind, "description": None, **function, "strict": strict}
        if shape.custom:
            definition = "" if form is None else form.take_field("definition", STRING, "")
            argument = {"type": "string", **({"description": definition} if definition else {})}
            function["parameters"] = {"type": "object", "properties": {_CUSTOM_INPUT: argument}, "required": [_CUSTOM_INPUT]}
            told = {"type": kind, "name": shape.name, "description": function.get("description", "")}
        if shape != ToolShape(shape.name):
            self.shapes[shape.for_model] = shape
        function["name"] = shape.for_model
        self.functions.append(tool)
        return told


def _take_choice(given: Fields, repeated: dict[str, Any]) -> tuple[str, Collection[str] | None]:
    """With the names of the tools that are allowed; None for all."""
    repeated["tool_choice"] = choice = given.take_field("tool_choice", _CHOICE, "auto")
    if isinstance(choice, str):
        return choice, None
    fields = Fields(choice, "tool_choice.", given.check)
    kind = fields.need("type", STRING, "")
    if kind in ("function", "custom"):
        return _shape_of(fields).for_model, None
    if kind == "allowed_tools":
        return read_allowed(fields)
    fields.refuse("type", f"{shown(kind)} is not possible: there are function, custom and allowed_tools")
    return "auto", None


# ---- input -------------------------------------------------------------------------------------------------------------


def input_items(given: Any) -> list[Any]:
    """`input` as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given) if isinstance(given, list) else []


def read_input(given: Fields, messages: list[dict[str, Any]]) -> None:
    """Add `input` as messages: what the model made in one turn is one message of the assistant."""
    read = given.text_or_objects("input")
    if isinstance(read, str):
        messages.append({"role": "user", "content": read})
        return
    for fields in read:
        kind = fields.take_field("type", STRING, "message")
        if kind in _ITEMS:
            _ITEMS[kind](fields, messages)
        else:
            fields.refuse("type", f"{shown(kind)} is not possible: there are {', '.join(_ITEMS)}")
    name_results(messages)


def _read_message(fields: Fields, messages: list[dict[str, Any]]) -> None:
    role = ROLES[fields.need("role", one_of("user", "assistant", "system", "developer"), "user")]
    content = read_content(fields)
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
        last["content"] = content  # behind its reasoning
    else:
        messages.append({"role": role, "content": content})


def _read_reasoning(fields: Fields, messages: list[dict[str, Any]]) -> None:
    """That of which the text is known: the content, or else the summary."""
    texts = [[part.need("text", STRING, "") for part in fields.objects(name)] for name in ("summary", "content")]
    if text := "\n".join(texts[1] or texts[0]):
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _read_call(fields: Fields, messages: list[dict[str, Any]]) -> None:
    _add_call(call_of(fields.need("call_id", STRING, ""), _shape_of(fields).for_model, fields.need("arguments", STRING, "{}")), messages)


def _read_custom_call(fields: Fields, messages: list[dict[str, Any]]) -> None:
    arguments = json.dumps({_CUSTOM_INPUT: fields.need("input", STRING, "")})
    _add_call(call_of(fields.need("call_id", STRING, ""), _shape_of(fields).for_model, arguments), messages)


def _shape_of(fields: Fields) -> ToolShape:
    """The name of a tool, where it is called or chosen."""
    return ToolShape(fields.need("name", STRING, ""), fields.take_field("namespace", STRING))


def _add_call(call: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _read_result(fields: Fields, messages: list[dict[str, Any]]) -> None:
    call_id = fields.need("call_id", STRING, "")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": read_content(fields, "output")})


_ITEMS: Mapping[str, Callable[[Fields, list[dict[str, Any]]], None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_result,
}
