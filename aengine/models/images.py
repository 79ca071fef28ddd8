"""What a model does with images in its prompts: `ImageInput`, read from a config.json, and what one step is given of them, `StepImages`.

Owns which families take images, and how the positions of an image's tokens become angles. Knows nothing of pixels or encoders: an image
is some tokens of a prompt whose inputs are given rows instead of those of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import Array

IntArray = NDArray[np.int32]


class ImagePositions(Enum):
    PLAIN = "plain"  # an image's tokens have the positions that text has
    GRID = "grid"  # a time, a row and a column each (M-RoPE, Wang et al., "Qwen2-VL", 2024)


class VideoForm(Enum):
    """How a prompt has a video, whose frames are images of two each."""

    NONE = "none"  # it has none
    TOGETHER = "together"  # as one run of tokens, whose positions in time are those of the frames (Qwen2-VL, Qwen2.5-VL)
    STAMPED = "stamped"  # as an image behind its time, each (Qwen3-VL, 2025)


@dataclass(frozen=True, slots=True)
class Grid:
    """The places of an image's tokens; those of a video are `frames` such grids."""

    rows: int
    columns: int
    frames: int = 1
    interval: float | None = None  # positions in time from one to the next; None: each is an image of its own

    @property
    def size(self) -> int:
        return self.frames * self.rows * self.columns


class SeenWithin(Enum):
    """Which layers let a token of an image see the later tokens of that image."""

    NONE = "none"
    SLIDING = "sliding"  # those with a window
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ImageInput:
    positions: ImagePositions = ImagePositions.PLAIN
    num_additions: int = 0  # after each of so many first layers, rows are added to the residual at an image's tokens (Qwen3-VL, 2025)
    within: SeenWithin = SeenWithin.NONE
    alone_differs: bool = False  # an image that is the only one of a prompt has more tokens than one of several (LLaVA-OneVision)
    video: VideoForm = VideoForm.NONE
    tokens_per_second: float | None = None  # positions in time of a video that is together; None: one for each two frames
    layer_input_id: int | None = None  # the token whose `LayerInputs` an image's tokens have; None: their placeholder

    @property
    def takes_videos(self) -> bool:
        return self.video is not VideoForm.NONE


_FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ImageInput(ImagePositions.GRID, video=VideoForm.TOGETHER)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), ImageInput(ImagePositions.GRID, video=VideoForm.STAMPED)),
    **dict.fromkeys(("mistral3", "llava", "internvl", "idefics3", "smolvlm", "llama4"), ImageInput()),
    "llava_onevision": ImageInput(alone_differs=True),
    "gemma3": ImageInput(within=SeenWithin.ALL),
    "gemma4": ImageInput(),
}
IMAGE_FAMILIES = tuple(_FAMILIES)
"""The model types that take images."""
_DEEPSTACK = {"qwen3_vl": (8, 16, 24), "qwen3_vl_moe": (8, 16, 24)}
"""Those whose vision_config has deepstack_visual_indexes, with the ones that it has by default."""


def read_image_input(config: Mapping[str, Any]) -> ImageInput | None:
    """What the model of a config.json does with images; None: it takes none, or is of a family that is not known to."""
    model_type, vision, text = (config.get(key) for key in ("model_type", "vision_config", "text_config"))
    known = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    vision, text = (part if isinstance(part, Mapping) else {} for part in (vision, text))
    if known is None or "vision_config" not in config:
        return None
    num_additions = len(vision.get("deepstack_visual_indexes", _DEEPSTACK[model_type])) if model_type in _DEEPSTACK else 0
    within, layer_input_id = known.within, known.layer_input_id
    per_second = vision.get("tokens_per_second", 4) if model_type == "qwen2_5_vl" else None
    if model_type == "gemma4":
        layer_input_id = text.get("pad_token_id", 0)
        within = SeenWithin.SLIDING if text.get("use_bidirectional_attention") == "vision" else SeenWithin.NONE
    return replace(known, num_additions=num_additions, within=within, layer_input_id=layer_input_id, tokens_per_second=per_second)


def grid_positions(num_tokens: int, grids: Sequence[tuple[int, Grid]]) -> IntArray:
    """[3, num_tokens]: time, row and column of each token of a prompt, whose images are `grids`, each with its first token.

    The formula of `get_rope_index` in transformers: text counts on, an image takes as many positions as its longer side has tokens; so does
    a video, however long it is (as in transformers 5.23; earlier ones counted its time, too).
    """
    positions, place, at = np.empty((3, num_tokens), np.int32), 0, 0
    for first, grid in grids:
        positions[:, at:first] = np.arange(place, place + first - at)
        place, at = place + first - at, first + grid.size
        frame, cell = np.divmod(np.arange(grid.size, dtype=np.int32), grid.rows * grid.columns)
        moment = (frame.astype(np.float32) * np.float32(grid.interval or 0)).astype(np.int32)
        positions[:, first:at] = place + np.stack((moment, *np.divmod(cell, grid.columns)))
        place += max(grid.rows, grid.columns)
    positions[:, at:] = np.arange(place, place + num_tokens - at)
    return positions


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """The images of a step: token id ~i stands for row i. All arrays are on the host."""

    rows: Array  # [k, hidden_size]
    additions: Array | None  # [num_additions, k, hidden_size]
    mixed: IntArray  # [3, a], the positions of tokens whose three differ: rows of tables of angles behind those of all positions
    first_mixed: int  # the number of the first of these rows
    tokens: IntArray  # [k], which tokens of the step
    placeholder: int  # a token id
