"""`ImageProcessor`: what the image processor of transformers makes of pixels, and the text that stands for an image in a prompt.

Owns how the processor of a model is built where torchvision is missing, which most of them ask for because of videos, and the most tokens
that an image may take. Knows nothing of weights. All methods belong to one thread.

`Tower`: the part of a model of transformers that makes rows of hidden size from what an image processor has made of an image.

Owns how this part is built and loaded without the text part, and what its families return. All methods belong to one thread.
"""

from __future__ import annotations

import inspect
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.processing_utils import ProcessorMixin

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError, one_line
from aengine.models.images import Grid, ImageInput, VideoForm

_FIXED = {"smolvlm": "Idefics3Processor"}
"""By model type a processor that writes the same text for images, and needs no package that the model's own needs for videos."""


_VIDEO_IMAGES = 4  # a video has as many tokens as so many images, at most
_WITH_TORCHVISION = ("llama4",)
"""Model types whose image processor is written for torchvision alone."""
_LAYOUT = "channels_last"


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    text: str  # that stands in a prompt where the chat template has written the placeholder
    num_tokens: int  # how many of the text's tokens are of the image
    inputs: Mapping[str, Tensor]  # of the tower
    grid: Grid | None  # of the image's tokens, where the model gives them positions by it
    placeholder: str  # that a chat template writes


class ImageProcessor:
    def __init__(self, model_dir: pathlib.Path, max_tokens: int, described: ImageInput | None = None) -> None:
        """`max_tokens`: of an image, where the model can make it smaller. `described`: what the model does with images. Raises
        ModelLoadError for a directory without the files of an image processor, or of a tokenizer that transformers reads."""
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]

        try:
            config = AutoConfig.from_pretrained(model_dir)
            model_type = config.model_type
            images: Any = AutoImageProcessor
            backend = "torchvision" if model_type in _WITH_TORCHVISION else "pil"
            self._images: Any = images.from_pretrained(model_dir, backend=backend)
            tokenizer = AutoTokenizer.from_pretrained(model_dir)
            name = _FIXED.get(model_type) or PROCESSOR_MAPPING_NAMES[model_type]
            is_pixtral = getattr(config.vision_config, "model_type", "") == "pixtral"  # also of a model of type llava
            kind: Any = _PixtralProcessor if is_pixtral else _processor_class(name)
            saved, _ = kind.get_processor_dict(model_dir)
            parts = {"image_processor": self._images, "tokenizer": tokenizer}
            known = _parameters(kind)
            own = {name: value for name, value in saved.items() if name in known and name not in (*parts, "video_processor")}
            others = {name: None for name in ("video_processor", "feature_extractor") if name in known}
            if kind is _PixtralProcessor:
                own = {"patch_size": config.vision_config.patch_size, "spatial_merge_size": getattr(config, "spatial_merge_size", 1), **own}
            if "image_seq_length" in known and "image_seq_length" not in own and hasattr(self._images, "image_seq_length"):
                own["image_seq_length"] = self._images.image_seq_length
            self._processor: Any = kind(**parts, **others, **own)
        except Exception as error:  # of code and files of others
            raise ModelLoadError(
                f"images are not possible: the image processor of {model_dir} cannot be used: {one_line(error)}"
            ) from error
        merged = self._processor._merge_kwargs(self._processor.valid_processor_kwargs, tokenizer_init_kwargs=tokenizer.init_kwargs)
        self._settings: dict[str, Any] = dict(merged["images_kwargs"])
        self._settings.pop("return_tensors", None)
        self._merge = int(getattr(self._images, "merge_size", 0) or 0)
        self._limit_tokens(max_tokens)
        self.placeholder: str = self._processor.image_token
        self.token_id = int(config.image_token_id)
        self.token = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self._described, self._max_tokens = described or ImageInput(), max_tokens
        self._alone_differs = self._described.alone_differs

    def _limit_tokens(self, most: int) -> None:
        """Has large images made smaller, where the model takes images of any size."""
        size = getattr(self._images, "size", None)
        longest = None if size is None else getattr(size, "longest_edge", None)
        if self._merge and longest is not None and longest > 65536:  # Qwen
            self._settings["size"] = self._area(most)
        elif longest is not None and isinstance(self._processor, _PixtralProcessor):  # a side in pixels
            self._settings["size"] = {"longest_edge": min(longest, max(math.isqrt(most), 1) * self._processor.side)}

    def _area(self, most: int) -> dict[str, int]:
        """The sizes in pixels that an image of at most so many tokens may have."""
        size, area = self._images.size, (self._merge * self._images.patch_size) ** 2
        shortest = getattr(size, "shortest_edge", None) or area
        return {"longest_edge": max(min(size.longest_edge, most * area), shortest), "shortest_edge": shortest}

    def process(self, pixels: NDArray[np.uint8], *, alone: bool) -> ProcessedImage:
        """`pixels` [height, width, 3]; `alone`: it is the only image of its prompt. They are given as an array: what transformers makes of
        a picture of PIL holds the interpreter for a tenth of a second, 5 ms at a time, and each release of a step then waits so long."""
        given: Any = [pixels]
        if self._alone_differs and not alone:
            given = [[pixels, np.zeros((1, 1, 3), np.uint8)]]
        with torch.inference_mode():
            made, texts = self._processor._process_images(given, return_tensors="pt", input_data_format=_LAYOUT, **self._settings)
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        if self._alone_differs:
            inputs = {name: value[:1] for name, value in inputs.items() if name != "batch_num_images"}
            inputs["batch_num_images"] = torch.tensor([1 if alone else 2])
        grid = made.get("image_grid_thw")
        cells = None if grid is None or not self._merge else Grid(int(grid[0][1]) // self._merge, int(grid[0][2]) // self._merge)
        return ProcessedImage(texts[0], texts[0].count(self.token), inputs, cells, self.placeholder)

    def process_video(self, frames: NDArray[np.uint8], fps: float) -> ProcessedImage:
        """`frames` [count, height, width, 3], so many per second. As many as stand in one patch, two, become one image of the tower: the
        numbers of a patch that the image processor has made of each frame. The last frame is repeated to fill up."""
        together: int = self._images.temporal_patch_size
        count = -(-len(frames) // together)  # of images
        settings = {**self._settings, "size": self._area(min(self._max_tokens, max(_VIDEO_IMAGES * self._max_tokens // count, 1)))}
        values = []
        with torch.inference_mode():
            for number in range(count * together):
                if number < len(frames):
                    made, _ = self._processor._process_images([frames[number]], return_tensors="pt", input_data_format=_LAYOUT, **settings)
                values.append(made["pixel_values"].view(made["pixel_values"].shape[0], 3, together, -1))
        own = [[values[first + slot][:, :, slot] for slot in range(together)] for first in range(0, len(values), together)]
        patches = torch.cat([torch.stack(slots, 2).flatten(1) for slots in own])
        inputs = {"pixel_values": patches, "image_grid_thw": made["image_grid_thw"].expand(count, 3)}
        rows, columns = (int(side) // self._merge for side in made["image_grid_thw"][0][1:])
        run, processor = self.token * (rows * columns), self._processor
        if self._described.video is VideoForm.TOGETHER:
            per_second = self._described.tokens_per_second
            interval = 1.0 if per_second is None else per_second * together / fps
            return ProcessedImage(run * count, count * rows * columns, inputs, Grid(rows, columns, count, interval), processor.video_token)
        moments = [min(number, len(frames) - 1) / fps for number in range(count * together)]
        times = [(moments[first] + moments[first + together - 1]) / 2 for first in range(0, len(moments), together)]
        begin, end = processor.vision_start_token, processor.vision_end_token
        text = "".join(f"<{moment:.1f} seconds>{begin}{run}{end}" for moment in times)
        placeholder = f"{begin}{processor.video_token}{end}"
        return ProcessedImage(text, count * rows * columns, inputs, Grid(rows, columns, count), placeholder)


def _processor_class(name: str) -> Any:
    """A processor that does not insist on a video processor."""
    import transformers

    kind: Any = getattr(transformers, name)
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, *_: None, "get_attributes": kind.get_attributes})


class _PixtralProcessor:
    """In place of the processor of Pixtral and Mistral 3, which cannot be imported without torchvision: a break after each row of an
    image's tokens, and an end after the last."""

    get_processor_dict = ProcessorMixin.get_processor_dict

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        patch_size: int = 14,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ) -> None:
        self.image_processor, self.side = image_processor, patch_size * spatial_merge_size
        self.image_token, self.marks = image_token, (image_break_token, image_end_token)

    valid_processor_kwargs = None

    def _merge_kwargs(self, *_: Any, **__: Any) -> dict[str, dict[str, Any]]:
        return {"images_kwargs": {}}

    def _process_images(self, images: Any, **settings: Any) -> tuple[Any, list[str]]:
        made = self.image_processor(images, patch_size=self.side, **settings)
        between, end = self.marks
        sizes = [(int(height) // self.side, int(width) // self.side) for height, width in made["image_sizes"]]
        return made, [between.join([self.image_token * columns] * rows) + end for rows, columns in sizes]


def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__init__).parameters)


_TEXT_PARTS = ("language_model", "text_model")


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """What a model computes an image's tokens with; in host memory."""

    rows: Tensor  # [k, hidden_size]
    additions: Tensor | None  # [layers, k, hidden_size], as of `PromptImages`

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.additions is None else self.additions.nbytes)


class Tower:
    def __init__(self, model_dir: pathlib.Path, load_format: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """`load_format` and `seed`: as of `EngineConfig`. Raises ModelLoadError."""
        from transformers import AutoConfig, AutoModel

        self._device = device
        try:
            config = AutoConfig.from_pretrained(model_dir)
            kind = _without_text(AutoModel._model_mapping[type(config)])
            if load_format == "dummy":
                torch.manual_seed(seed)
                model = kind._from_config(config, dtype=dtype)
            else:
                with _quiet():
                    model = kind.from_pretrained(model_dir, config=config, dtype=dtype, attn_implementation="sdpa")
            self._model: Any = model.to(device).eval()
        except Exception as error:  # of code and files of others
            raise ModelLoadError(f"images are not possible: their part of {model_dir} cannot be loaded: {one_line(error)}") from error
        self._takes = frozenset(inspect.signature(self._model.get_image_features).parameters)

    def encode(self, images: Sequence[ProcessedImage]) -> list[ImageRows]:
        """Images whose inputs have the same shapes, together. Raises RuntimeError if they have other numbers of rows than of tokens."""
        together = {name: torch.cat([image.inputs[name] for image in images]) for name in images[0].inputs if name in self._takes}
        dtype = self._model.dtype
        given = {name: value.to(self._device, dtype if value.is_floating_point() else None) for name, value in together.items()}
        with torch.inference_mode():
            found = self._model.get_image_features(**given, return_dict=True)
            rows = found.pooler_output
            if rows is None:  # of Llama 4, whose projector is not among the methods for images
                rows = self._model.multi_modal_projector(found.last_hidden_state)
            layers = getattr(found, "deepstack_features", None)
            additions = torch.stack([_joined(one) for one in layers]).cpu() if layers else None
            joined, counts = _joined(rows).cpu(), [image.num_tokens for image in images]
            if len(joined) != sum(counts):
                raise RuntimeError(f"images of {counts} tokens have {len(joined)} rows")
            added = [None] * len(images) if additions is None else [part.clone() for part in torch.split(additions, counts, 1)]
            return [ImageRows(part.clone(), more) for part, more in zip(torch.split(joined, counts), added, strict=True)]


def _joined(rows: Any) -> Tensor:
    """[k, hidden_size]."""
    parts = list(rows) if isinstance(rows, list | tuple) else [rows]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _without_text(kind: Any) -> Any:
    """The class of transformers for a model, without the layers and the embedding of its text part, whose weights stay where they are."""

    class VisionOnly(kind):  # type: ignore[misc]
        _tied_weights_keys: Mapping[str, str] = {}

        def __init__(self, config: Any, *args: Any, **named: Any) -> None:
            super().__init__(config, *args, **named)
            for name in _TEXT_PARTS:
                if hasattr(self, name):
                    setattr(self, name, nn.Module())

        def get_input_embeddings(self) -> None:
            return None

        def tie_weights(self, *args: Any, **named: Any) -> None:
            pass

    VisionOnly.__name__ = kind.__name__
    return VisionOnly


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of the weights that it was not to load, and without its bar."""
    from transformers.utils import logging as utils

    of_transformers: Any = utils

    logs = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "distributed.tensor_parallel")]
    levels, had_bar = [log.level for log in logs], of_transformers.is_progress_bar_enabled()
    for log in logs:
        log.setLevel(logging.ERROR)
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        if had_bar:
            of_transformers.enable_progress_bar()
