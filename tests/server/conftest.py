"""gRPC belongs to asyncio; what the tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from grpc_loop import ASYNCIO
from speculating import speculation as speculation


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return ASYNCIO


@pytest.fixture
def over_a_router() -> Iterator[None]:
    """The server serves a router, and the engine is behind that."""
    from grpc_harness import OVER_A_ROUTER  # not where tests without gRPC are collected

    token = OVER_A_ROUTER.set(True)
    yield
    OVER_A_ROUTER.reset(token)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
