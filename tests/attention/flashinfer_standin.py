"""A stand-in for the parts of FlashInfer that are called: it refuses what breaks FlashInfer's contract, also where FlashInfer would compute
nonsense without a word, and computes the right result in float32 from what is left.

Its signatures take keyword arguments only and are compared with those of the real versions in `flashinfer_signatures.json`. Results are
computed from what is in the index buffers at the time of `run`, as a kernel does. A device is played by `on_device`: after it was
called, tensors that share memory with what was named are on the device, and all others on the host. What `plan` copies to the device
arrives only when an event recorded behind it is waited for; a plan before that is the race that must not happen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Processors:
    """Of `torch.cuda.get_device_properties` what the planner reads."""

    multi_processor_count: int
    major: int = 9


DEVICE = Processors(4)


class ContractError(AssertionError):
    """FlashInfer's contract is broken."""


def check(condition: object, what: str) -> None:
    if not condition:
        raise ContractError(what)


@dataclass
class StandIn:
    """The library object. `calls` is every call in order."""

    __version__: str = "0.6.18.post1"
    processors: Processors = DEVICE
    fa3_modules: bool = False  # whether they are built
    calls: list[str] = field(default_factory=list)
    in_flight: set[object] = field(default_factory=set)  # wrappers whose plan was not seen to arrive
    _device_memory: dict[int, Tensor] | None = None  # by address; kept, so that no address is used again
    wrappers: list[_Wrapper] = field(default_factory=list)

    def on_device(self, *tensors: Tensor) -> None:
        if self._device_memory is None:
            self._device_memory = {}
        self._device_memory |= {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}

    def is_on(self, tensor: Tensor, *, device: bool) -> bool:
        if self._device_memory is None or not len(tensor):
            return True
        return (tensor.untyped_storage().data_ptr() in self._device_memory) == device

    def event(self) -> StandInEvent:
        return StandInEvent(self)

    @property
    def jit(self) -> Jit:
        return Jit(self)

    def BatchDecodeWithPagedKVCacheWrapper(self, **arguments) -> DecodeWrapper:
        return DecodeWrapper(self, **arguments)

    def BatchPrefillWithPagedKVCacheWrapper(self, **arguments) -> PrefillWrapper:
        return PrefillWrapper(self, **arguments)

    def rmsnorm(self, *, input: Tensor, weight: Tensor, eps: float = 1e-06, out: Tensor | None = None) -> Tensor:
        self.calls.append("rmsnorm")
        check(input.dim() in (2, 3), "rmsnorm takes 2 or 3 dimensions")
        check(out is not None and out.shape == input.shape and out.dtype == input.dtype, "rmsnorm without an output like its input")
        check(input.stride(-1) == out.stride(-1) == weight.stride(-1) == 1, "last dimensions must be contiguous")
        check(weight.dtype == input.dtype and weight.shape == input.shape[-1:], "weights are read as the dtype of the input")
        out.copy_(normed(input.float(), weight, eps))
        return out

    def fused_add_rmsnorm(self, *, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-06) -> None:
        self.calls.append("fused_add_rmsnorm")
        check(input.dim() == 2 and input.shape == residual.shape, "input and residual must be alike")
        check(input.dtype == residual.dtype == weight.dtype, "weights and residuals are read as the dtype of the input")
        total = input.float() + residual.float()
        residual.copy_(total)
        input.copy_(normed(total, weight, eps))

    def silu_and_mul(self, *, input: Tensor, out: Tensor | None = None) -> Tensor:
        self.calls.append("silu_and_mul")
        check(input.is_contiguous() and out is not None and out.is_contiguous(), "silu_and_mul takes contiguous tensors, out= among them")
        size = input.shape[-1] // 2
        check(size * input.dtype.itemsize % 16 == 0, "both halves of a row must begin at 16 bytes")
        check(out.shape == (*input.shape[:-1], size) and out.dtype == input.dtype, "out does not fit")
        gate, up = input.float().chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)
        return out


@dataclass(frozen=True)
class JitSpec:
    name: str
    is_compiled: bool


@dataclass(frozen=True)
class Jit:
    library: StandIn

    def gen_batch_prefill_module(
        self,
        *,
        backend: str,
        dtype_q: torch.dtype,
        dtype_kv: torch.dtype,
        dtype_o: torch.dtype,
        dtype_idx: torch.dtype,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: int,
        use_sliding_window: bool,
        use_logits_soft_cap: bool,
        use_fp16_qk_reduction: bool,
    ) -> JitSpec:
        check(backend == "fa3" and dtype_idx == torch.int32 and not use_fp16_qk_reduction, "another module is planned with")
        check(dtype_q == dtype_kv == dtype_o and head_dim_qk == head_dim_vo and pos_encoding_mode == 0, "another module is planned with")
        return JitSpec(f"swa_{use_sliding_window}_cap_{use_logits_soft_cap}_sm90", self.library.fa3_modules)


class StandInEvent:
    """Recorded behind plans, it lets them arrive when it is waited for."""

    def __init__(self, library: StandIn) -> None:
        self._library = library
        self._behind: set[object] = set()

    def record(self) -> None:
        self._behind = set(self._library.in_flight)

    def synchronize(self) -> None:
        self._library.in_flight -= self._behind


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@dataclass
class Plan:
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    logits_soft_cap: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    sm_scale: float
    num_rows: int
    num_queries: int


def num_parts(tiles: list[int], pages: list[int], chunk: int) -> int:
    """Of rows of so many tiles of queries and pages, in chunks of so many pages."""
    return sum(one * -(-max(length, 1) // chunk) for one, length in zip(tiles, pages, strict=True))


def chunk_pages(tiles: list[int], pages: list[int], page_size: int, fitting: int) -> int:
    """Of PrefillBinarySearchKVChunkSize."""
    low, high = max(128 // page_size, 1), max(pages)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if num_parts(tiles, pages, middle) > fitting else (low, middle)
    return low


def reserved(plan: Plan, qo_indptr: Tensor, kv_indptr: Tensor, processors: Processors, *, graph: bool) -> tuple[int, int]:
    """Bytes that the planner of 0.6.x takes of the float and of the int workspace: PrefillSplitQOKVIndptr and PrefillPlan."""
    group, rows = plan.num_qo_heads // plan.num_kv_heads, plan.num_rows
    queries = [int(one) * group for one in qo_indptr.diff()]
    pages = [int(one) for one in kv_indptr.diff()]
    average = (plan.num_queries - rows + 1) * group if graph else sum(queries) // rows
    tile = 128 if average > 64 and plan.head_dim < 256 else 64 if average > 16 or processors.major < 8 else 16
    tiles = [-(-one // tile) for one in queries]
    if plan.window_left >= 0:
        pages = [min(-(-(plan.window_left + tile) // plan.page_size), one) for one in pages]
    fitting = 2 * processors.multi_processor_count // plan.num_kv_heads
    chunk = chunk_pages(tiles, pages, plan.page_size, fitting)
    split, parts = graph or chunk < max(pages), num_parts(tiles, pages, chunk)
    padded = max(fitting, -(-plan.num_queries * group // tile) + rows - 1) if graph else parts
    check(parts <= padded, "new batch size should not exceed padded batch size")
    floats = sum(-(-plan.num_qo_heads * padded * tile * size * 4 // 16) * 16 for size in (plan.head_dim, 1)) if split else 0
    sizes = [4 * padded] * 3 + [4 * (rows + 1), 4] + [4] * graph + ([4 * (plan.num_queries + 1), padded] if split else [])
    return floats, sum(-(-size // 16) * 16 for size in sizes)


def reserved_fa3(plan: Plan, qo_indptr: Tensor, processors: Processors) -> int:
    """Bytes that PrefillSM90Plan takes of the int workspace."""
    tile = 192 if plan.head_dim == 64 else 128
    one_schedule = -(-plan.num_queries // tile) + plan.num_rows - 1 > 4096
    works = sum(-(-int(one) // tile) for one in qo_indptr.diff()) * (1 if one_schedule else plan.num_qo_heads)
    return sum(-(-4 * size // 16) * 16 for size in [works] * 7 + [processors.multi_processor_count + 1])


class _Wrapper:
    graph = False

    def __init__(self, library: StandIn, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        check(kv_layout == "NHD" and backend in ("fa2", "fa3"), "NHD, fa2 and fa3 are what was tested, whatever the defaults are")
        check(backend == "fa2" or library.fa3_modules, "building fa3 takes minutes")
        self.backend = backend
        check(float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any(), "the workspace must be bytes, and zero")
        library.wrappers.append(self)
        self.library = library
        self.float_workspace = float_workspace_buffer
        self.int_workspace = torch.empty(8 << 20, dtype=torch.uint8)
        self.planned: Plan | None = None
        self.qo_indptr = self.kv_indptr = self.kv_indices = self.last_page_len = torch.empty(0)

    def reset_workspace_buffer(self, *, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        check(int_workspace_buffer.dtype == torch.uint8, "the int workspace must be bytes")
        self.float_workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer

    def check_plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor, seq_lens: Tensor | None, **others
    ) -> None:
        """What both plans have in common: index arrays that fit together, and that nothing is left to a default."""
        check(self not in self.library.in_flight, "planned again before the plan before was on the device")
        library = self.library
        rows = len(last_page_len)
        check(rows > 0, "nothing to plan")
        check(seq_lens is not None, "without seq_lens lengths are computed again")
        page_size = others["page_size"]
        lengths = (kv_indptr.diff() - 1) * page_size + last_page_len
        if self.backend == "fa2":
            # Its planner reads none of them, but up to 0.6 the wrapper takes Python's max() of them.
            check(seq_lens.tolist() == [lengths.max()], "fa2 is given the longest row alone")
        else:
            check(seq_lens.tolist() == lengths.tolist(), "seq_lens and pages do not fit")
        host = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "last_page_len": last_page_len, "seq_lens": seq_lens}
        for name, tensor in (host | {"kv_indices": kv_indices}).items():
            check(tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), f"{name} must be int32 [n]")
            check(library.is_on(tensor, device=name == "kv_indices"), f"{name} is on the wrong side")
        check(len(qo_indptr) == len(kv_indptr) == rows + 1, "index arrays of different numbers of rows")
        check(qo_indptr[0] == kv_indptr[0] == 0, "indptr must begin with 0")
        check((qo_indptr.diff() > 0).all() and (kv_indptr.diff() > 0).all(), "rows without queries or pages")
        check(len(kv_indices) == kv_indptr[-1], "kv_indices and kv_indptr do not fit")
        check(((last_page_len >= 1) & (last_page_len <= page_size)).all(), "last_page_len must be 1..page_size")
        check((qo_indptr.diff() <= lengths).all(), "more queries than tokens")
        for name in ("q_data_type", "kv_data_type"):
            check(isinstance(others[name], torch.dtype), f"{name} was left to a default")
        check(others["q_data_type"] in (torch.float16, torch.bfloat16), "there are kernels for float16 and bfloat16")
        cached = [others["q_data_type"], torch.float8_e4m3fn] if self.backend == "fa2" else [others["q_data_type"]]
        check(others["kv_data_type"] in cached, "no kernel for this KV dtype")
        check(others["head_dim"] in (64, 128, 256), "no kernel for this head_dim")
        check(others["num_qo_heads"] % others["num_kv_heads"] == 0, "no whole number of query heads per KV head")
        check(others["sm_scale"] is not None, "sm_scale was left to a default")
        check(others["pos_encoding_mode"] == "NONE", "positions are encoded before")
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "window_left", "q_data_type", "kv_data_type", "sm_scale")
        chosen = {name: others[name] for name in names}
        cap = others["logits_soft_cap"] or 0.0
        self.planned = Plan(**chosen, logits_soft_cap=cap, num_rows=rows, num_queries=int(qo_indptr[-1]))
        if self.backend == "fa2":
            floats, ints = reserved(self.planned, qo_indptr, kv_indptr, library.processors, graph=self.graph)
        else:
            floats, ints = 0, reserved_fa3(self.planned, qo_indptr, library.processors)
        check(floats <= len(self.float_workspace), f"Buffer overflow: batch_prefill_tmp_v needs {floats} of {len(self.float_workspace)}")
        check(ints <= len(self.int_workspace), f"Buffer overflow: the indices need {ints} of {len(self.int_workspace)}")
        library.in_flight.add(self)

    def check_run(
        self, q: Tensor, cache: tuple[Tensor, Tensor], k_scale: float | None, v_scale: float | None, out: Tensor | None
    ) -> Tensor:
        plan = self.planned
        check(plan is not None, "run before plan")
        keys, values = cache
        check(q.shape == (plan.num_queries, plan.num_qo_heads, plan.head_dim), f"q is {tuple(q.shape)}, planned were {plan}")
        check(q.dtype == plan.q_data_type and q.stride(-1) == 1, "q has another dtype than planned, or no contiguous heads")
        if self.backend == "fa3":  # loads queries by descriptors
            check((q.data_ptr() | q.stride(0) * q.itemsize | q.stride(1) * q.itemsize) % 16 == 0, "q is not aligned to 16 bytes")
        check(keys.shape == values.shape and keys.stride() == values.stride(), "K and V must be laid out alike")
        check(keys.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim), "the cache is not [pages, page_size, heads, head_dim]")
        check(keys.dtype == values.dtype == plan.kv_data_type, "the cache has another dtype than planned")
        check(out is not None and out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous(), "out= must be given, and fit")
        for scale in (k_scale, v_scale):
            check(scale is None or isinstance(scale, float), "scales must be floats")
        scale = plan.sm_scale * (1.0 if k_scale is None else k_scale)
        for row in range(plan.num_rows):
            first, end = int(self.qo_indptr[row]), int(self.qo_indptr[row + 1])
            pages = self.kv_indices[int(self.kv_indptr[row]) : int(self.kv_indptr[row + 1])].long()
            seq_len = (len(pages) - 1) * plan.page_size + int(self.last_page_len[row])
            key, value = (part[pages].flatten(0, 1)[:seq_len].float() for part in cache)
            out[first:end] = attended(q[first:end].float(), key, value, scale, plan.window_left, plan.logits_soft_cap)
        if v_scale not in (None, 1.0):
            out *= v_scale
        return out


class DecodeWrapper(_Wrapper):
    def __init__(
        self,
        library: StandIn,
        *,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(library, float_workspace_buffer, kv_layout, backend)
        check(use_tensor_cores and backend == "fa2", "CUDA cores serve some group sizes only, and fa3 does not split")
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.graph = use_cuda_graph
        if use_cuda_graph:
            check(all(isinstance(buffer, Tensor) and buffer.dtype == torch.int32 for buffer in buffers), "graphs need int32 buffers")
            check(len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1, "buffers of different numbers of rows")
            self.kv_indptr, self.kv_indices, self.last_page_len = buffers
            self.fixed_rows = len(self.last_page_len)
        else:
            check(buffers == (None, None, None), "buffers without a graph are not used")

    def plan(
        self,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
    ) -> None:
        self.library.calls.append("decode.plan")
        queries = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self.check_plan(
            queries,
            indptr,
            indices,
            last_page_len,
            seq_lens,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        self.qo_indptr = queries
        if not self.graph:
            self.kv_indptr, self.kv_indices, self.last_page_len = indptr.clone(), indices, last_page_len.clone()
            return
        check(len(last_page_len) == self.fixed_rows, "the number of rows is fixed")
        check(len(indices) <= len(self.kv_indices), "more pages than the buffer holds")
        self.kv_indptr.copy_(indptr)
        self.last_page_len.copy_(last_page_len)
        self.kv_indices[: len(indices)].copy_(indices)

    def run(
        self,
        *,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.library.calls.append("decode.run")
        return self.check_run(q, paged_kv_cache, k_scale, v_scale, out)


class PrefillWrapper(_Wrapper):
    def __init__(self, library: StandIn, *, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(library, float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        self.library.calls.append(f"prefill.plan {self.backend}")
        check(causal, "prompts are causal, which is not the default")
        check(max_token_per_sequence == int(qo_indptr.diff().max()), "max_token_per_sequence is not the longest row")
        self.check_plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            seq_lens,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        self.qo_indptr, self.kv_indptr = qo_indptr.clone(), paged_kv_indptr.clone()
        self.kv_indices, self.last_page_len = paged_kv_indices, paged_kv_last_page_len.clone()

    def run(
        self,
        *,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.library.calls.append(f"prefill.run {self.backend}")
        return self.check_run(q, paged_kv_cache, k_scale, v_scale, out)


def attended(query: Tensor, key: Tensor, value: Tensor, scale: float, window_left: int, soft_cap: float) -> Tensor:
    """[q, Hq, D] last queries of a row over its [s, Hkv, D] keys, all float32. A window leaves the query itself out."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,shd->hqs", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(len(key) - len(query), len(key))[:, None]
    source = torch.arange(len(key))[None, :]
    hidden = source > at
    if window_left >= 0:
        hidden |= source < at - window_left
    return torch.einsum("hqs,shd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


STANDINS = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": DecodeWrapper.__init__,
    "BatchDecodeWithPagedKVCacheWrapper.plan": DecodeWrapper.plan,
    "BatchDecodeWithPagedKVCacheWrapper.run": DecodeWrapper.run,
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": DecodeWrapper.reset_workspace_buffer,
    "BatchPrefillWithPagedKVCacheWrapper.__init__": PrefillWrapper.__init__,
    "BatchPrefillWithPagedKVCacheWrapper.plan": PrefillWrapper.plan,
    "BatchPrefillWithPagedKVCacheWrapper.run": PrefillWrapper.run,
    "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": PrefillWrapper.reset_workspace_buffer,
    "jit.gen_batch_prefill_module": Jit.gen_batch_prefill_module,
    "rmsnorm": StandIn.rmsnorm,
    "fused_add_rmsnorm": StandIn.fused_add_rmsnorm,
    "silu_and_mul": StandIn.silu_and_mul,
}
