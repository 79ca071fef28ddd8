"""The commands of a chat: lines that begin with a slash. They change the chat and say what to show; what is asked of an engine is not
theirs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aengine.api.errors import AEngineError
from aengine.api.request import url_of_image
from aengine.server.config.settings import nearest
from aengine.terminal.answers import Chat
from aengine.terminal.conversation import CommandError, Conversation

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
