"""From an `EngineConfig` to a loaded model: files, runner, tokenizer. Runs in the step thread, which will own the device."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aengine.chat import ChatFormat
from aengine.config import EngineConfig
from aengine.engine.tokenizer import Tokenizer
from aengine.errors import AdapterError, ConfigError
from aengine.garbage import paused_collection
from aengine.models.hub import resolve_adapter, resolve_model
from aengine.outputs import AdapterInfo, LayerGroup, ModelInfo
from aengine.parallel.driver import start_ranks
from aengine.parallel.replicas import join_replicas
from aengine.params import SamplingParams
from aengine.runner.base import Runner
from aengine.runner.changes import LoadAdapter
from aengine.runner.warm_weights import warm_weights
from aengine.scheduler.drafter import Drafter

_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    runner: Runner
    tokenizer: Tokenizer | None
    info: ModelInfo
    adapters: tuple[AdapterInfo, ...] = ()  # their keys are 1, 2, ..
    drafter: Drafter | None = None  # in place of what `EngineConfig.speculative` stands for


def load_model(
    config: EngineConfig, check: Callable[[], object], fail: Callable[[BaseException], object] = lambda error: None
) -> LoadedModel:
    """`check` is called between the parts of the work, and may raise to end it. `fail` is called, from any thread, with what makes it
    impossible that the runner goes on. Raises what `check` raises, `ModelLoadError`, `InsufficientMemoryError` or `ConfigError`."""
    model_dir = resolve_model(config.model, config.revision, config.load_format)
    check()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="aengine-load"))
        tokenizers_future = pool.submit(_read_tokenizers, config, model_dir)  # while weights are loaded: large vocabularies take long
        ranks = start_ranks(config, model_dir, fail, check=check) if config.num_ranks > 1 else None  # they load while we import torch
        replicas = join_replicas(config, fail, check) if config.expert_parallel_size > 1 else None
        on_failure = stack.enter_context(ExitStack())
        for others in (ranks, replicas):
            if others is not None:
                on_failure.callback(others.close)
        warm = warm_weights(config, model_dir)
        if warm is not None:
            stack.enter_context(warm)
        with paused_collection():  # it would traverse the many objects that torch creates, again and again
            # Imported here, because it imports torch, which importing the engine should not do.
            from aengine.models.choice import implementation_of, parameter_counts
            from aengine.models.embedding_checkpoint import default_pooling
            from aengine.runner.model_runner import ModelRunner

        def check_all() -> None:
            check()
            if tokenizers_future.done():
                tokenizers_future.result()  # what it raises ends the loading of weights

        check_all()
        runner = ModelRunner(config, model_dir, warm=warm, check=check_all, ranks=ranks, replicas=replicas)
        on_failure.pop_all()  # the runner closes ranks and replicas
        try:
            tokenizer, compared = tokenizers_future.result()
            if not compared and runner.draft_vocab_size not in (None, runner.spec.vocab_size):
                sizes = f"its vocabulary has {runner.draft_vocab_size} ids, and the model's {runner.spec.vocab_size}"
                raise ConfigError.of("speculative_model", f"{config.speculative_model!r} is not possible: {sizes}")
            adapters = _load_adapters(config, runner, check)
        except BaseException:
            runner.close()
            raise
    num_parameters, num_active_parameters = parameter_counts(runner.spec)
    format = ChatFormat.of_template(tokenizer.template) if tokenizer is not None else ChatFormat()
    info = ModelInfo(
        name=config.model,
        architecture=runner.spec.architecture,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        dtype=str(runner.dtype).removeprefix("torch."),
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
        quantization=runner.quantization,
        call_format=format.calls,
        reasoning_format=format.reasoning,
        hidden_size=runner.spec.hidden_size,
        pooling=default_pooling(model_dir),
        output_head=runner.has_output_head,
        layer_groups=tuple(LayerGroup(count, window) for window, count in Counter(runner.spec.windows).items()),
    )
    _log.info("%s", info.describe())
    return LoadedModel(runner, tokenizer, info, adapters)


def _load_adapters(config: EngineConfig, runner: Runner, check: Callable[[], object]) -> tuple[AdapterInfo, ...]:
    """Those of the configuration. Raises AdapterError."""
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


def _read_tokenizers(config: EngineConfig, model_dir: Path) -> tuple[Tokenizer | None, bool]:
    """The tokenizer of the model, if it has one, and whether that of the draft model was compared with it. Raises ModelLoadError, and
    ConfigError for a draft model with another vocabulary."""
    tokenizer = Tokenizer.find(model_dir)
    if config.speculative_model is None or tokenizer is None:
        return tokenizer, False
    draft = Tokenizer.find(resolve_model(config.speculative_model, None, config.load_format))
    if draft is None:
        return tokenizer, False
    difference = tokenizer.difference(draft)
    if difference is not None:
        raise ConfigError.of("speculative_model", f"{config.speculative_model!r} is not possible: its vocabulary is another: {difference}")
    return tokenizer, True
