"""The MARS training loss: next-token cross-entropy on both streams.

`L = L_mask + ar_weight * L_ar` (arXiv 2604.07023, section 3). Each term is a mean over the response tokens with a label
in its stream. A prompt token predicts the first token of a response, equally in both streams, so the clean stream
trains it; without that loss (`ar_weight` 0) it counts among the masks, as in the authors' code. Beyond the paper, masks
further ahead may have lower weights, and the clean stream may teach the noisy stream (arXiv 1503.02531).

Sums and counts are returned separately, so that gradient accumulation and data parallelism can divide by the tokens of
the whole step. The loss then does not depend on how examples are packed into rows or spread over devices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.method import tiles
from mars_ray.method.logits import logits_at
from mars_ray.method.streams import Streams
from mars_ray.method.visibility import additive, dense_mask

CHUNK_NUMBERS = 1 << 21
"""Maximum number of logits in a chunk of the cross-entropy: 8 MiB in float32, which fit in the cache of a processor."""
GPU_CHUNK_NUMBERS = 1 << 25
"""The same on a GPU, where each chunk costs a dozen launches: 128 MiB."""


def label_weights(streams: Streams) -> Tensor:
    """Return the sum of the label weights in the noisy and in the clean stream, as [2]. If all weights are 1, these are
    the numbers of labels."""
    weight = streams.weight_RS.flatten()
    return torch.stack([weight[slot_M].sum() for slot_M in (streams.noisy_slot_M, streams.clean_slot_M)])


class StreamLoss(nn.Module):
    """A network together with its training loss, as one module for DDP and FSDP to wrap.

    In the target at a mask, the prediction of the clean stream has weight `distill`, and the token in the data has the
    remaining weight. `total_variation` is the share of the masks' loss that is no cross-entropy (see `mask_losses`).
    """

    def __init__(self, network: PreTrainedModel, distill: float = 0.0, total_variation: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self._distill = distill
        self._total_variation = total_variation

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return the weighted sums of cross-entropies in the noisy and in the clean stream, two float32 scalars."""
        slot_M = torch.cat([streams.noisy_slot_M, streams.clean_slot_M])
        masks = len(streams.noisy_slot_M)
        logits_MV = training_logits(self.network, streams, slot_M)
        # The clean stream sees the tokens that masks hide from the noisy stream, so it can teach the noisy stream.
        index = torch.zeros_like(streams.label_RS).flatten()
        index[slot_M] = torch.arange(len(slot_M), device=slot_M.device)
        teacher_M = index.view_as(streams.label_RS).gather(1, streams.twin_RS).flatten()[streams.noisy_slot_M]
        label_M = streams.label_RS.flatten()[slot_M]
        loss_M = mask_losses(logits_MV, label_M, teacher_M, self._distill, total_variation=self._total_variation)
        loss_M = loss_M * streams.weight_RS.flatten()[slot_M]
        return loss_M[:masks].sum(), loss_M[masks:].sum()


def training_logits(network: PreTrainedModel, streams: Streams, slot_M: Tensor) -> Tensor:
    """Run the training forward and return its logits [M, V] at `slot_M`; slots are counted through all rows.

    With `tiles.ATTENTION`, the logits at padding are undefined.
    """
    dtype = attention_dtype(network)
    if network.config._attn_implementation == tiles.ATTENTION:
        layout = tiles.lay_out(streams, dtype)
        place_M = layout.place_RS.flatten()[slot_M]
        return logits_at(
            network,
            (torch.zeros_like(place_M), place_M),
            input_ids=streams.tokens_RS.flatten()[layout.slot_P][None],
            position_ids=streams.position_RS.flatten()[layout.slot_P][None],
            tiles=layout.tiles,
        )
    width = streams.tokens_RS.shape[1]
    return logits_at(
        network,
        (slot_M // width, slot_M % width),
        input_ids=streams.tokens_RS,
        position_ids=streams.position_RS,
        attention_mask=additive(dense_mask(streams), dtype),
    )


def attention_dtype(network: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which the attention of a forward computes here."""
    device = network.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else network.dtype


def mask_losses(
    logits_MV: Tensor,
    label_M: Tensor,
    teacher_M: Tensor | None = None,
    share: float = 0.0,
    teachers: Tensor | None = None,
    total_variation: float = 0.0,
) -> Tensor:
    """Return the loss at each position as float32 [M], computed in chunks of positions to save memory.

    A plain cross-entropy holds the logits, their float32 copy, their log-probabilities and the gradients of all three.
    This one keeps only the logits, in the type that the network returns. Everything else of vocabulary size is
    recomputed in float32, one chunk at a time.

    The target is the label, which must not be `IGNORE`. `teachers` holds logits [any, V]; None means `logits_MV`.
    `teacher_M` has a row of `teachers` for each of the first positions, all or only some. The distribution there makes
    up `share` of the target and receives no gradient.

    At these positions, `total_variation` is the share of the loss that is the total variation between the two
    distributions instead of cross-entropy. A draft drawn from the one is accepted by the other with a probability of
    one minus their total variation (arXiv 2211.17192, corollary 3.6).
    """
    taught = bool(share or total_variation) and teacher_M is not None
    teacher_M = teacher_M if taught and teacher_M is not None else label_M[:0]
    teachers = (logits_MV if teachers is None else teachers).detach()
    result: Tensor = _MaskLosses.apply(  # type: ignore[no-untyped-call]
        logits_MV, label_M, teacher_M, share, teachers, total_variation
    )
    return result


class _MaskLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_MV: Tensor,
        label_M: Tensor,
        teacher_M: Tensor,
        share: float,
        teachers: Tensor,
        total_variation: float,
    ) -> Tensor:
        ctx.save_for_backward(logits_MV, label_M, teacher_M, teachers)
        ctx.share = share
        ctx.total_variation = total_variation
        loss_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
        for chunk in chunks(logits_MV):
            logits = logits_MV[chunk].float()
            label = logits.gather(1, label_M[chunk, None])[:, 0]
            taught = len(teacher_M[chunk])
            log_total = logits.logsumexp(dim=-1)
            if taught:
                target = teachers[teacher_M[chunk]].softmax(dim=-1, dtype=torch.float32)
                label[:taught] = torch.lerp(label[:taught], (target * logits[:taught]).sum(dim=-1), share)
            loss_M[chunk] = log_total - label
            if taught and total_variation:
                distance = (logits[:taught] - log_total[:taught, None]).exp_().sub_(target).abs_().sum(dim=-1) / 2
                loss_M[chunk][:taught].lerp_(distance, total_variation)
        return loss_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits_MV, label_M, teacher_M, teachers = ctx.saved_tensors
        [grad_M] = grads
        grad_MV = torch.empty_like(logits_MV)
        for chunk in chunks(logits_MV):
            grad = logits_MV[chunk].softmax(dim=-1, dtype=torch.float32)
            taught = len(teacher_M[chunk])
            weight = torch.full((len(grad), 1), -1.0, device=grad.device)
            if taught:
                target = teachers[teacher_M[chunk]].softmax(dim=-1, dtype=torch.float32)
                if ctx.total_variation:
                    own = grad[:taught].clone()
                    sign = (own - target).sign_()
                weight[:taught] = ctx.share - 1
                grad[:taught] -= ctx.share * target
            grad.scatter_add_(1, label_M[chunk, None], weight)
            if taught and ctx.total_variation:
                mean = (own * sign).sum(dim=-1, keepdim=True)
                grad[:taught].lerp_(own * (sign - mean) / 2, ctx.total_variation)
            torch.mul(grad, grad_M[chunk, None], out=grad)
            grad_MV[chunk] = grad
        return grad_MV, None, None, None, None, None


def chunks(logits_MV: Tensor) -> list[slice]:
    """Return consecutive ranges of positions, few enough each that a float32 copy of their logits is small."""
    M, V = logits_MV.shape
    rows = max(1, (GPU_CHUNK_NUMBERS if logits_MV.is_cuda else CHUNK_NUMBERS) // V)
    return [slice(start, start + rows) for start in range(0, M, rows)]
