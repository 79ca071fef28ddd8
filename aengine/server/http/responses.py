"""`/v1/responses`: the output of a chat as items, whole or as events, now or in the background; and responses that are stored."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.outputs import FinishReason, Token
from aengine.server.core.calls_in_flight import CURRENT_CALL, Caller, CallRecord, Decided, Progress, current_caller, current_time
from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError, clip, describe
from aengine.server.core.generation import Generation, count_prompt_tokens, submit
from aengine.server.core.journal import StoredAnswer
from aengine.server.http.bodies import Fields, read_body, read_generation
from aengine.server.http.chat_output import (
    Block,
    Change,
    ContentBlocks,
    OutputReader,
    Piece,
    TokenTexts,
    chat_logprobs,
    stop_reason_of,
    with_receipts,
)
from aengine.server.http.http_errors import to_json
from aengine.server.http.http_exchange import HttpExchange, split_events
from aengine.server.http.responses_input import ResponseAsked, ToolShape, read_request

_log = logging.getLogger("aengine")
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


class Background:
    """A response that is made without its call."""

    def __init__(self, core: Core, asked: ResponseAsked, generation: Generation, stored: StoredAnswer) -> None:
        self.writer, self.stored = ResponseWriter(core, asked, generation, created_at=int(stored.created)), stored
        self.events: list[bytes] = []
        self.streams = asked.stream  # whether its events may be read
        self.cancelled = False
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.task is None or self.task.done()

    async def run(self) -> None:
        """Make it to its end; nothing is raised but a cancellation."""
        try:
            async with self.writer.generation as generation:
                await generation.stream.started()
                self._note(self.writer.first_events())
                async for (piece,) in self.writer.reader.pieces():
                    self._note(self.writer.events(piece))
            self._note(self.writer.last_event())
        except asyncio.CancelledError:
            if not self.cancelled:
                raise  # the server ends
        except Exception as error:
            self._note(self.writer.failed(describe(error)))

    def _note(self, events: bytes) -> None:
        if self.streams:
            self.events += split_events(events)
            self._changed.set()
            self._changed = asyncio.Event()

    async def end_early(self) -> None:
        """Cancel it; returns when it has ended and is stored."""
        assert self.task is not None
        self.cancelled = True
        await self.writer.generation.stream.aclose()
        await asyncio.wait((self.task,))

    async def read(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events from `number` on to the end."""
        while True:
            changed = self._changed
            for event in self.events[number:]:
                number += 1
                yield event
            if self.ended and number >= len(self.events):
                return
            waiting = asyncio.create_task(changed.wait())
            assert self.task is not None
            try:
                await asyncio.wait((waiting, self.task), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()


class StoredResponses:
    """The responses that can be read again: those in the journal, and those that run in the background."""

    def __init__(self, core: Core) -> None:
        self._core, self._journal = core, core.journal
        self._running: dict[str, Background] = {}
        self._resuming: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """Go on with what was running when the process ended that had the journal before. The engine takes requests."""
        if self._resuming is None:
            self._resuming = asyncio.create_task(self._resume(), name="aengine-responses")

    async def aclose(self) -> None:
        """What runs stays unfinished in the journal."""
        tasks = [job.task for job in self._running.values() if job.task is not None]
        tasks += [] if self._resuming is None else [self._resuming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- storing -------------------------------------------------------------------------------------------------------

    async def items_before(self, given: Fields) -> list[Any]:
        """The items of the stored responses up to `previous_response_id`, oldest first. Notes a violation where one is not stored."""
        found: dict[str, list[Any]] = {}
        previous, own = given.peek("previous_response_id"), f"resp_{given.peek('request_id')}"
        while isinstance(previous, str):
            stored = await self._journal.get_answer(previous, current_caller())
            if stored is None or not stored.ended or previous in (own, *found):  # the last where a client gives a request_id twice
                reason = "is not stored" if stored is None else "would come before itself" if stored.ended else "has not ended"
                given.refuse("previous_response_id", f"the response {clip(previous)!r} {reason}")
                return []
            asked, answer = json.loads(stored.asked), json.loads(stored.answer)
            found[previous] = [*asked["input"], *answer["output"]]
            previous = asked["previous"]
        return [item for items in reversed(found.values()) for item in items]

    async def store(self, writer: ResponseWriter, asked: ResponseAsked) -> None:
        """Store a response that has ended. Where that fails its `store` is false."""
        answer = writer.response()
        held = {"input": asked.input, "previous": asked.repeated["previous_response_id"]}
        stored = StoredAnswer(answer["id"], current_caller().name, answer["created_at"], True, to_json(held), to_json(answer))
        if not await self._put(stored):
            writer.fixed["store"] = False

    async def _put(self, stored: StoredAnswer) -> bool:
        try:
            await self._journal.put_answer(stored)
        except OSError as error:
            _log.warning("a response is not stored: %s", error)
            return False
        return True

    async def _drop(self, name: str) -> None:
        with suppress(OSError):
            await self._journal.delete_answer(name)

    # ---- in the background ---------------------------------------------------------------------------------------------

    async def begin_background(self, asked: ResponseAsked, body: Mapping[str, Any]) -> Background:
        """Have a response be made in the background, the same after the process was killed. Raises what `submit` raises, and ServiceError
        (NOT_READY)."""
        caller, decided = current_caller(), Decided.by_chance()
        held = {
            "input": asked.input,
            "previous": asked.repeated["previous_response_id"],
            "body": body,
            "seed": decided.seed,
            "request_id": decided.request_id,
        }
        job = await self._submit(asked, held, time.time(), caller, None)
        if not await self._put(replace(job.stored, answer=to_json(job.writer.response()))):
            await job.writer.generation.close()
            raise ServiceError("NOT_READY", "the response cannot be stored")
        if job.writer.generation.decided is not None and not job.writer.generation.decided.shows_more:
            job.writer.generation.decided.progress = self._journal.follow(job.stored.name)
        self._run(job)
        return job

    async def _submit(
        self, asked: ResponseAsked, held: Mapping[str, Any], created: float, caller: Caller, progress: Progress | None
    ) -> Background:
        call = CURRENT_CALL.get()
        assert call is not None
        call.decided = Decided(held["seed"], held["request_id"], created, one_by_one=asked.stream, is_repeatable=False, progress=progress)
        generation = await submit(self._core.backend, asked.request)
        stored = StoredAnswer(f"resp_{generation.request_id}", caller.name, created, False, to_json(held), b"{}")
        return Background(self._core, asked, generation, stored)

    def _run(self, job: Background) -> None:
        self._running[job.stored.name] = job

        async def run() -> None:
            await job.run()
            asked, answer = json.loads(job.stored.asked), to_json(job.writer.response(cancelled=job.cancelled))
            held = to_json({"input": asked["input"], "previous": asked["previous"]})
            ended = replace(job.stored, ended=True, asked=held, answer=answer, events=b"".join(job.events))
            if not (await self._put(ended) or await self._put(replace(ended, events=b""))):
                await self._drop(ended.name)
            self._running.pop(ended.name, None)

        job.task = asyncio.create_task(run(), name="aengine-response")

    async def _resume(self) -> None:
        for stored in await self._journal.left_behind("resp_"):
            held = json.loads(stored.asked)
            CURRENT_CALL.set(CallRecord("", "", stored.name, caller=Caller.of_owner(stored.owner)))
            try:
                check = FieldChecks()
                given = Fields(held["body"], "", check)
                asked = read_request(given, check, await self.items_before(given))
                progress = await self._journal.follow_on(stored.name)
                job = await self._submit(asked, held, stored.created, current_caller(), progress)
                self._run(job)
            except Exception as error:
                _log.warning("response %s is not gone on with: %s", stored.name, error)
                answer = {"id": stored.name, "object": "response", "status": "failed", "output": [], "created_at": int(stored.created)}
                answer["error"] = {"code": "server_error", "message": describe(error).message}
                await self._put(replace(stored, ended=True, answer=to_json(answer)))

    # ---- reading -------------------------------------------------------------------------------------------------------

    async def find(self, name: str) -> Background | StoredAnswer:
        """Raises ServiceError (REQUEST_NOT_FOUND)."""
        caller = current_caller()
        if name not in self._running and self._resuming is not None:  # it may be one of the process before
            await asyncio.wait((self._resuming,))
        if (job := self._running.get(name)) is not None and caller.may_see(job.stored.owner):
            return job
        stored = await self._journal.get_answer(name, caller) if name.startswith("resp_") else None
        if stored is None:
            raise ServiceError("REQUEST_NOT_FOUND", f"no response {clip(name)!r} is stored", resource=("response", name))
        return stored

    async def retrieve(self, exchange: HttpExchange) -> None:
        """`GET /v1/responses/{id}`: the response; with `?stream=true` its events, those behind `starting_after`;
        `/input_items`: its input."""
        name, _, part = exchange.rest.partition("/")
        found = await self.find(name)
        if part == "input_items":
            asked = json.loads(found.stored.asked if isinstance(found, Background) else found.asked)
            items = [{"id": f"item_{name}_{index}", "type": "message", **item} for index, item in enumerate(asked["input"])]
            ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
            await exchange.respond_json({"object": "list", "data": items, **ids, "has_more": False})
            return
        _refuse_part(name, part)
        query = exchange.query_fields()
        if query.get("stream") != "true":
            answer = found.writer.response() if isinstance(found, Background) else json.loads(found.answer)
            await exchange.respond_json(answer)
            return
        after = query.get("starting_after", "-1")
        if not re.fullmatch(r"-1|[0-9]{1,9}", after):
            raise InvalidRequestError.of("starting_after", f"{clip(after)!r} is not the number of an event")
        if not (found.streams if isinstance(found, Background) else found.events):
            raise InvalidRequestError.of("stream", "only the events of responses are kept that were asked for with background and stream")
        if isinstance(found, Background):
            await _send_events(exchange, found, int(after) + 1)
        else:
            await exchange.begin_events()
            await exchange.end_events(b"".join(split_events(found.events)[int(after) + 1 :]))

    async def cancel(self, exchange: HttpExchange) -> None:
        """`POST /v1/responses/{id}/cancel`: end one that runs in the background; one that has ended stays as it is."""
        name, _, part = exchange.rest.partition("/")
        _refuse_part(name, part, "cancel")
        await exchange.read()
        found = await self.find(name)
        if isinstance(found, Background):
            await found.end_early()
            found = await self.find(name)
        await exchange.respond_json(found.writer.response() if isinstance(found, Background) else json.loads(found.answer))

    async def delete(self, exchange: HttpExchange) -> None:
        """`DELETE /v1/responses/{id}`: forget it; one that runs ends."""
        name, _, part = exchange.rest.partition("/")
        _refuse_part(name, part)
        found = await self.find(name)
        if isinstance(found, Background):
            await found.end_early()
        await self._journal.delete_answer(name)
        await exchange.respond_json({"id": name, "object": "response", "deleted": True})


def _refuse_part(name: str, part: str, wanted: str = "") -> None:
    if part != wanted:
        raise ServiceError("METHOD_NOT_FOUND", f"there is no /v1/responses/{clip(name)}/{clip(part)} for this method")


async def _send_events(exchange: HttpExchange, job: Background, number: int) -> None:
    await exchange.begin_events()
    async with aclosing(job.read(number)) as events:
        async for event in events:
            await exchange.send(event)
    await exchange.end_events()


async def responses(stored: StoredResponses, core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    given = await read_generation(exchange, check)
    body = given.not_taken()
    asked = read_request(given, check, await stored.items_before(given))
    asked.parameters.tell_ignored(core, exchange)
    with asked.parameters.located():
        if asked.background:
            job = await stored.begin_background(asked, body)
            if not asked.stream:
                await exchange.respond_json(job.writer.response())
                return
            await _send_events(exchange, job, 0)
            return
        async with await submit(core.backend, asked.request) as generation:
            await generation.stream.started()
            writer = ResponseWriter(core, asked, generation)
            if asked.stream:
                await exchange.begin_events()
                exchange.error_event = writer.failed
                await exchange.send(writer.first_events())
            async for (piece,) in writer.reader.pieces():
                events = writer.events(piece)
                if asked.stream and events:
                    await exchange.send(events)
        if asked.repeated["store"]:
            await stored.store(writer, asked)
        if asked.stream:
            await exchange.end_events(writer.last_event())
        else:
            await exchange.respond_json(writer.response())


async def input_tokens(core: Core, exchange: HttpExchange) -> None:
    """`/v1/responses/input_tokens`: how many tokens the input of such a request has."""
    check = FieldChecks()
    asked = read_request(await read_body(exchange, check), check)
    with asked.parameters.located():
        num_tokens = await count_prompt_tokens(core.backend, asked.request)
    await exchange.respond_json({"object": "response.input_tokens", "input_tokens": num_tokens})


class ResponseWriter:
    """Writes the output of one generation."""

    def __init__(self, core: Core, asked: ResponseAsked, generation: Generation, created_at: int | None = None) -> None:
        params, engine = asked.request.params, generation.backend.engine
        defaults = engine.model_info.generation_defaults
        self.generation = generation
        self._texts = None if params.logprobs is None else TokenTexts(engine)
        self.reader = OutputReader(generation, self._texts)
        self._blocks = ContentBlocks(with_tokens=self._texts is not None)
        self._shapes = asked.shapes
        self._last: Token | None = None
        self._num_events = 0
        self._error: ServiceError | None = None
        self.fixed = {
            "id": f"resp_{generation.request_id}",
            "object": "response",
            "created_at": current_time() if created_at is None else created_at,
            "model": generation.model,
            "temperature": _first(params.temperature, defaults.temperature, 1.0),
            "top_p": _first(params.top_p, defaults.top_p, 1.0),
            **asked.repeated,
        }

    # ---- the response --------------------------------------------------------------------------------------------------

    def response(self, error: ServiceError | None = None, *, cancelled: bool = False) -> dict[str, Any]:
        """The response as far as the output has come. `error`: what the generation failed with."""
        error = self._error = error or self._error
        reason = None if self._last is None else self._last.finish_reason
        incomplete = reason is not None and reason.cuts
        status = "failed" if error is not None else "in_progress" if reason is None else "incomplete" if incomplete else "completed"
        status = "cancelled" if cancelled and status in ("in_progress", "incomplete") else status
        return {
            **self.fixed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete and reason is not FinishReason.CANCELLED else None,
            "output": [self._item(block) for block in self._blocks.all],
            "usage": None if reason is None else self._usage(),
            "stop_reason": None if self._last is None else stop_reason_of(reason, self._last.stop_reason),  # ours
            **({} if reason is None else with_receipts([self.generation])),
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
        return f"{_PREFIXES[block.kind]}_{self.generation.request_id}_{block.index}"

    def _logprobs(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return [] if self._texts is None else chat_logprobs(tokens, self._texts, with_ids=False)

    # ---- events --------------------------------------------------------------------------------------------------------

    def first_events(self) -> bytes:
        """The events before there is any output, serialised."""
        response = self.response()
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def events(self, piece: Piece) -> bytes:
        """The events of what was read, serialised."""
        self._last = piece.last
        return b"".join([self._change(change) for change in self._blocks.read(piece)])

    def last_event(self) -> bytes:
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
