"""Receipts: what was asked of an engine, what it computed with, and what came of it, so that every token of it can be derived again.

A receipt is one line of JSON. It holds the ids of prompt and outputs, so whoever has it knows the conversation. Knows neither engines nor
how a receipt is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError, InvalidRequestError
from aengine.api.outputs import FinishReason, Token
from aengine.api.params import Reasoning, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = 1
_NEEDS = "needs the package cryptography: pip install 'aengine-llm[receipts]'"


@dataclass(frozen=True, slots=True)
class ReceiptOutput:
    """One sequence of a request."""

    token_ids: tuple[int, ...]  # of the whole output
    num_known: int = 0  # the first of them, which the request was given
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that matched
    logprobs: tuple[float, ...] | None = None  # float32, natural log, of each token behind the known ones, where they were asked for


@dataclass(frozen=True, slots=True)
class ReceiptFacts:
    """What a receipt says beside the outputs, as whoever runs the request knows it."""

    prompt: Sequence[int]  # ids
    known: Sequence[Sequence[int] | None]  # output that each sequence had already; None: it had ended
    parts: Mapping[str, str]  # as of `EngineInfo.fingerprint_parts`
    adapter: str = ""
    adapter_number: int = 0  # `AdapterInfo.key`
    image_tokens: int = 0  # of the prompt


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a request was and what came of it."""

    request_id: str
    model: Mapping[str, str]
    """What decides tokens beside the request, by name, as `EngineInfo.fingerprint_parts` has it: the release of aengine, digests of the
    weights, the config and the files of the tokenizer with its chat template, dtypes, and the level of the kernels."""
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams  # in use: with every default and the seed
    outputs: tuple[ReceiptOutput | None, ...]  # by sequence; None: it had ended before
    adapter: str = ""  # its name
    adapter_number: int = 0  # a digest of it, as of `AdapterInfo.key`
    image_tokens: int = 0  # tokens of the prompt that are of images, which are not in the receipt
    weights_versions: tuple[int, ...] = ()  # those of `EngineStats.weights_version` that made the tokens; `model` tells the last of them
    signature: str = ""  # Ed25519 over the other fields, in hexadecimal digits; empty: it was not signed
    public_key: str = ""  # that it is checked with, in the same form

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated, of all outputs."""
        return sum(len(output.token_ids) - output.num_known for output in self.outputs if output is not None)

    @property
    def why_not_replayed(self) -> str:
        """Why the tokens cannot be derived from the receipt; empty: they can."""
        if self.image_tokens:
            return f"its prompt has images ({self.image_tokens} tokens), which a receipt does not hold"
        if len(self.weights_versions) > 1:
            return f"its tokens are of several weights (versions {', '.join(map(str, self.weights_versions))})"
        return ""

    @classmethod
    def of(cls, request_id: str, params: SamplingParams, facts: Callable[[int], ReceiptFacts], read: Sequence[Sequence[Token]]) -> Receipt:
        """The receipt of a request that has ended. `facts`: gives them for a version of the weights. `read`: the tokens of each sequence
        behind those that it had already."""
        versions = tuple(sorted({token.weights_version for sequence in read for token in sequence if token.token_id >= 0}))
        told = facts(max(versions, default=0))
        return cls(
            request_id=request_id,
            model=dict(told.parts),
            prompt=tuple([int(one) for one in told.prompt]),
            params=params,
            outputs=tuple([None if ids is None else _output(ids, read[index], params) for index, ids in enumerate(told.known)]),
            adapter=told.adapter,
            adapter_number=told.adapter_number,
            image_tokens=told.image_tokens,
            weights_versions=versions,
        )

    def with_known(self, lengths: Sequence[int]) -> Receipt:
        """Return the receipt of the request that had so many tokens of each output; those behind them are counted as generated."""
        outputs = [one and replace(one, num_known=min(one.num_known, length)) for one, length in zip(self.outputs, lengths, strict=True)]
        return replace(self, outputs=tuple(outputs))

    # ---- as JSON -------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line, the keys in alphabetical order, in ASCII. Floats are written so that the same bits are read."""
        return json.dumps(self._plain(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"aengine_receipt": FORMAT}
        for one in fields(self):
            value = getattr(self, one.name)
            plain[one.name] = _set_fields(value) if isinstance(value, SamplingParams) else value
        plain["outputs"] = [None if output is None else _output_to_plain(output) for output in self.outputs]
        return plain

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        """Raises `ValueError` with what is wrong."""
        try:
            plain = json.loads(text)
        except ValueError as error:
            raise ValueError(f"is no JSON: {error}") from None
        if not isinstance(plain, dict) or plain.pop("aengine_receipt", None) != FORMAT:
            raise ValueError(f"is no receipt: aengine_receipt is not {FORMAT}")
        if missing := {"request_id", "model", "prompt", "params", "outputs"} - plain.keys():
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        if unknown := plain.keys() - {one.name for one in fields(cls)}:
            raise ValueError(f"has {', '.join(sorted(unknown))}, which no receipt has")
        try:
            plain["params"] = _params_from_plain(plain["params"])
            plain["outputs"] = tuple([None if one is None else _output_from_plain(one) for one in plain["outputs"]])
            plain["prompt"] = tuple(map(int, plain["prompt"]))
            plain["weights_versions"] = tuple(plain.get("weights_versions", ()))
            return cls(**plain)
        except (InvalidRequestError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"cannot be read: {error}") from None

    # ---- signatures ----------------------------------------------------------------------------------------------------

    def signed(self, key: Ed25519PrivateKey) -> Receipt:
        """The receipt with a signature of its other fields."""
        told = replace(self, public_key=key.public_key().public_bytes_raw().hex(), signature="")
        return replace(told, signature=key.sign(told._signed_bytes()).hex())

    def is_signed_by(self, public_key: str) -> bool:
        """Whether the signature is one of `public_key`, in hexadecimal digits, over what the receipt says. Raises `ConfigError` where the
        package cryptography is missing, or for what is no key."""
        if not self.signature or self.public_key != public_key:
            return False
        try:
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError:
            raise ConfigError.of("public_key", _NEEDS) from None
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        except ValueError as error:
            raise ConfigError.of("public_key", f"is no Ed25519 key in hexadecimal digits: {error}") from None
        try:
            key.verify(bytes.fromhex(self.signature), replace(self, signature="")._signed_bytes())
        except (InvalidSignature, ValueError):
            return False
        return True

    def _signed_bytes(self) -> bytes:
        return self.to_json().encode()


def read_receipt_key(path: str | Path, field: str = "receipt_key") -> Ed25519PrivateKey:
    """The private key in a PEM file, as `openssl genpkey -algorithm ed25519` writes it. Raises `ConfigError` (`field`)."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise ConfigError.of(field, _NEEDS) from None
    try:
        key = load_pem_private_key(Path(path).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError.of(field, f"{str(path)!r} is no private key in a PEM file: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError.of(field, f"{str(path)!r} has a {type(key).__name__}, not an Ed25519 key")
    return key


def _set_fields(value: Any) -> dict[str, Any]:
    """What is set of a dataclass, as JSON data. Custom code is left out."""
    return {one.name: plain for one in fields(value) if (plain := _value(getattr(value, one.name))) != _value(_default(one))}


def _params_from_plain(plain: Mapping[str, Any]) -> SamplingParams:
    """What `_set_fields` gave. Raises `InvalidRequestError` or `TypeError`."""
    given = dict(plain)
    if (output := given.get("structured_output")) is not None:
        given["structured_output"] = StructuredOutput(**output)
    if (reasoning := given.get("reasoning")) is not None:
        given["reasoning"] = Reasoning(**reasoning)
    if (biases := given.get("logit_bias")) is not None:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    return SamplingParams(**given)


def _default(one: Any) -> Any:
    return one.default_factory() if callable(one.default_factory) else one.default


def _value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _set_fields(value)
    if isinstance(value, Mapping):
        return {str(key): one for key, one in value.items()}
    if isinstance(value, tuple):
        return [one for one in value if not callable(one)]
    return value


def _output(known: Sequence[int], tokens: Sequence[Token], params: SamplingParams) -> ReceiptOutput:
    last = tokens[-1] if tokens else None
    made = [token for token in tokens if token.token_id >= 0]
    logprobs = None if params.logprobs is None else tuple([math.nan if one.logprob is None else one.logprob for one in made])
    return ReceiptOutput(
        (*(int(one) for one in known), *(token.token_id for token in made)),
        len(known),
        None if last is None else last.finish_reason,
        None if last is None else last.stop_reason,
        logprobs,
    )


_INFINITE = {math.inf: "inf", -math.inf: "-inf"}  # which JSON has not


def _output_to_plain(output: ReceiptOutput) -> dict[str, Any]:
    plain = asdict(output)
    plain["finish_reason"] = None if output.finish_reason is None else output.finish_reason.value
    if output.logprobs is not None:
        plain["logprobs"] = ["nan" if math.isnan(one) else _INFINITE.get(one, one) for one in output.logprobs]
    return plain


def _output_from_plain(plain: Mapping[str, Any]) -> ReceiptOutput:
    reason, logprobs = plain.get("finish_reason"), plain.get("logprobs")
    return ReceiptOutput(
        tuple(map(int, plain["token_ids"])),
        int(plain.get("num_known", 0)),
        None if reason is None else FinishReason(reason),
        plain.get("stop_reason"),
        None if logprobs is None else tuple(map(float, logprobs)),
    )
