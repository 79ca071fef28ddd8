"""What the doors of one server share."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from aengine.protocols import ServedEngine
from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import Authenticator
from aengine.server.core.backend import Backend
from aengine.server.core.in_flight import Admission, CallsInFlight
from aengine.server.core.records import Observers
from aengine.server.core.texts import Texts


class Core:
    """Serves `engine` by no door of its own. Must be made, used and closed in one event loop."""

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.serving = False  # what health says
        self.admission = Admission()
        self.observers = Observers()  # of calls and generations
        self.authenticator = Authenticator(config)
        self.calls = CallsInFlight(config.max_calls, config.stall_seconds)
        self.backend = Backend(engine, self.admission, self.observers, config.max_message_bytes)
        self.texts = Texts(engine)
        self.metrics: CollectorRegistry | None = None  # to be read in other threads; None until a door shows them
