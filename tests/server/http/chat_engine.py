"""An engine without a model that chats: what it writes is a script, with calls as Hermes writes them and reasoning in `<think>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fake_engine import INFO, FakeEngine, FakeStream, tokens

from aengine.api.outputs import FinishReason, ModelInfo, RenderedChat

TOOL = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bath"}}</tool_call>'
TURN = f"<think>\nWhere is it?\n</think>\n\nI shall look.{CALL}"
PROMPT = [1, 2, 3]


class ChatEngine(FakeEngine):
    """`messages` and `fields` are those of the last chat."""

    def __init__(self, text: str = "", reason: FinishReason = FinishReason.EOS, stop: str | None = None) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.fields: dict[str, Any] = {}
        self.write(text, reason, stop)

    def write(self, text: str, reason: FinishReason = FinishReason.EOS, stop: str | None = None) -> None:
        """What the next outputs are, cut into three characters each."""
        self.script = list(tokens(*[text[i : i + 3] for i in range(0, len(text), 3)], "", reason=reason))
        if stop is not None:
            self.script[-1] = replace(self.script[-1], stop_reason=stop)  # type: ignore[type-var]

    @property
    def model_info(self) -> ModelInfo:
        return replace(INFO, call_format="hermes", reasoning_format="think")

    def stream(self, *args: Any, **fields: Any) -> FakeStream:
        """One whose tokens are read one by one."""
        stream = super().stream(*args, **fields)
        read = stream.read
        stream.read = lambda most: read(1)  # type: ignore[method-assign]
        return stream

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> RenderedChat:
        self.messages, self.fields = [dict(message) for message in messages], fields
        return RenderedChat("a prompt")

    async def tokenize(self, text: str, **fields: Any) -> list[int]:
        return PROMPT
