"""`TokenStream`: what a user iterates. Owns what was read so far, and the promises about leaving a stream.

When the user lets go of it in any way, the request is cancelled. Must not know schedulers or threads.
"""

from __future__ import annotations

from types import TracebackType

import anyio

from aengine.engine.stream_state import NO_TOKEN, End, Item, StreamState
from aengine.outputs import Completion, Token, TokenLogprob, Usage
from aengine.params import SamplingParams


class _Answer:
    """What was read of one sequence."""

    __slots__ = ("end", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: End | None = None


class TokenStream:
    """The tokens of one request, as they are generated: an async iterator and an async context manager.

    Letting go of it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. A stream has one reader at a time. A reader that lags by more than `max_unread_tokens` parks the request
    until it catches up. With n > 1 the tokens of the sequences come interleaved; `Token.index` tells which one a token belongs to.
    """

    def __init__(self, state: StreamState) -> None:
        self._state = state
        self._answers = [_Answer() for _ in state.keys]
        self._num_open = len(self._answers)  # sequences whose end was not read yet
        self._closed = False

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None and not state.released.is_set():
            state.hooks.cancel(state)

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or the one that was drawn."""
        seed = self._state.params.seed
        assert seed is not None, "drawn at submission"
        return seed

    @property
    def effective_params(self) -> SamplingParams:
        """The parameters in use: what was given, with the defaults of model and engine, and the seed, filled in."""
        return self._state.params

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read."""
        num_tokens = sum(len(answer.token_ids) for answer in self._answers)
        return Usage(self._state.prompt_tokens, self._state.cached_prompt_tokens, num_tokens)

    def completion(self) -> Completion:
        """What was read so far, as one answer; the whole answer once the iteration has ended."""
        first, *others = self._answers
        return self._completion(first, tuple(self._completion(answer, ()) for answer in others))

    def _completion(self, answer: _Answer, others: tuple[Completion, ...]) -> Completion:
        params = self._state.params
        return Completion(
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.end.reason if answer.end is not None else None,
            stop_reason=answer.end.stop_reason if answer.end is not None else None,
            usage=self.usage,
            logprobs=tuple(answer.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(self._state.prompt_logprobs) if params.prompt_logprobs is not None else None,
            others=others,
        )

    async def started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""
        await self._state.ready.wait()
        if self._state.error is not None:
            raise self._state.error

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free. Repeated calls do nothing."""
        self._closed = True
        if not self._state.released.is_set():
            self._state.hooks.cancel(self._state)
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
        while not state.items or self._closed:
            if self._closed or self._num_open == 0:
                raise StopAsyncIteration
            if state.error is not None:
                self._closed = True
                raise state.error
            if state.waiter is not None:
                raise anyio.BusyResourceError("reading from a stream that another task is reading from")
            state.waiter = anyio.Event()
            try:
                await state.waiter.wait()
            except BaseException:  # the reading task is cancelled
                state.hooks.cancel(state)
                raise
            finally:
                state.waiter = None
        return self._take(state.pop())

    def _take(self, item: Item) -> Token:
        answer = self._answers[item.index]
        text = item.text or ""
        answer.text.append(text)
        if item.token_id != NO_TOKEN:
            answer.token_ids.append(item.token_id)
        if item.logprob is not None:
            answer.logprobs.append(item.logprob)
        if item.end is not None:
            answer.end = item.end
            self._num_open -= 1
        return Token(
            index=item.index,
            token_id=item.token_id,
            text=text,
            logprob=item.logprob.logprob if item.logprob is not None else None,
            rank=item.logprob.rank if item.logprob is not None else None,
            top_logprobs=item.logprob.top_logprobs if item.logprob is not None else None,
            finish_reason=item.end.reason if item.end is not None else None,
            stop_reason=item.end.stop_reason if item.end is not None else None,
        )
