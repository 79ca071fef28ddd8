"""`aengine-chat`: a chat with an engine in this process or with a server, over HTTP or gRPC, in a terminal or in a pipe.

Owns the process: flags, the choice between these, exit codes. Heavy modules are imported after the flags are read, so that --help and a
typo answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aengine.api.errors import ConfigError
from aengine.api.request import RequestOptions
from aengine.client.client_config import (
    GRPC,
    add_server_flags,
    client_config,
    exit_code,
    http_fields,
    is_url,
    read_file,
    read_json,
    read_stdin,
)
from aengine.client.openai import HttpConfig, OpenAIClient
from aengine.server.config.settings import Option, add_general, add_model, add_options, options, parse, read_settings
from aengine.terminal.answers import Chat, View
from aengine.terminal.conversation import ChatParameters, CommandError, Conversation
from aengine.terminal.partners import EnginePartner, HttpPartner, Partner

if TYPE_CHECKING:
    from aengine.engine.async_engine import AsyncEngine

DUMB = "this terminal cannot move its cursor (TERM says so), which a chat needs; --prompt and pipes do not"
COMMON = ("dtype", "quantization", "max_model_len", "kv_cache_memory")
"""Options of the engine that the help shows."""
ENGINE_OPTIONS = [option for option in options() if option.table == "engine"]


def main(arguments: Sequence[str] | None = None, name: str = "aengine-chat") -> int:
    """Returns the exit code: 0 when the user leaves and when all is answered, 1 for an error, 2 for wrong flags, 130 after Ctrl-C.
    `name`: what the program is called."""
    parser = build_parser(name)
    given = parse(parser, arguments, is_server)
    if given.server is not None:
        if given.address is not None:
            parser.error(f"the server is given twice: as {given.server} and with --address {given.address}")
        given.address = given.server
    return exit_code(name, partial(_run, given))


def is_server(argument: str) -> bool:
    """Whether it means a server, rather than a model."""
    return is_url(argument) or argument.startswith(GRPC)


def build_parser(name: str = "aengine-chat", *, whole: bool = False) -> argparse.ArgumentParser:
    """`whole`: the help shows all options."""
    parser = argparse.ArgumentParser(
        prog=name,
        usage="%(prog)s [MODEL | URL] [options]",
        allow_abbrev=False,
        description="Chat with a model, in this process or behind a server. In a pipe, stdin is the question and stdout the answer.",
    )
    models = "a Hugging Face id, a directory, or demo (the default), to run in this process"
    servers = "http://host:port of any server with OpenAI's API, or grpc://host:port of aengine-grpc"
    add_model(parser, "MODEL | URL", f"{models}; or {servers}")
    add_general(parser, partial(build_parser, name, whole=True))
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this and leave; several are asked one after the other")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        *("--param", "-p"), action="append", default=[], metavar="NAME=VALUE", help="a parameter of answers, as /params lists them"
    )
    parser.add_argument("--tools", metavar="FILE", help="a JSON file with the list of tools that the model may call; you type the results")
    parser.add_argument("--json", action="store_true", help="write each answer as one line of JSON")
    add_server_flags(parser.add_argument_group("server", "Instead of an engine in this process."), None, whole=whole)
    add_options(parser, ENGINE_OPTIONS, COMMON, whole=whole, help_of=_help)
    return parser


def _help(option: Option) -> str:
    where = " Of a server over HTTP: the name of the model there." if option.name == "model" else ""
    return f"{option.help}{where}".replace("%", "%%")


def _run(given: argparse.Namespace) -> int:
    interactive = given.prompt is None and not given.json and sys.stdin.isatty() and sys.stdout.isatty()
    tools = None if given.tools is None else read_json("tools", read_file("tools", given.tools))
    conversation, parameters, tools = Conversation(given.system), ChatParameters(given.param), RequestOptions(tools=tools).tools
    questions = None if interactive else _questions(given)
    chat = Chat(_partner(given), conversation, parameters, tools)
    if questions is not None:
        asyncio.run(_answer_all(chat, questions, as_json=given.json))
    else:
        if _is_dumb():
            raise CommandError(DUMB)
        from aengine.terminal.interactive import chat_in_terminal

        asyncio.run(chat_in_terminal(chat, "in this process" if given.address is None else f"at {given.address}"))
    return 0


def _partner(given: argparse.Namespace) -> Partner:
    """What the flags mean; not entered. Raises `ConfigError` and `SettingsError`."""
    flags = engine_flags(given)
    if given.address is None:
        return EnginePartner(engine_of(flags))
    over_http = is_url(given.address)
    model = flags.pop("model", None) if over_http else None
    if flags:
        raise ConfigError.of(next(iter(flags)), "is for an engine in this process, and not for the server of --address")
    if over_http:
        return HttpPartner(OpenAIClient(HttpConfig(**http_fields(given)), model))
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC core would report a lost connection beside our own message
    from aengine.client.client import AsyncClient

    return EnginePartner(AsyncClient(client_config(given)))


def engine_flags(given: argparse.Namespace) -> dict[str, Any]:
    """The options of the engine that were given on the command line, by name."""
    return {option.name: vars(given)[option.name] for option in ENGINE_OPTIONS if option.name in given}


def engine_of(flags: Mapping[str, object]) -> AsyncEngine:
    """An engine in this process, which is this program's, not started. `flags`: those of it that were given. Raises `SettingsError`."""
    from aengine.api.runtime import switch_often
    from aengine.engine.async_engine import AsyncEngine

    switch_often()
    return AsyncEngine(read_settings(flags, os.environ).engine)


def _questions(given: argparse.Namespace) -> list[str]:
    """Return the questions of the flags, or without any the text of stdin. Raises `ConfigError` if stdin is empty."""
    if given.prompt is not None:
        return list(given.prompt)
    if sys.stdin.isatty():
        print("aengine-chat: the question ends with Ctrl-D", file=sys.stderr)
    question = read_stdin().strip()
    if not question:
        raise ConfigError.of("prompt", "there is no question: stdin is empty")
    return [question]


async def _answer_all(chat: Chat, questions: list[str], *, as_json: bool) -> None:
    from aengine.terminal.answers import PlainView, answer_all

    make_view: Callable[[], View] | None = None if as_json else PlainView
    if not as_json and sys.stdout.isatty() and not _is_dumb():
        from aengine.terminal.render import TerminalView, make_console

        make_view = partial(TerminalView, make_console())
    async with chat.partner:
        await answer_all(chat, questions, make_view)


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"


if __name__ == "__main__":
    sys.exit(main())
