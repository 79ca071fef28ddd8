"""Which prompt pages are being computed right now, and who waits for them, so that a shared prefix is computed once.

Keyed by page digest. Knows neither pages nor rows.
"""

from __future__ import annotations

from aengine.scheduler.request import Sequence


class PrefixesInFlight:
    """A running sequence claims the digests it is going to publish; another that needs one waits for its page."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Sequence] = {}
        self._claims: dict[Sequence, list[bytes]] = {}
        self._awaiting: dict[bytes, list[Sequence]] = {}

    @property
    def num_awaiting(self) -> int:
        return sum(len(waiting) for waiting in self._awaiting.values())

    def claim(self, sequence: Sequence, digests: list[bytes]) -> None:
        mine = [digest for digest in digests if self._owner.setdefault(digest, sequence) is sequence]
        self._claims[sequence] = mine

    def wait(self, sequence: Sequence, digest: bytes) -> bool:
        """Whether a running sequence is computing the page; if so, `sequence` waits for it."""
        if digest not in self._owner:
            return False
        sequence.awaits = digest
        self._awaiting.setdefault(digest, []).append(sequence)
        return True

    def stop_waiting(self, sequence: Sequence) -> None:
        """The sequence no longer waits, if it did."""
        digest = sequence.awaits
        if digest is None:
            return
        sequence.awaits = None
        waiting = self._awaiting[digest]
        waiting.remove(sequence)
        if not waiting:
            del self._awaiting[digest]

    def settle(self, sequence: Sequence, digest: bytes) -> list[Sequence]:
        """`sequence` published the page. Returns those that waited for it."""
        if self._owner.get(digest) is not sequence:
            return []
        del self._owner[digest]
        woken = self._awaiting.pop(digest, [])
        for waiting in woken:
            waiting.awaits = None
        return woken

    def abandon(self, sequence: Sequence) -> list[Sequence]:
        """`sequence` computes no further pages. Returns those that waited for one of them."""
        woken: list[Sequence] = []
        for digest in self._claims.pop(sequence, ()):
            woken.extend(self.settle(sequence, digest))
        return woken
