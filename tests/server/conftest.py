"""gRPC belongs to asyncio; what the tests here share."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from grpc_loop import ASYNCIO
from speculating import speculation as speculation


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return ASYNCIO


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
