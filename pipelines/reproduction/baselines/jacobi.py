"""Jacobi decoding: an unmodified autoregressive network corrects its own guesses until they no longer change.

The tokens equal those of autoregressive decoding, up to rounding in the network, and every forward yields at least one.

Source: arXiv 2305.10427, but with a sliding window, as in later comparisons, instead of a window that waits until all
its guesses are stable. A position without a prediction repeats the last prediction as its guess.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.reader import Reader
from pipelines.reproduction.baselines.verify import verify_greedily


@torch.inference_mode()
def decode_jacobi(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    block: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    mask_id: int,
) -> list[BaselineOutput]:
    """Decode each prompt with `block` guesses after the last token; prompts must not be empty.

    A forward yields 1..block + 1 tokens.
    """
    if block < 1:
        raise ConfigError(f"block is {block}; it must be at least 1.")
    outputs = []
    for prompt in prompts:
        output = BaselineOutput(max_tokens, stop_ids)
        reader = Reader(network, mask_id)
        guesses = [prompt[-1]] * block
        while not output.is_finished:
            prefix = [*prompt, *output.tokens]
            guessed = guesses[: output.left - 1]
            predicted = reader.read([*prefix, *guessed], last=len(guessed) + 1).logits_MV.argmax(dim=-1).tolist()
            accepted = verify_greedily(guessed, predicted)
            output.extend(accepted)
            reader.crop(len(prefix) + len(accepted) - 1)
            ahead = predicted[len(accepted) :]
            guesses = ahead + [predicted[-1]] * (block - len(ahead))
        output.forwards = reader.forwards
        outputs.append(output)
    return outputs
