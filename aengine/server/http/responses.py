"""`POST /v1/responses`: the output of a chat as items, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aengine.api.fields import FieldChecks
from aengine.api.outputs import FinishReason, Token
from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError
from aengine.server.core.generation import Generation, count_prompt_tokens, submit
from aengine.server.http.bodies import read_body, read_generation
from aengine.server.http.chat_output import Block, Change, ContentBlocks, OutputReader, Piece, TokenTexts, chat_logprobs, stop_reason_of
from aengine.server.http.http_errors import to_json
from aengine.server.http.http_exchange import HttpExchange
from aengine.server.http.responses_input import ResponseAsked, ToolShape, read_request

_PREFIXES: Mapping[str, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
"""Of the ids of items."""
_ADDED: Mapping[str, str] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
"""The events of text that is added, without `.delta` and `.done`."""
_CUSTOM = "response.custom_tool_call_input"
_PARTS: Mapping[str, str] = {"reasoning": "reasoning_text", "text": "output_text"}
"""The parts of items."""


async def responses(core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    asked = read_request(await read_generation(exchange, check), check)
    asked.parameters.tell_ignored(core, exchange)
    with asked.parameters.located():
        async with await submit(core.backend, asked.request) as generation:
            await generation.stream.started()
            writer = _Writer(core, asked, generation)
            if asked.stream:
                await exchange.begin_events()
                exchange.error_event = writer.failed
                await exchange.send(writer.begin())
            async for (piece,) in writer.reader.pieces():
                events = writer.events(piece)
                if asked.stream and events:
                    await exchange.send(events)
        if asked.stream:
            await exchange.end_events(writer.end())
        else:
            await exchange.respond_json(writer.response())


async def input_tokens(core: Core, exchange: HttpExchange) -> None:
    """`/v1/responses/input_tokens`: how many tokens the input of such a request has."""
    check = FieldChecks()
    asked = read_request(await read_body(exchange, check), check)
    with asked.parameters.located():
        num_tokens = await count_prompt_tokens(core.backend, asked.request)
    await exchange.respond_json({"object": "response.input_tokens", "input_tokens": num_tokens})


class _Writer:
    """Writes the output of one generation."""

    def __init__(self, core: Core, asked: ResponseAsked, generation: Generation) -> None:
        params, defaults = asked.request.params, core.engine.model_info.generation_defaults
        self._generation = generation
        self._texts = None if params.logprobs is None else TokenTexts(core.engine)
        self.reader = OutputReader(generation, self._texts)
        self._blocks = ContentBlocks(with_tokens=self._texts is not None)
        self._shapes = asked.shapes
        self._last: Token | None = None
        self._num_events = 0
        self._fixed = {
            "id": f"resp_{generation.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": generation.model,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "temperature": _first(params.temperature, defaults.temperature, 1.0),
            "top_p": _first(params.top_p, defaults.top_p, 1.0),
            **asked.repeated,
        }

    # ---- the response --------------------------------------------------------------------------------------------------

    def response(self, error: ServiceError | None = None) -> dict[str, Any]:
        """The response as far as the output has come. `error`: what the generation failed with."""
        reason = None if self._last is None else self._last.finish_reason
        incomplete = reason is not None and reason.cuts
        status = "failed" if error is not None else "in_progress" if reason is None else "incomplete" if incomplete else "completed"
        return {
            **self._fixed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete and reason is not FinishReason.CANCELLED else None,
            "output": [self._item(block) for block in self._blocks.all],
            "usage": None if reason is None else self._usage(),
            "stop_reason": None if self._last is None else stop_reason_of(reason, self._last.stop_reason),  # ours
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.reader.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: Block) -> dict[str, Any]:
        """Empty for a block that was just opened."""
        status = "in_progress" if block.is_whole is None else "completed" if block.is_whole else "incomplete"
        item: dict[str, Any] = {"id": self._id(block), "type": "function_call", "status": status}
        if block.kind == "call":
            return {**item, "call_id": block.call_id, **self._called(block)}
        content = [self._part(block)] if block.text else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _called(self, block: Block) -> dict[str, Any]:
        """The tool and what it is given, as the client knows them."""
        shape = self._shapes.get(block.name, ToolShape(block.name))
        called: dict[str, Any] = {"name": shape.name} if shape.namespace is None else {"name": shape.name, "namespace": shape.namespace}
        if shape.custom:
            return {**called, "type": "custom_tool_call", "input": shape.input_of(block.text) if block.is_whole else ""}
        return {**called, "arguments": block.text}

    def _part(self, block: Block) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[block.kind], "text": block.text}
        return {**part, "annotations": [], "logprobs": self._logprobs(block.tokens)} if block.kind == "text" else part

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._generation.request_id}_{block.index}"

    def _logprobs(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return [] if self._texts is None else chat_logprobs(tokens, self._texts, with_ids=False)

    # ---- events --------------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """The events before there is any output, serialised."""
        response = self.response()
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def events(self, piece: Piece) -> bytes:
        """The events of what was read, serialised."""
        self._last = piece.last
        return b"".join([self._change(change) for change in self._blocks.read(piece)])

    def end(self) -> bytes:
        """The last event, serialised, with the whole response."""
        response = self.response()
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ServiceError) -> bytes:
        """The last event where the generation failed, serialised."""
        return self._event("response.failed", response=self.response(error))

    def _change(self, change: Change) -> bytes:
        block = change.block
        name, place = _ADDED[block.kind], {"item_id": self._id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        custom = self._called(block) if block.kind == "call" and self._is_custom(block) else None
        if change.kind == "added":
            if custom is not None:
                return b""  # its text is within the arguments
            more = {"logprobs": self._logprobs(change.tokens)} if block.kind == "text" else {}
            return self._event(f"{name}.delta", **place, delta=change.text, **more)
        item = {"output_index": block.index, "item": self._item(block)}
        if change.kind == "opened":
            added = self._event("response.output_item.added", **item)
            return added if block.kind == "call" else added + self._event("response.content_part.added", **place, part=self._part(block))
        if custom is not None:
            text = custom["input"]
            done = self._event(f"{_CUSTOM}.delta", **place, delta=text) + self._event(f"{_CUSTOM}.done", **place, input=text)
        elif block.kind == "call":
            done = self._event(f"{name}.done", **place, arguments=block.text)
        else:
            part = self._part(block)
            done = self._event(f"{name}.done", **place, **{key: part[key] for key in ("text", "logprobs") if key in part})
            done += self._event("response.content_part.done", **place, part=part)
        return done + self._event("response.output_item.done", **item)

    def _is_custom(self, block: Block) -> bool:
        return block.name in self._shapes and self._shapes[block.name].custom

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
