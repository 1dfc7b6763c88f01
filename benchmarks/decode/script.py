"""Record the proposals of the bundled model along its output, to replay them over a network with random weights.

A benchmark runs the random network in full and takes only the proposals from the script.
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
"""Most prefixes or prompts per forward."""


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """Proposals for one prompt; S positions of its output, W proposals at each, column 0 the autoregressive token."""

    tokens_SW: NDArray[np.int64]
    confidences_SW: NDArray[np.float32]
    """Probability of each token."""

    @property
    def output(self) -> list[int]:
        """The autoregressive output."""
        tokens: list[int] = self.tokens_SW[:, 0].tolist()
        return tokens

    def proposals(self, generated: int, window: int) -> tuple[list[int], list[float]]:
        """Return the proposals after `generated` tokens; past the end, those of the last position."""
        assert window <= self.tokens_SW.shape[1], f"{window} proposals asked of a script with {self.tokens_SW.shape[1]}"
        place = min(generated, len(self.tokens_SW) - 1)
        return self.tokens_SW[place, :window].tolist(), self.confidences_SW[place, :window].tolist()


def autoregressive_outputs(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Return the answer to each prompt, the stop token included."""
    options = DecodeOptions(mode="ar", max_tokens=max_tokens, stop_ids=checkpoint.stop_ids)
    outputs: list[list[int]] = []
    for start in range(0, len(prompts), ROWS_MAX):
        # A block of one token is plain decoding with a cache, faster than the reference and equal to it.
        batch = decode_block_cache(
            checkpoint.network, prompts[start : start + ROWS_MAX], options, mask_id=checkpoint.mask_id, cache_block=1
        )
        outputs += [each.tokens for each in batch]
    return outputs


def record(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], lengths: Sequence[int], block: int
) -> list[Script]:
    """Return a script of `block` proposals per position for each prompt, `lengths` tokens long or to its stop token."""
    outputs = autoregressive_outputs(checkpoint, prompts, max(lengths, default=1))
    return [
        _record_one(checkpoint, list(prompt), output[:length], block)
        for prompt, output, length in zip(prompts, outputs, lengths, strict=True)
    ]


@torch.inference_mode()
def _record_one(checkpoint: Checkpoint, prompt: list[int], output: list[int], block: int) -> Script:
    """Forward every prefix of prompt and output with masks after it, without a cache, as the reference does."""
    tokens, confidences = [], []
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
