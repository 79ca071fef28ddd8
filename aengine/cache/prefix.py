"""The names of page contents: chained hashes with the layer group, and the index from name to the page that holds the content.

A page's hash covers its own token ids, everything before it, the salt and the adapter, so equal names mean equal KV. Hashes are 128-bit
BLAKE2b; a hit is still compared on token ids, so even a constructed collision cannot serve foreign KV. Knows nothing of
ref counts or free lists.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


class PageChain:
    """The hashes of one sequence's full pages, each computed once, extended as tokens become known."""

    __slots__ = ("_page_bytes", "_root", "digests", "version")

    def __init__(self, page_size: int, salt: str = "", adapter: int = 0, version: int = 0) -> None:
        """`adapter`: its key; 0: none. `version`: of the weights that all of it is computed with."""
        self._page_bytes = page_size * np.dtype(np.int32).itemsize
        person = adapter.to_bytes(8, "little") + version.to_bytes(8, "little")
        self._root = blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=person).digest()
        self.version = version
        self.digests: list[bytes] = []

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Hash the full pages of `tokens` (the sequence from its start) that have no hash yet."""
        size = self._page_bytes
        raw = tokens.tobytes()
        for start in range(len(self.digests) * size, len(raw) - size + 1, size):
            self.append(raw[start : start + size])

    def append(self, page_tokens: bytes | memoryview) -> None:
        """Hash the next page: the bytes of its int32 token ids."""
        digests = self.digests
        digest = blake2b(digests[-1] if digests else self._root, digest_size=DIGEST_BYTES)
        digest.update(page_tokens)
        digests.append(digest.digest())


def page_name(digest: bytes, group: int) -> bytes:
    """The name of what the page of a layer group holds, `digest` being the hash of its tokens."""
    return digest + group.to_bytes(2, "little") if group else digest


def published_digest(name: bytes, salt: bytes) -> int:
    """What may be told of a page: a number that says nothing of its content without `salt` (at most 64 bytes) and the rest of its name."""
    return int.from_bytes(blake2b(name, key=salt, digest_size=8).digest(), "little")


class PrefixIndex:
    """Which page holds the content of a name: at most one page per name, at most one name per page.

    A page's own token ids come as the bytes of its int32 ids. Can log how the names of layer group 0 change, which stand for their tokens.
    """

    def __init__(self) -> None:
        self._by_name: dict[bytes, tuple[int, bytes]] = {}  # name -> page, token ids
        self._by_page: dict[int, bytes] = {}
        self._changes: dict[bytes, bool] | None = None  # names, the latest change last: whether it is there now. None: nothing is logged

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, name: bytes, page_tokens: bytes) -> int:
        """The page that holds `name`, if its token ids are `page_tokens`; 0: none."""
        entry = self._by_name.get(name)
        return entry[0] if entry is not None and entry[1] == page_tokens else 0

    def name_of(self, page: int) -> bytes | None:
        return self._by_page.get(page)

    def publish_page(self, page: int, name: bytes, page_tokens: bytes) -> None:
        """Publish `page` under `name`. If another page is published under it already, `page` stays private."""
        if name not in self._by_name:
            self._by_name[name] = (page, page_tokens)
            self._by_page[page] = name
            if self._changes is not None:
                self._log(name, True)

    def remove(self, page: int) -> None:
        name = self._by_page.pop(page)
        del self._by_name[name]
        if self._changes is not None:
            self._log(name, False)

    def clear(self) -> None:
        if self._changes is not None:
            for name in self._by_name:
                self._log(name, False)
        self._by_name.clear()
        self._by_page.clear()

    # ---- for those who want to know the names ------------------------------------------------------------------------

    def names(self, most: int) -> list[bytes]:
        """Return the names in layer group 0, or the `most` of them that have been there longest. As a rule each comes behind that of the
        page before it."""
        return list(islice((name for name in self._by_name if len(name) == DIGEST_BYTES), most))

    def log_changes(self, on: bool) -> None:
        """Log changes of the names of layer group 0 from here on, or no more."""
        if on != (self._changes is not None):
            self._changes = {} if on else None

    def take_changes(self) -> dict[bytes, bool]:
        """What was logged since the last call: names, and whether they are there now."""
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes

    def _log(self, name: bytes, is_there: bool) -> None:
        assert self._changes is not None, "logged"
        if len(name) == DIGEST_BYTES:
            self._changes.pop(name, None)
            self._changes[name] = is_there
