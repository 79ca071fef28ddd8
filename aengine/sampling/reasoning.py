"""Reasoning in an output: `ReasoningMarkers`, where it begins and ends, found in the text of tokens; and in the sampler how it is closed
when it has as many tokens as it may have, and the grammar of what follows it."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.sampling.grammar import Compiled, CompiledGrammar, ForcedText, GrammarError, GrammarMatcher, Matcher


class Phase(enum.Enum):
    """Which part of an output its next token belongs to."""

    OPENING = 0  # reasoning may begin
    REASONING = 1
    ANSWER = 2  # reasoning has ended, or there is none


class ReasoningPlace(NamedTuple):
    """How far an output has come relative to its reasoning: what is needed to find the next marker in the text that follows."""

    phase: Phase
    text: str = ""
    """OPENING: the output. REASONING: its longest end with which the closing could begin. ANSWER: empty."""
    num_tokens: int = 0  # of the output up to here; up to the end of the reasoning in the answer, 0 if there is none


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What reasoning stands between: none is empty, or has white space around it. A marker may be cut into tokens in any way, but for one
    that is cut within a character."""

    opening: str
    closing: str
    opened: bool  # the output begins within reasoning
    text_of: Callable[[int], str]
    """The text that a token adds to one that has begun, of special tokens too."""

    def start(self) -> ReasoningPlace:
        return ReasoningPlace(Phase.REASONING if self.opened else Phase.OPENING)

    def behind(self, place: ReasoningPlace, token_id: int) -> ReasoningPlace:
        """The place behind a token; `place` is not in the answer."""
        text, num_tokens = place.text + self.text_of(token_id), place.num_tokens + 1
        if place.phase is Phase.OPENING:
            written = text.lstrip()
            if not written.startswith(self.opening):
                return ReasoningPlace(Phase.OPENING, text, num_tokens) if self.opening.startswith(written) else ReasoningPlace(Phase.ANSWER)
            text = written.removeprefix(self.opening)
        if self.closing in text:
            return ReasoningPlace(Phase.ANSWER, "", num_tokens)
        ends = (text[begin:] for begin in range(max(0, len(text) - len(self.closing) + 1), len(text)))
        return ReasoningPlace(Phase.REASONING, next(filter(self.closing.startswith, ends), ""), num_tokens)


def unclean_ends(texts: Sequence[bytes], marker: str) -> tuple[list[int], dict[str, NDArray[np.int64]]]:
    """Tokens, by their `texts`, that hold a marker and more than white space behind it; and by beginnings of the marker, those that hold
    the rest of it and so much behind it."""
    whole = marker.encode()
    rests: defaultdict[bytes, list[tuple[str, bytes]]] = defaultdict(list)  # by their first byte, with what comes before
    for cut in range(1, len(marker)):
        rest = marker[cut:].encode()
        rests[rest[:1]].append((marker[:cut], rest))
    ends: list[int] = []
    ends_behind: defaultdict[str, list[int]] = defaultdict(list)
    for token_id, text in enumerate(texts):
        if whole in text and text.partition(whole)[2].strip():
            ends.append(token_id)
        for begin, rest in rests.get(text[:1], ()):
            if text.startswith(rest) and text[len(rest) :].strip():
                ends_behind[begin].append(token_id)
    return ends, {begin: np.array(ids, np.int64) for begin, ids in ends_behind.items()}


_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class CompiledReasoning(Compiled):
    """Reasoning made ready for one model's vocabulary, for the sequences of one request. Ids of tokens are int64."""

    markers: ReasoningMarkers
    closing_ids: tuple[int, ...]  # what is written when the reasoning has to end
    max_tokens: int | None = None
    grammar: CompiledGrammar | None = None  # of what follows
    grammar_at_start: CompiledGrammar | None = None  # of an output without reasoning
    opening_id: int | None = None  # what may come in place of that
    answer_ids: tuple[int, ...] = ()  # what is written behind the closing, before what the grammar allows
    banned: NDArray[np.int64] = field(default_factory=lambda: _NONE)  # within the reasoning
    banned_behind: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)  # there, and behind these beginnings of the closing

    @property
    def changes_logits(self) -> bool:
        """Whether it does more than to tell where the reasoning ends."""
        return self.max_tokens is not None or self.grammar is not None

    def start(self) -> Matcher:
        return _ReasoningMatcher(self)


class _ReasoningMatcher(Matcher):
    """Where one row is: before its reasoning, within it, or in the answer."""

    def __init__(self, compiled: CompiledReasoning) -> None:
        self._compiled = compiled
        self._at = compiled.markers.start()
        self._due: tuple[int, ...] = ()  # what has to come next
        at_start = compiled.grammar_at_start
        self._answer: GrammarMatcher | None = at_start.start() if at_start is not None and self._at.phase is Phase.OPENING else None

    @property
    def parameter(self) -> str:
        return "reasoning" if self._answer is None else self._answer.parameter

    @property
    def _forced(self) -> tuple[int, ...]:
        """The tokens that have to come next."""
        compiled = self._compiled
        if self._due or self._at.phase is not Phase.REASONING or compiled.max_tokens is None or self._at.num_tokens < compiled.max_tokens:
            return self._due
        return compiled.closing_ids + compiled.answer_ids

    def fill(self, bits: NDArray[np.int32]) -> NDArray[np.int64] | None:
        if forced := self._forced:
            bits.fill(0)
            _allow(bits, forced[0])
        elif self._answer is not None:
            self._answer.fill(bits)
            if self._at.phase is Phase.OPENING and self._compiled.opening_id is not None:
                _allow(bits, self._compiled.opening_id)
        elif self._at.phase is Phase.REASONING:
            banned, text = self._compiled.banned, self._at.text
            more = [ids for begin, ids in self._compiled.banned_behind.items() if text.endswith(begin)] if text else []
            return np.concatenate((banned, *more)) if more else banned
        else:
            return _NONE
        return None

    def likely(self, learned: ForcedText) -> list[int]:
        if forced := self._forced:
            return list(forced)
        return [] if self._answer is None else self._answer.likely(learned)

    def learn(self, token: int, learned: ForcedText) -> None:
        if self._answer is not None:
            self._answer.learn(token, learned)

    def accept(self, token: int) -> bool:
        compiled, at, answer = self._compiled, self._at, self._answer
        due: tuple[int, ...] = ()
        if forced := self._forced:
            if token != forced[0]:
                raise GrammarError.of("reasoning", f"token {token} is not what closes the reasoning")
            due = forced[1:]
            at = at._replace(phase=Phase.REASONING if due else Phase.ANSWER, text="")
        elif answer is not None and (at.phase is Phase.ANSWER or token != compiled.opening_id):
            ends = answer.accept(token)
            self._at = at._replace(phase=Phase.ANSWER)
            return ends
        else:
            if compiled.grammar is not None and token in compiled.grammar.eos_token_ids:
                raise GrammarError.of("reasoning", f"token {token} ends the output within its reasoning, before what must match a grammar")
            at, answer = compiled.markers.behind(at, token), None
            if at.phase is Phase.ANSWER:
                due = compiled.answer_ids
        if at.phase is Phase.ANSWER and not due and compiled.grammar is not None:
            answer = compiled.grammar.start()
        self._at, self._answer, self._due = at, answer, due
        return at.phase is Phase.ANSWER and not due and answer is None

    def place(self) -> object:
        return self._at, self._due, self._answer, None if self._answer is None else self._answer.place()

    def go_back(self, place: object) -> None:
        assert isinstance(place, tuple)
        self._at, self._due, self._answer, in_answer = place
        if self._answer is not None:
            self._answer.go_back(in_answer)


def _allow(bits: NDArray[np.int32], token_id: int) -> None:
    """Sets the bit of a token."""
    bits.view(np.uint8)[token_id >> 3] |= 1 << (token_id & 7)
