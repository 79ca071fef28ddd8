"""`Registry`: every request in flight, from `stream()` to its release. It prepares a request, submits it to the step thread, and gives the
results of steps to the streams; and it bounds how many sequences, and how many tokens of them, may wait for their first step.

Lives in the event loop; only `_cancel` may be called from elsewhere. Knows nothing of how the engine starts or stops.
"""

from __future__ import annotations

import functools
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from aengine.aio.edge import LoopEdge
from aengine.api.config import EngineConfig
from aengine.api.engine import not_forkable, output_of_fork
from aengine.api.errors import FieldViolation, InvalidRequestError, QueueFullError, RequestIdInUseError, refusal
from aengine.api.outputs import ChatIds, FinishReason
from aengine.api.params import EmbeddingParams, SamplingParams
from aengine.api.receipt import ReceiptFacts
from aengine.api.request import ForkPoint, OptionFields, Prompt, RequestOptions, form_of
from aengine.api.runtime import Remembered
from aengine.cache import PageNeeds
from aengine.engine.edges import Command, Submit
from aengine.engine.loading import LoadedModel
from aengine.engine.operations import Adapters
from aengine.engine.request_source import RequestTokens, StreamState, token_logprob
from aengine.engine.requests import CheckedRequest, ForkSource, Limits, SessionHistory, chat_size, check_request, prepare
from aengine.engine.text import OutputPlace, follow_outputs
from aengine.engine.workers import Steps, Workers, at_once
from aengine.scheduler.sequence import Request, Updates
from aengine.scheduler.sessions import SessionName
from aengine.structured.grammars import GrammarCompiler
from aengine.tokenizer.vocabulary import grammar_compiler

if TYPE_CHECKING:
    from aengine.images.encoder import ImageEncoder
    from aengine.sampling.grammar import Compiled
    from aengine.sampling.reasoning import CompiledReasoning


class QueueBound:
    def __init__(self, max_sequences: int | None, max_tokens: int | None) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._waiting: dict[int, int] = {}  # key of a sequence -> tokens of prompt and known outputs, counted once per request
        self._num_tokens = 0

    def enter_request(self, keys: Sequence[int]) -> None:
        """Count the sequences of a request, whose tokens are not known yet. Raises `QueueFullError`, and then counts none."""
        waiting = len(self._waiting)
        if self._max_sequences is not None and waiting and waiting + len(keys) > self._max_sequences:
            raise QueueFullError(
                f"{waiting} sequences wait already, and this request has {len(keys)}; max_queued_requests is {self._max_sequences}"
            )
        self._waiting.update(dict.fromkeys(keys, 0))

    def add_tokens(self, keys: Sequence[int], num_tokens: int) -> None:
        """Count the tokens of a request that was entered. Raises `QueueFullError`."""
        alone = len(self._waiting) == len(keys)
        if self._max_tokens is not None and not alone and self._num_tokens + num_tokens > self._max_tokens:
            raise QueueFullError(
                f"{self._num_tokens} tokens wait already; {num_tokens} more would exceed max_queued_tokens ({self._max_tokens})"
            )
        self._waiting[keys[0]] = num_tokens
        self._num_tokens += num_tokens

    def leave_sequences(self, keys: Iterable[int]) -> None:
        """Sequences were admitted to a step, or have ended."""
        for key in keys:
            self._num_tokens -= self._waiting.pop(key, 0)


def session_of(options: RequestOptions) -> SessionName:
    return options.tenant, options.session or ""


def num_equal(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    most = min(len(first), len(second))
    differs = first[:most] != second[:most]
    return int(differs.argmax()) if differs.any() else most


T = TypeVar("T")


class Registry:
    """`post` hands a command to the step thread; `workers` tokenize long prompts; `parts_of`: as `StepStats` has it."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        adapters: Adapters,
        edge: LoopEdge,
        post: Callable[[Command], None],
        workers: Workers,
        parts_of: Callable[[int], Mapping[str, str]],
    ) -> None:
        self._parts_of = parts_of
        self._config = config
        self._loaded = loaded
        self._adapters = adapters
        self._edge = edge
        self._post = post
        self._workers = workers
        runner = loaded.runner
        self._grammars: GrammarCompiler | None = None  # without a tokenizer there is no text to enforce anything on
        if loaded.tokenizer is not None:
            self._grammars = grammar_compiler(loaded.tokenizer, loaded.info.vocab_size, loaded.info.eos_token_ids)
        needs = PageNeeds(runner.windows, runner.page_size, runner.max_num_batched_tokens, runner.state_pages)
        kv_tokens = needs.longest(runner.num_pages - 1, runner.max_model_len)
        most = runner.max_num_batched_tokens - (runner.max_num_seqs - 1)  # beside what all others decode
        looks_up = config.speculative in ("ngram", "auto")
        self.limits = Limits(
            loaded.info, kv_tokens, config.max_logprobs, image_input=loaded.image_input, step_tokens=most, looks_up=looks_up
        )
        self._streams: dict[int, StreamState] = {}  # every request that is not released, by the key of each of its sequences
        self._by_id: dict[str, StreamState] = {}
        self._ended: Remembered[str, RequestTokens] = Remembered()  # of requests that have ended, by id
        self._sessions: Remembered[SessionName, SessionHistory] = Remembered()  # their latest requests
        self._preparations: dict[int, ExitStack] = {}  # by the key of a request's first sequence: what is to be cancelled when it ends
        self._next_key = 0
        self._bound = QueueBound(config.max_queued_requests, config.max_queued_tokens)
        self.weights_version = 0  # of the tokens that `update` brings
        self.num_submitted = 0  # sequences handed to the step thread so far

    def find(self, request_id: str) -> StreamState | None:
        return self._by_id.get(request_id)

    @property
    def num_preparing(self) -> int:
        """Sequences of requests whose prompt is still being tokenized, or their grammar compiled."""
        return sum(len(self._streams[key].keys) for key in self._preparations)

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended."""
        return sum(not state.finished for state in self._by_id.values())

    async def grammar_violations(self, params: SamplingParams) -> list[FieldViolation]:
        """The violations found by compiling the grammar and the reasoning, if there are any."""
        compiling = self._compile(params)
        if compiling is None:
            return []
        try:
            await self._edge.wait(compiling)
        except InvalidRequestError as error:
            return list(error.violations)
        return []

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions | None,
        fields: OptionFields,
        violations: list[FieldViolation],
        pooled: EmbeddingParams | None = None,
    ) -> StreamState:
        """Check a request and take it, with `pooled` one without output. `violations`: what is known to be wrong with it.

        Raises `InvalidRequestError`, `RequestIdInUseError` or `QueueFullError`.
        """
        try:
            options = RequestOptions.of(options, fields)
        except InvalidRequestError as error:
            violations.extend(error.violations)
        if isinstance(prompt, ForkPoint) and pooled is None and options is not None:
            source = self._find_tokens(prompt.request_id)
            return self._open_fork(source, prompt, params, options)
        request = check_request(prompt, params, options, self._limits_of(pooled), violations)
        if violations or options is None:
            raise refusal(violations)
        self.history_of(options)  # which may refuse it
        state = self._take(replace(request, pooled=pooled), options)
        if options.session is not None:
            messages: Any = prompt.messages if isinstance(prompt, ChatIds) else request.prompt if request.form == "chat" else ()
            state.messages = tuple([dict(message) for message in messages])  # the caller's may change
        return state

    def _take(self, request: CheckedRequest, options: RequestOptions) -> StreamState:
        """Take a request of which nothing is known to be wrong. Raises `RequestIdInUseError` or `QueueFullError`."""
        self._adapters.check(options.adapter)
        request_id = options.request_id or uuid.uuid4().hex
        if request_id in self._by_id:
            raise RequestIdInUseError.of("request_id", f"{request_id!r} is in use by a request in flight")
        return self._enter(request_id, request, options)

    def _find_tokens(self, request_id: str) -> RequestTokens:
        """Raises `InvalidRequestError` (prompt) for a request that cannot be forked."""
        state = self._by_id.get(request_id)
        tokens = self._ended.find(request_id) if state is None else state.tokens
        if tokens is None:
            raise not_forkable(request_id, is_known=state is not None)
        return tokens

    def _open_fork(self, source: RequestTokens, point: ForkPoint, params: SamplingParams, options: RequestOptions) -> StreamState:
        """Take a request that goes on behind what another one has. Raises what `open` raises."""
        form_of(point, options)
        output, num_shared = output_of_fork(point, source.outputs)
        if point.same_params:
            params = source.params.of_sequence(point.index, params)
        options = replace(options.of_fork(source.options, output, params.n), images=())
        prompt, violations = source.prompt if source.images is None else source.images.shown(source.prompt), list[FieldViolation]()
        request = check_request(prompt, params, options, self.limits, violations)  # type: ignore[arg-type] # an array is as good as a list
        if violations:
            raise refusal(violations)
        fork = ForkSource(source.first_key + point.index, len(source.prompt) + num_shared, source.images)
        return self._take(replace(request, prompt=source.prompt, fork=fork), options)

    def update(self, updates: Updates) -> None:
        """Give the results of one step to the streams. A stream that raises fails alone."""
        streams = self._streams
        for key, cached_tokens, loaded_tokens, when in updates.started:
            state = streams[key]
            if key == state.key:
                state.start(cached_tokens, loaded_tokens, when)
        self._bound.leave_sequences(key for key, *_ in updates.started)
        for key, piece in updates.prompt_logprobs:
            state = streams[key]
            try:
                state.add_prompt_logprobs(piece)
            except BaseException as error:
                state.fail(error)
        for key, pooled in updates.pooled:
            streams[key].add_pooled(pooled)
        ends = {finished.key: finished for finished in updates.finished}
        last = {key: i for i, key in enumerate(updates.keys)} if ends else {}  # a step may bring several tokens of a sequence
        version, now = self.weights_version, time.monotonic()
        dropped: Counter[int] = Counter()  # tokens of a sequence behind its stop string
        for i, (key, token_id) in enumerate(zip(updates.keys, updates.token_ids, strict=True)):
            state = streams[key]
            try:
                logprob = None
                if state.params.logprobs is not None and updates.logprobs is not None:
                    logprob = token_logprob(token_id, updates.logprobs, i, state.params.logprobs)
                finished = ends.get(key) if last.get(key) == i else None
                if not state.push(key, token_id, logprob, finished, version, now):
                    dropped[key] += 1
            except BaseException as error:  # with stop strings its text is decoded here
                state.fail(error)
        for key, source, num_drafts, num_accepted in updates.drafts:
            if dropped[key] <= num_accepted:  # else it had ended before the step
                streams[key].add_drafts(source.value, num_drafts, num_accepted - dropped[key])
        for end in updates.finished:
            streams[end.key].finish(end)
        self._bound.leave_sequences(updates.released)
        for key in updates.released:
            state = streams[key]
            if state.release():
                self._forget(state)

    async def cancel_all(self) -> int:
        """Cancel every request; returns how many those were, when their pages are free."""
        states = list(self._by_id.values())
        count = self.num_requests
        for state in states:
            state.cancel()
        with anyio.CancelScope(shield=True):  # bounded by one step
            for state in states:
                await state.released.wait()
        return count

    def end_all(self, error: BaseException) -> None:
        """The step thread has ended: so does every stream, with `error`."""
        if self._grammars is not None:
            self._grammars.close()
        for state in list(self._by_id.values()):
            self._forget(state)
            state.end_stream(error)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _limits_of(self, pooled: EmbeddingParams | None) -> Limits:
        return self.limits if pooled is None else self.limits.without_output()

    def _enter(self, request_id: str, request: CheckedRequest, options: RequestOptions) -> StreamState:
        """Take a request: submit it at once where preparing it is quick, else prepare it in a worker thread first.

        Raises `InvalidRequestError` or `QueueFullError`, and then forgets the request.
        """
        params = request.params
        keys = range(self._next_key, self._next_key + params.n)
        self._bound.enter_request([keys[index] for index in options.live_sequences(params.n)])  # before anything is done for it
        self._next_key = keys.stop
        drop, most_unread = functools.partial(self._edge.call_soon, self._drop), self._config.max_unread_tokens
        tokenizer, functions = self._loaded.tokenizer, (self._post, drop, self._open_own_fork)
        state = StreamState(keys, request_id, params, options, tokenizer, most_unread, *functions, self._edge.loop)
        self._by_id[request_id] = state
        self._streams.update(dict.fromkeys(state.keys, state))
        waits = None if options.adapter is None else self._adapters.enter_request(options.adapter, state.key)
        images = self._loaded.images if request.images else None
        if images is not None or waits is not None or request.size or params.structured_output is not None or params.reasoning is not None:
            preparation = self._preparations[state.key] = ExitStack()
            if state.deadline is not None:  # of which the step thread does not know yet
                seconds = state.deadline - time.monotonic()
                preparation.callback(self._edge.call_later(seconds, self._drop, state, None, FinishReason.DEADLINE))
        try:
            if waits is not None:
                self._go_on(state, waits, lambda _: self._encode(state, request, images))
            else:
                self._encode(state, request, images)
        except BaseException:
            self._forget(state)
            raise
        return state

    def _forget(self, state: StreamState) -> None:
        self._end_preparation(state)
        self._bound.leave_sequences(state.keys)
        self._adapters.leave_request(state.key)
        self._by_id.pop(state.request_id, None)
        state.end_replaced()
        if state.tokens is not None:
            self._ended.remember(state.request_id, state.tokens, state.tokens.num_bytes)
            if state.options.session is not None:
                self._remember_session(state, state.tokens)
        for key in state.keys:
            self._streams.pop(key, None)

    def _remember_session(self, state: StreamState, tokens: RequestTokens) -> None:
        is_plain = tokens.images is None and not state.params.stop
        messages = state.messages if is_plain else ()
        history = SessionHistory(tokens.prompt, np.array(tokens.outputs[0], np.int32), messages)
        size = history.prompt.nbytes + history.output.nbytes + (2 * chat_size(messages, None) if messages else 0)
        self._sessions.remember(session_of(state.options), history, size)

    def history_of(self, options: RequestOptions) -> SessionHistory | None:
        """The history whose ids a chat keeps; None: it keeps none. Raises `InvalidRequestError` where it says so and has no session."""
        if options.keep_history == "text":
            return None
        if options.session is None:
            raise InvalidRequestError.of("keep_history", "'ids' is for a request with a session")
        return self._sessions.find(session_of(options))

    def _open_own_fork(self, source: RequestTokens, point: ForkPoint, params: SamplingParams, fields: OptionFields) -> StreamState:
        return self._open_fork(source, point, params, RequestOptions.of(None, fields))

    def _submit(self, state: StreamState, prepared: tuple[list[Request], Mapping[int, OutputPlace]]) -> None:
        requests, places = prepared
        prompt, images = requests[0].prompt, requests[0].images
        if requests[0].params.pooling is None:
            outputs = tuple([array("i", ids or ()) for ids in state.options.known_outputs or [()] * state.params.n])
            state.tokens = RequestTokens(state.key - state.live_sequences[0], prompt, images, state.params, state.options, outputs)
        prompt = prompt if images is None else images.shown(prompt)
        if state.options.receipt:
            state.receipt_facts = functools.partial(self._receipt_facts, state.options, state.params.n, requests[0], prompt.tolist())
        if (before := self._sessions.find(session_of(state.options))) is not None:
            computed = before.computed
            state.rewritten_tokens = len(computed) - num_equal(computed, requests[0].prompt)
        self._bound.add_tokens(state.keys, len(prompt) + state.num_known_tokens)
        self._end_preparation(state)
        state.submit(prompt, 0 if images is None else len(images.tokens), places)
        self.num_submitted += len(requests)
        self._post(Submit(requests))

    def _receipt_facts(self, options: RequestOptions, n: int, request: Request, prompt: Sequence[int], version: int) -> ReceiptFacts:
        known = options.known_outputs or [()] * n
        image_tokens = 0 if request.images is None else len(request.images.tokens)
        return ReceiptFacts(prompt, known, self._parts_of(version), options.adapter or "", request.adapter_number, image_tokens)

    def _encode(self, state: StreamState, request: CheckedRequest, images: ImageEncoder | None) -> None:
        """The adapter that it asks for is there. `images`: what encodes those of the request; None: there are none to be encoded."""
        if images is None:
            self._begin(state, request)
        else:
            self._go_on(state, images.encode(request.images), lambda encoded: self._begin(state, replace(request, images=encoded)))

    def _begin(self, state: StreamState, request: CheckedRequest) -> None:
        """What it asks for is there, and its images are encoded."""
        compiling = self._compile(request.params)
        if compiling is None:
            self._prepare(state, request, None)
        else:
            self._go_on(state, compiling, functools.partial(self._prepare, state, request))

    def _compile(self, params: SamplingParams) -> Future[Any] | None:
        """A `CompiledReasoning` or a `CompiledGrammar`, later; None if there is neither."""
        return None if self._grammars is None else self._grammars.compile_both(params.structured_output, params.reasoning)

    def _prepare(self, state: StreamState, request: CheckedRequest, grammar: Any) -> None:
        """`grammar`: what `_compile` gave, or None."""
        if request.params.reasoning is not None:
            reasoning: CompiledReasoning = grammar
            state.markers = reasoning.markers
            grammar = reasoning if reasoning.changes_logits else None
        steps = self._steps(state, request, grammar)
        if request.size:
            self._go_on(state, self._workers.submit(steps, request.size), functools.partial(self._submit, state))
        else:
            self._submit(state, at_once(steps))

    def _steps(
        self, state: StreamState, request: CheckedRequest, grammar: Compiled | None
    ) -> Steps[tuple[list[Request], Mapping[int, OutputPlace]]]:
        """What `_submit` takes."""
        sequences = list(zip(state.live_sequences, state.keys, strict=True))
        adapter, limits = self._adapters.key_of(state.key), self._limits_of(request.pooled)
        tokenizer, options, history = self._loaded.tokenizer, state.options, self.history_of(state.options)
        requests = yield from prepare(request, tokenizer, limits, sequences, options, state.deadline, grammar, adapter, history)
        stop_ids = requests[0].stop_token_ids | requests[0].eos_token_ids
        return requests, (yield from follow_outputs(request.known, state.new_text, state.markers, grammar, stop_ids))

    def _go_on(self, state: StreamState, work: Future[T], then: Callable[[T], None]) -> None:
        """Have `then(result)` called in the loop when `work` is done, which is cancelled if the request ends before."""
        self._preparations[state.key].callback(work.cancel)
        work.add_done_callback(functools.partial(self._edge.call_soon, self._on_done, state, then))

    def _on_done(self, state: StreamState, then: Callable[[T], None], work: Future[T]) -> None:
        if state.released.is_set():
            return
        try:
            then(work.result())
        except Exception as error:
            self._drop(state, error)

    def _end_preparation(self, state: StreamState) -> None:
        preparation = self._preparations.pop(state.key, None)
        if preparation is not None:
            preparation.close()

    def _drop(self, state: StreamState, error: BaseException | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request that has not reached the step thread: it failed with `error`, or ended for `reason`."""
        if state.submitted:
            state.cancel()
        elif not state.released.is_set():
            self._forget(state)
            state.end_stream(error, reason)
