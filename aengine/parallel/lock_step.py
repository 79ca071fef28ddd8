"""`LockStep`: when engines that share experts compute a step together.

They compute in turns. All take each turn once, with a step of their own or with none, by telling each other how many tokens they have in
it. What is told is the same for all, so all know the same: a turn with tokens is followed by the next one, which all take at once; behind a
turn without tokens nobody computes until one of them wants the next.

Knows nothing of sockets, threads or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LockStep:
    """All methods but `others_want` belong to one thread."""

    def __init__(self, exchange: Callable[[int], Sequence[int]], tell_others: Callable[[int], object]) -> None:
        """`exchange` waits until all have called it with the number of their tokens, and returns those of all. `tell_others` has
        `others_want` called with a turn by all others, soon."""
        self._exchange = exchange
        self._tell_others = tell_others
        self._turn = 0
        self._goes_on = False  # there were tokens in the turn before
        self._wanted = -1  # the latest turn that another one wants

    @property
    def is_awaited(self) -> bool:
        """Whether others take the next turn, or will, whatever this one has to do."""
        return self._goes_on or self._wanted >= self._turn

    def others_want(self, turn: int) -> None:
        """May be called from any thread; then `is_awaited`, unless that turn is over."""
        self._wanted = max(self._wanted, turn)

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Takes the next turn, with a step of so many tokens, or with none only if it `is_awaited`. Returns the tokens of all."""
        if not self.is_awaited:
            self._tell_others(self._turn)
        counts = tuple(self._exchange(num_tokens))
        self._turn += 1
        self._goes_on = any(counts)
        return counts
