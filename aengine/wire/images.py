"""Images of prompts, in messages of the schema: written by clients, read by servers."""

from __future__ import annotations

from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.request import DEFAULT_FPS, NamedImage, RemoteImage, Video, image_file, image_of_url
from aengine.v1 import generation_pb2


def images_in(chat: generation_pb2.ChatPrompt) -> list[generation_pb2.Image]:
    """The images of a chat, in their order."""
    return [part.image for message in chat.messages for part in message.parts if part.HasField("image")]


def write_image(image: Any) -> generation_pb2.Image:
    if isinstance(image, NamedImage):
        image = image.image
    if isinstance(image, RemoteImage):
        return generation_pb2.Image(url=image.url)
    if isinstance(image, Video):
        return generation_pb2.Image(frames=generation_pb2.Frames(images=map(write_image, image.frames), per_second=image.fps))
    return generation_pb2.Image(data=image_file(image))


def read_image(image: generation_pb2.Image, path: str, check: FieldChecks) -> bytes | RemoteImage | Video:
    match image.WhichOneof("source"):
        case "data":
            return image.data
        case "url":
            try:
                return image_of_url(image.url)
            except ValueError as error:
                check.add_violation(f"{path}.url", str(error))
        case "frames":
            return _read_frames(image.frames, f"{path}.frames", check)
        case None:
            check.add_violation(path, "exactly one of data, url, frames must be set")
    return b""


def _read_frames(frames: generation_pb2.Frames, path: str, check: FieldChecks) -> bytes | Video:
    of_frames = enumerate(frames.images)
    found = [b"" if image.HasField("frames") else read_image(image, f"{path}.images[{index}]", check) for index, image in of_frames]
    if any(image.HasField("frames") for image in frames.images):
        check.add_violation(f"{path}.images", "a frame is no video")
    try:
        return Video(found, frames.per_second if frames.HasField("per_second") else DEFAULT_FPS)
    except InvalidRequestError as error:
        check.add_violation(path, error.violations[0].description)
    return b""
