"""Translate a sequence into the arguments of vLLM's `SamplingParams`. vLLM is not imported."""

import json
from typing import Any

from mars_ray.engine.grammar.library import LAYOUT
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.request import NUMBERS, Request, SamplingParams
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.errors import RequestError
from mars_ray.method.metric import Metric

SEEDS = 2**63
"""vLLM keeps seeds in 64 bits with a sign."""


def check_request(request: Request) -> None:
    """Raise `RequestError` for what only the engine `mars` can do."""
    if request.decode.confidence_metric is not Metric.PROBABILITY:
        raise RequestError(
            f"metric is {request.decode.metric.value}; the engine vllm accepts tokens by probability only."
        )
    if request.decode.adapter is not None:
        raise RequestError(f"adapter is {request.decode.adapter!r}; the engine vllm has no adapters.")
    if request.sampling.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs is {request.sampling.prompt_logprobs}; the engine vllm scores no prompts. Use the engine "
            "mars."
        )
    if request.partial_answers and (obstacle := resume_obstacle(request.sampling)):
        raise RequestError(f"the engine vllm continues no answer with {obstacle}.")


def resume_obstacle(sampling: SamplingParams) -> str | None:
    """Return what would make a partial answer go on differently, because vLLM reads it as a prompt; None if nothing."""
    if sampling.grammar is not None:
        return "a grammar"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "a presence_penalty or a frequency_penalty"
    return None


def sampling_arguments(sequence: Sequence) -> dict[str, Any]:
    """Return the arguments for one sequence. Text and stop strings are handled by our detokenizer."""
    sampling = sequence.request.sampling
    partial = sequence.num_output_tokens  # of another engine, or from before a preemption; vLLM reads them as a prompt
    return {
        "max_tokens": sequence.max_tokens - partial,
        "min_tokens": max(0, min(sampling.min_tokens, sequence.max_tokens) - partial),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "seed": sequence.seed % SEEDS,
        "stop_token_ids": sorted(sequence.stop_ids),
        "ignore_eos": True,  # the model's stop tokens are among `stop_token_ids` unless the request ignores them
        "logprobs": sampling.logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        **{name: getattr(sampling, name) for name in NUMBERS},
        "extra_args": lookahead_arguments(sequence.request),
        "detokenize": False,
    }


def structured_outputs(grammar: GrammarSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's `StructuredOutputsParams` for a grammar, with our layout of JSON."""
    if grammar.kind == "regex":
        return {"regex": grammar.text}
    if grammar.kind == "lark":
        return {"grammar": grammar.text}
    schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict):  # a schema may be true, which allows any value
        schema = {"allOf": [schema]}
    return {"json": schema | {"x-guidance": LAYOUT}}


def lookahead_arguments(request: Request) -> dict[str, Any]:
    """Return the lookahead of a request under the names of `vllm_xargs`."""
    decode = request.decode
    values = {
        "mode": decode.mode.value,
        "threshold": decode.threshold,
        "threshold_floor": decode.floor,
        "block": decode.block,
        "service_class": request.service_class,
    }
    return {name: value for name, value in values.items() if value is not None}
