"""`PageWatches`: who wants to know which pages of prompts are cached, and what each has not been told yet.

Lives in the event loop. The step thread lists names and logs their changes (`WatchPages`), which costs nothing while nobody watches; what
is paid per watcher, such as hashing the names under its salt, is paid here.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio.lowlevel

from aengine.cache import published_digest
from aengine.engine.mailbox import Command, UnwatchPages, WatchPages
from aengine.engine.step_driver import PageNames, PagesChanged
from aengine.outputs import CachedPages

MAX_CHANGES = 32_768
"""Changes that are kept for a watcher; with more it is told all names again."""
MAX_PAGES_TOLD = 16_384
"""In one item, so that no message is large."""
DIGESTS_AT_ONCE = 512
"""That are made before the event loop has another turn: about a millisecond."""


@dataclass(slots=True, eq=False)
class _Watch:
    is_listed: bool = False  # whether the names are there, or were asked for
    names: Iterator[bytes] | None = None  # that there were before the changes and are not told
    begins: bool = True  # the first of the names are still to be told
    changes: dict[bytes, bool] | None = None  # that are not told: names, and whether they are there now. None until the names are listed

    def merge(self, changes: dict[bytes, bool]) -> None:
        kept = self.changes
        if kept is None:
            return
        if len(kept) + len(changes) > MAX_CHANGES:
            self.is_listed, self.names, self.changes = False, None, None
            return
        for name, is_there in changes.items():
            kept.pop(name, None)
            kept[name] = is_there


class PageWatches:
    """`post` hands a command to the step thread."""

    def __init__(self, post: Callable[[Command], None]) -> None:
        self._post = post
        self._watches: dict[int, _Watch] = {}
        self._keys = itertools.count()

    async def watch(self, salt: bytes, most: int) -> AsyncGenerator[CachedPages | None, None]:
        """As `ServedEngine.watch_pages`."""
        key = next(self._keys)
        watch = self._watches[key] = _Watch()
        try:
            while True:
                if not watch.is_listed:
                    watch.is_listed = True
                    self._post(WatchPages(key, most))
                yield await _news(watch, salt)
        finally:
            del self._watches[key]
            if not self._watches:
                self._post(UnwatchPages())

    def on_names(self, report: PageNames) -> None:
        """The step thread has listed the names for a watcher, which may be gone."""
        watch = self._watches.get(report.watch)
        if watch is not None:
            watch.names, watch.begins, watch.changes = iter(report.names), True, {}

    def on_changes(self, report: PagesChanged) -> None:
        """The step thread reports changes, in the order of its lists."""
        for watch in self._watches.values():
            watch.merge(report.changes)


async def _news(watch: _Watch, salt: bytes) -> CachedPages | None:
    if watch.names is not None:
        names = list(itertools.islice(watch.names, MAX_PAGES_TOLD))
        begins, watch.begins = watch.begins, False
        if len(names) < MAX_PAGES_TOLD:
            watch.names = None
        if names or begins:
            return CachedPages(begins, await _digests(names, salt))
    if not watch.changes:
        return None
    changes = list(itertools.islice(watch.changes.items(), MAX_PAGES_TOLD))
    for name, _ in changes:
        del watch.changes[name]
    added = await _digests([name for name, is_there in changes if is_there], salt)
    return CachedPages(False, added, await _digests([name for name, is_there in changes if not is_there], salt))


async def _digests(names: Sequence[bytes], salt: bytes) -> tuple[int, ...]:
    digests: list[int] = []
    for start in range(0, len(names), DIGESTS_AT_ONCE):
        if start:
            await anyio.lowlevel.checkpoint()
        digests += [published_digest(name, salt) for name in names[start : start + DIGESTS_AT_ONCE]]
    return tuple(digests)
