"""Answers on a screen: however they are cut, the screen ends up the same."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console
from screen import Screen

from aengine.chat import ArgumentsDelta, CallStarted, ContentDelta, Event, ReasoningDelta
from aengine.terminal import render
from aengine.terminal.render import TerminalView

pytestmark = pytest.mark.anyio

ANSWER = """# Baths

Some **bold** words and `code` in a paragraph that is longer than a line.
The second line \x1b[2Jof it\x07.

1. first
   - 漢字のテキストがここにあります。これは長い行。

2. second
> quoted

| a | b |
|---|--:|
| 1 | 22 |

```python
def f(x):

    return x  # done
```
<div>no markup</div>

[ref]: http://bath
"""
SHOWN = """thinking
a bit

                 Baths

Some bold words and code in a paragraph
that is longer than a line.
The second line �[2Jof it�.

 1 first
    • 漢字のテキストがここにあります。こ
      れは長い行。
 2 second

▌ quoted

 a   b
 ─────
 1  22

 def f(x):

     return x  # done

<div>no markup</div>

[ref]: http://bath

→ weather {"city": "Bath"}"""


class Shown:
    """A view that draws whatever it is given at once, on a screen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int = 40, height: int = 12) -> None:
        monkeypatch.setattr(render, "MOST_DRAWS", float("inf"))
        monkeypatch.setattr(render, "DRAWING_SHARE", float("inf"))
        self._file = io.StringIO()
        self.console = Console(file=self._file, force_terminal=True, color_system="truecolor", width=width, height=height)
        self.screen = Screen(width, height)
        self.view = TerminalView(self.console)

    async def add(self, *events: Event) -> str:
        for event in events:
            self.view.add_event(event)
        for _ in range(4):
            await asyncio.sleep(0)
        return self.look()

    def look(self) -> str:
        self.screen.feed(self._file.getvalue())
        self._file.seek(0)
        self._file.truncate()
        return self.screen.text


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_every_cut_gives_the_same_screen(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    assert shown.look() == "…"
    await shown.add(ReasoningDelta(text="think"), ReasoningDelta(text="ing\na bit"))
    for at in range(0, len(ANSWER), size):
        await shown.add(ContentDelta(text=ANSWER[at : at + size]))
    await shown.add(CallStarted(index=0, id="x", name="weather"), ArgumentsDelta(index=0, text='{"city": '))
    await shown.add(ArgumentsDelta(index=0, text='"Bath"}'))
    shown.view.finish()
    assert shown.look() == SHOWN


async def test_of_a_long_block_the_end_is_shown_and_then_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, height=6)
    text = await shown.add(ContentDelta(text="Above.\n\n```\n" + "".join(f"{number}\n" for number in range(30))))
    assert text.split() == ["Above.", *map(str, range(25, 30))]
    text = await shown.add(ContentDelta(text="```\n\nBelow.\n"))
    shown.view.finish()
    assert shown.look().split() == ["Above.", *map(str, range(30)), "Below."]


async def test_a_resized_terminal_gets_the_answer_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    await shown.add(ContentDelta(text="One.\n\nTwo has words that take a line of their own.\n\nThr"))
    shown.console.size = (20, 9)  # type: ignore[assignment]
    shown.screen.width, shown.screen.height = 20, 9
    await shown.add(ContentDelta(text="ee"))
    shown.view.finish()
    shown.look()
    assert shown.screen.visible == ["One.", "", "Two has words that", "take a line of their", "own.", "", "Three", ""]


async def test_only_what_changes_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    await shown.add(ContentDelta(text="- one\n- two\n- th"))
    shown.view.add_event(ContentDelta(text="ree"))
    for _ in range(4):
        await asyncio.sleep(0)
    written = shown._file.getvalue()
    assert "three" in written
    assert "two" not in written


async def test_an_empty_answer_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    await shown.add(ContentDelta(text=""))
    shown.view.finish()
    assert shown.look() == ""
