"""The MARS training loss: next-token cross-entropy on both streams.

`L = L_mask + ar_weight * L_ar` (arXiv 2604.07023, section 3). Each term is a mean over the response tokens with a label
in its stream. A prompt token predicts the first token of a response, equally in both streams, so the clean stream
trains it; without that loss (`ar_weight` 0) it counts among the masks, as in the authors' code. Beyond the paper, masks
further ahead may have lower weights, and the clean stream may teach the noisy stream (arXiv 1503.02531).

Sums and counts are returned separately, so that gradient accumulation and data parallelism can divide by the tokens of
the whole step. The loss then does not depend on how examples are packed into rows or spread over devices.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.method import tiles
from mars_ray.method.logits import logits_at
from mars_ray.method.streams import IGNORE, Streams
from mars_ray.method.visibility import dense_mask, flex_mask

CHUNK_NUMBERS = 1 << 21
"""Maximum number of logits in a chunk of the cross-entropy: 8 MiB in float32, which fit in the cache of a processor."""


@dataclass(frozen=True, slots=True)
class LabelWeights:
    """Sum of the label weights in each stream. If all weights are 1, this is the number of labels."""

    mask: float
    ar: float

    @classmethod
    def of(cls, streams: Streams) -> "LabelWeights":
        """Return the weights of the labels in `streams`."""
        weight_RS = streams.weight_RS * (streams.label_RS != IGNORE)
        mask = float(weight_RS[streams.noisy_RS].sum())
        return cls(mask=mask, ar=float(weight_RS.sum()) - mask)


class StreamLoss(nn.Module):
    """A network together with its training loss, as one module for DDP and FSDP to wrap.

    In the target at a mask, the prediction of the clean stream has weight `distill`, and the token in the data has the
    remaining weight.
    """

    def __init__(self, network: PreTrainedModel, distill: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self._distill = distill

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return the weighted sums of cross-entropies in the noisy and in the clean stream, two float32 scalars."""
        labelled_RS = streams.label_RS != IGNORE
        logits_MV = training_logits(self.network, streams, labelled_RS)
        noisy_M = streams.noisy_RS[labelled_RS]
        # The clean stream sees the tokens that masks hide from the noisy stream, so it can teach the noisy stream.
        index_RS = labelled_RS.long().flatten().cumsum(0).view_as(streams.label_RS) - 1
        teacher_M = torch.where(noisy_M, index_RS.gather(1, streams.twin_RS)[labelled_RS], IGNORE)
        loss_M = cross_entropies(logits_MV, streams.label_RS[labelled_RS], teacher_M, self._distill)
        loss_M = loss_M * streams.weight_RS[labelled_RS]
        return (loss_M * noisy_M).sum(), (loss_M * ~noisy_M).sum()


def training_logits(network: PreTrainedModel, streams: Streams, where_RS: Tensor) -> Tensor:
    """Run the training forward and return its logits [M, V] where `where_RS` is True, row by row.

    With `tiles.ATTENTION`, the logits at padding are undefined.
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


def cross_entropies(
    logits_MV: Tensor,
    label_M: Tensor,
    teacher_M: Tensor | None = None,
    share: float = 0.0,
    teachers: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy at each position as float32 [M], computed in chunks of positions to save memory.

    A plain cross-entropy holds the logits, their float32 copy, their log-probabilities and the gradients of all three.
    This one keeps only the logits, in the type that the network returns. Everything else of vocabulary size is
    recomputed in float32, one chunk at a time.

    The target is the label, which must not be `IGNORE`. `teachers` holds logits [any, V]; None means `logits_MV`. Where
    `teacher_M` is not `IGNORE`, it is the index of a row of `teachers`, whose distribution makes up `share` of the
    target and receives no gradient.
    """
    teacher_M = torch.full_like(label_M, IGNORE) if teacher_M is None else teacher_M
    teachers = (logits_MV if teachers is None else teachers).detach()
    result: Tensor = _CrossEntropies.apply(  # type: ignore[no-untyped-call]
        logits_MV, label_M, teacher_M, share, teachers
    )
    return result


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, label_M: Tensor, teacher_M: Tensor, share: float, teachers: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits_MV, label_M, teacher_M, teachers)
        ctx.share = share
        loss_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
        for chunk in _chunks(logits_MV):
            logits = logits_MV[chunk].float()
            label = logits.gather(1, label_M[chunk, None])[:, 0]
            taught, target = _teacher(teachers, teacher_M[chunk], share)
            if len(taught):
                label[taught] = torch.lerp(label[taught], (target * logits[taught]).sum(dim=-1), share)
            loss_M[chunk] = logits.logsumexp(dim=-1) - label
        return loss_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_MV, label_M, teacher_M, teachers = ctx.saved_tensors
        [grad_M] = grads
        grad_MV = torch.empty_like(logits_MV)
        for chunk in _chunks(logits_MV):
            grad = logits_MV[chunk].softmax(dim=-1, dtype=torch.float32)
            taught, target = _teacher(teachers, teacher_M[chunk], ctx.share)
            weight = torch.full((len(grad), 1), -1.0, device=grad.device)
            if len(taught):
                weight[taught] = ctx.share - 1
                grad[taught] -= ctx.share * target
            grad.scatter_add_(1, label_M[chunk, None], weight)
            torch.mul(grad, grad_M[chunk, None], out=grad)
            grad_MV[chunk] = grad
        return grad_MV, None, None, None, None


def _chunks(logits_MV: Tensor) -> list[slice]:
    M, V = logits_MV.shape
    rows = max(1, CHUNK_NUMBERS // V)
    return [slice(start, start + rows) for start in range(0, M, rows)]


def _teacher(teachers: Tensor, teacher_M: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the positions of a chunk that have a teacher, and the teacher's distribution at each, in float32."""
    taught = (teacher_M != IGNORE).nonzero()[:, 0] if share else teacher_M[:0]
    return taught, teachers[teacher_M[taught]].softmax(dim=-1, dtype=torch.float32)
