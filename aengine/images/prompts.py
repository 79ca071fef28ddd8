"""A prompt and its images: where their text goes in a rendered chat, and what the scheduler is given of them.

Owns the ids that name images, by which pages of KV are found again. Knows nothing of how images are encoded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.api.errors import InvalidRequestError
from aengine.api.outputs import RenderedChat
from aengine.images.encoder import EncodedImage, ImageText
from aengine.models.images import Grid, ImageInput, ImagePositions, SeenWithin, grid_positions
from aengine.scheduler.plan import PromptImages

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
        torch.cat([image.rows for image in images]),
        torch.cat(additions, 1) if additions else None,
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
