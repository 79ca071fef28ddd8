"""The process that decodes files of images: run as a program by `ImageDecoder`, which speaks with it over its standard input and output.

Decoders of image formats are where hostile files do harm, so they run here: with limits of memory and of processor time, and without
the right to open files. Imports nothing of the package, so that it starts quickly.

A message in is a length of 8 bytes, big-endian, and a file. A message out is a JSON object in a line, and then the pixels [height,
width, 3] if it has a width. `to_rgb` also serves images that a program has in memory.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from contextlib import suppress
from typing import Any, BinaryIO

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEMORY = 1 << 31  # bytes of addresses, beside those that the process begins with
_SECONDS = 10  # of processor time, for a file


_MODULES = (
    *("GifImagePlugin", "JpegImagePlugin", "MpoImagePlugin", "PngImagePlugin", "TiffImagePlugin", "WebPImagePlugin"),
    *("ExifTags", "ImageChops", "ImageFile", "ImageMath", "ImageMode", "ImageOps", "ImagePalette", "ImageSequence", "TiffTags"),
)
"""What Pillow imports when it meets some file."""


class BadImage(Exception):
    """The file is no image that is taken; the argument says what it is, as a sentence goes on behind "it"."""


def check_size(width: int, height: int, max_pixels: int, max_side: int) -> None:
    """Raises BadImage."""
    if not (1 <= width <= max_side and 1 <= height <= max_side) or width * height > max_pixels:
        limit = f"each side is in [1, {max_side}], and they are at most {max_pixels} pixels"
        raise BadImage(f"is {width} by {height} pixels; {limit}")


def to_rgb(image: Any) -> Any:
    """The picture as it is looked at: turned as EXIF says, alpha over white. `image` and the result are PIL images."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        under = Image.new("RGBA", image.size, (255, 255, 255, 255))
        under.alpha_composite(image)
        image = under
    return image.convert("RGB")


def decode(data: bytes, max_pixels: int, max_side: int) -> Any:
    """The first frame of a file as a PIL image. Raises BadImage."""
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(*image.size, max_pixels, max_side)
            image.load()
            return to_rgb(image)
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImage(f"is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Exception:  # whatever a decoder raises; its text may hold addresses
        raise BadImage("is broken: it cannot be decoded to its end") from None


def _confine() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    for limit, most in ((resource.RLIMIT_AS, used + _MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _allow_seconds() -> None:
    with suppress(ImportError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + _SECONDS, most))


def _serve(source: BinaryIO, out: BinaryIO, max_pixels: int, max_side: int) -> None:
    while len(head := source.read(8)) == 8:
        data = source.read(int.from_bytes(head, "big"))
        _allow_seconds()
        pixels = b""
        try:
            image = decode(data, max_pixels, max_side)
            said: dict[str, Any] = {"width": image.width, "height": image.height}
            pixels = image.tobytes()
            del image
        except BadImage as refused:
            said = {"refused": refused.args[0]}
        except MemoryError:
            said = {"refused": "takes more memory than a picture may"}
        out.write(json.dumps(said).encode() + b"\n")
        out.write(pixels)
        out.flush()


def main() -> None:
    from PIL import Image

    for name in _MODULES:
        importlib.import_module(f"PIL.{name}")  # before files cannot be opened any more
    buffer = io.BytesIO()
    for kind in FORMATS:
        buffer.seek(0)
        Image.new("RGB", (8, 8)).save(buffer, kind)
        decode(buffer.getvalue(), 64, 8)
    _confine()
    _serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
