"""Answers on a terminal: Markdown as it streams, reasoning in dim lines, calls of tools.

A block is drawn for good when the next one has begun; the last one is drawn anew as it grows, in place and only where it changes. Of
a block that is longer than the screen the end is shown until it is complete. After the terminal was resized the answer is drawn
anew on a clear screen, since nobody knows how it broke the lines that were there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.text import Text
from rich.theme import Theme

from aengine.chat import ArgumentsDelta, CallStarted, ContentDelta, Event, ReasoningDelta
from aengine.terminal.answers import printable

MOST_DRAWS = 20.0  # per second
DRAWING_SHARE = 0.1  # of the time, at most: an engine in this process needs the rest

# HTML is shown and not dropped; so are definitions of links, which may stand in another block than the link.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
Block = tuple[int, RenderableType]
"""The line of its text on which it begins, and what it looks like."""


class _Blocks(Markdown):
    """Markdown that is parsed already."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = tokens


def markdown_blocks(text: str) -> Iterator[Block]:
    tokens: list[Token] = []
    for token in _PARSER.parse(text):
        tokens.append(token)
        for child in token.children or ():
            if child.type == "softbreak":  # in a chat, lines are broken where the model breaks them
                child.type = "hardbreak"
        if token.level == 0 and token.nesting <= 0:
            yield (tokens[0].map or [0])[0], _Blocks(tokens)
            tokens = []


def lines_in(style: str) -> Callable[[str], Iterator[Block]]:
    def lines(text: str) -> Iterator[Block]:
        yield from enumerate(Text(line, style) for line in text.split("\n"))

    return lines


_KINDS = {ContentDelta: markdown_blocks, ReasoningDelta: lines_in("dim"), CallStarted: lines_in("cyan")}


@dataclass(slots=True)
class _Part:
    """A stretch of events of one kind."""

    blocks_of: Callable[[str], Iterator[Block]]
    text: str = ""
    fixed: int = 0  # characters of the text that are drawn for good


def make_console() -> Console:
    """A console on stdout, in colours of the terminal's own that are seen on light and on dark ground."""
    return Console(highlight=False, theme=Theme({"markdown.code": "cyan", "markdown.code_block": "cyan"}))


class TerminalView:
    """Shows one answer, in the running event loop."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._region = LiveRegion(console)
        self._parts: list[_Part] = []
        self._current = 0  # the first part that is not all drawn for good
        self._spaced = False  # whether a block stands above, which the next one is set apart from
        self._size = self._seen = console.size  # of the last draw, and when that was looked at
        self._timer: asyncio.TimerHandle | None = None
        self._next_draw = 0.0
        self._region.draw([], self._render(Text("…", "dim")))

    def add_event(self, event: Event) -> None:
        if isinstance(event, ArgumentsDelta):
            self._parts[-1].text += printable(event.text)
        elif isinstance(event, CallStarted):
            self._parts.append(_Part(_KINDS[CallStarted], printable(f"→ {event.name} ")))
        elif isinstance(event, ContentDelta | ReasoningDelta) and event.text:
            blocks_of = _KINDS[type(event)]
            if not self._parts or self._parts[-1].blocks_of is not blocks_of:
                self._parts.append(_Part(blocks_of))
            self._parts[-1].text += printable(event.text)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._next_draw - time.monotonic()), self._draw)

    def finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._seen = self._console.size
        self._draw(to_end=True)

    def _draw(self, to_end: bool = False) -> None:
        begun = time.monotonic()
        self._timer = None
        if self._console.size != self._size and not self._draw_anew(to_end):
            return
        fixed: list[str] = []
        live: list[str] = []
        spaced = self._spaced
        for part in self._parts[self._current :]:
            closed = to_end or part is not self._parts[-1]
            text = part.text[part.fixed :]
            lines = text.split("\n")
            blocks = list(part.blocks_of(text))
            lines_fixed = 0
            for number, (_, look) in enumerate(blocks):
                following = blocks[number + 1][0] if number + 1 < len(blocks) else len(lines)
                drawn = self._render(look)
                if spaced and (part.blocks_of is markdown_blocks or (number == 0 and part.fixed == 0)):
                    drawn.insert(0, "")
                spaced = True
                if closed or following < len(lines) - 1:  # the next block begins in a line that is complete
                    fixed += drawn
                    lines_fixed, self._spaced = following, True
                else:
                    live += drawn
            part.fixed += sum(len(line) + 1 for line in lines[:lines_fixed])
            self._current += closed
        self._region.draw(fixed, live)
        now = time.monotonic()
        self._next_draw = now + max(1 / MOST_DRAWS, (now - begun) / DRAWING_SHARE)

    def _draw_anew(self, to_end: bool) -> bool:
        """Whether to draw, all of it, since the size does not change any more."""
        size, seen = self._console.size, self._seen
        self._seen = size
        if size != seen:
            self._timer = asyncio.get_running_loop().call_later(1 / MOST_DRAWS, self._draw)
            return False
        self._size, self._current, self._spaced = size, 0, False
        for part in self._parts:
            part.fixed = 0
        self._region.clear()
        return True

    def _render(self, look: RenderableType) -> list[str]:
        with self._console.capture() as capture:
            self._console.print(look, end="")
        lines = [line.rstrip(" ") if _STYLES.sub("", line).strip(" ") else "" for line in capture.get().split("\n")]
        return "\n".join(lines).strip("\n").split("\n")


class LiveRegion:
    """The last lines of a terminal's output, which can be drawn anew. The cursor stays at the beginning of the line below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[str] = []

    def draw(self, fixed: list[str], live: list[str]) -> None:
        """Show lines in place of those that were `live` so far. No line is longer than the terminal is wide."""
        live = live[len(live) - min(len(live), self._console.height - 1) :]
        lines = fixed + live
        same = 0
        while same < min(len(lines), len(self._shown)) and lines[same] == self._shown[same]:
            same += 1
        if same < max(len(lines), len(self._shown)):
            up = len(self._shown) - same
            move = f"\x1b[{up}A" if up else ""
            self._write(f"{move}\r" + "".join(f"\x1b[2K{line}\n" for line in lines[same:]) + "\x1b[J")
        self._shown = live

    def clear(self) -> None:
        """Move what is on the screen out of it, into what can be scrolled back to."""
        self._write("\n" * self._console.height + "\x1b[H\x1b[J")
        self._shown = []

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
