"""From the name of a model to a local directory.

Owns the difference between the bundled model, a directory and a Hugging Face id, what is downloaded, and the one sentence for each way it
can fail.
"""

from __future__ import annotations

import glob
import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aengine.errors import AdapterError, ModelLoadError
from aengine.models.checkpoint_files import find_checkpoint
from aengine.models.gguf.file import is_gguf

DEMO = "demo"
DEMO_ADAPTER = "demo-lora"
_DEMO_DIR = pathlib.Path(__file__).resolve().parent.parent / "demo_model"
_DEMO_ADAPTER_DIR = _DEMO_DIR.parent / "demo_lora"
_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Subfolders hold other formats of the same weights; additional_chat_templates and 1_Pooling (of sentence-transformers) do not.
_OTHER_PATTERNS = ["[!a1]*/*", "a[!d]*/*", "1[!_]*/*"]


def resolve_model(model: str, revision: str | None = None, load_format: str = "auto") -> pathlib.Path:
    """A GGUF file, or a directory with config.json and, unless `load_format` is "dummy", weights of that format.

    `model` is "demo" (the bundled model), a directory, a GGUF file, or a Hugging Face id, which may end in @ and a revision. Files of an
    id are taken from the cache or downloaded, if they are needed (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN as usual). Raises ModelLoadError, whose
    message is one sentence.
    """
    if is_local(model):
        path = pathlib.Path(os.path.expanduser(model))
    else:
        name, _, named_revision = model.partition("@")
        if named_revision and revision is not None:
            raise ModelLoadError(f"model {model!r} names a revision, and revision {revision!r} is another")
        revision = named_revision or revision
        if name != DEMO:
            with _explained(name, revision):
                return _download(name, revision, load_format)
        path = _DEMO_DIR
    if revision is not None:
        raise ModelLoadError(f"revision {revision!r} is for Hugging Face ids; {model!r} is a local model")
    if not path.exists():
        raise ModelLoadError(f"model directory {model!r} does not exist")
    if is_gguf(path) and path.is_file():
        return path
    if not path.is_dir():
        raise ModelLoadError(f"model {model!r} is a file; a directory with config.json and weights, or a .gguf file, is needed")
    _require_config(path, f"model directory {model!r}")
    if load_format != "dummy":
        find_checkpoint(path, load_format)
    return path


def resolve_adapter(adapter: str) -> pathlib.Path:
    """The directory of an adapter.

    `adapter` is "demo-lora" (the bundled one, of the demo model), a directory, or a Hugging Face id, which may end in @ and a revision and
    is downloaded if it is needed. Raises AdapterError, whose message is one sentence.
    """
    if adapter == DEMO_ADAPTER:
        return _DEMO_ADAPTER_DIR
    path = pathlib.Path(os.path.expanduser(adapter))
    if path.is_dir():
        return path
    if adapter.startswith((".", "/", "~")):
        raise AdapterError(f"adapter directory {adapter!r} does not exist")
    name, _, revision = adapter.partition("@")
    try:
        with _explained(name, revision or None):
            import huggingface_hub

            return pathlib.Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=_ADAPTER_FILES))
    except ModelLoadError as error:
        raise AdapterError(str(error).replace("model", "adapter", 1)) from error


def is_local(model: str) -> bool:
    """Whether `model` means a directory of this machine, rather than the demo or a Hugging Face id."""
    return model != DEMO and (model.startswith((".", "/", "~")) or os.path.exists(model))


def _require_config(path: pathlib.Path, what: str) -> None:
    if not (path / "config.json").is_file():
        hint = "; a GGUF model is given by the path of its file" if any(path.glob("*.gguf")) else ""
        raise ModelLoadError(f"{what} has no config.json{hint}")


def _download(model: str, revision: str | None, load_format: str) -> pathlib.Path:
    import huggingface_hub

    path = pathlib.Path(
        huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=_CONFIG_PATTERNS, ignore_patterns=_OTHER_PATTERNS)
    )
    _require_config(path, f"the Hugging Face model {model!r}")
    if load_format == "dummy":
        return path
    with suppress(ModelLoadError):
        find_checkpoint(path, load_format)
        return path  # all of it is in the cache
    commit = path.name  # the same for all requests, whatever is pushed meanwhile
    names = huggingface_hub.HfApi().list_repo_files(model, revision=commit)
    files = find_checkpoint(path, load_format, names)
    huggingface_hub.snapshot_download(model, revision=commit, allow_patterns=[glob.escape(name) for name in files.names])
    return path


@contextmanager
def _explained(model: str, revision: str | None) -> Iterator[None]:
    """Makes one sentence of whatever a download can raise."""
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
    except ModelLoadError:
        raise
    except errors.HFValidationError as error:
        raise ModelLoadError(f"model {model!r} is neither a directory nor a Hugging Face id (owner/name)") from error
    except errors.GatedRepoError as error:
        raise ModelLoadError(f"the Hugging Face model {model!r} is gated: accept its terms on its page and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"the Hugging Face model {model!r} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(f"there is no directory and no Hugging Face model {model!r} (if it is private, set HF_TOKEN)") from error
    except errors.LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else "the Hugging Face hub cannot be reached"
        raise ModelLoadError(f"model {model!r}{at} is neither a directory nor in the local Hugging Face cache, and {why}") from error
    except errors.OfflineModeIsEnabled as error:
        raise ModelLoadError(
            f"the weights of model {model!r}{at} are not in the local Hugging Face cache, and HF_HUB_OFFLINE is set"
        ) from error
    except Exception as error:  # of any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"cannot download model {model!r}{at}: {reason}") from error
