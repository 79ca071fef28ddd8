"""`GrammarCompiler`: compiles structured output for one model. Owns the threads that compile.

Knows requests only by their `StructuredOutput`, which it writes in the compiler's notation. Each request has a grammar compiled for itself:
most take a millisecond, and a compiled grammar grows as it is used. What reads schemas and grammars is imported by the threads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.params import Reasoning, StructuredOutput
from aengine.sampling.reasoning import ReasoningMarkers, unclean_ends
from aengine.sampling.unique_items import SchemaPlace, TokenShapes, UniqueArrays

if TYPE_CHECKING:
    import llguidance

    from aengine.sampling.grammar import CompiledGrammar
    from aengine.sampling.reasoning import CompiledReasoning

MAX_THREADS = 2
MAX_MARKERS = 16
"""Of which it is kept which tokens can end them."""
TRIAL_TOKENS = 32
"""Tokens that are sampled at random under a new grammar, to check that it stays within the limits."""

# What a grammar may take, in units of llguidance. A mask of a vocabulary of 137,000 tokens then took at most 6 ms on a 2.5 GHz core.
COMPILE_FUEL = 1_000_000  # about 20 ms
MASK_FUEL = 50_000
MASK_ITEMS = 20_000
MAX_STATES = 20_000  # some 10 MB

_OPTIONS = '%llguidance {"no_forcing": true}\n'  # bytes that can only follow are found with the mask, not all of them in advance
_NOISE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: |\blexer error: |\bparser error: ")
_IN_OUR_WORDS = (
    (re.compile(r"[\s\S]*regex parse error:[\s\S]*?^error: (.+)[\s\S]*", re.MULTILINE), r"not a regular expression: \1"),
    (re.compile(r"Unimplemented keys: \[(.*)\][\s\S]*"), r"cannot be enforced: \1"),
    (re.compile(r"Unknown format: (.*)[\s\S]*"), r"cannot be enforced: the format \1"),
    (
        re.compile(r"(.*(?:\btoo (?:many|big|large|complex)|\b[Ff]uel\b|\blimit\b|\bpanic\b|Unable to determine).*)[\s\S]*"),
        r"takes too much: \1",
    ),
)


class NotConcatenative(Exception):
    """The text of a sequence is not that of its tokens, one after the other."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model with `len(texts)` ids, each as the bytes of its text."""

    texts: tuple[bytes, ...]
    """What a token adds to a text that has begun. Empty for special tokens, and ids that have no token or no text."""
    drops_first_space: bool
    """Whether the text of a sequence lacks the space that its first token begins with."""
    may_begin: tuple[bool, ...]
    """By id: whether a text that this token begins starts with just its own text, but for the dropped space."""
    encode: Callable[[str], Sequence[int]]
    """The ids of a text."""

    def ids_behind(self, token_id: int, text: bytes) -> Sequence[int]:
        """The likely ids of a text that follows a token: as the tokenizer cuts both together, if it cuts between them; else as it cuts the
        text alone. None if these are not the text's, or it begins within a character. A part of one at its end is left out."""
        whole_characters = text.decode(errors="ignore").encode()
        if not text.startswith(whole_characters):
            return ()
        text = whole_characters
        for whole in (self.texts[token_id] + text, text):
            ids = self.encode(whole.decode(errors="ignore"))
            begin, missing = len(ids), len(text)
            while begin and missing > 0:
                begin -= 1
                missing -= len(self.texts[ids[begin]])
            if b"".join(self.texts[one] for one in ids[begin:]) == text:
                return ids[begin:]
        return ()


class GrammarCompiler:
    """Compiles for one model; made once per engine. Every method may be called from any thread.

    Nothing is read or imported before the first grammar is asked for. The compiler releases the GIL while it works.
    """

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        eos_token_ids: Sequence[int],
        text_of: Callable[[int], str],
        ids_within: Callable[[str], Sequence[int]],
    ) -> None:
        """`read_vocabulary`: takes up to a second; may raise `NotConcatenative`. `eos_token_ids`: what ends an output. `text_of`: the text
        that a token adds to one that has begun. `ids_within`: the ids of a text behind another one."""
        self._read_vocabulary = read_vocabulary
        self._text_of = text_of
        self._ids_within = ids_within
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._model: _Model | None = None
        self._token_shapes: TokenShapes | None = None
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="aengine-grammar")

    def compile_reasoning(self, reasoning: Reasoning, wanted: StructuredOutput | None) -> Future[CompiledReasoning]:
        """Reasoning, and the grammar of what follows it, if there is one; as `compile`. Without a grammar, nothing has to be installed, and
        it is there at once, however many grammars are being compiled."""
        if wanted is not None:
            return self._threads.submit(self._compile_reasoning, reasoning, wanted)
        compiled: Future[CompiledReasoning] = Future()
        try:
            compiled.set_result(self._compile_reasoning(reasoning, None))
        except Exception as error:
            compiled.set_exception(error)
        return compiled

    def compile(self, wanted: StructuredOutput) -> Future[CompiledGrammar]:
        """The grammar, later. Cancelling the future takes the grammar out of the queue.

        It fails with `InvalidRequestError` (structured_output.json_schema and so on): with what the grammar asks for that cannot be
        enforced, or takes too much; with advice when the compiler is not installed; and when the model's vocabulary cannot write any
        such output.
        """
        return self._threads.submit(self._compile, wanted)

    def compile_both(self, wanted: StructuredOutput | None, reasoning: Reasoning | None) -> Future[Any] | None:
        """What limits an output with these: a `CompiledReasoning` or a `CompiledGrammar`, later; None if there is neither."""
        if reasoning is not None:
            return self.compile_reasoning(reasoning, wanted)
        return None if wanted is None else self.compile(wanted)

    def close(self) -> None:
        """Compile nothing more; the futures of what waits are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile_reasoning(self, reasoning: Reasoning, wanted: StructuredOutput | None) -> CompiledReasoning:
        from aengine.sampling.reasoning import CompiledReasoning

        markers = ReasoningMarkers(reasoning.opening.strip(), reasoning.closing.strip(), reasoning.opened, self._text_of)
        closing_ids = tuple(self._ids_within(reasoning.closing))
        is_limited = wanted is not None or reasoning.max_tokens is not None
        if is_limited and markers.closing not in "".join(map(self._text_of, closing_ids)):
            raise InvalidRequestError.of("reasoning.closing", f"{reasoning.closing!r} cannot be found in the text of this model's tokens")
        compiled = CompiledReasoning(markers, closing_ids, reasoning.max_tokens)
        if wanted is None:
            return compiled
        opening_ids = () if reasoning.opened else self._ids_within(markers.opening)
        model = self._read_once()
        banned, banned_behind = model.unclean_ends(markers.closing)
        return replace(
            compiled,
            grammar=self._compile(wanted, behind_text=True),
            grammar_at_start=None if reasoning.opened else self._compile(wanted),
            opening_id=opening_ids[0] if len(opening_ids) == 1 else None,
            answer_ids=tuple(self._ids_within(reasoning.answer)),
            banned=np.array([*model.eos_token_ids, *banned], np.int64),
            banned_behind=banned_behind,
        )

    def _read_once(self) -> _Model:
        with self._lock:
            if self._model is None:
                self._model = self._read_model()
        return self._model

    def _compile(self, wanted: StructuredOutput, *, behind_text: bool = False) -> CompiledGrammar:
        """`behind_text`: of what follows a text, perhaps after white space."""
        model = self._read_once()
        import llguidance

        from aengine.sampling.grammar import CompiledGrammar, GrammarError

        before = "(/[ \\t\\n\\r]{1,8}/)? " if behind_text else "/ / " if model.vocabulary.drops_first_space else ""
        source, place = _source(wanted, before)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=MASK_FUEL,
            step_max_items=MASK_ITEMS,
            max_lexer_states=MAX_STATES,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(model.tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(wanted, _in_our_words(matcher.get_error().strip()))
        first = None if behind_text else model.first
        unique = None if place is None else UniqueArrays(place, self._shapes(wanted, model))
        compiled = CompiledGrammar(matcher, model.eos_token_ids, first, model.vocabulary.texts, model.vocabulary.ids_behind, unique)
        try:
            if not compiled.try_out(len(model.vocabulary.texts), TRIAL_TOKENS):
                raise _refusal(wanted, "nothing that the model's vocabulary can write matches")
        except GrammarError as error:
            raise _refusal(wanted, error.violations[0].description) from error
        return compiled

    def _shapes(self, wanted: StructuredOutput, model: _Model) -> TokenShapes:
        with self._lock:
            if self._token_shapes is None:
                self._token_shapes = TokenShapes(model.vocabulary.texts)
        if not self._token_shapes.are_enough():
            raise _refusal(wanted, "'uniqueItems' cannot be enforced: the model has no token for a quote, comma or closing bracket alone")
        return self._token_shapes

    def _read_model(self) -> _Model:
        """Raises `InvalidRequestError` where structured output is not possible at all."""
        import llguidance

        try:
            vocabulary = self._read_vocabulary()
        except NotConcatenative as error:
            raise InvalidRequestError.of("structured_output", f"is not possible with the model's tokenizer: {error}") from error
        eos = [token_id for token_id in self._eos_token_ids if token_id < len(vocabulary.texts)]
        if not eos:
            reason = "the model has no end-of-sequence id, which is what ends structured output"
            raise InvalidRequestError.of("structured_output", reason)
        tokens = llguidance.TokenizerWrapper(_Tokens(vocabulary, eos))
        tokenizer = llguidance.LLTokenizer(tokens, n_vocab=len(vocabulary.texts), eos_token=eos)
        return _Model(tokenizer, vocabulary, frozenset(eos), _first_tokens(vocabulary, eos))


@dataclass(frozen=True, slots=True)
class _Model:
    """What grammars are compiled for."""

    tokenizer: llguidance.LLTokenizer
    vocabulary: Vocabulary
    eos_token_ids: frozenset[int]
    first: NDArray[np.int32] | None  # see `_first_tokens`
    _unclean: dict[str, tuple[list[int], dict[str, NDArray[np.int64]]]] = field(default_factory=dict)  # by marker

    def unclean_ends(self, marker: str) -> tuple[list[int], dict[str, NDArray[np.int64]]]:
        """Return what the function of this name finds for `marker` in the vocabulary. It is kept for the next request with that marker."""
        found = self._unclean.get(marker)
        if found is None:
            if len(self._unclean) >= MAX_MARKERS:
                self._unclean.clear()
            found = self._unclean[marker] = unclean_ends(self.vocabulary.texts, marker)
        return found


class _Tokens:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> None:
        # End-of-sequence ids end the output wherever they stand, so they must not stand for text as well.
        self.tokens = [b"" if token_id in eos_token_ids else text for token_id, text in enumerate(vocabulary.texts)]
        self.special_token_ids = [token_id for token_id, text in enumerate(self.tokens) if not text]
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("tokens are sampled by the model")


def _source(wanted: StructuredOutput, before: str) -> tuple[str, SchemaPlace | None]:
    """The grammar, and the arrays whose items differ. `before`: what comes before the output. Raises `InvalidRequestError`."""
    from aengine.structured.gbnf import GbnfError
    from aengine.structured.json_documents import SchemaError
    from aengine.structured.regex_dialect import RegexError

    try:
        root, unique = _root(wanted)
    except (SchemaError, RegexError, GbnfError) as error:
        raise _refusal(wanted, str(error)) from error
    return f"{_OPTIONS}start: {before}root\n{root}\n", unique


def _root(wanted: StructuredOutput) -> tuple[str, SchemaPlace | None]:
    if wanted.json_schema is not None or wanted.json_object:
        from aengine.structured.json_schema import fit_schema

        text = '{"type": "object"}' if wanted.json_object else str(wanted.json_schema)
        fitted = fit_schema(text, strict_formats=wanted.strict_formats, exact_one_of=wanted.exact_one_of)
        return fitted.rules, fitted.unique
    if wanted.grammar is not None:
        from aengine.structured.gbnf import rules_of

        return rules_of(wanted.grammar), None
    from aengine.structured.regex_dialect import quoted, whole_text

    if wanted.regex is not None:
        return f"root: /{whole_text(wanted.regex)}/", None
    return f"root: /{'|'.join(map(quoted, wanted.choice or ()))}/", None


def _refusal(wanted: StructuredOutput, description: str) -> InvalidRequestError:
    """Names the field that is set."""
    names = ("json_schema", "regex", "grammar", "choice", "json_object")
    name = next(name for name in names if getattr(wanted, name))
    return InvalidRequestError.of(f"structured_output.{name}", description)


def _in_our_words(error: str) -> str:
    """What the compiler says of a grammar, without what speaks of its own notation."""
    while (shorter := _NOISE.sub("", error)) != error:
        error = shorter
    for pattern, ours in _IN_OUR_WORDS:
        if found := pattern.fullmatch(error):
            return found.expand(ours)[:300]
    return error.split("\n")[0][:300] or "cannot be compiled"


def _first_tokens(vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> NDArray[np.int32] | None:
    """The limit on first tokens as a bitmask [ceil(vocab_size / 32)] int32; None if all that have a text may begin one."""
    allowed = np.array(vocabulary.may_begin)
    if all(allowed[token_id] for token_id, text in enumerate(vocabulary.texts) if text):
        return None
    allowed[list(eos_token_ids)] = True
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view("<i4").astype(np.int32)
