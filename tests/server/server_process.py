"""`aengine-grpc` as a process of its own, with the demo model on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hang_guard import HANG_SECONDS

COMMAND = (sys.executable, "-m", "aengine.server.cli")
LISTENING = re.compile(r"aengine-grpc listening on (127\.0\.0\.1:\d+) \(model demo\)")
CHILD = "INFO replica "
"""In the lines that a router repeats of a replica's log."""


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    address: str
    log: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> None:
        """Read the log up to the first line with `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} is not in the log: {''.join(self.log)}")

    def cpu_seconds(self) -> float:
        """The processor time of all its threads, to 10 ms: how long it worked, however busy the machine is."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        """Wait for the exit code, with the rest of the log."""
        _, rest = self.process.communicate(timeout=HANG_SECONDS)
        self.log.append(rest)
        return self.process.returncode


@contextmanager
def server_process(*flags: str, program: Sequence[str] = COMMAND, listening: re.Pattern[str] = LISTENING) -> Iterator[ServerProcess]:
    command = [*program, "--port", "0", "--kv-cache-memory", str(64 * 1024 * 1024), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        server = ServerProcess(process, "")
        while (match := listening.search(server.log[-1] if server.log else "")) is None or CHILD in server.log[-1]:
            server.wait_for("listening")
        server.address = match[1]
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
