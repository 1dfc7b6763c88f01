"""vLLM's `LLMEngine` as a `DecodingCore`, in this process."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm import LLMEngine, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from mars_ray.engine.core.limits import EngineLimits
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.errors import ConfigError, RequestError
from mars_ray.vllm.engine.core import CoreLoad, CoreOutput
from mars_ray.vllm.engine.sampling import sampling_arguments, structured_outputs
from mars_ray.vllm.forward_log import LoggedForward
from mars_ray.vllm.runner.model_config import settings_of

MOST_LOGIT_BIAS, MOST_STOP_IDS = 1024, 128
"""Tokens with a bias, and stop tokens beside `min_tokens`, beyond which vLLM's sampler ends the engine."""


class LLMEngineCore:
    """Decodes with an `LLMEngine` whose scheduler runs in this process. `arguments` are those of `EngineArgs`.

    Raises `ConfigError` for arguments that vLLM refuses.
    """

    def __init__(self, arguments: Mapping[str, Any], options: EngineOptions) -> None:
        unknown = arguments.keys() - {field.name for field in fields(EngineArgs)}
        if unknown:
            raise ConfigError(f"vllm_args has {min(unknown)!r}, which this version of vLLM does not know.")
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, TypeError) as error:  # a pydantic error has one line for each problem and its help page
            reason = " ".join(str(error).split()).rstrip(". ")
            raise ConfigError(f"vLLM refuses the settings: {reason}.") from error
        config = self._engine.vllm_config
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.block = settings_of(config).block
        self.limits = EngineLimits(
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_kv_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
            max_waiting_seqs=options.max_waiting_seqs,
            max_request_tokens=options.max_request_tokens,
        )

    def check(self, sequence: Sequence) -> None:
        """Raise `RequestError` for sampling parameters that vLLM refuses, now or in a step."""
        params = _params(sequence)
        for name, number, most in (
            ("logit_bias", len(params.logit_bias or ()), MOST_LOGIT_BIAS),
            ("stop_token_ids", len(params.stop_token_ids) if params.min_tokens else 0, MOST_STOP_IDS),
        ):
            if number > most:
                raise RequestError(f"{name} has {number} tokens; vLLM takes at most {most}.", param=name)

    def add(self, key: str, sequence: Sequence) -> None:
        """Start a sequence. Only requests of one tenant share cached prefixes."""
        prompt = tokens_input(list(sequence.tokens), cache_salt=sequence.tenant or None)
        self._engine.add_request(key, prompt, _params(sequence))

    def abort(self, key: str) -> None:
        """End a sequence; its output of steps in flight is dropped."""
        self._engine.abort_request([key])

    def step(self) -> list[CoreOutput]:
        """Run a step, and return the output that is ready."""
        outputs = []
        for result in self._engine.step():
            [answer] = result.outputs
            logprobs = [
                {token: candidate.logprob for token, candidate in candidates.items()}
                for candidates in answer.logprobs or ()
            ]
            outputs.append(
                CoreOutput(
                    key=result.request_id,
                    tokens=tuple(answer.token_ids),
                    logprobs=tuple(logprobs),
                    cached_tokens=result.num_cached_tokens or 0,
                    finish_reason=answer.finish_reason,
                )
            )
        return outputs

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of some classes from the next step on."""
        self._engine.collective_rpc("set_mars_thresholds", args=(dict(by_class),))

    def record(self) -> Mapping[str, Any]:
        """Return the counts of the plug-in; all workers count the same."""
        record: Mapping[str, Any] = self._engine.collective_rpc("mars_record")[0]
        return record

    def forwards(self) -> list[LoggedForward]:
        """Return the forwards per request since the last call. All workers log the same, so one is read."""
        forwards: list[LoggedForward] = self._engine.collective_rpc("mars_forwards")[0]
        return forwards

    def load(self) -> CoreLoad:
        """Return the use of the KV cache."""
        return CoreLoad(kv_cache_usage=self._scheduler.kv_cache_manager.usage, preemptions=self._scheduler.preemptions)

    def close(self) -> None:
        """Stop vLLM's workers."""
        self._engine.engine_core.shutdown()


def _params(sequence: Sequence) -> SamplingParams:
    """Return vLLM's sampling parameters for a sequence. Raises `RequestError` for values that vLLM refuses."""
    try:
        grammar = sequence.request.sampling.grammar
        outputs = StructuredOutputsParams(**structured_outputs(grammar)) if grammar else None
        arguments = sampling_arguments(sequence) | {"structured_outputs": outputs}
        return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
    except ValueError as error:
        raise RequestError(f"vLLM refuses the request: {str(error).rstrip('. ')}.") from error
