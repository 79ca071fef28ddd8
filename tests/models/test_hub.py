"""From a name to a directory, and one sentence for each way it fails."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from hang_guard import HANG_SECONDS
from hub_server import REPO, serve_hub

from aengine.api.errors import AdapterError, ModelLoadError
from aengine.models.loading.hub import resolve_adapter, resolve_model


def test_the_bundled_model_needs_nothing() -> None:
    path = resolve_model("demo")
    assert (path / "config.json").is_file()
    assert (path / "model.safetensors").is_file()


def test_a_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(tmp_path.name).resolve() == tmp_path  # exists, so it is no Hugging Face id
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "~nobody-of-this-name/model"])
def test_a_missing_directory(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^model directory '{name}' does not exist$"):
        resolve_model(name)


def test_a_path_that_cannot_be() -> None:
    long = "/".join(["", *["x" * 300] * 30])
    with pytest.raises(ModelLoadError, match=r"does not exist$"):
        resolve_model(long)
    with pytest.raises(AdapterError, match=r"does not exist$"):
        resolve_adapter(long)


def test_an_incomplete_directory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"^there are no weights in .* \(no \*\.safetensors, \*\.bin, \*\.pt, \*\.pth\)$"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), load_format="dummy") == tmp_path
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("model", ["demo", "."])
def test_a_revision_of_something_local(model: str) -> None:
    with pytest.raises(ModelLoadError, match="revision 'main' is for Hugging Face ids"):
        resolve_model(model, "main")
    if model == "demo":
        with pytest.raises(ModelLoadError, match="revision 'v2' is for Hugging Face ids"):
            resolve_model("demo@v2")


def test_adapters(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve_adapter("demo-lora") / "adapter_model.safetensors").is_file()
    assert resolve_adapter(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_adapter(f"~/{tmp_path.name}") == tmp_path
    with pytest.raises(AdapterError, match=r"^adapter directory '\./nowhere' does not exist$"):
        resolve_adapter("./nowhere")
    with pytest.raises(AdapterError, match="'one/two/three' is neither a directory nor a Hugging Face id"):
        resolve_adapter("one/two/three")


def resolve_elsewhere(
    model: str, home: pathlib.Path, *others: str, revision: str = "", load_format: str = "auto", **environment: str
) -> str:
    """The message of resolve_model in a fresh process: huggingface_hub reads its environment once, at import. A line for each of `others`,
    models that are resolved after it."""
    code = (
        "import sys\n"
        "from aengine.api.errors import ModelLoadError\n"
        "from aengine.models.loading.hub import resolve_model\n"
        "revision, load_format, *models = sys.argv[1:]\n"
        "for model in models:\n"
        "    try:\n"
        "        print(resolve_model(model, revision or None, load_format))\n"
        "    except ModelLoadError as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, revision, load_format, model, *others],
        env={**os.environ, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return ran.stdout.strip()


def test_offline_without_a_cache(tmp_path: pathlib.Path) -> None:
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1") == (
        "model 'some/model' is neither a directory nor in the local Hugging Face cache, and HF_HUB_OFFLINE is set"
    )


def test_hub_out_of_reach(tmp_path: pathlib.Path) -> None:
    assert resolve_elsewhere("some/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0", revision="v2") == (
        "model 'some/model' at revision 'v2' is neither a directory nor in the local Hugging Face cache, "
        "and the Hugging Face hub cannot be reached"
    )


@pytest.mark.parametrize("name", ["a/b/c", "no spaces/here", "x" * 5000])
def test_not_an_id(name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^model '{name}' is neither a directory nor a Hugging Face id \(owner/name\)$"):
        resolve_model(name)


@pytest.mark.slow
def test_offline_from_the_cache(tmp_path: pathlib.Path) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1") == (
        "the weights of model 'some/model' are not in the local Hugging Face cache, and HF_HUB_OFFLINE is set"
    )
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1", load_format="dummy") == str(snapshot)
    (snapshot / "model.safetensors").touch()
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


BOTH = {
    "config.json": b"{}",
    "README.md": b"about",
    "model.safetensors": b"safe",
    "pytorch_model.bin": b"torch",
    "training_args.bin": b"no weights",
    "original/consolidated.00.pth": b"another format",
    "onnx/config.json": b"another format",
    "awq/config.json": b"another format",
    "additional_chat_templates/tool_use.jinja": b"tools",
}
TEMPLATE = "additional_chat_templates/tool_use.jinja"
SHARDS = {
    "config.json": b"{}",
    "pytorch_model.bin.index.json": json.dumps({"weight_map": {"a": "part-a.bin", "b": "part-b.bin"}}).encode(),
    "part-a.bin": b"a",
    "part-b.bin": b"b",
    "part-c.bin": b"in no index",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("files", "load_format", "downloaded"),
    [
        (BOTH, "auto", [TEMPLATE, "config.json", "model.safetensors"]),
        (BOTH, "pt", [TEMPLATE, "config.json", "pytorch_model.bin"]),
        (BOTH, "dummy", [TEMPLATE, "config.json"]),
        (SHARDS, "auto", ["config.json", "part-a.bin", "part-b.bin", "pytorch_model.bin.index.json"]),
    ],
)
def test_only_what_is_needed_is_downloaded(
    tmp_path: pathlib.Path, files: dict[str, bytes], load_format: str, downloaded: list[str]
) -> None:
    with serve_hub({"main": files}) as hub:
        twice = resolve_elsewhere(REPO, tmp_path, REPO, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="0", load_format=load_format)
        (path,) = map(pathlib.Path, set(twice.splitlines()))
        assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == sorted(hub.downloaded) == downloaded


@pytest.mark.slow
def test_revisions(tmp_path: pathlib.Path) -> None:
    with serve_hub({"main": BOTH, "v2": {**BOTH, "model.safetensors": b"newer"}}) as hub:
        hub_variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
        path = resolve_elsewhere(REPO, tmp_path, revision="v2", **hub_variables)
        assert (pathlib.Path(path) / "model.safetensors").read_bytes() == b"newer"
        others = resolve_elsewhere(f"{REPO}@v2", tmp_path, f"{REPO}@{hub.commits['v2']}", f"{REPO}@v3", **hub_variables)
        assert others.splitlines() == [path, path, f"the Hugging Face model '{REPO}' has no revision 'v3'"]
    assert resolve_elsewhere(f"{REPO}@v2", tmp_path, HF_HUB_OFFLINE="1") == path


def test_two_revisions() -> None:
    with pytest.raises(ModelLoadError, match=r"^model 'some/model@v2' names a revision, and revision 'main' is another$"):
        resolve_model("some/model@v2", "main")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "README.md": b""}, "there are no weights in"),
        ({"model.safetensors": b""}, "the Hugging Face model 'some/model' has no config.json"),
        (
            {**SHARDS, "model-00002-of-00003.safetensors": b""},
            "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors are missing",
        ),
        ({name: data for name, data in SHARDS.items() if name != "part-b.bin"}, "lists part-b.bin, which is missing"),
    ],
)
def test_an_incomplete_repository(tmp_path: pathlib.Path, files: dict[str, bytes], message: str) -> None:
    with serve_hub({"main": files}) as hub:
        assert message in resolve_elsewhere(REPO, tmp_path, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="0")
        assert not {"part-a.bin", "model-00002-of-00003.safetensors"} & set(hub.downloaded)
