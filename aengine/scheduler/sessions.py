"""`SessionPrefixes`: the prefix of each session's latest request stays in the pool while other prefixes are evicted.

Owns which pages are pinned for whom, for how long, and how many. A pin refuses a page to nobody: where nothing else is left it is evicted
like any other. Knows neither requests nor the queue.
"""

from __future__ import annotations

import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from aengine.cache import PageCache, PageChain, PageNeeds, Prefix
from aengine.scheduler.plan import IntArray
from aengine.scheduler.tier_loads import PageLoad, TierLoads

SessionName = tuple[str, str]
"""The tenant, and the name that it has given."""
MOST_TOKENS = 32 << 20
"""How many tokens all sessions that are known may have: 128 MiB of ids."""


_NOTE = struct.Struct("<dQI")
"""When it expires, in seconds since the epoch; the number of the adapter; bytes of the salt, which follow, and then the ids."""


def note_name(name: SessionName) -> bytes:
    """What tiers call the note of a session. No page is called so."""
    return blake2b("\0".join(name).encode(), digest_size=16, person=b"session").digest() + b"\xff\xff"


@dataclass(slots=True, eq=False)
class _Session:
    chain: PageChain
    tokens: IntArray  # whose full pages are its prefix
    pins: list[tuple[int, bytes]]  # pages and their names; of a state the first page
    expires: float  # on the clock


class SessionPrefixes:
    def __init__(self, cache: PageCache, needs: PageNeeds, clock: Callable[[], float], seconds: float, most_pages: int) -> None:
        """`seconds`: how long a session is kept after its latest request; `most_pages`: that all sessions may have pinned."""
        self._cache, self._needs, self._clock, self._seconds, self._most_pages = cache, needs, clock, seconds, most_pages
        self._sessions: OrderedDict[SessionName, _Session] = OrderedDict()  # the one that was used longest ago first
        self._num_tokens = 0
        self._with_pins: OrderedDict[SessionName, None] = OrderedDict()  # those of them that have some, in the same order
        self._pinned: Counter[str] = Counter()  # pages, by tenant
        self._num_pinned = 0
        self._touched: dict[PageLoad, SessionName] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def remember(self, name: SessionName, chain: PageChain, tokens: IntArray) -> None:
        """Pin what the pool has of these tokens, in place of what the session had before."""
        self.forget(name)
        session = self._sessions[name] = _Session(chain, tokens, [], self._clock() + self._seconds)
        self._pin(name, session)
        self._num_tokens += len(tokens)
        while self._num_tokens > MOST_TOKENS:
            self.forget(next(iter(self._sessions)))

    def write_note(self, tokens: IntArray, cache_salt: str, adapter_number: int) -> bytes:
        """What another process needs to know a session as long as this one does."""
        salt = cache_salt.encode()
        return _NOTE.pack(time.time() + self._seconds, adapter_number, len(salt)) + salt + tokens.tobytes()

    def restore(self, name: SessionName, note: bytes, weights_version: int) -> None:
        """Know a session that another process has known, unless its time has passed."""
        expires, adapter_number, salt_bytes = _NOTE.unpack_from(note)
        if expires <= time.time():
            return
        begin = _NOTE.size + salt_bytes
        tokens = np.frombuffer(note[begin:], np.int32)
        chain = PageChain(self._cache.page_size, note[_NOTE.size : begin].decode(), adapter_number, weights_version)
        chain.extend(tokens)
        self.remember(name, chain, tokens)

    def forget(self, name: SessionName) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            self._num_tokens -= len(session.tokens)
            self._unpin(name, session)

    def forget_all(self) -> None:
        """The pages hold nothing any more."""
        self._sessions.clear()
        self._num_tokens = 0
        self._with_pins.clear()
        self._pinned.clear()
        self._num_pinned = 0
        self._touched.clear()

    def expire(self, now: float) -> None:
        """Forget the sessions whose time has passed."""
        while self._sessions and (name := next(iter(self._sessions))) and self._sessions[name].expires <= now:
            self.forget(name)

    def touch(self, name: SessionName, loads: TierLoads | None, spared: int) -> int:
        """The session is used soon: its time begins anew, what the pool has of it is pinned again, and what tiers have is loaded where that
        leaves `spared` pages to others. Returns the number of its tokens; 0: it is not known."""
        session = self._sessions.get(name)
        if session is None:
            return 0
        self._unpin(name, session)
        self._sessions.move_to_end(name)
        session.expires = self._clock() + self._seconds
        prefix = self._pin(name, session)
        if loads is not None and (load := loads.begin_load(session.chain, self._whole(session), prefix, spared)) is not None:
            self._touched[load] = name
        return len(session.tokens)

    def end_load(self, load: PageLoad, num_loaded: int, loads: TierLoads, spared: int) -> None:
        """Go on with a session that was touched, if the load was for one."""
        name = self._touched.pop(load, None)
        if name is not None and num_loaded:
            self.touch(name, loads, spared)

    def abandon_loads(self) -> None:
        """No load that has begun counts any more."""
        self._touched.clear()

    def _whole(self, session: _Session) -> IntArray:
        """The tokens of its full pages, and one more, which is none of a prefix."""
        size = self._cache.page_size
        return np.append(session.tokens[: len(session.tokens) // size * size], np.int32(0))

    def _pin(self, name: SessionName, session: _Session) -> Prefix:
        index, prefix = self._cache.index, self._cache.match(session.chain, self._whole(session), self._needs)
        for page in [*prefix.pages[prefix.pages > 0].tolist(), *prefix.state[:1].tolist()]:
            found = index.name_of(page)
            assert found is not None, "it was matched"
            self._cache.pin(page)
            session.pins.append((page, found))
        if session.pins:
            self._with_pins[name] = None
        self._count_pins(name[0], len(session.pins))
        while self._num_pinned > self._most_pages:
            most = max(self._pinned, key=lambda tenant: self._pinned[tenant])
            oldest = next(one for one in self._with_pins if one[0] == most)
            self._unpin(oldest, self._sessions[oldest])
        return prefix

    def _unpin(self, name: SessionName, session: _Session) -> None:
        for page, found in session.pins:
            self._cache.unpin(page, found)
        self._count_pins(name[0], -len(session.pins))
        self._with_pins.pop(name, None)
        session.pins.clear()

    def _count_pins(self, tenant: str, count: int) -> None:
        self._num_pinned += count
        self._pinned[tenant] += count
        if not self._pinned[tenant]:
            del self._pinned[tenant]
