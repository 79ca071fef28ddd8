"""`OutputText`: the text of one sequence, up to a stop string. Owns the search for stop strings and the text that it holds back. Output
that a sequence has before its first step leaves its text, its reasoning and its grammar where they would be had it been generated here.

Its text comes from a `Detokenizer`. Knows nothing of requests, streams or why a sequence ended: the caller sees `stopped` and ends it.

Which match ends the sequence: the one that begins earliest in the text; of those that begin there, the shortest. That depends
on the text alone, not on how it falls into tokens. So of "abcd" and "bc" the first wins in "abcd", and after "abc" the match
is still open: one of the next tokens, or the end of the sequence, decides. It never stays open for longer than a stop string.

`Texts`: the model's tokenizer and chat template for callers, as requests use them.

All work is done in threads of its own, a step at a time, so that it holds up neither streams nor the prompts of requests. That of a caller
who goes away ends with its step, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aengine.aio.edge import LoopEdge
from aengine.api.errors import EngineStateError, InvalidRequestError, NoTokenizerError
from aengine.api.fields import FieldChecks, shown
from aengine.api.outputs import RenderedChat, TokenizedText
from aengine.api.request import ChatFields, ChatOptions, NamedImage, images_of
from aengine.engine.requests import (
    QUICK_CHARACTERS,
    Limits,
    SessionHistory,
    chat_size,
    check_images,
    encode_text,
    render_chat,
)
from aengine.engine.workers import Steps, Workers
from aengine.sampling.reasoning import Phase, ReasoningMarkers, ReasoningPlace
from aengine.tokenizer.codecs import ByteDetokenizer, Detokenizer
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import TokenBytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from aengine.images.encoder import ImageEncoder, ImageText
    from aengine.sampling.grammar import Compiled


class OutputText:
    """The text of one sequence, piece by piece, up to its first stop string. Not for use by two threads at once.

    The pieces add up to the full decode, cut where the match begins, or ends with `include_stop`. What is held back besides the
    detokenizer's own: the longest end of the text with which a stop string could begin, and no more. Stop strings are compared
    by code points, so one may begin or end inside a grapheme, and U+FFFD, which stands for bytes that are not UTF-8, is found like
    any other; text left out with the special tokens is not.

    `min_tokens`: a match counts only if it is completed by a later token than the first `min_tokens`: the text that is known to
    end with its last character came with such a token. It may begin in the text before. A stop string that was complete by then
    is text like any other and never found later, but one that overlaps with it, or goes on from it, is. Every pushed token
    counts, one without text too.

    Cost: a step of an automaton per character, and a copy of what is held; without stop strings, nothing.
    """

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_match", "_min_tokens", "_state", "_strings", "_tokens", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer | ByteDetokenizer,
        *,
        stop: tuple[str, ...] | StopStrings = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`detokenizer`: a fresh one, used only here. `stop`: strings that are not empty, or what several sequences share of them."""
        self.stopped: str | None = None
        """The stop string that ended the sequence: set by `push`, `flush` or `end_with`, which return no more text from then on."""
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._strings = stop if isinstance(stop, StopStrings) else StopStrings(stop) if stop else None
        self._state = 0  # after the text so far
        self._held = ""  # as many characters as the state is deep
        self._match: tuple[int, int] | None = None  # start and end in `held` of the earliest match, while an earlier one is possible

    def push(self, token_id: int) -> str:
        """Adds an id (>= 0); returns the text that became certain, often empty."""
        if self._strings is None:
            return self._detokenizer.push(token_id)
        if self.stopped is not None:
            return ""
        self._tokens += 1
        return self._search(self._strings, self._detokenizer.push(token_id))

    def flush(self) -> str:
        """At the end of the sequence, once: everything still held back, up to a stop string in it."""
        if self._strings is None:
            return self._detokenizer.flush()
        if self.stopped is not None:
            return ""
        text = self._search(self._strings, self._detokenizer.flush())
        if self.stopped is not None:
            return text
        return text + (self._held if self._match is None else self._stop(self._held, *self._match))

    def end_with(self, token_id: int, include: bool) -> str:
        """The end of a sequence that an end-of-sequence id or a stop token ended: `flush`, and the text of the token if `include`.

        No stop string is looked for in that text, so that why the sequence ended does not depend on `include`.
        """
        held, text = self._held, self.flush()
        if not include or self.stopped is not None:
            return text
        return held + self._detokenizer.push(token_id) + self._detokenizer.flush()

    def _search(self, strings: StopStrings, piece: str) -> str:
        """Reads text that follows on `held`; returns what of both is certain."""
        state, match = self._state, self._match
        counts = self._tokens > self._min_tokens
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            state = strings.step(state, character)
            found = strings.match[state]
            if found and counts and (match is None or end - found < match[0]):
                match = end - found, end
            if match is not None and match[0] <= end - strings.depth[state]:  # what could yet be completed begins no earlier
                return self._stop(text, *match)
            state = strings.unfinished[state]
        certain = len(text) - strings.depth[state]
        self._state = state
        self._held = text[certain:]
        self._match = match and (match[0] - certain, match[1] - certain)
        return text[:certain]

    def _stop(self, text: str, start: int, end: int) -> str:
        self.stopped = text[start:end]
        return text[: end if self._include_stop else start]


class StopStrings:
    """Stop strings, made ready to be looked for in any number of sequences: the automaton of Aho and Corasick ("Efficient string
    matching", 1975). It does not change.

    A state is a number: the longest beginning of a stop string that the text read so far ends with; 0 is none. What is known of
    a state stands in lists.
    """

    __slots__ = ("_children", "_fallback", "depth", "match", "unfinished")

    def __init__(self, strings: Iterable[str]) -> None:
        """`strings`: not empty."""
        self._children: list[dict[str, int]] = [{}]  # the states of one more character
        self._fallback = [0]  # the next shorter beginning that the text ends with
        self.depth = [0]  # characters of the beginning
        self.match = [0]  # characters of the longest stop string that the text ends with; 0 for none
        self.unfinished = [0]  # the longest beginning that the text ends with and that a stop string goes on from
        for string in strings:
            self.match[self._add(string)] = len(string)
        for state, children in self._by_depth():  # so what is shallower, as each fallback is, is finished
            fallback = self._fallback[state]
            self.match[state] = self.match[state] or self.match[fallback]
            self.unfinished[state] = state if children else self.unfinished[fallback]
            if state:
                for character, child in children.items():
                    self._fallback[child] = self.step(fallback, character)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (child := self._children[state].get(character)) is None:
            if not state:
                return 0
            state = self._fallback[state]
        return child

    def _add(self, string: str) -> int:
        state = 0
        for character in string:
            child = self._children[state].get(character)
            if child is None:
                child = len(self.depth)
                self._children[state][character] = child
                self._children.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
                self.unfinished.append(0)
            state = child
        return state

    def _by_depth(self) -> Iterator[tuple[int, dict[str, int]]]:
        states = [0]
        for state in states:  # grows as it is read
            yield state, self._children[state]
            states.extend(self._children[state].values())


_STEP_TOKENS = 512
"""Some milliseconds of work."""


class OutputPlace(NamedTuple):
    """Where the output of a sequence stands: in its text, and in its reasoning."""

    text: OutputText | None  # None where nothing is decoded
    reasoning: ReasoningPlace | None  # None without markers


def follow_outputs(
    known: Mapping[int, NDArray[np.int32]],
    new_text: Callable[[], OutputText | None],
    markers: ReasoningMarkers | None,
    grammar: Compiled | None,
    stop_ids: Collection[int],
) -> Steps[dict[int, OutputPlace]]:
    """The places of the sequences that have output, by index. `known`: the ids that each has.

    Raises `InvalidRequestError` (known_outputs) for tokens behind which a sequence does not go on: one of `stop_ids`, a stop string, or
    what its grammar or reasoning does not allow.
    """
    places: dict[int, OutputPlace] = {}
    left = sum(map(len, known.values()))
    for index, ids in known.items():
        ending = np.flatnonzero(np.isin(ids, list(stop_ids)))
        if len(ending):
            raise _refused(index, f"token {int(ids[ending[0]])} ends it; give None for a sequence that has ended")
        text, place = new_text(), None if markers is None else markers.start()
        matcher = None if grammar is None else grammar.start()
        for begin in range(0, len(ids), _STEP_TOKENS):
            for token in ids[begin : begin + _STEP_TOKENS].tolist():
                if text is not None:
                    text.push(token)
                    if text.stopped is not None:
                        raise _refused(
                            index, f"its text has the stop string {shown(text.stopped)}; give None for a sequence that has ended"
                        )
                if markers is not None and place is not None and place.phase is not Phase.ANSWER:
                    place = markers.behind(place, token)
                try:
                    if matcher is not None and matcher.accept(token):
                        matcher = None
                except InvalidRequestError as error:
                    raise _refused(index, error.violations[0].description) from error
            yield left - begin
        left -= len(ids)
        places[index] = OutputPlace(text, place)
    return places


def _refused(index: int, why: str) -> InvalidRequestError:
    return InvalidRequestError.of("known_outputs", f"entry {index}: {why}")


T = TypeVar("T")

MAX_NAMED_IDS = 16
"""Most refused ids that an error names."""
BYTES_AT_ONCE = 1024
"""Tokens of one step, of which the bytes are read."""


class Texts:
    """Works with `tokenizer`, if there is one. To be used in the loop of `edge`. Methods raise `NoTokenizerError`, and `EngineStateError`
    once it is closed."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits, edge: LoopEdge, images: ImageEncoder | None = None) -> None:
        """`images`: what encodes images; None: the model takes none."""
        self._images = images
        self._tokenizer = tokenizer
        self._limits = limits
        self._edge = edge
        self._workers = Workers("aengine-texts", quick=QUICK_CHARACTERS)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizerError("the model has no tokenizer; only token ids go in and come out")
        return self._tokenizer

    def close(self) -> None:
        """End the threads; callers whose work is not done get `EngineStateError`."""
        self._workers.close()

    async def tokenize(
        self, text: str, *, add_special_tokens: bool, for_prompt: bool, literals: Sequence[tuple[int, int]], pair: str | None = None
    ) -> list[int]:
        _check_literals(literals, len(text))
        limits = self._limits if for_prompt else None
        steps = encode_text(text, self.tokenizer, limits, add_special_tokens=add_special_tokens, literals=literals, pair=pair)
        return await self._run(steps, len(text) + len(pair or ""))

    async def locate(self, text: str, *, add_special_tokens: bool) -> TokenizedText:
        return await self._run(_locate(self.tokenizer, text, add_special_tokens), len(text))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._run(_detokenize(self.tokenizer, token_ids, self._limits.model.vocab_size, skip_special_tokens), len(token_ids))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        return await self._run(_read_bytes(self._bytes, tuple(token_ids)), len(token_ids))

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], history: SessionHistory | None, **fields: Unpack[ChatFields]
    ) -> RenderedChat:
        options, images = ChatOptions(**fields), check_images(images_of(messages), self._limits)
        said = await self._edge.wait(self._images.describe(images)) if images and self._images is not None else ()
        rendered = await self._run(render_chat(messages, self.tokenizer, options, said, history), chat_size(messages, options))
        return replace(rendered, images=tuple(map(_named, images, said)))

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    async def _run(self, steps: Steps[T], size: int) -> T:
        try:
            return await self._edge.wait(self._workers.submit(steps, size))
        except CancelledError:  # of the work: the threads have ended
            raise EngineStateError("the engine is closed") from None


def _named(image: Any, said: ImageText) -> NamedImage:
    from aengine.images.encoder import names_of  # imports torch

    return NamedImage(image, said.token_id, tuple(names_of(said.digest, said.num_tokens).tolist()))


def _locate(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Steps[TokenizedText]:
    yield len(text)
    return tokenizer.encode_located(text, add_special_tokens=add_special_tokens)


def _detokenize(tokenizer: Tokenizer, token_ids: Sequence[int], vocab_size: int, skip_special_tokens: bool) -> Steps[str]:
    ids = np.asarray(token_ids, np.int64)
    yield len(ids)
    check = FieldChecks()
    for index in islice(np.flatnonzero((ids >= vocab_size) | (ids < 0)), MAX_NAMED_IDS):
        check.add_violation(f"token_ids[{index}]", f"{ids[index]} is not below vocab_size {vocab_size}")
    check.finish(InvalidRequestError)
    return tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)


def _read_bytes(known: TokenBytes, token_ids: Sequence[int]) -> Steps[dict[int, bytes]]:
    found: dict[int, bytes] = {}
    for start in range(0, len(token_ids), BYTES_AT_ONCE):
        yield len(token_ids) - start
        found |= {token_id: known[token_id] for token_id in token_ids[start : start + BYTES_AT_ONCE]}
    return found


def _check_literals(literals: Sequence[tuple[int, int]], length: int) -> None:
    """Raises `InvalidRequestError` (literals) for what are no places, in their order, in a text of `length` characters."""
    end = 0
    for start, stop in literals:
        if not end <= start < stop <= length:
            raise InvalidRequestError.of("literals", f"({start}, {stop}) is not a place in [{end}, {length}]")
        end = stop
