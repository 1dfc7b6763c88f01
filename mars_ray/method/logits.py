"""Logits at chosen positions only, from any unmodified HF decoder.

A vocabulary of 152k makes the logits the largest tensor of a forward, and most of them are never read.
The hidden states are picked where they enter the output embedding, so whatever an architecture does after it
(scaling, soft-capping) still happens.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def logits_at(network: PreTrainedModel, where: Tensor | tuple[Tensor, Tensor], **inputs: Any) -> Tensor:
    """Run one forward without a cache and return some of its logits: [M, V].

    `where` is True there, bool [R, S], read row by row; or it is the rows and slots of each, two int64 [M].

    `inputs` go to the network unchanged (`input_ids`, `position_ids`, `attention_mask`).
    """

    def pick(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0][where][None],)

    hook = network.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        logits: Tensor = network(**inputs, use_cache=False).logits[0]
    finally:
        hook.remove()
    return logits
