"""Networks that the plug-in supports, and settings of vLLM that it refuses at start, in one line each."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mars_ray.errors import ConfigError
from mars_ray.vllm.settings import VllmSettings

ARCHITECTURE_OF = {
    "llama": "MarsLlamaForCausalLM",
    "qwen2": "MarsQwen2ForCausalLM",
    "qwen3": "MarsQwen3ForCausalLM",
}
"""Names for `--hf-overrides` of networks that look ahead, keyed by the `model_type` of config.json. Under its own name,
a checkpoint is served by stock vLLM."""


FLASHINFER = "attention backend is FLASHINFER, which takes our steps for prompts; choose FLASH_ATTN or TRITON_ATTN."


def check_backends(layers: Iterable[Any]) -> None:
    """Raise `ConfigError` if vLLM chose FlashInfer for a layer of the loaded network."""
    for layer in layers:
        backend = getattr(layer, "get_attn_backend", None)
        if backend and backend().get_name() == "FLASHINFER":
            raise ConfigError(FLASHINFER)


def check_start(config: Any, settings: VllmSettings) -> None:
    """Raise `ConfigError` unless MARS works under the `VllmConfig`."""
    for problem in _problems(config, settings):
        raise ConfigError(problem)


def _problems(config: Any, settings: VllmSettings) -> Iterator[str]:
    scheduler, parallel, model = config.scheduler_config, config.parallel_config, config.model_config
    positions = 1 + settings.draft_positions
    if not config.use_v2_model_runner:
        yield (
            "vLLM chose model runner V1, MARS needs V2. Leave VLLM_USE_V2_MODEL_RUNNER unset, and do without what V2 "
            "does not support: vLLM's log names it."
        )
    if config.speculative_config is not None:
        yield "speculative_config is set; MARS drafts by itself, so leave --speculative-config out."
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; MARS needs 1. Use --tensor-parallel-size to "
            "spread the model."
        )
    if parallel.enable_batch_sharded_sampling:
        yield "enable_batch_sharded_sampling is set; MARS samples all requests of a step together, so leave it out."
    if parallel.worker_extension_cls:
        yield f"worker_extension_cls is {parallel.worker_extension_cls}; MARS sets its own, so leave it out."
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config is set; a connector would copy keys of masks, so leave --kv-transfer-config out."
    # Added by vLLM after this check, as a connector.
    if (size := getattr(config.cache_config, "kv_offloading_size", None)) is not None:
        yield f"kv_offloading_size is {size}; keys of masks would be offloaded, so leave --kv-offloading-size out."
    if getattr(model, "enable_prompt_embeds", False):
        yield "enable_prompt_embeds is set; vLLM would feed no drafts, so leave --enable-prompt-embeds out."
    if getattr(model, "enable_trace_replay", False):
        yield "enable_trace_replay is set; it knows one token per step, so leave --enable-trace-replay out."
    if model.use_mla:
        yield "The model has MLA attention; MARS supports Llama, Qwen2 and Qwen3. Serve it without MARS."
    backend = config.attention_config.backend
    if backend is not None and re.search("flashinfer", str(backend), re.IGNORECASE):
        yield FLASHINFER
    if settings.mode == "threshold" and model.get_sliding_window():
        yield (
            f"The model has a sliding window of {model.get_sliding_window()} tokens, whose blocks vLLM frees too early "
            'in mode threshold; set mode to exact in --additional-config \'{"mars": {"mode": "exact"}}\'.'
        )
    if scheduler.policy != "fcfs":
        yield f"scheduling policy is {scheduler.policy}; MARS needs fcfs, so leave --scheduling-policy out."
    if scheduler.max_num_seqs * positions > scheduler.max_num_batched_tokens:
        yield (
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}; {scheduler.max_num_seqs} sequences with "
            f"{positions} positions each need {scheduler.max_num_seqs * positions}. Raise --max-num-batched-tokens, or "
            "lower --max-num-seqs or the block."
        )
    if 0 < scheduler.long_prefill_token_threshold < positions:
        yield (
            f"long_prefill_token_threshold is {scheduler.long_prefill_token_threshold}; it would cut the {positions} "
            f"positions of a step. Set it to 0, or to {positions} or more."
        )
