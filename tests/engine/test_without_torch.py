"""A start whose weights are packed imports neither torch nor transformers, whatever requests then ask for, but those that need tensors."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
CODE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not to be imported")

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


def run(code: str, *arguments: object, cache: pathlib.Path) -> str:
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
