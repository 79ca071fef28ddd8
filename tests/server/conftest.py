"""gRPC belongs to asyncio; what the tests here share."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
