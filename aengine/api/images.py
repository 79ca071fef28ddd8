"""Images in messages: the forms in which callers give them, and what they are sent as. Knows no pixels.

A part of a content is `{"type": "image", "image": ...}`, with the bytes of a file, its name or a `pathlib.Path`, a picture of PIL, a
`data:` URL, or a `RemoteImage`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aengine.api.errors import InvalidRequestError

_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that whoever serves the request is to fetch."""

    url: str


def image_file(image: Any) -> bytes:
    """The file of one of `images_of`. Raises `InvalidRequestError` (prompt) for one that cannot be read."""
    if isinstance(image, bytes):
        return image
    try:
        if isinstance(image, Path):
            return image.read_bytes()
        held = io.BytesIO()
        image.save(held, "PNG")
        return held.getvalue()
    except (OSError, ValueError) as error:
        raise InvalidRequestError.of("prompt", f"an image cannot be read: {error}") from None


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of a chat, in their order: the bytes of a file, a `pathlib.Path`, a picture of PIL, or a `RemoteImage` each. Raises
    `InvalidRequestError` (prompt).

    A part `{"type": "image", "image": ...}` of a content has any of these, the name of a file, or a `data:` URL.
    """
    found: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                found.append(read_image(part.get("image"), len(found)))
    return found


def read_image(value: Any, number: int) -> Any:
    if isinstance(value, str):
        if value[:5].lower() != "data:":
            return Path(value)
        try:
            return image_of_url(value)
        except ValueError as error:
            raise InvalidRequestError.of("prompt", f"image {number} {error}") from None
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, RemoteImage):
        return value
    if isinstance(value, bytes | Path) or (hasattr(value, "convert") and hasattr(value, "getexif")):
        return value
    raise InvalidRequestError.of(
        "prompt", f"image {number} is a {type(value).__name__}, not bytes, a path, a data: URL or a picture of PIL"
    )


def image_of_url(url: str) -> bytes | RemoteImage:
    """What a `data:` URL in base64 holds, or another URL to be fetched. Raises ValueError with what is wrong, as it goes on behind the name
    of an image."""
    if url[:5].lower() != "data:":
        return RemoteImage(url)
    head, comma, encoded = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError("is no URL such as data:image/png;base64,... with an image in base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError("is a data: URL whose base64 is not valid") from None


def url_of_image(data: bytes) -> str:
    """A `data:` URL with a file of an image."""
    kind = next((f"image/{name}" for signature, name in _SIGNATURES.items() if data.startswith(signature)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
