"""`TransformersModel`: a model of transformers with the call of our own decoder, over our attention.

Owns how the weights are read into the model of transformers, and how its base model and its head are called apart.
"""

from __future__ import annotations

import copy
import logging
import pathlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import array_dtype, as_tensor
from aengine.kernels.quantized import numbers_of
from aengine.models.fallback import FallbackSpec
from aengine.models.fallback.attention import OURS, StepSlot, place, register
from aengine.models.fallback.fallback_config import (
    base_model,
    build,
    generation_class,
    inputs_of_encoder,
    leave_out,
    padding_of,
    quantized_parts,
)
from aengine.models.loading.checkpoint import DTYPES, Checkpoint, WeightsDigest, are_finite, open_checkpoint
from aengine.models.loading.hub import described_problems, shortened
from aengine.models.loading.weights import StoredPart, text_tensors
from aengine.models.model_files import read_json
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.torch.decoder import ForwardBatch

_log = logging.getLogger("aengine")


class _GivenHidden(nn.Module):
    """In place of the base model below a head: returns the hidden states that it was given, in the class that the base model returns."""

    def __init__(self, base: nn.Module, layer: nn.Module) -> None:
        """`layer` is one of those that `base` has."""
        super().__init__()
        self._base = base, layer  # in a tuple, so that their parameters are not those of this module
        self.output: Any = None
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        pooler = self._base[0]._modules.get("pooler")
        if pooler is not None:
            return self.output(last_hidden_state=self.hidden, pooler_output=pooler(self.hidden))
        return self.output(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        """Some models call a module of their base model that has the layers, some read its embedding."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            base, layer = self.__dict__["_base"]
            found = getattr(base, name)
            return self if isinstance(found, nn.Module) and any(layer is module for module in found.modules()) else found


class TransformersModel:
    """A model of transformers that is called as `Decoder` is."""

    def __init__(self, spec: FallbackSpec, model: Any, device: torch.device) -> None:
        """`model` has weights, on `device`, and the attention function `OURS`."""
        self._model = model
        self._base = base_model(model)
        self._slot = StepSlot()
        self._calls = list(spec.encoder_layers) or [call.name for call in spec.attention]
        place(model, self._calls, self._slot, encodes=spec.encodes)
        if self._base is model:  # which has no head
            return
        # The head is the whole model but for the base model, so that whatever a model does to its logits is done.
        self._given = _GivenHidden(self._base, model.get_submodule(self._calls[0]))
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: self._given}

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size], ready for the head."""
        self._slot.step = batch.attention
        out = self._base(input_ids=batch.input_ids.long()[None], position_ids=batch.positions.long()[None], use_cache=False)
        self._slot.step = None
        self._note_output(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _note_output(self, out: Any) -> None:
        if self._base is not self._model:
            self._given.output = type(out)

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """[T, hidden_size] -> [m, vocab_size], of the tokens `indices` [m] int32."""
        return self.scaled_logits(self.head_product(hidden.index_select(0, indices)))

    def scaled_logits(self, product: Tensor) -> Tensor:
        """The logits of a `head_product`: the product as it is."""
        return product

    def head_product(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[m, hidden_size] -> [m, vocab_size], in `out` if it is given: logits, whatever the model makes of the product of its head."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(hidden.shape[:1], dtype=torch.int64, device=hidden.device)  # not read by the base model below the head
        logits: Tensor = self._head(input_ids=ids[None], use_cache=False).logits[0]
        self._given.hidden = None
        return logits if out is None else out.copy_(logits)

    @property
    def weights(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    @property
    def head_shape(self) -> tuple[int, int]:
        """vocab_size and hidden_size, of the output head."""
        rows, columns = self._model.get_output_embeddings().weight.shape
        return rows, columns

    @property
    def computes_whole_prompts(self) -> bool:
        """Whether a prompt is computed in one step."""
        return False

    def layers(self) -> list[tuple[str, nn.Module]]:
        """The modules that enclose an attention and are numbered, in the order of execution, with their names."""
        names = dict.fromkeys(match[0] for match in (re.match(r".*?\.\d+(?=\.)", name) for name in self._calls) if match)
        return [(name, self._model.get_submodule(name)) for name in names]

    def eager_logits(self, token_ids: Tensor, noise: float = 0.0) -> Tensor:
        """[T] int64 ids -> [T, vocab_size] float32: the forward pass of transformers itself, with its "eager" attention.

        `noise` is the largest relative change of what the embeddings are; it is random, and the same each time.
        """
        generator = torch.Generator(token_ids.device).manual_seed(0)

        def disturb(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
            factors = torch.rand(embedded.shape, generator=generator, device=embedded.device)
            return embedded * (1 + noise * (2 * factors - 1)).to(embedded.dtype)

        hook = self._model.get_input_embeddings().register_forward_hook(disturb) if noise else None
        try:
            with self._eager():
                return self._eager_pass(token_ids).float()
        finally:
            if hook is not None:
                hook.remove()

    def _eager_pass(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """While open, the attention is the "eager" one of transformers."""
        configs = {id(module.config): module.config for module in self._model.modules() if hasattr(module, "config")}.values()
        try:
            for config in configs:
                config._attn_implementation = "eager"
            yield
        finally:
            for config in configs:
                config._attn_implementation = OURS


class HeadlessModel(TransformersModel):
    """A model that generates no text. In place of its logits there are products with its embedding, which the self-check compares."""

    def __init__(self, spec: FallbackSpec, model: Any, device: torch.device) -> None:
        super().__init__(spec, model, device)
        self.label_pooling = spec.label_pooling if spec.labels else ""
        self._vocab_size = spec.vocab_size

    def head_product(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        embedding = self._model.get_input_embeddings().weight[: self._vocab_size]
        width = min(embedding.shape[1], hidden.shape[1])  # that of an embedding may be another one
        logits = hidden[:, :width] @ embedding[:, :width].t()
        return logits if out is None else out.copy_(logits)

    @property
    def head_shape(self) -> tuple[int, int]:
        return self._vocab_size, int(self._model.get_input_embeddings().weight.shape[1])

    def classify(self, states: Tensor) -> Tensor:
        """The scores of the labels [k, labels] float64, of hidden states [k, hidden_size] as `label_pooling` pools them: one after the
        other, so that none depends on the others."""
        weight, padding = next(self._model.parameters()), getattr(self._model.config, "pad_token_id", None)
        ids, found = torch.full((1, 1), int(padding == 0), dtype=torch.int64, device=weight.device), []
        for state in states:
            self._given.hidden = state.to(weight.device, weight.dtype)[None, None]
            found.append(self._head(input_ids=ids).logits[0].double())
        self._given.hidden = None
        return torch.stack(found)

    def label_scores(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of the labels of [T] int64 ids by transformers' own forward pass, and by `classify`, both [labels]."""
        with self._eager():
            hidden = self._states(token_ids)
            expected: Tensor = self._model(**self._inputs(token_ids)).logits[0].double()
        pooled = hidden.mean(0) if self.label_pooling == "mean" else hidden[0 if self.label_pooling == "cls" else -1]
        return expected, self.classify(pooled[None])[0]

    def _inputs(self, token_ids: Tensor) -> dict[str, Any]:
        return {"input_ids": token_ids[None]}

    def _states(self, token_ids: Tensor) -> Tensor:
        out = self._base(**self._inputs(token_ids))
        self._note_output(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _eager_pass(self, token_ids: Tensor) -> Tensor:
        return self.head_product(self._states(token_ids))


class EncoderModel(HeadlessModel):
    """A model whose tokens see all tokens of their prompt, which is computed in one step."""

    def __init__(self, spec: FallbackSpec, model: Any, device: torch.device, separator: int | None) -> None:
        """`separator`: the token behind the first of two texts, where the model tells the tokens of the second one apart."""
        super().__init__(spec, model, device)
        self._separator = separator
        self._padding = padding_of(self._base)

    @property
    def computes_whole_prompts(self) -> bool:
        return True

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size]. The rows of a step begin at position 0, but for those that only warm it up."""
        ids, positions = batch.input_ids.long(), batch.positions.long()
        starts = sorted({0, *torch.nonzero(positions == 0).flatten().tolist()})
        self._slot.spans = tuple(pairwise((*starts, len(ids))))
        types = torch.cat([self._types(ids[begin:end]) for begin, end in self._slot.spans])
        if self._padding is not None:
            is_text = (ids != self._padding).long()
            positions = torch.cat([is_text[begin:end].cumsum(0) for begin, end in self._slot.spans]) * is_text + self._padding
        out = self._base(**inputs_of_encoder(self._base, ids[None], positions[None], types[None]))
        self._note_output(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _inputs(self, token_ids: Tensor) -> dict[str, Any]:
        taken = inputs_of_encoder(self._base, token_ids[None], token_ids[None], self._types(token_ids)[None])
        return {name: tensor for name, tensor in taken.items() if name != "position_ids"}

    def _types(self, ids: Tensor) -> Tensor:
        if self._separator is None:
            return torch.zeros_like(ids)
        is_end = (ids == self._separator).long()
        return (is_end.cumsum(0) - is_end).clamp(max=1)


def load_model(
    spec: FallbackSpec,
    model_dir: pathlib.Path,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    digest: WeightsDigest | None = None,
) -> TransformersModel:
    """Reads the weights, which are added to the `digest`, or draws them for `load_format` dummy. Raises ModelLoadError."""
    register()
    config = copy.deepcopy(spec.config)
    if load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(config, OURS, dtype)
        leave_out(model, spec.unused)
    else:
        model = _stored_model(spec, config, model_dir, load_format, dtype, digest)
    without = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    if without:
        raise ModelLoadError(f"transformers leaves tensors of a {spec.family} without numbers: {shortened(without)}")
    model = model.to(device).eval().requires_grad_(False)
    if spec.encodes:
        tells_apart = getattr(spec.config, "type_vocab_size", 0) > 1
        return EncoderModel(spec, model, device, _separator(model_dir) if tells_apart else None)
    return (HeadlessModel if spec.labels else TransformersModel)(spec, model, device)


def _separator(model_dir: pathlib.Path) -> int | None:
    """The id of the token [SEP]; None without one."""
    try:
        added = read_json(model_dir / "tokenizer.json").get("added_tokens") or []
    except ModelLoadError:
        return None
    return next((token["id"] for token in added if token.get("content") == "[SEP]"), None)


def _text_class(spec: FallbackSpec) -> Any:
    """The class of the model, without the models inside that text does not enter: no memory is taken for their weights."""
    whole = generation_class(spec.config)

    def build_without(self: Any, config: Any, *args: Any, **options: Any) -> None:
        whole.__init__(self, config, *args, **options)
        leave_out(self, spec.unused)

    return type(whole.__name__, (whole,), {"__init__": build_without, "__module__": whole.__module__}) if spec.unused else whole


def _text_part(spec: FallbackSpec, checkpoint: Checkpoint) -> Checkpoint:
    with torch.device("meta"):
        model = build(spec.config, OURS, torch.bfloat16)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = (names[id(module)] for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    return text_tensors(checkpoint, embedding, head, (spec.vocab_size, spec.hidden_size))


def _stored_model(
    spec: FallbackSpec, config: Any, model_dir: pathlib.Path, load_format: str, dtype: torch.dtype, digest: WeightsDigest | None
) -> Any:
    checkpoint = open_checkpoint(model_dir, load_format)
    if spec.is_part:
        checkpoint = _text_part(spec, checkpoint)
    quantization = load_quantization(model_dir)
    parts: tuple[StoredPart, ...] = ()
    if quantization is not None:
        with torch.device("meta"):
            parts = quantized_parts(build(copy.deepcopy(config), OURS, dtype), quantization, checkpoint.tensors)
    expected = {name: described for part in parts for name, described in part.expected.items()}
    others = [
        f"{name} {tensor.dtype}" for name, tensor in checkpoint.tensors.items() if tensor.dtype not in DTYPES and name not in expected
    ]
    if others and quantization is not None:
        why = f"of quant_method {quantization.method!r}, of which transformers runs the weights of linear modules alone"
        raise ModelLoadError(f"the checkpoint has tensors {why}: {shortened(others)}")
    if others:
        raise ModelLoadError(f"the checkpoint has dtypes other than {', '.join(DTYPES)}: {shortened(others)}")
    tensors = {name: tensor.get() for name, tensor in checkpoint.tensors.items() if name not in expected or expected[name].dtypes}
    not_finite = next((name for name, tensor in tensors.items() if not are_finite(tensor)), None)
    if not_finite is not None:
        raise ModelLoadError(f"{not_finite} in {checkpoint.tensors[not_finite].file} has numbers that are not finite")
    if digest is not None:
        for name, rows in tensors.items():
            digest.add_weight(name, [rows])
    for part in parts:
        rows = part.rows([tensors.pop(name) for name in part.endings])
        matrix = numbers_of(rows, array_dtype(dtype))
        tensors[part.part.source] = matrix if part.part.transform is None else np.ascontiguousarray(matrix.T)
    if parts:
        _log.info("%d quantised matrices were dequantised: they take the memory of %s", len(parts), str(dtype).removeprefix("torch."))
    kind = _text_class(spec)
    state = {name: as_tensor(array) for name, array in tensors.items() if isinstance(array, np.ndarray)}
    options = {"dtype": dtype, "attn_implementation": OURS, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, info = kind.from_pretrained(None, config=config, state_dict=state, **options)
    except Exception as error:  # of many types
        raise ModelLoadError(f"transformers cannot load {model_dir}: {' '.join(str(error).split())[:500]}") from error
    left_out = tuple(f"{name}." for name in spec.unused)
    unread = ("pooler.", "cls.", "lm_head.", "head.", "decoder.") if spec.encodes and not spec.labels else ()
    problems = {
        "several of its files have": sorted(set(checkpoint.duplicates)),
        "it lacks": sorted(name for name in info["missing_keys"] if not name.startswith(unread)),
        "it has unexpected": sorted(name for name in info["unexpected_keys"] if not name.startswith((*left_out, *unread))),
        "it has other shapes than the config implies:": sorted(
            f"{name} {list(stored)} instead of {list(implied)}" for name, stored, implied in info["mismatched_keys"]
        ),
        "transformers cannot convert": sorted(str(one) for one in info.get("error_msgs") or ()),
    }
    found = described_problems(problems)
    if found:
        raise ModelLoadError(f"the checkpoint does not match its config.json: {found}")
    return model
