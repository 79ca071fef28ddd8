"""What a client of `/v1/messages` wants: the fields of Anthropic's body -> a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, FieldChecks, Range, integer, one_of, shown
from aengine.chat.preparation import ChatOutputOptions, GenerationRequest
from aengine.server.http.bodies import LIST, OBJECT, STRING, Fields
from aengine.server.http.chat_input import NO_TOOLS, name_results, read_content, read_function, read_response_format
from aengine.server.http.parameters import CHAT_OPTIONS, EFFORT, OF_OTHERS, OPTIONS, PARAMS, Parameters, tenant_of

TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "messages": "blocks: text, tool_use, tool_result, thinking. A last message of the assistant is gone on with",
    "system": "the first message, a text or blocks of text",
    "max_tokens": "must be there",
    "stop_sequences": "stop",
    "temperature": "0 to 1",
    "tools": "input_schema: the parameters of functions; tools of Anthropic's are ignored",
    "tool_choice": "auto, any, tool, none; any and tool are enforced. disable_parallel_tool_use: one call at most, where they are",
    "thinking": "enable_thinking in the chat template; budget_tokens: max_reasoning_tokens, where the model's marks are known",
    "output_config": "format: structured_output; effort: reasoning_effort in the chat template",
    "metadata": "user_id: tenant, its hash if it is longer than a tenant can be",
    "stream": "server-sent events",
    "chat_template_kwargs": "template_kwargs, by vLLM's name",
}
"""The fields beside those of ours, and what becomes of them."""
REFUSED: Mapping[str, str] = {
    "logprobs": "a message has no place for them",
    "n": "a message is one output",
    "prompt_logprobs": "a message has no place for them",
}
"""Fields that would change the answer, and cannot."""
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("anthropic_beta", "anthropic_version", "betas"), "a header says the same"),
    "cache_control": "the prefix cache finds what is equal",
    "container": "there are no skills, and nothing runs code",
    "context_management": "nothing is left out of the messages",
    "diagnostics": "there are none",
    "inference_geo": "it runs here",
    "mcp_servers": "no tools are called here",
    "service_tier": "there is one; priority is ours",
    "speed": "there is one",
    "user_profile_id": "there are none",
    "workspace_id": "there are none",
}
"""Fields of Anthropic's that change nothing here, and why."""
EXTRA = "Extra inputs are not permitted"
_TURN = ("continue_final_message", "add_generation_prompt")
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
_THINKING: Mapping[str, bool] = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


@dataclass(frozen=True, slots=True)
class MessageAsked:
    """A request to `/v1/messages`, as its body was read."""

    request: GenerationRequest
    parameters: Parameters  # has the client's names for fields
    stream: bool


def read_request(given: Fields, check: FieldChecks, *, has_output: bool = True, has_budget: bool = True) -> MessageAsked:
    """Read the body of a request to `/v1/messages`. `has_output`: false for a body that asks for the number of tokens alone. `has_budget`:
    whether reasoning can have one. Raises `InvalidRequestError` with all violations."""
    parameters = Parameters(given)
    parameters.names["prompt"] = "messages"
    model = given.take("model", STRING, "")
    messages = read_messages(given)
    if messages and messages[-1]["role"] == "assistant" and not any(name in given for name in _TURN):
        parameters.put("continue_final_message", True, "messages")
    if "system" in given:
        messages.insert(0, {"role": "system", "content": read_content(given, "system")})
    if tools := _read_tools(given, parameters):
        parameters.put("tools", tools, "tools")
    choice, parallel = _take_choice(given)
    choice = parameters.checked_choice(choice)
    if has_output and "max_tokens" not in given:
        given.refuse("max_tokens", "must be set")
    if "stop_sequences" in given:
        parameters.put("stop", given.take("stop_sequences", LIST, ()), "stop_sequences")
    if "temperature" in given:
        parameters.put("temperature", given.take("temperature", Range(0.0, 1.0)), "temperature")
    budget = _take_thinking(given, parameters)
    _take_output_config(given, parameters)
    if (metadata := given.sub("metadata")) is not None and (user := metadata.take("user_id", STRING)):
        parameters.put("tenant", tenant_of(user), "metadata.user_id")
    stream = given.take("stream", FLAG, False)
    parameters.ignore(IGNORED)
    given.refuse_all(REFUSED)
    parameters.take_ours((*OPTIONS, *CHAT_OPTIONS))
    given.refuse_rest((*TAKEN, *PARAMS, *OF_OTHERS, *OPTIONS, *CHAT_OPTIONS), EXTRA)
    params, options = parameters.params(), parameters.options()
    check.finish(InvalidRequestError)
    chat = ChatOutputOptions(tool_choice=choice, parallel_tool_calls=parallel, max_reasoning_tokens=budget if has_budget else None)
    return MessageAsked(GenerationRequest(prompt=messages, params=params, options=options, model=model, chat=chat), parameters, stream)


def _read_tools(given: Fields, parameters: Parameters) -> list[dict[str, Any]]:
    tools = []
    for fields in given.objects("tools"):
        kind = fields.take("type", STRING, "custom")
        if kind == "custom":
            tools.append(read_function(fields, "input_schema"))
        else:
            parameters.note_ignored(f"tools of type {kind}", NO_TOOLS)
    return tools


def _take_choice(given: Fields) -> tuple[str, bool]:
    """The choice of tools, and whether there may be several calls."""
    fields = given.sub("tool_choice")
    if fields is None:
        return "auto", True
    kind = fields.need("type", one_of(*_CHOICES), "auto")
    choice = _CHOICES[kind] or fields.need("name", STRING, "")
    parallel = not fields.take("disable_parallel_tool_use", FLAG, False)
    fields.refuse_rest(("type", "name", "disable_parallel_tool_use"), EXTRA)
    return choice, parallel


def _take_thinking(given: Fields, parameters: Parameters) -> int | None:
    """The budget of reasoning."""
    fields = given.sub("thinking")
    if fields is None:
        return None
    kind = fields.need("type", one_of(*_THINKING), "adaptive")
    budget = fields.need("budget_tokens", integer(1)) if kind == "enabled" else None
    fields.drop(("display",))  # it is shown as it is
    fields.refuse_rest(("type", "budget_tokens"), EXTRA)
    parameters.put_variables({"enable_thinking": _THINKING[kind]}, "thinking")
    parameters.names["max_reasoning_tokens"] = "thinking.budget_tokens"
    return budget


def _take_output_config(given: Fields, parameters: Parameters) -> None:
    fields = given.sub("output_config")
    if fields is None:
        return
    parameters.put_effort(fields.take("effort", EFFORT), "output_config.effort")
    form = fields.sub("format")
    if form is not None and (structured := read_response_format(form, "")) is not None:
        parameters.put("structured_output", structured, "output_config.format")
        parameters.names["structured_output.json_schema"] = "output_config.format.schema"
    parameters.ignore({"task_budget": "max_tokens is the limit"}, fields)
    fields.refuse_rest(("effort", "format"), EXTRA)


# ---- messages ----------------------------------------------------------------------------------------------------------


def read_messages(given: Fields) -> list[dict[str, Any]]:
    """`messages`. Results of tools are messages of their own."""
    if "messages" not in given:
        given.refuse("messages", "must be set")
    messages: list[dict[str, Any]] = []
    for fields in given.objects("messages"):
        role = fields.need("role", one_of("user", "assistant", "system"), "user")
        read = fields.text_or_objects("content")
        fields.refuse_rest(("role", "content"), EXTRA)
        if isinstance(read, str):
            messages.append({"role": role, "content": read})
        elif role == "assistant":
            messages.append(_read_assistant(read))
        else:
            messages += _read_blocks(role, read)
    name_results(messages)
    return messages


def _read_assistant(blocks: list[Fields]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.need("type", STRING, "text")
        if kind == "text":
            texts.append(block.need("text", STRING, ""))
        elif kind == "thinking":
            reasoning.append(block.need("thinking", STRING, ""))
        elif kind == "tool_use":
            function = {"name": block.need("name", STRING, ""), "arguments": block.need("input", OBJECT, {})}
            calls.append({"id": block.need("id", STRING, ""), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            block.refuse("type", f"{shown(kind)} is not possible: there are text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_blocks(role: str, blocks: list[Fields]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.need("type", STRING, "text")
        if kind == "tool_result" and role == "user":
            content = read_content(block) if "content" in block else ""
            messages.append({"role": "tool", "tool_call_id": block.need("tool_use_id", STRING, ""), "content": content})
        elif kind != "text":
            known = "text and tool_result" if role == "user" else "text"
            block.refuse("type", f"{shown(kind)} is not possible: there {'are' if role == 'user' else 'is'} {known}")
        else:
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append({"type": "text", "text": block.need("text", STRING, "")})
    return messages or [{"role": role, "content": ""}]
