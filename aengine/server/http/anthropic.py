"""`POST /v1/messages`, Anthropic's: the output of a chat as blocks of content, whole or as events; and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aengine.api.fields import FieldChecks
from aengine.api.outputs import FinishReason, Token
from aengine.server.core.core import Core
from aengine.server.core.generation import Generation, count_prompt_tokens, submit
from aengine.server.http.anthropic_input import read_request
from aengine.server.http.blocks import Block, Blocks, Change
from aengine.server.http.bodies import read_body
from aengine.server.http.chat_output import OutputReader, Piece
from aengine.server.http.errors import to_json
from aengine.server.http.exchange import Exchange

STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.STOP_TOKEN: "end_turn",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.CONTEXT_LENGTH: "model_context_window_exceeded",
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


async def messages(core: Core, exchange: Exchange) -> None:
    check = FieldChecks()
    asked = read_request(await read_body(exchange, check), check, has_budget=bool(core.engine.model_info.reasoning_format))
    core.log_ignored(asked.parameters.ignored)
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


async def count_tokens(core: Core, exchange: Exchange) -> None:
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
        self._blocks = Blocks()
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
        return _event("message_delta", delta=self._stop(), usage=self._usage()) + _event("message_stop")


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
