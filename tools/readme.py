"""Runs the commands of README's console blocks, in their order: python3 tools/readme.py

It needs nothing but the environment `.venv` that `make demo` leaves. A server goes on in the background, on a free port, until all is run.
`make test` is not run, but looked at.
"""

from __future__ import annotations

import random
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
"""A command that takes longer hangs."""


@dataclass(frozen=True)
class Shown:
    """A command of README and the output that it shows there, which may be none."""

    command: str
    output: str

    @property
    def is_server(self) -> bool:
        return re.search(r"aengine(-| )(serve|grpc) ", self.command) is not None


def shown_commands(text: str) -> list[Shown]:
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        Shown(command, output) for block in blocks for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def run_all(commands: list[Shown], programs: Path) -> None:
    """`programs`: what stands in place of `.venv/bin`. Raises RuntimeError for a command that fails, or prints something else."""
    ports: dict[str, str] = {}
    with ExitStack() as servers:
        for shown in commands:
            command = shown.command.replace(".venv/bin", str(programs))
            for port in re.findall(r"(?:--port |:)(\d{4,5})\b", command):
                command = command.replace(port, ports.setdefault(port, _free_port()))
            print(f"$ {command}", flush=True)
            if shown.is_server:
                servers.enter_context(_server(command))
            else:
                _check_shape(shown, _output(command))


def _output(command: str) -> str:
    words = shlex.split(command)
    if words[:2] == ["make", "test"]:
        words.insert(1, "--dry-run")
    if words[0] == "curl":
        words += ["--fail", "--silent", "--show-error"]
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{command} exits with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(done.stdout if words[0] != "make" else done.stdout[-1000:], flush=True)
    return done.stdout


def _check_shape(shown: Shown, told: str) -> None:
    """The last line has the form that README shows; what a model writes differs with the machine, and so do figures."""
    if shown.output and not shown.command.startswith("make test"):
        wanted, got = (_shape(text.strip().splitlines()[-1]) for text in (shown.output, told))
        if wanted != got:
            raise RuntimeError(f"{shown.command} ends with {got!r}, and not as README shows: {wanted!r}")
    if "curl" in shown.command and '"text"' not in told:
        raise RuntimeError(f"{shown.command} does not complete the prompt: {told}")


def _shape(line: str) -> str:
    """Without figures; and where a text is drawn, it may end before its limit."""
    return re.sub(r"[\d.,]+", "0", line).replace("[EOS", "[MAX_TOKENS")


@contextmanager
def _server(command: str) -> Iterator[None]:
    """Runs it from when it listens."""
    process = subprocess.Popen(shlex.split(command), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        log: list[str] = []
        for line in process.stderr:
            log.append(line)
            if " listening on " in line:
                print(line, end="", flush=True)
                break
        else:
            raise RuntimeError(f"{command} does not listen:\n{''.join(log)}")
        yield
    finally:
        process.terminate()
        _, rest = process.communicate()
        watchdog.cancel()
    if process.returncode:
        raise RuntimeError(f"{command} exits with {process.returncode}:\n{rest}")


def _free_port() -> str:
    """One that nobody gets who asks for any."""
    while True:
        port = random.randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


if __name__ == "__main__":
    try:
        run_all(shown_commands((ROOT / "README.md").read_text(encoding="utf-8")), ROOT / ".venv" / "bin")
    except RuntimeError as error:
        sys.exit(f"README: {error}")
