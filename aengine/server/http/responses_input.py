"""What a client of `/v1/responses` wants: the fields of the body -> a generation.

A response stands alone: what came before is in its input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aengine.chat.preparation import ChatOutputOptions
from aengine.chat.tool_choice import CHOICES
from aengine.checks import FLAG, Accepts, FieldChecks, integer, is_not, one_of, shown
from aengine.errors import InvalidRequestError
from aengine.server.core.generation import GenerationRequest
from aengine.server.http.bodies import LIST, OBJECT, STRING, Fields
from aengine.server.http.chat_input import (
    ROLES,
    call_of,
    name_results,
    read_content,
    read_function,
    read_response_format,
)
from aengine.server.http.parameters import CHAT_OPTIONS, EFFORT, OPTIONS, PARAMS, Parameters

TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "input": "a text, or items: message, function_call, function_call_output, reasoning; text alone",
    "instructions": "the first message, of the system",
    "max_output_tokens": "max_tokens",
    "include": "message.output_text.logprobs; the others change nothing",
    "top_logprobs": "logprobs, where they are included",
    "text": "format: structured_output",
    "tools": "functions",
    "tool_choice": "auto, none, required, a function, or allowed_tools; required ones are enforced",
    "parallel_tool_calls": "false: one call at most, where calls are required",
    "reasoning": "effort: a variable of the chat template; none: enable_thinking is false. All reasoning is in the output",
    "background": "false alone: nothing runs in the background",
    "truncation": "disabled alone: what is too long is refused",
    "stream": "server-sent events",
    "stream_options": "nothing changes",
    "service_tier": "priority",
    "user": "tenant",
    "metadata": "comes back",
    "prompt_cache_key": "comes back; the prefix cache finds what is equal",
    "safety_identifier": "comes back",
    "max_reasoning_tokens": "ours: the reasoning is closed when it has so many",
    "chat_template_kwargs": "template_kwargs, by vLLM's name",
}
"""The fields beside those of ours, and what becomes of them."""
REFUSED: Mapping[str, str] = {
    "conversation": "nothing is stored; the input has all that came before",
    "context_management": "nothing is left out of the input",
    "moderation": "nothing is moderated",
    "previous_response_id": "nothing is stored; the input has all that came before",
    "prompt": "nothing is stored; the input has all that came before",
    "n": "a response is one output",
    "prompt_logprobs": "a response has no place for them",
}
"""Fields that would change the answer, and cannot."""
IGNORED: Mapping[str, str] = {
    "background_options": "nothing runs in the background",
    "max_tool_calls": "it is for tools of a server, of which there are none",
    "prompt_cache_options": "the prefix cache finds what is equal",
    "store": "nothing is stored",
}
"""Fields of OpenAI's that change nothing here, and why; beside those of `parameters`."""
INCLUDABLE = (
    *("message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url", "code_interpreter_call.outputs"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources", "computer_call_output.output.image_url"),
)
_CHOICE = Accepts(lambda value: isinstance(value, dict) or value in CHOICES, "one of auto, none, required, or an object")
_LOGPROBS = "message.output_text.logprobs"
_METADATA = Accepts(lambda value: isinstance(value, dict) and len(value) <= 16, "an object of at most 16 fields")
_NO_BACKGROUND = Accepts(lambda value: value is False, "false: nothing runs in the background")
_NO_TRUNCATION = one_of("disabled", words="'disabled': what is too long is refused")
_NO_VERBOSITY = one_of("medium", words="'medium': the model knows none")


@dataclass(frozen=True, slots=True)
class ResponseAsked:
    """What a client wants."""

    request: GenerationRequest
    parameters: Parameters  # has the client's names for fields
    stream: bool
    repeated: Mapping[str, Any]  # the fields of the response that repeat those of the request


def read_request(given: Fields, check: FieldChecks) -> ResponseAsked:
    """Raises `InvalidRequestError` with all violations."""
    parameters = Parameters(given)
    parameters.names["prompt"] = "input"
    repeated: dict[str, Any] = {name: given.take(name, STRING) for name in ("instructions", "prompt_cache_key", "safety_identifier")}
    repeated["metadata"] = given.take("metadata", _METADATA, {})
    model = given.take("model", STRING, "")
    messages = read_input(given)
    if repeated["instructions"]:
        messages.insert(0, {"role": "system", "content": repeated["instructions"]})
    choice = _take_tools(given, parameters, repeated)
    repeated["parallel_tool_calls"] = given.take("parallel_tool_calls", FLAG, True)
    repeated["max_output_tokens"] = given.take("max_output_tokens", integer(1))
    if repeated["max_output_tokens"] is not None:
        parameters.put("max_tokens", repeated["max_output_tokens"], "max_output_tokens")
    _take_logprobs(given, parameters, repeated)
    repeated["text"] = _take_text(given, parameters)
    repeated["reasoning"] = _take_reasoning(given, parameters)
    given.take("background", _NO_BACKGROUND)
    repeated["truncation"] = given.take("truncation", _NO_TRUNCATION, "disabled")
    stream = given.take("stream", FLAG, False)
    if (options := given.sub("stream_options")) is not None:
        options.take("include_obfuscation", FLAG)
        options.refuse_rest(("include_obfuscation",))
    chat = ChatOutputOptions(
        tool_choice=choice,
        parallel_tool_calls=repeated["parallel_tool_calls"],
        max_reasoning_tokens=given.take("max_reasoning_tokens", integer(0)),
    )
    repeated["service_tier"] = parameters.take_openai()
    given.drop(IGNORED)
    given.refuse_all(REFUSED)
    parameters.take_ours((*OPTIONS, *CHAT_OPTIONS))
    given.refuse_rest((*TAKEN, *PARAMS, *OPTIONS, *CHAT_OPTIONS))
    params, of_request = parameters.params(), parameters.options()
    check.finish(InvalidRequestError)
    repeated["user"] = of_request.tenant or None
    request = GenerationRequest(prompt=messages, params=params, options=of_request, model=model, chat=chat)
    return ResponseAsked(request, parameters, stream, repeated)


def _take_logprobs(given: Fields, parameters: Parameters, repeated: dict[str, Any]) -> None:
    included = given.take("include", LIST, ())
    for index, value in enumerate(included):
        if value not in INCLUDABLE:
            given.refuse(f"include[{index}]", is_not(value, "one of " + ", ".join(INCLUDABLE)))
    repeated["top_logprobs"] = top = given.take("top_logprobs", integer(0), 0)
    if _LOGPROBS in included:
        parameters.put("logprobs", top, "top_logprobs")


def _take_text(given: Fields, parameters: Parameters) -> dict[str, Any]:
    text: dict[str, Any] = given.take("text", OBJECT, {})
    fields = Fields(text, "text.", given.check)
    fields.take("verbosity", _NO_VERBOSITY)
    form = fields.sub("format")
    fields.refuse_rest(("format", "verbosity"))
    if form is None:
        return {"format": {"type": "text"}, **text}
    if (structured := read_response_format(form, "")) is not None:
        parameters.put("structured_output", structured, "text.format")
        parameters.names["structured_output.json_schema"] = "text.format.schema"
        if structured.json_schema is not None:
            form.need("name", STRING)
    return text


def _take_reasoning(given: Fields, parameters: Parameters) -> dict[str, Any]:
    reasoning: dict[str, Any] = given.take("reasoning", OBJECT, {})
    fields = Fields(reasoning, "reasoning.", given.check)
    effort = fields.take("effort", EFFORT)
    fields.drop(("summary", "generate_summary", "context", "mode"))
    fields.refuse_rest(("effort", "summary"))
    parameters.put_effort(effort, "reasoning.effort")
    return {"effort": effort, "summary": None}


# ---- tools -------------------------------------------------------------------------------------------------------------


def _take_tools(given: Fields, parameters: Parameters, repeated: dict[str, Any]) -> str:
    """The choice of tools, as `ChatOutputOptions` have it."""
    tools = []
    repeated["tools"] = []
    for fields in given.objects("tools"):
        kind = fields.need("type", STRING, "function")
        if kind != "function":
            fields.refuse("type", f"{shown(kind)} is not possible: tools are functions")
            continue
        strict = fields.take("strict", FLAG, False)
        tools.append(read_function(fields))
        repeated["tools"].append({"type": "function", "description": None, **tools[-1]["function"], "strict": strict})
    choice, allowed = _take_choice(given, repeated)
    if allowed is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    if tools:
        parameters.put("tools", tools, "tools")
    return parameters.checked_choice(choice)


def _take_choice(given: Fields, repeated: dict[str, Any]) -> tuple[str, Collection[str] | None]:
    """With the names of the tools that are allowed; None for all."""
    repeated["tool_choice"] = choice = given.take("tool_choice", _CHOICE, "auto")
    if isinstance(choice, str):
        return choice, None
    fields = Fields(choice, "tool_choice.", given.check)
    kind = fields.need("type", STRING, "")
    if kind == "function":
        return fields.need("name", STRING, ""), None
    if kind == "allowed_tools":
        return fields.need("mode", one_of("auto", "required"), "auto"), [tool.need("name", STRING, "") for tool in fields.objects("tools")]
    fields.refuse("type", f"{shown(kind)} is not possible: there are function and allowed_tools")
    return "auto", None


# ---- input -------------------------------------------------------------------------------------------------------------


def read_input(given: Fields) -> list[dict[str, Any]]:
    """`input` as messages: what the model made in one turn is one message of the assistant."""
    read = given.text_or_objects("input")
    if isinstance(read, str):
        return [{"role": "user", "content": read}]
    messages: list[dict[str, Any]] = []
    for fields in read:
        kind = fields.take("type", STRING, "message")
        if kind in _ITEMS:
            _ITEMS[kind](fields, messages)
        else:
            fields.refuse("type", f"{shown(kind)} is not possible: there are {', '.join(_ITEMS)}")
    name_results(messages)
    return messages


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
    call = call_of(fields.need("call_id", STRING, ""), fields.need("name", STRING, ""), fields.need("arguments", STRING, "{}"))
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
}
