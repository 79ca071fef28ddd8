"""`DeviceDraft`: in torch, a smaller model of the same vocabulary or a draft head. It proposes tokens for the model to check, which stay on
the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.upload import to_device, upload
from aengine.models.draft_heads import draft_token_ids
from aengine.models.torch.decoder import Decoder
from aengine.runner.contract import IntArray, Step
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.model import DeviceModel
from aengine.sampling.draw import select_draw
from aengine.sampling.sampler import Sampler


class DeviceDraft:
    """Has KV pages of its own, with the numbers of the model's. For a head there are hidden states beside them, a row for each slot."""

    def __init__(self, setup: ExecutorSetup, target: DeviceModel, vocab_size: int, check: Callable[[], object]) -> None:
        """`setup` is the draft model's, `target` and `vocab_size` are the model's. To be called on the stream of the steps. Raises what
        loading raises."""
        device = setup.device
        self._device = device
        self._vocab_size = vocab_size
        self._draft_vocab_size = setup.spec.vocab_size
        self._most = setup.most_drafts
        self._last_tokens = torch.zeros(setup.max_num_seqs + setup.max_num_batched_tokens + 1, dtype=torch.int32, device=device)
        self._proposed = torch.zeros(setup.max_num_seqs * self._most, dtype=torch.int32, device=device)
        """By row, a draft at position p of a sequence at p % `most_drafts`: no row has more in a step."""
        self.model = DeviceModel(setup, self._last_tokens, check, target)
        self._draw = select_draw(self._draft_vocab_size, device, setup.dtype)
        ids = draft_token_ids(setup.native_spec, setup.model_dir, setup.config.load_format)
        self._token_ids = None if ids is None else to_device(ids, device)  # of the logits, where these are of some tokens alone
        self._page_size, self._dtype = setup.config.page_size, setup.dtype
        decoder = self.model.model
        self._kept = decoder.kept if isinstance(decoder, Decoder) else None
        self._kept_width = 0 if self._kept is None else setup.native_spec.hidden_size

    def bytes_per_page(self) -> int:
        """Bytes of the hidden states of one page, which come beside its KV; 0 for a model that is no draft head."""
        return self._page_size * self._kept_width * self._dtype.itemsize

    def allocate(self, num_pages: int) -> None:
        """Allocates the hidden states of `num_pages` pages, zeroed. Does nothing for a model that is no draft head."""
        if self._kept is not None:
            self._kept.states = torch.zeros(num_pages * self._page_size, self._kept_width, dtype=self._dtype, device=self._device)

    def free(self) -> None:
        if self._kept is not None:
            self._kept.states = self._kept.states.new_empty(0)

    def read_pages(self, pages: IntArray) -> Tensor | None:
        """The hidden states of these pages, in host memory, for `write_pages`; None for a model that is no draft head."""
        if self._kept is None:
            return None
        return self._kept.states.view(-1, self._page_size, self._kept_width).index_select(0, to_device(pages, self._device)).cpu()

    def write_pages(self, pages: IntArray, content: Tensor | None) -> None:
        if self._kept is not None and content is not None:
            write = to_device(pages, self._device).long()
            self._kept.states.view(-1, self._page_size, self._kept_width).index_copy_(0, write, content.to(self._device))

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        """Copies the hidden states of page sources[i] to page destinations[i]. Does nothing for a model that is no draft head."""
        if self._kept is not None:
            pages = self._kept.states.view(-1, self._page_size, self._kept_width)
            read, write = upload((sources, destinations), self._device)
            pages.index_copy_(0, write.long(), pages.index_select(0, read))

    def run(self, step: Step, sampler: Sampler) -> None:
        """Proposes the tokens that are sampled in the step, with the noise of the model, so that both likely draw the same. Decodes go on
        from what was proposed last for their rows.

        Vocabularies may be padded differently: ids that it does not have become its last one, and those that the model does not have
        the model's last one.
        """
        (token_ids,) = upload((np.minimum(step.token_ids, self._draft_vocab_size - 1),), self._device)
        forward = self.model.forward(step, token_ids)
        if not len(step.sampled_rows):
            return
        params = sampler.draft_params(step.sampled_rows, step.next_positions)
        tokens = None if forward.greedy is None else forward.greedy.tokens
        if params is not None or tokens is None:
            logits = self._of_all(forward.logits(forward.logits_indices))
            on_device = sampler.device_params(forward.rows, forward.next_positions)
            tokens = logits.argmax(-1) if params is None else self._draw(logits, params, on_device, None)
        elif self._token_ids is not None:
            tokens = self._token_ids.index_select(0, tokens)
        tokens = tokens.to(torch.int32)
        self._last_tokens.index_copy_(0, forward.rows.long(), tokens)
        at = forward.rows * self._most + forward.next_positions % self._most
        self._proposed.index_copy_(0, at.long(), tokens.clamp(max=self._vocab_size - 1))

    def _of_all(self, logits: Tensor) -> Tensor:
        """The logits of all tokens: the noise of a token belongs to its id among all."""
        if self._token_ids is None:
            return logits
        return logits.new_full((len(logits), self._draft_vocab_size), -math.inf).index_copy_(1, self._token_ids, logits)

    def fill(self, token_ids: Tensor, at: NDArray[np.int64], rows: IntArray, positions: IntArray) -> Tensor:
        """[n] int32 ids, those `at` these indices replaced by what was proposed for `rows` at `positions`."""
        if not len(at):
            return token_ids
        places, proposed = upload((at.astype(np.int32), rows * self._most + positions % self._most), self._device)
        return token_ids.index_copy(0, places.long(), self._proposed.index_select(0, proposed))
