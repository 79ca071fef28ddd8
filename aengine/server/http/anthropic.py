"""What a client of `/v1/messages` wants: the fields of Anthropic's body -> a generation.

`POST /v1/messages`, Anthropic's: the output of a chat as blocks of content, whole or as events; and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, FieldChecks, Range, integer, one_of, shown
from aengine.api.outputs import FinishReason, Token
from aengine.chat.preparation import ChatOutputOptions, GenerationRequest
from aengine.server.core.core import Core
from aengine.server.core.generation import Generation, count_prompt_tokens, submit
from aengine.server.http.bodies import LIST, OBJECT, STRING, Fields, read_body, read_generation
from aengine.server.http.body_parameters import CHAT_OPTIONS, EFFORT, OF_OTHERS, OPTIONS, PARAMS, BodyParameters, tenant_of
from aengine.server.http.chat_input import name_results, read_content, read_function, read_part, read_response_format
from aengine.server.http.chat_output import Block, Change, ContentBlocks, OutputReader, Piece, with_receipts
from aengine.server.http.http_errors import to_json
from aengine.server.http.http_exchange import HttpExchange

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
    "receipt": "ours: `receipts` with one entry, from which every token can be derived again; of a stream in message_delta",
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
    parameters: BodyParameters  # has the client's names for fields
    stream: bool


def read_request(given: Fields, check: FieldChecks, *, has_output: bool = True, has_budget: bool = True) -> MessageAsked:
    """Read the body of a request to `/v1/messages`. `has_output`: false for a body that asks for the number of tokens alone. `has_budget`:
    whether reasoning can have one. Raises `InvalidRequestError` with all violations."""
    parameters = BodyParameters(given)
    parameters.names["prompt"] = "messages"
    model = given.take_field("model", STRING, "")
    messages = read_messages(given)
    if messages and messages[-1]["role"] == "assistant" and not any(name in given for name in _TURN):
        parameters.put_field("continue_final_message", True, "messages")
    if "system" in given:
        messages.insert(0, {"role": "system", "content": read_content(given, "system")})
    if tools := _read_tools(given, parameters):
        parameters.put_field("tools", tools, "tools")
    choice, parallel = _take_choice(given)
    choice = parameters.checked_choice(choice)
    if has_output and "max_tokens" not in given:
        given.refuse("max_tokens", "must be set")
    if "stop_sequences" in given:
        parameters.put_field("stop", given.take_field("stop_sequences", LIST, ()), "stop_sequences")
    if "temperature" in given:
        parameters.put_field("temperature", given.take_field("temperature", Range(0.0, 1.0)), "temperature")
    budget = _take_thinking(given, parameters)
    _take_output_config(given, parameters)
    if (metadata := given.sub("metadata")) is not None and (user := metadata.take_field("user_id", STRING)):
        parameters.put_field("tenant", tenant_of(user), "metadata.user_id")
    stream = given.take_field("stream", FLAG, False)
    parameters.ignore(IGNORED)
    given.refuse_all(REFUSED)
    parameters.take_ours((*OPTIONS, *CHAT_OPTIONS, "receipt"))
    given.refuse_rest((*TAKEN, *PARAMS, *OF_OTHERS, *OPTIONS, *CHAT_OPTIONS), EXTRA)
    params, options = parameters.params(), parameters.options()
    check.finish(InvalidRequestError)
    chat = ChatOutputOptions(tool_choice=choice, parallel_tool_calls=parallel, max_reasoning_tokens=budget if has_budget else None)
    return MessageAsked(GenerationRequest(prompt=messages, params=params, options=options, model=model, chat=chat), parameters, stream)


def _read_tools(given: Fields, parameters: BodyParameters) -> list[dict[str, Any]]:
    tools = []
    for fields in given.objects("tools"):
        kind = fields.take_field("type", STRING, "custom")
        if kind == "custom":
            tools.append(read_function(fields, "input_schema"))
        else:
            parameters.leave_out_tool(kind)
    return tools


def _take_choice(given: Fields) -> tuple[str, bool]:
    """The choice of tools, and whether there may be several calls."""
    fields = given.sub("tool_choice")
    if fields is None:
        return "auto", True
    kind = fields.need("type", one_of(*_CHOICES), "auto")
    choice = _CHOICES[kind] or fields.need("name", STRING, "")
    parallel = not fields.take_field("disable_parallel_tool_use", FLAG, False)
    fields.refuse_rest(("type", "name", "disable_parallel_tool_use"), EXTRA)
    return choice, parallel


def _take_thinking(given: Fields, parameters: BodyParameters) -> int | None:
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


def _take_output_config(given: Fields, parameters: BodyParameters) -> None:
    fields = given.sub("output_config")
    if fields is None:
        return
    parameters.put_effort(fields.take_field("effort", EFFORT), "output_config.effort")
    form = fields.sub("format")
    if form is not None and (structured := read_response_format(form, "")) is not None:
        parameters.put_field("structured_output", structured, "output_config.format")
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
        elif kind not in ("text", "image"):
            known = "text, images and tool_result" if role == "user" else "text"
            block.refuse("type", f"{shown(kind)} is not possible: there {'are' if role == 'user' else 'is'} {known}")
        else:
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append(read_part(block, kind))
    return messages or [{"role": role, "content": ""}]


STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.STOP_TOKEN: "end_turn",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.CONTEXT_LENGTH: "model_context_window_exceeded",
    FinishReason.REPETITION: "max_tokens",
    FinishReason.DEADLINE: "max_tokens",
    FinishReason.CANCELLED: "max_tokens",
}
"""In Anthropic's words."""
_DELTAS: Mapping[str, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""What is added to blocks, and the field that has it."""


async def messages(core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    asked = read_request(await read_generation(exchange, check), check, has_budget=bool(core.engine.model_info.reasoning_format))
    asked.parameters.tell_ignored(core, exchange)
    with asked.parameters.located():
        async with await submit(core.backend, asked.request) as generation:
            await generation.stream.started()
            writer = _Writer(generation)
            if asked.stream:
                await exchange.begin_events()
            async for (piece,) in writer.reader.pieces():
                events = writer.events(piece)
                if asked.stream and events:
                    await exchange.send(events)
        if asked.stream:
            await exchange.end_events(writer.end())
        else:
            await exchange.respond_json(writer.message())


async def count_tokens(core: Core, exchange: HttpExchange) -> None:
    """`/v1/messages/count_tokens`: respond with the number of tokens that such a request has as a prompt."""
    check = FieldChecks()
    asked = read_request(await read_body(exchange, check), check, has_output=False, has_budget=False)
    with asked.parameters.located():
        num_tokens = await count_prompt_tokens(core.backend, asked.request)
    await exchange.respond_json({"input_tokens": num_tokens})


class _Writer:
    """Writes the output of one generation."""

    def __init__(self, generation: Generation) -> None:
        self.reader = OutputReader(generation)
        self._generation = generation
        self._blocks = ContentBlocks()
        self._last: Token | None = None

    def message(self) -> dict[str, Any]:
        """The response as far as the output has come."""
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": [_content(block) for block in self._blocks.all],
            **self._stop(),
            "usage": self._usage(),
            **({} if self._last is None else with_receipts([self._generation])),
        }

    def _stop(self) -> dict[str, Any]:
        if self._last is None or (reason := self._last.finish_reason) is None:
            return {"stop_reason": None, "stop_sequence": None}
        word, is_stop_string = STOP_REASONS[reason], reason is FinishReason.STOP_STRING
        if word == "end_turn" and any(block.kind == "call" for block in self._blocks.all):
            word = "tool_use"
        return {"stop_reason": word, "stop_sequence": self._last.stop_reason if is_stop_string else None}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.stream.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    # ---- events --------------------------------------------------------------------------------------------------------

    def events(self, piece: Piece) -> bytes:
        """The events of what was read, serialised. The first come with the first token, when it is known how much of the prompt was
        cached."""
        beginning = b"" if self._last is not None else _event("message_start", message=self.message()) + _event("ping")
        self._last = piece.last
        return beginning + b"".join([_change(change) for change in self._blocks.read(piece)])

    def end(self) -> bytes:
        """The last events, serialised: why the output ended, and the usage."""
        told = with_receipts([self._generation])
        return _event("message_delta", delta=self._stop(), usage=self._usage(), **told) + _event("message_stop")


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = json.loads(block.text) if block.is_whole else {}  # what is cut off cannot be called
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _change(change: Change) -> bytes:
    block = change.block
    if change.kind == "opened":
        return _event("content_block_start", index=block.index, content_block=_content(block))
    if change.kind == "added":
        kind, field = _DELTAS[block.kind]
        return _event("content_block_delta", index=block.index, delta={"type": kind, field: change.text})
    signed = {"type": "signature_delta", "signature": ""}
    end = _event("content_block_delta", index=block.index, delta=signed) if block.kind == "reasoning" else b""
    return end + _event("content_block_stop", index=block.index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"
