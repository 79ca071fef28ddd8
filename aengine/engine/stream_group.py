"""`StreamGroup`: many streams read by one task, which wakes once per step of the engine. Knows nothing of what reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from aengine.engine.stream import TokenStream
from aengine.outputs import Token

TagT = TypeVar("TagT", bound=Hashable)


@dataclass(eq=False, slots=True)
class _Member(Generic[TagT]):
    """The waiter of one stream, which notes once that there is something to take."""

    tag: TagT
    stream: TokenStream
    note: Callable[[_Member[TagT]], None]
    noted: bool = False

    def set(self) -> None:
        if not self.noted:
            self.noted = True
            self.note(self)


@dataclass(frozen=True, slots=True)
class Reading(Generic[TagT]):
    """The new tokens of one stream: none when it is `started()` and has none yet. A stream with an error, or that has ended, is no longer
    in the group."""

    tag: TagT
    stream: TokenStream
    tokens: list[Token]
    error: Exception | None = None


class StreamGroup(Generic[TagT]):
    """Streams under tags. Leaving its `async with` cancels those still in it; one task reads."""

    def __init__(self) -> None:
        self._members: dict[TagT, _Member[TagT]] = {}
        self._noted: list[_Member[TagT]] = []
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, tag: object) -> bool:
        return tag in self._members

    def add(self, tag: TagT, stream: TokenStream) -> None:
        """Read `stream` with the others from now on. Raises ValueError for a tag in use."""
        if tag in self._members:
            raise ValueError(f"{tag!r} is in use")
        member = _Member(tag, stream, self._note)
        stream.attach(member)
        self._members[tag] = member
        member.set()  # there may be something already

    def discard(self, tag: TagT) -> None:
        """Take the stream under `tag` out of the group; its request runs on. Does nothing if there is none."""
        member = self._members.pop(tag, None)
        if member is not None:
            member.stream.attach(None)

    def __getitem__(self, tag: TagT) -> TokenStream:
        return self._members[tag].stream

    async def read(self, most: int = sys.maxsize) -> list[Reading[TagT]]:
        """Wait until some stream has something new; returns what all of them have, as `take` does."""
        while not (readings := self.take(most)):
            await self.wait()
        return readings

    async def wait(self) -> None:
        """Until some stream has something new since this was last waited for, or `wake()` was called since."""
        await self._changed.wait()
        self._changed = anyio.Event()

    def wake(self) -> None:
        """End the `wait()` under way, or the next one."""
        self._changed.set()

    def take(self, most: int = sys.maxsize) -> list[Reading[TagT]]:
        """What all streams have, without waiting: each at most once, with at most `most` tokens. Further tokens come next time."""
        noted, self._noted = self._noted, []
        readings: list[Reading[TagT]] = []
        for member in noted:
            member.noted = False
            stream, tag = member.stream, member.tag
            if self._members.get(tag) is not member:
                continue
            try:
                tokens = stream.take(most)
            except Exception as error:
                self.discard(tag)
                readings.append(Reading(tag, stream, [], error))
                continue
            if tokens or stream.ended or stream.is_started:
                readings.append(Reading(tag, stream, tokens))
            if stream.ended:
                self.discard(tag)
            elif stream.has_news:
                member.set()
        return readings

    async def aclose(self) -> None:
        """Cancel all streams; returns when their pages are free."""
        members = list(self._members.values())
        for member in members:  # all of them before the first wait, so that one step ends them
            self.discard(member.tag)
            member.stream.cancel()
        with anyio.CancelScope(shield=True):
            for member in members:
                await member.stream.aclose()

    async def __aenter__(self) -> StreamGroup[TagT]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def _note(self, member: _Member[TagT]) -> None:
        self._noted.append(member)
        self._changed.set()
