from __future__ import annotations

import pytest
from speculating import speculation as speculation


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
