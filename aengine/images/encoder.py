"""`ImageEncoder`: images of prompts to what a model computes with, once for each image.

Owns the thread in which files become pixels, pixels the inputs of a tower, and these rows; the order of the work; and the cache, which is
bounded in bytes and keyed by what decides the rows: the pixels, their size, and whether the image is alone. Knows nothing of prompts.
"""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError, InvalidRequestError
from aengine.api.request import Video
from aengine.images.decoder import MAX_PIXELS, MAX_SIDE, ImageDecoder, ImageError, Pixels
from aengine.images.decoding_process import BadImage, check_size, to_rgb
from aengine.models.choice import AnySpec
from aengine.models.images import Grid, ImageInput
from aengine.models.spec import ModelSpec

if TYPE_CHECKING:
    from aengine.images.processor import ImageProcessor, ProcessedImage
    from aengine.images.tower import Tower

ImageSource = Any
"""The bytes of a file, its path (`pathlib.Path`), a picture of PIL, or a `Video`."""
MAX_FILE_BYTES = 20 << 20
MAX_REQUEST_BYTES = 64 << 20
MAX_REQUEST_PIXELS = 100_000_000
_CPU_TOKENS, _GPU_TOKENS = 1024, 4096  # that an image has at most, where the model can make it smaller
_TOGETHER = 8  # images that a GPU encodes at a time; a CPU is busy with one
_NICENESS = 15
_REMEMBERED = 4096  # files, and texts of images, which are small
_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class ImageText:
    """What a prompt says of an image."""

    digest: bytes
    text: str  # in place of the placeholder that a chat template writes
    placeholder: str
    token_id: int  # of the text's tokens that are of the image
    num_tokens: int  # of these
    grid: Grid | None  # of these, where the model gives them positions by it


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """What a model computes an image's tokens with. It does not change."""

    said: ImageText
    rows: Tensor  # [k, hidden_size], in host memory
    additions: Tensor | None  # [layers, k, hidden_size], as of `PromptImages`

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.additions is None else self.additions.nbytes)


T = TypeVar("T")


@dataclass(slots=True)
class _Job(Generic[T]):
    """The images of one request."""

    sources: Sequence[ImageSource]
    future: Future[tuple[T, ...]]
    step: Callable[[_Image], T]
    images: list[_Image] = field(default_factory=list)  # those that are read
    found: list[T] = field(default_factory=list)


@dataclass(slots=True)
class _Image:
    digest: bytes
    num_pixels: int
    num_bytes: int  # of its file
    pixels: Pixels | None  # [height, width, 3], of a video [frames, ...]; None: it is known, and is read again if it is not any more
    source: ImageSource
    alone: bool


def find_image_input(config: EngineConfig, spec: AnySpec, has_tokenizer: bool) -> ImageInput | None:
    """What the engine does with images; None: it takes none. One that is divided over several processes takes none."""
    if not isinstance(spec, ModelSpec) or not config.max_images or not has_tokenizer or config.num_ranks > 1:
        return None
    return spec.images


def make_encoder(
    config: EngineConfig, described: ImageInput, model_dir: pathlib.Path, dtype: torch.dtype, device: torch.device
) -> ImageEncoder:
    """`dtype` and `device`: of the model. Nothing is loaded before the first image."""
    most = config.image_max_tokens or (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS)

    def load() -> tuple[ImageProcessor, Tower]:
        from aengine.images.processor import ImageProcessor
        from aengine.images.tower import Tower

        return ImageProcessor(model_dir, most, described), Tower(model_dir, config.load_format, dtype, device, config.seed)

    together = 1 if device.type == "cpu" else _TOGETHER
    return ImageEncoder(load, config.image_cache_memory, alone_differs=described.alone_differs, most_together=together)


class ImageEncoder:
    """`encode` and `close` may be called from any thread."""

    def __init__(
        self, load: Callable[[], tuple[ImageProcessor, Tower]], cache_bytes: int, *, alone_differs: bool = False, most_together: int = 1
    ) -> None:
        """`load` is called in the thread, with the first image. `alone_differs`: as of `ImageInput`. `most_together`: images of different
        requests that are encoded together, if they have the same size."""
        self._load, self._alone_differs, self._most_together = load, alone_differs, most_together
        self._loaded: tuple[ImageProcessor, Tower] | None = None
        self._decoder = ImageDecoder()
        self._encoded: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._cache_bytes, self._left = cache_bytes, cache_bytes
        self._said: OrderedDict[bytes, ImageText] = OrderedDict()
        self._processed: tuple[ImageText, ProcessedImage] | None = None  # the image that was processed last
        self._ahead: dict[bytes, EncodedImage] = {}  # that were encoded together with others, before their turns
        self._files: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # digests -> of their pixels, and how many these are
        self._jobs: deque[_Job[Any]] = deque()
        self._lock = threading.Lock()  # of the jobs and of what is encoded
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "aengine-images", _come_last)
        self.num_encoded = 0
        """Images that the tower has run for."""

    def describe(self, sources: Sequence[ImageSource]) -> Future[tuple[ImageText, ...]]:
        """What a prompt says of its images, in their order. Of its errors InvalidRequestError (prompt) says which one is refused. A future
        that is cancelled is left out."""
        return self._submit(_Job(sources, Future(), self._text))

    def encode(self, sources: Sequence[ImageSource]) -> Future[tuple[EncodedImage, ...]]:
        """The images of one prompt, in their order. Errors and cancelling are as of `describe`."""
        return self._submit(_Job(sources, Future(), self._encode))

    def _submit(self, job: _Job[T]) -> Future[tuple[T, ...]]:
        with self._lock:
            if self._closed:
                job.future.cancel()
            else:
                self._add(job)
        return job.future

    def _add(self, job: _Job[Any]) -> None:
        self._jobs.append(job)
        self._thread.submit(self._turn)

    def forget(self) -> None:
        """Forget all images: the next ones are encoded again."""
        with self._lock:
            self._encoded.clear()
            self._left = self._cache_bytes

    def close(self) -> None:
        """End the thread, after the image that it is at; what waits is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            jobs = list(self._jobs)
            self._jobs.clear()
            self._thread.submit(self._end)
            self._thread.shutdown(wait=False)
        for job in jobs:
            job.future.cancel()

    # ---- in the thread ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        with self._lock:
            if not self._jobs:
                return  # closed
            job = self._jobs.popleft()
        if self._advance(job):
            with self._lock:
                if not self._closed:
                    self._add(job)  # the images of other requests come between
                    return
            job.future.cancel()
        elif not self._jobs:
            self._ahead.clear()  # of requests that went away

    def _end(self) -> None:
        self._decoder.close()
        self._loaded = self._processed = None
        self._ahead.clear()

    def _advance(self, job: _Job[Any]) -> bool:
        """Do the next part of a job. False: it has ended."""
        if job.future.cancelled():
            return False
        try:
            if len(job.images) < len(job.sources):
                self._read(job)
                return True
            if len(job.found) < len(job.sources):
                image = job.images[len(job.found)]
                job.found.append(job.step(image))
                image.pixels = None
            if len(job.found) < len(job.sources):
                return True
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(tuple(job.found))
        except BaseException as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                error = InsufficientMemoryError("there is no memory for an image")
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
        return False

    def _read(self, job: _Job[Any]) -> None:
        number = len(job.images)
        try:
            job.images.append(self._image(job.sources[number], alone=len(job.sources) == 1))
        except (ImageError, BadImage) as error:
            raise refused(number, str(error.args[0])) from None
        pixels, size = (sum(counts) for counts in zip(*((each.num_pixels, each.num_bytes) for each in job.images), strict=True))
        for name, count, most in (("pixels", pixels, MAX_REQUEST_PIXELS), ("bytes", size, MAX_REQUEST_BYTES)):
            if count > most:
                raise InvalidRequestError.of("prompt", f"its images have {count} {name} together; at most {most} are possible")

    def _image(self, source: ImageSource, *, alone: bool, fresh: bool = False) -> _Image:
        """`fresh`: with its pixels, however well it is known."""
        if isinstance(source, Video):
            return self._video(source)
        given, alone = source, alone and self._alone_differs
        if isinstance(source, pathlib.Path):
            try:
                if source.stat().st_size > MAX_FILE_BYTES:
                    raise ImageError(f"has {source.stat().st_size} bytes; at most {MAX_FILE_BYTES} are possible")
                source = source.read_bytes()
            except OSError as error:
                raise ImageError(f"cannot be read: {error.strerror}") from None
        if not isinstance(source, bytes):  # a picture of PIL
            width, height = source.size
            check_size(width, height, MAX_PIXELS, MAX_SIDE)
            pixels: Pixels = np.asarray(to_rgb(source))
            return _Image(digest_of(pixels, alone), width * height, 0, pixels, given, alone)
        if len(source) > MAX_FILE_BYTES:
            raise ImageError(f"has {len(source)} bytes; at most {MAX_FILE_BYTES} are possible")
        name = blake2b(source, digest_size=32, key=b"alone" if alone else b"").digest()
        if not fresh and (known := self._files.get(name)) is not None and known[0] in self._said:
            return _Image(*known, len(source), None, given, alone)
        pixels = self._decoder.decode(source)
        digest, num_pixels = digest_of(pixels, alone), pixels.size // 3
        _remember(self._files, name, (digest, num_pixels))
        return _Image(digest, num_pixels, len(source), pixels, given, alone)

    def _video(self, video: Video) -> _Image:
        frames: list[_Image] = []
        for number, source in enumerate(video.frames):
            try:
                frames.append(self._image(source, alone=False, fresh=True))
            except (ImageError, BadImage) as error:
                raise ImageError(f"is a video whose frame {number} {error.args[0]}") from None
            if (count := sum(frame.num_pixels for frame in frames)) > MAX_REQUEST_PIXELS:
                raise ImageError(f"is a video of {count} pixels and more; at most {MAX_REQUEST_PIXELS} are possible")
        shapes = {frame.pixels.shape for frame in frames if frame.pixels is not None}
        if len(shapes) > 1:
            first, second = (f"{width}x{height}" for height, width, _ in sorted(shapes)[:2])
            raise ImageError(f"is a video whose frames have different sizes, such as {first} and {second}")
        pixels = np.stack([frame.pixels for frame in frames if frame.pixels is not None])
        size = sum(frame.num_bytes for frame in frames)
        return _Image(digest_of(pixels, video.fps), pixels.size // 3, size, pixels, video, False)

    def _text(self, image: _Image) -> ImageText:
        """Also keeps what the image became, in case that it is encoded next."""
        if (known := self._said.get(image.digest)) is not None:
            return known
        return self._process(image)[0]

    def _process(self, image: _Image) -> tuple[ImageText, ProcessedImage]:
        if self._processed is not None and self._processed[0].digest == image.digest:
            return self._processed
        pixels = image.pixels
        if pixels is None:  # what it became has left the cache since
            pixels = self._image(image.source, alone=image.alone, fresh=True).pixels
            assert pixels is not None
        processor, _ = self._parts()
        begin = time.perf_counter()
        if isinstance(image.source, Video):
            made = processor.process_video(pixels, image.source.fps)
        else:
            made = processor.process(pixels, alone=image.alone)
        said = ImageText(image.digest, made.text, made.placeholder, processor.token_id, made.num_tokens, made.grid)
        _log.debug("an image of %d tokens is processed in %.3f s", said.num_tokens, time.perf_counter() - begin)
        _remember(self._said, image.digest, said)
        self._processed = said, made
        return said, made

    def _encode(self, image: _Image) -> EncodedImage:
        with self._lock:
            known = self._ahead.pop(image.digest, None) or self._encoded.get(image.digest)
            if known is not None:
                if image.digest in self._encoded:
                    self._encoded.move_to_end(image.digest)
                return known
        batch = [self._process(image)]
        for other in self._next_images(image):
            said, made = self._process(other)
            if {name: value.shape for name, value in made.inputs.items()} == {
                name: value.shape for name, value in batch[0][1].inputs.items()
            }:
                batch.append((said, made))
        self._processed = None
        begin = time.perf_counter()
        found = self._parts()[1].encode([made for _, made in batch])
        _log.debug("%d images of %d tokens are encoded in %.3f s", len(batch), batch[0][0].num_tokens, time.perf_counter() - begin)
        self.num_encoded += len(batch)
        images = [EncodedImage(said, made.rows, made.additions) for (said, _), made in zip(batch, found, strict=True)]
        for encoded in images:
            self._keep(encoded)
        self._ahead |= {encoded.said.digest: encoded for encoded in images[1:]}
        return images[0]

    def _next_images(self, first: _Image) -> list[_Image]:
        """Others that wait to be encoded, the next of each request: at most as many as are encoded together, besides the first."""
        found = {first.digest: first}
        with self._lock:
            for job in self._jobs:
                if len(found) < self._most_together and job.step == self._encode and len(job.images) == len(job.sources):
                    image = job.images[len(job.found)]
                    if image.digest not in self._encoded and image.digest not in self._ahead:
                        found.setdefault(image.digest, image)
        return list(found.values())[1:]

    def _parts(self) -> tuple[ImageProcessor, Tower]:
        if self._loaded is None:
            begin = time.perf_counter()
            self._loaded = self._load()
            _log.info("the part of the model for images is loaded, in %.1f s", time.perf_counter() - begin)
        return self._loaded

    def _keep(self, image: EncodedImage) -> None:
        with self._lock:
            if image.nbytes > self._cache_bytes:
                return
            self._encoded[image.said.digest] = image
            self._left -= image.nbytes
            while self._left < 0:
                self._left += self._encoded.popitem(last=False)[1].nbytes


def _come_last() -> None:
    """Steps of the model come before the work of this thread where cores are few."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _remember(known: OrderedDict[bytes, T], name: bytes, value: T) -> None:
    known[name] = value
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def digest_of(pixels: Pixels, kind: bool | float) -> bytes:
    """Tells an image from all others of one model: 32 bytes of BLAKE2b over its size, its pixels, and whether it is alone; or a video, over
    its frames per second."""
    digest = blake2b(repr((pixels.shape, kind)).encode(), digest_size=32)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def refused(number: int, why: str) -> InvalidRequestError:
    return InvalidRequestError.of("prompt", f"image {number} {why}")
