"""Every field of a description has an effect on the logits of its case: else the case would not see that it is wrong."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
import torch
from driver import Driver, record_logits
from family_cases import Case, randomize
from test_families import CASES, config_of

from aengine.models.config.model_config import load_spec
from aengine.models.spec import ModelSpec
from aengine.runner import model_plan
from aengine.runner.runner import ModelRunner

pytestmark = pytest.mark.slow

PROMPT = list(range(100, 160))
NO_EFFECT = {
    *("max_position_embeddings", "initializer_range", "eos_token_ids"),
    *("group_top", "top_groups", "num_groups"),  # where experts have one group
    "head_weights",  # where a norm is over all heads
    "layers.attention.qk_norm.norm.bias",  # where each head has weights of its own
    "sinks",  # of latent attention
    "is_part",  # it says how a checkpoint is read
    *("layers.attention.within_images", "layers.attention.rope.axes"),  # no prompt here has images
    *("layer_inputs.vocab_size", "layer_inputs.norm.bias"),  # rows that no token has; of no model
}
NORMED_AGAIN = {
    "gemma4_text": ("layers.attention_norm.eps", "layers.mlp.routing.scaling"),
    "gemma3n_text": ("layers.attention_norm.eps", "norm.eps", "embedding_scale"),
    "jamba": ("norm.eps",),
    "minimax": ("embedding_scale",),
}
"""By family what only multiplies what is normed."""
OF_NOTHING = {
    "llama4_text": ("layers.attention.qk_norm.norm.unit_offset",),  # a norm without weights
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("layers.attention.chunked",)),  # windows are of convolutions alone
    "kimi_linear": ("layers.attention.rope.frequencies",),  # nothing is rotated
    **dict.fromkeys(("falcon_h1", "jamba"), ("layers.recurrence.gated_first",)),  # no norm is gated
    **dict.fromkeys(("nemotron_h", "mamba2"), ("layers.parallel",)),  # no layer has attention and an MLP
    **dict.fromkeys(("mamba", "falcon_mamba"), ("layers.parallel", "layers.recurrence.gated_first")),
}
"""By family what is about something that none of its layers has."""


def paths(described: Any) -> Iterator[tuple[str, ...]]:
    """The fields of a dataclass that have a value, and those of dataclasses in it."""
    for field in dataclasses.fields(described):
        value = getattr(described, field.name)
        if dataclasses.is_dataclass(value):
            yield from ((field.name, *path) for path in paths(value))
        elif value not in (None, ()) and not isinstance(value, str) and field.name not in ("layers", *NO_EFFECT):
            yield (field.name,)


def altered(described: Any, path: tuple[str, ...]) -> Any:
    """With another value of the field, if it has one."""
    if not path:
        match described:
            case bool():
                return not described
            case Enum():
                others = [member for member in type(described) if member is not described]
                return others[0]
            case int():
                return described + 1
            case float():
                return described * 1.3 if described > 0.01 else 0.5
            case tuple():
                return tuple(each * 1.3 for each in described)
        return described
    value = getattr(described, path[0], None)
    return described if value is None else dataclasses.replace(described, **{path[0]: altered(value, path[1:])})


def alterations(spec: ModelSpec) -> dict[str, ModelSpec]:
    """In all layers that have a field with a value."""
    found = {".".join(path): altered(spec, path) for path in paths(spec)}
    for path in dict.fromkeys(path for layer in spec.layers for path in paths(layer)):
        layers = tuple(altered(layer, path) for layer in spec.layers)
        found["layers." + ".".join(path)] = dataclasses.replace(spec, layers=layers)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_field_has_an_effect(case: Case, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.make()
    randomize(model, 1)
    model.save_pretrained(tmp_path)
    spec = load_spec(tmp_path, case.max_model_len)

    def logits(of: ModelSpec) -> torch.Tensor | None:
        """None: the checkpoint does not fit, or the model cannot be run."""
        monkeypatch.setattr(model_plan, "find_spec", lambda *given: of)
        try:
            runner = ModelRunner(config_of(case, tmp_path, "torch_native"), tmp_path)
            seen = record_logits(runner)
            Driver(runner).generate([PROMPT], 1)
        except Exception:
            return None
        return seen[0]

    expected = logits(spec)
    assert expected is not None
    without = []
    for name, changed in alterations(spec).items():
        has_no_effect = (
            name in NO_EFFECT
            or name in (*NORMED_AGAIN.get(spec.family, ()), *OF_NOTHING.get(spec.family, ()))
            or name.startswith("images.")
            or (
                name == "layers.attention.chunked"
                and all(layer.attention is None or layer.attention.window is None for layer in spec.layers)
            )
            or (name == "embedding_scale" and spec.embedding_norm is not None)
        )
        found = None if has_no_effect else logits(changed)
        if found is not None and (found - expected).abs().max() < 1e-3 * expected.abs().max():
            without.append(name)
    assert not without
