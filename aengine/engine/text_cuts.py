"""Where a text may be cut so that the ids of its pieces, one after the other, are the ids of the whole text.

Owns the proof, which is by what a tokenizer is made of: each of its stages must do to the pieces what it does to the text. A cut lies
between two characters, and whether it may be made depends on these two alone. What is not known here is not cut. Knows nothing of
how long pieces should be.
"""

from __future__ import annotations

import enum
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import tokenizers
from tokenizers import models

from aengine.engine.regex_paths import RegexPaths, UnsupportedPatternError

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's, of which ByteLevel is made
_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


class _UnknownStageError(Exception):
    """A stage whose reach is not known here."""


class _Verdict(enum.Enum):
    """What a stage that splits a text says of a cut."""

    SPLITS = enum.auto()  # it splits there itself, in whatever text
    PASSES = enum.auto()  # elsewhere it does what it did without the cut
    FORBIDS = enum.auto()


_Stage = Callable[[str, str], _Verdict]


class TextCuts:
    """For one tokenizer. Made by `of`. May be used by several threads at once."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        """Raises `_UnknownStageError` or `UnsupportedPatternError`."""
        if getattr(core.model, "dropout", None):
            raise _UnknownStageError("dropout")
        self._core = core
        self._composes = False  # whether the normalizer joins marks to what is before them
        self._space = " "  # as the model spells it
        if core.normalizer is not None:
            self._read_normalizer(_state_of(core.normalizer))
        self._stages = [] if core.pre_tokenizer is None else list(self._read_stages(_state_of(core.pre_tokenizer)))
        added = core.get_added_tokens_decoder().values()
        self._added_pairs = {pair for token in added for text in (token.content, self._normal(token.content)) for pair in _pairs(text)}
        # Tokens that swallow the spaces beside them, or are none beside a letter, must not be touched.
        choosy = [token.content for token in added if token.lstrip or token.rstrip or token.single_word]
        self._choosy_ends = {end for text in choosy for end in (text[0], text[-1])}
        self._prove_once = lru_cache(maxsize=1 << 16)(self._prove)

    @classmethod
    def of(cls, core: tokenizers.Tokenizer) -> TextCuts | None:
        """None where nothing can be shown."""
        try:
            return cls(core)
        except (_UnknownStageError, UnsupportedPatternError):
            return None

    def may_cut(self, left: str, right: str) -> bool:
        """Whether any text may be cut between these two characters, wherever they stand side by side."""
        return self._prove_once(left, right)

    def _prove(self, left: str, right: str) -> bool:
        if not self._is_plain(left) or not self._is_plain(right):
            return False
        if self._choosy_ends and (not left.isalnum() or left in self._choosy_ends or right in self._choosy_ends):
            return False
        before, after = self._normal(left)[-1:], self._normal(right)[:1]
        if not before or not after or (left, right) in self._added_pairs or (before, after) in self._added_pairs:
            return False
        for stage in self._stages:
            verdict = stage(before, after)
            if verdict is not _Verdict.PASSES:
                return verdict is _Verdict.SPLITS
        return self._never_joins(before.replace(" ", self._space), after.replace(" ", self._space))

    def _is_plain(self, character: str) -> bool:
        """Whether the normalizer does to a character what it does to it alone, and all agree on what kind of character it is."""
        category = unicodedata.category(character)
        if category in ("Cn", "Cs"):
            return False
        # Only marks, Hangul's parts and a few letters of new scripts are composed with what is before them.
        return not self._composes or not (category[0] == "M" or "\u1100" <= character <= "\u11ff" or character > "\uffff")

    def _never_joins(self, left: str, right: str) -> bool:
        """Whether the model, given both in one go, makes no token of both, nor reads one of them otherwise for the other's sake."""
        model = self._core.model
        if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            return False
        # Where the second is known, no two unknown ones meet, which may become a single token.
        return self._core.token_to_id(right) is not None and (left, right) not in self._model_pairs

    @cached_property
    def _model_pairs(self) -> frozenset[tuple[str, str]]:
        """What stands side by side in a token: a pair that no token spells is never merged, whatever is around it."""
        return frozenset(pair for piece in self._core.get_vocab(with_added_tokens=False) for pair in _pairs(piece))

    def _normal(self, text: str) -> str:
        return text if self._core.normalizer is None else str(self._core.normalizer.normalize_str(text))

    def _read_normalizer(self, state: Mapping[str, Any]) -> None:
        """Raises `_UnknownStageError` for one that may look at several characters at once."""
        kind = state["type"]
        if kind == "Sequence":
            for one in state["normalizers"]:
                self._read_normalizer(one)
        elif kind in _UNICODE_FORMS:
            self._composes = True
        elif kind != "Lowercase" and not (kind == "Replace" and len(state["pattern"].get("String", "")) == 1):
            raise _UnknownStageError(kind)

    def _read_stages(self, state: Mapping[str, Any]) -> Iterator[_Stage]:
        """Raises `_UnknownStageError` or `UnsupportedPatternError`."""
        match state["type"]:
            case "Sequence":
                for one in state["pretokenizers"]:
                    yield from self._read_stages(one)
            case "Split":
                pattern = state["pattern"]
                paths = RegexPaths(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]))
                # Matches and what is between them are pieces, or one of the two is dropped; otherwise they are merged in some way.
                yield _by_pattern(paths, keeps_apart=state["behavior"] in ("Isolated", "Removed"))
            case "ByteLevel":
                if state["add_prefix_space"]:
                    yield _only_before(" ")
                if state["use_regex"]:
                    yield _by_pattern(RegexPaths(_BYTE_LEVEL), keeps_apart=True)
                yield _only_before("")  # letters stand for bytes from here on
            case "Metaspace":
                self._space = state["replacement"]
                yield _only_before(" ", self._space)  # before every other piece a space is written, or may be
                if state["split"]:
                    yield lambda left, right: _Verdict.SPLITS
            case "Digits":
                yield lambda left, right: _Verdict.FORBIDS if left.isnumeric() and right.isnumeric() else _Verdict.PASSES
            case kind:
                raise _UnknownStageError(kind)


def _by_pattern(paths: RegexPaths, *, keeps_apart: bool) -> _Stage:
    def stage(left: str, right: str) -> _Verdict:
        if paths.reads(left, right):
            return _Verdict.FORBIDS
        if not keeps_apart:
            return _Verdict.FORBIDS if paths.takes(left) or paths.takes(right) else _Verdict.PASSES
        return _Verdict.SPLITS if paths.always_takes(left) or paths.always_takes(right) else _Verdict.PASSES

    return stage


def _only_before(*characters: str) -> _Stage:
    return lambda left, right: _Verdict.PASSES if right in characters else _Verdict.FORBIDS


def _state_of(stage: Any) -> Any:
    """What a stage is made of, as in a tokenizer.json."""
    return json.loads(stage.__getstate__())


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    return itertools.pairwise(text)
