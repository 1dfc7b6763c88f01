"""Autoregressive decoding with the reader of the other rivals: what their wall-clock is compared with.

In:    prompts.
Out:   the tokens, one for each forward.
Never: looks ahead.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mars_ray.baselines.answer import Answer
from mars_ray.baselines.reader import Reader


@torch.inference_mode()
def decode_autoregressive(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    mask_id: int,
) -> list[Answer]:
    """Decode each prompt, none of them empty."""
    answers = []
    for prompt in prompts:
        answer, reader = Answer(max_tokens, stop_ids), Reader(network, mask_id)
        while not answer.is_finished:
            reading = reader.read([*prompt, *answer.tokens], last=1)
            answer.extend([int(reading.logits_MV[0].argmax())])
        answer.forwards = reader.forwards
        answers.append(answer)
    return answers
