"""Compute logits only at chosen positions, with any unmodified Hugging Face decoder.

With a vocabulary of 152k tokens the logits are the largest tensor of a forward, and most of them are never read. A hook
selects the hidden states before they enter the output embedding, so everything that an architecture does afterwards
(scaling, soft-capping) still happens.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def logits_at(network: PreTrainedModel, where: Tensor | tuple[Tensor, Tensor], **inputs: Any) -> Tensor:
    """Run one forward without a cache and return its logits [M, V] at M positions.

    `where` selects the positions: either a bool [R, S], read row by row, or two int64 tensors [M] with the row and the
    slot of each position. `inputs` go to the network unchanged (`input_ids`, `position_ids`, `attention_mask`).
    """

    def pick(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0][where][None],)

    hook = network.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        logits: Tensor = network(**inputs, use_cache=False).logits[0]
    finally:
        hook.remove()
    return logits
