"""The chat of a terminal: reads lines and commands, shows answers, and stops them at Ctrl-C. Owns the modes of the terminal, SIGINT, the
keys of the prompt, and what Tab completes.

The commands of a chat: lines that begin with a slash. They change the chat and say what to show; what is asked of an engine is not
theirs.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from rich.console import Console
from rich.text import Text

from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError
from aengine.api.request import url_of_image
from aengine.chat import ChatMessage
from aengine.server.config.settings import nearest
from aengine.terminal.answers import Answer, Chat, printable
from aengine.terminal.conversation import FIELDS, CommandError, Conversation
from aengine.terminal.render import LiveRegion, TerminalView, make_console


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


WITHOUT_TEMPLATE = "This model has no chat template: what you write is not answered but continued, as one text with all that came before."


async def chat_in_terminal(chat: Chat, where: str) -> None:
    """Enter the partner, which is `where`, and chat until the user leaves. Raises what starting raises."""
    console = make_console()
    waiting = LiveRegion(console)
    with _quiet_keys():
        waiting.draw([], [f"Waiting for the model {where} …"])
        async with chat.partner as partner:
            waiting.draw([], [])
            context = "" if partner.max_model_len is None else f": context of {partner.max_model_len:,} tokens"
            console.print(Text(printable(f"{partner.title} {where}{context}. /help lists the commands."), "dim"))
            if not partner.has_template:
                console.print(Text(WITHOUT_TEMPLATE, "yellow"))
            preparing = asyncio.create_task(partner.prepare())
            await _Terminal(chat, console).run()
            preparing.cancel()


class _Terminal:
    def __init__(self, chat: Chat, console: Console) -> None:
        self._chat = chat
        self._console = console
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation="  ",
            history=_history(),
            key_bindings=key_bindings(),
            completer=CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
        )
        self._on_interrupt: Callable[[], None] = self._leave_prompt

    async def run(self) -> None:
        """Read and obey lines until the user leaves. SIGINT stops an answer; at the prompt it drops the line, and the second time in a row
        it leaves."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: self._on_interrupt())
        try:
            while (line := await self._read_line()) is not None:
                if line.strip() and not await self._obey(line):
                    return
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _obey(self, line: str) -> bool:
        """Whether the chat goes on."""
        try:
            outcome = run_command(self._chat, line)
            if outcome is None:
                self._chat.conversation.ask(line.strip())
                await self._answer()
                return True
            if outcome.text:
                self._console.print(Text(printable(outcome.text)))
            if outcome.asks:
                await self._answer()
            return not outcome.quits
        except AEngineError as error:
            self._console.print(Text(printable(" ".join(str(error).split())), "red"))
            return True

    async def _answer(self) -> None:
        conversation = self._chat.conversation
        while True:
            message, stopped = await self._show_answer()
            calls = () if stopped or not all(call.complete for call in message.tool_calls) else message.tool_calls
            results: list[str] = []
            for call in calls:
                if (result := await self._read_line(printable(f"{call.name} returns: "))) is None:
                    break
                results.append(result)
            if not calls or len(results) < len(calls):
                break
            conversation.add_calls(message.as_dict(), results)
        if message.content or not (stopped or message.tool_calls):
            conversation.answer(replace(message, tool_calls=()).as_dict())

    async def _show_answer(self) -> tuple[ChatMessage, bool]:
        """The answer to what is unanswered, and whether it was stopped. Raises what an answer raises."""
        answer = Answer(self._chat)
        view = TerminalView(self._console)
        with anyio.CancelScope() as scope:
            self._on_interrupt = scope.cancel
            try:
                async with answer:
                    async for event in answer:
                        view.add_event(event)
            finally:
                self._on_interrupt = self._leave_prompt
                view.finish()
        self._console.print(Text(answer.describe(), "dim"), "", sep="\n")
        return answer.message, scope.cancelled_caught

    async def _read_line(self, prompt: str = "> ") -> str | None:
        """What was typed; None to leave."""
        interrupted = False
        while True:
            try:
                return await self._session.prompt_async([("bold", prompt)], handle_sigint=False)
            except KeyboardInterrupt:
                if interrupted:
                    return None
                interrupted = True
                self._console.print(Text("Ctrl-C again, or Ctrl-D, leaves.", "dim"))
            except EOFError:
                return None

    def _leave_prompt(self) -> None:
        if self._session.app.is_running:
            self._session.app.exit(exception=KeyboardInterrupt())


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """While no prompt is shown, keys are not echoed but kept for the next one, also at Ctrl-C."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    quiet = termios.tcgetattr(keys)
    quiet[0] &= ~termios.ICRNL  # a prompt tells Enter from Ctrl-J
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(keys, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _history() -> History:
    """What was typed before, for this user's eyes only; forgotten at the end where it cannot be kept."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "aengine" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        if os.access(path, os.W_OK):
            return FileHistory(path)
    except OSError:
        pass
    return InMemoryHistory()


KEYS = """Enter sends, Alt-Enter or Ctrl-J begins a new line. Up and Ctrl-R find what was
typed before, Tab completes commands. Ctrl-C stops the answer; twice at an
empty prompt it leaves, as Ctrl-D does. What begins with a space is no command."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What follows from a command: a text to show, an exchange that has to be answered, or the end."""

    text: str = ""
    asks: bool = False
    quits: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[Chat, str], CommandOutcome]  # with what stands behind its name
    takes_file: bool = False


def run_command(chat: Chat, line: str) -> CommandOutcome | None:
    """None if the line is no command. Raises `AEngineError`, with the chat as it was."""
    match = re.fullmatch(r"/(\w*)(?:\s+(.*))?", line.rstrip(), re.DOTALL)
    if match is None:
        return None
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        raise CommandError(f"there is no command /{name}{nearest('/' + name, (f'/{known}' for known in COMMANDS))}")
    command = COMMANDS[name]
    if argument and " " not in command.usage:
        raise CommandError(f"/{name} takes nothing behind it")
    return command.run(chat, argument)


def _help(chat: Chat, argument: str) -> CommandOutcome:
    width = max(len(command.usage) for command in COMMANDS.values()) + 2
    return CommandOutcome("\n".join([*(f"{command.usage:<{width}}{command.help}" for command in COMMANDS.values()), "", KEYS]))


def _system(chat: Chat, argument: str) -> CommandOutcome:
    if argument:
        chat.conversation.system = None if argument.lower() == "none" else argument
    system = chat.conversation.system
    return CommandOutcome("There is no system message." if system is None else f"The system message is: {system}")


def _params(chat: Chat, argument: str) -> CommandOutcome:
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise CommandError(f"{argument}: {error}") from None
    if len(words) == 1 and "=" not in words[0]:
        return CommandOutcome(chat.parameters.explain(words[0]))
    chat.parameters.set(words)
    return CommandOutcome(chat.parameters.describe(chat.partner.defaults, with_unset=not words))


def _retry(chat: Chat, argument: str) -> CommandOutcome:
    return CommandOutcome(f"Again: {chat.conversation.retry()}", asks=True)


def _undo(chat: Chat, argument: str) -> CommandOutcome:
    return CommandOutcome(f"Taken back: {chat.conversation.undo()}")


def _save(chat: Chat, argument: str) -> CommandOutcome:
    path = _path(argument)
    if not chat.conversation.messages:
        raise CommandError("there is nothing to save")
    if path.exists():
        _read(path, " and is not replaced")
    try:
        path.write_text(chat.conversation.to_json(), "utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    return CommandOutcome(f"Saved {len(chat.conversation.messages)} messages in {path}.")


def _load(chat: Chat, argument: str) -> CommandOutcome:
    path = _path(argument)
    chat.conversation = _read(path)
    return CommandOutcome(f"Loaded {len(chat.conversation.messages)} messages from {path}.")


def _image(chat: Chat, argument: str) -> CommandOutcome:
    path = _path(argument)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    if not (url := url_of_image(data)).startswith("data:image/"):
        raise CommandError(f"{path} is no PNG, JPEG, WEBP or GIF")
    chat.conversation.images.append(url)
    return CommandOutcome(f"{path.name} goes with the next question.")


def _clear(chat: Chat, argument: str) -> CommandOutcome:
    chat.conversation.clear()
    return CommandOutcome("A new conversation." + (" The system message stays." if chat.conversation.system is not None else ""))


def _model(chat: Chat, argument: str) -> CommandOutcome:
    return CommandOutcome(chat.partner.describe())


def _quit(chat: Chat, argument: str) -> CommandOutcome:
    return CommandOutcome(quits=True)


COMMANDS = {
    "help": Command("/help", "this list", _help),
    "system": Command("/system [TEXT]", "set or show the system message; none removes it", _system),
    "params": Command("/params [NAME=VALUE ...]", "show or set parameters (none: unset), or explain NAME", _params),
    "retry": Command("/retry", "ask the last question again", _retry),
    "undo": Command("/undo", "take the last question and its answer back", _undo),
    "save": Command("/save FILE", "write the conversation to a JSON file", _save, takes_file=True),
    "load": Command("/load FILE", "go on with the conversation of a file", _load, takes_file=True),
    "image": Command("/image FILE", "send an image with the next question", _image, takes_file=True),
    "clear": Command("/clear", "begin a new conversation", _clear),
    "model": Command("/model", "describe the model", _model),
    "quit": Command("/quit", "leave", _quit),
}
"""By name, without the slash."""


def _path(argument: str) -> Path:
    if not argument:
        raise CommandError("the name of a file is missing")
    return Path(argument).expanduser()


def _read(path: Path, consequence: str = "") -> Conversation:
    try:
        return Conversation.from_json(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except (AEngineError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} holds no conversation{consequence}: {error}") from None
