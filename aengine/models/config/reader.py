"""`ConfigReader`: typed access to the keys of a Hugging Face config.json, with errors that name key and value.

Owns what is common to all families: activations, token ids, the dtype. Does not know which keys a family has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.params import Activation

_LARGEST = sys.float_info.max
_LARGEST_INTEGER = 2**31 - 1
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}

MOST_POSITIONS = 1 << 24
_MOST = {
    "max_position_embeddings": MOST_POSITIONS,
    "sliding_window": 2**63 - 1,  # one beyond the context is none
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1024),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 65_536),
}
"""The largest values of what lists are made of before a checkpoint is read: several times those of any model. Other integers have up to
32 bits."""


class NotNativeError(ModelLoadError):
    """A model that no native implementation runs, although its config.json may be right: transformers may run it."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """What errors about a config name: its file, and what the keys are called there."""

    file: str = "config.json"
    keys: Mapping[str, str] = field(default_factory=dict)  # key of the config -> the file's; the others are called the same

    def name(self, key: str) -> str:
        return self.keys.get(key, key)


CONFIG_JSON = ConfigSource()


@dataclass(frozen=True, slots=True)
class ConfigReader:
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]  # the family's values of keys that are absent; a key of the config that is null is not absent
    keys: Mapping[str, str] = field(default_factory=dict)  # as `Family.keys`; the first name is that in the defaults
    max_model_len: int | None = None  # tokens that the engine will be limited to; None: by the model and memory alone
    family: str = ""  # whose config it is, if it describes a whole model; both as in `ModelSpec`
    architecture: str = ""
    source: ConfigSource = CONFIG_JSON

    def name(self, key: str) -> str:
        """A key as the file of the config has it."""
        return self.source.name(self._own(key))

    def _own(self, key: str) -> str:
        names = self.keys.get(key, key).split()
        return next((name for name in names if name in self.config), names[0])

    def get(self, key: str, fallback: Any = None) -> Any:
        """The value of a key; `fallback` if it is absent or null."""
        name = self._own(key)
        value = self.config[name] if name in self.config else self.defaults.get(name)
        return fallback if value is None else value

    def positive(self, key: str, fallback: int | None = None) -> int:
        value = self._present(key, fallback)
        if not _is_integer(value) or value < 1:
            raise self.unusable(key, value, "a positive integer")
        most = _MOST.get(key, _LARGEST_INTEGER)
        if value > most:
            raise self.unusable(key, value, f"an integer of at most {most}")
        return int(value)

    def positive_or_none(self, key: str) -> int | None:
        """None if the value is absent, null or 0."""
        return None if self.get(key, 0) in (0, False) else self.positive(key)

    def count(self, key: str, fallback: int | None = None) -> int:
        value = self._present(key, fallback)
        if not _is_integer(value) or not 0 <= value <= _LARGEST_INTEGER:
            raise self.unusable(key, value, "an integer of at least 0")
        return int(value)

    def integers(self, key: str, fallback: Sequence[int]) -> Sequence[int]:
        value = self._present(key, fallback)
        if not isinstance(value, list | tuple) or not all(map(_is_integer, value)):
            raise self.unusable(key, value, "a list of integers")
        return value

    def numbers(self, key: str, fallback: Sequence[float]) -> Sequence[float]:
        """A list of as many numbers as `fallback` has."""
        value = self._present(key, fallback)
        if not isinstance(value, list | tuple) or not all(map(is_number, value)) or len(value) != len(fallback):
            raise self.unusable(key, value, f"a list of {len(fallback)} numbers")
        return [float(one) for one in value]

    def number(self, key: str, fallback: float | None = None) -> float:
        value = self._present(key, fallback)
        if not is_number(value) or value < 0:
            raise self.unusable(key, value, "a number of at least 0")
        return float(value)

    def positive_number(self, key: str, fallback: float | None = None) -> float:
        value = self._present(key, fallback)
        if not is_number(value) or value <= 0:
            raise self.unusable(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, fallback: bool = False) -> bool:
        value = self.get(key, fallback)
        if not isinstance(value, bool):
            raise self.unusable(key, value, "true or false")
        return value

    def unusable(self, key: str, value: Any, needed: str) -> ModelLoadError:
        return ModelLoadError(f"{self.name(key)} {value!r} in {self.source.file} is not {needed}")

    def _present(self, key: str, fallback: Any) -> Any:
        value = self.get(key, fallback)
        if value is None:
            raise ModelLoadError(f"{self.source.file} lacks {self.name(key)}")
        return value

    def refuse(self, **expected: Any) -> None:
        """Raises NotNativeError for a key that has another value than the one given here, which is the only one that is supported."""
        for key, value in expected.items():
            if self.get(key, value) != value:
                raise NotNativeError(f"{self.name(key)} {self.get(key)!r} in {self.source.file} is not supported; supported is {value!r}")

    def activation(self, key: str = "hidden_act", fallback: str = "silu") -> Activation:
        name = self.get(key, fallback)
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise NotNativeError(
                f"{self.name(key)} {name!r} in {self.source.file} is not supported; supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]

    def part(self, key: str, **changes: Any) -> ConfigReader:
        """A reader of the object that stands under a key, with `changes` to it."""
        config = self.get(key, {})
        if not isinstance(config, dict):
            raise self.unusable(key, config, "an object")
        return replace(self, config={**config, **changes})

    def layer_types(
        self, num_layers: int, known: Sequence[str] = ("full_attention", "sliding_attention"), key: str = "layer_types"
    ) -> list[str] | None:
        """The entries of `key`, one per layer; None if it is absent."""
        kinds, name = self.get(key), self.name(key)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            count = len(kinds) if isinstance(kinds, list) else repr(kinds)
            raise ModelLoadError(f"{name} in {self.source.file} has {count} entries for {self.name('num_hidden_layers')} {num_layers}")
        unknown = sorted({str(kind) for kind in kinds} - set(known))
        if unknown:
            raise NotNativeError(f"{name} {unknown[0]!r} in {self.source.file} is not supported; supported are {', '.join(known)}")
        return kinds


def is_number(value: Any) -> bool:
    """Whether it is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_token_ids(value: Any, key: str) -> tuple[int, ...]:
    """None, an id or a list of ids -> the distinct ids in order. Raises ModelLoadError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_integer(token_id) and 0 <= token_id <= _LARGEST_INTEGER for token_id in ids):
        raise ModelLoadError(f"{key} {value!r} is not a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))
