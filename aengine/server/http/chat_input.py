"""Chats of all APIs, as they come in: messages, their parts, tools, the choice of tools, the format of the response -> ours.

A message of ours is what chat templates take. What is refused is added to the violations under its path.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, POSITIVE, one_of, shown, text
from aengine.api.params import StructuredOutput
from aengine.api.request import DEFAULT_FPS, RemoteImage, Video, image_of_url, image_part
from aengine.chat.preparation import CHOICES
from aengine.server.http.bodies import LIST, OBJECT, STRING, TEXT_OR_OBJECT, Fields
from aengine.server.http.body_parameters import BodyParameters

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of OpenAI's, and those that templates know."""
TEXT_PARTS = ("text", "input_text", "output_text")
_IGNORED_IN_MESSAGES = ("refusal", "annotations", "audio", "function_call", "id", "status", "cache_control")
_CHOICES: Mapping[str, str] = {**{choice: choice for choice in CHOICES}, "any": "required"}
_TOOL_NAME = text("a name of 1 to 64 letters, digits, _ and -", r"[A-Za-z0-9_-]{1,64}")


def read_messages(given: Fields) -> list[dict[str, Any]]:
    """Read the field `messages` of OpenAI's chat completions; returns messages as chat templates take them."""
    if "messages" not in given:
        given.refuse("messages", "must be set")
    messages = [_read_message(fields) for fields in given.objects("messages")]
    name_results(messages)
    return messages


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give the results of tools the names of their tools, which some templates want."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _read_message(fields: Fields) -> dict[str, Any]:
    role = fields.need("role", one_of(*ROLES), "user")
    message: dict[str, Any] = {"role": ROLES[role]}
    fields.drop(_IGNORED_IN_MESSAGES)
    for name in ("reasoning", "reasoning_content"):
        if name in fields:
            message["reasoning_content"] = fields.take_field(name, STRING, "")
    if "tool_calls" in fields:
        message["tool_calls"] = [_read_call(call) for call in fields.objects("tool_calls")]
    message["content"] = "" if role == "assistant" and "content" not in fields else read_content(fields)
    if role == "tool":
        message["tool_call_id"] = fields.need("tool_call_id", STRING, "")
    return {**fields.rest(), **message}


def _read_call(fields: Fields) -> dict[str, Any]:
    fields.take_field("type", one_of("function"))
    identity = fields.need("id", STRING, "")
    function = fields.sub("function")
    if function is None:
        fields.refuse("function", "must be set")
        return call_of(identity, "", "{}")
    return call_of(identity, function.need("name", STRING, ""), function.take_field("arguments", STRING, "{}"))


def call_of(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the assistant. `arguments`: JSON; templates take an object, and what is none as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": value if isinstance(value, dict) else arguments}}


def read_content(given: Fields, name: str = "content") -> list[dict[str, Any]] | str:
    """A text, or its parts, which are text and images; without any, an empty string."""
    found = given.text_or_objects(name)
    if isinstance(found, str):
        return found
    return [read_part(fields) for fields in found] or ""


def read_part(fields: Fields, kind: str | None = None) -> dict[str, Any]:
    """Read a part of a content: a text, an image or a video, by the names of any API. `kind`: its type, where that was taken."""
    kind = fields.need("type", STRING, "text") if kind is None else kind
    if kind in TEXT_PARTS or kind == "refusal":
        return {"type": "text", "text": str(fields.need("refusal" if kind == "refusal" else "text", STRING, ""))}
    if kind == "image_url":  # of chat completions
        given = fields.need("image_url", TEXT_OR_OBJECT, "")
        return {"type": "image", "image": read_image_url(fields.within("image_url", given if isinstance(given, dict) else {"url": given}))}
    if kind == "input_image" and "file_id" not in fields:  # of responses
        return {"type": "image", "image": read_image_url(fields, "image_url")}
    if kind == "image":  # of Anthropic
        return {"type": "image", "image": _read_source(fields)}
    if kind == "video":  # frames, as in the API of Qwen
        return image_part(_read_video(fields))
    files = "; files are not kept here: send the image" if kind == "input_image" else ""
    fields.refuse("type", f"{shown(kind)} is not possible: there are text, images and video as frames{files}")
    return {"type": "text", "text": ""}


def read_image_url(fields: Fields, name: str = "url") -> bytes | RemoteImage:
    """Read the field `name`, a `data:` URL with an image or another one that the server may fetch; takes a `detail`, by which nothing
    changes."""
    fields.drop(("detail",))
    url = str(fields.need(name, STRING, ""))
    try:
        return image_of_url(url)
    except ValueError as error:
        fields.refuse(name, str(error))
    return b""


def _read_video(fields: Fields) -> bytes | Video:
    """Its frames, `data:` URLs in a list."""
    frames, fps = fields.need("video", LIST, ()), fields.take_field("fps", POSITIVE, DEFAULT_FPS)
    try:
        found = [image_of_url(frame) if isinstance(frame, str) else frame for frame in frames]
        return Video(found, fps)
    except InvalidRequestError as error:
        fields.refuse("video", error.violations[0].description)
    except ValueError as error:
        fields.refuse("video", f"a frame {error}")
    return b""


def _read_source(fields: Fields) -> bytes | RemoteImage:
    """The `source` of Anthropic's images."""
    source = fields.sub("source")
    if source is None:
        fields.refuse("source", "must be set")
        return b""
    match source.need("type", one_of("base64", "url"), ""):
        case "base64":
            source.drop(("media_type",))  # what it is shows by its content
            data = str(source.need("data", STRING, ""))
            try:
                return base64.b64decode(data, validate=True)
            except ValueError:
                source.refuse("data", "is not valid base64")
        case "url":
            return read_image_url(source)
    return b""


# ---- tools -------------------------------------------------------------------------------------------------------------


def read_tools(given: Fields, parameters: BodyParameters) -> list[dict[str, Any]]:
    """`tools` of OpenAI's chat completions, which templates take as they are. Those that are no functions are left out."""
    tools = []
    for fields in given.objects("tools"):
        kind = fields.need("type", STRING, "function")
        function = fields.sub("function")
        if kind != "function":
            parameters.leave_out_tool(kind)
        elif function is None:
            fields.refuse("function", "must be set")
        else:
            tools.append(read_function(function))
    return tools


def read_function(fields: Fields, schema: str = "parameters") -> dict[str, Any]:
    """A tool as templates take it, of its name, description and parameters, which are in the field `schema`."""
    function: dict[str, Any] = {"name": fields.need("name", _TOOL_NAME, "")}
    if function["name"] in CHOICES:
        fields.refuse("name", f"{function['name']!r} is a choice of tools, not the name of one")
    if "description" in fields:
        function["description"] = fields.take_field("description", STRING, "")
    function["parameters"] = fields.take_field(schema, OBJECT, {"type": "object", "properties": {}})
    fields.take_field("strict", FLAG)  # arguments of calls that are required always match
    return {"type": "function", "function": function}


def read_tool_choice(given: Fields) -> tuple[str, Collection[str] | None]:
    """`tool_choice` of OpenAI's chat completions, as `ChatOutputOptions` have it, and the names of the tools that are allowed; None for
    all."""
    choice = given.take_field("tool_choice", TEXT_OR_OBJECT, "auto")
    if not isinstance(choice, dict):
        return _CHOICES.get(choice, choice), None
    fields = Fields(choice, f"{given.path}tool_choice.", given.check)
    kind = fields.take_field("type", one_of("function", "allowed_tools"), "function")
    inner = fields.sub(kind)
    if inner is None:
        fields.refuse(kind, "must be set")
        return "auto", None
    return read_allowed(inner) if kind == "allowed_tools" else (str(inner.need("name", STRING, "")), None)


def read_allowed(fields: Fields) -> tuple[str, Collection[str]]:
    """The mode of a choice of OpenAI's that allows some tools, and their names."""
    mode = fields.need("mode", one_of("auto", "required"), "auto")
    tools = [tool if (function := tool.sub("function")) is None else function for tool in fields.objects("tools")]
    return mode, [tool.take_field("name", STRING, "") for tool in tools]


def allowed_of(tools: Sequence[dict[str, Any]], allowed: Collection[str] | None) -> list[dict[str, Any]]:
    """The tools whose names are among `allowed`; None: all of them."""
    return [tool for tool in tools if allowed is None or tool["function"]["name"] in allowed]


def read_response_format(fields: Fields, schema_in: str = "json_schema") -> StructuredOutput | None:
    """A format of a response: `type` is text, json_object or json_schema; `schema_in`: the object with the schema, "" for these fields
    themselves, where llama.cpp has it."""
    kind = fields.need("type", one_of("text", "json_object", "json_schema"), "text")
    if kind == "json_object" and "schema" not in fields:
        return StructuredOutput(json_object=True)
    if kind == "text":
        return None
    holder = fields if not schema_in or "schema" in fields else fields.sub(schema_in)
    if holder is None:
        fields.refuse(schema_in, "must be set")
        return None
    schema = holder.take_field("schema", OBJECT, {})
    try:
        return StructuredOutput(json_schema=schema)
    except InvalidRequestError as error:
        holder.refuse("schema", error.violations[0].description)
    return None
