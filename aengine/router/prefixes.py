"""Which prefixes of prompts a replica holds, by the digests that replicas publish of their cached pages.

Owns the digests of a request's prompt and the set of digests of a replica. Knows neither load nor time, and no content: a digest is a
number under the router's own salt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.cache import PageChain, published_digest
from aengine.outputs import CachedPages

MAX_PAGES = 512  # of a prompt that are looked for; what comes behind them decides nothing
BEGINNING_TOKENS = 256
MAX_DIGESTS = 1 << 18  # kept of one replica


class PageNaming(NamedTuple):
    """What, beside its tokens, decides the name of a page at a replica."""

    page_size: int  # tokens
    adapter: int = 0  # its key there; 0: none
    weights_version: int = 0


class PagePrefix:
    """The digests of the pages that the prompt of one request fills."""

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int32], cache_salt: str, digest_salt: bytes) -> None:
        """`cache_salt`: of the request; "": none. `digest_salt`: the router's, 8 to 64 bytes, that replicas publish their digests under."""
        self._token_ids = np.asarray(token_ids, np.int32)
        self._cache_salt = cache_salt
        self._digest_salt = digest_salt
        self._digests: dict[PageNaming, Sequence[int]] = {}

    @property
    def beginning(self) -> int:
        """A number of 64 bits that the first tokens decide: what hashing goes by."""
        return published_digest(self._token_ids[:BEGINNING_TOKENS].tobytes() + self._cache_salt.encode(), self._digest_salt)

    def digests(self, naming: PageNaming) -> Sequence[int]:
        """Of its first pages, at most MAX_PAGES, as replicas of this naming publish them; computed once. The last token is in none of
        them: it is computed everywhere."""
        digests = self._digests.get(naming)
        if digests is None:
            chain = PageChain(naming.page_size, self._cache_salt, naming.adapter, naming.weights_version)
            chain.extend(self._token_ids[: min(len(self._token_ids) - 1, MAX_PAGES * naming.page_size)])
            digests = self._digests[naming] = [published_digest(name, self._digest_salt) for name in chain.digests]
        return digests


class CachedPrefixes:
    """The digests of one replica: those it reported, and those that are expected because a request was sent there.

    A page is reported after all pages before it and taken back before them, so that a prompt's pages are there up to some page and not
    behind it.
    """

    def __init__(self, most: int = MAX_DIGESTS) -> None:
        """`most`: reported digests that are kept; what is reported beyond them is not known."""
        self._most = most
        self._reported: set[int] = set()
        self._expected: dict[int, int] = {}  # digest -> by how many requests

    def __len__(self) -> int:
        return len(self._reported)

    def apply(self, pages: CachedPages) -> None:
        """Take a report."""
        if pages.snapshot:
            self._reported.clear()
        self._reported.difference_update(pages.removed)
        room = self._most - len(self._reported)
        self._reported.update(pages.added if len(pages.added) <= room else pages.added[: max(0, room)])

    def expect(self, digests: Iterable[int]) -> None:
        """A request was sent that will have these pages computed. Followed by one `forget` of the same digests."""
        expected = self._expected
        for digest in digests:
            expected[digest] = expected.get(digest, 0) + 1

    def forget(self, digests: Iterable[int]) -> None:
        """The pages are reported by now, or will not come."""
        expected = self._expected
        for digest in digests:
            if expected[digest] == 1:
                del expected[digest]
            else:
                expected[digest] -= 1

    def longest(self, digests: Sequence[int]) -> int:
        """How many of a prompt's first pages are there, in O(log pages)."""
        reported, expected = self._reported, self._expected
        if not digests or (digests[0] not in reported and digests[0] not in expected):
            return 0
        there, missing = 1, len(digests) + 1  # numbers of pages
        while missing - there > 1:
            middle = (there + missing) // 2
            digest = digests[middle - 1]
            if digest in reported or digest in expected:
                there = middle
            else:
                missing = middle
        return there
