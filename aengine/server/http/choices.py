"""The choices of a whole response as JSON, one by one: with logprobs all of them can take seconds, and more bytes than may be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aengine.server.core.errors import ServiceError
from aengine.server.http.errors import to_json


async def write_choices(
    response: Mapping[str, Any], choices: Iterable[Callable[[], dict[str, Any]]], *, apart: bool, max_bytes: int
) -> bytes:
    """`response`, with what `choices` give. `apart`: they are built in a thread, since they are large. Raises `ServiceError`
    (ANSWER_TOO_LARGE)."""
    written, num_bytes = [], 0
    for build in choices:
        choice = await asyncio.to_thread(lambda build=build: to_json(build())) if apart else to_json(build())  # type: ignore[misc]
        num_bytes += len(choice)
        if num_bytes > max_bytes:
            raise ServiceError("ANSWER_TOO_LARGE", f"the answer takes more than {max_bytes} bytes in one message")
        written.append(choice)
    return to_json(response)[:-1] + b',"choices":[' + b",".join(written) + b"]}"
