"""`StreamGroup`: many streams read by one task, which wakes once per step of the engine. Knows nothing of what reads it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from aengine.engine.stream import TokenStream
from aengine.outputs import Token

TagT = TypeVar("TagT", bound=Hashable)


class _Member(Generic[TagT]):
    """The waiter of one stream: notes once that there is something to take."""

    __slots__ = ("group", "noted", "started", "stream", "tag")

    def __init__(self, group: StreamGroup[TagT], tag: TagT, stream: TokenStream) -> None:
        self.group = group
        self.tag = tag
        self.stream = stream
        self.noted = False
        self.started = False

    def set(self) -> None:
        if not self.noted:
            self.noted = True
            self.group._note(self)


@dataclass(frozen=True, slots=True)
class Reading(Generic[TagT]):
    """What one stream brought: once no tokens, when it is `started()`. With an error, or once the stream has ended, it is no longer
    in the group."""

    tag: TagT
    stream: TokenStream
    tokens: list[Token]
    error: Exception | None = None


class StreamGroup(Generic[TagT]):
    """Streams under tags. Leaving its `async with` cancels those that are left; one task reads."""

    def __init__(self) -> None:
        self._members: dict[TagT, _Member[TagT]] = {}
        self._noted: list[_Member[TagT]] = []
        self._news = anyio.Event()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, tag: object) -> bool:
        return tag in self._members

    def add(self, tag: TagT, stream: TokenStream) -> None:
        """Read `stream` with the others from now on. Raises ValueError for a tag in use."""
        if tag in self._members:
            raise ValueError(f"{tag!r} is in use")
        member = self._members[tag] = _Member(self, tag, stream)
        stream.attach(member)
        member.set()  # there may be something already

    def __getitem__(self, tag: TagT) -> TokenStream:
        return self._members[tag].stream

    async def read(self) -> list[Reading[TagT]]:
        """Wait until some stream has something new; returns what all of them have. A stream comes at most once."""
        while True:
            while not self._noted:
                self._news = anyio.Event()
                await self._news.wait()
            readings = self.take()
            if readings:
                return readings

    def take(self) -> list[Reading[TagT]]:
        """What all streams have, without waiting."""
        noted, self._noted = self._noted, []
        readings: list[Reading[TagT]] = []
        for member in noted:
            member.noted = False
            stream, tag = member.stream, member.tag
            if self._members.get(tag) is not member:
                continue
            try:
                tokens = stream.take()
            except Exception as error:
                readings.append(Reading(tag, stream, [], error))
                self._leave(member)
                continue
            if tokens or stream.ended or (stream.is_started and not member.started):
                member.started = True
                readings.append(Reading(tag, stream, tokens))
            if stream.ended:
                self._leave(member)
        return readings

    async def aclose(self) -> None:
        """Cancel what is left; returns when its pages are free."""
        with anyio.CancelScope(shield=True):  # bounded by one step
            for member in list(self._members.values()):
                self._leave(member)
                await member.stream.aclose()

    async def __aenter__(self) -> StreamGroup[TagT]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def _leave(self, member: _Member[TagT]) -> None:
        del self._members[member.tag]
        member.stream.attach(None)

    def _note(self, member: _Member[TagT]) -> None:
        self._noted.append(member)
        self._news.set()
