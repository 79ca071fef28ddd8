"""`aengine-batch`: the requests of a file, answered into another one, by an engine in this process or by servers.

The files are those of OpenAI's batches: a line of JSON for each request, with `custom_id`, `method`, `url` and `body`, and one for each
answer, in the order in which they come. Owns what is left of a file that was begun: a call that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio

from aengine.api.engine import run_all
from aengine.api.errors import ConfigError, ConnectionLostError, ServerError
from aengine.client.client_config import TOKEN_VARIABLE, exit_code, read_file
from aengine.client.openai import HttpConfig, HttpServer
from aengine.server.config.settings import add_general, add_model, add_options, parse
from aengine.server.core.batches import BatchError, BatchLine, read_lines
from aengine.terminal.cli import COMMON, ENGINE_OPTIONS, engine_flags, engine_of

AT_ONCE = 256
"""Requests of all servers together that have no answer yet, unless a flag says so."""
MOST_TRIES = 8
"""How often a request is sent, at most, where the server cannot be reached or has no room."""
_WAITS = (429, 500, 502, 503, 504)  # statuses of answers that another try may change


def main(arguments: Sequence[str] | None = None, name: str = "aengine-batch") -> int:
    """Returns the exit code: 0 when all requests are answered, 1 for an error, or where some were refused, 2 for wrong flags, 130 after
    Ctrl-C. `name`: what the program is called."""
    parser = build_parser(name)
    return exit_code(name, partial(_run, parse(parser, arguments)))


def build_parser(name: str = "aengine-batch", *, whole: bool = False) -> argparse.ArgumentParser:
    """`whole`: the help shows all options."""
    parser = argparse.ArgumentParser(
        prog=name,
        usage="%(prog)s IN.jsonl OUT.jsonl [MODEL | --backends URL,URL] [options]",
        allow_abbrev=False,
        description="Answer the requests of a file in the form of OpenAI's batches. A call that was interrupted goes on where it was.",
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="a request in each line: custom_id, method, url, body")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="gets a line for each answer; of what it has is made no second one")
    add_model(parser, "MODEL", "a Hugging Face id, a directory, or demo (the default), to run in this process")
    parser.add_argument("--backends", metavar="URL,URL", help="servers with OpenAI's API, in place of an engine in this process")
    parser.add_argument("--token-file", metavar="FILE", help=f"with the token that the servers require (default: that of {TOKEN_VARIABLE})")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help=f"requests under way (default: {AT_ONCE})")
    parser.add_argument("--quiet", action="store_true", help="show no bar")
    add_general(parser, partial(build_parser, name, whole=True))
    add_options(parser, ENGINE_OPTIONS, COMMON, whole=whole, help_of=lambda option: option.help.replace("%", "%%"))
    return parser


def _run(given: argparse.Namespace) -> int:
    if given.at_once < 1:
        raise ConfigError.of("at_once", f"{given.at_once} is not at least 1")
    lines = read_requests(given.input)
    flags = engine_flags(given)
    if given.backends is not None and flags:
        raise ConfigError.of(next(iter(flags)), "is for an engine in this process, and not for servers")
    with open_answers(given.output, {line.custom_id for line in lines}) as (file, answered):
        left = [line for line in lines if line.custom_id not in answered]
        with _Bar(len(lines), len(answered), is_shown=not given.quiet) as bar:
            counts = asyncio.run(_answer_all(given, flags, left, file, bar))
    refused = sum(count for status, count in counts.items() if status != 200)
    before = f", {len(answered)} of them before" if answered else ""
    print(f"{len(lines)} requests{before}: {counts.total() - refused} answered, {refused} refused", file=sys.stderr)
    return 1 if refused else 0


# ---- files ---------------------------------------------------------------------------------------------------------------


def read_requests(path: Path) -> list[BatchLine]:
    """The requests of a file. Raises `BatchError`, naming the line, for what is none, or has the id of another one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BatchError(f"{path} cannot be read: {error}") from error
    return list(read_lines(text.split("\n"), str(path)))


@contextmanager
def open_answers(path: Path, known: set[str]) -> Iterator[tuple[IO[bytes], set[str]]]:
    """The file of answers, open for more, and the ids that it has. A line that was not written to its end is cut off. Raises `BatchError`
    for a file of other requests."""
    try:
        file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 # the errors of what is done inside are others
    except OSError as error:
        raise BatchError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        yield file, _read_answers(file, path, known)


def _read_answers(file: IO[bytes], path: Path, known: set[str]) -> set[str]:
    answered: set[str] = set()
    whole = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            break
        whole += len(raw)
        try:
            identity = json.loads(raw)["custom_id"]
        except (ValueError, KeyError, TypeError):
            raise BatchError(f"{path}, line {number}: not an answer; the file is another one's") from None
        if identity not in known:
            raise BatchError(f"{path}, line {number}: answers {identity!r}, which is no request of this file")
        answered.add(identity)
    file.seek(whole)
    file.truncate()
    return answered


# ---- requests ------------------------------------------------------------------------------------------------------------


async def _answer_all(
    given: argparse.Namespace, flags: Mapping[str, Any], lines: Sequence[BatchLine], file: IO[bytes], bar: _Bar
) -> Counter[int]:
    """Returns how many answers have each status."""
    if not lines:
        return Counter()
    async with _servers(given, flags) as servers:
        return await answer_all(lines, servers, file, given.at_once, bar.add)


@asynccontextmanager
async def _servers(given: argparse.Namespace, flags: Mapping[str, Any]) -> AsyncIterator[list[HttpServer]]:
    if given.backends is not None:
        file = given.token_file
        token = os.environ.get(TOKEN_VARIABLE) or None if file is None else read_file("token_file", file).strip()
        yield [HttpServer(HttpConfig(address=url.strip(), token=token)) for url in given.backends.split(",")]
        return
    from aengine.server.app import Server

    async with engine_of(flags) as engine:
        server = Server(engine, port=None, http_port=0, chat_page=False, access_log=False)
        await server.start()
        await server.set_serving(True)
        try:
            yield [HttpServer(HttpConfig(address=f"http://{server.http_address}"))]
        finally:
            await server.stop()


async def answer_all(lines: Sequence[BatchLine], servers: Sequence[HttpServer], file: IO[bytes], at_once: int, done: Any) -> Counter[int]:
    """Write the answer to each of the lines, by whichever server has fewest under way. `done` is called with each status. Returns how many
    answers have each. Raises `ConnectionLostError` where no server can be reached any more."""
    counts: Counter[int] = Counter()
    under_way = dict.fromkeys(servers, 0)

    async def answer(line: BatchLine) -> int:
        status, request_id, body = await _ask(line, under_way)
        response = {"status_code": status, "request_id": request_id, "body": body}
        written = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
        file.write(json.dumps(written, ensure_ascii=False).encode() + b"\n")
        file.flush()
        counts[status] += 1
        return status

    await run_all([partial(answer, line) for line in lines], at_once, done)
    return counts


async def _ask(line: BatchLine, under_way: dict[HttpServer, int]) -> tuple[int, str, Any]:
    """The status, the id and the body of an answer. What may be answered later or elsewhere is sent again."""
    lost: set[HttpServer] = set()
    for number in range(MOST_TRIES):
        if lost.issuperset(under_way):
            lost.clear()
        server = min((one for one in under_way if one not in lost), key=under_way.__getitem__)
        under_way[server] += 1
        try:
            status, headers, body = await server.post(line.url.removeprefix("/v1"), line.body)
        except (ConnectionLostError, ServerError):
            if number == MOST_TRIES - 1:
                raise
            lost.add(server)
        else:
            if status not in _WAITS or number == MOST_TRIES - 1:
                return status, headers.get("x-request-id", ""), body
            with suppress(ValueError):
                await anyio.sleep(min(float(headers.get("retry-after", "0")), 60.0))
        finally:
            under_way[server] -= 1
        if lost.issuperset(under_way) or not lost:
            await anyio.sleep(min(0.1 * 2**number, 10.0))
    raise AssertionError("the last try returns or raises")


class _Bar:
    def __init__(self, total: int, initial: int, *, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown and sys.stderr.isatty():
            with suppress(ImportError):  # which comes with transformers
                from tqdm import tqdm  # type: ignore[import-untyped]

                self._bar = tqdm(total=total, initial=initial, unit=" requests", dynamic_ncols=True)
        self._refused = 0

    def add(self, status: int) -> None:
        """A request has its answer."""
        if self._bar is not None:
            self._refused += status != 200
            self._bar.set_postfix_str(f"{self._refused} refused" if self._refused else "", refresh=False)
            self._bar.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
