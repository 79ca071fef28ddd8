"""The hand-over to the step thread: nothing is lost, whenever it is posted, and no post blocks whoever it comes upon."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from hang_guard import HANG_SECONDS

from aengine.engine.edges import Cancel, Mailbox


def test_a_post_in_the_middle_of_any_line_is_delivered_and_blocks_nobody() -> None:
    """As a destructor does that the garbage collector runs in the thread that is at work on the mailbox."""
    mailbox = Mailbox()
    posted: list[Cancel] = []
    taken: list[Any] = []

    def destructor(frame: FrameType, event: str, argument: object) -> Any:
        sys.settrace(None)
        posted.append(Cancel(len(posted)))
        mailbox.post(posted[-1])
        sys.settrace(destructor)
        return destructor

    def work() -> None:
        sys.settrace(destructor)
        for _ in range(3):
            mailbox.post(Cancel(-1))
            mailbox.wait()
            taken.extend(mailbox.take_commands())
        sys.settrace(None)
        taken.extend(mailbox.take_commands())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive(), "a post waits for a lock that its own thread holds"
    assert len(posted) > 10
    assert [command for command in taken if command.key >= 0] == posted
    assert len(taken) == len(posted) + 3


def test_a_wait_of_any_length_ends_with_a_post() -> None:
    mailbox = Mailbox()
    for timeout in (None, 1e10, 1e300):
        waiter = threading.Thread(target=mailbox.wait, args=(timeout,), daemon=True)
        waiter.start()
        mailbox.post(Cancel(1))
        waiter.join(HANG_SECONDS)
        assert not waiter.is_alive()
        assert mailbox.take_commands() == [Cancel(1)]


def test_on_post_is_called_when_the_command_is_there() -> None:
    mailbox = Mailbox()
    mailbox.post(Cancel(1))
    seen: list[bool] = []
    mailbox.on_post = lambda: seen.append(mailbox.is_empty)
    assert mailbox.take_commands() == [Cancel(1)]
    assert mailbox.is_empty
    mailbox.post(Cancel(2))
    assert seen == [False]


def test_what_was_taken_does_not_wake() -> None:
    mailbox = Mailbox()
    mailbox.post(Cancel(1))
    mailbox.post(Cancel(2))
    assert mailbox.take_commands() == [Cancel(1), Cancel(2)]
    waiter = threading.Thread(target=mailbox.wait, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    mailbox.post(Cancel(3))
    waiter.join(HANG_SECONDS)
    assert not waiter.is_alive()
