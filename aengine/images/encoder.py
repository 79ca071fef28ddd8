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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError, InvalidRequestError
from aengine.images.decoder import MAX_PIXELS, MAX_SIDE, ImageDecoder, ImageError, Pixels
from aengine.images.decoding_process import Refused, check_size, to_rgb
from aengine.models.choice import AnySpec
from aengine.models.images import ImageInput
from aengine.models.spec import ModelSpec

if TYPE_CHECKING:
    from aengine.images.processor import ImageProcessor
    from aengine.images.tower import Tower

ImageSource = Any
"""The bytes of a file, its path (`pathlib.Path`), or a picture of PIL."""
MAX_FILE_BYTES = 20 << 20
MAX_REQUEST_BYTES = 64 << 20
MAX_REQUEST_PIXELS = 100_000_000
_CPU_TOKENS, _GPU_TOKENS = 1024, 4096  # that an image has at most, where the model can make it smaller
_NICENESS = 10
_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """An image as a prompt takes it. It does not change."""

    digest: bytes
    text: str  # in place of the placeholder that a chat template writes
    placeholder: str
    token_id: int  # of the text's tokens that the rows are for
    rows: Tensor  # [k, hidden_size], in host memory
    additions: Tensor | None  # [layers, k, hidden_size], as of `PromptImages`
    grid: tuple[int, int] | None  # rows and columns of its tokens, where the model gives them positions by these

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.additions is None else self.additions.nbytes)


@dataclass(slots=True)
class _Job:
    """The images of one request."""

    sources: Sequence[ImageSource]
    future: Future[tuple[EncodedImage, ...]]
    pixels: list[Pixels | bytes] = field(default_factory=list)  # of those that are read; the digest of one that is known
    found: list[EncodedImage] = field(default_factory=list)
    num_pixels: int = 0
    num_bytes: int = 0


def find_image_input(config: EngineConfig, spec: AnySpec, has_tokenizer: bool) -> ImageInput | None:
    """What the engine does with images; None: it takes none. One that is divided over several processes takes none."""
    if not isinstance(spec, ModelSpec) or not config.max_images or not has_tokenizer or config.num_ranks > 1:
        return None
    return spec.images


def make_encoder(config: EngineConfig, model_dir: pathlib.Path, dtype: torch.dtype, device: torch.device) -> ImageEncoder:
    """`dtype` and `device`: of the model. Nothing is loaded before the first image."""
    most = config.image_max_tokens or (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS)

    def load() -> tuple[ImageProcessor, Tower]:
        from aengine.images.processor import ImageProcessor
        from aengine.images.tower import Tower

        return ImageProcessor(model_dir, most), Tower(model_dir, config.load_format, dtype, device, config.seed)

    return ImageEncoder(load, config.image_cache_memory)


class ImageEncoder:
    """`encode` and `close` may be called from any thread."""

    def __init__(self, load: Callable[[], tuple[ImageProcessor, Tower]], cache_bytes: int) -> None:
        """`load` is called in the thread, with the first image."""
        self._load = load
        self._loaded: tuple[ImageProcessor, Tower] | None = None
        self._decoder = ImageDecoder()
        self._cache: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._cache_bytes, self._left = cache_bytes, cache_bytes
        self._digests: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # of files -> of their pixels, and how many these are
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.num_encoded = 0
        """Images that the tower has run for."""

    def encode(self, sources: Sequence[ImageSource]) -> Future[tuple[EncodedImage, ...]]:
        """The images of one prompt, in their order. Of its errors InvalidRequestError (prompt) says which image is refused; a future that
        is cancelled is left out of the work."""
        future: Future[tuple[EncodedImage, ...]] = Future()
        with self._changed:
            if self._closed:
                future.cancel()
                return future
            self._jobs.append(_Job(sources, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aengine-images", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def forget(self) -> None:
        """Forget all images: the next ones are encoded again."""
        with self._changed:
            self._cache.clear()
            self._left = self._cache_bytes

    def close(self) -> None:
        """End the thread, after the image that it is at; what waits is cancelled."""
        with self._changed:
            self._closed = True
            jobs = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        for job in jobs:
            job.future.cancel()

    # ---- in the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # steps come first where cores are few
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                job = self._jobs.popleft()
            if self._advance(job):
                with self._changed:  # the images of other requests come between
                    if not self._closed:
                        self._jobs.append(job)
                        continue
                job.future.cancel()
        self._decoder.close()
        self._loaded = None

    def _advance(self, job: _Job) -> bool:
        """Do the next part of a job. False: it has ended."""
        if job.future.cancelled():
            return False
        try:
            if len(job.pixels) < len(job.sources):
                self._read(job)
                return True
            if len(job.found) < len(job.sources):
                job.found.append(self._image(job))
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

    def _read(self, job: _Job) -> None:
        number = len(job.pixels)
        try:
            pixels, num_pixels, num_bytes = self._pixels(job.sources[number], alone=len(job.sources) == 1)
        except (ImageError, Refused) as error:
            raise refused(number, str(error.args[0])) from None
        job.pixels.append(pixels)
        job.num_pixels += num_pixels
        job.num_bytes += num_bytes
        for name, count, most in (("pixels", job.num_pixels, MAX_REQUEST_PIXELS), ("bytes", job.num_bytes, MAX_REQUEST_BYTES)):
            if count > most:
                raise InvalidRequestError.of("prompt", f"its images have {count} {name} together; at most {most} are possible")

    def _pixels(self, source: ImageSource, *, alone: bool) -> tuple[Pixels | bytes, int, int]:
        """The pixels of an image, or the digest of one that is cached; how many pixels these are, and how many bytes its file has."""
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
            return pixels, pixels.size // 3, 0
        if len(source) > MAX_FILE_BYTES:
            raise ImageError(f"has {len(source)} bytes; at most {MAX_FILE_BYTES} are possible")
        name = blake2b(source, digest_size=32, key=b"alone" if alone else b"").digest()
        if (known := self._digests.get(name)) is not None and known[0] in self._cache:
            return known[0], known[1], len(source)
        pixels = self._decoder.decode(source)
        self._digests[name] = digest_of(pixels, alone=alone), pixels.size // 3
        if len(self._digests) > 4096:
            self._digests.popitem(last=False)
        return pixels, pixels.size // 3, len(source)

    def _image(self, job: _Job) -> EncodedImage:
        pixels, alone = job.pixels[len(job.found)], len(job.sources) == 1
        digest = pixels if isinstance(pixels, bytes) else digest_of(pixels, alone=alone)
        with self._changed:
            if (cached := self._cache.get(digest)) is not None:
                self._cache.move_to_end(digest)
                return cached
        if isinstance(pixels, bytes):  # it has left the cache since
            read, _, _ = self._pixels(job.sources[len(job.found)], alone=alone)
            assert not isinstance(read, bytes)
            pixels = read
        processor, tower = self._parts()
        begin = time.perf_counter()
        processed = processor.process(pixels, alone=alone)
        between = time.perf_counter()
        made = tower.encode(processed.inputs)
        took = between - begin, time.perf_counter() - between
        _log.debug("an image of %d tokens: processed in %.3f s, encoded in %.3f s", processed.num_tokens, *took)
        if len(made.rows) != processed.num_tokens:
            raise RuntimeError(f"an image has {len(made.rows)} rows for {processed.num_tokens} tokens")
        self.num_encoded += 1
        image = EncodedImage(digest, processed.text, processor.placeholder, processor.token_id, made.rows, made.additions, processed.grid)
        self._keep(image)
        return image

    def _parts(self) -> tuple[ImageProcessor, Tower]:
        if self._loaded is None:
            begin = time.perf_counter()
            self._loaded = self._load()
            _log.info("the part of the model for images is loaded, in %.1f s", time.perf_counter() - begin)
        return self._loaded

    def _keep(self, image: EncodedImage) -> None:
        with self._changed:
            if image.nbytes > self._cache_bytes:
                return
            self._cache[image.digest] = image
            self._left -= image.nbytes
            while self._left < 0:
                self._left += self._cache.popitem(last=False)[1].nbytes


def digest_of(pixels: Pixels, *, alone: bool) -> bytes:
    """Tells an image from all others of one model: 32 bytes of BLAKE2b over its size, its pixels, and whether it is alone."""
    digest = blake2b(repr((pixels.shape, alone)).encode(), digest_size=32)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def refused(number: int, why: str) -> InvalidRequestError:
    return InvalidRequestError.of("prompt", f"image {number} {why}")
