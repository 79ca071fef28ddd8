"""`Processor`: what changes the logits of some rows before their tokens are sampled. `Sampler` runs all of them, in the pinned order.

`CustomProcessors` are those of users. It owns the tokens that they are shown, on the host: the scheduler lets these rows wait for each
token. What one of them raises fails its row and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.params import LogitsProcessor
from aengine.kernels.draw_params import HIGHEST_LOGIT
from aengine.scheduler.plan import Features, NewRow


@dataclass(frozen=True, slots=True)
class StepRows:
    """The m tokens of a step that are to be sampled. Processors add those that cannot be.

    Without drafts each token is of another row. With drafts the tokens of a row follow each other, and processors take the drafts before a
    token as sampled: it counts only if they are.
    """

    rows: NDArray[np.int32]  # [m]
    positions: NDArray[np.int32]  # [m]
    drafts: NDArray[np.int32] | None = None  # [m], -1 for a row's last token
    failures: dict[int, Exception] = field(default_factory=dict)  # why a row's first token cannot be sampled, by row
    postponed: set[int] = field(default_factory=set)
    """Which of the m cannot be sampled in this step, for lack of time, or since it would fail: a row fails at its first token alone."""
    firsts: NDArray[np.int64] = field(init=False)  # [rows], of each row its first token's index
    numbers: NDArray[np.int64] = field(init=False)  # [m], of a token among those of its row

    def __post_init__(self) -> None:
        firsts = np.arange(len(self.rows))
        numbers = np.zeros_like(firsts)
        if self.drafts is not None:
            ends = (self.drafts < 0).nonzero()[0] + 1
            numbers, firsts = firsts, ends.copy()
            firsts[0], firsts[1:] = 0, ends[:-1]
            numbers -= firsts.repeat(ends - firsts)
        object.__setattr__(self, "firsts", firsts)
        object.__setattr__(self, "numbers", numbers)

    def drafts_before(self, index: int) -> list[int]:
        """The drafts of the token's row that come before the token at `index` of the m; empty without drafts."""
        return [] if self.drafts is None else self.drafts[index - self.numbers[index] : index].tolist()


class Processor:
    """Has a state for each row with its feature. `members` [k] are the indices of these rows' tokens among the m of a step."""

    feature: ClassVar[int]
    """Of `Features`."""

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Drops the state of these rows, and makes a new one for those with the feature. It may be called again after it raised."""
        raise NotImplementedError

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        """Changes the lines `members` of the [m, vocab_size] float32 logits in place."""
        raise NotImplementedError

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        """The next tokens of rows with the feature, as soon as the host has them; several of a row follow each other. Returns the rows that
        cannot go on with their token, with the reason. Called for rows with `Features.LAST_TOKEN` at least."""
        return {}

    def limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """The parameters that limit which token a row with the feature may have at `position`, with the tokens [vocab_size] that each
        leaves."""
        yield from ()


class CustomProcessors(Processor):
    feature = int(Features.PROCESSORS)

    def __init__(self) -> None:
        self._rows: dict[int, tuple[tuple[LogitsProcessor, ...], list[int]]] = {}  # processors, and the tokens so far

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.processors:
                self._rows[new.row] = new.params.processors, new.tokens.tolist()

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        """Runs the users' processors on the rows' lines, in place. An infinite logit becomes `HIGHEST_LOGIT`. What a processor raises fails
        its row, or postpones the token if drafts precede it."""
        for index, row in zip(members.tolist(), step.rows[members].tolist(), strict=True):
            if index in step.postponed:
                continue
            processors, tokens = self._rows[row]
            drafts = step.drafts_before(index)
            try:
                for processor in processors:
                    processor(logits[index], tokens + drafts)  # a new list, which it may keep or change
                logits[index].clamp_(max=HIGHEST_LOGIT)
            except BaseException as error:  # belongs to this row alone: this thread is nobody's to exit or to interrupt
                if drafts:
                    step.postponed.add(index)
                else:
                    step.failures[row] = _as_exception(error)

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._rows[row][1].append(token)
        return {}


def _as_exception(error: BaseException) -> Exception:
    """What a reader of the stream can catch without ending its own program or task."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a logits processor raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
