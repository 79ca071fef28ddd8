"""`LLM`: an engine for programs without an event loop, such as scripts and notebooks. `TokenIterator`: a stream of it.

Owns the event loop, which runs in a thread of its own, and how calls go there and come back. Knows of an engine what `EngineBase` says, so
that an `AsyncEngine`, an `AsyncClient` and a `Router` can be used alike.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from aengine.api.config import EngineConfig
from aengine.api.engine import EngineBase, run_all
from aengine.api.errors import EngineStateError, InvalidRequestError
from aengine.api.outputs import Completion, Embedding, ModelInfo, Score, Token, Usage
from aengine.api.params import SamplingParams
from aengine.api.request import ForkPoint, OptionFields, Prompt
from aengine.api.stream import TokenStream, read_to_end
from aengine.engine.async_engine import AsyncEngine

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")
MOST_AT_ONCE = 1024
"""Sequences of one call that the engine has at once; others follow as these end."""


class LLM:
    """An engine that is called from any thread, and answers when all is done.

    A call that is interrupted (Ctrl-C) cancels its requests, and the engine goes on. `close()`, the end of a `with` block or that of the
    program end the engine.
    """

    def __init__(self, model: str | EngineConfig | EngineBase, **options: Any) -> None:
        """Returns when the model is loaded. `model` and `options`: as of `AsyncEngine`; or an engine that is not started yet. Raises what
        starting it raises."""
        if isinstance(model, EngineBase) and options:
            raise TypeError("options are those of the engine, which is made already")
        self._engine = model if isinstance(model, EngineBase) else AsyncEngine(model, **options)
        self._loop = _Loop()
        self._end = weakref.finalize(self, _end, self._loop, self._engine)  # also at the end of the program
        try:
            self._loop.call(self._engine.start)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Cancel what runs, and end the engine. Repeated calls do nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def model_info(self) -> ModelInfo:
        """What is served."""
        return self._engine.model_info

    @property
    def engine(self) -> EngineBase:
        """The engine. Its methods belong to an event loop of its own: `call` has them run there."""
        return self._engine

    def call(self, function: Callable[[EngineBase], Awaitable[T]]) -> T:
        """What `function` of the engine gives, awaited in its event loop: `llm.call(lambda engine: engine.tokenize("text"))`."""
        return self._loop.call(partial(function, self._engine))

    # ---- requests ------------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams | None = ..., *, progress: bool | None = ..., **fields: Unpack[OptionFields]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        progress: bool | None = ...,
        **fields: Unpack[OptionFields],
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion | list[Completion]:
        """The completion of a prompt (text, token ids, chat messages), or those of several in their order, which run beside each other.

        `params`: of all, or one for each. `fields`: as of `EngineBase.stream`, of all. `progress`: whether there is a bar; None: for
        several prompts, where standard error is a terminal or this is a notebook. The first request that fails cancels the others, and
        is what is raised.
        """
        several = _several(prompts)
        given: list[Any] = list(prompts) if several else [prompts]  # type: ignore[arg-type]
        each = [params] * len(given) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(given):
            raise InvalidRequestError.of("params", f"there are {len(each)} of them for {len(given)} prompts")
        if "request_id" in fields and len(given) != 1:
            raise InvalidRequestError.of("request_id", "is of one request, and these are several")
        n = max((one.n for one in each if one is not None), default=1)
        work = [partial(self._engine.generate, prompt, one, **fields) for prompt, one in zip(given, each, strict=True)]
        with _Bar(len(work), several if progress is None else progress, asked=progress is not None) as bar:
            found = self._loop.call(partial(run_all, work, max(1, MOST_AT_ONCE // n), bar.add))
        return found if several else found[0]

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion | list[Completion]:
        """The answer to a conversation, given as its messages, or those to several: `generate` under the name that others have for it."""
        return self.generate(conversations, params, progress=progress, **fields)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Unpack[OptionFields]) -> TokenIterator:
        """Submit a request; iterate over the result for its tokens. Arguments and errors are those of `EngineBase.stream`."""

        async def submit() -> TokenStream:
            return self._engine.stream(prompt, params, **fields)

        return TokenIterator(self._loop, self._loop.call(submit))

    @overload
    def embed(self, prompts: Prompt, *, progress: bool | None = ..., **fields: Any) -> Embedding: ...
    @overload
    def embed(self, prompts: Sequence[Prompt], *, progress: bool | None = ..., **fields: Any) -> list[Embedding]: ...
    def embed(self, prompts: Prompt | Sequence[Prompt], *, progress: bool | None = None, **fields: Any) -> Embedding | list[Embedding]:
        """The embedding of a prompt, or those of several in their order. `fields`: as of `EngineBase.embed`. Else as `generate`."""
        several = _several(prompts)
        given: list[Any] = list(prompts) if several else [prompts]  # type: ignore[arg-type]
        work = [partial(self._engine.embed, prompt, **fields) for prompt in given]
        with _Bar(len(work), several if progress is None else progress, asked=progress is not None) as bar:
            found = self._loop.call(partial(run_all, work, MOST_AT_ONCE, bar.add))
        return found if several else found[0]

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        top_logprobs: int = 0,
        **fields: Unpack[OptionFields],
    ) -> list[Score]:
        """How likely each of the texts or token ids is behind the prompt, as of `EngineBase.score`."""
        return self._loop.call(partial(self._engine.score, prompt, continuations, top_logprobs=top_logprobs, **fields))


class TokenIterator:
    """The tokens of a request, as they come. Leaving its `with` block, `close()`, and dropping it cancel what is left."""

    def __init__(self, loop: _Loop, stream: TokenStream) -> None:
        self._loop, self._stream = loop, stream
        self._unread: deque[Token] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        if not self._unread:
            self._unread.extend(self._loop.call(self._stream.read))
        if not self._unread:
            raise StopIteration
        return self._unread.popleft()

    def completion(self) -> Completion:
        """The whole output, of tokens that were read, too, when it has ended."""
        self._unread.clear()
        return self._loop.call(partial(read_to_end, self._stream))

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._stream.request_id

    @property
    def usage(self) -> Usage:
        """How many tokens the request has had so far."""
        return self._stream.usage

    def close(self) -> None:
        """Cancel the request, and return when its pages are free."""
        self._unread.clear()
        self._loop.call(self._stream.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        with suppress(EngineStateError):  # the engine was closed before, and the request with it
            self.close()

    def __del__(self) -> None:
        self._loop.post(self._stream.cancel)


class _Loop:
    """An event loop in a thread that ends with the program."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False  # no call begins any more
        self._thread = threading.Thread(target=self._run, name="aengine-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end_tasks())
        self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """What `function` gives, awaited there. Whatever interrupts the caller cancels it, and is raised when it has ended. Raises
        `EngineStateError` once the loop is stopped."""
        if self.is_current:
            raise EngineStateError("an LLM cannot be called from its own event loop, which would wait for itself")
        call = _Call(function)
        with self._lock:
            if self._stopped:
                raise EngineStateError("the engine is closed")
            self.post(call.begin)
        try:
            call.ended.wait()
        except BaseException:
            self.post(call.cancel)
            call.ended.wait()
            raise
        if call.task.cancelled():
            raise EngineStateError("the engine was closed")
        return call.task.result()

    def post(self, function: Callable[[], object]) -> None:
        """Have it called there, unless the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    @property
    def is_current(self) -> bool:
        """Whether it is this thread's."""
        return threading.current_thread() is self._thread

    def stop_after(self, function: Callable[[], Awaitable[object]]) -> None:
        """End the thread when the function, which is called there, has ended. To be called there."""
        with self._lock:
            self._stopped = True
        self._last = _Call(function)
        self._last.begin()
        self._last.task.add_done_callback(lambda _: self._loop.stop())

    def stop(self) -> None:
        """End the thread. Calls that come later are refused."""
        with self._lock:
            self._stopped = True
            self.post(self._loop.stop)
        self._thread.join()


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.ended = threading.Event()
        self._function = function
        self.task: asyncio.Task[T]

    def begin(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.task.add_done_callback(lambda _: self.ended.set())

    def cancel(self) -> None:
        self.task.cancel()

    async def _run(self) -> T:
        return await self._function()


class _Bar:
    """How many requests of a call have ended, on standard error or in a notebook."""

    def __init__(self, total: int, is_wanted: bool, *, asked: bool) -> None:
        self._bar: Any = None
        if is_wanted and (asked or sys.stderr.isatty() or "ipykernel" in sys.modules):
            with suppress(ImportError):  # which comes with transformers
                from tqdm.auto import tqdm  # type: ignore[import-untyped]

                self._bar = tqdm(total=total, unit=" requests", dynamic_ncols=True)
        self._num_tokens = 0

    def add(self, result: Completion | Embedding) -> None:
        """A request has ended."""
        if self._bar is not None:
            self._num_tokens += result.usage.completion_tokens if isinstance(result, Completion) else result.num_tokens
            if seconds := self._bar.format_dict["elapsed"]:
                self._bar.set_postfix_str(f"{self._num_tokens / seconds:,.0f} tok/s", refresh=False)
            self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


def _several(prompts: Any) -> bool:
    """Whether these are prompts, and not one."""
    if isinstance(prompts, (str, ForkPoint)):
        return False
    first = next(iter(prompts), "")
    return isinstance(first, (str, ForkPoint, Sequence)) or (hasattr(first, "__len__") and not isinstance(first, Mapping))


def _end(loop: _Loop, engine: EngineBase) -> None:
    if loop.is_current:  # the object was collected there, where nothing can be waited for
        loop.post(partial(loop.stop_after, engine.aclose))
        return
    try:
        loop.call(engine.aclose)
    finally:
        loop.stop()
