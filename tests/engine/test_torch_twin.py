"""A twin's logprobs are those of the engine, bit for bit; its gradients are those of Transformers; what it publishes is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
import transformers
from mixture_cases import CASES

from aengine import LLM, Completion, InvalidRequestError, SamplingParams, torch_twin
from aengine.models.loading.hub import resolve_adapter, resolve_model
from aengine.torch_twin import TorchTwin

PROMPTS = [[5, 6, 7], [90, 91], [17] * 20]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, top_p=1.0, seed=1, logprobs=0, ignore_eos=True)
MODELS = ("demo", "qwen3-moe", "mixtral", "olmoe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name == "demo":
            return str(resolve_model("demo"))
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            next(case for case in CASES if case.name == name).make().save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture(params=[(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")], ids=lambda pair: "-".join(pair))
def llm(request: pytest.FixtureRequest, folder: Callable[[str], str]) -> Iterator[LLM]:
    name, dtype = request.param
    with LLM(folder(name), dtype=dtype, kv_cache_memory=16 << 20, max_model_len=64) as llm:
        yield llm


def sampled(llm: LLM) -> list[Completion]:
    vocab = llm.model_info.vocab_size
    return llm.generate([[one % vocab for one in prompt] for prompt in PROMPTS], SAMPLED, progress=False)


def bits_of(completions: Sequence[Completion]) -> list[list[float]]:
    return [[each.logprob for each in one.logprobs or ()] for one in completions]


def loss_of(logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each logprob counts with a factor of its own."""
    every = torch.cat(list(logprobs))
    return (every * torch.linspace(-1.0, 2.0, len(every))).sum()


def in_transformers(twin: TorchTwin, path: str, outputs: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[float, Any]:
    """The loss, and its gradients by name, by a model of its own that has what the engine has, in float32. In bfloat16 the engine's scores
    of experts are others than these, so they are chosen as there."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict({name: tensor.to(dtype).float() for name, tensor in twin.model.state_dict().items()})
    logprobs = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output]
        with nullcontext() if dtype is torch.float32 else twin._chosen_experts([(prompt, list(output))], len(ids)):
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0])
    loss = loss_of(logprobs)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_it_is_the_engine_to_the_last_bit(llm: LLM, folder: Callable[[str], str], request: pytest.FixtureRequest) -> None:
    name, dtype_name = request.node.callspec.params["llm"]
    dtype = getattr(torch, dtype_name)
    twin = TorchTwin(llm)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    for _ in range(2):
        completions = sampled(llm)
        outputs = [one.token_ids for one in completions]
        logprobs = twin(PROMPTS, outputs)
        assert [one.tolist() for one in logprobs] == bits_of(completions)
        loss = loss_of(logprobs)
        optimizer.zero_grad()
        loss.backward()
        total, expected = in_transformers(twin, folder(name), outputs, dtype)
        assert loss.item() == pytest.approx(total, rel=1e-4 if dtype is torch.float32 else 0.05)
        largest = max(gradient.abs().max().item() for gradient in expected.values() if gradient is not None)
        for key, parameter in twin.model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[key], atol=1e-4 * largest, rtol=1e-3)
        before = twin.publish()
        optimizer.step()
        assert twin.publish() == before + 1
        assert bits_of(sampled(llm)) != bits_of(completions)


def test_a_step_changes_what_the_gradient_says(folder: Callable[[str], str]) -> None:
    """The engine's own numbers, before and after a small step along the gradient."""
    with LLM("demo", dtype="float32", kv_cache_memory=16 << 20, max_model_len=64) as llm:
        twin = TorchTwin(llm)
        outputs = [one.token_ids for one in sampled(llm)]

        def value() -> torch.Tensor:
            return torch.cat(twin(PROMPTS, outputs)).sum()

        first = value()
        first.backward()
        squares = sum(float(parameter.grad.double().square().sum()) for parameter in twin.parameters() if parameter.grad is not None)
        rate = 1e-2 / squares
        with torch.no_grad():
            for parameter in twin.parameters():
                assert parameter.grad is not None
                parameter += rate * parameter.grad
        twin.publish()
        assert value().item() - first.item() == pytest.approx(1e-2, rel=0.05)


def test_what_is_published_is_served(folder: Callable[[str], str], tmp_path: Any) -> None:
    with LLM("demo", dtype="float32", kv_cache_memory=16 << 20, max_model_len=64) as llm:
        twin = TorchTwin(llm, trains=lambda name: "layers.4." in name)
        trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        torch.cat(twin(PROMPTS, [one.token_ids for one in sampled(llm)])).sum().backward()
        assert all(parameter.grad is None for parameter in twin.parameters() if not parameter.requires_grad)
        assert 0 < len(trained) < len(list(twin.parameters()))
        torch.optim.SGD(trained, lr=0.05).step()
        twin.publish()
        twin.model.save_pretrained(tmp_path)  # type: ignore[operator]
        greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        (ours,) = llm.generate([PROMPTS[0]], greedy, progress=False)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        given = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None, "eos_token_id": None}
        theirs = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=10, min_new_tokens=10, **given)[0, len(PROMPTS[0]) :].tolist()
        assert list(ours.token_ids) == theirs
        assert ours.weights_versions == (2,) * 10  # the twin has published its own first


@pytest.mark.parametrize("name", ["qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3"])
def test_experts_of_the_backward_pass_are_those_of_the_engine(
    name: str, folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 scores are so close that Transformers would choose others for some tokens; and whatever the engine says is taken."""
    with LLM(folder(name), dtype="bfloat16", kv_cache_memory=16 << 20, max_model_len=64) as llm:
        twin, rows = TorchTwin(llm), [([5, 6, 7, 8], [9, 10]), ([20] * 9, [1])]
        chosen = llm.call(lambda engine: torch_twin._experts_of(engine, rows, None))
        left: list[Any] = []
        seen: list[torch.Tensor] = []
        given = torch_twin._ChosenExperts.__torch_function__

        def watched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = len(self._left)
            found = given(self, func, types, args, kwargs)
            if len(self._left) < before:
                seen.append(found.indices.view(len(rows), 10, -1))
                left[:] = self._left
            return found

        monkeypatch.setattr(torch_twin._ChosenExperts, "__torch_function__", watched)
        twin(*zip(*rows, strict=True))[0].sum().backward()  # type: ignore[arg-type]
        assert len(seen) == len(chosen[0])
        assert left == []
        for layer, indices in enumerate(seen):
            assert torch.equal(indices[0, :6], torch.from_numpy(chosen[0][layer]).long())
            assert torch.equal(indices[1], torch.from_numpy(chosen[1][layer]).long())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_trained_alone(dtype: str, tmp_path: Any) -> None:
    with LLM("demo", dtype=dtype, kv_cache_memory=16 << 20, max_model_len=64) as llm:
        twin = TorchTwin(llm, adapter="mine", path="demo-lora")
        trained = {name: parameter for name, parameter in twin.model.named_parameters() if parameter.requires_grad}
        assert trained
        assert all("lora_" in name for name in trained)
        optimizer = torch.optim.SGD(trained.values(), lr=0.05)
        before: list[Any] = []
        for _ in range(2):
            completions = llm.generate(PROMPTS, SAMPLED, progress=False, adapter="mine")
            outputs = [one.token_ids for one in completions]
            assert bits_of(completions) not in before
            before.append(bits_of(completions))
            logprobs = twin(PROMPTS, outputs)
            assert [one.tolist() for one in logprobs] == bits_of(completions)
            optimizer.zero_grad()
            loss_of(logprobs).backward()
            optimizer.step()
            twin.publish()
        plain = llm.generate(PROMPTS, SAMPLED, progress=False)
        twin.model.save_pretrained(tmp_path)  # type: ignore[operator]
        ours = llm.generate(PROMPTS, SAMPLED, progress=False, adapter="mine")
    with LLM("demo", dtype=dtype, kv_cache_memory=16 << 20, max_model_len=64, adapters={"saved": str(tmp_path)}) as llm:
        assert bits_of(llm.generate(PROMPTS, SAMPLED, progress=False, adapter="saved")) == bits_of(ours) != bits_of(plain)
        assert bits_of(llm.generate(PROMPTS, SAMPLED, progress=False)) == bits_of(plain)


def test_gradients_of_an_adapter() -> None:
    with LLM("demo", dtype="float32", kv_cache_memory=16 << 20, max_model_len=64) as llm:
        twin = TorchTwin(llm, adapter="mine", path="demo-lora")
        outputs = [one.token_ids for one in llm.generate(PROMPTS, SAMPLED, progress=False, adapter="mine")]
        loss_of(twin(PROMPTS, outputs)).backward()
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(str(resolve_model("demo")), dtype=torch.float32)
        model: Any = peft.PeftModel.from_pretrained(base, str(resolve_adapter("demo-lora")), is_trainable=True).eval()
        logprobs = []
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
            logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0])
        loss_of(logprobs).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for name, parameter in twin.model.named_parameters():
            assert (parameter.grad is None) == (name not in expected)
            if name in expected:
                torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4 * largest, rtol=1e-3)


def test_what_has_no_twin() -> None:
    with (
        LLM("demo", quantization="int8", kv_cache_memory=16 << 20) as llm,
        pytest.raises(InvalidRequestError, match="llm: its weights are"),
    ):
        TorchTwin(llm)
    with LLM("demo", kv_cache_memory=16 << 20, max_model_len=64) as llm:
        with pytest.raises(InvalidRequestError, match="path: an adapter has a name and a path"):
            TorchTwin(llm, adapter="mine")
        twin = TorchTwin(llm)
        for prompts, outputs, said in (
            ([[1]], [], "outputs: 0 are not one for each of 1 prompts"),
            ([[1]], [[]], "outputs: one is empty"),
            ([[]], [[1]], "prompts: one is empty"),
            ([[-1]], [[1]], "prompts: token id -1 is not in"),
            ([[1]], [[10**6]], "1000000 is not in"),
            ([[1] * 60], [[1] * 60], "leave no room for a new one in the context"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                twin(prompts, outputs)
