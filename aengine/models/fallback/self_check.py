"""The self-check of a model of transformers: its logits over our attention, in chunks and mixed steps, against its own forward pass.

Owns the comparison, and the experiments that tell what is wrong with a model that fails it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from aengine.api.errors import ModelLoadError, one_line
from aengine.attention import AttentionBackend, AttentionMetadata, AttentionSpec, build_layout
from aengine.models.fallback.fallback_model import HeadlessModel, TransformersModel
from aengine.models.torch.decoder import ForwardBatch

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest error of a token's logits, relative to their spread."""
_OUTLIERS = {torch.float32: 0.0, torch.float16: 0.1, torch.bfloat16: 0.1}
"""The share of tokens that may have a larger one; up to `_MOST_OUTLIERS` if rounding alone changes the logits of many."""
_MOST_OUTLIERS = 0.9
_SHORTEST, _LONGEST = 29, 96  # tokens of the longer prompt; twice the smallest window where that is between
Chunk = tuple[int, int]  # a prompt, and how many of its tokens


def check_model(model: TransformersModel, backend: AttentionBackend, vocab_size: int, context: int) -> None:
    """Raises ModelLoadError saying what differs. Uses pages of its own, and frees them."""
    windows = [scoring.window for scoring in backend.spec.scoring if scoring.window is not None]
    longer = min(max(_SHORTEST, min(2 * min(windows, default=0), _LONGEST)), context)
    shorter = max(1, longer * 3 // 5)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocab_size, size=length) for length in (longer, shorter)]
    check = _Check(model, backend)
    try:
        expected = [check.eager(prompt) for prompt in prompts]
        steps = [[(0, longer), (1, shorter)]] if model.computes_whole_prompts else _mixed(longer, shorter)
        found = check.ours(prompts, steps)
        problem = check.difference(found, expected, _OUTLIERS[_precision(backend.spec)])
        if problem is not None:
            problem = check.difference(found, expected, min(_MOST_OUTLIERS, 2 * check.share_of_rounding(prompts, expected)))
        if problem is None:
            return
        if all(bool((logits.std(-1) > 0).all()) for logits in expected):
            layer, cause = check.explain(prompts, expected)
        else:
            layer, cause = "", "a value of config.json or the weights makes logits that are all equal, or no numbers"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the model's code
        raise ModelLoadError(f"the self-check failed: the model raises {type(error).__name__}: {one_line(error)}") from error
    finally:
        backend.free()
    raise ModelLoadError(
        f"the self-check failed: {layer}{cause}; the logits of {problem} differ from those of transformers' own forward pass"
        " (--skip-self-check serves the model all the same)"
    )


def check_labels(model: HeadlessModel, vocab_size: int, context: int) -> None:
    """Raises ModelLoadError where the scores of labels differ from those of transformers' own forward pass."""
    generator = np.random.default_rng(2)
    for length in (min(_SHORTEST, context), 1):
        with torch.inference_mode():
            ids = torch.from_numpy(generator.integers(0, vocab_size, size=length)).to(next(iter(model.weights)).device)
            expected, found = model.label_scores(ids)
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
        if not error < _TOLERANCES[torch.bfloat16]:
            raise ModelLoadError(f"the self-check failed: the scores of labels differ from those of transformers by {error:.1%}")


def _precision(spec: AttentionSpec) -> torch.dtype:
    """Whose tolerance applies: a KV cache of 8 bits changes logits about as much as bfloat16 does."""
    return torch.bfloat16 if spec.cache_dtype.itemsize == 1 else spec.dtype


def _mixed(longer: int, shorter: int) -> list[list[Chunk]]:
    """Steps of prompts 0 and 1: a chunk alone, chunks of both, decodes beside a chunk, decodes alone."""
    if shorter < 4:
        return [[(0, longer), (1, shorter)]]
    first, half = longer // 2, shorter // 2
    chunks = [[(0, first)], [(0, longer - first - 4), (1, half)], [(0, 1), (1, shorter - half - 2)]]
    return [*chunks, [(1, 1), (0, 1)], [(0, 1), (1, 1)], [(0, 1)]]


class _Check:
    def __init__(self, model: TransformersModel, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def eager(self, prompt: np.ndarray, noise: float = 0.0) -> Tensor:
        """Return the logits of transformers' own forward pass over a prompt [T]: [T, vocab_size] float32."""
        return self._model.eager_logits(torch.from_numpy(prompt).to(self._backend.spec.device), noise)

    def ours(self, prompts: Sequence[np.ndarray], steps: Sequence[Sequence[Chunk]]) -> list[Tensor]:
        """[T, vocab_size] float32 of each prompt."""
        spec = self._backend.spec
        width = -(-max(map(len, prompts)) // spec.page_size)
        shape = (spec.num_groups, len(prompts), width)
        table = np.random.default_rng(1).permutation(np.arange(1, 1 + np.prod(shape), dtype=np.int32)).reshape(shape)
        self._backend.allocate(1 + table.size)
        computed = np.zeros(len(prompts), dtype=np.int32)
        parts: list[list[Tensor]] = [[] for _ in prompts]
        for step in steps:
            step = sorted(step, key=lambda chunk: chunk[1] > 1 or not computed[chunk[0]])  # decodes come first
            rows, lengths = (np.array(column, dtype=np.int32) for column in zip(*step, strict=True))
            num_decodes = int(((lengths == 1) & (computed[rows] > 0)).sum())
            layout = build_layout(rows, num_decodes, computed[rows], lengths, table, spec.page_size)
            ids = np.concatenate([prompts[row][computed[row] : computed[row] + length] for row, length in step]).astype(np.int32)
            indices = np.arange(layout.num_tokens, dtype=np.int32)
            token_ids, positions, all_tokens = (torch.from_numpy(array).to(spec.device) for array in (ids, layout.positions, indices))
            batch = ForwardBatch(token_ids, positions, all_tokens, self._backend.plan(AttentionMetadata.of(layout, spec.device)))
            logits = self._model.logits(self._model(batch), batch.logits_indices).float()
            for (row, length), part in zip(step, torch.split(logits, lengths.tolist()), strict=True):
                parts[row].append(part)
                computed[row] += length
        return [torch.cat(row) for row in parts]

    def difference(self, found: Sequence[Tensor], expected: Sequence[Tensor], outliers: float = 0.0) -> str | None:
        """Which logits differ, and by how much; None: at most that share of the tokens does."""
        tolerance = _TOLERANCES[_precision(self._backend.spec)]
        wrong, errors = self._wrong(found, expected)
        count = int(wrong.sum())
        if count <= outliers * len(wrong):
            return None
        return f"{count} of {len(wrong)} tokens (by up to {float(errors.max()):.1%} of their spread, {tolerance:.1%} is allowed)"

    def share_of_rounding(self, prompts: Sequence[np.ndarray], expected: Sequence[Tensor]) -> float:
        """The share of tokens whose logits differ after a change of the embeddings like that of rounding them to the dtype, which sends
        tokens to other experts. 0 in float32, and for a model whose logits differ without any change."""
        dtype = self._backend.spec.dtype
        if not _OUTLIERS[dtype] or self.difference([self.eager(prompt) for prompt in prompts], expected):
            return 0.0
        changed = [self.eager(prompt, torch.finfo(dtype).eps) for prompt in prompts]
        return float(self._wrong(changed, expected)[0].float().mean())

    def _wrong(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return for each token whether its logits differ [T] bool, and by what share of their spread [T] float32."""
        tolerance = _TOLERANCES[_precision(self._backend.spec)]
        ours, theirs = torch.cat(list(found)), torch.cat(list(expected))
        spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
        errors = (ours - theirs).norm(dim=-1) / spread
        top = theirs.topk(2, dim=-1)
        clear = top.values[:, 0] - top.values[:, 1] > tolerance * (theirs.amax(-1) - theirs.amin(-1))
        return ~(errors <= tolerance) | (clear & (ours.argmax(-1) != top.indices[:, 0])), errors  # NaN is wrong

    def explain(self, prompts: Sequence[np.ndarray], expected: Sequence[Tensor]) -> tuple[str, str]:
        """Where a model differs first, and what it does that it must not, as far as experiments tell."""
        (longer, shorter), whole = prompts, [[(0, len(prompts[0])), (1, len(prompts[1]))]]
        layer = self._first_different(longer)
        if self.difference([self.eager(longer)], expected[:1]):
            return layer, "keeps a state from one forward pass to the next"
        half = len(longer) // 2
        if self.difference([self.eager(longer[:half])], [expected[0][:half]]):
            return layer, "looks ahead: later tokens change the logits of earlier ones"
        if self.difference(self.ours([longer], [[(0, len(longer))]]), expected[:1]):
            return layer, "has an attention that is not what it asks the attention function for"
        together = self.ours(prompts, whole)
        if self.difference(together, expected):
            others = self.ours([longer[::-1].copy(), shorter], whole)
            if self.difference(others[1:], together[1:]):
                return layer, "carries a state from token to token beside its attention, so that sequences of a batch mix"
            return layer, "takes the positions of tokens from their order and not from position_ids"
        chunks = [[(0, half)], [(0, len(longer) - half)]]
        if self.difference(self.ours([longer], chunks), expected[:1]):
            return layer, "takes the positions of tokens from their order and not from position_ids, or keeps no state of earlier chunks"
        return layer, "computes something else for tokens of several sequences in one step"

    def _first_different(self, prompt: np.ndarray) -> str:
        """The layer whose output differs first when the prompt is computed in two chunks, with its class; empty if none can be named."""
        half = len(prompt) // 2
        with self._outputs() as eager:
            self.eager(prompt)
        with self._outputs() as ours:
            self.ours([prompt], [[(0, half)], [(0, len(prompt) - half)]])
        for name, (layer, theirs) in eager.items():
            found, expected = torch.cat(ours[name][1], 1)[0].float(), torch.cat(theirs, 1)[0].float()
            if self.difference([found], [expected]):
                return f"layer {name} ({type(layer).__name__}) "
        return ""

    @contextmanager
    def _outputs(self) -> Iterator[dict[str, tuple[nn.Module, list[Tensor]]]]:
        """While open, what each layer returns: [1, T, hidden_size] of every forward pass."""
        outputs: dict[str, tuple[nn.Module, list[Tensor]]] = {}
        hooks = []
        for name, layer in self._model.layers():
            seen: list[Tensor] = []
            outputs[name] = layer, seen

            def keep(_: nn.Module, __: object, output: object, seen: list[Tensor] = seen) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                assert isinstance(tensor, Tensor)
                seen.append(tensor.clone())

            hooks.append(layer.register_forward_hook(keep))
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()
