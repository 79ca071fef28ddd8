"""`Tower`: the part of a model of transformers that makes rows of hidden size from what an image processor has made of an image.

Owns how this part is built and loaded without the text part, and what its families return. All methods belong to one thread.
"""

from __future__ import annotations

import inspect
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aengine.api.errors import ModelLoadError, one_line
from aengine.images.processor import ProcessedImage

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
