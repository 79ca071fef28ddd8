"""`StreamGroup`: many streams read by one task, which wakes once per step of the engine. Knows nothing of what reads it."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from aengine.api.dataclass import dataclass
from aengine.api.outputs import Token
from aengine.api.stream import TokenStream

TagT = TypeVar("TagT", bound=Hashable)


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
        self._streams: dict[TagT, TokenStream] = {}
        self._noted: dict[TagT, None] = {}  # tags of streams with something new, in order
        self._held: set[TagT] = set()  # tags of streams of which nothing is taken for now
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, tag: object) -> bool:
        return tag in self._streams

    def add_stream(self, tag: TagT, stream: TokenStream) -> None:
        """Read `stream` with the others from now on. Raises ValueError for a tag in use."""
        if tag in self._streams:
            raise ValueError(f"{tag!r} is in use")
        stream.attach(partial(self._note, tag))
        self._streams[tag] = stream
        self._note(tag)  # there may be something already

    def discard(self, tag: TagT) -> None:
        """Take the stream under `tag` out of the group; its request runs on. Does nothing if there is none."""
        stream = self._streams.pop(tag, None)
        if stream is not None:
            stream.attach(None)
            self._noted.pop(tag, None)
            self._held.discard(tag)

    def hold(self, tag: TagT, held: bool) -> None:
        """Take nothing from the stream under `tag` for now, so that its request parks when its reader would lag; or take from it again.
        Does nothing if there is none."""
        if tag not in self._streams or held == (tag in self._held):
            return
        if held:
            self._held.add(tag)
            self._noted.pop(tag, None)
        else:
            self._held.remove(tag)
            self._note(tag)  # there may be something by now

    @property
    def num_held(self) -> int:
        return len(self._held)

    def __getitem__(self, tag: TagT) -> TokenStream:
        return self._streams[tag]

    async def read(self, most: int = sys.maxsize) -> list[Reading[TagT]]:
        """Wait until some stream has something new; returns what all of them have, as `take_readings` does."""
        while not (readings := self.take_readings(most)):
            await self.wait()
        return readings

    async def wait(self) -> None:
        """Until some stream has something new since this was last waited for, or `wake()` was called since."""
        await self._changed.wait()
        self._changed = anyio.Event()

    def wake(self) -> None:
        """End the `wait()` under way, or the next one."""
        self._changed.set()

    def take_readings(self, most: int = sys.maxsize) -> list[Reading[TagT]]:
        """What all streams have, without waiting: each at most once, with at most `most` tokens. Further tokens come next time."""
        noted, self._noted = self._noted, {}
        readings: list[Reading[TagT]] = []
        for tag in noted:
            stream = self._streams[tag]
            try:
                tokens = stream.take_tokens(most)
            except Exception as error:
                self.discard(tag)
                readings.append(Reading(tag, stream, [], error))
                continue
            if tokens or stream.ended or stream.is_started:
                readings.append(Reading(tag, stream, tokens))
            if stream.ended:
                self.discard(tag)
            elif stream.has_news:
                self._note(tag)
        return readings

    async def aclose(self) -> None:
        """Cancel all streams; returns when their pages are free."""
        streams = dict(self._streams)
        for tag, stream in streams.items():  # all of them before the first wait, so that one step ends them
            self.discard(tag)
            stream.cancel()
        with anyio.CancelScope(shield=True):
            for stream in streams.values():
                await stream.aclose()

    async def __aenter__(self) -> StreamGroup[TagT]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def _note(self, tag: TagT) -> None:
        if tag not in self._noted and tag not in self._held:
            self._noted[tag] = None
            self._changed.set()
