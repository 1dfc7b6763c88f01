"""Record the proposals of the bundled model along its output, to replay them in a network with random weights.

A benchmark runs all of the random network and takes only the proposals from the script.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.decode.block_cache import decode_block_cache
from mars_ray.method.acceptance import confidence
from mars_ray.method.logits import logits_at
from mars_ray.method.metric import Metric
from mars_ray.method.reference import DecodeOptions
from mars_ray.model.checkpoint import Checkpoint

ROWS_MAX = 64
"""Largest number of prefixes or prompts per forward."""


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """Proposals for one prompt: W at each of the S positions of its output. Column 0 is the autoregressive token."""

    tokens_SW: NDArray[np.int64]
    confidences_SW: NDArray[np.float32]
    """Probability of each token."""

    def proposals(self, generated: int, window: int) -> tuple[list[int], list[float]]:
        """Return the proposals after `generated` tokens; beyond the recorded output, those of its last position."""
        assert window <= self.tokens_SW.shape[1], (
            f"{window} proposals requested from a script with {self.tokens_SW.shape[1]}"
        )
        index = min(generated, len(self.tokens_SW) - 1)
        return self.tokens_SW[index, :window].tolist(), self.confidences_SW[index, :window].tolist()


def autoregressive_outputs(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Return the answer to each prompt, including the stop token."""
    options = DecodeOptions(mode="ar", max_tokens=max_tokens, stop_ids=checkpoint.stop_ids)
    outputs: list[list[int]] = []
    for start in range(0, len(prompts), ROWS_MAX):
        # Blocks of one token are plain decoding with a cache, which equals the reference and is faster.
        batch = decode_block_cache(
            checkpoint.network, prompts[start : start + ROWS_MAX], options, mask_id=checkpoint.mask_id, cache_block=1
        )
        outputs += [sequence.tokens for sequence in batch]
    return outputs


def record(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], lengths: Sequence[int], block: int
) -> list[Script]:
    """Return a script with `block` proposals per position for each prompt, up to its length or its stop token."""
    outputs = autoregressive_outputs(checkpoint, prompts, max(lengths, default=1))
    return [
        _record_one(checkpoint, list(prompt), output[:length], block)
        for prompt, output, length in zip(prompts, outputs, lengths, strict=True)
    ]


@torch.inference_mode()
def _record_one(checkpoint: Checkpoint, prompt: list[int], output: list[int], block: int) -> Script:
    """Forward every prefix of prompt and output, followed by masks, without a cache, as the reference does."""
    tokens = []
    confidences = []
    for start in range(0, len(output), ROWS_MAX):
        generated_S = torch.arange(start, min(start + ROWS_MAX, len(output)))
        length = len(prompt) + int(generated_S[-1]) + block - 1
        written_T = torch.tensor((prompt + output + [checkpoint.mask_id] * block)[:length])
        last_S1 = len(prompt) - 1 + generated_S[:, None]
        slot_T = torch.arange(length)
        ids_ST = torch.where(slot_T <= last_S1, written_T, checkpoint.mask_id)
        where_ST = (slot_T >= last_S1) & (slot_T < last_S1 + block)
        network = checkpoint.network
        logits_SWV = logits_at(network, where_ST.to(network.device), input_ids=ids_ST.to(network.device))
        logits_SWV = logits_SWV.view(len(generated_S), block, -1)
        logits_SWV[..., checkpoint.mask_id] = -torch.inf
        tokens.append(logits_SWV.argmax(dim=-1).cpu())
        confidences.append(confidence(logits_SWV, Metric.PROBABILITY).cpu())
    return Script(torch.cat(tokens).numpy(), torch.cat(confidences).numpy())
