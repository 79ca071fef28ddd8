"""The compiled kernels as Python sees them: structs and signatures of the C interface, and the memory that calls work on.

Owns the mirror of `src/abi.h` and the errors for status codes. Does not know what tensors mean.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import pathlib
import weakref
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint16, c_uint32, c_void_p
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aengine.api.errors import AEngineError, ConfigError
from aengine.kernels.arrays import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8
from aengine.kernels.cpu.compiler import (
    PREBUILT,
    KernelsUnavailableError,
    Level,
    build,
    find_compiled,
    find_prebuilt,
    select_level,
    sources_digest,
)
from aengine.kernels.params import DRAW_PARAMS

_log = logging.getLogger("aengine")
PANEL = 64  # output columns that are packed together; rows of activations are padded to it
BLOCK = 16  # tokens of a KV block
MAX_KEY_DIM, MAX_VALUE_DIM = 576, 512  # of a head
MAX_TAPS, MAX_STATE_KEYS = 16, 256  # of a convolution; key_dim of a recurrent layer
CHANNELS = 32  # a multiple of those of a recurrent layer that its kernels read together
MAX_EXPERTS, MAX_HEADS = 1024, 256  # of a layer; of heads with a matrix each
MAX_BUFFERS, MAX_HEAD_KINDS = 32, 4  # of a model's activations; of its layers of attention
ELEMENTS = {BFLOAT16: 0, FLOAT32: 1}
PAGE_ELEMENTS = {**ELEMENTS, INT8: 2, INT4: 3}
KV_SCALE_BYTES = 8  # of a head of a token in int8 pages
BF16_PAIRS, F32_WORDS, INT8_QUADS, INT4_CODES, INT8_CODES, FLOAT8_CODES, INT2_CODES, INT6_CODES = range(8)  # `Format`
SCALE_KINDS = (BFLOAT16, FLOAT32, FLOAT16)  # by `ScaleKind`
MAX_ACTIVATION_GROUP = 128
_BYTES = ctypes.c_char * 0
DELTA, KIMI_DELTA, MAMBA1, MAMBA2 = range(4)  # `Rule`
EMBED, NORM, LINEAR, ROTATE, ATTEND, GATHER, EXPERTS, HEADS, COPY, READ_KEPT, WRITE_KEPT = range(11)
GATHER_RANKS, SUM_RANKS, CONVOLVE, CONVOLVE_STATES, RECUR, GATE, KEEP_INPUTS, ADD_IMAGES = range(11, 19)
"""`OpKind`."""
EMBEDDING, HEAD, NO_MATRIX = 0, 1, -1  # numbers of matrices, for adapters
NO_BUFFER = -1
STORE, ADD, ACTIVATE, GATED, PARTIAL, MULTIPLY = range(6)  # `Epilogue`
SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLIPPED_SWIGLU = range(6)  # `Activation`
RMS_NORM, LAYER_NORM = range(2)  # `NormKind`
SOFTMAX, SIGMOID = range(2)  # `Scoring`


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Groups of a type and the names of fields that have it, in the order of `src/abi.h`."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class CPackedLinear(Structure):
    _fields_ = _fields(
        (c_void_p, "words bias scales offsets table order"),
        (c_int64, "out_features in_features group_size activation_group"),
        (c_int32, "format interleaved scale_kind with_offsets zero float_activations groups_per_factor"),
    )


class CPart(Structure):
    _fields_ = _fields((c_void_p, "data"), (c_int64, "rows stride"))


class CCodesPart(Structure):
    _fields_ = _fields((c_void_p, "codes scales offsets factors offset_factors"), (c_int64, "rows stride"))


class CNorm(Structure):
    _fields_ = _fields((c_void_p, "weight bias"), (c_int64, "size"), (c_float, "eps"), (c_int32, "kind"))


class COp(Structure):
    _fields_ = _fields((c_int32, "kind"), (c_void_p, "item"))


class CEmbedOp(Structure):
    _fields_ = _fields((c_void_p, "embedding positions"), (c_int64, "width"), (c_int32, "out"), (c_float, "scale"), (c_int64, "image_id"))


class CAddImagesOp(Structure):
    _fields_ = _fields((c_int64, "addition width"), (c_int32, "out"))


class CNormOp(Structure):
    _fields_ = _fields((CNorm, "norm"), (c_void_p, "next"), (c_int64, "first"), (c_int32, "in out adds"), (c_float, "multiplier scale"))


class CLinearOp(Structure):
    _fields_ = _fields((POINTER(CPackedLinear), "weight"), (c_int32, "matrix in out epilogue activation"), (c_float, "multiplier"))


class CAttentionOp(Structure):
    _fields_ = _fields(
        (c_void_p, "cos_sin sinks query_scales slopes"),
        (CNorm, "q_norm k_norm v_norm"),
        (c_int64, "norm_stride group place part heads kv_heads key_dim value_dim rotary_dim window chunked sees_images"),
        (c_int64, "key_first value_first"),
        (c_float, "scale soft_cap"),
        (c_int32, "kind query key value out"),
    )


class CGatherOp(Structure):
    _fields_ = _fields((c_int32, "in out"))


class CExpertsOp(Structure):
    _fields_ = _fields(
        (c_void_p, "router correction expert_scale gate_up down shared_gate_up shared_down"),
        (c_int64, "num_experts top_k num_groups top_groups group_top"),
        (c_float, "scaling"),
        (
            c_int32,
            "scoring normalize shared_gate scaled_inputs shared_gate_up_matrix shared_down_matrix router_in in out epilogue activation "
            "chosen chosen_first",
        ),
        (c_float, "multiplier"),
        (c_void_p, "gate_up_orders down_orders gated_firsts shared_firsts"),
    )


class CHeadsOp(Structure):
    _fields_ = _fields((c_void_p, "weights"), (c_int64, "num_heads copied in_first in_stride out_first out_stride"), (c_int32, "in out"))


class CCopyOp(Structure):
    _fields_ = _fields((c_int64, "in_first out_first width"), (c_int32, "in out"))


class CConvolvePart(Structure):
    _fields_ = _fields((c_int64, "group place of_values first width"))


class CConvolveOp(Structure):
    _fields_ = _fields((c_void_p, "weights bias parts"), (c_int64, "num_parts channels taps"), (c_int32, "in out"))


class CStateLayer(Structure):
    _fields_ = _fields(
        (c_int64, "first blocks_per_piece pieces_per_block tail lines_per_piece pieces_per_page width heads key_heads key_dim value_dim"),
        (c_int64, "channels gates taps num_inputs"),
    )


class CRecurOp(Structure):
    _fields_ = _fields(
        (CStateLayer, "state"),
        (c_void_p, "conv conv_bias rates step_bias skip"),
        (c_int64, "conv_stride"),
        (c_int32, "mixed convolved gates out rule"),
    )


class CGateOp(Structure):
    _fields_ = _fields((CNorm, "norm"), (c_int64, "heads width first"), (c_int32, "gate out sigmoid"))


class CKeptOp(Structure):
    _fields_ = _fields((c_int64, "first width"), (c_int32, "rows"))


class CGatherRanksOp(Structure):
    _fields_ = _fields((c_void_p, "firsts"), (c_int64, "in_first out_first"), (c_int32, "in out"))


class CSumRanksOp(Structure):
    _fields_ = _fields((c_int64, "width"), (c_int32, "out epilogue"), (c_float, "multiplier"))


class CExchange(Structure):
    _fields_ = _fields(
        (c_void_p, "self meet"),
        (POINTER(c_void_p), "slots"),
        (c_int64, "slot_bytes round"),
        (c_int32, "index size status"),
        (c_int64, "nanoseconds"),
    )


class CSharedRanks(Structure):
    _fields_ = _fields((c_void_p, "memory"), (c_double, "timeout"), (c_int32, "index size yields"))


class CHeadKind(Structure):
    _fields_ = _fields((c_int64, "heads kv_heads key_dim value_dim"))


class CModel(Structure):
    _fields_ = _fields(
        (POINTER(COp), "ops"),
        (POINTER(CPackedLinear), "head"),
        (POINTER(c_int64), "strides"),
        (POINTER(CHeadKind), "head_kinds"),
        (c_int64, "num_ops num_buffers num_head_kinds vocab num_positions"),
        (c_float, "logit_soft_cap"),
        (c_int32, "hidden element"),
    )


class CPool(Structure):
    _fields_ = _fields(
        (POINTER(c_void_p), "keys values"),
        (c_int64, "layers_per_page num_pages page_size key_page_bytes value_page_bytes"),
        (c_int32, "element"),
    )


class CLowRankBlock(Structure):
    _fields_ = _fields((c_uint32, "row"), (c_uint16, "first count"))


class CLowRank(Structure):
    _fields_ = _fields((c_void_p, "a b blocks"), (c_int64, "size"))


class CStepAdapters(Structure):
    _fields_ = _fields((POINTER(c_void_p), "adapters"), (c_void_p, "of_tokens"), (c_int64, "num_adapters most"))


class CStep(Structure):
    _fields_ = _fields(
        (c_void_p, "token_ids positions slots qo_indptr kv_indptr kv_indices last_page_len"),
        (c_void_p, "logits_indices last_tokens input_rows output_rows hidden sampled draw_params kept kept_slots inputs"),
        (POINTER(CStepAdapters), "adapters"),
        (c_void_p, "image_rows seen image_layers"),
        (c_void_p, "state_reads state_writes state_replays state_drafts kept_state_rows kept_state_lengths kept_state_pages"),
        (c_int64, "num_tokens num_rows num_logits num_last_tokens num_input_rows num_output_rows num_groups num_kept"),
        (c_int64, "state_pages num_kept_states num_image_rows"),
    )


_OPS = (
    *(COp, CEmbedOp, CAddImagesOp, CNormOp, CLinearOp, CAttentionOp, CGatherOp, CExpertsOp, CHeadsOp, CCopyOp, CConvolvePart),
    *(CConvolveOp, CKeptOp, CGatherRanksOp, CSumRanksOp, CStateLayer, CRecurOp, CGateOp),
)
_OTHERS = (CExchange, CSharedRanks, CModel, CPool, CLowRankBlock, CLowRank, CStepAdapters, CStep)


def _layout() -> dict[str, int]:
    places: dict[str, int] = {}
    for struct in (CPackedLinear, CPart, CCodesPart, *_OPS, *_OTHERS):
        name = struct.__name__.removeprefix("C")
        places.update({f"{name}.{field[0]}": getattr(struct, field[0]).offset for field in struct._fields_})
        places[name] = ctypes.sizeof(struct)
    assert DRAW_PARAMS.fields is not None, "a record"
    places.update({f"DrawParams.{name}": int(field[1]) for name, field in DRAW_PARAMS.fields.items()})
    return {**places, "DrawParams": DRAW_PARAMS.itemsize}


LAYOUT = _layout()
"""The offset of each field of the structs that Python and C++ share, and the size of each struct, in bytes. `CpuKernels` compares it with
what the library was compiled with, so that fields that changed their places on one side alone are noticed when it is loaded."""


def layout_header() -> str:
    """The text of `src/layout.h`, which tells the library's own `LAYOUT`: the names as Python has them, the places as the compiler does."""
    places = [f"offsetof({name.replace('.', ', ')})" if "." in name else f"sizeof({name})" for name in LAYOUT]
    return "\n".join(
        [
            "// Generated from aengine/kernels/cpu/library.py by tools/generate.py; edit abi.h and that file instead.",
            "#pragma once",
            "#include <cstddef>",
            "",
            '#include "abi.h"',
            '#include "exchange.h"',
            "",
            "namespace aengine {",
            "",
            "constexpr const char* LAYOUT_NAMES =",
            *[f'    "{name} "' for name in LAYOUT],
            "    ;",
            "constexpr i64 LAYOUT_PLACES[] = {",
            *[f"    {place}," for place in places],
            "};",
            "",
            "}  // namespace aengine",
            "",
        ]
    )


_EXCHANGE_ABORTED, _EXCHANGE_TIMED_OUT = 11, 12
_MESSAGES = {  # of `Status`
    2: "a token id of the step is not one of the embedding's",
    3: "a position of the step is outside of the cos/sin table",
    4: "a slot of the step is neither -1 nor in the pool",
    5: "a page of the step is not in the pool",
    6: "a row of the step has no pages, a last page of no or too many tokens, or more queries than tokens",
    7: "a logits index is not that of a token of the step",
    9: "a row of the step has no last token",
}

_SIGNATURES: dict[str, tuple[Any, ...]] = {  # name -> result, arguments
    "aengine_level": (c_char_p,),
    "aengine_tiles_agree": (c_int32,),
    "aengine_layout_names": (c_char_p,),
    "aengine_layout_places": (POINTER(c_int64),),
    "aengine_workspace_create": (c_void_p, POINTER(CExchange)),
    "aengine_workspace_destroy": (None, c_void_p),
    "aengine_workspace_trim": (None, c_void_p),
    "aengine_pack": (None, POINTER(CPart), c_int64, c_int32, POINTER(CPackedLinear), c_int),
    "aengine_pack_codes": (None, POINTER(CCodesPart), c_int64, c_int32, POINTER(CPackedLinear), c_int),
    "aengine_quantise": (None, POINTER(CPart), c_int32, c_int64, c_void_p, c_void_p, c_int),
    "aengine_logits": (
        *(c_int, c_int32, c_void_p, c_int64, c_int64, POINTER(CPackedLinear), c_float),
        *(POINTER(CStepAdapters), c_void_p, c_void_p, c_int),
    ),
    "aengine_draw": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int),
    "aengine_log_sums": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "aengine_run_layers": (c_int, POINTER(CModel), POINTER(CPool), POINTER(CStep), c_void_p, c_int),
    "aengine_begin_layers": (c_int, POINTER(CModel), POINTER(CPool), POINTER(CStep), c_void_p, c_int),
    "aengine_finish_layers": (c_int, c_void_p),
    "aengine_finish_and_begin": (c_int, POINTER(CModel), POINTER(CPool), POINTER(CStep), c_void_p, c_int, POINTER(c_int32)),
    "aengine_meet_in_memory": (c_int, c_void_p, c_int64),
    "aengine_gather_ranks": (c_int, c_void_p, c_int64, POINTER(c_int64), c_void_p, c_void_p, c_int),
    "aengine_read_pages": (c_int, POINTER(CPool), c_void_p, c_int64, c_void_p),
    "aengine_bpe_find": (c_int, c_void_p, c_int64, POINTER(c_int64)),
    "aengine_bpe_create": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int),
    "aengine_bpe_destroy": (None, c_void_p),
    "aengine_bpe_is": (c_int, c_void_p, c_int64),
    **dict.fromkeys(("aengine_bpe_size", "aengine_bpe_count"), (c_int64, c_void_p)),
    "aengine_bpe_id": (c_int32, c_void_p, c_char_p, c_int64),
    "aengine_bpe_spelling": (c_void_p, c_void_p, c_int64, POINTER(c_int64)),
    "aengine_bpe_encode": (c_int64, c_void_p, c_char_p, c_void_p, c_void_p, c_int64, c_void_p),
    "aengine_copy_pages": (c_int, POINTER(CPool), c_void_p, c_void_p, c_int64, c_void_p, c_int),
}


def address(array: NDArray[np.generic]) -> int:
    """The address of a contiguous writable array; raises BufferError or TypeError for others. `array.ctypes` takes four times as long."""
    return ctypes.addressof(_BYTES.from_buffer(array.data))


def address_of_params(draw_params: NDArray[np.void], count: int) -> int:
    """The address of `count` contiguous records of `DRAW_PARAMS`. Raises ValueError for others."""
    if draw_params.dtype != DRAW_PARAMS or draw_params.shape != (count,):
        raise ValueError(f"draw_params {draw_params.shape} of dtype {draw_params.dtype} are not {count} of {DRAW_PARAMS}")
    return address(draw_params)


class ExchangeError(AEngineError):
    """A step or a gathering ended early because ranks did not meet. No step of the exchange can be run after it."""

    def __init__(self, message: str, *, timed_out: bool, lagging: tuple[int, ...]) -> None:
        super().__init__(message)
        self.timed_out = timed_out  # on this rank; otherwise the exchange was aborted, or it timed out on another rank
        self.lagging = lagging  # the ranks that had not come, where that is known


class RankExchange(Protocol):
    """How the ranks that compute parts of the same steps give each other their parts."""

    c: CExchange

    def lagging(self) -> tuple[int, ...]:
        """The ranks that the others wait for, or waited for when it failed; none where that is not known."""


def check(status: int) -> None:
    """Raises the error for a status that a C function returned: MemoryError, ValueError for a step that was refused before anything was
    written, or RuntimeError for a workspace that is in use."""
    if status == 0:
        return
    if status == 1:
        raise MemoryError("no memory for the scratch of a step")
    if status == 8:
        raise RuntimeError("the workspace is in a step that has begun and is not finished")
    raise ValueError(_MESSAGES[status])


class CpuKernels:
    """The kernels of one level. All state is in a `Workspace`, a pool or packed weights. Calls release the GIL."""

    def __init__(self, library: ctypes.CDLL, level: Level, *, prebuilt: bool = False) -> None:
        """Raises KernelsUnavailableError for a library that was compiled from other sources."""
        self.level = level
        self.prebuilt = prebuilt  # whether the library came with the package
        self._library = library
        try:
            for name, (result, *arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype = result
                function.argtypes = arguments
        except AttributeError as error:
            raise KernelsUnavailableError(f"the compiled kernels are of another version: {error}") from error
        found, names = library.aengine_level().decode(), library.aengine_layout_names().decode().split()
        places = library.aengine_layout_places()
        layout = {name: places[number] for number, name in enumerate(names)}
        if found != level.value or layout != LAYOUT:
            other = ", ".join([name for name in {**LAYOUT, **layout} if LAYOUT.get(name) != layout.get(name)]) or "none"
            raise KernelsUnavailableError(f"the compiled kernels are of another version ({found}; other places of {other})")

    @functools.cached_property
    def sources(self) -> str:
        """A digest of the sources that these kernels are of."""
        return sources_digest()

    def __getattr__(self, name: str) -> Any:
        """The C function `aengine_<name>`."""
        function = getattr(self._library, f"aengine_{name}")
        setattr(self, name, function)
        return function


class Workspace:
    """Scratch memory, and the number of threads that a call may use. For one call at a time; freed with the object."""

    running: object | None = None
    """The `PreparedStep` that has begun and is not finished; the reference keeps its memory."""

    def __init__(self, kernels: CpuKernels, threads: int, exchange: RankExchange | None = None) -> None:
        """`exchange`: with the other ranks of a model, which no other workspace uses."""
        if threads < 1:
            raise ValueError(f"threads {threads} is not an integer >= 1")
        handle = kernels.workspace_create(None if exchange is None else ctypes.byref(exchange.c))
        if handle is None:
            raise MemoryError("no memory for a workspace")
        self.kernels = kernels
        self.threads = threads
        self.exchange = exchange
        self.handle: int = handle
        weakref.finalize(self, kernels.workspace_destroy, handle).atexit = False  # a step may run up to the end of the process

    def trim(self) -> None:
        """Frees the scratch memory until the next call. No step has begun that is not finished."""
        self.kernels.workspace_trim(self.handle)

    def check(self, status: int) -> None:
        """Raises the error for a status that a C function returned, as the function `check` does, and ExchangeError where the exchange
        failed."""
        if status not in (_EXCHANGE_ABORTED, _EXCHANGE_TIMED_OUT):
            return check(status)
        assert self.exchange is not None
        lagging, timed_out = self.exchange.lagging(), status == _EXCHANGE_TIMED_OUT
        names = f"rank {', '.join(map(str, lagging))}" if lagging else "a rank"
        happened = f"{names} did not come in time" if timed_out else "the exchange between ranks was aborted"
        raise ExchangeError(f"{happened}; the step cannot be finished", timed_out=timed_out, lagging=lagging)


def load_kernels(environ: Mapping[str, str] = os.environ, *, canonical: bool = False) -> CpuKernels:
    """The kernels of the level that `select_level` names: the package's prebuilt ones where they can be used, otherwise compiled (seconds,
    once on a machine).

    Raises KernelsUnavailableError with the reason when there can be none, and ConfigError for a bad AENGINE_CPU_LEVEL.
    """
    kernels = load_level(select_level(environ, canonical=canonical), environ)
    if kernels.tiles_agree():
        return kernels
    _log.warning("the AMX tiles of this CPU compute other numbers than its vectors do; they are not used")
    return load_level(Level.AVX512_BF16, environ)


def built_kernels(environ: Mapping[str, str] = os.environ) -> CpuKernels | None:
    """The kernels that `load_kernels` names, if they need not be compiled first."""
    try:
        level = select_level(environ)
        path = find_prebuilt(level) or find_compiled(level, environ)
        return None if path is None else CpuKernels(_open(path), level)
    except (KernelsUnavailableError, ConfigError):
        return None


def load_level(level: Level, environ: Mapping[str, str] = os.environ, prebuilt: pathlib.Path = PREBUILT) -> CpuKernels:
    """The kernels of a level that this CPU supports, as `load_kernels`."""
    found = find_prebuilt(level, directory=prebuilt)
    if found is not None:
        try:
            return CpuKernels(_open(found), level, prebuilt=True)
        except KernelsUnavailableError as error:
            _log.warning("the prebuilt CPU kernels cannot be used: %s", error)
    with build(level, environ) as path:
        return CpuKernels(_open(path), level)


@functools.cache  # a library stays loaded, and only a full garbage collection frees the types that ctypes makes of its functions
def _open(path: pathlib.Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"cannot load {path}: {error}") from error


def stored_dim(head_dim: int) -> int:
    """How wide a head of keys or values is in a page."""
    return -(-head_dim // BLOCK) * BLOCK
