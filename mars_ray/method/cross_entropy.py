"""Cross-entropy of many positions over a large vocabulary, computed in chunks of positions to save memory.

A plain cross-entropy holds the logits, their float32 copy, their log-probabilities and the gradients of all three. This
implementation keeps only the logits, in the type that the network returns. Everything else of vocabulary size is
recomputed in float32, one chunk of positions at a time.
"""

from typing import Any

import torch
from torch import Tensor

from mars_ray.method.streams import IGNORE

CHUNK_NUMBERS = 1 << 21
"""Maximum number of logits in a chunk: 8 MiB in float32, which fit in the cache of a processor."""


def cross_entropies(
    logits_MV: Tensor,
    label_M: Tensor,
    teacher_M: Tensor | None = None,
    share: float = 0.0,
    teachers: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy at each position as float32 [M].

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
