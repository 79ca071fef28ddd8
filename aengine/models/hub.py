"""Finds or downloads the directory of a model by its name: the bundled model, a directory, or a Hugging Face id.

Owns the error messages, one sentence for each way it can fail. Does not read the files.
"""

from __future__ import annotations

import os
import pathlib

from aengine.errors import ModelLoadError

DEMO = "demo"
_DEMO_DIR = pathlib.Path(__file__).resolve().parent.parent / "demo_model"
_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
WEIGHT_FILES = "model*.safetensors"
_OTHER_PATTERNS = ["*/*"]  # subfolders hold other formats of the same weights


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> pathlib.Path:
    """A directory with config.json and, with `weights`, safetensors files.

    `model` is "demo" (the bundled model), a directory, or a Hugging Face id, which is taken from the cache or downloaded
    (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN as ever). Raises ModelLoadError, whose message is one sentence.
    """
    if model == DEMO:
        path = _DEMO_DIR
    elif is_local(model):
        path = pathlib.Path(os.path.expanduser(model))
    else:
        return _checked(_download(model, revision, weights), f"the Hugging Face model {model!r}", weights)
    if revision is not None:
        raise ModelLoadError(f"revision {revision!r} is for Hugging Face ids; {model!r} is a local model")
    if not path.exists():
        raise ModelLoadError(f"model directory {model!r} does not exist")
    if not path.is_dir():
        raise ModelLoadError(f"model {model!r} is a file; a directory with config.json and *.safetensors is needed")
    return _checked(path, f"model directory {model!r}", weights)


def is_local(model: str) -> bool:
    """Whether `model` is a directory of this machine, not the demo model or a Hugging Face id."""
    return model != DEMO and (model.startswith((".", "/", "~")) or os.path.exists(model))


def _checked(path: pathlib.Path, what: str, weights: bool) -> pathlib.Path:
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{what} has no config.json")
    if weights and not any(path.glob(WEIGHT_FILES)):
        raise ModelLoadError(f"{what} has no safetensors weights (model.safetensors or model-*.safetensors)")
    return path


def _download(model: str, revision: str | None, weights: bool) -> pathlib.Path:
    import huggingface_hub
    from huggingface_hub import errors

    patterns = _CONFIG_PATTERNS + ([WEIGHT_FILES] if weights else [])
    at = f" at revision {revision!r}" if revision else ""
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_OTHER_PATTERNS)
        )
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
    except Exception as error:  # of a download: the caller gets one sentence and the cause
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"cannot download model {model!r}{at}: {reason}") from error
