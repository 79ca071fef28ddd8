"""`RowImages`: the images of the rows that have some, and what a step is given of them.

Owns which of a step's tokens are of an image, and the positions that angles are made of where these differ from those in KV. Knows neither
encoders nor a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aengine.models.images import IntArray, StepImages
from aengine.runner.contract import Step
from aengine.scheduler.plan import NewRow, PromptImages


class RowImages:
    def __init__(self, first_mixed: int) -> None:
        """`first_mixed`: the first row of tables of angles that is of no single position."""
        self._first_mixed = first_mixed
        self._rows: dict[int, PromptImages] = {}

    def assign(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            if new.images is None:
                self._rows.pop(new.row, None)
            else:
                self._rows[new.row] = new.images

    def added(self, step: Step) -> Step:
        """The step with the images of its rows."""
        if not self._rows or not (numbers := [number for number, row in enumerate(step.rows.tolist()) if row in self._rows]):
            return step
        layout, num_decodes = step.layout, step.layout.num_decodes
        positions, token_ids = layout.positions.copy(), step.token_ids.copy()
        seen = layout.positions + 1
        parts: list[tuple[PromptImages, slice]] = []
        tokens: list[IntArray] = []
        mixed: list[IntArray] = []
        count, num_mixed = 0, 0
        for number in numbers:
            images = self._rows[int(step.rows[number])]
            begin, end = layout.qo_indptr[number : number + 2].tolist()
            first = int(layout.positions[begin])
            if images.positions is not None:
                three = _positions(images.positions, first, end - begin)
                several = np.flatnonzero((three != three[0]).any(0))
                positions[begin:end] = three[0]
                positions[begin + several] = self._first_mixed + num_mixed + np.arange(len(several))
                mixed.append(three[:, several])
                num_mixed += len(several)
            if images.whole:
                for whole in images.whole:
                    inside = slice(begin + max(whole[0] - first, 0), min(begin + max(whole[1] - first, 0), end))
                    seen[inside] = whole[1]
            part = slice(*np.searchsorted(images.tokens, (first, first + end - begin)).tolist())
            if number < num_decodes or part.start == part.stop:
                continue
            at = images.tokens[part] - first + begin
            token_ids[at - num_decodes] = ~np.arange(count, count + len(at), dtype=np.int32)
            parts.append((images, part))
            tokens.append(at)
            count += len(at)
        found = None
        if parts:
            rows = [images.rows[part] for images, part in parts]
            additions = [images.additions[:, part] for images, part in parts if images.additions is not None]
            found = StepImages(
                np.concatenate(rows),
                np.concatenate(additions, 1) if additions else None,
                np.concatenate(mixed, 1) if mixed else np.empty((3, 0), np.int32),
                self._first_mixed,
                np.concatenate(tokens),
                next(images.placeholder for images in self._rows.values()),
            )
        if (seen != layout.positions + 1).any():
            layout = replace(layout, seen=seen)
        return replace(step, layout=layout, token_ids=token_ids, positions=positions, images=found)


def _positions(of_prompt: IntArray, first: int, count: int) -> IntArray:
    """[3, count] positions of the tokens from `first` on; behind the prompt they count on from its last token's."""
    known = of_prompt[:, first : first + count]
    behind = of_prompt[0, -1] + 1 + np.arange(max(first - of_prompt.shape[1], 0), first + count - of_prompt.shape[1], dtype=np.int32)
    return np.concatenate((known, np.broadcast_to(behind, (3, len(behind)))), 1) if len(behind) else known
