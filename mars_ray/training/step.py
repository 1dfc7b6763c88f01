"""Run one optimizer step: forward and backward over its micro-batches, clip, update.

The loss is divided by the number of labels in the whole step, summed over all micro-batches and workers. The loss
therefore does not depend on how the rows are divided among them.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from mars_ray.errors import DivergedError
from mars_ray.method.loss import LabelWeights
from mars_ray.method.streams import Streams


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Mean losses over the labels of one step, before the update."""

    mask_loss: float | None
    """Loss at masks; None for the autoregressive objective, which has no masks."""
    ar_loss: float
    grad_norm: float
    """Norm of the gradient before clipping."""


def train_step(
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Streams],
    accelerator: Accelerator,
    *,
    ar_weight: float,
    clip_norm: float,
) -> StepLosses:
    """Update the weights once. Raises `DivergedError` if the loss is not finite, in which case the weights do not
    change."""
    weights = [LabelWeights.of(streams) for streams in batches]
    local = torch.tensor([sum(w.mask for w in weights), sum(w.ar for w in weights)], device=accelerator.device)
    mask_total, ar_total = (total or 1.0 for total in accelerator.reduce(local).tolist())
    sums = torch.zeros(2, device=accelerator.device)
    for number, streams in enumerate(batches, start=1):
        last = number == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(loss):
            with accelerator.autocast():
                mask_sum, ar_sum = loss(streams.to(accelerator.device))
            # Data parallelism averages the gradients of the workers, but the totals already include all workers.
            share = accelerator.num_processes * (mask_sum / mask_total + ar_weight * ar_sum / ar_total)
            accelerator.backward(share)
        sums += torch.stack([mask_sum.detach(), ar_sum.detach()])
    mask_sum, ar_sum = accelerator.reduce(sums).tolist()
    clipped = accelerator.clip_grad_norm_(loss.parameters(), clip_norm)
    norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
    if not math.isfinite(mask_sum + ar_sum + norm):
        raise DivergedError(f"mask loss {mask_sum / mask_total}, AR loss {ar_sum / ar_total}, gradient norm {norm}")
    optimizer.step()
    optimizer.zero_grad()
    masks = any(w.mask for w in weights)
    return StepLosses(mask_sum / mask_total if masks else None, ar_sum / ar_total, norm)
