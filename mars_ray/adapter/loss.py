"""The loss of adapter training, and how far an adapter looks ahead on held-out rows.

Letters are those of `adapter.sampler_head`, and V the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.adapter.forward import ATTENTION, MaskLogits, mask_logits
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.sampler_head import Candidates, likeliest
from mars_ray.method.cross_entropy import cross_entropies
from mars_ray.method.streams import IGNORE, Streams


class AdapterLoss(nn.Module):
    """An adapter and the loss of its masks. The base is not part of the module: it has no gradient and no state here.

    `distill` is the share of a mask's target that is the base's own distribution; the rest is the token of the data.
    The masks learn as if there were no sampler head, and the head learns from masks as they are.
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
        each_M = each_M + self._change_by_sampler(found, label_M)
        with torch.no_grad():
            base_M = cross_entropies(found.teacher_MV, label_M)
        return (each_M * weight_M).sum(), base_M.sum()

    def _change_by_sampler(self, found: MaskLogits, label_M: Tensor) -> Tensor:
        """Return what the sampler head adds to the cross-entropy of each mask, float32 [M]."""
        candidates = sampled(self._base[0], self.adapter, found)
        log_total_M = _logsumexp(found.logits_MV)
        teacher_MC = (
            found.teacher_MV.gather(1, candidates.token_MC).float() - _logsumexp(found.teacher_MV)[:, None]
        ).exp()
        target_MC = torch.lerp((candidates.token_MC == label_M[:, None]).float(), teacher_MC, self._distill)
        said_M = (target_MC * (candidates.corrected_MC - candidates.logit_MC)).sum(dim=-1)
        return candidates.log_total(log_total_M) - log_total_M - said_M


@torch.no_grad()
def _logsumexp(logits_MV: Tensor) -> Tensor:
    """Return log sum exp of the logits of a mask, float32 [M], a few masks at a time."""
    return torch.cat([some.float().logsumexp(dim=-1) for some in torch.split(logits_MV, 64)])


def sampled(network: PreTrainedModel, adapter: GatedLoRA, found: MaskLogits) -> Candidates:
    """Return the likeliest tokens of the masks, corrected by the sampler head, which alone gets gradients."""
    embeddings, unembeddings = network.get_input_embeddings(), network.get_output_embeddings()
    with torch.no_grad():
        logit_MC, token_MC = likeliest(found.logits_MV)
        logit_MC = logit_MC.float()
        before_MH, candidate_MCH = embeddings.weight[found.before_M].float(), unembeddings.weight[token_MC].float()
    read_MW = adapter.sampler.read(found.hidden_MH.detach().float())
    return Candidates(token_MC, logit_MC, logit_MC + adapter.sampler.correction(read_MW, before_MH, candidate_MCH))


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
    agrees_M = sampled(network, adapter, found).token_M == found.teacher_MV.argmax(dim=-1)
    offset_M = streams.tokens_RS.flatten()[found.slot_M]
    # Masks of a block stand in order, so a run goes on from one offset to the next.
    runs, unbroken = 0, False
    for offset, agrees in zip(offset_M.tolist(), agrees_M.tolist(), strict=True):
        unbroken = agrees and (unbroken or offset == 0)
        runs += unbroken
    counts = [agrees_M[offset_M == offset].float().mean().item() for offset in range(int(offset_M.max()) + 1)]
    return HeldoutAgreement(1 + runs / int((offset_M == 0).sum()), counts)
