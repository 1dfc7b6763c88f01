"""Derive the sizes of an engine from the model and the memory of the machine, and check requests against them.

A request that exceeds a limit is an error. Prompts are never shortened.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from mars_ray.engine.kv.cache import bytes_per_token, kv_shape
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request
from mars_ray.errors import ConfigError, ModelError, PromptTooLongError, RequestError
from mars_ray.model.rotary_length import constant_rotary_length
from mars_ray.usable_memory import usable_memory_bytes

MEMORY_SHARE = 0.5
"""Maximum share of the memory that is free once the model is loaded, for the KV cache to take."""

MAX_NUM_SEQS_ON_CPU = 32
MAX_NUM_SEQS_ON_GPU = 256
"""Default number of sequences decoded together. Beyond this number, step time grows in proportion to the number of
sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The sizes of one engine."""

    max_model_len: int
    """Maximum number of tokens of a sequence, prompt and output together."""
    vocab_size: int
    """Size of the vocabulary; every token id is smaller."""
    max_num_seqs: int
    """Maximum number of sequences decoded together."""
    max_kv_tokens: int
    """Capacity of the KV cache in tokens."""
    max_waiting_seqs: int
    """Maximum number of waiting sequences."""
    max_request_tokens: int
    """Maximum number of tokens that one request may generate, in all its n sequences together."""

    def check(self, request: Request) -> None:
        """Raise a `RequestError` for a request that this engine cannot serve."""
        sampling = request.sampling
        prompt = request.prompt
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(prompt) + min(1, sampling.max_tokens) > self.max_model_len:  # scores alone need no room for an answer
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; prompt and answer together may have {self.max_model_len}. "
                "Shorten the prompt."
            )
        self._check_tokens("the prompt", prompt, param="prompt")
        self._check_tokens("logit_bias", tuple(sampling.logit_bias), param="logit_bias")
        self._check_tokens("stop_token_ids", tuple(sampling.stop_token_ids), param="stop_token_ids")
        for index, partial in request.partial_answers.items():
            self._check_partial_answer(request, index, partial.tokens)
        if sampling.n * sampling.max_tokens > self.max_request_tokens:
            raise RequestError(
                f"n x max_tokens is {sampling.n} x {sampling.max_tokens} = {sampling.n * sampling.max_tokens}; a "
                f"request may generate at most {self.max_request_tokens} tokens. Lower n or max_tokens."
            )
        if sampling.n > self.max_waiting_seqs:
            raise RequestError(f"n is {sampling.n}; at most {self.max_waiting_seqs} sequences may wait. Lower n.")

    def _check_partial_answer(self, request: Request, index: int, tokens: tuple[int, ...]) -> None:
        if not 0 <= index < request.sampling.n:
            raise RequestError(f"a partial answer has the index {index}; n is {request.sampling.n}.")
        self._check_tokens("a partial answer", tokens)
        room = min(request.sampling.max_tokens, self.max_model_len - len(request.prompt))
        if len(tokens) >= room:
            raise RequestError(
                f"a partial answer has {len(tokens)} tokens; the whole answer may have {room} on this engine."
            )

    def _check_tokens(self, name: str, tokens: tuple[int, ...], *, param: str | None = None) -> None:
        invalid = [token for token in tokens if type(token) is not int]
        if invalid:
            raise RequestError(f"{name} holds {invalid[0]!r}; token ids are whole numbers.", param=param)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            unknown = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"{name} holds token {unknown}; the vocabulary has ids from 0 to {self.vocab_size - 1}.", param=param
            )


def resolve_limits(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, options: EngineOptions
) -> EngineLimits:
    """Return the limits of an engine, deriving a value for each option that is None.

    Raises `ConfigError` for sizes that are too small for any sequence, and `ModelError` if the number of query heads is
    not a multiple of the number of key heads.
    """
    text = config.get_text_config()
    _, key_heads, _ = kv_shape(config)
    if text.num_attention_heads % key_heads:
        raise ModelError(
            f"The model has {text.num_attention_heads} query heads and {key_heads} key heads; the number of "
            "query heads must be a multiple of the number of key heads. Correct num_key_value_heads in its config.json."
        )
    max_num_seqs = options.max_num_seqs or (MAX_NUM_SEQS_ON_GPU if device.type == "cuda" else MAX_NUM_SEQS_ON_CPU)
    max_kv_tokens = options.max_kv_tokens
    if max_kv_tokens is None:
        fitting = int(MEMORY_SHARE * free_memory_bytes(device)) // bytes_per_token(config, dtype)
        max_kv_tokens = max(1, min(fitting, max_num_seqs * text.max_position_embeddings))
    max_model_len = min(constant_rotary_length(text), max_kv_tokens)
    if max_model_len < 2:
        raise ConfigError(
            f"max_kv_tokens is {max_kv_tokens}; a prompt of one token and its answer need 2. Free memory or raise "
            "max_kv_tokens."
        )
    return EngineLimits(
        max_model_len=max_model_len,
        vocab_size=text.vocab_size,
        max_num_seqs=max_num_seqs,
        max_kv_tokens=max_kv_tokens,
        max_waiting_seqs=options.max_waiting_seqs,
        max_request_tokens=options.max_request_tokens,
    )


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of `device` in bytes, within the limits of this process's container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return usable_memory_bytes()
