"""Autoregressive decoding with the same reader as the other baselines, as the reference for their speed."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.reader import Reader


@torch.inference_mode()
def decode_autoregressive(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    mask_id: int,
) -> list[BaselineOutput]:
    """Decode each prompt; prompts must not be empty."""
    outputs = []
    for prompt in prompts:
        output = BaselineOutput(max_tokens, stop_ids)
        reader = Reader(network, mask_id)
        while not output.is_finished:
            reading = reader.read([*prompt, *output.tokens], last=1)
            output.extend([int(reading.logits_MV[0].argmax())])
        output.forwards = reader.forwards
        outputs.append(output)
    return outputs
