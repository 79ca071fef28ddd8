"""The `aengine-grpc` process: flags, the line that tells the address, signals, exit codes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import fields

import grpc
import pytest
from grpc import aio
from grpc_harness import events_of, failure_of, stream_request
from server_process import COMMAND, TIMEOUT, server_process

from aengine.config import EngineConfig
from aengine.server.cli import build_parser
from aengine.v1.generation_pb2 import FINISH_REASON_MAX_TOKENS
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=TIMEOUT)


def config_of(*flags: str) -> dict[str, object]:
    """What the flags say about the engine."""
    options = vars(build_parser().parse_args(flags))
    return {field.name: options[field.name] for field in fields(EngineConfig) if field.name in options}


def test_every_field_of_the_config_is_a_flag_with_its_docstring() -> None:
    assert config_of() == {"model": "demo"}  # what is not given is left to the config
    text = " ".join(build_parser().format_help().split())
    assert "Tokens per KV page: a power of two, 1..256. (default: 16)" in text
    assert all(f"--{field.name.replace('_', '-')}" in text for field in fields(EngineConfig))


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--revision", "v1"], "revision", "v1"),
        (["--max-model-len", "64"], "max_model_len", 64),
        (["--max-queued-requests", "none"], "max_queued_requests", None),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-cache"], "enable_prefix_cache", False),
        (["--tenant-weights", "a=2,b=0.5"], "tenant_weights", {"a": 2.0, "b": 0.5}),
    ],
)
def test_flags_have_the_types_of_their_fields(flags: list[str], name: str, value: object) -> None:
    given = config_of(*flags)
    assert given == {"model": "demo", name: value}
    assert getattr(EngineConfig(**given), name) == value  # type: ignore[arg-type]


def test_help_does_not_load_torch_or_grpc() -> None:
    code = "import sys; from aengine.server.cli import build_parser; build_parser().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT).stdout.split()
    assert not {"torch", "grpc", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--page-size", "3"], "aengine-grpc: --page-size: 3 is not a power of two in [1, 256]"),
        (["--port", "0", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_failed_start_is_one_sentence_and_exit_code_1(flags: list[str], sentence: str) -> None:
    result = run(*flags)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("aengine-grpc: ")
    assert sentence in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--port", "x"],
        ["--drain-seconds", "-1"],
        ["--no-such-flag"],
        ["--page-size", "x"],
        ["--tenant-weights", "a=x"],
    ],
)
def test_a_wrong_flag_is_a_usage_error(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


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


@pytest.mark.anyio
async def test_the_second_signal_ends_what_runs() -> None:
    with server_process("--drain-seconds", "600") as server:
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
from aengine.runner.model_runner import ModelRunner
from aengine.server.cli import main

def launch(self, plan, original=ModelRunner.launch):
    if plan.step == 5:
        raise RuntimeError("the device is on fire")
    return original(self, plan)

ModelRunner.launch = launch
sys.exit(main())
"""


@pytest.mark.anyio
async def test_a_dead_engine_ends_its_streams_and_the_process() -> None:
    with server_process(program=(sys.executable, "-c", DOOMED)) as server:
        async with aio.insecure_channel(server.address) as channel:
            request = stream_request()
            request.spec.stopping.ignore_eos = True
            with pytest.raises(aio.AioRpcError) as caught:
                await events_of(GenerationServiceStub(channel).StreamGenerate(request))
        failure = failure_of(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "ENGINE_DEAD")
        assert await asyncio.to_thread(server.end) == 1
        assert "aengine-grpc: the step thread died: RuntimeError: the device is on fire" in server.log[-1]


SIGNALLED = """
import signal, sys
from aengine.engine import async_engine
from aengine.server.cli import main

def load_model(config, original=async_engine.load_model):
    signal.raise_signal(signal.SIGTERM)
    return original(config)

async_engine.load_model = load_model
sys.exit(main(["--port", "0"]))
"""


def test_a_signal_while_the_model_loads_ends_the_process() -> None:
    result = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    assert "SIGTERM" in result.stderr
    assert "listening" not in result.stderr
