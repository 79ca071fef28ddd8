"""`ImageEncoder`: what is computed once, in which order, and what is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from image_models import Reference, as_file, picture
from PIL import Image

from aengine.images.encoder import ImageEncoder
from aengine.images.processor import ImageRows, ProcessedImage, Tower

Find = Callable[[str], Reference]


class Watched:
    """A tower that tells how many images it was given at a time, and can be held."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self.runs: list[int] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def encode(self, images: Sequence[ProcessedImage]) -> list[ImageRows]:
        self.runs.append(len(images))
        self.begun.set()
        assert self.may_go_on.wait(60)
        return self._tower.encode(images)


@contextmanager
def encoder_of(known: Reference, cache_bytes: int = 1 << 20, **options: Any) -> Iterator[tuple[ImageEncoder, Watched]]:
    tower = Watched(Tower(known.folder, "auto", torch.float32, torch.device("cpu")))
    loaded: Any = known.processor, tower
    encoder = ImageEncoder(lambda: loaded, cache_bytes, **options)
    try:
        yield encoder, tower
    finally:
        tower.may_go_on.set()
        encoder.close()


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "mistral3", "internvl", "llava_onevision", "idefics3", "gemma4"])
def test_images_of_several_requests_together(model_type: str, reference: Find) -> None:
    """Those of one size, in one run; the rows are those that each has alone."""
    files = [as_file(picture(96, 64, number)) for number in range(3)] + [as_file(picture(64, 160))]
    with encoder_of(reference(model_type), most_together=4) as (encoder, tower):
        tower.may_go_on.clear()
        futures = [encoder.encode([as_file(picture(32, 32))])]
        assert tower.begun.wait(60)
        futures += [encoder.encode([file]) for file in files]
        tower.may_go_on.set()
        found = [future.result(60)[0] for future in futures][1:]
        assert max(tower.runs) >= 3
        assert sum(tower.runs) == 5
        assert not encoder._ahead
    with encoder_of(reference(model_type)) as (encoder, tower):
        for file, together in zip(files, found, strict=True):
            (alone,) = encoder.encode([file]).result(60)
            torch.testing.assert_close(together.rows, alone.rows, atol=1e-5, rtol=1e-5)
            if alone.additions is not None:
                torch.testing.assert_close(together.additions, alone.additions, atol=1e-5, rtol=1e-5)
        assert set(tower.runs) == {1}


def test_what_is_cached_and_what_is_not(reference: Find) -> None:
    one, other = as_file(picture(64, 64, 1)), as_file(picture(64, 64, 2))
    with encoder_of(reference("qwen3_vl"), 5000) as (encoder, tower):  # 4 tokens with 4 rows of 256 bytes each
        for _ in range(2):
            (first,) = encoder.encode([one]).result(60)
        assert tower.runs == [1]
        encoder.encode([other]).result(60)  # takes its place
        (again,) = encoder.encode([one]).result(60)
        assert tower.runs == [1, 1, 1]
        assert (first.rows == again.rows).all()
        encoder.forget()
        encoder.encode([one]).result(60)
        assert len(tower.runs) == 4
    with encoder_of(reference("qwen3_vl"), 0) as (encoder, tower):
        assert len(encoder.encode([one, other, one]).result(60)) == 3
        said = encoder.describe([one, other]).result(60)
        assert [image.num_tokens for image in said] == [4, 4]
        assert len(tower.runs) == 3, "to say what an image is takes no tower"


def test_requests_take_turns_and_can_leave(reference: Find) -> None:
    with encoder_of(reference("qwen3_vl")) as (encoder, tower):
        tower.may_go_on.clear()
        held = encoder.encode([as_file(picture(32, 32))])
        assert tower.begun.wait(60)
        many = encoder.encode([as_file(picture(64, 64, number)) for number in range(6)])
        few = encoder.encode([as_file(picture(64, 64, 10))])
        left = encoder.encode([as_file(picture(64, 64, 11))])
        assert left.cancel()
        tower.may_go_on.set()
        few.result(60)
        assert not many.done(), "a request with many images goes before one with few"
        assert len(many.result(60)) == 6
        held.result(60)
        assert sum(tower.runs) == 8, "an image was encoded for nobody"
    assert encoder.encode([as_file(picture(4, 4))]).cancelled()


@pytest.mark.parametrize("height", [3, 1])
def test_an_image_of_few_rows_is_what_a_picture_is(reference: Find, height: int) -> None:
    """Whose first number could be that of its colors."""
    processor, pixels = reference("gemma3").processor, picture(30, height)
    with torch.inference_mode():
        expected, _ = processor._processor._process_images([Image.fromarray(pixels)], return_tensors="pt", **processor._settings)
    found = processor.process(pixels, alone=True)
    assert found.inputs["pixel_values"].equal(expected["pixel_values"])
