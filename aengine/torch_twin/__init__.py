"""`TorchTwin`: a model that an engine serves, as a module of torch that can be trained.

Its forward pass is that of the engine's kernels, so the logprobs that a loss is made of are, bit for bit, those that the engine sampled
with. The backward pass is that of Transformers' code in float32, at the same weights. Knows nothing of losses and optimizers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aengine.api.engine import run_all
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import read_token_ids
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.llm import LLM
from aengine.models.loading.checkpoint import open_checkpoint
from aengine.models.loading.hub import resolve_adapter, resolve_model

if TYPE_CHECKING:
    from typing_extensions import Self

_SHARED = "/dev/shm"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchTwin(torch.nn.Module):
    """The model of an `LLM`, or an adapter of it, whose parameters an optimizer may change. `publish()` gives them to the engine.

    Parameters are float32; what both passes compute with is their value in the engine's dtype. Dense models and mixtures of experts that
    Transformers can load, without quantisation.
    """

    def __init__(
        self, llm: LLM, *, adapter: str | None = None, path: str | None = None, trains: Callable[[str], bool] = lambda name: True
    ) -> None:
        """`adapter`: the name of a LoRA adapter, which alone is trained; it begins as PEFT wrote it to the directory `path`, and is loaded
        under this name. None: the model is trained. `trains`: which parameters get gradients, by their names in Transformers or PEFT.
        Raises `InvalidRequestError` for an engine whose weights are not float32 or bfloat16 as they are in the checkpoint, and for an
        adapter without a path; and what Transformers or PEFT raise for a model that they cannot load."""
        super().__init__()
        import transformers

        info, engine = llm.model_info, llm.engine
        if not isinstance(engine, AsyncEngine):
            raise InvalidRequestError.of("llm", f"its engine is a {type(engine).__name__}, and a twin needs one in this process")
        if info.quantization or info.dtype not in _DTYPES:
            raise InvalidRequestError.of("llm", f"its weights are {info.quantization or info.dtype}, and a twin needs float32 or bfloat16")
        if (adapter is None) != (path is None):
            raise InvalidRequestError.of("path", "an adapter has a name and a path")
        self._llm, self._engine, self._adapter = llm, engine, adapter
        self._dtype = _DTYPES[info.dtype]
        folder = resolve_model(engine.config.model, engine.config.revision, engine.config.load_format)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32, attn_implementation="eager")
        self.model: torch.nn.Module = loaded.eval()
        self._stored_names = set(open_checkpoint(Path(folder)).tensors)
        if path is not None:
            import peft

            self.model = peft.PeftModel.from_pretrained(loaded, resolve_adapter(path), is_trainable=True).eval()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trains(name) and (adapter is None or parameter.requires_grad))
        self.publish()

    def forward(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logprob of each token of each output behind its prompt, [tokens of the output] float32 each, under the model itself: natural
        log, before any sampling parameter. They are what the engine's weights give, so `publish()` follows a step of the optimizer."""
        if len(prompts) != len(outputs):
            raise InvalidRequestError.of("outputs", f"{len(outputs)} are not one for each of {len(prompts)} prompts")
        rows = [_read_row(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        scores = self._llm.call(lambda engine: _score_all(engine, rows, self._adapter))
        told = torch.tensor([each.logprob for score in scores for each in score.tokens], dtype=torch.float32)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        logprobs: Tensor = _AsTheEngine.apply(told, self, rows, *trained)  # type: ignore[no-untyped-call]
        return list(torch.split(logprobs, [len(output) for _, output in rows]))

    def publish(self) -> int:
        """Have the engine compute with the parameters as they are now, in its dtype; returns the version of the weights, or the key of the
        adapter. Requests that run go on with the KV that they have; those with an adapter that is published end before."""
        if self._adapter is not None:
            return self._llm.call(partial(self._publish_adapter, self._adapter))
        tensors = self.model.state_dict()
        if self._stored_names.issuperset(name for name, _ in self.model.named_parameters()):
            # One after the other, so that no second set of them is in memory beside what the engine packs.
            weights = ((name, tensor.to(self._dtype)) for name, tensor in tensors.items() if name in self._stored_names)
            return self._llm.call(lambda _: self._engine.update_weights(weights))
        held = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
        # Modules of experts have other names and shapes than a checkpoint, and Transformers knows how they are written there.
        with _shared_folder() as folder:
            cast(Any, self.model).save_pretrained(folder, state_dict=held)
            return self._llm.call(lambda _: self._engine.update_weights(folder))

    async def _publish_adapter(self, name: str, engine: Any) -> int:
        with _shared_folder() as folder:
            cast(Any, self.model).save_pretrained(folder)
            if any(each.name == name for each in engine.adapters):
                await engine.unload_adapter(name)
            return int((await engine.load_adapter(name, folder)).key)

    def torch_logprobs(self, rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        """What `forward` gives, by the code of Transformers in float32, one output behind the other. With gradients where they are on.
        Experts are those that the engine chooses (Ma et al., 2025, "R3"), with the weights that the model's own router gives them."""
        longest = max(len(prompt) + len(output) for prompt, output in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for row, (prompt, output) in enumerate(rows):
            count = len(prompt) + len(output)
            ids[row, :count], mask[row, :count] = torch.tensor([*prompt, *output]), 1
        rounded = {name: _rounded(parameter, self._dtype) for name, parameter in self.model.named_parameters()}
        with self._chosen_experts(rows, longest):
            logits = torch.func.functional_call(self.model, rounded, (ids,), {"attention_mask": mask, "use_cache": False}).logits
        found = []
        for row, (prompt, output) in enumerate(rows):
            own = logits[row, len(prompt) - 1 : len(prompt) + len(output) - 1].float()
            found.append(own.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0])
        return torch.cat(found)

    def _chosen_experts(self, rows: Sequence[tuple[list[int], list[int]]], longest: int) -> AbstractContextManager[object]:
        info = self._llm.model_info
        if info.num_active_parameters == info.num_parameters or info.executor != "cpu" or self._engine.config.pipeline_parallel_size > 1:
            return nullcontext()
        found = self._llm.call(lambda engine: _experts_of(engine, rows, self._adapter))
        chosen = torch.arange(found[0].shape[2]).repeat(found[0].shape[0], len(rows), longest, 1)  # of padding any
        for row, experts in enumerate(found):
            chosen[:, row, : experts.shape[1]] = torch.from_numpy(experts)
        return _ChosenExperts(chosen.flatten(1, 2))

    def train(self, mode: bool = True) -> Self:
        """There is no dropout in what is served, so nothing changes."""
        return self


def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory, where there is such a place."""
    return tempfile.TemporaryDirectory(prefix="aengine-twin-", dir=_SHARED if os.path.isdir(_SHARED) else None)


async def _score_all(engine: Any, rows: Sequence[tuple[list[int], list[int]]], adapter: str | None) -> list[Any]:
    async def score(prompt: list[int], output: list[int]) -> Any:
        return (await engine.score(prompt, [output], adapter=adapter))[0]

    return await run_all([partial(score, prompt, output) for prompt, output in rows])


async def _experts_of(engine: Any, rows: Sequence[tuple[list[int], list[int]]], adapter: str | None) -> list[Any]:
    """[layers with experts, tokens, top_k] of each row."""

    async def ask(ids: list[int]) -> Any:
        return (await engine.hidden_states(ids, experts=True, adapter=adapter)).experts

    return await run_all([partial(ask, [*prompt, *output]) for prompt, output in rows])


class _ChosenExperts(TorchFunctionMode):
    """While it is on, the choices of experts are given, layer after layer: what `torch.topk` finds among the scores of all tokens. That is
    how the routers of Transformers choose."""

    def __init__(self, chosen: Tensor) -> None:
        """`chosen`: [layers, tokens, top_k]."""
        super().__init__()
        self._left = list(chosen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._left and func in (torch.topk, Tensor.topk):
            scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            if self._left[0].shape == (scores.numel() // scores.shape[-1], k):
                indices = self._left.pop(0).view(*scores.shape[:-1], k)
                return torch.return_types.topk((scores.gather(-1, indices), indices))
        return func(*args, **kwargs)


def _read_row(prompt: Sequence[int], output: Sequence[int]) -> tuple[list[int], list[int]]:
    ids = [read_token_ids(each, 2**31 - 1, field).tolist() for field, each in (("prompts", prompt), ("outputs", output))]
    for field, each in zip(("prompts", "outputs"), ids, strict=True):
        if not each:
            raise InvalidRequestError.of(field, "one is empty; at least one token is needed")
    return ids[0], ids[1]


def _rounded(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in `dtype`, as float32, whose gradient is that of the parameter."""
    if dtype is parameter.dtype:
        return parameter
    return parameter + (parameter.detach().to(dtype).float() - parameter.detach())


class _AsTheEngine(torch.autograd.Function):
    """Logprobs that the engine computed, with the gradients that the code of Transformers has for them."""

    @staticmethod
    def forward(ctx: Any, told: Tensor, twin: TorchTwin, rows: Any, *trained: Tensor) -> Tensor:
        ctx.twin, ctx.rows = twin, rows
        return told.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        trained = [parameter for parameter in ctx.twin.model.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            logprobs = ctx.twin.torch_logprobs(ctx.rows)
            found = torch.autograd.grad(logprobs, trained, gradients[0], allow_unused=True)
        return None, None, None, *found
