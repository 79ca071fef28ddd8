"""`Layouts`: the layouts of steps that follow one another. Most steps decode the rows of the one before, and then little has changed.

Owns when that is so. Knows nothing of who plans the steps.
"""

from __future__ import annotations

import numpy as np

from aengine.attention.metadata import IntArray, StepLayout, build_layout


class Layouts:
    """What `build_layout` makes of every step, for a third of the time where the same rows decode within their pages."""

    def __init__(self, page_table: IntArray, page_size: int) -> None:
        """`page_table`: [max rows, max pages per row], which changes from step to step."""
        self._page_table = page_table
        self._page_size = page_size
        self._rows: IntArray | None = None  # of the latest step, if that was decodes alone
        self._latest: StepLayout | None = None

    def next(self, rows: IntArray, num_decodes: int, starts: IntArray, lengths: IntArray, *, same_pages: bool) -> StepLayout:
        """As `build_layout`. `same_pages`: nothing was written to the page table since the last call."""
        latest = self._latest
        if latest is not None and same_pages and num_decodes == len(rows) and self._follows(latest, rows, starts):
            layout = StepLayout(
                page_size=self._page_size,
                num_decodes=num_decodes,
                qo_indptr=latest.qo_indptr,
                kv_indptr=latest.kv_indptr,
                kv_indices=latest.kv_indices,
                last_page_len=latest.last_page_len + 1,
                seq_lens=starts + 1,
                positions=starts,
                slot_mapping=latest.slot_mapping + 1,
            )
        else:
            layout = build_layout(rows, num_decodes, starts, lengths, self._page_table, self._page_size)
        self._rows, self._latest = (rows, layout) if num_decodes == len(rows) else (None, None)
        return layout

    def _follows(self, latest: StepLayout, rows: IntArray, starts: IntArray) -> bool:
        """Whether decodes of `rows` at `starts` go on where the latest step ended, each within its last page."""
        return (
            self._rows is not None
            and len(rows) == len(self._rows)
            and not np.count_nonzero(rows != self._rows)
            and not np.count_nonzero(starts != latest.seq_lens)
            and not np.count_nonzero(latest.last_page_len == self._page_size)
        )
