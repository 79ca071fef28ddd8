"""Terminals for tests: one that shows what is written to it, and one that a program runs in."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from hang_guard import HANG_SECONDS
from rich.cells import cell_len

SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07")

START = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
from aengine.terminal.cli import main
sys.exit(main())
"""


class Screen:
    """All lines that a terminal has shown, those that were scrolled out too. It knows the sequences of `TerminalView`, and breaks no
    lines: one that is too long fails."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lines = [""]
        self._row = self._home = 0

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).strip("\n")

    @property
    def visible(self) -> list[str]:
        """The lines down to the cursor that are not scrolled out."""
        return [line.rstrip() for line in self.lines[self._top :]]

    @property
    def _top(self) -> int:
        return max(self._home, len(self.lines) - self.height)

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if match := SEQUENCE.match(text, at):
                self._obey(match[2], match[1])
                at = match.end()
                continue
            if text[at] == "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            elif text[at] != "\r":
                assert text[at] >= " "
                self.lines[self._row] += text[at]
                assert cell_len(self.lines[self._row]) <= self.width
            at += 1

    def _obey(self, kind: str, number: str) -> None:
        if kind == "A":
            self._row = max(self._top, self._row - int(number))
        elif kind == "H":
            self._row = self._home = self._top
        elif kind == "K":
            self.lines[self._row] = ""
        elif kind == "J":
            del self.lines[self._row :]
            self.lines.append("")
        else:
            assert kind == "m"


class Program:
    """`aengine-chat` in a terminal of its own."""

    def __init__(self, *arguments: str, state: Path) -> None:
        self._keys, terminal = os.openpty()
        self.resize(24, 80)
        names = ("COLUMNS", "LINES", "NO_COLOR", "TERM_PROGRAM")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**environment, "TERM": "xterm-256color", "XDG_STATE_HOME": str(state)},
        )
        os.close(terminal)
        self.output = ""  # without sequences
        self._raw = b""
        self._read = 0

    def resize(self, height: int, width: int) -> None:
        fcntl.ioctl(self._keys, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._keys, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until what was not waited for yet has a match; returns the match."""
        end = time.monotonic() + HANG_SECONDS
        while (match := re.search(pattern, self.output[self._read :])) is None:
            if not self._read_more(end):
                raise AssertionError(f"no {pattern!r} in {self.output[self._read :]!r}")
        self._read += match.end()
        return match[0]

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        end = time.monotonic() + HANG_SECONDS
        while self._read_more(end):
            pass
        return self._process.wait(HANG_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._keys)

    def _read_more(self, end: float) -> bool:
        """Whether there was something to read before `end`."""
        if not select.select([self._keys], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._keys, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # nobody has the terminal open any more
                raise
            return False
        if b"\x1b[6n" in data:  # where is the cursor?
            self.type("\x1b[24;1R")
        self._raw += data
        self.output = SEQUENCE.sub("", self._raw.decode(errors="ignore")).replace("\r", "")
        return bool(data)
