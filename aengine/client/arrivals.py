"""What has come of one request and was not read yet: events of the schema -> tokens of the engine.

Owns the order of what is read and the ends of sequences. Fed by the call, read by the stream; knows neither.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence

from aengine.errors import ServerError
from aengine.outputs import FinishReason, Timing, Token, TokenLogprob
from aengine.params import SamplingParams
from aengine.v1 import generation_pb2
from aengine.wire import FINISH_REASONS, seconds_of

MAX_UNREAD_TOKENS = 1024
"""So many wait here for a slow reader; then nothing more is taken from the connection, and the server parks the request."""
NO_TOKEN = -1
_REASONS = {value: reason for reason, value in FINISH_REASONS.items()}


class Arrivals:
    """The tokens of a request with `params`, as they come."""

    def __init__(self, params: SamplingParams) -> None:
        self.tokens: deque[Token] = deque()  # not yet read
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.prompt: Sequence[int] = ()  # its ids, where prompt_logprobs need them
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.timing = Timing()
        self.error: Exception | None = None
        self.over = False  # nothing more will come
        self.started = asyncio.Event()  # the prompt is known and valid, or the request has failed or was cancelled
        self.waiter: asyncio.Event | None = None
        self._open = set(range(params.n))  # sequences whose end has not come
        self._last: dict[int, Token] = {}  # the last tokens of sequences, until their ends have come
        self._room = asyncio.Event()
        self._room.set()

    # ---- fed by the call -----------------------------------------------------------------------------------------------

    def add(self, event: generation_pb2.GenerationEvent) -> None:
        """Raises `ServerError` for what no server should send."""
        match event.WhichOneof("event"):
            case "delta":
                self._add_delta(event.delta)
            case "sequence_finished":
                self._add_end(event.sequence_finished)
            case "started":
                self.prompt_tokens = event.started.prompt.num_tokens
                self.prompt_logprobs = [None]
                self.started.set()
            case "prompt_logprobs":
                self._add_prompt(event.prompt_logprobs)
            case "finished":
                self.cached_prompt_tokens = event.finished.usage.cached_prompt_tokens
                self.timing = _timing(event.finished.timing)
                self.close()
            case None:
                return  # of a newer server
        self._wake()

    async def wait_room(self) -> None:
        """Return when the reader is near enough."""
        await self._room.wait()

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will come: sequences that have no end are cancelled, or failed with `error`."""
        if self.over:
            return
        if self._open and error is not None:
            self.error = error
        else:
            for index in sorted(self._open):
                held = self._last.pop(index, None)
                if held is not None:
                    self._append(held)
                self._append(Token(index, NO_TOKEN, "", finish_reason=FinishReason.CANCELLED))
        self._open.clear()
        self.over = True
        self.started.set()
        self._wake()

    # ---- read by the stream --------------------------------------------------------------------------------------------

    def leave(self, indexes: Iterable[int]) -> None:
        """The reader goes: what is unread gives way to the ends of these sequences, and nothing follows them."""
        self.tokens.clear()
        self._room.set()
        self._open.clear()
        self.close()
        if self.error is None:
            self.tokens.extend(Token(index, NO_TOKEN, "", finish_reason=FinishReason.CANCELLED) for index in indexes)

    def pop(self) -> Token:
        token = self.tokens.popleft()
        if len(self.tokens) <= MAX_UNREAD_TOKENS // 2:
            self._room.set()
        return token

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _add_delta(self, delta: generation_pb2.GenerationDelta) -> None:
        index, ids = delta.sequence_index, delta.token_ids
        if index not in self._open or index in self._last or len(ids) != delta.num_tokens:
            raise ServerError(
                f"a delta of {len(ids)} ids for {delta.num_tokens} tokens of sequence {index} makes no sense here", "DATA_LOSS"
            )
        if not ids:  # text that had been held back
            self._add_token(Token(index, NO_TOKEN, delta.text), delta.last)
            return
        logprobs = _entries(ids, delta.logprobs) if delta.HasField("logprobs") else None
        end = len(ids) - 1
        for i, token_id in enumerate(ids):
            text = delta.text if i == end else ""
            if logprobs is None:
                token = Token(index, token_id, text)
            else:
                known = logprobs[i]
                token = (
                    Token(index, token_id, text, known.logprob, known.rank, known.top_logprobs) if known else Token(index, token_id, text)
                )
            self._add_token(token, delta.last and i == end)

    def _add_token(self, token: Token, is_last: bool) -> None:
        """The last token of a sequence is read together with its end, as in the engine."""
        if is_last:
            self._last[token.index] = token
        else:
            self._append(token)

    def _add_end(self, end: generation_pb2.SequenceFinished) -> None:
        index, finish = end.sequence_index, end.finish
        if index not in self._open:
            raise ServerError(f"sequence {index} ends twice, or is not one of the request's", "DATA_LOSS")
        reason = _REASONS.get(finish.reason)
        if reason is None:
            raise ServerError(f"finish reason {finish.reason} is not known to this client", "UNIMPLEMENTED")
        matched = finish.WhichOneof("matched")
        held = self._last.pop(index, None) or Token(index, NO_TOKEN, "")
        self._open.discard(index)
        self._append(
            Token(
                index,
                held.token_id,
                held.text,
                held.logprob,
                held.rank,
                held.top_logprobs,
                reason,
                getattr(finish, matched) if matched is not None else None,
            )
        )

    def _add_prompt(self, piece: generation_pb2.PromptLogprobs) -> None:
        start, stop = piece.token_offset, piece.token_offset + len(piece.logprobs.logprobs)
        if stop > len(self.prompt):
            raise ServerError(f"logprobs of {stop} tokens, where the prompt has {len(self.prompt)}", "DATA_LOSS")
        self.prompt_logprobs[start:] = _entries(self.prompt[start:stop], piece.logprobs)

    def _append(self, token: Token) -> None:
        self.tokens.append(token)
        if len(self.tokens) >= MAX_UNREAD_TOKENS:
            self._room.clear()

    def _wake(self) -> None:
        if self.waiter is not None:
            self.waiter.set()


def _entries(ids: Sequence[int], columns: generation_pb2.TokenLogprobs) -> list[TokenLogprob | None]:
    """The columns of the tokens `ids` by token. None is a token without a logprob."""
    top_k = columns.top_k
    if not len(ids) == len(columns.logprobs) == len(columns.ranks) or not len(columns.top_token_ids) == len(
        columns.top_logprobs
    ) == top_k * len(ids):
        raise ServerError(f"columns of logprobs differ in length for {len(ids)} tokens", "DATA_LOSS")
    entries: list[TokenLogprob | None] = []
    for i, (token_id, logprob, rank) in enumerate(zip(ids, columns.logprobs, columns.ranks, strict=True)):
        if math.isnan(logprob):
            entries.append(None)
            continue
        top = slice(i * top_k, (i + 1) * top_k)
        entries.append(TokenLogprob(token_id, logprob, rank, dict(zip(columns.top_token_ids[top], columns.top_logprobs[top], strict=True))))
    return entries


def _timing(message: generation_pb2.Timing) -> Timing:
    return Timing(
        queue=seconds_of(message.queue) if message.HasField("queue") else None,
        first_token=seconds_of(message.first_token) if message.HasField("first_token") else None,
        decode=seconds_of(message.decode) if message.HasField("decode") else None,
    )
