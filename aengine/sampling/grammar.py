"""Grammars in the sampler: which tokens a row may have next. Owns the rows' matchers and the bitmasks.

A compiled grammar arrives with a row's parameters; where it comes from is not known here. xgrammar does the matching; it is
imported with the first row that has a grammar, so engines without the extra `structured` never need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import AEngineError
from aengine.kernels.upload import to_device
from aengine.scheduler.plan import NewRow

if TYPE_CHECKING:
    import xgrammar


class GrammarError(AEngineError):
    """A row cannot go on under its grammar. Belongs to this row alone."""


@dataclass(frozen=True, eq=False, slots=True)
class CompiledGrammar:
    """A grammar made ready for one model's vocabulary. May be shared by rows, threads and requests."""

    grammar: xgrammar.CompiledGrammar
    first: Tensor | None
    """[ceil(vocab_size / 32)] int32 on the CPU, little-endian bits: a limit on the first token that the vocabulary needs beyond
    the grammar. None: there is none."""


@dataclass(slots=True)
class _Matcher:
    state: xgrammar.GrammarMatcher
    first: Tensor | None  # until the first token


class GrammarRows:
    """The matchers of the rows that have a grammar, over `vocab_size` ids. For one thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._matchers: dict[int, _Matcher] = {}
        self._batch: Any = None  # fills many bitmasks in parallel

    def __bool__(self) -> bool:
        """Whether any row has a grammar; `mask` and `observe` do nothing without."""
        return bool(self._matchers)

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over rows that changed hands. A row with output (after a preemption) continues where its tokens left its grammar.

        Raises `GrammarError` if these tokens do not match; the row then has no grammar.
        """
        for new in new_rows:
            self._matchers.pop(new.row, None)
            if isinstance(new.params.grammar, CompiledGrammar):
                matcher = self._start(new.params.grammar)
                for token in new.tokens[new.prompt_len :].tolist():
                    _accept(matcher, token)
                self._matchers[new.row] = matcher

    def mask(self, logits: Tensor, rows: NDArray[np.int32]) -> None:
        """[m, vocab_size] float32 logits of m distinct rows, changed in place: what the grammars forbid becomes -inf.

        Only end-of-sequence ids are left where a grammar is complete, nothing is left where no token can go on with it, and nothing is
        changed for a row whose grammar has ended with an end-of-sequence id.
        """
        found = [(index, matcher) for index, row in enumerate(rows.tolist()) if (matcher := self._active(row)) is not None]
        if not found:
            return
        bitmask = torch.empty(len(rows), -(-self._vocab_size // 32), dtype=torch.int32, pin_memory=logits.is_cuda)
        masked = [index for index, _ in found]
        self._fill(bitmask, masked, [matcher for _, matcher in found])
        import xgrammar

        # Its CPU code takes a list alone; its CUDA code would copy one from memory that is not pinned, and wait.
        indices: Any = to_device(np.array(masked, dtype=np.int32), logits.device) if logits.is_cuda else masked
        xgrammar.apply_token_bitmask_inplace(
            logits, bitmask.to(logits.device, non_blocking=True), vocab_size=self._vocab_size, indices=indices
        )

    def allowed(self, row: int) -> NDArray[np.bool_] | None:
        """[vocab_size], what `mask` leaves to a row; None where its grammar leaves everything."""
        matcher = self._active(row)
        if matcher is None:
            return None
        bitmask = torch.empty(1, -(-self._vocab_size // 32), dtype=torch.int32)
        self._fill(bitmask, [0], [matcher])
        return np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> Mapping[int, GrammarError]:
        """Advances the matchers of m distinct rows by the token [m] that each was given.

        Returns the rows whose grammar does not allow their token (which the mask did not leave, so other code chose it), with the
        reason; their matchers stay where they were.
        """
        errors: dict[int, GrammarError] = {}
        if not self._matchers:
            return errors
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            matcher = self._active(row)
            if matcher is None:
                continue
            try:
                _accept(matcher, token)
            except GrammarError as error:
                errors[row] = error
        return errors

    def _active(self, row: int) -> _Matcher | None:
        """Of a row whose grammar limits its next token."""
        matcher = self._matchers.get(row)
        return None if matcher is None or matcher.state.is_terminated() else matcher

    def _start(self, compiled: CompiledGrammar) -> _Matcher:
        import xgrammar

        return _Matcher(xgrammar.GrammarMatcher(compiled.grammar), compiled.first)

    def _fill(self, bitmask: Tensor, indices: list[int], matchers: Sequence[_Matcher]) -> None:
        """Row indices[i] of `bitmask` [m, ceil(vocab_size / 32)] int32 is made that of matchers[i]."""
        if len(matchers) == 1:
            matchers[0].state.fill_next_token_bitmask(bitmask, indices[0])
        else:
            if self._batch is None:
                import xgrammar

                self._batch = xgrammar.BatchGrammarMatcher()
            self._batch.batch_fill_next_token_bitmask([matcher.state for matcher in matchers], bitmask, indices)
        for index, matcher in zip(indices, matchers, strict=True):
            if matcher.first is not None:
                bitmask[index] &= matcher.first


def _accept(matcher: _Matcher, token: int) -> None:
    if not matcher.state.accept_token(token):
        raise GrammarError(f"token {token} does not match the grammar of the request")
    matcher.first = None
