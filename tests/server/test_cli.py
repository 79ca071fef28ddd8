"""The `aengine-grpc` process: flags, the line that tells the address, signals, exit codes."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from certificates import make_certificates
from grpc import aio
from grpc_harness import failure_of, stream_request
from hang_guard import HANG_SECONDS
from server_process import COMMAND, server_process
from slow_cases import slow_but

import aengine
from aengine.server.cli import build_parser, main
from aengine.server.config.options import GROUPS
from aengine.server.config.settings import GRPC, HTTP, ServerProgram, options, read_settings
from aengine.v1.generation_pb2 import FINISH_REASON_MAX_TOKENS
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize("program", [GRPC, HTTP])
def test_the_help_begins_with_the_model_and_ten_options(program: ServerProgram) -> None:
    parser = build_parser(program)
    text = parser.format_help()
    assert text.startswith(f"usage: {program.name} [MODEL] ")
    shown = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    known = [option.flag for option in options(program)]
    ten = [flag for flag in shown if flag in known]
    assert len(ten) == 10
    assert ten[:4] == ["--host", "--port", "--served-model-name", "--token-file"]
    whole = build_parser(program, whole=True).format_help()
    assert [flag for flag in re.findall(r"^  (--[\w-]+)", whole, re.MULTILINE) if flag in known][:10] == ten


def test_the_rest_is_behind_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help-all"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == build_parser(whole=True).format_help()


def test_the_model_is_an_argument_or_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["x/y"], ["--model", "x/y"], ["--port", "0", "x/y"], ["x/y", "--port", "0"]):
        assert main(["--check", *flags]) == 0
        assert '\nmodel = "x/y"  # --model\n' in capsys.readouterr().out
    for flags in (["x/y", "--model", "demo"], ["--model", "x/y", "--model", "demo"], ["x/y", "--models", "demo"]):
        assert main(["--check", *flags]) == 0
        shown = capsys.readouterr().out
        assert '\nmodel = "x/y"  # --model\n' in shown
        assert '\nmodels = {"demo" = ""}  # --models\n' in shown
    with pytest.raises(SystemExit):
        main(["x/y", "demo"])
    assert "error: unrecognized argument demo\n" in capsys.readouterr().err


def test_the_help_tells_every_option_by_group() -> None:
    parser = build_parser(whole=True)
    text = " ".join(parser.format_help().split())
    assert "Tokens per KV page: a power of two, 1..256. (default: 16; AENGINE_PAGE_SIZE)" in text
    for option in options():
        assert f"{option.flag}" in text
        assert option.variable in text
    assert {group.title for group in parser._action_groups} >= {*GROUPS.values(), "engine"}


def test_help_does_not_load_torch_or_grpc() -> None:
    code = "import sys; from aengine.server.cli import build_parser; build_parser().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_SECONDS).stdout.split()
    assert not {"torch", "grpc", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    slow_but(
        lambda case: case[0][0] == "--page-size" or "--model" in case[0],
        [
            (["--page-size", "3"], "--page-size: 3 is not a power of two in [1, 256]"),
            (["--port", "x"], "--port: 'x' is not an integer"),
            (["--host", "0.0.0.0"], "--host: '0.0.0.0' can be reached from elsewhere"),
            (["--port", "0", "--token-file", "/no/such/file"], "--token-file: cannot read /no/such/file: No such file or directory"),
            (["--port", "0", "--model", "/no/such/model"], "model directory '/no/such/model' does not exist"),
            (["--device", "cuda:77"], "--device: "),
        ],
    ),
)
def test_a_failed_start_is_one_sentence_and_exit_code_1(flags: list[str], sentence: str) -> None:
    result = run(*flags)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"aengine-grpc: {sentence}")


def test_an_unknown_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--prot", "1"])
    assert caught.value.code == 2
    assert "unrecognized argument --prot; the nearest is --port" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"aengine {aengine.__version__}\n"


class TestCheck:
    """--check looks at what can be looked at, without the model."""

    @pytest.fixture
    def tokens(self, tmp_path: Path) -> Path:
        path = tmp_path / "tokens"
        path.write_text("alice s3cret-of-alice\n")
        return path

    def test_prints_a_configuration_that_can_be_used(
        self, tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = make_certificates(tmp_path)
        monkeypatch.setenv("AENGINE_TENANT_WEIGHTS", "a=2,b=0.5")
        flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(files.client_ca)]
        flags += ["--token-file", str(tokens), "--admin-client-names", "x,y", "--metrics-port", "9", "--insecure", "--seed", "7"]
        assert main(["--check", *flags]) == 0
        printed = capsys.readouterr().out
        assert "s3cret" not in printed
        assert "metrics_port = 9  # --metrics-port" in printed
        assert 'tenant_weights = {"a" = 2.0, "b" = 0.5}  # AENGINE_TENANT_WEIGHTS' in printed
        path = tmp_path / "printed.toml"
        path.write_text(printed)
        monkeypatch.delenv("AENGINE_TENANT_WEIGHTS")
        again = read_settings({}, {}, str(path))
        assert (again.server.admin_client_names, again.server.metrics_port, again.engine.seed) == (("x", "y"), 9, 7)
        assert again.engine.tenant_weights == {"a": 2.0, "b": 0.5}
        assert again.engine.max_model_len is None
        assert again.router is None

    def test_prints_that_of_a_router(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for flags, tables in (
            (["--backends", "a:1,b:2"], ["[server]", "[router]"]),
            (["--ray", "--threads", "2"], ["[server]", "[engine]", "[router]", "[ray]"]),
        ):
            assert main(["--check", *flags]) == 0
            path = tmp_path / "printed.toml"
            path.write_text(printed := capsys.readouterr().out)
            assert [line for line in printed.splitlines() if line.startswith("[")] == tables
            assert read_settings({}, {}, str(path)).router is not None

    @pytest.mark.parametrize(
        ("flag", "content", "sentence"),
        [
            ("--token-file", "", "it holds no token"),
            ("--token-file", "one two three", "line 1 is not `name token` or `token`"),
            ("--admin-token-file", "ok\nt\u00f6ken", "line 2: a token consists of visible ASCII characters"),
            ("--model", "", "is a file"),
        ],
    )
    def test_names_a_file_that_is_wrong(
        self, flag: str, content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "file"
        path.write_text(content)
        assert main(["--check", flag, str(path)]) == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert sentence in told.err
        assert str(path) in told.err

    def test_a_key_must_be_that_of_the_certificate(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mine, other = tmp_path / "mine", tmp_path / "other"
        mine.mkdir()
        other.mkdir()
        mine_files, other_files = make_certificates(mine), make_certificates(other)
        assert main(["--check", "--tls-cert", str(mine_files.cert), "--tls-key", str(other_files.key)]) == 1
        assert "--tls-cert: " in capsys.readouterr().err
        mine_files.client_ca.write_text("nonsense")
        flags = ["--tls-cert", str(mine_files.cert), "--tls-key", str(mine_files.key), "--tls-client-ca", str(mine_files.client_ca)]
        assert main(["--check", *flags]) == 1
        assert "--tls-client-ca: " in capsys.readouterr().err

    @pytest.mark.slow
    def test_uvloop_must_be_there_where_it_is_asked_for(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["--check", "--uvloop", "auto"]) == 0
        assert main(["--check", "--uvloop", "on"]) == 1
        assert "--uvloop: 'on' needs the package uvloop" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.anyio
async def test_sigterm_drains() -> None:
    """What runs is finished, what comes is refused, the exit code is 0. A second server cannot have the port meanwhile."""
    with server_process() as server:
        port = server.address.rpartition(":")[2]
        async with aio.insecure_channel(server.address) as channel:
            stub = GenerationServiceStub(channel)
            request = stream_request()
            request.spec.stopping.ignore_eos = True
            request.spec.stopping.max_tokens = 300
            call = stub.StreamGenerate(request)
            await anext(aiter(call))
            second = await asyncio.to_thread(run, "--port", port)
            assert second.returncode == 1
            assert (
                second.stderr.strip()
                == f"aengine-grpc: cannot listen on 127.0.0.1:{port}: the address is in use or not one of this machine"
            )

            request.spec.stopping.max_tokens = 600
            long_call = stub.StreamGenerate(request)
            await anext(aiter(long_call))
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for, "draining")
            with pytest.raises(aio.AioRpcError) as caught:
                await anext(aiter(stub.StreamGenerate(request)))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            responses = [response async for response in call]
            finished = [response.event.sequence_finished for response in responses if response.event.HasField("sequence_finished")]
            assert (finished[0].num_tokens, finished[0].finish.reason) == (300, FINISH_REASON_MAX_TOKENS)
            assert [response async for response in long_call][-1].event.HasField("finished")
        assert await asyncio.to_thread(server.end) == 0
        assert "stopped" in server.log[-1]


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_second_signal_ends_what_runs() -> None:
    with server_process("--drain-seconds", "600", "--uvloop", "off") as server:
        async with aio.insecure_channel(server.address) as channel:
            request = stream_request()
            request.spec.stopping.ignore_eos = True
            call = GenerationServiceStub(channel).StreamGenerate(request)
            await anext(aiter(call))
            server.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(server.wait_for, "draining 1 requests")
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(server.end) == 0


DOOMED = """
import sys
from aengine.runner.runner import ModelRunner
from aengine.server.cli import main

def launch(self, plan, original=ModelRunner.launch):
    if plan.step == 5:
        raise RuntimeError("the device is on fire")
    return original(self, plan)

ModelRunner.launch = launch
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_dead_engine_ends_its_streams_and_the_process() -> None:
    with server_process(program=(sys.executable, "-c", DOOMED)) as server:
        async with aio.insecure_channel(server.address) as channel:
            request = stream_request()
            request.spec.stopping.ignore_eos = True
            received = []

            async def read() -> None:
                async for event in GenerationServiceStub(channel).StreamGenerate(request):
                    received.append(event)

            with pytest.raises(aio.AioRpcError) as caught:
                await read()
        failure = failure_of(caught.value)
        code = grpc.StatusCode.ABORTED if received else grpc.StatusCode.UNAVAILABLE  # where nothing came it may be sent elsewhere
        assert (failure.code, failure.reason) == (code, "ENGINE_DEAD")
        assert await asyncio.to_thread(server.end) == 1
        assert "aengine-grpc: the step thread died: RuntimeError: the device is on fire" in server.log[-1]


SIGNALLED = """
import signal, sys
from aengine.engine import async_engine
from aengine.server.cli import main

def load_model(config, check, fail, original=async_engine.load_model):
    signal.raise_signal(signal.SIGTERM)
    return original(config, check)

async_engine.load_model = load_model
sys.exit(main(["--port", "0"]))
"""


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_the_process() -> None:
    result = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert result.returncode == 0, result.stderr
    assert "SIGTERM" in result.stderr
    assert "listening" not in result.stderr
    assert "loading was cancelled: the engine is closed" in result.stderr, "the process waits for the thread that loads"


STUCK = """
import signal, sys, threading, time
from aengine.engine import async_engine
from aengine.server.cli import main

def load_model(config, check, fail):
    signal.raise_signal(signal.SIGTERM)
    while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.01)
    signal.raise_signal(signal.SIGTERM)
    threading.Event().wait()

async_engine.load_model = load_model
sys.exit(main(["--port", "0"]))
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_process_whose_loading_cannot_be_left() -> None:
    result = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert result.returncode == -signal.SIGTERM
    assert "Traceback" not in result.stderr
