"""`prepare_chat`: what a chat is as a request, and how its outputs are parsed. Knows no streams."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aengine.api.engine import EngineBase
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import MAX_INT32
from aengine.api.params import Reasoning, SamplingParams
from aengine.api.request import Prompt, RequestOptions
from aengine.chat.formats import CALLS, REASONING, ChatFormat
from aengine.chat.parser import ChatParser
from aengine.chat.tool_choice import CHOICES, check_choice, grammar_of

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

    def parser(self) -> ChatParser:
        """Return a new parser, for the output of one sequence."""
        is_structured = self.params.structured_output is not None
        return ChatParser(self.format, self.tools, opened=self.opened, structured=is_structured, only=self.only)


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
        prompt=token_ids,
        params=replace(params, structured_output=grammar, reasoning=reasoning or params.reasoning),
        options=options.for_ids(timeout=timeout),
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
