"""The keys of the prompt, and what Tab completes."""

from __future__ import annotations

from collections.abc import Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent

from aengine.terminal.commands import COMMANDS
from aengine.terminal.parameters import FIELDS


def key_bindings() -> KeyBindings:
    """Enter sends, Alt-Enter and Ctrl-J begin a new line, Ctrl-C empties the prompt or raises KeyboardInterrupt."""
    keys = KeyBindings()
    in_text = has_focus(DEFAULT_BUFFER)  # and not in a search

    @keys.add("enter", filter=in_text)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=in_text)
    @keys.add("c-j", filter=in_text)
    def _begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=in_text)
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


class CommandCompleter(Completer):
    """Names of commands, of parameters and of files."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        name, space, argument = document.text_before_cursor.partition(" ")
        command = COMMANDS.get(name[1:])
        if not name.startswith("/"):
            return
        if not space:
            known, begun = [f"/{known}" for known in COMMANDS], name
        elif command is not None and command.takes_file:
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)
            return
        else:
            known, begun = [f"{known}=" for known in FIELDS] if name == "/params" else [], argument.rpartition(" ")[2]
        yield from (Completion(one, -len(begun)) for one in known if one.startswith(begun))
