"""The sampler head, one mask after the other, over the whole vocabulary."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.adapter.sampler_head import CANDIDATES, SamplerHead


def corrected_by_hand(
    network: PreTrainedModel, head: SamplerHead, logits_MV: Tensor, hidden_MH: Tensor, before_M: Tensor
) -> Tensor:
    """Return the logits of masks, each corrected for its likeliest tokens."""
    words, outputs = (
        each.weight.detach() for each in (network.get_input_embeddings(), network.get_output_embeddings())
    )
    rows = []
    for logits, hidden, before in zip(logits_MV, hidden_MH, before_M, strict=True):
        known = head.read_hidden(_normed(hidden)) + head.read_token(_normed(words[before]))
        direction = head.write(known * torch.sigmoid(known))
        largest = logits.argsort(descending=True)[:CANDIDATES]
        row = logits.clone()
        row[largest] += outputs[largest] @ direction
        rows.append(row)
    return torch.stack(rows)


def _normed(x: Tensor) -> Tensor:
    return x / x.square().mean().sqrt()
