"""From the name of a model to a local directory, and which files there hold its weights: safetensors or PyTorch files, one or sharded, with
or without an index.

Owns the difference between the bundled model, a directory and a Hugging Face id, what is downloaded, and the one sentence for each way it
can fail. And what is told of the progress of loading. Reads names and the index, never the weights themselves. Imports no torch.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType

from aengine.api.dataclass import dataclass
from aengine.api.errors import AdapterError, ModelLoadError, one_line
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.model_files import format_without_config, read_json

_STEMS = {".safetensors": "model", ".bin": "pytorch_model", ".pt": "pytorch_model", ".pth": "pytorch_model"}
"""Suffixes in the order of preference, each with the usual name of its files."""
_FORMATS = {"auto": tuple(_STEMS), "safetensors": (".safetensors",), "pt": (".bin", ".pt", ".pth")}
_OTHERS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|adapter_model).*")
"""What training leaves beside the weights in files of the same suffixes."""
_HASHED = 1 << 16
"""Bytes at the beginning and at the end of a file."""
_LONGEST_SHOWN = 200
"""Characters of a name."""
_SHARD = re.compile(r"(.*-)(\d+)-of-(\d{1,6})(\.\w+)")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    names: tuple[str, ...]  # in the model's directory; of a model that is one file, its whole path
    index: str | None = None  # the file that lists them
    weight_map: Mapping[str, str] | None = None  # of the index: tensor name -> file


def find_checkpoint(model_dir: pathlib.Path, load_format: str = "auto", names: Collection[str] | None = None) -> CheckpointFiles:
    """The files with the weights, of those that `load_format` allows; safetensors before PyTorch's. An index must lie in `model_dir`.

    `names`: those of the files of the model, if they do not all lie in `model_dir` yet. Raises ModelLoadError if there are no weights, or
    some of their files are missing.
    """
    if is_gguf(model_dir):
        return CheckpointFiles((str(model_dir.absolute()),))  # joined to any directory, it is this path
    if names is None:
        names = os.listdir(model_dir)
    for suffix in _FORMATS[load_format]:
        usual = _STEMS[suffix] + suffix
        index = f"{usual}.index.json"
        if index in names:
            return _indexed(model_dir, index, names)
        if usual in names:
            return CheckpointFiles((usual,))
        found = sorted(name for name in names if name.endswith(suffix) and not _OTHERS.fullmatch(name))
        found = [name for name in found if name.startswith(f"{_STEMS[suffix]}-")] or found
        if found:
            _check_all_shards(found)
            return CheckpointFiles(tuple(found))
    known = format_without_config(names)
    looked_for = ", ".join(f"*{suffix}" for suffix in _FORMATS[load_format])
    raise ModelLoadError(f"there are no weights in {model_dir} (no {looked_for}){'; ' * bool(known)}{known}")


def _indexed(model_dir: pathlib.Path, index: str, names: Collection[str]) -> CheckpointFiles:
    weight_map = read_json(model_dir / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{model_dir / index} has no weight_map from tensors to files")
    listed = sorted(set(weight_map.values()))
    missing = [name for name in listed if name not in names]  # a path to elsewhere is never one of the names
    if missing:
        raise ModelLoadError(f"{model_dir / index} lists {shortened(missing)}, which {'is' if len(missing) == 1 else 'are'} missing")
    return CheckpointFiles(tuple(listed), index, weight_map)


def _check_all_shards(names: Collection[str]) -> None:
    for match in filter(None, map(_SHARD.fullmatch, names)):
        first, number, count, suffix = match.groups()
        expected = (f"{first}{shard:0{len(number)}}-of-{count}{suffix}" for shard in range(1, int(count) + 1))
        missing = [name for name in expected if name not in names]
        if missing:
            raise ModelLoadError(
                f"of the {int(count)} files of the checkpoint {shortened(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )


def checkpoint_digest(model_dir: pathlib.Path, load_format: str) -> str:
    """Hexadecimal digits that tell checkpoints apart: by config.json, and by the name, size, beginning and end of each file. Of load_format
    dummy, by config.json alone. Raises ModelLoadError."""
    digest = hashlib.sha256()
    config = model_dir / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for name in () if load_format == "dummy" else find_checkpoint(model_dir, load_format).names:
        path = model_dir / name
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_HASHED))
            file.seek(max(0, size - _HASHED))
            digest.update(file.read(_HASHED))
    return digest.hexdigest()[:16]


def shortened(names: Collection[str], limit: int = 8) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(_shown, list(names)[:limit])) + more


def described_problems(problems: Mapping[str, Collection[str]]) -> str:
    """Return what is wrong with a checkpoint as a part of a sentence, by what it has or lacks: the names of tensors, with what is said of
    them. Empty where no problem has a name."""
    return "; ".join([f"{title} {shortened(names)}" for title, names in problems.items() if names])


def _shown(name: str) -> str:
    """Return a name of a file or tensor that fits one line and is not too long."""
    name = name if name.isprintable() else repr(name)[1:-1]
    return name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."


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
    if not os.path.exists(path):  # also of what no path can be
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
    if os.path.isdir(path):  # also of what no path can be
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


def model_name(model: str) -> str:
    """What `model` is called where its place on this machine is nobody's business: a Hugging Face id without its revision, the last part of
    a path, or "demo"."""
    if not is_local(model):
        return model.partition("@")[0]
    return os.path.basename(os.path.abspath(os.path.expanduser(model))) or "model"


def _require_config(path: pathlib.Path, what: str) -> None:
    if not (path / "config.json").is_file():
        names = [file.name for file in path.glob("*")]
        known = format_without_config(names)
        if not known and any(name.endswith(".gguf") for name in names):
            known = "a GGUF model is given by the path of its file"
        raise ModelLoadError(f"{what} has no config.json{'; ' * bool(known)}{known}")


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
        raise ModelLoadError(f"cannot download model {model!r}{at}: {one_line(error)}") from error


_log = logging.getLogger("aengine")
LOG_SECONDS = 5.0
_GIB = 1 << 30


class LoadProgress:
    """Shows how many of `total` bytes are loaded. Loading that is done within `LOG_SECONDS` is not logged."""

    def __init__(self, total: int, report: Callable[[int, int], object] | None = None) -> None:
        """`report(loaded, total)` is called instead of showing anything."""
        self._total = total
        self._report = report
        self._loaded = 0
        self._logged = time.monotonic()
        self._bar = None
        if report is None and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, leave=False)

    def add_bytes(self, size: int) -> None:
        self._loaded += size
        if self._report is not None:
            self._report(self._loaded, self._total)
        elif self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            _log.info("loaded %.1f of %.1f GiB of weights", self._loaded / _GIB, self._total / _GIB)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
