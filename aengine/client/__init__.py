"""`AsyncClient`: an engine behind a gRPC server, used as if it were in this process. Loads neither torch nor transformers."""

from aengine.client.client import AsyncClient
from aengine.client.config import ClientConfig
from aengine.client.stream import ClientStream

__all__ = ["AsyncClient", "ClientConfig", "ClientStream"]
