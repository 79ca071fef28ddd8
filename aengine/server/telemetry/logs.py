"""How log lines look, text or one JSON object a line, and the access log. What else is logged is up to the others.

A record may carry fields beside its message: `logger.info("call", extra={FIELDS: {"code": "OK"}})`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime, timezone

from aengine.server.config.options import ServerConfig
from aengine.server.core.calls_in_flight import CallRecord

FIELDS = "aengine_fields"
_PLAIN = re.compile(r"[\w./:@+\[\]%-]+", re.ASCII)

access_logger = logging.getLogger("aengine.access")


class TextFormatter(logging.Formatter):
    """`2026-11-21 02:12:46,272 INFO message name=value ...`; values with other characters than those of words are quoted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join((line, *(f"{name}={_word(value)}" for name, value in getattr(record, FIELDS, {}).items())))


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-11-21T02:12:46.272Z", "level": "INFO", "logger": "aengine.server", "message": ..., name: value, ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_call(record: CallRecord) -> None:
    """A line of the access log, at level DEBUG for what is polled. Never holds a prompt, an output or a token of a caller."""
    level = logging.DEBUG if record.is_polled and not record.reason else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "method": record.method,
        "code": record.code,
        "reason": record.reason,
        "ms": round(record.seconds * 1000, 1),
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "principal": record.caller.name,
        "peer": record.peer,
        "messages": record.messages_sent,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "draft_tokens": record.draft_tokens,
        "accepted_draft_tokens": record.accepted_draft_tokens,
    }
    # Fields that do not apply are left out.
    shown = {name: value for name, value in fields.items() if value or name in ("ms", "messages")}
    access_logger.log(level, "call", extra={FIELDS: shown})


def configure_logging(config: ServerConfig) -> None:
    """Send the log of the whole process to stderr, as the configuration says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    handler.addFilter(is_fit)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


def is_fit(record: logging.LogRecord) -> bool:
    """Whether a record may be shown. gRPC reports metadata that are not UTF-8, tokens among them, with their bytes and a traceback."""
    raised = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc.") and isinstance(raised, UnicodeDecodeError))


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
