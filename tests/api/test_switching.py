from __future__ import annotations

import sys
from collections.abc import Iterator

import anyio
import pytest
from oracle_engine import OracleEngine

from aengine import SamplingParams
from aengine.api.runtime import SWITCH_INTERVAL, switch_often
from aengine.bench import cli
from aengine.server import process
from aengine.server.config.settings import read_settings


@pytest.fixture(autouse=True)
def python_default() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(interval)


def test_an_embedded_engine_leaves_the_interval_alone() -> None:
    async def run() -> None:
        async with OracleEngine() as engine:
            assert sys.getswitchinterval() == 0.005
            await engine.generate([1], SamplingParams(seed=1, max_tokens=2))
        assert sys.getswitchinterval() == 0.005

    anyio.run(run)


def test_a_shorter_one_stays() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL / 2)
    switch_often()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL / 2)


def test_the_server_shortens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*configs: object) -> int:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
        return 7

    monkeypatch.setattr(process, "run", run)
    assert process.run_process(read_settings({"uvloop": "off"}, {})) == 7


def test_the_benchmark_shortens_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["latency", "--model", "/no/such/model"]) == 1
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
