"""From a name to a directory, and one sentence for each way it fails."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from aengine.errors import ModelLoadError
from aengine.models.hub import resolve_model


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


def test_an_incomplete_directory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="has no safetensors weights"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), weights=False) == tmp_path
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("model", ["demo", "."])
def test_a_revision_of_something_local(model: str) -> None:
    with pytest.raises(ModelLoadError, match="revision 'main' is for Hugging Face ids"):
        resolve_model(model, "main")


def resolve_elsewhere(model: str, home: pathlib.Path, **environment: str) -> str:
    """The message of resolve_model in a fresh process: huggingface_hub reads its environment once, at import."""
    code = (
        "import sys\n"
        "from aengine.errors import ModelLoadError\n"
        "from aengine.models.hub import resolve_model\n"
        "try:\n"
        "    print(resolve_model(sys.argv[1], sys.argv[2] or None, weights=sys.argv[3] == 'weights'))\n"
        "except ModelLoadError as error:\n"
        "    print(error)\n"
    )
    revision, weights = environment.pop("revision", ""), environment.pop("weights", "weights")
    ran = subprocess.run(
        [sys.executable, "-c", code, model, revision, weights],
        env={**os.environ, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
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


def test_offline_from_the_cache(tmp_path: pathlib.Path) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1") == (
        "the Hugging Face model 'some/model' has no safetensors weights (model.safetensors or model-*.safetensors)"
    )
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1", weights="none") == str(snapshot)
