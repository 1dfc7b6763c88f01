"""The loss of adapter training, and the lookahead of an adapter on held-out data.

Letters: as in `sampler_head`, plus V for the vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.adapter.forward import ATTENTION, TILED, MaskLogits, mask_logits
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.adapter.sampler_head import Candidates, likeliest
from mars_ray.method import tiles
from mars_ray.method.heldout import HeldoutMask
from mars_ray.method.loss import chunks, mask_losses
from mars_ray.method.streams import PackedRows, Streams


class AdapterLoss(nn.Module):
    """Loss at the masks of an adapter. The base is not a submodule, because it has no gradients.

    `distill` is the weight of the base's distribution in the target of a mask; the remaining weight goes to the token
    in the data. `total_variation` is the share of the loss that is no cross-entropy (see `mask_losses`). The masks are
    trained on their uncorrected logits, and the sampler head by cross-entropy on detached hidden states of the masks.
    The attention is computed in tiles if `network` computes it so, otherwise with a dense mask.
    """

    def __init__(
        self, network: PreTrainedModel, adapter: GatedLoRA, distill: float, total_variation: float = 0.0
    ) -> None:
        super().__init__()
        tiled = network.config._attn_implementation in (tiles.ATTENTION, TILED)
        network.set_attn_implementation(TILED if tiled else ATTENTION)
        network.requires_grad_(False)
        self.adapter = adapter
        self._base = (network,)  # in a tuple, so that torch does not register the network
        self._distill = distill
        self._total_variation = total_variation

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the masks' losses, and the sum of the base's cross-entropies at their positions.

        Both are float32 scalars; the second has no gradient.
        """
        if not len(streams.noisy_slot_M):
            # All workers must run the forwards, in which they gather the weights of a sharded base.
            mask_sum, base_sum = self(_one_mask().to(streams.tokens_RS.device))
            return mask_sum * 0, base_sum * 0
        masks = mask_logits(self._base[0], self.adapter, streams)
        label_M = streams.label_RS.flatten()[streams.noisy_slot_M]
        weight_M = streams.weight_RS.flatten()[streams.noisy_slot_M]
        teacher_M = torch.arange(len(label_M), device=label_M.device)
        loss_M = mask_losses(
            masks.logits_MV, label_M, teacher_M, self._distill, masks.teacher_MV, self._total_variation
        )
        change_M = self._change_by_sampler(masks, label_M)
        # The head learns from the cross-entropy alone, so its gradient is whole and its value has the share of that.
        loss_M = loss_M + change_M - self._total_variation * change_M.detach()
        with torch.no_grad():
            base_M = mask_losses(masks.teacher_MV, label_M)
        return (loss_M * weight_M).sum(), base_M.sum()

    def _change_by_sampler(self, masks: MaskLogits, label_M: Tensor) -> Tensor:
        """Return the change that the sampler head makes to each mask's cross-entropy, as float32 [M]."""
        candidates = sampled(self._base[0], self.adapter, masks)
        log_total_M = _logsumexp(masks.logits_MV)
        teacher_MC = (
            masks.teacher_MV.gather(1, candidates.token_MC).float() - _logsumexp(masks.teacher_MV)[:, None]
        ).exp()
        target_MC = torch.lerp((candidates.token_MC == label_M[:, None]).float(), teacher_MC, self._distill)
        gain_M = (target_MC * (candidates.corrected_MC - candidates.logit_MC)).sum(dim=-1)
        return candidates.log_total(log_total_M) - log_total_M - gain_M


def _one_mask() -> Streams:
    """Return the smallest streams with a mask."""
    response_RT = torch.tensor([[False, True, True]])
    zero_RT = response_RT.long() * 0
    position_RT = torch.arange(3)[None]
    rows = PackedRows(tokens_RT=zero_RT, response_RT=response_RT, example_RT=zero_RT, position_RT=position_RT)
    return mask_streams(rows, masks=1)


@torch.no_grad()
def _logsumexp(logits_MV: Tensor) -> Tensor:
    """Return the log-sum-exp of each mask's logits as float32 [M], computed for a few masks at a time."""
    return torch.cat([logits_MV[chunk].float().logsumexp(dim=-1) for chunk in chunks(logits_MV)])


def sampled(network: PreTrainedModel, adapter: GatedLoRA, masks: MaskLogits) -> Candidates:
    """Return the most likely tokens of the masks, with logits corrected by the sampler head; only the head gets
    gradients."""
    with torch.no_grad():
        logit_MC, token_MC = likeliest(masks.logits_MV)
        logit_MC = logit_MC.float()
        before_MH = network.get_input_embeddings().weight[masks.before_M].float()
        candidate_MCH = network.get_output_embeddings().weight[token_MC].float()
    read_MW = adapter.sampler.read(masks.hidden_MH.detach().float())
    return Candidates(token_MC, logit_MC, logit_MC + adapter.sampler.correction(read_MW, before_MH, candidate_MCH))


@torch.no_grad()
def heldout_masks(network: PreTrainedModel, adapter: GatedLoRA, streams: Streams) -> list[HeldoutMask]:
    """Return which masks of the result of `mask_streams` are right; `network` must come from an `AdapterLoss`."""
    if not len(streams.noisy_slot_M):
        return []
    masks = mask_logits(network, adapter, streams)
    right_M = sampled(network, adapter, masks).token_M == masks.teacher_MV.argmax(dim=-1)
    offset_M = streams.tokens_RS.flatten()[streams.noisy_slot_M]
    return list(zip(right_M.tolist(), offset_M.tolist(), strict=True))
