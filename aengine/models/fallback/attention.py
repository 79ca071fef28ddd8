"""Our attention in models of transformers: the attention function that they call, and the probe of what each layer calls it with.

transformers has one table of attention functions (`AttentionInterface`) and one of functions that make masks; a model looks up both by the
name in its config. Ours finds what belongs to its engine by an attribute of the layer's module, so there is no global state of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.attention import AttentionStep, Scoring
from aengine.models.fallback import LayerCall

OURS, PROBE = "aengine", "aengine_probe"  # names of attention functions
_ATTRIBUTE, _WINDOW = "aengine_attention", "aengine_window"
_NO_WINDOW = 1 << 40  # a window that holds everything
_UNSUPPORTED = -1
_FARTHEST = 1 << 20  # tokens: masks are probed up to this distance
_IGNORED = frozenset({"dropout", "is_causal", "position_ids", "sliding_window", "softcap", "s_aux"})
"""Arguments that change nothing, or that are read."""


class StepSlot:
    """The attention of the step that runs now; one for each model."""

    step: AttentionStep | None = None
    spans: tuple[tuple[int, int], ...] = ()  # of an encoder: where the tokens of each row begin and end


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the attribute of an attention module holds."""

    slot: StepSlot
    index: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """[1, heads, T, width] each, where T are the tokens of all rows one after another -> [1, T, heads, width]."""
        step = self.slot.step
        assert step is not None
        query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
        step.write(self.index, key, value)
        return step.attend(self.index, query.contiguous(), sinks)[None]


@dataclass(frozen=True, slots=True)
class _WholeLayer:
    """What the attribute of a module of an encoder holds, whose tokens see all tokens of their row. Nothing is kept of them."""

    slot: StepSlot

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """[1, heads, T, width] each -> [1, T, heads, width]. `window`: tokens nearer than this see each other."""
        found = []
        for begin, end in self.slot.spans:
            mask = None
            if window is not None and end - begin > window:
                places = torch.arange(end - begin, device=query.device)
                mask = (places[:, None] - places).abs() < window
            q, k, v = (one[:, :, begin:end] for one in (query, key, value))
            found.append(nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]))
        return torch.cat(found, 2).transpose(1, 2)


def register() -> None:
    """Enters our functions into the tables of transformers."""
    AttentionInterface.register(OURS, _attend)
    AttentionInterface.register(PROBE, _record)
    AttentionMaskInterface.register(PROBE, _probe_mask)


def place(model: nn.Module, names: Iterable[str], slot: StepSlot, *, encodes: bool = False) -> None:
    """Prepares the modules of these names for `OURS`; layers are numbered in their order. `encodes`: they are those of an encoder."""
    for index, name in enumerate(names):
        setattr(model.get_submodule(name), _ATTRIBUTE, _WholeLayer(slot) if encodes else _Layer(slot, index))


@contextmanager
def recording(model: nn.Module, *, encodes: bool = False) -> Iterator[dict[str, LayerCall]]:
    """While open, forward passes of `model` with `PROBE` write what each module calls attention with, in the order of the calls, by its
    name. They raise ModelLoadError for a call that our attention does not compute."""
    calls: dict[str, LayerCall] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        setattr(module, _ATTRIBUTE, (name, calls, encodes))
    try:
        yield calls
    finally:
        for module in modules.values():
            delattr(module, _ATTRIBUTE)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    layer: _Layer | _WholeLayer = getattr(module, _ATTRIBUTE)
    if isinstance(layer, _WholeLayer):
        return layer.attend(query, key, value, options.get("scaling"), options.get("sliding_window")), None
    return layer.attend(query, key, value, options.get("s_aux")), None


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    name, calls, encodes = getattr(module, _ATTRIBUTE)

    def refuse(why: str) -> ModelLoadError:
        return ModelLoadError(f"{name} ({type(module).__name__}) {why}, which the transformers implementation does not support here")

    if name in calls:
        raise refuse("computes attention more than once in a forward pass")
    if getattr(module, "is_cross_attention", False) or key.shape[2] != query.shape[2]:
        raise refuse("attends to tokens other than those of the sequence itself (cross-attention)")
    if encodes:
        if getattr(module, "is_causal", False) and options.get("is_causal") is not False:
            raise refuse("computes causal attention in an encoder")
        calls[name] = LayerCall(name, 1, 1, query.shape[-1], value.shape[-1], Scoring(scale=1.0))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1])), None
    if options.get("is_causal") is False or (attention_mask is None and not getattr(module, "is_causal", True)):
        raise refuse("computes attention that is not causal")
    extra = [key for key, given in options.items() if key not in _IGNORED and isinstance(given, Tensor)]
    if extra:
        raise refuse(f"gives its attention {extra[0]}")
    # A mask without the attribute was computed by the model itself.
    window = _NO_WINDOW if attention_mask is None else getattr(attention_mask, _WINDOW, _UNSUPPORTED)
    if window == _UNSUPPORTED:
        raise refuse("masks its attention other than causally with or without a sliding window")
    if attention_mask is None and options.get("sliding_window"):
        window = int(options["sliding_window"])
    sinks = options.get("s_aux")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if sinks is not None and sinks.shape != (num_heads,):
        raise refuse(f"has sinks of shape {list(sinks.shape)} for {num_heads} heads")
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    scoring = Scoring(
        scale=key_dim**-0.5 if scaling is None else float(scaling),
        window=None if window == _NO_WINDOW else window,
        soft_cap=float(options.get("softcap") or 0.0),
        sinks=sinks is not None,
    )
    calls[name] = LayerCall(name, num_heads, num_kv_heads, key_dim, value_dim, scoring)
    return query.new_zeros((1, query.shape[2], num_heads, value_dim)), None


def _probe_mask(q_length: int, kv_length: int, mask_function: Callable[..., Tensor], config: Any, device: Any = None, **_: Any) -> Tensor:
    """A tensor of the shape of a mask, with the window that the mask stands for as its attribute."""
    most = int(getattr(config, "max_position_embeddings", None) or _FARTHEST)
    mask = torch.zeros((1, 1, q_length, kv_length), device=device)
    setattr(mask, _WINDOW, _window(mask_function, min(most, _FARTHEST)))
    return mask


def _window(mask_function: Callable[..., Tensor], length: int) -> int:
    """The window of a causal mask for sequences of `length` tokens."""
    zero, found = torch.tensor(0), _NO_WINDOW
    for last in (length - 1, length // 2 + 1):
        try:
            visible = mask_function(zero, zero, torch.tensor(last), torch.arange(last + 2)).expand(last + 2)
        except Exception:  # one that is more than a function of distance
            return _UNSUPPORTED
        count = int(visible[: last + 1].sum())
        if not count or bool(visible[last + 1]) or not bool(visible[last + 1 - count : last + 1].all()):
            return _UNSUPPORTED
        if count <= last:
            if found not in (_NO_WINDOW, count):
                return _UNSUPPORTED
            found = count
        elif found <= last:
            return _UNSUPPORTED
    return found
