"""What is served and how it does: `/v1/models`, `/health`, `/load`, `/metrics`, `/version`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import aengine
from aengine.outputs import ModelInfo
from aengine.server.core.backend import require_model
from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError, draining
from aengine.server.http.exchange import Exchange

_STARTED = int(time.time())


async def health(core: Core, exchange: Exchange) -> None:
    """200 while requests are served."""
    if core.admission.closed:
        raise draining()
    if not core.serving or not core.engine.healthy:
        raise ServiceError("NOT_READY", "the engine does not take requests")
    await exchange.respond_json({"status": "ok"})


async def models(core: Core, exchange: Exchange) -> None:
    """The model, and its adapters: what OpenAI's clients read, and what Anthropic's do."""
    info = core.engine.model_info
    names = [info.name, *(adapter.name for adapter in core.engine.adapters)]
    data = [_model(info, name) for name in names]
    await exchange.respond_json({"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def model(core: Core, exchange: Exchange) -> None:
    info, _ = require_model(core.engine, exchange.rest)
    await exchange.respond_json(_model(info, exchange.rest))


def _model(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "aengine",
        "root": info.name,
        "parent": None if name == info.name else info.name,
        # Ours.
        "max_model_len": info.max_model_len,
        "chat_template": info.chat_template,
        # Anthropic's.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(_STARTED, timezone.utc).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": info.max_model_len,
        "max_tokens": info.max_model_len,
    }


async def version(core: Core, exchange: Exchange) -> None:
    """Of this package."""
    await exchange.respond_json({"version": aengine.__version__})


async def load(core: Core, exchange: Exchange) -> None:
    """The engine's statistics."""
    await exchange.respond_json({"draining": core.admission.closed, **asdict(core.engine.stats())})


async def metrics(core: Core, exchange: Exchange) -> None:
    """In Prometheus' text format."""
    assert core.metrics is not None
    text = await asyncio.to_thread(generate_latest, core.metrics)
    await exchange.respond(text, content_type=CONTENT_TYPE_LATEST.encode())
