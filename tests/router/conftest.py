"""A router belongs to asyncio."""

from __future__ import annotations

import pytest
from grpc_loop import ASYNCIO


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return ASYNCIO
