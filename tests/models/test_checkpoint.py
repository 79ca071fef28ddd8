"""Files of a checkpoint in each format and layout, and one sentence for each way they can be broken."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_weights import Tensors, load, spec_of, tensors_of

from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import BFLOAT16, array_dtype, as_tensor, data_address
from aengine.models.loading.checkpoint import are_finite, checkpoint_dtype, open_checkpoint
from aengine.models.loading.hub import checkpoint_digest, find_checkpoint
from aengine.models.model_files import read_json


def save(path: pathlib.Path, tensors: Tensors) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def save_index(folder: pathlib.Path, name: str, weight_map: dict[str, str]) -> None:
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


LAYOUTS = {
    "one": ["model.safetensors"],
    "shards": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    "other names": ["a.safetensors", "b.safetensors"],
    "torch": ["pytorch_model.bin"],
    "torch shards": ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
    "pt": ["weights.pt"],
    "pth": ["consolidated.00.pth"],
}


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(tmp_path: pathlib.Path, files: Sequence[str], dtype: torch.dtype, index: bool) -> None:
    spec = spec_of()
    tensors = tensors_of(spec, dtype)
    items = list(tensors.items())
    shards = {name: dict(items[number :: len(files)]) for number, name in enumerate(files)}
    for name, shard in shards.items():
        save(tmp_path / name, shard)
    if index:
        usual = "model.safetensors" if files[0].endswith(".safetensors") else "pytorch_model" + pathlib.Path(files[0]).suffix
        save_index(tmp_path, usual, {tensor: name for name, shard in shards.items() for tensor in shard})
    torch.save({"epoch": 3}, tmp_path / "training_args.bin")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    stored = open_checkpoint(tmp_path).tensors
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} == {
        name: (tuple(tensor.shape), str(dtype).removeprefix("torch.")) for name, tensor in tensors.items()
    }
    assert all(torch.equal(as_tensor(stored[name].read_numbers()), tensor) for name, tensor in tensors.items())
    assert checkpoint_dtype(tmp_path) == array_dtype(dtype)
    assert torch.equal(load(spec, tmp_path)["norm.weight"], tensors["model.norm.weight"].float())


def test_safetensors_come_first(tmp_path: pathlib.Path) -> None:
    names = ["a.pth", "pytorch_model.bin", "b.safetensors", "model.safetensors"]
    for number, name in enumerate(names):
        (tmp_path / name).touch()
        assert find_checkpoint(tmp_path).names == (name,), number
    assert find_checkpoint(tmp_path, "safetensors").names == ("model.safetensors",)
    assert find_checkpoint(tmp_path, "pt").names == ("pytorch_model.bin",)


def test_formats_that_were_asked_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"^there are no weights in .* \(no \*\.safetensors\)$"):
        find_checkpoint(tmp_path, "safetensors")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"^there are no weights in .* \(no \*\.bin, \*\.pt, \*\.pth\)$"):
        find_checkpoint(tmp_path, "pt")


def test_tensors_are_mapped(tmp_path: pathlib.Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        save(tmp_path / name, {"a": torch.zeros(1 << 20)})
        array = open_checkpoint(tmp_path, "pt" if name.endswith("bin") else "safetensors").tensors["a"].read_numbers()
        address = data_address(array)
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        mappings = ((*(int(part, 16) for part in line.split()[0].split("-")), line) for line in lines)
        assert next(line for first, end, line in mappings if first <= address < end).endswith(name)


def test_files_of_an_old_torch(tmp_path: pathlib.Path) -> None:
    tensors = tensors_of(spec_of())
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load(spec_of(), tmp_path)["norm.weight"], tensors["model.norm.weight"])


def test_torch_tensors_that_are_views(tmp_path: pathlib.Path) -> None:
    tensors = tensors_of(spec_of(tie_word_embeddings=True))
    down = "model.layers.0.mlp.down_proj.weight"
    stored = {**tensors, down: tensors[down].t().contiguous().t(), "lm_head.weight": tensors["model.embed_tokens.weight"]}
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in stored.items()}, tmp_path / "pytorch_model.bin")
    assert torch.equal(load(spec_of(tie_word_embeddings=True), tmp_path)["layers.0.down.weight"], tensors[down])


class Code:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return print, ("ran",)


def truncate(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def overwrite(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


NOT_SAFETENSORS = r"model\.safetensors is not a safetensors file, or corrupt or truncated: "
NOT_TORCH = r"pytorch_model\.bin is (not a file of PyTorch tensors, or corrupt or truncated: |corrupt, or holds Python objects)"
BROKEN = {
    "truncated": ("model.safetensors", truncate, NOT_SAFETENSORS),
    "corrupt": ("model.safetensors", overwrite, NOT_SAFETENSORS),
    "empty": ("model.safetensors", lambda path: path.write_bytes(b""), NOT_SAFETENSORS),
    "git lfs pointer": ("model.safetensors", lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1"), NOT_SAFETENSORS),
    "without tensors": ("model.safetensors", lambda path: save_file({}, path), r"model\.safetensors holds no tensors$"),
    "truncated torch": ("pytorch_model.bin", truncate, NOT_TORCH),
    "corrupt torch": ("pytorch_model.bin", overwrite, NOT_TORCH),
    "empty torch": ("pytorch_model.bin", lambda path: path.write_bytes(b""), NOT_TORCH),
    "torch code": (
        "pytorch_model.bin",
        lambda path: torch.save({"a": Code()}, path),
        r"holds Python objects \(print\), which are not loaded",
    ),
    "torch object": ("pytorch_model.bin", lambda path: torch.save([1], path), "holds a list, not a dictionary of tensors$"),
    "torch without numbers": (
        "pytorch_model.bin",
        lambda path: torch.save({"a": torch.empty(2, device="meta")}, path),
        "holds 'a' without its numbers, on torch's device meta$",
    ),
    "torch entry": (
        "pytorch_model.bin",
        lambda path: torch.save({"epoch": 3}, path),
        "holds 'epoch' of type int; only tensors are supported$",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(tmp_path: pathlib.Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, damage, message = BROKEN[case]
    save(tmp_path / name, tensors_of(spec_of()))
    damage(tmp_path / name)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(spec_of(), tmp_path)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_that_does_not_match(tmp_path: pathlib.Path, suffix: str) -> None:
    tensors = tensors_of(spec_of())
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[suffix]
    save(tmp_path / f"a.{suffix}", tensors)
    weight_map = dict.fromkeys(tensors, f"a.{suffix}")
    save_index(tmp_path, name, {**weight_map, "b": f"a.{suffix}", "c": f"a.{suffix}"})
    with pytest.raises(ModelLoadError, match=r"index\.json lists b, c, which none of its files has$"):
        open_checkpoint(tmp_path)
    save_index(tmp_path, name, {**weight_map, "b": f"b.{suffix}"})
    with pytest.raises(ModelLoadError, match=rf"index\.json lists b\.{suffix}, which is missing$"):
        open_checkpoint(tmp_path)
    save_index(tmp_path, name, {**weight_map, "b": f"b.{suffix}", "c": "../c", "d": "/etc/passwd"})
    with pytest.raises(ModelLoadError, match=rf"index\.json lists \.\./c, /etc/passwd, b\.{suffix}, which are missing$"):
        open_checkpoint(tmp_path)
    save_index(tmp_path, name, {**weight_map, "b": "b\n\0", "c": "c" * 1000})
    with pytest.raises(ModelLoadError, match=r"index\.json lists b\\n\\x00, c{200}\.\.\., which are missing$"):
        open_checkpoint(tmp_path)
    for content in ({}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": ["a"]}):
        (tmp_path / f"{name}.index.json").write_text(json.dumps(content))
        with pytest.raises(ModelLoadError, match=r"index\.json has no weight_map from tensors to files$"):
            open_checkpoint(tmp_path)
    (tmp_path / f"{name}.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"index\.json is not valid JSON"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_without_an_index(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model-00002-of-00003.safetensors").touch()
    with pytest.raises(
        ModelLoadError, match=r"of the 3 files .* model-00001-of-00003\.safetensors, model-00003-of-00003\.safetensors are missing$"
    ):
        open_checkpoint(tmp_path)


def test_everything_that_does_not_match_is_named_at_once(tmp_path: pathlib.Path) -> None:
    tensors = tensors_of(spec_of())
    del tensors["lm_head.weight"]
    mlp = "model.layers.0.mlp"
    tensors |= {
        "stray": torch.zeros(1),
        "model.norm.weight": torch.zeros(9),
        f"{mlp}.down_proj.weight": torch.zeros(8, 12, dtype=torch.int8),
        f"{mlp}.up_proj.weight": torch.zeros(12, 8).to_sparse(),
    }
    torch.save(tensors, tmp_path / "a.bin")
    torch.save({"model.embed_tokens.weight": torch.zeros(11, 8)}, tmp_path / "b.bin")
    with pytest.raises(ModelLoadError) as caught:
        load(spec_of(), tmp_path)
    assert str(caught.value) == (
        "the checkpoint does not match its config.json: it lacks lm_head.weight; it has unexpected stray; it has more than one "
        "model.embed_tokens.weight; it has other shapes than the config implies: model.norm.weight [9] instead of [8]; it has dtypes other "
        f"than float32, float16, bfloat16, float64: {mlp}.down_proj.weight int8, {mlp}.up_proj.weight torch.sparse_coo"
    )


def test_digests_tell_checkpoints_apart(tmp_path: pathlib.Path) -> None:
    weights = bytearray(1 << 18)
    seen = []
    for change in ("nothing", "config.json", "beginning", "end", "size"):
        (tmp_path / "config.json").write_text(f'{{"changed": {change == "config.json"}}}')
        data = weights + b"more" if change == "size" else bytearray(weights)
        data[0], data[-1] = change == "beginning", change == "end"
        (tmp_path / "model.safetensors").write_bytes(data)
        seen.append(checkpoint_digest(tmp_path, "auto"))
    assert len(set(seen)) == 5
    assert checkpoint_digest(tmp_path, "dummy") not in seen


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json"])
def test_a_pipe_is_no_file_of_a_model(name: str, tmp_path: pathlib.Path) -> None:
    """To open one would never end."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    read = partial(read_json, tmp_path / name) if name.endswith("config.json") else partial(open_checkpoint, tmp_path)
    with pytest.raises(ModelLoadError, match=f"^{tmp_path / name} is not a regular file$"):
        read()


@pytest.mark.parametrize("padding", range(9))
def test_arrays_of_every_dtype_and_alignment(tmp_path: pathlib.Path, padding: int) -> None:
    """Also numbers that do not begin at a multiple of their size, as some programs write them; arrays without dimensions or entries."""
    random, stored = np.random.default_rng(padding), dict[str, Any]()
    for name in ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e8m0fnu"):
        for shape in ((), (3,), (2, 5), (0, 4), (2, 1, 3)):
            size = math.prod(shape) * np.dtype(name).itemsize
            stored[f"{name}.{len(stored)}"] = random.integers(0, 256, size, np.uint8).view(name).reshape(shape)
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "bfloat16": "BF16"}
    header, data = dict[str, Any](), b""
    for name, array in stored.items():
        dtype = names.get(str(array.dtype)) or f"{'U' if array.dtype.kind == 'u' else array.dtype.kind.upper()}{8 * array.itemsize}"
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (len(data), len(data) + array.nbytes)}
        data += array.tobytes()
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode() + b" " * padding
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = open_checkpoint(tmp_path).tensors
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        read = found[name].read_numbers()
        assert (read.shape, read.dtype, read.tobytes()) == (array.shape, array.dtype, array.tobytes()), name
        assert (found[name].shape, found[name].dtype, found[name].nbytes) == (array.shape, str(array.dtype), array.nbytes)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e8m0fnu", "int8", "int64"])
def test_numbers_that_are_not_finite_are_found(name: str) -> None:
    """Wherever they are, in bfloat16 too, of any bits, and of some columns of a matrix."""
    dtype, random = np.dtype(name), np.random.default_rng(1)
    for _ in range(200):
        numbers = random.integers(0, 256, (7, 3 * dtype.itemsize), np.uint8).view(dtype)
        for taken in (numbers, numbers[:, 1:2], numbers[:, 0], numbers[0, 0], numbers[:0]):
            with np.errstate(over="ignore"):
                wide = taken.astype(np.float32).astype(BFLOAT16).astype(np.float32)
            largest = float(np.array(0x7F7F, np.uint16).view(BFLOAT16))
            expected = bool(np.isfinite(wide).all()) and (dtype.kind in "iu" or bool((abs(taken.astype(np.float64)) <= largest).all()))
            assert are_finite(np.asarray(taken)) == expected, taken
