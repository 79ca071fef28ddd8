"""What ranks say to each other, and its bytes: frozen dataclasses of numbers, texts and arrays of int32 or bytes, encoded without pickle.

A frame is its length (uint32), the kind of the message (uint32), one 8-byte number per field in the order of the fields, and then the
bytes of texts and arrays, each padded to 8 bytes; the number of such a field is its length in bytes. Everything is little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.scheduler.plan import NO_INTS, IntArray, StateRows, StepPlan

FRAME = struct.Struct("<II")
MAX_MESSAGE = 1 << 28  # bytes behind the frame's header
ByteArray = NDArray[np.uint8]
_DTYPES: dict[str, np.dtype[Any]] = {"IntArray": np.dtype("<i4"), "ByteArray": np.dtype(np.uint8)}


class MessageError(Exception):
    """Raised for bytes that are no message, and for a message longer than `MAX_MESSAGE`."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank of another host."""

    rank: int
    version: str  # of aengine
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The driver's first message: what a rank has to do."""

    config: str  # EngineConfig as JSON
    model_dir: str  # on the driver's host
    num_local: int  # ranks on the driver's host
    store_host: str  # where the driver listens for what its ranks set up between them; "": its address
    store_port: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a Hello that does not fit; the connection is then closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What has to be the same on all ranks."""

    values: str  # a JSON object of texts


@dataclass(frozen=True, slots=True)
class Sizes:
    """From a rank that has loaded: how much it can hold. From the driver: the least of all ranks, and what their pages take together."""

    num_pages: int
    max_model_len: int
    bytes_per_page: int
    weights_digest: str  # from a rank: of its part; from the driver: of all parts


@dataclass(frozen=True, slots=True)
class StageAddresses:
    """From a rank: where it waits for the rank of the stage before. From the driver: where all of them do, and what they prove to know."""

    by_rank: str  # JSON list of host:port
    secret: str


@dataclass(frozen=True, slots=True)
class RankLoadProgress:
    """How many bytes of its weights a rank has loaded."""

    loaded: int
    total: int


@dataclass(frozen=True, slots=True)
class Log:
    level: int  # as in logging
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Says why the sender, a rank or an engine that shares experts, ends."""

    error: str  # name of the class
    field: str  # of a ConfigError; of a RankHungError the rank
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A `StepPlan` without the parts that rank 0 alone uses: new rows, rows of the draft model, and what the result should say."""

    step: int
    rows: IntArray
    num_decodes: int
    starts: IntArray
    lengths: IntArray
    num_sampled: IntArray
    token_ids: IntArray
    page_groups: IntArray
    page_rows: IntArray
    page_cols: IntArray
    page_ids: IntArray
    copy_from: IntArray
    copy_to: IntArray
    scores_prompts: bool
    adapters: IntArray
    # As in `StateRows`, which is None where there is nothing; pages of states one after the other.
    state_rows: IntArray
    state_pages: IntArray
    state_sources: IntArray
    kept_rows: IntArray
    kept_lengths: IntArray
    kept_pages: IntArray

    @classmethod
    def of(cls, plan: StepPlan) -> Plan:
        states = plan.states
        of_states = [NO_INTS] * 6
        if states is not None:
            tables = (states.pages.ravel(), states.sources.ravel(), states.kept_rows, states.kept_lengths, states.kept_pages.ravel())
            of_states = [states.rows, *tables]
        return cls(*[getattr(plan, name) for name in _PLAN_FIELDS], *of_states)

    def step_plan(self) -> StepPlan:
        states, count = None, len(self.state_rows) + len(self.kept_rows)
        if count:
            size = (len(self.state_pages) + len(self.kept_pages)) // count
            written, sources, kept = (one.reshape(-1, size) for one in (self.state_pages, self.state_sources, self.kept_pages))
            states = StateRows(self.state_rows, written, sources, self.kept_rows, self.kept_lengths, kept)
        return StepPlan(new_rows=(), states=states, **{name: getattr(self, name) for name in _PLAN_FIELDS})


_STATE_FIELDS = ("state_rows", "state_pages", "state_sources", "kept_rows", "kept_lengths", "kept_pages")
_PLAN_FIELDS = tuple(field.name for field in fields(Plan) if field.name not in _STATE_FIELDS)


@dataclass(frozen=True, slots=True)
class Logits:
    """A step's logits are needed of these rows of its hidden states."""

    indices: IntArray


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each row that the step sampled, in the order of the plan's rows. The step ends with it."""

    tokens: IntArray


@dataclass(frozen=True, slots=True)
class Hidden:
    """From a stage to the next one: hidden states of a step."""

    step: int
    words: IntArray  # their bytes


@dataclass(frozen=True, slots=True)
class PrepareChange:
    """The rank prepares a change beside its steps; a `ChangePrepared` follows. May come within a step, as `DiscardChange` may."""

    number: int  # of changes
    change: str  # `Change` as JSON


@dataclass(frozen=True, slots=True)
class ChangePrepared:
    """From a rank: it has prepared the change, or cannot."""

    number: int
    error: str  # name of the class; empty: there is none
    text: str
    weights_digest: str  # of its part of new weights


@dataclass(frozen=True, slots=True)
class ApplyChange:
    """The steps of the plans that follow compute with the change."""

    number: int


@dataclass(frozen=True, slots=True)
class DiscardChange:
    """The change is not applied, whether it is prepared or could not be."""

    number: int


@dataclass(frozen=True, slots=True)
class SleepRank:
    """The rank gives memory back as `Runner.sleep` says. Sent between two plans."""

    level: int
    pages: IntArray


@dataclass(frozen=True, slots=True)
class WakeRank:
    """The rank ends its sleep. After a sleep of level 2 it is sent once a change of weights was applied."""


@dataclass(frozen=True, slots=True)
class ReadPages:
    """The rank answers with what it holds of these pages of KV, as `PagesRead`. Sent between two plans."""

    pages: IntArray


@dataclass(frozen=True, slots=True)
class PagesRead:
    """From a rank: what it holds of the pages that it was asked for, one after the other."""

    content: ByteArray


@dataclass(frozen=True, slots=True)
class WritePages:
    """The rank writes its part of these pages of KV, for the steps of the plans that follow."""

    pages: IntArray
    content: ByteArray


@dataclass(frozen=True, slots=True)
class StepWanted:
    """Between engines that share experts: one has a step to compute, and waits for the others in this turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class Close:
    """The rank ends in an orderly way."""


Message = (
    (Hello | Welcome | Refused | Facts | Sizes | StageAddresses | RankLoadProgress | Log | Failed | Plan | Logits | LastTokens | Hidden)
    | (PrepareChange | ChangePrepared | ApplyChange | DiscardChange | SleepRank | WakeRank | ReadPages | PagesRead | WritePages)
    | (StepWanted | Close)
)
_KINDS: tuple[type[Any], ...] = get_args(Message)


class _Codec:
    """The layout of one kind of message: its number on the wire, and its fields in their order."""

    def __init__(self, kind: int, message: type[Any]) -> None:
        self.kind = kind
        self.message = message
        self.fields = tuple((field.name, str(field.type)) for field in fields(message))
        self.numbers = struct.Struct(f"<{len(self.fields)}q")


_CODECS = tuple(_Codec(kind, message) for kind, message in enumerate(_KINDS))
_CODEC_OF = {codec.message: codec for codec in _CODECS}


def encode(message: Message) -> bytes:
    """The frame of a message. Raises MessageError if it is too long."""
    codec = _CODEC_OF[type(message)]
    numbers: list[int] = []
    parts: list[bytes] = []
    size = codec.numbers.size
    for name, kind in codec.fields:
        value = getattr(message, name)
        if kind in ("int", "bool"):
            numbers.append(value)
            continue
        data = value.encode(errors="replace") if kind == "str" else np.ascontiguousarray(value, _DTYPES[kind]).tobytes()
        numbers.append(len(data))
        if len(data):
            padding = -len(data) % 8
            parts.append(data + bytes(padding) if padding else data)
            size += len(data) + padding
    if size > MAX_MESSAGE:
        raise MessageError(f"a {codec.message.__name__} of {size} bytes is longer than a message may be: {MAX_MESSAGE} bytes")
    return b"".join((FRAME.pack(size, codec.kind), codec.numbers.pack(*numbers), *parts))


def check_header(header: bytes | bytearray) -> tuple[int, int]:
    """The size in bytes of what follows the 8 bytes of a frame's header, and the kind of its message. Raises MessageError."""
    size, kind = FRAME.unpack(header)
    if kind >= len(_CODECS):
        raise MessageError(f"there is no message of kind {kind}")
    if size > MAX_MESSAGE:
        raise MessageError(f"a message of {size} bytes is longer than {MAX_MESSAGE} bytes")
    return size, kind


def decode(kind: int, data: bytearray) -> Message:
    """The message behind a frame's header; its arrays are views into `data`. Raises MessageError for bytes that are none."""
    codec = _CODECS[kind]
    try:
        numbers = codec.numbers.unpack_from(data)
        at = codec.numbers.size
        values: list[Any] = []
        for number, (_, field_kind) in zip(numbers, codec.fields, strict=True):
            if field_kind == "int":
                values.append(number)
            elif field_kind == "bool":
                values.append(bool(number))
            elif not 0 <= number <= len(data) - at:
                raise ValueError(f"a field of {number} bytes, where {len(data) - at} are left")
            else:
                values.append(data[at : at + number].decode() if field_kind == "str" else _array(data, _DTYPES[field_kind], number, at))
                at += number + -number % 8
        if at != len(data):
            raise ValueError(f"its fields have {at} bytes, not {len(data)}")
    except (ValueError, struct.error) as error:
        raise MessageError(f"a {codec.message.__name__} cannot be read: {error}") from None
    message: Message = codec.message(*values)
    return message


def _array(data: bytearray, dtype: np.dtype[Any], size: int, at: int) -> NDArray[Any]:
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        raise ValueError(f"an array of {size} bytes")
    return np.frombuffer(data, dtype, count, at)
