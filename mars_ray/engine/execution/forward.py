"""One forward of an unmodified HF decoder over the KV cache, as a function of tensors.

Tensor names use the letters of `kv/forward_batch`, and V for the vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.engine.kv.attention import Layers, decoding_rectangle, prefill_rectangle
from mars_ray.engine.kv.cache import kv_shape
from mars_ray.engine.kv.forward_batch import ForwardBatch

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def forward_of(network: PreTrainedModel, mask_id: int) -> Forward:
    """Return a function that runs `network` and returns the most likely tokens, their probabilities, and the logits.

    Tokens and probabilities have the shape [M]; logits are float32 [M, V]. The mask token has logit -inf.
    """
    text = network.config.get_text_config()
    groups = text.num_attention_heads // kv_shape(text)[1]

    def forward(
        layers: Layers, batch: ForwardBatch, embedded_NH: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits: Tensor = network(
            input_ids=batch.id_N[None] if embedded_NH is None else None,
            inputs_embeds=None if embedded_NH is None else embedded_NH[None],
            position_ids=batch.position_N[None],
            use_cache=False,
            logits_to_keep=batch.pick_M,
            layers=layers,
            batch=batch,
            decoding=decoding_rectangle(batch, groups, network.dtype),
            prefill=prefill_rectangle(batch, groups, network.dtype),
        ).logits
        logits_MV = logits[0].float()
        mask_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device) == mask_id
        logits_MV = logits_MV.masked_fill(mask_V, -torch.inf)
        top_M, token_M = logits_MV.max(dim=-1)
        return token_M, (top_M - logits_MV.logsumexp(dim=-1)).exp(), logits_MV

    return forward
