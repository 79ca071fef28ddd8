"""Chats as outputs: answers, reasoning and calls of tools, told apart in the text of a stream."""

from __future__ import annotations

from aengine.chat.formats import ChatFormat
from aengine.chat.parser import ChatParser
from aengine.chat.preparation import ChatOutputOptions, ChatStream, PreparedChat, prepare_chat, stream_chat
from aengine.chat.text_source import ArgumentsDelta, CallEnded, CallStarted, ChatMessage, ContentDelta, Event, ReasoningDelta, ToolCall

__all__ = [
    "ArgumentsDelta",
    "CallEnded",
    "CallStarted",
    "ChatFormat",
    "ChatMessage",
    "ChatOutputOptions",
    "ChatParser",
    "ChatStream",
    "ContentDelta",
    "Event",
    "PreparedChat",
    "ReasoningDelta",
    "ToolCall",
    "prepare_chat",
    "stream_chat",
]
