"""`TokenStream`: what a user iterates. Owns text, back-pressure and the promises about leaving a stream.

Two halves: `StreamState` is fed by the engine in the event loop and lives until the request is released; `TokenStream` is what
the user holds. When the user lets go of the second, the request is cancelled. Must not know schedulers or threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

import anyio

from aengine.engine.detokenizer import Detokenizer
from aengine.outputs import Completion, FinishReason, Token, Usage
from aengine.scheduler import Finished

NO_TOKEN = -1  # token_id of the token that closes a sequence ended from outside


class StreamState:
    """What the event loop knows of one request. All methods are called in the loop."""

    __slots__ = (
        "cached_prompt_tokens",
        "error",
        "finished",
        "key",
        "lag_limit",
        "on_lag",
        "parked",
        "prompt_tokens",
        "ready",
        "released",
        "request_id",
        "seed",
        "submitted",
        "token_ids",
        "waiter",
    )

    def __init__(self, key: int, request_id: str, seed: int, lag_limit: int, on_lag: Callable[[int, bool], None]) -> None:
        """`on_lag(key, lagging)` is called when the reader falls behind by more than `lag_limit` tokens, and when it caught up."""
        self.key = key
        self.request_id = request_id
        self.seed = seed
        self.lag_limit = lag_limit
        self.on_lag = on_lag
        self.token_ids: deque[int] = deque()  # generated, not yet read
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.parked = False
        self.submitted = False  # handed to the step thread, which will release it
        self.finished: Finished | None = None
        self.error: BaseException | None = None
        self.waiter: anyio.Event | None = None
        self.ready = anyio.Event()  # the prompt is known and valid, or the stream has failed
        self.released = anyio.Event()  # nothing of the request is left in the engine

    def push(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.waiter is not None:
            self.waiter.set()
        if len(self.token_ids) > self.lag_limit and not self.parked:
            self.parked = True
            self.on_lag(self.key, True)

    def pop(self) -> int:
        token_id = self.token_ids.popleft()
        if self.parked and len(self.token_ids) <= self.lag_limit // 2:
            self.parked = False
            self.on_lag(self.key, False)
        return token_id

    def finish(self, finished: Finished) -> None:
        self.finished = finished
        self.wake()

    def end(self, error: BaseException | None) -> None:
        """Nothing of the request is left in the engine, and no report of it follows."""
        if self.finished is None:
            if error is None:
                self.finished = Finished(self.key, FinishReason.CANCELLED)
            else:
                self.error = error
        self.ready.set()
        self.released.set()
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None:
            self.waiter.set()


class TokenStream:
    """The tokens of one request, as they are generated: an async iterator and an async context manager.

    Letting go of it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. A stream has one reader at a time. A reader that lags by more than `max_unread_tokens` parks the request
    until it catches up.
    """

    def __init__(self, state: StreamState, detokenizer: Detokenizer, cancel: Callable[[StreamState], None]) -> None:
        self._state = state
        self._detokenizer = detokenizer
        self._cancel = cancel
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._ended = False

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None and not state.released.is_set():
            self._cancel(state)

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or the one that was drawn."""
        return self._state.seed

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read."""
        return Usage(self._state.prompt_tokens, self._state.cached_prompt_tokens, len(self._token_ids))

    def completion(self) -> Completion:
        """What was read so far, as one answer; the whole answer once the iteration has ended."""
        finished = self._state.finished
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=finished.stop_token_id if finished is not None and self._finish_reason is not None else None,
            usage=self.usage,
        )

    async def started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""
        await self._state.ready.wait()
        if self._state.error is not None:
            raise self._state.error

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free. Repeated calls do nothing."""
        self._ended = True
        if not self._state.released.is_set():
            self._cancel(self._state)
            with anyio.CancelScope(shield=True):  # bounded by one step
                await self._state.released.wait()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        state = self._state
        while not state.token_ids:
            if self._ended:
                raise StopAsyncIteration
            if state.error is not None:
                self._ended = True
                raise state.error
            if state.finished is not None:
                return self._close(state.finished)
            if state.waiter is not None:
                raise anyio.BusyResourceError("reading from a stream that another task is reading from")
            state.waiter = anyio.Event()
            try:
                await state.waiter.wait()
            except BaseException:  # the reading task is cancelled
                self._cancel(state)
                raise
            finally:
                state.waiter = None
        if self._ended:
            raise StopAsyncIteration
        return self._token(state.pop())

    def _token(self, token_id: int) -> Token:
        self._token_ids.append(token_id)
        finished = self._state.finished
        if finished is None or self._state.token_ids or finished.reason not in _ENDED_BY_TOKEN:
            text = self._detokenizer.push(token_id)
        else:
            self._ended = True
            self._finish_reason = finished.reason
            # The token that stopped the sequence is not part of its text.
            text = "" if finished.reason in _STOPPED else self._detokenizer.push(token_id)
            text += self._detokenizer.flush()
        self._text.append(text)
        return Token(0, token_id, text, finish_reason=self._finish_reason)

    def _close(self, finished: Finished) -> Token:
        """The end of a sequence that no token of its own ended."""
        self._ended = True
        if finished.error is not None:
            raise finished.error
        self._finish_reason = finished.reason
        text = self._detokenizer.flush()
        self._text.append(text)
        return Token(0, NO_TOKEN, text, finish_reason=finished.reason)


_STOPPED = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})
_ENDED_BY_TOKEN = _STOPPED | {FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH}
