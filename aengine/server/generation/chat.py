"""A conversation of the schema as the tokenizer takes it. Knows nothing of templates."""

from __future__ import annotations

from typing import Any

from aengine.errors import FieldViolation
from aengine.requests import MAX_CHAT_MESSAGES
from aengine.v1.generation_pb2 import ChatPrompt


def read_chat(chat: ChatPrompt, path: str, violations: list[FieldViolation]) -> list[dict[str, Any]]:
    """What is wrong is added to `violations`, under paths that begin with `path`. Whether there are messages is for the caller to say."""
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        violations.append(FieldViolation(f"{path}.messages", f"{len(chat.messages)} messages are more than {MAX_CHAT_MESSAGES}"))
    messages = chat.messages[:MAX_CHAT_MESSAGES]
    for index, message in enumerate(messages):
        if not message.role:
            violations.append(FieldViolation(f"{path}.messages[{index}].role", "must not be empty"))
    return [{"role": message.role, "content": message.content} for message in messages]
