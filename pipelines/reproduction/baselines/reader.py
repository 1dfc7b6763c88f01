"""Read one sequence with a network and a KV cache, so that a forward computes only new slots.

Callers pass the ids of the whole sequence in each call, and crop the cache after wrong guesses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel


class Reading(NamedTuple):
    """Outputs of one forward at the last M slots."""

    logits_MV: Tensor
    """Logits in float32 or wider; -inf for the mask token, which is never generated."""
    hidden_MD: Tensor
    """Hidden states before the output embedding."""


class Reader:
    """Reads one sequence with one network; `forwards` counts the calls of `read`."""

    def __init__(self, network: PreTrainedModel, mask_id: int) -> None:
        self._network = network
        self._mask_id = mask_id
        self._cache = DynamicCache()
        self.forwards = 0

    @property
    def length(self) -> int:
        """Number of slots in the cache."""
        length: int = self._cache.get_seq_length()
        return length

    def crop(self, length: int) -> None:
        """Keep no more than the first `length` slots."""
        self._cache.crop(min(0, length - self.length))

    def read(
        self,
        ids: Sequence[int],
        last: int,
        *,
        positions: Sequence[int] | None = None,
        visible_QS: Tensor | None = None,
    ) -> Reading:
        """Forward the Q of the S `ids` that are not in the cache, and return the outputs at the `last` slots.

        At least `last` slots must be new. `positions` of the Q slots default to their indices in `ids`, and attention
        defaults to causal. `visible_QS` is a bool mask, for which the network must use SDPA attention.
        """
        cached = self.length
        device = self._network.device
        hidden_MD: Tensor | None = None

        def pick(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            nonlocal hidden_MD
            hidden_MD = args[0][0, -last:]
            return (hidden_MD[None],)

        hook = self._network.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            logits_MV: Tensor = self._network(
                input_ids=torch.tensor([ids[cached:]], device=device),
                position_ids=torch.tensor([positions or range(cached, len(ids))], device=device),
                attention_mask=None if visible_QS is None else visible_QS[None, None].to(device),
                past_key_values=self._cache,
                use_cache=True,
            ).logits[0]
        finally:
            hook.remove()
        self.forwards += 1
        assert hidden_MD is not None
        # On a CPU, argmax is four times as fast in float32 as in bfloat16.
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        logits_MV[:, self._mask_id] = -torch.inf
        return Reading(logits_MV, hidden_MD)
