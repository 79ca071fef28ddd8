"""New weights of a runner: from every source, in both executors; and those that do not fit, which change nothing."""

from __future__ import annotations

import pathlib
import random
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import Driver
from reference import FAMILIES, TINY, save_random, save_tiny
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from test_graphs import graph_runner
from test_greedy import make_runner
from test_tensor_parallel import CASES as MODELS
from tiny_adapters import write_adapter
from torch import Tensor

from aengine.api.errors import InsufficientMemoryError, ModelLoadError
from aengine.api.weight_sources import SharedWeights
from aengine.models.config.model_config import load_spec
from aengine.models.named_weights import named_weights
from aengine.models.spec import ModelSpec
from aengine.runner.contract import LoadAdapter, NewWeights
from aengine.runner.cpu import model as host_model
from aengine.runner.runner import ModelRunner

PROMPTS = [[1, 2, 3, 4, 5], [7, 3, 9], list(range(10, 40))]


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "gpt2": ("GPT2", {}),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
}


def save_two(name: str, path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Two models of a family with other weights."""
    prefix, changes = OTHERS[name] if name in OTHERS else FAMILIES[name]
    save_random(prefix, {**TINY, **changes}, path / "old", 1, dtype=torch.float32)
    model = save_random(prefix, {**TINY, **changes}, path / "new", 1, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.data.abs().mean() * torch.randn_like(parameter.data)
    model.save_pretrained(path / "new")
    return path / "old", path / "new"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    return save_two("qwen3", tmp_path_factory.mktemp("models"))


def tokens(runner: ModelRunner) -> list[list[int]]:
    return Driver(runner).generate(PROMPTS, 8)


def update(runner: ModelRunner, source: object) -> None:
    runner.apply(runner.prepare(NewWeights(source)))


CASES = [(name, backend, {}) for name in ("gemma2", "gpt-oss", "qwen2-tied-windowed") for backend in ("auto", "torch_native")]
CASES += [("qwen3-tied-biased", "auto", {"quantization": how}) for how in ("int8", "int4")]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "backend", "options"), slow_but(CASES[:2] + CASES[-1:], CASES))
def test_directory(name: str, backend: str, options: dict, tmp_path: pathlib.Path) -> None:
    old, new = save_two(name, tmp_path)
    options = {"attention_backend": backend, **options}
    runner, expected = make_runner(old, **options), tokens(make_runner(new, **options))
    before = tokens(runner)
    assert before != expected
    prepared = runner.prepare(NewWeights(new))
    assert tokens(runner) == before
    runner.apply(prepared)
    assert tokens(runner) == expected
    update(runner, str(old))
    assert tokens(runner) == before


def test_graphs_stay(models: tuple[pathlib.Path, pathlib.Path]) -> None:
    old, new = models
    runner = graph_runner(old)
    update(runner, new)
    assert tokens(runner) == tokens(make_runner(new, attention_backend="torch_native"))


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_adapters_stay(backend: str, models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    old, new = models
    adapter = LoadAdapter(1, "a", str(write_adapter(tmp_path / "a", old, size=0.5)))

    def with_adapter(runner: ModelRunner) -> list[list[int]]:
        return Driver(runner).generate(PROMPTS, 8, adapters=[1, 0, 1])

    runner, expected = (make_runner(path, attention_backend=backend, max_adapters=1) for path in (old, new))
    for each in (runner, expected):
        each.apply(each.prepare(adapter))
    before = with_adapter(runner)
    update(runner, new)
    assert with_adapter(runner) == with_adapter(expected) != before


def test_files_may_change_afterwards(models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    old, new = models
    copy = tmp_path / "model.safetensors"
    copy.write_bytes((new / "model.safetensors").read_bytes())
    runner = make_runner(old)
    update(runner, tmp_path)  # without a config.json it is of the model
    with copy.open("r+b") as file:
        file.write(b"\0" * copy.stat().st_size)
    assert tokens(runner) == tokens(make_runner(new))


@pytest.mark.parametrize("kind", ["mapping", "iterator", "shared"])
def test_other_sources(kind: str, models: tuple[pathlib.Path, pathlib.Path]) -> None:
    old, new = models
    tensors = load_file(new / "model.safetensors")
    runner = make_runner(old)

    def one_buffer() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))
        for name, tensor in tensors.items():
            yield name, buffer[: tensor.numel()].copy_(tensor.flatten()).view(tensor.shape)

    shared = SharedWeights(f"aengine-test-{uuid.uuid4().hex}")
    try:
        if kind == "shared":
            shared.write(tensors)
        update(runner, {"mapping": tensors, "iterator": one_buffer(), "shared": shared}[kind])
    finally:
        shared.remove()
    for tensor in tensors.values():
        tensor.zero_()
    assert tokens(runner) == tokens(make_runner(new))


def test_what_does_not_fit_changes_nothing(models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    old, new = models
    runner = make_runner(old)
    before = tokens(runner)
    tensors = load_file(new / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"

    def refuse(source: object, message: str) -> None:
        with pytest.raises(ModelLoadError, match=message):
            runner.prepare(NewWeights(source))

    refuse({key: tensor for key, tensor in tensors.items() if key != name}, f"the checkpoint does not match the model: it lacks {name}")
    refuse({**tensors, "model.extra.weight": torch.zeros(2)}, "unexpected model.extra.weight")
    refuse({**tensors, name: tensors[name][1:]}, rf"{name} \[\d+, \d+\] instead of")
    refuse({**tensors, name: tensors[name].to(torch.int16)}, f"{name} int16")
    refuse([*tensors.items(), (name, tensors[name])], f"more than one {name}")
    refuse([name], "pairs of a name and a tensor, not str")
    refuse(3, "not from int")
    refuse(tmp_path / "absent", "does not exist")
    refuse(SharedWeights("aengine-absent"), "no shared memory 'aengine-absent'")
    save_tiny("llama", tmp_path / "other")
    refuse(tmp_path / "other", "of another model")
    (tmp_path / "cut.safetensors").write_bytes((new / "model.safetensors").read_bytes()[:-8])
    refuse(tmp_path / "cut.safetensors", "corrupt or truncated")
    save_file(tensors, tmp_path / "whole.safetensors")

    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors.items())[:3]
        raise KeyError("the trainer failed")

    with pytest.raises(KeyError, match="the trainer failed"):
        runner.prepare(NewWeights(breaks()))
    assert tokens(runner) == before


def test_memory_is_checked_before_anything_is_read(models: tuple[pathlib.Path, pathlib.Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = models
    runner = make_runner(old)
    monkeypatch.setattr(host_model, "free_host_memory", lambda: 1 << 10)

    def never() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("read")
        yield

    with pytest.raises(InsufficientMemoryError, match=r"new weights need .* of host memory .* but 1\.00 KiB are available"):
        runner.prepare(NewWeights(never()))


PARTIAL = [(name, backend, {}) for name in ("gpt-oss", "qwen2-moe", "qwen3-tied-biased") for backend in ("auto", "torch_native")]
PARTIAL += [("qwen3-tied-biased", "auto", {"quantization": how}) for how in ("int8", "int4")]


def halves(spec: ModelSpec, seed: int) -> tuple[set[str], set[str]]:
    """The tensors of the checkpoint that make half of the weights, and those of the others."""
    generator, found = random.Random(seed), (set[str](), set[str]())
    joined: dict[str, set[str]] = {}
    for name, weight in named_weights(spec).items():
        joined[name] = {part.source for part in weight.parts}
        if name.endswith("shared_gate.weight"):
            joined[name] |= joined.pop(name.replace("shared_gate", "router"))
    for sources in joined.values():
        found[generator.randrange(2)].update(sources)
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "backend", "options"), slow_but(PARTIAL[:2] + PARTIAL[-1:], PARTIAL))
def test_some_weights(name: str, backend: str, options: dict, tmp_path: pathlib.Path) -> None:
    """Weights and biases of the same and of other matrices, and the rest after them."""
    old, new = save_two(name, tmp_path)
    options = {"attention_backend": backend, **options}
    runner = make_runner(old, **options)
    stored, changed = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    some, others = halves(load_spec(old), 1)
    shutil.copytree(old, tmp_path / "mixed")
    save_file({**stored, **{name: changed[name] for name in some}}, tmp_path / "mixed" / "model.safetensors", {"format": "pt"})
    expected = [tokens(make_runner(path, **options)) for path in (old, tmp_path / "mixed", new)]
    assert expected[0] != expected[1] != expected[2]
    before = runner.weights_digest
    prepared = runner.prepare(NewWeights({name: changed[name] for name in some}, partial=True))
    assert tokens(runner) == expected[0]
    runner.apply(prepared)
    assert tokens(runner) == expected[1]
    between = runner.weights_digest
    save_file({name: changed[name] for name in others}, tmp_path / "others.safetensors")
    runner.apply(runner.prepare(NewWeights(tmp_path / "others.safetensors", partial=True)))
    assert tokens(runner) == expected[2]
    assert len({before, between, runner.weights_digest}) == 3


def test_matrices_that_stay_take_no_memory_again(models: tuple[pathlib.Path, pathlib.Path]) -> None:
    runner = make_runner(models[0])
    changed = load_file(models[1] / "model.safetensors")
    stack = runner._executor._model._stack
    before = dict(stack.weights.linears)
    runner.apply(runner.prepare(NewWeights({"model.layers.1.mlp.down_proj.weight": changed["model.layers.1.mlp.down_proj.weight"]}, True)))
    moved = {name for name, linear in stack.weights.linears.items() if linear.c.words != before[name].c.words}
    assert moved == {"layers.1.down"}


def test_names_of_a_model_that_was_saved_without_its_head(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    model = MODELS["gpt2"].make()
    model.save_pretrained(old)
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.data.abs().mean()
    model.save_pretrained(new)
    for path in (old, new):
        stored = load_file(path / "model.safetensors")
        save_file({name.removeprefix("transformer."): tensor for name, tensor in stored.items()}, path / "model.safetensors")
    runner, changed = make_runner(old), load_file(new / "model.safetensors")
    for name, tensor in changed.items():
        if not name.startswith("lm_head"):
            runner.apply(runner.prepare(NewWeights([(name, tensor)], partial=True)))
    assert tokens(runner) == tokens(make_runner(new))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "has none of the weights that the model has"),
        (
            ["model.layers.0.self_attn.q_proj.weight"],
            r"it lacks model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_",
        ),
        (["lm_head.weight", "model.nothing.weight"], r"it has unexpected model\.nothing\.weight"),
    ],
)
def test_some_weights_that_do_not_fit(names: list[str], sentence: str, models: tuple[pathlib.Path, pathlib.Path]) -> None:
    runner, changed = make_runner(models[0]), load_file(models[1] / "model.safetensors")
    expected, digest = tokens(runner), runner.weights_digest
    with pytest.raises(ModelLoadError, match=sentence):
        runner.prepare(NewWeights({name: changed.get(name, torch.zeros(2)) for name in names}, partial=True))
    assert (tokens(runner), runner.weights_digest) == (expected, digest)
