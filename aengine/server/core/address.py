"""The address that a server listens on."""

from __future__ import annotations

from aengine.errors import AEngineError


class BindError(AEngineError):
    """An address cannot be bound."""


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
