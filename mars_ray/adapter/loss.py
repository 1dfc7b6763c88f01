"""The loss of adapter training, and how far an adapter looks ahead on held-out rows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.adapter.forward import ATTENTION, mask_logits
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.method.cross_entropy import cross_entropies
from mars_ray.method.streams import IGNORE, Streams


class AdapterLoss(nn.Module):
    """An adapter and the loss of its masks. The base is not part of the module: it has no gradient and no state here.

    `distill` is the share of a mask's target that is the base's own distribution; the rest is the token of the data.
    """

    def __init__(self, network: PreTrainedModel, adapter: GatedLoRA, distill: float) -> None:
        super().__init__()
        network.set_attn_implementation(ATTENTION)
        network.requires_grad_(False)
        self.adapter, self._base, self._distill = adapter, (network,), distill

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the cross-entropies of the masks, and that of the base in their place.

        Two float32 scalars; the second carries no gradient.
        """
        if not (streams.label_RS != IGNORE).any():
            nothing = self.adapter.mask_embedding_KH.sum() * 0
            return nothing, nothing.detach()
        found = mask_logits(self._base[0], self.adapter, streams)
        label_M, weight_M = (each.flatten()[found.slot_M] for each in (streams.label_RS, streams.weight_RS))
        teacher_M = torch.arange(len(label_M), device=label_M.device)
        each_M = cross_entropies(found.logits_MV, label_M, teacher_M, self._distill, found.teacher_MV)
        with torch.no_grad():
            base_M = cross_entropies(found.teacher_MV, label_M)
        return (each_M * weight_M).sum(), base_M.sum()


@dataclass(frozen=True, slots=True)
class HeldoutAgreement:
    """How often masks say what the base says in their place, its most likely token."""

    tokens_per_forward: float
    """1 + the mean run of masks that agree: what exact mode gives, standing before each block."""
    by_offset: list[float]
    """Share of the masks with so many before them that agree."""


@torch.no_grad()
def heldout_agreement(network: PreTrainedModel, adapter: GatedLoRA, streams: Streams) -> HeldoutAgreement:
    """Measure agreement on the result of `mask_streams`, teacher-forced. `network` is that of an `AdapterLoss`."""
    found = mask_logits(network, adapter, streams)
    agrees_M = found.logits_MV.argmax(dim=-1) == found.teacher_MV.argmax(dim=-1)
    offset_M = streams.tokens_RS.flatten()[found.slot_M]
    # Masks of a block stand in order, so a run goes on from one offset to the next.
    runs, unbroken = 0, False
    for offset, agrees in zip(offset_M.tolist(), agrees_M.tolist(), strict=True):
        unbroken = agrees and (unbroken or offset == 0)
        runs += unbroken
    counts = [agrees_M[offset_M == offset].float().mean().item() for offset in range(int(offset_M.max()) + 1)]
    return HeldoutAgreement(1 + runs / int((offset_M == 0).sum()), counts)
