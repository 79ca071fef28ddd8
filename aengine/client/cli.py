"""`aengine-client`: one prompt to a server, its output to stdout as it comes.

Owns the process: flags, signals, what is written where. The text goes to stdout, everything about it to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import anyio

from aengine.api.errors import ConfigError
from aengine.api.outputs import FinishReason
from aengine.api.params import SamplingParams
from aengine.api.request import Prompt, RequestOptions
from aengine.chat.text_source import CallEnded, CallStarted
from aengine.client.client import AsyncClient
from aengine.client.client_config import (
    DEFAULT_ADDRESS,
    INTERRUPTED,
    ClientConfig,
    add_server_flags,
    client_config,
    exit_code,
    http_fields,
    is_url,
    read_file,
    read_json,
    read_stdin,
)

_PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def main(arguments: Sequence[str] | None = None, name: str = "aengine-client") -> int:
    """Returns the exit code: 0 for a completion, 1 for an error, 130 after Ctrl-C. `name`: what the program is called."""
    parser = build_parser(name)
    options = parser.parse_args(arguments)
    if options.info == (options.prompt is not None):
        parser.error("give a prompt, or --info")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC core would report a lost connection beside our own message
    return exit_code(name, partial(_run, options))


def build_parser(name: str = "aengine-client") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description="Stream the output of a server to stdout. Ctrl-C cancels the request.")
    parser.add_argument("prompt", nargs="?", help="the text to go on from; - reads it from stdin")
    parser.add_argument("--info", action="store_true", help="print one line about the model that the server serves, without a prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="with --chat: an image before the prompt; may be repeated"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message before it")
    parser.add_argument("--tools", metavar="FILE", help="with --chat: a JSON file with the list of tools that the model may call")
    variables = """with --chat: variables for the model's chat template, such as '{"enable_thinking": false}'"""
    parser.add_argument("--template-kwargs", metavar="JSON", help=variables)
    parser.add_argument("--stats", action="store_true", help="over gRPC: also report how busy the server is, when the output is complete")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    request = parser.add_argument_group("request", "The defaults are the model's.")
    request.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate (default: the rest of the context)")
    request.add_argument("--temperature", type=float, metavar="T", help="0 to 100; 0 always takes the most likely token")
    request.add_argument("--top-p", type=float, metavar="P", help="more than 0, at most 1")
    request.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    request.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same output")
    request.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    request.add_argument("--timeout", type=float, metavar="SECONDS", help="end with what there is after this time")
    request.add_argument("--adapter", metavar="NAME", help="one of the server's adapters")
    server = parser.add_argument_group("server")
    add_server_flags(server, DEFAULT_ADDRESS)
    server.add_argument("--model", metavar="NAME", help="over HTTP: the model to ask for (default: the first that the server lists)")
    server.add_argument("--resume", dest="auto_resume", action="store_true", help="over gRPC: resume the stream if the connection is lost")
    return parser


def _run(options: argparse.Namespace) -> int:
    params, request = {name: getattr(options, name) for name in _PARAMS}, _read_options(options)
    sampling, prompt = SamplingParams(**params), _read_prompt(options)
    if is_url(options.address):
        for name in ("stats", "auto_resume"):
            if getattr(options, name):
                raise ConfigError.of("resume" if name == "auto_resume" else name, "is possible over gRPC alone")
        return asyncio.run(_until_interrupted(partial(_ask_over_http, options, params, prompt, request)))
    if options.model is not None:
        raise ConfigError.of("model", "is for servers over HTTP: over gRPC there is one model, and --adapter")
    config = client_config(options, auto_resume=options.auto_resume)
    return asyncio.run(_until_interrupted(partial(_ask, options, config, prompt, sampling, request)))


async def _until_interrupted(ask: Callable[[], Awaitable[None]]) -> int:
    """Returns the exit code. The first Ctrl-C cancels the request."""
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, scope.cancel)
        await ask()
    return INTERRUPTED if scope.cancelled_caught else 0


async def _ask(options: argparse.Namespace, config: ClientConfig, prompt: Prompt, params: SamplingParams, request: RequestOptions) -> None:
    async with AsyncClient(config) as client:
        if options.info:
            print(client.model_info.describe())
        else:
            facts = await _print_stream(client, prompt, params, request)
            if not options.quiet:
                print(facts, file=sys.stderr)
        if options.stats:
            load = await client.load()
            pages = f"{load.pages_used} of {load.pages_total} pages in use"
            print(f"[server: {load.running} running, {load.waiting} waiting, {load.parked} parked, {pages}]", file=sys.stderr)


async def _ask_over_http(options: argparse.Namespace, params: dict[str, Any], prompt: Prompt, request: RequestOptions) -> None:
    from aengine.client.openai import HttpConfig, OpenAIClient

    client = OpenAIClient(HttpConfig(**http_fields(options)), options.model)
    await client.start()
    if options.info:
        print(client.model.describe())
        return
    fields = {name: value for name, value in params.items() if value not in (None, [])}
    fields |= {name: value for name in ("timeout", "template_kwargs", "adapter") if (value := getattr(request, name)) is not None}
    start, times = time.monotonic(), []
    stream = client.chat(prompt, fields, request.tools) if options.chat else client.complete(str(prompt), fields)  # type: ignore[arg-type]
    async with aclosing(stream):
        async for event in stream:
            times.append(time.monotonic())
            if isinstance(event, CallStarted):
                print(f"{event.name} ", end="")
            elif not isinstance(event, CallEnded):
                print(event.text, end="", flush=True)
    print(flush=True)
    if not options.quiet:
        reason = stream.finish_reason
        print(_facts(reason, stream.usage.completion_tokens or len(times), start, times), file=sys.stderr)


async def _print_stream(client: AsyncClient, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> str:
    """Write the output to stdout; returns the facts about it."""
    start = time.monotonic()
    times: list[float] = []
    async with client.stream(prompt, params, options) as stream:
        async for token in stream:
            if token.token_id >= 0:
                times.append(time.monotonic())
            print(token.text, end="", flush=bool(token.text))
    print(flush=True)
    facts = _facts(stream.completion().finish_reason, len(times), start, times)
    if stream.usage.drafts:
        facts = f"{facts[:-1]}, {stream.usage.accepted_draft_tokens} of {stream.usage.draft_tokens} drafts right]"
    return facts


def _facts(reason: FinishReason | None, num_tokens: int, start: float, times: Sequence[float]) -> str:
    """`times`: when tokens, or pieces of the text, came."""
    facts = [reason.name if reason is not None else "NOTHING", f"{num_tokens} tokens"]
    if times:
        facts.append(f"first after {(times[0] - start) * 1000:.0f} ms")
    if num_tokens > 1 and len(times) > 1:
        facts.append(f"{(num_tokens - 1) / max(times[-1] - times[0], 1e-9):.0f} tok/s after it")
    return f"[{', '.join(facts)}]"


def _read_prompt(options: argparse.Namespace) -> Prompt:
    text = read_stdin() if options.prompt == "-" else options.prompt or ""
    if not options.chat:
        for name in ("system", "image"):
            if getattr(options, name):
                raise ConfigError.of(name, "is possible with --chat")
        return text
    images = [{"type": "image", "image": path} for path in options.image]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}]
    return messages if options.system is None else [{"role": "system", "content": options.system}, *messages]


def _read_options(options: argparse.Namespace) -> RequestOptions:
    tools = None if options.tools is None else read_json("tools", read_file("tools", options.tools))
    template_kwargs = None if options.template_kwargs is None else read_json("template_kwargs", options.template_kwargs)
    return RequestOptions(timeout=options.timeout, tools=tools, template_kwargs=template_kwargs, adapter=options.adapter)


if __name__ == "__main__":
    sys.exit(main())
