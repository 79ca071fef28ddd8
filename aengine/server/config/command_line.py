"""What the command lines of servers and chats share: a help that shows what most people use, and with --help-all everything; the model as
an argument or a flag; and the nearest flag to one that does not exist.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aengine import __version__
from aengine.server.config.settings import Option, nearest

_MODEL = "model_argument"


class ShowAll(argparse.Action):
    """Prints the whole help, and exits."""

    def __init__(self, *, build: Callable[[], argparse.ArgumentParser], **fields: Any) -> None:
        super().__init__(nargs=0, **fields)
        self._build = build

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        self._build().print_help()
        parser.exit()


def add_general(parser: argparse.ArgumentParser, build_whole: Callable[[], argparse.ArgumentParser]) -> None:
    """`--help-all` and `--version`. `build_whole`: makes the parser whose help shows all."""
    parser.add_argument("--help-all", action=ShowAll, build=build_whole, help="show all options, by group, and exit")
    parser.add_argument("--version", action="version", version=f"aengine {__version__}")


def add_model(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """The model as the first argument."""
    parser.add_argument(_MODEL, nargs="?", metavar=metavar, help=text)


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], common: Sequence[str], *, whole: bool, help_of: Callable[[Option], str]
) -> None:
    """The flags of `options`, those of the names in `common` first and in this order. Without `whole` the help shows no others."""
    by_name = {option.name: option for option in options}
    groups = dict.fromkeys(common, "common options")
    for name in (*common, *(name for name in by_name if name not in common)):
        title = groups.get(name, by_name[name].group)
        group = next((group for group in parser._action_groups if group.title == title), None) or parser.add_argument_group(title)
        by_name[name].add_to(group, help_of(by_name[name]) if whole or name in common else argparse.SUPPRESS)


def help_with_source(option: Option) -> str:
    """What an option is, its default, and the variable that it can be given as."""
    default = str(option.default).lower() if isinstance(option.default, bool) else option.default
    shown = "" if default in (None, (), {}) else f"default: {default}; "
    return f"{option.help} ({shown}{option.variable})".replace("%", "%%")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, is_server: Callable[[str], bool] = lambda argument: False
) -> argparse.Namespace:
    """The namespace, with `model` wherever the model was given; `server` is the argument in its place that `is_server`, else None. Exits
    with a usage error for what is unknown, or given twice."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unrecognized argument {unknown[0]}{nearest(unknown[0], flags) if unknown[0].startswith('-') else ''}")
    model = vars(given).pop(_MODEL)
    given.server = model if model is not None and is_server(model) else None
    if model is not None and given.server is None:
        if "model" in given:
            parser.error(f"the model is given twice: as {model} and with --model {given.model}")
        given.model = model
    return given
