"""`ActiveRequest`: one request of a client, from its submission to its end: the task that reads its call, and the unread tokens.

Owns the order of the tokens, the ends of sequences, and cancellation. Nothing here refers to the stream that the user holds, so that
dropping the stream cancels the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace

import anyio

from aengine.client.call import GenerationCall
from aengine.client.messages import NO_TOKEN, read_delta, read_drafts, read_finish, read_logprobs, read_timing
from aengine.errors import AEngineError, ServerError
from aengine.outputs import FinishReason, Timing, Token
from aengine.params import SamplingParams
from aengine.requests import RequestOptions
from aengine.stream_base import StreamSource
from aengine.v1 import generation_pb2

MAX_UNREAD_TOKENS = 1024
"""So many wait here for a slow reader; then nothing more is taken from the connection, and the server parks the request."""
CLOSE_SECONDS = 5.0
"""How long closing a request may wait for the server to confirm that it is cancelled."""


class ActiveRequest(StreamSource):
    """Made and used in one event loop, but for `drop`. `on_done` is called when the task has ended."""

    def __init__(
        self, call: GenerationCall, params: SamplingParams, options: RequestOptions, on_done: Callable[[ActiveRequest], object]
    ) -> None:
        super().__init__(call.request_id, params, options, asyncio.Event)
        self._tokens: deque[Token] = deque()  # not read yet
        self._timing = Timing()
        self._finished = False
        self._open = set(self.live_sequences)  # sequences whose end has not come
        self._last: dict[int, Token] = {}  # the last tokens of sequences, until their ends have come
        self._room = asyncio.Event()  # there are few unread tokens
        self._room.set()
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(lambda _: self._end())  # where it was cancelled from elsewhere, before it began or while it ran
        self._task.add_done_callback(lambda _: on_done(self))

    # ---- used by the stream --------------------------------------------------------------------------------------------

    @property
    def timing(self) -> Timing:
        return self._timing

    @property
    def finished(self) -> bool:
        return self._finished

    def pop(self) -> Token | None:
        if not self._tokens:
            return None
        token = self._tokens.popleft()
        if len(self._tokens) <= MAX_UNREAD_TOKENS // 2:
            self._room.set()
        return token

    def cancel(self) -> None:
        """Cancel the request unless it has ended; its unread tokens stay, and sequences without an end are CANCELLED."""
        if not self._finished:
            self._end()
            self._task.cancel()

    def drop(self) -> None:
        """`cancel()` from any thread, also when the loop is closed."""
        if not self._task.done():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.cancel)

    def discard(self, indexes: Iterable[int]) -> None:
        self._tokens.clear()
        if self.error is None:
            self._tokens.extend(Token(index, NO_TOKEN, "", finish_reason=FinishReason.CANCELLED) for index in indexes)

    async def wait_released(self) -> None:
        """Until the server has confirmed it, for CLOSE_SECONDS at most."""
        if not self._task.done():
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                await asyncio.wait({self._task})

    # ---- the task ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            async with aclosing(self._call.events()) as events:
                async for event in events:
                    self._add(event)
                    await self._room.wait()
        except asyncio.CancelledError:
            with suppress(AEngineError), anyio.move_on_after(CLOSE_SECONDS):
                await self._call.cancel()
        except Exception as error:
            self._end(error)

    def _add(self, event: generation_pb2.GenerationEvent) -> None:
        """Raises `ServerError` for what no server should send."""
        match event.WhichOneof("event"):
            case "delta":
                self._add_delta(event.delta)
            case "sequence_finished":
                self._add_finish(event.sequence_finished)
            case "started":
                self.prompt_tokens = event.started.prompt.num_tokens
                self.prompt_logprobs = [None]
                self.ready.set()
            case "prompt_logprobs":
                self._add_prompt(event.prompt_logprobs)
            case "finished":
                usage = event.finished.usage
                self.cached_prompt_tokens = usage.cached_prompt_tokens
                self.reasoning_tokens = usage.reasoning_tokens
                self.drafts = {one.drafter: one for one in read_drafts(usage.drafts)}
                self._timing = read_timing(event.finished.timing)
                self._end()

    def _add_delta(self, delta: generation_pb2.GenerationDelta) -> None:
        index = delta.sequence_index
        if index not in self._open or index in self._last:
            raise ServerError(f"a delta of sequence {index}, which has ended or is not one of the request's", "DATA_LOSS")
        tokens = read_delta(delta)
        if delta.last:
            self._last[index] = tokens.pop()  # it is read together with its end, as in the engine
        self._append(tokens)

    def _add_finish(self, end: generation_pb2.SequenceFinished) -> None:
        index = end.sequence_index
        if index not in self._open:
            raise ServerError(f"sequence {index} ends twice, or is not one of the request's", "DATA_LOSS")
        reason, stop_reason = read_finish(end.finish)
        last = self._last.pop(index, None) or Token(index, NO_TOKEN, "")
        self._open.discard(index)
        self._append([replace(last, finish_reason=reason, stop_reason=stop_reason)])

    def _add_prompt(self, piece: generation_pb2.PromptLogprobs) -> None:
        ids = self._call.prompt_ids
        start, stop = piece.token_offset, piece.token_offset + len(piece.logprobs.logprobs)
        if stop > len(ids):
            raise ServerError(f"logprobs of {stop} tokens, where the prompt has {len(ids)}", "DATA_LOSS")
        self.prompt_logprobs[start:] = read_logprobs(ids[start:stop], piece.logprobs)

    def _append(self, tokens: Iterable[Token]) -> None:
        self._tokens.extend(tokens)
        if len(self._tokens) >= MAX_UNREAD_TOKENS:
            self._room.clear()
        self.notify()

    def _end(self, error: Exception | None = None) -> None:
        """Sequences that have no end are cancelled, or the request has failed with `error`."""
        if self._finished:
            return
        self._finished = True
        if self._open and error is not None:
            self.error = error
        else:
            for index in sorted(self._open):
                held = self._last.pop(index, None)
                end = Token(index, NO_TOKEN, "", finish_reason=FinishReason.CANCELLED)
                self._tokens.extend([end] if held is None else [held, end])
        self.ready.set()
        self._room.set()  # the task only has to close the call
        self.notify()
