"""Ranks of other hosts, which here are other processes or threads, and connections that are none."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import SECONDS, STAND_IN, driving

from aengine import __version__
from aengine.api.errors import ConfigError, ModelLoadError, RankDiedError
from aengine.parallel import join
from aengine.parallel.channel import Channel, ChannelClosedError
from aengine.parallel.follower import run_worker
from aengine.parallel.join import JoinError, accept_ranks, free_port, join_driver, listen, read_secret
from aengine.parallel.messages import FRAME, Hello, Log, Message, Refused, encode

SECRET = b"a secret of ranks"


class Waiting:
    """A driver that waits for ranks, in a thread."""

    def __init__(self, wanted: set[int]) -> None:
        self.port = listen("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port.getsockname()[1]}"
        self.joined: dict[int, Channel] = {}
        self._thread = threading.Thread(target=self._main, args=(wanted,))
        self._thread.start()

    def _main(self, wanted: set[int]) -> None:
        with self.port:
            for rank, channel, hello in accept_ranks(self.port, SECRET, wanted, __version__, lambda: None):
                assert (hello.host, hello.pid) == (socket.gethostname(), os.getpid())
                self.joined[rank] = channel

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=SECONDS)

    def prove(self) -> Channel:
        """A connection that has shown that it knows the secret, and has said nothing else."""
        stream = self.connect()
        theirs = stream.recv(1 << 10).removeprefix(join._GREETING)
        stream.sendall(bytes(join._NONCE) + join._proof(SECRET, b"rank", theirs, bytes(join._NONCE)))
        assert stream.recv(1 << 10) == join._proof(SECRET, b"driver", bytes(join._NONCE), theirs)
        return Channel(stream, "the driver")

    def join(self, rank: int = 1, secret: bytes = SECRET, version: str = __version__) -> Channel:
        return join_driver(self.address, secret, rank, version)

    def finish(self) -> None:
        """All have joined."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def waiting() -> Iterator[Callable[..., Waiting]]:
    made: list[Waiting] = []

    def start(wanted: set[int]) -> Waiting:
        made.append(Waiting(wanted))
        return made[-1]

    yield start
    for one in made:
        one.finish()
        for channel in one.joined.values():
            channel.close()


def hear(stream: socket.socket) -> bytes:
    """Everything until the other side closes the connection."""
    data = b""
    try:
        while piece := stream.recv(1 << 12):
            data += piece
    except ConnectionResetError:
        pass  # it did not read all that was sent
    return data


def test_ranks_join_in_any_order(waiting: Callable[..., Waiting]) -> None:
    driver = waiting({1, 2, 3})
    channels = {rank: driver.join(rank) for rank in (3, 1, 2)}
    driver.finish()
    for rank, channel in channels.items():
        driver.joined[rank].send(Log(20, f"to {rank}"))
        assert channel.receive(SECONDS) == Log(20, f"to {rank}")
        assert channel.peer_host == "127.0.0.1"
        channel.close()
    with pytest.raises(JoinError, match=r"there is no driver at 127\.0\.0\.1:"):
        join_driver(driver.address, SECRET, 1, __version__, seconds=0.0)


def test_connections_without_the_secret_disturb_nobody(waiting: Callable[..., Waiting], caplog: pytest.LogCaptureFixture) -> None:
    driver = waiting({1})
    silent = [driver.connect() for _ in range(join.MOST_STRANGERS + 10)]
    gone = driver.connect()
    gone.close()
    for data in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
        b"\0" * 64,
        encode(Hello(1, __version__, "", 1)) * 2,
        os.urandom(1 << 16),
    ):
        with driver.connect() as stream:
            stream.sendall(data)
            assert len(hear(stream)) in (0, len(join._GREETING) + join._NONCE)  # nothing behind the greeting
    with pytest.raises(JoinError, match="the driver closed the connection: the secrets differ, or it waits for no more ranks"):
        driver.join(secret=b"another secret of ranks")
    channel = driver.join()
    driver.finish()
    assert list(driver.joined) == [1]
    channel.close()
    for stream in silent:
        stream.close()
    assert "a connection from 127.0.0.1 is refused: it does not know the secret" in caplog.messages
    assert "a connection from 127.0.0.1 is refused: too many others come after it" in caplog.messages


def test_connections_that_say_nothing_are_closed(waiting: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "ANSWER_SECONDS", 0.01)
    driver = waiting({1})
    with driver.connect() as stream:
        assert len(hear(stream)) == len(join._GREETING) + join._NONCE
    monkeypatch.undo()
    driver.join().close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(1, "0.0.1", "h", 1), f"its version of aengine is 0.0.1, the driver's is {__version__}"),
        (Hello(4, __version__, "h", 1), "the ranks of other hosts are 2, 3"),
        (Hello(0, __version__, "h", 1), "the ranks of other hosts are 2, 3"),
        (Hello(3, __version__, "h", 1), "there is such a rank already"),
        (Log(20, "hello"), "it did not begin with its rank"),
    ],
)
def test_ranks_that_do_not_fit_are_told_why(waiting: Callable[..., Waiting], hello: Message, reason: str) -> None:
    driver = waiting({2, 3})
    driver.join(3)
    channel = driver.prove()
    channel.send(hello)
    assert channel.receive(SECONDS) == Refused(reason)
    driver.join(2)


def test_a_rank_that_knows_the_secret_and_sends_rubbish(waiting: Callable[..., Waiting], caplog: pytest.LogCaptureFixture) -> None:
    driver = waiting({1})
    channel = driver.prove()
    channel.send_frame(FRAME.pack(2**32 - 1, 0))
    with pytest.raises(ChannelClosedError):
        channel.receive(SECONDS)
    driver.join()
    said = "a connection from 127.0.0.1 is refused: the rank at 127.0.0.1 sent what is no message: a message of 4294967295 bytes is longer"
    assert any(message.startswith(said) for message in caplog.messages)


def test_what_answers_may_be_no_driver() -> None:
    def answer(data: bytes) -> None:
        stream, _ = port.accept()
        with stream:
            stream.sendall(data)
            hear(stream)

    for data, said in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no driver of this version: it says b'HTTP/1.1 400 Ba'"),
        (join._GREETING + bytes(64), "has another secret"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as port:
            thread = threading.Thread(target=answer, args=(data,))
            thread.start()
            with pytest.raises(JoinError, match=said):
                join_driver(f"127.0.0.1:{port.getsockname()[1]}", SECRET, 1, __version__)
            thread.join()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "JOIN_SECONDS", 0.0)
    with listen("127.0.0.1:0") as port, pytest.raises(ModelLoadError, match=r"rank 2 did not join at 127.0.0.1:\d+ within 0 s"):
        list(accept_ranks(port, SECRET, {2, 3}, __version__, lambda: None))


def test_secrets_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"rank_secret_file: '.*/secret' cannot be read: No such file or directory"):
        read_secret(str(path))
    path.write_text("short\n")
    with pytest.raises(ConfigError, match=r"has 5 bytes; a secret has at least 16"):
        read_secret(str(path))
    path.write_bytes(SECRET + b"\n")
    assert read_secret(str(path)) == SECRET
    with listen("127.0.0.1:0") as port, pytest.raises(ConfigError, match=r"rank_address: '127.0.0.1:\d+' cannot be listened on: Address"):
        listen(f"127.0.0.1:{port.getsockname()[1]}")
    listen("[::1]:0").close()
    listen(":0").close()


def worker(*arguments: str, what: str = "", **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(STAND_IN), what, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_bytes(SECRET)
    return str(tmp_path / "secret")


def test_a_rank_of_another_host_takes_steps(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    port = free_port()
    options: dict[str, Any] = {"rank_address": f"127.0.0.1:{port}", "rank_secret_file": secret}
    environment = {"RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "AENGINE_RANK_SECRET_FILE": secret}
    with worker(**environment) as process:
        with driving(num_ranks=3, local_ranks=2, **options) as driver:
            assert driver.ranks.num_local == 2
            assert driver.ranks.exchange_fd is None
            driver.step()
            assert not socket.socket().connect_ex(driver.ranks.store)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(SECONDS) == 0
    assert "rank 2: did 1 steps" in caplog.messages
    assert "rank 2 INFO did 1 steps" in said


def test_a_rank_of_another_host_is_killed(secret: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = worker(f"--driver={address}", "--rank=1", f"--secret-file={secret}")
    with process, driving(rank_address=address, rank_secret_file=secret) as driver:
        process.kill()
        error = driver.failure()
        assert isinstance(error, RankDiedError)
        assert (error.rank, error.pid) == (1, None)
        assert re.match(rf"rank 1 \(host {socket.gethostname()}\) (closed the connection|is gone: .*); its last log lines:\n", str(error))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("what", "expected"), [("", "the driver is gone: the driver at 127.0.0.1:"), ("deaf", "told to give up")])
def test_the_driver_of_another_host_is_gone(secret: str, what: str, expected: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = worker(f"--driver={address}", "--rank=1", f"--secret-file={secret}", what=what)
    with process, driving(rank_address=address, rank_secret_file=secret) as driver:
        driver.ranks.close(at_once=True)
        assert process.stderr is not None
        assert expected in process.stderr.read()
        assert process.wait(SECONDS) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: --driver, --rank, --secret-file"),
        (["--driver=host"], "argument --driver: 'host' is not an address host:port"),
        (["--rank=0"], "argument --rank: '0' is not an integer >= 1"),
        (["--driver=127.0.0.1:1", "--rank=1", "--secret-file=none"], "aengine-worker: rank_secret_file: 'none' cannot be read"),
        (["--driver=127.0.0.1:1", "--rank=1", "--secret-file=none", "--model=nowhere"], "aengine-worker: model: 'nowhere' does not exist"),
        (
            ["--driver=127.0.0.1:1", "--rank=1", f"--secret-file={__file__}", "--timeout=0"],
            "aengine-worker: there is no driver at 127.0.0.1:1",
        ),
    ],
)
def test_what_is_wrong_with_a_command_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = run_worker(arguments, {}, lambda ranks: None)
    except SystemExit as exit:
        code = exit.code
    assert code in (1, 2)
    assert said in capsys.readouterr().err


def test_a_connection_to_itself_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may choose the port that is connected to for this end, where nobody listens on it."""
    address = "127.0.0.1", free_port()
    made: list[socket.socket] = []

    def connect_to_itself(*given: object, **fields: object) -> socket.socket:
        stream = socket.socket()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stream.bind(address)
        stream.connect(address)
        made.append(stream)
        return stream

    class EnoughError(Exception):
        pass

    def check() -> None:
        if made:
            raise EnoughError

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    with pytest.raises(EnoughError):
        join_driver(f"{address[0]}:{address[1]}", SECRET, 1, __version__, check=check)
    assert made[0].fileno() == -1, "it is closed, so that the driver can listen"
