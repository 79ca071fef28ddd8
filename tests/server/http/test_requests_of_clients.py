"""What programs of others send: each request is answered. It was recorded from them, with long texts cut and ids blanked; that of Zed is
made by the types of its source."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from chat_engine import TURN, ChatEngine
from http_harness import Serving, serving_http

pytestmark = pytest.mark.anyio

REQUESTS = {
    f"{path.stem}-{number}": request
    for path in sorted((Path(__file__).parent / "requests").glob("*.json"))
    for number, request in enumerate(json.loads(path.read_text(encoding="utf-8")))
}


@pytest.fixture(scope="module")
async def serve() -> AsyncIterator[Serving]:
    async with serving_http(ChatEngine(TURN), limit=None) as serve:
        yield serve


@pytest.mark.parametrize("request_of_client", REQUESTS.values(), ids=REQUESTS)
async def test_the_request_is_answered(serve: Serving, request_of_client: dict[str, Any]) -> None:
    response = await serve.post(request_of_client["path"], request_of_client["body"])
    assert response.status_code == 200, response.text
