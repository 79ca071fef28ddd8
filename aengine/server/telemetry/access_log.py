"""The access log: a line for each call when it is over. Never holds a prompt, an answer or a token of a caller."""

from __future__ import annotations

import logging

from aengine.server.calls.records import CallRecord, GenerationRecord
from aengine.server.telemetry.logs import FIELDS

logger = logging.getLogger("aengine.access")


class AccessLog:
    """An `Observer`."""

    def on_call_end(self, record: CallRecord) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "method": record.method,
            "code": record.code.name,
            "reason": record.reason,
            "ms": round(record.seconds * 1000, 1),
            "request_id": record.request_id,
            "trace_id": record.trace_id,
            "principal": record.caller.name,
            "peer": record.peer,
            "messages": record.messages_sent,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
        }
        # What does not apply is left out; a count of messages always does.
        told = {name: value for name, value in fields.items() if value or name in ("ms", "messages")}
        logger.info("call", extra={FIELDS: told})

    def on_generation_end(self, record: GenerationRecord) -> None:
        pass  # its tokens are counted in the record of its call
