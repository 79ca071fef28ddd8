"""`ImageEncoder`: images of prompts to what a model computes with, once for each image.

Owns the thread in which files become pixels, pixels the inputs of a tower, and these rows; the order of the work; and the cache, which is
bounded in bytes and keyed by what decides the rows: the pixels, their size, and whether the image is alone. Behind it
stand the prompts of images: where their text goes in a rendered chat, what the scheduler is given of them, and the ids that name images, by
which pages of KV are found again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import InsufficientMemoryError, InvalidRequestError
from aengine.api.outputs import RenderedChat
from aengine.api.request import Video
from aengine.api.runtime import imports_of
from aengine.images.decoder import MAX_PIXELS, MAX_SIDE, ImageDecoder, ImageError, Pixels
from aengine.images.decoding_process import BadImage, check_size, to_rgb
from aengine.kernels.arrays import Array, as_array, torch_dtype
from aengine.models.choice import AnySpec
from aengine.models.images import Grid, ImageInput, ImagePositions, SeenWithin, grid_positions
from aengine.models.spec import ModelSpec
from aengine.runner.torch.device import is_out_of_memory
from aengine.scheduler.plan import PromptImages

if TYPE_CHECKING:
    from aengine.images.processor import ImageProcessor, ProcessedImage, Tower

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
    rows: Array  # [k, hidden_size], in host memory
    additions: Array | None  # [layers, k, hidden_size], as of `PromptImages`

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


def make_encoder(config: EngineConfig, described: ImageInput, model_dir: pathlib.Path, dtype: np.dtype[Any], device: str) -> ImageEncoder:
    """`dtype` and `device`: of the model. Nothing is loaded before the first image."""
    most = config.image_max_tokens or (_CPU_TOKENS if device == "cpu" else _GPU_TOKENS)

    def load() -> tuple[ImageProcessor, Tower]:
        with imports_of("an image"):
            import torch

            from aengine.images.processor import ImageProcessor, Tower

        tower = Tower(model_dir, config.load_format, torch_dtype(dtype), torch.device(device), config.seed)
        return ImageProcessor(model_dir, most, described), tower

    together = 1 if device == "cpu" else _TOGETHER
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
            if isinstance(error, MemoryError) or is_out_of_memory(error):
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
        images = [EncodedImage(said, *_on_host(made)) for (said, _), made in zip(batch, found, strict=True)]
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


IntArray = NDArray[np.int32]


def with_images(rendered: RenderedChat, images: Sequence[ImageText]) -> RenderedChat:
    """The chat with the text of its `images` where the template has written a placeholder for each. What the caller wrote that reads like
    one is none. Raises `InvalidRequestError` (prompt) for a template that has written more or fewer."""
    if not images:
        return rendered
    literals = {place for start, end in rendered.literals for place in range(start, end)}
    pattern = "|".join(re.escape(placeholder) for placeholder in sorted({image.placeholder for image in images}, key=len, reverse=True))
    matches = [match for match in re.finditer(pattern, rendered.text) if literals.isdisjoint(range(*match.span()))]
    if [match.group() for match in matches] != [image.placeholder for image in images]:
        counts = f"{len(images)} images and videos, of which the model's chat template has written {len(matches)}"
        raise InvalidRequestError.of("prompt", f"the messages have {counts}")
    found = [match.span() for match in matches]
    pieces: list[str] = []
    at, moved, shifts = 0, 0, []  # where each text begins, and how far what is behind it moves
    for (start, end), image in zip(found, images, strict=True):
        pieces += [rendered.text[at:start], image.text]
        at, moved = end, moved + len(image.text) - (end - start)
        shifts.append((end, moved))
    pieces.append(rendered.text[at:])
    shift = [0, *(moved for _, moved in shifts)]
    ends = [end for end, _ in shifts]
    places = tuple((start + shift[_count(ends, start)], end + shift[_count(ends, start)]) for start, end in rendered.literals)
    return RenderedChat("".join(pieces), places)


def _count(ends: Sequence[int], place: int) -> int:
    return int(np.searchsorted(ends, place, side="right"))


def place_images(ids: IntArray, images: Sequence[EncodedImage], described: ImageInput) -> tuple[IntArray, PromptImages]:
    """The prompt as the scheduler takes it, whose ids name the images, and what it computes these with. Raises `InvalidRequestError`
    (prompt) if it has another number of tokens for images than they have rows."""
    at = np.flatnonzero(ids == images[0].said.token_id).astype(np.int32)
    counts = [len(image.rows) for image in images]
    if len(at) != sum(counts):
        raise InvalidRequestError.of("prompt", f"it has {len(at)} tokens of images, whose images are of {sum(counts)} tokens")
    named = ids.copy()
    named[at] = np.concatenate([names_of(image.said.digest, len(image.rows)) for image in images])
    firsts = np.cumsum([0, *counts])
    positions = None
    if described.positions is ImagePositions.GRID:
        grids: list[tuple[int, Grid]] = []
        for first, image in zip(firsts, images, strict=False):
            grid = image.said.grid
            assert grid is not None, "of a model that gives positions by grids"
            if grid.interval is None:  # images apart
                cells = Grid(grid.rows, grid.columns)
                grids += [(int(at[first + frame * cells.size]), cells) for frame in range(grid.frames)]
            else:
                grids.append((int(at[first]), grid))
        positions = grid_positions(len(ids), grids)
    whole: tuple[tuple[int, int], ...] = ()
    if described.within is not SeenWithin.NONE:
        whole = tuple(_runs(at))
    additions = [image.additions for image in images if image.additions is not None]
    return named, PromptImages(
        at,
        np.concatenate([image.rows for image in images]),
        np.concatenate(additions, 1) if additions else None,
        images[0].said.token_id,
        positions,
        whole,
    )


def _runs(at: IntArray) -> list[tuple[int, int]]:
    """Begin and end of each run of consecutive numbers."""
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(at, breaks)]


def names_of(digest: bytes, count: int) -> IntArray:
    """[count] ids below -1: 31 bits of SHAKE-128 of the image's digest each, so that no two images are likely to share the name of a
    page."""
    bits = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), "<u4") & 0x7FFFFFFF
    names: IntArray = (-2 - np.minimum(bits, 0x7FFFFFFE).astype(np.int64)).astype(np.int32)
    return names


def _on_host(made: Any) -> tuple[Array, Array | None]:
    """The rows and additions of an image."""
    return as_array(made.rows), None if made.additions is None else as_array(made.additions)
