"""The MARS training loss: next-token cross-entropy on both streams.

`L = L_mask + ar_weight * L_ar` (arXiv 2604.07023, section 3), each a mean over the response tokens it counts. Beyond
the paper, masks further ahead may weigh less, and the clean stream may teach the noisy one (arXiv 1503.02531).
Sums and counts are kept apart, so that gradient accumulation and data parallelism divide by the tokens of the whole
step: the loss does not depend on how examples were packed or spread.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.method import tiles
from mars_ray.method.cross_entropy import cross_entropies
from mars_ray.method.logits import logits_at
from mars_ray.method.streams import IGNORE, Streams
from mars_ray.method.visibility import dense_mask, flex_mask


@dataclass(frozen=True, slots=True)
class LabelWeights:
    """The sum of the weights of the labels in each stream; their number, where all weigh 1."""

    mask: float
    ar: float

    @classmethod
    def of(cls, streams: Streams) -> "LabelWeights":
        """Return the weights of the labels in `streams`."""
        weight_RS = streams.weight_RS * (streams.label_RS != IGNORE)
        mask = float(weight_RS[streams.noisy_RS].sum())
        return cls(mask=mask, ar=float(weight_RS.sum()) - mask)


class StreamLoss(nn.Module):
    """A network together with the loss of one forward over its streams; what DDP and FSDP wrap.

    `distill` is the share of a mask's target that is what the clean stream predicts there; the rest is the token of
    the data.
    """

    def __init__(self, network: PreTrainedModel, distill: float = 0.0) -> None:
        super().__init__()
        self.network, self._distill = network, distill

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return the weighted sums of cross-entropies of the noisy and of the clean stream, two float32 scalars."""
        labelled_RS = streams.label_RS != IGNORE
        logits_MV = training_logits(self.network, streams, labelled_RS)
        noisy_M = streams.noisy_RS[labelled_RS]
        # Two streams read the same tokens; the clean one knows more of them, so it can teach. Not the other way.
        number_RS = labelled_RS.long().flatten().cumsum(0).view_as(streams.label_RS) - 1
        teacher_M = torch.where(noisy_M, number_RS.gather(1, streams.twin_RS)[labelled_RS], IGNORE)
        each_M = cross_entropies(logits_MV, streams.label_RS[labelled_RS], teacher_M, self._distill)
        each_M = each_M * streams.weight_RS[labelled_RS]
        return (each_M * noisy_M).sum(), (each_M * ~noisy_M).sum()


def training_logits(network: PreTrainedModel, streams: Streams, where_RS: Tensor) -> Tensor:
    """Run the training forward and return its logits where `where_RS` is True: [M, V], row by row.

    With the attention `tiles.ATTENTION` those of padding mean nothing.
    """
    attention = network.config._attn_implementation
    if attention == tiles.ATTENTION:
        device = streams.tokens_RS.device.type
        autocast = torch.is_autocast_enabled(device)
        layout = tiles.lay_out(streams, torch.get_autocast_dtype(device) if autocast else network.dtype)
        place_M = layout.place_RS[where_RS]
        return logits_at(
            network,
            (torch.zeros_like(place_M), place_M),
            input_ids=streams.tokens_RS.flatten()[layout.slot_P][None],
            position_ids=streams.position_RS.flatten()[layout.slot_P][None],
            tiles=layout.tiles,
        )
    return logits_at(
        network,
        where_RS,
        input_ids=streams.tokens_RS,
        position_ids=streams.position_RS,
        attention_mask=flex_mask(streams) if attention == "flex_attention" else dense_mask(streams),
    )
