from __future__ import annotations

import pytest
from speculating import speculation as speculation


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a test has both, drafts are tried in one loop, and are slow in the other: no loop knows of them."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and (callspec.params.get("speculation"), callspec.params.get("anyio_backend")) == ("drafts", "trio"):
            item.add_marker(pytest.mark.slow)
