"""Run one optimizer step: forward and backward over its micro-batches, clip, update.

The loss is divided by the number of labels in the whole step, summed over all micro-batches and workers. The loss
therefore does not depend on how the rows are divided among them.

On a GPU the host only queues work. It waits once a step, for the figures that decide whether the weights are updated.
"""

import contextlib
import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mars_ray.errors import DivergedError
from mars_ray.method.loss import label_weights
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
    device = accelerator.device
    local = torch.stack([label_weights(streams) for streams in batches]).sum(dim=0)
    labels = accelerator.reduce(local.to(device, non_blocking=True))
    totals = torch.where(labels > 0, labels, 1.0)
    weights = accelerator.num_processes * torch.stack([1 / totals[0], ar_weight / totals[1]])
    sums = torch.zeros(2, device=device)
    for number, streams in enumerate(batches, start=1):
        last = number == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(loss):
            with accelerator.autocast():
                both = torch.stack(loss(streams.to(device)))
            # Data parallelism averages the gradients of the workers, but the totals already include all workers.
            accelerator.backward((both * weights).sum())
        sums += both.detach()
    mask_mean, ar_mean = accelerator.reduce(sums) / totals
    clipped = accelerator.clip_grad_norm_(loss.parameters(), clip_norm)
    norm = clipped.full_tensor() if isinstance(clipped, DTensor) else clipped
    masks, mask_loss, ar_loss, grad_norm = to_host(torch.stack([labels[0], mask_mean, ar_mean, norm]))
    if not math.isfinite(mask_loss + ar_loss + grad_norm):
        raise DivergedError(f"mask loss {mask_loss}, AR loss {ar_loss}, gradient norm {grad_norm}")
    optimizer.step()
    optimizer.zero_grad()
    return StepLosses(mask_loss if masks else None, ar_loss, grad_norm)


def to_host(figures: Tensor) -> list[float]:
    """Return the values of a tensor, for which the host waits."""
    return [float(figure) for figure in figures.tolist()]


# Options of mallopt, from malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, until the process ends. Without glibc this has no effect.

    Each step frees all its activations. By default glibc returns large blocks to the system at once, and the system
    clears every page again when the next step allocates it; this takes a third of a step with 135 million parameters.
    The peak memory of a run is the same either way.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)
        library.mallopt(_TOP_PAD, GROWTH_BYTES)
