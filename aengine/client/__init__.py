"""`AsyncClient`: an engine behind a gRPC server, used as if it were in this process. Loads neither torch nor transformers."""

from aengine.client.client import AsyncClient, ClientStream
from aengine.client.config import ClientConfig

__all__ = ["AsyncClient", "ClientConfig", "ClientStream"]
