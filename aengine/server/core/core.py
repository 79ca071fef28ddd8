"""What the doors of one server share."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from aengine.api.engine import ServedEngine
from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import Authenticator
from aengine.server.core.backend import Backend
from aengine.server.core.decoding import Decoding
from aengine.server.core.in_flight import Admission, CallsInFlight
from aengine.server.core.records import Observers
from aengine.server.core.texts import Texts

logger = logging.getLogger(__name__)
MAX_LOGGED = 256


class Core:
    """Serves `engine` by no door of its own. Must be made, used and closed in one event loop."""

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.serving = False  # what health says
        self.admission = Admission(config.max_sequences_per_caller, config.max_waiting_tokens_per_caller)
        self.observers = Observers()  # of calls and generations
        self.authenticator = Authenticator(config)
        self.calls = CallsInFlight(config.max_calls, config.stall_seconds)
        names = tuple(dict.fromkeys(config.served_model_name))
        self.backend = Backend(engine, self.admission, self.observers, config.max_message_bytes, served_names=names)
        self.texts = Texts(engine)
        self.decoding = Decoding(config.max_decoding_bytes, config.max_decoding_bytes_per_caller)
        self.metrics: CollectorRegistry | None = None  # to be read in other threads; None until a door shows them
        self._logged: set[str] = set()

    def log_ignored(self, ignored: Mapping[str, str]) -> None:
        """What a request asked for and did not get, and why. Each is logged once, of the first `MAX_LOGGED`."""
        for what, why in ignored.items():
            if what not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(what)
                logger.info("ignored from now on: %s (%s)", what, why)
