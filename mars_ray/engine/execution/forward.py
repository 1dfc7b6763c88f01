"""One forward of an unmodified HF decoder over the cache, as a function of tensors.

It gives, at each picked position, the most likely token, its probability, and the logits. Letters are those of
`attention` and `input_packer`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.engine.kv.attention import Layers, PrefillBatch, Rectangle, rectangle
from mars_ray.engine.kv.cache import kv_shape

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def forward_of(network: PreTrainedModel, mask_id: int) -> Forward:
    """Return the forward of `network` as a function of tensors: tokens [M], their probabilities [M], logits [M, V]."""

    text = network.config.get_text_config()
    groups = text.num_attention_heads // kv_shape(text)[1]

    def forward(
        layers: Layers,
        id_N: Tensor,
        slot_N: Tensor,
        position_N: Tensor,
        target_N: Tensor,
        prefix_N: Tensor,
        behind_N: Tensor,
        back_N: Tensor,
        where_RP: Tensor,
        pick_M: Tensor,
        column_C: Tensor,
        prefill: PrefillBatch | None = None,
        embedded_NH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        def laid_out(where_RP: Tensor, column_C: Tensor) -> Rectangle:
            return rectangle(where_RP, position_N, prefix_N, behind_N, column_C, groups, network.dtype)

        logits: Tensor = network(
            input_ids=id_N[None] if embedded_NH is None else None,
            inputs_embeds=None if embedded_NH is None else embedded_NH[None],
            position_ids=position_N[None],
            use_cache=False,
            logits_to_keep=pick_M,
            layers=layers,
            slot_N=slot_N,
            target_N=target_N,
            back_N=back_N,
            decoding=laid_out(where_RP, column_C),
            prefill=prefill and laid_out(prefill.where_LQ, prefill.column_C),
            prefill_slot_L=prefill and prefill.slot_L,
        ).logits
        logits_MV = logits[0].float()
        mask_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device) == mask_id
        logits_MV = logits_MV.masked_fill(mask_V, -torch.inf)
        top_M, token_M = logits_MV.max(dim=-1)
        return token_M, (top_M - logits_MV.logsumexp(dim=-1)).exp(), logits_MV

    return forward
