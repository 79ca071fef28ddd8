"""`AsyncClient`: an engine behind a gRPC server, used as if it were in this process. Loads neither torch nor transformers, and gRPC with
the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aengine.client.client_config import ClientConfig

if TYPE_CHECKING:
    from aengine.api.stream import TokenStream as ClientStream
    from aengine.client.client import AsyncClient

__all__ = ["AsyncClient", "ClientConfig", "ClientStream"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aengine.client' has no attribute {name!r}")
    if name == "ClientStream":  # the name from when clients had streams of their own
        from aengine.api.stream import TokenStream

        return TokenStream
    from aengine.client import client

    return getattr(client, name)
