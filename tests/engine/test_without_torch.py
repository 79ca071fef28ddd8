"""Engines on a CPU import neither torch nor transformers: not to read and pack a checkpoint, nor for what requests then ask for, but for
those that need tensors."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import anyio
import pytest
from quantized_layouts import LAYOUTS
from quantized_models import rewrite
from test_gguf_models import write_demo

from aengine import AsyncEngine, SamplingParams
from aengine.models.loading.hub import resolve_model

pytestmark = pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
CODE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is not to be imported", name=name)

sys.meta_path.insert(0, Blocked())
import anyio
from aengine import AsyncEngine, SamplingParams as P, StructuredOutput

async def main():
    async with AsyncEngine("demo", speculative=sys.argv[1], tensor_parallel_size=int(sys.argv[2])) as engine:
        async for token in engine.stream("Once upon a time", P(max_tokens=3, temperature=0.0)):
            pass
        await engine.generate([1, 2, 3], P(max_tokens=5, seed=1, top_k=5, top_p=0.5, min_p=0.01, n=2))
        masks = {"logit_bias": {5: 2.0}, "bad_words": ["the", "of the"], "min_tokens": 2, "allowed_token_ids": list(range(5, 900))}
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
        await engine.generate("Once upon", P(max_tokens=9, seed=1, logprobs=3, prompt_logprobs=2, **masks, **penalties))
        for output in (StructuredOutput(json_object=True), StructuredOutput(regex="[a-c]+")):
            await engine.generate("Once", P(max_tokens=9, structured_output=output, logprobs=1))
        await engine.generate([{"role": "user", "content": "Hello"}], P(max_tokens=3))
        await engine.embed("Hello", pooling="mean")
        await engine.hidden_states("Hello", layers=[0, -1])
        await engine.score("It was", " a dark")
        await engine.sleep(1)
        await engine.wake()
        print(engine.model_info.executor)

anyio.run(main)
"""


def run(code: str, *arguments: object, cache: pathlib.Path | str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "AENGINE_PACKED_WEIGHTS": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the packed weights of the demo model, whole and in two parts."""
    from fresh_process import run_fresh

    folder = tmp_path_factory.mktemp("weights")
    for ranks in (1, 2):
        run_fresh(f"""
            import os
            os.environ["AENGINE_PACKED_WEIGHTS"] = {str(folder)!r}
            import anyio
            from aengine import AsyncEngine

            async def main():
                async with AsyncEngine("demo", tensor_parallel_size={ranks}):
                    pass

            anyio.run(main)
        """)
    assert len(list(folder.glob("*.weights"))) == 3
    return folder


@pytest.mark.parametrize(("speculative", "ranks"), [("off", 1), ("ngram", 1), ("off", 2)])
def test_requests(cache: pathlib.Path, speculative: str, ranks: int) -> None:
    assert run(CODE, speculative, ranks, cache=cache).strip() == "cpu"


def test_a_processor_is_given_a_tensor(cache: pathlib.Path) -> None:
    """And torch is imported for it."""
    code = """
import sys, anyio
from aengine import AsyncEngine, SamplingParams

def only_seven(logits, token_ids):
    logits[:7], logits[8:] = -float("inf"), -float("inf")
    assert type(logits).__module__ == "torch"

async def main():
    async with AsyncEngine("demo") as engine:
        await engine.generate([5, 6], SamplingParams(max_tokens=3))
        assert "torch" not in sys.modules
        print(*(await engine.generate([5, 6], SamplingParams(max_tokens=3, logits_processors=[only_seven], ignore_eos=True))).token_ids)

anyio.run(main)
"""
    assert run(code, cache=cache).split() == ["7"] * 3


@pytest.mark.parametrize("program", ["grpc", "serve"])
def test_servers(cache: pathlib.Path, program: str) -> None:
    from aengine.client import AsyncClient  # noqa: F401 - the test is of what the server maps

    process = subprocess.Popen(
        [sys.executable, "-m", "aengine", program, "demo", "--port", "0"],
        env={**os.environ, "AENGINE_PACKED_WEIGHTS": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "parameters in" in line:  # it is loaded
                break
        assert any("mapped from" in line for line in said), said
        mapped = pathlib.Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        assert "libtorch" not in mapped
        assert str(cache) in mapped
    finally:
        process.terminate()
        process.communicate()


START = (
    CODE[: CODE.index("import anyio")]
    + """
import anyio, pathlib
from aengine import AsyncEngine, SamplingParams
from aengine.models.loading.checkpoint import open_checkpoint

PROMPT, GREEDY = [5, 6, 7, 8, 9, 10], SamplingParams(max_tokens=4, temperature=0.0)

async def main(model, options, adapter=None):
    async with AsyncEngine(model, **eval(options)) as engine:
        tokens = (await engine.generate(PROMPT, GREEDY)).token_ids
        if adapter is not None:
            await engine.load_adapter("a", adapter)
            await engine.generate(PROMPT, GREEDY, adapter="a")
            stored = open_checkpoint(pathlib.Path(model)).tensors
            await engine.update_weights({name: one.read_numbers() for name, one in stored.items()})
            await engine.update_weights(model)
            await engine.sleep(2)
            await engine.wake()
            assert (await engine.generate(PROMPT, GREEDY)).token_ids == tokens
        print(*tokens)

anyio.run(main, *sys.argv[1:])
"""
)


def started(*arguments: object) -> str:
    return run(START, *arguments, cache="off")


def with_torch(model: pathlib.Path, options: dict[str, Any]) -> str:
    async def tokens() -> list[int]:
        async with AsyncEngine(str(model), **options) as engine:
            params = SamplingParams(max_tokens=4, temperature=0.0)
            return list((await engine.generate([5, 6, 7, 8, 9, 10], params)).token_ids)

    return " ".join(map(str, anyio.run(tokens)))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_a_checkpoint_is_packed(quantization: str) -> None:
    """Also for an adapter, new weights, and a model that wakes."""
    demo = resolve_model("demo")
    options = {"quantization": quantization, "max_adapters": 1}
    assert started(demo, options, demo.parent / "demo_lora").strip() == with_torch(demo, options)


def test_ranks_pack_theirs() -> None:
    demo = resolve_model("demo")
    options = {"tensor_parallel_size": 2, "tensor_parallel_mode": "exact", "max_adapters": 1}
    assert started(demo, options, demo.parent / "demo_lora").strip() == with_torch(demo, {})


@pytest.mark.parametrize("name", ["gptq 4 bits", "awq", "fp8, blocks", "nf4"])
def test_quantised_checkpoints(name: str, tmp_path: pathlib.Path) -> None:
    demo = resolve_model("demo")
    rewrite(demo, tmp_path, LAYOUTS[name])
    for path in demo.glob("*token*.json"):
        (tmp_path / path.name).symlink_to(path)
    assert started(tmp_path, {}).strip() == with_torch(tmp_path, {})


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_gguf(kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo(path, kind)
    assert started(path, {}).strip() == with_torch(path, {})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"attention_backend": "torch_native"},
            "a model that the CPU kernels do not run takes torch, which is not installed: pip",
        ),
        ({"model_impl": "transformers"}, "a model in the code of transformers .asked for. takes torch"),
        ({"load_format": "pt"}, "pytorch_model.bin, a file of PyTorch, takes torch"),
    ],
)
def test_what_needs_torch_says_so(options: dict[str, Any], sentence: str, tmp_path: pathlib.Path) -> None:
    for path in resolve_model("demo").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path), str(options)],
        env={**os.environ, "AENGINE_PACKED_WEIGHTS": "off"},
        capture_output=True,
        text=True,
    )
    assert re.search(sentence, done.stderr.splitlines()[-1]), done.stderr[-2000:]
