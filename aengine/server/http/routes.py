"""The paths of the HTTP door."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aengine.server.core.core import Core
from aengine.server.http import anthropic, chat_completions, completions, embeddings, models, responses
from aengine.server.http import models as texts
from aengine.server.http.boundary import Route
from aengine.server.http.errors import ANTHROPIC
from aengine.server.http.exchange import Exchange
from aengine.server.http.models import ChatPage

TABLE: tuple[tuple[str, str, Callable[[Core, Exchange], Awaitable[None]]], ...] = (
    ("POST", "/v1/chat/completions", chat_completions.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/responses/input_tokens", responses.input_tokens),
    ("POST", "/v1/embeddings", embeddings.embeddings),
    ("GET", "/v1/models", models.models),
    ("GET", "/v1/models/{model}", models.model),
    *(("POST", f"{prefix}/tokenize", texts.tokenize) for prefix in ("", "/v1")),
    *(("POST", f"{prefix}/detokenize", texts.detokenize) for prefix in ("", "/v1")),
    ("GET", "/tokenizer_info", texts.tokenizer_info),
    ("GET", "/version", models.version),
    ("GET", "/load", models.load),
    ("GET", "/metrics", models.metrics),
)
POLLED = ("/load", "/metrics")
ANTHROPIC_TABLE = (
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
)


def routes(core: Core) -> list[Route]:
    """All routes of the HTTP door, which serve `core`."""
    found = [Route(verb, path, partial(handler, core), is_polled=path in POLLED) for verb, path, handler in TABLE]
    found += [Route(verb, path, partial(handler, core), errors=ANTHROPIC) for verb, path, handler in ANTHROPIC_TABLE]
    found.append(Route("GET", "/health", partial(models.health, core), is_apart=True))
    if core.config.chat_page:
        page = ChatPage()
        found.append(Route("GET", "/", page, is_public=True))
        found.append(Route("GET", "/static/{file}", page, is_public=True, is_polled=True))
    return found
