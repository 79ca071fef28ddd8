"""`aengine-chat`: a chat with an engine in this process or behind a gRPC server, in a terminal or in a pipe.

Owns the process: flags, the choice between the two, exit codes. Heavy modules are imported after the flags are read, so that --help and a
typo answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from aengine import __version__
from aengine.client.flags import add_server_flags, client_config, exit_code, read_file, read_json, read_stdin
from aengine.errors import ConfigError
from aengine.requests import RequestOptions
from aengine.server.config.settings import nearest, options, read_settings
from aengine.terminal.answers import Chat, View
from aengine.terminal.conversation import CommandError, Conversation
from aengine.terminal.parameters import Parameters

if TYPE_CHECKING:
    from aengine.protocols import EngineProtocol

MISSING = "a chat needs rich and prompt_toolkit (pip install 'aengine[chat]'); --prompt and pipes do not"
DUMB = "this terminal cannot move its cursor (TERM says so), which a chat needs; --prompt and pipes do not"
_ENGINE = [option for option in options() if option.table == "engine"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when the user leaves and when all is answered, 1 for an error, 2 for wrong flags, 130 after Ctrl-C."""
    parser = build_parser()
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unrecognized argument {unknown[0]}{nearest(unknown[0], flags)}")
    return exit_code("aengine-chat", partial(_run, given))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aengine-chat",
        usage="%(prog)s [--model MODEL | --address HOST:PORT] [options]",
        allow_abbrev=False,
        description="Chat with a model, in this process or behind a server. In a pipe, stdin is the question and stdout the answer.",
    )
    parser.add_argument("--version", action="version", version=f"aengine {__version__}")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this and leave; several are asked one after the other")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        *("--param", "-p"), action="append", default=[], metavar="NAME=VALUE", help="a parameter of answers, as /params lists them"
    )
    parser.add_argument("--tools", metavar="FILE", help="a JSON file with the list of tools that the model may call; you type the results")
    parser.add_argument("--json", action="store_true", help="write each answer as one line of JSON")
    add_server_flags(parser.add_argument_group("server", "Instead of an engine in this process."), None)
    group = parser.add_argument_group("engine", "In this process. The environment has the same names as for aengine-grpc.")
    for option in _ENGINE:
        option.add_to(group, option.help.replace("%", "%%"))
    return parser


def _run(given: argparse.Namespace) -> int:
    interactive = given.prompt is None and not given.json and sys.stdin.isatty() and sys.stdout.isatty()
    tools = None if given.tools is None else read_json("tools", read_file("tools", given.tools))
    conversation, parameters, tools = Conversation(given.system), Parameters(given.param), RequestOptions(tools=tools).tools
    questions = None if interactive else _questions(given)
    chat = Chat(_engine(given), conversation, parameters, tools)
    if questions is not None:
        asyncio.run(_answer_all(chat, questions, as_json=given.json))
    else:
        if (missing := _missing()) is not None:
            raise CommandError(missing)
        from aengine.terminal.interactive import chat_in_terminal

        asyncio.run(chat_in_terminal(chat, "in this process" if given.address is None else f"at {given.address}"))
    return 0


def _engine(given: argparse.Namespace) -> EngineProtocol:
    """The engine that the flags mean; not started. Raises `ConfigError` and `SettingsError`."""
    flags = {option.name: vars(given)[option.name] for option in _ENGINE if option.name in given}
    if given.address is not None:
        if flags:
            raise ConfigError.of(next(iter(flags)), "is for an engine in this process, and not for the server of --address")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC core would report a lost connection beside our own message
        from aengine.client.client import AsyncClient

        return AsyncClient(client_config(given))
    from aengine.engine.async_engine import AsyncEngine
    from aengine.switching import switch_often

    switch_often()
    return AsyncEngine(read_settings(flags, os.environ).engine)


def _questions(given: argparse.Namespace) -> list[str]:
    """Those of the flags, or what stdin has. Raises `ConfigError`."""
    if given.prompt is not None:
        return list(given.prompt)
    if sys.stdin.isatty():
        print("aengine-chat: the question ends with Ctrl-D", file=sys.stderr)
    question = read_stdin().strip()
    if not question:
        raise ConfigError.of("prompt", "there is no question: stdin is empty")
    return [question]


async def _answer_all(chat: Chat, questions: list[str], *, as_json: bool) -> None:
    from aengine.terminal.pipe import PlainView, answer_all

    make_view: Callable[[], View] | None = None if as_json else PlainView
    if not as_json and sys.stdout.isatty() and _missing() is None:
        from aengine.terminal.render import TerminalView, make_console

        make_view = partial(TerminalView, make_console())
    async with chat.engine:
        await answer_all(chat, questions, make_view)


def _missing() -> str | None:
    """What a chat in this terminal lacks, in a sentence."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return DUMB
    return None if all(map(find_spec, ("rich", "prompt_toolkit"))) else MISSING


if __name__ == "__main__":
    sys.exit(main())
