"""Both sides of the same promises: an engine in this process, and a client of a server that it is behind."""

from __future__ import annotations

import pytest
from grpc_loop import ASYNCIO
from speculating import speculation as speculation


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return ASYNCIO
