"""What one engine takes: derived from the model and the memory of the machine, checked before any work.

In:    a network, a device, and what the operator set.
Out:   limits; a typed error for a request beyond them.
Never: shortens a prompt.
"""

from dataclasses import dataclass

import psutil
import torch
from transformers import PretrainedConfig

from mars_ray.engine.kv.cache import bytes_per_token
from mars_ray.engine.request import Request
from mars_ray.errors import ConfigError, PromptTooLongError, RequestError

MEMORY_SHARE = 0.5
"""Of the memory that is free once the model is loaded, so much goes to the KV cache at most."""

ROWS_ON_CPU, ROWS_ON_GPU = 32, 256
"""Sequences decoded together where the operator sets no number: beyond them a step costs as much as it gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes of one engine."""

    positions: int
    """Tokens of one sequence, prompt and output."""
    vocabulary: int
    rows: int
    """Sequences that run at a time."""
    kv_tokens: int
    """Positions the cache holds."""
    queue: int
    """Sequences that may wait."""
    request_tokens: int
    """Tokens one request may generate, all of its n sequences together."""

    def check(self, request: Request) -> None:
        """Raise a `RequestError` for what cannot be served; nothing was started."""
        sampling, prompt = request.sampling, request.prompt
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(prompt) >= self.positions:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens and a sequence may have {self.positions}, its answer included. "
                "Shorten the prompt."
            )
        self._check_tokens("the prompt", prompt)
        self._check_tokens("logit_bias", tuple(sampling.logit_bias))
        self._check_tokens("stop_ids", tuple(sampling.stop_ids))
        if sampling.n * sampling.max_tokens > self.request_tokens:
            raise RequestError(
                f"n x max_tokens is {sampling.n} x {sampling.max_tokens} = {sampling.n * sampling.max_tokens}; a "
                f"request may generate {self.request_tokens} tokens. Lower n or max_tokens."
            )
        if sampling.n > self.queue:
            raise RequestError(f"n is {sampling.n} and {self.queue} sequences may wait. Lower n.")

    def _check_tokens(self, name: str, tokens: tuple[int, ...]) -> None:
        strange = [token for token in tokens if type(token) is not int]
        if strange:
            raise RequestError(f"{name} holds {strange[0]!r}; token ids are whole numbers.")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise RequestError(f"{name} holds token {wrong}; the vocabulary has ids from 0 to {self.vocabulary - 1}.")


def resolve_limits(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int | None,
    kv_tokens: int | None,
    queue: int,
    request_tokens: int,
) -> Limits:
    """Fill in what the operator left open. Raises `ConfigError` for sizes that cannot serve one sequence."""
    for name, value in (("rows", rows), ("kv_tokens", kv_tokens), ("queue", queue), ("request_tokens", request_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    text = config.get_text_config()
    rows = rows or (ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU)
    if kv_tokens is None:
        fitting = int(MEMORY_SHARE * free_memory_bytes(device)) // bytes_per_token(config, dtype)
        kv_tokens = max(1, min(fitting, rows * text.max_position_embeddings))
    positions = min(text.max_position_embeddings, kv_tokens)
    if positions < 2:
        raise ConfigError(
            f"kv_tokens is {kv_tokens}; one prompt token and its answer need 2 positions. Free memory or set kv_tokens."
        )
    return Limits(
        positions=positions,
        vocabulary=text.vocab_size,
        rows=rows,
        kv_tokens=kv_tokens,
        queue=queue,
        request_tokens=request_tokens,
    )


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that may still be taken on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    return available
