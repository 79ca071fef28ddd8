"""The address that a server listens on."""

from __future__ import annotations

from aengine.api.errors import AEngineError


class BindError(AEngineError):
    """The server cannot listen on an address."""


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
