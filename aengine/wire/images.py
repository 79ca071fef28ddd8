"""Images of prompts, in messages of the schema: written by clients, read by servers."""

from __future__ import annotations

from typing import Any

from aengine.api.fields import FieldChecks
from aengine.api.request import RemoteImage, image_file, image_of_url
from aengine.v1 import generation_pb2


def images_in(chat: generation_pb2.ChatPrompt) -> list[generation_pb2.Image]:
    """The images of a chat, in their order."""
    return [part.image for message in chat.messages for part in message.parts if part.HasField("image")]


def write_image(image: Any) -> generation_pb2.Image:
    if isinstance(image, RemoteImage):
        return generation_pb2.Image(url=image.url)
    return generation_pb2.Image(data=image_file(image))


def read_image(image: generation_pb2.Image, path: str, check: FieldChecks) -> bytes | RemoteImage:
    match image.WhichOneof("source"):
        case "data":
            return image.data
        case "url":
            try:
                return image_of_url(image.url)
            except ValueError as error:
                check.add_violation(f"{path}.url", str(error))
        case None:
            check.add_violation(path, "exactly one of data, url must be set")
    return b""
