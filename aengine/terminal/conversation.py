"""`Conversation`: the messages of a chat, in exchanges that can be taken back and asked again. Knows neither an engine nor files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aengine.api.errors import AEngineError
from aengine.api.request import read_messages

Message = dict[str, Any]
"""As chat templates take them."""


class CommandError(AEngineError):
    """What the user asked for is not possible. The message is one sentence."""


class Conversation:
    """`exchanges`: each a message of the user and what followed it, up to the answer. `unanswered`: the exchange that has no answer yet."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.exchanges: list[list[Message]] = []
        self.unanswered: list[Message] = []
        self.images: list[str] = []  # of the next question, as `data:` URLs

    @property
    def messages(self) -> list[Message]:
        """All messages in order, as the model sees them: the system's, the exchanges, and the unanswered one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for exchange in (*self.exchanges, self.unanswered) for message in exchange]

    @property
    def text(self) -> str:
        """For models without a chat template: what was said, one message per line."""
        return "\n".join(map(_text_of, self.messages))

    def ask(self, text: str) -> None:
        """Begin an exchange, with the images that were added. One that got no answer is dropped."""
        images = [{"type": "image", "image": image} for image in self.images]
        self.images = []
        self.unanswered = [{"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}]

    def add_calls(self, message: Message, results: Sequence[str]) -> None:
        """Add a message of the assistant that calls tools, with their results. The exchange goes on."""
        calls = message["tool_calls"]
        tools = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        self.unanswered += [message, *tools]

    def answer(self, message: Message) -> None:
        """Add the answer to the unanswered exchange, which joins the others."""
        self.exchanges.append([*self.unanswered, message])
        self.unanswered = []

    def retry(self) -> str:
        """Take the last answer back, so that its question is unanswered; returns the question."""
        if not self.unanswered:
            self.unanswered = self._last()
            self.exchanges.pop()
        del self.unanswered[1:]
        return _text_of(self.unanswered[0])

    def undo(self) -> str:
        """Take the last exchange back; returns its question."""
        question = _text_of(self._last()[0])
        self.exchanges.pop()
        self.unanswered = []
        return question

    def clear(self) -> None:
        """Forget everything but the system's message."""
        self.exchanges, self.unanswered, self.images = [], [], []

    def to_json(self) -> str:
        return json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """What `to_json` wrote, or another list of messages. Raises `CommandError`, or `InvalidRequestError` for what is no message."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"this is not JSON: {error}") from None
        if not isinstance(value, list):
            raise CommandError("this is no list of messages")
        messages = value
        if value:
            read_messages(value)
            for message in messages:
                for part in message["content"] if isinstance(message["content"], list) else ():
                    if part["type"] == "image" and not str(part.get("image")).startswith("data:"):
                        raise CommandError("an image in it is no data: URL")
        found = cls()
        if messages and messages[0]["role"] == "system":
            found.system = _text_of(messages.pop(0))
        for message in messages:
            if message["role"] == "user":
                found.exchanges.append([message])
            elif not found.exchanges:
                raise CommandError(f"the first message has role {message['role']!r}, and not system or user")
            else:
                found.exchanges[-1].append(message)
        if found.exchanges and found.exchanges[-1][-1]["role"] != "assistant":
            found.unanswered = found.exchanges.pop()
        return found

    def _last(self) -> list[Message]:
        if not self.exchanges:
            raise CommandError("nothing was asked yet")
        return self.exchanges[-1]


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "[image] ") for part in content or ())
