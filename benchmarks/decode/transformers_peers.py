"""Decode the same requests with transformers, in static batches and with its continuous batching.

Decoding is greedy. Setup (paged cache, graphs, threads) is not timed, because a server does it once.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

NO_STOP = -1
"""Stop id that no token has; None would select the stop ids of the model's generation config."""
PAGE_TOKENS = 256
"""Tokens per page; the default of transformers."""
SILENCE_S_MAX = 120.0
"""Seconds without a token after which a batch fails."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Answers of a peer in the order of the requests."""

    outputs: list[list[int]]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all answers, without those generated after the end of an answer."""
        return sum(map(len, self.outputs))


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The reason why a peer cannot run here."""

    reason: str


def generate_static(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    batch: int,
    *,
    stop_ids: frozenset[int],
    clock: Callable[[], float] = time.perf_counter,
) -> PeerRun:
    """Run `generate` batch by batch, each until its longest answer is complete.

    Without stop ids every row runs to the longest length in its batch, because random weights never stop by themselves.
    """
    outputs: list[list[int]] = []
    with _quiet():
        started_s = clock()
        for start in range(0, len(prompts), batch):
            rows = prompts[start : start + batch]
            room = max(lengths[start : start + batch])
            width = max(map(len, rows))
            ids_RS = torch.tensor([[0] * (width - len(row)) + [*row] for row in rows], device=network.device)
            real_RS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=network.device)
            generated_RS = network.generate(
                ids_RS, attention_mask=real_RS, generation_config=_greedy(room, stop_ids), use_cache=True
            )
            outputs += generated_RS[:, width:].tolist()
        seconds = clock() - started_s
    cut = [_cut(output, length, stop_ids) for output, length in zip(outputs, lengths, strict=True)]
    return PeerRun(cut, seconds)


def generate_continuous(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    batch: int,
    *,
    stop_ids: frozenset[int],
    clock: Callable[[], float] = time.perf_counter,
) -> PeerRun | Unavailable:
    """Run the continuous batching of transformers with `batch` requests at once; each leaves when it is complete.

    It uses the manager behind `generate_batch`, because the manager takes a length per request.
    """
    attention = network.config._attn_implementation
    try:
        with (
            _quiet(),
            network.continuous_batching_context_manager(
                generation_config=_greedy(max(lengths), stop_ids),
                continuous_batching_config=_continuous(network, prompts, lengths, batch),
            ) as manager,
        ):
            started_s = clock()
            # Number the requests, because the manager would invent its own ids.
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request([*prompt], request_id=str(number), max_new_tokens=length)
            outputs = _collect(manager, len(prompts))
            seconds = clock() - started_s
    # Continuous batching differs between versions and may lack memory or attention kernels, so report any error.
    except Exception as error:
        return Unavailable(f"continuous batching of transformers: {type(error).__name__}: {error}")
    finally:
        if network.config._attn_implementation != attention:
            network.set_attn_implementation(attention)
    cut = [_cut(output, length, stop_ids) for output, length in zip(outputs, lengths, strict=True)]
    return PeerRun(cut, seconds)


def _continuous(
    network: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int], batch: int
) -> ContinuousBatchingConfig:
    longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    return ContinuousBatchingConfig(
        max_requests_per_batch=batch,
        page_size=PAGE_TOKENS,
        # The default takes most of the memory. Take twice the need, because 15 percent of the pages stay free.
        num_blocks=2 * batch * -(-longest // PAGE_TOKENS),
        max_batch_tokens=batch * max(map(len, prompts)),
        allow_block_sharing=False,
        auto_switch_to_flash=network.device.type == "cuda",
        seed=0,
    )


def _collect(manager: Any, requests: int) -> list[list[int]]:
    outputs: dict[int, list[int]] = {}
    while len(outputs) < requests:
        result = manager.get_result(timeout=SILENCE_S_MAX)
        if result is None:
            fatal = manager.background_thread_status.fatal_error
            raise RuntimeError(fatal or f"no answer for {SILENCE_S_MAX:.0f} s")
        if result.error is not None:
            raise RuntimeError(result.error)
        outputs[int(result.request_id)] = result.generated_tokens
    return [outputs[number] for number in range(requests)]


def _greedy(room: int, stop_ids: frozenset[int]) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False, max_new_tokens=room, eos_token_id=sorted(stop_ids) or NO_STOP, pad_token_id=0
    )


def _cut(output: list[int], length: int, stop_ids: frozenset[int]) -> list[int]:
    """Return the output up to its stop token or its length."""
    ends = next((count for count, token in enumerate(output, start=1) if token in stop_ids), len(output))
    return output[: min(ends, length)]


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("transformers", "ContinuousBatchingLogger")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
