"""Load a model into vLLM."""

import json
import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars_ray.adapter.card import AdapterCard
from mars_ray.engine.core.limits import MAX_NUM_SEQS_ON_CPU, MAX_NUM_SEQS_ON_GPU
from mars_ray.engine.core.load import best_device
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.service_class import class_names
from mars_ray.engine.stats.profile import Profile
from mars_ray.errors import ConfigError
from mars_ray.model.card import Card, gains
from mars_ray.model.folder import ResolvedModel
from mars_ray.vllm.engine.engine import VllmEngine
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.settings import KEY, VllmSettings
from mars_ray.vllm.start_checks import ARCHITECTURE_OF

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of vLLM, unless the caller has set it otherwise."""


@dataclass(frozen=True, slots=True)
class LoadedTokens:
    """The tokenizer of a model and its special tokens."""

    tokenizer: PreTrainedTokenizerBase
    mask_id: int
    stop_ids: frozenset[int]


def load_engine(model: ResolvedModel, options: EngineOptions) -> tuple[VllmEngine, PreTrainedTokenizerBase]:
    """Return a `VllmEngine` on this machine's best device, and the tokenizer of the model.

    Call `requirements.problems` first. Raises `ConfigError` for settings that vLLM or the plug-in refuses.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process runs the steps; it is the engine process already
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mars_ray.vllm.engine.llm_engine import LLMEngineCore
    from mars_ray.vllm.runner.plugin import register

    register()
    settings = VllmSettings.complete({}, model.folder, model.config.get_text_config().vocab_size)
    tokenizer = model.load_tokenizer()
    core = LLMEngineCore(engine_arguments(model, options, settings), options)
    tokens = LoadedTokens(tokenizer, settings.mask_id, _stop_ids(model, tokenizer))
    records = new_records(model.card, core.block, tokens.stop_ids)
    return VllmEngine(core, tokens, options, records=records), tokenizer


def open_records(model: ResolvedModel, card: Card | AdapterCard | None, block: int) -> Records:
    """Return new records of an engine that another process has loaded. `card` has the calibration."""
    return new_records(card, block, _stop_ids(model, model.load_tokenizer()))


def new_records(card: Card | AdapterCard | None, block: int, stop_ids: frozenset[int]) -> Records:
    """Return records that begin with the calibration of a card."""
    calibration = gains(card.calibration if card else ())
    return Records(Profile(block, calibration, lenient=isinstance(card, AdapterCard)), stop_ids)


def engine_arguments(model: ResolvedModel, options: EngineOptions, settings: VllmSettings) -> dict[str, Any]:
    """Return the arguments of `EngineArgs`. Raises `ConfigError` for an argument that our options already set."""
    positions = 1 + settings.draft_positions
    default_seqs = MAX_NUM_SEQS_ON_GPU if best_device() == "cuda" else MAX_NUM_SEQS_ON_CPU
    max_num_seqs = options.max_num_seqs or default_seqs
    ours: dict[str, Any] = {
        "model": str(model.folder),
        "dtype": model.dtype.name,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "mp" if options.tensor_parallel_size > 1 else None,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs * positions + options.max_prefill_tokens,
        "hf_overrides": {"architectures": [ARCHITECTURE_OF[model.config.model_type]]},
        "additional_config": {KEY: {"threshold": options.threshold, "classes": class_names(options.classes)}},
        "generation_config": "vllm",  # requests bring their own sampling parameters
        "structured_outputs_config": {"backend": "guidance"},  # the library that our grammars are written for
        "disable_log_stats": True,
    }
    for name in options.vllm_args:
        if name in ours:
            raise ConfigError(f"vllm_args may not set {name}, because other options of mars-ray set it.")
    return ours | dict(options.vllm_args)


def _stop_ids(model: ResolvedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a response, as `Checkpoint.stop_ids` does for a loaded network."""
    file = model.folder / "generation_config.json"
    configured = json.loads(file.read_text()).get("eos_token_id") if file.exists() else model.config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(number for number in (*ids, tokenizer.eos_token_id) if number is not None)
