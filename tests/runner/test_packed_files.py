"""Weights that an earlier start packed: later ones map them and give the same tokens, whatever has become of the file or the checkpoint."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver
from reference import FAMILIES, save_tiny
from test_greedy import make_runner
from test_new_weights import save_two, update

import aengine
from aengine import LLM
from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import FLOAT32
from aengine.kernels.cpu.library import load_kernels
from aengine.models.cpu.packed_weights import PackedFile, PackedFileError, open_packed, verify_packed
from aengine.parallel.shard import WHOLE
from aengine.runner.cpu.executor import CpuExecutorBase
from aengine.runner.runner import ModelRunner

pytestmark = pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
DEMO = pathlib.Path(aengine.__file__).parent / "models" / "demo_model"
PROMPTS = [[1, 2, 3, 4, 5], [7, 3, 9], list(range(10, 40))]


def start(model: pathlib.Path, cache: pathlib.Path | str, **options: object) -> tuple[list[list[int]], ModelRunner]:
    """The tokens of a runner, which is left open."""
    runner = make_runner(model, weights_cache=str(cache), **options)
    return Driver(runner).generate(PROMPTS, 8), runner


def tokens(model: pathlib.Path, cache: pathlib.Path | str, **options: object) -> list[list[int]]:
    found, runner = start(model, cache, **options)
    runner.close()
    return found


def sources(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How each runner got its weights: packed, or mapped."""
    return [record.args[5].split()[0] for record in caplog.records if record.msg.startswith("CPU kernels")]


def kept(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted(cache.glob("*.weights"))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", sorted(name for name in FAMILIES if not name.startswith("deepseek")))
def test_mapped_weights_are_those_that_were_packed(tmp_path: pathlib.Path, caplog, family: str, quantization: str) -> None:
    caplog.set_level(logging.INFO)
    save_tiny(family, tmp_path / "model")
    cache = tmp_path / "cache"
    expected, runner = start(tmp_path / "model", cache, quantization=quantization)
    assert isinstance(runner._executor, CpuExecutorBase)
    digest = runner.weights_digest
    runner.close()
    (path,) = kept(cache)
    verify_packed(path)
    found, runner = start(tmp_path / "model", cache, quantization=quantization)
    assert found == expected
    assert runner.weights_digest == digest
    assert sources(caplog) == ["packed", "mapped"]
    runner.close()


def test_ranks_keep_their_parts(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    cache, options = tmp_path / "cache", {"tensor_parallel_size": 2}
    expected = tokens(tmp_path / "model", cache, **options)
    assert len(kept(cache)) == 2
    for path in kept(cache):
        os.utime(path, (0, 0))
    assert tokens(tmp_path / "model", cache, **options) == expected == tokens(tmp_path / "model", "off")
    assert all(path.stat().st_mtime > 0 for path in kept(cache)), "a rank did not use its file"


def test_another_checkpoint_has_another_file(tmp_path: pathlib.Path, caplog) -> None:
    old, new = save_two("qwen3", tmp_path)
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"
    first = tokens(old, cache)
    assert sources(caplog) == ["packed"]
    for name in ("config.json", "model.safetensors"):  # of the same size
        (old / name).write_bytes((new / name).read_bytes())
    second = tokens(old, cache)
    assert sources(caplog) == ["packed", "packed"]
    assert second == tokens(new, "off") != first
    assert len(kept(cache)) == 2


def test_other_settings_have_other_files(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    cache = tmp_path / "cache"
    for options in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int8"}):
        tokens(tmp_path / "model", cache, **options)
    assert len(kept(cache)) == 3


@pytest.mark.parametrize("damage", ["cut", "table", "empty", "other"])
def test_a_damaged_file_is_packed_again(tmp_path: pathlib.Path, caplog, damage: str) -> None:
    save_tiny("qwen3", tmp_path / "model")
    cache = tmp_path / "cache"
    expected = tokens(tmp_path / "model", cache)
    (path,) = kept(cache)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "table":
        content[-10] ^= 1
    elif damage == "other":
        content[:8] = b"12345678"
    path.write_bytes(b"" if damage == "empty" else content)
    caplog.set_level(logging.INFO)
    assert tokens(tmp_path / "model", cache) == expected
    assert sources(caplog) == ["packed"]
    assert len([record for record in caplog.records if "cannot be used" in record.getMessage()]) == 1
    assert tokens(tmp_path / "model", cache) == expected
    assert sources(caplog) == ["packed", "mapped"]


def test_a_changed_bit_is_found(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    tokens(tmp_path / "model", tmp_path / "cache")
    (path,) = kept(tmp_path / "cache")
    content = bytearray(path.read_bytes())
    content[8192] ^= 1
    path.write_bytes(content)
    with pytest.raises(PackedFileError, match="its content has the checksum"):
        verify_packed(path)


def test_an_array_outside_the_file(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    _, runner = start(tmp_path / "model", "off")
    weights = runner._executor._model._stack._weights
    file = PackedFile(weights, {})
    file._table["vectors"]["norm.weight"][0] = 1 << 40
    file.write(tmp_path / "bad.weights")
    with pytest.raises(PackedFileError, match=rf"bytes at {1 << 40} is not in its"):
        open_packed(tmp_path / "bad.weights", weights.whole_spec, FLOAT32, WHOLE)
    runner.close()


KILLED = """
import os, pathlib, signal, sys
from aengine.models.cpu import packed_weights
from test_greedy import make_runner
write, count = packed_weights._write_at, 0
def killed(*given):
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    write(*given)
packed_weights._write_at = killed
make_runner(pathlib.Path(sys.argv[1]), weights_cache=sys.argv[2]).close()
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    folders = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": folders},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_killed_while_it_writes(tmp_path: pathlib.Path, piece: int) -> None:
    save_tiny("qwen3", tmp_path / "model")
    cache = tmp_path / "cache"
    process = python(KILLED, tmp_path / "model", cache, piece)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert kept(cache) == []
    assert len(list(cache.glob("*.writing"))) == 1
    expected = tokens(tmp_path / "model", "off")
    assert tokens(tmp_path / "model", cache) == expected
    assert len(kept(cache)) == len(list(cache.iterdir())) == 1, "what the killed process left is still there"
    assert tokens(tmp_path / "model", cache) == expected


TOO_LARGE = """
import pathlib, resource, sys
from driver import Driver
from test_greedy import make_runner
from test_packed_files import PROMPTS
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
runner = make_runner(pathlib.Path(sys.argv[1]), weights_cache=sys.argv[2])
sys.stdout.write(f"\\n{Driver(runner).generate(PROMPTS, 8)}\\n")  # at once: a thread logs to the same pipe
runner.close()
"""


def test_no_room_on_the_disk(tmp_path: pathlib.Path) -> None:
    """A limit on the size of files is found where a full disk is: when the room is taken, before anything is written."""
    save_tiny("qwen3", tmp_path / "model")
    process = python(TOO_LARGE, tmp_path / "model", tmp_path / "cache")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert str(tokens(tmp_path / "model", "off")) in output.splitlines()
    assert list((tmp_path / "cache").iterdir()) == []


AT_ONCE = """
import pathlib, sys
from driver import Driver
from test_greedy import make_runner
from test_packed_files import PROMPTS
sys.stdin.readline()
runner = make_runner(pathlib.Path(sys.argv[1]), weights_cache=sys.argv[2])
sys.stdout.write(f"\\n{Driver(runner).generate(PROMPTS, 8)}\\n")  # at once: a thread logs to the same pipe
runner.close()
"""


def test_two_processes_at_once(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    processes = [python(AT_ONCE, tmp_path / "model", tmp_path / "cache") for _ in range(2)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate()[0] for process in processes]
    expected = tokens(tmp_path / "model", "off")
    assert [output.splitlines()[-1] for output in outputs] == [str(expected)] * 2
    (path,) = kept(tmp_path / "cache")
    verify_packed(path)
    assert tokens(tmp_path / "model", tmp_path / "cache") == expected


def test_the_oldest_give_way(tmp_path: pathlib.Path) -> None:
    for name in ("qwen3", "llama", "qwen2"):
        save_tiny(name, tmp_path / name)
    cache = tmp_path / "cache"
    tokens(tmp_path / "qwen3", cache)
    (first,) = kept(cache)
    size = first.stat().st_size
    os.utime(first, (time.time() - 100,) * 2)
    tokens(tmp_path / "llama", cache)
    (second,) = {*kept(cache)} - {first}
    os.utime(second, (time.time() - 50,) * 2)
    tokens(tmp_path / "qwen3", cache)  # is used, so that the other one is older
    tokens(tmp_path / "qwen2", cache, weights_cache_size=2 * size + size // 2)
    assert first in kept(cache)
    assert second not in kept(cache)
    assert len(kept(cache)) == 2


def test_another_tokenizer_has_other_tables(tmp_path: pathlib.Path) -> None:
    """They are in the folder of the weights, and count as these do."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(DEMO, model)
    load_kernels()

    def spelled(**options: Any) -> list[int]:
        with LLM(str(model), kv_cache_memory=32 << 20, weights_cache=str(cache), **options) as llm:
            return llm.call(lambda engine: engine.tokenize("universally acknowledged"))

    first = spelled()
    assert spelled() == first
    (tables,) = cache.glob("*.tokens")
    document = json.loads((model / "tokenizer.json").read_text())
    document["model"]["merges"] = document["model"]["merges"][:40]
    (model / "tokenizer.json").write_text(json.dumps(document))
    assert spelled() != first
    assert len([*cache.glob("*.tokens")]) == 2
    os.utime(tables, (1, 1))
    one, other = kept(cache)
    one.unlink()
    size = sum(path.stat().st_size for path in cache.iterdir())
    other.unlink()
    spelled(weights_cache_size=size - 1)  # writes one of the two again
    assert not tables.exists()


def test_what_is_larger_than_all_is_not_kept(tmp_path: pathlib.Path, caplog) -> None:
    save_tiny("qwen3", tmp_path / "model")
    tokens(tmp_path / "model", tmp_path / "cache", weights_cache_size=100)
    assert not (tmp_path / "cache").exists()
    assert any("weights_cache_size" in record.getMessage() for record in caplog.records)


def test_a_folder_that_others_may_write_to(tmp_path: pathlib.Path, caplog) -> None:
    save_tiny("qwen3", tmp_path / "model")
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    tokens(tmp_path / "model", tmp_path / "cache")
    assert kept(tmp_path / "cache") == []
    assert any("others may write to" in record.getMessage() for record in caplog.records)


def test_weights_are_replaced_and_dropped(tmp_path: pathlib.Path) -> None:
    old, new = save_two("qwen3", tmp_path)
    cache = tmp_path / "cache"
    first, second = tokens(old, cache), tokens(new, "off")
    _, runner = start(old, cache)
    update(runner, str(new))
    assert Driver(runner).generate(PROMPTS, 8) == second
    runner.sleep(2, np.zeros(0, np.int32))
    update(runner, str(old))
    assert Driver(runner).generate(PROMPTS, 8) == first
    runner.close()


def test_a_missing_weight_is_still_an_error(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    tokens(tmp_path / "model", tmp_path / "cache")
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = load_file(tmp_path / "model" / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelLoadError):
        start(tmp_path / "model", tmp_path / "cache")
