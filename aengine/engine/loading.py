"""From an `EngineConfig` to a loaded model: files, runner, tokenizer; and its fingerprint, the parts of which tell engines apart that may
give one request different tokens or texts. Runs in the step thread, which will own the device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import AdapterError, ConfigError
from aengine.api.outputs import AdapterInfo, DraftSource, LayerGroup, ModelInfo
from aengine.api.params import SamplingParams
from aengine.api.runtime import paused_collection
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.loading.hub import model_name, resolve_adapter, resolve_model
from aengine.parallel.driver import start_ranks
from aengine.parallel.expert_replicas import join_replicas
from aengine.runner.contract import LoadAdapter, Runner
from aengine.scheduler.drafters import BestOfBoth, Drafter, ModelDrafter, NgramDrafter
from aengine.scheduler.sequence import SchedulerConfig
from aengine.tokenizer.bpe_codec import KeptTables
from aengine.tokenizer.tokenizer import TOKENIZER_FILES, Tokenizer

if TYPE_CHECKING:
    from aengine.images.encoder import ImageEncoder
    from aengine.models.images import ImageInput

WEIGHTS = "weights"
"""The part that changes while an engine runs."""
_TEXT_FILES = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
_GGUF_BYTES = 16 << 20
"""So much of a GGUF file is read: it holds the tokenizer before the weights."""


def fingerprint_of(parts: Mapping[str, str]) -> str:
    """16 hexadecimal digits; of no parts: empty."""
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()[:16] if parts else ""


def text_digest(model_dir: Path) -> str:
    """A digest of the files of a model that say how texts become ids and ids texts."""
    digest = hashlib.sha256()
    if is_gguf(model_dir):
        with open(model_dir, "rb") as file:
            digest.update(file.read(_GGUF_BYTES))
        return digest.hexdigest()[:16]
    for path in sorted({path for pattern in _TEXT_FILES for path in model_dir.glob(pattern) if path.is_file()}):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(model_dir)} {len(data)};".encode() + data)
    return digest.hexdigest()[:16]


_log = logging.getLogger("aengine")
SECONDS_BEFORE_TEMPLATE = 0.5
"""After a start, until the chat template is compiled unless a chat came before: so that first tokens of others do not wait for it."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, with its tokenizer and its adapters."""

    runner: Runner
    tokenizer: Tokenizer | None
    info: ModelInfo
    adapters: tuple[AdapterInfo, ...] = ()  # their keys are 1, 2, ..
    drafter: Drafter | None = None  # in place of what `EngineConfig.speculative` stands for
    facts: Mapping[str, str] = field(default_factory=dict)  # parts of the fingerprint, without the weights
    images: ImageEncoder | None = None  # None: the model takes none
    image_input: ImageInput | None = None


def load_model(
    config: EngineConfig, check: Callable[[], object], fail: Callable[[BaseException], object] = lambda error: None
) -> LoadedModel:
    """`check` is called between the parts of the work, and may raise to end it. `fail` is called, from any thread, with what makes it
    impossible that the runner goes on. Raises what `check` raises, `ModelLoadError`, `InsufficientMemoryError` or `ConfigError`."""
    took: dict[str, float] = {}
    with _timed(took, "all"):
        model_dir = resolve_model(config.model, config.revision, config.load_format)
        check()
        loaded = _load(config, model_dir, check, fail, took)
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in took.items() if name != "all")
    _log.info("loaded in %.3f s: %s", took["all"], parts, extra={"seconds": took})
    return loaded


@contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        took[name] = time.perf_counter() - start


def _load(
    config: EngineConfig, model_dir: Path, check: Callable[[], object], fail: Callable[[BaseException], object], took: dict[str, float]
) -> LoadedModel:
    """`took`: gets the seconds of its parts, of which the tokenizer is read beside the others."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="aengine-load"))
        tokenizers_future = pool.submit(_read_tokenizers, config, model_dir, took)  # while weights are loaded: large vocabularies take long
        text_future = pool.submit(text_digest, model_dir)
        ranks = start_ranks(config, model_dir, fail, check=check) if config.num_ranks > 1 else None  # they load while we import torch
        replicas = join_replicas(config, fail, check) if config.expert_parallel_size > 1 else None
        on_failure = stack.enter_context(ExitStack())
        for others in (ranks, replicas):
            if others is not None:
                on_failure.callback(others.close)
        # A collection would traverse the many objects that imports create, again and again.
        with _timed(took, "modules"), paused_collection():
            # Imported here, in the step thread, since importing the engine needs none of it.
            from aengine.images.encoder import find_image_input, make_encoder
            from aengine.models.choice import default_pooling, implementation_of, is_encoder, labels_of, parameter_counts
            from aengine.runner.cpu.packed_loading import warm_weights
            from aengine.runner.runner import ModelRunner
        warm = warm_weights(config, model_dir)
        if warm is not None:
            stack.enter_context(warm)

        def check_all() -> None:
            check()
            if tokenizers_future.done():
                tokenizers_future.result()  # what it raises ends the loading of weights

        check_all()
        with _timed(took, "weights and memory"):
            runner = ModelRunner(config, model_dir, warm=warm, check=check_all, ranks=ranks, replicas=replicas)
        on_failure.pop_all()  # the runner closes ranks and replicas
        try:
            tokenizer, compared = tokenizers_future.result()
            facts = {**runner.facts, "texts": text_future.result()}
            if not compared and runner.draft_vocab_size not in (None, runner.spec.vocab_size):
                sizes = f"its vocabulary has {runner.draft_vocab_size} ids, and the model's {runner.spec.vocab_size}"
                raise ConfigError.of("speculative_model", f"{config.speculative_model!r} is not possible: {sizes}")
            adapters = _load_adapters(config, runner, check)
        except BaseException:
            runner.close()
            raise
    if tokenizer is not None and tokenizer.has_chat_template:
        later = threading.Timer(SECONDS_BEFORE_TEMPLATE, tokenizer.compile_template)
        later.daemon = True
        later.start()
    image_input = find_image_input(config, runner.spec, tokenizer is not None)
    encoder = None if image_input is None else make_encoder(config, image_input, model_dir, runner.dtype, str(runner.device))
    num_parameters, num_active_parameters = parameter_counts(runner.spec)
    chat_format = None if tokenizer is None else tokenizer.chat_format
    info = ModelInfo(
        name=model_name(config.model),
        architecture=runner.spec.architecture,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        dtype=runner.dtype.name,
        num_parameters=num_parameters,
        chat_template=tokenizer is not None and tokenizer.has_chat_template,
        generation_defaults=SamplingParams(**runner.sampling_defaults, detokenize=None if tokenizer is not None else False),
        device=str(runner.device),
        tokenizer=tokenizer is not None,
        family=runner.spec.family,
        implementation=implementation_of(runner.spec),
        executor=runner.executor_name,
        num_active_parameters=num_active_parameters,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        state_bytes=runner.state_bytes,
        quantization=runner.quantization,
        call_format="" if chat_format is None else chat_format.calls,
        reasoning_format="" if chat_format is None else chat_format.reasoning,
        num_layers=runner.spec.num_layers,
        hidden_size=runner.spec.hidden_size,
        pooling=default_pooling(model_dir, encodes=is_encoder(runner.spec)),
        output_head=runner.has_output_head,
        encoder=is_encoder(runner.spec),
        labels=labels_of(runner.spec),
        max_images=0 if encoder is None else config.max_images,
        layer_groups=tuple(LayerGroup(count, window) for window, count in Counter(runner.spec.windows).items()),
    )
    _log.info("%s", info.describe())
    return LoadedModel(runner, tokenizer, info, adapters, facts=facts, images=encoder, image_input=image_input)


def _load_adapters(config: EngineConfig, runner: Runner, check: Callable[[], object]) -> tuple[AdapterInfo, ...]:
    """Load the adapters of the configuration under the keys 1, 2, ... and return what is known of them. Raises AdapterError."""
    infos = []
    for key, (name, path) in enumerate(config.adapters.items(), 1):
        check()
        try:
            prepared = runner.prepare(LoadAdapter(key, name, str(resolve_adapter(path))))
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from error
        runner.apply(prepared)
        assert prepared.adapter is not None
        infos.append(prepared.adapter)
    return tuple(infos)


def kept_tables(config: EngineConfig, model_dir: Path) -> KeptTables | None:
    """The file with the tables of a model's tokenizer; None: they are not kept."""
    from aengine.runner.cpu.packed_loading import WeightsCache  # imports what runs models, as above

    cache, file = WeightsCache.of(config), model_dir if model_dir.is_file() else model_dir / "tokenizer.json"
    return None if cache is None or not file.is_file() else KeptTables(cache.tables_path(file), cache.check_room, cache.make_room)


def _read_tokenizers(config: EngineConfig, model_dir: Path, took: dict[str, float]) -> tuple[Tokenizer | None, bool]:
    """The tokenizer of the model, if it has one, and whether that of the draft model was compared with it. Raises ModelLoadError, and
    ConfigError for a draft model with another vocabulary."""
    with _timed(took, "tokenizer"):
        tokenizer = Tokenizer.find(model_dir, content_special_tokens=config.content_special_tokens, kept=kept_tables(config, model_dir))
    if config.speculative_model is None or tokenizer is None:
        return tokenizer, False
    draft_dir = resolve_model(config.speculative_model, None, config.load_format)
    draft = Tokenizer.find(draft_dir, kept=kept_tables(config, draft_dir))
    if draft is None:
        return tokenizer, False
    difference = tokenizer.difference(draft)
    if difference is not None:
        raise ConfigError.of("speculative_model", f"{config.speculative_model!r} is not possible: its vocabulary is another: {difference}")
    return tokenizer, True


def drafter_of(config: EngineConfig, loaded: LoadedModel) -> Drafter | None:
    """What proposes drafts; None: nothing does."""
    if loaded.drafter is not None:
        return loaded.drafter
    if config.speculative == "off":
        return None
    source = loaded.runner.draft_source
    model = None if source is None else ModelDrafter(source)
    if model is not None and config.speculative != "auto":
        return model
    ngram = NgramDrafter(loaded.info.vocab_size, loaded.runner.max_num_seqs)
    return ngram if model is None else BestOfBoth(ngram, model)


def scheduler_config(config: EngineConfig, runner: Runner, info: ModelInfo) -> SchedulerConfig:
    """The limits of the runner, and what the configuration says of scheduling."""
    return SchedulerConfig(
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        num_pages=runner.num_pages,
        page_size=runner.page_size,
        windows=runner.windows,
        state_pages=runner.state_pages,
        state_interval=runner.state_interval,
        max_in_flight=runner.max_in_flight,
        max_adapters=runner.max_adapters or None,
        enable_prefix_cache=config.enable_prefix_cache and not info.encoder,
        whole_prompts=info.encoder,
        max_drafts=config.max_drafts,
        has_draft_model=runner.draft_source is not None,
        has_draft_head=runner.draft_source in (DraftSource.HEAD, DraftSource.MTP),
        session_seconds=config.session_seconds,
        session_share=config.session_share,
        tenant_weights=config.tenant_weights,
        ageing_seconds=config.ageing_seconds,
    )
