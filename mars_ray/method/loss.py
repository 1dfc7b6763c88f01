"""The MARS training loss: next-token cross-entropy on both streams.

`L = L_mask + ar_weight * L_ar` (arXiv 2604.07023, section 3), each a mean over the response tokens it counts.
Sums and counts are kept apart, so that gradient accumulation and data parallelism divide by the tokens of the whole
step: the loss does not depend on how examples were packed or spread.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.method.logits import logits_at
from mars_ray.method.streams import IGNORE, Streams
from mars_ray.method.visibility import dense_mask, flex_mask


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How many labels each stream has."""

    mask: int
    ar: int

    @classmethod
    def of(cls, streams: Streams) -> "TokenCounts":
        """Count the labels of `streams`."""
        labelled_RS = streams.label_RS != IGNORE
        mask = int((labelled_RS & streams.noisy_RS).sum())
        return cls(mask=mask, ar=int(labelled_RS.sum()) - mask)


class StreamLoss(nn.Module):
    """A network together with the loss of one forward over its streams; what DDP and FSDP wrap."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy of the noisy and of the clean stream, two float32 scalars."""
        labelled_RS = streams.label_RS != IGNORE
        logits_MV = training_logits(self.network, streams, labelled_RS)
        each_M = F.cross_entropy(logits_MV.float(), streams.label_RS[labelled_RS], reduction="none")
        noisy_M = streams.noisy_RS[labelled_RS]
        return (each_M * noisy_M).sum(), (each_M * ~noisy_M).sum()


def training_logits(network: PreTrainedModel, streams: Streams, where_RS: Tensor) -> Tensor:
    """Run the training forward and return its logits where `where_RS` is True: [M, V]."""
    flex = network.config._attn_implementation == "flex_attention"
    return logits_at(
        network,
        where_RS,
        input_ids=streams.tokens_RS,
        position_ids=streams.position_RS,
        attention_mask=flex_mask(streams) if flex else dense_mask(streams),
    )
