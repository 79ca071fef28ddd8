"""`StreamState`: the event loop's side of one request, from submission to release; `TokenStream`: what its user iterates; and the embedding
that an embedding request comes to.

The registry adds what the step thread reports; the `TokenStream` that the user holds reads from it. Owns the order of what is read, the
ends of sequences, stop strings, and when a reader lags. All methods are called in the event loop. Knows neither schedulers nor threads.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.errors import EngineStateError, FieldViolation, InvalidRequestError, NothingToChooseError, RequestEndedError
from aengine.api.outputs import (
    NO_TOKEN,
    DraftUsage,
    Embedding,
    FinishReason,
    ModelInfo,
    RequestInfo,
    RequestState,
    Timing,
    Token,
    TokenLogprob,
)
from aengine.api.params import NEUTRAL, EmbeddingParams, SamplingParams
from aengine.api.request import ForkPoint, OptionFields, RequestOptions
from aengine.api.runtime import UnreadBuffer
from aengine.api.stream import MOST_WAITING, StreamSource
from aengine.engine.edges import Cancel, Command, Park
from aengine.engine.text import OutputPlace, OutputText, StopStrings
from aengine.sampling.reasoning import Phase, ReasoningMarkers, ReasoningPlace
from aengine.scheduler.plan import PooledStates, PromptImages, PromptLogprobs, TokenLogprobs, TokenStates
from aengine.scheduler.sequence import Finished
from aengine.tokenizer.tokenizer import Tokenizer

_Unread = tuple[int, int, str | None, float | None, int | None, Mapping[int, float] | None, FinishReason | None, int | str | None, int]
"""The fields of a `Token`, in its order; its text is None until it is decoded. A plain tuple is the cheapest of all that could wait."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestTokens:
    """What a request was given and has brought, for others to go on behind it."""

    first_key: int  # of the sequence 0
    prompt: NDArray[np.int32]
    images: PromptImages | None
    params: SamplingParams
    options: RequestOptions
    outputs: tuple[array[int], ...]  # of the sequences, known outputs included; they grow

    @property
    def num_bytes(self) -> int:
        images = 0 if self.images is None else self.images.num_bytes
        return self.prompt.nbytes + sum(4 * len(output) for output in self.outputs) + images


class StreamState(StreamSource):
    """The state of a request with `params.n` sequences."""

    def __init__(
        self,
        keys: range,
        request_id: str,
        params: SamplingParams,
        options: RequestOptions,
        tokenizer: Tokenizer | None,
        lag_limit: int,
        post: Callable[[Command], None],
        drop: Callable[[StreamState], object],
        open_fork: Callable[[RequestTokens, ForkPoint, SamplingParams, OptionFields], StreamState],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """`keys`: one for each sequence, also for those that had ended. `tokenizer`: None for a model without one. `lag_limit`: unread
        tokens beyond which it lags. `post`: hands a command to the step thread. `drop`: ends a request that has not reached it; both
        callable from any thread."""
        super().__init__(request_id, params, options, self._open_own_fork, loop)
        self.messages: Sequence[Mapping[str, Any]] = ()  # that its prompt was made of, where a session wants them
        self.tokens: RequestTokens | None = None  # once the prompt is known, of a request with output
        self.replaces: StreamState | None = None  # which ends when this one has begun, or has ended
        self.most_waiting = min(MOST_WAITING, lag_limit)
        self._new_fork = open_fork
        self.keys = [keys[index] for index in self.live_sequences]  # of the sequences that get tokens
        self.options = options
        self.items: UnreadBuffer[_Unread] = UnreadBuffer(lag_limit, self._park)  # without stop strings decoded when they are read
        self.prompt: list[int] = []  # the ids, where prompt_logprobs need them
        self.pooled: NDArray[np.float64] | None = None  # [hidden_size], the sum of `PooledStates`
        self.token_states: list[TokenStates] = []  # in the order of the tokens
        self.submitted = False  # handed to the step thread, which will release it
        self.released = self.new_event()  # set when the engine has forgotten the request: its pages are free
        self.markers: ReasoningMarkers | None = None  # set before its first token
        self._first_key = keys.start
        self._tokenizer = tokenizer if params.detokenize is not False else None
        self._stop = StopStrings(params.stop) if params.stop else ()
        self._texts: dict[int, OutputText | None] = {}  # of the sequences that have tokens
        self._post = post
        self._drop = drop
        self._places: dict[int, ReasoningPlace] = {}  # of these, with markers
        self._ended = [index not in self.live_sequences for index in range(params.n)]  # by sequence, with those whose end is in the items
        self._num_released = 0
        self._num_tokens = self.num_known_tokens
        self._weights_version = 0  # of its latest token
        self._arrival_time = time.time()
        self._arrival = time.monotonic()  # these four in seconds
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token = 0.0

    @property
    def key(self) -> int:
        """The key of the first sequence that gets tokens."""
        return self.keys[0]

    @property
    def deadline(self) -> float | None:
        """When the request's timeout passes, on time.monotonic; None if it has none."""
        return None if self.options.timeout is None else self._arrival + self.options.timeout

    @property
    def unread(self) -> int:
        return len(self.items)

    @property
    def gone(self) -> bool:
        return self.released.is_set()

    @property
    def finished(self) -> bool:
        """Whether every sequence has its end, read or not, or the request failed."""
        return self.error is not None or all(self._ended)

    @property
    def timing(self) -> Timing:
        first, started = self._first_token, self._started
        return Timing(
            queue=None if started is None else started - self._arrival,
            first_token=None if first is None else first - self._arrival,
            decode=None if first is None else self._last_token - first,
        )

    def info(self) -> RequestInfo:
        if self.finished:
            state = RequestState.FINISHED
        elif not self.submitted:
            state = RequestState.PREPARING
        elif self.items.lags:
            state = RequestState.PARKED
        else:
            state = RequestState.WAITING if self._started is None else RequestState.RUNNING
        usage = self.usage_with(self._num_tokens)
        return RequestInfo(self.request_id, state, usage, self.timing, self._arrival_time)

    def submit(self, prompt: NDArray[np.int32], image_tokens: int, places: Mapping[int, OutputPlace]) -> None:
        """The request is valid and goes to the step thread. `prompt`: its ids, of which so many are of images. `places`: where sequences
        are that have output, by index."""
        for index, place in places.items():
            self._texts[index] = place.text
            if place.reasoning is not None:
                self._places[index] = place.reasoning
        self._count_reasoning()
        self.prompt_tokens, self.image_tokens = len(prompt), image_tokens
        if self.params.prompt_logprobs is not None:
            self.prompt = prompt.tolist()
        self.prompt_logprobs = [None] * max(1, min(self.params.prompt_logprobs_from, len(prompt)))
        self.submitted = True
        self.ready.set()
        self.notify()

    # ---- written by the registry ---------------------------------------------------------------------------------------

    def start(self, cached_tokens: int, loaded_tokens: int, when: float) -> None:
        """The first step of the request began at `when`, on time.monotonic; `cached_tokens` of its prompt need not be computed, of which
        so many were loaded for it."""
        self.cached_prompt_tokens, self.loaded_prompt_tokens = cached_tokens, loaded_tokens
        self._started = when
        self.end_replaced()

    def add_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        """Add the logprobs of further prompt tokens. A preempted prompt is computed again from its start, so pieces may repeat some."""
        known, count = self.prompt_logprobs, self.params.prompt_logprobs or 0
        for i in range(len(known) - piece.start, len(piece.logprobs.token_logprobs)):
            known.append(token_logprob(self.prompt[piece.start + i], piece.logprobs, i, count))

    def add_pooled(self, piece: PooledStates | TokenStates) -> None:
        """Add the pooled states of a further chunk. A prompt that was preempted is computed again from its start."""
        if isinstance(piece, TokenStates):
            self.token_states = [*[one for one in self.token_states if one.start < piece.start], piece]
            return
        self.pooled = piece.states if self.pooled is None or piece.start == 0 else self.pooled + piece.states

    def add_drafts(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Count drafts of `drafter` for one of the sequences, and how many of them were accepted."""
        self.drafts[drafter] = self.drafts.get(drafter, DraftUsage(drafter)).plus(num_drafts, num_accepted)

    def push(
        self, key: int, token_id: int, logprob: TokenLogprob | None, finished: Finished | None, weights_version: int, when: float
    ) -> bool:
        """A new token, which came at `when`, on time.monotonic; `finished` if the sequence ends with it. False: it is behind a stop
        string, and dropped."""
        index = key - self._first_key
        if self._ended[index]:
            return False  # generated before the scheduler cancelled the sequence, or in the same step
        if self.tokens is not None:
            self.tokens.outputs[index].append(token_id)
        text: str | None = None
        reason = None
        stop_reason: int | str | None = None
        if finished is not None and finished.reason in _ENDED_BY_TOKEN:
            reason, stop_reason = finished.reason, finished.stop_token_id
        if self._stop:  # these are decoded at once, so that the sequence stops however slow its reader is
            text = self._decode(index, token_id, reason)
            decoded = self._texts[index]
            if decoded is not None and decoded.stopped is not None:
                if reason is None:
                    self._post(Cancel(key))
                reason, stop_reason = FinishReason.STOP_STRING, decoded.stopped
        self._weights_version = weights_version
        self._num_tokens += 1
        if self.markers is not None:
            place = self._places.get(index) or self.markers.start()
            if place.phase is not Phase.ANSWER:
                self._places[index] = self.markers.behind(place, token_id)
                self._count_reasoning()
        self._last_token = when
        if self._first_token is None:
            self._first_token = when
        if logprob is None:
            unread: _Unread = index, token_id, text, None, None, None, reason, stop_reason, weights_version
        else:
            of_logprobs = logprob.logprob, logprob.rank, logprob.top_logprobs
            unread = index, token_id, text, *of_logprobs, reason, stop_reason, weights_version
        self._append(index, unread, ends=reason is not None)
        return True

    def finish(self, finished: Finished) -> None:
        """A sequence ended, after its last token was pushed."""
        index = finished.key - self._first_key
        if self._ended[index]:
            return
        if finished.error is not None:
            self.fail(finished.error)
        else:
            end = index, NO_TOKEN, None, None, None, None, finished.reason, None, self._weights_version
            self._append(index, end, ends=True)

    def fail(self, error: BaseException) -> None:
        """The request fails, and no other; its reader gets `error` after the unread tokens. KeyboardInterrupt and SystemExit are raised
        again, as they are meant for the whole program."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        self._ended = [True] * self.params.n  # nothing more is taken of it
        if self.error is None:
            self.error = error if isinstance(error, Exception) else _as_exception(error)
        self.cancel()
        self.notify()

    def release(self) -> bool:
        """The scheduler has released one more sequence; True when it was the last."""
        self._num_released += 1
        if self._num_released < len(self.keys):
            return False
        self.released.set()
        return True

    def end_stream(self, error: BaseException | None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """The engine has forgotten the request, and no report of it follows: it failed with `error`, or ended for `reason`."""
        if error is None:
            for key in self.keys:
                self.finish(Finished(key, reason))
        elif not self.finished:
            self.error = error
        self.ready.set()
        self.released.set()
        self.notify()

    def _count_reasoning(self) -> None:
        self.reasoning_tokens = sum(place.num_tokens for place in self._places.values() if place.phase is not Phase.OPENING)

    def _park(self, parked: bool) -> None:
        """Have the request parked while its reader lags."""
        for key in self.keys:
            self._post(Park(key, parked))

    def _append(self, index: int, unread: _Unread, *, ends: bool) -> None:
        self._ended[index] = ends
        self.items.append(unread)
        self.notify()

    # ---- read by the stream --------------------------------------------------------------------------------------------

    def pop(self) -> Token | None:
        """The next token; None if there is none, also because decoding it failed the request."""
        unread = self.items.popleft()
        if unread is None:
            return None
        index, token_id, text, logprob, rank, top_logprobs, reason, stop_reason, weights_version = unread
        if text is None:
            try:
                text = self._decode(index, token_id, reason)
            except BaseException as error:  # a decoder is a program of others
                self.items.replace(())
                self.fail(error)
                return None
        return Token(index, token_id, text, logprob, rank, top_logprobs, reason, stop_reason, weights_version)

    def cancel(self) -> None:
        """From any thread, also in a destructor."""
        if self.released.is_set():
            return
        if not self.submitted:
            self._drop(self)
            return
        for key in self.keys:
            self._post(Cancel(key))

    def give_way(self, successor: StreamSource) -> None:
        """Compute nothing more, and keep what is computed until the `successor` has it."""
        assert isinstance(successor, StreamState)
        if self.submitted and not self.finished:
            successor.replaces = self
            self._park(True)
        else:
            self.cancel()

    def end_replaced(self) -> None:
        """The request has begun, or has ended: the one in whose place it is goes."""
        replaced, self.replaces = self.replaces, None
        if replaced is not None:
            replaced.cancel()

    def _open_own_fork(self, point: ForkPoint, params: SamplingParams, fields: OptionFields) -> StreamState:
        if self.tokens is None:
            raise EngineStateError("the request cannot be forked: its prompt is not tokenized yet, or it has no output")
        return self._new_fork(self.tokens, point, params, fields)

    async def wait_released(self) -> None:
        """Wait until the engine has forgotten the request, which takes one step at most. The wait cannot be cancelled."""
        if not self.released.is_set():
            with anyio.CancelScope(shield=True):
                await self.released.wait()

    def discard(self, indexes: Iterable[int]) -> None:
        self._ended = [True] * self.params.n
        end = NO_TOKEN, "", None, None, None, FinishReason.CANCELLED, None, 0
        self.items.replace([] if self.error is not None else [(index, *end) for index in indexes])
        self.notify()

    def new_text(self) -> OutputText | None:
        """The text of a sequence without tokens; None where nothing is decoded. From any thread."""
        params = self.params
        if self._tokenizer is None:
            return None
        return OutputText(
            self._tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens),
            stop=self._stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _decode(self, index: int, token_id: int, reason: FinishReason | None) -> str:
        """The text that a token brings. Tokens of a sequence are decoded in order, each once."""
        text = self._texts[index] if index in self._texts else self.new_text()
        if self._tokenizer is None or text is None:
            return ""
        self._texts[index] = text
        if reason in _STOPPED:  # the token that stopped the sequence is not part of its text
            return text.end_with(token_id, include=self.params.include_stop_str_in_output)
        piece = text.push(token_id) if token_id != NO_TOKEN else ""
        return piece if reason is None else piece + text.flush()


def token_logprob(token_id: int, columns: TokenLogprobs, i: int, num_top: int) -> TokenLogprob:
    """The i-th token of `columns`, with its `num_top` most likely alternatives."""
    return TokenLogprob(
        token_id,
        float(columns.token_logprobs[i]),
        int(columns.ranks[i]),
        dict(zip(columns.top_ids[i, :num_top].tolist(), columns.top_logprobs[i, :num_top].tolist(), strict=True)),
    )


def _as_exception(error: BaseException) -> Exception:
    """What readers can catch, of something else: libraries in Rust raise such when they panic."""
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


_STOPPED = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})
_ENDED_BY_TOKEN = _STOPPED | {FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.REPETITION}


NO_OUTPUT = SamplingParams(**NEUTRAL)
"""The parameters of a request without output: nothing is left to the model's defaults."""


def read_embedding(model: ModelInfo, stages: int, violations: list[FieldViolation], **fields: Any) -> EmbeddingParams:
    """`EmbeddingParams` of these fields, with the pooling in use, and layers as 0 to their number. Adds what is wrong with them, or not
    possible with the model, which is in so many `stages`, to `violations`."""
    try:
        params = EmbeddingParams(**fields)
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return EmbeddingParams(pooling="last")
    pooling = params.pooling or model.pooling
    layers = tuple([layer + model.num_layers + 1 if layer < 0 else layer for layer in params.layers])
    if pooling == "tokens":
        if model.executor != "cpu" or stages > 1:
            violations.append(FieldViolation("pooling", "tokens needs the CPU kernels and a model in one stage"))
        if bad := [layer for layer in params.layers if not -model.num_layers - 1 <= layer <= model.num_layers]:
            violations.append(FieldViolation("layers", f"{bad[0]} is not in [{-model.num_layers - 1}, {model.num_layers}]"))
        if len({*layers}) < len(layers):
            violations.append(FieldViolation("layers", f"{list(params.layers)} names a layer twice"))
        if params.experts and model.num_active_parameters == model.num_parameters:
            violations.append(FieldViolation("experts", "the model has none"))
    elif params.layers != (-1,) or params.first_token or params.experts:
        violations.append(FieldViolation("pooling", f"layers, first_token and experts go with tokens, not with {pooling}"))
    if pooling not in ("last", "mean", "cls", "label", "tokens"):
        violations.append(FieldViolation("pooling", f"that of the checkpoint is {pooling}, which is not supported; choose last or mean"))
    if pooling == "label" and not model.labels:
        violations.append(FieldViolation("pooling", "label is for models that classify, and this one has no labels"))
    if params.dimensions is not None and params.dimensions > model.hidden_size:
        violations.append(FieldViolation("dimensions", f"{params.dimensions} is not in [1, {model.hidden_size}]"))
    return replace(params, pooling="last" if violations else pooling, layers=params.layers if violations else layers)


def embedding_of(state: StreamState, params: EmbeddingParams, reason: FinishReason | None, num_labels: int) -> Embedding:
    """Make the embedding of a request that has ended for `reason`. Raises `RequestEndedError` if it has not come to its end, and
    `NothingToChooseError` for states that are not finite."""
    values = state.pooled if params.pooling != "tokens" else _joined([piece.states for piece in state.token_states])
    if reason is not FinishReason.MAX_TOKENS or values is None:
        why = "its timeout passed" if reason is FinishReason.DEADLINE else "it was cancelled"
        raise RequestEndedError(f"request {state.request_id!r} has no embedding: {why}")
    if not np.isfinite(values).all():
        raise NothingToChooseError.of("model", "its hidden states of the input are not finite numbers, so there is no embedding")
    if params.pooling == "label":
        return Embedding(values[:num_labels].astype(np.float32), state.prompt_tokens, state.cached_prompt_tokens)
    if params.pooling == "tokens":
        experts = _joined([piece.experts for piece in state.token_states if piece.experts is not None])
        return Embedding(params.finish(values), state.prompt_tokens, state.cached_prompt_tokens, experts)
    values = values / float(state.prompt_tokens) if params.pooling == "mean" else values
    return Embedding(params.finish(values), state.prompt_tokens, state.cached_prompt_tokens)


def _joined(pieces: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """The [tokens, layers, ..] of chunks as [layers, tokens, ..]; None where there are none."""
    return np.ascontiguousarray(np.concatenate(pieces).swapaxes(0, 1)) if pieces else None
