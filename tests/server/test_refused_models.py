"""Models that cannot be loaded: the engine's start raises one clear sentence, and `aengine-grpc` prints it and exits with 1."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hang_guard import HANG_SECONDS
from safetensors.torch import load_file, save_file

from aengine import AsyncEngine, ModelLoadError
from aengine.api.config import EngineConfig
from aengine.models.loading.hub import resolve_model

SHARDS = 2
STEMS = {"safetensors": "model", "bin": "pytorch_model"}


def in_shards(suffix: str, path: Path) -> Path:
    """The demo model, its weights in shards with an index."""
    shutil.copytree(resolve_model("demo"), path, dirs_exist_ok=True)
    tensors = list(load_file(path / "model.safetensors").items())
    (path / "model.safetensors").unlink()
    weight_map = {}
    for number in range(SHARDS):
        shard = dict(tensors[number::SHARDS])
        name = f"{STEMS[suffix]}-{number + 1:05}-of-{SHARDS:05}.{suffix}"
        weight_map |= dict.fromkeys(shard, name)
        if suffix == "safetensors":
            save_file(shard, path / name)
        else:
            torch.save(shard, path / name)
    (path / f"{STEMS[suffix]}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def shard_of(folder: Path) -> Path:
    return next(folder.glob(f"*-00002-of-{SHARDS:05}.*"))


def truncate(folder: Path) -> None:
    shard = shard_of(folder)
    shard.write_bytes(shard.read_bytes()[:-4096])


def overwrite(folder: Path) -> None:
    shard = shard_of(folder)
    shard.write_bytes(b"\xff" * 64 + shard.read_bytes()[64:])


def empty(folder: Path) -> None:
    shard_of(folder).write_bytes(b"")


def lose(folder: Path) -> None:
    shard_of(folder).unlink()


OF_WEIGHTS = (truncate, overwrite, empty, lose)


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            for path in folder.glob(name):
                path.unlink()

    return change


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: next(folder.glob(name)).write_text(text)


BROKEN = (
    r"\S+-00002-of-00002\.\w+ is (corrupt, or holds Python objects|not a \w+ file|not a file of PyTorch tensors, or corrupt or truncated)"
)
UNKNOWN = "transformers cannot run it either: transformers does not know the model"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated shard": (truncate, BROKEN),
    "corrupt shard": (overwrite, BROKEN),
    "empty shard": (empty, BROKEN),
    "missing shard": (lose, r"\S+\.index\.json lists \S+-00002-of-00002\.\w+, which is missing$"),
    "broken index": (write("*.index.json", "{"), r"\S+\.index\.json is not valid JSON"),
    "no weights": (remove("*-of-*", "*.index.json"), "there are no weights in"),
    "no config": (remove("config.json"), r"model directory \S+ has no config\.json$"),
    "broken config": (write("config.json", "{"), r"\S+config\.json is not valid JSON"),
    "other sizes": (config(intermediate_size=96), "the checkpoint does not match its config.json: it has other shapes"),
    "unknown architecture": (
        config(architectures=["NoSuchForCausalLM"], model_type="no_such"),
        f"architecture 'NoSuchForCausalLM' has no native implementation; {UNKNOWN}",
    ),
    "encoder-decoder": (
        write("config.json", '{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": true}'),
        r"architecture 'T5ForConditionalGeneration' has no native implementation; .* is an encoder-decoder",
    ),
    "rope type": (
        config(rope_scaling={"rope_type": "spiral"}),
        "rope type 'spiral' in config.json is not supported; supported are default",
    ),
    "activation": (config(hidden_act="softplus"), "hidden_act 'softplus' in config.json is not supported; supported are silu"),
    "quantization": (
        config(quantization_config={"quant_method": "quark", "bits": 4}),
        r"quantization_config is not supported \(quant_method 'quark'\); supported are compressed-tensors, gptq, awq, auto-round, ",
    ),
    "wrong type": (config(vocab_size="100"), "vocab_size '100' in config.json is not a positive integer$"),
    "wrong number": (config(num_key_value_heads=3), r"num_attention_heads \d+ is not a multiple of num_key_value_heads 3$"),
}


CASES = [(suffix, name) for name, (change, _) in DAMAGES.items() for suffix in (STEMS if change in OF_WEIGHTS else ["safetensors"])]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("models")
    whole = {suffix: in_shards(suffix, folder / suffix) for suffix in STEMS}

    def damage(suffix: str, name: str) -> Path:
        path = folder / f"{suffix}-{name}".replace(" ", "-")
        if not path.exists():
            shutil.copytree(whole[suffix], path)
            DAMAGES[name][0](path)
        return path

    for path in whole.values():
        asyncio.run(start(path))
    return damage


async def start(path: Path) -> None:
    async with AsyncEngine(EngineConfig(model=str(path), device="cpu", kv_cache_memory=8 << 20)):
        pass


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("suffix", "name"), CASES)
def test_a_start_raises_one_sentence(damaged: Callable[[str, str], Path], suffix: str, name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        asyncio.run(start(damaged(suffix, name)))
    assert_told(str(caught.value), name)


SERVE_ALL = """
import sys
from aengine.server.cli import main
for model in sys.argv[1:]:
    sys.stderr.write("\\0")
    code = main(["--model", model, "--port", "0", "--device", "cpu", "--log-level", "error"])
    sys.stderr.write(f"{code}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[3:12:4], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_aengine_grpc_prints_the_sentence(damaged: Callable[[str, str], Path], cases: list[tuple[str, str]]) -> None:
    """All of them one after another in one process, which is quicker."""
    models = [str(damaged(*case)) for case in cases]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # with it transformers hands on what it logs
    command = [sys.executable, "-c", SERVE_ALL, *models]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS, env=environment)
    assert result.stdout == ""
    parts = result.stderr.split("\0")[1:]
    assert len(parts) == len(cases)
    for (_, name), text in zip(cases, parts, strict=True):
        *logged, line, code = text.splitlines()
        assert [line for line in logged if not line.startswith("[transformers]")] == [], name
        assert code == "1", name
        assert line.startswith("aengine-grpc: ")
        assert_told(line.removeprefix("aengine-grpc: "), name)


def assert_told(sentence: str, name: str) -> None:
    message = DAMAGES[name][1]
    assert len(sentence.splitlines()) == 1
    assert len(sentence) < 1000
    with pytest.raises(ModelLoadError, match=f"^{message}"):
        raise ModelLoadError(sentence)
