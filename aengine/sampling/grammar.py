"""Grammars in the sampler: which tokens a row may have next. Owns the rows' matchers, the bitmasks, and the time these may take.

A compiled grammar arrives with a row's parameters; where it comes from is not known here. llguidance does the matching, within limits
that came with the grammar; the rows' parameters bring its objects, so engines without the extra `structured` never need it. The tokens of a
text that a grammar forces are not forced, as it allows every way to cut it: how the model cuts it, and what it writes behind it, is learned
from what was sampled, and until then as its tokenizer cuts the text.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.errors import InvalidRequestError
from aengine.kernels.arrays import Numbers
from aengine.sampling.arrays import Arrays
from aengine.sampling.processors import Processor, StepRows
from aengine.sampling.unique_items import UniqueArrays
from aengine.scheduler.plan import Features, NewRow

if TYPE_CHECKING:
    import llguidance


MOST_BYTES = 128  # of a text that is looked at
_MOST_TOKENS = 16
_MOST_BEHIND = 3  # tokens behind a text: the punctuation of JSON, where a grammar allows white space too
_MOST_ENTRIES = 10_000  # some 3 MB
_SURE, _MOST_SURE = 2, 3  # how often a token was seen, less how often another one was

Encode = Callable[[int, bytes], Sequence[int]]
"""The likely ids of a text that follows a token; none if it cannot be told."""


class ForcedPlace(NamedTuple):
    """In a forced text or behind it."""

    text: bytes = b""  # all of it
    rest: bytes = b""  # what must come next
    num_behind: int = 0  # tokens since its end, the one it ended in included

    @property
    def key(self) -> bytes:
        """What tells it from other places; empty if that is of no interest."""
        if self.rest or not 0 < self.num_behind <= _MOST_BEHIND:
            return self.rest
        return self.text + b"\xff" * self.num_behind  # 0xff is in no UTF-8

    def forced(self, text: bytes) -> ForcedPlace:
        """Returns the place when the grammar says that `text` must come next: further on in the forced text, or at the start of a new one.
        It is this place if `text` is empty."""
        return ForcedPlace(self.text if self.rest else text, text) if text else self

    def behind(self, token: bytes) -> ForcedPlace:
        """The place behind a token, by its text."""
        rest = self.rest[len(token) :] if token else b""
        return ForcedPlace(self.text, rest, 0 if rest else self.num_behind + 1)


class ForcedText:
    def __init__(self) -> None:
        self._next: dict[tuple[int, bytes], tuple[int, int]] = {}  # by the token before, and the place: the next token, how sure it is

    def tokens(self, before: int, place: ForcedPlace, texts: Sequence[bytes], encode: Encode) -> list[int]:
        """The likely tokens, `_MOST_TOKENS` at most, that follow the token `before`. `texts`: of all ids."""
        found: list[int] = []
        encoded = False
        while len(found) < _MOST_TOKENS and (key := place.key):
            token, sure = self._next.get((before, key), (-1, 0))
            if token < 0 and place.rest and not encoded:
                encoded = True
                start, rest = before, place.rest
                for token in encode(start, rest):
                    self._next.setdefault((start, rest), (token, 1))
                    start, rest = token, rest[len(texts[token]) :]
                continue
            if token < 0 or (not place.rest and sure < _SURE):
                break
            found.append(token)
            before, place = token, place.behind(texts[token])
        return found

    def learn(self, before: int, place: ForcedPlace, token: int) -> None:
        """The token that was sampled at a place, behind the token `before`."""
        if not (key := place.key):
            return
        if len(self._next) >= _MOST_ENTRIES:
            self._next.clear()
        known, sure = self._next.get((before, key), (token, 0))
        if known == token:
            self._next[before, key] = token, min(sure + 1, _MOST_SURE)
        else:
            self._next[before, key] = (known, sure - 1) if sure > 1 else (token, 1)


MASK_SECONDS = 0.02
"""Of one step. Most masks take some 20 microseconds; a grammar can be such that all of its masks take some milliseconds."""
_HIGHEST_OF_BYTES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf).astype(
    np.float32
)
"""[256, 8]: what logits can be at most, by the byte with the bits of their tokens."""
_NOTHING_FOLLOWS = ("NoExtension", "NoExtensionBias")


class GrammarError(InvalidRequestError):
    """A row cannot go on under its grammar. Belongs to this row alone."""


class Matcher(ABC):
    """Where one row is in what limits its tokens."""

    @property
    @abstractmethod
    def parameter(self) -> str:
        """The field of a request that limits the next token."""

    @abstractmethod
    def fill(self, bits: NDArray[np.int32]) -> NDArray[np.int64] | None:
        """Sets the bits [ceil(vocab_size / 32)] of the tokens that may come next, and no others; or leaves them and returns the few ids
        that may not. Raises `GrammarError` if it takes more than the grammar's limits to find out."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Goes on by a token; returns whether nothing is limited behind it. Raises `GrammarError`, and then stays where it was."""

    @abstractmethod
    def likely(self, learned: ForcedText) -> list[int]:
        """The likely next tokens, where a text is forced, or just was."""

    @abstractmethod
    def learn(self, token: int, learned: ForcedText) -> None:
        """The next token, which was sampled."""

    @abstractmethod
    def place(self) -> object:
        """What `go_back` needs to come back here."""

    @abstractmethod
    def go_back(self, place: object) -> None: ...

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[vocab_size], the tokens that may come next. Raises what `fill` raises."""
        bits = _bitmask(1, vocab_size)[0]
        banned = self.fill(bits)
        if banned is None:
            return _unpacked(bits, vocab_size)
        allowed = np.ones(vocab_size, np.bool_)
        allowed[banned] = False
        return allowed


class Compiled(ABC):
    """What limits the tokens of a request's sequences, made ready for one model's vocabulary."""

    @abstractmethod
    def start(self) -> Matcher:
        """At the start of an output."""


@dataclass(frozen=True, eq=False, slots=True)
class CompiledGrammar(Compiled):
    """A grammar made ready for one model's vocabulary, for the sequences of one request."""

    matcher: llguidance.LLMatcher  # at the start of an output; it is copied, and does not change
    eos_token_ids: frozenset[int]
    first: NDArray[np.int32] | None
    """[ceil(vocab_size / 32)], little-endian bits: a limit on the first token that the vocabulary needs beyond the grammar. None: there
    is none."""
    texts: Sequence[bytes] = ()  # of all ids
    encode: Encode | None = None
    unique: UniqueArrays | None = None
    """The arrays whose items differ, beyond what `matcher` knows."""

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self)

    def try_out(self, vocab_size: int, num_tokens: int) -> bool:
        """Sample up to `num_tokens` random tokens, as a row would; returns whether any can begin an output. Raises `GrammarError` if
        that takes more than the grammar's limits."""
        draw = np.random.default_rng(0)
        matcher = self.start()
        for number in range(num_tokens):
            allowed = np.flatnonzero(matcher.allowed(vocab_size))
            if not len(allowed):
                return number > 0
            if matcher.accept(int(draw.choice(allowed))):
                break
        return True


class GrammarMatcher(Matcher):
    """Where one row is in its grammar."""

    parameter = "structured_output"

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._state = compiled.matcher.deep_copy()
        self._tokens: list[int] = []  # of the output, without the one that ends it
        self._place = ForcedPlace()  # as far as forced text was looked for
        self._unique = None if compiled.unique is None else compiled.unique.start()

    def fill(self, bits: NDArray[np.int32]) -> None:
        self._fill(bits)
        if not self._tokens and self._compiled.first is not None:
            bits &= self._compiled.first
        if self._unique is not None:
            allowed = _unpacked(bits, len(self._compiled.texts))
            self._unique.limit(allowed, self._allowed_behind)
            packed = np.packbits(allowed, bitorder="little")
            bits.view(np.uint8)[: len(packed)] = packed

    def _fill(self, bits: NDArray[np.int32]) -> None:
        self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)  # without the GIL
        if self._state.is_error():
            error = first_line(self._state.get_error())
            if error not in _NOTHING_FOLLOWS:
                raise GrammarError.of("structured_output", f"the grammar takes too much: {error}")
            bits.fill(0)

    def _allowed_behind(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """What the grammar allows behind some more tokens."""
        vocab_size = len(self._compiled.texts)
        bits = _bitmask(1, vocab_size)[0]
        self._state.try_consume_tokens(list(tokens))
        self._fill(bits)
        self._move_back(len(tokens))
        return _unpacked(bits, vocab_size)

    def likely(self, learned: ForcedText) -> list[int]:
        if not self._tokens or self._compiled.encode is None:
            return []
        self._place = self._place.forced(self._state.compute_ff_bytes()[:MOST_BYTES])
        return learned.tokens(self._tokens[-1], self._place, self._compiled.texts, self._compiled.encode)

    def learn(self, token: int, learned: ForcedText) -> None:
        if self._place.text:
            learned.learn(self._tokens[-1], self._place, token)
            self._place = self._place.behind(self._compiled.texts[token])

    def accept(self, token: int) -> bool:
        """Nothing is limited behind the end of the output."""
        ends = token in self._compiled.eos_token_ids
        repeats = not ends and self._unique is not None and self._unique.banned()[token]
        if repeats or not (self._state.is_accepting() if ends else self._state.try_consume_tokens([token])):
            raise GrammarError.of("structured_output", f"token {token} does not match the grammar of the request")
        if not ends:
            self._tokens.append(token)
            if self._unique is not None:
                self._unique.accept(token)
        return ends

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def place(self) -> object:
        return len(self._tokens)

    def go_back(self, place: object) -> None:
        assert isinstance(place, int)
        num_back = len(self._tokens) - place
        del self._tokens[place:]
        if self._unique is not None:
            self._unique.go_back(num_back)
        self._move_back(num_back)

    def _move_back(self, num_back: int) -> None:
        """The matcher alone, to where the tokens of the output leave it."""
        if self._state.is_error():  # it stays so
            self._state = self._compiled.matcher.deep_copy()
            for token in self._tokens:
                self._state.try_consume_tokens([token])
        elif num_back:
            self._state.rollback(num_back)


class _Lines:
    """What the matchers leave of some lines of the logits: those of a bitmask, or all but a few ids."""

    def __init__(self, most: int, vocab_size: int) -> None:
        self.bitmask = _bitmask(most, vocab_size)
        self.masked: dict[int, int] = {}  # lines with a bitmask, and which
        self.banned: dict[int, NDArray[np.int64]] = {}  # and those with banned ids

    def add(self, index: int, matcher: Matcher) -> None:
        """Takes what `matcher` allows as the limit of the line `index`. Raises `GrammarError` if that takes more than the grammar's
        limits."""
        number = len(self.masked)
        banned = matcher.fill(self.bitmask[number])
        if banned is None:
            self.masked[index] = number
        elif len(banned):
            self.banned[index] = banned

    def allows(self, index: int, token: int) -> bool:
        number = self.masked.get(index)
        if number is None:
            return token not in self.banned.get(index, ())
        return bool(int(self.bitmask[number, token >> 5]) >> (token & 31) & 1)


class Grammars(Processor):
    """The matchers of the rows whose output follows a grammar, or has reasoning that is limited, over `vocab_size` ids. For one thread."""

    feature = int(Features.GRAMMAR)

    def __init__(self, vocab_size: int, arrays: Arrays) -> None:
        self._vocab_size, self._arrays = vocab_size, arrays
        self._matchers: dict[int, Matcher] = {}  # of rows whose output has not ended
        self._waiting: list[int] = []  # rows whose mask was not made last time, the one that waits longest first
        self._highest: Numbers = None  # `_HIGHEST_OF_BYTES` on a device
        self._learned = ForcedText()

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """A row with output (after a preemption) continues where its tokens left its grammar.

        Raises `GrammarError` if these tokens do not match; the row then has no grammar.
        """
        for new in new_rows:
            self._matchers.pop(new.row, None)
            if isinstance(new.params.grammar, Compiled):
                matcher = new.params.grammar.start()
                if not any(matcher.accept(token) for token in new.tokens[new.prompt_len :].tolist()):
                    self._matchers[new.row] = matcher

    def apply(self, logits: Numbers, step: StepRows, members: NDArray[np.int64]) -> None:
        """What the grammars forbid becomes -inf.

        Only end-of-sequence ids are left where a grammar is complete, nothing is left where no token can go on with it, and nothing is
        changed for a row whose grammar has ended with an end-of-sequence id. Rows that take more than their grammar's limits fail, and
        those for which MASK_SECONDS leave no time are postponed: they come first next time, and one at least is always done. The logits of
        these are not changed. Tokens behind drafts come after the first ones of all rows.
        """
        firsts = members[step.numbers[members] == 0]
        found = [(index, row) for index, row in zip(firsts.tolist(), step.rows[firsts].tolist(), strict=True) if row in self._matchers]
        if not found:
            return
        if self._waiting:
            turns = {row: turn for turn, row in enumerate(self._waiting)}
            found.sort(key=lambda one: turns.get(one[1], len(turns)))
        lines = _Lines(len(members), self._vocab_size)
        end = time.perf_counter() + MASK_SECONDS
        num_done = 0
        for index, row in found:
            if num_done and time.perf_counter() > end:
                break
            num_done += 1
            try:
                lines.add(index, self._matchers[row])
            except GrammarError as error:
                step.failures[row] = error
        self._waiting = [row for _, row in found[num_done:]]
        step.postponed.update(index for index, _ in found[num_done:])
        if step.drafts is not None:
            for index, row in found[:num_done]:
                if row not in step.failures:
                    self._follow_drafts(step, index, lines, end)
        self._forbid(logits, lines)

    def _follow_drafts(self, step: StepRows, first: int, lines: _Lines, end: float) -> None:
        """Adds what is left behind the drafts of a row, as far as they can be accepted. `first` is its first token. The matcher stays where
        it was."""
        assert step.drafts is not None
        index, matcher = first, self._matchers[int(step.rows[first])]
        place = matcher.place()
        while (draft := int(step.drafts[index])) >= 0 and lines.allows(index, draft):
            try:
                if matcher.accept(draft):
                    break  # nothing is masked behind the end
            except GrammarError:
                step.postponed.add(max(index, first + 1))
                break
            index += 1
            try:
                if time.perf_counter() > end:
                    raise TimeoutError
                lines.add(index, matcher)
            except (GrammarError, TimeoutError):
                step.postponed.add(index)
                break
        matcher.go_back(place)

    def forced(self, rows: NDArray[np.int32]) -> dict[int, NDArray[np.int32]]:
        """The likely next tokens, by row, of those rows whose grammar leaves a single text for what follows, or did so shortly before."""
        matchers = {row: matcher for row in rows.tolist() if (matcher := self._matchers.get(row)) is not None}
        return {row: np.array(tokens, np.int32) for row, matcher in matchers.items() if (tokens := matcher.likely(self._learned))}

    def has(self, row: int) -> bool:
        """Whether anything limits what follows the row's latest token, now or later."""
        return row in self._matchers

    def limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        if (matcher := self._matchers.get(row)) is not None:
            yield matcher.parameter, matcher.allowed(self._vocab_size)

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        """Advances the matchers. Returns the rows whose grammar does not allow their token (which the mask did not leave, so other code
        sampled it), with the reason; their matchers stay where they were."""
        errors: dict[int, Exception] = {}
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers.get(row)
            if matcher is None or row in errors:
                continue
            matcher.learn(token, self._learned)
            try:
                if matcher.accept(token):
                    del self._matchers[row]
            except GrammarError as error:
                errors[row] = error
        return errors

    def _forbid(self, logits: Numbers, lines: _Lines) -> None:
        """The lines are left with what `lines` says."""
        packed = lines.bitmask[: len(lines.masked)].view(np.uint8)
        if self._arrays.on_host:
            for index, bits in zip(lines.masked, packed, strict=True):
                np.minimum(logits[index], _HIGHEST_OF_BYTES.take(bits, axis=0).reshape(-1)[: self._vocab_size], out=logits[index])
            for index, ids in lines.banned.items():
                logits[index][ids] = -np.inf
            return
        put = self._arrays.put_array
        if lines.banned:
            flat = np.concatenate([index * self._vocab_size + ids for index, ids in lines.banned.items()])
            logits.view(-1).index_fill_(0, put(flat), -math.inf)
        if not lines.masked:
            return
        if self._highest is None:
            self._highest = put(_HIGHEST_OF_BYTES)
        highest = self._highest[put(packed).long()].view(len(packed), -1)[:, : self._vocab_size]
        at = put(np.array(list(lines.masked)))
        logits[at] = logits[at].minimum(highest)


def _bitmask(num_rows: int, vocab_size: int) -> NDArray[np.int32]:
    return np.zeros((num_rows, -(-vocab_size // 32)), dtype=np.int32)


def _unpacked(bits: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocab_size).astype(np.bool_)


def first_line(error: str) -> str:
    """What the matching library says, without the state of its parser."""
    return error.strip().split("\n")[0][:200]
